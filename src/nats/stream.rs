//! The relay's stream: created when missing, verified, watched.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::api::{Api, Refusal};
use super::connect::Connection;
use super::info::Info;
use crate::config::{self, Manage, Storage};
use crate::fault::{Class, Failure};

pub use super::info::{Finding, Mend, Retention, SHORT_WINDOW, StreamFacts, Unfit};

/// JetStream's "stream not found".
pub(super) const NOT_FOUND: u64 = 10_059;
/// "stream name already in use with a different configuration": someone else was first.
const NAME_IN_USE: u64 = 10_058;
/// "subjects overlap with an existing stream".
const OVERLAP: u64 = 10_065;

/// Why the stream cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamFault {
    /// Passes, or someone mends it outside the relay: try again.
    #[error("stream {stream:?} cannot be checked yet: {failure}; {}", failure.hint())]
    Waiting { stream: String, failure: Failure },
    /// The relay may not make it.
    #[error("stream {0:?} does not exist; create it, or set nats.manage = \"create\"")]
    Missing(String),
    /// It exists, or would have to be made, in a way that cannot work.
    #[error("{problem}; {fix}")]
    Unfit { problem: String, fix: Cow<'static, str> },
    /// `action`: what the relay's user may not do, as `publish to`.
    #[error("the relay's user may not {action} {subject:?} on NATS; allow it in the permissions of its account")]
    Denied { action: &'static str, subject: String },
}

impl StreamFault {
    /// [`Class::Transient`] or [`Class::Fatal`].
    pub fn class(&self) -> Class {
        match self {
            Self::Waiting { .. } => Class::Transient,
            Self::Missing(_) | Self::Unfit { .. } | Self::Denied { .. } => Class::Fatal,
        }
    }
}

/// What a look at the stream found.
#[derive(Clone, Debug)]
pub struct Examined {
    /// What it tells of itself.
    pub facts: StreamFacts,
    /// Why it cannot carry an outbox, if so.
    pub unfit: Option<Unfit>,
    /// What the operator should know.
    pub findings: Vec<Finding>,
}

/// The relay's stream. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Stream {
    pub(super) api: Api,
    pub(super) name: String,
}

/// What lies behind a [`Failure::NoResponders`] for this subject, as the stream tells of itself.
pub fn why_no_responders(told: &Result<StreamFacts, Failure>, subject: &str) -> Failure {
    match told {
        Ok(facts) if !facts.takes(subject) => Failure::NoStreamForSubject(subject.to_owned()),
        Ok(facts) if !facts.has_leader => Failure::NoLeader,
        // The stream came or its leader was elected meanwhile; or it may not be asked, which is not the event's fault.
        Ok(_) | Err(Failure::PermissionDenied { .. }) => Failure::NoResponders,
        Err(failure) => failure.clone(),
    }
}

impl Stream {
    /// `config.domain` selects the JetStream domain.
    pub fn new(connection: &Connection, config: &config::Nats) -> Self {
        Self { api: Api::new(connection, config.domain.as_deref()), name: config.stream.clone() }
    }

    /// Makes the stream when it is missing and the settings allow it, and sees whether it can carry an outbox.
    /// `filter`: every subject that the route can make (`Router::subject_filter`).
    pub async fn ensure(
        &self,
        config: &config::Nats,
        filter: &str,
    ) -> Result<(StreamFacts, Vec<Finding>), StreamFault> {
        let info = match self.info::<Info>().await {
            Ok(Ok(info)) => info,
            Ok(Err(refusal)) if refusal.code == NOT_FOUND && config.manage == Manage::Create => {
                self.create(&config.create).await?
            }
            Ok(Err(refusal)) if refusal.code == NOT_FOUND => return Err(StreamFault::Missing(self.name.clone())),
            Ok(Err(refusal)) => return Err(self.fault(refusal.into_failure())),
            Err(failure) => return Err(self.fault(failure)),
        };
        if let Some(Unfit { problem, mend, .. }) = info.unfit(filter) {
            return Err(StreamFault::Unfit { problem, fix: mend.to_string().into() });
        }
        let facts = info.facts().map_err(|failure| self.fault(failure))?;
        Ok((facts, info.findings()))
    }

    /// Sees whether the stream can carry an outbox, and makes nothing. `None`: there is no such stream.
    pub async fn examine(&self, filter: &str) -> Result<Option<Examined>, StreamFault> {
        let info = match self.info::<Info>().await {
            Ok(Ok(info)) => info,
            Ok(Err(refusal)) if refusal.code == NOT_FOUND => return Ok(None),
            Ok(Err(refusal)) => return Err(self.fault(refusal.into_failure())),
            Err(failure) => return Err(self.fault(failure)),
        };
        let facts = info.facts().map_err(|failure| self.fault(failure))?;
        Ok(Some(Examined { facts, unfit: info.unfit(filter), findings: info.findings() }))
    }

    /// Asks for the stream's present state.
    pub async fn facts(&self) -> Result<StreamFacts, Failure> {
        match self.info::<Info>().await? {
            Ok(info) => info.facts(),
            Err(refusal) => Err(self.named(refusal.into_failure())),
        }
    }

