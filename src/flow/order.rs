//! The one place that keeps the order of an aggregate's events: at most one of them is unacknowledged at a time, and
//! while one waits for a retry, the later ones are held in the table.

use std::collections::{HashMap, VecDeque};

use bytestring::ByteString;

use super::event::Event;

/// An aggregate: what orders events among each other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AggregateKey {
    pub tenant_id: Option<ByteString>,
    pub aggregate_type: ByteString,
    pub aggregate_id: ByteString,
}

impl AggregateKey {
    pub fn of(event: &Event) -> Self {
        Self {
            tenant_id: event.tenant_id.clone(),
            aggregate_type: event.aggregate_type.clone(),
            aggregate_id: event.aggregate_id.clone(),
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
}

impl Gate {
    /// An event arrives.
    pub fn arrive(&mut self, aggregate: AggregateKey, token: u64, pass: Pass) -> Turn {
        let line = self.lines.entry(aggregate).or_default();
        if let Some(block) = &mut line.block
            && pass == Pass::First
        {
            block.changes += 1;
            block.rows += 1;
            block.uncommitted += 1;
            self.held += 1;
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
        let waiting = std::mem::take(&mut line.waiting);
        let block = line.blocked(&mut self.held);
        block.changes += waiting.len() as u64;
        block.rows += waiting.len() as u64;
        block.uncommitted += waiting.len() as u64;
        self.held += waiting.len() as u64;
        waiting
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

    /// The blocked aggregates that are settled.
    pub fn settled_blocks(&self) -> Vec<Blocked> {
        self.lines.iter().filter_map(|(aggregate, line)| line.blocks(aggregate)).filter(|block| block.settled).collect()
    }

    /// Those of the aggregates that are blocked.
    pub fn blocks(&self, of: &[AggregateKey]) -> Vec<Blocked> {
        of.iter().filter_map(|aggregate| self.lines.get(aggregate)?.blocks(aggregate)).collect()
    }

    /// The table was seen to hold no row of the aggregate any more. It is free again, unless another event was held
    /// behind it, or failed, since it was asked for.
    pub fn unblock(&mut self, seen: &Blocked) {
        let Some(line) = self.lines.get_mut(&seen.aggregate) else { return };
        let same = line.block.filter(|block| block.changes == seen.changes && block.uncommitted == 0);
        if let Some(block) = same
            && !line.busy
        {
            self.lines.remove(&seen.aggregate);
            self.held = self.held.saturating_sub(block.rows);
        }
    }

    /// How many rows wait: those that block, and those that were held behind them.
    pub fn held(&self) -> usize {
        usize::try_from(self.held).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: &'static str) -> AggregateKey {
        AggregateKey { tenant_id: None, aggregate_type: "order".into(), aggregate_id: ByteString::from_static(id) }
    }

    fn blocked(gate: &Gate) -> usize {
        gate.lines.values().filter(|line| line.block.is_some()).count()
    }

    fn arrive(gate: &mut Gate, id: &'static str, token: u64) -> Turn {
        gate.arrive(key(id), token, Pass::First)
    }

    #[test]
    fn events_of_one_aggregate_go_one_after_the_other_in_their_order() {
        let mut gate = Gate::default();
        assert_eq!([1, 2, 3].map(|token| arrive(&mut gate, "a", token)), [Turn::Go, Turn::Wait, Turn::Wait]);
        assert_eq!(gate.leave(&key("a")), Some(2));
        assert_eq!(gate.leave(&key("a")), Some(3));
        assert_eq!(gate.leave(&key("a")), None);
        assert!(gate.lines.is_empty(), "an aggregate at rest takes no memory");
    }

    #[test]
    fn aggregates_do_not_wait_for_each_other() {
        let mut gate = Gate::default();
        assert_eq!(arrive(&mut gate, "a", 1), Turn::Go);
        assert_eq!(arrive(&mut gate, "b", 2), Turn::Go);
        let tenant = AggregateKey { tenant_id: Some("t".into()), ..key("a") };
        assert_eq!(gate.arrive(tenant, 3, Pass::First), Turn::Go, "another tenant's aggregate is another aggregate");
    }

    #[test]
    fn what_comes_behind_a_failed_event_is_held_until_the_table_is_empty() {
        let mut gate = Gate::default();
        arrive(&mut gate, "a", 1);
        arrive(&mut gate, "a", 2);
        assert_eq!(gate.block(key("a")), [2]);
        assert_eq!(arrive(&mut gate, "a", 3), Turn::Hold);
        assert!(gate.settled_blocks().is_empty(), "two holds are on their way to the table");
        gate.hold_committed(&key("a"));
        gate.hold_committed(&key("a"));
        let seen = gate.settled_blocks().remove(0);
        assert_eq!(gate.arrive(key("a"), 4, Pass::Again), Turn::Go, "the retry itself may go");
        gate.unblock(&seen);
        assert_eq!(blocked(&gate), 1, "not while it is under way");
        assert_eq!(gate.leave(&key("a")), None);
        gate.unblock(&seen);
        assert!(gate.lines.is_empty());
        assert_eq!(arrive(&mut gate, "a", 5), Turn::Go);
    }

    #[test]
    fn a_row_that_fails_again_keeps_the_block() {
        let mut gate = Gate::default();
        gate.block_as_found(key("a"), 2);
        let seen = gate.settled_blocks().remove(0);
        assert_eq!(gate.arrive(key("a"), 1, Pass::Again), Turn::Go);
        gate.block(key("a"));
        gate.await_failure(&key("a"));
        gate.hold_committed(&key("a"));
        gate.unblock(&seen);
        assert_eq!(arrive(&mut gate, "a", 2), Turn::Hold);
    }

    #[test]
    fn a_released_row_that_is_held_again_counts_once() {
        let mut gate = Gate::default();
        gate.block_as_found(key("a"), 3);
        for _ in 0..5 {
            assert_eq!(gate.arrive(key("a"), 1, Pass::Again), Turn::Go);
            assert_eq!(gate.arrive(key("a"), 2, Pass::Again), Turn::Wait);
            assert_eq!(gate.block(key("a")), [2]);
            gate.still_held(&key("a"));
            assert_eq!(gate.held(), 3);
        }
        let seen = gate.settled_blocks().remove(0);
        gate.unblock(&seen);
        assert_eq!((gate.held(), blocked(&gate)), (0, 0));
    }

    #[test]
    fn a_failure_that_is_not_in_the_table_yet_keeps_the_block() {
        let mut gate = Gate::default();
        arrive(&mut gate, "a", 1);
        gate.block(key("a"));
        gate.await_failure(&key("a"));
        assert!(gate.settled_blocks().is_empty(), "the table would be seen without anything that waits");
        gate.hold_committed(&key("a"));
        assert_eq!(gate.settled_blocks().len(), 1);
    }

    #[test]
    fn an_event_held_after_the_table_was_looked_at_keeps_the_block() {
        let mut gate = Gate::default();
        gate.block(key("a"));
        let seen = gate.settled_blocks().remove(0);
        assert_eq!(arrive(&mut gate, "a", 1), Turn::Hold);
        gate.unblock(&seen);
        gate.hold_committed(&key("a"));
        gate.unblock(&seen);
        assert_eq!(arrive(&mut gate, "a", 2), Turn::Hold);
    }
}
