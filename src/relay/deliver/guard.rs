//! The resume guard: beyond the duplicate window only the stream itself can tell whether it has an event.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use bytestring::ByteString;
use tracing::{info, warn};

use super::Deliver;
use crate::config::OnSuccess;
use crate::fault::{Class, Failure};
use crate::flow::event::Report;
use crate::nats::ids::Start;
use crate::nats::stream::{Stream, StreamFacts};

/// Ids kept, at most, about: what an earlier session may have left open is far less, so more belong to others. Fewer than
/// make a table of twice the size, which has room for seven eighths of 2^20.
pub const IDS_MAX: u64 = 850_000;
/// For how long a leader that was just elected may not show its last messages.
const SHOWN: Duration = Duration::from_secs(1);

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
            if known.len() as u64 > IDS_MAX {
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
        if (self.len() as u64) < IDS_MAX {
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

    /// Asks the stream about itself, once the new connection is heard of.
    pub(super) fn look_at_stream(&mut self) {
        if self.unseen && self.look.is_none() && !self.wiring.stop.is_cancelled() {
            let (stream, newest) = (self.nats.stream.clone(), self.delivery.newest());
            self.look = Some(Box::pin(async move { shown(&stream, newest).await }));
        }
    }

    /// The stream has told of itself: events are sent again if it is as it was.
    pub(super) fn seen(&mut self, told: Result<Shown, Failure>) {
        self.look = None;
        match told {
            Ok(shown) if !shown.facts.has_leader => self.hold_for(&Failure::NoLeader),
            Ok(shown) => self.unseen = !self.is_as_it_was(&shown),
            Err(failure) if failure.class() == Class::Transient => self.wait_for_stream(&failure),
            // It cannot be asked.
            Err(_) => self.unseen = false,
        }
    }

    /// Whether the stream is the one that the session began with, and holds what it acknowledged. Otherwise the session
    /// ends.
    fn is_as_it_was(&mut self, Shown { facts, newest }: &Shown) -> bool {
        if facts.created_as_noted() != self.shared.stream_created {
            warn!("the stream was made anew; the session ends, and the next one begins with that");
            self.wiring.stop.cancel();
            return false;
        }
        let whole = facts.last_sequence >= *newest;
        if !whole {
            self.stream_went_back();
        }
        whole
    }

    /// The stream counts on from before what it had reached. What was looked for behind that may stand before it: the
    /// session ends, and the next one begins with a look further back.
    pub(super) fn stream_went_back(&mut self) {
        self.nats.went_back = true;
        self.wiring.stop.cancel();
    }
}

/// What the stream tells of itself, and the sequence that it was known to have reached when it was asked: by the time that
/// it is heard, more may be stored.
pub(super) struct Shown {
    facts: StreamFacts,
    newest: u64,
}

/// Asks the stream about itself. One that seems not to have reached `newest` is asked twice.
async fn shown(stream: &Stream, newest: u64) -> Result<Shown, Failure> {
    let mut facts = stream.facts().await?;
    if facts.last_sequence < newest {
        tokio::time::sleep(SHOWN).await;
        facts = stream.facts().await?;
    }
    Ok(Shown { facts, newest })
}
