//! The relay never keeps the server's log from being recycled, nor the server from shutting down.

use std::time::Duration;

use rustix::process::Signal;
use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres, connect};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::wait::eventually;
use crate::harness::{outbox, stream};

const DEADLINE: Duration = Duration::from_mins(2);
const SLOT: &str = "outbox_relay";

/// `confirmed_flush_lsn` against the end of the log, in bytes, and `wal_status`.
async fn slot(client: &Client) -> (i64, String) {
    let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::int8, wal_status
               FROM pg_replication_slots WHERE slot_name = $1";
    let row = client.query_one(sql, &[&SLOT]).await.expect("the slot");
    (row.get(0), row.get(1))
}

/// The relay's defaults on servers of its own, migrated.
async fn settings(postgres: &Postgres, nats: &Nats, space: &Space) -> RelaySettings {
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url()).within(space);
    settings.migrate().await;
    settings
}

async fn started(settings: &RelaySettings) -> Relay {
    let mut relay = settings.start();
    relay.wait_ready().await;
    relay
}

/// Case 1. The limit of the slot is far below what is written, so that a relay which confirms only with outbox rows
/// loses its slot at a checkpoint.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_outbox_on_a_busy_server_lets_the_log_go() {
    const MIB: i64 = 1024 * 1024;
    const ROUNDS: i32 = 24;
    let nats = Nats::shared(NatsVersion::V2_15).await;
    for version in PgVersion::ENDS {
        let postgres = Postgres::start(version, &[("max_slot_wal_keep_size", "64MB"), ("autovacuum", "off")]).await;
        let settings = settings(&postgres, nats, &Space::new()).await;
        postgres.create_database("busy").await;
        let (here, elsewhere) = (postgres.client().await, connect(&postgres.url("busy")).await);
        for client in [&here, &elsewhere] {
            client
                .batch_execute("CREATE TABLE other (t text); ALTER TABLE other ALTER t SET STORAGE EXTERNAL")
                .await
                .unwrap();
        }
        let relay = started(&settings).await;
        for round in 0..ROUNDS {
            let client = if round % 2 == 0 { &here } else { &elsewhere };
            client
                .batch_execute("INSERT INTO other SELECT repeat('x', 100000) FROM generate_series(1, 80)")
                .await
                .unwrap();
            eventually(DEADLINE, "the slot follows", async || slot(&here).await.0 < 4 * MIB).await;
            client.batch_execute("TRUNCATE other").await.unwrap();
            // Decoding could start over from the checkpoint before the last one: rounds are short beside the limit.
            here.batch_execute("CHECKPOINT").await.unwrap();
            assert_ne!(slot(&here).await.1, "lost", "round {round}");
        }
        here.batch_execute("SELECT pg_switch_wal()").await.unwrap();
        here.batch_execute("CHECKPOINT").await.unwrap();
        eventually(DEADLINE, "the slot is where the log is", async || {
            let (lag, status) = slot(&here).await;
            lag < 16 * MIB && status == "reserved"
        })
        .await;
        let lag = relay.metric("outbox_relay_slot_confirmed_lag_bytes").await;
        assert!(lag.is_some_and(|lag| lag < 64e6), "{lag:?}");
        assert_eq!(outbox::count(&here, "true").await, 0);
    }
}

async fn insert(client: &Client, count: i64) {
    let sql = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', i::text, 'created', to_jsonb(i) FROM generate_series(1, $1::int8) i";
    client.execute(sql, &[&count]).await.expect("insert");
}

/// Case 4: idle, just used, and with events that nobody acknowledges.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_shuts_down_at_once_under_a_relay() {
    const LONG: Duration = Duration::from_secs(10);
    for version in PgVersion::ENDS {
        let mut postgres = Postgres::start(version, &[]).await;
        let (nats, space) = (Nats::start(NatsVersion::V2_15).await, Space::new());
        // Longer than the stop may take: what was sent is not waited for before the server is let go.
        let settings = settings(&postgres, &nats, &space).await.set("delivery.ack_timeout", "30s");
        let mut relay = started(&settings).await;
        let took = postgres.stop_fast().await;
        assert!(took < LONG, "with an idle relay a fast stop took {took:?}");
        relay.wait_unready().await;
        let unknown =
            ["slot_active", "slot_confirmed_lag_bytes", "slot_retained_wal_bytes", "oldest_unconfirmed_seconds"];
        eventually(DEADLINE, "what is not known is not shown", async || {
            let value = async |name: &str| relay.metric(&format!("outbox_relay_{name}")).await;
            let mut gone = value("leader").await == Some(0.0) && value("publishes_in_flight").await == Some(0.0);
            for name in unknown {
                gone &= value(name).await.is_none();
            }
            gone
        })
        .await;

        postgres.start_again().await;
        relay.wait_ready().await;
        insert(&postgres.client().await, 200).await;
        let took = postgres.stop_fast().await;
        assert!(took < LONG, "with an outbox just used a fast stop took {took:?}");
        relay.wait_unready().await;

        postgres.start_again().await;
        relay.wait_ready().await;
        let client = postgres.client().await;
        outbox::settled(&client, DEADLINE).await;
        nats.signal(Signal::STOP);
        insert(&client, 300).await;
        let in_flight = "outbox_relay_publishes_in_flight";
        eventually(DEADLINE, "events are in flight", async || relay.metric(in_flight).await > Some(0.0)).await;
        let took = postgres.stop_fast().await;
        assert!(took < LONG, "with events in flight a fast stop took {took:?}");

        nats.signal(Signal::CONT);
        postgres.start_again().await;
        let client = postgres.client().await;
        outbox::settled(&client, DEADLINE).await;
        assert_eq!(outbox::count(&client, "status = 'completed'").await, 500);
        assert_eq!(stream::count(&nats.jetstream().await, &space.stream).await, 500);
        assert!(relay.ended().is_none(), "{}", relay.log());
    }
}
