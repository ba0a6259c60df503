//! Rows that wait in the table: each has its turn, whatever waits beside it.

use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::wait::eventually;

/// A row of aggregate `$2` with these values.
fn row(event_id: &str, aggregate: &str, status: &str, next_retry_at: &str) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, next_retry_at)
         VALUES ('{event_id}', 'order', '{aggregate}', 'paid', '{{}}', '{status}', {next_retry_at})"
    )
}

/// What the producer dated comes due while an earlier event of its aggregate waits for a retry: it is held like others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dated_row_that_comes_due_behind_a_failed_one_waits_for_it() {
    let scene = Scene::new().await;
    scene.sql(&row("failed", "a", "failed", "now() + interval '5 s'")).await;
    scene.sql(&row("dated", "a", "pending", "now()")).await;
    let _relay = scene.relay().await;
    scene.wait_completed(2).await;
    assert_eq!(scene.ids().await, ["failed", "dated"]);
    let versions = "SELECT event_id || ' ' || version FROM outbox_events ORDER BY id";
    assert_eq!(scene.texts(versions).await, ["failed 2", "dated 3"], "held once, completed once");
}

/// A relay took over from a poller that has claimed a row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_wait_for_an_earlier_one_of_their_aggregate_that_a_poller_has() {
    let scene = Scene::new().await;
    scene.sql(&row("claimed", "a", "processing", "now() + interval '1 h'")).await;
    let _relay = scene.relay().await;
    scene.sql(&row("other", "b", "pending", "NULL")).await;
    scene.wait_stored(1).await;
    scene.sql(&row("later", "a", "pending", "NULL")).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE next_retry_at = 'infinity'", 1).await;
    scene.sql("UPDATE outbox_events SET next_retry_at = now() WHERE event_id = 'claimed'").await;
    scene.wait_completed(3).await;
    assert_eq!(scene.ids().await, ["other", "claimed", "later"]);
}

/// Nothing blocks an aggregate any more, and nothing would ever release what a relay with another setting has held.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_rows_are_sent_when_the_order_is_given_up() {
    let scene = Scene::new().await;
    scene.sql(&row("held", "a", "pending", "'infinity'")).await;
    let _relay = scene.relay_with(&scene.settings.clone().set("delivery.ordering", "none")).await;
    scene.wait_completed(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_row_without_a_date_is_sent() {
    let scene = Scene::new().await;
    scene.sql(&row("failed", "a", "failed", "NULL")).await;
    let _relay = scene.relay().await;
    scene.wait_completed(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_due_row_that_someone_locks_does_not_keep_others_waiting() {
    let scene = Scene::new().await;
    // Not before: the making of a slot waits for every open transaction of the server.
    let _relay = scene.relay().await;
    scene.sql(&row("locked", "a", "pending", "now() + interval '2 s'")).await;
    scene.sql(&row("free", "b", "pending", "now() + interval '7 s'")).await;
    let mut other = scene.database.client().await;
    let lock = other.transaction().await.unwrap();
    lock.execute("SELECT FROM outbox_events WHERE event_id = 'locked' FOR UPDATE", &[]).await.unwrap();
    scene.wait_completed(1).await;
    lock.rollback().await.unwrap();
    scene.wait_completed(2).await;
    eventually(DELIVERED, "each is stored once", async || scene.ids().await == ["locked", "free"]).await;
}

/// No failed row of its aggregate, and no block in the relay: someone else wrote it, or a relay that has gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_rows_that_wait_for_nothing_are_found_under_a_running_relay() {
    let scene = Scene::new().await;
    let _relay = scene.relay_with(&scene.settings.clone().set("reconcile.sweep_interval", "500ms")).await;
    scene.sql(&row("first", "a", "pending", "'infinity'")).await;
    scene.sql(&row("second", "a", "pending", "'infinity'")).await;
    scene.wait_completed(2).await;
    scene.sql(&row("third", "a", "pending", "NULL")).await;
    scene.wait_completed(3).await;
    assert_eq!(scene.ids().await, ["first", "second", "third"]);
}

/// Statistics do not know of them: a plan that compares each with each free aggregate takes for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_many_held_rows_leave_as_soon_as_what_they_wait_for_has_left() {
    let scene = Scene::new().await;
    scene.sql("ALTER TABLE outbox_events SET (autovacuum_enabled = false); ANALYZE outbox_events").await;
    let rows = |first, last, status, date| {
        format!(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status, next_retry_at)
             SELECT 'order', (i % 1000)::text, 'paid', '{{}}', '{status}', {date} FROM generate_series({first}, {last}) i;"
        )
    };
    scene.sql(&(rows(1, 1000, "failed", "now()") + &rows(1001, 20_000, "pending", "'infinity'"))).await;
    let _relay = scene.relay().await;
    scene.wait_completed(20_000).await;
    assert_eq!(scene.count().await, 20_000);
}
