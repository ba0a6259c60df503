//! What PostgreSQL refuses to write: the outcomes of rows, as when a trigger of the table raises an error, or everything,
//! as when a privilege was taken back.

use std::collections::HashSet;
use std::time::Instant;

use tracing::warn;

use crate::flow::event::Report;
use crate::pause::Repeats;
use crate::postgres::describe;
use crate::telemetry::health::{Condition, Health};

/// Tries of one row after which readiness tells of it: about five seconds.
const TOLD: u32 = 10;
/// The same for statements about no row alone, each over a new connection: some two seconds.
const ALL_TOLD: u32 = 5;

/// The slot waits for these rows, however many others go on.
#[derive(Debug, Default)]
pub struct Refused {
    tokens: HashSet<u64>,
    /// So many statements in a row were refused that are about no row alone.
    all: u32,
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
            raise("the outcomes of some rows", error, health);
        }
    }

    /// A statement was refused that is about no row alone.
    pub(super) fn all(&mut self, error: &tokio_postgres::Error, health: &Health) {
        let reason = describe(error);
        if self.repeats.is_news(&reason, Instant::now()) {
            warn!(error = reason, "PostgreSQL refuses what write-back asks for; it is tried again");
        }
        self.all = self.all.saturating_add(1);
        // One may be a chance; and of rows is told already.
        if self.all >= ALL_TOLD && self.tokens.is_empty() {
            raise("what write-back asks for", error, health);
        }
    }

    /// A statement was carried out.
    pub(super) fn over(&mut self, health: &Health) {
        if std::mem::take(&mut self.all) > 0 && self.tokens.is_empty() {
            health.clear(Condition::Refused);
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
        (self.all, self.tokens) = (0, HashSet::new());
        health.clear(Condition::Refused);
    }
}

/// Not with the server's words, which may hold values of a row.
fn raise(what: &str, error: &tokio_postgres::Error, health: &Health) {
    let code = error.code().map_or("unknown", |state| state.code());
    let reason = format!(
        "PostgreSQL refuses {what} (SQLSTATE {code}), and the slot keeps the log from there: see the relay's log"
    );
    health.raise(Condition::Refused, reason);
}
