//! Compensations: a service is asked until it has done its part, and a person when it does not.

use std::time::Duration;

use async_nats::{HeaderMap, Message, Subscriber};
use futures_util::StreamExt as _;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::wait::{always, eventually};

const SOON: Duration = Duration::from_mins(1);
const QUIET: Duration = Duration::from_secs(2);

/// An outbox without events, and a server on which services listen.
struct Site {
    database: Database,
    client: Client,
    nats: Nats,
    settings: RelaySettings,
}

impl Site {
    async fn new(postgres: PgVersion, nats: NatsVersion) -> Self {
        let database = Postgres::shared(postgres).await.database().await;
        let nats = Nats::start(nats).await;
        let settings = RelaySettings::shared(&database, &nats, &Space::new())
            .set("retry.initial", "50ms")
            .set("retry.max", "100ms")
            .set("reconcile.interval", "50ms")
            .set("compensation.timeout", "300ms");
        settings.migrate().await;
        let client = database.client().await;
        Self { database, client, nats, settings }
    }

    async fn newest() -> Self {
        Self::new(PgVersion::V18, NatsVersion::V2_15).await
    }

    async fn start(&self) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    async fn create(&self, operation: &str) -> i64 {
        let call = "SELECT create_compensation('batch 7', $1, 3, '{\"price\": 1.10}', 'out of stock')";
        self.client.query_one(call, &[&operation]).await.unwrap().get(0)
    }

