//! `outbox-relay stream`: the plan is what happens, and nothing else does.

use serde_json::{Value, json};

use super::{assert_shape, expect};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::relay::RelaySettings;
use crate::nats::stream::{ask, update};

fn settings(server: &Nats, space: &Space) -> RelaySettings {
    RelaySettings::new("postgres://nobody@127.0.0.1:1/none", &server.url()).within(space)
}

async fn config(server: &Nats, stream: &str) -> Value {
    let mut config = ask(server, &format!("STREAM.INFO.{stream}"), &Value::Null).await["config"].take();
    // What the server writes in by itself.
    config["metadata"] = Value::Null;
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_the_settings_name_is_changed() {
    let shape = json!({
        "stream": "string", "action": "string", "messages": "number|null", "bytes": "number|null",
        "deletes_messages": "boolean", "unfit": "string|null", "findings": [{ "code": "string", "text": "string" }],
        "changes": [{
            "field": "string", "present": "string|number|list|null", "wanted": "string|number|list|null",
            "deletes_messages": "boolean", "possible": "boolean",
        }],
    });
    for version in NatsVersion::ENDS {
        let (server, space) = (Nats::shared(version).await, Space::new());
        let (base, name) = (settings(server, &space), space.stream.as_str());
        let plan = async |settings: &RelaySettings, code| {
            let plan = expect(settings, &["stream", "plan", "--output", "json"], code).await.json();
            assert_shape(&plan, &shape);
            plan
        };
        let made = plan(&base, 3).await;
        assert_eq!((&made["action"], &made["messages"]), (&json!("create"), &Value::Null));
        let made = expect(&base, &["stream", "apply"], 0).await;
        assert!(made.stdout.contains(&format!("stream {name} created")), "{made:?}");
        assert_eq!(plan(&base, 0).await["action"], json!("none"));
        let done = expect(&base, &["stream", "apply"], 0).await;
        assert!(done.stdout.contains("nothing to do"), "{done:?}");

        // An operator's own changes, to keys that the settings name and to others.
        let extra = format!("{}.more", name.to_lowercase());
        update(server, name, |config| {
            config["subjects"] = json!([format!("{}.>", space.prefix), extra]);
            config["max_msg_size"] = 4096.into();
            config["description"] = "ours".into();
            config["max_age"] = 90_000_000_000_000_u64.into();
        })
        .await;
        let before = config(server, name).await;
        assert_eq!(plan(&base.clone().unset("nats.create.subjects"), 0).await["changes"], json!([]));
        let wanted = base.clone().unset("nats.create.subjects").set("nats.create.max_age", "12h");
        let shrink = plan(&wanted, 3).await;
        assert_eq!(
            shrink["changes"],
            json!([{
                "field": "max_age", "present": 90_000, "wanted": 43_200, "deletes_messages": true, "possible": true,
            }])
        );
        assert_eq!((&shrink["deletes_messages"], &shrink["action"]), (&json!(true), &json!("update")));
        let refused = expect(&wanted, &["stream", "apply"], 4).await;
        assert!(refused.stderr.contains("DELETES all messages older than 12h"), "{refused:?}");
        assert_eq!(config(server, name).await, before, "it was refused");
        expect(&wanted, &["stream", "apply", "--yes"], 0).await;
        let mut expected = before.clone();
        expected["max_age"] = 43_200_000_000_000_u64.into();
        assert_eq!(config(server, name).await, expected, "something else changed too");

        let grow = plan(&wanted.clone().set("nats.create.max_age", "never"), 3).await;
        assert_eq!((&grow["deletes_messages"], &grow["changes"][0]["wanted"]), (&json!(false), &Value::Null));
        let narrow = plan(&base.clone().set("nats.create.subjects", &format!("{}.a", space.prefix)), 3).await;
        assert!(narrow["unfit"].as_str().unwrap().contains("does not cover"), "{narrow}");

        // What a stream keeps for life stops all of it.
        let other = wanted.clone().set("nats.create.storage", "memory").set("nats.create.max_age", "never");
        let change = plan(&other, 3).await["changes"][0].take();
        assert_eq!((&change["field"], &change["possible"]), (&json!("storage"), &json!(false)));
        let refused = expect(&other, &["stream", "apply", "--yes"], 1).await;
        assert!(refused.stderr.contains("keeps its storage for life"), "{refused:?}");
        assert_eq!(config(server, name).await, expected, "half of it was done");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_server_refuses_names_the_setting() {
    let (server, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let base = settings(server, &space);
    expect(&base, &["stream", "apply", "--yes"], 0).await;
    let refused = expect(&base.clone().set("nats.create.replicas", "3"), &["stream", "apply", "--yes"], 1).await;
    assert!(refused.stderr.contains("set nats.create.replicas = 1, or run a cluster"), "{refused:?}");
    let taken = settings(server, &Space { stream: format!("{}_2", space.stream), prefix: space.prefix.clone() });
    let refused = expect(&taken, &["stream", "apply", "--yes"], 1).await;
    assert!(refused.stderr.contains(&format!("overlap with those of stream [{:?}]", space.stream)), "{refused:?}");
    let away = base.clone().set("nats.url", "nats://127.0.0.1:1");
    assert!(expect(&away, &["stream", "plan"], 1).await.one_line().contains("127.0.0.1:1"));
}
