//! Rows from before the slot: the snapshot that the slot exports is the seam between the table and the log.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::{PgVersion, connect};
use crate::harness::scene::{DELIVERED, Scene, publishes};
use crate::harness::stream::Stored;
use crate::harness::wait::eventually;

const NEEDS_DRAIN: &str = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";

/// Inserts rows 1 to 1000 of a batch in one transaction.
fn insert_batch(batch: &str) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT '{batch}-' || i, 'order', (i % 7)::text, 'paid', jsonb_build_object('n', i)
         FROM generate_series(1, 1000) i"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_from_before_the_slot_come_once_and_in_the_order_of_their_ids() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let settings = scene.settings.clone().set("delivery.ordering", "none");
        // Committed in another order than inserted: from the table the ids count.
        let late = scene.database.client().await;
        late.batch_execute(&format!("BEGIN; {}", insert_batch("first"))).await.unwrap();
        scene.sql(&insert_batch("second")).await;
        late.batch_execute("COMMIT").await.unwrap();
        scene.sql("DELETE FROM outbox_events WHERE id % 100 = 0").await;

        let mut relay = scene.relay_with(&settings).await;
        scene.sql(&insert_batch("live")).await;
        scene.wait_completed(2980).await;
        scene.wait_number(NEEDS_DRAIN, 0).await;
        let stored = scene.stored().await;
        let ids: Vec<&str> = stored.iter().map(Stored::id).collect();
        assert_eq!(ids, scene.texts("SELECT event_id FROM outbox_events ORDER BY id").await);
        let from_table = stored.iter().filter(|message| message.header("Outbox-Position").is_none());
        assert_eq!(from_table.count(), 1980, "a row from the table has no position in the log");
        assert_eq!(publishes(&relay, "duplicate").await, 0);
        assert_eq!(scene.number("SELECT max(version) FROM outbox_events").await, 2);

        // A healthy slot needs no drain.
        assert!(relay.terminate(DELIVERED).await.success());
        let relay = scene.relay_with(&settings).await;
        scene.sql(&insert_batch("later")).await;
        scene.wait_completed(3980).await;
        assert_eq!((scene.count().await, publishes(&relay, "stored").await), (3980, 1000));
    }
}

/// Writers that never pause, each with transactions of its own length, while the slot is made and the table drained.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_written_while_the_slot_is_made_come_once() {
    const WRITERS: i64 = 6;
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        scene.sql(&insert_batch("before")).await;
        let stop = Arc::new(AtomicBool::new(false));
        let writers: Vec<_> =
            (0..WRITERS).map(|writer| tokio::spawn(write(scene.database.url(), writer, Arc::clone(&stop)))).collect();
        // In order of their ends: open before the slot is asked for, and until after later ones have begun.
        let (old, young) = (scene.database.client().await, scene.database.client().await);
        old.batch_execute(&format!("BEGIN; {}", insert_batch("old"))).await.unwrap();
        let mut relay = scene.settings.start();
        let waiting = "SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND query LIKE 'CREATE_REPLICATION_SLOT%' AND wait_event_type = 'Lock'";
        eventually(DELIVERED, "the slot waits for open transactions", async || scene.number(waiting).await == 1).await;
        young.batch_execute(&format!("BEGIN; {}", insert_batch("young"))).await.unwrap();
        scene.sql(&insert_batch("between")).await;
        old.batch_execute("COMMIT").await.unwrap();
        young.batch_execute("COMMIT").await.unwrap();
        relay.wait_ready().await;
        scene.sql(&insert_batch("after")).await;
        scene
            .wait_number("SELECT count(*) FROM outbox_events WHERE event_id LIKE 'after-%' AND version = 2", 1000)
            .await;
        stop.store(true, Ordering::Relaxed);
        let mut written = 0;
        for writer in writers {
            written += writer.await.unwrap();
        }
        scene.wait_completed(5000 + written).await;

        let ids = scene.ids().await;
        let mut once = ids.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), ids.len(), "none twice");
        let mut committed = scene.texts("SELECT event_id FROM outbox_events").await;
        committed.sort_unstable();
        assert!(once == committed, "each committed row, and no other: {} of {}", once.len(), committed.len());
        assert_eq!(publishes(&relay, "duplicate").await, 0, "what the drain shows, the slot does not show again");
        check_writers_order(&ids);
    }
}

/// Transactions of 1 to 5 rows, some of them open for a while and some rolled back. Returns how many rows were
/// committed.
async fn write(url: String, writer: i64, stop: Arc<AtomicBool>) -> i64 {
    let client = connect(&url).await;
    let mut committed = 0;
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let rows: i64 = 1 + turn % 5;
        let (end, counts) = if turn % 8 == 7 { ("ROLLBACK", 0) } else { ("COMMIT", rows) };
        client
            .batch_execute(&format!(
                "BEGIN;
                 INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                 SELECT 'w{writer}-{turn}-' || i, 'writer', '{writer}', 'wrote', '{{}}' FROM generate_series(1, {rows}) i;
                 SELECT pg_sleep({pause});
                 {end}",
                pause = format_args!("0.{:02}", turn % 4 * writer),
            ))
            .await
            .unwrap();
        committed += counts;
    }
    committed
}

/// Each writer has an aggregate of its own: its rows are in the order in which it wrote them.
fn check_writers_order(ids: &[String]) {
    let mut last: HashMap<&str, (u64, u64)> = HashMap::new();
    for id in ids.iter().filter(|id| id.starts_with('w')) {
        let mut parts = id.split('-');
        let writer = parts.next().unwrap();
        let mut number = || parts.next().unwrap().parse().unwrap();
        let place = (number(), number());
        let before = last.insert(writer, place);
        assert!(before < Some(place), "{id} comes after {before:?}");
    }
}

/// A relay that dies in the middle of the drain leaves word for the next one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_that_was_cut_off_starts_over() {
    let scene = Scene::new().await;
    for batch in ["a", "b", "c", "d"] {
        scene.sql(&insert_batch(batch)).await;
    }
    // One at a time, so that the drain takes long enough to be cut off.
    let settings = scene.settings.clone().set("delivery.max_in_flight", "1");
    let mut relay = settings.start();
    scene.wait_stored(100).await;
    relay.kill9().await;
    assert!(scene.count().await < 4000, "the drain was over already");
    assert_eq!(scene.number(NEEDS_DRAIN).await, 1);
    let _relay = scene.relay().await;
    scene.sql(&insert_batch("live")).await;
    scene.wait_completed(5000).await;
    scene.wait_number(NEEDS_DRAIN, 0).await;
    let mut ids = scene.ids().await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), scene.count().await), (5000, 5000));
}
