//! What an operator does by command: look at rows, have them tried again, put dead letters back, decide on
//! compensations.

mod compensations;
mod dead_letters;
mod events;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion, Space, denying};
use crate::harness::postgres::PgVersion;
use crate::harness::relay::RelaySettings;
use crate::harness::scene::Scene;

/// A NATS server that refuses events of the type `refused`, and an outbox before it.
async fn refusing_scene(postgres: PgVersion, nats: NatsVersion) -> (Nats, Scene) {
    let space = Space::new();
    let nats = Nats::start_with(nats, &denying(&format!("{}.order.refused", space.prefix))).await;
    let mut scene = Scene::before(postgres, &nats, space).await;
    scene.settings = scene.settings.set("retry.initial", "50ms").set("retry.max", "100ms");
    scene.settings = scene.settings.set("reconcile.interval", "50ms");
    (nats, scene)
}

/// Inserts an event of the aggregate type `order`.
async fn insert(scene: &Scene, event: &str, aggregate: &str, kind: &str, max_retries: i32) {
    scene
        .sql(&format!(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, max_retries)
             VALUES ('{event}', 'order', '{aggregate}', '{kind}', '{{\"secret\": \"salt\"}}', {max_retries})"
        ))
        .await;
}

/// What a command said.
struct Said {
    code: i32,
    out: String,
    err: String,
}

/// Runs a command that is to end with this exit code.
async fn run(settings: &RelaySettings, code: i32, arguments: &[&str]) -> Said {
    let output = settings.clone().unset("log.level").run(arguments).await;
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let said = Said { code: output.status.code().unwrap(), out: text(&output.stdout), err: text(&output.stderr) };
    assert_eq!(said.code, code, "{arguments:?}: {}\n{}", said.out, said.err);
    said
}

/// Runs a command with `--output json`.
async fn json(settings: &RelaySettings, code: i32, arguments: &[&str]) -> Value {
    let said = run(settings, code, &[arguments, &["--output", "json"]].concat()).await;
    serde_json::from_str(&said.out).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {}", said.out))
}

/// What a command did to each row, as JSON.
async fn acted(settings: &RelaySettings, code: i32, arguments: &[&str]) -> Value {
    let mut done = json(settings, code, arguments).await;
    assert_eq!(shape(&done), "rows: array");
    done["rows"].take()
}

/// The rows that a list shows as JSON.
async fn listed(settings: &RelaySettings, arguments: &[&str]) -> Value {
    let mut page = json(settings, 0, arguments).await;
    assert!(["next_after: null, rows: array", "next_after: number, rows: array"].contains(&&*shape(&page)), "{page}");
    page["rows"].take()
}

/// The names of an object's fields with the types of their values, as `a: number, b: text`.
fn shape(value: &Value) -> String {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "text",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let fields: BTreeMap<&String, &str> =
        value.as_object().unwrap().iter().map(|(key, value)| (key, kind(value))).collect();
    fields.iter().map(|(name, kind)| format!("{name}: {kind}")).collect::<Vec<_>>().join(", ")
}

/// One clear line on stderr that contains the words.
fn assert_one_line(said: &Said, words: &str) {
    assert!(said.err.starts_with("outbox-relay: ") && said.err.trim_end().lines().count() == 1, "{}", said.err);
    assert!(said.err.contains(words), "{words} in {}", said.err);
}
