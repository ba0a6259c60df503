//! A slot that was moved, dropped, made anew or invalidated: the table still knows what is to be delivered.

use std::time::Duration;

use rustix::process::Signal;
use tokio_postgres::Client;

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::wait::{always, eventually};

struct Site {
    nats: &'static Nats,
    database: Database,
    settings: RelaySettings,
    outbox: Outbox,
    client: Client,
}

impl Site {
    /// With a slot that delivered some events already.
    async fn used(postgres: PgVersion, nats: NatsVersion) -> (Self, Relay) {
        let (database, nats) = (Postgres::shared(postgres).await.database().await, Nats::shared(nats).await);
        let space = Space::new();
        let settings = RelaySettings::shared(&database, nats, &space);
        settings.migrate().await;
        let (outbox, client) = (Outbox::new(&database.url(), &space.stream).await, database.client().await);
        let mut relay = settings.start();
        relay.wait_ready().await;
        let site = Self { nats, database, settings, outbox, client };
        site.insert().await;
        site.outbox.wait_completed().await;
        (site, relay)
    }

    /// 20 events of two aggregates.
    async fn insert(&self) {
        for _ in 0..10 {
            self.outbox.insert("a").await;
            self.outbox.insert("b").await;
        }
    }

    /// Runs a statement with the slot as `$1`, once nobody holds it.
    async fn change_slot(&self, statement: &str) {
        let held = "SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = $1";
        let slot = &self.database.slot;
        eventually(READY, "the slot is let go", async || {
            self.client.query_one(held, &[slot]).await.unwrap().get::<_, i64>(0) == 0
        })
        .await;
        self.client.execute(statement, &[slot]).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
    }

    /// Starts the relay while events go on coming, of those aggregates as well, and checks the stream.
    async fn expect_exact(self) {
        let load = Load::start(&self.outbox, 2);
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        self.insert().await;
        load.stop().await;
        self.outbox.expect_exact(self.nats).await;
        assert_eq!(relay.ended(), None);
        let passed = "SELECT count(*) FROM outbox_relay_state WHERE NOT needs_drain";
        eventually(READY, "no drain is asked for", async || self.outbox.number(passed).await == 1).await;
    }
}

const ADVANCE: &str = "SELECT pg_replication_slot_advance($1::text, pg_current_wal_lsn())";
const DROP: &str = "SELECT pg_drop_replication_slot($1::text)";
const MAKE: &str = "SELECT pg_create_logical_replication_slot($1::text, 'pgoutput')";

/// Case 6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_an_advanced_slot_skips_are_delivered_in_order() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (site, mut relay) = Site::used(postgres, nats).await;
        assert!(relay.terminate(READY).await.success());
        site.insert().await;
        site.change_slot(ADVANCE).await;
        site.insert().await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_under_way_at_a_kill_is_delivered_though_the_slot_was_advanced() {
    let (site, mut relay) = Site::used(PgVersion::V18, NatsVersion::V2_15).await;
    let load = Load::start(&site.outbox, 3);
    site.outbox.wait_stored(site.nats, 100).await;
    relay.kill9().await;
    load.stop().await;
    site.change_slot(ADVANCE).await;
    site.expect_exact().await;
}

/// Case 9.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_was_made_anew_while_the_relay_was_away_costs_no_row() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (site, mut relay) = Site::used(postgres, nats).await;
        assert!(relay.terminate(READY).await.success());
        site.insert().await;
        site.change_slot(DROP).await;
        site.insert().await;
        site.change_slot(MAKE).await;
        site.insert().await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_was_dropped_while_the_relay_was_away_is_made_again() {
    let (site, mut relay) = Site::used(PgVersion::V18, NatsVersion::V2_15).await;
    assert!(relay.terminate(READY).await.success());
    site.insert().await;
    site.change_slot(DROP).await;
    site.insert().await;
    site.expect_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_dropped_under_a_running_relay_is_made_again() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (site, mut relay) = Site::used(postgres, nats).await;
        let load = Load::start(&site.outbox, 3);
        let slot = &site.database.slot;
        let kill = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
            WHERE slot_name = $1 AND active_pid IS NOT NULL";
        eventually(READY, "the slot is dropped before the relay has it again", async || {
            site.client.execute(kill, &[slot]).await.unwrap();
            site.client.execute(DROP, &[slot]).await.is_ok()
        })
        .await;
        site.outbox.wait_stored(site.nats, site.outbox.stored(site.nats).await + 100).await;
        load.stop().await;
        site.outbox.expect_exact(site.nats).await;
        relay.wait_ready().await;
        assert!(relay.log().contains("the slot was made"), "{}", relay.log());
    }
}

/// Case 10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_that_is_invalidated_under_a_frozen_relay_heals_by_itself() {
    const LAG: &str = "outbox_relay_slot_confirmed_lag_bytes";
    for (version, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let postgres = Postgres::start(version, &[("max_slot_wal_keep_size", "16MB")]).await;
        let nats = Nats::start(nats).await;
        let url = postgres.url("postgres");
        let settings = RelaySettings::new(&url, &nats.url());
        settings.migrate().await;
        let outbox = Outbox::new(&url, "OUTBOX").await;
        let mut relay = settings.start();
        relay.wait_ready().await;
        outbox.insert_many("a", 20).await;
        outbox.wait_completed().await;

        relay.signal(Signal::STOP);
        outbox.insert_many("a", 20).await;
        let client = postgres.client().await;
        let lost = "SELECT count(*) FROM pg_replication_slots WHERE wal_status = 'lost'";
        eventually(READY, "the slot is lost", async || {
            // Each takes the log 16 MB further.
            client.batch_execute("SELECT pg_logical_emit_message(false, 'it', 'x')").await.unwrap();
            client.batch_execute("SELECT pg_switch_wal()").await.unwrap();
            client.batch_execute("CHECKPOINT").await.unwrap();
            outbox.number(lost).await == 1
        })
        .await;
        outbox.insert_many("a", 20).await;
        // A new slot waits for open transactions: long enough to look at the relay without one.
        client.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
        relay.signal(Signal::CONT);
        relay.wait_unready().await;
        always(Duration::from_secs(3), "it is not ready, and no lag of 0 is shown", async || {
            let unready = relay.get("/readyz").await.is_some_and(|(status, _)| status == 503);
            unready && relay.metric(LAG).await != Some(0.0)
        })
        .await;
        assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));
        client.batch_execute("ROLLBACK").await.unwrap();
        relay.wait_ready().await;
        outbox.insert_many("a", 20).await;
        assert_eq!(outbox.expect_exact(&nats).await, 80);
        assert_eq!(outbox.number(lost).await, 0);
        eventually(READY, "a lag is shown again", async || relay.metric(LAG).await.is_some()).await;
    }
}
