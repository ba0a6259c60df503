//! Reading the row's `headers` without building a map of them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// Calls `each` with every name in the JSON object `headers` and its value, `None` where that is not a string.
///
/// Returns false when the text stops being a JSON object on the way, which no `jsonb` does.
pub(super) fn for_each(headers: &str, each: impl FnMut(&str, Option<&str>)) -> bool {
    // Most rows have none.
    if headers == "{}" {
        return true;
    }
    serde_json::Deserializer::from_str(headers).deserialize_map(Entries(each)).is_ok()
}

/// The string under `name`.
pub(super) fn find(headers: &str, name: &str) -> Option<String> {
    let mut found = None;
    for_each(headers, |key, value| {
        if key == name {
            found = value.map(str::to_owned);
        }
    });
    found
}

struct Entries<F>(F);

impl<'de, F: FnMut(&str, Option<&str>)> Visitor<'de> for Entries<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut entries: A) -> Result<(), A::Error> {
        // Raw, because a value that is not a string is only passed over: its numbers may exceed every Rust type.
        while let Some((Text(name), value)) = entries.next_entry::<Text<'de>, &'de RawValue>()? {
            let value = serde_json::from_str::<Text<'de>>(value.get()).ok();
            (self.0)(&name, value.as_ref().map(|Text(value)| &**value));
        }
        Ok(())
    }
}

/// A JSON string, borrowed when it has no escapes. (serde's own `Cow<str>` is always owned.)
struct Text<'a>(Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;

        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(TextVisitor)
    }
}
