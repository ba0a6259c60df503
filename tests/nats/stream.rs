//! Making and verifying the stream.

use std::time::Duration;

use outbox_relay::config::{self, Manage, Storage};
use outbox_relay::fault::{Class, Failure};
use outbox_relay::nats::connect::connect;
use outbox_relay::nats::stream::{Finding, Retention, Stream, StreamFacts, StreamFault};
use serde_json::{Value, json};

use super::{Rig, SOON, message_id, payload, settings};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::wait::eventually;

const FILTER: &str = "outbox.*.>";

pub async fn ask(server: &Nats, verb: &str, body: &Value) -> Value {
    let client = server.client().await;
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let answer = client.request(format!("$JS.API.{verb}"), body.into()).await.unwrap();
    let answer: Value = serde_json::from_slice(&answer.payload).unwrap();
    assert!(answer["error"].is_null(), "{verb}: {answer}");
    answer
}

/// Changes a stream's configuration as raw JSON, which knows more than a client does.
pub async fn update(server: &Nats, stream: &str, change: impl FnOnce(&mut Value)) {
    let mut config = ask(server, &format!("STREAM.INFO.{stream}"), &Value::Null).await["config"].take();
    change(&mut config);
    ask(server, &format!("STREAM.UPDATE.{stream}"), &config).await;
}

async fn ensure(config: &config::Nats) -> Result<(StreamFacts, Vec<Finding>), StreamFault> {
    let (connection, _inboxes) = connect(config, 16).await.unwrap();
    Stream::new(&connection, config).ensure(config, FILTER).await
}

#[tokio::test]
async fn a_missing_stream_is_made_as_the_settings_say_and_then_verified() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let mut config = settings(&server.url());
        config.manage = Manage::Verify;
        let missing = ensure(&config).await.unwrap_err();
        assert_eq!((missing.class(), &missing), (Class::Fatal, &StreamFault::Missing("OUTBOX".to_owned())));

        config.manage = Manage::Create;
        config.create.subjects = vec!["outbox.>".to_owned(), "more.*".to_owned()];
        config.create.storage = Storage::Memory;
        config.create.duplicate_window = Duration::from_secs(90);
        config.create.max_age = Some(Duration::from_hours(48));
        config.create.max_bytes = Some(1_000_000);
        let (facts, findings) = ensure(&config).await.unwrap();
        assert_eq!(facts.subjects, config.create.subjects);
        assert_eq!((facts.first_sequence, facts.last_sequence, facts.messages), (0, 0, 0));
        assert_eq!((facts.duplicate_window, facts.max_age), (Duration::from_secs(90), Some(Duration::from_hours(48))));
        assert_eq!((facts.retention, facts.replicas, facts.max_msg_size), (Retention::Limits, 1, None));
        assert!(facts.has_leader && facts.remembers());
        let codes: Vec<_> = findings.iter().map(|finding| finding.code).collect();
        assert_eq!(codes, ["discard_old", "storage_memory"]);
        let made = ask(&server, "STREAM.INFO.OUTBOX", &Value::Null).await["config"].take();
        assert_eq!(
            (&made["max_bytes"], &made["storage"], &made["discard"]),
            (&json!(1_000_000), &json!("memory"), &json!("old"))
        );

        // It exists: other settings for its making change nothing.
        config.create.storage = Storage::File;
        let (again, _) = ensure(&config).await.unwrap();
        assert_eq!((again.created, &again.subjects), (facts.created, &facts.subjects));
        config.manage = Manage::Verify;
        assert_eq!(ensure(&config).await.unwrap().0, again);

        // Both shorter than is good, but as the settings say.
        config.manage = Manage::Create;
        config.stream = "SHORT".to_owned();
        config.create.subjects = vec!["short.>".to_owned()];
        config.create.max_age = Some(Duration::from_secs(20));
        config.create.duplicate_window = Duration::from_secs(20);
        let (connection, _inboxes) = connect(&config, 16).await.unwrap();
        let (facts, findings) = Stream::new(&connection, &config).ensure(&config, "short.a").await.unwrap();
        assert_eq!(facts.duplicate_window, Duration::from_secs(20));
        let codes: Vec<_> = findings.iter().map(|finding| finding.code).collect();
        assert_eq!(codes, ["max_age_short", "discard_old", "duplicate_window_short"]);
    }
}

