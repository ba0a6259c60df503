//! PostgreSQL's timestamps -> RFC 3339.

use std::fmt::Write as _;

use jiff::SignedDuration;
use jiff::civil::DateTime;

/// Replaces `target` with the RFC 3339 form, in UTC, of a `timestamptz` as PostgreSQL prints it with `DateStyle=ISO`:
/// `2026-11-29 21:04:05.678+00`, also with an offset of hours, minutes and seconds.
///
/// Returns false, and leaves `target` empty, when RFC 3339 has no form for it: infinity, years before Christ or after
/// 9999; also when the text is no timestamp with an offset.
pub(super) fn write_rfc3339(text: &str, target: &mut String) -> bool {
    target.clear();
    let Some(time) = parse(text) else { return false };
    if let Some((date, clock)) = text.strip_suffix("+00").and_then(|utc| utc.split_once(' ')) {
        // As the relay's own sessions print it: two letters differ.
        for part in [date, "T", clock, "Z"] {
            target.push_str(part);
        }
    } else {
        // Digits of the second as PostgreSQL gave them: none, or without trailing zeros.
        // Writing to a String cannot fail.
        let _ = write!(target, "{time}Z");
    }
    true
}

fn parse(text: &str) -> Option<DateTime> {
    let (date, rest) = text.split_at_checked(10)?;
    let (time, offset) = rest.strip_prefix(' ')?.split_at_checked(rest.find(['+', '-'])?.checked_sub(1)?)?;
    let (clock, fraction) = time.split_at_checked(8)?;
    let date = date.as_bytes();
    let clock = clock.as_bytes();
    let is_shaped = date.get(4) == Some(&b'-')
        && date.get(7) == Some(&b'-')
        && clock.get(2) == Some(&b':')
        && clock.get(5) == Some(&b':');
    if !is_shaped {
        return None;
    }
    let year = number(date.get(..4)?)?;
    let local = DateTime::new(
        i16::try_from(year).ok()?,
        two(date.get(5..7)?)?,
        two(date.get(8..)?)?,
        two(clock.get(..2)?)?,
        two(clock.get(3..5)?)?,
        two(clock.get(6..)?)?,
        nanoseconds(fraction)?,
    )
    .ok()?;
    let utc = local.checked_sub(ahead(offset)?).ok()?;
    // Year 0 is 1 BC.
    (1..=9999).contains(&utc.year()).then_some(utc)
}

/// How far ahead of UTC: `+HH`, `+HH:MM` or `+HH:MM:SS`.
fn ahead(offset: &str) -> Option<SignedDuration> {
    let sign = if offset.starts_with('-') { -1 } else { 1 };
    let mut parts = offset.get(1..)?.split(':');
    let mut seconds = 0;
    for unit in [3600, 60, 1] {
        let part = parts.next().map_or(Some(0), |digits| two(digits.as_bytes()))?;
        seconds += unit * i64::from(part);
    }
    parts.next().is_none().then(|| SignedDuration::from_secs(sign * seconds))
}

/// The fraction of a second: nothing, or a dot and up to nine digits.
fn nanoseconds(fraction: &str) -> Option<i32> {
    if fraction.is_empty() {
        return Some(0);
    }
    let digits = fraction.strip_prefix('.')?.as_bytes();
    let missing = 9_u32.checked_sub(u32::try_from(digits.len()).ok()?)?;
    number(digits)?.checked_mul(10_i32.checked_pow(missing)?)
}

fn two(digits: &[u8]) -> Option<i8> {
    if digits.len() != 2 {
        return None;
    }
    number(digits)?.try_into().ok()
}

/// Digits only: no sign, no space.
fn number(digits: &[u8]) -> Option<i32> {
    let append = |number: i32, digit: &u8| {
        let digit = digit.is_ascii_digit().then(|| i32::from(digit - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    };
    (!digits.is_empty()).then(|| digits.iter().try_fold(0, append)).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rfc3339(text: &str) -> Option<String> {
        let mut target = String::from("what was there");
        let is_written = write_rfc3339(text, &mut target);
        assert_eq!(is_written, !target.is_empty());
        is_written.then_some(target)
    }

    #[test]
    fn converts_to_utc() {
        for (text, expected) in [
            ("2026-11-29 21:04:05.678901+00", "2026-11-29T21:04:05.678901Z"),
            ("2026-11-29 21:04:05.6+00", "2026-11-29T21:04:05.6Z"),
            ("2026-11-29 21:04:05+00", "2026-11-29T21:04:05Z"),
            ("2026-11-29 21:04:05+05:30", "2026-11-29T15:34:05Z"),
            ("2026-01-01 00:00:00-03:30:15", "2026-01-01T03:30:15Z"),
            ("0001-01-01 00:00:00+00", "0001-01-01T00:00:00Z"),
            ("9999-12-31 23:59:59.999999+00", "9999-12-31T23:59:59.999999Z"),
        ] {
            assert_eq!(rfc3339(text).as_deref(), Some(expected), "{text}");
        }
    }

    /// Case 23 of the field reports: dates that RFC 3339 cannot say are left out.
    #[test]
    fn leaves_out_what_has_no_form() {
        for text in [
            "infinity",
            "-infinity",
            "0044-03-15 00:00:00+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "10000-01-01 00:00:00+00",
            "9999-12-31 23:59:59-01",
            "0001-01-01 00:00:00+01",
            "2026-11-29 21:04:05",
            "2026-11-29",
            "2026-11-29 21:04:05+00:00:00:00",
            "2026-13-29 21:04:05+00",
            "2026-11-29 21:04:05.+00",
            "2026-11-29 21:04:05.1234567890+00",
            "2026-11-29 +1:04:05+00",
            "2026-11-29T21:04:05+00",
            "\u{661}\u{662}026-11-29 21:04:05+00",
            "",
        ] {
            assert_eq!(rfc3339(text), None, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(text in "[-+0-9:. BC]{0,40}|.{0,40}") {
            rfc3339(&text);
        }
    }
}
