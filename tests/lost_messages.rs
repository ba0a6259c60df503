//! The stream loses messages that it acknowledged, or is made anew, under a running relay: it says so, and what it was to
//! look for behind them is still found.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

use crate::harness::nats::{Nats, NatsVersion, PERMITTING, Space, denying};
use crate::harness::postgres::PgVersion;
use crate::harness::proxy::Proxy;
use crate::harness::relay::{READY, Relay};
use crate::harness::scene::Scene;
use crate::harness::wait::eventually;

const LOST: &str = "the stream has lost messages that it acknowledged";
const MADE_ANEW: &str = "the stream was deleted and made anew";
/// Until a stream with a window of 2 s has forgotten an id for certain.
const FORGOTTEN: Duration = Duration::from_secs(5);

/// Acknowledgements that are lost are missed only when the stream has forgotten the event.
async fn scene(nats: &Nats, proxy: &Proxy) -> Scene {
    let mut scene = Scene::before(PgVersion::V18, nats, Space::new()).await;
    let url = proxy.instead_of(&nats.url());
    scene.settings = scene.settings.set("nats.url", &url).set("nats.create.duplicate_window", "2s");
    scene.settings = scene.settings.set("delivery.ack_timeout", "5s");
    scene
}

fn insert(batch: &str, rows: u32) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         SELECT '{batch}' || i, 'order', '{batch}' || i, 'paid', '{{}}' FROM generate_series(1, {rows}) i"
    )
}

/// Loses the first acknowledgement of each event.
fn lose_first(proxy: &Proxy) {
    let lost = Mutex::new(HashSet::new());
    proxy.drop_messages(move |line| token_of(line).is_some_and(|token| lost.lock().unwrap().insert(token)));
}

/// The number at the end of an acknowledgement's subject; answers to other questions have none.
fn token_of(line: &str) -> Option<u64> {
    line.split(' ').nth(1)?.rsplit('.').next()?.parse().ok()
}

