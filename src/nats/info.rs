//! What a stream is, as its server tells.

mod fitness;

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::fault::Failure;
use crate::flow::subject::covers;

pub use fitness::{Finding, Mend, SHORT_WINDOW, Unfit};

/// When a stream forgets its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    /// By its limits of age, number and size alone.
    Limits,
    /// By its limits, and once every consumer has acknowledged them; without consumers at once.
    Interest,
    /// By its limits, and once a consumer has acknowledged them.
    WorkQueue,
    /// One that this version does not know.
    Other,
}

/// What the relay needs to know of its stream, as the server told last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamFacts {
    /// `nats.stream`
    pub name: String,
    /// Another time means another stream of the same name.
    pub created: jiff::Timestamp,
    /// Subjects and filters whose messages it takes.
    pub subjects: Vec<String>,
    /// The sequence of the oldest message; of the next one when there is none.
    pub first_sequence: u64,
    /// The sequence given last; 0 when none was.
    pub last_sequence: u64,
    /// Messages that it holds.
    pub messages: u64,
    /// Bytes.
    pub bytes: u64,
    /// For how long it knows a message's id again.
    pub duplicate_window: Duration,
    /// Bytes, headers included. `None`: only the server's `max_payload` counts.
    pub max_msg_size: Option<usize>,
    /// When it forgets messages.
    pub retention: Retention,
    /// `None`: for ever.
    pub max_age: Option<Duration>,
    /// Whether the oldest messages go when it holds too many, or too many bytes.
    pub drops_oldest: bool,
    /// Whether a new message may push out an older one of its subject.
    pub limited_per_subject: bool,
    /// When its oldest message was stored; `None` when it holds none.
    pub first_stored: Option<jiff::Timestamp>,
    /// How many servers keep it.
    pub replicas: u64,
    /// In a cluster without a leader: `false`.
    pub has_leader: bool,
}

impl StreamFacts {
    /// Whether the stream takes messages on this subject.
    pub fn takes(&self, subject: &str) -> bool {
        self.subjects.iter().any(|filter| covers(filter, subject))
    }

    /// When it was created, as precisely as PostgreSQL keeps a time: a finer one would never be found equal again.
    pub fn created_as_noted(&self) -> SystemTime {
        let time = jiff::Timestamp::from_microsecond(self.created.as_microsecond()).unwrap_or(self.created);
        SystemTime::from(time)
    }

    /// Whether the stream keeps its messages, so that their ids can be looked up later.
    pub fn remembers(&self) -> bool {
        self.retention == Retention::Limits
    }

    /// How long after an event was sent for the first time the stream is asked for it before it is sent again: half the
    /// duplicate window. `None` where the stream forgets messages, and cannot tell.
    pub fn proof_after(&self) -> Option<Duration> {
        self.remembers().then_some(self.duplicate_window / 2)
    }
}

/// The answer to `STREAM.INFO` and `STREAM.CREATE`. What Go leaves out or writes as null is `None`.
#[derive(Debug, Deserialize)]
pub(super) struct Info {
    config: Config,
    created: String,
    state: State,
    #[serde(default)]
    cluster: Option<Cluster>,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
#[derive(Default)]
struct Config {
    name: String,
    subjects: Option<Vec<String>>,
    retention: Option<String>,
    discard: Option<String>,
    storage: Option<String>,
    persist_mode: Option<String>,
    template_owner: Option<String>,
    mirror: Option<IgnoredAny>,
    subject_transform: Option<IgnoredAny>,
    num_replicas: u64,
    max_msgs: i64,
    max_bytes: i64,
    max_msgs_per_subject: i64,
    max_msg_size: i64,
    /// Nanoseconds, like the other.
    max_age: u64,
    duplicate_window: u64,
    sealed: bool,
    no_ack: bool,
    discard_new_per_subject: bool,
    allow_msg_counter: bool,
}

#[derive(Debug, Deserialize)]
#[serde(default)]
#[derive(Default)]
struct State {
    messages: u64,
    bytes: u64,
    first_seq: u64,
    last_seq: u64,
    first_ts: Option<String>,
}

impl Config {
    fn drops_oldest(&self) -> bool {
        (self.max_msgs > 0 || self.max_bytes > 0) && self.discard.as_deref() == Some("old")
    }
}

#[derive(Debug, Deserialize)]
struct Cluster {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    leader: Option<String>,
}

impl Info {
    pub(super) fn facts(&self) -> Result<StreamFacts, Failure> {
        let config = &self.config;
        let created = self
            .created
            .parse()
            .map_err(|error| Failure::UnknownAnswer(format!("the stream's time of creation: {error}")))?;
        Ok(StreamFacts {
            name: config.name.clone(),
            created,
            subjects: config.subjects.clone().unwrap_or_default(),
            first_sequence: self.state.first_seq,
            last_sequence: self.state.last_seq,
            messages: self.state.messages,
            bytes: self.state.bytes,
            duplicate_window: Duration::from_nanos(config.duplicate_window),
            // Negative or, from old configurations, zero: no limit.
            max_msg_size: usize::try_from(config.max_msg_size).ok().filter(|size| *size > 0),
            retention: match config.retention.as_deref() {
                Some("limits") => Retention::Limits,
                Some("interest") => Retention::Interest,
                Some("workqueue") => Retention::WorkQueue,
                _ => Retention::Other,
            },
            max_age: (config.max_age > 0).then(|| Duration::from_nanos(config.max_age)),
            drops_oldest: config.drops_oldest(),
            limited_per_subject: config.max_msgs_per_subject > 0,
            first_stored: self
                .state
                .first_ts
                .as_deref()
                .filter(|_| self.state.messages > 0)
                .and_then(|ts| ts.parse().ok()),
            replicas: config.num_replicas,
            has_leader: !self.clustered() || self.leader().is_some(),
        })
    }

    fn clustered(&self) -> bool {
        self.cluster.as_ref().is_some_and(|cluster| cluster.name.as_deref().is_some_and(|name| !name.is_empty()))
    }

    fn leader(&self) -> Option<&str> {
        self.cluster.as_ref()?.leader.as_deref().filter(|name| !name.is_empty())
    }
}
