//! Every statement on the outbox tables.

mod compensations;
mod drain;
mod due;
mod locks;
mod retention;
mod rows;
mod state;
mod waiting;
mod writeback;
mod writeback_sql;

pub use compensations::{Attempted, Claim, Compensation};
pub use drain::WaitingRows;
pub use due::{Due, DueRow, HeldRows};
pub use locks::{holders as lock_holders, is_locked};
pub use retention::Retention;
pub use rows::COLUMNS;
pub use state::{NOTE_REACH, RelayState, StateRow};
pub use waiting::{LOOK_ROWS, Waiting, waiting};
pub use writeback::{Place, Recorded, Writeback};

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use crate::config::TableName;
use crate::postgres::names::in_schema;

/// The quoted names of the tables, for statements.
#[derive(Clone, Debug)]
pub struct Tables {
    pub events: String,
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
            dead_letter: in_schema(events, "outbox_dead_letter"),
            state: in_schema(events, "outbox_relay_state"),
            compensation: in_schema(events, "supply_batch_compensation"),
            compensate: in_schema(events, "outbox_relay_compensate"),
        }
    }
}

/// Of rows that were read from the log again: which have an outcome, or belong to someone, so that they must not be
/// sent. Rows that are pending and free, or gone, are not among them.
///
/// Returns the ids, and of each whether the row waits there, for a retry or behind one that does: events after it in its
/// aggregate wait for it.
pub async fn taken_care_of(
    client: &Client,
    tables: &Tables,
    ids: &[i64],
    event_ids: &[&str],
) -> Result<Vec<(i64, bool)>, tokio_postgres::Error> {
    let statement = format!(
        "SELECT o.id, {} FROM unnest($1, $2) AS u(id, event_id)
         JOIN {} o ON o.id = u.id AND o.event_id = u.event_id
         WHERE o.status <> 'pending' OR o.next_retry_at IS NOT NULL",
        due::waits("o"),
        tables.events
    );
    let rows = client.query_typed(&statement, &[(&ids, Type::INT8_ARRAY), (&event_ids, Type::TEXT_ARRAY)]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

/// PostgreSQL's `text` holds no zero byte.
fn printable(message: &str) -> String {
    message.replace('\0', "\u{FFFD}")
}
