//! Up to which sequence of the stream nothing is left open.

use std::collections::BTreeMap;

/// Sequences above which events of unrecorded outcome stand, each with how many of them there are.
#[derive(Debug, Default)]
pub struct Floors(BTreeMap<u64, usize>);

impl Floors {
    /// One more event can only stand above `floor`.
    pub fn hold(&mut self, floor: u64) {
        *self.0.entry(floor).or_default() += 1;
    }

    /// The outcome of one of the events above `floor` is recorded.
    pub fn release(&mut self, floor: u64) {
        let Some(count) = self.0.get_mut(&floor) else { return };
        *count -= 1;
        if *count == 0 {
            self.0.remove(&floor);
        }
    }

    /// No event of unrecorded outcome stands at or below it; `None` when there is no such event.
    pub fn lowest(&self) -> Option<u64> {
        self.0.first_key_value().map(|(&floor, _)| floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_floor_rises_when_the_last_event_above_it_is_recorded() {
        let mut floors = Floors::default();
        assert_eq!(floors.lowest(), None);
        for floor in [7, 5, 5] {
            floors.hold(floor);
        }
        floors.release(5);
        assert_eq!(floors.lowest(), Some(5));
        floors.release(5);
        assert_eq!(floors.lowest(), Some(7));
        floors.release(7);
        floors.release(7);
        assert_eq!(floors.lowest(), None);
    }
}
