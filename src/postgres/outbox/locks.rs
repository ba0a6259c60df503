//! Who keeps others from the outbox tables.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::Tables;

/// Whether a statement failed because a lock was not to be had in time.
pub fn is_locked(error: &Error) -> bool {
    error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
}

/// Other sessions of this database with a lock that keeps write-back or reading from going on: the events or the
/// dead letters locked as a whole, or the relay's row of state. For people to read; empty when none is seen.
pub async fn holders(client: &Client, tables: &Tables) -> Result<String, Error> {
    let statement = "SELECT string_agg(DISTINCT format('%s by process %s (%s)', l.relation::regclass, l.pid,
             coalesce(nullif(a.application_name, ''), 'unnamed')), ', ')
         FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
         WHERE l.granted AND l.pid <> pg_backend_pid()
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND ((l.relation IN ($1::text::regclass, $3::text::regclass) AND l.mode IN
                  ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))
             OR (l.relation = $2::text::regclass AND l.mode <> 'AccessShareLock'))";
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&tables.events, Type::TEXT), (&tables.state, Type::TEXT), (&tables.dead_letter, Type::TEXT)];
    let rows = client.query_typed(statement, &parameters).await?;
    let holders = rows.first().map(|row| row.try_get::<_, Option<String>>(0)).transpose()?;
    Ok(holders.flatten().unwrap_or_default())
}
