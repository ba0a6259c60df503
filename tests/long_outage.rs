//! NATS away for long: the slot does not pin the log, and what waits in the table is delivered afterwards.

use rustix::process::Signal;

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, PERMITTING, denying};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::stream::{self, Stored};
use crate::harness::wait::eventually;

const MIB: i64 = 1024 * 1024;
const BOUND: i64 = 16 * MIB;
const LAG: &str = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::int8 FROM pg_replication_slots";
const RETAINED: &str = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8 FROM pg_replication_slots";
/// 15 MB of log.
const BALLAST: &str =
    "SELECT count(pg_logical_emit_message(false, 'it', repeat('x', 1000000))) FROM generate_series(1, 15)";
const NEEDS_DRAIN: &str = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";

/// Servers of a test's own, for every byte of the log counts.
struct Site {
    _postgres: Postgres,
    nats: Nats,
    settings: RelaySettings,
    outbox: Outbox,
}

impl Site {
    async fn new(postgres: PgVersion, nats: NatsVersion) -> Self {
        Self::before(postgres, Nats::start(nats).await).await
    }

    async fn before(postgres: PgVersion, nats: Nats) -> Self {
        let postgres = Postgres::start(postgres, &[]).await;
        let url = postgres.url("postgres");
        let settings = RelaySettings::new(&url, &nats.url()).set("source.max_retained_wal", "16MiB");
        settings.migrate().await;
        let outbox = Outbox::new(&url, "OUTBOX").await;
        Self { _postgres: postgres, nats, settings, outbox }
    }

    /// Starts a relay, which delivers so many events.
    async fn deliver(&self, events: usize) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        self.outbox.insert_many("a", events).await;
        self.outbox.wait_completed().await;
        relay
    }

    /// Brings NATS back. The relay delivers what waits, and what comes.
    async fn expect_recovery(mut self, mut relay: Relay) {
        self.nats.start_again().await;
        relay.wait_ready().await;
        self.outbox.insert_many("a", 5).await;
        self.expect_exact().await;
    }

    /// Writes more than 120 MB of log, with events among it; the slot follows.
    async fn expect_bounded(&self) {
        self.expect_bounded_for(8).await;
    }

    /// Writes so many pieces of log of about the bound, with events among it; the slot follows each of them.
    async fn expect_bounded_for(&self, rounds: usize) {
        let client = self.outbox.client().await;
        for round in 0..rounds {
            self.outbox.insert_many("a", 5).await;
            self.outbox.insert_bulk(100, 10, 100).await;
            client.batch_execute(BALLAST).await.unwrap();
            // While it is written, as much again may come before the slot is looked at.
            let what = format!("the slot follows within its bound, round {round}");
            eventually(READY, &what, async || self.outbox.number(LAG).await <= 2 * BOUND).await;
        }
        assert_eq!(self.outbox.number(NEEDS_DRAIN).await, 1);
        assert_eq!(self.outbox.rows("failed").await, 0);
    }

    /// Takes the outbox out of its publication, and writes a row that no log shows.
    async fn drop_publication(&self) {
        self.outbox.client().await.batch_execute("DROP PUBLICATION outbox_relay").await.unwrap();
        self.outbox.insert("a").await;
    }

    async fn expect_exact(self) {
        self.outbox.expect_exact(&self.nats).await;
        eventually(READY, "no drain is asked for", async || self.outbox.number(NEEDS_DRAIN).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_while_nats_is_away_and_every_row_comes_afterwards() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let mut site = Site::new(postgres, nats).await;
        let mut relay = site.settings.start();
        relay.wait_ready().await;
        let load = Load::start(&site.outbox, 2);
        site.outbox.wait_stored(&site.nats, 50).await;
        site.nats.stop().await;
        relay.wait_unready().await;
        site.expect_bounded().await;
        assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));
        site.nats.start_again().await;
        relay.wait_ready().await;
        load.stop().await;
        site.outbox.insert_many("a", 5).await;
        site.expect_exact().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_too_when_nats_is_away_at_the_start() {
    let mut site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    let mut relay = site.deliver(20).await;
    assert!(relay.terminate(READY).await.success());
    site.nats.stop().await;
    let mut relay = site.settings.start();
    site.expect_bounded().await;
    // Word for the next one is left in the table.
    relay.kill9().await;
    let relay = site.settings.start();
    site.expect_recovery(relay).await;
}

/// The disk is full of what the slot keeps, which is more than what it has not confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_that_the_slot_has_confirmed_is_let_go_too() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let mut site = Site::new(postgres, nats).await;
        let mut relay = site.settings.start();
        relay.wait_ready().await;
        site.nats.stop().await;
        relay.wait_unready().await;
        // Without it, the session goes on to confirm the log.
        site.outbox.insert("a").await;
        let client = site.outbox.client().await;
        for round in 0..2 {
            // All of it is there when the relay looks.
            relay.signal(Signal::STOP);
            for _ in 0..3 {
                client.batch_execute(BALLAST).await.unwrap();
                // Only what PostgreSQL notes now and then tells it from where it could decode.
                client.batch_execute("CHECKPOINT").await.unwrap();
            }
            relay.signal(Signal::CONT);
            let what = format!("the log of round {round} is let go");
            eventually(READY, &what, async || site.outbox.number(RETAINED).await <= BOUND).await;
        }
    }
}

