//! Rows of the outbox, for operators to look at.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use super::super::due::lease_end;
use super::{Desk, End, Page, Parameter, json, one_more, same_aggregate, seconds, some_text, text, utc, waits};

/// Rows that one statement looks at, at most, where no index knows what is looked for.
const STRIDE: i64 = 100_000;

/// The states of a row: its status, where `pending` is told apart from rows that wait for a date or are held.
pub const STATES: [&str; 7] = ["pending", "scheduled", "held", "processing", "failed", "completed", "dead_letter"];

/// Which rows are listed; what is `None` does not matter.
#[derive(Clone, Debug, Default)]
pub struct EventFilter {
    /// One of [`STATES`].
    pub state: Option<String>,
    pub event_type: Option<String>,
    pub tenant_id: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    /// Not older than this, in seconds.
    pub since: Option<f64>,
}

/// A row as it is listed. Times are RFC 3339 in UTC.
#[derive(Clone, Debug, Serialize)]
pub struct EventRow {
    pub id: i64,
    pub event_id: String,
    pub tenant_id: Option<String>,
    pub aggregate_type: String,
    pub aggregate_id: String,
    pub event_type: String,
    /// One of [`STATES`].
    pub state: String,
    pub retry_count: i32,
    pub max_retries: i32,
    pub created_at: Option<String>,
    pub age_seconds: Option<f64>,
    pub next_retry_at: Option<String>,
    /// Until then, or until the lease of a poller that dated none ends. Below zero: it is overdue.
    pub next_retry_seconds: Option<f64>,
    /// The row that a held one waits for.
    pub held_behind: Option<i64>,
    pub error_code: Option<String>,
    pub error_message: Option<String>,
}

/// A row with all that the table knows of it.
#[derive(Clone, Debug, Serialize)]
pub struct EventStory {
    #[serde(flatten)]
    pub row: EventRow,
    /// The row of its aggregate that a failed one waits for, since that comes before it.
    pub behind: Option<i64>,
    pub first_failed_at: Option<String>,
    pub dead_letter_reason: Option<String>,
    pub locked_by: Option<String>,
    pub locked_at: Option<String>,
    pub processed_at: Option<String>,
    /// Seconds since it was completed.
    pub processed_seconds: Option<f64>,
    pub updated_at: Option<String>,
    pub version: i64,
    pub deduplication_key: Option<String>,
    pub headers: Value,
    /// Bytes as PostgreSQL prints it.
    pub payload_bytes: i64,
    /// As PostgreSQL prints it; `None` unless it was asked for.
    pub payload: Option<Box<RawValue>>,
}

