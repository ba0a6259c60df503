//! Waiting longer and longer between attempts. The only place that knows the `backoff` crate.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// The pauses between attempts: they double from `first` to `longest`, with jitter, and never end.
#[derive(Debug)]
pub struct Pause {
    backoff: ExponentialBackoff,
    longest: Duration,
}

impl Pause {
    pub fn new(first: Duration, longest: Duration) -> Self {
        let backoff = ExponentialBackoff {
            current_interval: first,
            initial_interval: first,
            max_interval: longest,
            multiplier: 2.0,
            randomization_factor: 0.2,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        };
        Self { backoff, longest }
    }

    /// How long to wait before the next attempt.
    pub fn next(&mut self) -> Duration {
        self.backoff.next_backoff().unwrap_or(self.longest)
    }

    /// An attempt succeeded: the next pause is the first one again.
    pub fn reset(&mut self) {
        self.backoff.reset();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_start_over_after_a_success() {
        let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(1));
        let first = pause.next();
        assert!(first >= Duration::from_millis(80) && first <= Duration::from_millis(120), "{first:?}");
        let last = (0..20).map(|_| pause.next()).last().unwrap();
        assert!(last >= Duration::from_millis(800) && last <= Duration::from_millis(1200), "{last:?}");
        pause.reset();
        assert!(pause.next() <= Duration::from_millis(120));
    }
}
