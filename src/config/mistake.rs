//! What is wrong with the settings, where it was said, and what would be right.

use std::fmt;
use std::path::PathBuf;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nothing named it.
    Default,
    /// A line of the settings file, counted from 1; `None` when the whole file is meant.
    File(PathBuf, Option<usize>),
    /// An environment variable.
    Variable(String),
    /// A flag of the command line, with its dashes.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path, Some(line)) => write!(f, "{}:{line}", path.display()),
            Self::File(path, None) => write!(f, "{}", path.display()),
            Self::Variable(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

/// One mistake in the settings. Never holds a secret's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// The key as the file spells it, or the name of what was taken for one.
    pub key: String,
    pub origin: Origin,
    /// What is wrong, and what would be right.
    pub problem: String,
}

impl Mistake {
    pub(super) fn new(key: impl Into<String>, origin: Origin, problem: impl Into<String>) -> Self {
        Self { key: key.into(), origin, problem: problem.into() }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)?;
        match &self.origin {
            // The name of what is wrong says it already.
            Origin::Variable(name) | Origin::Flag(name) if *name == self.key => Ok(()),
            origin => write!(f, " ({origin})"),
        }
    }
}

/// Every mistake that was found, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("1 mistake in the settings:")?,
            n => write!(f, "{n} mistakes in the settings:")?,
        }
        self.0.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
    }
}

impl std::error::Error for Mistakes {}
