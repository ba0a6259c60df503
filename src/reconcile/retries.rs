//! Rows whose time has come, and the rows that were held behind them.

use tokio::sync::oneshot;

use super::{Ask, Interrupted, PASS_ROWS, Reconciler};
use crate::flow::order::{AggregateKey, Blocked, Pass};
use crate::postgres::outbox::Due;

/// Blocked aggregates that are looked at together.
const AGGREGATES_AT_A_TIME: usize = 200;

impl Reconciler {
    /// Sends due rows until none is left.
    pub(super) async fn send_due(&self, due: Due<'_>) -> Result<(), Interrupted> {
        loop {
            let rows = due.rows(limit()).await?;
            if rows.is_empty() {
                return Ok(());
            }
            let again = rows.iter().filter(|(_, pass)| *pass == Pass::Again).count();
            let sent = self.send(rows).await?;
            self.metrics.retries.inc_by(again.min(sent) as u64);
            if sent == 0 {
                return Ok(());
            }
        }
    }

    /// Releases every held row: a relay that kept the order left them.
    pub(super) async fn release_all(&self, due: Due<'_>) -> Result<(), Interrupted> {
        loop {
            let held = due.held(limit()).await?;
            if held.is_empty() {
                return Ok(());
            }
            if self.send(held).await? == 0 {
                return Ok(());
            }
        }
    }

    /// Releases blocked aggregates in which nothing waits for a retry any more: their held rows leave by id, and when the
    /// table shows none, the aggregate is free.
    pub(super) async fn release(&self, due: Due<'_>) -> Result<(), Interrupted> {
        let (reply, blocks) = oneshot::channel();
        self.ask(Ask::Blocks(reply)).await?;
        let blocks = blocks.await.map_err(|_| Interrupted::SessionEnded)?;
        for blocks in blocks.chunks(AGGREGATES_AT_A_TIME) {
            let aggregates: Vec<AggregateKey> = blocks.iter().map(|block| block.aggregate.clone()).collect();
            loop {
                let held = due.released(&aggregates, limit()).await?;
                if held.is_empty() || self.send(held).await? == 0 {
                    break;
                }
            }
            let free = due.free(&aggregates).await?;
            let free: Vec<Blocked> = free.into_iter().filter_map(|at| blocks.get(at).cloned()).collect();
            if !free.is_empty() {
                self.ask(Ask::Unblock(free)).await?;
            }
        }
        Ok(())
    }
}

fn limit() -> i64 {
    i64::try_from(PASS_ROWS).unwrap_or(i64::MAX)
}
