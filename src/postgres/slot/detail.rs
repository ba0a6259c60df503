//! Replication slots as an operator looks at them, makes them and drops them.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use crate::config::Source;
use crate::flow::lsn::Lsn;

/// A replication slot, with whoever streams from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotDetail {
    pub name: String,
    /// `None`: a physical slot.
    pub plugin: Option<String>,
    /// `None`: a physical slot.
    pub database: Option<String>,
    /// Whether it ends with the session that made it.
    pub temporary: bool,
    /// Whether it shows prepared transactions before they are committed.
    pub two_phase: bool,
    /// Whether that is the database of the connection.
    pub here: bool,
    pub active_pid: Option<i32>,
    /// What the process that streams from it calls itself, whose it is, and where it comes from, as far as the role may
    /// see them.
    pub application_name: Option<String>,
    pub user: Option<String>,
    pub client_address: Option<String>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: Option<String>,
    pub restart: Option<Lsn>,
    pub confirmed: Option<Lsn>,
    /// Bytes of write-ahead log between the confirmed position and the end.
    pub lag_bytes: Option<i64>,
    /// Bytes of write-ahead log that the slot keeps; `None`: it keeps none any more.
    pub retained_bytes: Option<i64>,
    /// Bytes that may still be written before the slot is in danger; `None` when unlimited, or when it is lost.
    pub safe_bytes: Option<i64>,
    /// The server's `max_slot_wal_keep_size` in bytes; `None` when unlimited.
    pub keep_bytes: Option<i64>,
    /// Whether standbys keep a copy of the slot (PostgreSQL 17 and later, like the following).
    pub failover: Option<bool>,
    /// Whether this is such a copy.
    pub synced: Option<bool>,
    /// Since when nobody has streamed from it, RFC 3339 in UTC.
    pub inactive_since: Option<String>,
    /// Why the server gave it up.
    pub invalidation_reason: Option<String>,
}

impl SlotDetail {
    /// Whether the server has given the slot up: its changes are gone.
    pub fn is_lost(&self) -> bool {
        self.wal_status.as_deref().is_none_or(|status| status == "lost")
    }

    /// Why the slot cannot be an outbox's, if so.
    pub fn foreign(&self) -> Option<String> {
        let name = &self.name;
        match &self.plugin {
            None => Some(format!("replication slot {name:?} is a physical one")),
            Some(plugin) if plugin != "pgoutput" => {
                Some(format!("replication slot {name:?} is not of pgoutput, but of plugin {plugin:?}"))
            }
            Some(_) if !self.here => Some(format!(
                "replication slot {name:?} belongs to database {:?}",
                self.database.as_deref().unwrap_or_default()
            )),
            Some(_) => None,
        }
    }
}

/// Columns that older servers do not have are read by way of JSON, where they are absent instead of unknown. A standby
/// has no current position, only the one that it has replayed.
const SELECT: &str = "SELECT s.slot_name::text, s.plugin::text, s.database::text,
       coalesce(s.database = current_database(), false), s.active_pid, a.application_name, host(a.client_addr),
       s.wal_status, s.restart_lsn::text, s.confirmed_flush_lsn::text,
       pg_wal_lsn_diff(e.position, s.confirmed_flush_lsn)::int8, pg_wal_lsn_diff(e.position, s.restart_lsn)::int8,
       s.safe_wal_size, (j.slot ->> 'failover')::bool, (j.slot ->> 'synced')::bool,
       to_char((j.slot ->> 'inactive_since')::timestamptz AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),
       j.slot ->> 'invalidation_reason', s.temporary, s.two_phase, a.usename::text,
       nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1)
     FROM pg_replication_slots s
     CROSS JOIN LATERAL (SELECT to_jsonb(s) AS slot) j
     CROSS JOIN (SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END) e (position)
     LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid";

/// The logical slots of the database, and the one named `ours`, whatever it is, in the order of their names.
pub async fn slots(client: &Client, ours: &str) -> Result<Vec<SlotDetail>, Error> {
    let condition = "WHERE s.slot_type = 'logical' AND s.database = current_database() OR s.slot_name = $1";
    let rows = client.query_typed(&format!("{SELECT} {condition} ORDER BY 1"), &[(&ours, Type::TEXT)]).await?;
    rows.iter().map(read).collect()
}

/// Looks one slot up, of whatever kind.
pub async fn slot(client: &Client, name: &str) -> Result<Option<SlotDetail>, Error> {
    let rows = client.query_typed(&format!("{SELECT} WHERE s.slot_name = $1"), &[(&name, Type::TEXT)]).await?;
    rows.first().map(read).transpose()
}

fn read(row: &Row) -> Result<SlotDetail, Error> {
    let lsn = |at: usize| -> Result<Option<Lsn>, Error> {
        Ok(row.try_get::<_, Option<&str>>(at)?.and_then(|text| text.parse().ok()))
    };
    Ok(SlotDetail {
        name: row.try_get(0)?,
        plugin: row.try_get(1)?,
        database: row.try_get(2)?,
        here: row.try_get(3)?,
        active_pid: row.try_get(4)?,
        application_name: row.try_get(5)?,
        client_address: row.try_get(6)?,
        wal_status: row.try_get(7)?,
        restart: lsn(8)?,
        confirmed: lsn(9)?,
        lag_bytes: row.try_get(10)?,
        retained_bytes: row.try_get(11)?,
        safe_bytes: row.try_get(12)?,
        failover: row.try_get(13)?,
        synced: row.try_get(14)?,
        inactive_since: row.try_get(15)?,
        invalidation_reason: row.try_get(16)?,
        temporary: row.try_get(17)?,
        two_phase: row.try_get(18)?,
        user: row.try_get(19)?,
        keep_bytes: row.try_get(20)?,
    })
}

/// Makes the slot as the relay does, but without exporting a snapshot. It waits for the transactions that are open at
/// the time. Returns where the slot begins.
pub async fn create_slot(client: &Client, source: &Source, server_version: u32) -> Result<Option<Lsn>, Error> {
    // A command that is interrupted does not keep the name. Where the server cannot notice that, it still makes the
    // slot.
    let _ = client.batch_execute(super::CHECK_CLIENT).await;
    let failover = if server_version >= 170_000 { ", false, false, $2" } else { "" };
    let statement = format!("SELECT lsn::text FROM pg_create_logical_replication_slot($1, 'pgoutput'{failover})");
    let name: (&(dyn ToSql + Sync), Type) = (&source.slot, Type::NAME);
    let parameters = [name, (&source.failover, Type::BOOL)];
    let used = if failover.is_empty() { parameters.get(..1) } else { parameters.get(..) };
    let rows = client.query_typed(&statement, used.unwrap_or_default()).await?;
    let point = rows.first().map(|row| row.try_get::<_, Option<&str>>(0)).transpose()?.flatten();
    Ok(point.and_then(|text| text.parse().ok()))
}

/// Whether a statement failed because someone uses the slot.
pub fn is_in_use(error: &Error) -> bool {
    error.code() == Some(&SqlState::OBJECT_IN_USE)
}
