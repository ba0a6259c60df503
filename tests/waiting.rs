//! Rows that are not to be sent yet, and rows that the log never showed.

use std::time::Duration;

use outbox_relay::config::TableName;
use outbox_relay::postgres::store;

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::relay::READY;
use crate::harness::scene::{Scene, publishes};
use crate::harness::wait::always;

/// An event that may leave so many seconds from now; `null`: at once.
fn insert(event: &str, aggregate: &str, seconds: &str) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, next_retry_at)
         VALUES ('{event}', 'order', '{aggregate}', 'paid', '{{}}', clock_timestamp() + {seconds} * interval '1 s');"
    )
}

fn table() -> TableName {
    TableName { schema: "public".to_owned(), table: "outbox_events".to_owned() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_dated_to_the_future_waits_for_its_time_and_then_goes() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        scene.sql("CREATE TABLE dated (event_id text, due timestamptz)").await;
        let remember = "INSERT INTO dated SELECT event_id, next_retry_at FROM outbox_events
            WHERE next_retry_at IS NOT NULL AND event_id NOT IN (SELECT event_id FROM dated);";
        // From before the slot, and from the log.
        scene.sql(&(insert("early", "a", "8") + remember)).await;
        let _relay = scene.relay().await;
        scene.sql(&(insert("late", "b", "5") + &insert("now", "c", "null") + remember)).await;
        scene.wait_completed(3).await;
        assert_eq!(scene.count().await, 3);
        let hasty = "SELECT count(*) FROM outbox_events JOIN dated USING (event_id) WHERE processed_at < due";
        assert_eq!(scene.number(hasty).await, 0, "none left before its time");
        assert_eq!(scene.number("SELECT max(retry_count)::int8 FROM outbox_events").await, 0, "waiting is no failure");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_a_poller_has_claimed_is_sent_only_when_its_lease_has_ended() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        scene.sql(&(insert("ends", "a", "null") + &insert("kept", "b", "null"))).await;
        let mut poller = scene.database.client().await;
        let claim = async |poller: &mut tokio_postgres::Client, lease| {
            let tx = poller.transaction().await.unwrap();
            let claimed = store::claim_batch(&tx, &table(), "poller", 1, Duration::from_secs(lease)).await.unwrap();
            tx.commit().await.unwrap();
            claimed.into_iter().next()
        };
        let ends = claim(&mut poller, 8).await.expect("the first row");
        let kept = claim(&mut poller, 3600).await.expect("the second row");
        scene.sql("CREATE TABLE leases AS SELECT event_id, next_retry_at AS ends FROM outbox_events").await;

        let relay = scene.relay().await;
        scene.sql(&insert("free", "c", "null")).await;
        assert!(claim(&mut poller, 60).await.is_none(), "pollers rest while the relay holds the slot");
        scene.wait_completed(2).await;
        let mut ids = scene.ids().await;
        ids.sort_unstable();
        assert_eq!(ids, [&*ends.event_id, "free"]);
        let hasty = "SELECT count(*) FROM outbox_events JOIN leases USING (event_id)
            WHERE status = 'completed' AND processed_at < ends";
        assert_eq!(scene.number(hasty).await, 0, "it was left to its poller for as long as the lease lasted");

        let tx = poller.transaction().await.unwrap();
        store::mark_completed(&tx, &table(), kept.id, "poller").await.unwrap();
        tx.commit().await.unwrap();
        let pause = Duration::from_secs(2);
        always(pause, "what the poller completed is not sent", async || scene.count().await == 2).await;
        assert_eq!(publishes(&relay, "stored").await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_the_log_missed_are_found_in_the_table() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        let settings = scene.settings.clone().set("reconcile.sweep_interval", "1s");
        let mut relay = scene.relay_with(&settings).await;
        scene.sql(&insert("shown", "a", "null")).await;
        scene.wait_completed(1).await;
        for number in 1..=20 {
            // The log shows it as nothing to be sent, and updates it does not show.
            let event = format!("missed-{number:02}");
            scene
                .sql(&format!(
                    "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status)
                     VALUES ('{event}', 'order', 'a', 'paid', '{{}}', 'completed');
                     UPDATE outbox_events SET status = 'pending' WHERE event_id = '{event}'"
                ))
                .await;
        }
        scene.sql(&insert("last", "b", "null")).await;
        scene.wait_completed(22).await;
        assert!(relay.log().contains("pending rows were not in the log"), "{}", relay.log());
        let ids: Vec<String> = scene.ids().await.into_iter().filter(|id| id != "last").collect();
        assert_eq!(ids, scene.texts("SELECT event_id FROM outbox_events WHERE event_id <> 'last' ORDER BY id").await);
        assert_eq!((scene.count().await, publishes(&relay, "duplicate").await), (22, 0));
        assert_eq!(scene.number("SELECT max(version) FROM outbox_events").await, 2);
        relay.wait_ready().await;
    }
}

/// A poller of another kind writes down when it locked a row, and no lease: what it left when it died is nobody's once
/// it is old, however many rows came after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_a_poller_without_leases_left_is_sent_when_it_is_old() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        let events = ["old", "ends", "kept"];
        scene.sql(&events.map(|event| insert(event, event, "null")).concat()).await;
        scene
            .sql(
                "UPDATE outbox_events SET status = 'processing', locked_by = 'w1', locked_at = now() - CASE event_id
                   WHEN 'old' THEN interval '1 h' WHEN 'ends' THEN interval '4 min 50 s' ELSE interval '0' END;
                 CREATE TABLE leases AS SELECT event_id, locked_at + interval '5 min' AS ends FROM outbox_events",
            )
            .await;
        let settings = scene.settings.clone().set("reconcile.sweep_interval", "1s");
        let relay = scene.relay_with(&settings).await;
        scene.sql(&insert("later", "later", "null")).await;
        scene.wait_completed(3).await;
        let mut ids = scene.ids().await;
        ids.sort_unstable();
        assert_eq!(ids, ["ends", "later", "old"]);
        let hasty = "SELECT count(*) FROM outbox_events JOIN leases USING (event_id)
            WHERE status = 'completed' AND processed_at < ends";
        assert_eq!(scene.number(hasty).await, 0, "it was left to its poller for as long as a lease lasts");
        assert_eq!(publishes(&relay, "stored").await, 3);

        let output = scene.settings.run(&["status"]).await;
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("0 scheduled, 1 claimed"), "{said}");
        let output = scene.settings.run(&["events", "show", "kept"]).await;
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("is claimed by w1, for 4"), "{said}");
    }
}

