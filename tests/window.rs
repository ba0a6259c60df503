//! Someone changes the stream's duplicate window under a running relay: for how long a second copy would be told from the
//! first is another matter by then.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use async_nats::jetstream::stream::Config;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::PgVersion;
use crate::harness::proxy::Proxy;
use crate::harness::scene::{Scene, publishes};

/// A window within which an event that is sent again would be recognized, and one that is over by then.
const LONG: Duration = Duration::from_mins(2);
const SHORT: Duration = Duration::from_secs(1);
/// Until a stream with the short one has forgotten an id for certain.
const FORGOTTEN: Duration = Duration::from_secs(4);

async fn set_window(scene: &Scene, window: Duration) {
    let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
    let config = stream.cached_info().config.clone();
    scene.jetstream.update_stream(Config { duplicate_window: window, ..config }).await.unwrap();
}

/// What makes the relay send again.
#[derive(Clone, Copy, PartialEq)]
enum Cause {
    NoAnswer,
    NewConnection,
}

/// Events are stored and their first acknowledgements lost; they are sent again when the stream has forgotten them.
async fn changes(version: NatsVersion, [from, to]: [Duration; 2], cause: Cause) {
    let nats = Nats::shared(version).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let mut scene = Scene::before(PgVersion::V18, nats, Space::new()).await;
    scene.settings = scene.settings.set("nats.url", &proxy.instead_of(&nats.url()));
    scene.settings = scene.settings.set("nats.create.duplicate_window", &format!("{}s", from.as_secs()));
    let timeout = if cause == Cause::NoAnswer { "6s" } else { "1m" };
    scene.settings = scene.settings.set("delivery.ack_timeout", timeout);
    let relay = scene.relay().await;
    let lost = Mutex::new(HashSet::new());
    // An acknowledgement's subject ends with the event's number.
    proxy.drop_messages(move |line| {
        let token = line.split(' ').nth(1).and_then(|subject| subject.rsplit('.').next()?.parse::<u64>().ok());
        token.is_some_and(|token| lost.lock().unwrap().insert(token))
    });
    scene
        .sql(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
             SELECT i::text, 'order', i::text, 'paid', '{}' FROM generate_series(1, 3) i",
        )
        .await;
    scene.wait_stored(3).await;
    if to == SHORT {
        set_window(&scene, to).await;
    }
    tokio::time::sleep(FORGOTTEN).await;
    if to == LONG {
        set_window(&scene, to).await;
    }
    if cause == Cause::NewConnection {
        proxy.reset_all();
    }
    scene.wait_completed(3).await;
    assert_eq!(scene.ids().await, ["1", "2", "3"], "{}", relay.log());
    assert_eq!(publishes(&relay, "stored").await, 0, "they were found in the stream");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_is_made_shorter_leads_to_no_second_copy() {
    let shorter = async |version| {
        let windows = [LONG, SHORT];
        tokio::join!(changes(version, windows, Cause::NoAnswer), changes(version, windows, Cause::NewConnection))
    };
    let [oldest, newest] = NatsVersion::ENDS;
    tokio::join!(shorter(oldest), shorter(newest));
}

/// The stream does not remember anew what it has forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_that_is_made_longer_leads_to_no_second_copy() {
    let [oldest, newest] = NatsVersion::ENDS.map(|version| changes(version, [SHORT, LONG], Cause::NewConnection));
    tokio::join!(oldest, newest);
}
