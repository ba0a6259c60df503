//! From what was read from the table to what comes next, which may show the same events again: the log, or another
//! round.
//!
//! Outcomes that are known and not written yet keep nothing waiting. Someone may hold the lock of a row for long, and
//! meanwhile the log would be left unread.

use std::collections::{HashMap, HashSet};

use bytestring::ByteString;

use super::Deliver;
use crate::flow::event::{Event, Report};

/// Events of the table whose outcome is known, and on its way to their rows.
#[derive(Debug, Default)]
pub(super) struct Seam {
    /// Of what is read now, and of what the reconciler found, by their tokens.
    unrecorded: HashMap<u64, (i64, ByteString)>,
    /// Those that had no outcome in the table when the next source, or round, could begin: it may show them as waiting,
    /// also when their outcome is written by the time they are taken in. By both ids, since a truncated table may count
    /// its rows from one again.
    passed: HashSet<(i64, ByteString)>,
}

impl Seam {
    pub(super) fn decided(&mut self, report: &Report) {
        self.unrecorded.insert(report.token, (report.id, report.event_id.clone()));
    }

    pub(super) fn recorded(&mut self, token: u64) {
        self.unrecorded.remove(&token);
    }

    /// What comes from here on may show these events again.
    fn pass(&mut self) {
        self.passed = self.unrecorded.values().cloned().collect();
    }

    fn is_passed(&self, event: &Event) -> bool {
        !self.passed.is_empty() && self.passed.contains(&(event.id, event.event_id.clone()))
    }
}

impl Deliver<'_> {
    /// Whether what is read now comes from the table.
    pub(super) fn reads_table(&self) -> bool {
        self.wiring.sources.len() > 1 || self.wiring.decided.is_some()
    }

    /// Goes on to the next source, or round, once nothing of the present one is to be sent any more. The last source
    /// ends when all is settled.
    pub(super) fn advance_source(&mut self) {
        if let Some(decided) = &self.wiring.decided
            && *decided.borrow() < self.taken_in
            && !self.delivery.has_open()
        {
            self.seam.pass();
            decided.send_replace(self.taken_in);
        }
        let table = self.wiring.sources.len() > 1;
        if self.source_ended && if table { !self.delivery.has_open() } else { self.delivery.is_empty() } {
            self.source_ended = false;
            self.wiring.sources.pop();
            if table {
                self.seam.pass();
            }
        }
    }

    /// Whether the event came from the table before, and its outcome is known. The position is not confirmed beyond it
    /// all the same: in the ledger, it stands before what comes now.
    pub(super) fn is_shown_again(&self, event: &Event) -> bool {
        self.seam.is_passed(event) && self.is_doubtful(event)
    }
}
