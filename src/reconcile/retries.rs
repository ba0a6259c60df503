//! Rows whose time has come, and the rows that were held behind them.

use std::time::Duration;

use tokio::sync::oneshot;

use super::{Ask, Interrupted, PASS_ROWS, Reconciler};
use crate::flow::order::{AggregateKey, Blocked, Pass};
use crate::postgres::outbox::Due;

/// Blocked aggregates that are looked at together.
const AGGREGATES_AT_A_TIME: usize = 200;
/// How often in a pass an aggregate is tried to be freed that gets new events all the time.
const TRIES: usize = 20;
/// Between two tries while the aggregate is not settled.
const MOMENT: Duration = Duration::from_millis(5);

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
            self.release_some(due, blocks.to_vec()).await?;
        }
        Ok(())
    }

    async fn release_some(&self, due: Due<'_>, mut blocks: Vec<Blocked>) -> Result<(), Interrupted> {
        let some = aggregates(&blocks);
        let mut tries = 0;
        while tries < TRIES && !blocks.is_empty() {
            blocks.retain(|block| block.settled);
            if blocks.is_empty() {
                // Something was held or sent a moment ago.
                tokio::time::sleep(MOMENT).await;
                tries += 1;
            } else {
                let quiet = due.quiet(&aggregates(&blocks)).await?;
                let quiet: Vec<Blocked> = quiet.into_iter().filter_map(|at| blocks.get(at).cloned()).collect();
                if quiet.is_empty() {
                    break;
                }
                let held = due.released(&aggregates(&quiet), limit()).await?;
                if held.is_empty() {
                    // Those behind which another event was held meanwhile are not free yet.
                    self.ask(Ask::Unblock(quiet)).await?;
                    tries += 1;
                } else if self.send(held).await? == 0 {
                    break;
                }
            }
            let (reply, left) = oneshot::channel();
            self.ask(Ask::BlocksOf(some.clone(), reply)).await?;
            blocks = left.await.map_err(|_| Interrupted::SessionEnded)?;
        }
        Ok(())
    }
}

fn aggregates(blocks: &[Blocked]) -> Vec<AggregateKey> {
    blocks.iter().map(|block| block.aggregate.clone()).collect()
}

fn limit() -> i64 {
    i64::try_from(PASS_ROWS).unwrap_or(i64::MAX)
}
