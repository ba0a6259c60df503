//! The one place that keeps the order of an aggregate's events: at most one of them is unacknowledged at a time, and
//! while one waits for a retry, the later ones are held in the table.

use std::collections::{HashMap, VecDeque};

use bytestring::ByteString;

use super::event::{Event, Outcome};

/// An aggregate: what orders events among each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AggregateKey {
    /// As in the row, if it has one.
    pub tenant_id: Option<ByteString>,
    /// As in the row.
    pub aggregate_type: ByteString,
    /// As in the row, within its type.
    pub aggregate_id: ByteString,
}

impl AggregateKey {
    /// The aggregate of an event.
    pub fn of(event: &Event) -> Self {
        Self {
            tenant_id: event.tenant_id.clone(),
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate_id.clone(),
        }
    }

    /// The aggregate of an event whose outcome is to wait in the table.
    pub fn of_waiting(outcome: &Outcome) -> Option<Self> {
        match outcome {
            Outcome::Completed => None,
            Outcome::Failed(rejection) => rejection.retry_in.map(|_| Self::of(&rejection.event)),
            Outcome::Held(event) => Some(Self::of(event)),
        }
    }
}

/// What an arriving event does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// It may be sent now.
    Go,
    /// Another event of its aggregate is under way: [`Gate::leave`] names this one when its turn has come.
    Wait,
    /// Its aggregate is blocked: it is held in the table.
    Hold,
}

/// Whether an event may pass a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// An event that comes for the first time is held behind a block.
    First,
    /// A retry, or a row that was held and is released: it is what the block waits for.
    Again,
}

/// An aggregate that is blocked, as it stood when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Which one.
    pub aggregate: AggregateKey,
    /// How many events were held behind it, or failed, so far.
    changes: u64,
    /// Its held rows all stand in the table, with none under way.
    pub settled: bool,
}

/// Lets one event of an aggregate pass at a time; the others wait in line, or in the table while it is blocked.
///
/// Holds an entry only for aggregates with an event under way and for blocked ones.
#[derive(Debug, Default)]
pub struct Gate {
    lines: HashMap<AggregateKey, Line>,
    held: u64,
}

#[derive(Debug, Default)]
struct Line {
    /// An event of the aggregate is under way.
    busy: bool,
    /// The tokens that wait behind it.
    waiting: VecDeque<u64>,
    block: Option<Block>,
    /// The tokens of events that came while the block opens: they go on when it is gone.
    late: VecDeque<u64>,
}

impl Line {
    fn blocks(&self, aggregate: &AggregateKey) -> Option<Blocked> {
        let block = self.block?;
        let settled = block.uncommitted == 0 && !self.busy;
        Some(Blocked { aggregate: aggregate.clone(), changes: block.changes, settled })
    }

    /// The line's block. A new one counts for the row that blocks.
    fn blocked(&mut self, held: &mut u64) -> &mut Block {
        self.block.get_or_insert_with(|| {
            *held += 1;
            Block { rows: 1, ..Block::default() }
        })
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// Events that were held, or failed, since the aggregate was blocked.
    changes: u64,
    /// Rows that wait: the one that blocks, and each that was held, once however often it was released and held again.
    rows: u64,
    /// Those among them that the table does not show as held yet, and failures that it does not show yet.
    uncommitted: u64,
    /// What comes now is not held any more: it waits here until the rows in the table have left.
    opens: bool,
}

impl Block {
    /// So many more are held.
    fn hold(&mut self, events: u64, held: &mut u64) {
        self.changes += events;
        self.rows += events;
        self.uncommitted += events;
        *held += events;
    }
}

impl Gate {
    /// An event arrives.
    pub fn arrive(&mut self, aggregate: AggregateKey, token: u64, pass: Pass) -> Turn {
        let line = self.lines.entry(aggregate).or_default();
        if let Some(block) = &mut line.block
            && pass == Pass::First
        {
            if block.opens {
                line.late.push_back(token);
                return Turn::Wait;
            }
            block.hold(1, &mut self.held);
            return Turn::Hold;
        }
        if line.busy {
            line.waiting.push_back(token);
            return Turn::Wait;
        }
        line.busy = true;
        Turn::Go
    }

    /// The event under way of this aggregate has come to its end. Returns the one whose turn it is now.
    pub fn leave(&mut self, aggregate: &AggregateKey) -> Option<u64> {
        let line = self.lines.get_mut(aggregate)?;
        let next = line.waiting.pop_front();
        line.busy = next.is_some();
        if !line.busy && line.block.is_none() {
            self.lines.remove(aggregate);
        }
        next
    }

