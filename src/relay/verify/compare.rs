//! Looks for the events of completed rows in the stream.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;

use super::{Step, patiently, timestamp};
use crate::fault::Failure;
use crate::nats::ids::{Start, Walk};
use crate::nats::stream::{Stream, StreamFacts};
use crate::postgres::outbox::CompletedRow;

/// By how much the clocks of PostgreSQL and NATS may differ before the comparison takes longer. It is right all the
/// same.
const SKEW: Duration = Duration::from_secs(10);

/// Ids that were read before their rows, kept in each of two generations.
const AHEAD: usize = 100_000;

/// The comparison, some rows at a time. Rows and messages are read side by side, both in the order of time.
pub struct Compare<'a> {
    stream: &'a Stream,
    walk: Walk<'a>,
    /// When the last message that was read was stored.
    at: Timestamp,
    ahead: Ahead,
    /// Rows that were not found where they were expected.
    pub suspects: Vec<CompletedRow>,
    /// Rows whose messages the stream's limits have removed.
    pub expired: u64,
}

impl<'a> Compare<'a> {
    pub fn new(stream: &'a Stream) -> Self {
        let walk = stream.walk(Start::Time(Timestamp::MAX));
        Self { stream, walk, at: Timestamp::MIN, ahead: Ahead::default(), suspects: Vec::new(), expired: 0 }
    }

    /// Looks for rows, given in the order of their creation, among the messages that were stored around their time. An
    /// event is stored after its row was created and before its outcome was written; what does not keep to that (clocks
    /// that differ, times that a producer made up, repaired events, the few that took much longer than others) becomes
    /// suspect.
    pub async fn chunk(&mut self, rows: Vec<CompletedRow>) -> Result<(), Failure> {
        let Some(first) = rows.iter().map(|row| row.created_at.min(row.processed_at)).min() else { return Ok(()) };
        let last = nearly_last(&rows).unwrap_or(first);
        let (first, last) = (before(first), timestamp(last.checked_add(SKEW).unwrap_or(last)));
        if self.at < first {
            (self.walk, self.ahead) = (self.stream.walk(Start::Time(first)), Ahead::default());
        }
        let mut wanted = Wanted::new(rows);
        wanted.0.retain(|id, _| !self.ahead.has(id));
        while !wanted.0.is_empty()
            && self.at <= last
            && let Some(stored) = patiently(async || self.walk.next().await).await?
        {
            for stored in stored {
                self.at = stored.stored_at;
                if let Some(id) = stored.id
                    && wanted.0.remove(&id).is_none()
                {
                    self.ahead.add(id);
                }
            }
        }
        self.suspects.extend(wanted.left());
        Ok(())
    }

    /// Looks for the suspects in the whole stream: nothing is called missing before, since sending again what is there
    /// would store it twice. Returns the missing ones, in the order of their ids.
    pub async fn settle(&mut self, tell: &mut impl FnMut(Step)) -> Result<Vec<CompletedRow>, Failure> {
        if self.suspects.is_empty() {
            return Ok(Vec::new());
        }
        let facts = patiently(async || self.stream.facts().await).await?;
        let (gone, suspects): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.suspects).into_iter().partition(|row| expired(row, &facts));
        self.expired += gone.len() as u64;
        let rows = suspects.len();
        let mut wanted = Wanted::new(suspects);
        let mut walk = self.stream.walk(Start::After(0));
        while !wanted.0.is_empty()
            && let Some(stored) = patiently(async || walk.next().await).await?
        {
            for id in stored.iter().filter_map(|stored| stored.id.as_ref()) {
                wanted.0.remove(id);
            }
            if let Some(last) = stored.last() {
                tell(Step::Searching { rows, share: part(&facts, last.sequence) });
            }
        }
        let mut missing = wanted.left();
        // What the limits removed while the stream was read.
        let facts = patiently(async || self.stream.facts().await).await?;
        let found = missing.len();
        missing.retain(|row| !expired(row, &facts));
        self.expired += found.saturating_sub(missing.len()) as u64;
        missing.sort_unstable_by_key(|row| row.id);
        Ok(missing)
    }
}

/// Rows that are looked for, by the ids of their events.
struct Wanted(HashMap<String, CompletedRow>);

impl Wanted {
    fn new(rows: Vec<CompletedRow>) -> Self {
        Self(rows.into_iter().map(|mut row| (std::mem::take(&mut row.event_id), row)).collect())
    }

    fn left(self) -> Vec<CompletedRow> {
        self.0.into_iter().map(|(event_id, row)| CompletedRow { event_id, ..row }).collect()
    }
}

/// Ids of messages that were read and belong to no row so far: its row may come later. The oldest are forgotten.
#[derive(Default)]
struct Ahead {
    young: HashSet<String>,
    old: HashSet<String>,
}

impl Ahead {
    fn add(&mut self, id: String) {
        if self.young.len() >= AHEAD {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(id);
    }

    fn has(&self, id: &str) -> bool {
        self.young.contains(id) || self.old.contains(id)
    }
}

/// When nearly all of the rows had their outcome. The last hundredth may have had to wait for a retry, and would have
/// all that came meanwhile read for its sake.
fn nearly_last(rows: &[CompletedRow]) -> Option<SystemTime> {
    let mut times: Vec<SystemTime> = rows.iter().map(|row| row.processed_at).collect();
    let place = times.len().saturating_sub(1 + times.len() / 100);
    (place < times.len()).then(|| *times.select_nth_unstable(place).1)
}

/// Whether the stream's limits would have removed the row's message by now. Its time is taken to be when the outcome
/// was written, which follows the store closely: near the edge it counts as removed. A limit on size removes the oldest
/// messages only: what was stored after the oldest one that is left, or before this very stream was made, was not
/// removed by it.
fn expired(row: &CompletedRow, facts: &StreamFacts) -> bool {
    let edge = |oldest: SystemTime| oldest.checked_add(SKEW).unwrap_or(oldest);
    let too_old = facts.max_age.and_then(|age| SystemTime::now().checked_sub(age)).map(edge);
    let pushed_out = facts.first_stored.filter(|_| facts.drops_oldest && facts.first_sequence > 1);
    let pushed_out =
        pushed_out.map(|first| edge(first.into())).filter(|_| timestamp(row.processed_at) >= facts.created);
    too_old.is_some_and(|oldest| row.processed_at < oldest)
        || pushed_out.is_some_and(|oldest| row.processed_at < oldest)
}

fn before(time: SystemTime) -> Timestamp {
    timestamp(time.checked_sub(SKEW).unwrap_or(time))
}

/// How much of the stream lies before a sequence, from 0 to 1.
#[allow(clippy::cast_precision_loss, reason = "it is shown as a percentage")]
fn part(facts: &StreamFacts, sequence: u64) -> f64 {
    let length = facts.last_sequence.saturating_sub(facts.first_sequence).max(1);
    (sequence.saturating_sub(facts.first_sequence) as f64 / length as f64).clamp(0.0, 1.0)
}
