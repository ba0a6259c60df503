//! The slot's confirmed position: it moves on time, never passes what is not recorded, and is kept at the end.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres, connect};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::scene::{DELIVERED, Scene, counter, publishes};
use crate::harness::stream;
use crate::harness::wait::{always, eventually};

/// Status updates leave by themselves: the server asks for one only at half of its `wal_sender_timeout`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_position_moves_without_being_asked_for() {
    const STANDS: Duration = Duration::from_secs(10);
    let scene = Scene::new().await;
    let _relay = scene.relay().await;
    let url = scene.database.url();
    // 200 rows a second for 20 seconds.
    let writer = tokio::spawn(async move {
        let client = connect(&url).await;
        client
            .batch_execute(
                "DO $$ BEGIN
                 FOR i IN 1..4000 LOOP
                     INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                     VALUES ('order', i::text, 'paid', '{}');
                     COMMIT;
                     PERFORM pg_sleep(0.005);
                 END LOOP;
                 END $$",
            )
            .await
            .unwrap();
    });
    let slot = &scene.database.slot;
    let position =
        format!("SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = '{slot}'");
    let (mut last, mut since) = (scene.number(&position).await, Instant::now());
    while !writer.is_finished() {
        let now = scene.number(&position).await;
        assert!(now >= last, "it never goes backwards");
        if now > last {
            (last, since) = (now, Instant::now());
        }
        assert!(since.elapsed() < STANDS, "the position has not moved for {:?}", since.elapsed());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    writer.await.unwrap();
    scene.wait_completed(4000).await;
    let end = scene.number("SELECT (pg_current_wal_lsn() - '0/0')::int8").await;
    eventually(DELIVERED, "the position reaches the end", async || scene.number(&position).await >= end).await;
}

/// Under synchronous replication the log shows a row before the table does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_published_before_it_is_visible_ends_completed() {
    for version in PgVersion::ENDS {
        let postgres = Postgres::start(version, &[]).await;
        let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
        let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url()).within(&space);
        settings.migrate().await;
        let mut relay = settings.start();
        relay.wait_ready().await;
        let (client, jetstream) = (postgres.client().await, nats.jetstream().await);
        postgres.reload("synchronous_standby_names", "nosuch").await;
        let writer = postgres.client().await;
        let insert = tokio::spawn(async move {
            let insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                          SELECT 'order', '1', 'paid', '{}' FROM generate_series(1, 3)";
            writer.execute(insert, &[]).await.map(|_| ())
        });
        eventually(DELIVERED, "all are stored", async || stream::count(&jetstream, &space.stream).await == 3).await;
        let without_row = "events_without_row";
        let stored = stream::read_all(&jetstream, &space.stream).await;
        let position = stored[0].header("Outbox-Position").unwrap();
        let commit = position.rsplit_once('/').unwrap().0;
        // The status update finds no row, and it is not taken for a deleted one: long enough for several tries.
        let held = format!(
            "SELECT (SELECT count(*) FROM outbox_events) + (SELECT count(*) FROM pg_replication_slots
             WHERE confirmed_flush_lsn > '{commit}')"
        );
        always(Duration::from_secs(2), "the row is invisible and the slot waits", async || {
            counter(&relay, without_row).await == 0
                && client.query_one(&held, &[]).await.unwrap().get::<_, i64>(0) == 0
                && !insert.is_finished()
        })
        .await;
        postgres.reload("synchronous_standby_names", "").await;
        insert.await.unwrap().unwrap();
        let completed = "SELECT count(*) FROM outbox_events WHERE status = 'completed' AND version = 2";
        eventually(DELIVERED, "the rows are completed", async || {
            client.query_one(completed, &[]).await.unwrap().get::<_, i64>(0) == 3
        })
        .await;
        assert_eq!(counter(&relay, without_row).await, 0);
        assert_eq!(stream::count(&jetstream, &space.stream).await, 3);
        let passed = format!("SELECT count(*) FROM pg_replication_slots WHERE confirmed_flush_lsn > '{commit}'");
        eventually(DELIVERED, "the slot goes on", async || {
            client.query_one(&passed, &[]).await.unwrap().get::<_, i64>(0) == 1
        })
        .await;
        assert_eq!(publishes(&relay, "duplicate").await, 0);
    }
}

