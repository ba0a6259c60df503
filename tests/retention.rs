//! Retention: completed rows go when they are old enough, and nothing else does.

use std::time::Duration;

use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::PgVersion;
use crate::harness::scene::Scene;
use crate::harness::wait::{always, eventually};

const SOON: Duration = Duration::from_mins(1);

async fn insert(client: &Client, id: &str, status: &str, created: &str, processed: Option<&str>) {
    let sql = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status,
          next_retry_at, created_at, processed_at)
        VALUES ($1, 'a', $1, 'c', '{}', $2::text, CASE WHEN $2::text NOT IN ('completed', 'dead_letter') THEN now() + '1 day' END,
          now() - $3::text::interval, now() - $4::text::interval)";
    client.execute(sql, &[&id, &status, &created, &processed]).await.unwrap();
}

async fn left(client: &Client) -> String {
    let select = "SELECT coalesce(string_agg(event_id, ' ' ORDER BY event_id), '') FROM outbox_events";
    client.query_one(select, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_old_completed_rows_go() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let (client, settings) = (&scene.client, scene.settings.clone().set("compensation.enabled", "false"));
        insert(client, "completed-late", "completed", "3 h", Some("10 min")).await;
        insert(client, "completed-new", "completed", "10 min", Some("10 min")).await;
        for status in ["dead_letter", "failed", "pending", "processing"] {
            insert(client, &format!("old-{status}"), status, "3 h", Some("3 h")).await;
        }
        insert(client, "completed-old", "completed", "3 h", Some("2 h")).await;
        insert(client, "completed-untold", "completed", "3 h", None).await;
        // More than go at once.
        let many = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status,
              created_at, processed_at)
            SELECT 'many-' || n, 'a', 'b', 'c', '{}', 'completed', now() - interval '3 h', now() - interval '2 h'
            FROM generate_series(1, 2500) n";
        scene.sql(many).await;
        let keeping = scene.relay_with(&settings).await;
        let all = left(client).await;
        always(Duration::from_secs(3), "by default all is kept", async || left(client).await == all).await;
        drop(keeping);
        let _relay = scene.relay_with(&settings.set("reconcile.retention", "1h")).await;
        let kept = "completed-late completed-new old-dead_letter old-failed old-pending old-processing";
        eventually(SOON, "old completed rows are gone", async || left(client).await == kept).await;
        always(Duration::from_secs(2), "the others stay", async || left(client).await == kept).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_stays_while_its_log_may_be_read_again() {
    let mut nats = Nats::start(NatsVersion::V2_15).await;
    let scene = Scene::before(PgVersion::V18, &nats, Space::new()).await;
    let client = &scene.client;
    let mut relay = scene.relay_with(&scene.settings.clone().set("reconcile.retention", "1s")).await;
    insert(client, "first", "completed", "0 s", Some("0 s")).await;
    eventually(SOON, "retention works", async || left(client).await.is_empty()).await;
    nats.kill().await;
    relay.wait_unready().await;
    // Nobody takes it, so that nothing behind it is confirmed.
    let sql = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
               VALUES ('stuck', 'a', 'b', 'c', '{}')";
    scene.sql(sql).await;
    insert(client, "behind", "completed", "0 s", Some("0 s")).await;
    let both = async || left(client).await == "behind stuck";
    always(Duration::from_secs(6), "the slot has not confirmed the row", both).await;
    nats.start_again().await;
    eventually(SOON, "what is confirmed goes", async || left(client).await.is_empty()).await;
}