async fn wait_said(relay: &Relay, text: &str, times: usize) {
    let said = || relay.log().matches(text).count();
    eventually(READY, &format!("{text:?} is said {times} times"), async || said() >= times).await;
    assert_eq!(said(), times);
    let status = relay.get("/status").await.unwrap().1;
    assert!(status.contains(text), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_comes_back_without_its_end_is_told_of_and_stores_nothing_twice() {
    let [oldest, newest] = NatsVersion::ENDS.map(loses_its_end);
    tokio::join!(oldest, newest);
}

async fn loses_its_end(version: NatsVersion) {
    let mut nats = Nats::start(version).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = scene(&nats, &proxy).await;
    let mut relay = scene.relay().await;
    // From its first sweep on, the table is told how far the stream goes.
    let mut kept = 0;
    while scene.number("SELECT stream_seq FROM outbox_relay_state").await == 0 {
        kept += 1;
        scene.sql(&insert(&format!("kept{kept}-"), 1)).await;
        scene.wait_completed(kept).await;
    }
    let kept_messages = u64::try_from(kept).unwrap();
    nats.stop().await;
    nats.keep_store();
    // The outcome of the first one cannot be written, so that the table alone would not tell.
    scene.sql(&insert("open", 1)).await;
    let mut holder = scene.database.client().await;
    let lock = holder.transaction().await.unwrap();
    lock.execute("SELECT FROM outbox_events WHERE event_id = 'open1' FOR UPDATE", &[]).await.unwrap();
    nats.start_again().await;
    scene.wait_stored(kept_messages + 1).await;
    scene.sql(&insert("lost", 9)).await;
    scene.wait_completed(kept + 9).await;
    scene.wait_number("SELECT stream_seq FROM outbox_relay_state", kept).await;
    nats.stop().await;
    nats.put_store_back();
    nats.start_again().await;
    wait_said(&relay, LOST, 1).await;
    lock.rollback().await.unwrap();
    scene.wait_completed(kept + 10).await;
    assert_eq!(scene.count().await, kept_messages + 1);

    lose_first(&proxy);
    scene.sql(&insert("new", 3)).await;
    scene.wait_completed(kept + 13).await;
    let mut ids = scene.ids().await;
    assert_eq!(ids.split_off(usize::try_from(kept).unwrap() + 1), ["new1", "new2", "new3"], "{}", relay.log());
    wait_said(&relay, LOST, 1).await;
    assert_eq!(relay.ended(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_is_made_anew_between_two_events_is_told_of_and_stores_nothing_twice() {
    let [oldest, newest] = NatsVersion::ENDS.map(is_made_anew);
    tokio::join!(oldest, newest);
}

/// The connection stands, so that only what is stored shows it.
async fn is_made_anew(version: NatsVersion) {
    let nats = Nats::shared(version).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = scene(nats, &proxy).await;
    let relay = scene.relay().await;
    scene.sql(&insert("gone", 10)).await;
    scene.wait_completed(10).await;
    let make_anew = async || {
        let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
        let config = stream.cached_info().config.clone();
        scene.jetstream.delete_stream(&scene.space.stream).await.unwrap();
        scene.jetstream.create_stream(config).await.unwrap();
    };
    make_anew().await;
    lose_first(&proxy);
    scene.sql(&insert("first", 2)).await;
    scene.wait_completed(12).await;
    assert_eq!(scene.ids().await, ["first1", "first2"], "{}", relay.log());
    wait_said(&relay, MADE_ANEW, 1).await;

    proxy.pass();
    make_anew().await;
    scene.sql(&insert("second", 1)).await;
    wait_said(&relay, MADE_ANEW, 2).await;
    scene.wait_completed(13).await;
    assert_eq!(scene.ids().await, ["second1"]);
    // It is not PostgreSQL that ended the sessions.
    let status: serde_json::Value = serde_json::from_str(&relay.get("/status").await.unwrap().1).unwrap();
    let faults = status["faults"].as_array().unwrap();
    let about = |what| faults.iter().find(|fault| fault["about"] == what);
    assert!(
        about("session").is_some_and(|fault| fault["text"].as_str().unwrap().starts_with("the stream has gone back"))
    );
    assert_eq!(about("postgres"), None);
}

/// A relay that did not notice it at once may have left events before what the table names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_left_in_a_stream_that_is_shorter_than_the_table_says_are_not_stored_twice() {
    let nats = Nats::shared(NatsVersion::V2_15).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = scene(nats, &proxy).await;
    let mut relay = scene.relay().await;
    proxy.drop_messages(|_| true);
    scene.sql(&insert("left", 10)).await;
    scene.wait_stored(10).await;
    relay.kill9().await;
    scene.sql("UPDATE outbox_relay_state SET stream_seq = 1000000").await;
    proxy.pass();
    tokio::time::sleep(FORGOTTEN).await;
    let relay = scene.relay().await;
    scene.wait_completed(10).await;
    assert_eq!(scene.count().await, 10);
    wait_said(&relay, LOST, 1).await;
}

/// After a reconnect nothing is sent before the stream was looked at, unless that is forbidden.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_does_not_tell_of_itself_is_waited_for() {
    let mut nats = Nats::start_with(NatsVersion::V2_15, PERMITTING).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    let scene = scene(&nats, &proxy).await;
    let mut relay = scene.relay().await;
    scene.sql(&insert("before", 1)).await;
    scene.wait_completed(1).await;
    let connections = proxy.accepted();
    let made = async |count| {
        eventually(READY, "it is connected anew", async || proxy.accepted() >= connections + count).await;
    };
    // Every answer but acknowledgements, which end with a number.
    proxy.drop_messages(|line| token_of(line).is_none());
    proxy.reset_all();
    made(1).await;
    scene.sql(&insert("waits", 1)).await;
    relay.wait_unready().await;
    assert_eq!(scene.count().await, 1);
    proxy.pass();
    scene.wait_completed(2).await;
    relay.wait_ready().await;

    nats.reload(&denying("$JS.API.STREAM.INFO.>")).await;
    proxy.reset_all();
    made(2).await;
    scene.sql(&insert("after", 1)).await;
    scene.wait_completed(3).await;
    assert_eq!(relay.ended(), None);
}
