//! What `status` found: the JSON is a contract.

use serde::Serialize;
use serde_json::Value;

use crate::postgres::outbox::Tally;

#[derive(Debug, Serialize)]
pub struct Report {
    pub verdict: Verdict,
    /// What keeps it from being healthy, the worst first.
    pub problems: Vec<String>,
    pub time: jiff::Timestamp,
    pub postgres: Postgres,
    pub nats: Nats,
    pub relay: Relay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// A relay holds the slot, and nothing asks for an operator.
    Healthy,
    /// Events flow; someone should look at what is named.
    Attention,
    /// Events do not flow, or it cannot be said whether they do.
    Trouble,
}

#[derive(Debug, Default, Serialize)]
pub struct Postgres {
    pub answers: bool,
    /// Why it does not, or what cannot be looked at.
    pub error: Option<String>,
    pub version: Option<String>,
    pub slot: Option<Slot>,
    pub table: String,
    pub rows: Option<Rows>,
    /// Unhandled, by reason.
    pub dead_letters: Option<Vec<Tally>>,
    /// By status.
    pub compensations: Option<Vec<Tally>>,
    pub state: Option<State>,
}

#[derive(Debug, Serialize)]
pub struct Slot {
    pub name: String,
    /// `false`: there is no such slot, and the rest is null.
    pub exists: bool,
    pub active: bool,
    pub active_pid: Option<i32>,
    pub holder: Option<String>,
    pub wal_status: Option<String>,
    pub confirmed_lsn: Option<String>,
    /// Of a lost slot there is none.
    pub confirmed_lag_bytes: Option<u64>,
    pub retained_wal_bytes: Option<u64>,
    pub safe_wal_bytes: Option<u64>,
    pub max_retained_wal_bytes: u64,
    /// Null: unlimited.
    pub max_slot_wal_keep_size_bytes: Option<u64>,
}

impl Slot {
    pub fn is_lost(&self) -> bool {
        self.wal_status.as_deref() == Some("lost")
    }
}

#[derive(Debug, Serialize)]
pub struct Rows {
    pub pending: u64,
    pub scheduled: u64,
    pub claimed: u64,
    pub failed: u64,
    pub held: u64,
    pub dead_letters_unhandled: u64,
    pub oldest_waiting_seconds: Option<f64>,
    /// Of the whole table, as the planner estimates.
    pub estimated_total: Option<u64>,
    /// A count ended at its bound: there may be more.
    pub at_least: bool,
    /// Pending rows were looked for among the newest only.
    pub newest_only: bool,
}

#[derive(Debug, Serialize)]
pub struct State {
    pub stream: Option<String>,
    pub stream_sequence: Option<u64>,
    pub needs_drain: bool,
    pub confirmed_lsn: Option<String>,
    pub updated_at: jiff::Timestamp,
}

#[derive(Debug, Default, Serialize)]
pub struct Nats {
    pub answers: bool,
    /// Why it does not, or why the stream cannot be looked at.
    pub error: Option<String>,
    /// Name and version of the server.
    pub server: Option<String>,
    pub stream: Option<Stream>,
}

#[derive(Debug, Serialize)]
pub struct Stream {
    pub name: String,
    pub messages: u64,
    pub bytes: u64,
    pub last_sequence: u64,
    pub has_leader: bool,
}

#[derive(Debug, Serialize)]
pub struct Relay {
    /// `admin.listen`; null when it is off.
    pub address: Option<String>,
    pub answers: bool,
    /// What it says on `/status`.
    pub status: Option<Value>,
}

impl Report {
    pub fn nobody_answers(&self) -> bool {
        !self.postgres.answers && !self.nats.answers
    }

    /// Says what is wrong, and how bad it is.
    pub fn judge(&mut self) {
        let (mut trouble, mut attention) = (Vec::new(), Vec::new());
        self.judge_postgres(&mut trouble, &mut attention);
        trouble.extend(self.nats.error.clone());
        if self.nats.stream.as_ref().is_some_and(|stream| !stream.has_leader) {
            trouble.push("the stream has no leader".to_owned());
        }
        let reasons = self.relay.status.as_ref().and_then(|status| status.get("reasons")?.as_array());
        trouble
            .extend(reasons.into_iter().flatten().filter_map(Value::as_str).map(|said| format!("the relay: {said}")));
        self.verdict = match (trouble.is_empty(), attention.is_empty()) {
            (false, _) => Verdict::Trouble,
            (true, false) => Verdict::Attention,
            (true, true) => Verdict::Healthy,
        };
        self.problems = trouble;
        self.problems.extend(attention);
    }

    fn judge_postgres(&self, trouble: &mut Vec<String>, attention: &mut Vec<String>) {
        let postgres = &self.postgres;
        if let Some(slot) = &postgres.slot {
            let name = &slot.name;
            if !slot.exists {
                trouble.push(format!("there is no slot {name:?}"));
            } else if slot.is_lost() {
                trouble.push(format!("the slot {name:?} is lost"));
            } else if !slot.active {
                trouble.push(format!("no relay holds the slot {name:?}"));
            }
            if slot.confirmed_lag_bytes.is_some_and(|lag| lag > slot.max_retained_wal_bytes) {
                trouble.push("the slot is further behind than source.max_retained_wal".to_owned());
            }
            if slot.wal_status.as_deref() == Some("unreserved") {
                trouble.push("the slot is about to be lost: max_slot_wal_keep_size is used up".to_owned());
            }
        }
        trouble.extend(postgres.error.clone());
        let some = |count: u64, what: &str| (count > 0).then(|| format!("{what}: {count}"));
        if let Some(rows) = &postgres.rows {
            attention.extend(some(rows.dead_letters_unhandled, "dead letters to be handled"));
            attention.extend(some(rows.failed, "failed rows that wait for a retry"));
        }
        let manual = postgres.compensations.iter().flatten().find(|tally| tally.name == "manual_required");
        let manual = manual.and_then(|tally| u64::try_from(tally.count).ok()).unwrap_or(0);
        attention.extend(some(manual, "compensations to be seen to by hand"));
        if postgres.state.as_ref().is_some_and(|state| state.needs_drain) {
            attention.push("rows are, or will be, read from the table before the log goes on".to_owned());
        }
    }
}
