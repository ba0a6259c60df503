//! Beyond the duplicate window the stream no longer knows a second copy: the relay looks into it before it sends again.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::jetstream::stream::Config;
use rustix::process::Signal;

use crate::harness::load::{DELIVERED, Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::proxy::Proxy;
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::stream::read_all;
use crate::harness::wait::eventually;

/// The stream forgets the ids of messages after 2 s.
const WINDOW: &str = "2s";
/// Until it has forgotten them for certain.
const FORGOTTEN: Duration = Duration::from_secs(5);

struct Site<'a> {
    nats: &'a Nats,
    database: Database,
    settings: RelaySettings,
    outbox: Outbox,
}

impl<'a> Site<'a> {
    async fn new(postgres: PgVersion, nats: &'a Nats) -> Self {
        let (database, space) = (Postgres::shared(postgres).await.database().await, Space::new());
        let settings = RelaySettings::shared(&database, nats, &space).set("nats.create.duplicate_window", WINDOW);
        settings.migrate().await;
        let outbox = Outbox::new(&database.url(), &space.stream).await;
        Self { nats, database, settings, outbox }
    }

    async fn start(&self) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    async fn start_over(&self, proxy: &Proxy) -> Relay {
        let mut relay = self.settings.clone().set("nats.url", &proxy.instead_of(&self.nats.url())).start();
        relay.wait_ready().await;
        relay
    }

    /// A statement of a killed relay that waits for a lock would go on without it.
    async fn write_back_has_ended(&self) {
        let backends = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'outbox-relay write-back'
                        AND datname = current_database()";
        eventually(READY, "its statements have ended", async || self.outbox.number(backends).await == 0).await;
    }

    /// Waits until so many rows are left.
    async fn wait_left(&self, rows: i64) {
        let client = self.outbox.client().await;
        let left = async || {
            client.query_one("SELECT count(*) FROM outbox_events", &[]).await.unwrap().get::<_, i64>(0) == rows
        };
        eventually(DELIVERED, "the rows are deleted", left).await;
    }

    /// A relay delivers three events, and is killed when the stream has ten more of which no row knows.
    async fn kill_before_ten_are_recorded(&self) {
        let proxy = Proxy::start_nats(self.nats.port()).await;
        let mut relay = self.start_over(&proxy).await;
        self.outbox.insert_many("early", 3).await;
        self.outbox.wait_completed().await;
        proxy.drop_messages(|_| true);
        for aggregate in 0..10 {
            self.outbox.insert(&format!("aggregate {aggregate}")).await;
        }
        self.outbox.wait_stored(self.nats, 13).await;
        relay.kill9().await;
    }

    async fn progress(&self, count: u64) {
        self.outbox.wait_stored(self.nats, self.outbox.stored(self.nats).await + count).await;
    }
}

/// How many publishes of this relay were stored, and how many only recognized as doubles.
async fn publishes(relay: &Relay) -> (Option<f64>, Option<f64>) {
    let outcome = async |name| relay.metric(&format!("outbox_relay_publishes_total{{outcome=\"{name}\"}}")).await;
    (outcome("stored").await, outcome("duplicate").await)
}

/// Case 34: nothing is known of the acknowledgements; the rows come from the log again, or from the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_unacknowledged_before_a_kill_is_not_sent_after_the_window() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        for drained in [false, true] {
            let site = Site::new(postgres, Nats::shared(nats).await).await;
            let proxy = Proxy::start_nats(site.nats.port()).await;
            let mut relay = site.start_over(&proxy).await;
            site.outbox.insert("early").await;
            site.outbox.wait_completed().await;
            proxy.drop_messages(|_| true);
            for aggregate in 0..10 {
                site.outbox.insert_many(&format!("aggregate {aggregate}"), 3).await;
            }
            // The first of each aggregate; the next ones wait for its acknowledgement.
            site.outbox.wait_stored(site.nats, 11).await;
            relay.kill9().await;
            assert_eq!(site.outbox.rows("completed").await, 1);
            if drained {
                let client = site.outbox.client().await;
                let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1";
                let slot = &site.database.slot;
                eventually(READY, "the slot is dropped", async || client.execute(drop, &[slot]).await.is_ok()).await;
            }
            tokio::time::sleep(FORGOTTEN).await;
            let relay = site.start().await;
            assert_eq!(site.outbox.expect_exact(site.nats).await, 31);
            assert_eq!(publishes(&relay).await, (Some(20.0), Some(0.0)));
        }
    }
}

