//! What would have to change for the stream to be as `nats.create` says, and changing it.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::info::{Finding, Info, Unfit};
use super::stream::{NOT_FOUND, Stream, StreamFault, config_to_create};
use crate::config::NatsCreate;
use crate::fault::Failure;

/// A stream as it is, and as the settings want it.
#[derive(Clone, Debug)]
pub struct StreamPlan {
    /// `nats.stream`
    pub stream: String,
    /// `None`: the stream is to be made.
    pub present: Option<Present>,
    /// What is to change. Of a stream that is to be made: all that the settings say of it.
    pub changes: Vec<Change>,
    /// Why a relay could not use the stream even then, and what to do.
    pub unfit: Option<Unfit>,
    /// What the operator should know of the stream as it would be.
    pub findings: Vec<Finding>,
    /// The whole configuration to ask for. Of a stream that exists it is the present one but for the changes.
    config: Config,
}

/// A stream's configuration as JetStream tells it, fields that this version does not know included.
type Config = Map<String, Value>;

#[derive(Deserialize)]
struct RawInfo {
    config: Config,
    state: Present,
}

/// What a stream holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Present {
    /// Messages.
    #[serde(default)]
    pub messages: u64,
    /// Bytes that they take.
    #[serde(default)]
    pub bytes: u64,
}

/// A field of a stream's configuration that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// As in `nats.create`.
    pub field: &'static str,
    /// `None`: there is no stream yet.
    pub present: Option<Limit>,
    /// What the settings say.
    pub wanted: Limit,
    /// What it does beside changing the field.
    pub effect: Effect,
}

/// The value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum Limit {
    /// In any order.
    Subjects(Vec<String>),
    /// As of replicas.
    Count(u64),
    /// `None`: without end.
    Age(Option<Duration>),
    /// `None`: any number.
    Bytes(Option<u64>),
    /// `file` or `memory`.
    Storage(String),
}

/// What a change does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing else.
    None,
    /// Messages that exceed the new limit are deleted.
    Deletes,
    /// A stream keeps it for its life.
    Impossible,
}

impl StreamPlan {
    /// Whether anything is to be done.
    pub fn is_empty(&self) -> bool {
        self.present.is_some() && self.changes.is_empty()
    }

    /// Whether carrying it out can delete messages.
    pub fn deletes(&self) -> bool {
        self.changes.iter().any(|change| change.effect == Effect::Deletes)
    }
}

impl Stream {
    /// Compares the stream with `create`. Of one that exists, only the fields for which `named` says yes are compared:
    /// what nobody asked for is kept. `filter`: every subject that the route can make.
    ///
    /// # Errors
    /// When it cannot be asked for.
    pub async fn plan(
        &self,
        create: &NatsCreate,
        named: impl Fn(&str) -> bool,
        filter: &str,
    ) -> Result<StreamPlan, StreamFault> {
        match self.info::<RawInfo>().await.map_err(|failure| self.fault(failure))? {
            Ok(info) => self.plan_changes(info, create, named, filter),
            Err(refusal) if refusal.code == NOT_FOUND => self.plan_creation(create, filter),
            Err(refusal) => Err(self.fault(refusal.into_failure())),
        }
    }

    /// Makes or changes the stream as planned. Every field that the plan does not name stays as it was when the plan
    /// was made.
    ///
    /// # Errors
    /// When the server refuses, with the setting to change.
    pub async fn apply(&self, plan: &StreamPlan, create: &NatsCreate) -> Result<(), StreamFault> {
        let verb = if plan.present.is_some() { "UPDATE" } else { "CREATE" };
        let answer = self.api.call::<Value>(&format!("STREAM.{verb}.{}", self.name), &json!(plan.config)).await;
        match answer.map_err(|failure| self.fault(failure))? {
            Ok(_) => Ok(()),
            Err(refusal) => Err(self.refused(&verb.to_lowercase(), refusal, create).await),
        }
    }

    fn plan_creation(&self, create: &NatsCreate, filter: &str) -> Result<StreamPlan, StreamFault> {
        let config = target(&self.name, create);
        let changes = FIELDS
            .into_iter()
            .map(|(field, key)| Change {
                field,
                present: None,
                wanted: limit(field, config.get(key)),
                effect: Effect::None,
            })
            .collect();
        self.judged(None, changes, config, filter)
    }