impl Desk<'_> {
    /// Rows below the id `after`, the newest first. Where no index knows the rows that are wanted, the table is looked
    /// through from its newest row down, for as long as `patience`.
    ///
    /// Rows of an older schema that failed, or were claimed, and have no date are not listed as failed or processing: a
    /// relay takes them with its next sweep.
    pub async fn events(
        &self,
        filter: &EventFilter,
        after: Option<i64>,
        limit: usize,
        patience: Duration,
    ) -> Result<Page<EventRow>, Error> {
        let mut below = after.unwrap_or(i64::MAX);
        if filter.has_index() {
            return Ok(Page::cut(self.between(filter, i64::MIN, below, limit).await?, limit, |row| row.id));
        }
        let started = Instant::now();
        let mut rows = Vec::new();
        let mut bottom = None;
        while let Some(floor) = self.stride(below).await? {
            rows.extend(self.between(filter, floor, below, limit.saturating_sub(rows.len())).await?);
            if rows.len() > limit {
                break;
            }
            below = floor;
            if let (None, Some(since)) = (bottom, filter.since) {
                bottom = Some(self.lowest_since(since).await?.unwrap_or(i64::MAX));
            }
            if bottom.is_some_and(|bottom| below <= bottom) {
                break;
            }
            if started.elapsed() >= patience {
                return Ok(Page { rows, end: End::Patience(below) });
            }
        }
        Ok(Page::cut(rows, limit, |row| row.id))
    }

    /// The whole story of a row, by its id (where the name is a number) or its event's id.
    pub async fn event(&self, name: &str, payload: bool) -> Result<Option<EventStory>, Error> {
        if let Ok(id) = name.parse::<i64>()
            && let Some(story) = self.event_where("e.id = $1", (&id, Type::INT8), payload).await?
        {
            return Ok(Some(story));
        }
        self.event_where("e.event_id = $1", (&name, Type::TEXT), payload).await
    }

    async fn event_where(
        &self,
        condition: &str,
        parameter: Parameter<'_>,
        payload: bool,
    ) -> Result<Option<EventStory>, Error> {
        let statement = format!(
            "SELECT {}, (SELECT min(w.id) FROM {events} w WHERE {} AND {} AND w.id < e.id AND e.status = 'failed')
                 AS behind, {}, dead_letter_reason, locked_by, {}, {}, {}, {}, version,
               deduplication_key, headers::text AS headers, octet_length(payload::text)::int8 AS payload_bytes,
               CASE WHEN $2 THEN payload::text END AS payload
             FROM {events} e WHERE {condition}",
            columns(),
            same_aggregate("w", "e"),
            waits("w"),
            utc("e", "first_failed_at"),
            utc("e", "locked_at"),
            utc("e", "processed_at"),
            seconds("e.processed_at", "now()", "processed_seconds"),
            utc("e", "updated_at"),
            events = self.tables.events,
        );
        let mut found = self.rows(&statement, &[parameter, (&payload, Type::BOOL)], read_story).await?.pop();
        if let Some(story) = &mut found {
            self.note_what_holds(std::slice::from_mut(&mut story.row)).await?;
        }
        Ok(found)
    }

    /// Rows from `floor` to below `below`.
    async fn between(
        &self,
        filter: &EventFilter,
        floor: i64,
        below: i64,
        limit: usize,
    ) -> Result<Vec<EventRow>, Error> {
        let statement = format!(
            "SELECT {} FROM {} e WHERE {} AND e.id >= $6 AND e.id < $7 ORDER BY e.id DESC LIMIT $8",
            columns(),
            self.tables.events,
            filter.condition(&self.tables.dead_letter),
        );
        let limit = one_more(limit);
        let mut parameters = filter.parameters();
        parameters.extend([(&floor as _, Type::INT8), (&below as _, Type::INT8), (&limit as _, Type::INT8)]);
        let mut rows = self.rows(&statement, &parameters, read).await?;
        self.note_what_holds(&mut rows).await?;
        Ok(rows)
    }

    /// The lowest id of the next rows below one; `None` when there is none.
    async fn stride(&self, below: i64) -> Result<Option<i64>, Error> {
        let statement = format!(
            "SELECT min(id) FROM (SELECT id FROM {} WHERE id < $1 ORDER BY id DESC LIMIT {STRIDE}) AS next",
            self.tables.events
        );
        let rows = self.rows(&statement, &[(&below, Type::INT8)], |row| row.try_get(0)).await?;
        Ok(rows.into_iter().next().flatten())
    }

    /// The lowest id of rows that are not older. The OFFSET makes the server look at them by their age.
    async fn lowest_since(&self, since: f64) -> Result<Option<i64>, Error> {
        let statement = format!(
            "SELECT min(id) FROM (
               SELECT id FROM {} WHERE created_at >= now() - make_interval(secs => $1) OFFSET 0) AS young",
            self.tables.events
        );
        let rows = self.rows(&statement, &[(&since, Type::FLOAT8)], |row| row.try_get(0)).await?;
        Ok(rows.into_iter().next().flatten())
    }

    /// Finds out what held rows wait for.
    async fn note_what_holds(&self, rows: &mut [EventRow]) -> Result<(), Error> {
        let held: Vec<i64> = rows.iter().filter(|row| row.state == "held").map(|row| row.id).collect();
        if held.is_empty() {
            return Ok(());
        }
        let statement = format!(
            "SELECT e.id, (SELECT min(w.id) FROM {events} w WHERE {} AND {}) FROM {events} e WHERE e.id = ANY ($1)",
            same_aggregate("w", "e"),
            waits("w"),
            events = self.tables.events,
        );
        let read = |row: &Row| Ok((row.try_get::<_, i64>(0)?, row.try_get::<_, Option<i64>>(1)?));
        let behind = self.rows(&statement, &[(&held, Type::INT8_ARRAY)], read).await?;
        let behind: std::collections::HashMap<i64, Option<i64>> = behind.into_iter().collect();
        for row in rows {
            row.held_behind = behind.get(&row.id).copied().flatten();
        }
        Ok(())
    }
}

impl EventFilter {
    /// Whether few rows are wanted, and an index knows them.
    fn has_index(&self) -> bool {
        let waits = ["scheduled", "held", "processing", "failed", "dead_letter"];
        self.state.as_deref().is_some_and(|state| waits.contains(&state))
            || self.aggregate_type.is_some() && self.aggregate_id.is_some()
    }

