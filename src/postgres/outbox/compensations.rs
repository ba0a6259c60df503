//! Compensations: claimed under a lease, and what became of each attempt.

use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use super::rows::Raw;
use super::{Tables, printable};

/// A compensation that this relay has claimed.
#[derive(Clone, Debug)]
pub struct Compensation {
    pub id: i64,
    pub item_index: i32,
    /// What it says, or why that cannot be sent.
    pub texts: Result<Texts, String>,
    /// Attempts, this one included.
    pub attempt: i32,
    /// Microseconds since the Unix epoch.
    pub created_at: i64,
    /// The row's version under this claim: another one means that someone else has changed its state since.
    version: i64,
}

/// What a compensation says.
#[derive(Clone, Debug)]
pub struct Texts {
    pub batch_id: String,
    pub operation_type: String,
    /// JSON text, exactly as PostgreSQL prints the `jsonb`.
    pub item_payload: String,
}

/// What became of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attempted {
    /// The service has done it.
    Resolved,
    /// It counts; where it was the last one, the compensation is a person's from now on.
    Failed { reason: String, retry_in: Duration },
    /// It does not count: the service is not to blame.
    Returned { retry_in: Duration },
}

/// Claims compensations, and records what became of them.
#[derive(Clone, Copy, Debug)]
pub struct Claim<'a> {
    pub client: &'a Client,
    pub tables: &'a Tables,
    /// Who holds the lease, for people to read.
    pub worker: &'a str,
}

/// Whose turn it is: pending ones whose time has come, and those whose lease has ended (`retrying` without a lease is
/// one).
const DUE: &str = "status IN ('pending', 'retrying') AND (next_retry_at IS NULL OR next_retry_at <= now())";

impl Claim<'_> {
    /// Takes a lease on at most `limit` due compensations, the oldest first, and counts the attempt. Payloads over
    /// `cap` bytes are left behind.
    pub async fn due(&self, limit: usize, lease: Duration, cap: usize) -> Result<Vec<Compensation>, Error> {
        let statement = format!(
            "WITH due AS MATERIALIZED (
               SELECT id FROM {0} WHERE {DUE} AND retry_count < max_retries
               ORDER BY created_at, id LIMIT $1 FOR NO KEY UPDATE SKIP LOCKED)
             UPDATE {0} c SET status = 'retrying', retry_count = c.retry_count + 1, locked_by = $2, locked_at = now(),
               next_retry_at = now() + make_interval(secs => $3), updated_at = now(), version = c.version + 1
             FROM due WHERE c.id = due.id
             RETURNING c.id, c.batch_id::text, c.operation_type::text, c.item_index,
               CASE WHEN octet_length(c.item_payload::text) <= $4 THEN c.item_payload::text END,
               c.retry_count, (extract(epoch FROM c.created_at) * 1000000)::int8, c.version",
            self.tables.compensation
        );
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let cap = i32::try_from(cap).unwrap_or(i32::MAX);
        let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
            (&limit, Type::INT8),
            (&self.worker, Type::TEXT),
            (&lease.as_secs_f64(), Type::FLOAT8),
            (&cap, Type::INT4),
        ];
        self.client.query_typed(&statement, &parameters).await?.iter().map(compensation).collect()
    }

    /// Gives due compensations whose attempts are used up to a person: their last lease ended without an outcome.
    /// Returns how many.
    pub async fn give_up(&self) -> Result<u64, Error> {
        let statement = format!(
            "UPDATE {0} c SET status = 'manual_required',
               failure_reason = concat_ws('; ', c.failure_reason, CASE WHEN c.status = 'retrying'
                 THEN 'the outcome of the last attempt is not known' ELSE 'its attempts are used up' END),
               next_retry_at = NULL, locked_by = NULL, locked_at = NULL, updated_at = now(), version = c.version + 1
             WHERE c.id IN (SELECT id FROM {0} WHERE {DUE} AND retry_count >= max_retries
               ORDER BY created_at LIMIT 100 FOR NO KEY UPDATE SKIP LOCKED)",
            self.tables.compensation
        );
        self.client.execute_typed(&statement, &[]).await
    }

    /// Records what became of an attempt. Returns the status now; `None` when the claim is not this relay's any more.
    pub async fn record(&self, claimed: &Compensation, attempted: &Attempted) -> Result<Option<String>, Error> {
        let (change, text, wait) = match attempted {
            Attempted::Resolved => {
                ("status = 'resolved', resolved_at = now(), resolution_notes = $3", "the service has answered", None)
            }
            Attempted::Failed { reason, retry_in } => (FAILED, reason.as_str(), Some(retry_in)),
            Attempted::Returned { retry_in } => (RETURNED, "", Some(retry_in)),
        };
        let statement = format!(
            "UPDATE {} SET {change}, locked_by = NULL, locked_at = NULL, updated_at = now(), version = version + 1,
               next_retry_at = CASE WHEN $4::float8 IS NOT NULL AND NOT (retry_count >= max_retries AND $5)
                 THEN now() + make_interval(secs => $4::float8) END
             WHERE id = $1 AND version = $2 AND status = 'retrying'
             RETURNING status::text",
            self.tables.compensation
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
            (&claimed.id, Type::INT8),
            (&claimed.version, Type::INT8),
            (&printable(text), Type::TEXT),
            (&wait.map(Duration::as_secs_f64), Type::FLOAT8),
            (&matches!(attempted, Attempted::Failed { .. }), Type::BOOL),
        ];
        let rows = self.client.query_typed(&statement, &parameters).await?;
        rows.first().map(|row| row.try_get(0)).transpose()
    }
}

/// The reason is appended, unless it was the last one already: the rule of `mark_compensation_manual_required`.
const FAILED: &str = "status = CASE WHEN retry_count >= max_retries THEN 'manual_required' ELSE 'pending' END,
    failure_reason = CASE WHEN right('; ' || failure_reason, length($3) + 2) = '; ' || $3 THEN failure_reason
      ELSE concat_ws('; ', failure_reason, $3) END";

const RETURNED: &str = "status = 'pending', retry_count = greatest(retry_count - 1, 0)";

fn compensation(row: &Row) -> Result<Compensation, Error> {
    Ok(Compensation {
        id: row.try_get(0)?,
        item_index: row.try_get(3)?,
        texts: texts(row.try_get(1)?, row.try_get(2)?, row.try_get(4)?),
        attempt: row.try_get(5)?,
        created_at: row.try_get(6)?,
        version: row.try_get(7)?,
    })
}

/// A database whose encoding is SQL_ASCII holds any bytes: a row of it must not spoil the others.
fn texts(batch_id: Raw<'_>, operation_type: Raw<'_>, item_payload: Option<Raw<'_>>) -> Result<Texts, String> {
    let text = |column: &str, raw: Raw<'_>| match std::str::from_utf8(raw.0) {
        Ok(text) => Ok(text.to_owned()),
        Err(_) => Err(format!("its {column} is not UTF-8 (does the database have the encoding SQL_ASCII?)")),
    };
    let item_payload = item_payload.ok_or("its item_payload is larger than delivery.max_in_flight_bytes")?;
    Ok(Texts {
        batch_id: text("batch_id", batch_id)?,
        operation_type: text("operation_type", operation_type)?,
        item_payload: text("item_payload", item_payload)?,
    })
}