    fn plan_changes(
        &self,
        info: RawInfo,
        create: &NatsCreate,
        named: impl Fn(&str) -> bool,
        filter: &str,
    ) -> Result<StreamPlan, StreamFault> {
        let (before, present) = (info.config, info.state);
        let mut config = before.clone();
        let target = target(&self.name, create);
        for (field, key) in FIELDS {
            if let Some(value) = target.get(key).filter(|_| named(field)) {
                config.insert(key.to_owned(), value.clone());
            }
        }
        // The server takes no window longer than the age.
        let number = |key: &str| config.get(key).and_then(Value::as_u64).unwrap_or(0);
        let age = number("max_age");
        if age > 0 && number("duplicate_window") > age {
            config.insert("duplicate_window".to_owned(), age.into());
        }
        let changes: Vec<Change> = FIELDS
            .into_iter()
            .map(|(field, key)| (field, limit(field, before.get(key)), limit(field, config.get(key))))
            .filter(|(_, present, wanted)| differ(present, wanted))
            .map(|(field, present, wanted)| {
                let effect = effect(field, &present, &wanted);
                Change { field, present: Some(present), wanted, effect }
            })
            .collect();
        self.judged(Some(present), changes, config, filter)
    }

    /// What a relay would say of the stream.
    fn judged(
        &self,
        present: Option<Present>,
        changes: Vec<Change>,
        config: Config,
        filter: &str,
    ) -> Result<StreamPlan, StreamFault> {
        let info: Info = serde_json::from_value(json!({ "config": config, "created": "", "state": {} }))
            .map_err(|error| self.fault(Failure::UnknownAnswer(format!("the stream's configuration: {error}"))))?;
        let (unfit, findings) = (info.unfit(filter), info.findings());
        Ok(StreamPlan { stream: self.name.clone(), present, changes, unfit, findings, config })
    }
}

/// The fields of `nats.create`, and the keys of JetStream's configuration.
const FIELDS: [(&str, &str); 6] = [
    ("subjects", "subjects"),
    ("replicas", "num_replicas"),
    ("storage", "storage"),
    ("duplicate_window", "duplicate_window"),
    ("max_age", "max_age"),
    ("max_bytes", "max_bytes"),
];

fn target(stream: &str, create: &NatsCreate) -> Config {
    match config_to_create(stream, create) {
        Value::Object(config) => config,
        // It makes nothing else.
        _ => Config::new(),
    }
}

/// A value as JetStream tells it: nanoseconds, zero or negative for "no limit".
fn limit(field: &str, value: Option<&Value>) -> Limit {
    let some = value.and_then(Value::as_u64).filter(|number| *number > 0);
    match field {
        "subjects" => {
            let subjects = value.and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
            Limit::Subjects(subjects.map(str::to_owned).collect())
        }
        "storage" => Limit::Storage(value.and_then(Value::as_str).unwrap_or("file").to_owned()),
        "replicas" => Limit::Count(some.unwrap_or(1)),
        "max_bytes" => Limit::Bytes(some),
        _ => Limit::Age(some.map(Duration::from_nanos)),
    }
}

fn differ(present: &Limit, wanted: &Limit) -> bool {
    match (present, wanted) {
        (Limit::Subjects(present), Limit::Subjects(wanted)) => {
            present.iter().collect::<BTreeSet<_>>() != wanted.iter().collect::<BTreeSet<_>>()
        }
        _ => present != wanted,
    }
}

/// What a change of one limit does. That a window is shorter deletes nothing.
fn effect(field: &str, present: &Limit, wanted: &Limit) -> Effect {
    let shrinks = match (present, wanted) {
        (Limit::Storage(_), _) => return Effect::Impossible,
        (Limit::Age(present), Limit::Age(Some(wanted))) => present.is_none_or(|present| *wanted < present),
        (Limit::Bytes(present), Limit::Bytes(Some(wanted))) => present.is_none_or(|present| *wanted < present),
        _ => false,
    };
    if shrinks && field != "duplicate_window" { Effect::Deletes } else { Effect::None }
}
