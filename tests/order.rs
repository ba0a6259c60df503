//! The order of an aggregate's events while one of them fails, and what becomes of the one that fails.

use std::time::Duration;

use async_nats::jetstream::stream::Config;
use rustix::process::Signal;

use crate::harness::nats::{Nats, NatsVersion, PERMITTING, Space, denying};
use crate::harness::outbox;
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{DELIVERED, Scene, counter, publishes};
use crate::harness::wait::{always, eventually};

/// A NATS server that refuses events of the type `refused`, and an outbox before it whose refused rows are tried again
/// soon.
async fn scene(postgres: PgVersion, nats: NatsVersion) -> (Nats, Scene) {
    let space = Space::new();
    let nats = Nats::start_with(nats, &denying(&format!("{}.order.refused", space.prefix))).await;
    let mut scene = Scene::before(postgres, &nats, space).await;
    scene.settings = scene.settings.set("retry.initial", "500ms").set("retry.max", "1s");
    scene.settings = scene.settings.set("reconcile.interval", "100ms");
    (nats, scene)
}

/// Inserts one event after the other, in one transaction: `(event_id, aggregate_id, event_type)`.
async fn insert(scene: &Scene, max_retries: i32, events: &[(&str, &str, &str)]) {
    let statement = |(event, aggregate, kind): &(&str, &str, &str)| {
        format!(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, max_retries)
             VALUES ('{event}', 'order', '{aggregate}', '{kind}', '{{}}', {max_retries});"
        )
    };
    let statements: Vec<String> = events.iter().map(statement).collect();
    scene.sql(&format!("BEGIN; {} COMMIT", statements.concat())).await;
}

/// Waits until the row is held behind an earlier one of its aggregate.
async fn wait_held(scene: &Scene, event: &str) {
    let held = "SELECT count(*) FROM outbox_events WHERE status = 'pending' AND next_retry_at = 'infinity'";
    scene.wait_number(&format!("{held} AND event_id = '{event}'"), 1).await;
}

/// How many attempts were counted on the row.
async fn attempts(scene: &Scene, event: &str) -> i64 {
    scene.number(&format!("SELECT retry_count::int8 FROM outbox_events WHERE event_id = '{event}'")).await
}

/// Case 37.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn later_events_of_an_aggregate_wait_for_the_refused_one_and_others_do_not() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (mut nats, scene) = scene(postgres, nats).await;
        let _relay = scene.relay().await;
        let first = [("A", "a", "refused"), ("B1", "a", "fine"), ("B2", "a", "fine"), ("C", "c", "fine")];
        insert(&scene, 1000, &first).await;
        scene.wait_stored(1).await;
        wait_held(&scene, "B1").await;
        wait_held(&scene, "B2").await;
        // It comes when its aggregate is blocked already.
        insert(&scene, 1000, &[("B3", "a", "fine"), ("C2", "c", "fine")]).await;
        wait_held(&scene, "B3").await;
        eventually(DELIVERED, "A is tried again", async || attempts(&scene, "A").await >= 3).await;
        scene.wait_stored(2).await;
        assert_eq!(scene.ids().await, ["C", "C2"]);

        nats.reload(PERMITTING).await;
        scene.wait_completed(6).await;
        // Nothing is left behind that would hold what comes now.
        insert(&scene, 1000, &[("B4", "a", "fine")]).await;
        scene.wait_completed(7).await;
        assert_eq!(scene.ids().await, ["C", "C2", "A", "B1", "B2", "B3", "B4"]);
        assert_eq!(outbox::dead_letters(&scene.client).await, []);
    }
}

