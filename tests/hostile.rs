//! Rows that would harm: whatever they hold, they reach no other subject, speak for no one else, and stop nobody.

use std::time::Duration;

use async_nats::jetstream;
use futures_util::StreamExt as _;
use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::outbox::{count, dead_letters, outcome, settled};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::stream::{self, Stored};
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

/// A database with an outbox, and a server with nobody else's messages.
struct Site {
    database: Database,
    client: Client,
    nats: Nats,
    space: Space,
    settings: RelaySettings,
}

impl Site {
    async fn new(version: NatsVersion, config: &str) -> Self {
        let database = Postgres::shared(PgVersion::V18).await.database().await;
        let (nats, space) = (Nats::start_with(version, config).await, Space::new());
        // A refused row stays as it is for the length of a test.
        let settings =
            RelaySettings::shared(&database, &nats, &space).set("retry.initial", "10m").set("retry.max", "10m");
        Self { client: database.client().await, database, nats, space, settings }
    }

    async fn start(&self) -> Relay {
        self.settings.migrate().await;
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    /// One row, each in a transaction and an aggregate of its own.
    async fn insert(&self, id: &str, event_type: &str, payload: &str, headers: &str) {
        let sql = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
                   VALUES ($1, 'order', $1, $2, $3::text::jsonb, $4::text::jsonb)";
        self.client.execute(sql, &[&id, &event_type, &payload, &headers]).await.expect("insert");
    }

    async fn stored(&self) -> Vec<Stored> {
        stream::read_all(&self.nats.jetstream().await, &self.space.stream).await
    }

    async fn settled(&self) {
        settled(&self.client, DEADLINE).await;
    }
}

fn ids(stored: &[Stored]) -> Vec<&str> {
    let mut ids: Vec<_> = stored.iter().map(Stored::id).collect();
    ids.sort_unstable();
    ids
}

/// Case 28. Every message that the server takes from the relay is seen, whatever its subject.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_value_reaches_another_subject_or_header() {
    let types = [
        ("plain", "plain"),
        ("space", "a.b c"),
        ("inject", "a.b 0\r\n\r\nPUB evil.x 2\r\nhi"),
        ("dots", "a..b"),
        ("dot", "."),
        ("wide", "a.>"),
        ("star", "*"),
        ("dollar", "$JS.API.STREAM.PURGE.OUTBOX"),
        ("tab", "a\tb"),
        ("percent", "a%2Eb"),
        ("umlaut", "größe"),
    ];
    let subjects = [
        "plain",
        "a.b%20c",
        "a.b%200%0D%0A%0D%0APUB%20evil.x%202%0D%0Ahi",
        "a%2E%2Eb",
        "%2E",
        "a.%3E",
        "%2A",
        "%24JS.API.STREAM.PURGE.OUTBOX",
        "a%09b",
        "a%252Eb",
        "gr%C3%B6%C3%9Fe",
    ];
    for version in NatsVersion::ENDS {
        let site = Site::new(version, "").await;
        let _relay = site.start().await;
        let all = site.nats.client().await;
        let mut seen = all.subscribe(">").await.unwrap();
        all.flush().await.unwrap();
        for (id, event_type) in types {
            site.insert(id, event_type, "1", r#"{"x-note": "v\r\nNats-Rollup: all", "x-line": "a\nb", "x-ok": "é"}"#)
                .await;
        }
        site.settled().await;
        // Before the stream is read: the server shows each delivery under the message's own subject, too.
        all.publish("the.end", "".into()).await.unwrap();
        all.flush().await.unwrap();
        let stored = site.stored().await;
        for ((id, _), subject) in types.iter().zip(subjects) {
            let message =
                stored.iter().find(|message| message.id() == *id).unwrap_or_else(|| panic!("{id} is missing"));
            assert_eq!(message.subject, format!("{}.order.{subject}", site.space.prefix));
            assert_eq!((message.payload.as_ref(), message.header("x-ok")), (&b"1"[..], Some("é")));
            assert!(message.header("x-note").is_none() && message.header("Nats-Rollup").is_none(), "{message:?}");
        }
        assert_eq!(stored.len(), types.len());
        let ours = format!("{}.order.", site.space.prefix);
        let mut published = 0;
        while let Some(message) = seen.next().await
            && &*message.subject != "the.end"
        {
            let subject = message.subject.as_str();
            // What clients ask JetStream, and what it answers.
            if !subject.starts_with("_INBOX.") && !subject.starts_with("$JS.") {
                assert!(subject.starts_with(&ours), "a message on {subject:?}");
                published += 1;
            }
        }
        assert_eq!(published, types.len());
    }
}

/// Case 28, where the template puts values of every kind into the subject.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_stay_in_their_own_token() {
    let mut site = Site::new(NatsVersion::V2_15, "").await;
    let template = format!("{}.{{tenant_id}}.{{aggregate_id}}.{{header.region}}.{{event_type}}", site.space.prefix);
    site.settings = site.settings.set("route.subject", &template);
    let _relay = site.start().await;
    let sql = "INSERT INTO outbox_events (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, headers)
               VALUES ('a', 't.>', 'order', 'a b.c', 'x', '1', '{\"region\": \"*.\\r\\n\"}'), ('b', NULL, 'order', '_', 'x', '1', '{}')";
    site.client.execute(sql, &[]).await.unwrap();
    site.settled().await;
    let stored = site.stored().await;
    let mut subjects: Vec<_> = stored.iter().map(|message| message.subject.as_str()).collect();
    subjects.sort_unstable();
    let prefix = &site.space.prefix;
    let expected = [format!("{prefix}._.%5F._.x"), format!("{prefix}.t%2E%3E.a%20b%2Ec.%2A%2E%0D%0A.x")];
    assert_eq!(subjects, expected);
}

