//! Why there is no session, and telling of it.

use crate::postgres::connect::ConnectError;
use crate::postgres::migrate::MigrateError;
use crate::postgres::wal::WalError;
use crate::postgres::{describe, is_ending};
use crate::telemetry::health::{Condition, Health};

/// Why a session ended, or did not begin.
#[derive(Debug, thiserror::Error)]
pub enum Setback {
    /// Passes: the next session may work.
    #[error("{0}")]
    Transient(String),
    /// Does not pass without an operator.
    #[error("{0}")]
    Fatal(String),
    /// PostgreSQL does not answer, or has ended a connection.
    #[error("{0}")]
    PostgresLost(String),
    /// The slot is not ours any more, or cannot be used.
    #[error("{0}")]
    SlotLost(&'static str),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Replication(#[from] WalError),
    /// Events cannot be delivered, or not be recorded, and the log grows behind the slot.
    #[error("the slot keeps more of the log than source.max_retained_wal while events cannot be delivered or recorded")]
    TooMuchRetained,
    /// What was inserted since may not be in the log.
    #[error("the outbox table or its publication was changed or made anew; both are checked again")]
    SourceChanged,
    #[error("PostgreSQL: {}", describe(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Schema(#[from] MigrateError),
}

impl Setback {
    /// Whether the next session may work.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Transient(_)
            | Self::PostgresLost(_)
            | Self::SlotLost(_)
            | Self::TooMuchRetained
            | Self::SourceChanged => true,
            Self::Connect(error) => error.is_transient(),
            Self::Replication(error) => error.is_transient(),
            Self::Sql(error) | Self::Schema(MigrateError::Database { source: error, .. }) => may_pass(error),
            Self::Fatal(_) | Self::Schema(_) => false,
        }
    }

    /// Whether PostgreSQL just could not be had: the next session may well begin, and take the log as it is.
    pub fn is_away(&self) -> bool {
        match self {
            Self::PostgresLost(_) => true,
            Self::Connect(error) => error.is_transient(),
            Self::Replication(error) => matches!(error, WalError::Io(_) | WalError::Closed | WalError::Silent(_)),
            Self::Sql(error) | Self::Schema(MigrateError::Database { source: error, .. }) => is_ending(error),
            _ => false,
        }
    }

    /// Under what the probes tell of it.
    pub fn condition(&self) -> Condition {
        match self {
            Self::Connect(_)
            | Self::Replication(_)
            | Self::PostgresLost(_)
            | Self::Sql(_)
            | Self::Schema(MigrateError::Database { .. }) => Condition::PostgresDown,
            Self::SlotLost(_) => Condition::Slot,
            Self::SourceChanged => Condition::Source,
            Self::Transient(_) | Self::Fatal(_) | Self::TooMuchRetained | Self::Schema(_) => Condition::Session,
        }
    }
}

/// Whether a statement that the server refused may work later. Class 42: what is named does not exist, or may not be
/// used.
fn may_pass(error: &tokio_postgres::Error) -> bool {
    !error.code().is_some_and(|code| code.code().starts_with("42"))
}

/// What only [`say_why`] says, and [`recovered`] takes back. The others end with what they are about.
const OF_SESSIONS: [Condition; 2] = [Condition::PostgresDown, Condition::Session];

/// Says why there is no session. What an earlier setback said of it holds no more.
pub fn say_why(health: &Health, setback: &Setback) {
    let condition = setback.condition();
    for over in OF_SESSIONS.into_iter().filter(|over| *over != condition) {
        health.clear(over);
    }
    health.raise(condition, setback.to_string());
}

/// Takes back what [`say_why`] said: there is a session, or another relay has one.
pub fn recovered(health: &Health) {
    for over in OF_SESSIONS {
        health.clear(over);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_is_away_is_told_apart_from_one_that_refuses() {
        let changes = WalError::Changes(crate::postgres::changes::ChangeError::UnknownRelation(7));
        let lost = || Setback::PostgresLost("PostgreSQL did not answer".to_owned());
        assert!(lost().is_away() && Setback::Replication(WalError::Closed).is_away());
        for refused in [Setback::Replication(changes), Setback::Fatal("no grant".to_owned()), Setback::TooMuchRetained]
        {
            assert!(!refused.is_away(), "{refused}");
        }
    }

    #[test]
    fn a_setback_is_told_as_what_it_is_and_until_the_next_one() {
        let health = Health::default();
        let raised = || {
            let all = [Condition::PostgresDown, Condition::Session, Condition::Slot, Condition::Source];
            all.into_iter().filter(|condition| health.is_raised(*condition)).collect::<Vec<_>>()
        };
        say_why(&health, &Setback::PostgresLost("PostgreSQL did not answer".to_owned()));
        assert_eq!(raised(), [Condition::PostgresDown]);
        say_why(&health, &Setback::Transient("the stream was made anew".to_owned()));
        assert_eq!(raised(), [Condition::Session]);
        say_why(&health, &Setback::Replication(WalError::Closed));
        assert_eq!(raised(), [Condition::PostgresDown]);
        say_why(&health, &Setback::SourceChanged);
        assert_eq!(raised(), [Condition::Source]);
        say_why(&health, &Setback::Fatal("the role lacks privileges".to_owned()));
        assert_eq!(raised(), [Condition::Session, Condition::Source]);
        recovered(&health);
        assert_eq!(raised(), [Condition::Source]);
    }
}
