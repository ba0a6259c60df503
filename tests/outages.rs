//! Servers that stop, freeze, crash or are not there yet: the relay waits, and nothing is lost or stored twice.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::Signal;

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::scene::Scene;
use crate::harness::wait::{always, eventually};

const DUPLICATE: &str = "outbox_relay_publishes_total{outcome=\"duplicate\"}";
const TIMED_OUT: &str = "terminating walsender process due to replication timeout";

/// Servers of a test's own, with an outbox and a running relay.
struct Site {
    postgres: Postgres,
    nats: Nats,
    settings: RelaySettings,
    outbox: Outbox,
    relay: Relay,
}

impl Site {
    async fn start((postgres, nats): (PgVersion, NatsVersion), options: &[(&str, &str)]) -> Self {
        let nats = Nats::start(nats).await;
        Self::over(Postgres::start(postgres, options).await, nats, |settings| settings).await
    }

    async fn over(postgres: Postgres, nats: Nats, change: impl FnOnce(RelaySettings) -> RelaySettings) -> Self {
        let url = postgres.url("postgres");
        let settings = change(RelaySettings::new(&url, &nats.url()));
        settings.migrate().await;
        let outbox = Outbox::new(&url, "OUTBOX").await;
        let mut relay = settings.start();
        relay.wait_ready().await;
        Self { postgres, nats, settings, outbox, relay }
    }

    /// Waits until so many more events are stored.
    async fn progress(&self, count: u64) {
        let before = self.outbox.stored(&self.nats).await;
        self.outbox.wait_stored(&self.nats, before + count).await;
    }

    /// Checks the stream, and that it was one relay all the time.
    async fn expect_exact(mut self) -> usize {
        let count = self.outbox.expect_exact(&self.nats).await;
        self.relay.wait_ready().await;
        count
    }
}

