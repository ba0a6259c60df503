//! What a relay tells of the standbys that its slot is for, and how it goes on when one of them takes over.

use std::time::Duration;

use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::stream;
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

/// Waits until the one row that a query gives is a true value.
async fn holds(server: &Postgres, what: &str, sql: &str) {
    let client = server.client().await;
    eventually(DEADLINE, what, async || {
        client.query_one(sql, &[]).await.unwrap().get::<_, Option<bool>>(0) == Some(true)
    })
    .await;
}

/// Events of fifty aggregates.
async fn insert(server: &Postgres, first: i32, last: i32) {
    let insert = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                  SELECT 'e' || i, 'order', (i % 50)::text, 'paid', '{}' FROM generate_series($1::int4, $2::int4) i";
    server.client().await.execute(insert, &[&first, &last]).await.unwrap();
}

/// A standby of `primary`, which from 17 on may keep a copy of the relay's slot.
async fn follower(primary: &Postgres) -> Postgres {
    let client = primary.client().await;
    client.batch_execute("SELECT pg_create_physical_replication_slot('standby', true)").await.unwrap();
    let standby = primary.standby().await;
    let slot = "ALTER SYSTEM SET primary_slot_name = 'standby'";
    standby.client().await.batch_execute(slot).await.unwrap();
    standby.reload("hot_standby_feedback", "on").await;
    if standby.version() == PgVersion::V18 {
        standby.reload("sync_replication_slots", "on").await;
    }
    standby
}

/// Waits until the standby could go on with the relay's slot.
async fn copied(primary: &Postgres, standby: &Postgres) {
    let (first, second) = (primary.client().await, standby.client().await);
    let copied = "SELECT bool_or(synced AND NOT temporary) FROM pg_replication_slots WHERE slot_name = 'outbox_relay'";
    eventually(DEADLINE, "the slot is copied", async || {
        // What the copy waits for comes by itself only every 15 s.
        first.batch_execute("SELECT pg_log_standby_snapshot()").await.unwrap();
        second.query_one(copied, &[]).await.unwrap().get::<_, Option<bool>>(0) == Some(true)
    })
    .await;
}

/// The standby has the rows, but not the outcomes that were written before the primary died: the events are in the
/// stream, and the window is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_takes_over_and_nothing_is_lost_or_stored_twice() {
    const WINDOW: Duration = Duration::from_secs(1);
    for version in PgVersion::ENDS {
        let mut primary = Postgres::start(version, &[]).await;
        let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
        let proxy = Proxy::start_nats(nats.port()).await;
        let settings = RelaySettings::new(&primary.url("postgres"), &proxy.instead_of(&nats.url()))
            .within(&space)
            .set("nats.create.duplicate_window", "1s")
            .set("delivery.ack_timeout", "1m");
        settings.migrate().await;
        settings.start().wait_ready().await;
        let standby = follower(&primary).await;
        let hosts = format!("127.0.0.1:{},127.0.0.1:{}", primary.port(), standby.port());
        let relay = settings.set("postgres.url", &format!("postgres://postgres@{hosts}/postgres"));
        let mut relay = relay.start();
        relay.wait_ready().await;
        insert(&primary, 1, 50).await;
        let completed = |rows| format!("SELECT count(*) = {rows} FROM outbox_events WHERE status = 'completed'");
        holds(&primary, "the first ones are completed", &completed(50)).await;
        if version == PgVersion::V18 {
            copied(&primary, &standby).await;
        }

        proxy.hold(Direction::ToClient);
        insert(&primary, 51, 100).await;
        let jetstream = nats.jetstream().await;
        eventually(DEADLINE, "all are stored", async || stream::count(&jetstream, &space.stream).await == 100).await;
        holds(&standby, "the rows have come over", "SELECT count(*) = 100 FROM outbox_events").await;
        standby.reload("primary_conninfo", "").await;
        holds(&standby, "nothing comes over any more", "SELECT count(*) = 0 FROM pg_stat_wal_receiver").await;
        proxy.pass();
        holds(&primary, "all are completed", &completed(100)).await;
        tokio::time::sleep(WINDOW).await;
        primary.stop_immediate().await;
        standby.client().await.batch_execute("SELECT pg_promote()").await.unwrap();
        insert(&standby, 101, 150).await;
        holds(&standby, "all are completed there", &completed(150)).await;
        relay.wait_ready().await;
        let stored = stream::read_all(&jetstream, &space.stream).await;
        let mut ids: Vec<u32> = stored.iter().map(|message| message.id()[1..].parse().unwrap()).collect();
        let of = |aggregate| ids.iter().filter(move |id| **id % 50 == aggregate);
        assert!((0..50).all(|aggregate| of(aggregate).is_sorted()), "{version:?}: out of order: {ids:?}");
        ids.sort_unstable();
        assert_eq!(ids, (1..=150).collect::<Vec<_>>(), "{version:?}");
    }
}