/// Its row of the state names another slot, and a third one that was given up long ago.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_before_a_kill_is_not_sent_under_another_slots_name() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    site.kill_before_ten_are_recorded().await;
    let given_up = "INSERT INTO outbox_relay_state (slot_name, stream, stream_created, stream_seq)
        SELECT 'given up', stream, stream_created, 1000000 FROM outbox_relay_state";
    site.outbox.client().await.batch_execute(given_up).await.unwrap();
    tokio::time::sleep(FORGOTTEN).await;
    let other = format!("{}_other", site.database.slot);
    let mut relay = site.settings.clone().set("source.slot", &other).start();
    relay.wait_ready().await;
    assert_eq!(site.outbox.expect_exact(site.nats).await, 13);
    assert_eq!(publishes(&relay).await, (Some(0.0), Some(0.0)));
}

/// Someone has emptied the relay's own table: nothing tells any more how far things were.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_stored_before_a_kill_is_not_sent_again_when_the_state_is_lost() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    site.kill_before_ten_are_recorded().await;
    site.outbox.client().await.batch_execute("TRUNCATE outbox_relay_state").await.unwrap();
    tokio::time::sleep(FORGOTTEN).await;
    let relay = site.start().await;
    assert_eq!(site.outbox.expect_exact(site.nats).await, 13);
    assert_eq!(publishes(&relay).await, (Some(0.0), Some(0.0)));

    // A slot that is made now has nothing in the stream: the first start of a relay beside others reads none of theirs.
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let first = site.settings.clone().set("postgres.url", &database.url()).set("source.slot", &database.slot);
    first.migrate().await;
    let mut relay = first.start();
    relay.wait_ready().await;
    assert!(!relay.log().contains("the stream was asked"), "{}", relay.log());
}

/// Case 34: the acknowledgements came, and could not be written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_but_not_written_before_a_kill_is_not_sent_after_the_window() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    let mut relay = site.start().await;
    assert!(relay.terminate(READY).await.success());
    for aggregate in 0..20 {
        site.outbox.insert(&format!("aggregate {aggregate}")).await;
    }
    let mut holder = site.outbox.client().await;
    let lock = holder.transaction().await.unwrap();
    lock.execute("SELECT 1 FROM outbox_events FOR UPDATE", &[]).await.unwrap();
    let mut relay = site.start().await;
    site.outbox.wait_stored(site.nats, 20).await;
    eventually(READY, "all are acknowledged", async || publishes(&relay).await.0 == Some(20.0)).await;
    relay.kill9().await;
    site.write_back_has_ended().await;
    lock.rollback().await.unwrap();
    assert_eq!(site.outbox.rows("completed").await, 0);
    tokio::time::sleep(FORGOTTEN).await;
    let relay = site.start().await;
    assert_eq!(site.outbox.expect_exact(site.nats).await, 20);
    assert_eq!(publishes(&relay).await, (Some(0.0), Some(0.0)));
}

