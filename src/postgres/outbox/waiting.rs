//! How many rows wait, without reading the whole table: each look is bounded, and follows an index.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use super::Tables;

/// Rows that one look reads, at most.
pub const LOOK_ROWS: i64 = 100_000;

/// Rows that wait, and dead letters that nobody has handled.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Waiting {
    /// On their way, or not sent yet.
    pub pending: i64,
    /// Pending until a time that their producer set.
    pub scheduled: i64,
    /// Claimed by a poller.
    pub claimed: i64,
    /// Until their next retry.
    pub failed: i64,
    /// Behind a failed row of their aggregate.
    pub held: i64,
    pub unhandled: i64,
    /// Since the oldest of them but the dead letters was made, in seconds; `None` when none waits.
    pub oldest_seconds: Option<f64>,
    /// Whether a look ended at its bound: then there may be more than was counted.
    pub cut: bool,
}

/// Looks at what waits: undated rows only above the id `low`, from there on at most [`LOOK_ROWS`], completed ones among
/// them.
pub async fn waiting(client: &Client, tables: &Tables, low: i64) -> Result<Waiting, Error> {
    let Tables { share, dead_letter, .. } = tables;
    let statement = format!(
        "WITH recent AS MATERIALIZED (
           SELECT status, next_retry_at, created_at FROM {share} e WHERE id > $1 ORDER BY id LIMIT {LOOK_ROWS}),
         dated AS MATERIALIZED (
           SELECT status, created_at FROM {share} e WHERE next_retry_at < 'infinity'
           ORDER BY next_retry_at LIMIT {LOOK_ROWS}),
         held AS MATERIALIZED (
           SELECT created_at FROM {share} e WHERE next_retry_at = 'infinity' AND status = 'pending' LIMIT {LOOK_ROWS}),
         unhandled AS MATERIALIZED (SELECT FROM {dead_letter} WHERE handled = false LIMIT {LOOK_ROWS}),
         undated AS (SELECT status, created_at FROM recent
           WHERE status IN ('pending', 'processing', 'failed') AND next_retry_at IS NULL)
         SELECT (SELECT count(*) FROM undated WHERE status = 'pending'),
           (SELECT count(*) FROM dated WHERE status = 'pending'),
           (SELECT count(*) FROM dated WHERE status = 'processing')
             + (SELECT count(*) FROM undated WHERE status = 'processing'),
           (SELECT count(*) FROM dated WHERE status = 'failed')
             + (SELECT count(*) FROM undated WHERE status = 'failed'),
           (SELECT count(*) FROM held), (SELECT count(*) FROM unhandled),
           extract(epoch FROM now() - least((SELECT min(created_at) FROM undated), (SELECT min(created_at) FROM held),
             (SELECT min(created_at) FROM dated WHERE status IN ('failed', 'processing'))))::float8,
           greatest((SELECT count(*) FROM recent), (SELECT count(*) FROM dated), (SELECT count(*) FROM held),
             (SELECT count(*) FROM unhandled)) >= {LOOK_ROWS}"
    );
    let rows = client.query_typed(&statement, &[(&low, Type::INT8)]).await?;
    let Some(row) = rows.first() else { return Ok(Waiting::default()) };
    Ok(Waiting {
        pending: row.try_get(0)?,
        scheduled: row.try_get(1)?,
        claimed: row.try_get(2)?,
        failed: row.try_get(3)?,
        held: row.try_get(4)?,
        unhandled: row.try_get(5)?,
        oldest_seconds: row.try_get(6)?,
        cut: row.try_get(7)?,
    })
}
