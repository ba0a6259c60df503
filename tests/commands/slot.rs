//! `outbox-relay slot`: what it shows is true, what it makes and drops loses no row.

use serde_json::{Value, json};

use super::{assert_shape, command, expect};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::RelaySettings;
use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::wait::eventually;

const INSERT: &str = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'order', i::text, 'paid', '{}' FROM generate_series(1, 20) i";

fn shape() -> Value {
    json!({
        "name": "string", "ours": "boolean", "plugin": "string|null", "database": "string|null",
        "active_pid": "number|null", "application_name": "string|null", "client_address": "string|null",
        "wal_status": "string|null", "restart_lsn": "string|null", "confirmed_lsn": "string|null",
        "confirmed_lag_bytes": "number|null", "retained_wal_bytes": "number|null", "safe_wal_bytes": "number|null",
        "failover": "boolean|null", "synced": "boolean|null", "inactive_since": "string|null",
        "invalidation_reason": "string|null",
    })
}

async fn needs_drain(scene: &Scene) -> i64 {
    scene.number("SELECT count(*) FROM outbox_relay_state WHERE needs_drain").await
}

/// Dropped, made anew by hand, with rows before, between and after: each is delivered, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_dropped_and_made_by_hand_loses_no_row() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let (settings, name) = (&scene.settings, &scene.database.slot);
        expect(settings, &["publication", "create"], 0).await;
        let made = expect(settings, &["slot", "create"], 0).await;
        assert!(made.stdout.contains(name) && made.stderr.contains("read from the table"), "{made:?}");
        assert_eq!(needs_drain(&scene).await, 1, "rows from before the slot are not looked for");
        scene.sql(INSERT).await;
        let mut relay = scene.relay().await;
        scene.wait_completed(20).await;
        eventually(DELIVERED, "the drain is over", async || needs_drain(&scene).await == 0).await;

        let refused = expect(settings, &["slot", "drop", "--yes"], 4).await;
        let pid = scene
            .number(&format!("SELECT active_pid::int8 FROM pg_replication_slots WHERE slot_name = '{name}'"))
            .await;
        assert!(refused.one_line().contains(&format!("outbox-relay (pid {pid})")), "{refused:?}");
        relay.terminate(DELIVERED).await;
        scene.sql(INSERT).await;
        let refused = expect(settings, &["slot", "drop"], 4).await;
        assert!(refused.stderr.contains("not lost") && refused.stderr.contains("--yes"), "{refused:?}");
        assert_eq!(needs_drain(&scene).await, 0, "it was refused");
        expect(settings, &["slot", "drop", "--yes"], 0).await;
        assert_eq!(needs_drain(&scene).await, 1, "nobody looks for rows that the slot would have shown");
        scene.sql(INSERT).await;
        expect(settings, &["slot", "create"], 0).await;
        let again = expect(settings, &["slot", "create"], 1).await;
        assert!(again.one_line().contains("exists already"), "{again:?}");
        scene.sql(INSERT).await;
        let _relay = scene.relay().await;
        scene.wait_completed(80).await;
        let mut ids = scene.ids().await;
        ids.sort();
        assert_eq!(ids, scene.texts("SELECT event_id::text FROM outbox_events ORDER BY event_id COLLATE \"C\"").await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_slot_of_an_outbox_is_never_dropped() {
    let scene = Scene::new().await;
    let other = scene.database.server().database().await;
    let names = ["physical", "plugin"].map(|kind| format!("{}_{kind}", scene.database.name));
    let names = [names[0].clone(), other.slot.clone(), names[1].clone()];
    scene.sql(&format!("SELECT pg_create_physical_replication_slot('{}')", names[0])).await;
    scene.sql(&format!("SELECT pg_create_logical_replication_slot('{}', 'test_decoding')", names[2])).await;
    let make = format!("SELECT pg_create_logical_replication_slot('{}', 'pgoutput')", names[1]);
    other.client().await.batch_execute(&make).await.unwrap();
    for (name, why) in names.iter().zip(["is a physical one", "belongs to database", "\"test_decoding\""]) {
        let refused = expect(&scene.settings, &["slot", "drop", name, "--yes"], 4).await;
        assert!(refused.one_line().contains(why), "{refused:?}");
        let shown = expect(&scene.settings, &["slot", "show", name, "--output", "json"], 0).await.json();
        assert!(shown["meaning"][0].as_str().unwrap().contains(why), "{shown}");
        let ours = scene.settings.clone().set("source.slot", name);
        let refused = expect(&ours, &["slot", "create"], 1).await;
        assert!(refused.one_line().contains(why), "{refused:?}");
    }
    let count = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name IN ('{}')", names.join("', '"));
    assert_eq!(scene.number(&count).await, 3);
    scene.sql(&format!("SELECT pg_drop_replication_slot('{}')", names[0])).await;
    for arguments in [&["slot", "show", "no such"][..], &["slot", "drop", "no such", "--yes"], &["slot", "show"]] {
        let missing = expect(&scene.settings, arguments, 1).await;
        assert!(missing.one_line().contains("does not exist"), "{missing:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_are_listed_and_shown_as_the_server_has_them() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let (settings, name) = (&scene.settings, scene.database.slot.as_str());
        assert_eq!(expect(settings, &["slot", "list", "--output", "json"], 0).await.json(), json!({ "rows": [] }));
        let relay = scene.relay().await;
        scene.sql(INSERT).await;
        scene.wait_completed(20).await;
        let beside = format!("{}_beside", scene.database.name);
        scene.sql(&format!("SELECT pg_create_logical_replication_slot('{beside}', 'pgoutput')")).await;
        let list = expect(settings, &["slot", "list", "--output", "json"], 0).await.json()["rows"].take();
        assert_shape(&list, &json!([shape()]));
        let (mine, other) = (&list[1], &list[0]);
        assert_eq!((&mine["name"], &mine["ours"]), (&json!(name), &json!(true)));
        assert_eq!((&other["name"], &other["ours"]), (&json!(beside), &json!(false)));
        assert_eq!((&mine["application_name"], &mine["wal_status"]), (&json!("outbox-relay"), &json!("reserved")));
        assert!(mine["active_pid"].as_u64() > Some(0) && mine["confirmed_lag_bytes"].is_number(), "{mine}");
        let failover = if version == PgVersion::V15 { Value::Null } else { json!(true) };
        assert_eq!(mine["failover"], failover);
        assert_eq!(other["inactive_since"].is_string(), version != PgVersion::V15, "{other}");

        let shown = expect(settings, &["slot", "show", "--output", "json"], 0).await.json();
        let mut full = shape();
        full["meaning"] = json!(["string"]);
        full["state"] = json!({ "or_null": {
            "stream": "string|null", "stream_created": "string|null", "stream_sequence": "number",
            "needs_drain": "boolean", "confirmed_lsn": "string|null",
        } });
        assert_shape(&shown, &full);
        assert_eq!(shown["state"]["stream"], json!(scene.space.stream));
        let unknown = expect(settings, &["slot", "show", &beside, "--output", "json"], 0).await.json();
        assert_eq!(unknown["state"], Value::Null);
        let table = expect(settings, &["slot", "list"], 0).await.stdout;
        let marked = table.lines().filter(|line| line.starts_with("* ")).collect::<Vec<_>>();
        assert!(matches!(marked[..], [line] if line.contains(name)), "{table}");
        drop(relay);
    }
}

/// A lost slot never reads as one that is up to date.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_slot_reads_as_lost() {
    let postgres = Postgres::start(PgVersion::V18, &[("max_slot_wal_keep_size", "1MB")]).await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url()).set("nats.stream", &space.stream);
    settings.migrate().await;
    expect(&settings, &["slot", "create"], 0).await;
    let client = postgres.client().await;
    let status = "SELECT wal_status FROM pg_replication_slots";
    eventually(DELIVERED, "the slot is lost", async || {
        client.batch_execute("SELECT pg_logical_emit_message(false, 'x', 'x'), pg_switch_wal()").await.unwrap();
        client.batch_execute("CHECKPOINT").await.unwrap();
        client.query_one(status, &[]).await.unwrap().get::<_, String>(0) == "lost"
    })
    .await;
    let shown = expect(&settings, &["slot", "show", "--output", "json"], 0).await.json();
    assert_eq!((&shown["wal_status"], &shown["confirmed_lag_bytes"]), (&json!("lost"), &Value::Null));
    assert_eq!(shown["invalidation_reason"], json!("wal_removed"));
    assert!(shown["meaning"][0].as_str().unwrap().contains("given the slot up"), "{shown}");
    let again = command(&settings, &["slot", "create"]).await;
    assert!(again.code == 1 && again.one_line().contains("drop it first"), "{again:?}");
    expect(&settings, &["slot", "drop", "--yes"], 0).await;
    expect(&settings, &["slot", "create"], 0).await;
}
