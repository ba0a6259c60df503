//! The schema on real servers: migrations, adoption of older tables, the SQL functions, the typed calls.

mod adopt;
mod compensations;
mod events;
mod migrate;
mod polling;
mod store;

use outbox_relay::config::TableName;
use outbox_relay::postgres::migrate::migrate;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Row};

use crate::harness::postgres::{Database, PgVersion, Postgres};

fn outbox_events() -> TableName {
    table("public", "outbox_events")
}

fn table(schema: &str, table: &str) -> TableName {
    TableName { schema: schema.to_owned(), table: table.to_owned() }
}

/// A migrated database of the shared server.
struct Outbox {
    database: Database,
    client: Client,
}

impl Outbox {
    async fn new(version: PgVersion) -> Self {
        let database = Postgres::shared(version).await.database().await;
        let mut client = database.client().await;
        migrate(&mut client, &outbox_events(), false).await.unwrap();
        Self { database, client }
    }

    /// One on the oldest and one on the newest server.
    async fn ends() -> Vec<Self> {
        let mut all = Vec::new();
        for version in PgVersion::ENDS {
            all.push(Self::new(version).await);
        }
        all
    }

    /// Inserts a pending event of the aggregate; further columns as SQL, `, name = value` written as two lists.
    async fn insert(&self, event_id: &str, columns: &str, values: &str) {
        let sql = format!(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload{columns})
             VALUES ($1, 'order', '7', 'placed', '{{}}'{values})"
        );
        self.client.execute(&sql, &[&event_id]).await.unwrap();
    }

    async fn status(&self, event_id: &str) -> String {
        one(&self.client, "SELECT status::text FROM outbox_events WHERE event_id = $1", &[&event_id]).await
    }

    /// The event_ids that `fetch_and_lock_outbox_events` returns.
    async fn fetch(&self, limit: i32) -> Vec<String> {
        let rows = self.client.query("SELECT event_id::text FROM fetch_and_lock_outbox_events($1)", &[&limit]).await;
        column(&rows.unwrap())
    }

    /// The SQLSTATE of a statement that must fail.
    async fn refusal(&self, sql: &str) -> String {
        code(&self.client.batch_execute(sql).await.expect_err(sql))
    }
}

fn code(error: &tokio_postgres::Error) -> String {
    error.code().map_or_else(|| error.to_string(), |code| code.code().to_owned())
}

fn column<'a, T: tokio_postgres::types::FromSql<'a>>(rows: &'a [Row]) -> Vec<T> {
    rows.iter().map(|row| row.get(0)).collect()
}

/// The only value of the only row.
async fn one<T>(client: &Client, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> T
where
    T: for<'a> tokio_postgres::types::FromSql<'a>,
{
    client.query_one(sql, parameters).await.unwrap().get(0)
}
