//! How long a row waits before its next attempt.

use std::time::Duration;

/// The wait before the attempt that follows `attempt` failed ones (1 for the first): `initial`, doubled with each
/// further failure, at most `max`; then shortened by up to a half, as `jitter` (0 to 1) says, so that rows that failed
/// together do not come back together.
pub fn delay(attempt: u32, initial: Duration, max: Duration, jitter: f64) -> Duration {
    let factor = 2_u32.checked_pow(attempt.saturating_sub(1));
    let full = factor.and_then(|factor| initial.checked_mul(factor)).map_or(max, |delay| delay.min(max));
    // Not a number counts as no jitter.
    let jitter = if jitter.is_nan() { 0.0 } else { jitter.clamp(0.0, 1.0) };
    // Half of the longest Duration still fits after rounding, so this cannot overflow.
    full.saturating_sub((full / 2).mul_f64(jitter))
}

/// A jitter for [`delay`], from 0 to below 1, that differs between neighbouring row ids and is always the same for one.
pub fn spread(id: i64) -> f64 {
    // Fibonacci hashing: multiples of 2^64 / golden ratio lie evenly, however few they are.
    let hash = id.cast_unsigned().wrapping_mul(0x9E37_79B9_7F4A_7C15);
    // The upper 32 bits fit a float exactly.
    f64::from(u32::try_from(hash >> 32).unwrap_or(u32::MAX)) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INITIAL: Duration = Duration::from_secs(2);
    const MAX: Duration = Duration::from_mins(1);

    #[test]
    fn doubles_up_to_the_maximum() {
        let seconds: Vec<u64> = (1..=7).map(|attempt| delay(attempt, INITIAL, MAX, 0.0).as_secs()).collect();
        assert_eq!(seconds, [2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(delay(0, INITIAL, MAX, 0.0), INITIAL);
    }

    #[test]
    fn jitter_takes_off_up_to_a_half() {
        assert_eq!(delay(2, INITIAL, MAX, 1.0), Duration::from_secs(2));
        assert_eq!(delay(2, INITIAL, MAX, 0.5), Duration::from_secs(3));
        assert_eq!(delay(2, INITIAL, MAX, f64::NAN), Duration::from_secs(4));
    }

    #[test]
    fn extremes_do_not_overflow() {
        for jitter in [0.0, 1.0, -1.0, f64::INFINITY] {
            assert!(delay(u32::MAX, Duration::MAX, Duration::MAX, jitter) > Duration::ZERO);
            assert!(delay(33, Duration::from_nanos(1), Duration::MAX, jitter) > Duration::ZERO);
        }
        assert_eq!(delay(9, Duration::ZERO, MAX, 0.0), Duration::ZERO);
    }

    #[test]
    fn neighbouring_rows_spread_out() {
        let mut spreads: Vec<f64> = (1..=10).map(spread).collect();
        spreads.sort_by(f64::total_cmp);
        assert!(spreads[0] >= 0.0 && spreads[9] < 1.0);
        assert!(spreads.windows(2).all(|pair| pair[1] - pair[0] > 0.03), "{spreads:?}");
    }

    proptest! {
        #[test]
        fn stays_within_bounds(attempt: u32, initial: Duration, max: Duration, jitter in 0.0..=1.0) {
            let got = delay(attempt, initial, max, jitter);
            prop_assert!(got <= max);
            // What rounding in f64 may add to the half that jitter takes off.
            let rounding = Duration::from_secs(initial.min(max).as_secs() >> 50) + Duration::from_nanos(1);
            prop_assert!(got >= (initial.min(max) / 2).saturating_sub(rounding));
        }
    }
}
