//! What a relay tells of the standbys that its slot is for.

use std::time::Duration;

use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

/// Waits until the relay says that there are so many standbys that may keep a copy, and that are missing.
async fn expect(relay: &Relay, kept: Option<f64>, missing: Option<f64>) {
    let said = async || {
        let value = async |name: &str| relay.metric(&format!("outbox_relay_slot_{name}_standbys")).await;
        (value("failover").await, value("missing").await)
    };
    eventually(DEADLINE, &format!("{kept:?} and {missing:?}"), async || said().await == (kept, missing)).await;
}

/// Whether `doctor` warns that there is no copy.
async fn is_warned(settings: &RelaySettings) -> bool {
    let output = settings.run(&["doctor", "--output", "json"]).await;
    let document: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    document["findings"].as_array().expect("a list").iter().any(|finding| finding["id"] == "slot-copies")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_that_no_standby_copies_and_one_that_waits_for_a_standby_are_told() {
    let server = Postgres::start(PgVersion::V18, &[]).await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let settings = RelaySettings::new(&server.url("postgres"), &nats.url()).within(&space);
    settings.migrate().await;
    // A slot that was never used is no standby's.
    let client = server.client().await;
    client.batch_execute("SELECT pg_create_physical_replication_slot('unused')").await.unwrap();
    let mut relay = settings.start();
    relay.wait_ready().await;
    server.reload("synchronized_standby_slots", "unused").await;
    // The server warns on the stream of changes that it waits, which is no reason to give the slot up.
    client.batch_execute("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'e', '{}')").await.unwrap();
    expect(&relay, None, Some(1.0)).await;
    server.reload("synchronized_standby_slots", "").await;
    let completed = "SELECT count(*) FROM outbox_events WHERE status = 'completed'";
    eventually(DEADLINE, "the event is delivered", async || {
        client.query_one(completed, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    assert_eq!(relay.log().matches("the slot was made").count(), 1, "{}", relay.log());

    let standby = server.standby().await;
    client.batch_execute("SELECT pg_create_physical_replication_slot('standby', true)").await.unwrap();
    let standby_client = standby.client().await;
    for setting in ["primary_slot_name = 'standby'", "wal_receiver_status_interval = '1s'"] {
        standby_client.batch_execute(&format!("ALTER SYSTEM SET {setting}")).await.unwrap();
    }
    // It keeps dead rows back for its queries, but has no slots.
    standby.reload("hot_standby_feedback", "on").await;
    eventually(DEADLINE, "the standby feeds back", async || {
        let fed =
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'standby' AND active AND xmin IS NOT NULL";
        client.query_one(fed, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    expect(&relay, Some(0.0), None).await;
    assert!(is_warned(&settings).await);

    standby.reload("sync_replication_slots", "on").await;
    expect(&relay, Some(1.0), None).await;
    assert!(!is_warned(&settings).await);
    let copies = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'outbox_relay' AND synced";
    assert_eq!(standby_client.query_one(copies, &[]).await.unwrap().get::<_, i64>(0), 1);

    server.reload("synchronized_standby_slots", "standby").await;
    expect(&relay, Some(1.0), Some(0.0)).await;
    drop(standby);
    expect(&relay, Some(0.0), Some(1.0)).await;
    server.reload("synchronized_standby_slots", "\"gone\", standby").await;
    expect(&relay, Some(0.0), Some(2.0)).await;

    // Where no copies are wanted, nobody is told that there are none.
    relay.kill9().await;
    let mut relay = settings.set("source.failover", "false").start();
    relay.wait_ready().await;
    expect(&relay, None, Some(2.0)).await;
}
