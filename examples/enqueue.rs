//! Enqueues an event in the transaction that changes the data it tells of: both are committed, or neither.
//!
//! `DATABASE_URL=postgres://… cargo run --example enqueue`, after `outbox-relay migrate`.

use outbox_relay::config::TableName;
use outbox_relay::postgres::store::{EnqueueError, NewEvent, enqueue};
use tokio_postgres::{Client, NoTls};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL").unwrap_or_else(|_| "postgres://localhost:5432/postgres".to_owned());
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    let driver = tokio::spawn(connection);
    place_order(&mut client, "order-7").await?;
    drop(client);
    driver.await??;
    Ok(())
}

async fn place_order(client: &mut Client, order: &str) -> Result<(), Box<dyn std::error::Error>> {
    let outbox = TableName { schema: "public".to_owned(), table: "outbox_events".to_owned() };
    let tx = client.transaction().await?;
    // Stands for the program's own tables.
    tx.batch_execute("CREATE TEMP TABLE IF NOT EXISTS orders (id text)").await?;
    tx.execute("INSERT INTO orders VALUES ($1)", &[&order]).await?;

    let payload = serde_json::json!({ "order": order, "total": "12.50" }).to_string();
    let event = NewEvent {
        // Placing the same order again is the same event.
        deduplication_key: Some(order),
        headers: &[("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")],
        ..NewEvent::new("order", order, "placed", &payload)
    };
    match enqueue(&tx, &outbox, event).await {
        Ok(event_id) => println!("enqueued as {event_id}"),
        Err(error @ EnqueueError::DeduplicationConflict(_)) => {
            tx.rollback().await?;
            return Err(error.into());
        }
        Err(error) => return Err(error.into()),
    }
    tx.commit().await?;
    Ok(())
}
