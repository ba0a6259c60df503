//! The outbox table or its publication changes under a running relay: it is noticed, mended or told, and no row is
//! missed.

use std::time::Duration;

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::scene::{DELIVERED, Scene, publishes};
use crate::harness::wait::eventually;

/// The sweep comes too late to find anything.
fn without_sweep(scene: &Scene) -> RelaySettings {
    scene.settings.clone().set("reconcile.sweep_interval", "1h")
}

/// Four events of two aggregates.
async fn insert(scene: &Scene, batch: &str) {
    let insert = format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT '{batch}-' || i, 'order', (i % 2)::text, 'paid', '{{}}' FROM generate_series(1, 4) i"
    );
    scene.sql(&insert).await;
}

/// The stream holds these batches, whole and in order, and nothing twice.
async fn expect(scene: &Scene, relay: &mut Relay, batches: &[&str]) {
    scene.wait_stored(batches.len() as u64 * 4).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE status <> 'completed'", 0).await;
    relay.wait_ready().await;
    let ids = scene.ids().await;
    for aggregate in [0, 1] {
        let of_it = |id: &&String| id.bytes().last().unwrap() % 2 == aggregate;
        let numbers = (1..=4).filter(|n| n % 2 == aggregate);
        let wanted: Vec<String> =
            batches.iter().flat_map(|batch| numbers.clone().map(move |n| format!("{batch}-{n}"))).collect();
        assert_eq!(ids.iter().filter(of_it).cloned().collect::<Vec<_>>(), wanted);
    }
    assert_eq!(ids.len(), batches.len() * 4);
    assert_eq!(publishes(relay, "duplicate").await, 0);
}

/// Case 17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_made_anew_under_a_running_relay_is_published_again() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let mut relay = scene.relay_with(&without_sweep(&scene)).await;
        insert(&scene, "old").await;
        scene.wait_completed(4).await;
        scene.sql("DROP TABLE outbox_events CASCADE").await;
        scene.settings.migrate().await;
        // Their ids are those of the first rows of the old table.
        insert(&scene, "new").await;
        expect(&scene, &mut relay, &["old", "new"]).await;
        insert(&scene, "later").await;
        expect(&scene, &mut relay, &["old", "new", "later"]).await;
        assert!(relay.log().contains("the outbox is added"), "{}", relay.log());
    }
}

/// Case 17, while a row of the old table has no outcome: a row of the new one that has its id is not taken for it,
/// which would let it overtake those before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_the_new_table_are_not_taken_for_missed_ones_of_the_old() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        assert!(scene.relay().await.terminate(READY).await.success());
        insert(&scene, "old").await;
        let outbox = scene.outbox().await;
        let mut holder = outbox.client().await;
        let lock = holder.transaction().await.unwrap();
        lock.execute("SELECT 1 FROM outbox_events WHERE event_id IN ('old-3', 'old-4') FOR UPDATE", &[]).await.unwrap();
        let mut relay = without_sweep(&scene).start();
        scene.wait_completed(2).await;
        scene.wait_stored(4).await;
        // The first look at waiting rows, which sees those two.
        relay.wait_ready().await;
        lock.batch_execute("DROP TABLE outbox_events CASCADE").await.unwrap();
        lock.commit().await.unwrap();
        scene.settings.migrate().await;
        insert(&scene, "new").await;
        expect(&scene, &mut relay, &["old", "new"]).await;
    }
}

/// Case 17, where the relay may not mend it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_made_anew_is_told_where_the_relay_must_not_add_it() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let mut relay = scene.relay().await;
        assert!(relay.terminate(READY).await.success());
        let mut relay = scene.relay_with(&without_sweep(&scene).set("source.create", "false")).await;
        insert(&scene, "old").await;
        scene.wait_completed(4).await;
        scene.sql("DROP TABLE outbox_events CASCADE").await;
        relay.wait_says(&["outbox_events", "outbox-relay migrate"]).await;
        scene.settings.migrate().await;
        insert(&scene, "new").await;
        let mend =
            format!("ALTER PUBLICATION \"{}\" ADD TABLE \"public\".\"outbox_events\"", scene.database.publication);
        relay.wait_says(&["does not include", &mend]).await;
        assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));
        scene.sql(&mend).await;
        expect(&scene, &mut relay, &["old", "new"]).await;
    }
}

/// Too short to be seen: the rows of the meantime are in no log all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_written_while_the_table_was_out_of_its_publication_are_delivered() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let publication = &scene.database.publication;
        let mut relay = scene.relay_with(&without_sweep(&scene)).await;
        insert(&scene, "before").await;
        scene.wait_completed(4).await;
        scene.sql(&format!("ALTER PUBLICATION {publication} DROP TABLE outbox_events")).await;
        insert(&scene, "between").await;
        scene.sql(&format!("ALTER PUBLICATION {publication} ADD TABLE outbox_events")).await;
        expect(&scene, &mut relay, &["before", "between"]).await;
        // Taken out for good, it is put back.
        scene.sql(&format!("ALTER PUBLICATION {publication} DROP TABLE outbox_events")).await;
        insert(&scene, "out").await;
        expect(&scene, &mut relay, &["before", "between", "out"]).await;
    }
}

