//! The form of W3C trace context. Source: "Trace Context", sections 3.2 and 3.3.

/// Whether `value` has the form of a `traceparent`: `version-trace_id-parent_id-flags` in lowercase hex, ids not zero.
/// A version above 00 may go on after a further dash.
pub(super) fn is_traceparent(value: &str) -> bool {
    let mut fields = value.split('-');
    let mut hex = |len: usize| {
        let is_hex = |field: &&str| field.len() == len && field.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        fields.next().filter(is_hex)
    };
    let (Some(version), Some(trace_id), Some(parent_id), Some(_flags)) = (hex(2), hex(32), hex(16), hex(2)) else {
        return false;
    };
    let is_zero = |id: &str| id.bytes().all(|byte| byte == b'0');
    let is_too_long = version == "00" && fields.next().is_some();
    version != "ff" && !is_zero(trace_id) && !is_zero(parent_id) && !is_too_long
}

/// Whether `value` has the form of a `tracestate`: up to 32 members `key=value`, separated by commas.
pub(super) fn is_tracestate(value: &str) -> bool {
    const MEMBERS_MAX: usize = 32;
    let members =
        || value.split(',').map(|member| member.trim_matches([' ', '\t'])).filter(|member| !member.is_empty());
    members().count() <= MEMBERS_MAX
        && members().all(|member| member.split_once('=').is_some_and(|(key, value)| is_key(key) && is_value(value)))
}

fn is_key(key: &str) -> bool {
    let is_first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    key.len() <= 256
        && key.bytes().next().is_some_and(is_first)
        && key.bytes().all(|byte| is_first(byte) || b"_-*/@".contains(&byte))
}

fn is_value(value: &str) -> bool {
    let is_allowed = |byte: u8| matches!(byte, b' '..=b'~') && byte != b',' && byte != b'=';
    (1..=256).contains(&value.len()) && value.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traceparent_by_its_form() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert!(is_traceparent(good));
        assert!(is_traceparent(&good.replacen("00", "cc", 1)));
        assert!(is_traceparent(&format!("{}-more", good.replacen("00", "cc", 1))));
        for bad in [
            "",
            "00",
            &format!("{good}-more"),
            &format!("{good}-"),
            &format!(" {good}"),
            &good.to_uppercase(),
            &good.replacen("00", "ff", 1),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.more",
        ] {
            assert!(!is_traceparent(bad), "{bad:?}");
        }
    }

    #[test]
    fn tracestate_by_its_form() {
        for good in ["congo=t61rcWkgMzE", "rojo=00f067aa0ba902b7,congo=t6", "a=1 , b=2,", "fw529a3039@dt=FfAA1/:!", ""]
        {
            assert!(is_tracestate(good), "{good:?}");
        }
        let many = vec!["a=1"; 33].join(",");
        for bad in
            ["congo", "=1", "a=", "A=1", "a=1=2", "a=\u{e9}", "a b=1", "-a=1", &many, &format!("a={}", "x".repeat(257))]
        {
            assert!(!is_tracestate(bad), "{bad:?}");
        }
    }
}
