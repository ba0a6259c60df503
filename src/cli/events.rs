//! `outbox-relay events`

mod list;
mod retry;
mod show;
mod words;

use super::{Failure, log_warnings};
use crate::config::Loaded;

#[derive(clap::Subcommand)]
pub enum Events {
    /// List rows of the outbox, the newest first, without their payloads
    List(list::List),
    /// Tell the whole story of a row: its state, its message in the stream, dead letters, compensations
    Show(show::Show),
    /// Have failed rows tried again now
    Retry(retry::Retry),
}

impl Events {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let settings = &loaded.settings;
        match self {
            Self::List(command) => command.run(settings),
            Self::Show(command) => command.run(settings),
            Self::Retry(command) => command.run(settings),
        }
    }
}
