//! What `/status` and the page show: the relay at a glance, made from its metrics and its health. Names of fields are a
//! contract; bytes and seconds are numbers, what is not known is null. No row's values, no secrets.

mod history;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Serialize;

use self::history::{History, Rates, Times};
use super::faults::{Fault, now};
use super::health::{Health, Pulse, Readiness, State};
use super::metrics::{Counters, Metrics, waiting};
use crate::config::Settings;
use crate::flow::lsn::Lsn;

/// Past this share of the server's limit the slot is in danger.
const DANGER: f64 = 0.8;

/// What is watched, and what it is. Clones share it.
#[derive(Clone, Debug)]
pub struct Board {
    /// What the probes tell of.
    pub health: Health,
    /// The beat of the relay's loop.
    pub pulse: Pulse,
    /// What the stages count.
    pub metrics: Metrics,
    facts: Arc<Facts>,
    history: Arc<Mutex<History>>,
}

/// What stays the same while the relay runs.
#[derive(Debug)]
struct Facts {
    started: Instant,
    started_at: Timestamp,
    table: String,
    slot: String,
    publication: String,
    stream: String,
    max_retained_wal: u64,
}

/// The relay at a glance.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// The relay's.
    pub version: &'static str,
    /// When this was made, UTC.
    pub time: Timestamp,
    /// When the relay started, UTC.
    pub started_at: Timestamp,
    /// Whole seconds since then.
    pub uptime_seconds: u64,
    /// As `schema.table`.
    pub table: String,
    /// `source.publication`
    pub publication: String,
    /// `nats.stream`
    pub stream: String,
    /// `starting`, `running`, `standby`, `stopping`.
    pub state: &'static str,
    /// As `/readyz` has it: `ready`, `standby`, `not_ready`.
    pub readiness: &'static str,
    /// Why it is not ready.
    pub reasons: Vec<String>,
    /// One sentence.
    pub verdict: &'static str,
    /// `ok`, `info`, `bad`.
    pub tone: &'static str,
    /// How long ago the loop ticked.
    pub last_tick_seconds: f64,
    /// In the order of the flow: `decode`, `route`, `publish`, `confirm`, `writeback`.
    pub stages: [Stage; 5],
    /// The service level.
    pub delivery: Delivery,
    /// The replication slot.
    pub slot: Slot,
    /// Rows that wait in the table.
    pub rows: Rows,
    /// Since the start.
    pub dead_letters: Vec<Count>,
    /// Attempts since the start.
    pub compensations: Vec<Count>,
    /// Since the start.
    pub publishes: Vec<Count>,
    /// Failed rows that were sent again since the start.
    pub retries: u64,
    /// Events since the start whose row was deleted before it could be written back.
    pub events_without_row: u64,
    /// Since the start, by server.
    pub reconnects: Vec<Count>,
    /// The newest first.
    pub faults: Vec<Fault>,
}

/// One stage of the flow.
#[derive(Clone, Debug, Serialize)]
pub struct Stage {
    /// As in [`Status::stages`].
    pub name: &'static str,
    /// Events since the start; of `confirm`, the position in bytes of the log.
    pub total: Option<u64>,
    /// Over the last ten seconds; of `confirm`, bytes of the log.
    pub per_second: Option<f64>,
    /// Events in the stage; of `confirm`, transactions.
    pub in_flight: Option<u64>,
    /// `decode`: log not yet read. `confirm`: log not yet confirmed.
    pub lag_bytes: Option<u64>,
    /// `publish`: from commit to acknowledgement, and `writeback`: of a batch, for 99 of 100 in the last minute.
    /// `confirm`: age of the oldest event without an outcome.
    pub lag_seconds: Option<f64>,
}

/// The service level, over the last minute.
#[derive(Clone, Debug, Serialize)]
pub struct Delivery {
    /// Half of the events were acknowledged within so many seconds of their commit.
    pub commit_to_ack_p50_seconds: Option<f64>,
    /// 99 of 100 were.
    pub commit_to_ack_p99_seconds: Option<f64>,
    /// Events that the stream got, second by second, the last one at the end.
    pub stored_per_second: Vec<f64>,
}

