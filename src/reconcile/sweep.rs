//! Rows that the log never showed: the slot was moved, or the table left its publication for a while.
//!
//! A pending row that was visible before a position of the log, and has no outcome once everything before that position
//! has one, was missed.

use std::time::Instant;

use tokio::sync::watch;
use tracing::warn;

use super::{Ask, Interrupted, PASS_ROWS, Reconciler};
use crate::flow::lsn::Lsn;
use crate::postgres::outbox::{self, Due, LOOK_ROWS, Seen};
use crate::postgres::slot;
use crate::telemetry::metrics::waiting;

/// Rows looked at in one sweep, at most; the next one goes on behind them.
const SWEEP_ROWS: usize = 10_000;

/// Where the sweep stands.
#[derive(Debug)]
pub(super) struct Sweep {
    next: Instant,
    /// Rows up to this id have an outcome, as far as they were there at the last sweep; `None` before the first one.
    low: Option<i64>,
    /// Which tables the rows stood in then. A partition that is attached brings rows of any age.
    partitions: Option<String>,
    /// Pending rows that were seen, and the position of the log by which each must have an outcome.
    seen: Option<(Vec<Seen>, Lsn)>,
    /// When waiting rows are counted next: also while the sweep waits for the log.
    count: Instant,
}

impl Sweep {
    pub(super) fn new() -> Self {
        Self { next: Instant::now(), low: None, partitions: None, seen: None, count: Instant::now() }
    }
}

impl Reconciler {
    /// Takes the sweep one step on: looks at pending rows when it is time, and sends those that were missed once the
    /// log has passed them.
    pub(super) async fn sweep(
        &self,
        due: Due<'_>,
        sweep: &mut Sweep,
        safe: &watch::Receiver<Lsn>,
    ) -> Result<(), Interrupted> {
        // Not before the log has shown what an earlier session left: nothing is known to be missed until then, and a
        // look at the whole of a large table would cost the server what it needs for the log.
        let shown = *safe.borrow() >= self.horizon;
        if shown && sweep.seen.is_none() && Instant::now() >= sweep.next {
            sweep.next = Instant::now() + self.sweep_interval;
            let partitions = due.partitions().await?;
            if sweep.partitions != partitions {
                (sweep.low, sweep.partitions) = (None, partitions);
            }
            let pending = due.pending_after(sweep.low.unwrap_or(0), SWEEP_ROWS).await?;
            // First the rows, then the position: what commits in between is not among the rows.
            let position = slot::current_wal(due.client).await?;
            sweep.low = Some(self.next_low(due, &pending).await?);
            sweep.seen = (!pending.is_empty()).then_some((pending, position));
        }
        if Instant::now() >= sweep.count {
            sweep.count = Instant::now() + self.sweep_interval;
            self.count(due, sweep.low).await?;
            if self.ordered {
                self.ask(Ask::Held(outbox::held_aggregates(due.client, due.tables).await?)).await?;
            }
        }
        let passed = |(_, position): &(Vec<Seen>, Lsn)| *safe.borrow() >= *position;
        let Some((pending, _)) = sweep.seen.take_if(|seen| passed(seen)) else { return Ok(()) };
        for seen in pending.chunks(PASS_ROWS) {
            let missed = due.still_pending(seen).await?;
            if !missed.is_empty() {
                warn!(rows = missed.len(), "pending rows were not in the log; they are sent from the table");
                let count = missed.len();
                if self.send(missed).await? < count {
                    // What was not taken, or has no outcome yet, is looked at again.
                    let first = seen.first().map_or(0, |first| first.id.saturating_sub(1));
                    sweep.low = sweep.low.map(|low| low.min(first));
                }
            }
        }
        Ok(())
    }

    /// Shows how many rows wait: before the first sweep, among the newest.
    async fn count(&self, due: Due<'_>, low: Option<i64>) -> Result<(), Interrupted> {
        let low = match low {
            Some(low) => low,
            None => due.highest_id().await?.unwrap_or(0).saturating_sub(LOOK_ROWS),
        };
        let found = outbox::waiting(due.client, due.tables, low).await?;
        let whole = |rows: i64| u64::try_from(rows).unwrap_or(0);
        self.metrics.set_outbox_rows(waiting::PENDING, whole(found.pending + found.scheduled));
        self.metrics.set_outbox_rows(waiting::FAILED, whole(found.failed));
        self.metrics.set_outbox_rows(waiting::HELD, whole(found.held));
        self.metrics.live.unhandled.set_bytes(whole(found.unhandled));
        Ok(())
    }

    /// The next sweep starts behind rows that have an outcome. Ids that are given out but not committed yet may lie
    /// lower: those rows come through the log, and the first sweep of the next session looks at all again.
    async fn next_low(&self, due: Due<'_>, pending: &[Seen]) -> Result<i64, Interrupted> {
        match (pending.first(), pending.last()) {
            (Some(_), Some(&last)) if pending.len() >= SWEEP_ROWS => Ok(last.id),
            (Some(&first), _) => Ok(first.id.saturating_sub(1)),
            // A table that was emptied may count its rows from one again.
            _ => Ok(due.highest_id().await?.unwrap_or(0)),
        }
    }
}
