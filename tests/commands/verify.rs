//! `outbox-relay verify`: what the stream has lost is found and comes back, once, and nothing else is sent.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::jetstream::message::PublishMessage;
use serde_json::{Value, json};

use super::{Ended, assert_shape, command, expect};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::stream::Stored;
use crate::nats::stream::{ask, update};

/// A scene whose relay has delivered so many events and has ended.
async fn delivered(scene: &Scene, count: i64) {
    let mut relay = scene.relay().await;
    let insert = format!(
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, tenant_id, headers)
         SELECT 'order', (i % 7)::text, 'paid', jsonb_build_object('n', i), 'é', '{{\"traceparent\": \"x\", \"k\": \"v\"}}'
         FROM generate_series(1, {count}) i"
    );
    scene.sql(&insert).await;
    scene.wait_completed(count).await;
    relay.terminate(DELIVERED).await;
}

/// The server takes the messages away, and still remembers their ids.
async fn lose(scene: &Scene, sequences: &[u64]) {
    let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
    for sequence in sequences {
        assert!(stream.delete_message(*sequence).await.unwrap());
    }
}

async fn verify(scene: &Scene, more: &[&str], code: i32) -> Value {
    let arguments = [&["verify", "--output", "json"][..], more].concat();
    let found = expect(&scene.settings, &arguments, code).await.json();
    let shape = json!({
        "stream": "string", "since": "string", "until": "string", "rows": "number", "present": "number",
        "expired": "number", "missing": "number", "repaired": "number",
        "missing_events": [{
            "id": "number", "event_id": "string", "created_at": "string", "processed_at": "string",
            "stream_sequence": "number|null", "problem": "string|null",
        }],
    });
    assert_shape(&found, &shape);
    found
}

fn counts(found: &Value) -> [u64; 5] {
    ["rows", "present", "expired", "missing", "repaired"].map(|name| found[name].as_u64().unwrap())
}

fn ids(found: &Value) -> Vec<i64> {
    found["missing_events"].as_array().unwrap().iter().map(|event| event["id"].as_i64().unwrap()).collect()
}

/// Within its duplicate window the stream calls a lost event a duplicate: that is waited out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_messages_are_found_and_come_back_once_and_unchanged() {
    for (postgres, nats) in [(PgVersion::V15, NatsVersion::V2_10), (PgVersion::V18, NatsVersion::V2_15)] {
        let mut scene = Scene::on(postgres, nats).await;
        scene.settings = scene.settings.set("nats.create.duplicate_window", "4s");
        delivered(&scene, 1500).await;
        let before = scene.stored().await;
        assert_eq!(counts(&verify(&scene, &[], 0).await), [1500, 1500, 0, 0, 0]);
        let lost = [1_u64, 2, 700, 701, 702, 1500];
        lose(&scene, &lost).await;
        // Between those that were lost are events of others.
        scene
            .jetstream
            .publish(format!("{}.other.thing", scene.space.prefix), "x".into())
            .await
            .unwrap()
            .await
            .unwrap();

        let found = verify(&scene, &[], 3).await;
        assert_eq!(counts(&found), [1500, 1494, 0, 6, 0]);
        assert_eq!(ids(&found), [1, 2, 700, 701, 702, 1500]);
        let Ended { stdout, stderr, .. } = expect(&scene.settings, &["verify"], 3).await;
        assert!(stdout.contains("missing") && stdout.contains(before[699].id()), "{stdout}");
        assert!(stderr.contains("verify --repair"), "{stderr}");
        assert_eq!(scene.count().await, 1495, "without --repair nothing is sent");

        let repaired = verify(&scene, &["--repair"], 0).await;
        assert_eq!(counts(&repaired), [1500, 1494, 0, 6, 6], "{repaired:#}");
        let after = scene.stored().await;
        assert_eq!(after.len(), 1501);
        for (sequence, event) in lost.iter().zip(repaired["missing_events"].as_array().unwrap()) {
            let first = &before[usize::try_from(*sequence - 1).unwrap()];
            let again = after.iter().find(|message| message.id_or_none() == Some(first.id())).expect("it came back");
            assert_eq!(event["stream_sequence"].as_u64(), Some(again.sequence));
            assert_eq!((&again.subject, &again.payload), (&first.subject, &first.payload));
            let headers = |message: &Stored| -> BTreeSet<(String, String)> {
                message.headers.iter().filter(|(name, _)| name != "Outbox-Position").cloned().collect()
            };
            assert_eq!(headers(again), headers(first));
        }
        let stored: BTreeSet<&str> = after.iter().filter_map(|message| message.id_or_none()).collect();
        assert_eq!(stored.len(), 1500, "something is stored twice");
        // Late as they are, they are found.
        assert_eq!(counts(&verify(&scene, &["--repair"], 0).await), [1500, 1500, 0, 0, 0]);
        assert_eq!(scene.count().await, 1501);
    }
}

