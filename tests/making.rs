//! A new slot waits for every transaction that is open on the server: rows do not.

use std::time::Duration;

use outbox_relay::config::TableName;
use outbox_relay::postgres::outbox::{Tables, WaitingRows};

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::scene::publishes;
use crate::harness::wait::{always, eventually};

const NEEDS_DRAIN: &str = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";

struct Site {
    nats: &'static Nats,
    database: Database,
    settings: RelaySettings,
    outbox: Outbox,
}

impl Site {
    async fn new(postgres: PgVersion, nats: NatsVersion) -> Self {
        let (database, nats) = (Postgres::shared(postgres).await.database().await, Nats::shared(nats).await);
        let space = Space::new();
        let settings = RelaySettings::shared(&database, nats, &space);
        settings.migrate().await;
        let outbox = Outbox::new(&database.url(), &space.stream).await;
        Self { nats, database, settings, outbox }
    }

    async fn expect_exact(&self, relay: &mut Relay) {
        relay.wait_ready().await;
        self.outbox.expect_exact(self.nats).await;
        assert_eq!(publishes(relay, "duplicate").await, 0);
        eventually(READY, "no drain is asked for", async || self.outbox.number(NEEDS_DRAIN).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_delivered_while_a_new_slot_waits_for_an_old_transaction() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let site = Site::new(postgres, nats).await;
        let outbox = &site.outbox;
        outbox.insert_many("a", 20).await;
        let old = site.database.client().await;
        old.batch_execute("SET application_name = 'forgotten'; BEGIN; SELECT pg_current_xact_id()").await.unwrap();
        let late = site.database.client().await;
        let insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
            VALUES ('order', 'late', 'changed', '{\"n\": 1}')";
        late.batch_execute(&format!("BEGIN; {insert}")).await.unwrap();

        let mut relay = site.settings.start();
        outbox.wait_stored(site.nats, 20).await;
        // And what comes now, also from a transaction that was open before, whose row has a lower id.
        let load = Load::start(outbox, 2);
        outbox.wait_stored(site.nats, 120).await;
        late.batch_execute("COMMIT").await.unwrap();
        let pid: i32 = old.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
        let words = ["waits for", "(forgotten)", &format!("pg_terminate_backend({pid})"), "since 20"];
        relay.wait_says(&words).await;
        let lag = "outbox_relay_slot_confirmed_lag_bytes";
        assert_eq!(relay.metric(lag).await, None, "a slot that is not made has no lag");
        // Pollers rest, as under a slot that is made.
        assert_eq!(outbox.number("SELECT count(*) FROM fetch_and_lock_outbox_events(10)").await, 0);
        let late_is_stored = "SELECT count(*) FROM outbox_events WHERE aggregate_id = 'late' AND status = 'completed'";
        eventually(READY, "the late row is delivered", async || outbox.number(late_is_stored).await == 1).await;
        assert_eq!(outbox.number(NEEDS_DRAIN).await, 1);

        old.batch_execute("COMMIT").await.unwrap();
        relay.wait_ready().await;
        let now = outbox.stored(site.nats).await;
        outbox.wait_stored(site.nats, now + 50).await;
        load.stop().await;
        site.expect_exact(&mut relay).await;
        assert!(relay.log().contains("the slot was made"), "{}", relay.log());
    }
}

/// Two relays begin at once while no slot can be made: one delivers, the other stands by, also when the first one dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_relay_delivers_while_the_slot_is_made() {
    let site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    let outbox = &site.outbox;
    let old = site.database.client().await;
    old.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    let mut first = site.settings.start();
    let load = Load::start(outbox, 2);
    outbox.wait_stored(site.nats, 20).await;
    let mut second = site.settings.start();
    second.wait_standby().await;
    always(Duration::from_secs(2), "it stands by", async || second.metric("outbox_relay_leader").await == Some(0.0))
        .await;
    // Told to stop, the first one leaves no slot behind that nobody makes.
    assert!(first.terminate(READY).await.success());
    let before = outbox.stored(site.nats).await;
    outbox.wait_stored(site.nats, before + 50).await;
    old.batch_execute("COMMIT").await.unwrap();
    load.stop().await;
    site.expect_exact(&mut second).await;
}

