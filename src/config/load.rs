//! Lays the sources over each other: flags over environment over file over defaults.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::Settings;
use super::check::{CHECKS, Check};
use super::keys::{KEYS, Key, Name};
use super::layers::{self, Given, Layer};
use super::mistake::{Mistake, Mistakes, Origin};
use super::value::Raw;
use super::value::Setting;

/// The variable that names the settings file when no flag does.
pub(super) const FILE_VARIABLE: &str = "OUTBOX_RELAY_CONFIG";

/// Where settings come from.
#[derive(Clone, Default)]
pub struct Sources {
    /// The settings file (`--config`); without it, the one that `OUTBOX_RELAY_CONFIG` names.
    pub file: Option<PathBuf>,
    /// The whole environment. Of it, `OUTBOX_RELAY_*`, `DATABASE_URL` and `NATS_URL` are looked at.
    pub environment: Vec<(OsString, OsString)>,
    /// The flags given, with their values.
    pub flags: Vec<(Name, String)>,
}

/// The settings, and where each came from.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub settings: Settings,
    pub(super) origins: BTreeMap<&'static str, Origin>,
    file: Option<PathBuf>,
}

impl Loaded {
    /// Where the value of a key came from.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).cloned().unwrap_or(Origin::Default)
    }

    /// Where the values come from that are not the defaults.
    pub fn origins(&self) -> impl Iterator<Item = &Origin> {
        self.origins.values()
    }

    /// The settings file that was read, if one was named.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }
}

/// Reads all sources, checks all values, and reports every mistake at once. `checks` are those that belong to other
/// modules; they run after this module's own.
pub fn load(sources: &Sources, checks: &[Check]) -> Result<Loaded, Mistakes> {
    let mut mistakes = Vec::new();
    let file = settings_file(sources);
    let mut layers = vec![
        layers::flags(&sources.flags),
        layers::environment(&sources.environment, &mut mistakes),
        file.as_ref().map_or_else(Layer::new, |(path, origin)| layers::file(path, origin, &mut mistakes)),
        layers::fallback(&sources.environment),
    ];
    let mut loaded =
        Loaded { settings: Settings::default(), origins: BTreeMap::new(), file: file.map(|(path, _)| path) };
    let mut unread = BTreeSet::new();
    for key in KEYS {
        let Some(found) = take(&mut layers, key) else { continue };
        let (origin, result) = match found {
            Ok(Given { raw, origin }) => {
                let result = (key.set)(&mut loaded.settings, &raw).map_err(|problem| (key.name.to_owned(), problem));
                (origin, result)
            }
            Err(mistake) => (mistake.origin, Err((mistake.key, mistake.problem))),
        };
        if let Err((name, problem)) = result {
            mistakes.push(Mistake::new(name, origin.clone(), problem));
            unread.insert(key.name);
        }
        loaded.origins.insert(key.name, origin);
    }
    for check in CHECKS.iter().chain(checks) {
        if check.keys.iter().any(|key| unread.contains(key)) {
            continue;
        }
        if let Err(problem) = (check.test)(&loaded.settings) {
            let set = check.keys.iter().find(|key| loaded.origins.contains_key(**key)).or(check.keys.first());
            let key = set.copied().unwrap_or_default();
            mistakes.push(Mistake::new(key, loaded.origin(key), problem));
        }
    }
    if mistakes.is_empty() { Ok(loaded) } else { Err(Mistakes(mistakes)) }
}

/// The file to read, and what named it.
fn settings_file(sources: &Sources) -> Option<(PathBuf, Origin)> {
    if let Some(path) = &sources.file {
        return Some((path.clone(), Origin::Flag("--config".to_owned())));
    }
    let (_, path) = sources.environment.iter().find(|(name, value)| name == FILE_VARIABLE && !value.is_empty())?;
    Some((PathBuf::from(path), Origin::Variable(FILE_VARIABLE.to_owned())))
}

/// The value of a key from the highest layer that has it, be it under its own name or, for a secret, in a file of its
/// own.
fn take(layers: &mut [Layer], key: &'static Key) -> Option<Result<Given, Mistake>> {
    let file_name = Name { key, file: true }.dotted();
    layers.iter_mut().find_map(|layer| {
        let (value, file) = (layer.remove(key.name), key.secret.then(|| layer.remove(&file_name)).flatten());
        match (value, file) {
            (None, None) => None,
            (Some(value), None) => Some(Ok(value)),
            (None, Some(file)) => Some(secret_from(&file_name, file)),
            (Some(_), Some(file)) => {
                let problem = format!("{} is set too; keep one of them", key.name);
                Some(Err(Mistake::new(&file_name, file.origin, problem)))
            }
        }
    })
}

/// Reads a secret from its file. One line end after it is not part of it; white space else may be.
fn secret_from(name: &str, file: Given) -> Result<Given, Mistake> {
    let Given { raw, origin } = file;
    let read = PathBuf::read(&raw).and_then(|path| {
        std::fs::read_to_string(&path).map_err(|error| format!("cannot read {}: {error}", path.display()))
    });
    let text = read.map_err(|problem| Mistake::new(name, origin.clone(), problem))?;
    let secret = text.strip_suffix('\n').map_or(&*text, |text| text.strip_suffix('\r').unwrap_or(text));
    if secret.is_empty() {
        return Err(Mistake::new(name, origin, "the file is empty; it must hold the secret"));
    }
    Ok(Given { raw: Raw::Text(secret.to_owned()), origin })
}

#[cfg(test)]
mod tests;
