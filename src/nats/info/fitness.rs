//! Whether a stream can carry an outbox, and what an operator should know of it.

use std::fmt;
use std::time::Duration;

use super::Info;
use crate::flow::subject::covers;

/// A window below this is not much longer than an acknowledgement's timeout and a reconnect.
pub const SHORT_WINDOW: Duration = Duration::from_secs(30);

/// Subscribers are away for less than this every now and then.
const SHORT_AGE: Duration = Duration::from_hours(24);

/// Something that is allowed, but that the operator should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// A stable name.
    pub code: &'static str,
    /// What "it", the stream, does, and what follows.
    pub text: String,
}

/// Why a stream cannot carry an outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// A stable name.
    pub code: &'static str,
    /// What is wrong; it names the stream.
    pub problem: String,
    /// What to do.
    pub mend: Mend,
}

/// What makes an unfit stream fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mend {
    /// A command of the NATS command line.
    Command(String),
    /// What to do, in words.
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

impl Info {
    /// Why the stream cannot carry an outbox, if so. `filter`: every subject that the route can make.
    pub(in crate::nats) fn unfit(&self, filter: &str) -> Option<Unfit> {
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
    pub(in crate::nats) fn findings(&self) -> Vec<Finding> {
        self.what_it_forgets()
            .into_iter()
            .chain(self.what_it_refuses())
            .chain(self.what_is_unsafe())
            .flatten()
            .collect()
    }

    /// Messages that are removed before everyone has seen them.
    fn what_it_forgets(&self) -> [Option<Finding>; 4] {
        let config = &self.config;
        let age = Duration::from_nanos(config.max_age);
        let retention = config.retention.as_deref();
        [
            found(
                retention == Some("workqueue"),
                "retention_workqueue",
                "it removes messages once consumed: an event sent again after the duplicate window is stored again",
            ),
            found(
                retention == Some("interest"),
                "retention_interest",
                "it drops messages without a consumer, and removes them once consumed: events that nobody waits for are \
                 acknowledged and gone, and one sent again after the duplicate window is stored again",
            ),
            found(
                config.max_age > 0 && age < SHORT_AGE,
                "max_age_short",
                format!("it forgets messages after {}: subscribers that are away longer miss them", human(age)),
            ),
            found(
                config.drops_oldest(),
                "discard_old",
                "when full (max_bytes, max_msgs) it removes its oldest messages, consumed or not; with discard \"new\" \
                 the relay waits instead",
            ),
        ]
    }

    /// Limits of which events are refused, or removed by the next ones.
    fn what_it_refuses(&self) -> [Option<Finding>; 3] {
        let config = &self.config;
        let full = |used: u64, most: i64| u64::try_from(most).is_ok_and(|most| most > 0 && used >= most / 10 * 9);
        [
            found(
                config.discard.as_deref() == Some("new")
                    && (full(self.state.messages, config.max_msgs) || full(self.state.bytes, config.max_bytes)),
                "nearly_full",
                "it is nearly full (max_bytes, max_msgs), and then takes nothing more: rows will wait until there is room",
            ),
            found(
                config.max_msgs_per_subject > 0,
                "max_msgs_per_subject",
                format!("it keeps only {} messages a subject", config.max_msgs_per_subject),
            ),
            found(
                config.discard_new_per_subject,
                "discard_new_per_subject",
                "events of a full subject are refused, and become dead letters after their last attempt",
            ),
        ]
    }

    /// What may let events be stored twice, be lost, or be stored where nobody looks for them.
    fn what_is_unsafe(&self) -> [Option<Finding>; 4] {
        let config = &self.config;
        let window = Duration::from_nanos(config.duplicate_window);
        [
            found(
                window < SHORT_WINDOW,
                "duplicate_window_short",
                format!("its duplicate window is only {}; {} or more is better", human(window), human(SHORT_WINDOW)),
            ),
            found(
                config.storage.as_deref() == Some("memory"),
                "storage_memory",
                "it lives in memory: a restart of its servers loses acknowledged events",
            ),
            found(
                self.clustered() && config.num_replicas < 3,
                "replicas_few",
                format!(
                    "it has {} replica(s): the loss of one server can stop it or lose acknowledged events; 3 survive it",
                    config.num_replicas
                ),
            ),
            found(
                config.subject_transform.is_some(),
                "subject_transform",
                "it stores events under other subjects than route.subject makes",
            ),
        ]
    }
}

/// A finding, if it is one.
fn found(is_so: bool, code: &'static str, text: impl Into<String>) -> Option<Finding> {
    is_so.then(|| Finding { code, text: text.into() })
}

fn human(duration: Duration) -> humantime::FormattedDuration {
    humantime::format_duration(duration)
}

fn listed(subjects: &[String]) -> String {
    if subjects.is_empty() { "no subjects".to_owned() } else { format!("{subjects:?}") }
}
