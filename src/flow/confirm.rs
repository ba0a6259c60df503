//! The ledger that decides how far the slot may advance. Correctness lives here: promise 4 of the crate.
//!
//! Transactions arrive in commit order; the outcomes of their events become durable in any order. The safe position is
//! the end of the last transaction before which every event has an outcome committed in the table.

use std::collections::BTreeMap;

use super::lsn::Lsn;

/// Which transactions still have events without a recorded outcome, and what may be confirmed.
///
/// Holds one entry for each transaction with such an event, so that its size follows the events in flight, whatever
/// a straggler at the front may hold up.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Committed transactions with unrecorded events, by the number of their first event.
    waiting: BTreeMap<u64, Waiting>,
    /// The transaction that is being received.
    open: Option<Open>,
    safe: Lsn,
}

#[derive(Debug)]
struct Waiting {
    unrecorded: u64,
    /// What may be confirmed once this transaction and all before it are finished.
    end: Lsn,
}

#[derive(Debug, Default)]
struct Open {
    first: Option<u64>,
    unrecorded: u64,
}

impl Ledger {
    /// A ledger that has confirmed everything up to `confirmed`.
    pub fn new(confirmed: Lsn) -> Self {
        Self { safe: confirmed, ..Self::default() }
    }

    /// A transaction begins. The server sends one at a time, whole.
    pub fn begin(&mut self) {
        self.open = Some(Open::default());
    }

    /// The open transaction has an event, which is known by `number` from here on. Numbers ascend.
    pub fn add(&mut self, number: u64) {
        let open = self.open.get_or_insert_default();
        open.first.get_or_insert(number);
        open.unrecorded += 1;
    }

    /// The open transaction ends at `end` (`Commit.end_lsn`: the first byte after its commit record).
    pub fn commit(&mut self, end: Lsn) {
        match self.open.take() {
            Some(Open { first: Some(first), unrecorded }) if unrecorded > 0 => {
                self.waiting.insert(first, Waiting { unrecorded, end });
            }
            _ => self.finished_through(end, u64::MAX),
        }
    }

    /// The server has nothing more for us before `position`. Without effect inside a transaction, whose events lie
    /// before positions that the server has passed already.
    pub fn mark(&mut self, position: Lsn) {
        if self.open.is_none() {
            self.finished_through(position, u64::MAX);
        }
    }

    /// The outcome of event `number` is committed in the table. Each event is settled once.
    pub fn settle(&mut self, number: u64) {
        if let Some(open) = self.open.as_mut().filter(|open| open.first.is_some_and(|first| first <= number)) {
            open.unrecorded = open.unrecorded.saturating_sub(1);
            return;
        }
        let Some((&first, transaction)) = self.waiting.range_mut(..=number).next_back() else { return };
        transaction.unrecorded = transaction.unrecorded.saturating_sub(1);
        if transaction.unrecorded == 0 {
            let end = transaction.end;
            self.waiting.remove(&first);
            self.finished_through(end, first);
        }
    }

    /// Everything up to `end` that came before event `number` is finished or stands in an earlier entry: the
    /// position passes to the nearest earlier transaction that still waits, or is safe when there is none.
    fn finished_through(&mut self, end: Lsn, number: u64) {
        let holder = match self.waiting.range_mut(..number).next_back() {
            Some((_, earlier)) => &mut earlier.end,
            None => &mut self.safe,
        };
        *holder = end.max(*holder);
    }

    /// The position up to which the slot may be confirmed. Never goes backwards.
    pub fn safe(&self) -> Lsn {
        self.safe
    }

