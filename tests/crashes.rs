//! `kill -9` of the relay: whatever it was doing, the next one goes on without a loss, a double or a change of order.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::SinkExt as _;
use rustix::process::Signal;

use crate::harness::load::{DELIVERED, Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::proxy::Proxy;
use crate::harness::relay::{READY, RelaySettings};
use crate::harness::wait::eventually;

const OURS: [&str; 2] = ["the slot is ours", "the slot was made"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_under_load_loses_nothing_doubles_nothing_and_keeps_the_order() {
    killed_again_and_again(PgVersion::V18, NatsVersion::V2_15, 12).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kill9_under_load_is_harmless_on_the_oldest_servers_too() {
    killed_again_and_again(PgVersion::V15, NatsVersion::V2_10, 6).await;
}

async fn killed_again_and_again(postgres: PgVersion, nats: NatsVersion, rounds: u64) {
    let (database, nats) = (Postgres::shared(postgres).await.database().await, Nats::shared(nats).await);
    let space = Space::new();
    let settings = RelaySettings::shared(&database, nats, &space);
    settings.migrate().await;
    let outbox = Outbox::new(&database.url(), &space.stream).await;
    let load = Load::start(&outbox, 4);
    let mut rng = Rng::with_seed(rounds);
    for round in 0..rounds {
        let mut relay = settings.start();
        if round % 4 == 3 {
            // While it reads again what an earlier one left behind.
            eventually(READY, "it has the slot", async || OURS.iter().any(|line| relay.log().contains(line))).await;
        } else {
            outbox.wait_stored(nats, outbox.stored(nats).await + rng.u64(1..200)).await;
        }
        relay.kill9().await;
    }
    load.stop().await;
    let mut relay = settings.start();
    outbox.expect_exact(nats).await;
    assert_eq!(relay.ended(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_share_an_lsn_survive_a_kill_between_their_acknowledgements() {
    const ROWS: i64 = 500;
    const ACKS: usize = 100;
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (database, nats) = (Postgres::shared(postgres).await.database().await, Nats::shared(nats).await);
        let (space, proxy) = (Space::new(), Proxy::start_nats(nats.port()).await);
        let settings = RelaySettings::shared(&database, nats, &space);
        settings.migrate().await;
        let outbox = Outbox::new(&database.url(), &space.stream).await;
        let mut relay = settings.clone().set("nats.url", &proxy.instead_of(&nats.url())).start();
        relay.wait_ready().await;

        // Of 10 aggregates: when no further acknowledgement comes, 10 events are stored without the relay knowing.
        let acks = AtomicUsize::new(0);
        proxy.drop_messages(move |_| acks.fetch_add(1, Ordering::SeqCst) >= ACKS);
        let client = outbox.client().await;
        let copy = "COPY outbox_events (aggregate_type, aggregate_id, event_type, payload) FROM STDIN";
        let mut rows = Box::pin(client.copy_in::<_, Bytes>(copy).await.unwrap());
        for row in 0..ROWS {
            let line = format!("order\tcopied {}\tchanged\t{{\"n\": {}}}\n", row % 10, row / 10 + 1);
            rows.send(Bytes::from(line)).await.unwrap();
        }
        rows.close().await.unwrap();
        eventually(DELIVERED, "100 rows are completed", async || outbox.rows("completed").await >= 100).await;
        outbox.wait_reported(&database.slot).await;
        relay.kill9().await;
        assert_eq!(outbox.rows("completed").await, 100);
        let stored = outbox.stored(nats).await;
        assert!((100..=110).contains(&stored), "{stored} are stored: the kill came at another time than meant");

        let _relay = settings.start();
        assert_eq!(outbox.expect_exact(nats).await, 500);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_single_inserts_survive_twenty_kills_at_random_moments() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let settings = RelaySettings::shared(&database, nats, &space);
    settings.migrate().await;
    let outbox = Outbox::new(&database.url(), &space.stream).await;
    for round in 0..20 {
        let insert = outbox.insert_many("single", 50);
        let (from_start, from_slot) = (rng.u64(..600), rng.u64(..60));
        let kill = async {
            let mut relay = settings.start();
            if round % 2 == 0 {
                tokio::time::sleep(Duration::from_millis(from_start)).await;
            } else {
                eventually(READY, "it has the slot", async || OURS.iter().any(|line| relay.log().contains(line))).await;
                tokio::time::sleep(Duration::from_millis(from_slot)).await;
            }
            relay.kill9().await;
        };
        tokio::join!(insert, kill);
    }
    let _relay = settings.start();
    assert_eq!(outbox.expect_exact(nats).await, 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_decoded_but_not_acknowledged_is_not_confirmed_to_postgres() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let (nats, space) = (Nats::start(NatsVersion::V2_15).await, Space::new());
    let settings = RelaySettings::shared(&database, &nats, &space);
    settings.migrate().await;
    let outbox = Outbox::new(&database.url(), &space.stream).await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    nats.signal(Signal::STOP);

    let client = outbox.client().await;
    outbox.insert("frozen").await;
    let first: String = client.query_one("SELECT pg_current_wal_insert_lsn()::text", &[]).await.unwrap().get(0);
    outbox.insert_many("frozen", 49).await;
    for number in 0..50 {
        outbox.insert(&format!("frozen {number}")).await;
    }
    let decoded = "outbox_relay_events_decoded_total";
    eventually(READY, "all are decoded", async || relay.metric(decoded).await >= Some(100.0)).await;
    outbox.wait_reported(&database.slot).await;
    let early = "SELECT confirmed_flush_lsn < $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = $2";
    let early: bool = client.query_one(early, &[&first, &database.slot]).await.unwrap().get(0);
    assert!(early, "the slot is confirmed beyond the first event that nobody acknowledged");
    assert_eq!(outbox.rows("pending").await, 100);

    relay.kill9().await;
    nats.signal(Signal::CONT);
    let _relay = settings.start();
    assert_eq!(outbox.expect_exact(&nats).await, 100);
}
