//! What comes in: changes from the log, rows from the table, and what the reconciler asks.

use std::collections::HashSet;

use bytestring::ByteString;

use super::Deliver;
use crate::fault::Failure;
use crate::flow::delivery::Parcel;
use crate::flow::event::{Change, Decoded, Event, Outcome, Rejection, Report};
use crate::postgres::outbox::DueRow;
use crate::reconcile::{Ask, PASS_ROWS};

impl Deliver<'_> {
    pub(super) fn ask(&mut self, ask: Ask) {
        match ask {
            Ask::Send { rows, done } => {
                let under_way: HashSet<ByteString> = self.rows.values().cloned().collect();
                let mut tokens = HashSet::new();
                for due in rows {
                    if self.rows.len() < PASS_ROWS && !due.row.event_id().is_some_and(|id| under_way.contains(id)) {
                        tokens.extend(self.due_row(due));
                    }
                }
                self.pass = Some((tokens.clone(), tokens.len(), done));
                self.settle(Vec::new());
            }
            // A reconciler that does not wait for the answer has ended.
            Ask::Blocks(reply) => drop(reply.send(self.delivery.gate().all_blocks())),
            Ask::Open(some, reply) => {
                for aggregate in &some {
                    self.delivery.gate().open(aggregate);
                }
                drop(reply.send(self.delivery.gate().blocks(&some)));
            }
            Ask::Close(some) => {
                for report in self.delivery.close(&some) {
                    self.report(report);
                }
            }
            Ask::Held(found) => {
                for (aggregate, rows) in found {
                    let gate = self.delivery.gate();
                    if gate.blocks(std::slice::from_ref(&aggregate)).is_empty() {
                        gate.block_as_found(aggregate, rows);
                    }
                }
            }
            Ask::Unblock(blocks) => {
                for block in &blocks {
                    self.delivery.unblock(block);
                }
            }
            Ask::PassOver => {
                // Rows that wait for a lock may be under way still.
                if self.rows.is_empty() {
                    self.delivery.reconciled();
                }
            }
        }
    }

    /// Takes in a row that the reconciler found; returns its token, if it is under way now.
    pub(super) fn due_row(&mut self, DueRow { row, pass, changed, .. }: DueRow) -> Option<u64> {
        let token = self.delivery.next_token();
        self.rows.insert(token, row.event_id().cloned().unwrap_or_default());
        let Some(addressed) = self.address(row) else {
            self.rows.remove(&token);
            return None;
        };
        let report = match addressed {
            Ok((event, subject)) => match self.known.get(&event.event_id).filter(|_| !changed) {
                Some(&sequence) => Some(self.delivery.admit_stored_row(&event, sequence)),
                None => self.delivery.admit_row(Parcel { event, subject, committed_at: None }, pass),
            },
            Err(rejection) => Some(self.delivery.admit_rejected_row(rejection)),
        };
        if let Some(report) = report {
            self.report(report);
        }
        Some(token)
    }

    /// Takes an event back that was to wait in the table, where its row is gone.
    pub(super) fn returned(&mut self, report: Report) {
        let Outcome::Failed(rejection) = report.outcome else { return };
        if let Some(Ok((event, subject))) = self.address(Decoded::Live(rejection.event)) {
            self.delivery.take_back(report.token, Parcel { event, subject, committed_at: None });
        }
    }

    /// Takes in changes while there is room.
    pub(super) fn take_in(&mut self) {
        while self.delivery.has_room() {
            let Some(change) = self.pending.pop_front() else { break };
            match change {
                Change::Begin { committed_at } => {
                    self.committed_at = committed_at;
                    self.delivery.ledger().begin();
                }
                Change::Row(decoded) => self.row(*decoded),
                Change::Commit { end_lsn } => {
                    self.delivery.ledger().commit(end_lsn);
                    self.taken_in = end_lsn;
                    self.shared.metrics.live.read.set_count(end_lsn.0);
                }
                Change::Mark(position) => {
                    self.delivery.ledger().mark(position);
                    self.shared.metrics.live.read.set_count(position.0);
                }
            }
        }
    }

    pub(super) fn row(&mut self, decoded: Decoded) {
        self.counters.decoded.inc();
        match &decoded {
            Decoded::Waits(event) => self.delivery.admit_waiting(event),
            Decoded::Live(event) | Decoded::Unfit(event, _) | Decoded::Nameless(event, _)
                if self.is_shown_again(event) =>
            {
                return;
            }
            _ => {}
        }
        let report = match self.address(decoded) {
            Some(Ok((event, subject))) => match self.known.get(&event.event_id).filter(|_| self.is_doubtful(&event)) {
                Some(&sequence) => Some(self.delivery.admit_stored(&event, sequence)),
                None => self.delivery.admit(Parcel { event, subject, committed_at: self.committed_at }),
            },
            Some(Err(rejection)) => Some(self.delivery.admit_rejected(rejection)),
            None => None,
        };
        if let Some(report) = report {
            self.report(report);
        }
    }

    /// The row's event and its subject, or why there is none. `None`: the row stays in the table.
    pub(super) fn address(&self, decoded: Decoded) -> Option<Result<(Event, ByteString), Rejection>> {
        let (event, failure) = match decoded {
            Decoded::Left | Decoded::Waits(_) => return None,
            Decoded::Unfit(event, reason) | Decoded::Nameless(event, reason) => (event, Failure::Undecodable(reason)),
            Decoded::Live(event) => match self.shared.router.subject(&event) {
                Ok(subject) => {
                    self.counters.routed.inc();
                    return Some(Ok((event, subject.into())));
                }
                Err(reason) => (event, Failure::Unroutable(reason.to_string())),
            },
        };
        Some(Err(Rejection { event, code: failure.code(), message: failure.to_string(), retry_in: None, counts: true }))
    }
}
