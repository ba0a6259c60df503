//! What a value must be beyond its type: each by itself, then against others.

use std::fs::File;
use std::path::PathBuf;

use super::table_name::MAX_NAME;
use super::{Settings, mask};

/// A check over one or more keys. It runs when all of them could be read.
#[derive(Clone, Copy)]
pub struct Check {
    /// The keys it looks at. A mistake is reported for the first of them that is set.
    pub keys: &'static [&'static str],
    /// What is wrong, and what would be right.
    pub test: fn(&Settings) -> Result<(), String>,
}

/// The checks of one key against another.
pub(super) const CHECKS: &[Check] = &[
    Check {
        keys: &["nats.create.duplicate_window", "nats.create.max_age"],
        test: |settings| match settings.nats.create.max_age {
            Some(age) if age < settings.nats.create.duplicate_window => Err(format!(
                "nats.create.duplicate_window ({}) must not be longer than nats.create.max_age ({})",
                humantime::format_duration(settings.nats.create.duplicate_window),
                humantime::format_duration(age),
            )),
            _ => Ok(()),
        },
    },
    Check {
        keys: &["retry.initial", "retry.max"],
        test: |settings| {
            let (initial, max) = (settings.retry.initial, settings.retry.max);
            let [initial_text, max_text] = [initial, max].map(humantime::format_duration);
            ensure(initial <= max, || format!("retry.initial ({initial_text}) must not be over retry.max ({max_text})"))
        },
    },
    Check {
        keys: &["nats.tls_cert", "nats.tls_key"],
        test: |settings| {
            let both = settings.nats.tls_cert.is_some() == settings.nats.tls_key.is_some();
            ensure(both, || "nats.tls_cert and nats.tls_key belong together; set both".to_owned())
        },
    },
    Check {
        keys: &["nats.user", "nats.password"],
        test: |settings| {
            let both = settings.nats.user.is_some() == settings.nats.password.is_some();
            ensure(both, || "nats.user and nats.password (or nats.password_file) belong together; set both".to_owned())
        },
    },
    Check {
        keys: &["nats.credentials_file", "nats.nkey_file", "nats.token", "nats.user", "nats.password", "nats.url"],
        test: one_way_to_log_in,
    },
];

fn one_way_to_log_in(settings: &Settings) -> Result<(), String> {
    let nats = &settings.nats;
    let ways: Vec<&str> = [
        (nats.credentials_file.is_some(), "nats.credentials_file"),
        (nats.nkey_file.is_some(), "nats.nkey_file"),
        (nats.token.is_some(), "nats.token"),
        (nats.user.is_some() || nats.password.is_some(), "nats.user"),
        (nats.url.iter().any(|url| url.contains('@')), "a user or token in nats.url"),
    ]
    .into_iter()
    .filter_map(|(set, way)| set.then_some(way))
    .collect();
    ensure(ways.len() < 2, || format!("there is more than one way to log in ({}); keep one", ways.join(", ")))
}

fn ensure(right: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if right { Ok(()) } else { Err(problem()) }
}

pub(super) fn slot_name(name: &str) -> Result<(), String> {
    let legal = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_');
    ensure(name.len() <= MAX_NAME && name.bytes().all(legal), || {
        format!("{name:?} is not a slot's name; use 1 to {MAX_NAME} of a-z, 0-9 and _")
    })?;
    ensure(name != "pg_conflict_detection", || format!("{name} is PostgreSQL's own slot; use another name"))
}

pub(super) fn publication(name: &str) -> Result<(), String> {
    ensure(name.len() <= MAX_NAME && !name.contains('\0'), || {
        format!("{name:?} is not a publication's name; use 1 to {MAX_NAME} bytes, none of them zero")
    })
}

/// One token of a subject, without wildcards.
pub(super) fn token(text: &str) -> Result<(), String> {
    let legal = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'.' | b'*' | b'>');
    ensure(text.bytes().all(legal), || format!("{text:?} must be one word without white space and . * >"))
}

