//! What `status` found: the JSON is a contract.

use serde::Serialize;
use serde_json::Value;

use crate::postgres::outbox::Tally;

/// All that `status` found.
#[derive(Debug, Serialize)]
pub struct Report {
    /// In one word.
    pub verdict: Verdict,
    /// What keeps it from being healthy, the worst first.
    pub problems: Vec<String>,
    /// When this was made, UTC.
    pub time: jiff::Timestamp,
    /// What PostgreSQL told.
    pub postgres: Postgres,
    /// What NATS told.
    pub nats: Nats,
    /// What a relay at `admin.listen` told.
    pub relay: Relay,
}

/// How things are.
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

/// What PostgreSQL told; null is what could not be seen.
#[derive(Debug, Default, Serialize)]
pub struct Postgres {
    /// Whether it could be reached.
    pub answers: bool,
    /// Why it does not, or what cannot be looked at.
    pub error: Option<String>,
    /// `server_version`, as the server reports it.
    pub version: Option<String>,
    /// The replication slot.
    pub slot: Option<Slot>,
    /// `source.table`
    pub table: String,
    /// Rows that wait.
    pub rows: Option<Rows>,
    /// Unhandled, by reason.
    pub dead_letters: Option<Vec<Tally>>,
    /// By status.
    pub compensations: Option<Vec<Tally>>,
    /// The relay's row of state.
    pub state: Option<State>,
}

/// The slot of the settings.
#[derive(Debug, Serialize)]
pub struct Slot {
    /// `source.slot`
    pub name: String,
    /// `false`: there is no such slot, and the rest is null.
    pub exists: bool,
    /// Whether someone uses it.
    pub active: bool,
    /// The server process that uses it.
    pub active_pid: Option<i32>,
    /// The `application_name` of that.
    pub holder: Option<String>,
    /// As `pg_replication_slots` has it.
    pub wal_status: Option<String>,
    /// The position that it has confirmed, as `0/16B3748`.
    pub confirmed_lsn: Option<String>,
    /// Of a lost slot there is none.
    pub confirmed_lag_bytes: Option<u64>,
    /// Log that the server keeps for it.
    pub retained_wal_bytes: Option<u64>,
    /// What may still be written before it is in danger; null when unlimited.
    pub safe_wal_bytes: Option<u64>,
    /// `source.max_retained_wal`
    pub max_retained_wal_bytes: u64,
    /// Null: unlimited.
    pub max_slot_wal_keep_size_bytes: Option<u64>,
}

impl Slot {
    /// Whether the server no longer keeps the log that it needs.
    pub fn is_lost(&self) -> bool {
        self.wal_status.as_deref() == Some("lost")
    }
}

/// How many rows wait, and for what.
#[derive(Debug, Serialize)]
pub struct Rows {
    /// For their turn.
    pub pending: u64,
    /// For the time that their producer set.
    pub scheduled: u64,
    /// A poller has claimed them.
    pub claimed: u64,
    /// For a retry.
    pub failed: u64,
    /// For a failed row of their aggregate.
    pub held: u64,
    /// Dead letters that nobody has replayed or resolved.
    pub dead_letters_unhandled: u64,
    /// Since the oldest of them but the dead letters was made; null when none waits.
    pub oldest_waiting_seconds: Option<f64>,
    /// Of the whole table, as the planner estimates.
    pub estimated_total: Option<u64>,
    /// A count ended at its bound: there may be more.
    pub at_least: bool,
    /// Pending rows were looked for among the newest only.
    pub newest_only: bool,
}

/// What the relay notes for its next session.
#[derive(Debug, Serialize)]
pub struct State {
    /// The stream that it fed last.
    pub stream: Option<String>,
    /// No event without a recorded outcome is stored at or below this sequence.
    pub stream_sequence: Option<u64>,
    /// Whether rows may wait that the slot does not show.
    pub needs_drain: bool,
    /// Up to where the slot was let confirm the log, as `0/16B3748`.
    pub confirmed_lsn: Option<String>,
    /// When that was noted last, UTC.
    pub updated_at: jiff::Timestamp,
}

/// What NATS told.
#[derive(Debug, Default, Serialize)]
pub struct Nats {
    /// Whether it could be reached.
    pub answers: bool,
    /// Why it does not, or why the stream cannot be looked at.
    pub error: Option<String>,
    /// Name and version of the server.
    pub server: Option<String>,
    /// The stream; null when it does not exist or may not be seen.
    pub stream: Option<Stream>,
}

/// The stream of the settings.
#[derive(Debug, Serialize)]
pub struct Stream {
    /// `nats.stream`
    pub name: String,
    /// Messages that it holds.
    pub messages: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// The sequence that it gave last.
    pub last_sequence: u64,
    /// Without one it takes nothing.
    pub has_leader: bool,
}

/// What the relay itself told.
#[derive(Debug, Serialize)]
pub struct Relay {
    /// `admin.listen`; null when it is off.
    pub address: Option<String>,
    /// Whether it answered there.
    pub answers: bool,
    /// What it says on `/status`.
    pub status: Option<Value>,
}

impl Report {
    /// Whether neither server answers, so that nothing can be said.
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
