//! Several relays for one slot: one streams, the others stand by, and take over without a loss or a double.

use std::time::Duration;

use rustix::process::Signal;

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::proxy::Proxy;
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::scene::Scene;
use crate::harness::wait::eventually;

const STORED: &str = "outbox_relay_publishes_total{outcome=\"stored\"}";
const DUPLICATE: &str = "outbox_relay_publishes_total{outcome=\"duplicate\"}";

async fn expect_standby(relay: &mut Relay) {
    relay.wait_standby().await;
    let (status, body) = relay.get("/readyz").await.expect("an answer");
    assert_eq!((status, body.trim()), (200, "standby"));
    assert_eq!(relay.metric("outbox_relay_leader").await, Some(0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_relay_stands_by_and_takes_over_from_one_that_is_killed_or_stopped() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (scene, nats) = (Scene::on(postgres, nats).await, Nats::shared(nats).await);
        let (settings, outbox) = (&scene.settings, scene.outbox().await);
        let load = Load::start(&outbox, 3);
        let mut first = scene.relay().await;
        outbox.wait_stored(nats, 50).await;
        let mut second = settings.start();
        expect_standby(&mut second).await;
        assert_eq!(first.metric("outbox_relay_leader").await, Some(1.0));

        first.kill9().await;
        second.wait_ready().await;
        outbox.wait_stored(nats, outbox.stored(nats).await + 50).await;
        let mut third = settings.start();
        expect_standby(&mut third).await;

        let status = second.terminate(READY).await;
        assert!(status.success(), "{status}\n{}", second.log());
        third.wait_ready().await;
        outbox.wait_stored(nats, outbox.stored(nats).await + 50).await;
        load.stop().await;
        outbox.expect_exact(nats).await;
        // What the second one stopped in order had its outcome before the third one began.
        assert_eq!(third.metric(DUPLICATE).await, Some(0.0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_relay_that_wakes_after_its_successor_took_over_publishes_nothing() {
    let postgres = Postgres::start(PgVersion::V18, &[("wal_sender_timeout", "3s")]).await;
    let nats = Nats::start(NatsVersion::V2_15).await;
    // Nothing else may stop it when it wakes: so few events are in flight that the replication connection is not read
    // and its silence not noticed, and no acknowledgement is overdue.
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url())
        .set("delivery.max_in_flight", "16")
        .set("delivery.ack_timeout", "5m");
    settings.migrate().await;
    let outbox = Outbox::new(&postgres.url("postgres"), "OUTBOX").await;
    let mut first = settings.start();
    first.wait_ready().await;
    let mut second = settings.start();
    expect_standby(&mut second).await;
    // Of one aggregate, so that they leave one by one, and most of them still wait when the relay freezes.
    outbox.insert_bulk(4000, 1, 0).await;
    outbox.wait_stored(&nats, 50).await;

    first.signal(Signal::STOP);
    let load = Load::start(&outbox, 3);
    second.wait_ready().await;
    outbox.wait_stored(&nats, 4000).await;
    // What PostgreSQL and NATS sent in the meantime waits in the first one's sockets.
    first.signal(Signal::CONT);
    expect_standby(&mut first).await;
    // One was on its way when the relay froze, in the hands of the socket: nothing can call it back.
    let repeated = first.metric(DUPLICATE).await.unwrap();
    assert!(repeated <= 1.0, "it published {repeated} events after it woke\n{}", first.log());
    load.stop().await;
    outbox.expect_exact(&nats).await;
    assert_eq!(second.ended(), None);
}

/// Without a bound of its own the frozen relay would hold the slot for ever, while the log fills the disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_relay_is_succeeded_where_the_server_would_wait_for_ever() {
    let postgres = Postgres::start(PgVersion::V15, &[("wal_sender_timeout", "0")]).await;
    let space = Space::new();
    let nats = Nats::shared(NatsVersion::V2_10).await;
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url()).within(&space);
    settings.migrate().await;
    let mut first = settings.start();
    first.wait_ready().await;
    let mut second = settings.start();
    expect_standby(&mut second).await;
    first.signal(Signal::STOP);
    second.wait_ready().await;
    first.signal(Signal::CONT);
    expect_standby(&mut first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_half_open_link_to_postgres_keeps_the_slot_for_no_longer_than_the_server_waits() {
    let postgres = Postgres::start(PgVersion::V15, &[("wal_sender_timeout", "3s")]).await;
    let nats = Nats::start(NatsVersion::V2_10).await;
    let proxy = Proxy::start(postgres.port()).await;
    let url = postgres.url("postgres");
    let settings = RelaySettings::new(&url, &nats.url());
    settings.migrate().await;
    let outbox = Outbox::new(&url, "OUTBOX").await;
    let mut cut_off = settings.clone().set("postgres.url", &proxy.instead_of(&url)).start();
    cut_off.wait_ready().await;
    let load = Load::start(&outbox, 3);
    outbox.wait_stored(&nats, 50).await;

    proxy.drop_both();
    // Another relay finds the slot held by one that is gone, as PostgreSQL does not know yet.
    let mut other = settings.start();
    other.wait_ready().await;
    cut_off.wait_unready().await;
    let before = cut_off.metric(STORED).await;
    outbox.wait_stored(&nats, outbox.stored(&nats).await + 100).await;
    assert_eq!(cut_off.metric(STORED).await, before);
    proxy.pass();
    expect_standby(&mut cut_off).await;
    other.kill9().await;
    cut_off.wait_ready().await;
    load.stop().await;
    outbox.expect_exact(&nats).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_alone_streams_again_after_a_half_open_link() {
    let postgres = Postgres::start(PgVersion::V18, &[("wal_sender_timeout", "3s")]).await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let proxy = Proxy::start(postgres.port()).await;
    let url = postgres.url("postgres");
    let settings = RelaySettings::new(&proxy.instead_of(&url), &nats.url()).within(&space);
    settings.migrate().await;
    let outbox = Outbox::new(&url, &space.stream).await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    let load = Load::start(&outbox, 3);
    outbox.wait_stored(nats, 50).await;

    proxy.drop_both();
    relay.wait_unready().await;
    eventually(Duration::from_secs(30), "PostgreSQL lets go", async || {
        postgres.log().contains("terminating walsender process due to replication timeout")
    })
    .await;
    proxy.pass();
    relay.wait_ready().await;
    load.stop().await;
    outbox.expect_exact(nats).await;
}