/// Rows whose times say nothing about when their messages were stored: what is there is never sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_with_strange_times_are_not_sent_twice() {
    // More than are read at a time: what is looked for lies beyond where its time would be.
    const OTHERS: u64 = 50_500;
    let mut scene = Scene::new().await;
    scene.settings = scene.settings.set("nats.create.duplicate_window", "100ms");
    expect(&scene.settings, &["stream", "apply", "--yes"], 0).await;
    let client = Nats::shared(NatsVersion::V2_15).await.client().await;
    for sent in (500..=OTHERS).step_by(500) {
        for _ in 0..500 {
            client.publish(format!("{}.other.thing", scene.space.prefix), "".into()).await.unwrap();
        }
        scene.wait_stored(sent).await;
    }
    delivered(&scene, 300).await;
    scene
        .sql(
            "UPDATE outbox_events SET created_at = now() - interval '50 min', processed_at = now() - interval '40 min'
               WHERE id <= 100;
             UPDATE outbox_events SET processed_at = NULL WHERE id BETWEEN 101 AND 150;
             UPDATE outbox_events SET processed_at = now() + interval '1 year' WHERE id BETWEEN 151 AND 160;
             UPDATE outbox_events SET created_at = '-infinity' WHERE id = 200;
             UPDATE outbox_events SET created_at = 'infinity', processed_at = 'infinity' WHERE id = 201;
             UPDATE outbox_events SET created_at = '4000-01-01 BC' WHERE id = 202",
        )
        .await;
    assert_eq!(counts(&verify(&scene, &["--repair"], 0).await), [297, 297, 0, 0, 0]);
    assert_eq!(counts(&verify(&scene, &["--since", "1970-01-01", "--repair"], 0).await), [297, 297, 0, 0, 0]);
    assert_eq!(counts(&verify(&scene, &["--since", "55m", "--until", "45m"], 0).await), [100, 100, 0, 0, 0]);
    assert_eq!(scene.count().await, OTHERS + 300);
    lose(&scene, &[OTHERS + 50]).await;
    let found = verify(&scene, &["--since", "55m", "--until", "45m", "--repair"], 0).await;
    assert_eq!((counts(&found), ids(&found)), ([100, 99, 0, 1, 1], vec![50]));
}

