//! The servers that an operator's command looks at.

use super::{Failure, block_on};
use crate::config::Settings;
use crate::nats::connect::{self as nats, Connection};
use crate::postgres::connect::{self as postgres, Session, SqlConnection};
use crate::postgres::outbox::desk::Desk;
use crate::relay;

/// Connects to PostgreSQL where the tables are.
pub async fn postgres(settings: &Settings, command: &str) -> Result<SqlConnection, Failure> {
    let target = relay::postgres_target(settings)?;
    Ok(postgres::sql(&target, &Session::new(format!("outbox-relay {command}"))).await?)
}

/// Does what a command does with rows of the tables, on a connection of its own.
pub fn at_desk<T>(
    settings: &Settings,
    command: &str,
    work: impl AsyncFnOnce(Desk<'_>) -> Result<T, Failure>,
) -> Result<T, Failure> {
    block_on(async {
        let target = relay::postgres_target(settings)?;
        let session = Session::new(format!("outbox-relay {command}"));
        let session = Desk::SESSION.into_iter().fold(session, |session, (name, value)| session.with(name, value));
        let connection = postgres::sql(&target, &session).await?;
        work(Desk::new(&connection.client, &settings.source.table)).await
    })
}

/// Connects to NATS; no server in reach is an error.
pub async fn nats(settings: &Settings) -> Result<Connection, Failure> {
    let (connection, _) = nats::connect(&settings.nats, settings.delivery.max_in_flight).await?;
    Ok(connection)
}
