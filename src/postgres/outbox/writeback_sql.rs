//! The statements of write-back.

use super::Tables;
use super::due::full_xid;
use crate::config::OnSuccess;

/// The rows that a statement speaks of, by both of their ids, and the place of each in the parameters.
const GIVEN: &str = "unnest($1::int8[], $2::text[]) WITH ORDINALITY AS given(id, event_id, position)";

/// Whether the row `o` is the event `event_id` (and has its `id`). An id that could not be read is empty here: it means
/// any that is no id.
fn same_event(event_id: &str) -> String {
    format!("(o.event_id = {event_id} OR {event_id} = '' AND (o.event_id ~ '^[!-~]+$') IS NOT TRUE)")
}

/// Notes the place in the transaction of the statement that it is part of, whose parameters from `first` on are the
/// slot, the sequence and the position. No row comes of it where the relay's own is gone.
fn place_sql(tables: &Tables, first: usize) -> String {
    format!(
        "UPDATE {} SET stream_seq = greatest(stream_seq, ${}::int8), updated_at = now(),
           confirmed_lsn = coalesce(nullif(${}::text::pg_lsn, '0/0'), confirmed_lsn)
         WHERE slot_name = ${first}::text RETURNING true",
        tables.state,
        first + 1,
        first + 2
    )
}

/// Notes the place alone.
pub(super) fn note_sql(tables: &Tables) -> String {
    place_sql(tables, 1)
}

/// An acknowledgement is a fact: it completes a row whatever its lease. The event's id is compared as well, because
/// a truncated table may count its rows from one again. As with every statement beside it, the last column tells
/// whether the place was noted.
pub(super) fn complete_sql(tables: &Tables, on_success: OnSuccess, skip_locked: bool) -> String {
    let Tables { events, .. } = tables;
    let state = place_sql(tables, 3);
    let open = "o.status NOT IN ('completed', 'dead_letter')";
    let (free, rows) = if skip_locked {
        let free = format!(
            "free AS MATERIALIZED (SELECT given.position, o.id, o.event_id FROM {GIVEN}
               JOIN {events} o ON o.id = given.id AND o.event_id = given.event_id AND {open}
               FOR NO KEY UPDATE OF o SKIP LOCKED),"
        );
        (free, "free AS given")
    } else {
        (String::new(), GIVEN)
    };
    let change = match on_success {
        OnSuccess::Complete => format!(
            "UPDATE {events} o SET status = 'completed', processed_at = now(), updated_at = now(),
               version = o.version + 1, next_retry_at = NULL, locked_by = NULL, locked_at = NULL
             FROM {rows}"
        ),
        OnSuccess::Delete => format!("DELETE FROM {events} o USING {rows}"),
    };
    format!(
        "WITH {free} place AS ({state}),
         done AS ({change} WHERE o.id = given.id AND o.event_id = given.event_id AND {open} RETURNING given.position)
         SELECT coalesce(array_agg(position), '{{}}'), EXISTS (SELECT FROM place) FROM done"
    )
}

/// One transaction counts the failure (unless the event is spared) and, when it was the last, writes the dead letter
/// and the compensation that it asks for. Returns the status, and whether that compensation is there (null: none is
/// asked for); no status where the row could not be had. A row that counts more failures than the event knew of was
/// written by an earlier try of the same. What an adopted table allows to be longer than a dead letter's columns is cut:
/// it must not keep the dead letter from being written.
pub(super) fn fail_sql(tables: &Tables) -> String {
    let Tables { events, dead_letter, compensate, .. } = tables;
    let state = place_sql(tables, 6);
    let event = same_event("$2::text");
    let last = "($5::float8 IS NULL OR ($10::bool AND o.retry_count + 1 >= o.max_retries))";
    format!(
        "WITH place AS ({state}),
         free AS MATERIALIZED (
           SELECT o.id FROM {events} o
           WHERE o.id = $1 AND {event} AND o.status IN ('pending', 'processing', 'failed')
             AND o.retry_count <= $9::int4
           FOR NO KEY UPDATE SKIP LOCKED),
         failed AS (
           UPDATE {events} o SET
             status = CASE WHEN {last} THEN 'dead_letter' ELSE 'failed' END,
             retry_count = o.retry_count + $10::bool::int4,
             error_code = $3::text, error_message = $4::text,
             first_failed_at = coalesce(o.first_failed_at, now()),
             dead_letter_reason = CASE WHEN {last} THEN $4::text END,
             next_retry_at = CASE WHEN NOT {last} THEN now() + make_interval(secs => $5::float8) END,
             locked_by = NULL, locked_at = NULL, updated_at = now(), version = o.version + 1
           FROM free WHERE o.id = free.id
           RETURNING o.*),
         buried AS (
           INSERT INTO {dead_letter} (original_event_id, original_aggregate_type, original_aggregate_id, tenant_id,
             event_type, payload, headers, error_code, error_message, retry_count, first_failed_at)
           SELECT left(coalesce(event_id, ''), 64), left(coalesce(aggregate_type, ''), 64), left(coalesce(aggregate_id, ''), 128),
             left(tenant_id, 64), left(coalesce(event_type, ''), 128), coalesce(payload, 'null'), coalesce(headers, '{{}}'), error_code,
             error_message, retry_count, first_failed_at
           FROM failed WHERE status = 'dead_letter')
         SELECT status::text,
           CASE WHEN status = 'dead_letter' THEN {compensate}(headers, payload, error_message) END,
           EXISTS (SELECT FROM place)
         FROM (VALUES (true)) AS always LEFT JOIN failed ON true"
    )
}

