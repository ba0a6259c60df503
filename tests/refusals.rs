//! Many refusals: of one subject among others, and of everything.

use std::time::Duration;

use async_nats::jetstream::stream::Config;
use futures_util::{FutureExt as _, StreamExt as _};

use crate::harness::nats::{Nats, NatsVersion, Space, denying};
use crate::harness::outbox;
use crate::harness::postgres::PgVersion;
use crate::harness::relay::Relay;
use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::wait::{always, eventually};

/// NATS refuses these subjects below the test's prefix, and takes all others.
fn refusing(space: &Space, subjects: &str) -> String {
    denying(&format!("{}.order.{subjects}", space.prefix))
}

/// A server that refuses the subjects, and an outbox before it of which little is under way at a time.
async fn scene(subjects: &str) -> (Nats, Scene) {
    let space = Space::new();
    let nats = Nats::start_with(NatsVersion::V2_15, &refusing(&space, subjects)).await;
    let mut scene = Scene::before(PgVersion::V18, &nats, space).await;
    scene.settings = scene.settings.set("retry.initial", "500ms").set("retry.max", "1s");
    scene.settings = scene.settings.set("reconcile.interval", "100ms").set("delivery.max_in_flight", "200");
    (nats, scene)
}

/// Events of aggregates of their own.
fn insert(kind: &str, rows: u32) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, max_retries)
         SELECT '{kind}-' || i, 'order', '{kind}-' || i, '{kind}', '{{}}', 2 FROM generate_series(1, {rows}) i;"
    )
}

async fn is_ready(relay: &Relay) -> bool {
    relay.get("/readyz").await.is_some_and(|(status, _)| status == 200)
}

const COUNTED: &str = "SELECT coalesce(sum(retry_count), 0)::int8 FROM outbox_events";

/// A mistyped event type: many more than may be under way, with good ones only behind them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_one_refused_subject_do_not_hold_up_the_others_and_reach_their_end() {
    let (_nats, scene) = scene("mistyped").await;
    let relay = scene.relay().await;
    scene.sql(&(insert("mistyped", 1500) + &insert("good", 100))).await;
    scene.wait_completed(100).await;
    scene.wait_number("SELECT count(*) FROM outbox_dead_letter WHERE error_code = 'permission_denied'", 1500).await;
    assert_eq!(scene.number(COUNTED).await, 2 * 1500, "each has had its attempts");
    eventually(DELIVERED, "it is ready", async || is_ready(&relay).await).await;
    // Nobody takes what fails from now on for the set-up's fault, though nothing else is under way.
    let more = insert("mistyped", 300).replace("'mistyped-' || i", "'more-' || i");
    scene.sql(&more).await;
    let dead = "SELECT count(*) FROM outbox_dead_letter";
    let all_dead = async || scene.number(dead).await == 1800;
    eventually(DELIVERED, "it stays ready until they are dead letters", async || {
        assert!(is_ready(&relay).await, "{:?}", relay.get("/readyz").await);
        all_dead().await
    })
    .await;
}

/// It is not said which of them is refused, so that the stream is asked. Meanwhile it goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_stored_while_the_stream_is_asked_for_refused_events_is_not_taken_for_a_loss() {
    let (_nats, scene) = scene("bad.>").await;
    let relay = scene.relay().await;
    let client = scene.database.client().await;
    let good = tokio::spawn(async move {
        let load = "DO $$ BEGIN FOR i IN 1..1500 LOOP
            INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
            VALUES ('order', 'good-' || i, 'good', '{}');
            COMMIT;
          END LOOP; END $$";
        client.batch_execute(load).await.unwrap();
    });
    for kind in 0..20 {
        scene.sql(&insert(&format!("bad.{kind}"), 3)).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    good.await.unwrap();
    scene.wait_completed(1500).await;
    assert!(relay.log().contains("the stream was asked"), "{}", relay.log());
    assert!(!relay.log().contains("has lost messages"), "{}", relay.log());
}

/// It is not said which of them is refused, and the stream cannot be asked for those that may be stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_stream_cannot_be_asked_refused_events_hold_up_nobody_for_ever() {
    let (mut nats, scene) = scene("mistyped").await;
    let _relay = scene.relay().await;
    nats.reload(&refusing(&scene.space, "mistyped\", \"$JS.API.CONSUMER.CREATE.>")).await;
    scene.sql(&(insert("mistyped", 20) + &insert("good", 5))).await;
    scene.wait_completed(5).await;
    scene.wait_number("SELECT count(*) FROM outbox_dead_letter WHERE error_code = 'permission_denied'", 20).await;
    assert_eq!(scene.number(COUNTED).await, 2 * 20);
}

/// Nothing may be published any more: nobody is blamed, also not events whose rows are gone and cannot wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permissions_withdrawn_for_everything_blame_nobody() {
    let (mut nats, scene) = scene("nothing").await;
    let relay = scene.relay().await;
    scene.sql(&insert("before", 10)).await;
    scene.wait_completed(10).await;
    nats.reload(&refusing(&scene.space, ">")).await;
    let kinds: String = (0..6).map(|kind| insert(&format!("kind{kind}"), 150)).collect();
    scene.sql(&kinds).await;
    eventually(DELIVERED, "the pipeline holds", async || relay.says(&["holds"]).await).await;
    scene
        .sql(&format!("BEGIN; {} DELETE FROM outbox_events WHERE event_type = 'gone'; COMMIT", insert("gone", 300)))
        .await;
    always(Duration::from_secs(6), "nobody is blamed", async || {
        relay.says(&["holds"]).await
            && scene.number(COUNTED).await <= 50
            && outbox::dead_letters(&scene.client).await.is_empty()
    })
    .await;
    nats.reload(&refusing(&scene.space, "nothing")).await;
    scene.wait_completed(910).await;
    scene.wait_stored(1210).await;
    assert_eq!((scene.count().await, outbox::dead_letters(&scene.client).await), (1210, Vec::new()));
    eventually(DELIVERED, "it is ready", async || is_ready(&relay).await).await;
}

/// The stream was narrowed under the running relay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_events_of_a_subject_that_no_stream_takes_are_explained_together() {
    let (nats, scene) = scene("nothing").await;
    let _relay = scene.relay().await;
    let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
    let subjects = vec![format!("{}.order.good", scene.space.prefix)];
    let narrow = Config { subjects, ..stream.cached_info().config.clone() };
    scene.jetstream.update_stream(narrow).await.unwrap();
    let client = nats.client().await;
    let mut asked = client.subscribe(format!("$JS.API.STREAM.INFO.{}", scene.space.stream)).await.unwrap();
    client.flush().await.unwrap();
    scene.sql(&(insert("uncovered", 180) + &insert("good", 5))).await;
    scene.wait_completed(5).await;
    let failed = "SELECT count(*) FROM outbox_events WHERE error_code = 'no_stream_for_subject'";
    scene.wait_number(failed, 180).await;
    let mut questions = 0;
    while asked.next().now_or_never().is_some() {
        questions += 1;
    }
    // One by one it would be 180, and as many again with each retry.
    assert!((1..120).contains(&questions), "{questions} questions");
}