/// Each stream that cannot carry an outbox, and a word of what is said about it.
#[tokio::test]
async fn each_unfit_stream_is_refused_for_its_own_reason() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        ask(&server, "STREAM.CREATE.SOURCE", &json!({ "name": "SOURCE", "subjects": ["source"] })).await;
        let base = json!({ "name": "OUTBOX", "subjects": ["outbox.>"], "retention": "limits", "storage": "file" });
        let mut cases = vec![
            (json!({ "subjects": null, "mirror": { "name": "SOURCE" } }), "is a mirror"),
            (json!({ "no_ack": true }), "nats stream edit OUTBOX --ack"),
            (json!({ "subjects": ["outbox.*"] }), "--subjects 'outbox.*,outbox.*.>'"),
            (json!({ "subjects": ["other.>"] }), "does not cover \"outbox.*.>\" of route.subject"),
            (json!({ "sealed": true }), "is sealed"),
        ];
        if version == NatsVersion::V2_15 {
            cases.push((json!({ "persist_mode": "async" }), "persist_mode async"));
            cases.push((json!({ "allow_msg_counter": true }), "allow_msg_counter"));
        }
        for (change, words) in cases {
            let mut config = base.clone();
            config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            let sealed = config["sealed"].as_bool() == Some(true);
            config["sealed"] = false.into();
            ask(&server, "STREAM.CREATE.OUTBOX", &config).await;
            if sealed {
                update(&server, "OUTBOX", |config| config["sealed"] = true.into()).await;
            }
            let fault = ensure(&settings(&server.url())).await.unwrap_err();
            assert_eq!(fault.class(), Class::Fatal);
            let text = fault.to_string();
            assert!(text.contains(words) && text.contains("\"OUTBOX\""), "{change}: {text}");
            ask(&server, "STREAM.DELETE.OUTBOX", &Value::Null).await;
        }
    }
}

#[tokio::test]
async fn what_the_operator_should_know_is_found() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        // While it exists, the server does not remove the folder that the next stream is about to be made in.
        ask(&server, "STREAM.CREATE.KEEP", &json!({ "name": "KEEP", "subjects": ["keep"] })).await;
        let base = json!({ "name": "OUTBOX", "subjects": ["outbox.>"], "storage": "file" });
        for (change, code) in [
            (json!({ "retention": "workqueue" }), "retention_workqueue"),
            (json!({ "retention": "interest" }), "retention_interest"),
            (json!({ "max_age": 3_600_000_000_000_u64 }), "max_age_short"),
            (json!({ "max_msgs": 10 }), "discard_old"),
            (json!({ "max_msgs_per_subject": 5 }), "max_msgs_per_subject"),
            (json!({ "duplicate_window": 5_000_000_000_u64 }), "duplicate_window_short"),
            (json!({ "storage": "memory" }), "storage_memory"),
            (json!({ "subject_transform": { "src": "outbox.>", "dest": "moved.>" } }), "subject_transform"),
        ] {
            let mut config = base.clone();
            config.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            ask(&server, "STREAM.CREATE.OUTBOX", &config).await;
            let (facts, findings) = ensure(&settings(&server.url())).await.unwrap();
            assert_eq!(findings.iter().map(|finding| finding.code).collect::<Vec<_>>(), [code], "{change}");
            assert_eq!(facts.remembers(), !code.starts_with("retention"));
            ask(&server, "STREAM.DELETE.OUTBOX", &Value::Null).await;
        }
        ask(&server, "STREAM.CREATE.OUTBOX", &base).await;
        assert_eq!(ensure(&settings(&server.url())).await.unwrap().1, []);
    }
}

