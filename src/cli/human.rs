//! Numbers as people read them.

use std::time::Duration;

/// Bytes with a unit, rounded: `1.2 MiB`.
pub fn bytes(bytes: i64) -> String {
    let size = bytesize::ByteSize::b(bytes.unsigned_abs()).display().iec();
    if bytes < 0 { format!("-{size}") } else { size.to_string() }
}

/// A dash where there is nothing.
pub fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.to_string())
}

/// A duration in whole seconds at most: `2m 30s`.
pub fn duration(duration: Duration) -> String {
    let whole = Duration::from_secs(duration.as_secs());
    let shown = if whole.is_zero() { duration } else { whole };
    humantime::format_duration(shown).to_string()
}
