//! Sizes and times as people read them.

use std::time::Duration;

/// Bytes with a unit, rounded: `1.2 MiB`.
pub fn bytes(bytes: u64) -> String {
    bytesize::ByteSize::b(bytes).display().iec().to_string()
}

/// The same of what the server counts, which may be below zero.
pub fn signed_bytes(count: i64) -> String {
    format!("{}{}", if count < 0 { "-" } else { "" }, bytes(count.unsigned_abs()))
}

/// A duration in whole seconds at most: `2m 30s`.
pub fn duration(duration: Duration) -> String {
    let whole = Duration::from_secs(duration.as_secs());
    let shown = if whole.is_zero() { duration } else { whole };
    humantime::format_duration(shown).to_string()
}

/// An age in whole seconds: `2m 30s`.
pub fn age(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0).floor()).unwrap_or_default();
    humantime::format_duration(whole).to_string()
}

/// A length of time in its largest unit, rounded down.
pub fn span(seconds: f64) -> String {
    let seconds = seconds.abs();
    let units = [(86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")];
    let (size, unit) = units.into_iter().find(|(size, _)| seconds >= *size).unwrap_or((1.0, "s"));
    format!("{:.0} {unit}", (seconds / size).floor())
}

/// When something is due.
pub fn due(seconds: Option<f64>) -> String {
    match seconds {
        None => String::new(),
        Some(seconds) if seconds < 0.0 => "now".to_owned(),
        Some(seconds) => format!("in {}", span(seconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_their_largest_unit() {
        let told = [0.4, 59.9, 60.0, 7199.0, -90_000.0].map(span);
        assert_eq!(told, ["0 s", "59 s", "1 min", "1 h", "1 d"]);
        assert_eq!([None, Some(-1.0), Some(12.3)].map(due), ["", "now", "in 12 s"]);
    }
}
