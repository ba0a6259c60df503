//! Events that fail for their own sake, and those that are held behind them.

use std::time::{Duration, Instant};

use super::{Delivery, Entry, Parcel, Stage};
use crate::flow::event::{Event, Rejection, Report};
use crate::flow::order::{AggregateKey, Blocked, Pass, Turn};

/// Why an event failed.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// The kind of failure, for the row's `error_code`.
    pub code: &'static str,
    /// What happened, for the row's `error_message`.
    pub message: String,
    /// No later attempt can succeed.
    pub hopeless: bool,
    /// When it was refused.
    pub at: Instant,
}

/// What follows from a refusal.
#[derive(Clone, Debug, Default)]
pub struct Refused {
    /// The event's own report, and those of events that are held behind it. Empty when its outcome is known already.
    pub reports: Vec<Report>,
    /// The set-up may be at fault: nothing is counted against the event, and it waits in the table.
    pub spared: bool,
}

impl Delivery {
    /// The event was refused, but not with its first copy, and that one may be stored: it is to be asked for, and the
    /// event sent again if it is not. `false`: no copy but the refused one was sent.
    pub fn doubt(&mut self, token: u64) -> bool {
        let Some(entry) = self.entries.get(&token) else { return false };
        let Stage::Open { sent_at, first_sent, .. } = entry.stage else { return false };
        if first_sent.is_none() || first_sent == sent_at {
            return false;
        }
        self.ask_for(token);
        true
    }

    /// Before it is sent again, the stream is asked for a copy of the event.
    fn ask_for(&mut self, token: u64) {
        if let Some(Entry { stage: Stage::Open { sent_at, doubted, .. }, .. }) = self.entries.get_mut(&token) {
            (*sent_at, *doubted) = (None, true);
            self.ready.insert(token);
        }
    }

    /// Events to `subject` are refused at `now`, and it is not said which. Of several under way the first may be
    /// stored, if the subject was not refused before: then all are to be asked for, and sent again if they are not.
    /// `false`: none is.
    pub fn doubt_unnamed(&mut self, subject: &str, now: Instant) -> bool {
        let sent = self.sent_to(subject);
        if sent.len() < 2 || !self.refusals.begins(subject, now) {
            return false;
        }
        for token in sent {
            self.ask_for(token);
        }
        true
    }

    /// The stream cannot be asked: whether copies of refused events are stored stays unknown, and they are sent as if none
    /// were.
    pub fn end_doubts(&mut self) {
        for entry in self.entries.values_mut() {
            if let Stage::Open { first_sent, doubted: doubted @ true, .. } = &mut entry.stage {
                (*first_sent, *doubted) = (None, false);
            }
        }
    }

    /// The event failed for its own sake, unless everything fails. `retry_in` tells when it is tried again, as it is
    /// spared or not.
    pub fn refused(
        &mut self,
        token: u64,
        refusal: Refusal,
        retry_in: impl FnOnce(&Event, bool) -> Duration,
    ) -> Refused {
        let Some(Entry { stage: Stage::Open { parcel, .. }, .. }) = self.entries.get(&token) else {
            return Refused::default();
        };
        let Refusal { code, message, hopeless, at } = refusal;
        let counts = hopeless || self.refusals.refused(&parcel.subject, at);
        let last = hopeless || (counts && parcel.event.retry_count.saturating_add(1) >= parcel.event.max_retries);
        let retry_in = (!last).then(|| retry_in(&parcel.event, !counts));
        let mut reports = Vec::new();
        let blocked = (self.limits.ordered && retry_in.is_some()).then(|| AggregateKey::of(&parcel.event));
        if let Some(aggregate) = &blocked {
            let waiting = self.gate.block(aggregate.clone());
            self.gate.await_failure(aggregate);
            reports.extend(waiting.into_iter().filter_map(|waiting| self.hold(waiting)));
        }
        if let Some(parcel) = self.decide(token) {
            if let Some(entry) = self.entries.get_mut(&token) {
                entry.stage = Stage::Decided { blocks: blocked };
            }
            let rejection = Rejection { event: parcel.event, code, message, retry_in, counts };
            reports.insert(0, Report::rejected(token, rejection));
        }
        Refused { reports, spared: !counts }
    }

    /// An event that waited behind one that failed is held. A row that the table shows as held stays as it is.
    fn hold(&mut self, token: u64) -> Option<Report> {
        let entry = self.entries.get_mut(&token)?;
        let Stage::Open { parcel, .. } = std::mem::replace(&mut entry.stage, Stage::Decided { blocks: None }) else {
            return None;
        };
        let aggregate = AggregateKey::of(&parcel.event);
        if entry.pass == Pass::Again {
            self.gate.still_held(&aggregate);
            self.forgotten.push(token);
            return None;
        }
        entry.stage = Stage::Decided { blocks: Some(aggregate) };
        Some(Report::held(token, parcel.event))
    }

    /// These aggregates stay blocked: what came while they were about to be free is held. Returns the reports.
    pub fn close(&mut self, aggregates: &[AggregateKey]) -> Vec<Report> {
        let late: Vec<u64> = aggregates.iter().flat_map(|aggregate| self.gate.close(aggregate)).collect();
        late.into_iter().filter_map(|token| self.hold(token)).collect()
    }

    /// The table holds no row of the aggregate any more: see [`Gate::unblock`](crate::flow::order::Gate::unblock).
    pub fn unblock(&mut self, seen: &Blocked) {
        self.ready.extend(self.gate.unblock(seen));
    }

    /// Tokens of rows that stay as the table shows them.
    pub fn take_forgotten(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.forgotten)
    }

    /// The event was spared, but its row is gone, so that it cannot wait in the table: it is sent again from here.
    pub fn take_back(&mut self, token: u64, parcel: Parcel) {
        let Some(entry) = self.entries.get_mut(&token) else { return };
        let mut turn = Turn::Go;
        if let Stage::Decided { blocks: Some(aggregate) } = &entry.stage {
            self.gate.hold_committed(aggregate);
            turn = self.gate.arrive(aggregate.clone(), token, Pass::Again);
        }
        entry.bytes = super::intake::size_of(&parcel);
        self.bytes += entry.bytes;
        entry.stage = Stage::unsent(parcel);
        if turn == Turn::Go {
            self.ready.insert(token);
        }
    }
}
