//! Locks that others hold on the outbox's tables: they are waited for, told of, and cost nothing but the wait.

use std::time::Duration;

use async_nats::jetstream::stream::Config;
use rustix::process::Signal;

use crate::harness::postgres::connect;
use crate::harness::relay::{READY, Relay};
use crate::harness::scene::{DELIVERED, Scene, publishes};
use crate::harness::wait::{always, eventually};

/// Events of so many aggregates.
fn insert(rows: u32, aggregates: u32) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT 'e' || nextval('outbox_events_id_seq'), 'order', (i % {aggregates})::text, 'paid', '{{}}'
         FROM generate_series(1, {rows}) i"
    )
}

async fn lives(relay: &Relay) -> bool {
    relay.get("/livez").await.is_some_and(|(status, _)| status == 200)
}

/// A session with a name of its own, as psql has one.
async fn psql(scene: &Scene) -> tokio_postgres::Client {
    connect(&format!("{}?application_name=psql", scene.database.url())).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_row_of_state_that_someone_holds_is_told_of_and_nothing_is_sent_twice() {
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; SELECT FROM outbox_relay_state FOR UPDATE").await.unwrap();
    scene.sql(&insert(2000, 2000)).await;
    scene.wait_stored(2000).await;
    eventually(DELIVERED, "it is told of", async || relay.says(&["outbox_relay_state by process"]).await).await;
    assert!(relay.says(&["(psql)"]).await);
    always(Duration::from_secs(3), "it is waited for", async || {
        relay.says(&["outbox_relay_state"]).await
            && scene.number("SELECT count(*) FROM outbox_events WHERE status = 'completed'").await == 0
    })
    .await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_completed(2000).await;
    relay.wait_ready().await;
    assert_eq!((scene.count().await, publishes(&relay, "stored").await), (2000, 2000));
    assert_eq!(publishes(&relay, "duplicate").await, 0);
    assert!(!relay.log().contains("one by one") && !relay.log().contains("lost its connection"), "{}", relay.log());
}

/// The liveness probe sees whether the loop ticks, and would have the relay killed while it waits rightly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_is_waited_for_at_the_end_of_a_session_keeps_the_loop_ticking() {
    const NOTES: &str = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND application_name = 'outbox-relay control' AND wait_event_type = 'Lock'";
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; SELECT FROM outbox_relay_state FOR UPDATE").await.unwrap();
    let publication = &scene.database.publication;
    scene.sql(&format!("ALTER PUBLICATION {publication} DROP TABLE outbox_events")).await;
    scene.wait_number(NOTES, 1).await;
    always(Duration::from_secs(7), "the loop ticks", async || {
        let (_, status) = relay.get("/status").await.unwrap();
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        status["last_tick_seconds"].as_f64().unwrap() < 5.0
    })
    .await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_survives_a_lock_of_the_whole_table() {
    /// Longer than the server may be silent.
    const LONG: Duration = Duration::from_secs(9);
    let scene = Scene::new().await;
    scene.sql(&format!("ALTER ROLE postgres IN DATABASE {} SET wal_sender_timeout = '4s'", scene.database.name)).await;
    let full = scene.space.small_stream(1);
    let stream = scene.jetstream.create_stream(full.clone()).await.unwrap();
    let settings = scene.settings.clone().set("delivery.max_in_flight", "10");
    let mut relay = scene.relay_with(&settings).await;
    assert!(relay.terminate(DELIVERED).await.success());
    // So many that the last ones are looked up only when the first have been delivered.
    scene.sql(&insert(600, 600)).await;
    let mut relay = settings.start();
    eventually(DELIVERED, "the stream is full", async || relay.says(&["holds"]).await).await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE").await.unwrap();
    stream.purge().await.unwrap();
    scene.jetstream.update_stream(Config { max_messages: -1, ..full }).await.unwrap();
    eventually(DELIVERED, "it is told of", async || relay.says(&["outbox_events by process"]).await).await;
    let active = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND active";
    let walsender = "SELECT max(pid)::int8 FROM pg_stat_replication WHERE application_name = 'outbox-relay' AND pid IN
        (SELECT active_pid FROM pg_replication_slots WHERE database = current_database())";
    let pid = scene.number(walsender).await;
    always(LONG, "the session lasts", async || {
        lives(&relay).await && relay.says(&["outbox_events by process"]).await && scene.number(active).await == 1
    })
    .await;
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_completed(600).await;
    assert_eq!(scene.number(walsender).await, pid, "by the same connection");
    assert_eq!(publishes(&relay, "duplicate").await, 0);
    relay.wait_ready().await;
    assert!(!relay.log().contains("the session ended"), "{}", relay.log());
}

/// Longer than PostgreSQL waits for a sign of life, from the moment when the relay is to note that its drain is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_session_survives_a_lock_of_the_row_of_state() {
    const NEEDS_DRAIN: &str = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";
    let scene = Scene::new().await;
    scene.sql(&format!("ALTER ROLE postgres IN DATABASE {} SET wal_sender_timeout = '4s'", scene.database.name)).await;
    // A slot that is there already: a new one would wait for the holder.
    assert!(scene.relay().await.terminate(READY).await.success());
    scene.sql(&insert(3, 3)).await;
    scene.sql("UPDATE outbox_relay_state SET needs_drain = true").await;
    // Whoever waits for the row's lock meanwhile has it next.
    scene
        .sql(
            "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NULL; END';
             CREATE TRIGGER dawdle AFTER UPDATE ON outbox_relay_state FOR EACH ROW EXECUTE FUNCTION dawdle()",
        )
        .await;
    let mut relay = scene.settings.start();
    let writes = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND application_name = 'outbox-relay write-back' AND wait_event = 'PgSleep'";
    scene.wait_number(writes, 1).await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; SELECT FROM outbox_relay_state FOR UPDATE").await.unwrap();
    scene.wait_completed(3).await;
    assert_eq!(scene.number(NEEDS_DRAIN).await, 1, "it is the holder's turn before the note");
    let walsender = "SELECT max(active_pid)::int8 FROM pg_replication_slots WHERE database = current_database()";
    let pid = scene.number(walsender).await;
    scene.sql(&insert(3, 3)).await;
    scene.wait_stored(6).await;
    always(Duration::from_secs(8), "the session lasts", async || {
        lives(&relay).await && scene.number(walsender).await == pid
    })
    .await;
    assert!(relay.says(&["outbox_relay_state by process"]).await);
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_completed(6).await;
    scene.wait_number(NEEDS_DRAIN, 0).await;
    assert_eq!(scene.number(walsender).await, pid, "by the same connection");
    assert_eq!(publishes(&relay, "duplicate").await, 0);
    relay.wait_ready().await;
    assert!(!relay.log().contains("the session ended"), "{}", relay.log());
}

