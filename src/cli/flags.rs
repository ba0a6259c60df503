//! Where the settings come from: `--config`, and a flag for every key, made from the table of keys.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, value_parser};

use crate::config::{Name, Sources, names};

const FILE: &str = "settings-file";

/// The flags that name settings, on every command.
#[derive(Default)]
pub struct SourceFlags {
    file: Option<PathBuf>,
    flags: Vec<(Name, String)>,
}

impl SourceFlags {
    pub fn with_environment(self, environment: Vec<(OsString, OsString)>) -> Sources {
        Sources { file: self.file, environment, flags: self.flags }
    }
}

impl Args for SourceFlags {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new(FILE)
            .long("config")
            .short('c')
            .value_name("FILE")
            .value_parser(value_parser!(PathBuf))
            .global(true)
            .help("The settings file (TOML) [variable: OUTBOX_RELAY_CONFIG]");
        names().fold(command.arg(file), |command, name| {
            command.arg(
                Arg::new(name.dotted())
                    .long(name.flag())
                    .value_name(if name.file { "FILE" } else { name.key.kind })
                    .help(help(name))
                    .help_heading("Settings")
                    .global(true)
                    .hide_short_help(true),
            )
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn help(name: Name) -> String {
    let help = name.key.help;
    match (name.file, name.key.default) {
        (true, _) => format!("{help}, read from a file"),
        (false, Some(default)) => format!("{help} [default: {default}]"),
        (false, None) if name.key.secret => format!("{help}; other users of the machine see it here"),
        (false, None) => help.to_owned(),
    }
}

impl FromArgMatches for SourceFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.file = matches.get_one(FILE).cloned();
        self.flags =
            names().filter_map(|name| Some((name, matches.get_one::<String>(&name.dotted())?.clone()))).collect();
        Ok(())
    }
}
