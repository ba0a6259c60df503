//! The sources, each as a layer of values by name. What is no key is a mistake, with the key that may be meant.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use toml::de::{DeTable, DeValue};

use super::keys::{KEYS, Name, names};
use super::mistake::{Mistake, Origin};
use super::value::Raw;

/// A value as given, and where.
pub struct Given {
    pub raw: Raw,
    pub origin: Origin,
}

/// What one source gives, by dotted name. Every name is one of [`names`].
pub type Layer = BTreeMap<String, Given>;

const PREFIX: &str = "OUTBOX_RELAY_";
/// Variables with the prefix that are no keys: the path of the file, and where the development servers are.
const OTHERS: [&str; 2] = [super::load::FILE_VARIABLE, "OUTBOX_RELAY_SERVERS"];

/// The values of the settings file.
pub fn file(path: &Path, origin: &Origin, mistakes: &mut Vec<Mistake>) -> Layer {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => {
            let key = path.display().to_string();
            mistakes.push(Mistake::new(key, origin.clone(), format!("cannot read the settings file: {error}")));
            return Layer::new();
        }
    };
    let line = |at: usize| {
        let before = text.as_bytes().get(..at).unwrap_or_default();
        Origin::File(path.to_owned(), Some(1 + memchr::memchr_iter(b'\n', before).count()))
    };
    let (table, errors) = DeTable::parse_recoverable(&text);
    for error in &errors {
        let at = error.span().map_or(0, |span| span.start);
        // The parser's own display would print the line, which may hold a secret.
        mistakes.push(Mistake::new("settings file", line(at), format!("not TOML: {}", error.message())));
    }
    let mut layer = Layer::new();
    if errors.is_empty() {
        walk("", table.get_ref(), &line, &mut layer, mistakes);
    }
    layer
}

fn walk(
    section: &str,
    table: &DeTable<'_>,
    line: &impl Fn(usize) -> Origin,
    layer: &mut Layer,
    mistakes: &mut Vec<Mistake>,
) {
    for (key, value) in table {
        let origin = line(key.span().start);
        let dot = if section.is_empty() { "" } else { "." };
        let name = format!("{section}{dot}{}", key.get_ref());
        let prefix = format!("{name}.");
        if names().any(|known| known.dotted() == name) {
            layer.insert(name, Given { raw: raw(value.get_ref()), origin });
        } else if names().any(|known| known.dotted().starts_with(&prefix)) {
            match value.get_ref() {
                DeValue::Table(inner) => walk(&name, inner, line, layer, mistakes),
                _ => mistakes.push(Mistake::new(&name, origin, format!("is a section, not a value; write [{name}]"))),
            }
        } else {
            let problem = unknown("key", &name, keys_and_sections());
            mistakes.push(Mistake::new(name, origin, problem));
        }
    }
}

