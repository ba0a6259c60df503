//! When nothing is sent for a while, and saying so.

use std::time::Instant;

use tracing::{debug, warn};

use super::Deliver;
use crate::fault::Failure;
use crate::telemetry::health::Condition;

impl Deliver<'_> {
    /// Nothing is sent for a while: the failure is not the event's fault.
    pub(super) fn hold_for(&mut self, failure: &Failure) {
        let now = Instant::now();
        if self.held_until.is_some_and(|until| now < until) {
            return;
        }
        let pause = self.pause.next();
        self.held_until = Some(now + pause);
        self.troubled_until = self.troubled_until.max(Some(now));
        let code = failure.code();
        debug!(code, ?pause, "delivery holds");
        if self.shared.health.raise(Condition::Holding, format!("delivery holds: {code}: {}", failure.hint())) {
            warn!(code, hint = failure.hint(), "delivery holds until it passes; nothing is counted against the events");
        }
    }

    /// Whatever made the pipeline hold has passed.
    pub(super) fn trouble_passed(&mut self) {
        if self.troubled_until.take().is_some() {
            self.pause.reset();
            if !self.full {
                self.shared.health.clear(Condition::Holding);
            }
        }
    }

    /// Says so while too many rows are held behind failed ones for more to be taken in.
    pub(super) fn look_at_held(&mut self) {
        let full = self.delivery.holds_too_many();
        if full {
            let reason = "delivery holds: as many rows as delivery.max_blocked_rows wait behind events that fail";
            if self.shared.health.raise(Condition::Holding, reason) {
                warn!(rows = self.delivery.gate().held(), "{reason}; see error_message of the rows with status failed");
            }
        } else if self.full && self.troubled_until.is_none() {
            self.shared.health.clear(Condition::Holding);
        }
        self.full = full;
    }
}
