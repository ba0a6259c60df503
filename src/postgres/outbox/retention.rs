//! Completed rows go when they are old enough.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::Tables;
use crate::flow::lsn::Lsn;

/// Deletes old rows.
#[derive(Clone, Copy, Debug)]
pub struct Retention<'a> {
    pub client: &'a Client,
    pub tables: &'a Tables,
}

impl Retention<'_> {
    /// Whether there are rows that were completed longer than `age` ago.
    pub async fn any(&self, age: Duration) -> Result<bool, Error> {
        let statement = format!(
            "SELECT FROM {} WHERE status = 'completed' AND created_at < now() - make_interval(secs => $1)
               AND coalesce(processed_at, created_at) < now() - make_interval(secs => $1) LIMIT 1",
            self.tables.events
        );
        Ok(!self.client.query_typed(&statement, &[(&age.as_secs_f64(), Type::FLOAT8)]).await?.is_empty())
    }

    /// The server's time, and a position of the write-ahead log behind everything that was committed before.
    pub async fn now(&self) -> Result<Option<(SystemTime, Lsn)>, Error> {
        let rows = self.client.query_typed("SELECT clock_timestamp(), pg_current_wal_insert_lsn()::text", &[]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let (time, position) = (row.try_get(0)?, row.try_get::<_, &str>(1)?.parse().ok());
        Ok(position.map(|position| (time, position)))
    }

    /// Deletes at most `limit` rows that were completed longer than `age` ago, and before `proven`. Returns how many.
    pub async fn delete(&self, age: Duration, proven: SystemTime, limit: i64) -> Result<u64, Error> {
        // `created_at` has an index, and no row is completed before it was made.
        let statement = format!(
            "WITH cut AS MATERIALIZED (
               SELECT least(now() - make_interval(secs => $1), $2 - interval '1 s') AS cut)
             DELETE FROM {0} WHERE id = ANY (ARRAY(
               SELECT id FROM {0}
               WHERE status = 'completed' AND created_at < (SELECT cut FROM cut)
                 AND coalesce(processed_at, created_at) < (SELECT cut FROM cut)
               ORDER BY created_at LIMIT $3 FOR UPDATE SKIP LOCKED))",
            self.tables.events
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&age.as_secs_f64(), Type::FLOAT8), (&proven, Type::TIMESTAMPTZ), (&limit, Type::INT8)];
        self.client.execute_typed(&statement, &parameters).await
    }
}
