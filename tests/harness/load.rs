//! Producers that write events as applications do, and the check that the stream holds exactly what they committed.
//!
//! Each event carries the next number of its aggregate, drawn under a row lock that is held until the commit: the
//! order of the numbers is the order of the commits.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fastrand::Rng;
use tokio::task::JoinHandle;
use tokio_postgres::{Client, NoTls};

use super::nats::Nats;
use super::postgres::connect;
use super::stream::{self, Stored};
use super::wait::eventually;

/// From the end of the load until every row has its outcome, on two busy cores.
pub const DELIVERED: Duration = Duration::from_mins(3);
/// Between two transactions of one writer.
const PACE: Duration = Duration::from_millis(5);
/// How many aggregates the writers share. A third of the events belong to the first two.
const AGGREGATES: usize = 12;

/// Adds one event of the aggregate `$1` and returns its number.
const INSERT: &str = "WITH next AS (
      INSERT INTO numbers AS known VALUES ($1, 1) ON CONFLICT (aggregate) DO UPDATE SET n = known.n + 1 RETURNING n)
    INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'order', $1, 'changed', jsonb_build_object('n', n) FROM next";

/// An outbox of one test's own, and the stream that its events go to.
#[derive(Clone, Debug)]
pub struct Outbox {
    url: String,
    pub stream: String,
}

impl Outbox {
    /// The tables must be there already.
    pub async fn new(url: &str, stream: &str) -> Self {
        let table = "CREATE TABLE numbers (aggregate text PRIMARY KEY, n bigint NOT NULL)";
        connect(url).await.batch_execute(table).await.expect("create the table of numbers");
        Self { url: url.to_owned(), stream: stream.to_owned() }
    }

    /// A new connection to the database.
    pub async fn client(&self) -> Client {
        connect(&self.url).await
    }

    /// Inserts the next event of an aggregate, in a transaction of its own.
    pub async fn insert(&self, aggregate: &str) {
        self.insert_many(aggregate, 1).await;
    }

    /// Inserts that many events of an aggregate, each in a transaction of its own.
    pub async fn insert_many(&self, aggregate: &str, count: usize) {
        let client = self.client().await;
        for _ in 0..count {
            client.execute(INSERT, &[&aggregate]).await.expect("insert an event");
        }
    }

    /// Inserts `count` events of `aggregates` new aggregates in one transaction, each with so many bytes of ballast.
    pub async fn insert_bulk(&self, count: i32, aggregates: i32, ballast: i32) {
        let sql = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
            SELECT 'order', format('bulk %s/%s', pg_current_xact_id(), i % $2), 'changed',
              jsonb_build_object('n', (i - 1) / $2 + 1, 'ballast', repeat('x', $3))
            FROM generate_series(1, $1) AS i";
        self.client().await.execute(sql, &[&count, &aggregates, &ballast]).await.expect("insert events");
    }

    /// The answer to a question for one number.
    pub async fn number(&self, sql: &str) -> i64 {
        self.client().await.query_one(sql, &[]).await.expect("ask for a number").get(0)
    }

    /// How many rows have that status.
    pub async fn rows(&self, status: &str) -> i64 {
        let sql = "SELECT count(*) FROM outbox_events WHERE status = $1";
        self.client().await.query_one(sql, &[&status]).await.expect("count rows").get(0)
    }

    /// How many messages the stream holds; 0 when there is no stream.
    pub async fn stored(&self, nats: &Nats) -> u64 {
        stream::count(&nats.jetstream().await, &self.stream).await
    }

    /// Waits until the stream holds at least that many messages.
    pub async fn wait_stored(&self, nats: &Nats, count: u64) {
        let jetstream = nats.jetstream().await;
        let what = format!("the stream holds {count} messages");
        eventually(DELIVERED, &what, async || stream::count(&jetstream, &self.stream).await >= count).await;
    }

    /// Waits until the relay that holds the slot has told PostgreSQL its position once more.
    pub async fn wait_reported(&self, slot: &str) {
        let client = self.client().await;
        let now: SystemTime = client.query_one("SELECT clock_timestamp()", &[]).await.expect("the time").get(0);
        let reported = "SELECT bool_or(reply_time > $1) FROM pg_stat_replication AS sender
            JOIN pg_replication_slots AS slot ON slot.active_pid = sender.pid WHERE slot.slot_name = $2";
        eventually(DELIVERED, "a position is reported", async || {
            let row = client.query_one(reported, &[&now, &slot]).await.expect("the time of the report");
            row.get::<_, Option<bool>>(0) == Some(true)
        })
        .await;
    }