/// The replication slot.
#[derive(Clone, Debug, Serialize)]
pub struct Slot {
    /// `source.slot`
    pub name: String,
    /// `ok`, `danger`, `lost`, `unknown`.
    pub condition: &'static str,
    /// As `pg_replication_slots` has it.
    pub wal_status: Option<&'static str>,
    /// Whether a relay reads through it.
    pub active: Option<bool>,
    /// The position up to which it may be confirmed, as `0/16B3748`.
    pub confirmed_lsn: Option<String>,
    /// Log written since the position that it has confirmed.
    pub confirmed_lag_bytes: Option<u64>,
    /// Log that the server keeps for it.
    pub retained_wal_bytes: Option<u64>,
    /// What may still be written before the slot is in danger.
    pub safe_wal_bytes: Option<u64>,
    /// Lag against `source.max_retained_wal`, past which rows wait in the table while events cannot be delivered or recorded.
    pub max_retained_wal: Bound,
    /// Retained log against the server's limit, past which the slot is lost.
    pub max_slot_wal_keep_size: Bound,
}

/// How much of a limit is used.
#[derive(Clone, Debug, Serialize)]
pub struct Bound {
    /// Null: unlimited, or not known.
    pub limit_bytes: Option<u64>,
    /// Whether the limit is known.
    pub known: bool,
    /// 1 is all of it.
    pub share: Option<f64>,
}

/// Rows that wait in the table, as the last sweep saw them; each counted up to a bound.
#[derive(Clone, Debug, Serialize)]
pub struct Rows {
    /// Wait for their turn, or for the time that their producer set.
    pub pending: Option<u64>,
    /// Wait for a retry.
    pub failed: Option<u64>,
    /// Wait behind a failed row of their aggregate.
    pub held: Option<u64>,
    /// Dead letters that nobody has replayed or resolved.
    pub dead_letters_unhandled: Option<u64>,
}

/// How often something happened.
#[derive(Clone, Debug, Serialize)]
pub struct Count {
    /// What: a label's value, as in the metrics.
    pub name: &'static str,
    /// How often, since the start.
    pub count: u64,
}

impl Board {
    /// Of a relay with these settings, which starts now.
    pub fn new(health: Health, pulse: Pulse, metrics: Metrics, settings: &Settings) -> Self {
        let source = &settings.source;
        let facts = Facts {
            started: Instant::now(),
            started_at: now(),
            table: format!("{}.{}", source.table.schema, source.table.table),
            slot: source.slot.clone(),
            publication: source.publication.clone(),
            stream: settings.nats.stream.clone(),
            max_retained_wal: source.max_retained_wal,
        };
        Self { health, pulse, metrics, facts: Arc::new(facts), history: Arc::default() }
    }

    /// Remembers the counters; never ends.
    pub async fn remember(&self) {
        let mut every = tokio::time::interval(Duration::from_secs(1));
        loop {
            every.tick().await;
            self.history.lock().unwrap_or_else(PoisonError::into_inner).sample(&self.metrics);
        }
    }

