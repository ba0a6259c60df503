//! What waits in the outbox's tables: counts, never a row's values.

use std::time::Duration;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use crate::postgres::outbox::Tables;

/// Counts of rows that wait for someone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rows {
    /// Dead letters that nobody has seen to.
    pub dead_letters: i64,
    /// Compensations that an operator has to see to.
    pub compensations: i64,
    /// Rows whose retry was due for longer than was asked.
    pub overdue: i64,
    /// Rows held behind another one of their aggregate.
    pub held: i64,
    /// Rows that nobody took for longer than was asked. `None`: counting took too long.
    pub waiting: Option<i64>,
}

impl Rows {
    /// Counts. `age`: rows that wait for less are none of anybody's business.
    pub async fn read(client: &Client, tables: &Tables, age: Duration) -> Result<Self, Error> {
        let Tables { events, dead_letter, compensation, .. } = tables;
        let seconds = age.as_secs_f64();
        // Each by an index that holds only what is counted.
        let statement = format!(
            "SELECT (SELECT count(*) FROM {dead_letter} WHERE handled = false),
               (SELECT count(*) FROM {compensation} WHERE status = 'manual_required'),
               (SELECT count(*) FROM {events} WHERE next_retry_at < now() - make_interval(secs => $1)),
               (SELECT count(*) FROM {events} WHERE next_retry_at = 'infinity')"
        );
        let parameters = [(&seconds as &(dyn tokio_postgres::types::ToSql + Sync), Type::FLOAT8)];
        let rows = client.query_typed(&statement, &parameters).await?;
        let Some(row) = rows.first() else { return Ok(Self::default()) };
        // Waiting rows have no index of their own, since every delivery would pay for it.
        let waiting = format!(
            "SELECT count(*) FROM {events}
             WHERE status = 'pending' AND next_retry_at IS NULL AND created_at < now() - make_interval(secs => $1)"
        );
        let waiting = match client.query_typed(&waiting, &parameters).await {
            Ok(rows) => rows.first().map(|row| row.try_get(0)).transpose()?,
            Err(error) if error.code() == Some(&tokio_postgres::error::SqlState::QUERY_CANCELED) => None,
            Err(error) => return Err(error),
        };
        Ok(Self {
            dead_letters: row.try_get(0)?,
            compensations: row.try_get(1)?,
            overdue: row.try_get(2)?,
            held: row.try_get(3)?,
            waiting,
        })
    }
}
