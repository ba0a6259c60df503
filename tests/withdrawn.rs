//! Privileges that are taken back under a running relay, and outcomes that PostgreSQL refuses: the relay tells of it, and
//! the slot keeps no more of the log than it may.

use std::time::Duration;

use tokio_postgres::Client;

use crate::harness::load::Outbox;
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{READY, Relay, RelaySettings};
use crate::harness::scene::{counter, publishes};
use crate::harness::wait::{always, eventually};

const BOUND: i64 = 1024 * 1024;
const END: &str = "SELECT (pg_current_wal_lsn() - '0/0')::int8";
const CONFIRMED: &str = "SELECT (confirmed_flush_lsn - '0/0')::int8 FROM pg_replication_slots";
const NEEDS_DRAIN: &str = "SELECT count(*) FROM outbox_relay_state WHERE needs_drain";
/// All that a relay's role needs when its publication exists.
const ROLE: &str = "CREATE ROLE relay LOGIN REPLICATION;
    GRANT SELECT, UPDATE ON outbox_events TO relay; GRANT SELECT, INSERT ON outbox_dead_letter TO relay;
    GRANT SELECT, INSERT, UPDATE ON outbox_relay_state, supply_batch_compensation TO relay;
    CREATE PUBLICATION outbox_relay FOR TABLE outbox_events WITH (publish = 'insert')";

/// A relay that has delivered five events of one aggregate, as a role that has just what it needs. The server is the
/// test's own, for every byte of the log counts.
struct Site {
    _postgres: Postgres,
    nats: &'static Nats,
    outbox: Outbox,
    client: Client,
    relay: Relay,
}

impl Site {
    async fn new() -> Self {
        let (postgres, nats) = (Postgres::start(PgVersion::V18, &[]).await, Nats::shared(NatsVersion::V2_15).await);
        let (url, space) = (postgres.url("postgres"), Space::new());
        let settings = RelaySettings::new(&url, &nats.url()).within(&space);
        settings.migrate().await;
        let (outbox, client) = (Outbox::new(&url, &space.stream).await, postgres.client().await);
        client.batch_execute(ROLE).await.unwrap();
        let settings = settings
            .set("postgres.url", &url.replace("postgres@", "relay@"))
            .set("source.max_retained_wal", "1MiB")
            .set("delivery.ack_timeout", "500ms");
        let mut relay = settings.start();
        relay.wait_ready().await;
        outbox.insert_many("a", 5).await;
        outbox.wait_completed().await;
        eventually(READY, "the first drain is over", async || outbox.number(NEEDS_DRAIN).await == 0).await;
        Self { _postgres: postgres, nats, outbox, client, relay }
    }

    async fn sql(&self, statements: &str) {
        self.client.batch_execute(statements).await.unwrap_or_else(|error| panic!("{statements}: {error:?}"));
    }

    /// Writes so many bytes of log, which no row is part of.
    async fn write_log(&self, bytes: i64) {
        self.sql(&format!("SELECT pg_logical_emit_message(true, 'it', repeat('x', {bytes}))")).await;
    }

    /// Writes more log than the slot may keep. It is let go.
    async fn expect_bounded(&self) {
        self.write_log(2 * BOUND).await;
        self.wait_confirmed().await;
        assert_eq!(self.outbox.number(NEEDS_DRAIN).await, 1);
    }

    /// Waits until the slot has passed everything that is in the log by now.
    async fn wait_confirmed(&self) {
        let end = self.outbox.number(END).await;
        eventually(READY, "the slot follows", async || self.outbox.number(CONFIRMED).await >= end).await;
    }

    /// Everything is delivered, and nothing was sent twice.
    async fn expect_exact(mut self) {
        let rows = self.outbox.expect_exact(self.nats).await as u64;
        self.relay.wait_ready().await;
        assert_eq!((publishes(&self.relay, "stored").await, publishes(&self.relay, "duplicate").await), (rows, 0));
        eventually(READY, "no drain is asked for", async || self.outbox.number(NEEDS_DRAIN).await == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_privilege_on_the_rows_that_is_taken_back_is_named_and_pins_no_log() {
    let site = Site::new().await;
    site.sql("REVOKE UPDATE ON outbox_events FROM relay").await;
    site.outbox.insert_many("a", 5).await;
    site.outbox.wait_stored(site.nats, 10).await;
    site.relay.wait_says(&["refuses the outcomes", "SQLSTATE 42501"]).await;
    site.expect_bounded().await;
    site.relay.wait_says(&["GRANT UPDATE ON", "outbox_events"]).await;
    // No session begins, and the slot keeps within its bound all the same.
    site.outbox.insert_many("b", 5).await;
    site.expect_bounded().await;
    site.sql("GRANT UPDATE ON outbox_events TO relay").await;
    site.expect_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_whose_outcome_is_refused_pins_no_log_and_keeps_no_other() {
    let site = Site::new().await;
    site.sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN IF NEW.id = 7 THEN RAISE EXCEPTION 'not %', NEW.aggregate_id; END IF; RETURN NEW; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await;
    for round in 1..=2 {
        for aggregate in ["a", "b"] {
            site.outbox.insert_many(aggregate, 3).await;
        }
        let others = async || site.outbox.rows("completed").await == 5 + 6 * round - 1;
        eventually(READY, "the others are completed", others).await;
        if round == 1 {
            // With no word of the server's, which may hold values of the row.
            site.relay.wait_says(&["refuses the outcomes", "SQLSTATE P0001), and the slot"]).await;
            site.expect_bounded().await;
        }
    }
    site.sql("DROP TRIGGER refuse ON outbox_events").await;
    site.expect_exact().await;
}

/// Nothing is to be sent, so that only the note of the position is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_privilege_on_the_state_that_is_taken_back_is_told_of_without_haste() {
    let site = Site::new().await;
    site.sql("REVOKE UPDATE ON outbox_relay_state FROM relay").await;
    let connected = counter(&site.relay, "reconnects{peer=\"postgres\"}").await;
    site.write_log(100_000).await;
    site.relay.wait_says(&["refuses what write-back asks for", "SQLSTATE 42501"]).await;
    always(Duration::from_secs(4), "it is told of once, and tried now and then", async || {
        let again = counter(&site.relay, "reconnects{peer=\"postgres\"}").await - connected;
        let told = site.relay.log().matches("it is tried again").count();
        again < 12 && told == 1 && site.relay.get("/readyz").await.is_some_and(|(status, _)| status == 503)
    })
    .await;
    // Without a note, the slot cannot be kept within its bound. The session ends all the same, and the next one says why
    // it does not begin.
    site.outbox.insert_many("a", 5).await;
    site.outbox.wait_stored(site.nats, 10).await;
    site.write_log(2 * BOUND).await;
    site.relay.wait_says(&["GRANT UPDATE ON", "outbox_relay_state"]).await;
    site.sql("GRANT UPDATE ON outbox_relay_state TO relay").await;
    site.outbox.wait_completed().await;
    site.wait_confirmed().await;
    site.expect_exact().await;
}
