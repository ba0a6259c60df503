//! What the delivery stage measures.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::rounds::WHOLE;
use crate::flow::delivery::Delivery;
use crate::flow::lsn::Lsn;
use crate::postgres::slot::SlotInfo;
use crate::postgres::slot::copies::Copies;
use crate::telemetry::metrics::{Counter, Known, Metrics, outcome};

/// Tells what the server says of the slot.
pub(super) fn show_slot(metrics: &Metrics, info: &SlotInfo) {
    let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
    metrics.slot.active.set(f64::from(u8::from(info.active_pid.is_some())));
    // A slot that is lost, or is still being made, has no position that could be behind.
    if info.is_lost() || info.confirmed == Lsn::ZERO {
        metrics.slot.confirmed_lag.unset();
        metrics.slot.retained_wal.unset();
    } else {
        metrics.slot.confirmed_lag.set_count(bytes(info.lag_bytes));
        metrics.slot.retained_wal.set_count(bytes(info.retained_bytes));
    }
    match info.safe_bytes {
        Some(safe) => metrics.slot.safe_wal.set_count(bytes(safe)),
        None => metrics.slot.safe_wal.unset(),
    }
    metrics.slot.set_wal_status(Some(&info.wal_status));
    let live = &metrics.live;
    live.wal_end.set_count(info.confirmed.0.saturating_add(bytes(info.lag_bytes)));
    match info.keep_bytes {
        Some(keep) => live.keep_size.set_count(bytes(keep)),
        None => live.keep_size.unset(),
    }
}

/// Tells what the server says of the standbys that the slot is for. `wanted`: whether they shall keep copies of it.
pub(super) fn show_standbys(metrics: &Metrics, copies: Copies, wanted: bool) {
    let show = |gauge: &Known, count: Option<i64>| match count.and_then(|count| u64::try_from(count).ok()) {
        Some(count) => gauge.set_count(count),
        None => gauge.unset(),
    };
    show(&metrics.slot.failover_standbys, copies.kept.filter(|_| wanted));
    show(&metrics.slot.missing_standbys, copies.missing);
}

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
    pub routed: Counter,
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
            routed: metrics.live.routed.clone(),
            headers_dropped: metrics.row_headers_dropped.clone(),
            stored: metrics.publishes.of(outcome::STORED),
            duplicate: metrics.publishes.of(outcome::DUPLICATE),
            transient: metrics.publishes.of(outcome::TRANSIENT),
            poison: metrics.publishes.of(outcome::POISON),
        }
    }
}

/// Tells how far delivery is. Of the events under way, so many were sent and have no answer.
pub(super) fn show(metrics: &Metrics, delivery: &mut Delivery, sent: usize) {
    let ((under_way, decided), live) = (delivery.under_way(), &metrics.live);
    live.under_way.set_count(under_way as u64);
    live.waiting.set_count(under_way.saturating_sub(decided).saturating_sub(sent) as u64);
    live.decided.set_count(decided as u64);
    live.transactions.set_count(delivery.ledger().waiting() as u64);
    let safe = delivery.safe();
    // Where the rows of the table come first, or come alone, there is no position yet.
    if safe == Lsn::ZERO || delivery.horizon() == WHOLE {
        live.confirmed.unset();
    } else {
        live.confirmed.set_count(safe.0);
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
