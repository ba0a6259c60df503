//! Compensations, for operators to look at and to decide.

use serde::Serialize;
use serde_json::value::RawValue;
use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use super::events::raw;
use super::{Desk, Page, one_more, seconds, some_text, text, utc};
use crate::postgres::outbox::printable;

/// Which compensations are listed; what is `None` does not matter.
#[derive(Clone, Debug, Default)]
pub struct CompensationFilter {
    pub status: Option<String>,
    pub batch_id: Option<String>,
    pub operation_type: Option<String>,
}

/// A compensation as it is listed. Times are RFC 3339 in UTC.
#[derive(Clone, Debug, Serialize)]
pub struct CompensationRow {
    pub id: i64,
    pub batch_id: String,
    pub operation_type: String,
    pub item_index: i32,
    pub status: String,
    pub retry_count: i32,
    pub max_retries: i32,
    pub created_at: Option<String>,
    pub age_seconds: Option<f64>,
    pub next_retry_at: Option<String>,
    /// Below zero: it is overdue.
    pub next_retry_seconds: Option<f64>,
    pub failure_reason: Option<String>,
}

/// A compensation with all that the table knows of it.
#[derive(Clone, Debug, Serialize)]
pub struct CompensationStory {
    #[serde(flatten)]
    pub row: CompensationRow,
    pub locked_by: Option<String>,
    pub locked_at: Option<String>,
    pub resolved_at: Option<String>,
    pub resolved_by: Option<i64>,
    pub resolution_notes: Option<String>,
    pub created_by: Option<i64>,
    pub updated_at: Option<String>,
    pub version: i64,
    /// Bytes as PostgreSQL prints it.
    pub item_payload_bytes: i64,
    /// As PostgreSQL prints it; `None` unless it was asked for.
    pub item_payload: Option<Box<RawValue>>,
}

impl Desk<'_> {
    /// Compensations below the id `after`, the newest first.
    pub async fn compensations(
        &self,
        filter: &CompensationFilter,
        after: Option<i64>,
        limit: usize,
    ) -> Result<Page<CompensationRow>, Error> {
        let statement = format!(
            "SELECT {} FROM {} c WHERE ($1::text IS NULL OR c.status = $1) AND ($2::text IS NULL OR c.batch_id = $2)
               AND ($3::text IS NULL OR c.operation_type = $3) AND c.id < $4 ORDER BY c.id DESC LIMIT $5",
            columns(),
            self.tables.compensation
        );
        let (after, wanted) = (after.unwrap_or(i64::MAX), one_more(limit));
        let parameters = [
            (&filter.status as _, Type::TEXT),
            (&filter.batch_id as _, Type::TEXT),
            (&filter.operation_type as _, Type::TEXT),
            (&after as _, Type::INT8),
            (&wanted as _, Type::INT8),
        ];
        Ok(Page::cut(self.rows(&statement, &parameters, read).await?, limit, |row| row.id))
    }

    /// One compensation with all that the table knows of it.
    pub async fn compensation(&self, id: i64, payload: bool) -> Result<Option<CompensationStory>, Error> {
        let statement = format!(
            "SELECT {}, c.locked_by, {}, {}, c.resolved_by, c.resolution_notes, c.created_by, {}, c.version,
               octet_length(c.item_payload::text)::int8 AS item_payload_bytes,
               CASE WHEN $2 THEN c.item_payload::text END AS item_payload
             FROM {} c WHERE c.id = $1",
            columns(),
            utc("c", "locked_at"),
            utc("c", "resolved_at"),
            utc("c", "updated_at"),
            self.tables.compensation
        );
        Ok(self.rows(&statement, &[(&id, Type::INT8), (&payload, Type::BOOL)], read_story).await?.pop())
    }

    /// Makes a compensation due now; one that was given to a person gets its attempts again, and goes back to the
    /// service. `false`: it is in no state for that.
    pub async fn retry_compensation(&self, id: i64) -> Result<bool, Error> {
        self.change(
            "status = 'pending', next_retry_at = now(), locked_by = NULL, locked_at = NULL,
             retry_count = CASE WHEN status = 'manual_required' OR retry_count >= max_retries THEN 0 ELSE retry_count END",
            &format!("(status IN ('pending', 'manual_required') OR {UNCLAIMED})"),
            id,
            None,
        )
        .await
    }

    /// Gives a compensation up for good. `false`: it is in no state for that.
    pub async fn abandon_compensation(&self, id: i64, notes: Option<&str>) -> Result<bool, Error> {
        self.change(
            "status = 'abandoned', resolution_notes = coalesce($2, resolution_notes), next_retry_at = NULL, locked_by = NULL, locked_at = NULL",
            &format!("(status IN ('pending', 'manual_required') OR {UNCLAIMED})"),
            id,
            notes,
        )
        .await
    }

    /// Calls `resolve_compensation`, which says what is wrong (SQLSTATE OB002, OB003, P0002).
    pub async fn resolve_compensation(&self, id: i64, by: Option<i64>, notes: Option<&str>) -> Result<(), Error> {
        let notes = notes.map(printable);
        let statement = format!("SELECT {}($1, $2, $3)", self.resolve);
        let parameters = [(&id as _, Type::INT8), (&by as _, Type::INT8), (&notes as _, Type::TEXT)];
        self.client.query_typed(&statement, &parameters).await.map(drop)
    }

    async fn change(&self, change: &str, condition: &str, id: i64, notes: Option<&str>) -> Result<bool, Error> {
        let statement = format!(
            "UPDATE {} SET {change}, updated_at = now(), version = version + 1 WHERE id = $1 AND {condition}",
            self.tables.compensation
        );
        let notes = notes.map(printable);
        Ok(self.client.execute_typed(&statement, &[(&id, Type::INT8), (&notes, Type::TEXT)]).await? > 0)
    }
}

