//! What `status` asks the database: one bounded look at the slot and at each table.

use std::time::SystemTime;

use serde::Serialize;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use super::outbox::{LOOK_ROWS, Tables, Waiting, waiting};
use super::slot::{SlotInfo, slot_info};
use crate::config::Source;

/// Reasons of dead letters that are told apart, at most.
const REASONS: u32 = 10;

/// The slot, and who streams from it.
#[derive(Debug)]
pub struct SlotLook {
    pub info: SlotInfo,
    /// `application_name` of the backend that holds it; `None` when nobody does, or when the role may not see it.
    pub holder: Option<String>,
}

/// The tables of the outbox.
#[derive(Debug)]
pub struct TablesLook {
    /// Rows of the events table, as the planner estimates them; `None` before its first `ANALYZE`.
    pub estimated_rows: Option<i64>,
    pub waiting: Waiting,
    /// Whether undated rows were looked for among the newest only.
    pub newest_only: bool,
    /// Dead letters that nobody has handled, by `error_code`, the most frequent first.
    pub dead_letters: Vec<Tally>,
    /// By status, counted up to a bound.
    pub compensations: Vec<Tally>,
    pub state: Option<StateLook>,
}

/// So many of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tally {
    pub name: String,
    pub count: i64,
}

/// The relay's row of state.
#[derive(Debug)]
pub struct StateLook {
    pub stream: Option<String>,
    pub stream_seq: Option<i64>,
    pub needs_drain: bool,
    pub confirmed_lsn: Option<String>,
    pub updated_at: SystemTime,
}

/// Looks at the slot. `None`: there is none.
pub async fn slot(client: &Client, source: &Source) -> Result<Option<SlotLook>, Error> {
    let Some(info) = slot_info(client, &source.slot).await? else { return Ok(None) };
    let statement = "SELECT application_name FROM pg_stat_activity WHERE pid = $1";
    let rows = client.query_typed(statement, &[(&info.active_pid, Type::INT4)]).await?;
    let holder = rows.first().map_or(Ok(None), |row| row.try_get(0))?;
    Ok(Some(SlotLook { info, holder }))
}

/// Looks at the tables. A table of ten million completed rows is not read through: undated rows that wait are looked for
/// among the newest, since no index shows them; what waits for a time, and dead letters, have an index.
pub async fn tables(client: &Client, source: &Source) -> Result<TablesLook, Error> {
    let tables = Tables::of(&source.table);
    let events = &tables.events;
    let statement = format!(
        "SELECT (SELECT sum(reltuples)::int8 FROM pg_class WHERE reltuples >= 0 AND relkind <> 'p'
             AND (oid = $1::regclass OR oid IN (SELECT relid FROM pg_partition_tree($1::regclass)))),
           coalesce((SELECT max(id) FROM {events}), 0) - {LOOK_ROWS}, coalesce((SELECT min(id) FROM {events}), 0)"
    );
    let rows = client.query_typed(&statement, &[(events, Type::TEXT)]).await?;
    let (estimated_rows, low, lowest) = match rows.first() {
        Some(row) => (row.try_get(0)?, row.try_get::<_, i64>(1)?, row.try_get::<_, i64>(2)?),
        None => (None, 0, 0),
    };
    Ok(TablesLook {
        estimated_rows,
        waiting: waiting(client, &tables, low).await?,
        newest_only: lowest <= low,
        dead_letters: dead_letters(client, &tables).await?,
        compensations: compensations(client, &tables).await?,
        state: state(client, &tables, &source.slot).await?,
    })
}

async fn dead_letters(client: &Client, tables: &Tables) -> Result<Vec<Tally>, Error> {
    let statement = format!(
        "SELECT coalesce(error_code, 'none'), count(*) FROM (
           SELECT error_code FROM {} WHERE handled = false ORDER BY dead_letter_at DESC LIMIT {LOOK_ROWS}) AS d
         GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {REASONS}",
        tables.dead_letter
    );
    tallies(client, &statement).await
}

async fn compensations(client: &Client, tables: &Tables) -> Result<Vec<Tally>, Error> {
    let statement = format!(
        "SELECT s, (SELECT count(*) FROM (SELECT FROM {} WHERE status = s LIMIT {LOOK_ROWS}) AS c)
         FROM unnest(ARRAY['pending', 'retrying', 'manual_required', 'resolved', 'abandoned']) AS s",
        tables.compensation
    );
    tallies(client, &statement).await
}

async fn tallies(client: &Client, statement: &str) -> Result<Vec<Tally>, Error> {
    let rows = client.query_typed(statement, &[]).await?;
    rows.iter().map(|row| Ok(Tally { name: row.try_get(0)?, count: row.try_get(1)? })).collect()
}

async fn state(client: &Client, tables: &Tables, slot: &str) -> Result<Option<StateLook>, Error> {
    let statement = format!(
        "SELECT stream, stream_seq, needs_drain, confirmed_lsn::text, updated_at FROM {} WHERE slot_name = $1",
        tables.state
    );
    let rows = client.query_typed(&statement, &[(&slot, Type::TEXT)]).await?;
    let look = |row: &tokio_postgres::Row| {
        Ok(StateLook {
            stream: row.try_get(0)?,
            stream_seq: row.try_get(1)?,
            needs_drain: row.try_get(2)?,
            confirmed_lsn: row.try_get(3)?,
            updated_at: row.try_get(4)?,
        })
    };
    rows.first().map(look).transpose()
}