    /// The relay as it is now.
    pub fn status(&self) -> Status {
        let Self { health, metrics, facts, .. } = self;
        let (rates, times, stored_per_second) = {
            let history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            (history.rates(metrics), history.times(metrics), history.stored_per_second())
        };
        let (readiness, reasons) = readiness(health);
        let (verdict, tone) = verdict(health.state(), readiness, &reasons);
        Status {
            version: env!("CARGO_PKG_VERSION"),
            time: now(),
            started_at: facts.started_at,
            uptime_seconds: facts.started.elapsed().as_secs(),
            table: facts.table.clone(),
            publication: facts.publication.clone(),
            stream: facts.stream.clone(),
            state: state(health.state()),
            readiness,
            reasons,
            verdict,
            tone,
            last_tick_seconds: self.pulse.age().as_secs_f64(),
            stages: stages(metrics, rates, times),
            delivery: Delivery {
                commit_to_ack_p50_seconds: times.commit_to_ack_p50,
                commit_to_ack_p99_seconds: times.commit_to_ack_p99,
                stored_per_second,
            },
            slot: slot(metrics, facts),
            rows: Rows {
                pending: metrics.outbox_rows(waiting::PENDING),
                failed: metrics.outbox_rows(waiting::FAILED),
                held: metrics.outbox_rows(waiting::HELD),
                dead_letters_unhandled: metrics.live.unhandled.count(),
            },
            dead_letters: counts(&metrics.dead_letters),
            compensations: counts(&metrics.compensations),
            publishes: counts(&metrics.publishes),
            retries: metrics.retries.get(),
            events_without_row: metrics.events_without_row.get(),
            reconnects: counts(&metrics.reconnects),
            faults: health.faults(),
        }
    }
}

fn state(state: State) -> &'static str {
    match state {
        State::Starting => "starting",
        State::Running => "running",
        State::Standby => "standby",
        State::Stopping => "stopping",
    }
}

fn readiness(health: &Health) -> (&'static str, Vec<String>) {
    match health.readiness() {
        Readiness::Ready => ("ready", Vec::new()),
        Readiness::Standby => ("standby", Vec::new()),
        Readiness::NotReady(reasons) => {
            let states = [state(State::Starting), state(State::Stopping)];
            let reasons = reasons.lines().filter(|reason| !states.contains(reason)).map(str::to_owned);
            ("not_ready", reasons.collect())
        }
    }
}

fn verdict(state: State, readiness: &str, reasons: &[String]) -> (&'static str, &'static str) {
    match (readiness, state) {
        ("ready", _) => ("Events flow", "ok"),
        ("standby", _) => ("Standing by: another relay holds the slot", "info"),
        (_, State::Stopping) => ("Stopping", "info"),
        (_, State::Starting) if reasons.is_empty() => ("Starting", "info"),
        (_, State::Starting) => ("Not ready: it tries again", "bad"),
        (_, State::Running | State::Standby) => ("Not ready", "bad"),
    }
}

fn stages(metrics: &Metrics, rates: Rates, times: Times) -> [Stage; 5] {
    let live = &metrics.live;
    let unread = live.wal_end.count().zip(live.read.count()).map(|(end, read)| end.saturating_sub(read));
    let sum = |counters: &Counters| counters.all().values().sum();
    let sent = live.under_way.count().map(|_| u64::try_from(metrics.in_flight.get()).unwrap_or(0));
    let stage = |name, total, per_second, in_flight| Stage {
        name,
        total,
        per_second,
        in_flight,
        lag_bytes: None,
        lag_seconds: None,
    };
    [
        Stage {
            lag_bytes: unread,
            ..stage("decode", Some(metrics.decoded.get()), rates.decoded, live.under_way.count())
        },
        stage("route", Some(live.routed.get()), rates.routed, live.waiting.count()),
        Stage {
            lag_seconds: times.commit_to_ack_p99,
            ..stage("publish", Some(sum(&metrics.publishes)), rates.published, sent)
        },
        Stage {
            lag_bytes: metrics.slot.confirmed_lag.count(),
            lag_seconds: live.under_way.count().and(metrics.oldest_unconfirmed.get()),
            ..stage("confirm", live.confirmed.count(), rates.confirmed, live.transactions.count())
        },
        Stage {
            lag_seconds: times.batch_p99,
            ..stage("writeback", Some(sum(&metrics.writeback_rows)), rates.written, live.decided.count())
        },
    ]
}