/// Whose last claim has ended without an outcome.
const UNCLAIMED: &str = "status = 'retrying' AND coalesce(next_retry_at <= now(), true)";

fn columns() -> String {
    format!(
        "c.id, c.batch_id, c.operation_type, c.item_index, c.status, c.retry_count, c.max_retries, {}, {}, {}, {},
         c.failure_reason",
        utc("c", "created_at"),
        seconds("c.created_at", "now()", "age_seconds"),
        utc("c", "next_retry_at"),
        seconds("now()", "c.next_retry_at", "next_retry_seconds"),
    )
}

fn read(row: &Row) -> Result<CompensationRow, Error> {
    Ok(CompensationRow {
        id: row.try_get("id")?,
        batch_id: text(row, "batch_id")?,
        operation_type: text(row, "operation_type")?,
        item_index: row.try_get("item_index")?,
        status: row.try_get("status")?,
        retry_count: row.try_get("retry_count")?,
        max_retries: row.try_get("max_retries")?,
        created_at: row.try_get("created_at")?,
        age_seconds: row.try_get("age_seconds")?,
        next_retry_at: row.try_get("next_retry_at")?,
        next_retry_seconds: row.try_get("next_retry_seconds")?,
        failure_reason: some_text(row, "failure_reason")?,
    })
}

fn read_story(row: &Row) -> Result<CompensationStory, Error> {
    Ok(CompensationStory {
        row: read(row)?,
        locked_by: some_text(row, "locked_by")?,
        locked_at: row.try_get("locked_at")?,
        resolved_at: row.try_get("resolved_at")?,
        resolved_by: row.try_get("resolved_by")?,
        resolution_notes: some_text(row, "resolution_notes")?,
        created_by: row.try_get("created_by")?,
        updated_at: row.try_get("updated_at")?,
        version: row.try_get("version")?,
        item_payload_bytes: row.try_get("item_payload_bytes")?,
        item_payload: raw(some_text(row, "item_payload")?),
    })
}
