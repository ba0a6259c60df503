//! What the relay, and operators at its desk, do with the outbox tables. Programs that enqueue or poll use
//! [`store`](super::store).

mod compensations;
mod completed;
pub mod desk;
mod drain;
mod due;
mod locks;
mod overview;
mod retention;
mod rows;
mod state;
mod waiting;
mod writeback;
mod writeback_sql;

pub use compensations::{Attempted, Claim, Compensation, Texts};
pub use completed::{Completed, CompletedRow, CompletedRows};
pub use drain::WaitingRows;
pub use due::{Due, DueRow, HeldRows, Seen, blocked, held_aggregates, snapshot};
pub use locks::{holders as lock_holders, is_locked};
pub use overview::{Overview, Tally, overview};
pub use retention::Retention;
pub use rows::COLUMNS;
pub use state::{NOTE_REACH, RelayState, StateRow};
pub use waiting::{LOOK_ROWS, Waiting, waiting};
pub use writeback::{Place, Recorded, Writeback};

use std::collections::HashSet;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use self::rows::Raw;
use crate::config::TableName;
use crate::postgres::names::in_schema;

/// The quoted names of the tables, for statements.
#[derive(Clone, Debug)]
pub struct Tables {
    pub events: String,
    /// Where the rows stand that are this relay's to look for: the whole table, unless the publication has a row
    /// filter. Needs an alias.
    pub share: String,
    pub dead_letter: String,
    pub state: String,
    pub compensation: String,
    /// The function that creates the compensation which a dead letter asks for.
    pub compensate: String,
}

impl Tables {
    /// The tables that belong to the events table: they share its schema.
    pub fn of(events: &TableName) -> Self {
        Self {
            events: events.to_string(),
            share: events.to_string(),
            dead_letter: in_schema(events, "outbox_dead_letter"),
            state: in_schema(events, "outbox_relay_state"),
            compensation: in_schema(events, "supply_batch_compensation"),
            compensate: in_schema(events, "outbox_relay_compensate"),
        }
    }

    /// Leaves the rows that the publication hides to other relays.
    ///
    /// `filter`: the row filter as PostgreSQL prints it (`PublicationFlaw::RowFilter`).
    pub fn leave_hidden(&mut self, filter: &str) {
        self.share = format!("(SELECT *, xmin FROM {} WHERE {filter})", self.events);
    }
}

/// Of rows that were read from the log again: which have an outcome, or belong to someone, so that they must not be
/// sent. Rows that are pending and free, or gone, are not among them.
///
/// Returns the ids, and of each whether the row waits there, for a retry or behind one that does: events after it in
/// its aggregate wait for it.
pub async fn taken_care_of(
    client: &Client,
    tables: &Tables,
    ids: &[i64],
    event_ids: &[&str],
) -> Result<Vec<(i64, bool)>, tokio_postgres::Error> {
    let (Some(&least), Some(&most)) = (ids.iter().min(), ids.iter().max()) else { return Ok(Vec::new()) };
    let (waits, events) = (due::waits("o"), &tables.events);
    let taken = "(o.status <> 'pending' OR o.next_retry_at IS NOT NULL)";
    let rows = if most.abs_diff(least) < 2 * ids.len() as u64 {
        // The rows of a backlog stand side by side: one walk along them costs a fraction of a search for each.
        let statement =
            format!("SELECT o.id, {waits}, o.event_id::text FROM {events} o WHERE o.id BETWEEN $1 AND $2 AND {taken}");
        client.query_typed(&statement, &[(&least, Type::INT8), (&most, Type::INT8)]).await?
    } else {
        let statement = format!(
            "SELECT o.id, {waits}, o.event_id::text FROM unnest($1, $2) AS u(id, event_id)
             JOIN {events} o ON o.id = u.id AND o.event_id = u.event_id WHERE {taken}"
        );
        client.query_typed(&statement, &[(&ids, Type::INT8_ARRAY), (&event_ids, Type::TEXT_ARRAY)]).await?
    };
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    // By both ids: a truncated table may count its rows from one again.
    let asked: HashSet<(i64, &[u8])> = ids.iter().copied().zip(event_ids.iter().map(|id| id.as_bytes())).collect();
    let mut found = Vec::with_capacity(rows.len());
    for row in &rows {
        let id = row.try_get(0)?;
        if row.try_get::<_, Option<Raw<'_>>>(2)?.is_some_and(|Raw(event_id)| asked.contains(&(id, event_id))) {
            found.push((id, row.try_get(1)?));
        }
    }
    Ok(found)
}

/// PostgreSQL's `text` holds no zero byte.
fn printable(message: &str) -> String {
    message.replace('\0', "\u{FFFD}")
}