    /// Status, attempts and reason.
    async fn row(&self, id: i64) -> (String, i32, String) {
        let select = "SELECT status::text, retry_count, failure_reason FROM supply_batch_compensation WHERE id = $1";
        let row = self.client.query_one(select, &[&id]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    }

    async fn wait(&self, id: i64, status: &str) -> (i32, String) {
        eventually(SOON, &format!("compensation {id} is {status}"), async || self.row(id).await.0 == status).await;
        let (_, attempts, reason) = self.row(id).await;
        (attempts, reason)
    }
}

fn header(message: &Message) -> String {
    message.headers.as_ref().unwrap().get("Outbox-Compensation-Id").expect("the header").to_string()
}

async fn next(requests: &mut Subscriber) -> Message {
    tokio::time::timeout(SOON, requests.next()).await.expect("a request").expect("a subscription")
}

async fn answer(client: &async_nats::Client, request: &Message, error: Option<&str>) {
    let mut headers = HeaderMap::new();
    if let Some(error) = error {
        headers.insert("Nats-Service-Error", error);
        headers.insert("Nats-Service-Error-Code", "409");
    }
    client.publish_with_headers(request.reply.clone().unwrap(), headers, "{}".into()).await.unwrap();
}

async fn listen(site: &Site, subject: &'static str) -> (async_nats::Client, Subscriber) {
    let client = site.nats.client().await;
    let requests = client.subscribe(subject).await.unwrap();
    client.flush().await.unwrap();
    (client, requests)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_resolves_it() {
    for (postgres, nats) in [(PgVersion::V15, NatsVersion::V2_10), (PgVersion::V18, NatsVersion::V2_15)] {
        let site = Site::new(postgres, nats).await;
        let (service, mut requests) = listen(&site, "outbox-compensate.>").await;
        let relay = site.start().await;
        let id = site.create("re.fund *").await;
        let request = next(&mut requests).await;
        assert_eq!(request.subject.as_str(), "outbox-compensate.re%2Efund%20%2A");
        let body: Value = serde_json::from_slice(&request.payload).unwrap();
        let expected = json!({ "id": id, "batch_id": "batch 7", "operation_type": "re.fund *", "item_index": 3,
            "item_payload": { "price": 1.1 }, "attempt": 1 });
        assert_eq!(body, expected);
        let text = String::from_utf8(request.payload.to_vec()).unwrap();
        assert!(text.contains(r#"{"price": 1.10}"#), "the payload is as PostgreSQL prints it: {text}");
        answer(&service, &request, None).await;
        assert_eq!(site.wait(id, "resolved").await, (1, "out of stock".to_owned()));
        let clean = "SELECT resolved_at IS NOT NULL AND locked_by IS NULL AND next_retry_at IS NULL AND version = 3
                     FROM supply_batch_compensation";
        assert!(site.client.query_one(clean, &[]).await.unwrap().get::<_, bool>(0));
        let resolved = "outbox_relay_compensations_total{outcome=\"resolved\"}";
        relay.wait_metric(resolved, 1.0).await;
        let last = async || relay.metric("outbox_relay_reconcile_last_success_timestamp_seconds").await;
        eventually(SOON, "a sweep has ended well", async || last().await.is_some_and(|last| last > 1.7e9)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_replies_use_the_attempts_up_and_then_a_person_is_asked() {
    let site = Site::newest().await;
    let (service, mut requests) = listen(&site, "outbox-compensate.refund").await;
    let relay = site.start().await;
    let id = site.create("refund").await;
    let mut ids = Vec::new();
    for attempt in 1..=3 {
        let request = next(&mut requests).await;
        let body: Value = serde_json::from_slice(&request.payload).unwrap();
        assert_eq!(body["attempt"], attempt);
        ids.push(header(&request));
        answer(&service, &request, Some("shipped already")).await;
    }
    let (attempts, reason) = site.wait(id, "manual_required").await;
    assert_eq!((attempts, &*reason), (3, "out of stock; the service answers with error 409: shipped already"));
    assert!(ids.iter().all(|other| *other == ids[0]) && !ids[0].is_empty(), "one id for all attempts: {ids:?}");
    let manual = "outbox_relay_compensations_total{outcome=\"manual_required\"}";
    relay.wait_metric(manual, 1.0).await;
    let more = tokio::time::timeout(QUIET, requests.next()).await;
    assert!(more.is_err(), "a person is asked, not the service");
    let other = site.create("refund").await;
    assert_eq!(other, id, "it is not settled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_and_nobody_and_a_stream_are_failures() {
    let site = Site::newest().await;
    let (_service, mut mute) = listen(&site, "outbox-compensate.mute").await;
    let _relay = site.start().await;
    // Only now, or the relay would not start.
    let config = async_nats::jetstream::stream::Config {
        name: "GREEDY".to_owned(),
        subjects: vec!["outbox-compensate.greedy".to_owned()],
        ..Default::default()
    };
    site.nats.jetstream().await.create_stream(config).await.unwrap();
    let mut ids = Vec::new();
    for operation in ["mute", "nobody", "greedy"] {
        ids.push(site.create(operation).await);
    }
    for (id, reason) in ids.iter().zip([
        "out of stock; no answer within 300ms",
        "out of stock; no service listens to the subject",
        "out of stock; stream \"GREEDY\" captures the subject, so no service answers",
    ]) {
        assert_eq!(site.wait(*id, "manual_required").await, (3, reason.to_owned()));
    }
    let headers = [header(&next(&mut mute).await), header(&next(&mut mute).await), header(&next(&mut mute).await)];
    assert!(headers.iter().all(|header| *header == headers[0]), "{headers:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_respected_and_taken_over_when_it_ends() {
    let site = Site::newest().await;
    let (service, mut requests) = listen(&site, "outbox-compensate.>").await;
    let (ended, held, used_up, later) =
        (site.create("a").await, site.create("b").await, site.create("c").await, site.create("d").await);
    let lease = "UPDATE supply_batch_compensation SET status = $2, locked_by = 'other', locked_at = now(),
                 next_retry_at = now() + $3::text::interval, retry_count = $4 WHERE id = $1";
    for (id, status, end, count) in [
        (ended, "retrying", "-1 s", 1),
        (held, "retrying", "1 h", 1),
        (used_up, "retrying", "-1 s", 3),
        (later, "pending", "1 h", 0),
    ] {
        site.client.execute(lease, &[&id, &status, &end, &count]).await.unwrap();
    }
    let _relay = site.start().await;
    let request = next(&mut requests).await;
    assert_eq!(request.subject.as_str(), "outbox-compensate.a");
    let body: Value = serde_json::from_slice(&request.payload).unwrap();
    assert_eq!(body["attempt"], 2);
    answer(&service, &request, None).await;
    assert_eq!(site.wait(ended, "resolved").await.0, 2);
    let (attempts, reason) = site.wait(used_up, "manual_required").await;
    assert_eq!((attempts, &*reason), (3, "out of stock; the outcome of the last attempt is not known"));
    let more = tokio::time::timeout(QUIET, requests.next()).await;
    assert!(more.is_err(), "one is another's, one is not due, one is a person's: {more:?}");
    assert_eq!(site.row(held).await.0, "retrying");
    assert_eq!(site.row(later).await.0, "pending");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_or_a_stop_costs_no_attempt() {
    let mut site = Site::newest().await;
    site.settings = site.settings.set("compensation.timeout", "30s");
    let mut relay = site.start().await;
    let (_, mut requests) = listen(&site, "outbox-compensate.>").await;
    let id = site.create("refund").await;
    next(&mut requests).await;
    assert_eq!(site.row(id).await.1, 1);
    site.nats.kill().await;
    site.wait(id, "pending").await;
    assert_eq!(site.row(id).await.1, 0, "NATS was away");
    always(QUIET, "nothing is claimed while NATS is away", async || site.row(id).await.0 == "pending").await;
    site.nats.start_again().await;
    let (service, mut requests) = listen(&site, "outbox-compensate.>").await;
    let first = next(&mut requests).await;
    assert_eq!(site.row(id).await.1, 1);
    assert!(relay.terminate(SOON).await.success());
    let (status, attempts, reason) = site.row(id).await;
    assert_eq!((&*status, attempts, &*reason), ("pending", 0, "out of stock"), "the relay was stopped");
    relay = site.start().await;
    let again = next(&mut requests).await;
    assert_eq!(header(&again), header(&first));
    answer(&service, &again, None).await;
    assert_eq!(site.wait(id, "resolved").await.0, 1);
    assert!(relay.ended().is_none());
    drop(site.database);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_captures_the_subject_stops_the_start() {
    let site = Site::newest().await;
    let config = async_nats::jetstream::stream::Config {
        name: "GREEDY".to_owned(),
        subjects: vec!["outbox-compensate.>".to_owned()],
        ..Default::default()
    };
    site.nats.jetstream().await.create_stream(config).await.unwrap();
    let mut relay = site.settings.start();
    assert_eq!(relay.wait_exit(SOON).await.code(), Some(1));
    for word in ["GREEDY", "outbox-compensate.*", "compensation.enabled = false"] {
        assert!(relay.log().contains(word), "{word} in {}", relay.log());
    }
    let off = site.settings.clone().set("compensation.enabled", "false");
    let id = site.create("refund").await;
    let mut relay = off.start();
    relay.wait_ready().await;
    always(QUIET, "it is not this relay's", async || site.row(id).await.0 == "pending").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_is_not_a_silent_service() {
    let mut site = Site::newest().await;
    site.settings = site.settings.set("compensation.timeout", "2s");
    let _relay = site.start().await;
    let (service, mut requests) = listen(&site, "outbox-compensate.>").await;
    let id = site.create("refund").await;
    next(&mut requests).await;
    site.nats.signal(Signal::STOP);
    site.wait(id, "pending").await;
    let row = site.row(id).await;
    site.nats.signal(Signal::CONT);
    assert_eq!(row, ("pending".to_owned(), 0, "out of stock".to_owned()));
    let request = next(&mut requests).await;
    answer(&service, &request, None).await;
    assert_eq!(site.wait(id, "resolved").await.0, 1);
}
