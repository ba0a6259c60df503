//! The outbox for Rust programs: enqueue an event in a transaction of one's own, and poll without a relay.
//!
//! While a relay holds its slot, [`claim_batch`] returns nothing; without a relay, pollers work on. `worker` names the
//! claimer and must be its alone: each mark is accepted only from the worker that holds the claim.

use std::time::{Duration, SystemTime};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Transaction};

use super::{describe, names};
use crate::config::TableName;

/// An event to enqueue. The names must not be empty; the longest are 64, 128 and 128 characters.
#[derive(Clone, Copy, Debug)]
pub struct NewEvent<'a> {
    /// The kind of thing that the event is about, as `order`.
    pub aggregate_type: &'a str,
    /// Which one of them: events of one aggregate are delivered in the order of their commits.
    pub aggregate_id: &'a str,
    /// What happened to it, as `placed`.
    pub event_type: &'a str,
    /// JSON text.
    pub payload: &'a str,
    /// A second event of this tenant and type with the same key is the same event, for as long as the first is kept.
    pub deduplication_key: Option<&'a str>,
    /// At most 64 characters.
    pub tenant_id: Option<&'a str>,
    /// Copied to NATS headers.
    pub headers: &'a [(&'a str, &'a str)],
    /// Visible ASCII, at most 64 characters; `None`: a random UUID.
    pub event_id: Option<&'a str>,
}

impl<'a> NewEvent<'a> {
    /// An event without the optional parts.
    #[must_use]
    pub fn new(aggregate_type: &'a str, aggregate_id: &'a str, event_type: &'a str, payload: &'a str) -> Self {
        Self {
            aggregate_type,
            aggregate_id,
            event_type,
            payload,
            deduplication_key: None,
            tenant_id: None,
            headers: &[],
            event_id: None,
        }
    }
}

/// Why an event was not enqueued. The transaction is aborted: roll it back.
#[derive(Debug, thiserror::Error)]
pub enum EnqueueError {
    /// `OB001`
    #[error("the deduplication key was used before, with another payload")]
    DeduplicationConflict(#[source] tokio_postgres::Error),
    /// 23505
    #[error("the event_id was used before{}", named(constraint.as_deref()))]
    EventIdUsed { constraint: Option<String>, source: tokio_postgres::Error },
    /// The table does not accept a value: one is empty, too long, or not JSON.
    #[error("the outbox does not accept the event: {message}{}", named(constraint.as_deref()))]
    Invalid { message: String, constraint: Option<String>, source: tokio_postgres::Error },
    /// Any other failure: of the connection, of rights, of serialization.
    #[error("cannot enqueue the event: {}", describe(.0))]
    Database(#[source] tokio_postgres::Error),
}

/// Why rows could not be claimed or marked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The row is no longer claimed by this worker: the lease ended and another one took the row over, or it was marked
    /// before. Stands for `OB003`. The transaction is still good.
    #[error(
        "worker {worker} does not hold the lease on row {id} any more: another worker took it over, or it was marked before"
    )]
    LeaseLost { id: i64, worker: String },
    /// A failure of the database. The transaction is aborted: roll it back.
    #[error("cannot {doing}: {}", describe(source))]
    Database { doing: &'static str, source: tokio_postgres::Error },
}

/// An event that a worker has claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedEvent {
    /// The row's primary key.
    pub id: i64,
    /// The event's global id, by which consumers know it again.
    pub event_id: String,
    /// As it was enqueued.
    pub tenant_id: Option<String>,
    /// The kind of thing that the event is about.
    pub aggregate_type: String,
    /// Which one of them.
    pub aggregate_id: String,
    /// What happened to it.
    pub event_type: String,
    /// As it was enqueued.
    pub deduplication_key: Option<String>,
    /// JSON text, exactly as PostgreSQL prints the `jsonb`.
    pub payload: String,
    /// JSON text: an object of strings.
    pub headers: String,
    /// Attempts, this one included.
    pub attempt: i32,
    /// Attempts after which a failure makes the event a dead letter.
    pub max_retries: i32,
    /// When the lease ends.
    pub lease_until: SystemTime,
}

/// What became of a failed event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// It will be claimed again.
    WillRetry,
    /// Its attempts are used up: it stands in `outbox_dead_letter`.
    DeadLetter,
}

