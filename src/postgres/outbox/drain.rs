//! Pending rows, read from the table in the order of their ids.

use std::pin::Pin;

use futures_util::TryStreamExt;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, RowStream, SimpleQueryMessage};

use super::{Tables, rows};
use crate::flow::event::Decoded;
use crate::postgres::names::literal;

/// Rows that wait for nothing but their turn.
const WAITING: &str = "e.status = 'pending' AND e.next_retry_at IS NULL";

/// The rows that a snapshot shows as pending and due. They stream: memory does not grow with their number.
pub struct WaitingRows {
    rows: Pin<Box<RowStream>>,
}

impl WaitingRows {
    /// Begins a transaction that sees what `snapshot`, exported by another session, shows; `None`: what is visible now.
    pub async fn enter_snapshot(client: &Client, snapshot: Option<&str>) -> Result<(), Error> {
        client.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let enter = match snapshot {
            Some(snapshot) => format!("SET TRANSACTION SNAPSHOT {}", literal(snapshot)),
            // The snapshot is taken by the first statement.
            None => "SELECT 1".to_owned(),
        };
        client.batch_execute(&enter).await
    }

    /// Whether more than `rows` may wait now. No index tells: where few wait in a very large table, it cannot be seen in
    /// time.
    pub async fn may_be_more_than(client: &Client, tables: &Tables, rows: usize) -> Result<bool, Error> {
        // The statements are one transaction, after which the limits are the session's own again. A lock is told of for
        // itself.
        let statement = format!(
            "SET LOCAL lock_timeout = '2s'; SET LOCAL statement_timeout = '3s';
             SELECT 1 FROM {} e WHERE {WAITING} OFFSET {rows} LIMIT 1",
            tables.share
        );
        match client.simple_query(&statement).await {
            Err(error) if error.code() == Some(&SqlState::QUERY_CANCELED) => Ok(true),
            found => Ok(found?.iter().any(|message| matches!(message, SimpleQueryMessage::Row(_)))),
        }
    }

    /// Begins to read, on a connection inside the transaction whose snapshot counts where there is one, at most `limit`
    /// rows. Payloads over `cap` bytes are left behind.
    pub async fn read(client: &Client, tables: &Tables, cap: usize, limit: Option<usize>) -> Result<Self, Error> {
        let limit = limit.map_or_else(String::new, |limit| format!(" LIMIT {limit}"));
        let statement =
            format!("SELECT {} FROM {} e WHERE {WAITING} ORDER BY e.id{limit}", rows::select_list(), tables.share);
        let cap = i32::try_from(cap).unwrap_or(i32::MAX);
        let rows = client.query_typed_raw(&statement, [(cap, Type::INT4)]).await?;
        Ok(Self { rows: Box::pin(rows) })
    }

    /// The next row; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Decoded>, Error> {
        self.rows.try_next().await?.map(|row| rows::read(&row)).transpose()
    }
}
