//! `outbox-relay dead-letters`

mod list;
mod replay;
mod resolve;
mod show;

use super::{Failure, log_warnings};
use crate::config::Loaded;

#[derive(clap::Subcommand)]
pub enum DeadLetters {
    /// List dead letters, the newest first, without their payloads
    List(list::List),
    /// Show all that is kept of a dead letter
    Show(show::Show),
    /// Put events back into the outbox, in the order of their aggregates, with all attempts before them
    Replay(replay::Replay),
    /// Put dead letters away: somebody has dealt with them
    Resolve(resolve::Resolve),
}

impl DeadLetters {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let settings = &loaded.settings;
        match self {
            Self::List(command) => command.run(settings),
            Self::Show(command) => command.run(settings),
            Self::Replay(command) => command.run(settings),
            Self::Resolve(command) => command.run(settings),
        }
    }
}
