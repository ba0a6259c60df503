//! `dead-letters list`, `show`, `replay` and `resolve`, with a running relay where events are to arrive.

use std::time::Duration;

use async_nats::HeaderMap;
use serde_json::{Value, json as value};

use super::{acted, assert_one_line, insert, json, listed, refusing_scene, run, shape};
use crate::harness::nats::{NatsVersion, PERMITTING};
use crate::harness::postgres::PgVersion;
use crate::harness::process::free_port;
use crate::harness::scene::{Scene, publishes};
use crate::harness::wait::always;

const QUIET: Duration = Duration::from_secs(1);
const DEAD: &str = "SELECT count(*) FROM outbox_dead_letter";
const OPEN: &str = "SELECT count(*) FROM outbox_dead_letter WHERE NOT handled";

fn outcomes(acts: &Value) -> Vec<&str> {
    acts.as_array().unwrap().iter().map(|act| act["outcome"].as_str().unwrap()).collect()
}

fn ids(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|row| row["id"].as_i64().unwrap()).collect()
}

/// A row that is dead, with its letter, as pollers leave it when they publish and believe that they failed.
async fn dead_row(scene: &Scene, event: &str, aggregate: &str) {
    scene
        .sql(&format!(
            "BEGIN;
             INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, retry_count)
             VALUES ('{event}', 'order', '{aggregate}', 'placed', '{{}}', 'dead_letter', 5);
             INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id, event_type,
               payload, retry_count, first_failed_at, error_message)
             VALUES ('{event}', 'order', '{aggregate}', 'placed', '{{}}', 5, now(), 'no answer');
             COMMIT"
        ))
        .await;
}

/// Stores a message under an event's id, and returns its sequence.
async fn store(scene: &Scene, event: &str) -> u64 {
    let mut headers = HeaderMap::new();
    headers.insert("Nats-Msg-Id", event);
    let subject = format!("{}.order.placed", scene.space.prefix);
    let ack = scene.jetstream.publish_with_headers(subject, headers, "{}".into()).await.unwrap().await.unwrap();
    assert!(!ack.duplicate);
    ack.sequence
}

async fn status(scene: &Scene, event: &str) -> String {
    scene.texts(&format!("SELECT status::text FROM outbox_events WHERE event_id = '{event}'")).await.remove(0)
}

/// Cases 38 and 39.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn exhausted_events_are_seen_and_replayed_within_the_duplicate_window() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let (mut nats, scene) = refusing_scene(postgres, nats).await;
        let relay = scene.relay().await;
        insert(&scene, "A", "a", "refused", 3).await;
        insert(&scene, "B", "a", "fine", 3).await;
        insert(&scene, "C", "c", "refused", 3).await;
        scene.wait_number(DEAD, 2).await;
        scene.wait_completed(1).await;
        relay.wait_metric("outbox_relay_dead_letters_total{reason=\"permission_denied\"}", 2.0).await;

        let list = listed(&scene.settings, &["dead-letters", "list"]).await;
        assert_eq!(list.as_array().unwrap().len(), 2);
        assert!(list.as_array().unwrap().iter().all(|letter| letter["error_code"] == "permission_denied"
            && letter["row_status"] == "dead_letter"
            && letter["retry_count"] == 3));
        let table = run(&scene.settings, 0, &["dead-letters", "list", "--reason", "permission_denied"]).await;
        assert!(table.out.contains("order/c") && !table.out.contains("salt"), "{}", table.out);

        let refused = run(&scene.settings, 4, &["dead-letters", "replay", "--all"]).await;
        assert!(refused.err.contains("2 dead letters go back into the outbox"), "{}", refused.err);
        assert_eq!(scene.number(OPEN).await, 2);
        // While it would be refused again, it dies again: as another dead letter.
        let c = list.as_array().unwrap().iter().find(|letter| letter["event_id"] == "C").unwrap()["id"].to_string();
        json(&scene.settings, 0, &["dead-letters", "replay", &c]).await;
        scene.wait_number(DEAD, 3).await;

        nats.reload(PERMITTING).await;
        let acts = acted(&scene.settings, 0, &["dead-letters", "replay", "--all", "--yes"]).await;
        assert_eq!(outcomes(&acts), ["replayed", "replayed"]);
        assert_eq!(shape(&acts[0]), "detail: text, event_id: text, id: number, outcome: text");
        scene.wait_completed(3).await;
        let mut stored = scene.ids().await;
        assert_eq!(stored.remove(0), "B");
        stored.sort();
        assert_eq!(stored, ["A", "C"], "under their own ids, well within the window");
        assert_eq!(publishes(&relay, "duplicate").await, 0);
        assert_eq!(scene.number(OPEN).await, 0);
        let notes = "SELECT handler_notes FROM outbox_dead_letter WHERE handled_at IS NOT NULL ORDER BY id";
        assert_eq!(scene.texts(notes).await, ["replayed"; 3]);
        assert_eq!(listed(&scene.settings, &["dead-letters", "list"]).await, value!([]));
        assert_eq!(ids(&listed(&scene.settings, &["dead-letters", "list", "--handled"]).await), [3, 2, 1]);
        let again = run(&scene.settings, 1, &["dead-letters", "replay", &c]).await;
        assert!(again.err.contains("it was handled before"), "{}", again.err);
    }
}