fn slot(metrics: &Metrics, facts: &Facts) -> Slot {
    let (lag, retained) = (metrics.slot.confirmed_lag.count(), metrics.slot.retained_wal.count());
    let bound = |used, limit, known| Bound { limit_bytes: limit, known, share: share(used, limit) };
    let keep = bound(retained, metrics.live.keep_size.count(), retained.is_some());
    let wal_status = metrics.slot.wal_status();
    let condition = match wal_status {
        Some("lost") => "lost",
        None => "unknown",
        Some("unreserved") => "danger",
        Some(_) if keep.share.is_some_and(|share| share >= DANGER) => "danger",
        Some(_) => "ok",
    };
    Slot {
        name: facts.slot.clone(),
        condition,
        wal_status,
        active: metrics.slot.active.get().map(|active| active > 0.0),
        confirmed_lsn: metrics.live.confirmed.count().map(|position| Lsn(position).to_string()),
        confirmed_lag_bytes: lag,
        retained_wal_bytes: retained,
        safe_wal_bytes: metrics.slot.safe_wal.count(),
        max_retained_wal: bound(lag, Some(facts.max_retained_wal), true),
        max_slot_wal_keep_size: keep,
    }
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn share(used: Option<u64>, limit: Option<u64>) -> Option<f64> {
    let (used, limit) = used.zip(limit)?;
    Some(used as f64 / (limit.max(1)) as f64)
}

fn counts(counters: &Counters) -> Vec<Count> {
    counters.all().into_iter().map(|(name, count)| Count { name, count }).collect()
}

#[cfg(test)]
impl Board {
    pub(crate) fn of_defaults(health: Health, pulse: Pulse, metrics: Metrics) -> Self {
        let loaded = crate::config::load(&crate::config::Sources::default(), &[]).unwrap();
        Self::new(health, pulse, metrics, &loaded.settings)
    }
}

#[cfg(test)]
mod tests {
    use super::super::health::Condition;
    use super::*;

    fn board() -> Board {
        Board::of_defaults(Health::default(), Pulse::default(), Metrics::new())
    }

    #[test]
    fn a_lost_slot_is_lost_and_has_no_lag() {
        let board = board();
        let metrics = &board.metrics;
        metrics.slot.confirmed_lag.set_count(0);
        metrics.slot.retained_wal.set_count(900);
        metrics.live.keep_size.set_count(1000);
        metrics.slot.set_wal_status(Some("reserved"));
        let slot = board.status().slot;
        assert_eq!(
            (slot.condition, slot.confirmed_lag_bytes, slot.max_slot_wal_keep_size.share),
            ("danger", Some(0), Some(0.9))
        );
        metrics.slot.set_wal_status(Some("lost"));
        metrics.forget_slot();
        let slot = board.status().slot;
        assert_eq!((slot.condition, slot.confirmed_lag_bytes, slot.retained_wal_bytes), ("lost", None, None));
        assert_eq!(slot.max_retained_wal.share, None);
    }

    #[test]
    fn the_verdict_follows_the_readiness() {
        let board = board();
        let said = || {
            let status = board.status();
            (status.verdict, status.tone, status.reasons)
        };
        assert_eq!(said(), ("Starting", "info", vec![]));
        board.health.raise(Condition::NatsDown, "NATS is away");
        assert_eq!(said(), ("Not ready: it tries again", "bad", vec!["NATS is away".to_owned()]));
        board.health.clear(Condition::NatsDown);
        board.health.set(State::Running);
        assert_eq!(said(), ("Events flow", "ok", vec![]));
        assert_eq!(board.status().faults.len(), 1);
    }

    #[test]
    fn what_is_not_known_is_null() {
        let json = serde_json::to_value(board().status()).unwrap();
        for path in
            ["/slot/confirmed_lag_bytes", "/slot/active", "/stages/3/lag_seconds", "/rows/held", "/stages/0/in_flight"]
        {
            assert_eq!(json.pointer(path), Some(&serde_json::Value::Null), "{path}");
        }
        assert_eq!(json.pointer("/stages/0/total").unwrap(), 0);
    }
}
