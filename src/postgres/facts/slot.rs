//! The relay's slot beyond what the relay itself looks at, and the relay's notes about it.

use std::time::SystemTime;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use crate::flow::lsn::Lsn;
use crate::postgres::outbox::Tables;
use crate::postgres::slot::{SlotInfo, slot_info};

/// The slot.
#[derive(Clone, Debug)]
pub struct Slot {
    pub info: SlotInfo,
    pub temporary: bool,
    /// Whether it shows prepared transactions before they are committed.
    pub two_phase: bool,
    /// `None`: this version knows no such thing.
    pub failover: Option<bool>,
    /// Whether it is a copy of a primary's slot.
    pub synced: bool,
    /// Why the server gave it up, where it tells.
    pub invalidation: Option<String>,
    /// What the session that holds it calls itself, and its user.
    pub holder: Option<(String, String)>,
}

impl Slot {
    /// Looks the slot up.
    pub async fn read(client: &Client, name: &str) -> Result<Option<Self>, Error> {
        let Some(info) = slot_info(client, name).await? else { return Ok(None) };
        // Through JSON, since the older versions lack some of these columns.
        let statement = "SELECT s.temporary, s.two_phase, (j ->> 'failover')::bool, coalesce((j ->> 'synced')::bool, false),
               coalesce(j ->> 'invalidation_reason', ''), coalesce(a.application_name, ''), coalesce(a.usename, '')::text
             FROM pg_replication_slots s CROSS JOIN to_jsonb(s) j LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
             WHERE s.slot_name = $1";
        let Some(row) = client.query_typed(statement, &[(&name, Type::TEXT)]).await?.into_iter().next() else {
            return Ok(None);
        };
        let holder: (String, String) = (row.try_get(5)?, row.try_get(6)?);
        Ok(Some(Self {
            temporary: row.try_get(0)?,
            two_phase: row.try_get(1)?,
            failover: row.try_get(2)?,
            synced: row.try_get(3)?,
            invalidation: Some(row.try_get(4)?).filter(|reason: &String| !reason.is_empty()),
            holder: info.active_pid.map(|_| holder),
            info,
        }))
    }
}

/// The relay's row of state, as it stands: [`crate::postgres::outbox::RelayState::read`] would make it.
#[derive(Clone, Debug)]
pub struct State {
    pub stream: Option<String>,
    pub stream_created: Option<SystemTime>,
    pub stream_seq: u64,
    pub needs_drain: bool,
    pub confirmed: Lsn,
}

impl State {
    /// Reads the row of one slot. `None`: no relay ran with it yet.
    pub async fn read(client: &Client, tables: &Tables, slot: &str) -> Result<Option<Self>, Error> {
        let statement = format!(
            "SELECT stream, stream_created, coalesce(stream_seq, 0), needs_drain, coalesce(confirmed_lsn, '0/0')::text
             FROM {} WHERE slot_name = $1",
            tables.state
        );
        let Some(row) = client.query_typed(&statement, &[(&slot, Type::TEXT)]).await?.into_iter().next() else {
            return Ok(None);
        };
        Ok(Some(Self {
            stream: row.try_get(0)?,
            stream_created: row.try_get(1)?,
            stream_seq: u64::try_from(row.try_get::<_, i64>(2)?).unwrap_or(0),
            needs_drain: row.try_get(3)?,
            confirmed: row.try_get::<_, &str>(4)?.parse().unwrap_or(Lsn::ZERO),
        }))
    }
}
