//! The events under way, from the moment they are taken in until their outcome is committed in the table.
//!
//! A state machine without sockets or clock: the driver says what happened and asks what to do next.

mod intake;
mod refused;
#[cfg(test)]
mod tests;

pub use refused::{Refusal, Refused};

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::time::{Duration, Instant};

use bytestring::ByteString;

use super::confirm::Ledger;
use super::event::{Event, Report, Settled};
use super::floors::Floors;
use super::lsn::Lsn;
use super::order::{AggregateKey, Gate, Pass};
use super::refusals::Refusals;
use super::token::TokenMap;

/// What bounds the events under way.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How many may be under way at once.
    pub events: usize,
    /// Bytes of them past which no more are taken in.
    pub bytes: u64,
    /// Whether events of one aggregate go one after the other.
    pub ordered: bool,
    /// Rows held behind failed ones.
    pub held: usize,
}

/// Where a session begins: how far the log, the stream and the tokens are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start {
    /// The slot's confirmed position.
    pub confirmed: Lsn,
    /// The end of the write-ahead log: what was committed before it may have been sent by an earlier session.
    pub horizon: Lsn,
    /// No event with unrecorded outcome is stored at or below this sequence.
    pub stream_seq: u64,
    /// The stream's last sequence.
    pub last_seq: u64,
    /// The first token to use. Tokens never come back in a process, so that an answer to an event of an earlier
    /// session is not taken for one of this session's.
    pub first_token: u64,
}

/// The events under way.
#[derive(Debug)]
pub struct Delivery {
    limits: Limits,
    start: Start,
    ledger: Ledger,
    gate: Gate,
    refusals: Refusals,
    entries: TokenMap<Entry>,
    /// May be sent now; the smallest first, so that what is sent again keeps its order.
    ready: BTreeSet<u64>,
    /// In the order of sending; an entry that was decided or sent again since is passed over.
    sent: VecDeque<(Instant, u64)>,
    /// Above which sequences sent or stored, and unrecorded, events stand.
    floors: Floors,
    forgotten: Vec<u64>,
    reconciled: bool,
    bytes: u64,
    next: u64,
    /// The highest sequence that the stream is known to have reached.
    newest: u64,
}

#[derive(Debug)]
struct Entry {
    bytes: u64,
    /// Part of the stream of changes: the slot waits for its outcome.
    ledgered: bool,
    pass: Pass,
    /// Stored above this sequence, if it was sent at all.
    floor: Option<u64>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Waits for its turn or for its acknowledgement; `sent_at` is when it was sent last, unless it is to be sent
    /// again, and `first_sent` since when a copy of it may be stored. `doubted`: it was refused, but perhaps such a
    /// copy is. `asked`: none was under way when the stream was asked for copies.
    Open { parcel: Box<Parcel>, sent_at: Option<Instant>, first_sent: Option<Instant>, doubted: bool, asked: bool },
    /// The outcome is known and on its way to the table; with its aggregate where it is held, or blocks it.
    Decided { blocks: Option<AggregateKey> },
}

impl Stage {
    /// Not sent yet.
    fn unsent(parcel: Parcel) -> Self {
        Self::Open { parcel: Box::new(parcel), sent_at: None, first_sent: None, doubted: false, asked: false }
    }
}

/// The event that is to be sent next.
#[derive(Clone, Copy, Debug)]
pub struct Next<'a> {
    /// What its answer is known by.
    pub token: u64,
    /// What to send, and where.
    pub parcel: &'a Parcel,
    first_sent: Option<Instant>,
    doubted: bool,
}

impl Next<'_> {
    /// Whether the stream is to be asked for a copy of the event before another one is sent: it was sent for the first
    /// time longer than `age` before `now`, or was refused when a copy sent earlier had no answer.
    pub fn needs_proof(&self, now: Instant, age: Duration) -> bool {
        self.doubted || self.first_sent.is_some_and(|first| now.saturating_duration_since(first) > age)
    }
}

/// An event with its address.
#[derive(Debug)]
pub struct Parcel {
    /// What is sent.
    pub event: Event,
    /// Where it is sent.
    pub subject: ByteString,
    /// Microseconds since 2000-01-01 UTC; `None` when the row came from the table.
    pub committed_at: Option<i64>,
}

/// An event that the stream has.
#[derive(Debug)]
pub struct Accepted {
    /// For its row.
    pub report: Report,
    /// Microseconds since 2000-01-01 UTC; `None` when the row came from the table.
    pub committed_at: Option<i64>,
    /// When it was sent last.
    pub sent_at: Option<Instant>,
    /// The stream had reached this sequence before it was sent for the first time.
    pub floor: Option<u64>,
}

impl Delivery {
    /// Nothing under way, and no aggregate blocked.
    pub fn new(limits: Limits, start: Start) -> Self {
        Self {
            limits,
            start,
            ledger: Ledger::new(start.confirmed),
            gate: Gate::default(),
            refusals: Refusals::default(),
            entries: TokenMap::default(),
            ready: BTreeSet::new(),
            sent: VecDeque::new(),
            floors: Floors::default(),
            forgotten: Vec::new(),
            reconciled: false,
            bytes: 0,
            next: start.first_token,
            newest: start.last_seq.max(start.stream_seq),
        }
    }

