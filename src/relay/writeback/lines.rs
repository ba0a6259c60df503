//! The outcomes of an aggregate that wait for an earlier one of it to be written.
//!
//! Should the relay be killed, the table shows what the next session releases. A row that stands there as held while an
//! earlier one of its aggregate does not would be released before that one is read from the log again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::flow::event::{Outcome, Report};
use crate::flow::order::AggregateKey;

/// Lines of holds, by aggregate. Empty unless a row that failed or is to be held could not be had.
#[derive(Debug, Default)]
pub(super) struct Lines(HashMap<AggregateKey, Line>);

#[derive(Debug)]
struct Line {
    /// The token of the report that the others wait for.
    head: u64,
    /// In their order.
    behind: Vec<Report>,
}

impl Lines {
    /// Takes in a hold behind an outcome that waits. Gives back what does not have to wait.
    pub(super) fn line_up(&mut self, report: Report) -> Option<Report> {
        if !self.0.is_empty()
            && let Outcome::Held(event) = &report.outcome
            && let Some(line) = self.0.get_mut(&AggregateKey::of(event))
            && line.head < report.token
        {
            line.behind.push(report);
            return None;
        }
        Some(report)
    }

    /// The report is to be written later: what comes behind it waits.
    pub(super) fn begin(&mut self, report: &Report) {
        if let Some(aggregate) = AggregateKey::of_waiting(&report.outcome) {
            self.0.entry(aggregate).or_insert_with(|| Line { head: report.token, behind: Vec::new() });
        }
    }

    /// Nothing waits for the report any more. Returns what did.
    pub(super) fn end(&mut self, report: &Report) -> Vec<Report> {
        if !self.0.is_empty()
            && let Some(aggregate) = AggregateKey::of_waiting(&report.outcome)
            && let Entry::Occupied(line) = self.0.entry(aggregate)
            && line.get().head == report.token
        {
            return line.remove().behind;
        }
        Vec::new()
    }

    /// How many reports wait.
    pub(super) fn len(&self) -> usize {
        self.0.values().map(|line| line.behind.len()).sum()
    }
}
