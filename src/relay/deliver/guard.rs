//! The resume guard: beyond the duplicate window only the stream itself can tell whether it has an event.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};

use bytestring::ByteString;
use tracing::{info, warn};

use super::Deliver;
use super::stream::{Shown, shown};
use crate::config::OnSuccess;
use crate::fault::{Class, Failure};
use crate::flow::event::Report;
use crate::nats::ids::Start;
use crate::nats::stream::Stream;

/// Ids kept, at most, about: what an earlier session may have left open is far less, so more belong to others. Fewer than
/// make a table of twice the size, which has room for seven eighths of 2^20.
pub const IDS_MAX: u64 = 850_000;

/// The events that the stream is seen to hold: where each stands.
///
/// By two hashes of its id, which take a fraction of its room. That two ids share both has a chance of 1 in 2^128, and
/// nobody who chooses ids knows the keys.
#[derive(Debug, Default)]
pub struct Known {
    hashers: [RandomState; 2],
    places: HashMap<[u64; 2], u64>,
}

impl Known {
    /// Reads the ids of everything stored after `sequence`.
    pub async fn read(stream: &Stream, sequence: u64) -> Result<Self, Failure> {
        Self::collect(stream, sequence, |_| true).await
    }

    /// Of these events, those that are stored after `sequence`, however many others are.
    pub async fn of(events: HashSet<ByteString>, stream: &Stream, sequence: u64) -> Result<Self, Failure> {
        Self::collect(stream, sequence, |id| events.contains(id)).await
    }

    async fn collect(stream: &Stream, sequence: u64, wanted: impl Fn(&str) -> bool) -> Result<Self, Failure> {
        let (mut known, mut walk) = (Self::default(), stream.walk(Start::After(sequence)));
        while let Some(stored) = walk.next().await? {
            if known.is_full() {
                warn!(
                    from = stored.first().map_or(sequence, |first| first.sequence),
                    "the stream holds more new messages than the relay can compare; from there on only the duplicate \
                     window protects from a second copy"
                );
                break;
            }
            for stored in stored {
                if let Some(id) = stored.id.filter(|id| wanted(id)) {
                    known.places.insert(known.key(&id), stored.sequence);
                }
            }
        }
        Ok(known)
    }

    fn key(&self, event_id: &str) -> [u64; 2] {
        self.hashers.each_ref().map(|hasher| hasher.hash_one(event_id))
    }

    /// The stream was told to hold the event, too.
    pub fn add(&mut self, event_id: &str, sequence: u64) {
        if !self.is_full() {
            self.places.insert(self.key(event_id), sequence);
        }
    }

    /// Where the event stands in the stream.
    pub fn get(&self, event_id: &str) -> Option<&u64> {
        if self.places.is_empty() { None } else { self.places.get(&self.key(event_id)) }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    fn is_full(&self) -> bool {
        self.len() as u64 >= IDS_MAX
    }
}

impl Deliver<'_> {
    /// Asks the stream for copies of events that were sent. Nothing is sent until it has told.
    pub(super) fn ask_for_copies(&mut self) {
        let (stream, (events, after)) = (self.nats.stream.clone(), self.delivery.copies());
        let newest = self.delivery.newest();
        self.proof = Some(Box::pin(async move {
            let shown = shown(&stream, newest).await?;
            Ok((shown, Known::of(events, &stream, after).await?))
        }));
    }

    /// The stream has told what it holds: those events are acknowledged, the others are sent again.
    pub(super) fn proved(&mut self, known: Result<(Shown, Known), Failure>) {
        self.proof = None;
        match known {
            Ok((shown, known)) => {
                if !self.is_as_it_was(&shown) {
                    return;
                }
                let stored = self.delivery.prove(|event_id| known.get(event_id).copied());
                info!(stored = stored.len(), "the stream was asked for events of unknown outcome");
                for report in stored {
                    if let Some(&sequence) = known.get(&report.event_id) {
                        self.remember(&report, sequence);
                    }
                    self.report(report);
                }
            }
            Err(failure) => {
                if failure.class() != Class::Transient {
                    // Nor can it be later: events that are refused must not keep others waiting for ever.
                    warn!(
                        code = failure.code(),
                        hint = failure.hint(),
                        "the stream cannot be asked for events that were refused"
                    );
                    self.delivery.end_doubts();
                }
                self.wait_for_stream(&failure);
            }
        }
    }

    /// Keeps in mind that the stream has an event whose row, read from the table, is deleted: the log may show it again,
    /// and no row will tell by then.
    pub(super) fn remember(&mut self, report: &Report, sequence: u64) {
        let goes = self.shared.settings.writeback.on_success == OnSuccess::Delete && report.xid.is_none();
        if goes && self.delivery.safe() < self.shared.horizon {
            self.known.add(&report.event_id, sequence);
        }
    }
}
