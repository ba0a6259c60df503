//! What keeps the server from removing log and dead rows: open transactions and other slots.

use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

/// Most of each kind that are told.
const MOST: i64 = 10;

/// What holds the server back.
#[derive(Clone, Debug, Default)]
pub struct Pins {
    /// Open for longer than was asked, the oldest first.
    pub sessions: Vec<OpenTransaction>,
    /// Sessions whose transactions the role may not see.
    pub unseen: i64,
    /// Prepared for longer than was asked. Their `name` is the transaction's identifier.
    pub prepared: Vec<OpenTransaction>,
    /// Standbys that keep dead rows for their own queries: what each calls itself, and the age of the oldest row's end.
    pub standbys: Vec<(String, i32)>,
    /// Every slot but the relay's.
    pub slots: Vec<OtherSlot>,
}

/// A transaction that is open.
#[derive(Clone, Debug)]
pub struct OpenTransaction {
    /// Zero for a prepared one.
    pid: i32,
    /// What the session calls itself.
    pub name: String,
    pub user: String,
    /// Empty for a session without one.
    pub database: String,
    /// Seconds.
    pub age: f64,
}

impl OpenTransaction {
    /// The server process; `None` for a prepared one.
    pub fn pid(&self) -> Option<i32> {
        (self.pid != 0).then_some(self.pid)
    }
}

/// A slot that is not the relay's.
#[derive(Clone, Debug)]
pub struct OtherSlot {
    pub name: String,
    pub active: bool,
    pub wal_status: String,
    /// Bytes of log that it keeps.
    pub retained: i64,
    /// Of the oldest transaction whose dead rows it keeps.
    pub xid_age: i32,
}

impl Pins {
    /// Looks for transactions that are open for longer than `age`, and for slots beside `slot`. Not on a standby.
    pub async fn read(client: &Client, slot: &str, age: Duration) -> Result<Self, Error> {
        let seconds = age.as_secs_f64();
        let longer: [(&(dyn ToSql + Sync), Type); 2] = [(&seconds, Type::FLOAT8), (&MOST, Type::INT8)];
        // A relay that drains has a reason. Without an xid and a snapshot a transaction holds nothing back.
        let sessions = "SELECT pid, coalesce(application_name, ''), coalesce(usename, '')::text,
               coalesce(datname, '')::text, extract(epoch FROM clock_timestamp() - xact_start)::float8
             FROM pg_stat_activity
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
               AND application_name NOT LIKE 'outbox-relay%'
               AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
               AND clock_timestamp() - xact_start > make_interval(secs => $1)
             ORDER BY xact_start LIMIT $2";
        let prepared = "SELECT 0, gid, owner::text, database::text,
               extract(epoch FROM clock_timestamp() - prepared)::float8
             FROM pg_prepared_xacts WHERE clock_timestamp() - prepared > make_interval(secs => $1)
             ORDER BY prepared LIMIT $2";
        let unseen = "SELECT count(*) FROM pg_stat_activity
             WHERE xact_start IS NULL AND backend_type IS NULL AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)";
        let slots = "SELECT slot_name::text, active, coalesce(wal_status, ''),
               coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::int8,
               coalesce(greatest(age(xmin), age(catalog_xmin)), 0)
             FROM pg_replication_slots WHERE slot_name <> $1 ORDER BY 1";
        let standbys = "SELECT coalesce(application_name, ''), age(backend_xmin) FROM pg_stat_replication
             WHERE backend_xmin IS NOT NULL ORDER BY 2 DESC LIMIT $1";
        let standbys = client.query_typed(standbys, &[(&MOST, Type::INT8)]).await?;
        let slots = client.query_typed(slots, &[(&slot, Type::TEXT)]).await?;
        let unseen = client.query_typed(unseen, &[]).await?;
        Ok(Self {
            sessions: transactions(client, sessions, &longer).await?,
            unseen: unseen.first().map(|row| row.try_get(0)).transpose()?.unwrap_or(0),
            prepared: transactions(client, prepared, &longer).await?,
            standbys: standbys
                .iter()
                .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
                .collect::<Result<_, Error>>()?,
            slots: slots
                .iter()
                .map(|row| {
                    Ok(OtherSlot {
                        name: row.try_get(0)?,
                        active: row.try_get(1)?,
                        wal_status: row.try_get(2)?,
                        retained: row.try_get(3)?,
                        xid_age: row.try_get(4)?,
                    })
                })
                .collect::<Result<_, Error>>()?,
        })
    }
}

async fn transactions(
    client: &Client,
    statement: &str,
    parameters: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<OpenTransaction>, Error> {
    let rows = client.query_typed(statement, parameters).await?;
    rows.iter()
        .map(|row| {
            Ok(OpenTransaction {
                pid: row.try_get(0)?,
                name: row.try_get(1)?,
                user: row.try_get(2)?,
                database: row.try_get(3)?,
                age: row.try_get(4)?,
            })
        })
        .collect()
}
