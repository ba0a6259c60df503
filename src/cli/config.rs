//! `outbox-relay config`

use std::collections::BTreeSet;
use std::io::{self, Write};

use super::output::{self, Format};
use crate::config::{Loaded, Origin, entries, toml};

#[derive(clap::Subcommand)]
pub enum Config {
    /// Check the settings, and report every mistake
    #[command(after_help = "Example:\n  outbox-relay config check --config relay.toml")]
    Check,
    /// Print the settings in effect, and where each comes from; secrets are hidden
    #[command(after_help = "Example:\n  outbox-relay config show --output json")]
    Show {
        #[arg(long, value_enum, default_value_t)]
        output: Format,
    },
}

impl Config {
    pub fn run(self, loaded: &Loaded) -> io::Result<()> {
        let mut out = io::stdout().lock();
        match self {
            Self::Check => {
                say_sources(&mut io::stderr(), loaded)?;
                writeln!(out, "the settings are usable")
            }
            Self::Show { output: Format::Table } => out.write_all(toml(loaded).as_bytes()),
            Self::Show { output: Format::Json } => {
                let list: Vec<_> = entries(loaded)
                    .into_iter()
                    .map(|entry| {
                        serde_json::json!({
                            "key": entry.key,
                            "value": entry.value.json(),
                            "origin": entry.origin.to_string(),
                        })
                    })
                    .collect();
                output::rows_json(&mut out, &list)
            }
        }
    }
}

/// Says what was read: of a check, that tells whether the right thing was checked.
fn say_sources(out: &mut impl Write, loaded: &Loaded) -> io::Result<()> {
    match loaded.file() {
        Some(path) => writeln!(out, "settings file: {}", path.display())?,
        None => writeln!(out, "settings file: none is named by --config or OUTBOX_RELAY_CONFIG")?,
    }
    let (mut variables, mut flags) = (BTreeSet::new(), BTreeSet::new());
    for origin in loaded.origins() {
        match origin {
            Origin::Variable(name) => variables.insert(&**name),
            Origin::Flag(name) => flags.insert(&**name),
            Origin::Default | Origin::File(..) => false,
        };
    }
    for (what, names) in [("variables", variables), ("flags", flags)] {
        if !names.is_empty() {
            writeln!(out, "{what}: {}", names.into_iter().collect::<Vec<_>>().join(", "))?;
        }
    }
    Ok(())
}
