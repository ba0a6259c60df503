//! What the delivery stage measures.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::telemetry::metrics::{Counter, Metrics, outcome};

/// Seconds since a time of PostgreSQL's clock (microseconds since 2000-01-01 UTC); zero where the clocks disagree.
pub(super) fn seconds_since(committed_at: i64) -> f64 {
    /// From the Unix epoch to 2000-01-01.
    const POSTGRES_EPOCH: Duration = Duration::from_hours(262_968);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().saturating_sub(POSTGRES_EPOCH);
    let then = Duration::from_micros(u64::try_from(committed_at).unwrap_or(0));
    now.saturating_sub(then).as_secs_f64()
}

/// Counters that are touched for each event.
pub(super) struct Counters {
    pub decoded: Counter,
    pub headers_dropped: Counter,
    pub stored: Counter,
    pub duplicate: Counter,
    pub transient: Counter,
    pub poison: Counter,
}

impl Counters {
    pub fn of(metrics: &Metrics) -> Self {
        Self {
            decoded: metrics.decoded.clone(),
            headers_dropped: metrics.row_headers_dropped.clone(),
            stored: metrics.publishes.of(outcome::STORED),
            duplicate: metrics.publishes.of(outcome::DUPLICATE),
            transient: metrics.publishes.of(outcome::TRANSIENT),
            poison: metrics.publishes.of(outcome::POISON),
        }
    }
}

/// Times that are remembered, at most.
const TIMES: usize = 1024;

/// Remembers when tokens were given out, as finely as the tick.
#[derive(Debug, Default)]
pub(super) struct Ages {
    /// From which token on events were taken in after a time.
    from: VecDeque<(Instant, u64)>,
}

impl Ages {
    /// How long ago the event `oldest` was taken in, at most, when `next` is the next token to be given out.
    pub fn oldest(&mut self, now: Instant, next: u64, oldest: Option<u64>) -> Duration {
        // Behind a straggler the times become coarser, not the list longer.
        if self.from.len() < TIMES && self.from.back().is_none_or(|&(_, from)| from < next) {
            self.from.push_back((now, next));
        }
        let Some(oldest) = oldest else { return Duration::ZERO };
        while self.from.get(1).is_some_and(|&(_, from)| from <= oldest) {
            self.from.pop_front();
        }
        self.from.front().map_or(Duration::ZERO, |&(since, _)| now.saturating_duration_since(since))
    }
}