    /// The first stream that takes messages on a subject or filter, if one does. For the check that no stream captures
    /// the subject of compensations.
    pub async fn capturing(&self, filter: &str) -> Result<Option<String>, Failure> {
        #[derive(Deserialize)]
        struct Names {
            #[serde(default)]
            streams: Option<Vec<String>>,
        }
        let answer = self.api.call::<Names>("STREAM.NAMES", &json!({ "subject": filter })).await?;
        let names = answer.map_err(Refusal::into_failure)?;
        Ok(names.streams.unwrap_or_default().into_iter().next())
    }

    /// Asks for the stream, and reads of the answer what `T` has of it.
    pub(super) async fn info<T: DeserializeOwned>(&self) -> Result<Result<T, Refusal>, Failure> {
        self.api.call(&format!("STREAM.INFO.{}", self.name), &Value::Null).await
    }

    async fn create(&self, create: &config::NatsCreate) -> Result<Info, StreamFault> {
        let body = config_to_create(&self.name, create);
        let answer = self.api.call::<Info>(&format!("STREAM.CREATE.{}", self.name), &body).await;
        match answer.map_err(|failure| self.fault(failure))? {
            Ok(info) => {
                tracing::info!(stream = self.name, "created the stream");
                Ok(info)
            }
            // Another relay or an operator was faster; whether theirs is fit is seen next.
            Err(refusal) if refusal.code == NAME_IN_USE => match self.info::<Info>().await {
                Ok(Ok(info)) => Ok(info),
                Ok(Err(refusal)) => Err(self.fault(refusal.into_failure())),
                Err(failure) => Err(self.fault(failure)),
            },
            Err(refusal) => Err(self.refused("create", refusal, create).await),
        }
    }

    /// Why the server refused to `create` or `update` the stream, and which setting would mend it.
    pub(super) async fn refused(&self, verb: &str, refusal: Refusal, create: &config::NatsCreate) -> StreamFault {
        let fix: Cow<'static, str> = match refusal.code {
            OVERLAP => {
                let mut others = Vec::new();
                for subject in &create.subjects {
                    others.extend(self.capturing(subject).await.ok().flatten().filter(|other| *other != self.name));
                }
                others.dedup();
                return StreamFault::Unfit {
                    problem: format!(
                        "stream {:?} cannot be {verb}d: its subjects {:?} overlap with those of stream {others:?}",
                        self.name, create.subjects
                    ),
                    fix: "set nats.stream to that one, or change nats.create.subjects and route.subject".into(),
                };
            }
            10_074 => "set nats.create.replicas = 1, or run a cluster".into(),
            10_113 | 10_122 => "set nats.create.max_bytes within the account's limit".into(),
            10_026 | 10_027 | 10_053 | 10_120 => "raise the JetStream limits of the account".into(),
            // Not a server's trouble, though some come as 500: what the settings ask for is not possible.
            10_052 | 10_025 | 10_003 => "see nats.stream and nats.create".into(),
            // No peers for the replicas: a cluster that is not complete yet.
            10_005 => return self.waiting(Failure::JetStreamUnavailable(refusal.text)),
            _ if matches!(refusal.status, 400..=499) && refusal.clone().into_failure().class() != Class::Transient => {
                "see nats.stream and nats.create".into()
            }
            _ => return self.fault(refusal.into_failure()),
        };
        let problem = format!("stream {:?} cannot be {verb}d: {} (error {})", self.name, refusal.text, refusal.code);
        StreamFault::Unfit { problem, fix }
    }

    pub(super) fn fault(&self, failure: Failure) -> StreamFault {
        match self.named(failure) {
            Failure::PermissionDenied { action, subject } => StreamFault::Denied { action, subject },
            failure => self.waiting(failure),
        }
    }

    fn waiting(&self, failure: Failure) -> StreamFault {
        StreamFault::Waiting { stream: self.name.clone(), failure }
    }

    fn named(&self, failure: Failure) -> Failure {
        match failure {
            Failure::StreamMissing(_) => Failure::StreamMissing(self.name.clone()),
            other => other,
        }
    }
}

/// What the relay creates is what `nats stream add` would by default: a log that keeps all it is given, and that
/// removes the oldest when the operator sets a limit. `discard: new` would protect unread events better, but since a
/// log does not shrink by being read it stops the relay for good once full: that is for an operator to choose, not for
/// us.
pub(super) fn config_to_create(name: &str, create: &config::NatsCreate) -> Value {
    let nanos = |duration: std::time::Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    json!({
        "name": name,
        "description": "events of an outbox table, from outbox-relay",
        "subjects": create.subjects,
        "retention": "limits",
        "discard": "old",
        "storage": match create.storage { Storage::File => "file", Storage::Memory => "memory" },
        "num_replicas": create.replicas,
        "duplicate_window": nanos(create.duplicate_window),
        "max_age": create.max_age.map_or(0, nanos),
        "max_bytes": create.max_bytes.and_then(|bytes| i64::try_from(bytes).ok()).unwrap_or(-1),
        "max_msgs": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "max_consumers": -1,
        // As the NATS CLI does: consumers may read single messages from any replica.
        "allow_direct": true,
        "metadata": { "created_by": "outbox-relay" },
    })
}