    /// On the row `e`; the parameters from `$1` to `$5` are those of [`Self::parameters`].
    pub(super) fn condition(&self, dead_letter: &str) -> String {
        let state = match self.state.as_deref() {
            None => "true".to_owned(),
            // The table of dead letters is the shorter one.
            Some("dead_letter") => {
                format!("e.status = 'dead_letter' AND e.event_id IN (SELECT original_event_id FROM {dead_letter})")
            }
            Some(state @ ("failed" | "processing")) => format!("e.next_retry_at IS NOT NULL AND {}", shows(state)),
            Some(state) => shows(state),
        };
        format!(
            "{state} AND ($1::text IS NULL OR e.event_type = $1) AND ($2::text IS NULL OR e.tenant_id = $2)
             AND ($3::text IS NULL OR e.aggregate_type = $3) AND ($4::text IS NULL OR e.aggregate_id = $4)
             AND ($5::float8 IS NULL OR e.created_at >= now() - make_interval(secs => $5))"
        )
    }

    pub(super) fn parameters(&self) -> Vec<Parameter<'_>> {
        vec![
            (&self.event_type, Type::TEXT),
            (&self.tenant_id, Type::TEXT),
            (&self.aggregate_type, Type::TEXT),
            (&self.aggregate_id, Type::TEXT),
            (&self.since, Type::FLOAT8),
        ]
    }
}

/// How the row `e` shows a state.
fn shows(state: &str) -> String {
    match state {
        "pending" => "e.status = 'pending' AND e.next_retry_at IS NULL".to_owned(),
        "scheduled" => "e.status = 'pending' AND e.next_retry_at < 'infinity'".to_owned(),
        "held" => "e.status = 'pending' AND e.next_retry_at = 'infinity'".to_owned(),
        status => format!("e.status = '{status}'"),
    }
}

/// What is read of the row `e`. An adopted table may allow NULL where ours does not.
fn columns() -> String {
    let states: Vec<String> = STATES.iter().map(|state| format!("WHEN {} THEN '{state}'", shows(state))).collect();
    format!(
        "e.id, coalesce(e.event_id, '') AS event_id, e.tenant_id, coalesce(e.aggregate_type, '') AS aggregate_type,
         coalesce(e.aggregate_id, '') AS aggregate_id, coalesce(e.event_type, '') AS event_type,
         CASE {} ELSE e.status END AS state, e.retry_count, e.max_retries, {}, {}, {}, {}, e.error_code, e.error_message",
        states.join(" "),
        utc("e", "created_at"),
        seconds("e.created_at", "now()", "age_seconds"),
        utc("e", "next_retry_at"),
        seconds("now()", &lease_end("e"), "next_retry_seconds"),
    )
}

fn read(row: &Row) -> Result<EventRow, Error> {
    Ok(EventRow {
        id: row.try_get("id")?,
        event_id: text(row, "event_id")?,
        tenant_id: some_text(row, "tenant_id")?,
        aggregate_type: text(row, "aggregate_type")?,
        aggregate_id: text(row, "aggregate_id")?,
        event_type: text(row, "event_type")?,
        state: row.try_get("state")?,
        retry_count: row.try_get("retry_count")?,
        max_retries: row.try_get("max_retries")?,
        created_at: row.try_get("created_at")?,
        age_seconds: row.try_get("age_seconds")?,
        next_retry_at: row.try_get("next_retry_at")?,
        next_retry_seconds: row.try_get("next_retry_seconds")?,
        held_behind: None,
        error_code: row.try_get("error_code")?,
        error_message: some_text(row, "error_message")?,
    })
}

fn read_story(row: &Row) -> Result<EventStory, Error> {
    Ok(EventStory {
        row: read(row)?,
        behind: row.try_get("behind")?,
        first_failed_at: row.try_get("first_failed_at")?,
        dead_letter_reason: some_text(row, "dead_letter_reason")?,
        locked_by: some_text(row, "locked_by")?,
        locked_at: row.try_get("locked_at")?,
        processed_at: row.try_get("processed_at")?,
        processed_seconds: row.try_get("processed_seconds")?,
        updated_at: row.try_get("updated_at")?,
        version: row.try_get("version")?,
        deduplication_key: some_text(row, "deduplication_key")?,
        headers: json(row, "headers")?,
        payload_bytes: row.try_get("payload_bytes")?,
        payload: raw(some_text(row, "payload")?),
    })
}

/// JSON text as it is. PostgreSQL prints nothing else for `jsonb`.
pub(super) fn raw(text: Option<String>) -> Option<Box<RawValue>> {
    RawValue::from_string(text?).ok()
}
