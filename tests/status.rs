//! `outbox-relay status`: what an operator sees first.

use std::process::{Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::free_port;
use crate::harness::relay::RelaySettings;
use crate::harness::scene::Scene;
use crate::harness::wait::{eventually, eventually_some};

const NOBODY: &str = "postgres://postgres@127.0.0.1:1/postgres";

/// With a place for the relay's page that `status` asks as well.
async fn scene(postgres: PgVersion, nats: NatsVersion) -> (Scene, RelaySettings) {
    let scene = Scene::on(postgres, nats).await;
    let settings = scene.settings.clone().set("admin.listen", &format!("127.0.0.1:{}", free_port()));
    (scene, settings)
}

async fn report(settings: &RelaySettings) -> Value {
    let output = settings.run(&["status", "--output", "json"]).await;
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_line_says_whether_all_is_well_and_what_to_look_at() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (scene, settings) = scene(postgres, nats).await;
        let before = report(&settings).await;
        assert_eq!((&before["verdict"], &before["postgres"]["slot"]["exists"]), (&json!("trouble"), &json!(false)));
        assert_eq!(before["relay"]["answers"], false);

        let _relay = settings.start();
        scene.sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'b', 'c', '{}')").await;
        scene.wait_completed(1).await;
        let healthy = eventually_some(Duration::from_mins(1), "all is well", async || {
            let healthy = report(&settings).await;
            (healthy["verdict"] == "healthy" && healthy["relay"]["status"]["stages"][4]["total"] == 1)
                .then_some(healthy)
        })
        .await;
        assert_eq!((&healthy["problems"], &healthy["nats"]["stream"]["messages"]), (&json!([]), &json!(1)));
        assert_eq!(healthy["postgres"]["slot"]["holder"], "outbox-relay");

        scene
            .sql(
                "INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id,
              event_type, payload, error_code, retry_count, first_failed_at)
              SELECT n::text, 'a', 'b', 'c', '{}', E'too\\x1b[2Jlarge', 0, now() FROM generate_series(1, 3) n",
            )
            .await;
        // Held for long by an earlier one of its aggregate.
        scene.sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status, next_retry_at, created_at)
              SELECT 'x', 'y', 'z', '{}', s, t, now() - interval '1 hour'
              FROM (VALUES ('failed', now() + interval '1 hour'), ('pending', 'infinity'), ('pending', now() + interval '1 day')) v (s, t)").await;
        let now = report(&settings).await;
        assert_eq!(now["verdict"], "attention");
        let rows = &now["postgres"]["rows"];
        let seen = ["pending", "failed", "held", "scheduled", "dead_letters_unhandled"].map(|name| rows[name].clone());
        assert_eq!(seen, [0, 1, 1, 1, 3].map(|count| json!(count)), "{now}");
        assert!((3600.0..4000.0).contains(&rows["oldest_waiting_seconds"].as_f64().unwrap()), "{rows}");
        let screen = stdout(&settings.run(&["status"]).await);
        let said = "Attention: dead letters to be handled: 3\n  failed rows that wait for a retry: 1\n\n";
        assert!(screen.starts_with(said), "{screen}");
        assert!(screen.contains("3 too\\u{1b}[2Jlarge") && !screen.contains('\x1b'), "{screen}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_away_does_not_hide_the_others() {
    let (_scene, settings) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    let without_nats = report(&settings.clone().set("nats.url", "nats://127.0.0.1:1")).await;
    assert_eq!((&without_nats["nats"]["answers"], &without_nats["postgres"]["answers"]), (&json!(false), &json!(true)));
    assert!(without_nats["nats"]["error"].as_str().unwrap().contains("127.0.0.1:1"));
    let without_postgres = settings.clone().set("postgres.url", NOBODY);
    let screen = stdout(&settings.clone().set("postgres.url", NOBODY).run(&["status"]).await);
    assert!(screen.starts_with("Trouble: cannot connect to PostgreSQL at 127.0.0.1:1"), "{screen}");
    assert!(screen.contains("no relay answers on 127.0.0.1"), "{screen}");
    assert_eq!(report(&without_postgres).await["nats"]["answers"], true);
    let neither = without_postgres.set("nats.url", "nats://127.0.0.1:1").run(&["status", "--output", "json"]).await;
    assert_eq!(neither.status.code(), Some(1), "{neither:?}");
    assert_eq!(serde_json::from_slice::<Value>(&neither.stdout).unwrap()["verdict"], "trouble");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_slot_has_no_lag() {
    let postgres = Postgres::start(PgVersion::V15, &[("max_slot_wal_keep_size", "16MB")]).await;
    let nats = Nats::shared(NatsVersion::V2_15).await;
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url()).set("admin.listen", "off");
    settings.migrate().await;
    let client = postgres.client().await;
    client.batch_execute("SELECT pg_create_logical_replication_slot('outbox_relay', 'pgoutput')").await.unwrap();
    let slot = || async { report(&settings).await["postgres"]["slot"].clone() };
    assert_eq!(slot().await["max_slot_wal_keep_size_bytes"], 16 << 20);
    assert!(slot().await["confirmed_lag_bytes"].is_number());
    // What several commands tell has one name.
    let shown = settings.run(&["slot", "show", "--output", "json"]).await.stdout;
    let (shown, told) = (serde_json::from_slice::<Value>(&shown).unwrap(), slot().await);
    for name in ["confirmed_lsn", "confirmed_lag_bytes", "retained_wal_bytes", "safe_wal_bytes", "wal_status"] {
        assert!(shown.get(name).is_some() && told.get(name).is_some(), "{name}: {shown} {told}");
    }
    eventually(Duration::from_mins(1), "the slot is lost", async || {
        for statement in ["SELECT pg_logical_emit_message(false, 'it', 'x')", "SELECT pg_switch_wal()", "CHECKPOINT"] {
            client.batch_execute(statement).await.unwrap();
        }
        slot().await["wal_status"] == "lost"
    })
    .await;
    assert_eq!(
        (&slot().await["confirmed_lag_bytes"], &slot().await["retained_wal_bytes"]),
        (&Value::Null, &Value::Null)
    );
    let screen = stdout(&settings.run(&["status"]).await);
    assert!(screen.starts_with("Trouble: the slot \"outbox_relay\" is lost"), "{screen}");
    assert!(!screen.contains("not confirmed"), "{screen}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_watches_until_it_is_told_to_stop() {
    let (_scene, settings) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    for (arguments, starts) in [
        (&["status", "--watch", "1"][..], "Trouble: "),
        (&["status", "--watch", "1", "--output", "json"], "{\"verdict\":"),
    ] {
        let out = tempfile::NamedTempFile::new().unwrap();
        let mut command = settings.command(arguments);
        command.stdin(Stdio::null()).stdout(out.reopen().unwrap()).stderr(Stdio::inherit());
        let mut child = command.spawn().unwrap();
        let said = || std::fs::read_to_string(out.path()).unwrap();
        let blocks = || said().lines().filter(|line| line.starts_with(starts)).count();
        eventually(Duration::from_mins(1), "it has looked twice", async || blocks() >= 2).await;
        assert!(!said().contains('\x1b'), "nothing is cleared where there is no terminal");
        kill_process(Pid::from_child(&child), Signal::INT).unwrap();
        let status = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
        assert_eq!(status.code(), Some(0), "{}", said());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_table_is_not_read_through() {
    let (scene, settings) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    scene
        .sql(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status)
          SELECT 'a', n::text, 'c', '{}', CASE n WHEN 149990 THEN 'pending' ELSE 'completed' END
          FROM generate_series(1, 150000) n; ANALYZE outbox_events",
        )
        .await;
    let read = "SELECT seq_scan || ' ' || idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox_events'";
    let numbers = || async {
        scene.sql("SELECT pg_stat_clear_snapshot()").await;
        let text = scene.texts(read).await.remove(0);
        let (scans, rows) = text.split_once(' ').unwrap();
        (scans.parse::<i64>().unwrap(), rows.parse::<i64>().unwrap())
    };
    let before = numbers().await;
    let rows = report(&settings).await["postgres"]["rows"].clone();
    assert_eq!((&rows["pending"], &rows["newest_only"], &rows["at_least"]), (&json!(1), &json!(true), &json!(true)));
    assert_eq!(rows["estimated_total"], 150_000);
    let mut after = before;
    eventually(Duration::from_mins(1), "the look is counted", async || {
        after = numbers().await;
        after.1 > before.1
    })
    .await;
    assert_eq!(after.0, before.0, "no scan of the whole table");
    assert!(after.1 - before.1 <= 100_010, "{before:?} {after:?}");
}
