//! The servers that an operator's command looks at.

use super::Failure;
use crate::config::Settings;
use crate::nats::connect::{self as nats, Connection};
use crate::postgres::connect::{self as postgres, Session, SqlConnection};
use crate::relay;

/// Connects to PostgreSQL where the tables are.
pub async fn postgres(settings: &Settings, command: &str) -> Result<SqlConnection, Failure> {
    let target = relay::postgres_target(settings)?;
    Ok(postgres::sql(&target, &Session::new(format!("outbox-relay {command}"))).await?)
}

/// Connects to NATS; no server in reach is an error.
pub async fn nats(settings: &Settings) -> Result<Connection, Failure> {
    let (connection, _) = nats::connect(&settings.nats, settings.delivery.max_in_flight).await?;
    Ok(connection)
}
