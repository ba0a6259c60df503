//! Whether the relay lives, and whether it is ready: set by the relay, read by the probes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::faults::{Fault, Faults};

/// What the relay is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Between two sessions, or before the first.
    #[default]
    Starting,
    /// Holds the slot; rows flow.
    Running,
    /// Another relay holds the slot: ready to take over.
    Standby,
    /// Was told to stop; what was sent comes to its end.
    Stopping,
}

/// What can be wrong while the relay runs. Each may hold by itself, and several at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// PostgreSQL cannot be reached, ended a connection, or refused a statement.
    PostgresDown,
    /// The session ended, or does not begin, and no other condition says why.
    Session,
    /// The slot is missing, lost, or cannot be used.
    Slot,
    /// The outbox table or its publication is not as it must be.
    Source,
    /// Someone else holds a lock on the outbox's tables.
    Locked,
    /// PostgreSQL refuses what write-back asks for, of some rows or at all.
    Refused,
    /// The connection to NATS is down.
    NatsDown,
    /// The pipeline holds: nothing is accepted, or too much waits.
    Holding,
}

impl Condition {
    /// A stable name.
    pub fn name(self) -> &'static str {
        match self {
            Self::PostgresDown => "postgres",
            Self::Session => "session",
            Self::Slot => "slot",
            Self::Source => "source",
            Self::Locked => "lock",
            Self::Refused => "write-back",
            Self::NatsDown => "nats",
            Self::Holding => "delivery",
        }
    }
}