/// The log shows a transaction again as a whole, and the rows are gone that could tell what became of its events.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_before_a_kill_is_not_sent_after_the_window_with_its_transaction() {
    let mut site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    site.settings = site.settings.set("writeback.on_success", "delete");
    let proxy = Proxy::start_nats(site.nats.port()).await;
    let mut relay = site.start_over(&proxy).await;
    let noted = "SELECT max(stream_seq) FROM outbox_relay_state";
    let mut early = 0;
    while site.outbox.number(noted).await == 0 {
        site.outbox.insert("early").await;
        early += 1;
        site.wait_left(0).await;
    }
    // One aggregate, one after the other. The last one's answer is lost; its token stands at the end of the subject.
    let last = format!(".{}", early + 49);
    proxy.drop_messages(move |line| line.split(' ').nth(1).is_some_and(|subject| subject.ends_with(&last)));
    site.outbox.insert_bulk(50, 1, 0).await;
    site.wait_left(1).await;
    for _ in 0..3 {
        site.outbox.insert("later").await;
        site.wait_left(1).await;
    }
    relay.kill9().await;
    tokio::time::sleep(FORGOTTEN).await;
    let relay = site.start().await;
    site.wait_left(0).await;
    assert_eq!(site.outbox.stored(site.nats).await, early + 50 + 3);
    assert_eq!(publishes(&relay).await, (Some(0.0), Some(0.0)));
}

/// PostgreSQL is told of a position less often than the table: what lies between is shown again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_deleted_just_before_a_kill_is_not_sent_after_the_window() {
    let mut site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    site.settings = site.settings.set("writeback.on_success", "delete");
    let mut relay = site.start().await;
    let noted = "SELECT max(stream_seq) FROM outbox_relay_state";
    let mut inserted = 0;
    while site.outbox.number(noted).await < 20 {
        site.outbox.insert_many("early", 10).await;
        inserted += 10;
        site.wait_left(0).await;
    }
    for number in 0..10 {
        site.outbox.insert(&format!("aggregate {number}")).await;
        site.wait_left(0).await;
    }
    relay.kill9().await;
    tokio::time::sleep(FORGOTTEN).await;
    let relay = site.start().await;
    site.outbox.insert("late").await;
    site.outbox.wait_stored(site.nats, inserted + 11).await;
    site.wait_left(0).await;
    assert_eq!(site.outbox.stored(site.nats).await, inserted + 11);
    assert_eq!(publishes(&relay).await, (Some(1.0), Some(0.0)));
}

