//! Replication slots, as the relay looks at them, takes them and lets them go.

pub mod copies;
pub mod detail;

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::names::identifier;
use crate::config::Source;
use crate::flow::lsn::Lsn;

/// A logical slot, as `pg_replication_slots` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotInfo {
    pub plugin: String,
    /// Whether the slot belongs to the database that the relay is connected to.
    pub here: bool,
    /// The backend that streams from it.
    pub active_pid: Option<i32>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: String,
    pub confirmed: Lsn,
    /// Bytes of write-ahead log between the confirmed position and the end.
    pub lag_bytes: i64,
    /// Bytes of write-ahead log that the slot keeps.
    pub retained_bytes: i64,
    /// Bytes that may still be written before the slot is in danger; `None` when unlimited.
    pub safe_bytes: Option<i64>,
    /// The server's `max_slot_wal_keep_size` in bytes; `None` when unlimited.
    pub keep_bytes: Option<i64>,
}

impl SlotInfo {
    /// Whether the backend that has the slot still makes it: until then it has no position.
    pub fn is_being_made(&self) -> bool {
        self.active_pid.is_some() && self.plugin == "pgoutput" && self.confirmed == Lsn::ZERO
    }

    /// Whether the server has given the slot up: its changes are gone.
    pub fn is_lost(&self) -> bool {
        self.wal_status == "lost"
    }
}

/// Looks the slot up.
pub async fn slot_info(client: &Client, slot: &str) -> Result<Option<SlotInfo>, tokio_postgres::Error> {
    let statement = "SELECT coalesce(plugin, ''), coalesce(database = current_database(), false), active_pid,
           coalesce(wal_status, 'lost'), coalesce(confirmed_flush_lsn, '0/0')::text,
           coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn), 0)::int8,
           coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::int8, safe_wal_size,
           nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1)
         FROM pg_replication_slots WHERE slot_name = $1";
    let Some(row) = client.query_typed(statement, &[(&slot, Type::TEXT)]).await?.into_iter().next() else {
        return Ok(None);
    };
    Ok(Some(SlotInfo {
        plugin: row.try_get(0)?,
        here: row.try_get(1)?,
        active_pid: row.try_get(2)?,
        wal_status: row.try_get(3)?,
        confirmed: row.try_get::<_, &str>(4)?.parse().unwrap_or(Lsn::ZERO),
        lag_bytes: row.try_get(5)?,
        retained_bytes: row.try_get(6)?,
        safe_bytes: row.try_get(7)?,
        keep_bytes: row.try_get(8)?,
    }))
}

/// Drops the slot. A slot that is gone already is no error.
pub async fn drop_slot(client: &Client, slot: &str) -> Result<(), tokio_postgres::Error> {
    match client.execute_typed("SELECT pg_drop_replication_slot($1)", &[(&slot, Type::NAME)]).await {
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_OBJECT) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// Confirms the log up to `position` without showing it to anyone, so that it does not matter whether it can be read
/// through the publication. Takes as long as the server needs to walk through the log, and where the slot waits for
/// standbys (`synchronized_standby_slots`), until they have it.
pub async fn advance(client: &Client, slot: &str, position: Lsn) -> Result<(), tokio_postgres::Error> {
    // Where the server cannot notice our end, it keeps the slot until it is done.
    let _ = client.batch_execute(CHECK_CLIENT).await;
    let statement = "SELECT pg_replication_slot_advance($1, $2::text::pg_lsn)";
    let position = position.to_string();
    // On its way to a position the server learns only one place from which decoding could begin, and keeps the log from
    // there: mostly it lies just behind where the slot stood. On the second way it learns the last one.
    for _ in 0..2 {
        client.query_typed(statement, &[(&slot, Type::NAME), (&position, Type::TEXT)]).await?;
    }
    Ok(())
}

/// Lets the server notice within seconds when the client of the next command has gone, where its platform can (it
/// refuses otherwise). The making of a slot does not look by itself while it waits for old transactions, which may be
/// for days. It does not start the timer either: only an SQL statement under the setting does, and each look starts the
/// next one.
pub const CHECK_CLIENT: &str = "SET client_connection_check_interval = '2s'; SELECT 1";

/// The command that makes the slot, on a replication connection, and exports the snapshot that is its seam.
pub fn create_command(source: &Source, server_version: u32) -> String {
    let failover = if source.failover && server_version >= 170_000 { ", FAILOVER" } else { "" };
    format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput (SNAPSHOT 'export'{failover})", identifier(&source.slot))
}

/// The command that holds the slot's name for as long as the replication connection lives: while rows are drained
/// before the slot itself is made, no other relay begins, and pollers rest.
pub fn reserve_command(source: &Source) -> String {
    format!("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", identifier(&source.slot))
}

/// The command that gives the name free again.
pub fn release_command(source: &Source) -> String {
    format!("DROP_REPLICATION_SLOT {}", identifier(&source.slot))
}

/// Ends a replication connection that waits.
pub async fn terminate(client: &Client, pid: i32) -> Result<(), tokio_postgres::Error> {
    client.execute_typed("SELECT pg_terminate_backend($1)", &[(&pid, Type::INT4)]).await.map(|_| ())
}

/// The end of the write-ahead log.
pub async fn current_wal(client: &Client) -> Result<Lsn, tokio_postgres::Error> {
    let row = client.query_typed("SELECT pg_current_wal_insert_lsn()::text", &[]).await?;
    let text = row.first().map(|row| row.try_get::<_, String>(0)).transpose()?;
    Ok(text.and_then(|text| text.parse().ok()).unwrap_or(Lsn::ZERO))
}
