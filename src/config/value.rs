//! How a value is read from a source, and how it is shown again.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::{LogFormat, Manage, OnSuccess, Ordering, Secret, Storage, TableName};

/// A value as its source spells it. Variables and flags give text only.
#[derive(Clone, Debug)]
pub enum Raw {
    Text(String),
    Integer(i64),
    Boolean(bool),
    List(Vec<String>),
    /// Something that no key takes, by its name.
    Other(String),
}

impl Raw {
    fn text(&self) -> Result<&str, String> {
        match self {
            Self::Text(text) if text.is_empty() => Err("is empty".to_owned()),
            Self::Text(text) => Ok(text),
            other => Err(format!("expected text in quotes, found {}", other.name())),
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Text(_) => "text",
            Self::Integer(_) => "a number",
            Self::Boolean(_) => "true or false",
            Self::List(_) => "a list",
            Self::Other(name) => name,
        }
    }
}

/// A value to be shown: never a secret.
#[derive(Clone, Debug, PartialEq)]
pub enum Shown {
    Text(String),
    Boolean(bool),
    Count(usize),
    /// Bytes.
    Size(u64),
    Duration(Duration),
    List(Vec<String>),
    Unset,
}

impl Shown {
    /// As the settings file spells it; `None` when there is no value.
    pub fn toml(&self) -> Option<String> {
        Some(match self {
            Self::Text(text) => string(text),
            Self::Boolean(value) => value.to_string(),
            Self::Count(count) => count.to_string(),
            Self::Size(_) | Self::Duration(_) => string(&self.plain()),
            Self::List(items) => format!("[{}]", items.iter().map(|item| string(item)).collect::<Vec<_>>().join(", ")),
            Self::Unset => return None,
        })
    }

    /// Bytes and seconds as numbers.
    pub fn json(&self) -> serde_json::Value {
        match self {
            Self::Text(text) => text.as_str().into(),
            Self::Boolean(value) => (*value).into(),
            Self::Count(count) => (*count).into(),
            Self::Size(bytes) => (*bytes).into(),
            Self::Duration(duration) if duration.subsec_nanos() == 0 => duration.as_secs().into(),
            Self::Duration(duration) => duration.as_secs_f64().into(),
            Self::List(items) => items.as_slice().into(),
            Self::Unset => serde_json::Value::Null,
        }
    }

    /// As a variable or a flag would spell it.
    fn plain(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Boolean(value) => value.to_string(),
            Self::Count(count) => count.to_string(),
            Self::Size(bytes) => size(*bytes),
            Self::Duration(duration) => humantime::format_duration(*duration).to_string(),
            Self::List(items) => items.join(","),
            Self::Unset => String::new(),
        }
    }
}

/// A TOML string. JSON's escapes are all TOML's too; TOML wants one more.
fn string(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7F}', "\\u007F")
}

