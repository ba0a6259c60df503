//! The ledger that decides how far the slot may advance. Correctness lives here: promise 4 of the crate.
//!
//! Transactions arrive in commit order; the outcomes of their events become durable in any order. The safe position is
//! the end of the last transaction before which every event has an outcome committed in the table.

use std::collections::BTreeMap;

use super::floors::Floors;
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
    /// Above which sequences of the stream events stand whose rows are gone, of transactions that may be read again.
    floors: Floors,
}

#[derive(Debug)]
struct Waiting {
    unrecorded: u64,
    /// What may be confirmed once this transaction and all before it are finished.
    end: Lsn,
    /// Above it stands what was settled of this transaction, and of finished ones behind it, and has no row any more.
    floor: Option<u64>,
}

#[derive(Debug, Default)]
struct Open {
    first: Option<u64>,
    unrecorded: u64,
    floor: Option<u64>,
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
            Some(Open { first: Some(first), unrecorded, floor }) if unrecorded > 0 => {
                self.waiting.insert(first, Waiting { unrecorded, end, floor });
            }
            open => self.finished_through(end, open.and_then(|open| open.floor), u64::MAX),
        }
    }

    /// The server has nothing more for us before `position`. Without effect inside a transaction, whose events lie
    /// before positions that the server has passed already.
    pub fn mark(&mut self, position: Lsn) {
        if self.open.is_none() {
            self.finished_through(position, None, u64::MAX);
        }
    }

    /// The outcome of event `number` is committed in the table. Each event is settled once. `gone_above`: its row is gone,
    /// and it stands in the stream above this sequence.
    pub fn settle(&mut self, number: u64, gone_above: Option<u64>) {
        if let Some(open) = self.open.as_mut().filter(|open| open.first.is_some_and(|first| first <= number)) {
            open.unrecorded = open.unrecorded.saturating_sub(1);
            lower(&mut open.floor, gone_above, &mut self.floors);
            return;
        }
        let Some((&first, transaction)) = self.waiting.range_mut(..=number).next_back() else { return };
        transaction.unrecorded = transaction.unrecorded.saturating_sub(1);
        lower(&mut transaction.floor, gone_above, &mut self.floors);
        if transaction.unrecorded == 0
            && let Some(Waiting { end, floor, .. }) = self.waiting.remove(&first)
        {
            self.finished_through(end, floor, first);
        }
    }

    /// An event that came from the table stands in the stream above `floor`, and its row is gone. What was received so
    /// far may have shown it, and may be read again.
    pub fn gone(&mut self, floor: u64) {
        let newest = self.waiting.last_entry().map(|newest| &mut newest.into_mut().floor);
        let held = self.open.as_mut().map(|open| &mut open.floor).or(newest);
        if let Some(held) = held {
            lower(held, Some(floor), &mut self.floors);
        }
    }

    /// Everything up to `end` that came before event `number` is finished or stands in an earlier entry: the
    /// position passes to the nearest earlier transaction that still waits, or is safe when there is none. So does the
    /// `floor` that was held until here.
    fn finished_through(&mut self, end: Lsn, floor: Option<u64>, number: u64) {
        if let Some(floor) = floor {
            self.floors.release(floor);
        }
        let holder = match self.waiting.range_mut(..number).next_back() {
            Some((_, earlier)) => {
                lower(&mut earlier.floor, floor, &mut self.floors);
                &mut earlier.end
            }
            None => &mut self.safe,
        };
        *holder = end.max(*holder);
    }

    /// Above which sequence of the stream events stand whose rows are gone, and which the log may show again.
    pub fn gone_above(&self) -> Option<u64> {
        self.floors.lowest()
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

/// What `held` keeps free in `floors` begins at `floor` at the latest.
fn lower(held: &mut Option<u64>, floor: Option<u64>, floors: &mut Floors) {
    let Some(floor) = floor.filter(|&floor| held.is_none_or(|held| floor < held)) else { return };
    floors.hold(floor);
    if let Some(above) = held.replace(floor) {
        floors.release(above);
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
        ledger.settle(0, None);
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
                ledger.settle(number, None);
            }
        }
        assert_eq!(ledger.waiting.len(), 1);
        assert_eq!(ledger.safe(), Lsn(0));
        ledger.settle(0, None);
        assert_eq!(ledger.safe(), Lsn(10_000));
        assert!(is_idle(&ledger));
    }

    #[test]
    fn what_has_no_row_any_more_is_remembered_until_the_log_cannot_show_it_again() {
        let mut ledger = Ledger::new(Lsn(0));
        for number in 0..4 {
            ledger.begin();
            ledger.add(2 * number);
            ledger.add(2 * number + 1);
            if number < 3 {
                ledger.commit(Lsn(number + 1));
            }
        }
        // Of each transaction one, of the third both, and of the one that is still open.
        for (number, above) in [(0, 10), (4, 14), (5, 12), (6, 16)] {
            ledger.settle(number, Some(above));
        }
        assert_eq!(ledger.gone_above(), Some(10));
        ledger.settle(1, None);
        assert_eq!((ledger.safe(), ledger.gone_above()), (Lsn(1), Some(12)), "the third waits for the second");
        ledger.settle(3, Some(11));
        assert_eq!(ledger.gone_above(), Some(11));
        ledger.settle(2, None);
        assert_eq!((ledger.safe(), ledger.gone_above()), (Lsn(3), Some(16)));
        ledger.settle(7, Some(17));
        ledger.commit(Lsn(4));
        assert_eq!((ledger.safe(), ledger.gone_above()), (Lsn(4), None));
    }

    #[test]
    fn what_came_from_the_table_is_remembered_until_all_that_was_received_is_finished() {
        let mut ledger = Ledger::new(Lsn(0));
        ledger.gone(5);
        assert_eq!(ledger.gone_above(), None, "nothing may be shown again");
        for number in 0..2 {
            ledger.begin();
            ledger.add(number);
            ledger.commit(Lsn(number + 1));
        }
        ledger.gone(7);
        ledger.settle(1, None);
        assert_eq!(ledger.gone_above(), Some(7));
        ledger.begin();
        ledger.gone(6);
        ledger.gone(8);
        ledger.commit(Lsn(3));
        assert_eq!(ledger.gone_above(), Some(6));
        ledger.settle(0, None);
        assert_eq!((ledger.safe(), ledger.gone_above()), (Lsn(3), None));
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
            // Of each settled event, which has no row any more: its place in the stream, and where its transaction ends.
            let mut gone: Vec<(u64, u64)> = Vec::new();
            let check = |ledger: &Ledger, unsettled: &[(u64, u64)], gone: &[(u64, u64)], before: &mut Lsn| {
                let bound = unsettled.iter().map(|&(_, end)| end).min();
                prop_assert!(bound.is_none_or(|end| ledger.safe() < Lsn(end)));
                prop_assert!(ledger.safe() >= *before);
                *before = ledger.safe();
                let again = gone.iter().filter(|&&(_, end)| Lsn(end) > ledger.safe()).map(|&(place, _)| place);
                prop_assert_eq!(ledger.gone_above(), again.min());
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
                        let (n, end) = unsettled.swap_remove(pick.index(unsettled.len()));
                        gone.push((n * 7 % 50, end));
                        ledger.settle(n, Some(n * 7 % 50));
                    }
                    check(&ledger, &unsettled, &gone, &mut before)?;
                }
                ledger.commit(Lsn(position));
                check(&ledger, &unsettled, &gone, &mut before)?;
                if mark {
                    position += 1;
                    ledger.mark(Lsn(position));
                    check(&ledger, &unsettled, &gone, &mut before)?;
                }
            }
            while !unsettled.is_empty() {
                let at = picks.next().map_or(0, |pick| pick.index(unsettled.len()));
                let (n, end) = unsettled.swap_remove(at);
                gone.push((n * 7 % 50, end));
                ledger.settle(n, Some(n * 7 % 50));
                check(&ledger, &unsettled, &gone, &mut before)?;
            }
            prop_assert_eq!(ledger.safe(), Lsn(position));
            prop_assert!(is_idle(&ledger));
        }
    }
}
