//! The resume guard: beyond the duplicate window only the stream itself can tell whether it has an event.

use std::collections::{HashMap, HashSet};

use bytestring::ByteString;
use tracing::{info, warn};

use super::Deliver;
use crate::fault::{Class, Failure};
use crate::nats::ids::Start;
use crate::nats::stream::Stream;

/// Ids kept, at most: what an earlier session may have left open is far less, so more belong to others.
const IDS_MAX: usize = 500_000;

/// The events that the stream is seen to hold: where each stands.
#[derive(Debug, Default)]
pub struct Known(HashMap<Box<str>, u64>);

impl Known {
    /// Reads the ids of everything stored after `sequence`.
    pub async fn read(stream: &Stream, sequence: u64) -> Result<Self, Failure> {
        let (mut known, mut walk) = (HashMap::new(), stream.walk(Start::After(sequence)));
        while let Some(stored) = walk.next().await? {
            if known.len() > IDS_MAX {
                warn!(
                    from = stored.first().map_or(sequence, |first| first.sequence),
                    "the stream holds more new messages than the relay can compare; for older events only the \
                     duplicate window protects from a second copy"
                );
                break;
            }
            known.extend(stored.into_iter().filter_map(|stored| Some((stored.id?.into_boxed_str(), stored.sequence))));
        }
        Ok(Self(known))
    }

    /// Of these events, those that are stored after `sequence`, however many others are.
    pub async fn of(events: HashSet<ByteString>, stream: &Stream, sequence: u64) -> Result<Self, Failure> {
        let (mut known, mut walk) = (HashMap::new(), stream.walk(Start::After(sequence)));
        while let Some(stored) = walk.next().await? {
            let named = stored.into_iter().filter_map(|stored| Some((stored.id?.into_boxed_str(), stored.sequence)));
            known.extend(named.filter(|(id, _)| events.contains(&**id)));
        }
        Ok(Self(known))
    }

    /// Where the event stands in the stream.
    pub fn get(&self, event_id: &str) -> Option<&u64> {
        self.0.get(event_id)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

impl Deliver<'_> {
    /// Asks the stream for copies of events that were sent. Nothing is sent until it has told.
    pub(super) fn ask_for_copies(&mut self) {
        let (stream, (events, after)) = (self.nats.stream.clone(), self.delivery.copies());
        self.proof = Some(Box::pin(async move { Known::of(events, &stream, after).await }));
    }

    /// The stream has told what it holds: those events are acknowledged, the others are sent again.
    pub(super) fn proved(&mut self, known: Result<Known, Failure>) {
        self.proof = None;
        match known {
            Ok(known) => {
                let stored = self.delivery.prove(|event_id| known.get(event_id).copied());
                info!(stored = stored.len(), "the stream was asked for events of unknown outcome");
                for report in stored {
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
                self.hold_for(&failure);
            }
        }
    }
}
