//! `outbox-relay config`

use std::io::{self, Write};

use super::output::{self, Format};
use crate::config::{Loaded, entries, toml};

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
            Self::Check => writeln!(out, "the settings are usable"),
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
