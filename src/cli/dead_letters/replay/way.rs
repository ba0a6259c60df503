//! Under which id an event may be sent again, so that an answer of `duplicate` means a message that can be read.

use std::collections::HashSet;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::super::super::{Failure, servers};
use crate::config::Settings;
use crate::fault;
use crate::nats::connect::Connection;
use crate::nats::presence::Presence;
use crate::nats::stream::{Stream, StreamFacts};
use crate::postgres::outbox::desk::{Candidate, Replay};

/// By how much the clocks of the servers may differ, and how much earlier than it failed first an event whose row is
/// gone may have been sent.
const SKEW: SignedDuration = SignedDuration::from_mins(5);
/// Characters of an event's id, at most.
const LONGEST: usize = 64;

/// Asks the stream.
pub struct Ways(Option<Asked>);

struct Asked {
    /// Lives as long as the stream is asked.
    _connection: Connection,
    stream: Stream,
    facts: StreamFacts,
}

impl Ways {
    /// `offline`: nobody is asked, and ids stay.
    pub async fn new(settings: &Settings, offline: bool) -> Result<Self, Failure> {
        if offline {
            return Ok(Self(None));
        }
        let connection = servers::nats(settings).await.map_err(cannot_ask)?;
        let stream = Stream::new(&connection, &settings.nats);
        match stream.facts().await {
            Ok(facts) => Ok(Self(Some(Asked { _connection: connection, stream, facts }))),
            // The relay makes it anew, and a new stream knows no ids.
            Err(fault::Failure::StreamMissing(_)) => Ok(Self(None)),
            Err(failure) => Err(cannot_ask(failure)),
        }
    }

    /// The way of each of the dead letters, in their order.
    pub async fn of(&self, letters: &[Candidate]) -> Result<Vec<Replay>, Failure> {
        let Some(Asked { stream, facts, .. }) = &self.0 else { return Ok(vec![Replay::Again; letters.len()]) };
        if letters.is_empty() || !facts.remembers() {
            return Ok(vec![Replay::Again; letters.len()]);
        }
        let oldest = letters.iter().map(|letter| letter.made_seconds).fold(0.0, f64::max);
        let events: HashSet<String> = letters.iter().map(|letter| letter.event_id.clone()).collect();
        let presence = stream.look_for(&events, ago(oldest)).await.map_err(cannot_ask)?;
        Ok(letters.iter().map(|letter| way(letter, &presence, facts.duplicate_window)).collect())
    }
}

fn cannot_ask(failure: impl Into<Failure>) -> Failure {
    let failure = failure.into();
    Failure::Unfit(format!("the stream cannot be asked for the events: {failure}; --offline replays without asking"))
}

/// The time so many seconds ago, and somewhat earlier.
fn ago(seconds: f64) -> Timestamp {
    let span = SignedDuration::try_from_secs_f64(seconds).unwrap_or(SignedDuration::MAX).saturating_add(SKEW);
    Timestamp::now().checked_sub(span).unwrap_or(Timestamp::UNIX_EPOCH)
}

fn way(letter: &Candidate, presence: &Presence, window: Duration) -> Replay {
    if let Some(&sequence) = presence.found.get(&letter.event_id) {
        return Replay::Stored(sequence);
    }
    let window = SignedDuration::try_from(window).unwrap_or(SignedDuration::MAX).saturating_add(SKEW);
    let window_begins = Timestamp::now().checked_sub(window).unwrap_or(Timestamp::UNIX_EPOCH);
    // It was sent before it was dead, so a copy that was removed was stored by then, and by the time of the last
    // removal.
    let dead_at = SignedDuration::try_from_secs_f64(letter.dead_seconds).ok();
    let dead_at = dead_at.and_then(|span| Timestamp::now().checked_sub(span).ok()).unwrap_or(Timestamp::UNIX_EPOCH);
    match presence.removed_until {
        Some(removed) if removed.min(dead_at) >= window_begins => Replay::Renamed(new_name(letter)),
        _ => Replay::Again,
    }
}

/// Another id for the event, one for each dead letter. It begins with the old one, as far as there is room.
fn new_name(letter: &Candidate) -> String {
    let suffix = format!(".r{}", letter.id);
    let kept = letter.event_id.chars().take(LONGEST.saturating_sub(suffix.len()));
    kept.chain(suffix.chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_mins(2);

    fn letter(dead_seconds: f64) -> Candidate {
        Candidate {
            id: 17,
            event_id: "e1".to_owned(),
            handled: false,
            made_seconds: dead_seconds + 10.0,
            dead_seconds,
            row_id: None,
            row_status: None,
            is_whole: true,
            compensations: Vec::new(),
        }
    }

    fn presence(found: &[(&str, u64)], removed_seconds_ago: Option<i64>) -> Presence {
        let mut presence = Presence::default();
        presence.found.extend(found.iter().map(|&(id, sequence)| (id.to_owned(), sequence)));
        presence.removed_until = removed_seconds_ago.map(|ago| Timestamp::now() - SignedDuration::from_secs(ago));
        presence
    }

    #[test]
    fn what_can_be_read_is_not_sent_again() {
        assert_eq!(way(&letter(5.0), &presence(&[("e1", 9)], Some(0)), WINDOW), Replay::Stored(9));
    }

    #[test]
    fn the_id_stays_where_no_copy_can_have_been_removed() {
        assert_eq!(way(&letter(5.0), &presence(&[("e2", 9)], None), WINDOW), Replay::Again);
    }

    #[test]
    fn the_id_stays_once_the_window_has_passed() {
        assert_eq!(way(&letter(1000.0), &presence(&[], Some(0)), WINDOW), Replay::Again);
        assert_eq!(way(&letter(5.0), &presence(&[], Some(1000)), WINDOW), Replay::Again);
    }

    #[test]
    fn an_event_that_may_have_been_removed_within_the_window_gets_a_new_id() {
        assert_eq!(way(&letter(5.0), &presence(&[], Some(0)), WINDOW), Replay::Renamed("e1.r17".to_owned()));
        assert_eq!(way(&letter(130.0), &presence(&[], Some(0)), WINDOW), Replay::Renamed("e1.r17".to_owned()));
    }

    #[test]
    fn a_new_id_fits_its_column() {
        let long = Candidate { event_id: "x".repeat(64), ..letter(1.0) };
        assert_eq!(new_name(&long), format!("{}.r17", "x".repeat(60)));
    }
}
