//! The command line: one file a command.

mod compensations;
mod completions;
mod config;
mod consent;
mod dead_letters;
mod demo;
mod desk;
mod doctor;
mod events;
mod flags;
mod human;
mod man;
mod migrate;
pub mod output;
mod progress;
mod publication;
mod run;
mod servers;
mod slot;
mod status;
mod stream;
mod verify;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use tokio_postgres::error::SqlState;

use crate::config::{Loaded, Mistakes, Origin};
use crate::fault;
use crate::nats::connect::ConnectFault;
use crate::pace;
use crate::postgres::connect::{ConnectError, ConnectInfoError};
use crate::relay::{self, RunError};
use crate::telemetry;

const SETTINGS_HELP: &str = "\
Every setting can be a line of the settings file, a variable or a flag: `url` in the section [nats] is also \
OUTBOX_RELAY_NATS__URL and --nats-url. Flags win over variables, variables over the file. `--help` lists all flags, \
`outbox-relay config show` the values in effect.

Exit codes: 0 done, 1 failed, 2 usage, 3 a check found something, 4 refused, 78 unusable configuration";

#[derive(Parser)]
#[command(name = "outbox-relay", version, about, after_help = SETTINGS_HELP, max_term_width = 120)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    sources: flags::SourceFlags,
}

#[derive(Subcommand)]
enum Command {
    /// Run the relay
    #[command(after_help = "Example:\n  outbox-relay run --config relay.toml")]
    Run,
    /// Make or update the outbox's tables
    Migrate(migrate::Migrate),
    /// Look at everything that a relay needs, and say what is wrong and how it is mended
    Doctor(doctor::Doctor),
    /// Show at a glance whether it is healthy, how far behind it is, what waits and what is dead
    Status(status::Status),
    /// Relay a shop's orders, in places of its own that are removed at the end, and show them arrive
    #[command(
        after_help = "Example:\n  outbox-relay demo --postgres-url postgres://postgres@localhost/postgres --nats-url nats://localhost"
    )]
    Demo,
    /// Look at the outbox's rows, and have failed ones tried again
    #[command(subcommand)]
    Events(events::Events),
    /// Look at dead letters, put them back into the outbox, or put them away
    #[command(subcommand)]
    DeadLetters(dead_letters::DeadLetters),
    /// Look at compensations, and decide what becomes of them
    #[command(subcommand)]
    Compensations(compensations::Compensations),
    #[command(subcommand)]
    Slot(slot::Slot),
    #[command(subcommand)]
    Publication(publication::Publication),
    #[command(subcommand)]
    Stream(stream::Stream),
    Verify(verify::Verify),
    /// Look at the settings
    #[command(subcommand)]
    Config(config::Config),
    /// Print a script of completions for a shell
    Completions(completions::Completions),
    /// Print the manual page
    Man(man::Man),
}

/// Why a command did not end well.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Settings(#[from] Mistakes),
    #[error("{0}")]
    Run(#[from] RunError),
    #[error("{0}")]
    Demo(demo::DemoError),
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    #[error(transparent)]
    Address(#[from] ConnectInfoError),
    #[error(transparent)]
    Postgres(#[from] ConnectError),
    #[error("PostgreSQL: {}{}", crate::postgres::describe(.0), advice(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Nats(#[from] ConnectFault),
    #[error("NATS: {}", hinted(.0))]
    JetStream(#[from] fault::Failure),
    /// What was named is not there, or not in a state for it.
    #[error("{0}")]
    Unfit(String),
    /// It destroys, and nobody agreed to it.
    #[error("{0}")]
    Refused(String),
    /// A check found something, and has printed it.
    #[error("something was found")]
    Found,
}

/// What to do about a statement that PostgreSQL refused.
fn advice(error: &tokio_postgres::Error) -> &'static str {
    match error.code() {
        Some(&SqlState::UNDEFINED_TABLE | &SqlState::UNDEFINED_COLUMN | &SqlState::UNDEFINED_FUNCTION) => {
            "; run: outbox-relay migrate (or see that source.table and postgres.url name the outbox)"
        }
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
            "; connect as a role that may (deploy/sql/roles.sql has roles for operators and for monitoring)"
        }
        _ => "",
    }
}

fn hinted(failure: &fault::Failure) -> String {
    format!("{failure}; {}", failure.hint())
}

impl From<demo::DemoError> for Failure {
    fn from(error: demo::DemoError) -> Self {
        match error {
            demo::DemoError::Write(error) => Self::Write(error),
            demo::DemoError::Run(error) => Self::Run(error),
            error => Self::Demo(error),
        }
    }
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Settings(_) | Self::Address(_) => 78,
            Self::Run(error) => error.exit_code(),
            Self::Found => 3,
            Self::Refused(_) => 4,
            Self::Demo(_)
            | Self::Write(_)
            | Self::Postgres(_)
            | Self::Sql(_)
            | Self::Nats(_)
            | Self::JetStream(_)
            | Self::Unfit(_) => 1,
        }
    }
}

