//! The operator's commands, as people and programs call them.

mod publication;
mod slot;
mod stream;
mod verify;

use std::process::Output;

use serde_json::Value;

use crate::harness::relay::RelaySettings;

/// How a command ended.
#[derive(Debug)]
struct Ended {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Ended {
    /// Standard output as one JSON document.
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The one line that a failed command says.
    fn one_line(&self) -> &str {
        assert!(self.stderr.starts_with("outbox-relay: "), "{self:?}");
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        &self.stderr
    }
}

/// Runs a command with these settings to its end.
async fn command(settings: &RelaySettings, arguments: &[&str]) -> Ended {
    // What a command says of itself, and no log.
    let Output { status, stdout, stderr } = settings.clone().set("log.level", "warn").run(arguments).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    let ended = Ended { code: status.code().expect("an exit code"), stdout: text(stdout), stderr: text(stderr) };
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
    assert!(!ended.stdout.contains('\x1b') && !ended.stderr.contains('\x1b'), "colour without a terminal: {ended:?}");
    ended
}

/// Runs a command that must end with this code.
async fn expect(settings: &RelaySettings, arguments: &[&str], code: i32) -> Ended {
    let ended = command(settings, arguments).await;
    assert_eq!(ended.code, code, "{arguments:?}: {ended:?}");
    ended
}

/// A document has exactly the fields of a shape, of these types: `"number"`, `"string"`, `"boolean"`, also one of
/// several, `"string|null"`. Each item of a list has the shape's only item. An object under the key `or_null` may be
/// null.
fn assert_shape(value: &Value, shape: &Value) {
    if let Err(difference) = fits(value, shape, "$") {
        panic!("{difference}\n{value:#}");
    }
}

fn fits(value: &Value, shape: &Value, path: &str) -> Result<(), String> {
    match shape {
        Value::String(types) => {
            let found = match value {
                Value::Null => "null",
                Value::Bool(_) => "boolean",
                Value::Number(_) => "number",
                Value::String(_) => "string",
                Value::Array(_) => "list",
                Value::Object(_) => "object",
            };
            types.split('|').any(|one| one == found).then_some(()).ok_or(format!("{path} is {found}, not {types}"))
        }
        Value::Array(items) => {
            let list = value.as_array().ok_or(format!("{path} is no list"))?;
            list.iter().enumerate().try_for_each(|(at, item)| fits(item, &items[0], &format!("{path}[{at}]")))
        }
        Value::Object(fields) => {
            if let Some(inner) = fields.get("or_null") {
                return if value.is_null() { Ok(()) } else { fits(value, inner, path) };
            }
            let object = value.as_object().ok_or(format!("{path} is no object"))?;
            let (found, wanted): (Vec<_>, Vec<_>) = (object.keys().collect(), fields.keys().collect());
            if found != wanted {
                return Err(format!("{path} has the fields {found:?}, not {wanted:?}"));
            }
            fields.iter().try_for_each(|(name, inner)| fits(&object[name], inner, &format!("{path}.{name}")))
        }
        _ => unreachable!("a shape is made of text, lists and objects"),
    }
}

#[test]
fn the_check_of_shapes_finds_what_differs() {
    use serde_json::json;
    let shape = json!({ "a": "number", "b": ["string|null"], "c": { "or_null": { "d": "boolean" } } });
    assert_shape(&json!({ "a": 1, "b": [null, "x"], "c": { "d": true } }), &shape);
    assert_shape(&json!({ "a": 1, "b": [], "c": null }), &shape);
    for wrong in [
        json!({ "a": 1, "b": [] }),
        json!({ "a": 1, "b": [], "c": null, "e": 1 }),
        json!({ "a": "1", "b": [], "c": null }),
        json!({ "a": 1, "b": [2], "c": null }),
        json!({ "a": 1, "b": [], "c": { "d": null } }),
    ] {
        assert!(fits(&wrong, &shape, "$").is_err(), "{wrong}");
    }
}

/// `outbox-relay … | head`, and an operator who wants no colour.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_pipe_is_no_error() {
    use std::io::Read as _;
    use std::process::Stdio;

    let scene = crate::harness::scene::Scene::new().await;
    for arguments in
        [&["slot", "list"][..], &["stream", "plan"], &["verify", "--help"], &["slot", "list", "--output=json"]]
    {
        let mut command = scene.settings.command(arguments);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).env("NO_COLOR", "1").spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        let code = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap().code();
        assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked") && !stderr.contains("cannot write"), "{arguments:?}: {stderr}");
    }
}
