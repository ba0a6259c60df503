//! Waiting longer and longer between attempts, and saying so only now and then. The only place that knows the `backoff`
//! crate.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// The pauses between attempts: they double from `first` to `longest`, with jitter, and never end.
#[derive(Debug)]
pub struct Pause {
    backoff: ExponentialBackoff,
    longest: Duration,
}

impl Pause {
    /// `first` is the first pause and `longest` the longest, give or take a fifth.
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

/// How often a reason that lasts is said.
const SAY_EVERY: Duration = Duration::from_mins(1);

/// Why attempts fail, as the log tells it: each reason at once, and then once a minute for as long as it lasts. Reasons
/// may come in turns.
#[derive(Debug, Default)]
pub struct Repeats {
    said: HashMap<String, Instant>,
}

impl Repeats {
    /// Whether `reason`, met at `now`, is to be said.
    pub fn is_news(&mut self, reason: &str, now: Instant) -> bool {
        self.said.retain(|_, said| now.saturating_duration_since(*said) < SAY_EVERY);
        let news = !self.said.contains_key(reason);
        if news {
            self.said.insert(reason.to_owned(), now);
        }
        news
    }

    /// It is over: whatever comes next is news. Gives whether anything was said of it.
    pub fn end(&mut self) -> bool {
        !std::mem::take(&mut self.said).is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_said_at_once_then_once_a_minute_and_anew_when_it_was_over() {
        let (mut repeats, start) = (Repeats::default(), Instant::now());
        let mut said = Vec::new();
        for second in (0..=150).step_by(5) {
            let reason = if second % 20 == 15 { "refused" } else { "no route" };
            if repeats.is_news(reason, start + Duration::from_secs(second)) {
                said.push((second, reason));
            }
        }
        let each = |at: [u64; 3], reason| at.map(|second| (second, reason));
        let mut expected = [each([0, 60, 120], "no route"), each([15, 75, 135], "refused")].concat();
        expected.sort_unstable();
        assert_eq!(said, expected);
        assert!(repeats.end());
        assert!(!repeats.end());
        assert!(repeats.is_news("refused", start + Duration::from_secs(151)));
    }

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
