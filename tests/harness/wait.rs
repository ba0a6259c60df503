//! Waiting for a condition instead of for a time.

use std::time::{Duration, Instant};

const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// Asks `probe` until it says true. Panics with `what` after `deadline`.
pub async fn eventually(deadline: Duration, what: &str, mut probe: impl AsyncFnMut() -> bool) {
    eventually_some(deadline, what, async || probe().await.then_some(())).await;
}

/// Asks `probe` until it has a value, and returns that. Panics with `what` after `deadline`.
pub async fn eventually_some<T>(deadline: Duration, what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        if let Ok(Some(value)) = tokio::time::timeout(left, probe()).await {
            return value;
        }
        assert!(start.elapsed() < deadline, "waited {deadline:?} in vain: {what}");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Asks `probe` again and again for the whole of `period`. Panics with `what` as soon as it says false.
pub async fn always(period: Duration, what: &str, mut probe: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while start.elapsed() < period {
        assert!(probe().await, "no longer true after {:?}: {what}", start.elapsed());
        tokio::time::sleep(LONGEST_PAUSE).await;
    }
}
