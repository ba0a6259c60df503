//! The main job: what is committed is in the stream, once, in order, as it was, and its row says so.

use std::collections::{BTreeMap, HashMap};

use crate::harness::nats::NatsVersion;
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{DELIVERED, Scene, counter, publishes};
use crate::harness::stream::Stored;
use crate::harness::wait::eventually;

/// Rows of each way to commit them.
const ROWS: i64 = 2000;
const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_once_and_in_order_postgres_15_nats_2_10() {
    every_row_once_and_in_order(PgVersion::V15, NatsVersion::V2_10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_once_and_in_order_postgres_15_nats_2_15() {
    every_row_once_and_in_order(PgVersion::V15, NatsVersion::V2_15).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_once_and_in_order_postgres_18_nats_2_10() {
    every_row_once_and_in_order(PgVersion::V18, NatsVersion::V2_10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_once_and_in_order_postgres_18_nats_2_15() {
    every_row_once_and_in_order(PgVersion::V18, NatsVersion::V2_15).await;
}

async fn every_row_once_and_in_order(postgres: PgVersion, nats: NatsVersion) {
    let scene = Scene::on(postgres, nats).await;
    let relay = scene.relay().await;
    scene.sql(&insert_committing_every(1)).await;
    scene.sql(&insert_committing_every(500)).await;
    scene.wait_completed(2 * ROWS).await;

    let rows = rows(&scene).await;
    let stored = scene.stored().await;
    assert_eq!(stored.len(), rows.len(), "each row is in the stream once");
    let by_id: HashMap<&str, &Row> = rows.iter().map(|row| (&*row.event_id, row)).collect();
    let mut last_of_aggregate = HashMap::new();
    let mut places = Vec::new();
    for message in &stored {
        let row = by_id[message.id()];
        assert_eq!(message.payload, row.payload, "row {}", row.id);
        assert_eq!(message.subject, row.subject(&scene.space.prefix), "row {}", row.id);
        check_headers(&scene, message, row);
        let last = last_of_aggregate.insert((&row.tenant_id, &row.aggregate_id), row.id);
        assert!(last < Some(row.id), "row {} came after {last:?} of its aggregate", row.id);
        places.push((position(message), row.id));
    }
    places.sort_unstable();
    assert!(places.is_sorted_by_key(|&(_, id)| id), "positions are in the order of commits");
    let indexes: Vec<u64> = places.iter().map(|((_, index), _)| *index).collect();
    let expected: Vec<u64> = (0..ROWS).map(|_| 0).chain((0..ROWS).map(|row| row.cast_unsigned() % 500)).collect();
    assert_eq!(indexes, expected, "positions count the rows of a transaction");
    let commits: BTreeMap<u64, usize> = places.iter().fold(BTreeMap::new(), |mut commits, ((commit, _), _)| {
        *commits.entry(*commit).or_default() += 1;
        commits
    });
    assert_eq!(commits.len(), 2004, "each transaction has a position of its own");

    let unfinished = "SELECT count(*) FROM outbox_events WHERE (status, version, retry_count) <> ('completed', 2, 0)
        OR processed_at IS NULL OR processed_at < created_at OR updated_at <> processed_at
        OR num_nonnulls(next_retry_at, locked_by, locked_at, error_code, error_message, first_failed_at) > 0";
    assert_eq!(scene.number(unfinished).await, 0);
    assert_eq!(publishes(&relay, "stored").await, 4000);
    assert_eq!(publishes(&relay, "duplicate").await, 0);
    assert!(!relay.log().contains("secret-of-a-row"), "row values never reach the log");
}

/// A `DO` block that commits after each `size` rows. The payloads have what a parser in between would change.
fn insert_committing_every(size: i64) -> String {
    format!(
        r#"DO $$ BEGIN
        FOR i IN 1..{ROWS} LOOP
            INSERT INTO outbox_events (tenant_id, aggregate_type, aggregate_id, event_type, payload, headers)
            VALUES (CASE WHEN i % 3 = 0 THEN 'Zoë & Co' END, 'shop.order', 'order ' || i % 37, 'paid late',
                jsonb_build_object('n', i, 'note', 'secret-of-a-row', 'sum', (i || '.10')::numeric, 'none', NULL),
                CASE WHEN i % 2 = 0 THEN '{{"traceparent": "{TRACE}", "Shop": "Köln"}}' ELSE '{{}}' END::jsonb);
            IF i % {size} = 0 THEN COMMIT; END IF;
        END LOOP;
        END $$"#
    )
}

#[derive(Debug)]
struct Row {
    id: i64,
    event_id: String,
    tenant_id: Option<String>,
    aggregate_type: String,
    aggregate_id: String,
    event_type: String,
    payload: String,
    created_at: String,
}

impl Row {
    fn subject(&self, prefix: &str) -> String {
        format!("{prefix}.{}.{}", self.aggregate_type, self.event_type.replace(' ', "%20"))
    }
}

async fn rows(scene: &Scene) -> Vec<Row> {
    let query = "SELECT id, event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload::text,
        to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US') FROM outbox_events ORDER BY id";
    let rows = scene.client.query(query, &[]).await.unwrap();
    rows.iter()
        .map(|row| Row {
            id: row.get(0),
            event_id: row.get(1),
            tenant_id: row.get(2),
            aggregate_type: row.get(3),
            aggregate_id: row.get(4),
            event_type: row.get(5),
            payload: row.get(6),
            created_at: row.get(7),
        })
        .collect()
}

/// All headers of the contract, and no others.
fn check_headers(scene: &Scene, message: &Stored, row: &Row) {
    let mut headers: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, value) in &message.headers {
        assert_eq!(headers.insert(name, value), None, "{name} comes once");
    }
    headers.remove("Outbox-Position").expect("Outbox-Position");
    let time = headers.remove("ce-time").expect("ce-time");
    // RFC 3339 may leave out zeros at the end.
    let (seconds, fraction) = time.strip_suffix('Z').expect("UTC").split_once('.').unwrap_or((time, ""));
    let same = format!("{}.{fraction:0<6}", seconds.trim_end_matches('Z').replace('T', " "));
    assert_eq!(same, row.created_at, "ce-time {time}");
    let encoded = |text: &str| text.replace(' ', "%20").replace('ë', "%C3%AB");
    let (event_type, aggregate_id) = (encoded(&row.event_type), encoded(&row.aggregate_id));
    let tenant_id = row.tenant_id.as_deref().map(encoded);
    let mut expected = BTreeMap::from([
        ("Nats-Msg-Id", &*row.event_id),
        ("Nats-Expected-Stream", &*scene.space.stream),
        ("Content-Type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-id", &*row.event_id),
        ("ce-source", "/outbox-relay"),
        ("ce-type", &*event_type),
        ("ce-subject", &*aggregate_id),
        ("ce-aggregatetype", &*row.aggregate_type),
    ]);
    expected.extend(tenant_id.as_deref().map(|tenant_id| ("ce-tenantid", tenant_id)));
    if row.payload.contains("secret") && headers.contains_key("Shop") {
        expected.extend([("traceparent", TRACE), ("Shop", "Köln")]);
    }
    assert_eq!(headers, expected, "row {}", row.id);
}

/// `Outbox-Position`, as numbers: where the commit lies, and which of its rows this is.
fn position(message: &Stored) -> (u64, u64) {
    let position = message.header("Outbox-Position").expect("Outbox-Position");
    let parts: Vec<&str> = position.split('/').collect();
    let [high, low, index] = parts[..] else { panic!("{position}") };
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    (hex(high) << 32 | hex(low), index.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_ordering_the_whole_stream_is_in_commit_order_and_leaves_no_row_behind() {
    let scene = Scene::new().await;
    let relay = scene.relay_with(&scene.settings.clone().set("delivery.ordering", "none")).await;
    scene.sql(&insert_committing_every(100)).await;
    scene.wait_completed(ROWS).await;
    // Nothing failed, so nothing was sent again: what one publisher sends arrives in its order.
    assert_eq!(publishes(&relay, "transient").await, 0);
    assert_eq!(scene.ids().await, scene.texts("SELECT event_id FROM outbox_events ORDER BY id").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delivered_rows_are_deleted_when_that_is_wished() {
    let scene = Scene::new().await;
    let relay = scene.relay_with(&scene.settings.clone().set("writeback.on_success", "delete")).await;
    // What someone has completed is not the relay's to delete.
    scene
        .sql(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status)
              VALUES ('order', 'kept', 'paid', '{}', 'completed')",
        )
        .await;
    scene.sql(&insert_committing_every(500)).await;
    scene.wait_number("SELECT count(*) FROM outbox_events", 1).await;
    assert_eq!(scene.texts("SELECT aggregate_id FROM outbox_events").await, ["kept"]);
    let mut ids = scene.ids().await;
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((ids.len(), scene.count().await), (2000, 2000), "every row is in the stream once");
    // Their deletion is the outcome; they are not taken for rows that someone else deleted.
    assert_eq!(counter(&relay, "events_without_row").await, 0);
    let deleted = "writeback_rows{status=\"deleted\"}";
    eventually(DELIVERED, "the rows count as deleted", async || counter(&relay, deleted).await == 2000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_write_back_is_one_hot_update_a_row() {
    const COUNT: i64 = 20_000;
    let scene = Scene::new().await;
    let mut relay = scene.relay().await;
    scene
        .sql(&format!(
            "DO $$ BEGIN
            FOR i IN 1..{COUNT} / 100 LOOP
                INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                SELECT 'order', i || '-' || j, 'paid', jsonb_build_object('n', i, 'text', repeat('x', 300))
                FROM generate_series(1, 100) j;
                COMMIT;
            END LOOP;
            END $$"
        ))
        .await;
    scene.wait_completed(COUNT).await;
    // A session's statistics are all counted when it has ended.
    assert!(relay.terminate(DELIVERED).await.success());
    let updates = "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'outbox_events'";
    eventually(DELIVERED, "the updates are counted", async || scene.number(updates).await >= COUNT).await;
    let updates = scene.number(updates).await;
    let hot = scene.number("SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'outbox_events'").await;
    assert!(updates * 100 <= COUNT * 105, "{updates} updates for {COUNT} rows");
    assert!(hot * 100 >= updates * 80, "{hot} of {updates} updates are HOT");
}
