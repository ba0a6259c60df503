//! Why the schema could not be brought up to date, each with the way out.

use tokio_postgres::error::{DbError, SqlState};

use crate::postgres::describe;

/// Why the schema could not be read or brought up to date.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// PostgreSQL is older than what the migrations need.
    #[error("PostgreSQL {version} is too old: outbox-relay needs version 15 or later; upgrade the server")]
    TooOld { version: String },
    /// The server is a standby.
    #[error(
        "the server is a standby, which cannot be migrated: connect to the primary (target_session_attrs=read-write)"
    )]
    Standby,
    /// `source.table` cannot name an events table.
    #[error("source.table: {0}")]
    Name(String),
    /// There is a relation of that name that cannot be adopted.
    #[error(
        "{relation} is there, but is not an outbox table that can be adopted: {problem}; name another table in source.table, or move this one away"
    )]
    NotAnOutbox { relation: String, problem: String },
    /// Rights are missing.
    #[error("role {role} may not migrate: {}", missing.join("; "))]
    Privilege { role: String, missing: Vec<String> },
    /// A table stayed locked.
    #[error(
        "a table stayed locked by another session for too long, so nothing was changed: end long transactions on it (see pg_locks), or try again in a quiet moment"
    )]
    Locked,
    /// Another row has the same `event_id` (or key).
    #[error("the table holds values twice that must be unique, so nothing was changed: {0}; remove the duplicates")]
    Duplicates(String),
    /// The history of migrations is not what refinery writes.
    #[error(
        "the history of migrations in {history} makes no sense ({problem}): restore it, or drop that table and migrate again"
    )]
    History { history: String, problem: String },
    /// A newer outbox-relay migrated this schema.
    #[error("a newer outbox-relay migrated this schema ({unknown}): use that version or a later one")]
    Newer { unknown: String },
    /// An applied migration differs from ours.
    #[error(
        "migration {migration} was applied with another text than it has for {table}. A schema holds one outbox: if there is another one in this schema, put this one into a schema of its own; if the table or its schema was renamed, drop {history} and migrate again"
    )]
    Diverged { migration: String, table: String, history: String },
    /// Any other refusal of the database.
    #[error("cannot {doing}: {}", describe(source))]
    Database { doing: &'static str, source: tokio_postgres::Error },
    /// Any other failure of the migration library.
    #[error("cannot apply the migrations, so nothing was changed: {message}")]
    Runner { message: String, source: refinery::Error },
}

impl MigrateError {
    pub(super) fn database(doing: &'static str, source: tokio_postgres::Error) -> Self {
        source.as_db_error().and_then(Self::known).unwrap_or(Self::Database { doing, source })
    }

    pub(super) fn from_runner(source: refinery::Error) -> Self {
        let database = match source.kind() {
            refinery::error::Kind::Connection(_, source) => source.downcast_ref::<tokio_postgres::Error>(),
            _ => None,
        };
        let known = database.and_then(tokio_postgres::Error::as_db_error).and_then(Self::known);
        let message = database.map_or_else(|| source.to_string(), describe);
        known.unwrap_or(Self::Runner { message, source })
    }

    fn known(db: &DbError) -> Option<Self> {
        let code = db.code();
        if *code == SqlState::LOCK_NOT_AVAILABLE {
            Some(Self::Locked)
        } else if *code == SqlState::READ_ONLY_SQL_TRANSACTION {
            Some(Self::Standby)
        } else if *code == SqlState::UNIQUE_VIOLATION {
            Some(Self::Duplicates(db.message().to_owned()))
        } else {
            None
        }
    }
}