/// What the readiness probe answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Rows flow.
    Ready,
    /// Another relay holds the slot, and this one can take over.
    Standby,
    /// The reasons, one a line.
    NotReady(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Inner {
    state: State,
    conditions: BTreeMap<Condition, String>,
    faults: Faults,
}

/// The relay's state, and what is wrong. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Health(Arc<watch::Sender<Inner>>);

impl Health {
    /// Says what the relay is doing.
    pub fn set(&self, state: State) {
        self.0.send_if_modified(|inner| std::mem::replace(&mut inner.state, state) != state);
    }

    /// Says that something is wrong until it is cleared. The reason is shown to whoever probes: no row data, no
    /// secrets. Gives whether the condition is new.
    pub fn raise(&self, condition: Condition, reason: impl Into<String>) -> bool {
        let reason = reason.into();
        let mut new = false;
        self.0.send_if_modified(|inner| {
            let before = inner.conditions.insert(condition, reason.clone());
            new = before.is_none();
            let changed = before.as_ref() != Some(&reason);
            if changed {
                inner.faults.end(condition.name());
                inner.faults.begin(condition.name(), reason);
            }
            changed
        });
        new
    }

    /// Gives whether the condition was raised.
    pub fn clear(&self, condition: Condition) -> bool {
        self.0.send_if_modified(|inner| {
            let raised = inner.conditions.remove(&condition).is_some();
            if raised {
                inner.faults.end(condition.name());
            }
            raised
        })
    }

    /// Remembers something that went wrong and is over: no row data, no secrets.
    pub fn note(&self, about: &'static str, text: impl Into<String>) {
        self.0.send_if_modified(|inner| {
            inner.faults.begin(about, text.into());
            inner.faults.end(about);
            false
        });
    }

    /// What went wrong lately, the newest first.
    pub fn faults(&self) -> Vec<Fault> {
        self.0.borrow().faults.newest_first()
    }

    /// What the relay is doing.
    pub fn state(&self) -> State {
        self.0.borrow().state
    }

    /// Whether this is wrong at present.
    pub fn is_raised(&self, condition: Condition) -> bool {
        self.0.borrow().conditions.contains_key(&condition)
    }

    /// Whether the relay was told to stop.
    pub fn is_stopping(&self) -> bool {
        self.0.borrow().state == State::Stopping
    }

    /// What the readiness probe answers now. A relay that runs or stands by is ready when nothing is wrong.
    pub fn readiness(&self) -> Readiness {
        let inner = self.0.borrow();
        let mut reasons: Vec<&str> = Vec::new();
        for reason in inner.conditions.values() {
            // One trouble may be noticed at several places.
            if !reasons.contains(&&**reason) {
                reasons.push(reason);
            }
        }
        match inner.state {
            State::Starting => reasons.insert(0, "starting"),
            State::Stopping => reasons.insert(0, "stopping"),
            State::Running if reasons.is_empty() => return Readiness::Ready,
            State::Standby if reasons.is_empty() => return Readiness::Standby,
            State::Running | State::Standby => {}
        }
        Readiness::NotReady(reasons.join("\n"))
    }

    /// Returns once the readiness is no longer the one given.
    pub async fn changed(&self, from: &Readiness) {
        let mut changes = self.0.subscribe();
        while self.readiness() == *from && changes.changed().await.is_ok() {}
    }
}

/// The beat of the relay's loop: it ticks, the liveness probe looks how long ago. Clones share it.
#[derive(Clone, Debug)]
pub struct Pulse {
    start: Instant,
    /// Milliseconds from `start` to the last tick.
    last: Arc<AtomicU64>,
}

impl Default for Pulse {
    /// Ticks once.
    fn default() -> Self {
        Self { start: Instant::now(), last: Arc::default() }
    }
}

impl Pulse {
    /// The loop is alive.
    pub fn tick(&self) {
        self.last.store(self.since_start(), Ordering::Relaxed);
    }

    /// The time since the last tick, to a millisecond.
    pub fn age(&self) -> Duration {
        Duration::from_millis(self.since_start().saturating_sub(self.last.load(Ordering::Relaxed)))
    }

    /// A pulse that ticked so long ago.
    #[cfg(test)]
    pub(crate) fn of_age(age: Duration) -> Self {
        Self { start: Instant::now().checked_sub(age).unwrap(), last: Arc::default() }
    }

    fn since_start(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn not_ready(reasons: &str) -> Readiness {
        Readiness::NotReady(reasons.to_owned())
    }

    #[test]
    fn several_conditions_hold_at_once_and_each_is_cleared_alone() {
        let health = Health::default();
        assert_eq!(health.readiness(), not_ready("starting"));
        health.set(State::Running);
        assert_eq!(health.readiness(), Readiness::Ready);
        assert!(health.raise(Condition::NatsDown, "no NATS"));
        assert!(!health.raise(Condition::NatsDown, "still no NATS"));
        assert!(health.raise(Condition::Slot, "slot lost"));
        assert_eq!(health.readiness(), not_ready("slot lost\nstill no NATS"));
        health.raise(Condition::PostgresDown, "slot lost");
        assert_eq!(health.readiness(), not_ready("slot lost\nstill no NATS"), "each reason once");
        health.clear(Condition::PostgresDown);
        assert!(health.clear(Condition::Slot));
        assert!(!health.clear(Condition::Slot));
        assert_eq!(health.readiness(), not_ready("still no NATS"));
        health.set(State::Standby);
        assert_eq!(health.readiness(), not_ready("still no NATS"));
        health.clear(Condition::NatsDown);
        assert_eq!(health.readiness(), Readiness::Standby);
        health.set(State::Stopping);
        assert_eq!(health.readiness(), not_ready("stopping"));
    }

    #[test]
    fn what_was_wrong_is_remembered_when_it_is_over() {
        let health = Health::default();
        health.raise(Condition::NatsDown, "refused");
        health.raise(Condition::NatsDown, "refused");
        health.raise(Condition::NatsDown, "no route");
        health.note("event", "too_large");
        let seen = || -> Vec<(String, u64, bool)> {
            health.faults().into_iter().map(|fault| (fault.text, fault.count, fault.until.is_none())).collect()
        };
        let refused = ("refused".to_owned(), 1, false);
        assert_eq!(seen(), [("too_large".to_owned(), 1, false), ("no route".to_owned(), 1, true), refused.clone()]);
        health.clear(Condition::NatsDown);
        assert_eq!(seen()[1..], [("no route".to_owned(), 1, false), refused]);
        health.raise(Condition::NatsDown, "refused");
        assert_eq!(seen()[0], ("refused".to_owned(), 2, true));
    }

    #[tokio::test]
    async fn a_change_is_seen_by_who_waits_for_it() {
        let health = Health::default();
        let seen = health.readiness();
        let (other, waited) = (health.clone(), health.clone());
        let waiter = tokio::spawn(async move { waited.changed(&seen).await });
        tokio::task::yield_now().await;
        other.set(State::Running);
        tokio::time::timeout(Duration::from_secs(5), waiter).await.unwrap().unwrap();
    }

    #[test]
    fn a_pulse_ages_until_it_ticks() {
        let pulse = Pulse::of_age(Duration::from_mins(1));
        assert!(pulse.age() >= Duration::from_mins(1));
        pulse.clone().tick();
        assert!(pulse.age() < Duration::from_secs(30));
    }
}
