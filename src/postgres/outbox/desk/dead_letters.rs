//! Dead letters, for operators to look at and to put away.

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use super::events::raw;
use super::{Desk, Page, Parameter, json, one_more, seconds, some_text, text, utc};
use crate::postgres::outbox::printable;

/// Which dead letters are meant; what is `None` does not matter.
#[derive(Clone, Debug, Default)]
pub struct DeadLetterFilter {
    /// Those that were handled, or those that were not.
    pub handled: Option<bool>,
    /// The code of the error.
    pub reason: Option<String>,
    pub event_type: Option<String>,
    pub tenant_id: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    /// Dead for no longer than this, in seconds.
    pub since: Option<f64>,
}

/// A dead letter as it is listed. Times are RFC 3339 in UTC.
#[derive(Clone, Debug, Serialize)]
pub struct DeadLetterRow {
    pub id: i64,
    pub event_id: String,
    pub tenant_id: Option<String>,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub event_type: String,
    pub error_code: Option<String>,
    pub error_message: Option<String>,
    pub retry_count: i32,
    pub first_failed_at: Option<String>,
    pub dead_letter_at: Option<String>,
    pub age_seconds: Option<f64>,
    pub handled: bool,
    pub handled_at: Option<String>,
    pub handler_notes: Option<String>,
    /// The event's row in the outbox, if it is still there.
    pub row_id: Option<i64>,
    pub row_status: Option<String>,
}

/// A dead letter with all that is kept of it.
#[derive(Clone, Debug, Serialize)]
pub struct DeadLetterStory {
    #[serde(flatten)]
    pub letter: DeadLetterRow,
    pub headers: Value,
    /// Bytes as PostgreSQL prints it.
    pub payload_bytes: i64,
    /// As PostgreSQL prints it; `None` unless it was asked for.
    pub payload: Option<Box<RawValue>>,
    /// What the event's headers asked for.
    pub compensations: Vec<LinkedCompensation>,
}

/// A compensation that came of a dead letter.
#[derive(Clone, Debug, Serialize)]
pub struct LinkedCompensation {
    pub id: i64,
    pub status: String,
}

impl Desk<'_> {
    /// Dead letters below the id `after`, the newest first.
    pub async fn dead_letters(
        &self,
        filter: &DeadLetterFilter,
        after: Option<i64>,
        limit: usize,
    ) -> Result<Page<DeadLetterRow>, Error> {
        let statement = format!(
            "SELECT {} WHERE {} AND d.id < $8 ORDER BY d.id DESC LIMIT $9",
            self.letters(),
            DeadLetterFilter::CONDITION
        );
        let (after, wanted) = (after.unwrap_or(i64::MAX), one_more(limit));
        let mut parameters = filter.parameters();
        parameters.extend([(&after as _, Type::INT8), (&wanted as _, Type::INT8)]);
        Ok(Page::cut(self.rows(&statement, &parameters, read).await?, limit, |letter| letter.id))
    }

    /// One dead letter with all that is kept of it.
    pub async fn dead_letter(&self, id: i64, payload: bool) -> Result<Option<DeadLetterStory>, Error> {
        let columns = "d.headers::text AS headers, octet_length(d.payload::text)::int8 AS payload_bytes,
            CASE WHEN $2 THEN d.payload::text END AS payload";
        let statement = format!("SELECT {columns}, {} WHERE d.id = $1", self.letters());
        let read = |row: &Row| {
            Ok(DeadLetterStory {
                letter: read(row)?,
                headers: json(row, "headers")?,
                payload_bytes: row.try_get("payload_bytes")?,
                payload: raw(some_text(row, "payload")?),
                compensations: Vec::new(),
            })
        };
        let mut found = self.rows(&statement, &[(&id, Type::INT8), (&payload, Type::BOOL)], read).await?.pop();
        if let Some(story) = &mut found {
            story.compensations = self.linked_compensations(id).await?;
        }
        Ok(found)
    }

    /// Every dead letter of an event, the newest first.
    pub async fn dead_letters_of(&self, event_id: &str) -> Result<Vec<DeadLetterRow>, Error> {
        let statement =
            format!("SELECT {} WHERE d.original_event_id = left($1, 64) ORDER BY d.id DESC", self.letters());
        self.rows(&statement, &[(&event_id, Type::TEXT)], read).await
    }

    /// The compensations that a dead letter's headers asked for.
    pub async fn linked_compensations(&self, id: i64) -> Result<Vec<LinkedCompensation>, Error> {
        let statement = format!(
            "SELECT c.id, c.status FROM {} d JOIN {} c ON {LINKED} WHERE d.id = $1 ORDER BY c.id",
            self.tables.dead_letter, self.tables.compensation
        );
        let read = |row: &Row| Ok(LinkedCompensation { id: row.try_get(0)?, status: row.try_get(1)? });
        self.rows(&statement, &[(&id, Type::INT8)], read).await
    }

    /// Puts dead letters away: somebody has dealt with them. Those that were handled before stay as they are. Returns
    /// the ids of those that were open.
    pub async fn resolve_dead_letters(&self, ids: &[i64], notes: Option<&str>) -> Result<Vec<i64>, Error> {
        let statement = format!(
            "UPDATE {} SET handled = true, handled_at = now(), handler_notes = $2
             WHERE id = ANY ($1) AND NOT handled RETURNING id",
            self.tables.dead_letter
        );
        let parameters = [(&ids as _, Type::INT8_ARRAY), (&notes.map(printable) as _, Type::TEXT)];
        self.rows(&statement, &parameters, |row| row.try_get(0)).await
    }

    /// Those of the ids that are dead letters, in their order.
    pub async fn known_dead_letters(&self, ids: &[i64]) -> Result<Vec<i64>, Error> {
        let statement = format!("SELECT id FROM {} WHERE id = ANY ($1) ORDER BY id", self.tables.dead_letter);
        self.rows(&statement, &[(&ids, Type::INT8_ARRAY)], |row| row.try_get(0)).await
    }

    fn letters(&self) -> String {
        format!(
            "d.id, d.original_event_id, d.tenant_id, d.original_aggregate_type, d.original_aggregate_id, d.event_type,
               d.error_code, d.error_message, d.retry_count, {}, {}, {}, d.handled, {}, d.handler_notes,
               e.id AS row_id, e.status AS row_status
             FROM {} d LEFT JOIN {} e ON e.event_id = d.original_event_id",
            utc("d", "first_failed_at"),
            utc("d", "dead_letter_at"),
            seconds("d.dead_letter_at", "now()", "age_seconds"),
            utc("d", "handled_at"),
            self.tables.dead_letter,
            self.tables.events,
        )
    }
}

