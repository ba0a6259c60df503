//! How far the stages are at this moment. Shown by `/status`, and no metrics: a scrape would meet them at random.

use super::{Counter, Known};

/// What the stages, the watcher and the sweep saw last.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// Events that were given a subject.
    pub routed: Counter,
    /// Events that were taken in and have no outcome in the table yet.
    pub under_way: Known,
    /// Those of them that wait for their turn to be sent.
    pub waiting: Known,
    /// Those of them whose outcome is known and on its way to the table.
    pub decided: Known,
    /// Transactions with an event that has no outcome yet.
    pub transactions: Known,
    /// Where the log ends: a position, in bytes, as are the next two.
    pub wal_end: Known,
    /// As far as it was read.
    pub read: Known,
    /// As far as it may be confirmed.
    pub confirmed: Known,
    /// The server's `max_slot_wal_keep_size`; no value when unlimited.
    pub keep_size: Known,
    /// Dead letters in the table that nobody has handled.
    pub unhandled: Known,
}

impl Live {
    /// Forgets what only a running session knows.
    pub(super) fn forget(&self) {
        for known in [
            &self.under_way,
            &self.waiting,
            &self.decided,
            &self.transactions,
            &self.wal_end,
            &self.read,
            &self.confirmed,
            &self.keep_size,
            &self.unhandled,
        ] {
            known.unset();
        }
    }
}
