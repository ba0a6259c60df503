//! `outbox-relay compensations`

mod change;
mod look;

use super::{Failure, log_warnings};
use crate::config::Loaded;

#[derive(clap::Subcommand)]
pub enum Compensations {
    /// List compensations, the newest first, without their payloads
    List(look::List),
    /// Show all that is kept of a compensation
    Show(look::Show),
    /// Have the service asked again now; what was given to a person gets its attempts again
    Retry(change::Retry),
    /// Somebody has done it: the compensation is resolved
    Resolve(change::Resolve),
    /// Nobody will do it: the compensation is given up for good
    Abandon(change::Abandon),
}

impl Compensations {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let settings = &loaded.settings;
        match self {
            Self::List(command) => command.run(settings),
            Self::Show(command) => command.run(settings),
            Self::Retry(command) => command.run(settings),
            Self::Resolve(command) => command.run(settings),
            Self::Abandon(command) => command.run(settings),
        }
    }
}