/// Case 29, and trace context of a broken form.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_headers_never_speak_for_the_relay() {
    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for version in NatsVersion::ENDS {
        let site = Site::new(version, "").await;
        let relay = site.start().await;
        let reserved = [
            "Nats-Msg-Id",
            "nats-msg-id",
            "Nats-Expected-Stream",
            "Nats-Expected-Last-Sequence",
            "NATS-ROLLUP",
            "Nats-TTL",
            "Outbox-Position",
            "outbox-anything",
            "CE-ID",
            "ce-type",
            "content-TYPE",
            "bad name",
            "bad:name",
            "",
        ];
        let headers: Vec<_> = reserved.iter().map(|name| format!("\"{name}\": \"forged\"")).collect();
        site.insert("liar", "x", "1", &format!("{{{}, \"x-ok\": \"yes\"}}", headers.join(", "))).await;
        site.insert("traced", "x", "1", &format!("{{\"traceparent\": \"{TRACE}\", \"tracestate\": \"a=b\"}}")).await;
        site.insert("broken", "x", "1", &format!("{{\"traceparent\": \"{TRACE}-00\", \"tracestate\": \"=\"}}")).await;
        site.settled().await;
        let stored = site.stored().await;
        assert_eq!(ids(&stored), ["broken", "liar", "traced"]);
        let of = |id: &str| stored.iter().find(|message| message.id() == id).unwrap();
        assert!(of("liar").headers.iter().all(|(_, value)| value != "forged"), "{:?}", of("liar").headers);
        assert_eq!(of("liar").header("x-ok"), Some("yes"));
        assert_eq!((of("traced").header("traceparent"), of("traced").header("tracestate")), (Some(TRACE), Some("a=b")));
        assert_eq!((of("broken").header("traceparent"), of("broken").header("tracestate")), (None, None));
        let dropped = relay.metric("outbox_relay_row_headers_dropped_total").await;
        assert_eq!(dropped, Some(16.0), "{} reserved ones and a broken trace", reserved.len());
    }
}