/// Runs the program with these arguments, the first being its name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print(); // Where nobody reads there is nobody to tell.
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    match dispatch(cli) {
        Ok(()) => ExitCode::SUCCESS,
        // `outbox-relay … | head`: the reader has what it wanted.
        Err(Failure::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(Failure::Found) => ExitCode::from(Failure::Found.exit_code()),
        Err(failure) => {
            let _ = writeln!(io::stderr(), "outbox-relay: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn dispatch(cli: Cli) -> Result<(), Failure> {
    let load = || load(cli.sources);
    match cli.command {
        Command::Run => run::run(load()?),
        Command::Migrate(command) => command.run(load()?),
        Command::Status(command) => command.run(load()?),
        Command::Doctor(command) => command.run(load()?),
        Command::Demo => demo::run(load()?),
        Command::Events(command) => command.run(load()?),
        Command::DeadLetters(command) => command.run(load()?),
        Command::Compensations(command) => command.run(load()?),
        Command::Slot(command) => command.run(load()?),
        Command::Publication(command) => command.run(load()?),
        Command::Stream(command) => command.run(load()?),
        Command::Verify(command) => command.run(load()?),
        Command::Config(command) => Ok(command.run(&load()?)?),
        Command::Completions(command) => Ok(command.run(Cli::command())?),
        Command::Man(command) => command.run(Cli::command()),
    }
}

fn load(sources: flags::SourceFlags) -> Result<Loaded, Mistakes> {
    crate::config::load(&sources.with_environment(std::env::vars_os().collect()), relay::CHECKS)
}

/// Starts the log for a command that has its own things to say: only warnings, unless the operator chose a level.
fn log_warnings(loaded: &mut Loaded) {
    if loaded.origin("log.level") == Origin::Default {
        "warn".clone_into(&mut loaded.settings.log.level);
    }
    telemetry::init(&loaded.settings.log);
}

/// Runs a task on a runtime of one thread: the stages share data without locks, and two threads were measured slower.
fn block_on<T, E>(task: impl Future<Output = Result<T, E>>) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().on_thread_park(pace::rest).build()?;
    Ok(runtime.block_on(task)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_agree_with_each_other() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_of_each_command_ends_in_an_example_of_it() {
        fn look(command: &clap::Command, path: &str) {
            let mut parts = command.get_subcommands().peekable();
            if parts.peek().is_some() {
                return parts.for_each(|part| look(part, &format!("{path} {}", part.get_name())));
            }
            for help in [command.get_after_help(), command.get_after_long_help().or(command.get_after_help())] {
                let help = help.map(ToString::to_string).unwrap_or_default();
                let last = help.lines().last().unwrap_or_default();
                assert!(last.starts_with(&format!("  {path}")), "{path}: {last:?}");
                assert!(help.lines().any(|line| line.starts_with("Example")), "{path}: {help}");
            }
        }
        look(&Cli::command(), "outbox-relay");
    }
}
