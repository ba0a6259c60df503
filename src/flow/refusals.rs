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

    /// Events to `subject` are refused at `now`. Whether they were not before, or were accepted in between.
    pub fn begins(&mut self, subject: &str, now: Instant) -> bool {
        let known = self.refused.contains_key(&self.key(subject));
        self.since(subject, now);
        !known
    }

    /// Since when the subject is refused, which it is at `now`.
    fn since(&mut self, subject: &str, now: Instant) -> Instant {
        let key = self.key(subject);
        if self.refused.len() >= SUBJECTS && !self.refused.contains_key(&key) {
            self.refused.clear();
        }
        *self.refused.entry(key).or_insert(now)
    }

    /// An event was refused at `now`. Whether that counts against the event.
    pub fn refused(&mut self, subject: &str, now: Instant) -> bool {
        let since = self.since(subject, now);
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
mod tests;