    /// Waits until every row is completed.
    pub async fn wait_completed(&self) {
        let open = "SELECT count(*) FROM outbox_events WHERE status <> 'completed'";
        let client = self.client().await;
        let mut left = -1_i64;
        let done = tokio::time::timeout(DELIVERED, async {
            while left != 0 {
                left = client.query_one(open, &[]).await.expect("count open rows").get(0);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let done = done.await;
        assert!(done.is_ok(), "{left} rows have no outcome after {DELIVERED:?}; {}", self.open_rows(&client).await);
    }

    async fn open_rows(&self, client: &Client) -> String {
        let sql = "SELECT id, status, retry_count, coalesce(error_code, '-') FROM outbox_events
            WHERE status <> 'completed' ORDER BY id LIMIT 5";
        let rows = client.query(sql, &[]).await.expect("list open rows");
        let row = |row: &tokio_postgres::Row| {
            let (id, status, retries): (i64, String, i32) = (row.get(0), row.get(1), row.get(2));
            format!("id {id} {status} retries {retries} {}", row.get::<_, String>(3))
        };
        format!("the first: {:?}", rows.iter().map(row).collect::<Vec<_>>())
    }

    /// Waits until every row is completed, then checks that the stream holds each event exactly once, unchanged, in
    /// the order of commits within each aggregate; that no attempt was counted, and nothing is dead. Returns the
    /// number of events.
    pub async fn expect_exact(&self, nats: &Nats) -> usize {
        self.wait_completed().await;
        let rows = "SELECT event_id, payload::text, retry_count, version FROM outbox_events";
        let rows = self.client().await.query(rows, &[]).await.expect("read the rows");
        let messages = stream::read_all(&nats.jetstream().await, &self.stream).await;
        let mut payloads = HashMap::new();
        for row in &rows {
            let (event_id, payload): (String, String) = (row.get(0), row.get(1));
            assert_eq!(row.get::<_, i32>(2), 0, "an attempt was counted on {event_id}");
            assert_eq!(row.get::<_, i64>(3), 2, "{event_id} changed its state more than once");
            payloads.insert(event_id, payload);
        }
        let mut seen = HashMap::new();
        for message in &messages {
            let earlier = seen.insert(message.id().to_owned(), message.sequence);
            assert_eq!(earlier, None, "event {} is stored twice, again as {}", message.id(), message.sequence);
            let payload = payloads.get(message.id()).map(String::as_bytes);
            assert_eq!(payload, Some(&message.payload[..]), "message {} is no committed event", message.sequence);
        }
        let lost: Vec<&String> = payloads.keys().filter(|event_id| !seen.contains_key(*event_id)).collect();
        assert!(lost.is_empty(), "{} completed events are not in the stream: {lost:?}", lost.len());
        expect_order(&messages);
        assert_eq!(self.number("SELECT count(*) FROM outbox_dead_letter").await, 0);
        rows.len()
    }
}

/// Of each aggregate, the numbers must count up from 1 without a gap.
fn expect_order(messages: &[Stored]) {
    let mut numbers: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for message in messages {
        let payload: serde_json::Value = serde_json::from_slice(&message.payload).expect("a payload is JSON");
        let Some(number) = payload["n"].as_u64() else { continue };
        let aggregate = message.header("ce-subject").expect("ce-subject");
        numbers.entry(aggregate).or_default().push((number, message.sequence));
    }
    for (aggregate, numbers) in numbers {
        if let Some(at) = (1..).zip(&numbers).position(|(wanted, (number, _))| wanted != *number) {
            let around = &numbers[at.saturating_sub(5)..numbers.len().min(at + 30)];
            panic!("aggregate {aggregate:?} is out of order; (number, stream sequence): {around:?}");
        }
    }
}

/// Writers at work: single rows, and transactions of several rows of several aggregates, some of which are hot.
pub struct Load {
    stop: Arc<AtomicBool>,
    writers: Vec<JoinHandle<usize>>,
}

impl Load {
    /// Starts the writers. They go on through restarts of the server.
    pub fn start(outbox: &Outbox, writers: u64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let writer = |seed| tokio::spawn(write(outbox.url.clone(), Rng::with_seed(seed), Arc::clone(&stop)));
        Self { writers: (0..writers).map(writer).collect(), stop: Arc::clone(&stop) }
    }

    /// Stops the writers; how many transactions they know to be committed.
    pub async fn stop(self) -> usize {
        self.stop.store(true, Ordering::SeqCst);
        let mut committed = 0;
        for writer in self.writers {
            committed += writer.await.expect("a writer ended in order");
        }
        assert!(committed > 0, "the writers wrote nothing");
        committed
    }
}

async fn write(url: String, mut rng: Rng, stop: Arc<AtomicBool>) -> usize {
    let mut committed = 0;
    let stopped = || stop.load(Ordering::SeqCst);
    while !stopped() {
        let Ok((mut client, connection)) = tokio_postgres::connect(&url, NoTls).await else {
            tokio::time::sleep(PACE).await;
            continue;
        };
        let connection = tokio::spawn(connection);
        while !stopped() && transact(&mut client, &mut rng).await.is_ok() {
            committed += 1;
            tokio::time::sleep(PACE).await;
        }
        connection.abort();
    }
    committed
}

async fn transact(client: &mut Client, rng: &mut Rng) -> Result<(), tokio_postgres::Error> {
    let rows = if rng.bool() { 1 } else { rng.usize(2..8) };
    let mut aggregates: Vec<String> = (0..rows)
        .map(|_| if rng.u8(..3) == 0 { rng.usize(..2) } else { rng.usize(..AGGREGATES) })
        .map(|number| format!("load {number:02}"))
        .collect();
    // In one order, or two writers would wait for each other.
    aggregates.sort();
    let transaction = client.transaction().await?;
    for aggregate in &aggregates {
        transaction.execute(INSERT, &[aggregate]).await?;
    }
    transaction.commit().await
}
