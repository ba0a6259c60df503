//! What stands in the outbox tables, for checks on it.

use std::time::Duration;

use tokio_postgres::Client;

use super::wait::eventually;

/// What the relay wrote to a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub status: String,
    pub retry_count: i32,
    pub error_code: Option<String>,
    pub error_message: Option<String>,
    /// Whether `next_retry_at` lies in the future.
    pub is_due_later: bool,
}

/// How many rows of `outbox_events` meet an SQL condition.
pub async fn count(client: &Client, condition: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM outbox_events WHERE {condition}");
    client.query_one(&sql, &[]).await.expect("count rows").get(0)
}

/// What became of the row with this `event_id`.
pub async fn outcome(client: &Client, event_id: &str) -> Outcome {
    let sql = "SELECT status, retry_count, error_code, error_message, coalesce(next_retry_at > now(), false)
               FROM outbox_events WHERE event_id = $1";
    let row = client.query_one(sql, &[&event_id]).await.expect("a row");
    Outcome {
        status: row.get(0),
        retry_count: row.get(1),
        error_code: row.get(2),
        error_message: row.get(3),
        is_due_later: row.get(4),
    }
}

/// `event_id` and `error_code` of every dead letter, in the order of the former.
pub async fn dead_letters(client: &Client) -> Vec<(String, String)> {
    let sql = "SELECT original_event_id, coalesce(error_code, '') FROM outbox_dead_letter
               ORDER BY original_event_id COLLATE \"C\", id";
    let rows = client.query(sql, &[]).await.expect("dead letters");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Waits until every row has an outcome. Panics after `deadline`.
pub async fn settled(client: &Client, deadline: Duration) {
    eventually(deadline, "every row has an outcome", async || count(client, "status = 'pending'").await == 0).await;
}