    /// The event under way waits for a retry: the aggregate is blocked. Returns the tokens that waited behind it; each
    /// counts as one more that is held until [`Gate::still_held`] says otherwise.
    pub fn block(&mut self, aggregate: AggregateKey) -> VecDeque<u64> {
        let line = self.lines.entry(aggregate).or_default();
        line.busy = false;
        let mut waiting = std::mem::take(&mut line.waiting);
        waiting.append(&mut line.late);
        let block = line.blocked(&mut self.held);
        block.opens = false;
        block.hold(waiting.len() as u64, &mut self.held);
        waiting
    }

    /// Nothing of the aggregate waits for a retry any more, and its held rows are about to leave the table. However
    /// fast new events come, they do not join those rows: each waits for [`Gate::unblock`], or [`Gate::close`].
    pub fn open(&mut self, aggregate: &AggregateKey) {
        if let Some(block) = self.lines.get_mut(aggregate).and_then(|line| line.block.as_mut()) {
            block.opens = true;
        }
    }

    /// The held rows did not leave so soon: new events are held in the table again. Returns the tokens that came
    /// meanwhile; each counts as one more that is held.
    pub fn close(&mut self, aggregate: &AggregateKey) -> VecDeque<u64> {
        let Some(line) = self.lines.get_mut(aggregate) else { return VecDeque::new() };
        let Some(block) = &mut line.block else { return VecDeque::new() };
        block.opens = false;
        let late = std::mem::take(&mut line.late);
        block.hold(late.len() as u64, &mut self.held);
        late
    }

    /// The table does not show yet that the event which blocks the aggregate waits for a retry: until
    /// [`Gate::hold_committed`] is told of it, nobody may find the aggregate free.
    pub fn await_failure(&mut self, aggregate: &AggregateKey) {
        if let Some(block) = self.lines.get_mut(aggregate).and_then(|line| line.block.as_mut()) {
            block.changes += 1;
            block.uncommitted += 1;
        }
    }

    /// The table shows `rows` of the aggregate as held, or waiting for a retry: it is blocked from the start.
    pub fn block_as_found(&mut self, aggregate: AggregateKey, rows: u64) {
        let block = self.lines.entry(aggregate).or_default().blocked(&mut self.held);
        let more = rows.saturating_sub(block.rows);
        block.changes += rows;
        block.rows += more;
        self.held += more;
    }

    /// A hold, or the failure that blocks, is committed in the table, or its row is gone.
    pub fn hold_committed(&mut self, aggregate: &AggregateKey) {
        if let Some(block) = self.lines.get_mut(aggregate).and_then(|line| line.block.as_mut()) {
            block.uncommitted = block.uncommitted.saturating_sub(1);
        }
    }

    /// An event that waited when the aggregate was blocked is a row that the table shows as held, and that was counted
    /// when it was held first.
    pub fn still_held(&mut self, aggregate: &AggregateKey) {
        if let Some(block) = self.lines.get_mut(aggregate).and_then(|line| line.block.as_mut()) {
            block.uncommitted = block.uncommitted.saturating_sub(1);
            block.rows = block.rows.saturating_sub(1);
            self.held = self.held.saturating_sub(1);
        }
    }

    /// The blocked aggregates.
    pub fn all_blocks(&self) -> Vec<AggregateKey> {
        let blocked = self.lines.iter().filter(|(_, line)| line.block.is_some());
        blocked.map(|(aggregate, _)| aggregate.clone()).collect()
    }

    /// Those of the aggregates that are blocked.
    pub fn blocks(&self, of: &[AggregateKey]) -> Vec<Blocked> {
        of.iter().filter_map(|aggregate| self.lines.get(aggregate)?.blocks(aggregate)).collect()
    }

    /// The table was seen to hold no row of the aggregate any more. It is free again, unless another event was held
    /// behind it, or failed, since it was asked for. Returns the one whose turn it is then.
    pub fn unblock(&mut self, seen: &Blocked) -> Option<u64> {
        let line = self.lines.get_mut(&seen.aggregate)?;
        let block = line.block.filter(|block| block.changes == seen.changes && block.uncommitted == 0)?;
        if line.busy {
            return None;
        }
        line.block = None;
        self.held = self.held.saturating_sub(block.rows);
        line.waiting.append(&mut line.late);
        self.leave(&seen.aggregate)
    }

    /// Nothing that waits for its turn gets it any more.
    pub fn forget_waiting(&mut self) {
        for line in self.lines.values_mut() {
            line.waiting.clear();
            line.late.clear();
        }
    }

    /// How many rows wait: those that block, and those that were held behind them.
    pub fn held(&self) -> usize {
        usize::try_from(self.held).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests;
