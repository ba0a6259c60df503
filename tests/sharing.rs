//! Two relays on one outbox that share its rows by the row filters of their publications.

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::relay::RelaySettings;
use crate::harness::scene::{Scene, publishes};

/// Rows of 20 aggregates, in turn.
fn rows(first: i64, last: i64, more: (&str, &str)) -> String {
    let (columns, values) = more;
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload{columns})
         SELECT 'e' || i, 'order', (i % 20)::text, 'paid', '{{}}'{values} FROM generate_series({first}, {last}) i;"
    )
}

/// The settings of the relay whose share is `number`, and its publication.
async fn share(scene: &Scene, number: u32) -> RelaySettings {
    let publication = format!("{}_{number}", scene.database.publication);
    scene
        .sql(&format!(
            "CREATE PUBLICATION {publication} FOR TABLE outbox_events
             WHERE (abs(hashtext(aggregate_id)) % 2 = {number}) WITH (publish = 'insert')"
        ))
        .await;
    let slot = format!("{}_{number}", scene.database.slot);
    let settings = scene.settings.clone().set("source.slot", &slot).set("source.publication", &publication);
    settings.set("reconcile.sweep_interval", "1s")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_relays_share_the_rows_and_neither_touches_the_others() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        let settings = [share(&scene, 0).await, share(&scene, 1).await];
        // From before the slots, dated, failed by an earlier relay with one held behind it.
        scene.sql(&rows(1, 200, ("", ""))).await;
        scene.sql(&rows(201, 220, (", next_retry_at", ", now() + interval '3 s'"))).await;
        scene.sql(&rows(221, 240, (", status, next_retry_at", ", 'failed', now() + interval '4 s'"))).await;
        scene.sql(&rows(241, 260, (", next_retry_at", ", 'infinity'"))).await;
        let relays = [scene.relay_with(&settings[0]).await, scene.relay_with(&settings[1]).await];
        // From the log; and such that it does not show, for the sweeps.
        scene.sql(&rows(261, 500, ("", ""))).await;
        scene
            .sql(
                &(rows(501, 540, (", status", ", 'completed'"))
                    + "UPDATE outbox_events SET status = 'pending' WHERE id > 500"),
            )
            .await;
        scene.wait_completed(540).await;

        let mine = |number: usize| {
            format!("SELECT count(*) FROM outbox_events WHERE abs(hashtext(aggregate_id)) % 2 = {number}")
        };
        for (number, relay) in relays.iter().enumerate() {
            let rows = u64::try_from(scene.number(&mine(number)).await).unwrap();
            assert!(rows > 0);
            assert_eq!((publishes(relay, "stored").await, publishes(relay, "duplicate").await), (rows, 0));
        }
        let ids = scene.ids().await;
        assert_eq!(ids.len(), 540);
        let held = |id: &String| id[1..].parse::<i64>().unwrap() > 240;
        for aggregate in 0..20 {
            let of = format!(
                "SELECT event_id FROM outbox_events WHERE aggregate_id = '{aggregate}' AND id > 240 ORDER BY id"
            );
            let expected = scene.texts(&of).await;
            let stored: Vec<_> = ids.iter().filter(|id| held(id) && expected.contains(id)).cloned().collect();
            assert_eq!(stored.len(), expected.len());
            // Rows that only the sweep finds come late.
            let shown = |ids: &[String]| {
                ids.iter().filter(|id| id[1..].parse::<i64>().unwrap() <= 500).cloned().collect::<Vec<_>>()
            };
            assert_eq!(shown(&stored), shown(&expected));
        }
    }
}