/// Whether the compensation `c` is what the headers of the dead letter `d` ask for.
pub(super) const LINKED: &str = "c.batch_id = d.headers ->> 'batch_id'
    AND c.operation_type = d.headers ->> 'compensate'
    AND c.item_index = CASE WHEN coalesce(d.headers ->> 'item_index', '0') ~ '^\\s*[-+]?\\d{1,9}\\s*$'
      THEN coalesce(d.headers ->> 'item_index', '0')::int END";

impl DeadLetterFilter {
    /// On the dead letter `d`; the parameters from `$1` to `$7` are those of [`Self::parameters`].
    pub(super) const CONDITION: &str = "($1::bool IS NULL OR d.handled = $1)
        AND ($2::text IS NULL OR d.error_code = $2) AND ($3::text IS NULL OR d.event_type = $3)
        AND ($4::text IS NULL OR d.tenant_id = $4) AND ($5::text IS NULL OR d.original_aggregate_type = $5)
        AND ($6::text IS NULL OR d.original_aggregate_id = $6)
        AND ($7::float8 IS NULL OR d.dead_letter_at >= now() - make_interval(secs => $7))";

    pub(super) fn parameters(&self) -> Vec<Parameter<'_>> {
        vec![
            (&self.handled, Type::BOOL),
            (&self.reason, Type::TEXT),
            (&self.event_type, Type::TEXT),
            (&self.tenant_id, Type::TEXT),
            (&self.aggregate_type, Type::TEXT),
            (&self.aggregate_id, Type::TEXT),
            (&self.since, Type::FLOAT8),
        ]
    }
}

fn read(row: &Row) -> Result<DeadLetterRow, Error> {
    Ok(DeadLetterRow {
        id: row.try_get("id")?,
        event_id: text(row, "original_event_id")?,
        tenant_id: some_text(row, "tenant_id")?,
        aggregate_type: text(row, "original_aggregate_type")?,
        aggregate_id: text(row, "original_aggregate_id")?,
        event_type: text(row, "event_type")?,
        error_code: row.try_get("error_code")?,
        error_message: some_text(row, "error_message")?,
        retry_count: row.try_get("retry_count")?,
        first_failed_at: row.try_get("first_failed_at")?,
        dead_letter_at: row.try_get("dead_letter_at")?,
        age_seconds: row.try_get("age_seconds")?,
        handled: row.try_get("handled")?,
        handled_at: row.try_get("handled_at")?,
        handler_notes: some_text(row, "handler_notes")?,
        row_id: row.try_get("row_id")?,
        row_status: row.try_get("row_status")?,
    })
}