/// Case 30. A message that the server would close the connection for is never sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn oversize_events_are_dead_letters_at_once_and_neighbours_flow() {
    const LIMIT: usize = 1024 * 1024;
    for version in NatsVersion::ENDS {
        let site = Site::new(version, "").await;
        let relay = site.start().await;
        let text = |bytes: usize| format!("\"{}\"", "x".repeat(bytes - 2));
        let header = |bytes: usize| format!("{{\"x-big\": \"{}\"}}", "h".repeat(bytes));
        site.insert("big", "x", &text(LIMIT + 1), "{}").await;
        site.insert("full", "x", &text(LIMIT - 10), "{}").await;
        site.insert("headers", "x", "1", &header(65_536)).await;
        site.insert("most", "x", "1", &header(60_000)).await;
        for number in 0..10 {
            site.insert(&format!("small-{number}"), "x", "1", "{}").await;
        }
        site.settled().await;
        let expected = [("big", "message_too_large"), ("full", "message_too_large"), ("headers", "headers_too_large")];
        assert_eq!(dead_letters(&site.client).await, expected.map(|(id, code)| (id.to_owned(), code.to_owned())));
        let big = outcome(&site.client, "big").await;
        assert_eq!((big.status.as_str(), big.retry_count), ("dead_letter", 1));
        assert!(big.error_message.is_some_and(|text| text.contains("at most 1048576 bytes")));
        let stored = site.stored().await;
        assert_eq!(stored.len(), 11);
        assert_eq!(ids(&stored)[0], "most");
        let reconnects = relay.metric("outbox_relay_reconnects_total{peer=\"nats\"}").await;
        assert!(reconnects.is_none_or(|count| count < 1.0), "the server closed the connection: {reconnects:?}");
    }
}

/// Case 31. A core subscriber takes what no stream stores; that is no acknowledgement.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn core_subscriber_does_not_count_as_a_stream() {
    let mut site = Site::new(NatsVersion::V2_15, "").await;
    site.settings = site.settings.set("delivery.ack_timeout", "1s");
    assert!(site.start().await.terminate(DEADLINE).await.success());
    // It would make the stream anew.
    site.settings = site.settings.set("nats.manage", "verify");
    let mut relay = site.start().await;
    let jetstream = site.nats.jetstream().await;
    let mut config = jetstream.get_stream(&site.space.stream).await.unwrap().cached_info().config.clone();
    jetstream.delete_stream(&site.space.stream).await.unwrap();
    let client = site.nats.client().await;
    let mut subscriber = client.subscribe(site.space.subjects()).await.unwrap();
    client.flush().await.unwrap();
    site.insert("one", "x", "1", "{}").await;
    tokio::time::timeout(DEADLINE, subscriber.next()).await.unwrap().unwrap();
    relay.wait_unready().await;
    let row = outcome(&site.client, "one").await;
    assert_eq!((row.status.as_str(), row.retry_count), ("pending", 0));
    config.description = Some("made later".to_owned());
    jetstream.create_stream(config).await.unwrap();
    site.settled().await;
    relay.wait_ready().await;
    assert_eq!(ids(&site.stored().await), ["one"]);
    assert_eq!(outcome(&site.client, "one").await.status, "completed");
}