/// Rows were read from the table and deleted; then the log shows them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_drained_and_deleted_is_not_sent_again_when_the_log_shows_it() {
    let mut site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    site.settings = site.settings.set("writeback.on_success", "delete");
    let client = site.outbox.client().await;
    let mut relay = site.start().await;
    let drained = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";
    eventually(DELIVERED, "the slot is settled", async || site.outbox.number(drained).await == 0).await;
    assert!(relay.terminate(READY).await.success());
    // One after the other, so that the first ones are gone by the time the last one is sent.
    site.outbox.insert_bulk(500, 1, 0).await;
    client.execute("UPDATE outbox_relay_state SET needs_drain = true", &[]).await.unwrap();
    let relay = site.start().await;
    site.outbox.insert("late").await;
    site.wait_left(0).await;
    site.outbox.wait_stored(site.nats, 501).await;
    assert_eq!(publishes(&relay).await, (Some(501.0), Some(0.0)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_kills_under_load_with_restarts_after_the_window_store_nothing_twice() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    let load = Load::start(&site.outbox, 3);
    for _ in 0..3 {
        let mut relay = site.start().await;
        site.progress(100).await;
        relay.kill9().await;
        tokio::time::sleep(FORGOTTEN).await;
    }
    load.stop().await;
    let _relay = site.start().await;
    site.outbox.expect_exact(site.nats).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nats_server_frozen_for_longer_than_the_window_stores_nothing_twice() {
    let nats = Nats::start(NatsVersion::V2_15).await;
    let site = Site::new(PgVersion::V18, &nats).await;
    let load = Load::start(&site.outbox, 3);
    let mut relay = site.start().await;
    for _ in 0..3 {
        site.progress(100).await;
        nats.signal(Signal::STOP);
        tokio::time::sleep(Duration::from_secs(7)).await;
        nats.signal(Signal::CONT);
    }
    site.progress(100).await;
    load.stop().await;
    site.outbox.expect_exact(&nats).await;
    assert_eq!(relay.ended(), None);
}

/// The first acknowledgement of every third event is lost, and missed only after the window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acknowledgement_lost_for_longer_than_the_window_leads_to_no_second_copy() {
    for nats in NatsVersion::ENDS {
        let mut site = Site::new(PgVersion::V18, Nats::shared(nats).await).await;
        site.settings = site.settings.set("delivery.ack_timeout", "5s");
        let proxy = Proxy::start_nats(site.nats.port()).await;
        let mut relay = site.start_over(&proxy).await;
        let lost = Mutex::new(HashSet::new());
        proxy.drop_messages(move |line| {
            let subject = line.split(' ').nth(1).unwrap_or_default();
            // Answers to other questions end with no number.
            let token: Option<u64> = subject.rsplit('.').next().and_then(|token| token.parse().ok());
            token.is_some_and(|token| token.is_multiple_of(3) && lost.lock().unwrap().insert(token))
        });
        for aggregate in 0..10 {
            site.outbox.insert_many(&format!("aggregate {aggregate}"), 2).await;
        }
        assert_eq!(site.outbox.expect_exact(site.nats).await, 20);
        // No other acknowledgement comes after the last one.
        let last = AtomicBool::new(false);
        proxy.drop_messages(move |line| line.contains("_INBOX") && !last.swap(true, Ordering::SeqCst));
        site.outbox.insert("last").await;
        assert_eq!(site.outbox.expect_exact(site.nats).await, 21);
        relay.wait_ready().await;
        let (stored, duplicate) = publishes(&relay).await;
        assert_eq!(duplicate, Some(0.0), "none was sent again");
        assert!(stored < Some(21.0), "some were found in the stream: {stored:?}");
    }
}

/// A partition between the relay and NATS: what was sent is stored, and the connection is gone for longer than the
/// window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_longer_than_the_window_leads_to_no_second_copy() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    let proxy = Proxy::start_nats(site.nats.port()).await;
    let relay = site.start_over(&proxy).await;
    proxy.drop_messages(|_| true);
    for aggregate in 0..10 {
        site.outbox.insert_many(&format!("aggregate {aggregate}"), 3).await;
    }
    site.outbox.wait_stored(site.nats, 10).await;
    proxy.refuse();
    proxy.reset_all();
    tokio::time::sleep(FORGOTTEN).await;
    proxy.pass();
    eventually(DELIVERED, "the rest is stored", async || publishes(&relay).await.0 >= Some(20.0)).await;
    assert_eq!(site.outbox.expect_exact(site.nats).await, 30);
    assert_eq!(publishes(&relay).await, (Some(20.0), Some(0.0)));
}

/// The first copy is stored, its acknowledgement is lost, and the second one is refused: a retry may come when the
/// stream has forgotten the id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_second_copy_is_refused_is_completed_where_the_first_was_stored() {
    for nats in NatsVersion::ENDS {
        let mut site = Site::new(PgVersion::V18, Nats::shared(nats).await).await;
        // Within the window, so that only the refusal makes the relay ask.
        site.settings = site.settings.set("nats.create.duplicate_window", "2m").set("delivery.ack_timeout", "500ms");
        site.settings = site.settings.set("retry.initial", "1s").set("reconcile.interval", "100ms");
        let proxy = Proxy::start_nats(site.nats.port()).await;
        let relay = site.start_over(&proxy).await;
        proxy.drop_messages(|_| true);
        site.outbox.insert_many("a", 2).await;
        site.outbox.insert("b").await;
        site.outbox.wait_stored(site.nats, 2).await;
        let jetstream = site.nats.jetstream().await;
        let wide = jetstream.get_stream(&site.outbox.stream).await.unwrap().cached_info().config.clone();
        let narrow = vec![format!("{}.nothing", site.outbox.stream)];
        jetstream.update_stream(Config { subjects: narrow, ..wide.clone() }).await.unwrap();
        proxy.pass();
        // The next one of its aggregate, which was not stored, has its turn and is refused.
        let refused = "SELECT count(*) FROM outbox_events WHERE error_code = 'no_stream_for_subject'";
        eventually(READY, "one is refused", async || site.outbox.number(refused).await > 0).await;
        assert_eq!((site.outbox.number(refused).await, site.outbox.rows("completed").await), (1, 2), "{}", relay.log());
        jetstream.update_stream(wide).await.unwrap();
        site.outbox.wait_completed().await;
        let numbers: Vec<_> = read_all(&jetstream, &site.outbox.stream).await.into_iter().map(|m| m.payload).collect();
        assert_eq!(numbers.len(), 3);
        assert_eq!(numbers[2], "{\"n\": 2}");
    }
}

