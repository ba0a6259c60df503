//! Tables that were there before: of the older schema, and partitioned ones.

use outbox_relay::postgres::migrate::{SchemaState, migrate, state};
use tokio_postgres::Client;

use super::{code, column, one, outbox_events};
use crate::harness::postgres::{PgVersion, Postgres};

/// An outbox of the older kind: columns up to `version`, the index that stops HOT, `event_id` indexed twice, functions
/// of which two cannot be replaced in place, and things of the owner's own that must stay.
const OLDER: &str = "
    CREATE TABLE outbox_events (
        id bigserial PRIMARY KEY, aggregate_type varchar(64) NOT NULL, aggregate_id varchar(128) NOT NULL,
        event_type varchar(128) NOT NULL, event_id varchar(64) NOT NULL UNIQUE, payload jsonb NOT NULL,
        status varchar(20) NOT NULL DEFAULT 'pending'
            CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'dead_letter')),
        retry_count int NOT NULL DEFAULT 0, max_retries int NOT NULL DEFAULT 5, error_message text,
        created_at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz, next_retry_at timestamptz,
        dead_letter_reason text, version bigint NOT NULL DEFAULT 1, the_owners text DEFAULT 'x');
    CREATE INDEX named_by_someone ON outbox_events (status, next_retry_at) WHERE status IN ('pending', 'failed');
    CREATE INDEX named_by_someone_too ON outbox_events (event_id);
    CREATE INDEX by_aggregate ON outbox_events (aggregate_type, aggregate_id);
    CREATE INDEX by_time ON outbox_events (created_at);
    CREATE INDEX the_owners_index ON outbox_events (event_id, created_at);
    CREATE TABLE outbox_dead_letter (
        id bigserial PRIMARY KEY, original_event_id varchar(64) NOT NULL, original_aggregate_type varchar(64) NOT NULL,
        original_aggregate_id varchar(128) NOT NULL, event_type varchar(128) NOT NULL, payload jsonb NOT NULL,
        error_message text, retry_count int NOT NULL, first_failed_at timestamptz NOT NULL,
        dead_letter_at timestamptz NOT NULL DEFAULT now(), handled boolean NOT NULL DEFAULT false,
        handled_at timestamptz, handler_notes text, created_at timestamptz NOT NULL DEFAULT now());
    CREATE INDEX unhandled ON outbox_dead_letter (handled, dead_letter_at) WHERE handled = false;
    CREATE TABLE supply_batch_compensation (
        id bigserial PRIMARY KEY, batch_id varchar(64) NOT NULL, operation_type varchar(32) NOT NULL,
        item_index int NOT NULL, item_payload jsonb NOT NULL, failure_reason text,
        status varchar(20) NOT NULL DEFAULT 'pending', retry_count int NOT NULL DEFAULT 0,
        max_retries int NOT NULL DEFAULT 3, resolved_at timestamptz, resolved_by bigint, resolution_notes text,
        created_at timestamptz NOT NULL DEFAULT now(), updated_at timestamptz NOT NULL DEFAULT now(),
        created_by bigint, version bigint NOT NULL DEFAULT 1);
    CREATE FUNCTION get_outbox_stats() RETURNS TABLE (state text, number int) LANGUAGE sql AS 'SELECT ''x'', 1';
    CREATE FUNCTION mark_outbox_failed(event varchar, reason text) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
    CREATE FUNCTION mark_outbox_completed(p_event_id varchar(64)) RETURNS void LANGUAGE sql AS 'SELECT';
    REVOKE ALL ON FUNCTION mark_outbox_completed FROM PUBLIC;
    CREATE FUNCTION fetch_and_lock_outbox_events(p_limit int DEFAULT 100) RETURNS SETOF outbox_events
        LANGUAGE sql AS 'SELECT * FROM outbox_events';

    INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, retry_count,
                               next_retry_at, processed_at)
    VALUES ('new', 'a', '1', 't', '{}', 'pending', 0, NULL, NULL),
           ('lost', 'a', '1', 't', '{}', 'processing', 0, NULL, NULL),
           ('lost later', 'a', '1', 't', '{}', 'processing', 2, now() - interval '1 h', NULL),
           ('done', 'a', '1', 't', '{}', 'completed', 0, NULL, now()),
           ('due', 'a', '1', 't', '{}', 'failed', 1, now() - interval '1 s', NULL),
           ('not due', 'a', '1', 't', '{}', 'failed', 1, now() + interval '1 h', NULL),
           ('dead', 'a', '1', 't', '{}', 'dead_letter', 5, now(), NULL),
           ('no aggregate', '', '', 't', '{}', 'pending', 0, NULL, NULL);
    INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id, event_type,
                                    payload, retry_count, first_failed_at) VALUES ('dead', 'a', '1', 't', '{}', 5, now());
    INSERT INTO supply_batch_compensation (batch_id, operation_type, item_index, item_payload, status)
    VALUES ('b', 'o', 1, '{}', 'retrying'), ('b', 'o', 2, '{}', 'manual_required')";