/// Puts an event into the outbox, in the caller's transaction: it is delivered if, and only if, that commits. Returns
/// its `event_id`; for a deduplication key that was used before with the same payload, that of the first event.
///
/// # Errors
/// See [`EnqueueError`].
pub async fn enqueue(tx: &Transaction<'_>, table: &TableName, event: NewEvent<'_>) -> Result<String, EnqueueError> {
    let sql = format!(
        "SELECT {}($1, $2, $3, $4::jsonb, $5, $6, $7::jsonb, $8)",
        names::in_schema(table, "enqueue_outbox_event")
    );
    let headers: serde_json::Map<String, serde_json::Value> =
        event.headers.iter().map(|&(name, value)| (name.to_owned(), value.into())).collect();
    let headers = serde_json::Value::Object(headers).to_string();
    let parameters: [(&(dyn ToSql + Sync), Type); 8] = [
        (&event.aggregate_type, Type::VARCHAR),
        (&event.aggregate_id, Type::VARCHAR),
        (&event.event_type, Type::VARCHAR),
        (&event.payload, Type::TEXT),
        (&event.deduplication_key, Type::TEXT),
        (&event.tenant_id, Type::VARCHAR),
        (&headers, Type::TEXT),
        (&event.event_id, Type::VARCHAR),
    ];
    let rows = tx.query_typed(&sql, &parameters).await.map_err(EnqueueError::from_database)?;
    match rows.first() {
        Some(row) => row.try_get(0).map_err(EnqueueError::Database),
        // A call of a function that returns no set is always one row.
        None => Ok(String::new()),
    }
}

impl EnqueueError {
    fn from_database(source: tokio_postgres::Error) -> Self {
        let Some(db) = source.as_db_error() else { return Self::Database(source) };
        let constraint = db.constraint().map(ToOwned::to_owned);
        let code = db.code();
        let refused = [
            SqlState::CHECK_VIOLATION,
            SqlState::NOT_NULL_VIOLATION,
            SqlState::STRING_DATA_RIGHT_TRUNCATION,
            SqlState::INVALID_TEXT_REPRESENTATION,
            SqlState::UNTRANSLATABLE_CHARACTER,
            SqlState::CHARACTER_NOT_IN_REPERTOIRE,
        ];
        if code.code() == "OB001" {
            Self::DeduplicationConflict(source)
        } else if *code == SqlState::UNIQUE_VIOLATION {
            Self::EventIdUsed { constraint, source }
        } else if refused.contains(code) {
            Self::Invalid { message: db.message().to_owned(), constraint, source }
        } else {
            Self::Database(source)
        }
    }
}

/// Claims up to `size` due events for `lease`, in order of insertion, and counts the attempt. Commit before working on
/// them: until then nobody else sees the claim.
///
/// # Errors
/// [`StoreError::Database`]
pub async fn claim_batch(
    tx: &Transaction<'_>,
    table: &TableName,
    worker: &str,
    size: u32,
    lease: Duration,
) -> Result<Vec<ClaimedEvent>, StoreError> {
    let failed = |source| StoreError::Database { doing: "claim events", source };
    let sql = format!(
        "SELECT id, event_id::text, tenant_id::text, aggregate_type::text, aggregate_id::text, event_type::text, \
                deduplication_key, payload::text, headers::text, retry_count, max_retries, next_retry_at \
         FROM {}($1, $2, make_interval(secs => $3), 1) ORDER BY id",
        names::in_schema(table, "outbox_relay_claim")
    );
    let size = i32::try_from(size).unwrap_or(i32::MAX);
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&worker, Type::TEXT), (&size, Type::INT4), (&lease.as_secs_f64(), Type::FLOAT8)];
    let rows = tx.query_typed(&sql, &parameters).await.map_err(failed)?;
    rows.iter().map(claimed).collect::<Result<_, _>>().map_err(failed)
}

fn claimed(row: &Row) -> Result<ClaimedEvent, tokio_postgres::Error> {
    Ok(ClaimedEvent {
        id: row.try_get(0)?,
        event_id: row.try_get(1)?,
        tenant_id: row.try_get(2)?,
        aggregate_type: row.try_get(3)?,
        aggregate_id: row.try_get(4)?,
        event_type: row.try_get(5)?,
        deduplication_key: row.try_get(6)?,
        payload: row.try_get(7)?,
        headers: row.try_get(8)?,
        attempt: row.try_get(9)?,
        max_retries: row.try_get(10)?,
        lease_until: row.try_get(11)?,
    })
}

