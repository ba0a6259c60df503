//! What a stream is, and whether it can carry an outbox.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::fault::Failure;
use crate::flow::subject::covers;

/// A window below this is not much longer than an acknowledgement's timeout and a reconnect.
const SHORT_WINDOW: Duration = Duration::from_secs(30);

/// Subscribers are away for less than this every now and then.
const SHORT_AGE: Duration = Duration::from_hours(24);

/// When a stream forgets its messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Limits,
    Interest,
    WorkQueue,
    /// One that this version does not know.
    Other,
}

/// What the relay needs to know of its stream, as the server told last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamFacts {
    pub name: String,
    /// Another time means another stream of the same name.
    pub created: jiff::Timestamp,
    pub subjects: Vec<String>,
    /// The sequence of the oldest message; of the next one when there is none.
    pub first_sequence: u64,
    /// The sequence given last; 0 when none was.
    pub last_sequence: u64,
    pub messages: u64,
    /// Bytes.
    pub bytes: u64,
    pub duplicate_window: Duration,
    /// Bytes, headers included. `None`: only the server's `max_payload` counts.
    pub max_msg_size: Option<usize>,
    pub retention: Retention,
    /// `None`: for ever.
    pub max_age: Option<Duration>,
    /// Whether the oldest messages go when it holds too many, or too many bytes.
    pub drops_oldest: bool,
    /// Whether a new message may push out an older one of its subject.
    pub limited_per_subject: bool,
    /// When its oldest message was stored; `None` when it holds none.
    pub first_stored: Option<jiff::Timestamp>,
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

    /// Whether the stream keeps its messages, so that their ids can be looked up later (§5, resume guard).
    pub fn remembers(&self) -> bool {
        self.retention == Retention::Limits
    }
}

/// Something that is allowed, but that the operator should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// A stable name.
    pub code: &'static str,
    pub text: String,
}

/// Why a stream cannot carry an outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// A stable name.
    pub code: &'static str,
    pub problem: String,
    pub mend: Mend,
}

/// What makes an unfit stream fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mend {
    /// A command of the NATS command line.
    Command(String),
    Advice(String),
}

impl fmt::Display for Mend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(command) => write!(f, "run: {command}"),
            Self::Advice(advice) => f.write_str(advice),
        }
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

    /// Why the stream cannot carry an outbox, if so. `filter`: every subject that the route can make.
    pub(super) fn unfit(&self, filter: &str) -> Option<Unfit> {
        let config = &self.config;
        let name = &config.name;
        let fatal = |code: &'static str, problem: &str, mend: Mend| {
            Some(Unfit { code, problem: format!("stream {name:?} {problem}"), mend })
        };
        let other = Mend::Advice("set nats.stream to another stream".to_owned());
        if config.mirror.is_some() {
            return fatal("mirror", "is a mirror, which takes no messages from publishers", other);
        }
        if config.sealed {
            return fatal("sealed", "is sealed: it takes no messages ever again", other);
        }
        if config.template_owner.as_deref().is_some_and(|owner| !owner.is_empty()) {
            return fatal("template", "belongs to a stream template, which may change or remove it", other);
        }
        if config.allow_msg_counter {
            return fatal("counter", "counts (allow_msg_counter): it takes increments only, no events", other);
        }
        if config.no_ack {
            let fix = Mend::Command(format!("nats stream edit {name} --ack --force"));
            return fatal("no_ack", "acknowledges nothing (no_ack), so the relay cannot know what is stored", fix);
        }
        if config.persist_mode.as_deref() == Some("async") {
            let fix = "create it anew with persist_mode \"default\" (it cannot be changed later)".to_owned();
            return fatal(
                "persist_async",
                "may acknowledge before it stores (persist_mode async), so acknowledged events can be lost",
                Mend::Advice(fix),
            );
        }
        let subjects = config.subjects.as_deref().unwrap_or_default();
        if !subjects.iter().any(|wide| covers(wide, filter)) {
            // Servers refuse a stream whose subjects overlap each other.
            let kept = subjects.iter().map(String::as_str).filter(|kept| !covers(filter, kept));
            let subjects_then = kept.chain([filter]).collect::<Vec<_>>().join(",");
            let fix = Mend::Command(format!("nats stream edit {name} --subjects '{subjects_then}' --force"));
            let problem = format!("takes {}, which does not cover {filter:?} of route.subject", listed(subjects));
            return fatal("subjects", &problem, fix);
        }
        None
    }

    /// What the operator should know.
    pub(super) fn findings(&self) -> Vec<Finding> {
        let config = &self.config;
        let mut found = Vec::new();
        let mut find = |when: bool, code: &'static str, text: String| {
            if when {
                found.push(Finding { code, text });
            }
        };
        let full = |used: u64, most: i64| u64::try_from(most).is_ok_and(|most| most > 0 && used >= most / 10 * 9);
        let age = Duration::from_nanos(config.max_age);
        let window = Duration::from_nanos(config.duplicate_window);
        let retention = config.retention.as_deref();
        find(
            retention == Some("workqueue"),
            "retention_workqueue",
            "it removes messages once consumed: an event sent again after the duplicate window is stored again"
                .to_owned(),
        );
        find(
            retention == Some("interest"),
            "retention_interest",
            "it drops messages without a consumer, and removes them once consumed: events that nobody waits for are \
             acknowledged and gone, and one sent again after the duplicate window is stored again"
                .to_owned(),
        );
        find(
            config.max_age > 0 && age < SHORT_AGE,
            "max_age_short",
            format!("it forgets messages after {}: subscribers that are away longer miss them", human(age)),
        );
        find(
            config.drops_oldest(),
            "discard_old",
            "when full (max_bytes, max_msgs) it removes its oldest messages, consumed or not; with discard \"new\" the \
             relay waits instead"
                .to_owned(),
        );
        find(
            config.discard.as_deref() == Some("new")
                && (full(self.state.messages, config.max_msgs) || full(self.state.bytes, config.max_bytes)),
            "nearly_full",
            "it is nearly full (max_bytes, max_msgs), and then takes nothing more: rows will wait until there is room"
                .to_owned(),
        );
        find(
            config.max_msgs_per_subject > 0,
            "max_msgs_per_subject",
            format!("it keeps only {} messages a subject", config.max_msgs_per_subject),
        );
        find(
            config.discard_new_per_subject,
            "discard_new_per_subject",
            "events of a full subject are refused, and become dead letters after their last attempt".to_owned(),
        );
        find(
            window < SHORT_WINDOW,
            "duplicate_window_short",
            format!("its duplicate window is only {}; {} or more is better", human(window), human(SHORT_WINDOW)),
        );
        find(
            config.storage.as_deref() == Some("memory"),
            "storage_memory",
            "it lives in memory: a restart of its servers loses acknowledged events".to_owned(),
        );
        find(
            self.clustered() && config.num_replicas < 3,
            "replicas_few",
            format!(
                "it has {} replica(s): the loss of one server can stop it or lose acknowledged events; 3 survive it",
                config.num_replicas
            ),
        );
        find(
            config.subject_transform.is_some(),
            "subject_transform",
            "it stores events under other subjects than route.subject makes".to_owned(),
        );
        found
    }
}

fn human(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

fn listed(subjects: &[String]) -> String {
    if subjects.is_empty() { "no subjects".to_owned() } else { format!("{subjects:?}") }
}