/// Waits until a row has failed, and says how.
async fn failure_of(site: &Site, id: &str) -> (String, String) {
    eventually(DEADLINE, &format!("{id} has failed"), async || outcome(&site.client, id).await.status == "failed")
        .await;
    let row = outcome(&site.client, id).await;
    assert!(row.is_due_later && row.retry_count == 1, "{row:?}");
    (row.error_code.unwrap(), row.error_message.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_subject_fails_its_own_row_and_no_other() {
    for version in NatsVersion::ENDS {
        let space = Space::new();
        let config = format!(
            "no_auth_user: admin\nauthorization {{ users: [
               {{user: admin, password: admin}},
               {{user: relay, password: relay, permissions: {{publish: {{deny: [\"{}.order.denied\"]}}}}}}] }}",
            space.prefix
        );
        let mut site = Site::new(version, &config).await;
        site.settings = RelaySettings::shared(&site.database, &site.nats, &space)
            .set("retry.initial", "10m")
            .set("nats.user", "relay")
            .set("retry.max", "10m")
            .set("nats.password", "relay");
        site.space = space;
        let _relay = site.start().await;
        for number in 0..20 {
            let (id, kind) = (format!("{number:02}"), if number % 5 == 0 { "denied" } else { "allowed" });
            site.insert(&id, kind, "1", "{}").await;
        }
        site.settled().await;
        for id in ["00", "05", "10", "15"] {
            let (code, message) = failure_of(&site, id).await;
            assert_eq!(code, "permission_denied");
            assert!(message.contains(&format!("{}.order.denied", site.space.prefix)), "{message}");
        }
        assert_eq!(count(&site.client, "status = 'completed'").await, 16);
        assert_eq!(site.stored().await.len(), 16);
        assert!(dead_letters(&site.client).await.is_empty());
    }
}

/// The stream is narrowed under the running relay: no stream for one subject, another stream for a second one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncovered_subject_fails_its_own_row_and_no_other() {
    for version in NatsVersion::ENDS {
        let site = Site::new(version, "").await;
        let _relay = site.start().await;
        let (jetstream, prefix) = (site.nats.jetstream().await, &site.space.prefix);
        let mut config = jetstream.get_stream(&site.space.stream).await.unwrap().cached_info().config.clone();
        config.subjects = vec![format!("{prefix}.order.covered")];
        jetstream.update_stream(config).await.unwrap();
        let other = jetstream::stream::Config {
            name: "OTHER".to_owned(),
            subjects: vec![format!("{prefix}.order.elsewhere")],
            ..Default::default()
        };
        jetstream.create_stream(other).await.unwrap();
        for (id, kind) in [("1", "covered"), ("2", "nowhere"), ("3", "elsewhere"), ("4", "covered")] {
            site.insert(id, kind, "1", "{}").await;
        }
        let (code, message) = failure_of(&site, "2").await;
        assert_eq!(code, "no_stream_for_subject");
        assert!(message.contains(&format!("{prefix}.order.nowhere")), "{message}");
        assert_eq!(failure_of(&site, "3").await.0, "wrong_stream");
        site.settled().await;
        assert_eq!(ids(&site.stored().await), ["1", "4"]);
        assert_eq!(stream::count(&jetstream, "OTHER").await, 0);
    }
}

/// A table of the older schema keeps its columns as they are, without the checks of a fresh one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adopted_rows_that_cannot_be_events_are_dead_letters() {
    let site = Site::new(NatsVersion::V2_15, "").await;
    let table = "CREATE TABLE outbox_events (
        id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, event_id varchar(64) UNIQUE,
        aggregate_type varchar(64), aggregate_id varchar(128), event_type varchar(128), payload jsonb, headers jsonb)";
    site.client.batch_execute(table).await.unwrap();
    let relay = site.start().await;
    let insert =
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers) VALUES
        ('array', 'order', '1', 'x', '1', '[]'),
        ('empty-type', 'order', '2', '', '1', '{}'),
        ('good', 'order', '3', 'x', '1', '{\"a\": \"b\", \"number\": 1}'),
        ('no-headers', 'order', '4', 'x', '1', NULL),
        ('no-payload', 'order', '5', 'x', NULL, NULL),
        ('no-type', NULL, '6', 'x', '1', '{}'),
        ('null-headers', 'order', '7', 'x', '1', 'null'),
        ('string', 'order', '8', 'x', '1', '\"text\"'),
        ('with space', 'order', '9', 'x', '1', '{}'),
        (NULL, 'order', '10', 'x', '1', '{}'),
        ('zz-last', 'order', '1', 'x', '1', '{}')";
    site.client.batch_execute(insert).await.unwrap();
    site.settled().await;
    let bad = ["", "array", "empty-type", "no-payload", "no-type", "string", "with space"];
    assert_eq!(dead_letters(&site.client).await, bad.map(|id| (id.to_owned(), "undecodable".to_owned())));
    for (id, reason) in [
        ("array", "headers is not a JSON object"),
        ("empty-type", "event_type is empty"),
        ("no-payload", "payload is NULL"),
        ("no-type", "aggregate_type is NULL"),
        ("with space", "event_id has characters other than"),
    ] {
        let message = outcome(&site.client, id).await.error_message.unwrap();
        assert!(message.contains(reason), "{id}: {message}");
    }
    let stored = site.stored().await;
    assert_eq!(ids(&stored), ["good", "no-headers", "null-headers", "zz-last"]);
    let good = stored.iter().find(|message| message.id() == "good").unwrap();
    assert_eq!((good.header("a"), good.header("number")), (Some("b"), None));
    assert_eq!(relay.metric("outbox_relay_row_headers_dropped_total").await, Some(1.0));
}
