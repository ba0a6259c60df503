//! Claiming events by SQL, with and without a relay.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use super::{Outbox, one};
use crate::harness::postgres::{PgVersion, connect};
use crate::harness::process::{Process, command, scratch};
use crate::harness::wait::eventually;

const SOON: Duration = Duration::from_secs(20);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_come_in_order_of_id_as_they_are_after_the_claim() {
    for outbox in Outbox::ends().await {
        for id in ["a", "b", "c"] {
            outbox.insert(id, "", "").await;
        }
        // Rewritten rows lie elsewhere on the page: order is by id all the same.
        outbox.client.batch_execute("UPDATE outbox_events SET created_at = now() WHERE event_id = 'a'").await.unwrap();
        let sql = "SELECT string_agg(concat_ws(' ', event_id, status, version, retry_count, locked_by IS NOT NULL,
                                     round(extract(epoch FROM next_retry_at - locked_at))), ', ')
                   FROM fetch_and_lock_outbox_events(2)";
        let claimed: String = one(&outbox.client, sql, &[]).await;
        assert_eq!(claimed, "a processing 2 0 t 300, b processing 2 0 t 300");
        assert_eq!(outbox.fetch(100).await, ["c"]);
        assert_eq!(outbox.fetch(100).await, [""; 0]);
        let end = "UPDATE outbox_events SET next_retry_at = now() WHERE event_id = 'b';
                   UPDATE outbox_events SET next_retry_at = NULL WHERE event_id = 'c'";
        outbox.client.batch_execute(end).await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["b"], "a lease that has ended; another poller's, not dated, has not");
        let end = "UPDATE outbox_events SET next_retry_at = NULL, locked_at = locked_at - interval '5 min'
                   WHERE event_id = 'b';
                   UPDATE outbox_events SET next_retry_at = NULL, locked_at = NULL WHERE event_id = 'c'";
        outbox.client.batch_execute(end).await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["b", "c"], "leases that have ended");
        assert_eq!(outbox.fetch(0).await, [""; 0]);
        let all = "SELECT count(*) FROM fetch_and_lock_outbox_events(NULL)";
        assert_eq!(one::<i64>(&outbox.client, all, &[]).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_at_once_do_not_meet() {
    for outbox in Outbox::ends().await {
        for id in ["a", "b", "c"] {
            outbox.insert(id, "", "").await;
        }
        let mut other = outbox.database.client().await;
        let tx = other.transaction().await.unwrap();
        tx.batch_execute("SELECT FROM fetch_and_lock_outbox_events(2)").await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["c"], "neither waits nor takes the same");
        tx.rollback().await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["a", "b"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_a_relay_held_leave_one_by_one_behind_the_failed_one() {
    for outbox in Outbox::ends().await {
        outbox.insert("failed", ", status, next_retry_at", ", 'failed', now() + interval '1 hour'").await;
        outbox.insert("held_1", ", next_retry_at", ", 'infinity'").await;
        outbox.insert("held_2", ", next_retry_at", ", 'infinity'").await;
        outbox.insert("dated", ", next_retry_at, tenant_id", ", now() + interval '1 hour', 'other'").await;
        outbox.insert("free", ", next_retry_at, tenant_id", ", 'infinity', 'other'").await;
        assert_eq!(outbox.fetch(100).await, ["free"], "of another tenant, behind nothing that failed");
        let due = "UPDATE outbox_events SET next_retry_at = now() WHERE status = 'failed'";
        outbox.client.batch_execute(due).await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["failed"]);
        assert_eq!(outbox.fetch(100).await, [""; 0], "the failed one is being tried");
        outbox.client.batch_execute("SELECT mark_outbox_failed('failed', 'no')").await.unwrap();
        assert_eq!(outbox.fetch(100).await, [""; 0], "the failed one waits again");
        outbox
            .client
            .batch_execute(
                "UPDATE outbox_events SET status = 'dead_letter', next_retry_at = NULL
                                     WHERE event_id = 'failed'",
            )
            .await
            .unwrap();
        assert_eq!(outbox.fetch(100).await, ["held_1"]);
        assert_eq!(outbox.fetch(100).await, [""; 0]);
        outbox.client.batch_execute("SELECT mark_outbox_completed('held_1')").await.unwrap();
        assert_eq!(outbox.fetch(100).await, ["held_2"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_named_poller_cannot_mark_what_went_to_another() {
    for outbox in Outbox::ends().await {
        outbox.insert("e", "", "").await;
        let client = &outbox.client;
        client.batch_execute("SET outbox_relay.worker = 'one'").await.unwrap();
        assert_eq!(outbox.fetch(1).await, ["e"]);
        let take = "SET outbox_relay.worker = 'two'; UPDATE outbox_events SET next_retry_at = now()";
        client.batch_execute(take).await.unwrap();
        assert_eq!(outbox.fetch(1).await, ["e"]);
        client.batch_execute("SET outbox_relay.worker = 'one'").await.unwrap();
        assert_eq!(outbox.refusal("SELECT mark_outbox_failed('e', 'no')").await, "OB003");
        assert_eq!(outbox.refusal("SELECT mark_outbox_completed('e')").await, "OB003");
        assert_eq!(outbox.status("e").await, "processing");
        client.batch_execute("SET outbox_relay.worker = 'two'; SELECT mark_outbox_completed('e')").await.unwrap();

        outbox.insert("f", "", "").await;
        assert_eq!(outbox.fetch(1).await, ["f"]);
        client.batch_execute("RESET outbox_relay.worker; SELECT mark_outbox_completed('f')").await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pollers_rest_while_a_relay_holds_its_slot() {
    for version in PgVersion::ENDS {
        let outbox = Outbox::new(version).await;
        let (slot, publication) = (&outbox.database.slot, &outbox.database.publication);
        let setup = format!(
            "CREATE PUBLICATION {publication} FOR TABLE outbox_events;
             INSERT INTO outbox_relay_state (slot_name) VALUES ('{slot}'), ('no_such_slot')"
        );
        outbox.client.batch_execute(&setup).await.unwrap();
        let make = "SELECT pg_create_logical_replication_slot($1, 'pgoutput')::text";
        outbox.client.execute(make, &[slot]).await.unwrap();
        outbox.insert("a", "", "").await;
        outbox.insert("b", "", "").await;
        assert_eq!(outbox.fetch(1).await, ["a"], "no relay runs");

        let server = outbox.database.server();
        let mut relay = command(&server.bin().join("pg_recvlogical"), scratch(), None);
        relay.arg("-d").arg(outbox.database.url()).arg(format!("--slot={slot}")).args(["--start", "-f", "-"]);
        relay.args(["-o", "proto_version=1", "-o", &format!("publication_names={publication}")]);
        let relay = Process::spawn(relay.stdout(Stdio::null()).stderr(Stdio::null()), Signal::KILL);
        let active = "SELECT active FROM pg_replication_slots WHERE slot_name = $1";
        eventually(SOON, "the slot is active", async || one(&outbox.client, active, &[slot]).await).await;
        assert_eq!(outbox.fetch(10).await, [""; 0]);
        let elsewhere = "SELECT count(*) FROM outbox_relay_claim('w', 10, interval '1 min', 1)";
        assert_eq!(one::<i64>(&outbox.client, elsewhere, &[]).await, 0);
        drop(relay);
        eventually(SOON, "the slot is let go", async || !one::<bool>(&outbox.client, active, &[slot]).await).await;
        assert_eq!(outbox.fetch(10).await, ["b"]);
    }
}

/// What a relay does when it has its slot: it waits for the claims that are being made, and later ones see the slot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_starting_relay_waits_for_running_claims_and_only_for_them() {
    for outbox in Outbox::ends().await {
        let mut poller = outbox.database.client().await;
        let relay = outbox.database.client().await;
        let wait = "BEGIN; LOCK TABLE outbox_relay_state IN EXCLUSIVE MODE; COMMIT";
        let claim = "SELECT FROM fetch_and_lock_outbox_events()";
        for setup in ["SELECT", "INSERT INTO outbox_relay_state (slot_name) VALUES ('x')"] {
            outbox.client.batch_execute(setup).await.unwrap();
            let tx = poller.transaction().await.unwrap();
            tx.batch_execute(claim).await.unwrap();
            // Its write-back goes on meanwhile.
            relay.batch_execute("UPDATE outbox_relay_state SET stream_seq = 1, updated_at = now()").await.unwrap();
            let waiting = relay.batch_execute(wait);
            tokio::pin!(waiting);
            let early = tokio::time::timeout(Duration::from_millis(300), &mut waiting).await;
            assert!(early.is_err(), "the relay did not wait for a running claim ({setup})");
            tx.commit().await.unwrap();
            waiting.await.unwrap();
        }
    }
}

/// Whoever could poll before needs no new grant: not on the relay's state.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pollers_need_no_rights_on_the_relays_state() {
    let outbox = Outbox::new(PgVersion::V15).await;
    outbox.insert("e", "", "").await;
    let role = format!("{}_poller", outbox.database.name);
    let grant = format!(
        "CREATE ROLE {role} LOGIN; GRANT SELECT, UPDATE ON outbox_events TO {role};
         INSERT INTO outbox_relay_state (slot_name) VALUES ('x')"
    );
    outbox.client.batch_execute(&grant).await.unwrap();
    let poller = connect(&outbox.database.url().replace("postgres@", &format!("{role}@"))).await;
    let sql = "SELECT event_id::text FROM fetch_and_lock_outbox_events()";
    assert_eq!(one::<String>(&poller, sql, &[]).await, "e");
    poller.batch_execute("SELECT mark_outbox_completed('e')").await.unwrap();
    outbox.client.batch_execute(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await.unwrap();
}