/// More than one look takes in, and ids that lie further apart than one reaches: the next one follows at once, not with
/// the next sweep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_many_rows_that_the_log_missed_are_sent_by_one_sweep() {
    const ROWS: i64 = 21_000;
    let scene = Scene::new().await;
    assert!(scene.relay().await.terminate(READY).await.success());
    scene
        .sql(&format!(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status)
             SELECT 'order', i::text, 'paid', '{{}}', 'completed' FROM generate_series(3, {ROWS}) i;
             INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, status)
             SELECT i, 'order', i::text, 'paid', '{{}}', 'completed' FROM unnest(ARRAY[5000000, 30000000]) i;
             UPDATE outbox_events SET status = 'pending'"
        ))
        .await;
    let _relay = scene.relay_with(&scene.settings.clone().set("reconcile.sweep_interval", "1h")).await;
    scene.wait_completed(ROWS).await;
    assert_eq!(scene.count().await, u64::try_from(ROWS).unwrap());
}

/// Held rows wait for nothing that the sweep does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_rows_leave_though_every_sweep_fails() {
    for postgres in PgVersion::ENDS {
        let scene = Scene::on(postgres, NatsVersion::V2_15).await;
        // Only the sweep calls the function, and a role that is no superuser may be forbidden to.
        let (role, publication) = (format!("{}_relay", scene.database.name), &scene.database.publication);
        let rows = insert("failed", "a", "null") + &insert("held", "a", "null") + &insert("behind", "a", "null");
        scene
            .sql(&format!(
                "CREATE ROLE {role} LOGIN REPLICATION;
                 GRANT ALL ON ALL TABLES IN SCHEMA public TO {role};
                 CREATE PUBLICATION {publication} FOR TABLE outbox_events WITH (publish = 'insert');
                 REVOKE EXECUTE ON FUNCTION hashtextextended(text, int8) FROM PUBLIC;
                 {rows}
                 UPDATE outbox_events SET next_retry_at = 'infinity';
                 UPDATE outbox_events SET status = 'failed', next_retry_at = now() + interval '1 h'
                   WHERE event_id = 'failed'"
            ))
            .await;
        let url = scene.database.url().replace("postgres@", &format!("{role}@"));
        let relay = scene.relay_with(&scene.settings.clone().set("postgres.url", &url)).await;
        relay.wait_log("the reconciler starts over", READY).await;
        scene.sql("UPDATE outbox_events SET next_retry_at = now() WHERE event_id = 'failed'").await;
        scene.wait_completed(3).await;
        assert_eq!(scene.ids().await, ["failed", "held", "behind"]);
        assert!(relay.log().contains("hashtextextended"), "{}", relay.log());
    }
}

/// On a slow disk a look at very many ids would take longer than a statement may, each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_the_log_missed_are_found_where_a_look_at_many_takes_too_long() {
    const ROWS: i64 = 60;
    let scene = Scene::new().await;
    // Some milliseconds for each row that is looked at.
    scene
        .sql(&format!(
            "CREATE PUBLICATION {} FOR TABLE outbox_events WHERE (length(repeat(event_id, 300000)) > 0)
             WITH (publish = 'insert')",
            scene.database.publication
        ))
        .await;
    assert!(scene.relay().await.terminate(READY).await.success());
    scene
        .sql(&format!(
            "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, status)
             SELECT i * 15000, 'order', i::text, 'paid', '{{}}', 'completed' FROM generate_series(1, {ROWS}) i;
             UPDATE outbox_events SET status = 'pending'"
        ))
        .await;
    let impatient = scene.database.client().await;
    let impatient = tokio::spawn(async move {
        let cancel = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'outbox-relay reconciler' AND state = 'active'
              AND query LIKE '%UNION ALL%' AND clock_timestamp() > query_start + interval '200 ms'";
        loop {
            impatient.query(cancel, &[]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let relay = scene.relay_with(&scene.settings.clone().set("reconcile.interval", "100ms")).await;
    scene.wait_completed(ROWS).await;
    impatient.abort();
    assert!(relay.log().contains("canceling statement"), "no look took too long: {}", relay.log());
}