/// A purged stream and one that was made anew have lost what they held; limits have removed what is too old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_limits_removed_is_not_missing() {
    let mut scene = Scene::new().await;
    scene.settings = scene.settings.set("nats.create.max_age", "2d").set("nats.create.duplicate_window", "100ms");
    delivered(&scene, 400).await;
    scene
        .sql(
            "UPDATE outbox_events SET created_at = now() - interval '3 days', processed_at = now() - interval '3 days'
               WHERE id <= 100",
        )
        .await;
    lose(&scene, &[50, 60, 250]).await;
    let found = verify(&scene, &["--since", "7d"], 3).await;
    assert_eq!((counts(&found), ids(&found)), ([400, 397, 2, 1, 0], vec![250]));

    // Full, so that its oldest messages went.
    update(Nats::shared(NatsVersion::V2_15).await, &scene.space.stream, |config| {
        config["max_age"] = 0.into();
        config["max_msgs"] = 250.into();
    })
    .await;
    scene.sql("UPDATE outbox_events SET created_at = now(), processed_at = now() WHERE id <= 100").await;
    assert_eq!(counts(&verify(&scene, &[], 0).await), [400, 250, 150, 0, 0]);

    // Made anew: nothing of what it held was removed by its limits.
    scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
    let gone = expect(&scene.settings, &["verify"], 1).await;
    assert!(gone.one_line().contains("does not exist"), "{gone:?}");
    expect(&scene.settings, &["stream", "apply", "--yes"], 0).await;
    let found = verify(&scene, &["--repair"], 0).await;
    assert_eq!(counts(&found), [400, 0, 0, 400, 400]);
    assert_eq!(scene.ids().await, scene.texts("SELECT event_id::text FROM outbox_events ORDER BY id").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_proves_nothing_is_refused() {
    let scene = Scene::new().await;
    let server = Nats::shared(NatsVersion::V2_15).await;
    for (change, words) in [
        (json!({ "retention": "workqueue" }), "work queue"),
        (json!({ "retention": "interest" }), "retention interest"),
        (json!({ "max_msgs_per_subject": 5 }), "max_msgs_per_subject"),
    ] {
        let mut config = json!({ "name": scene.space.stream, "subjects": [scene.space.subjects()] });
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ask(server, &format!("STREAM.CREATE.{}", scene.space.stream), &config).await;
        let refused = expect(&scene.settings, &["verify", "--repair"], 4).await;
        assert!(refused.one_line().contains(words), "{refused:?}");
        scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
    }
    expect(&scene.settings, &["stream", "apply", "--yes"], 0).await;
    let deleting = scene.settings.clone().set("writeback.on_success", "delete");
    let refused = expect(&deleting, &["verify"], 4).await;
    assert!(refused.one_line().contains("rows are deleted once the stream has their events"), "{refused:?}");
    for wrong in ["soon", "5"] {
        let usage = command(&scene.settings, &["verify", "--since", wrong]).await;
        assert!(usage.code == 2 && usage.stderr.contains("2026-11-30"), "{usage:?}");
    }
}

/// What cannot be sent again is named with its reason, and the rest comes back all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_cannot_be_repaired_does_not_stop_the_others() {
    let mut scene = Scene::new().await;
    scene.settings = scene.settings.set("nats.create.duplicate_window", "100ms");
    delivered(&scene, 20).await;
    lose(&scene, &[3, 5, 7]).await;
    scene.sql("UPDATE outbox_events SET payload = to_jsonb(repeat('x', 5000)) WHERE id = 5").await;
    update(Nats::shared(NatsVersion::V2_15).await, &scene.space.stream, |config| {
        config["max_msg_size"] = 4000.into();
    })
    .await;
    let found = verify(&scene, &["--repair"], 3).await;
    assert_eq!((counts(&found), ids(&found)), ([20, 17, 0, 3, 2], vec![3, 5, 7]));
    let events = &found["missing_events"];
    assert!(events[1]["problem"].as_str().unwrap().contains("too_large"), "{events:#}");
    assert!(!found.to_string().contains("xxxx"), "a payload is shown");
    let table = expect(&scene.settings, &["verify", "--repair"], 3).await;
    assert!(table.stdout.contains("NOT REPAIRED BECAUSE"), "{table:?}");

    // Beyond the longest wait: it says when to come back.
    let window = Duration::from_hours(2);
    scene.settings = scene.settings.set("nats.create.duplicate_window", "2h");
    update(Nats::shared(NatsVersion::V2_15).await, &scene.space.stream, |config| {
        config["duplicate_window"] = u64::try_from(window.as_nanos()).unwrap().into();
    })
    .await;
    scene.sql("DELETE FROM outbox_events WHERE id = 5").await;
    let id = events[0]["event_id"].as_str().unwrap();
    let stored = scene.stored().await.into_iter().find(|message| message.id() == id).unwrap();
    lose(&scene, &[stored.sequence]).await;
    // Whether its first copy is still remembered or not, this one is.
    let message = PublishMessage::build().message_id(id);
    let subject = stored.subject.clone();
    let ack = scene.jetstream.send_publish(subject, message).await.unwrap().await.unwrap();
    if !ack.duplicate {
        lose(&scene, &[ack.sequence]).await;
    }
    let found = verify(&scene, &["--repair"], 3).await;
    assert_eq!(counts(&found), [19, 18, 0, 1, 0]);
    assert!(found["missing_events"][0]["problem"].as_str().unwrap().contains("2h"), "{found:#}");
}

/// A server that goes away in the middle of a repair, and comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repair_goes_on_when_the_server_comes_back() {
    const ROWS: u64 = 4000;
    let mut nats = Nats::start(NatsVersion::V2_15).await;
    let mut scene = Scene::before(PgVersion::V18, &nats, Space::new()).await;
    scene.settings = scene.settings.set("nats.create.duplicate_window", "100ms").set("delivery.ack_timeout", "1s");
    delivered(&scene, 4000).await;
    scene.jetstream.get_stream(&scene.space.stream).await.unwrap().purge().await.unwrap();
    let settings = scene.settings.clone();
    let repair = tokio::spawn(async move { expect(&settings, &["verify", "--repair", "--output", "json"], 0).await });
    scene.wait_stored(300).await;
    nats.stop().await;
    assert!(!repair.is_finished(), "it was too fast to be interrupted");
    nats.start_again().await;
    assert_eq!(counts(&repair.await.unwrap().json()), [ROWS, 0, 0, ROWS, ROWS]);
    scene.jetstream = nats.jetstream().await;
    let stored = scene.ids().await;
    assert_eq!(stored.iter().collect::<BTreeSet<_>>().len(), stored.len(), "something is stored twice");
    assert_eq!(stored.len(), 4000);
}