/// What the stream held when the session began says nothing of an event that is put back later, its message being gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_put_back_after_its_message_was_deleted_is_sent_again() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    let mut relay = site.start().await;
    site.outbox.insert_many("a", 3).await;
    site.outbox.wait_completed().await;
    assert!(relay.terminate(READY).await.success());
    let client = site.database.client().await;
    client.batch_execute("UPDATE outbox_relay_state SET stream_seq = 0").await.unwrap();
    let relay = site.start().await;
    eventually(READY, "it knows them", async || relay.log().contains("read=3")).await;
    site.nats.jetstream().await.get_stream(&site.outbox.stream).await.unwrap().purge().await.unwrap();
    tokio::time::sleep(FORGOTTEN).await;
    let back = "UPDATE outbox_events SET status = 'failed', next_retry_at = now()";
    client.batch_execute(back).await.unwrap();
    site.outbox.wait_stored(site.nats, 3).await;
}

/// A row that the log missed and an earlier session sent: its copy in the stream is kept in mind until the sweep has
/// looked at the row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_sweep_sent_before_a_kill_is_not_sent_after_the_window() {
    let site = Site::new(PgVersion::V18, Nats::shared(NatsVersion::V2_15).await).await;
    let mut relay = site.start().await;
    // Or the rows would be drained.
    let drains = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";
    eventually(READY, "the first drain is over", async || site.outbox.number(drains).await == 0).await;
    assert!(relay.terminate(READY).await.success());
    let client = site.outbox.client().await;
    site.outbox.insert("missed").await;
    // The log shows it as nothing to be sent, and updates it does not show.
    client.batch_execute("ALTER TABLE outbox_events ALTER status SET DEFAULT 'completed'").await.unwrap();
    site.outbox.insert("missed").await;
    client.batch_execute("ALTER TABLE outbox_events ALTER status SET DEFAULT 'pending'").await.unwrap();
    client.batch_execute("UPDATE outbox_events SET status = 'pending'").await.unwrap();
    let mut holder = site.outbox.client().await;
    let lock = holder.transaction().await.unwrap();
    lock.execute("SELECT FROM outbox_events WHERE id = 2 FOR UPDATE", &[]).await.unwrap();
    let mut relay = site.start().await;
    site.outbox.wait_stored(site.nats, 2).await;
    relay.kill9().await;
    site.write_back_has_ended().await;
    lock.rollback().await.unwrap();

    // The sweep of the next session waits for the log, and has no second turn.
    site.outbox.insert("locked").await;
    let lock = holder.transaction().await.unwrap();
    lock.execute("SELECT FROM outbox_events WHERE id = 3 FOR UPDATE", &[]).await.unwrap();
    let mut relay = site.settings.clone().set("reconcile.interval", "1h").start();
    relay.wait_ready().await;
    let passed = async || relay.metric("outbox_relay_reconcile_last_success_timestamp_seconds").await > Some(0.0);
    eventually(READY, "a pass is over", passed).await;
    site.outbox.wait_stored(site.nats, 3).await;
    lock.rollback().await.unwrap();
    for more in 4..=6 {
        site.outbox.insert("more").await;
        let done = format!("SELECT count(*) FROM outbox_events WHERE id IN (3, {more}) AND status = 'completed'");
        eventually(READY, "it is recorded", async || site.outbox.number(&done).await == 2).await;
    }
    assert_eq!(site.outbox.rows("completed").await, 5);
    relay.kill9().await;
    tokio::time::sleep(FORGOTTEN).await;
    let _relay = site.start().await;
    assert_eq!(site.outbox.expect_exact(site.nats).await, 6);
}
