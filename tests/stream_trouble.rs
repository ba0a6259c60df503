//! A stream that is full or gone: the pipeline holds, no attempt is counted, and it goes on by itself.

use std::collections::HashSet;
use std::time::Duration;

use async_nats::jetstream::stream::{Config, DiscardPolicy};

use crate::harness::nats::NatsVersion;
use crate::harness::outbox::{self, dead_letters};
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::wait::{always, eventually};

/// Events of so many aggregates, each with 1,000 bytes of ballast.
fn insert(batch: &str, rows: u32) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT '{batch}' || i, 'order', (i % 7)::text, 'paid', jsonb_build_object('x', repeat('x', 1000))
         FROM generate_series(1, {rows}) i"
    )
}

const BLAMED: &str = "SELECT count(*) + (SELECT count(*) FROM outbox_dead_letter) FROM outbox_events
    WHERE retry_count > 0 OR status NOT IN ('pending', 'completed')";

/// Case 35.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_stream_is_waited_for_and_no_row_is_blamed() {
    const ROWS: u32 = 40;
    let limits = [
        (NatsVersion::V2_10, Config { max_bytes: 20_000, ..Config::default() }),
        (NatsVersion::V2_15, Config { max_messages: 15, ..Config::default() }),
    ];
    for (nats, limit) in limits {
        let scene = Scene::on(PgVersion::V18, nats).await;
        let config = Config {
            name: scene.space.stream.clone(),
            subjects: vec![scene.space.subjects()],
            discard: DiscardPolicy::New,
            ..limit
        };
        let stream = scene.jetstream.create_stream(config).await.unwrap();
        let relay = scene.relay().await;
        scene.sql(&insert("e", ROWS)).await;
        let holds = async || relay.says(&["holds"]).await;
        let mut seen = HashSet::new();
        let mut round = 0;
        while seen.len() < ROWS as usize {
            let completed = async || outbox::count(&scene.client, "status = 'completed'").await;
            if completed().await < i64::from(ROWS) {
                eventually(DELIVERED, "it is full, or all is stored", async || {
                    holds().await || completed().await == i64::from(ROWS)
                })
                .await;
            }
            if round == 0 {
                let pause = Duration::from_secs(2);
                always(pause, "it holds and blames nobody", async || holds().await && scene.number(BLAMED).await == 0)
                    .await;
                assert_eq!(relay.get("/livez").await.map(|answer| answer.0), Some(200));
            }
            // Only what was read is purged: more may be stored at any time.
            let stored = scene.stored().await;
            for message in &stored {
                assert!(seen.insert(message.id().to_owned()), "{} is stored twice", message.id());
            }
            if let Some(last) = stored.last() {
                stream.purge().sequence(last.sequence + 1).await.unwrap();
            }
            round += 1;
        }
        assert!(round >= 3, "{round} rounds: it was never full");
        scene.wait_completed(ROWS.into()).await;
        assert_eq!((seen.len(), scene.number(BLAMED).await), (ROWS as usize, 0));
        eventually(DELIVERED, "it is ready", async || relay.get("/readyz").await.is_some_and(|(s, _)| s == 200)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_deleted_under_the_relay_is_made_again() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        let mut relay = scene.relay().await;
        scene.sql(&insert("before", 50)).await;
        scene.wait_completed(50).await;
        scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
        scene.sql(&insert("after", 50)).await;
        scene.wait_completed(100).await;
        let mut ids = scene.ids().await;
        ids.sort_unstable();
        let mut expected: Vec<String> = (1..=50).map(|i| format!("after{i}")).collect();
        expected.sort_unstable();
        assert_eq!(ids, expected);
        assert_eq!(scene.number(BLAMED).await, 0);
        relay.wait_ready().await;

        // Once more, with its numbers begun anew.
        scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
        scene.sql(&insert("again", 20)).await;
        scene.wait_completed(120).await;
        assert_eq!(scene.count().await, 20);
    }
}

/// Who does not let the relay make streams makes them himself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_the_relay_may_not_make_is_waited_for() {
    let scene = Scene::new().await;
    let config =
        Config { name: scene.space.stream.clone(), subjects: vec![scene.space.subjects()], ..Config::default() };
    scene.jetstream.create_stream(config.clone()).await.unwrap();
    let mut relay = scene.relay_with(&scene.settings.clone().set("nats.manage", "verify")).await;
    scene.sql(&insert("before", 10)).await;
    scene.wait_completed(10).await;
    scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
    scene.sql(&insert("after", 10)).await;
    relay.wait_unready().await;
    let pause = Duration::from_secs(2);
    always(pause, "it waits and blames nobody", async || {
        relay.ended().is_none() && scene.number(BLAMED).await == 0 && scene.count().await == 0
    })
    .await;
    scene.jetstream.create_stream(config).await.unwrap();
    scene.wait_completed(20).await;
    assert_eq!(scene.count().await, 10);
    relay.wait_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_that_was_too_large_is_delivered_when_the_stream_takes_larger_ones() {
    for nats in NatsVersion::ENDS {
        let scene = Scene::on(PgVersion::V18, nats).await;
        let narrow = Config {
            name: scene.space.stream.clone(),
            subjects: vec![scene.space.subjects()],
            max_message_size: 1000,
            ..Config::default()
        };
        scene.jetstream.create_stream(narrow.clone()).await.unwrap();
        let relay = scene.relay().await;
        scene.sql(&insert("large", 1)).await;
        scene.wait_number("SELECT count(*) FROM outbox_dead_letter", 1).await;
        let expected = [("large1".to_owned(), "message_too_large".to_owned())];
        assert_eq!(dead_letters(&scene.client).await, expected);
        let why = scene.texts("SELECT error_message FROM outbox_dead_letter").await.remove(0);
        let size: usize = why.split(['(', ' ']).find_map(|word| word.parse().ok()).expect("the size");
        assert!(size > 1000 && why.ends_with("at most 1000 bytes are allowed, headers included"), "{why}");

        // It fits exactly, so that the size is the one that counts.
        let wide = Config { max_message_size: i32::try_from(size).unwrap(), ..narrow };
        scene.jetstream.update_stream(wide).await.unwrap();
        let id = scene.texts("SELECT id::text FROM outbox_dead_letter").await.remove(0);
        let replayed = scene.settings.run(&["dead-letters", "replay", &id, "--yes"]).await;
        assert!(replayed.status.success(), "{}", String::from_utf8_lossy(&replayed.stderr));
        scene.wait_completed(1).await;
        assert_eq!(scene.ids().await, ["large1"], "{}", relay.log());
    }
}
