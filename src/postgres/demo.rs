//! The database's side of `outbox-relay demo`: producers, what became of their rows, and the removal of everything.
//!
//! Each run has a name of its own, which its schema, slot and publication bear. A session lock on that name shows that
//! the run lives, so that a later run can tell what a killed one has left behind, and remove it.

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Transaction};

use super::connect::{self, ConnectError, Session, SqlConnection, Target};
use super::names::identifier;
use super::slot;
use super::store::{EnqueueError, NewEvent, enqueue};
use crate::config::TableName;

/// How the names of all runs begin; eight hexadecimal digits follow.
pub const PREFIX: &str = "outbox_demo_";

/// How long a slot may stay in use after its relay has gone.
const SLOT_RELEASE: Duration = Duration::from_secs(15);

/// A connection that holds the run's lock for as long as it is open.
#[derive(Debug)]
pub struct Overseer {
    connection: SqlConnection,
    name: String,
}

impl Overseer {
    /// Connects, and takes the lock on `name`.
    ///
    /// # Errors
    /// The outer error is of the connection, the inner one of the lock.
    pub async fn open(target: &Target, name: &str) -> Result<Result<Self, Error>, ConnectError> {
        let session = Session::new("outbox-relay demo").with("lock_timeout", "15s");
        let connection = connect::sql(target, &session).await?;
        let lock = "SELECT pg_advisory_lock(hashtextextended($1, 0))";
        let locked = connection.client.query_typed(lock, &[(&name, Type::TEXT)]).await;
        Ok(locked.map(|_| Self { connection, name: name.to_owned() }))
    }

    /// What the server calls its version, such as `18.6`.
    pub fn server_version(&self) -> &str {
        self.connection.parameters.get("server_version").map_or("", String::as_str)
    }

    /// The names of earlier runs that were killed, and whose objects this role may drop.
    pub async fn leftovers(&self) -> Result<Vec<String>, Error> {
        // The lock is tried only on what is a run's: the two conditions must not change places.
        let statement = "WITH runs AS MATERIALIZED (
               SELECT nspname::text AS name FROM pg_namespace
               WHERE nspname ~ ('^' || $1 || '[0-9a-f]{8}$') AND nspname <> $2 AND pg_has_role(nspowner, 'USAGE'))
             SELECT name FROM runs WHERE pg_try_advisory_lock(hashtextextended(name, 0))";
        let parameters: [(&(dyn ToSql + Sync), Type); 2] = [(&PREFIX, Type::TEXT), (&self.name, Type::TEXT)];
        let rows = self.client().query_typed(statement, &parameters).await?;
        rows.iter().map(|row| row.try_get(0)).collect()
    }

    /// Drops the slot, the publication and the schema of a run. What is gone already is no error.
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        let start = Instant::now();
        while let Err(error) = slot::drop_slot(self.client(), name).await {
            // The server notices only after a while that the slot's relay has gone.
            if error.code() != Some(&SqlState::OBJECT_IN_USE) || start.elapsed() > SLOT_RELEASE {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let quoted = identifier(name);
        let drop = format!("DROP PUBLICATION IF EXISTS {quoted}; DROP SCHEMA IF EXISTS {quoted} CASCADE");
        self.client().batch_execute(&drop).await
    }

    /// What [`Self::remove`] does, for someone to do by hand.
    pub fn removal_by_hand(name: &str) -> String {
        format!("SELECT pg_drop_replication_slot('{name}'); DROP PUBLICATION {name}; DROP SCHEMA {name} CASCADE;")
    }

    /// Whether the relay has caught up with the log, so that a commit from now on is sent on at once.
    pub async fn is_streaming(&self) -> Result<bool, Error> {
        let statement = "SELECT FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
             WHERE s.slot_name = $1 AND r.state = 'streaming'";
        Ok(!self.client().query_typed(statement, &[(&self.name, Type::TEXT)]).await?.is_empty())
    }

    /// How many rows of the outbox have which status.
    pub async fn statuses(&self, table: &TableName) -> Result<Vec<(String, u64)>, Error> {
        let statement = format!("SELECT status::text, count(*) FROM {table} GROUP BY 1 ORDER BY 2 DESC, 1");
        let rows = self.client().query_typed(&statement, &[]).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, u64::try_from(row.try_get::<_, i64>(1)?).unwrap_or(0)))).collect()
    }

    /// Says goodbye to the server.
    pub async fn close(self) {
        self.connection.close().await;
    }

    fn client(&self) -> &Client {
        &self.connection.client
    }
}

/// A program that changes data, and enqueues events in the same transactions.
#[derive(Debug)]
pub struct Producer {
    connection: SqlConnection,
    table: TableName,
}

impl Producer {
    /// Connects as a producer for the outbox of `table`.
    ///
    /// # Errors
    /// See [`connect::ConnectErrorKind`].
    pub async fn connect(target: &Target, table: &TableName) -> Result<Self, ConnectError> {
        let connection = connect::sql(target, &Session::new("outbox-relay demo's shop")).await?;
        Ok(Self { connection, table: table.clone() })
    }

    /// Begins a transaction and enqueues events in it; returns it, ready to be committed, and the ids of the events.
    ///
    /// # Errors
    /// See [`EnqueueError`].
    pub async fn begin(&mut self, events: &[NewEvent<'_>]) -> Result<(Transaction<'_>, Vec<String>), EnqueueError> {
        let transaction = self.connection.client.transaction().await.map_err(EnqueueError::Database)?;
        let mut ids = Vec::with_capacity(events.len());
        for event in events {
            ids.push(enqueue(&transaction, &self.table, *event).await?);
        }
        Ok((transaction, ids))
    }
}
