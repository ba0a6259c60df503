//! Whether the stream is still what the session began with. It may have lost its end, or have been made anew, and neither
//! ends a connection.

use std::time::Duration;

use tracing::warn;

use super::Deliver;
use crate::fault::{Class, Failure};
use crate::nats::stream::{Stream, StreamFacts};

/// For how long a leader that was just elected may not show its last messages.
const SHOWN: Duration = Duration::from_secs(1);

/// How the stage ended.
pub struct Ended {
    /// The first token that no event had.
    pub next_token: u64,
    /// What of the stream ended it, and so the session.
    pub why: Option<&'static str>,
}

/// What the stream tells of itself, and the sequence that it was known to have reached when it was asked: by the time that
/// it is heard, more may be stored.
pub(super) struct Shown {
    facts: StreamFacts,
    newest: u64,
}

/// Asks the stream about itself. One that seems not to have reached `newest` is asked twice.
pub(super) async fn shown(stream: &Stream, newest: u64) -> Result<Shown, Failure> {
    let mut facts = stream.facts().await?;
    if facts.last_sequence < newest {
        tokio::time::sleep(SHOWN).await;
        facts = stream.facts().await?;
    }
    Ok(Shown { facts, newest })
}

impl Deliver<'_> {
    /// Asks the stream about itself, over a new connection once that is heard of.
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
    pub(super) fn is_as_it_was(&mut self, Shown { facts, newest }: &Shown) -> bool {
        if facts.created_as_noted() != self.shared.stream_created {
            warn!("the stream was made anew; the session ends, and the next one begins with that");
            self.end_session("the stream was made anew");
            return false;
        }
        self.note_window(facts);
        let whole = facts.last_sequence >= *newest;
        if !whole {
            self.stream_went_back();
        }
        whole
    }

    /// Someone may have made the duplicate window shorter. A longer one does not bring back what is forgotten: it counts
    /// from the next session on.
    pub(super) fn note_window(&mut self, facts: &StreamFacts) {
        self.shared.proof_after = self.shared.proof_after.min(facts.proof_after());
    }

    /// The stream counts on from before what it had reached. What was looked for behind that may stand before it: the
    /// session ends, and the next one begins with a look further back.
    pub(super) fn stream_went_back(&mut self) {
        self.nats.went_back = true;
        self.end_session("the stream has gone back behind what it had reached");
    }

    fn end_session(&mut self, why: &'static str) {
        self.ended_by.get_or_insert(why);
        self.wiring.stop.cancel();
    }
}