    /// How many committed transactions have an event without a recorded outcome.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// A bound for the oldest event without a recorded outcome: no older one has none.
    pub fn oldest(&self) -> Option<u64> {
        let open = self.open.as_ref().filter(|open| open.unrecorded > 0).and_then(|open| open.first);
        self.waiting.first_key_value().map(|(&first, _)| first).or(open)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn is_idle(ledger: &Ledger) -> bool {
        ledger.waiting.is_empty() && ledger.open.is_none()
    }

    #[test]
    fn a_transaction_without_events_is_confirmed_at_once() {
        let mut ledger = Ledger::new(Lsn(10));
        ledger.begin();
        ledger.commit(Lsn(20));
        assert_eq!(ledger.safe(), Lsn(20));
    }

    #[test]
    fn a_mark_waits_for_what_came_before_it_and_counts_for_nothing_inside_a_transaction() {
        let mut ledger = Ledger::new(Lsn(1));
        ledger.begin();
        ledger.mark(Lsn(50));
        ledger.add(0);
        ledger.commit(Lsn(20));
        assert_eq!(ledger.safe(), Lsn(1));
        ledger.mark(Lsn(60));
        assert_eq!(ledger.safe(), Lsn(1));
        ledger.settle(0);
        assert_eq!(ledger.safe(), Lsn(60));
    }

    #[test]
    fn a_straggler_holds_the_position_but_not_the_memory() {
        let mut ledger = Ledger::new(Lsn(0));
        for number in 0..10_000 {
            ledger.begin();
            ledger.add(number);
            ledger.commit(Lsn(number + 1));
            if number > 0 {
                ledger.settle(number);
            }
        }
        assert_eq!(ledger.waiting.len(), 1);
        assert_eq!(ledger.safe(), Lsn(0));
        ledger.settle(0);
        assert_eq!(ledger.safe(), Lsn(10_000));
        assert!(is_idle(&ledger));
    }

    /// What the server might send: transactions of some events, with marks in between.
    fn history() -> impl Strategy<Value = Vec<(usize, bool)>> {
        prop::collection::vec((0_usize..5, any::<bool>()), 1..40)
    }

    proptest! {
        #[test]
        fn never_passes_an_unfinished_event_and_always_reaches_the_end(history in history(), picks in prop::collection::vec(any::<prop::sample::Index>(), 200)) {
            let mut ledger = Ledger::new(Lsn(0));
            let (mut number, mut position) = (0_u64, 0_u64);
            // Of each unsettled event: where its transaction ends.
            let mut unsettled: Vec<(u64, u64)> = Vec::new();
            let mut picks = picks.into_iter();
            let mut before = Lsn(0);
            let check = |ledger: &Ledger, unsettled: &[(u64, u64)], before: &mut Lsn| {
                let bound = unsettled.iter().map(|&(_, end)| end).min();
                prop_assert!(bound.is_none_or(|end| ledger.safe() < Lsn(end)));
                prop_assert!(ledger.safe() >= *before);
                *before = ledger.safe();
                Ok(())
            };
            for (events, mark) in history {
                ledger.begin();
                position += 10;
                let numbers: BTreeSet<u64> = (number..number + events as u64).collect();
                number += events as u64;
                for &n in &numbers {
                    ledger.add(n);
                    unsettled.push((n, position));
                    if let Some(pick) = picks.next() {
                        // An event may be settled while its transaction is still being received.
                        let (n, _) = unsettled.swap_remove(pick.index(unsettled.len()));
                        ledger.settle(n);
                    }
                    check(&ledger, &unsettled, &mut before)?;
                }
                ledger.commit(Lsn(position));
                check(&ledger, &unsettled, &mut before)?;
                if mark {
                    position += 1;
                    ledger.mark(Lsn(position));
                    check(&ledger, &unsettled, &mut before)?;
                }
            }
            while !unsettled.is_empty() {
                let at = picks.next().map_or(0, |pick| pick.index(unsettled.len()));
                let (n, _) = unsettled.swap_remove(at);
                ledger.settle(n);
                check(&ledger, &unsettled, &mut before)?;
            }
            prop_assert_eq!(ledger.safe(), Lsn(position));
            prop_assert!(is_idle(&ledger));
        }
    }
}
