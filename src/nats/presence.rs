//! Which events a stream holds, and whether it may have held others that it does not hold any more.
//!
//! Within its duplicate window a stream answers `duplicate` also for a message that was removed since. So an event may
//! be sent under its own id only where that cannot be: the stream has removed nothing since the event was made, or the
//! window has passed since.

use std::collections::{HashMap, HashSet};

use jiff::Timestamp;

use super::ids::{Start, StoredId};
use super::stream::Stream;
use crate::fault::Failure;

/// What a stream knows of some events.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Presence {
    /// Those that it holds, and where.
    pub found: HashMap<String, u64>,
    /// Messages were removed, of which the last may have been stored at this time; `None`: none was.
    pub removed_until: Option<Timestamp>,
    /// The sequence seen last.
    last: Option<u64>,
}

impl Stream {
    /// Looks for events among all messages stored at `since` or later, by the server's clock.
    ///
    /// # Errors
    /// As [`Stream::ids_after`].
    pub async fn look_for(&self, events: &HashSet<String>, since: Timestamp) -> Result<Presence, Failure> {
        let end = self.facts().await?.last_sequence;
        let mut presence = Presence::default();
        let mut walk = self.walk(Start::Time(since));
        while let Some(stored) = walk.next().await? {
            if let (None, Some(first)) = (presence.last, stored.first()) {
                // What stands right before it is older: nothing is missing in between.
                let joins = first.sequence <= 1 || self.id_at(first.sequence - 1).await?.is_some();
                presence.last = joins.then(|| first.sequence.saturating_sub(1));
            }
            presence.read(stored, events);
        }
        let at_rest = end == 0 || presence.last.is_none() && self.id_at(end).await?.is_some();
        if !at_rest && presence.last.is_none_or(|last| last < end) {
            presence.removed_until = Some(Timestamp::now());
        }
        Ok(presence)
    }
}

impl Presence {
    fn read(&mut self, stored: Vec<StoredId>, events: &HashSet<String>) {
        for StoredId { sequence, stored_at, id } in stored {
            if self.last.is_none_or(|last| last.saturating_add(1) < sequence) {
                self.removed_until = Some(stored_at);
            }
            self.last = Some(sequence);
            if let Some(id) = id.filter(|id| events.contains(id)) {
                self.found.insert(id, sequence);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(sequence: u64, second: i64) -> StoredId {
        let stored_at = Timestamp::from_second(second).unwrap();
        StoredId { sequence, stored_at, id: Some(format!("e{sequence}")) }
    }

    fn read(last: Option<u64>, messages: &[(u64, i64)]) -> Presence {
        let mut presence = Presence { last, ..Presence::default() };
        let messages = messages.iter().map(|&(sequence, second)| stored(sequence, second)).collect();
        presence.read(messages, &HashSet::from(["e7".to_owned()]));
        presence
    }

    #[test]
    fn a_gap_is_as_young_as_what_follows_it() {
        assert_eq!(read(Some(4), &[(5, 10), (6, 20), (7, 30)]).removed_until, None);
        assert_eq!(read(Some(4), &[(5, 10), (7, 30), (8, 40)]).removed_until, Timestamp::from_second(30).ok());
        assert_eq!(read(Some(3), &[(5, 10), (6, 40)]).removed_until, Timestamp::from_second(10).ok());
        assert_eq!(read(None, &[(5, 10), (6, 40)]).removed_until, Timestamp::from_second(10).ok());
    }

    #[test]
    fn only_what_is_looked_for_is_kept() {
        assert_eq!(read(None, &[(6, 10), (7, 20)]).found, HashMap::from([("e7".to_owned(), 7)]));
    }
}
