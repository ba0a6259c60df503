//! Faults of NATS, its permissions and the stream.

use std::fmt::Write as _;
use std::time::Duration;

use async_nats::Client;
use futures_util::StreamExt as _;
use serde_json::{Value, json};

use super::{Patient, Report, text};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::RelaySettings;

/// A request to JetStream's API, as the NATS command line makes them.
async fn ask(client: &Client, verb: &str, body: &Value) -> Value {
    let bytes = if body.is_null() { String::new() } else { body.to_string() };
    let answer = client.request(format!("$JS.API.{verb}"), bytes.into()).await.expect("an answer");
    let answer: Value = serde_json::from_slice(&answer.payload).expect("JSON");
    assert!(answer.get("error").is_none(), "{verb} {body}: {answer}");
    answer
}

/// `nats stream edit NAME --flag value … --force`
async fn edit(client: &Client, line: &str) {
    let words: Vec<String> = line.replace('=', " ").split(' ').map(|word| word.trim_matches('\'').to_owned()).collect();
    assert_eq!(words[..3], ["nats", "stream", "edit"], "{line}");
    assert_eq!(words.last().unwrap(), "--force", "it would ask: {line}");
    let mut config = ask(client, &format!("STREAM.INFO.{}", words[3]), &Value::Null).await["config"].take();
    let mut flags = words[4..].iter();
    while let Some(flag) = flags.next() {
        let mut value = || flags.next().unwrap().clone();
        let nanos = |text: &str| u64::try_from(humantime::parse_duration(text).unwrap().as_nanos()).unwrap();
        match &**flag {
            "--force" => {}
            "--ack" => config["no_ack"] = false.into(),
            "--subjects" => config["subjects"] = value().split(',').collect::<Vec<_>>().into(),
            "--dupe-window" => config["duplicate_window"] = nanos(&value()).into(),
            "--max-age" => config["max_age"] = nanos(&value()).into(),
            "--discard" => config["discard"] = value().into(),
            "--no-discard-per-subject" => config["discard_new_per_subject"] = false.into(),
            "--max-msg-size" => config["max_msg_size"] = value().parse::<i64>().unwrap().into(),
            "--max-msgs-per-subject" => config["max_msgs_per_subject"] = value().parse::<i64>().unwrap().into(),
            other => panic!("{other} of {line}"),
        }
    }
    ask(client, &format!("STREAM.UPDATE.{}", words[3]), &config).await;
}

async fn patient(nats: &Nats) -> (Database, Patient) {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let mut patient = Patient::new(&database, nats).await;
    let of = |settings: RelaySettings| {
        settings
            .set("nats.stream", "S")
            .set("nats.create.subjects", "s.>")
            .set("route.subject", "s.{aggregate_type}.{event_type}")
    };
    patient.settings = of(patient.settings);
    patient.operator = of(patient.operator);
    (database, patient)
}

/// A stream, settings, the id that finds what is wrong, and whether that can be mended by the command that is printed.
type Fault = (Value, &'static [(&'static str, &'static str)], &'static str, bool);

