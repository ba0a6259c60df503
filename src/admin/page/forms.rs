//! How values are written; `page.js` has the same forms. What is not known has a form of its own, never that of 0.

use serde_json::Value;

const NONE: &str = "–";

/// Every form.
#[cfg(test)]
pub const NAMES: [&str; 12] =
    ["text", "count", "rate", "bytes", "limit", "seconds", "time", "lasting", "condition", "width", "peak", "spark"];

/// The value in a form.
pub fn form(name: &str, value: &Value) -> String {
    let number = |shown: fn(f64) -> String| value.as_f64().map_or(NONE.to_owned(), shown);
    match name {
        "count" => number(whole),
        "rate" => number(rate),
        "bytes" => number(bytes),
        "limit" if value["known"] == true => value["limit_bytes"].as_f64().map_or("none".to_owned(), bytes),
        "seconds" => number(seconds),
        "time" => value.as_str().and_then(|time| time.get(..19)).map_or(NONE.to_owned(), |time| time.replace('T', " ")),
        "lasting" => value.as_str().and_then(|time| time.get(11..19)).unwrap_or("lasts").to_owned(),
        "condition" => condition(value.as_str().unwrap_or_default()).to_owned(),
        "width" => format!("{:.1}", value.as_f64().unwrap_or(0.0).min(1.0) * 100.0),
        "peak" => rate(top(&values(value))),
        "spark" => spark(&values(value)),
        _ => value.as_str().unwrap_or(NONE).to_owned(),
    }
}

fn whole(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn rate(value: f64) -> String {
    if value < 10.0 { format!("{value:.1}") } else { whole(value) }
}

fn bytes(mut value: f64) -> String {
    if value < 1024.0 {
        return format!("{value:.0} B");
    }
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB", "PiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates at both ends")]
fn seconds(value: f64) -> String {
    let left = value as u64;
    match value {
        ..=0.0 => "0 s".to_owned(),
        ..0.01 => format!("{:.2} ms", value * 1000.0),
        ..0.0995 => format!("{:.1} ms", value * 1000.0),
        ..1.0 => format!("{:.0} ms", value * 1000.0),
        ..10.0 => format!("{value:.1} s"),
        ..60.0 => format!("{value:.0} s"),
        ..3600.0 => format!("{} min {} s", left / 60, left % 60),
        ..86400.0 => format!("{} h {} min", left / 3600, left % 3600 / 60),
        _ => format!("{} d {} h", left / 86400, left % 86400 / 3600),
    }
}

fn condition(slot: &str) -> &str {
    match slot {
        "ok" => "The server keeps what the relay still needs",
        "danger" => "In danger: little is left before the server gives it up",
        "lost" => "Lost: the server has removed log that the slot still needed",
        "unknown" => "Not known: nobody looks at it at present",
        other => other,
    }
}

fn values(value: &Value) -> Vec<f64> {
    value.as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
}

fn top(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}

/// The points of an area 118 wide and 34 high: a value every 2, the last one at the right.
#[expect(clippy::cast_precision_loss, reason = "some 60 points")]
fn spark(values: &[f64]) -> String {
    let top = top(values).max(1.0);
    let x = |at: usize| 118.0 - (values.len() - 1 - at) as f64 * 2.0;
    if values.is_empty() {
        return String::new();
    }
    let line = values.iter().enumerate().map(|(at, value)| format!("{:.1},{:.1}", x(at), 33.0 - 31.0 * value / top));
    let line: Vec<String> = line.collect();
    format!("{:.1},34.0 {} 118.0,34.0", x(0), line.join(" "))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_written_for_people() {
        for (name, value, expected) in [
            ("count", json!(1_234_567), "1,234,567"),
            ("count", json!(0), "0"),
            ("count", json!(null), "–"),
            ("rate", json!(9.25), "9.2"),
            ("rate", json!(1234.4), "1,234"),
            ("bytes", json!(0), "0 B"),
            ("bytes", json!(1_073_741_824_u64), "1.0 GiB"),
            ("bytes", json!(17_000_000), "16 MiB"),
            ("bytes", json!(null), "–"),
            ("limit", json!({"known": true, "limit_bytes": null}), "none"),
            ("limit", json!({"known": false, "limit_bytes": null}), "–"),
            ("limit", json!({"known": true, "limit_bytes": 1024}), "1.0 KiB"),
            ("seconds", json!(0), "0 s"),
            ("seconds", json!(0.000_75), "0.75 ms"),
            ("seconds", json!(0.0123), "12.3 ms"),
            ("seconds", json!(0.25), "250 ms"),
            ("seconds", json!(1.5), "1.5 s"),
            ("seconds", json!(3725), "1 h 2 min"),
            ("seconds", json!(200_000), "2 d 7 h"),
            ("time", json!("2026-11-30T00:10:06.123Z"), "2026-11-30 00:10:06"),
            ("lasting", json!("2026-11-30T00:10:06.123Z"), "00:10:06"),
            ("lasting", json!(null), "lasts"),
            ("width", json!(7), "100.0"),
            ("width", json!(null), "0.0"),
            ("peak", json!([1, 30.4, 2]), "30"),
            ("spark", json!([]), ""),
            ("spark", json!([0, 2]), "116.0,34.0 116.0,33.0 118.0,2.0 118.0,34.0"),
            ("text", json!(null), "–"),
            ("condition", json!("lost"), "Lost: the server has removed log that the slot still needed"),
        ] {
            assert_eq!(form(name, &value), expected, "{name} of {value}");
            assert!(NAMES.contains(&name));
        }
    }
}
