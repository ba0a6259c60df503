//! Values that systems of this kind have altered or choked on: they pass as PostgreSQL prints them, from the table
//! (before the slot is there) and from the log.

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{Scene, publishes};

/// `jsonb` expressions. The larger ones stay below what NATS takes by default, 1 MiB.
const PAYLOADS: &[&str] = &[
    r#"'{"id":9007199254740993,"d":0.1234567890123456789}'"#,
    "'[1.0, 1.50, -0, -0.0, 1e2, 1E+300, 1e-30, 12345678901234567890123456789012345678901234567890.10]'",
    "'1e1000'",
    "'null'",
    r#"'""'"#,
    "'[]'",
    "'{}'",
    "'false'",
    r#"'{"a":[],"b":null,"c":{},"d":[[]],"e":"","f":[null],"":0}'"#,
    r#"'{"zz": 1, "a": 2, "B": 3, "a": 4, "longer key": 5}'"#,
    r#"'"\u00e9 \ud83d\ude00 \u2028 \u007f \u0001 \\ \" \/ \n\r\t \\u0041 é 😀 </script>"'"#,
    "to_jsonb(repeat('a\"\\é' || chr(10), 50000))",
    "(SELECT jsonb_agg(jsonb_build_array(i, jsonb_build_array(), jsonb_build_array(i::text, NULL))) FROM generate_series(1, 33000) i)",
    "(repeat('[', 3000) || repeat(']', 3000))::jsonb",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_are_the_bytes_that_postgresql_prints() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let statements: Vec<String> = PAYLOADS
            .iter()
            .map(|payload| {
                format!(
                    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                     VALUES ('order', '1', 'paid', {payload});"
                )
            })
            .collect();
        let statements = statements.concat();
        scene.sql(&statements).await;
        let relay = scene.relay().await;
        scene.sql(&statements).await;
        scene.wait_completed(i64::try_from(2 * PAYLOADS.len()).unwrap()).await;

        let bodies = scene.texts("SELECT payload::text FROM outbox_events ORDER BY id").await;
        assert_eq!(bodies[0], r#"{"d": 0.1234567890123456789, "id": 9007199254740993}"#);
        assert!(bodies.iter().any(|body| body.len() > 900_000), "a large one is among them");
        let stored = scene.stored().await;
        assert_eq!(stored.len(), bodies.len());
        for (message, body) in stored.iter().zip(&bodies) {
            // Not assert_eq: some are long.
            assert!(message.payload == body, "stored {:.200?} for {body:.200}", message.payload);
        }
        assert_eq!(publishes(&relay, "poison").await, 0);
    }
}

/// `created_at`, and the `ce-time` that RFC 3339 has for it: years 0000 to 9999, and no infinity.
const TIMES: &[(&str, Option<&str>)] = &[
    ("infinity", None),
    ("-infinity", None),
    ("0044-03-15 12:00:00+00 BC", None),
    ("294276-12-31 23:59:59.999999+00", None),
    ("10000-01-01 00:00:00+00", None),
    ("9999-12-31 23:59:59.999999+00", Some("9999-12-31T23:59:59.999999Z")),
    ("0001-01-01 00:00:00+00", Some("0001-01-01T00:00:00Z")),
    ("1815-06-18 11:35:00+00:18", Some("1815-06-18T11:17:00Z")),
    ("2026-11-29 12:34:56.5+05:30", Some("2026-11-29T07:04:56.5Z")),
    ("2000-01-01 00:00:00+00", Some("2000-01-01T00:00:00Z")),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn infinite_and_far_dates_are_delivered() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        // The relay's sessions do not take over how the database shows times.
        let database = &scene.database.name;
        scene
            .sql(&format!(
                "ALTER DATABASE {database} SET timezone = 'Asia/Kolkata';
                 ALTER DATABASE {database} SET datestyle = 'German';"
            ))
            .await;
        let statements: Vec<String> = TIMES
            .iter()
            .map(|(time, _)| {
                format!(
                    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
                     VALUES ('order', '1', 'paid', '{{}}', '{time}');"
                )
            })
            .collect();
        let statements = statements.concat();
        scene.sql(&statements).await;
        let relay = scene.relay().await;
        scene.sql(&statements).await;
        scene.wait_completed(i64::try_from(2 * TIMES.len()).unwrap()).await;
        let stored = scene.stored().await;
        let times: Vec<Option<&str>> = stored.iter().map(|message| message.header("ce-time")).collect();
        let expected: Vec<Option<&str>> = TIMES.iter().chain(TIMES).map(|(_, time)| *time).collect();
        assert_eq!(times, expected);
        assert_eq!(publishes(&relay, "poison").await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn columns_added_and_dropped_while_streaming_neither_stop_the_relay_nor_lose_rows() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        let relay = scene.relay().await;
        let mut number = 0;
        let mut insert = || {
            number += 1;
            format!(
                "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                 VALUES ('{number}', 'order', '1', 'paid', '{{\"n\": {number}}}');"
            )
        };
        for change in [
            "ADD COLUMN extra text DEFAULT 'x'",
            "ADD COLUMN number int, ADD COLUMN rewritten float DEFAULT random()",
            "DROP COLUMN extra",
            "ADD COLUMN extra jsonb NOT NULL DEFAULT '{}'",
            "RENAME COLUMN number TO status_code",
            "ALTER COLUMN event_type TYPE text",
            "DROP COLUMN rewritten",
            // Not needed from the log: the relay goes on without it.
            "DROP COLUMN max_retries, ADD COLUMN max_retries int NOT NULL DEFAULT 5",
        ] {
            let change = format!("ALTER TABLE outbox_events {change};");
            // In the middle of a transaction, between transactions, and rolled back.
            let (one, two, undone, three) =
                (insert(), insert(), "ALTER TABLE outbox_events ADD COLUMN undone int;", insert());
            scene.sql(&format!("BEGIN; {one} {change} {two} COMMIT")).await;
            scene.sql(&format!("BEGIN; SAVEPOINT s; {undone} ROLLBACK TO s; {three} COMMIT")).await;
            scene.sql(&insert()).await;
        }
        scene.wait_completed(32).await;
        let ids: Vec<String> = (1..=32).map(|number| number.to_string()).collect();
        assert_eq!(scene.ids().await, ids);
        for (message, number) in scene.stored().await.iter().zip(1..) {
            assert_eq!(message.payload, format!("{{\"n\": {number}}}"));
        }
        // Only write-back may have been in the way of a change, and given up its lock.
        assert!(!relay.log().contains("the slot is ours"), "a restart: {}", relay.log());
        assert_eq!(publishes(&relay, "poison").await, 0);
    }
}