pub(super) fn subjects(list: &[String]) -> Result<(), String> {
    list.iter().try_for_each(|subject| {
        let mut tokens = subject.split('.').peekable();
        let mut legal = !subject.starts_with('$');
        while let Some(token) = tokens.next() {
            legal &= match token {
                "" => false,
                "*" => true,
                ">" => tokens.peek().is_none(),
                token => token.chars().all(|c| !c.is_whitespace() && !c.is_control() && c != '*' && c != '>'),
            };
        }
        ensure(legal, || {
            format!(
                "{subject:?} is not a subject for a stream; use words joined by dots, * for one word, > at the end for \
                 the rest, and no leading $ (it is the server's)"
            )
        })
    })
}

pub(super) fn printable(text: &str) -> Result<(), String> {
    ensure(text.bytes().all(|byte| byte.is_ascii_graphic()), || {
        format!("{text:?} must be printable ASCII without white space")
    })
}

/// `nats://host:port` or `tls://host:port`; scheme and port may be left out.
pub(super) fn nats_url(text: &str) -> Result<(), String> {
    let full = if text.contains("://") { text.to_owned() } else { format!("nats://{text}") };
    let legal = url::Url::parse(&full)
        .is_ok_and(|url| matches!(url.scheme(), "nats" | "tls") && url.host_str().is_some_and(|host| !host.is_empty()));
    ensure(legal, || {
        format!("{:?} is not the address of a NATS server; use nats://host:4222 or tls://host:4222", mask::nats(text))
    })
}

#[expect(clippy::ref_option, reason = "a check sees the value as it is stored")]
pub(super) fn readable(path: &Option<PathBuf>) -> Result<(), String> {
    let Some(path) = path else { return Ok(()) };
    let directory = path.is_dir().then(|| std::io::Error::from(std::io::ErrorKind::IsADirectory));
    match directory.map_or_else(|| File::open(path).map(drop), Err) {
        Ok(()) => Ok(()),
        Err(error) => Err(format!("cannot read {}: {error}", path.display())),
    }
}

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// A level or a filter. A bare word that is no level would be taken for the name of a module, and a mistyped level
/// would so switch the log off: such words are refused.
pub(super) fn filter(text: &str) -> Result<(), String> {
    let directives = || text.split(',').map(str::trim);
    let bare = directives()
        .find(|word| !word.contains(['=', '[']) && !LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level)));
    let legal = bare.is_none() && tracing_subscriber::EnvFilter::try_new(text).is_ok();
    ensure(legal, || {
        let word = bare.unwrap_or(text);
        format!("{word:?} is no level; use {}, or a filter such as info,outbox_relay=debug", LEVELS.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_slots() {
        assert!(slot_name("outbox_relay_1").is_ok());
        assert!(slot_name(&"a".repeat(63)).is_ok());
        for wrong in ["A-b", "a b", "é", &"a".repeat(64), "pg_conflict_detection"] {
            assert!(slot_name(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn subjects_of_streams() {
        let check = |subject: &str| subjects(&[subject.to_owned()]);
        for right in ["outbox.>", "a", "a.*.b", ">", "ünï.b"] {
            assert!(check(right).is_ok(), "{right:?}");
        }
        for wrong in ["", "a..b", ".a", "a.", "a.>.b", "a b", "a.b*", "a.>>", "$JS.API.>", "a\tb", "a\u{7}"] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn addresses() {
        for right in ["localhost", "h:1", "nats://h:4222", "tls://u:p@[::1]:4222"] {
            assert_eq!(nats_url(right), Ok(()));
        }
        for wrong in ["http://h", "ws://h:1", "nats://", "nats://h:port", "nats://u:s3cret@"] {
            let problem = nats_url(wrong).unwrap_err();
            assert!(!problem.contains("s3cret"), "{problem}");
        }
    }

    #[test]
    fn a_mistyped_level_is_refused() {
        for right in ["info", "WARN", "off", "info,outbox_relay=debug", "warn,outbox_relay[span]=trace"] {
            assert_eq!(filter(right), Ok(()));
        }
        for wrong in ["inof", "info,debgu", "outbox_relay", "info,outbox_relay=loud", "a=b=c"] {
            assert!(filter(wrong).is_err(), "{wrong}");
        }
    }
}
