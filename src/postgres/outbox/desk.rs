//! What operators look at in the tables, and change there by hand. The relay may run meanwhile.

mod compensations;
mod dead_letters;
mod events;
mod replay;
mod retry;

pub use compensations::{CompensationFilter, CompensationRow, CompensationStory};
pub use dead_letters::{DeadLetterFilter, DeadLetterRow, DeadLetterStory, LinkedCompensation};
pub use events::{EventFilter, EventRow, EventStory, STATES};
pub use replay::{Candidate, Replay, Replayed};

use serde_json::Value;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use super::Tables;
use super::rows::Raw;
use crate::config::TableName;
use crate::postgres::names::in_schema;

/// A parameter of a statement, with its type.
type Parameter<'a> = (&'a (dyn ToSql + Sync), Type);

/// The tables, as operators see them.
#[derive(Debug)]
pub struct Desk<'a> {
    client: &'a Client,
    tables: Tables,
    /// The function that resolves a compensation.
    resolve: String,
}

/// A part of a listing, the newest rows first.
#[derive(Debug)]
pub struct Page<T> {
    pub rows: Vec<T>,
    pub end: End,
}

/// Where a page of a listing ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing is left.
    All,
    /// The page is full; the next one comes after this id.
    Full(i64),
    /// Looking for more took too long; what lies behind this id was not looked at.
    Patience(i64),
}

impl<'a> Desk<'a> {
    /// Settings of the connection's session. Rows that a policy hides would be missing without a word: an error is
    /// better. And what an operator changes waits for no lock for long.
    pub const SESSION: [(&'static str, &'static str); 2] = [("row_security", "off"), ("lock_timeout", "5s")];

    /// Over the tables that belong to the events table.
    pub fn new(client: &'a Client, events: &TableName) -> Self {
        Self { client, tables: Tables::of(events), resolve: in_schema(events, "resolve_compensation") }
    }

    async fn rows<T>(
        &self,
        statement: &str,
        parameters: &[Parameter<'_>],
        read: impl Fn(&Row) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        self.client.query_typed(statement, parameters).await?.iter().map(read).collect()
    }

    async fn count(&self, statement: &str, parameters: &[Parameter<'_>]) -> Result<i64, Error> {
        let rows = self.rows(statement, parameters, |row| row.try_get(0)).await?;
        Ok(rows.first().copied().unwrap_or(0))
    }
}

impl<T> Page<T> {
    /// Of rows of which one more than `limit` was asked for.
    fn cut(mut rows: Vec<T>, limit: usize, id: impl Fn(&T) -> i64) -> Self {
        let more = rows.len() > limit;
        rows.truncate(limit);
        let end = match rows.last() {
            Some(last) if more => End::Full(id(last)),
            _ => End::All,
        };
        Self { rows, end }
    }
}

/// Text for people to read. Where the database's encoding is SQL_ASCII it may hold bytes that are no UTF-8: one such
/// row must not hide the others, so U+FFFD stands for them.
fn text(row: &Row, column: &str) -> Result<String, Error> {
    Ok(lossy(row.try_get(column)?))
}

fn some_text(row: &Row, column: &str) -> Result<Option<String>, Error> {
    Ok(row.try_get::<_, Option<_>>(column)?.map(lossy))
}

/// The same of a `jsonb` that was selected as text.
fn json(row: &Row, column: &str) -> Result<Value, Error> {
    Ok(serde_json::from_str(&text(row, column)?).unwrap_or_default())
}

fn lossy(raw: Raw<'_>) -> String {
    String::from_utf8_lossy(raw.0).into_owned()
}

/// One more than a page holds, to see whether another follows.
fn one_more(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX).saturating_add(1)
}

/// A time as RFC 3339 writes it, in UTC, under the column's name; null for none and for `infinity`.
fn utc(row: &str, column: &str) -> String {
    format!(
        "CASE WHEN isfinite({row}.{column}) THEN
           to_char({row}.{column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') END AS {column}"
    )
}

/// Seconds from `from` to `to`; null where one of them is none or `infinity`.
fn seconds(from: &str, to: &str, name: &str) -> String {
    format!(
        "CASE WHEN isfinite({from}) AND isfinite({to}) THEN extract(epoch FROM {to} - {from})::float8 END AS {name}"
    )
}

/// Whether two rows belong to the same aggregate.
fn same_aggregate(one: &str, other: &str) -> String {
    format!(
        "{one}.aggregate_type = {other}.aggregate_type AND {one}.aggregate_id = {other}.aggregate_id
         AND {one}.tenant_id IS NOT DISTINCT FROM {other}.tenant_id"
    )
}

/// Whether the later rows of its aggregate wait for a row: it failed, or is a poller's.
fn waits(row: &str) -> String {
    format!("{row}.next_retry_at IS NOT NULL AND {row}.status IN ('failed', 'processing')")
}