/// The log from before the new publication cannot be read through it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_too_when_the_publication_is_made_anew_while_nats_is_away() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let mut site = Site::new(postgres, nats).await;
        let mut relay = site.deliver(5).await;
        site.nats.stop().await;
        relay.wait_unready().await;
        // Until then a session streams the log.
        site.outbox.client().await.batch_execute(&format!("{BALLAST}; {BALLAST}")).await.unwrap();
        relay.wait_log("the log is confirmed", READY).await;
        site.drop_publication().await;
        let publication = "CREATE PUBLICATION outbox_relay FOR TABLE outbox_events
            WITH (publish = 'insert', publish_via_partition_root = true)";
        site.outbox.client().await.batch_execute(publication).await.unwrap();
        site.expect_bounded_for(3).await;

        // And by a relay that begins meanwhile.
        relay.kill9().await;
        site.drop_publication().await;
        let mut relay = site.settings.start();
        relay.wait_log("the publication is missing; it is created", READY).await;
        site.expect_bounded_for(3).await;
        assert_eq!(relay.ended(), None);

        site.expect_recovery(relay).await;
    }
}

/// NATS is there, but the relay may not ask what the stream holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_too_while_no_session_can_begin() {
    let nats = Nats::start_with(NatsVersion::V2_15, PERMITTING).await;
    let mut site = Site::before(PgVersion::V18, nats).await;
    let mut relay = site.deliver(5).await;
    // Somebody else's message, of which no row knows.
    let foreign = site.nats.jetstream().await.publish("outbox.foreign", "".into()).await.unwrap().await.unwrap();
    site.nats.reload(&denying("$JS.API.CONSUMER.CREATE.>")).await;
    let end = "SELECT count(pg_terminate_backend(active_pid)) FROM pg_replication_slots";
    assert_eq!(site.outbox.number(end).await, 1);
    relay.wait_log("permission denied to publish to", READY).await;
    site.expect_bounded_for(3).await;
    assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));

    site.nats.reload(PERMITTING).await;
    relay.wait_ready().await;
    let stream = site.nats.jetstream().await.get_stream("OUTBOX").await.unwrap();
    assert!(stream.delete_message(foreign.sequence).await.unwrap());
    site.outbox.insert_many("a", 5).await;
    site.expect_exact().await;
}

/// A slow or full stream is no less an outage: nothing is accepted though the connection stands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_too_while_the_stream_is_full() {
    use async_nats::jetstream::stream::{Config, DiscardPolicy};
    let site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    let jetstream = site.nats.jetstream().await;
    let full = Config {
        name: "OUTBOX".to_owned(),
        subjects: vec!["outbox.>".to_owned()],
        max_messages: 20,
        discard: DiscardPolicy::New,
        ..Config::default()
    };
    jetstream.create_stream(full.clone()).await.unwrap();
    let mut relay = site.deliver(20).await;
    site.expect_bounded().await;
    jetstream.update_stream(Config { max_messages: -1, ..full }).await.unwrap();
    relay.wait_ready().await;
    site.expect_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_is_let_go_too_while_too_many_rows_wait_behind_one_that_fails() {
    let nats = Nats::start_with(NatsVersion::V2_15, &denying("outbox.order.refused")).await;
    let mut site = Site::before(PgVersion::V18, nats).await;
    let settings = site.settings.clone().set("delivery.max_blocked_rows", "10").set("retry.max", "2s");
    let mut relay = settings.start();
    relay.wait_ready().await;
    let client = site.outbox.client().await;
    let refused = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, max_retries)
        VALUES ('refused', 'order', 'a', 'refused', '{}', 1000)";
    client.batch_execute(refused).await.unwrap();
    let failed = async || site.outbox.rows("failed").await == 1;
    eventually(READY, "it is refused", failed).await;
    for round in 0..5 {
        site.outbox.insert_many("a", 10).await;
        site.outbox.insert_many("b", 2).await;
        client.batch_execute(BALLAST).await.unwrap();
        let what = format!("the slot follows within its bound, round {round}");
        eventually(READY, &what, async || site.outbox.number(LAG).await <= 2 * BOUND).await;
    }
    assert_eq!(site.outbox.number(NEEDS_DRAIN).await, 1);

    site.nats.reload(&denying("nothing")).await;
    site.outbox.wait_completed().await;
    relay.wait_ready().await;
    let jetstream = site.nats.jetstream().await;
    let messages = stream::read_all(&jetstream, "OUTBOX").await;
    let of = |aggregate: &str| -> Vec<&str> {
        let of_it = |message: &&Stored| message.header("ce-subject") == Some(aggregate);
        messages.iter().filter(of_it).map(Stored::id).collect()
    };
    for (aggregate, count) in [("a", 51), ("b", 10)] {
        let ids = "SELECT event_id FROM outbox_events WHERE aggregate_id = $1 ORDER BY id";
        let rows = client.query(ids, &[&aggregate]).await.unwrap();
        let ids: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!((of(aggregate).len(), of(aggregate)), (count, ids));
    }
    assert_eq!(messages.len(), 61);
    eventually(READY, "no drain is asked for", async || site.outbox.number(NEEDS_DRAIN).await == 0).await;
}