/// The log shows rows of a transaction as the publication was when they were written, whenever it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_a_transaction_that_was_open_meanwhile_are_delivered_when_it_ends() {
    const OPEN: Duration = Duration::from_secs(3);
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let publication = &scene.database.publication;
        let often = scene.settings.clone().set("reconcile.sweep_interval", "200ms").set("reconcile.interval", "50ms");
        let mut relay = scene.relay_with(&often).await;
        insert(&scene, "before").await;
        scene.wait_completed(4).await;
        let open = scene.database.client().await;
        scene.sql(&format!("ALTER PUBLICATION {publication} DROP TABLE outbox_events")).await;
        open.batch_execute(
            "BEGIN; INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
             SELECT 'open-' || i, 'order', (i % 2)::text, 'paid', '{}' FROM generate_series(1, 4) i",
        )
        .await
        .unwrap();
        insert(&scene, "between").await;
        scene.sql(&format!("ALTER PUBLICATION {publication} ADD TABLE outbox_events")).await;
        scene.wait_completed(8).await;
        // What comes later has been looked at, and found delivered.
        tokio::time::sleep(OPEN).await;
        open.batch_execute("COMMIT").await.unwrap();
        scene.wait_completed(12).await;
        expect(&scene, &mut relay, &["before", "between", "open"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_that_shows_other_things_is_told_and_left_alone() {
    for (change, words, mend) in [
        ("SET (publish = 'update')", "does not publish inserts", "SET (publish = 'insert')"),
        ("SET TABLE outbox_dead_letter", "does not include", "ADD TABLE outbox_events"),
    ] {
        let scene = Scene::new().await;
        let publication = &scene.database.publication;
        let mut relay = scene.relay_with(&without_sweep(&scene)).await;
        insert(&scene, "before").await;
        scene.wait_completed(4).await;
        scene.sql(&format!("ALTER PUBLICATION {publication} {change}")).await;
        insert(&scene, "between").await;
        relay.wait_says(&[words, "ALTER PUBLICATION"]).await;
        insert(&scene, "later").await;
        // The sweep that every session begins with may have found those before.
        assert!(scene.count().await <= 8);
        scene.sql(&format!("ALTER PUBLICATION {publication} {mend}")).await;
        expect(&scene, &mut relay, &["before", "between", "later"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_that_is_dropped_under_a_running_relay_is_made_again() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let mut relay = scene.relay_with(&without_sweep(&scene)).await;
        insert(&scene, "before").await;
        scene.wait_completed(4).await;
        scene.sql(&format!("DROP PUBLICATION {}", scene.database.publication)).await;
        insert(&scene, "between").await;
        expect(&scene, &mut relay, &["before", "between"]).await;
    }
}

/// Where the relay must make neither, each step that it waits for is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_that_is_dropped_is_told_where_the_relay_must_not_make_it() {
    let scene = Scene::on(PgVersion::V15, NatsVersion::V2_15).await;
    let (publication, slot) = (&scene.database.publication, &scene.database.slot);
    let mut relay = scene.relay().await;
    assert!(relay.terminate(READY).await.success());
    let mut relay = scene.relay_with(&without_sweep(&scene).set("source.create", "false")).await;
    insert(&scene, "before").await;
    scene.wait_completed(4).await;
    scene.sql(&format!("DROP PUBLICATION {publication}")).await;
    insert(&scene, "between").await;
    relay.wait_says(&["does not exist", "outbox-relay publication create", "CREATE PUBLICATION"]).await;
    let create = "FOR TABLE outbox_events WITH (publish = 'insert', publish_via_partition_root = true)";
    scene.sql(&format!("CREATE PUBLICATION {publication} {create}")).await;
    // The slot still shows the log of the meantime, which cannot be read.
    let commands = ["outbox-relay slot drop, then outbox-relay slot create", "pg_drop_replication_slot"];
    relay.wait_says(&commands).await;
    eventually(DELIVERED, "the slot is dropped", async || {
        scene.client.batch_execute(&format!("SELECT pg_drop_replication_slot('{slot}')")).await.is_ok()
    })
    .await;
    relay.wait_says(&["is missing", "run: outbox-relay slot create", "pg_create_logical_replication_slot"]).await;
    scene.sql(&format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")).await;
    expect(&scene, &mut relay, &["before", "between"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_is_renamed_under_a_running_relay_is_missed() {
    let scene = Scene::new().await;
    let mut relay = scene.relay_with(&without_sweep(&scene)).await;
    insert(&scene, "before").await;
    scene.wait_completed(4).await;
    scene.sql("ALTER TABLE outbox_events RENAME TO elsewhere").await;
    relay.wait_says(&["outbox_events", "outbox-relay migrate"]).await;
    scene.sql("ALTER TABLE elsewhere RENAME TO outbox_events").await;
    insert(&scene, "after").await;
    expect(&scene, &mut relay, &["before", "after"]).await;
}