/// Marks the claimed row `id` as delivered.
///
/// # Errors
/// [`StoreError::LeaseLost`] when `worker` does not hold the claim, else [`StoreError::Database`].
pub async fn mark_completed(tx: &Transaction<'_>, table: &TableName, id: i64, worker: &str) -> Result<(), StoreError> {
    let sql = format!(
        "UPDATE {} SET status = 'completed', processed_at = clock_timestamp(), next_retry_at = NULL, locked_by = NULL, \
                locked_at = NULL, updated_at = clock_timestamp(), version = version + 1 \
         WHERE id = $1 AND status = 'processing' AND locked_by = $2 RETURNING id",
        names::events(table)
    );
    let rows = tx
        .query_typed(&sql, &[(&id, Type::INT8), (&worker, Type::TEXT)])
        .await
        .map_err(|source| StoreError::Database { doing: "mark an event as completed", source })?;
    if rows.is_empty() { Err(StoreError::LeaseLost { id, worker: worker.to_owned() }) } else { Ok(()) }
}

/// Marks the claimed `event` as failed with `code`: it is due again at `next_attempt`, or a dead letter when its
/// attempts are used up. The attempt was counted by the claim. Only the claim that `event` came from can fail: not a
/// later one, though by the same worker.
///
/// # Errors
/// [`StoreError::LeaseLost`] when `worker` does not hold the claim, else [`StoreError::Database`].
pub async fn mark_failed(
    tx: &Transaction<'_>,
    table: &TableName,
    event: &ClaimedEvent,
    worker: &str,
    code: &str,
    next_attempt: SystemTime,
) -> Result<Failed, StoreError> {
    let failed = |source| StoreError::Database { doing: "mark an event as failed", source };
    // `INSERT` runs to its end though nothing reads it.
    let sql = format!(
        "WITH failed AS ( \
            UPDATE {events} SET \
                status = CASE WHEN retry_count >= max_retries THEN 'dead_letter' ELSE 'failed' END, \
                next_retry_at = CASE WHEN retry_count < max_retries THEN $5::timestamptz END, \
                dead_letter_reason = CASE WHEN retry_count >= max_retries THEN $4 ELSE dead_letter_reason END, \
                error_code = $4, error_message = NULL, first_failed_at = coalesce(first_failed_at, clock_timestamp()), \
                locked_by = NULL, locked_at = NULL, updated_at = clock_timestamp(), version = version + 1 \
            WHERE id = $1 AND status = 'processing' AND locked_by = $2 AND retry_count = $3 \
            RETURNING * \
         ), dead AS ( \
            INSERT INTO {dead_letters} (original_event_id, original_aggregate_type, original_aggregate_id, tenant_id, \
                event_type, payload, headers, error_code, retry_count, first_failed_at) \
            SELECT event_id, aggregate_type, aggregate_id, tenant_id, event_type, payload, headers, error_code, \
                retry_count, first_failed_at FROM failed WHERE status = 'dead_letter' \
         ) SELECT status = 'dead_letter', \
            CASE WHEN status = 'dead_letter' THEN {compensate}(headers, payload, error_code) END FROM failed",
        events = names::events(table),
        dead_letters = names::in_schema(table, "outbox_dead_letter"),
        compensate = names::in_schema(table, "outbox_relay_compensate")
    );
    let parameters: [(&(dyn ToSql + Sync), Type); 5] = [
        (&event.id, Type::INT8),
        (&worker, Type::TEXT),
        (&event.attempt, Type::INT4),
        (&code, Type::TEXT),
        (&next_attempt, Type::TIMESTAMPTZ),
    ];
    let rows = tx.query_typed(&sql, &parameters).await.map_err(failed)?;
    match rows.first() {
        None => Err(StoreError::LeaseLost { id: event.id, worker: worker.to_owned() }),
        Some(row) => Ok(if row.try_get(0).map_err(failed)? { Failed::DeadLetter } else { Failed::WillRetry }),
    }
}

fn named(constraint: Option<&str>) -> String {
    constraint.map(|name| format!(" (constraint {name})")).unwrap_or_default()
}