#[tokio::test]
async fn a_stream_that_cannot_be_made_names_the_setting() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let unfit = async |change: &dyn Fn(&mut config::Nats), words: &str| {
            let mut config = settings(&server.url());
            change(&mut config);
            let fault = ensure(&config).await.unwrap_err();
            assert_eq!(fault.class(), Class::Fatal, "{fault}");
            assert!(fault.to_string().contains(words), "{fault}");
        };
        unfit(&|config| config.create.replicas = 3, "nats.create.replicas").await;
        unfit(&|config| config.create.subjects = vec!["a..b".to_owned()], "nats.create").await;
        ask(&server, "STREAM.CREATE.OLD", &json!({ "name": "OLD", "subjects": ["outbox.a.>"] })).await;
        unfit(&|_| {}, "overlap with those of stream [\"OLD\"]").await;
        let config = settings(&server.url());
        let (connection, _inboxes) = connect(&config, 16).await.unwrap();
        let stream = Stream::new(&connection, &config);
        assert_eq!(stream.capturing("outbox.a.b").await, Ok(Some("OLD".to_owned())));
        assert_eq!(stream.capturing("outbox-compensate.*").await, Ok(None));
    }
}

#[tokio::test]
async fn without_jetstream_the_relay_waits() {
    for version in NatsVersion::ENDS {
        let off = "accounts { OFF: { users: [ { user: u, password: p } ] } }\nno_auth_user: u";
        let server = Nats::start_with(version, off).await;
        let fault = ensure(&settings(&server.url())).await.unwrap_err();
        assert_eq!(fault.class(), Class::Transient);
        let StreamFault::Waiting { failure: Failure::JetStreamUnavailable(_), .. } = &fault else {
            panic!("{fault:?}")
        };
        assert!(fault.to_string().contains("enable JetStream"), "{fault}");
    }
}

#[tokio::test]
async fn a_domain_is_spoken_to_by_its_name() {
    for version in NatsVersion::ENDS {
        let mut server = Nats::start(version).await;
        server.stop().await;
        server.configure("jetstream { domain: hub }");
        server.start_again().await;
        let mut config = settings(&server.url());
        config.domain = Some("hub".to_owned());
        assert_eq!(ensure(&config).await.unwrap().0.name, "OUTBOX");
        config.domain = Some("nowhere".to_owned());
        let fault = ensure(&config).await.unwrap_err();
        assert!(fault.to_string().contains("$JS.nowhere.API"), "{fault}");
    }
}

#[tokio::test]
async fn a_missing_permission_is_named() {
    for version in NatsVersion::ENDS {
        for (permissions, words) in [
            (r#"publish: { deny: "$JS.API.>" }"#, "publish to \"$JS.API.STREAM.INFO.OUTBOX\""),
            (r#"publish: { deny: "$JS.API.STREAM.CREATE.>" }"#, "publish to \"$JS.API.STREAM.CREATE.OUTBOX\""),
            (r#"subscribe: { deny: "_INBOX.>" }"#, "subscribe to \"_INBOX.>\""),
        ] {
            let user = format!("{{ user: u, password: p, permissions: {{ {permissions} }} }}");
            let server =
                Nats::start_with(version, &format!("authorization {{ users: [ {user} ] }}\nno_auth_user: u")).await;
            let fault = ensure(&settings(&server.url())).await.unwrap_err();
            assert_eq!(fault.class(), Class::Fatal, "{fault}");
            assert!(fault.to_string().contains(words), "{fault}");
        }
        // Nothing is sent that could never be acknowledged.
        let user = "{ user: u, password: p, permissions: { subscribe: { deny: '_INBOX.>' } } }";
        let server =
            Nats::start_with(version, &format!("authorization {{ users: [ {user} ] }}\nno_auth_user: u")).await;
        let rig = Rig::open(&settings(&server.url())).await;
        let send = || rig.publisher.send(1, "outbox.a.b".to_owned(), message_id("1"), payload(1));
        eventually(SOON, "the refusal is known", async || matches!(send(), Err(Failure::SetUp { .. }))).await;
    }
}