fn raw(value: &DeValue<'_>) -> Raw {
    match value {
        DeValue::String(text) => Raw::Text(text.to_string()),
        DeValue::Boolean(value) => Raw::Boolean(*value),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(|_| Raw::Other("a number that is too large".to_owned()), Raw::Integer),
        DeValue::Array(items) => items
            .iter()
            .map(|item| item.get_ref().as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .map_or_else(|| Raw::Other("a list of something else than text".to_owned()), Raw::List),
        other => Raw::Other(format!("a {}", other.type_str())),
    }
}

/// The values of the environment. An empty variable counts as not set.
pub fn environment(variables: &[(OsString, OsString)], mistakes: &mut Vec<Mistake>) -> Layer {
    let mut layer = Layer::new();
    for (variable, value) in variables {
        let variable = variable.to_string_lossy();
        if !variable.starts_with(PREFIX) || OTHERS.contains(&&*variable) || value.is_empty() {
            continue;
        }
        let origin = Origin::Variable(variable.to_string());
        match (names().find(|name| name.variable() == variable), value.to_str()) {
            (Some(name), Some(text)) => {
                layer.insert(name.dotted(), Given { raw: Raw::Text(text.to_owned()), origin });
            }
            (Some(name), None) => mistakes.push(Mistake::new(name.dotted(), origin, "is not UTF-8")),
            (None, _) if is_service_link(&variable) => {}
            (None, _) => {
                let problem = unknown("variable", &variable, names().map(Name::variable));
                mistakes.push(Mistake::new(variable, origin, problem));
            }
        }
    }
    layer
}

/// Kubernetes gives every container variables for the services of its namespace; those of one that is named like the
/// relay (`outbox-relay`, `outbox-relay-metrics`) share the prefix and are not meant for it.
fn is_service_link(variable: &str) -> bool {
    let port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty();
    let tail = |text: &str| {
        let mut parts = text.splitn(3, '_');
        let number = parts.next().is_some_and(port);
        let protocol = parts.next().is_some_and(|protocol| matches!(protocol, "TCP" | "UDP" | "SCTP"));
        number && protocol && parts.next().is_none_or(|last| matches!(last, "PROTO" | "PORT" | "ADDR"))
    };
    // With the `_` of the prefix before it, so that a service's name may be empty or end in one.
    let rest = variable.get(PREFIX.len() - 1..).unwrap_or_default();
    !rest.contains("__")
        && (rest.ends_with("_SERVICE_HOST")
            || rest.ends_with("_SERVICE_PORT")
            || rest.contains("_SERVICE_PORT_")
            || rest.ends_with("_PORT")
            || rest.match_indices("_PORT_").any(|(at, found)| rest.get(at + found.len()..).is_some_and(tail)))
}

/// The values of the command line.
pub fn flags(flags: &[(Name, String)]) -> Layer {
    flags
        .iter()
        .map(|(name, text)| {
            let origin = Origin::Flag(format!("--{}", name.flag()));
            (name.dotted(), Given { raw: Raw::Text(text.clone()), origin })
        })
        .collect()
}

/// `DATABASE_URL` and `NATS_URL`, which serve when nothing else names the servers.
pub fn fallback(variables: &[(OsString, OsString)]) -> Layer {
    [("DATABASE_URL", "postgres.url"), ("NATS_URL", "nats.url")]
        .into_iter()
        .filter_map(|(variable, key)| {
            let (_, value) = variables.iter().find(|(name, value)| name == variable && !value.is_empty())?;
            let raw = value
                .to_str()
                .map_or_else(|| Raw::Other("bytes that are not UTF-8".to_owned()), |text| Raw::Text(text.to_owned()));
            Some((key.to_owned(), Given { raw, origin: Origin::Variable(variable.to_owned()) }))
        })
        .collect()
}

/// Says that there is no such key or variable, and which of the known may be meant: the nearest in spelling, or one of
/// the same name in another section.
fn unknown(what: &str, given: &str, known: impl Iterator<Item = String>) -> String {
    // Sections, words and case apart, so that `OUTBOX_RELAY_NATS_URL` is near `OUTBOX_RELAY_NATS__URL`.
    let plain = |text: &str| text.to_ascii_lowercase().replace("__", "_").replace('.', "_");
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    let known: Vec<String> = known.collect();
    let near = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(&plain(given), &plain(known)), known))
        .min()
        .filter(|(distance, _)| *distance <= 3 && *distance * 2 <= last(given).len());
    let elsewhere = || known.iter().find(|known| last(known) == last(given));
    match near.map(|(_, known)| known).or_else(elsewhere) {
        Some(known) => format!("unknown {what}; did you mean {known}?"),
        None => format!("unknown {what}; `outbox-relay config show` lists all keys"),
    }
}

/// All keys and the sections that they are in.
fn keys_and_sections() -> impl Iterator<Item = String> {
    let sections = KEYS.iter().filter_map(|key| key.name.rsplit_once('.').map(|(section, _)| section.to_owned()));
    names().map(Name::dotted).chain(sections)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_suggested() {
        let key = |given| unknown("key", given, keys_and_sections());
        assert!(key("postgres.ulr").contains("postgres.url"));
        assert!(key("delivery.max_inflight").contains("delivery.max_in_flight?"));
        assert!(key("nats.tokenfile").contains("nats.token_file"));
        assert!(key("nats.subjects").contains("nats.create.subjects"));
        assert!(key("nat").contains("did you mean nats?"));
        assert!(key("subject").contains(".subject?"));
        assert!(key("nats.colour").contains("config show"));
        let variable = |given| unknown("variable", given, names().map(Name::variable));
        assert!(variable("OUTBOX_RELAY_NATS_URL").contains("OUTBOX_RELAY_NATS__URL"));
        assert!(variable("OUTBOX_RELAY_LOG__LEVLE").contains("OUTBOX_RELAY_LOG__LEVEL"));
    }

    #[test]
    fn services_of_kubernetes_are_no_settings() {
        for link in [
            "OUTBOX_RELAY_SERVICE_HOST",
            "OUTBOX_RELAY_SERVICE_PORT_HTTP",
            "OUTBOX_RELAY_PORT",
            "OUTBOX_RELAY_PORT_9464_TCP_ADDR",
            "OUTBOX_RELAY_METRICS_PORT_9464_TCP",
        ] {
            assert!(is_service_link(link), "{link}");
        }
        for other in ["OUTBOX_RELAY_POSTGRES_URL", "OUTBOX_RELAY_ADMIN__PORT", "OUTBOX_RELAY_PORT_X", "OUTBOX_RELAY_"] {
            assert!(!is_service_link(other), "{other}");
        }
    }
}
