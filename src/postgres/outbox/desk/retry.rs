//! Failed rows made due.

use tokio_postgres::Error;
use tokio_postgres::types::Type;

use super::{Desk, EventFilter, same_aggregate, waits};

impl Desk<'_> {
    /// Makes failed rows due now; `reset`: they get their attempts again. With `ordered`, a row that comes behind one
    /// of its aggregate that waits is left as it is, since it may not overtake. Returns the ids of those that are due
    /// now, each with its event's.
    pub async fn retry(&self, ids: &[i64], reset: bool, ordered: bool) -> Result<Vec<(i64, String)>, Error> {
        let statement = format!(
            "UPDATE {events} e SET next_retry_at = now(), updated_at = now(), version = e.version + 1,
               retry_count = CASE WHEN $2 THEN 0 ELSE e.retry_count END
             WHERE e.id = ANY ($1) AND e.status = 'failed' AND (NOT $3 OR NOT EXISTS (
               SELECT FROM {events} w WHERE {} AND {} AND w.id < e.id))
             RETURNING e.id, e.event_id",
            same_aggregate("w", "e"),
            waits("w"),
            events = self.tables.events,
        );
        let parameters = [(&ids as _, Type::INT8_ARRAY), (&reset as _, Type::BOOL), (&ordered as _, Type::BOOL)];
        self.rows(&statement, &parameters, |row| Ok((row.try_get(0)?, row.try_get(1)?))).await
    }

    /// Ids of failed rows above `after`, in their order.
    pub async fn failed_after(&self, filter: &EventFilter, after: i64, limit: i64) -> Result<Vec<i64>, Error> {
        let statement = format!(
            "SELECT e.id FROM {} e WHERE {} AND e.id > $6 ORDER BY e.id LIMIT $7",
            self.tables.events,
            filter.condition(&self.tables.dead_letter),
        );
        let mut parameters = filter.parameters();
        parameters.extend([(&after as _, Type::INT8), (&limit as _, Type::INT8)]);
        self.rows(&statement, &parameters, |row| row.try_get(0)).await
    }

    /// How many rows the filter means.
    pub async fn count_events(&self, filter: &EventFilter) -> Result<i64, Error> {
        let condition = filter.condition(&self.tables.dead_letter);
        let statement = format!("SELECT count(*) FROM {} e WHERE {condition}", self.tables.events);
        self.count(&statement, &filter.parameters()).await
    }
}