/// Someone else holds the lock of a row that is to be marked as failed, or held, and the relay is killed. What stands
/// in the table as held is released by the next one, which reads the others from the log.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_row_is_held_before_an_earlier_one_of_its_aggregate_that_someone_locks() {
    /// Rows that are held while an earlier one of their aggregate is not, and has not failed.
    const TOO_EARLY: &str = "SELECT count(*) FROM outbox_events late JOIN outbox_events early
        ON early.aggregate_id = late.aggregate_id AND early.id < late.id
        WHERE late.next_retry_at = 'infinity' AND early.status = 'pending' AND early.next_retry_at IS NULL";
    for (postgres, locked) in PgVersion::ENDS.into_iter().zip(["A", "B1"]) {
        let (mut nats, scene) = scene(postgres, NatsVersion::V2_15).await;
        let mut relay = scene.relay().await;
        relay.signal(Signal::STOP);
        insert(&scene, 1000, &[("A", "a", "refused"), ("B1", "a", "fine"), ("B2", "a", "fine"), ("C", "c", "fine")])
            .await;
        let mut holder = scene.database.client().await;
        let lock = holder.transaction().await.unwrap();
        let locks = "SELECT FROM outbox_events WHERE event_id = $1 FOR UPDATE";
        assert_eq!(lock.execute(locks, &[&locked]).await.unwrap(), 1);
        relay.signal(Signal::CONT);
        scene.wait_completed(1).await;
        eventually(DELIVERED, "A is refused", async || publishes(&relay, "poison").await >= 1).await;
        // They come when those before them are on their way to the table already, and few of them just when the locked
        // row is tried again.
        for (at, [event, other]) in (2..).zip([["B3", "D3"], ["B4", "D4"], ["B5", "D5"], ["B6", "D6"]]) {
            insert(&scene, 1000, &[(event, "a", "fine"), (other, "d", "fine")]).await;
            scene.wait_completed(at).await;
        }
        always(Duration::from_millis(500), "none is held too early", async || scene.number(TOO_EARLY).await == 0).await;
        relay.kill9().await;
        lock.rollback().await.unwrap();
        nats.reload(PERMITTING).await;
        let _relay = scene.relay().await;
        scene.wait_completed(12).await;
        let ids = ["C", "D3", "D4", "D5", "D6", "A", "B1", "B2", "B3", "B4", "B5", "B6"];
        assert_eq!(scene.ids().await, ids);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_order_holds_when_the_relay_is_killed_while_one_event_fails() {
    for slot_is_lost in [false, true] {
        let (mut nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
        // The failed row stays as it is until after the restarts.
        let slow = scene.settings.clone().set("retry.initial", "1h").set("retry.max", "1h");
        let mut relay = scene.relay_with(&slow).await;
        insert(&scene, 1000, &[("A", "a", "refused"), ("B1", "a", "fine"), ("C1", "c", "fine")]).await;
        wait_held(&scene, "B1").await;
        scene.wait_completed(1).await;
        relay.kill9().await;
        // One that no relay has seen yet comes to an aggregate that only the table shows as blocked.
        insert(&scene, 1000, &[("B2", "a", "fine"), ("C2", "c", "fine")]).await;
        if slot_is_lost {
            let drop = format!("SELECT pg_drop_replication_slot('{}')", scene.database.slot);
            eventually(DELIVERED, "the slot is dropped", async || scene.client.batch_execute(&drop).await.is_ok())
                .await;
        }
        let mut relay = scene.relay_with(&slow).await;
        wait_held(&scene, "B2").await;
        scene.wait_completed(2).await;
        // While the hold of a row may be decided, and not written yet.
        insert(&scene, 1000, &[("B3", "a", "fine"), ("C3", "c", "fine")]).await;
        scene.wait_stored(3).await;
        relay.kill9().await;
        let _relay = scene.relay_with(&slow).await;
        wait_held(&scene, "B3").await;
        scene.wait_completed(3).await;
        // An attempt that a kill kept from the table is made again.
        eventually(DELIVERED, "A's attempt is counted", async || attempts(&scene, "A").await == 1).await;
        assert_eq!(scene.ids().await, ["C1", "C2", "C3"]);

        nats.reload(PERMITTING).await;
        // Its time has come.
        scene.sql("UPDATE outbox_events SET next_retry_at = now() WHERE event_id = 'A'").await;
        scene.wait_completed(7).await;
        assert_eq!(scene.ids().await, ["C1", "C2", "C3", "A", "B1", "B2", "B3"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_refused_attempts_make_a_dead_letter_and_then_the_next_one_leaves() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (_nats, scene) = scene(postgres, nats).await;
        let relay = scene.relay().await;
        insert(&scene, 5, &[("A", "a", "refused"), ("B1", "a", "fine"), ("B2", "a", "fine")]).await;
        eventually(DELIVERED, "A is refused", async || attempts(&scene, "A").await > 0).await;
        let failed = scene.texts("SELECT first_failed_at::text FROM outbox_events WHERE event_id = 'A'").await;
        scene.wait_number("SELECT count(*) FROM outbox_dead_letter", 1).await;
        scene.wait_completed(2).await;

        assert_eq!(scene.ids().await, ["B1", "B2"]);
        assert_eq!(outbox::dead_letters(&scene.client).await, [("A".to_owned(), "permission_denied".to_owned())]);
        assert_eq!(scene.texts("SELECT first_failed_at::text FROM outbox_dead_letter").await, failed);
        assert_eq!(publishes(&relay, "poison").await, 5);
        let kept = "SELECT count(*) FROM outbox_dead_letter d JOIN outbox_events e ON e.event_id = d.original_event_id
            WHERE d.retry_count = 5 AND e.retry_count = 5 AND e.status = 'dead_letter' AND d.first_failed_at < d.dead_letter_at";
        assert_eq!(scene.number(kept).await, 1);
        // The times are those of the server's transactions: the successor's outcome comes after the dead letter.
        let after = "SELECT count(*) FROM outbox_events WHERE event_id LIKE 'B%'
            AND processed_at >= (SELECT dead_letter_at FROM outbox_dead_letter)";
        assert_eq!(scene.number(after).await, 2);
        assert_eq!(counter(&relay, "dead_letters{reason=\"permission_denied\"}").await, 1);
    }
}

const COUNTED: &str = "SELECT coalesce(sum(retry_count), 0)::int8 FROM outbox_events";

/// When nothing at all is accepted, it is not the events' fault.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_everything_is_refused_it_stops_counting_and_goes_on_when_it_may() {
    // As many refusals as are counted, with nothing accepted in between.
    const BOUND: i64 = 50;
    const ROWS: i64 = 120;
    for ordering in ["aggregate", "none"] {
        let (mut nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
        let relay = scene.relay_with(&scene.settings.clone().set("delivery.ordering", ordering)).await;
        scene
            .sql(&format!(
                "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                 SELECT 'e' || i, 'order', (i % 60)::text, 'refused', '{{}}' FROM generate_series(1, {ROWS}) i"
            ))
            .await;
        eventually(DELIVERED, "the pipeline holds", async || relay.says(&["holds"]).await).await;
        always(Duration::from_secs(6), "nothing more is counted", async || {
            scene.number(COUNTED).await <= BOUND && relay.says(&["holds"]).await
        })
        .await;
        assert_eq!(outbox::dead_letters(&scene.client).await, []);

        nats.reload(PERMITTING).await;
        scene.wait_completed(ROWS).await;
        let mut ids = scene.ids().await;
        ids.sort_unstable();
        ids.dedup();
        assert_eq!((ids.len(), scene.count().await), (120, 120), "each is in the stream once");
        eventually(DELIVERED, "it is ready", async || relay.get("/readyz").await.is_some_and(|(s, _)| s == 200)).await;
    }
}

/// What is held takes room: there is a limit to it, and where it is reached somebody has to hear of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_held_rows_stop_the_flow_and_are_told_of_until_they_have_left() {
    let (mut nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    let settings = scene.settings.clone().set("delivery.max_blocked_rows", "20");
    let relay = scene.relay_with(&settings).await;
    let ready = async |status, words: &str| {
        relay.get("/readyz").await.is_some_and(|answer| answer.0 == status && answer.1.contains(words))
    };
    let later: Vec<String> = (1..=30).map(|number| format!("B{number:02}")).collect();
    insert(&scene, 1000, &[("A", "a", "refused")]).await;
    let behind: Vec<(&str, &str, &str)> = later.iter().map(|event| (&**event, "a", "fine")).collect();
    insert(&scene, 1000, &behind).await;
    eventually(DELIVERED, "it is told of", async || ready(503, "max_blocked_rows").await).await;
    insert(&scene, 1000, &[("C", "c", "fine")]).await;
    always(Duration::from_secs(3), "the flow stands still", async || {
        ready(503, "max_blocked_rows").await && scene.count().await == 0
    })
    .await;

    nats.reload(PERMITTING).await;
    scene.wait_completed(32).await;
    let in_order: Vec<String> = scene.ids().await.into_iter().filter(|id| id != "C").collect();
    assert_eq!(in_order[0], "A");
    assert_eq!(in_order[1..], later);
    eventually(DELIVERED, "it is ready", async || ready(200, "").await).await;
}

/// Someone else has the failed row, so that the table does not show its failure: to whoever looks there, nothing waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_that_cannot_be_written_yet_holds_later_events_too() {
    let (mut nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    let mut relay = scene.relay().await;
    // Or the next one reads the table first, and goes on to the log only when every row of it has its outcome.
    scene.wait_number("SELECT count(*) FROM outbox_relay_state WHERE needs_drain", 0).await;
    assert!(relay.terminate(DELIVERED).await.success());
    insert(&scene, 1000, &[("A", "a", "refused")]).await;
    let holder = scene.database.client().await;
    holder.batch_execute("BEGIN; SELECT FROM outbox_events FOR UPDATE").await.unwrap();
    let relay = scene.relay().await;
    eventually(DELIVERED, "A is refused", async || publishes(&relay, "poison").await == 1).await;
    let passed = relay.metric(PASS).await;
    eventually(DELIVERED, "the table is looked at", async || relay.metric(PASS).await > passed).await;
    insert(&scene, 1000, &[("B", "a", "fine"), ("C", "c", "fine")]).await;
    scene.wait_completed(1).await;
    assert_eq!(scene.ids().await, ["C"]);
    holder.batch_execute("ROLLBACK").await.unwrap();
    wait_held(&scene, "B").await;
    nats.reload(PERMITTING).await;
    scene.wait_completed(3).await;
    assert_eq!(scene.ids().await, ["C", "A", "B"]);
}

/// When the reconciler was through last.
const PASS: &str = "outbox_relay_reconcile_last_success_timestamp_seconds";

/// A relay that ends may record a failure when its successor has read already which aggregates are blocked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_recorded_late_by_a_predecessor_holds_later_events_too() {
    for drained in [false, true] {
        let scene = Scene::new().await;
        let full = scene.space.small_stream(1);
        let stream = scene.jetstream.create_stream(full.clone()).await.unwrap();
        let settings = scene.settings.clone().set("delivery.max_in_flight", "10");
        let mut relay = scene.relay_with(&settings).await;
        insert(&scene, 5, &[("first", "first", "fine")]).await;
        scene.wait_completed(1).await;
        assert!(relay.terminate(DELIVERED).await.success());
        if drained {
            scene.sql("UPDATE outbox_relay_state SET needs_drain = true").await;
        }
        // So many that the last ones are looked up only when the first have been delivered.
        scene
            .sql(
                "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                 SELECT 'e' || i, 'order', i::text, 'fine', '{}' FROM generate_series(1, 3000) i",
            )
            .await;
        insert(&scene, 5, &[("A", "a", "fine"), ("B", "a", "fine"), ("C", "c", "fine")]).await;
        let relay = settings.start();
        eventually(DELIVERED, "the stream is full", async || relay.says(&["holds"]).await).await;
        let fail = "UPDATE outbox_events SET status = 'failed', retry_count = 1, next_retry_at = now() + interval '1 h'
            WHERE event_id = 'A'";
        scene.sql(fail).await;
        stream.purge().await.unwrap();
        scene.jetstream.update_stream(Config { max_messages: -1, ..full }).await.unwrap();
        scene.wait_completed(3002).await;
        wait_held(&scene, "B").await;
        assert!(!scene.ids().await.contains(&"B".to_owned()), "B waits for A");
        scene.sql("UPDATE outbox_events SET next_retry_at = now() WHERE event_id = 'A'").await;
        scene.wait_completed(3004).await;
        let ids: Vec<String> = scene.ids().await.into_iter().filter(|id| id == "A" || id == "B").collect();
        assert_eq!(ids, ["A", "B"]);
    }
}

/// An aggregate that gets new events faster than a hold is written: there is always one on its way to the table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aggregate_that_never_rests_is_free_again_soon_after_its_failed_event_was_delivered() {
    let (mut nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    let _relay = scene.relay_with(&scene.settings.clone().set("reconcile.interval", "1s")).await;
    insert(&scene, 1000, &[("A", "a", "refused")]).await;
    eventually(DELIVERED, "A is refused", async || attempts(&scene, "A").await > 0).await;
    let writer = scene.database.client().await;
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let writing = tokio::spawn(async move {
        while !stopped.is_cancelled() {
            let one = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                VALUES ('order', 'a', 'fine', '{}')";
            writer.batch_execute(one).await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    scene.wait_number("SELECT least(count(*), 20) FROM outbox_events WHERE next_retry_at = 'infinity'", 20).await;
    nats.reload(PERMITTING).await;
    // What was held has one state more behind it.
    let at_once = "SELECT least(count(*), 20) FROM outbox_events WHERE status = 'completed' AND version = 2";
    scene.wait_number(at_once, 20).await;
    stop.cancel();
    writing.await.unwrap();
    let rows = scene.number("SELECT count(*) FROM outbox_events").await;
    scene.wait_completed(rows).await;
    assert_eq!(scene.ids().await, scene.texts("SELECT event_id FROM outbox_events ORDER BY id").await);
}

/// Rows that their producer dates come due all the time, each a moment after the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_events_leave_though_dated_ones_come_due_without_end() {
    let (_nats, scene) = scene(PgVersion::V18, NatsVersion::V2_15).await;
    let _relay = scene.relay().await;
    scene
        .sql(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, next_retry_at)
             SELECT 'order', 'dated ' || i, 'fine', '{}', clock_timestamp() + i * interval '1 ms'
             FROM generate_series(1, 40000) i",
        )
        .await;
    insert(&scene, 2, &[("A", "a", "refused"), ("B", "a", "fine")]).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE event_id = 'B' AND status = 'completed'", 1).await;
    assert_eq!(attempts(&scene, "A").await, 2);
    let dated = "SELECT count(*) FROM outbox_events WHERE status = 'pending' AND next_retry_at > now()";
    assert!(scene.number(dated).await > 0, "there was an end");
}