async fn texts(client: &Client, sql: &str) -> Vec<String> {
    column(&client.query(sql, &[]).await.unwrap())
}

const OLD_ROWS: &str = "
    SELECT concat_ws('|', id, aggregate_type, aggregate_id, event_type, event_id, payload, status, retry_count,
                     max_retries, error_message, created_at, processed_at, next_retry_at, dead_letter_reason, version,
                     the_owners) FROM outbox_events ORDER BY id";
const INDEXES: &str = "SELECT indexname::text FROM pg_indexes WHERE tablename = 'outbox_events' ORDER BY 1";
const OLD_COLUMNS: &str = "
    SELECT concat_ws(' ', column_name, data_type, column_default, is_nullable) FROM information_schema.columns
    WHERE table_name = 'outbox_events' AND ordinal_position <= 16 ORDER BY ordinal_position";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_outbox_is_adopted_and_nothing_else_is_touched() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let mut client = database.client().await;
        client.batch_execute(OLDER).await.unwrap();
        let (rows, columns) = (texts(&client, OLD_ROWS).await, texts(&client, OLD_COLUMNS).await);
        assert!(matches!(state(&client, &outbox_events()).await.unwrap(), SchemaState::Behind { .. }));

        let report = migrate(&mut client, &outbox_events(), false).await.unwrap();
        assert_eq!((report.applied.len(), report.warnings), (5, vec![]));
        assert_eq!(state(&client, &outbox_events()).await.unwrap(), SchemaState::Current);
        assert_eq!(texts(&client, OLD_ROWS).await, rows);
        assert_eq!(texts(&client, OLD_COLUMNS).await, columns);
        assert_eq!(
            texts(&client, INDEXES).await,
            [
                "by_aggregate",
                "by_time",
                "outbox_events_coalesce_event_type_deduplication_key_idx",
                "outbox_events_event_id_key",
                "outbox_events_next_retry_at_idx",
                "outbox_events_pkey",
                "the_owners_index",
            ]
        );
        let checks = "SELECT conname::text FROM pg_constraint WHERE conrelid = 'outbox_events'::regclass
                      AND contype = 'c' ORDER BY 1";
        let expected = ["outbox_events_headers_check", "outbox_events_status_check", "outbox_events_tenant_id_check"];
        assert_eq!(texts(&client, checks).await, expected);
        let options: Vec<String> =
            one(&client, "SELECT reloptions FROM pg_class WHERE oid = 'outbox_events'::regclass", &[]).await;
        assert!(options.contains(&"fillfactor=50".to_owned()), "{options:?}");
        let public: bool =
            one(&client, "SELECT has_function_privilege('public', 'mark_outbox_completed(varchar)', 'EXECUTE')", &[])
                .await;
        assert!(!public, "a replaced function lost its grants");

        work_on(&client).await;
    }
}