/// Bytes in the largest unit that divides them: `64MiB`.
fn size(bytes: u64) -> String {
    [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")]
        .into_iter()
        .find(|(bits, _)| bytes != 0 && bytes.is_multiple_of(1 << bits))
        .map_or_else(|| format!("{bytes}B"), |(bits, unit)| format!("{}{unit}", bytes >> bits))
}

/// A type that a key can have.
pub trait Setting: Sized {
    /// What the help text calls a value.
    const KIND: &'static str;
    /// Whether values are hidden, and may come from a file of their own.
    const SECRET: bool = false;
    /// The word that means "no value", where there is one.
    const OFF: Option<&'static str> = None;
    /// Reads a value; the error says what is wrong and what would be right.
    fn read(raw: &Raw) -> Result<Self, String>;
    fn shown(&self) -> Shown;
}

/// The value lies within the range, whose ends are named otherwise.
pub fn within<T: Setting + PartialOrd + Copy>(value: &T, least: T, most: T) -> Result<(), String> {
    if *value >= least && *value <= most {
        return Ok(());
    }
    let [value, least, most] = [*value, least, most].map(|value| value.shown().plain());
    Err(format!("{value} is out of range; use {least} to {most}"))
}

impl<T: Setting> Setting for Option<T> {
    const KIND: &'static str = T::KIND;
    const SECRET: bool = T::SECRET;

    fn read(raw: &Raw) -> Result<Self, String> {
        match (raw, T::OFF) {
            (Raw::Text(text), Some(off)) if text == off => Ok(None),
            (_, Some(off)) => T::read(raw).map(Some).map_err(|problem| format!("{problem}, or \"{off}\"")),
            _ => T::read(raw).map(Some),
        }
    }

    fn shown(&self) -> Shown {
        match (self, T::OFF) {
            (Some(value), _) => value.shown(),
            (None, Some(off)) => Shown::Text(off.to_owned()),
            (None, None) => Shown::Unset,
        }
    }
}

impl Setting for Secret {
    const KIND: &'static str = "TEXT";
    const SECRET: bool = true;

    fn read(raw: &Raw) -> Result<Self, String> {
        raw.text().map(|text| Self(text.to_owned()))
    }

    fn shown(&self) -> Shown {
        Shown::Text("***".to_owned())
    }
}

impl Setting for String {
    const KIND: &'static str = "TEXT";

    fn read(raw: &Raw) -> Result<Self, String> {
        raw.text().map(str::to_owned)
    }

    fn shown(&self) -> Shown {
        Shown::Text(self.clone())
    }
}

impl Setting for Vec<String> {
    const KIND: &'static str = "LIST";

    /// A list, or text with commas between the items.
    fn read(raw: &Raw) -> Result<Self, String> {
        let items: Self = match raw {
            Raw::List(items) => items.iter().map(|item| item.trim().to_owned()).collect(),
            _ => raw
                .text()
                .map_err(|problem| format!("{problem}; or write a list: [\"a\", \"b\"]"))?
                .split(',')
                .map(|item| item.trim().to_owned())
                .collect(),
        };
        if items.is_empty() || items.iter().any(String::is_empty) {
            return Err("is empty, or has an empty item".to_owned());
        }
        Ok(items)
    }

    fn shown(&self) -> Shown {
        Shown::List(self.clone())
    }
}

impl Setting for PathBuf {
    const KIND: &'static str = "FILE";

    fn read(raw: &Raw) -> Result<Self, String> {
        raw.text().map(Self::from)
    }

    fn shown(&self) -> Shown {
        Shown::Text(self.display().to_string())
    }
}

impl Setting for bool {
    const KIND: &'static str = "true|false";

    fn read(raw: &Raw) -> Result<Self, String> {
        match raw {
            Raw::Boolean(value) => Ok(*value),
            Raw::Text(text) => text.parse().map_err(|_| format!("expected true or false, found {text:?}")),
            other => Err(format!("expected true or false, found {}", other.name())),
        }
    }

    fn shown(&self) -> Shown {
        Shown::Boolean(*self)
    }
}

impl Setting for usize {
    const KIND: &'static str = "COUNT";

    fn read(raw: &Raw) -> Result<Self, String> {
        match raw {
            Raw::Integer(number) => {
                Self::try_from(*number).map_err(|_| format!("expected a whole number from 0, found {number}"))
            }
            Raw::Text(text) => text.parse().map_err(|_| format!("expected a whole number from 0, found {text:?}")),
            other => Err(format!("expected a whole number from 0, found {}", other.name())),
        }
    }

    fn shown(&self) -> Shown {
        Shown::Count(*self)
    }
}

impl Setting for u64 {
    const KIND: &'static str = "SIZE";
    const OFF: Option<&'static str> = Some("unlimited");

    /// Bytes: a number, or text with a unit.
    fn read(raw: &Raw) -> Result<Self, String> {
        let expected = "expected a size, such as \"64MiB\" or \"1GiB\"";
        match raw {
            Raw::Integer(number) => Self::try_from(*number).map_err(|_| format!("{expected}, found {number}")),
            Raw::Text(text) => {
                let size = text.parse::<bytesize::ByteSize>().map_err(|_| format!("{expected}, found {text:?}"))?;
                Ok(size.as_u64())
            }
            other => Err(format!("{expected}, found {}", other.name())),
        }
    }

    fn shown(&self) -> Shown {
        Shown::Size(*self)
    }
}

impl Setting for Duration {
    const KIND: &'static str = "DURATION";
    const OFF: Option<&'static str> = Some("never");

    fn read(raw: &Raw) -> Result<Self, String> {
        let expected = "expected a duration with its unit, such as \"500ms\", \"5s\" or \"7d\"";
        match raw {
            Raw::Text(text) => humantime::parse_duration(text).map_err(|_| format!("{expected}, found {text:?}")),
            Raw::Integer(number) => Err(format!("{expected}, found {number}")),
            other => Err(format!("{expected}, found {}", other.name())),
        }
    }

    fn shown(&self) -> Shown {
        Shown::Duration(*self)
    }
}

impl Setting for SocketAddr {
    const KIND: &'static str = "ADDRESS";
    const OFF: Option<&'static str> = Some("off");

    fn read(raw: &Raw) -> Result<Self, String> {
        let text = raw.text()?;
        text.parse().map_err(|_| {
            format!("expected an address and a port, such as \"127.0.0.1:9464\" or \"[::]:9464\", found {text:?}")
        })
    }

    fn shown(&self) -> Shown {
        Shown::Text(self.to_string())
    }
}

impl Setting for TableName {
    const KIND: &'static str = "TABLE";

    fn read(raw: &Raw) -> Result<Self, String> {
        raw.text()?.parse().map_err(|error: super::TableNameError| error.to_string())
    }

    fn shown(&self) -> Shown {
        Shown::Text(self.plain())
    }
}

/// Settings that are one of a few words.
macro_rules! choice {
    ($type:ident: $kind:literal, $($word:literal = $variant:ident),+) => {
        impl Setting for $type {
            const KIND: &'static str = $kind;

            fn read(raw: &Raw) -> Result<Self, String> {
                match raw.text()? {
                    $($word => Ok(Self::$variant),)+
                    other => Err(format!("expected {}, found {other:?}", $kind.replace('|', " or "))),
                }
            }

            fn shown(&self) -> Shown {
                Shown::Text(match self { $(Self::$variant => $word),+ }.to_owned())
            }
        }
    };
}

choice!(Manage: "create|verify", "create" = Create, "verify" = Verify);
choice!(Storage: "file|memory", "file" = File, "memory" = Memory);
choice!(Ordering: "aggregate|none", "aggregate" = Aggregate, "none" = None);
choice!(OnSuccess: "complete|delete", "complete" = Complete, "delete" = Delete);
choice!(LogFormat: "text|json", "text" = Text, "json" = Json);

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Raw {
        Raw::Text(text.to_owned())
    }

    #[test]
    fn sizes_are_read_and_shown() {
        for (given, bytes, shown) in [
            ("64MiB", 64 << 20, "64MiB"),
            ("1 GiB", 1 << 30, "1GiB"),
            ("1.5 KiB", 1536, "1536B"),
            ("1MB", 1_000_000, "1000000B"),
            ("1024", 1024, "1KiB"),
            ("0", 0, "0B"),
        ] {
            assert_eq!(u64::read(&text(given)), Ok(bytes), "{given}");
            assert_eq!(bytes.shown().plain(), shown);
            assert_eq!(u64::read(&text(shown)), Ok(bytes), "{shown}");
        }
        for wrong in ["", "MiB", "-1", "64 fathoms", "NaN"] {
            assert!(u64::read(&text(wrong)).is_err(), "{wrong:?}");
        }
        assert!(u64::read(&Raw::Integer(-1)).is_err());
    }

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(Duration::read(&text("1m 30s")), Ok(Duration::from_secs(90)));
        assert_eq!(Duration::from_secs(90).shown().toml().as_deref(), Some("\"1m 30s\""));
        assert_eq!(Option::<Duration>::read(&text("never")), Ok(None));
        for wrong in [text("5"), text(""), text("-1s"), text("soon"), Raw::Integer(5), Raw::Boolean(true)] {
            assert!(Duration::read(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn json_has_numbers_and_toml_has_units() {
        assert_eq!(Shown::Size(1 << 20).json(), serde_json::json!(1_048_576));
        assert_eq!(Shown::Duration(Duration::from_secs(2)).json().to_string(), "2");
        assert_eq!(Shown::Duration(Duration::from_millis(1500)).json().to_string(), "1.5");
        assert_eq!(Shown::Text("a\"\\\n\u{7F}é".into()).toml().as_deref(), Some("\"a\\\"\\\\\\n\\u007Fé\""));
    }
}
