//! Set-ups that users make by hand: publications, slots and names.

use std::collections::HashSet;
use std::time::Duration;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::RelaySettings;
use crate::harness::scene::{DELIVERED, Scene, counter, publishes};
use crate::harness::stream;
use crate::harness::wait::{always, eventually};

const INSERT: &str = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    VALUES ('order', '1', 'paid', '{}')";

/// The relay's own UPDATE comes back to it through such a publication.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_write_back_does_not_feed_itself() {
    for (version, tables) in [
        (PgVersion::V15, "FOR TABLE outbox_events, outbox_relay_state"),
        (PgVersion::V18, "FOR TABLE outbox_events WITH (publish = 'insert, update, delete')"),
        (PgVersion::V18, "FOR ALL TABLES"),
    ] {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        scene.sql(&format!("CREATE PUBLICATION {} {tables}", scene.database.publication)).await;
        let relay = scene.relay().await;
        scene.sql(INSERT).await;
        scene.wait_completed(1).await;
        // Every transaction of the relay's write-back changes one of these two rows. How far it is may be noted a few
        // times more; writing that feeds itself never ends, and makes hundreds.
        let written = "SELECT concat_ws(' ', e.xmin, e.version, s.xmin) FROM outbox_events e, outbox_relay_state s";
        let mut seen = HashSet::new();
        always(Duration::from_secs(4), "nothing more happens", async || {
            seen.extend(scene.texts(written).await);
            seen.len() <= 5
        })
        .await;
        assert_eq!(scene.number("SELECT version FROM outbox_events").await, 2);
        assert_eq!(scene.count().await, 1);
        assert_eq!(publishes(&relay, "stored").await, 1);
        assert_eq!(publishes(&relay, "duplicate").await, 0);
        assert_eq!(counter(&relay, "events_decoded").await, 1);
    }
}

/// WAL from before the publication cannot be read through it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_between_the_slot_and_its_publication_are_delivered() {
    for version in PgVersion::ENDS {
        for by_hand in [true, false] {
            let scene = Scene::on(version, NatsVersion::V2_15).await;
            let (slot, publication) = (&scene.database.slot, &scene.database.publication);
            let make = format!("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')::text");
            assert_eq!(scene.texts(&make).await.len(), 1);
            scene.sql(INSERT).await;
            if by_hand {
                let create =
                    format!("CREATE PUBLICATION {publication} FOR TABLE outbox_events WITH (publish = 'insert')");
                scene.sql(&create).await;
                scene.sql(INSERT).await;
            }
            let relay = scene.settings.start();
            scene.wait_completed(1 + i64::from(by_hand)).await;
            scene.sql(INSERT).await;
            scene.wait_completed(2 + i64::from(by_hand)).await;
            assert_eq!(scene.ids().await, scene.texts("SELECT event_id FROM outbox_events ORDER BY id").await);
            assert_eq!(publishes(&relay, "duplicate").await, 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_names_of_tables_and_publications_work() {
    for (version, on_success) in [(PgVersion::V15, "complete"), (PgVersion::V18, "delete")] {
        let database = Postgres::shared(version).await.database().await;
        let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
        let settings = RelaySettings::shared(&database, nats, &space)
            .set("source.table", r#""Out Box"."Ev""t""#)
            .set("source.publication", r#"Pub 'li' "ca\tion", too"#)
            .set("writeback.on_success", on_success);
        let client = database.client().await;
        client.batch_execute(r#"CREATE SCHEMA "Out Box""#).await.unwrap();
        settings.migrate().await;
        let insert = r#"INSERT INTO "Out Box"."Ev""t" (aggregate_type, aggregate_id, event_type, payload)
            VALUES ('order', '1', 'paid', '{}')"#;
        client.batch_execute(insert).await.unwrap();
        let mut relay = settings.start();
        relay.wait_ready().await;
        client.batch_execute(insert).await.unwrap();
        // The same name in another schema is another table.
        client
            .batch_execute(
                r#"CREATE TABLE "Ev""t" (LIKE "Out Box"."Ev""t" INCLUDING ALL);
                   INSERT INTO "Ev""t" (aggregate_type, aggregate_id, event_type, payload) VALUES ('x', 'x', 'x', '{}')"#,
            )
            .await
            .unwrap();
        client.batch_execute(insert).await.unwrap();
        let left = r#"SELECT count(*) FROM "Out Box"."Ev""t" WHERE status <> 'completed'"#;
        let jetstream = nats.jetstream().await;
        eventually(DELIVERED, "all rows are delivered", async || {
            let left: i64 = client.query_one(left, &[]).await.unwrap().get(0);
            left == 0 && stream::count(&jetstream, &space.stream).await == 3
        })
        .await;
        assert_eq!(publishes(&relay, "stored").await, 3);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_no_slot_can_have_are_refused_at_the_start() {
    let settings = RelaySettings::new("postgres://nobody@127.0.0.1:1/none", "nats://127.0.0.1:1");
    for name in ["A-b", &"s".repeat(64), "ünder", "a b", "pg_conflict_detection"] {
        let output = settings.clone().set("source.slot", name).run(&["run"]).await;
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(78), "{name:?}: {words}");
        assert!(words.contains("source.slot"), "{name:?}: {words}");
    }
    // The longest name that a slot can have.
    let scene = Scene::new().await;
    let longest = format!("{:_<63}", scene.database.slot);
    let _relay = scene.relay_with(&scene.settings.clone().set("source.slot", &longest)).await;
    scene.sql(INSERT).await;
    scene.wait_completed(1).await;
}