/// More than a round holds: it is delivered before the slot's snapshot is taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_backlog_is_delivered_before_the_slot_is_made() {
    let site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    site.outbox.insert_bulk(60_000, 500, 10).await;
    let mut relay = site.settings.start();
    let load = Load::start(&site.outbox, 1);
    // Transactions of other tests come before it.
    let words = ["they are delivered first", "the new slot waits for"];
    let first = async || relay.says(&words[..1]).await || relay.says(&words[1..]).await;
    eventually(READY, "it says what comes first", first).await;
    relay.wait_ready().await;
    load.stop().await;
    site.expect_exact(&mut relay).await;
    let log = relay.log();
    let rounds = log.find("while the slot is being made").expect("a round");
    assert!(rounds < log.find("the slot was made").expect("the slot"), "{log}");
}

/// No index tells how many rows wait: in a very large table in which few do, all of it would have to be read, for longer
/// than a session may take to begin. A slot that is missing would never be made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_rows_that_cannot_be_counted_in_time_count_as_many() {
    let site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    let client = site.database.client().await;
    // Each of its rows takes as long as millions of others.
    let view = "CREATE VIEW slow AS SELECT 'pending' AS status, NULL::timestamptz AS next_retry_at
        FROM generate_series(1, 100) WHERE pg_sleep(1) IS NOT NULL";
    client.batch_execute(view).await.unwrap();
    let more_than = async |table: &str, rows| {
        let tables = Tables::of(&table.parse::<TableName>().unwrap());
        tokio::time::timeout(READY, WaitingRows::may_be_more_than(&client, &tables, rows)).await.unwrap().unwrap()
    };
    assert!(more_than("public.slow", 100).await);
    site.outbox.insert_many("a", 3).await;
    for (rows, more) in [(2, true), (3, false), (4, false)] {
        assert_eq!(more_than("public.outbox_events", rows).await, more, "{rows}");
    }
    let limit: String = client.query_one("SHOW statement_timeout", &[]).await.unwrap().get(0);
    assert_eq!(limit, "0", "the limit is for that question alone");
}

/// A row that someone locks has no outcome for as long; what comes behind it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_someone_holds_does_not_keep_others_waiting_while_the_slot_is_made() {
    let site = Site::new(PgVersion::V18, NatsVersion::V2_15).await;
    let outbox = &site.outbox;
    outbox.insert_many("held", 20).await;
    let old = site.database.client().await;
    old.batch_execute("BEGIN; SELECT FROM outbox_events WHERE payload ->> 'n' = '7' FOR UPDATE").await.unwrap();
    let mut relay = site.settings.start();
    let completed = async |rows: i64| {
        eventually(READY, &format!("{rows} rows are completed"), async || outbox.rows("completed").await == rows).await;
    };
    completed(19).await;
    for round in 1..=3 {
        outbox.insert_many("held", 10).await;
        outbox.insert_many("another", 10).await;
        completed(19 + 20 * round).await;
    }
    assert_eq!((outbox.stored(site.nats).await, publishes(&relay, "stored").await), (80, 80));
    old.batch_execute("COMMIT").await.unwrap();
    site.expect_exact(&mut relay).await;
    assert_eq!(publishes(&relay, "stored").await, 80);
}

/// A relay that dies while PostgreSQL waits for an old transaction does not keep the slot's name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_a_slot_that_nobody_waits_for_any_more_is_free_again() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let site = Site::new(postgres, nats).await;
        let outbox = &site.outbox;
        let old = site.database.client().await;
        old.batch_execute("SET application_name = 'forgotten'; BEGIN; SELECT pg_current_xact_id()").await.unwrap();
        let mut first = site.settings.start();
        outbox.insert_many("a", 20).await;
        outbox.wait_stored(site.nats, 20).await;
        let mut second = site.settings.start();
        second.wait_standby().await;
        // It says for what the slot waits, and that its maker may be gone.
        let maker =
            outbox.number("SELECT active_pid::int8 FROM pg_replication_slots WHERE database = current_database()");
        let maker = maker.await;
        second.wait_log(&format!("is being made by process {maker}"), READY).await;
        // The oldest one may be another test's.
        for words in ["the oldest is open since", &format!("pg_terminate_backend({maker})")] {
            assert!(second.log().contains(words), "{words}: {}", second.log());
        }
        assert!(second.get("/status").await.is_some_and(|(_, body)| body.contains("the oldest is open since")));

        first.kill9().await;
        outbox.insert_many("a", 20).await;
        outbox.wait_stored(site.nats, 40).await;
        old.batch_execute("COMMIT").await.unwrap();
        site.expect_exact(&mut second).await;
    }
}