/// Someone empties the relay's own table under it: a position that is noted nowhere is not confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_position_waits_for_the_row_of_state_to_be_made_anew() {
    const ROW: &str = "SELECT count(*) FROM outbox_relay_state WHERE stream IS NOT NULL AND confirmed_lsn IS NOT NULL";
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    let insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', i::text, 'paid', '{}' FROM generate_series(1, 20) i";
    scene.sql(insert).await;
    scene.wait_completed(20).await;
    scene.wait_number(&format!("{ROW} AND NOT needs_drain"), 1).await;
    // No session makes it anew for now.
    scene
        .sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not yet'; END $$;
             CREATE TRIGGER refuse BEFORE INSERT ON outbox_relay_state FOR EACH ROW EXECUTE FUNCTION refuse();
             TRUNCATE outbox_relay_state",
        )
        .await;
    let end = scene.number("SELECT (pg_current_wal_lsn() - '0/0')::int8").await;
    scene.sql(insert).await;
    relay.wait_log("row in outbox_relay_state is gone", DELIVERED).await;
    relay.wait_unready().await;
    let slot = &scene.database.slot;
    let passed = format!(
        "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}' AND (confirmed_flush_lsn - '0/0') > {end}"
    );
    always(Duration::from_secs(2), "the slot waits", async || scene.number(&passed).await == 0).await;
    scene.sql("DROP TRIGGER refuse ON outbox_relay_state").await;
    scene.wait_completed(40).await;
    scene.wait_number(&format!("{ROW} AND NOT needs_drain"), 1).await;
    relay.wait_ready().await;
    scene.wait_number(&passed, 1).await;
    assert_eq!((scene.count().await, publishes(&relay, "duplicate").await), (40, 0));
    assert_eq!(relay.log().matches("row in outbox_relay_state is gone").count(), 1, "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_published_again_after_sigterm() {
    stopped_in_order(Signal::TERM).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_published_again_after_sigint() {
    stopped_in_order(Signal::INT).await;
}

async fn stop(relay: &mut Relay, signal: Signal) {
    relay.signal(signal);
    let status = relay.wait_exit(DELIVERED).await;
    assert_eq!(status.code(), Some(0), "{signal:?}");
}

async fn stopped_in_order(signal: Signal) {
    let insert = |rows: u32, pause: f64| {
        format!(
            "DO $$ BEGIN
             FOR i IN 1..{rows} LOOP
                 INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                 VALUES ('order', (i % 5)::text, 'paid', '{{}}');
                 COMMIT;
                 PERFORM pg_sleep({pause});
             END LOOP;
             END $$"
        )
    };
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    let mut all = 0;
    for rows in [100, 20, 20, 20, 20] {
        scene.sql(&insert(rows, 0.0)).await;
        all += u64::from(rows);
        scene.wait_stored(all).await;
        // What was acknowledged before is recorded and confirmed: it is not even read again.
        assert_eq!(counter(&relay, "events_decoded").await, u64::from(rows));
        assert_eq!(publishes(&relay, "duplicate").await, 0);
        stop(&mut relay, signal).await;
        let recorded = scene.number("SELECT count(*) FROM outbox_events WHERE status = 'completed'").await;
        assert_eq!(recorded.cast_unsigned(), all);
        relay = scene.relay().await;
    }

    // Under load, with events under way at the signal.
    let (url, burst) = (scene.database.url(), insert(400, 0.002));
    let writer = tokio::spawn(async move { connect(&url).await.batch_execute(&burst).await });
    for stored in [250, 350, 450] {
        scene.wait_stored(stored).await;
        stop(&mut relay, signal).await;
        let unrecorded = scene.count().await
            - u64::try_from(scene.number("SELECT count(*) FROM outbox_events WHERE version = 2").await).unwrap();
        assert_eq!(unrecorded, 0, "what is stored is recorded");
        relay = scene.relay().await;
    }
    writer.await.unwrap().unwrap();
    scene.wait_completed(580).await;
    assert_eq!(scene.count().await, 580);
    assert_eq!(publishes(&relay, "duplicate").await, 0);
    assert_eq!(scene.number("SELECT max(version) FROM outbox_events").await, 2);
}

/// A crash takes the slot back to its last checkpoint. Rows that are gone by then cannot tell that they were delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_the_server_sends_no_deleted_row_again() {
    let mut postgres = Postgres::start(PgVersion::V18, &[("checkpoint_timeout", "1h")]).await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let url = postgres.url("postgres");
    let settings = RelaySettings::new(&url, &nats.url())
        .set("nats.stream", &space.stream)
        .set("nats.create.subjects", &space.subjects())
        .set("nats.create.duplicate_window", "1s")
        .set("route.subject", &space.template())
        .set("writeback.on_success", "delete");
    settings.migrate().await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    let (client, jetstream) = (postgres.client().await, nats.jetstream().await);
    let insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', i::text, 'paid', '{}' FROM generate_series(1, 20) i";
    client.batch_execute(insert).await.unwrap();
    let end: String = client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
    let gone = async |client: &tokio_postgres::Client| {
        client.query_one("SELECT count(*) FROM outbox_events", &[]).await.unwrap().get::<_, i64>(0) == 0
    };
    eventually(Duration::from_mins(1), "the rows are deleted", async || gone(&client).await).await;
    let past = "SELECT bool_or(confirmed_flush_lsn >= $1::text::pg_lsn) FROM pg_replication_slots";
    let confirmed = async || client.query_one(past, &[&end]).await.unwrap().get::<_, Option<bool>>(0) == Some(true);
    eventually(Duration::from_mins(1), "the slot is confirmed", confirmed).await;
    // Past the duplicate window.
    tokio::time::sleep(Duration::from_secs(2)).await;
    postgres.stop_immediate().await;
    postgres.start_again().await;
    let client = postgres.client().await;
    client.batch_execute(insert).await.unwrap();
    eventually(Duration::from_mins(1), "the new rows are deleted", async || gone(&client).await).await;
    assert_eq!(stream::count(&jetstream, &space.stream).await, 40);
}
