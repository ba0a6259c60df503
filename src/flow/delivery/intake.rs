//! How events come under way: from the log, or from the table.

use super::{Delivery, Entry, Parcel, Stage};
use crate::flow::event::{Event, Rejection, Report};
use crate::flow::order::{AggregateKey, Pass, Turn};

impl Delivery {
    /// Takes in an event of the open transaction. Returns a report where it is to be held.
    pub fn admit(&mut self, parcel: Parcel) -> Option<Report> {
        self.place(parcel, Pass::First, true)
    }

    /// Takes in a row that the reconciler found in the table. Returns a report where it is to be held.
    pub fn admit_row(&mut self, parcel: Parcel, pass: Pass) -> Option<Report> {
        self.place(parcel, pass, false)
    }

    /// An event of the log that the table shows as failed or held: later ones of its aggregate are held as well. Those
    /// before it that are still under way go on.
    pub fn admit_waiting(&mut self, event: &Event) {
        if self.limits.ordered {
            self.gate.block_as_found(AggregateKey::of(event), 1);
        }
    }

    fn place(&mut self, parcel: Parcel, pass: Pass, ledgered: bool) -> Option<Report> {
        let turn = if self.limits.ordered {
            self.gate.arrive(AggregateKey::of(&parcel.event), self.next, pass)
        } else {
            Turn::Go
        };
        if turn == Turn::Hold {
            let blocks = Some(AggregateKey::of(&parcel.event));
            let token = self.enter(size_of(&parcel), pass, ledgered, Stage::Decided { blocks });
            return Some(Report::held(token, parcel.event));
        }
        let bytes = size_of(&parcel);
        let token = self.enter(bytes, pass, ledgered, Stage::unsent(parcel));
        if turn == Turn::Go {
            self.ready.insert(token);
        }
        None
    }

    /// Takes in an event of the open transaction that can never be sent. Returns the report of its end.
    pub fn admit_rejected(&mut self, rejection: Rejection) -> Report {
        let token = self.enter(0, Pass::First, true, Stage::Decided { blocks: None });
        Report::rejected(token, rejection)
    }

    /// As [`Delivery::admit_rejected`], of a row that the reconciler found in the table.
    pub fn admit_rejected_row(&mut self, rejection: Rejection) -> Report {
        let token = self.enter(0, Pass::Again, false, Stage::Decided { blocks: None });
        Report::rejected(token, rejection)
    }

    /// Takes in an event of the open transaction that the stream is seen to hold at `sequence`. Returns its report.
    pub fn admit_stored(&mut self, event: &Event, sequence: u64) -> Report {
        self.place_stored(event, sequence, true)
    }

    /// As [`Delivery::admit_stored`], of a row that the reconciler found in the table.
    pub fn admit_stored_row(&mut self, event: &Event, sequence: u64) -> Report {
        self.place_stored(event, sequence, false)
    }

    fn place_stored(&mut self, event: &Event, sequence: u64, ledgered: bool) -> Report {
        self.newest = self.newest.max(sequence);
        let token = self.enter(0, Pass::First, ledgered, Stage::Decided { blocks: None });
        self.hold_floor(token, sequence.saturating_sub(1));
        Report::completed(token, event)
    }

    fn enter(&mut self, bytes: u64, pass: Pass, ledgered: bool, stage: Stage) -> u64 {
        let token = self.next;
        self.next += 1;
        self.bytes += bytes;
        if ledgered {
            self.ledger.add(token);
        }
        self.entries.insert(token, Entry { bytes, ledgered, pass, floor: None, stage });
        token
    }
}

/// What an event under way costs in memory, about: its text, and the structures around it.
pub(super) fn size_of(parcel: &Parcel) -> u64 {
    const OVERHEAD: usize = 512;
    let event = &parcel.event;
    let text = event.payload.len() + event.headers.len() + event.aggregate_id.len() + parcel.subject.len();
    (text + OVERHEAD) as u64
}
