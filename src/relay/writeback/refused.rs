//! Rows whose outcomes PostgreSQL refuses again and again, as when a trigger of the table raises an error.

use std::collections::HashSet;
use std::time::Instant;

use tracing::warn;

use crate::flow::event::Report;
use crate::pause::Repeats;
use crate::postgres::describe;
use crate::telemetry::health::{Condition, Health};

/// Tries of one row after which readiness tells of it: about five seconds.
const TOLD: u32 = 10;

/// The slot waits for these rows, however many others go on.
#[derive(Debug, Default)]
pub struct Refused {
    tokens: HashSet<u64>,
    repeats: Repeats,
}

impl Refused {
    /// The outcome was refused, after so many tries before.
    pub(super) fn add(&mut self, tries: u32, report: &Report, error: &tokio_postgres::Error, health: &Health) {
        let reason = describe(error);
        if self.repeats.is_news(&reason, Instant::now()) {
            warn!(error = reason, id = report.id, "the outcome of a row cannot be written; it is tried again");
        }
        if tries >= TOLD {
            self.tokens.insert(report.token);
            // Not the server's words, which may hold values of the row.
            let code = error.code().map_or("unknown", |state| state.code());
            let reason = format!(
                "PostgreSQL refuses the outcomes of some rows (SQLSTATE {code}), and the slot keeps the log from there: \
                 see the relay's log"
            );
            health.raise(Condition::Refused, reason);
        }
    }

    /// The outcome is written.
    pub(super) fn settled(&mut self, token: u64, health: &Health) {
        if self.tokens.remove(&token) && self.tokens.is_empty() {
            health.clear(Condition::Refused);
        }
    }

    /// Nothing is written any more.
    pub(super) fn end(&mut self, health: &Health) {
        self.tokens.clear();
        health.clear(Condition::Refused);
    }
}
