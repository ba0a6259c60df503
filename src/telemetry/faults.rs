//! What went wrong lately: a short memory for whoever looks after it has passed.

use std::collections::VecDeque;

use jiff::{Timestamp, Unit};
use serde::Serialize;

/// Faults that are remembered, at most.
const REMEMBERED: usize = 20;

/// The present, to a millisecond.
pub(super) fn now() -> Timestamp {
    let now = Timestamp::now();
    now.round(Unit::Millisecond).unwrap_or(now)
}

/// Something that went wrong, in the relay's own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    /// What it is about: `postgres`, `slot`, `nats`, `delivery`, …
    pub about: &'static str,
    /// What went wrong: no row data, no secrets.
    pub text: String,
    /// How often it began.
    pub count: u64,
    /// When it began first.
    pub first_at: Timestamp,
    /// When it began last.
    pub last_at: Timestamp,
    /// When it ended; `None` while it lasts.
    pub until: Option<Timestamp>,
}

/// The faults of late, those that began last at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Faults(VecDeque<Fault>);

impl Faults {
    /// A fault begins. The same one as before counts up.
    pub fn begin(&mut self, about: &'static str, text: String) {
        let now = now();
        let known = self.0.iter().position(|fault| fault.about == about && fault.text == text);
        let mut fault = known.and_then(|at| self.0.remove(at)).unwrap_or(Fault {
            about,
            text,
            count: 0,
            first_at: now,
            last_at: now,
            until: None,
        });
        (fault.count, fault.last_at, fault.until) = (fault.count + 1, now, None);
        if self.0.len() >= REMEMBERED {
            // One that lasts is never the one to be forgotten, unless all do.
            let over = self.0.iter().position(|fault| fault.until.is_some()).unwrap_or(0);
            self.0.remove(over);
        }
        self.0.push_back(fault);
    }

    /// What lasted about this is over.
    pub fn end(&mut self, about: &str) {
        let now = now();
        for fault in self.0.iter_mut().filter(|fault| fault.about == about) {
            fault.until.get_or_insert(now);
        }
    }

    /// Those remembered, the one that began last at the front.
    pub fn newest_first(&self) -> Vec<Fault> {
        self.0.iter().rev().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_fault_counts_up_and_the_memory_is_short() {
        let mut faults = Faults::default();
        faults.begin("slot", "lost".to_owned());
        for at in 0..100 {
            faults.begin("nats", format!("away {}", at % 50));
            faults.end("nats");
        }
        faults.begin("nats", "away 49".to_owned());
        let found = faults.newest_first();
        assert_eq!(found.len(), REMEMBERED);
        let newest = &found[0];
        assert_eq!((&*newest.text, newest.count, newest.until), ("away 49", 2, None));
        assert!(found[1].until.is_some());
        let oldest = found.last().unwrap();
        assert_eq!((&*oldest.text, oldest.until), ("lost", None), "what lasts is not forgotten");
    }
}
