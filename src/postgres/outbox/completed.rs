//! Completed rows, for the comparison with the stream.

use std::time::SystemTime;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::{Tables, rows};
use crate::flow::event::Decoded;

/// Bytes of payloads and headers read at a time, about.
const BYTES: i64 = 8 * 1024 * 1024;

/// A row whose event was acknowledged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletedRow {
    pub id: i64,
    pub event_id: String,
    /// When its transaction began, unless the producer said otherwise. Between 1970 and now, whatever the row says.
    pub created_at: SystemTime,
    /// When its outcome was written: no earlier than the event was stored. Now, where the row does not say.
    pub processed_at: SystemTime,
}

/// Reads completed rows.
#[derive(Clone, Copy, Debug)]
pub struct Completed<'a> {
    pub client: &'a Client,
    pub tables: &'a Tables,
}

/// The completed rows that were created in a range of time, the oldest first, some at a time.
#[derive(Debug)]
pub struct CompletedRows<'a> {
    read: Completed<'a>,
    until: SystemTime,
    /// The place of the last row: its time as PostgreSQL prints it, and its id.
    after: (String, i64),
}

impl<'a> Completed<'a> {
    /// The server's time.
    pub async fn now(&self) -> Result<SystemTime, Error> {
        match self.client.query_typed("SELECT clock_timestamp()", &[]).await?.first() {
            Some(row) => row.try_get(0),
            None => Ok(SystemTime::now()),
        }
    }

    /// The rows created from `since` on and before `until`.
    pub async fn created(self, since: SystemTime, until: SystemTime) -> Result<CompletedRows<'a>, Error> {
        let text = self.client.query_typed("SELECT $1::text", &[(&since, Type::TIMESTAMPTZ)]).await?;
        let since = text.first().map(|row| row.try_get(0)).transpose()?.unwrap_or_default();
        Ok(CompletedRows { read: self, until, after: (since, i64::MIN) })
    }

    /// Those of the rows that are still there and completed, whole, in the order of their ids: the first of them that
    /// fit into some megabytes. Payloads over `cap` bytes are left behind.
    pub async fn events(&self, ids: &[i64], cap: usize) -> Result<Vec<Decoded>, Error> {
        let found = format!("(SELECT * FROM {} e WHERE id = ANY($2) AND status = 'completed')", self.tables.events);
        let statement = format!(
            "SELECT {} FROM {} AS e ORDER BY e.id",
            rows::select_list(),
            rows::first_that_fit(&found, "e.id", BYTES)
        );
        let cap = i32::try_from(cap).unwrap_or(i32::MAX);
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&cap, Type::INT4), (&ids, Type::INT8_ARRAY)];
        let found = self.client.query_typed(&statement, &parameters).await?;
        found.iter().map(rows::read).collect()
    }
}

impl CompletedRows<'_> {
    /// The next rows, at most `limit`; none at the end.
    pub async fn next(&mut self, limit: i64) -> Result<Vec<CompletedRow>, Error> {
        // The first comparison is for the index, which is on the time alone.
        let statement = format!(
            "SELECT id, event_id::text, greatest(least(created_at, now()), 'epoch'),
               greatest(least(coalesce(processed_at, now()), now()), 'epoch'), created_at::text
             FROM {} WHERE status = 'completed' AND created_at >= $1::text::timestamptz AND created_at < $3
               AND (created_at, id) > ($1::text::timestamptz, $2)
             ORDER BY created_at, id LIMIT $4",
            self.read.tables.events
        );
        let (time, id) = &self.after;
        let parameters: [(&(dyn ToSql + Sync), Type); 4] =
            [(time, Type::TEXT), (id, Type::INT8), (&self.until, Type::TIMESTAMPTZ), (&limit, Type::INT8)];
        let found = self.read.client.query_typed(&statement, &parameters).await?;
        if let Some(last) = found.last() {
            self.after = (last.try_get(4)?, last.try_get(0)?);
        }
        found
            .iter()
            .map(|row| {
                Ok(CompletedRow {
                    id: row.try_get(0)?,
                    event_id: row.try_get(1)?,
                    created_at: row.try_get(2)?,
                    processed_at: row.try_get(3)?,
                })
            })
            .collect()
    }
}
