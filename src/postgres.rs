//! Everything that speaks to PostgreSQL.

pub mod changes;
pub mod checks;
pub mod connect;
pub mod demo;
pub mod facts;
pub mod frame;
pub mod grants;
pub mod migrate;
pub mod names;
pub mod outbox;
pub mod pgoutput;
pub mod publication;
pub mod remedies;
pub mod slot;
pub mod store;
pub mod waits;
pub mod wal;

/// Whether the server ends, or the connection to it, instead of refusing what it was asked (class 57P).
pub fn is_ending(error: &tokio_postgres::Error) -> bool {
    error.code().is_none_or(|code| code.code().starts_with("57P"))
}

/// A database error with its cause, which the driver's own text leaves out. Never a row's values: `DETAIL` is not
/// shown.
pub fn describe(error: &tokio_postgres::Error) -> String {
    match (error.as_db_error(), std::error::Error::source(error)) {
        (Some(server), _) => format!("{} (SQLSTATE {})", server.message(), server.code().code()),
        (None, Some(cause)) => format!("{error}: {cause}"),
        (None, None) => error.to_string(),
    }
}
