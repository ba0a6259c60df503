//! What a NATS server says unasked: the `-ERR` lines of the client protocol, and lame duck mode.

/// Something that a server told without being asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The user may not publish to this subject. Every message sent to it is lost.
    PublishRefused { subject: String },
    /// The user may not subscribe to this subject.
    SubscribeRefused { subject: String },
    /// The server is about to shut down and will close the connection.
    LameDuck,
    /// Acknowledgements came faster than they were read; some are lost, and will look like timeouts.
    RepliesLost,
    /// Any other error, with the server's text. The server often closes the connection after it.
    Error(String),
}

impl Notice {
    /// Reads the text of an `-ERR`, without the quotes around it.
    pub(super) fn from_error(text: &str) -> Self {
        let subject = |prefix: &str| {
            let start = text.get(..prefix.len())?;
            start.eq_ignore_ascii_case(prefix).then(|| text.get(prefix.len()..).and_then(unquote)).flatten()
        };
        if let Some(subject) = subject("Permissions Violation for Publish to ") {
            return Self::PublishRefused { subject };
        }
        if let Some(subject) = subject("Permissions Violation for Subscription to ") {
            return Self::SubscribeRefused { subject };
        }
        Self::Error(text.to_owned())
    }
}

/// Reads a string that Go's `%q` has quoted, up to its closing quote. What follows it (a queue group) is ignored.
///
/// `None` when the form is another.
fn unquote(quoted: &str) -> Option<String> {
    let mut chars = quoted.strip_prefix('"')?.chars();
    let mut plain = String::with_capacity(quoted.len());
    loop {
        match chars.next()? {
            '"' => return Some(plain),
            '\\' => plain.push(unescape(&mut chars)?),
            other => plain.push(other),
        }
    }
}

/// Reads what follows a backslash. Bytes that are not UTF-8 (`\xff`) cannot occur in a subject of ours.
fn unescape(chars: &mut std::str::Chars<'_>) -> Option<char> {
    match chars.next()? {
        'a' => Some('\u{7}'),
        'b' => Some('\u{8}'),
        'f' => Some('\u{c}'),
        'n' => Some('\n'),
        'r' => Some('\r'),
        't' => Some('\t'),
        'v' => Some('\u{b}'),
        kept @ ('\\' | '"' | '\'') => Some(kept),
        'x' => hex(chars, 2).filter(char::is_ascii),
        'u' => hex(chars, 4),
        'U' => hex(chars, 8),
        _ => None,
    }
}

fn hex(chars: &mut std::str::Chars<'_>, digits: usize) -> Option<char> {
    let text: String = chars.take(digits).collect();
    let plain = text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit());
    plain.then(|| u32::from_str_radix(&text, 16).ok()).flatten().and_then(char::from_u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publish(subject: &str) -> Notice {
        Notice::PublishRefused { subject: subject.to_owned() }
    }

    #[test]
    fn names_the_refused_subject() {
        for (text, notice) in [
            (r#"Permissions Violation for Publish to "outbox.order.paid""#, publish("outbox.order.paid")),
            (r#"permissions violation for publish to "a""#, publish("a")),
            (r#"Permissions Violation for Publish to "a\"b\\c'd""#, publish(r#"a"b\c'd"#)),
            (r#"Permissions Violation for Publish to "a\u00e9\x7f\U0001f600""#, publish("a\u{e9}\u{7f}\u{1f600}")),
            (
                r#"Permissions Violation for Subscription to "_INBOX.>" using queue "q""#,
                Notice::SubscribeRefused { subject: "_INBOX.>".to_owned() },
            ),
        ] {
            assert_eq!(Notice::from_error(text), notice, "{text}");
        }
    }

    #[test]
    fn leaves_other_texts_as_they_are() {
        for text in [
            "",
            "Maximum Payload Violation",
            "Permissions Violation for Publish to ",
            "Permissions Violation for Publish to outbox",
            r#"Permissions Violation for Publish to "open"#,
            r#"Permissions Violation for Publish to "\"#,
            r#"Permissions Violation for Publish to "\xfg""#,
            r#"Permissions Violation for Publish to "\ud800""#,
            r#"Permissions Violation for Publish to "\u12"#,
            "Permissions Violation for Publisé",
        ] {
            assert_eq!(Notice::from_error(text), Notice::Error(text.to_owned()));
        }
    }
}
