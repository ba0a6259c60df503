//! Whose fault it is when events are refused: their own, or the set-up's.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::time::Instant;

/// So many refusals in a row, with nothing accepted in between, may be the events' own fault. When nothing at all is
/// accepted for longer, it is the set-up's.
const TOLERATED: u32 = 50;
/// Subjects that are remembered, at most.
const SUBJECTS: usize = 10_000;

/// Judges refusals.
///
/// A subject that is refused while others are accepted is at fault itself, however many of its events come in a row. Of
/// a subject about which that is not known, a bounded number of refusals in a row count.
#[derive(Debug, Default)]
pub struct Refusals {
    /// Refusals in a row that the set-up may be at fault for.
    run: u32,
    /// When the event was sent that was sent last of all that were accepted.
    good: Option<Instant>,
    /// The hashes of subjects that were refused and not accepted since; since when.
    refused: HashMap<u64, Instant>,
}

impl Refusals {
    /// An event, sent last at `sent_at`, was accepted.
    pub fn accepted(&mut self, subject: &str, sent_at: Option<Instant>) {
        self.run = 0;
        self.good = self.good.max(sent_at);
        if !self.refused.is_empty() {
            self.refused.remove(&self.key(subject));
        }
    }

    /// An event was refused at `now`. Whether that counts against the event.
    pub fn refused(&mut self, subject: &str, now: Instant) -> bool {
        let key = self.key(subject);
        if self.refused.len() >= SUBJECTS && !self.refused.contains_key(&key) {
            self.refused.clear();
        }
        let since = *self.refused.entry(key).or_insert(now);
        // One that was sent before the first refusal proves nothing: permissions may have been withdrawn in between.
        if self.good.is_some_and(|good| good > since) {
            return true;
        }
        self.run = self.run.saturating_add(1);
        self.run <= TOLERATED
    }

    fn key(&self, subject: &str) -> u64 {
        self.refused.hasher().hash_one(subject)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn when_everything_is_refused_a_bounded_number_counts() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        let counted = (0..1000).filter(|number| refusals.refused(&format!("s.{}", number % 7), now)).count();
        assert_eq!(counted, 50);
        refusals.accepted("s.1", Some(now));
        assert!(refusals.refused("s.2", now), "the run has ended");
    }

    #[test]
    fn a_subject_that_is_refused_while_others_are_accepted_counts_however_often_it_comes() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(refusals.refused("bad", at(1)));
        refusals.accepted("good", Some(at(2)));
        assert_eq!((0..1000).filter(|_| refusals.refused("bad", at(3))).count(), 1000);
        // What is refused from now on together with it is another matter.
        assert_eq!((0..1000).filter(|_| refusals.refused("good", at(4))).count(), 50);
        assert!(refusals.refused("bad", at(5)));
        // Once it was accepted itself, nothing is known against it any more.
        refusals.accepted("bad", Some(at(6)));
        assert_eq!((0..1000).filter(|_| refusals.refused("bad", at(7))).count(), 50);
    }

    #[test]
    fn what_was_sent_before_permissions_were_withdrawn_proves_nothing() {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        assert!(refusals.refused("first", start + Duration::from_secs(1)));
        refusals.accepted("other", Some(start));
        let later = start + Duration::from_secs(2);
        assert_eq!((0..1000).filter(|_| refusals.refused("first", later)).count(), 50);
    }

    #[test]
    fn subjects_without_end_are_not_remembered_without_end() {
        let (mut refusals, now) = (Refusals::default(), Instant::now());
        for number in 0..3 * SUBJECTS {
            refusals.refused(&number.to_string(), now);
        }
        assert!(refusals.refused.len() <= SUBJECTS);
    }
}
