//! Dead letters on their way back into the outbox.

use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use super::dead_letters::LINKED;
use super::{DeadLetterFilter, Desk, same_aggregate, text, waits};
use crate::postgres::names::literal;

/// A dead letter that may be replayed.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub id: i64,
    pub event_id: String,
    pub handled: bool,
    /// Seconds since its event was made; where its row is gone, since it failed first.
    pub made_seconds: f64,
    /// Seconds since it became a dead letter.
    pub dead_seconds: f64,
    /// The event's row, if it is still there.
    pub row_id: Option<i64>,
    pub row_status: Option<String>,
    /// Whether what is kept would make a row again: a payload that could not be read, or names that were empty, would
    /// not.
    pub is_whole: bool,
    /// Compensations of it that are not abandoned.
    pub compensations: Vec<i64>,
}

/// How a dead letter is replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// Under its own id.
    Again,
    /// Under a new id.
    Renamed(String),
    /// Not sent: the stream has it at this sequence.
    Stored(u64),
}

/// What became of a replay.
#[derive(Clone, Debug)]
pub struct Replayed {
    pub letter: i64,
    pub row_id: Option<i64>,
}

impl Desk<'_> {
    /// The dead letters with these ids.
    pub async fn candidates(&self, ids: &[i64]) -> Result<Vec<Candidate>, Error> {
        let statement = format!("{} WHERE d.id = ANY ($1) ORDER BY d.id", self.select_candidates());
        self.rows(&statement, &[(&ids, Type::INT8_ARRAY)], read).await
    }

    /// Dead letters above the id `after` that a filter means, in their order.
    pub async fn candidates_after(
        &self,
        filter: &DeadLetterFilter,
        after: i64,
        limit: i64,
    ) -> Result<Vec<Candidate>, Error> {
        let condition = DeadLetterFilter::CONDITION;
        let statement = format!("{} WHERE {condition} AND d.id > $8 ORDER BY d.id LIMIT $9", self.select_candidates());
        let mut parameters = filter.parameters();
        parameters.extend([(&after as _, Type::INT8), (&limit as _, Type::INT8)]);
        self.rows(&statement, &parameters, read).await
    }

    /// How many dead letters a filter means, and how many of them have a compensation that is not abandoned.
    pub async fn count_dead_letters(&self, filter: &DeadLetterFilter) -> Result<(i64, i64), Error> {
        let statement = format!(
            "SELECT count(*), count(*) FILTER (WHERE EXISTS (
               SELECT FROM {} c WHERE {LINKED} AND c.status <> 'abandoned'))
             FROM {} d WHERE {}",
            self.tables.compensation,
            self.tables.dead_letter,
            DeadLetterFilter::CONDITION
        );
        let read = |row: &Row| Ok((row.try_get(0)?, row.try_get(1)?));
        let counts = self.rows(&statement, &filter.parameters(), read).await?;
        Ok(counts.first().copied().unwrap_or_default())
    }

    /// Puts the events of dead letters back, each with its way, in one transaction that also marks the letters as
    /// handled. What was put back meanwhile by someone else is left out. Attempts start over.
    ///
    /// A row that is there comes back in its place: as the failed one that its aggregate waits for, unless an earlier
    /// one is that already; later ones that failed come again behind it, as if for the first time: the relay holds them
    /// as long as it has to. With `ordered` false nobody waits. A row that is gone is made anew, and comes last.
    pub async fn replay(&self, letters: &[(i64, Replay)], ordered: bool, again: bool) -> Result<Vec<Replayed>, Error> {
        let ids: Vec<i64> = letters.iter().map(|(id, _)| *id).collect();
        let names: Vec<Option<&str>> = letters
            .iter()
            .map(|(_, way)| match way {
                Replay::Renamed(name) => Some(name.as_str()),
                Replay::Again | Replay::Stored(_) => None,
            })
            .collect();
        let stored: Vec<Option<i64>> = letters
            .iter()
            .map(|(_, way)| match way {
                Replay::Stored(sequence) => i64::try_from(*sequence).ok(),
                Replay::Again | Replay::Renamed(_) => None,
            })
            .collect();
        let parameters = [
            (&ids as _, Type::INT8_ARRAY),
            (&names as _, Type::TEXT_ARRAY),
            (&stored as _, Type::INT8_ARRAY),
            (&ordered as _, Type::BOOL),
            (&again as _, Type::BOOL),
        ];
        let read = |row: &Row| Ok(Replayed { letter: row.try_get(0)?, row_id: row.try_get(1)? });
        self.rows(&self.replay_sql(), &parameters, read).await
    }

    /// The parts: `letter`, the letters that are still to be replayed; `dead`, their rows, with the place of each among
    /// those of its aggregate; `revived`, `stored` and `made`, what became of the events; `behind`, the later rows that
    /// failed; `done`, the letters.
    fn replay_sql(&self) -> String {
        let (events, dead_letter) = (&self.tables.events, &self.tables.dead_letter);
        let waits_before = format!(
            "EXISTS (SELECT FROM {events} w WHERE {} AND {} AND w.id < e.id)",
            same_aggregate("w", "e"),
            waits("w")
        );
        format!(
            "WITH letter AS MATERIALIZED (
               SELECT d.*, given.name, given.sequence
               FROM unnest($1::int8[], $2::text[], $3::int8[]) AS given(letter, name, sequence)
               JOIN {dead_letter} d ON d.id = given.letter AND (NOT d.handled OR $5)
               FOR NO KEY UPDATE OF d),
             dead AS MATERIALIZED (
               SELECT l.id AS letter, l.name, l.sequence, e.id,
                 $4 AND ({waits_before} OR l.sequence IS NULL AND row_number() OVER (
                   PARTITION BY e.tenant_id, e.aggregate_type, e.aggregate_id, l.sequence IS NULL ORDER BY e.id) > 1)
                   AS is_later
               FROM letter l JOIN {events} e ON e.event_id = l.original_event_id AND e.status = 'dead_letter'),
             revived AS (
               UPDATE {events} e SET event_id = coalesce(dead.name, e.event_id),
                 status = CASE WHEN is_later THEN 'pending' ELSE 'failed' END, next_retry_at = now(), retry_count = 0,
                 dead_letter_reason = NULL, updated_at = now(), version = e.version + 1
               FROM dead WHERE e.id = dead.id AND e.status = 'dead_letter' AND dead.sequence IS NULL
               RETURNING dead.letter, e.id, e.status, e.tenant_id, e.aggregate_type, e.aggregate_id),
             behind AS (
               UPDATE {events} w SET status = 'pending', next_retry_at = now(), updated_at = now(),
                 version = w.version + 1
               FROM revived WHERE $4 AND revived.status = 'failed' AND {behind} AND w.id > revived.id
                 AND w.status = 'failed' AND w.next_retry_at IS NOT NULL),
             stored AS (
               UPDATE {events} e SET status = 'completed', processed_at = now(), next_retry_at = NULL, updated_at = now(),
                 version = e.version + 1
               FROM dead WHERE e.id = dead.id AND e.status = 'dead_letter' AND dead.sequence IS NOT NULL
               RETURNING dead.letter, e.id),
             made AS (
               INSERT INTO {events} (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, headers,
                 next_retry_at, error_code, error_message, first_failed_at, created_at)
               SELECT coalesce(name, original_event_id), tenant_id, original_aggregate_type, original_aggregate_id,
                 event_type, payload, headers, now(), error_code, error_message, first_failed_at,
                 least(first_failed_at, now())
               FROM letter l
               WHERE sequence IS NULL AND NOT EXISTS (SELECT FROM {events} e WHERE e.event_id = l.original_event_id)
               ORDER BY l.id
               ON CONFLICT DO NOTHING
               RETURNING id, event_id),
             replayed AS (
               SELECT letter, id FROM revived UNION ALL SELECT letter, id FROM stored
               UNION ALL SELECT l.id, m.id FROM made m JOIN letter l ON m.event_id = coalesce(l.name, l.original_event_id)
               UNION ALL SELECT l.id, NULL FROM letter l WHERE sequence IS NOT NULL
                 AND NOT EXISTS (SELECT FROM {events} e WHERE e.event_id = l.original_event_id)),
             done AS (
               UPDATE {dead_letter} d SET handled = true, handled_at = now(),
                 handler_notes = concat_ws('; ', d.handler_notes, CASE
                   WHEN l.sequence IS NOT NULL THEN 'found in the stream at sequence ' || l.sequence
                   WHEN l.name IS NOT NULL THEN 'replayed as event ' || l.name ELSE 'replayed' END)
               FROM replayed r JOIN letter l ON l.id = r.letter
               WHERE d.original_event_id = l.original_event_id AND (NOT d.handled OR d.id = l.id))
             SELECT letter, id FROM replayed ORDER BY letter",
            behind = same_aggregate("w", "revived"),
        )
    }

    /// An adopted table may have ids that are longer than a dead letter keeps: of those the end may be missing.
    fn select_candidates(&self) -> String {
        let is_whole_id = format!(
            "(length(d.original_event_id) < 64 OR (SELECT atttypmod = 68 FROM pg_catalog.pg_attribute
               WHERE attrelid = {}::regclass AND attname = 'event_id'))",
            literal(&self.tables.events)
        );
        format!(
            "SELECT d.id, d.original_event_id, d.handled,
               extract(epoch FROM now() - coalesce(e.created_at, d.first_failed_at))::float8 AS made_seconds,
               extract(epoch FROM now() - d.dead_letter_at)::float8 AS dead_seconds,
               e.id AS row_id, e.status AS row_status,
               d.payload <> 'null' AND {is_whole_id} AND d.original_event_id ~ '^[!-~]+$' AND d.original_aggregate_type <> ''
                 AND d.original_aggregate_id <> '' AND d.event_type <> '' AND coalesce(d.tenant_id, '-') <> ''
                 AND jsonb_typeof(d.headers) = 'object' AS is_whole,
               ARRAY(SELECT c.id FROM {} c WHERE {LINKED} AND c.status <> 'abandoned' ORDER BY c.id) AS compensations
             FROM {} d LEFT JOIN {} e ON e.event_id = d.original_event_id",
            self.tables.compensation, self.tables.dead_letter, self.tables.events
        )
    }
}

fn read(row: &Row) -> Result<Candidate, Error> {
    Ok(Candidate {
        id: row.try_get("id")?,
        event_id: text(row, "original_event_id")?,
        handled: row.try_get("handled")?,
        made_seconds: row.try_get("made_seconds")?,
        dead_seconds: row.try_get("dead_seconds")?,
        row_id: row.try_get("row_id")?,
        row_status: row.try_get("row_status")?,
        is_whole: row.try_get("is_whole")?,
        compensations: row.try_get("compensations")?,
    })
}
