//! Compensations, by SQL.

use std::time::Duration;

use super::{Outbox, one};
use crate::harness::postgres::PgVersion;

const CREATE: &str = "SELECT create_compensation('batch', 'refund', 1, '{}', 'reason')";

async fn reset(outbox: &Outbox, status: &str) {
    let sql = format!(
        "TRUNCATE supply_batch_compensation RESTART IDENTITY; {CREATE};
         UPDATE supply_batch_compensation SET status = '{status}'"
    );
    outbox.client.batch_execute(&sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_are_taken_only_from_the_states_that_allow_them() {
    let statuses = ["pending", "retrying", "resolved", "manual_required", "abandoned"];
    let retry = ["retrying", "retrying", "OB002", "OB002", "OB002"];
    let resolve = ["resolved", "resolved", "resolved", "resolved", "OB002"];
    let manual = ["manual_required", "manual_required", "OB002", "manual_required", "OB002"];
    for outbox in Outbox::ends().await {
        for (call, outcomes) in [
            ("retry_compensation(1)", retry),
            ("resolve_compensation(1, 5, 'notes')", resolve),
            ("mark_compensation_manual_required(1, 'more')", manual),
        ] {
            for (status, expected) in statuses.into_iter().zip(outcomes) {
                reset(&outbox, status).await;
                let call = format!("SELECT {call}");
                if expected == "OB002" {
                    assert_eq!(outbox.refusal(&call).await, expected, "{call} from {status}");
                } else {
                    outbox.client.batch_execute(&call).await.unwrap();
                }
                let row = "SELECT status || ' ' || version FROM supply_batch_compensation";
                let version = if expected == "OB002" || (expected, status) == ("resolved", "resolved") { 1 } else { 2 };
                let after = if expected == "OB002" { status } else { expected };
                assert_eq!(one::<String>(&outbox.client, row, &[]).await, format!("{after} {version}"));
            }
            let unknown = format!("SELECT {}", call.replace("(1", "(99"));
            assert_eq!(outbox.refusal(&unknown).await, "P0002");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_takes_a_lease_and_attempts_are_limited() {
    for outbox in Outbox::ends().await {
        reset(&outbox, "pending").await;
        let row = "SELECT concat_ws(' ', status, retry_count, version, locked_by IS NOT NULL,
                                    round(extract(epoch FROM next_retry_at - locked_at)))
                   FROM supply_batch_compensation";
        for attempt in 1..=3 {
            outbox.client.batch_execute("SELECT retry_compensation(1)").await.unwrap();
            let expected = format!("retrying {attempt} {} t 300", 2 * attempt);
            assert_eq!(one::<String>(&outbox.client, row, &[]).await, expected);
            assert_eq!(outbox.refusal("SELECT retry_compensation(1)").await, "OB002", "the lease holds");
            let end = "UPDATE supply_batch_compensation SET next_retry_at = now(), version = version + 1";
            outbox.client.batch_execute(end).await.unwrap();
        }
        assert_eq!(outbox.refusal("SELECT retry_compensation(1)").await, "OB002", "three attempts are all");
        outbox.client.batch_execute("SELECT mark_compensation_manual_required(1, 'used up')").await.unwrap();
        let left = "SELECT count(*) FROM supply_batch_compensation
                    WHERE locked_by IS NULL AND locked_at IS NULL AND next_retry_at IS NULL";
        assert_eq!(one::<i64>(&outbox.client, left, &[]).await, 1, "the lease is given back");

        reset(&outbox, "pending").await;
        outbox.client.batch_execute("SET outbox_relay.worker = 'one'; SELECT retry_compensation(1)").await.unwrap();
        outbox.client.batch_execute("SET outbox_relay.worker = 'two'").await.unwrap();
        assert_eq!(outbox.refusal("SELECT resolve_compensation(1, 1, '')").await, "OB003");
        assert_eq!(outbox.refusal("SELECT mark_compensation_manual_required(1, '')").await, "OB003");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_made_twice_do_what_one_does() {
    for outbox in Outbox::ends().await {
        reset(&outbox, "pending").await;
        assert_eq!(one::<i64>(&outbox.client, CREATE, &[]).await, 1, "the same item, not settled yet");
        let other = "SELECT create_compensation('batch', 'refund', 2, '{}', 'reason')";
        let other = one::<i64>(&outbox.client, other, &[]).await;
        assert_ne!(other, 1);

        for reason in ["second", "second", "third", "second", "econd"] {
            let call = format!("SELECT mark_compensation_manual_required(1, '{reason}')");
            outbox.client.batch_execute(&call).await.unwrap();
        }
        let row = "SELECT failure_reason || ' ' || version FROM supply_batch_compensation WHERE id = 1";
        let expected = "reason; second; third; second; econd 5";
        assert_eq!(one::<String>(&outbox.client, row, &[]).await, expected);
        let due = "SELECT string_agg(id::text, ' ') FROM get_pending_manual_compensations()";
        assert_eq!(one::<String>(&outbox.client, due, &[]).await, "1");

        for (who, notes) in [(5, "first"), (6, "again")] {
            let call = format!("SELECT resolve_compensation(1, {who}, '{notes}')");
            outbox.client.batch_execute(&call).await.unwrap();
        }
        let row = "SELECT resolved_by || resolution_notes || (resolved_at IS NOT NULL) || version
                   FROM supply_batch_compensation WHERE id = 1";
        assert_eq!(one::<String>(&outbox.client, row, &[]).await, "5firsttrue6");
        assert!(one::<i64>(&outbox.client, CREATE, &[]).await > other, "the first is settled: a new one");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_made_at_once_make_one_compensation() {
    let outbox = Outbox::new(PgVersion::V18).await;
    let (mut first, second) = (outbox.database.client().await, outbox.database.client().await);
    let tx = first.transaction().await.unwrap();
    let id: i64 = tx.query_one(CREATE, &[]).await.unwrap().get(0);
    let waiting = one::<i64>(&second, CREATE, &[]);
    tokio::pin!(waiting);
    assert!(tokio::time::timeout(Duration::from_millis(300), &mut waiting).await.is_err(), "it did not wait");
    tx.commit().await.unwrap();
    assert_eq!(waiting.await, id);
}
