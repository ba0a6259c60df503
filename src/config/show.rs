//! The settings in effect, with where each came from and without secrets.

use std::fmt::Write;

use super::keys::KEYS;
use super::load::Loaded;
use super::mistake::Origin;
use super::value::Shown;

/// One key with its value.
pub struct Entry {
    pub key: &'static str,
    pub value: Shown,
    pub origin: Origin,
}

/// All keys, in the order of the file.
pub fn entries(loaded: &Loaded) -> Vec<Entry> {
    KEYS.iter()
        .map(|key| Entry { key: key.name, value: (key.get)(&loaded.settings), origin: loaded.origin(key.name) })
        .collect()
}

/// The settings as a file, each line with where its value came from. Keys without a value are comments.
pub fn toml(loaded: &Loaded) -> String {
    let mut text = String::new();
    let mut open = "";
    for Entry { key, value, origin } in entries(loaded) {
        let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
        if section != open {
            let gap = if open.is_empty() { "" } else { "\n" };
            text.extend([gap, "[", section, "]\n"]);
            open = section;
        }
        let line = match value.toml() {
            Some(value) => format!("{name} = {value}"),
            None => format!("# {name} = ..."),
        };
        let origin = if value == Shown::Unset { "not set".to_owned() } else { origin.to_string() };
        let _ = writeln!(text, "{line:<50}  # {origin}"); // A string takes all.
    }
    text
}
