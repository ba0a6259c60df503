//! What `status` asks of the tables: one bounded look at each.

use serde::Serialize;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use super::{LOOK_ROWS, RelayState, StateRow, Tables, Waiting, waiting};
use crate::config::Source;

/// Reasons of dead letters that are told apart, at most.
const REASONS: u32 = 10;

/// The tables of the outbox.
#[derive(Debug)]
pub struct Overview {
    /// Rows of the events table, as the planner estimates them; `None` before its first `ANALYZE`.
    pub estimated_rows: Option<i64>,
    pub waiting: Waiting,
    /// Whether undated rows were looked for among the newest only.
    pub newest_only: bool,
    /// Dead letters that nobody has handled, by `error_code`, the most frequent first.
    pub dead_letters: Vec<Tally>,
    /// By status, counted up to a bound.
    pub compensations: Vec<Tally>,
    /// The relay's row of state; `None`: no relay ran with this slot yet.
    pub state: Option<StateRow>,
}

/// So many of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tally {
    pub name: String,
    pub count: i64,
}

/// Looks at the tables. A table of ten million completed rows is not read through: undated rows that wait are looked
/// for among the newest, since no index shows them; what waits for a time, and dead letters, have an index.
pub async fn overview(client: &Client, source: &Source) -> Result<Overview, Error> {
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
    Ok(Overview {
        estimated_rows,
        waiting: waiting(client, &tables, low).await?,
        newest_only: lowest <= low,
        dead_letters: dead_letters(client, &tables).await?,
        compensations: compensations(client, &tables).await?,
        state: RelayState { client, tables: &tables, slot: &source.slot }.find().await?,
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