/// Case 39: what the stream would take for a duplicate of a message that nobody can read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_message_was_removed_gets_a_new_id_within_the_window() {
    for version in NatsVersion::ENDS {
        let scene = Scene::on(PgVersion::V18, version).await;
        let relay = scene.relay().await;
        for event in ["first", "second"] {
            let sequence = store(&scene, event).await;
            let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
            stream.delete_message(sequence).await.unwrap();
            dead_row(&scene, event, event).await;
        }
        // Without asking, the event is lost in the duplicate window: that is what asking is for.
        json(&scene.settings, 0, &["dead-letters", "replay", "1", "--offline"]).await;
        scene.wait_completed(1).await;
        assert_eq!((publishes(&relay, "duplicate").await, scene.count().await), (1, 0));

        let acts = acted(&scene.settings, 0, &["dead-letters", "replay", "2"]).await;
        assert_eq!(outcomes(&acts), ["renamed"]);
        assert_eq!(acts[0]["detail"], "row 2 as second.r2");
        scene.wait_completed(2).await;
        assert_eq!(scene.ids().await, ["second.r2"]);
        let notes = "SELECT handler_notes FROM outbox_dead_letter WHERE id = 2";
        assert_eq!(scene.texts(notes).await, ["replayed as event second.r2"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_that_the_stream_has_is_not_sent_again() {
    let scene = Scene::new().await;
    let relay = scene.relay().await;
    store(&scene, "before").await;
    store(&scene, "had").await;
    dead_row(&scene, "had", "a").await;
    dead_row(&scene, "gone", "a").await;
    store(&scene, "gone").await;
    scene.sql("DELETE FROM outbox_events WHERE event_id = 'gone'").await;
    let acts = acted(&scene.settings, 0, &["dead-letters", "replay", "1", "2", "--yes"]).await;
    assert_eq!(outcomes(&acts), ["stored", "stored"]);
    assert_eq!(acts[0]["detail"], "the stream has it at sequence 2; not sent again");
    assert_eq!((status(&scene, "had").await, scene.number(OPEN).await), ("completed".to_owned(), 0));
    always(QUIET, "nothing is sent", async || publishes(&relay, "stored").await == 0).await;
    assert_eq!(scene.ids().await, ["before", "had", "gone"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_event_keeps_its_place_among_those_that_wait() {
    let (mut nats, scene) = refusing_scene(PgVersion::V18, NatsVersion::V2_15).await;
    let slow = scene.settings.clone().set("retry.initial", "1h").set("retry.max", "1h");
    let _relay = scene.relay_with(&slow).await;
    // Two die, and one after the other; a third one fails, and holds what comes behind it.
    insert(&scene, "A", "a", "refused", 1).await;
    scene.wait_number(DEAD, 1).await;
    insert(&scene, "B", "a", "refused", 1).await;
    scene.wait_number(DEAD, 2).await;
    insert(&scene, "C", "a", "refused", 9).await;
    insert(&scene, "D", "a", "fine", 9).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE next_retry_at = 'infinity'", 1).await;
    scene.sql("UPDATE outbox_events SET max_retries = 9").await;

    // They come back before the one that failed, and fail again: all the others wait behind the first.
    json(&slow, 0, &["dead-letters", "replay", "--all", "--yes"]).await;
    scene
        .wait_number(
            "SELECT count(*) FROM outbox_events WHERE event_id = 'A' AND retry_count = 1 AND status = 'failed'",
            1,
        )
        .await;
    scene
        .wait_number("SELECT count(*) FROM outbox_events WHERE status = 'pending' AND next_retry_at = 'infinity'", 3)
        .await;
    let story = json(&slow, 0, &["events", "show", "C", "--offline"]).await;
    assert!(story["explanation"].as_str().unwrap().contains("is held behind event 1, which failed 1 of 9"), "{story}");

    nats.reload(PERMITTING).await;
    json(&slow, 0, &["events", "retry", "A"]).await;
    scene.wait_completed(4).await;
    assert_eq!(scene.ids().await, ["A", "B", "C", "D"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_dead_letter_waits_behind_an_earlier_event_that_failed() {
    let (mut nats, scene) = refusing_scene(PgVersion::V18, NatsVersion::V2_15).await;
    let slow = scene.settings.clone().set("retry.initial", "1h").set("retry.max", "1h");
    let _relay = scene.relay_with(&slow).await;
    insert(&scene, "A", "a", "refused", 9).await;
    scene.wait_number("SELECT count(*) FROM outbox_events WHERE status = 'failed'", 1).await;
    dead_row(&scene, "B", "a").await;
    json(&slow, 0, &["dead-letters", "replay", "1"]).await;
    scene
        .wait_number("SELECT count(*) FROM outbox_events WHERE event_id = 'B' AND next_retry_at = 'infinity'", 1)
        .await;
    nats.reload(PERMITTING).await;
    json(&slow, 0, &["events", "retry", "A"]).await;
    scene.wait_completed(2).await;
    assert_eq!(scene.ids().await, ["A", "B"]);
}

/// It failed by a function call: the relay has nothing blocked for it that it would release later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_event_that_failed_elsewhere_follows_the_replayed_one() {
    let mut scene = Scene::new().await;
    scene.settings = scene.settings.set("reconcile.interval", "50ms");
    let _relay = scene.relay().await;
    dead_row(&scene, "A", "a").await;
    scene
        .sql(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, next_retry_at)
             VALUES ('B', 'order', 'a', 'placed', '{}', 'failed', now() + interval '1 hour')",
        )
        .await;
    json(&scene.settings, 0, &["dead-letters", "replay", "1"]).await;
    scene.wait_completed(2).await;
    assert_eq!(scene.ids().await, ["A", "B"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_replayed_where_the_stream_cannot_be_asked() {
    let scene = Scene::new().await;
    dead_row(&scene, "A", "a").await;
    let nobody = scene.settings.clone().set("nats.url", &format!("nats://127.0.0.1:{}", free_port()));
    let said = run(&nobody, 1, &["dead-letters", "replay", "1"]).await;
    assert_one_line(&said, "--offline replays without asking");
    assert_eq!((scene.number(OPEN).await, status(&scene, "A").await), (1, "dead_letter".to_owned()));
    // A stream that is not there yet holds nothing: the relay makes it.
    let acts = acted(&scene.settings, 0, &["dead-letters", "replay", "1"]).await;
    assert_eq!(outcomes(&acts), ["replayed"]);
}

/// Deleted, or inserted and deleted in one transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_whose_row_is_gone_is_made_anew() {
    for on_success in ["complete", "delete"] {
        let (mut nats, scene) = refusing_scene(PgVersion::V15, NatsVersion::V2_15).await;
        let settings = scene.settings.clone().set("writeback.on_success", on_success);
        let _relay = scene.relay_with(&settings).await;
        scene
            .sql(
                "BEGIN;
                 INSERT INTO outbox_events (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, headers)
                 VALUES ('A', 'acme', 'order', 'a', 'refused', '{\"n\": 1.10}', '{\"k\": \"v\"}');
                 DELETE FROM outbox_events;
                 COMMIT",
            )
            .await;
        scene.wait_number(DEAD, 1).await;
        nats.reload(PERMITTING).await;
        let acts = acted(&settings, 0, &["dead-letters", "replay", "1"]).await;
        assert_eq!(outcomes(&acts), ["replayed"]);
        scene.wait_stored(1).await;
        let message = scene.stored().await.remove(0);
        assert_eq!((message.id(), message.header("k")), ("A", Some("v")));
        assert_eq!(message.payload, "{\"n\": 1.10}");
        let left = i64::from(on_success == "complete");
        scene
            .wait_number("SELECT count(*) FROM outbox_events WHERE status = 'completed' AND tenant_id = 'acme'", left)
            .await;
        scene.wait_number("SELECT count(*) FROM outbox_events", left).await;

        // What is not kept whole cannot be made again.
        scene.sql("UPDATE outbox_dead_letter SET payload = 'null', handled = false; DELETE FROM outbox_events").await;
        let broken = run(&settings, 1, &["dead-letters", "replay", "1"]).await;
        assert!(broken.err.contains("not a whole event"), "{}", broken.err);
        assert_eq!(scene.number(OPEN).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_beside_a_compensation_wants_consent() {
    let scene = Scene::new().await;
    dead_row(&scene, "A", "a").await;
    scene
        .sql(
            "UPDATE outbox_dead_letter SET headers = '{\"compensate\": \"refund\", \"batch_id\": \"b\"}';
             SELECT create_compensation('b', 'refund', 0, '{}', 'no')",
        )
        .await;
    let refused = run(&scene.settings, 4, &["dead-letters", "replay", "1", "--offline"]).await;
    assert!(refused.err.contains("asked for a compensation"), "{}", refused.err);
    assert_eq!((scene.number(OPEN).await, status(&scene, "A").await), (1, "dead_letter".to_owned()));
    json(&scene.settings, 0, &["compensations", "abandon", "1", "--notes", "delivered after all", "--yes"]).await;
    json(&scene.settings, 0, &["dead-letters", "replay", "1", "--offline"]).await;
    assert_eq!(status(&scene, "A").await, "failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_put_away_with_a_note_and_wrong_ids_change_nothing() {
    let scene = Scene::new().await;
    for event in ["A", "B", "C"] {
        dead_row(&scene, event, "a").await;
    }
    let list = listed(&scene.settings, &["dead-letters", "list", "--limit", "2"]).await;
    assert_eq!(ids(&list), [3, 2]);
    assert_eq!(
        shape(&list[0]),
        "age_seconds: number, aggregate_id: text, aggregate_type: text, dead_letter_at: text, error_code: null, \
         error_message: text, event_id: text, event_type: text, first_failed_at: text, handled: bool, handled_at: null, \
         handler_notes: null, id: number, retry_count: number, row_id: number, row_status: text, tenant_id: null"
    );
    let show = json(&scene.settings, 0, &["dead-letters", "show", "2", "--payload"]).await;
    assert_eq!(
        (&show["payload"], &show["compensations"], &show["payload_bytes"]),
        (&value!({}), &value!([]), &value!(2))
    );
    assert!(run(&scene.settings, 0, &["dead-letters", "show", "2"]).await.out.contains("no answer"));

    for command in ["show", "replay", "resolve"] {
        let wrong = run(&scene.settings, 1, &["dead-letters", command, "99"]).await;
        assert_one_line(&wrong, "there is no dead letter 99");
    }
    let both = run(&scene.settings, 2, &["dead-letters", "replay", "1", "--reason", "x"]).await;
    assert!(both.err.contains("cannot be used with '--reason"), "{}", both.err);
    run(&scene.settings, 4, &["dead-letters", "resolve", "1", "2"]).await;
    assert_eq!(scene.number(OPEN).await, 3);
    json(&scene.settings, 0, &["dead-letters", "resolve", "1", "--notes", "by hand"]).await;
    let acts = acted(&scene.settings, 0, &["dead-letters", "resolve", "1", "2", "--notes", "again", "--yes"]).await;
    assert_eq!(outcomes(&acts), ["handled", "handled"]);
    assert!(acts[0]["detail"].as_str().unwrap().starts_with("already resolved at 20"), "{acts:?}");
    assert_eq!(acts[1]["detail"], Value::Null);
    let notes = "SELECT handler_notes FROM outbox_dead_letter WHERE handled AND handled_at <= now() ORDER BY id";
    assert_eq!(scene.texts(notes).await, ["by hand", "again"]);
    assert_eq!(status(&scene, "A").await, "dead_letter", "the event is not touched");
    // An event that lives again by other means has nothing to replay.
    scene.sql("UPDATE outbox_events SET status = 'completed' WHERE event_id = 'C'").await;
    let alive = run(&scene.settings, 1, &["dead-letters", "replay", "3", "--offline"]).await;
    assert!(alive.err.contains("row 3 is completed"), "{}", alive.err);
}