fn faults() -> Vec<Fault> {
    let second = 1_000_000_000_u64;
    vec![
        (json!({ "subjects": ["s.a", "t.>"] }), &[], "stream-subjects", true),
        (json!({ "no_ack": true }), &[], "stream-no-ack", true),
        (json!({ "duplicate_window": 5 * second }), &[], "stream-window", true),
        (json!({ "duplicate_window": 20 * second, "max_age": 30 * second }), &[], "stream-window", true),
        (
            json!({ "retention": "workqueue", "duplicate_window": 60 * second }),
            &[("retry.max", "5m")],
            "stream-window",
            true,
        ),
        (
            json!({ "max_msgs_per_subject": 5, "discard": "new", "discard_new_per_subject": true }),
            &[],
            "stream-subject-full",
            true,
        ),
        (json!({}), &[("nats.create.replicas", "3")], "stream-replicas-setting", true),
        (
            json!({ "name": "OTHER", "subjects": ["t.>"] }),
            &[("nats.create.replicas", "3")],
            "stream-replicas-setting",
            true,
        ),
        (json!({ "max_msgs": 10, "discard": "old" }), &[], "stream-discard-old", true),
        (json!({ "max_msg_size": 1000 }), &[], "stream-message-size", true),
        (json!({ "subjects": ["s.>", "outbox-compensate.>"] }), &[], "compensation-captured", true),
        (json!({ "name": "OTHER" }), &[], "stream-overlap", true),
        (json!({ "subjects": null, "mirror": { "name": "KEEP" } }), &[], "stream-mirror", false),
        (json!({ "persist_mode": "async" }), &[], "stream-persist-async", false),
        (json!({ "storage": "memory" }), &[], "stream-memory", false),
        (json!({ "name": "OTHER", "subjects": ["t.>"] }), &[("nats.manage", "verify")], "stream-missing", false),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_stream_are_found_and_mended() {
    let nats = Nats::start(NatsVersion::V2_15).await;
    let (_database, mut patient) = patient(&nats).await;
    let client = nats.client().await;
    // While it exists, the server does not remove the folder that the next stream is about to be made in.
    ask(&client, "STREAM.CREATE.KEEP", &json!({ "name": "KEEP", "subjects": ["keep"] })).await;
    let healthy = patient.settings.clone();
    for (change, settings, id, mends) in faults() {
        let mut config = json!({ "name": "S", "subjects": ["s.>"], "retention": "limits", "storage": "file" });
        config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let name = text(&config["name"]);
        ask(&client, &format!("STREAM.CREATE.{name}"), &config).await;
        patient.settings = settings.iter().fold(healthy.clone(), |all, (key, value)| all.set(key, value));
        let report = patient.report().await;
        assert!(report.has(id), "{change} is not found as {id}, but {:#?}", report.findings);
        if mends {
            for (kind, what) in report.mends(id) {
                match &*kind {
                    "command" => edit(&client, &what).await,
                    "setting" => {
                        let (key, value) = what.split_once(" = ").unwrap();
                        patient.settings = patient.settings.clone().set(key, value.trim_matches('"'));
                    }
                    _ => {}
                }
            }
            let report = patient.report().await;
            assert!(!report.has(id), "{change}: what mends {id} does not: {:?}", report.of_id(id));
            assert!(report.ills().is_empty(), "{change}: {:?}", report.findings);
        }
        ask(&client, &format!("STREAM.DELETE.{name}"), &Value::Null).await;
    }
}

/// A stream that ends before what it acknowledged, and one made anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_that_lost_messages_is_found() {
    let nats = Nats::start(NatsVersion::V2_15).await;
    let (database, patient) = patient(&nats).await;
    let client = nats.client().await;
    let config = json!({ "name": "S", "subjects": ["s.>"] });
    let created = text(&ask(&client, "STREAM.CREATE.S", &config).await["created"]).to_owned();
    let note = |created: &str| {
        format!(
            "INSERT INTO outbox_relay_state (slot_name, stream, stream_created, stream_seq)
             VALUES ('{}', 'S', '{created}', 5) ON CONFLICT (slot_name) DO UPDATE SET stream_created = '{created}'",
            database.slot
        )
    };
    // PostgreSQL keeps microseconds, cut off.
    let to_microsecond: jiff::Timestamp = created.parse().unwrap();
    let to_microsecond = jiff::Timestamp::from_microsecond(to_microsecond.as_microsecond()).unwrap().to_string();
    patient.sql(&note(&to_microsecond)).await;
    let report = patient.report().await;
    assert_eq!(report.ills(), ["stream-lost"], "{:?}", report.findings);
    patient.sql(&note("2020-01-01T00:00:00Z")).await;
    let report = patient.report().await;
    assert!(report.has("stream-changed") && report.ills().is_empty(), "{:?}", report.findings);
}

/// Only the relay's user is examined, by messages that go nowhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permissions_are_told_without_publishing_anything() {
    for version in NatsVersion::ENDS {
        let users = |publish: &[String], subscribe: &[String]| {
            let mut config =
                String::from("authorization { users: [ { user: admin, password: p }, { user: relay, password: p, ");
            let _ = writeln!(config, "permissions: {{ publish: {publish:?}, subscribe: {subscribe:?} }} }} ] }}");
            config
        };
        let own = |list: &[&str]| list.iter().map(|subject| (*subject).to_owned()).collect::<Vec<_>>();
        let mut nats = Nats::start_with(version, &users(&own(&["s.a.>"]), &own(&["no.>"]))).await;
        let (_database, mut patient) = patient(&nats).await;
        patient.settings = patient.settings.set("dead_letter.announce", "true").set("nats.user", "nobody");
        patient.settings = patient.settings.clone().set("nats.password", "p");
        let report = patient.report().await;
        assert_eq!(report.ills(), ["nats-refused"], "{:?}", report.findings);
        patient.settings = patient.settings.clone().set("nats.user", "relay");

        let options = async_nats::ConnectOptions::with_user_and_password("admin".to_owned(), "p".to_owned());
        let admin = options.connect(nats.url()).await.unwrap();
        ask(&admin, "STREAM.CREATE.S", &json!({ "name": "S", "subjects": ["s.>"] })).await;
        let mut spies = Vec::new();
        for subject in ["s.>", "outbox-compensate.>", "outbox-dead-letter.>", "_R_.>"] {
            spies.push(admin.subscribe(subject).await.unwrap());
        }
        admin.flush().await.unwrap();

        let (mut publish, mut subscribe) = (Vec::new(), Vec::new());
        let mut rounds = 0;
        loop {
            let report = patient.report().await;
            let ids = ["nats-publish", "nats-api", "nats-inbox"];
            if !ids.iter().any(|id| report.has(id)) {
                assert!(report.ills().is_empty(), "{:?}", report.findings);
                break;
            }
            rounds += 1;
            assert!(rounds <= 2, "{:?}", report.findings);
            for (_, step) in ids.iter().flat_map(|id| report.mends(id)) {
                let (subject, whose) = step.strip_prefix("add ").unwrap().split_once(" to what the user may ").unwrap();
                let list = if whose == "publish" { &mut publish } else { &mut subscribe };
                list.push(subject.to_owned());
            }
            nats.reload(&users(&publish, &subscribe)).await;
        }
        for subject in ["s.*.>", "outbox-compensate.*", "outbox-dead-letter.*.>", "$JS.API.STREAM.INFO.S"] {
            assert!(publish.iter().any(|allowed| allowed == subject), "{subject} is not among {publish:?}");
        }
        // What is said of permissions is what they are: with all of them a relay runs.
        let info = ask(&admin, "STREAM.INFO.S", &Value::Null).await;
        assert_eq!(info["state"]["last_seq"], 0, "something was published");
        for spy in &mut spies {
            let heard = tokio::time::timeout(Duration::from_millis(1), spy.next()).await;
            assert!(heard.is_err(), "{heard:?}");
        }
        let mut relay = patient.settings.start();
        relay.wait_ready().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_that_is_off_is_found() {
    let accounts = |jetstream: &str| {
        format!("accounts {{ A {{ users: [{{user: a, password: a}}]\n{jetstream}\n }} }}\nno_auth_user: a\n")
    };
    let mut nats = Nats::start_with(NatsVersion::V2_10, &accounts("")).await;
    let (_database, patient) = patient(&nats).await;
    let report: Report = patient.report().await;
    assert_eq!(report.ills(), ["jetstream"], "{:?}", report.findings);
    assert!(report.mends("jetstream")[0].1.contains("enable JetStream"));
    nats.stop().await;
    let report = patient.report().await;
    assert_eq!(report.ills(), ["nats-unreachable"], "{:?}", report.findings);
    nats.configure(&accounts("jetstream: enabled"));
    nats.start_again().await;
    assert!(patient.report().await.ills().is_empty());
}
