//! The last minute, second by second: what rates and the shares of slow events are made from.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::telemetry::metrics::{Metrics, outcome};

/// Seconds that are looked back on.
pub const MINUTE: usize = 60;
/// Rates are those of about so long.
const RATES_OVER: Duration = Duration::from_secs(10);
/// Below this a rate says nothing.
const TOO_SHORT: f64 = 0.5;

/// The counters at one moment.
#[derive(Clone, Debug)]
struct Sample {
    at: Instant,
    decoded: u64,
    routed: u64,
    published: u64,
    /// Those of them that the stream has.
    stored: u64,
    written: u64,
    /// The confirmed position, in bytes of the log.
    confirmed: Option<f64>,
    commit_to_ack: Vec<u64>,
    batches: Vec<u64>,
}

impl Sample {
    fn of(metrics: &Metrics) -> Self {
        let publishes = metrics.publishes.all();
        let stored = [outcome::STORED, outcome::DUPLICATE].iter().filter_map(|outcome| publishes.get(outcome)).sum();
        Self {
            at: Instant::now(),
            decoded: metrics.decoded.get(),
            routed: metrics.live.routed.get(),
            published: publishes.values().sum(),
            stored,
            written: metrics.writeback_rows.all().values().sum(),
            confirmed: metrics.live.confirmed.get(),
            commit_to_ack: metrics.commit_to_ack.counts(),
            batches: metrics.writeback_duration.counts(),
        }
    }
}

/// How fast things go: events, and bytes of log, a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub decoded: Option<f64>,
    pub routed: Option<f64>,
    pub published: Option<f64>,
    pub written: Option<f64>,
    pub confirmed: Option<f64>,
}

/// How long things took in the last minute, in seconds; nothing where nothing happened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    pub commit_to_ack_p50: Option<f64>,
    pub commit_to_ack_p99: Option<f64>,
    pub batch_p99: Option<f64>,
}

/// The samples of the last minute.
#[derive(Debug, Default)]
pub struct History(VecDeque<Sample>);

impl History {
    /// Takes a sample; to be called once a second.
    pub fn sample(&mut self, metrics: &Metrics) {
        if self.0.len() > MINUTE {
            self.0.pop_front();
        }
        self.0.push_back(Sample::of(metrics));
    }

    pub fn rates(&self, metrics: &Metrics) -> Rates {
        let now = Sample::of(metrics);
        let recent = |sample: &&Sample| now.at.duration_since(sample.at) <= RATES_OVER + Duration::from_millis(500);
        let Some(then) = self.0.iter().find(recent) else { return Rates::default() };
        let rate = |to: u64, from: u64| per_second(to.saturating_sub(from), then, &now);
        Rates {
            decoded: rate(now.decoded, then.decoded),
            routed: rate(now.routed, then.routed),
            published: rate(now.published, then.published),
            written: rate(now.written, then.written),
            confirmed: now.confirmed.zip(then.confirmed).and_then(|(to, from)| {
                let seconds = now.at.duration_since(then.at).as_secs_f64();
                (seconds >= TOO_SHORT).then(|| (to - from).max(0.0) / seconds)
            }),
        }
    }

    pub fn times(&self, metrics: &Metrics) -> Times {
        let Some(then) = self.0.front() else { return Times::default() };
        let (acks, batches) = (metrics.commit_to_ack.counts(), metrics.writeback_duration.counts());
        let ack = |share| metrics.commit_to_ack.quantile(&then.commit_to_ack, &acks, share);
        Times {
            commit_to_ack_p50: ack(0.5),
            commit_to_ack_p99: ack(0.99),
            batch_p99: metrics.writeback_duration.quantile(&then.batches, &batches, 0.99),
        }
    }

    /// Events a second that the stream got, for each second of the last minute.
    pub fn stored_per_second(&self) -> Vec<f64> {
        let pairs = self.0.iter().zip(self.0.iter().skip(1));
        pairs.map(|(from, to)| per_second(to.stored.saturating_sub(from.stored), from, to).unwrap_or(0.0)).collect()
    }
}

#[expect(clippy::cast_precision_loss, reason = "a rate")]
fn per_second(count: u64, from: &Sample, to: &Sample) -> Option<f64> {
    let seconds = to.at.duration_since(from.at).as_secs_f64();
    (seconds >= TOO_SHORT).then(|| (count as f64 / seconds * 10.0).round() / 10.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_the_last_seconds_and_not_since_the_start() {
        let metrics = Metrics::new();
        let mut history = History::default();
        assert_eq!(history.rates(&metrics), Rates::default());
        metrics.decoded.inc_by(1_000_000);
        history.sample(&metrics);
        assert_eq!(history.rates(&metrics).decoded, None, "no time has passed");
        let second = Duration::from_secs(1);
        for sample in &mut history.0 {
            sample.at = sample.at.checked_sub(second * 10).unwrap();
        }
        metrics.decoded.inc_by(500);
        let rate = history.rates(&metrics).decoded.unwrap();
        assert!((rate - 50.0).abs() < 1.0, "{rate}");
        for _ in 0..2 * MINUTE {
            history.sample(&metrics);
        }
        assert_eq!(history.stored_per_second().len(), MINUTE);
    }
}