/// Holds rows until the reconciler releases them: also one that its producer had dated and that has come due, which
/// would stay due for ever otherwise. Behind a row that is locked or not visible yet, none of the same aggregate, which
/// `$6` numbers, is held: the next session might release it before that one.
pub(super) fn hold_sql(tables: &Tables) -> String {
    let Tables { events, .. } = tables;
    let state = place_sql(tables, 3);
    format!(
        "WITH place AS ({state}),
         given AS MATERIALIZED (
           SELECT * FROM unnest($1::int8[], $2::text[], $6::int8[]) WITH ORDINALITY AS given(id, event_id, line, position)),
         free AS MATERIALIZED (
           SELECT given.line, given.position, o.id FROM given
           JOIN {events} o ON o.id = given.id AND o.event_id = given.event_id
             AND o.status = 'pending' AND coalesce(o.next_retry_at <= now(), true)
           FOR NO KEY UPDATE OF o SKIP LOCKED),
         stuck AS (
           SELECT given.line, min(given.position) AS position FROM given
           LEFT JOIN {events} o ON o.id = given.id AND o.event_id = given.event_id
           WHERE given.position NOT IN (SELECT position FROM free)
             AND coalesce(o.status = 'pending' AND coalesce(o.next_retry_at <= now(), true), true)
           GROUP BY given.line),
         held AS (
           UPDATE {events} o SET next_retry_at = 'infinity', updated_at = now(), version = o.version + 1
           FROM free LEFT JOIN stuck USING (line)
           WHERE o.id = free.id AND coalesce(free.position < stuck.position, true) RETURNING free.position)
         SELECT coalesce(array_agg(position), '{{}}'), EXISTS (SELECT FROM place) FROM held"
    )
}

/// The dead letter of an event whose row is gone, once (but for events whose id could not be read), and the
/// compensation that it asks for. Returns whether that is there.
pub(super) fn bury_sql(tables: &Tables) -> String {
    let Tables { dead_letter, compensate, .. } = tables;
    format!(
        "WITH buried AS (
           INSERT INTO {dead_letter} (original_event_id, original_aggregate_type, original_aggregate_id, tenant_id,
             event_type, payload, headers, error_code, error_message, retry_count, first_failed_at)
           SELECT left($1::text, 64), left($2::text, 64), left($3::text, 128), left($4::text, 64), left($5::text, 128),
             coalesce($6::text::jsonb, 'null'),
             coalesce($7::text::jsonb, '{{}}'), $8::text, $9::text, $10::int4, now()
           WHERE $1::text = '' OR NOT EXISTS (SELECT FROM {dead_letter} WHERE original_event_id = left($1::text, 64))
           RETURNING headers, payload, error_message)
         SELECT {compensate}(headers, payload, error_message) FROM buried"
    )
}

/// Whether rows stand in the table, and whether the transactions that inserted them are visible to the very snapshot
/// that looked.
pub(super) fn look_sql(tables: &Tables) -> String {
    format!(
        "WITH now AS MATERIALIZED (
           SELECT pg_current_snapshot() AS snapshot, pg_snapshot_xmax(pg_current_snapshot())::text::int8 AS xmax)
         SELECT given.position, o.status::text,
           given.xid IS NULL OR pg_visible_in_snapshot({}, snapshot),
           o.retry_count, coalesce(o.next_retry_at > now(), false)
         FROM now, unnest($1::int8[], $2::text[], $3::int8[]) WITH ORDINALITY
           AS given(id, event_id, xid, position)
         LEFT JOIN {} o ON o.id = given.id AND {}",
        full_xid("given.xid", "xmax"),
        tables.events,
        same_event("given.event_id")
    )
}