const OLDEST: (PgVersion, NatsVersion) = (PgVersion::V15, NatsVersion::V2_10);
const NEWEST: (PgVersion, NatsVersion) = (PgVersion::V18, NatsVersion::V2_15);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_restarts_and_crashes_under_load() {
    for versions in [OLDEST, NEWEST] {
        let mut site = Site::start(versions, &[]).await;
        let load = Load::start(&site.outbox, 3);
        site.progress(50).await;
        site.postgres.restart().await;
        site.progress(50).await;
        site.postgres.stop_immediate().await;
        site.relay.wait_unready().await;
        assert_eq!(site.relay.get("/livez").await.map(|answer| answer.0), Some(200));
        site.postgres.start_again().await;
        site.progress(50).await;
        load.stop().await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_crashes_and_restarts_under_load() {
    for versions in [OLDEST, NEWEST] {
        let mut site = Site::start(versions, &[]).await;
        let load = Load::start(&site.outbox, 3);
        for _ in 0..2 {
            site.progress(50).await;
            site.nats.kill().await;
            site.relay.wait_unready().await;
            assert_eq!(site.relay.get("/livez").await.map(|answer| answer.0), Some(200));
            site.nats.start_again().await;
        }
        site.progress(50).await;
        site.nats.stop().await;
        site.nats.start_again().await;
        site.progress(50).await;
        load.stop().await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_servers_crash_at_once() {
    let mut site = Site::start(NEWEST, &[]).await;
    let load = Load::start(&site.outbox, 3);
    site.progress(50).await;
    tokio::join!(site.postgres.stop_immediate(), site.nats.kill());
    site.relay.wait_unready().await;
    tokio::join!(site.postgres.start_again(), site.nats.start_again());
    site.progress(50).await;
    load.stop().await;
    site.expect_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn terminated_backends_come_back() {
    for versions in [OLDEST, NEWEST] {
        let site = Site::start(versions, &[]).await;
        let load = Load::start(&site.outbox, 2);
        let client = site.outbox.client().await;
        let others = "SELECT pid, application_name || ' (' || backend_type || ')' FROM pg_stat_activity
            WHERE application_name LIKE 'outbox-relay%' AND backend_type <> 'walsender'
              AND application_name NOT LIKE 'outbox-relay drain%' ORDER BY 2";
        let names: Vec<String> = client.query(others, &[]).await.unwrap().iter().map(|row| row.get(1)).collect();
        assert!(names.len() >= 2, "the relay has a connection for control and one for write-back: {names:?}");
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE application_name || ' (' || backend_type || ')' = $1";
        for name in ["outbox-relay (walsender)"].into_iter().chain(names.iter().map(String::as_str)) {
            site.progress(30).await;
            eventually(READY, &format!("{name} is there again"), async || {
                !client.query(kill, &[&name]).await.unwrap().is_empty()
            })
            .await;
        }
        site.progress(50).await;
        load.stop().await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_nats_counts_no_attempt_and_stores_once_what_it_had_received() {
    for versions in [OLDEST, NEWEST] {
        let site = Site::start(versions, &[]).await;
        let load = Load::start(&site.outbox, 3);
        site.progress(50).await;
        site.nats.signal(Signal::STOP);
        // Longer than `delivery.ack_timeout`: what is stored on waking is sent again.
        tokio::time::sleep(Duration::from_secs(6)).await;
        site.nats.signal(Signal::CONT);
        site.progress(50).await;
        load.stop().await;
        site.expect_exact().await;
    }
}

/// The process of the walsender that serves the relay.
async fn walsender(site: &Site) -> i64 {
    site.outbox.number("SELECT coalesce(max(active_pid), 0)::int8 FROM pg_replication_slots").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_or_frozen_nats_does_not_cost_the_replication_connection() {
    for (versions, frozen) in [(OLDEST, false), (NEWEST, true)] {
        let postgres = Postgres::start(versions.0, &[("wal_sender_timeout", "5s")]).await;
        let nats = Nats::start(versions.1).await;
        let proxy = Proxy::start_nats(nats.port()).await;
        let url = proxy.instead_of(&nats.url());
        let small = |settings: RelaySettings| settings.set("nats.url", &url).set("delivery.max_in_flight", "64");
        let site = Site::over(postgres, nats, small).await;
        let before = walsender(&site).await;
        if frozen {
            site.nats.signal(Signal::STOP);
        } else {
            proxy.delay(Direction::ToClient, Duration::from_secs(1));
        }
        // More than all buffers on the way hold, so that PostgreSQL cannot send any further.
        for _ in 0..20 {
            site.outbox.insert_bulk(200, 50, 4000).await;
        }
        tokio::time::sleep(Duration::from_secs(20)).await;
        assert_eq!(walsender(&site).await, before);
        site.nats.signal(Signal::CONT);
        proxy.pass();
        site.outbox.wait_completed().await;
        assert_eq!(walsender(&site).await, before);
        assert!(!site.postgres.log().contains(TIMED_OUT), "{}", site.postgres.log());
        assert_eq!(site.expect_exact().await, 4000);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_five_seconds_without_nats_cost_nothing() {
    let mut site = Site::start(NEWEST, &[("wal_sender_timeout", "5s")]).await;
    let before = walsender(&site).await;
    site.nats.kill().await;
    for _ in 0..20 {
        site.outbox.insert_bulk(100, 10, 500).await;
    }
    site.relay.wait_unready().await;
    always(Duration::from_secs(45), "the walsender and the relay live, and it is not ready", async || {
        let status = async |path| site.relay.get(path).await.map(|answer| answer.0);
        walsender(&site).await == before && status("/livez").await == Some(200) && status("/readyz").await == Some(503)
    })
    .await;
    let said = site.relay.log().matches("cannot reconnect to NATS").count();
    assert!((1..=2).contains(&said), "said {said} times");
    site.nats.start_again().await;
    site.outbox.wait_completed().await;
    assert_eq!(walsender(&site).await, before);
    assert!(!site.postgres.log().contains(TIMED_OUT), "{}", site.postgres.log());
    assert_eq!(site.expect_exact().await, 2000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_backlog_while_nats_is_frozen_costs_neither_memory_nor_the_replication_connection() {
    const ROWS: usize = 50_000;
    let site = Site::start(NEWEST, &[("wal_sender_timeout", "5s")]).await;
    let before = walsender(&site).await;
    site.nats.signal(Signal::STOP);
    for _ in 0..10 {
        site.outbox.insert_bulk(5000, 1000, 1000).await;
    }
    always(Duration::from_secs(15), "the walsender lives", async || walsender(&site).await == before).await;
    site.nats.signal(Signal::CONT);
    site.outbox.wait_completed().await;
    assert_eq!(walsender(&site).await, before);
    assert!(!site.postgres.log().contains(TIMED_OUT), "{}", site.postgres.log());
    let peak = site.relay.peak_resident_bytes() / (1 << 20);
    assert!(peak < 128, "the relay took {peak} MiB");
    assert_eq!(site.expect_exact().await, ROWS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_acknowledgement_is_asked_for_again() {
    let (scene, nats) = (Scene::new().await, Nats::shared(NatsVersion::V2_15).await);
    let proxy = Proxy::start_nats(nats.port()).await;
    let outbox = scene.outbox().await;
    let settings = scene.settings.clone().set("nats.url", &proxy.instead_of(&nats.url()));
    let relay = scene.relay_with(&settings.set("delivery.ack_timeout", "1s")).await;
    // Of every third event, the first answer is lost. The token at the end of the subject tells the event; what the
    // stream tells of itself has none.
    let lost = Mutex::new(HashSet::new());
    proxy.drop_messages(move |line| {
        let subject = line.split(' ').nth(1).expect("a subject");
        let token: Option<u64> = subject.rsplit('.').next().and_then(|token| token.parse().ok());
        token.is_some_and(|token| token.is_multiple_of(3) && lost.lock().expect("the tokens").insert(token))
    });
    for aggregate in 0..10 {
        outbox.insert_many(&format!("aggregate {aggregate}"), 3).await;
    }
    assert_eq!(outbox.expect_exact(nats).await, 30);
    assert_eq!(relay.metric(DUPLICATE).await, Some(10.0));
}

/// Asserts that the relay says `reason` and lives on.
async fn expect_waiting(relay: &mut Relay, reason: &str) {
    relay.wait_unready().await;
    relay.wait_says(&[reason]).await;
    assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));
    let pause = Duration::from_secs(2);
    always(pause, "the relay waits", async || relay.ended().is_none()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_are_away_at_the_start_are_waited_for() {
    let mut site = Site::start(NEWEST, &[]).await;
    assert!(site.relay.terminate(READY).await.success());
    site.outbox.insert_many("waiting", 20).await;

    site.nats.stop().await;
    site.relay = site.settings.start();
    expect_waiting(&mut site.relay, "NATS").await;
    site.nats.start_again().await;
    site.relay.wait_ready().await;
    site.outbox.wait_completed().await;
    assert!(site.relay.terminate(READY).await.success());

    site.outbox.insert_many("waiting", 20).await;
    site.postgres.stop_fast().await;
    site.relay = site.settings.start();
    expect_waiting(&mut site.relay, "PostgreSQL").await;
    site.postgres.start_again().await;
    site.relay.wait_ready().await;
    assert_eq!(site.expect_exact().await, 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_someone_holds_keeps_neither_its_batch_nor_the_flow() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        a_row_is_held((postgres, nats), false).await;
        a_row_is_held((postgres, nats), true).await;
    }
}

/// With rows that come from the log, or from the table and then once more from the log.
async fn a_row_is_held((postgres, nats): (PgVersion, NatsVersion), drained: bool) {
    let (scene, nats) = (Scene::on(postgres, nats).await, Nats::shared(nats).await);
    let outbox = scene.outbox().await;
    let mut relay = scene.relay().await;
    let over = "SELECT count(*) FROM outbox_relay_state WHERE NOT needs_drain";
    eventually(READY, "the first drain is over", async || outbox.number(over).await == 1).await;
    assert!(relay.terminate(READY).await.success());
    outbox.insert_many("held", 20).await;
    let client = outbox.client().await;
    client.execute("UPDATE outbox_relay_state SET needs_drain = $1", &[&drained]).await.unwrap();

    let mut holder = outbox.client().await;
    let lock = holder.transaction().await.unwrap();
    lock.execute("SELECT 1 FROM outbox_events WHERE payload ->> 'n' = '7' FOR UPDATE", &[]).await.unwrap();
    let mut relay = scene.settings.start();
    let completed = async |count: i64| {
        let what = format!("{count} rows are completed");
        eventually(READY, &what, async || outbox.rows("completed").await == count).await;
    };
    completed(19).await;
    outbox.insert_many("held", 20).await;
    outbox.insert_many("another", 20).await;
    completed(59).await;
    assert_eq!(outbox.rows("pending").await, 1);
    assert_eq!(outbox.stored(nats).await, 60);
    // The slot waits for it.
    let passed = "SELECT confirmed_flush_lsn >= pg_current_wal_lsn() FROM pg_replication_slots WHERE slot_name = $1";
    assert!(!client.query_one(passed, &[&scene.database.slot]).await.unwrap().get::<_, bool>(0));
    assert_eq!(outbox.number(over).await, i64::from(!drained), "a drain is over when its last row has its outcome");
    assert_eq!(relay.metric(DUPLICATE).await, Some(0.0));
    // Nor does the next relay send it again.
    relay.kill9().await;
    let mut relay = scene.settings.start();
    outbox.insert_many("held", 20).await;
    completed(79).await;
    assert_eq!(outbox.stored(nats).await, 80);
    lock.rollback().await.unwrap();
    assert_eq!(outbox.expect_exact(nats).await, 80);
    assert_eq!(relay.ended(), None);
    assert_eq!(relay.metric(DUPLICATE).await, Some(0.0));
    eventually(READY, "the drain is over", async || outbox.number(over).await == 1).await;
}
