//! A replication connection, made as the relay makes its own: the only way to know that it will be admitted.

use crate::postgres::checks;
use crate::postgres::connect::{self, ConnectError, Session, Target};
use crate::postgres::wal::{WalConnection, WalError};

/// Bytes of an answer; they are short.
const CAP: usize = 64 * 1024;

/// What a replication connection tells.
#[derive(Clone, Debug)]
pub struct Replication {
    /// As [`checks::ServerFacts::identity`].
    pub identity: String,
}

/// Connects for replication, asks which server it is, and ends the connection.
///
/// # Errors
/// Why the server does not admit it. The inner error is one of a connection that was made.
pub async fn replication(target: &Target) -> Result<Result<Replication, WalError>, ConnectError> {
    let connection = connect::replication(target, &Session::new("outbox-relay doctor")).await?;
    let mut wal = WalConnection::new(connection, CAP);
    let answer = wal.query(checks::IDENTITY).await;
    Ok(answer.map(|rows| Replication { identity: rows.into_iter().flatten().flatten().next().unwrap_or_default() }))
}