    /// Whether another event may be taken in.
    pub fn has_room(&self) -> bool {
        self.entries.len() < self.limits.events && self.bytes < self.limits.bytes && !self.holds_too_many()
    }

    /// Whether so many rows are held behind failed ones that no more may be taken in.
    pub fn holds_too_many(&self) -> bool {
        self.gate.held() >= self.limits.held
    }

    /// The gate of aggregates: the driver blocks what the table shows as blocked, and releases it.
    pub fn gate(&mut self) -> &mut Gate {
        &mut self.gate
    }

    /// The ledger of transactions: the driver passes on where they begin and end.
    pub fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// The next event to send, if one is due.
    pub fn next_ready(&self) -> Option<Next<'_>> {
        let token = *self.ready.first()?;
        match self.entries.get(&token)?.stage {
            Stage::Open { ref parcel, first_sent, doubted, .. } => Some(Next { token, parcel, first_sent, doubted }),
            Stage::Decided { .. } => None,
        }
    }

    /// The event was handed to NATS at `now`.
    pub fn sent(&mut self, token: u64, now: Instant) {
        self.ready.remove(&token);
        let Some(entry) = self.entries.get_mut(&token) else { return };
        let Stage::Open { sent_at, first_sent, .. } = &mut entry.stage else { return };
        *sent_at = Some(now);
        first_sent.get_or_insert(now);
        self.sent.push_back((now, token));
        self.hold_floor(token, self.newest);
    }

    /// Until its outcome is recorded, the event can only be stored above `floor`.
    fn hold_floor(&mut self, token: u64, floor: u64) {
        if let Some(entry) = self.entries.get_mut(&token)
            && entry.floor.is_none()
        {
            entry.floor = Some(floor);
            self.floors.hold(floor);
        }
    }

    /// JetStream stored the event (now or earlier) at `sequence`. `None` when its outcome is known already.
    pub fn accepted(&mut self, token: u64, sequence: u64) -> Option<Accepted> {
        // An answer to an event of an earlier session may speak of another stream.
        let (sent_at, floor) = (self.waits_since(token), self.entries.get(&token)?.floor);
        self.newest = self.newest.max(sequence);
        let Parcel { event, subject, committed_at } = *self.decide(token)?;
        self.refusals.accepted(&subject, sent_at);
        Some(Accepted { report: Report::completed(token, &event), committed_at, sent_at, floor })
    }

    /// Ends the event's way to NATS and lets the next one of its aggregate go.
    fn decide(&mut self, token: u64) -> Option<Box<Parcel>> {
        let entry = self.entries.get_mut(&token)?;
        let Stage::Open { parcel, .. } = std::mem::replace(&mut entry.stage, Stage::Decided { blocks: None }) else {
            return None;
        };
        self.bytes -= std::mem::take(&mut entry.bytes);
        self.ready.remove(&token);
        if self.limits.ordered
            && let Some(next) = self.gate.leave(&AggregateKey::of(&parcel.event))
        {
            self.ready.insert(next);
        }
        Some(parcel)
    }

    /// The event's acknowledgement did not come, or came as a failure that is not the event's fault: it is sent
    /// again when the driver sends next. `false` when it was not waiting for one.
    pub fn send_again(&mut self, token: u64) -> bool {
        let Some(Entry { stage: Stage::Open { sent_at, .. }, .. }) = self.entries.get_mut(&token) else { return false };
        sent_at.take().is_some() && self.ready.insert(token)
    }

    /// The connection was lost: whatever waits for an acknowledgement is sent again.
    pub fn send_all_again(&mut self) {
        for (_, token) in std::mem::take(&mut self.sent) {
            self.send_again(token);
        }
    }

    /// The events of which copies may be stored, by their ids, and the sequence above which those stand: what the
    /// stream is asked for, until [`Delivery::prove`].
    pub fn copies(&mut self) -> (HashSet<ByteString>, u64) {
        let (mut ids, mut above) = (HashSet::new(), self.newest);
        for entry in self.entries.values_mut() {
            if let Stage::Open { parcel, sent_at, first_sent: Some(_), asked, .. } = &mut entry.stage {
                ids.insert(parcel.event.event_id.clone());
                above = above.min(entry.floor.unwrap_or(above));
                *asked = sent_at.is_none();
            }
        }
        (ids, above)
    }

    /// The stream was asked: events that it holds are accepted, and of the others it is known that no copy of them was
    /// stored before, but for those of which one was under way. Returns the reports of those accepted.
    pub fn prove(&mut self, stored: impl Fn(&str) -> Option<u64>) -> Vec<Report> {
        let mut found = Vec::new();
        for (&token, entry) in &mut self.entries {
            if let Stage::Open { parcel, sent_at, first_sent, doubted, asked } = &mut entry.stage
                && first_sent.is_some()
            {
                if let Some(sequence) = stored(&parcel.event.event_id) {
                    found.push((token, sequence));
                } else if std::mem::take(asked) {
                    (*first_sent, *doubted) = (*sent_at, false);
                }
            }
        }
        // The gate lets events go in the order in which they end.
        found.sort_unstable();
        found.into_iter().filter_map(|(token, sequence)| Some(self.accepted(token, sequence)?.report)).collect()
    }

    /// An event that was sent at `timeout` or more before `now` and has no answer yet. Call until `None`.
    pub fn overdue(&mut self, now: Instant, timeout: Duration) -> Option<u64> {
        while let Some(&(at, token)) = self.sent.front() {
            let waiting = self.waits_since(token) == Some(at);
            if waiting && now.saturating_duration_since(at) < timeout {
                return None;
            }
            self.sent.pop_front();
            if waiting {
                return Some(token);
            }
        }
        None
    }

    /// The events sent to `subject` that have no answer yet, in the order of sending.
    pub fn sent_to(&self, subject: &str) -> Vec<u64> {
        let to_subject = |token: &u64| {
            matches!(self.entries.get(token), Some(Entry { stage: Stage::Open { parcel, sent_at: Some(_), .. }, .. })
                if parcel.subject == subject)
        };
        self.sent.iter().map(|&(_, token)| token).filter(to_subject).collect()
    }

    fn waits_since(&self, token: u64) -> Option<Instant> {
        match self.entries.get(&token)?.stage {
            Stage::Open { sent_at, .. } => sent_at,
            Stage::Decided { .. } => None,
        }
    }

    /// The event's outcome is committed in the table: it is no longer under way.
    pub fn settle(&mut self, Settled { token, gone }: Settled) {
        let Some(entry) = self.entries.remove(&token) else { return };
        // What is held keeps its payload until the table shows it.
        self.bytes -= entry.bytes;
        let gone_above = entry.floor.filter(|_| gone);
        if entry.ledgered {
            self.ledger.settle(token, gone_above);
        } else if let Some(floor) = gone_above {
            self.ledger.gone(floor);
        }
        if let Stage::Decided { blocks: Some(aggregate) } = &entry.stage {
            self.gate.hold_committed(aggregate);
        }
        if let Some(floor) = entry.floor {
            self.floors.release(floor);
        }
    }

    /// Forgets what was not sent yet, or is to be sent again: the session ends, and another will read it again. The
    /// slot waits for it, and the stream is asked for what was sent of it.
    pub fn forget_unsent(&mut self) {
        self.gate.forget_waiting();
        for (token, entry) in
            self.entries.extract_if(|_, entry| matches!(entry.stage, Stage::Open { sent_at: None, .. }))
        {
            self.bytes -= entry.bytes;
            if let Stage::Open { parcel, .. } = entry.stage
                && self.ready.remove(&token)
            {
                self.gate.leave(&AggregateKey::of(&parcel.event));
            }
        }
    }

    /// An event that waits for its answer.
    pub fn parcel(&self, token: u64) -> Option<&Parcel> {
        match &self.entries.get(&token)?.stage {
            Stage::Open { parcel, .. } => Some(parcel),
            Stage::Decided { .. } => None,
        }
    }

    /// The highest sequence that the stream is known to have reached.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Where the log ended when the session began: what was committed before may have been sent already.
    pub fn horizon(&self) -> Lsn {
        self.start.horizon
    }

    /// The token that the next event would get.
    pub fn next_token(&self) -> u64 {
        self.next
    }

    /// The sequence at or below which no event with unrecorded outcome is stored.
    pub fn stream_seq(&self) -> u64 {
        if self.ledger.safe() < self.start.horizon || !self.reconciled {
            return self.start.stream_seq;
        }
        // Of what the log may show again, the table tells as long as it has the row.
        let open = self.floors.lowest().into_iter().chain(self.ledger.gone_above());
        open.min().unwrap_or(self.newest)
    }

    /// Every row that was due when the session began was sent once: none of them is left of which the stream, before
    /// this session, may hold a copy that nobody has looked for.
    pub fn reconciled(&mut self) {
        self.reconciled = true;
    }

    /// The position up to which the slot may be confirmed.
    pub fn safe(&self) -> Lsn {
        self.ledger.safe()
    }

    /// How many events are under way, and how many of them have an outcome that is not committed yet.
    pub fn under_way(&self) -> (usize, usize) {
        let decided = self.entries.values().filter(|entry| matches!(entry.stage, Stage::Decided { .. })).count();
        (self.entries.len(), decided)
    }

    /// Whether an event of the stream of changes is still to be sent, or waits for its answer.
    pub fn has_open(&self) -> bool {
        self.entries.values().any(|entry| entry.ledgered && matches!(entry.stage, Stage::Open { .. }))
    }

    /// Whether no event is under way.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// How many events were sent and have no answer yet. What was answered behind one that was not is forgotten here:
    /// call it from time to time, or the list of what was sent grows behind a straggler.
    pub fn in_flight(&mut self) -> usize {
        let mut sent = std::mem::take(&mut self.sent);
        sent.retain(|&(at, token)| self.waits_since(token) == Some(at));
        self.sent = sent;
        self.sent.len()
    }
}
