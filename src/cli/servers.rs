//! The servers that an operator's command looks at.

use super::Failure;
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

/// Connects to PostgreSQL for a command that reads and changes rows of the tables.
pub async fn tables(settings: &Settings, command: &str) -> Result<SqlConnection, Failure> {
    let target = relay::postgres_target(settings)?;
    let session = Session::new(format!("outbox-relay {command}"));
    let session = Desk::SESSION.into_iter().fold(session, |session, (name, value)| session.with(name, value));
    Ok(postgres::sql(&target, &session).await?)
}

/// Connects to NATS; no server in reach is an error.
pub async fn nats(settings: &Settings) -> Result<Connection, Failure> {
    let (connection, _) = nats::connect(&settings.nats, settings.delivery.max_in_flight).await?;
    Ok(connection)
}
