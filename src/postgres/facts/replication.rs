//! A replication connection, made as the relay makes its own: the only way to know that it will be admitted.

use crate::postgres::checks;
use crate::postgres::connect::{self, ConnectError, Session, Target};
use crate::postgres::wal::{WalConnection, WalError};

/// Bytes of an answer; they are short.
const CAP: usize = 64 * 1024;

/// Connects for replication, asks which server it is ([`checks::ServerFacts::identity`]), and ends the connection.
///
/// # Errors
/// Why the server does not admit it. The inner error is one of a connection that was made.
pub async fn replication(target: &Target) -> Result<Result<String, WalError>, ConnectError> {
    let connection = connect::replication(target, &Session::new("outbox-relay doctor")).await?;
    let mut wal = WalConnection::new(connection, CAP);
    let answer = wal.query(checks::IDENTITY).await;
    Ok(answer.map(|rows| rows.into_iter().flatten().flatten().next().unwrap_or_default()))
}
