//! Which rows are events: what is committed, pending and not dated, whatever else its transaction did.

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::PgVersion;
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::scene::{DELIVERED, Scene, counter, publishes};
use crate::harness::wait::eventually;

/// A statement that inserts an event of the one aggregate of a test: what comes later is behind what comes earlier.
fn insert(event_id: &str) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         VALUES ('{event_id}', 'order', '1', 'paid', '{{}}');"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn inserted_and_deleted_in_one_transaction_is_published() {
    let scene = Scene::new().await;
    let relay = scene.relay().await;
    scene.sql(&format!("BEGIN; {} {} DELETE FROM outbox_events; COMMIT", insert("a"), insert("b"))).await;
    scene.sql(&insert("c")).await;
    scene.wait_completed(1).await;
    assert_eq!(scene.ids().await, ["a", "b", "c"]);
    let without_row = "events_without_row";
    eventually(DELIVERED, "two rows were gone", async || counter(&relay, without_row).await == 2).await;
    // What has no row does not hold the slot either.
    scene.sql("CREATE TABLE other (id int); INSERT INTO other SELECT generate_series(1, 1000)").await;
    let target: String = scene.client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
    let slot = &scene.database.slot;
    let passed = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn >= '{target}'"
    );
    scene.wait_number(&passed, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolled_back_rows_are_not_published() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let relay = scene.relay().await;
        scene.sql(&format!("BEGIN; {} ROLLBACK", insert("rolled-back"))).await;
        scene
            .sql(&format!(
                "BEGIN; {} SAVEPOINT one; {} ROLLBACK TO one; {} SAVEPOINT two; {} RELEASE two; {} COMMIT",
                insert("1"),
                insert("undone"),
                insert("2"),
                insert("3"),
                insert("4")
            ))
            .await;
        // A statement that fails inside of a block with an exception handler is a savepoint of its own.
        let (five, twice, six) = (insert("5"), insert("5"), insert("6"));
        scene
            .sql(&format!("DO $$ BEGIN {five} BEGIN {twice} EXCEPTION WHEN unique_violation THEN {six} END; END $$"))
            .await;
        scene.client.batch_execute(&format!("BEGIN; {} SELECT 1 / 0", insert("failed"))).await.unwrap_err();
        scene.sql("ROLLBACK").await;
        scene.sql(&insert("last")).await;
        scene.wait_completed(7).await;
        assert_eq!(scene.ids().await, ["1", "2", "3", "4", "5", "6", "last"]);
        assert_eq!(publishes(&relay, "stored").await, 7);
    }
}

/// Rows that no reconciler may take for a day either, of aggregates that nothing else waits behind.
const LEFT: &str = "
    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, next_retry_at, locked_at)
    SELECT 'LEFT-' || row_number() OVER (), 'left', row_number() OVER (), 'paid', '{}', status, at, locked
    FROM (VALUES
        ('pending', now() + interval '1 day', NULL),
        ('processing', now() + interval '1 day', now()),
        ('failed', now() + interval '1 day', NULL),
        ('completed', NULL, NULL),
        ('dead_letter', NULL, NULL)) v (status, at, locked);";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_are_not_pending_or_dated_stay_in_the_table() {
    let scene = Scene::new().await;
    scene.sql(&LEFT.replace("LEFT", "before")).await;
    scene.sql(&insert("1")).await;
    let relay = scene.relay().await;
    scene.sql(&LEFT.replace("LEFT", "live")).await;
    scene.sql(&insert("2")).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE version = 2", 2).await;
    assert_eq!(scene.ids().await, ["1", "2"]);
    assert_eq!(scene.number("SELECT count(*) FROM outbox_events WHERE version = 1").await, 10);
    assert_eq!(publishes(&relay, "stored").await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logical_messages_do_not_confuse_the_decoder() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let mut relay = scene.relay().await;
        let burst = "DO $$ BEGIN
            FOR i IN 1..150 LOOP
                PERFORM pg_logical_emit_message(true, 'p', 'm'), pg_logical_emit_message(false, '', repeat('I', i));
                INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                VALUES ('order', '1', 'paid', '{}');
                PERFORM pg_logical_emit_message(true, 'outbox_events', '');
                COMMIT;
                PERFORM pg_logical_emit_message(true, 'alone', 'm');
                COMMIT;
            END LOOP;
            END $$";
        scene.sql(burst).await;
        scene.wait_stored(50).await;
        relay.kill9().await;
        scene.sql(burst).await;
        let _relay = scene.relay().await;
        scene.wait_completed(300).await;
        assert_eq!(scene.ids().await, scene.texts("SELECT event_id FROM outbox_events ORDER BY id").await);
    }
}

/// Acknowledgements of rows that a TRUNCATE took away arrive when other rows have the same ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_used_again_after_a_truncate_complete_no_wrong_row() {
    let nats = Nats::shared(NatsVersion::V2_15).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = Scene::new().await;
    let settings = scene
        .settings
        .clone()
        .set("nats.url", &proxy.instead_of(&nats.url()))
        .set("delivery.ordering", "none")
        .set("delivery.ack_timeout", "2m");
    let relay = scene.relay_with(&settings).await;
    proxy.hold(Direction::ToClient);
    for id in ["a1", "a2", "a3"] {
        scene.sql(&insert(id)).await;
    }
    scene.wait_stored(3).await;
    scene.sql("TRUNCATE outbox_events RESTART IDENTITY").await;
    // The same ids, in rows that are not to be sent yet, and one that is under way as well.
    scene
        .sql(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, next_retry_at)
              SELECT 'b' || i, 'left', i::text, 'paid', '{}', now() + interval '1 day' FROM generate_series(1, 2) i",
        )
        .await;
    scene.sql(&insert("b3")).await;
    scene.wait_stored(4).await;
    proxy.pass();
    scene.wait_completed(1).await;
    let without_row = "events_without_row";
    eventually(DELIVERED, "three rows were gone", async || counter(&relay, without_row).await == 3).await;
    let rows = "SELECT concat_ws(' ', id, event_id, status, version) FROM outbox_events ORDER BY id";
    assert_eq!(scene.texts(rows).await, ["1 b1 pending 1", "2 b2 pending 1", "3 b3 completed 2"]);
    assert_eq!(scene.ids().await, ["a1", "a2", "a3", "b3"]);
}

/// The write-back of a row that someone else locks waits, and that of the others does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_does_not_keep_others_from_being_completed() {
    let nats = Nats::shared(NatsVersion::V2_15).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = Scene::new().await;
    let relay = scene.relay_with(&scene.settings.clone().set("nats.url", &proxy.instead_of(&nats.url()))).await;
    proxy.hold(Direction::ToClient);
    scene
        .sql(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
              SELECT 'order', i::text, 'paid', '{}' FROM generate_series(1, 10) i",
        )
        .await;
    scene.wait_stored(10).await;
    let locker = scene.database.client().await;
    locker.batch_execute("BEGIN; SELECT FROM outbox_events WHERE id = 5 FOR UPDATE").await.unwrap();
    proxy.pass();
    scene.wait_completed(9).await;
    assert_eq!(scene.number("SELECT id FROM outbox_events WHERE status = 'pending'").await, 5);
    locker.batch_execute("COMMIT").await.unwrap();
    scene.wait_completed(10).await;
    assert_eq!(scene.number("SELECT max(version) FROM outbox_events").await, 2);
    assert_eq!(counter(&relay, "events_without_row").await, 0);
}
