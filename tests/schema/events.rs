//! Enqueueing and marking events, by SQL.

use std::time::Duration;

use tokio_postgres::Client;

use super::{Outbox, code, one};
use crate::harness::postgres::PgVersion;
use crate::harness::wait::eventually;

const SOON: Duration = Duration::from_secs(10);

async fn call(client: &Client, arguments: &str) -> Result<String, String> {
    let row = client.query_one(&format!("SELECT enqueue_outbox_event('order', '7', 'placed', {arguments})"), &[]).await;
    row.map(|row| row.get(0)).map_err(|error| code(&error))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_stands_for_one_payload() {
    for outbox in Outbox::ends().await {
        let client = &outbox.client;
        let first = call(client, r#"'{"a": 1, "b": [2]}', 'key', 'tenant', '{"h": "x"}'"#).await.unwrap();
        assert_eq!(
            call(client, r#"'{ "b":[2],"a":1 }', 'key', 'tenant'"#).await,
            Ok(first.clone()),
            "spaces and order"
        );
        assert_eq!(call(client, r"'{}', 'key', 'tenant'").await, Err("OB001".to_owned()));
        // Another tenant, no tenant, no key: other events.
        for arguments in ["'{}', 'key', 'other'", "'{}', 'key'", "'{}'", "'{}'", "'{}', NULL, 'tenant'"] {
            assert_ne!(call(client, arguments).await.unwrap(), first);
        }
        let other_type = "SELECT enqueue_outbox_event('order', '7', 'paid', '{}', 'key', 'tenant')::text";
        assert_ne!(one::<String>(client, other_type, &[]).await, first);

        // The hash of a row that was inserted without one is computed.
        outbox.insert("plain", ", deduplication_key", ", 'k2'").await;
        assert_eq!(call(client, "'{}', 'k2'").await.unwrap(), "plain");
        assert_eq!(call(client, "'[]', 'k2'").await, Err("OB001".to_owned()));

        // The key is free again once its row is gone, whatever its payload was.
        client.batch_execute("DELETE FROM outbox_events WHERE event_id = 'plain'").await.unwrap();
        assert_ne!(call(client, "'[]', 'k2'").await.unwrap(), "plain");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_id_is_used_once_and_bad_values_are_refused() {
    for outbox in Outbox::ends().await {
        let client = &outbox.client;
        assert_eq!(call(client, "'{}', p_event_id => 'e1'").await.unwrap(), "e1");
        assert_eq!(call(client, "'{}', p_event_id => 'e1'").await, Err("23505".to_owned()));
        assert_eq!(call(client, "'{}', 'new key', p_event_id => 'e1'").await, Err("23505".to_owned()));
        assert_eq!(call(client, "'{}', 'key', p_event_id => 'e2'").await.unwrap(), "e2");
        assert_eq!(call(client, "'{}', 'key', p_event_id => 'e2'").await.unwrap(), "e2", "the same call again");
        assert_eq!(call(client, "'{}', 'key', p_event_id => 'e1'").await.unwrap(), "e2", "the key comes first");
        for (arguments, expected) in [
            ("NULL", "23502"),
            ("'{}', p_event_id => 'a b'", "23514"),
            ("'{}', p_event_id => repeat('x', 65)", "22001"),
            ("'{}', p_tenant_id => ''", "23514"),
            ("'{}', p_headers => '{\"a\": 1}'", "23514"),
        ] {
            assert_eq!(call(client, arguments).await, Err(expected.to_owned()), "{arguments}");
        }
        let row =
            "SELECT concat_ws(' ', status, retry_count, max_retries, headers, version, next_retry_at, payload_hash)
                   FROM outbox_events WHERE event_id = 'e1'";
        assert_eq!(one::<String>(client, row, &[]).await, "pending 0 5 {} 1");
        assert_eq!(call(client, "'{}', p_headers => NULL").await.map(|id| id.len()), Ok(36));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_callers_at_once_one_inserts_and_the_other_gets_its_id() {
    for outbox in Outbox::ends().await {
        let (mut first, second) = (outbox.database.client().await, outbox.database.client().await);
        for commits in [true, false] {
            let key = format!("'{{}}', 'key {commits}'");
            let tx = first.transaction().await.unwrap();
            let sql = format!("SELECT enqueue_outbox_event('order', '7', 'placed', {key})");
            let id: String = tx.query_one(&sql, &[]).await.unwrap().get(0);
            let waiting = call(&second, &key);
            tokio::pin!(waiting);
            let early = tokio::time::timeout(Duration::from_millis(300), &mut waiting).await;
            assert!(early.is_err(), "it did not wait for the open transaction: {early:?}");
            let ended = if commits { tx.commit().await } else { tx.rollback().await };
            ended.unwrap();
            let got = waiting.await.unwrap();
            assert_eq!(got == id, commits);
            let count = "SELECT count(*) FROM outbox_events WHERE deduplication_key = $1";
            assert_eq!(one::<i64>(&second, count, &[&format!("key {commits}")]).await, 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn marks_are_taken_only_from_the_states_that_allow_them() {
    let statuses = ["pending", "processing", "completed", "failed", "dead_letter"];
    let completed = ["completed", "completed", "completed", "completed", "OB002"];
    let failed = ["failed", "failed", "OB002", "OB002", "OB002"];
    for outbox in Outbox::ends().await {
        for (call, outcomes) in [("mark_outbox_completed('e')", completed), ("mark_outbox_failed('e', 'no')", failed)] {
            for (status, expected) in statuses.into_iter().zip(outcomes) {
                outbox.client.batch_execute("DELETE FROM outbox_events").await.unwrap();
                outbox.insert("e", ", status, locked_by", &format!(", '{status}', 'w'")).await;
                let call = format!("SELECT {call}");
                if expected == "OB002" {
                    assert_eq!(outbox.refusal(&call).await, expected, "{call} from {status}");
                    assert_eq!(outbox.status("e").await, status);
                    continue;
                }
                outbox.client.batch_execute(&call).await.unwrap();
                assert_eq!(outbox.status("e").await, expected, "{call} from {status}");
                let row = "SELECT version || ' ' || (updated_at > created_at) || ' ' || (processed_at IS NOT NULL)
                           || ' ' || (next_retry_at IS NOT NULL) FROM outbox_events WHERE locked_by IS NULL OR version = 1";
                let row: String = one(&outbox.client, row, &[]).await;
                let unchanged = status == expected;
                let (processed, due) = (expected == "completed" && !unchanged, expected == "failed");
                assert_eq!(row, format!("{} {} {processed} {due}", if unchanged { 1 } else { 2 }, !unchanged));
            }
        }
        // Unknown events are no error: a row may be gone by the time it is marked.
        let unknown = "SELECT mark_outbox_completed('nobody'), mark_outbox_failed('nobody', 'no')";
        outbox.client.batch_execute(unknown).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_failures_make_one_dead_letter_that_knows_the_first() {
    for outbox in Outbox::ends().await {
        let client = &outbox.client;
        let insert = "SELECT enqueue_outbox_event('a', '1', 't', '{\"x\": 1}', NULL, 'tenant', '{\"h\": \"v\"}', 'e');
                      UPDATE outbox_events SET created_at = now() - interval '1 day'";
        client.batch_execute(insert).await.unwrap();
        let mut first_failed = None;
        for attempt in 1..=5 {
            assert_eq!(outbox.fetch(10).await, ["e"]);
            client.batch_execute(&format!("SELECT mark_outbox_failed('e', 'reason {attempt}')")).await.unwrap();
            let at: String = one(client, "SELECT first_failed_at::text FROM outbox_events", &[]).await;
            assert_eq!(*first_failed.get_or_insert(at.clone()), at, "the first failure stays the first");
            let row = "SELECT concat_ws(' ', status, retry_count, version, error_message, '|',
                                        round(extract(epoch FROM next_retry_at - updated_at)), dead_letter_reason)
                       FROM outbox_events";
            let row: String = one(client, row, &[]).await;
            let (status, rest) = if attempt < 5 {
                ("failed", (1 << attempt).to_string())
            } else {
                ("dead_letter", "reason 5".to_owned())
            };
            assert_eq!(row, format!("{status} {attempt} {} reason {attempt} | {rest}", 2 * attempt + 1));
            assert_eq!(outbox.fetch(10).await, [""; 0], "taken before its time");
            client
                .batch_execute("UPDATE outbox_events SET next_retry_at = now() WHERE status = 'failed'")
                .await
                .unwrap();
        }
        let letter =
            "SELECT concat_ws(' ', original_event_id, original_aggregate_type, original_aggregate_id, tenant_id,
                             event_type, payload, headers, error_message, retry_count, handled) || ' ' ||
                             (first_failed_at::text = $1) FROM outbox_dead_letter";
        let letter: String = one(client, letter, &[&first_failed.unwrap()]).await;
        assert_eq!(letter, r#"e a 1 tenant t {"x": 1} {"h": "v"} reason 5 5 f true"#);
        assert_eq!(outbox.refusal("SELECT mark_outbox_completed('e')").await, "OB002");

        // The wait grows to a minute and no further, however often the row failed.
        outbox.insert("old", ", retry_count, max_retries", ", 2000000000, 2100000000").await;
        let wait =
            "SELECT extract(epoch FROM next_retry_at - updated_at)::int FROM outbox_events WHERE event_id = 'old'";
        client.batch_execute("SELECT mark_outbox_failed('old', 'no')").await.unwrap();
        assert_eq!(one::<i32>(client, wait, &[]).await, 60);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_reported_at_once_count_once() {
    for outbox in Outbox::ends().await {
        outbox.insert("e", ", retry_count", ", 4").await;
        let mut holder = outbox.database.client().await;
        let hold = holder.transaction().await.unwrap();
        hold.batch_execute("SELECT FROM outbox_events FOR UPDATE").await.unwrap();
        let mut callers = Vec::new();
        for _ in 0..8 {
            let client = outbox.database.client().await;
            callers.push(tokio::spawn(async move {
                client.batch_execute("SELECT mark_outbox_failed('e', 'no')").await.map_err(|error| code(&error))
            }));
        }
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                       AND wait_event_type = 'Lock'";
        eventually(SOON, "all wait", async || one::<i64>(&outbox.client, waiting, &[]).await == 8).await;
        hold.commit().await.unwrap();
        let mut outcomes = Vec::new();
        for caller in callers {
            outcomes.push(caller.await.unwrap());
        }
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1, "{outcomes:?}");
        assert!(
            outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).all(|code| code == "OB002"),
            "{outcomes:?}"
        );
        assert_eq!(one::<i64>(&outbox.client, "SELECT count(*) FROM outbox_dead_letter", &[]).await, 1);
        assert_eq!(one::<i32>(&outbox.client, "SELECT retry_count FROM outbox_events", &[]).await, 5);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statistics_count() {
    for outbox in Outbox::ends().await {
        for (event_id, status) in [("a", "pending"), ("b", "pending"), ("c", "completed")] {
            outbox.insert(event_id, ", status", &format!(", '{status}'")).await;
        }
        let letters =
            "INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id,
                           event_type, payload, retry_count, first_failed_at, handled)
                       SELECT 'e', 'a', '1', 't', '{}', 5, now(), n = 1 FROM generate_series(1, 3) n";
        outbox.client.batch_execute(letters).await.unwrap();
        let sql = "SELECT string_agg(status || ' ' || count, ', ') FROM get_outbox_stats()";
        assert_eq!(one::<String>(&outbox.client, sql, &[]).await, "completed 1, pending 2");
        let sql = "SELECT string_agg(handled || ' ' || count, ', ') FROM get_dead_letter_stats()";
        assert_eq!(one::<String>(&outbox.client, sql, &[]).await, "false 2, true 1");
    }
}

/// Nothing on the caller's search_path, or put into its way, changes what the functions do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_functions_do_not_follow_the_callers_search_path() {
    let outbox = Outbox::new(PgVersion::V18).await;
    let trap = "
        CREATE SCHEMA trap;
        CREATE FUNCTION trap.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2000-01-01''::timestamptz';
        CREATE FUNCTION trap.gen_random_uuid() RETURNS uuid LANGUAGE sql AS 'SELECT NULL::uuid';
        CREATE TEMP TABLE outbox_events (LIKE public.outbox_events);
        SET search_path = trap, pg_catalog;
        SELECT public.enqueue_outbox_event('a', '1', 't', '{}');
        SELECT public.mark_outbox_failed(event_id, 'no') FROM public.outbox_events;
        RESET search_path";
    outbox.client.batch_execute(trap).await.unwrap();
    let row = "SELECT status || ' ' || (updated_at > '2001-01-01') FROM public.outbox_events";
    assert_eq!(one::<String>(&outbox.client, row, &[]).await, "failed true");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn completing_rows_is_a_hot_update() {
    for outbox in Outbox::ends().await {
        let client = &outbox.client;
        let insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                      SELECT 'order', n::text, 'placed', jsonb_build_object('text', repeat('x', 300))
                      FROM generate_series(1, 2000) n";
        client.batch_execute(insert).await.unwrap();
        for batch in 0..20 {
            let complete = format!(
                "UPDATE outbox_events SET status = 'completed', processed_at = now(), updated_at = now(),
                                          version = version + 1 WHERE id BETWEEN {} AND {}",
                batch * 100 + 1,
                batch * 100 + 100
            );
            client.batch_execute(&complete).await.unwrap();
        }
        client.batch_execute("SELECT pg_stat_force_next_flush()").await.unwrap();
        let sql = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_all_tables WHERE relid = 'outbox_events'::regclass";
        let row = client.query_one(sql, &[]).await.unwrap();
        let (updates, hot): (i64, i64) = (row.get(0), row.get(1));
        assert_eq!(updates, 2000);
        assert!(hot * 100 >= updates * 95, "{hot} of {updates} are HOT");
    }
}