/// A dead letter and the outcomes beside it are written in one transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_that_someone_locks_are_told_of() {
    for prepared in [true, false] {
        dead_letters_are_locked(prepared).await;
    }
}

/// Once write-back has `prepared` its statements, or before.
async fn dead_letters_are_locked(prepared: bool) {
    const WRITE_BACK: &str = "FROM pg_stat_activity WHERE datname = current_database()
        AND application_name = 'outbox-relay write-back' AND state = 'idle'";
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    // It has noted that its drain is over, and where.
    scene
        .wait_number("SELECT count(*) FROM outbox_relay_state WHERE confirmed_lsn IS NOT NULL AND NOT needs_drain", 1)
        .await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; LOCK TABLE outbox_dead_letter IN ACCESS EXCLUSIVE MODE").await.unwrap();
    if !prepared {
        let ended = scene.number(&format!("SELECT count(pg_terminate_backend(pid)) {WRITE_BACK}")).await;
        assert_eq!(ended, 1);
    }
    scene.sql(&insert(1, 1)).await;
    scene.sql(&insert(1, 1).replace("'{}'", "to_jsonb(repeat('x', 1500000))")).await;
    eventually(DELIVERED, "it is told of", async || relay.says(&["outbox_dead_letter by process"]).await).await;
    assert!(lives(&relay).await);
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_number("SELECT count(*) FROM outbox_dead_letter", 1).await;
    scene.wait_completed(1).await;
    relay.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_locked_when_a_session_begins_is_told_of() {
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    scene.wait_number("SELECT count(*) FROM outbox_relay_state WHERE needs_drain", 0).await;
    assert!(relay.terminate(DELIVERED).await.success());
    scene.sql(&insert(3, 1)).await;
    let holder = psql(&scene).await;
    holder.batch_execute("BEGIN; LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE").await.unwrap();
    let mut relay = scene.settings.start();
    eventually(DELIVERED, "it is told of", async || relay.says(&["outbox_events by process"]).await).await;
    assert!(lives(&relay).await);
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_completed(3).await;
    relay.wait_ready().await;
    assert_eq!((publishes(&relay, "stored").await, publishes(&relay, "duplicate").await), (3, 0));
}

/// As under an ALTER TABLE that takes long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_back_waits_for_a_locked_table_on_the_connection_that_it_has() {
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    let holder = psql(&scene).await;
    let backend = "SELECT coalesce(max(pid), 0)::int8 FROM pg_stat_activity
        WHERE application_name = 'outbox-relay write-back' AND datname = current_database()";
    eventually(DELIVERED, "it is connected", async || scene.number(backend).await != 0).await;
    // It has to connect anew, and finds the table locked.
    relay.signal(Signal::STOP);
    scene.sql(&insert(3, 3)).await;
    let first = scene.number(backend).await;
    holder.batch_execute("BEGIN; LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE").await.unwrap();
    scene.sql(&format!("SELECT pg_terminate_backend({first})")).await;
    relay.signal(Signal::CONT);
    eventually(DELIVERED, "it is told of", async || relay.says(&["outbox_events by process"]).await).await;
    let second = scene.number(backend).await;
    always(Duration::from_secs(2), "it keeps its connection", async || scene.number(backend).await == second).await;
    assert_ne!((first, second), (second, 0));
    holder.batch_execute("ROLLBACK").await.unwrap();
    scene.wait_completed(3).await;
    assert_eq!(scene.number(backend).await, second);
    assert_eq!(relay.log().matches("lost its connection").count(), 1, "{}", relay.log());
    relay.wait_ready().await;
    // The end of a session does not wait for ever, not even to note how far it came.
    holder.batch_execute("BEGIN; SELECT FROM outbox_relay_state FOR UPDATE").await.unwrap();
    scene.sql(&insert(3, 3)).await;
    scene.wait_stored(6).await;
    assert!(relay.terminate(DELIVERED).await.success(), "{}", relay.log());
    assert!(relay.log().contains("could not be written; they are sent again"), "{}", relay.log());
    assert_eq!(relay.log().matches("lost its connection").count(), 1, "{}", relay.log());
    holder.batch_execute("ROLLBACK").await.unwrap();
    let _relay = scene.relay().await;
    scene.wait_completed(6).await;
    assert_eq!(scene.count().await, 6);
}