/// The functions work on the rows that were there.
async fn work_on(client: &Client) {
    let fetch = "SELECT event_id::text FROM fetch_and_lock_outbox_events()";
    assert_eq!(texts(client, fetch).await, ["new", "lost", "lost later", "due", "no aggregate"]);
    assert_eq!(texts(client, fetch).await, [""; 0]);
    client.batch_execute("SELECT mark_outbox_completed('lost'), mark_outbox_failed('due', 'no')").await.unwrap();
    // Breaks today's constraints, and can be given up all the same.
    let fail = "UPDATE outbox_events SET max_retries = 1 WHERE event_id = 'no aggregate';
                SELECT mark_outbox_failed('no aggregate', 'no')";
    client.batch_execute(fail).await.unwrap();
    let stats = "SELECT status || ' ' || count FROM get_outbox_stats()";
    assert_eq!(texts(client, stats).await, ["completed 2", "dead_letter 2", "failed 2", "processing 2"]);
    assert_eq!(texts(client, "SELECT handled || ' ' || count FROM get_dead_letter_stats()").await, ["false 2"]);
    let manual = "SELECT item_index::text FROM get_pending_manual_compensations()";
    assert_eq!(texts(client, manual).await, ["2"]);
    // `retrying` without a lease: its lease has ended.
    client.batch_execute("SELECT retry_compensation(1)").await.unwrap();
    client.batch_execute("SELECT enqueue_outbox_event('a', '1', 't', '{}', 'key')").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_someone_stands_on_stays_and_what_stops_hot_is_reported() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let mut client = database.client().await;
    let setup = "
        CREATE TABLE outbox_events (id bigint PRIMARY KEY, event_id text NOT NULL, aggregate_type text, aggregate_id text,
            event_type text, payload jsonb, status text) WITH (fillfactor = 77);
        CREATE UNIQUE INDEX first ON outbox_events (event_id);
        CREATE UNIQUE INDEX second ON outbox_events (event_id);
        CREATE INDEX hashed ON outbox_events USING hash (event_id);
        CREATE TABLE refers (event_id text REFERENCES outbox_events (event_id));
        CREATE INDEX by_status ON outbox_events (status);
        CREATE INDEX open_ones ON outbox_events (id) WHERE status <> 'completed'";
    client.batch_execute(setup).await.unwrap();
    let report = migrate(&mut client, &outbox_events(), false).await.unwrap();
    let mut indexes = texts(&client, INDEXES).await;
    indexes.retain(|name| !name.starts_with("outbox_events_"));
    assert_eq!(indexes.len(), 4, "one of the two unique ones went, the one without a foreign key: {indexes:?}");
    let warnings = report.warnings.join("\n");
    assert_eq!(report.warnings.len(), 2, "{warnings}");
    assert!(warnings.contains(".by_status covers or is conditioned on status"), "{warnings}");
    assert!(warnings.contains(".open_ones covers or is conditioned on status"), "{warnings}");
    let options: Vec<String> =
        one(&client, "SELECT reloptions FROM pg_class WHERE oid = 'outbox_events'::regclass", &[]).await;
    assert!(options.contains(&"fillfactor=77".to_owned()), "the owner's setting: {options:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partitioned_table_works_as_far_as_it_can() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let mut client = database.client().await;
        let setup = "
            CREATE TABLE outbox_events (id bigserial, event_id varchar(64) NOT NULL, aggregate_type varchar(64),
                aggregate_id varchar(128), event_type varchar(128), payload jsonb,
                created_at timestamptz NOT NULL DEFAULT now(), status text DEFAULT 'pending', next_retry_at timestamptz,
                PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at);
            CREATE INDEX old ON outbox_events (status, next_retry_at);
            CREATE TABLE part PARTITION OF outbox_events FOR VALUES FROM ('2020-01-01') TO ('2100-01-01');
            CREATE INDEX old_too ON part (event_id, status)";
        client.batch_execute(setup).await.unwrap();
        let report = migrate(&mut client, &outbox_events(), false).await.unwrap();
        let warnings = report.warnings.join("\n");
        assert_eq!(report.warnings.len(), 3, "{warnings}");
        for part in ["event_id cannot be unique", "with a deduplication key does not work", ".old_too covers"] {
            assert!(warnings.contains(part), "{part}: {warnings}");
        }
        assert_eq!(state(&client, &outbox_events()).await.unwrap(), SchemaState::Current);
        let options: Vec<String> =
            one(&client, "SELECT reloptions FROM pg_class WHERE oid = 'part'::regclass", &[]).await;
        assert!(options.contains(&"fillfactor=50".to_owned()), "{options:?}");
        let old: Option<String> = one(&client, "SELECT to_regclass('old')::text", &[]).await;
        assert_eq!(old, None);

        let work =
            "SELECT enqueue_outbox_event('a', '1', 't', '{}', p_event_id => 'e' || n) FROM generate_series(1, 3) n";
        client.batch_execute(work).await.unwrap();
        let fetch = "SELECT event_id::text FROM fetch_and_lock_outbox_events(2)";
        assert_eq!(texts(&client, fetch).await, ["e1", "e2"]);
        client.batch_execute("SELECT mark_outbox_completed('e1'), mark_outbox_failed('e2', 'no')").await.unwrap();
        let keyed = "SELECT enqueue_outbox_event('a', '1', 't', '{}', 'key')";
        assert_eq!(code(&client.batch_execute(keyed).await.unwrap_err()), "42P10");
    }
}
