//! Rows whose time has come, and the rows that were held behind them.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::{Ask, Interrupted, PASS_ROWS, Reconciler};
use crate::flow::order::{AggregateKey, Blocked, Pass};
use crate::postgres::outbox::Due;

/// Blocked aggregates that are looked at together.
const AGGREGATES_AT_A_TIME: usize = 200;
/// For how long an aggregate is waited for in which something is under way, or not written yet.
const SETTLING: Duration = Duration::from_secs(1);
/// Between two looks at it.
const MOMENT: Duration = Duration::from_millis(5);

impl Reconciler {
    /// Sends the rows that are due now until none of them is left. What comes due meanwhile has its turn later: others
    /// wait for theirs, and where rows are dated steadily there would be no end.
    pub(super) async fn send_due(&self, due: Due<'_>) -> Result<(), Interrupted> {
        let now = due.now().await?;
        loop {
            let rows = due.rows(now, limit()).await?;
            if rows.is_empty() {
                return Ok(());
            }
            let again = rows.iter().filter(|row| row.pass == Pass::Again).count();
            let sent = self.send(rows).await?;
            self.metrics.retries.inc_by(again.min(sent) as u64);
            if sent == 0 {
                return Ok(());
            }
        }
    }

    /// Releases every held row: a relay that kept the order left them. Returns whether none is left.
    pub(super) async fn release_all(&self, due: Due<'_>) -> Result<bool, Interrupted> {
        loop {
            let held = due.held(limit()).await?;
            if held.is_empty() {
                return Ok(true);
            }
            if self.send(held).await? == 0 {
                return Ok(false);
            }
        }
    }

    /// Releases blocked aggregates in which nothing waits for a retry any more: their held rows leave by id, and when
    /// the table shows none, the aggregate is free. Returns whether none of those rows is left.
    pub(super) async fn release(&self, due: Due<'_>) -> Result<bool, Interrupted> {
        let (reply, blocked) = oneshot::channel();
        self.ask(Ask::Blocks(reply)).await?;
        let blocked = blocked.await.map_err(|_| Interrupted::SessionEnded)?;
        let mut whole = true;
        for some in blocked.chunks(AGGREGATES_AT_A_TIME) {
            let mut some = quiet(due, some.to_vec()).await?;
            let released = self.release_some(due, &mut some).await;
            self.ask(Ask::Close(some)).await?;
            whole &= released?;
        }
        Ok(whole)
    }

    /// The same, of some aggregates. Those that turn out to wait for a retry again are taken out.
    async fn release_some(&self, due: Due<'_>, some: &mut Vec<AggregateKey>) -> Result<bool, Interrupted> {
        let mut until = Instant::now() + SETTLING;
        loop {
            let mut blocks = self.open(some).await?;
            if blocks.is_empty() {
                return Ok(true);
            }
            if Instant::now() >= until {
                return Ok(false);
            }
            blocks.retain(|block| block.settled);
            if blocks.is_empty() {
                tokio::time::sleep(MOMENT).await;
                continue;
            }
            // Of those whose every outcome is in the table: a failure may be among them.
            let settled: Vec<AggregateKey> = blocks.iter().map(|block| block.aggregate.clone()).collect();
            let free = quiet(due, settled.clone()).await?;
            let waits = |aggregate: &AggregateKey| settled.contains(aggregate) && !free.contains(aggregate);
            let waiting: Vec<AggregateKey> = some.extract_if(.., |aggregate| waits(aggregate)).collect();
            self.ask(Ask::Close(waiting)).await?;
            let held = due.released(&free, limit()).await?;
            if held.is_empty() {
                blocks.retain(|block| free.contains(&block.aggregate));
                self.ask(Ask::Unblock(blocks)).await?;
                continue;
            }
            let more = held.len() >= PASS_ROWS;
            if more {
                // It takes a while: what comes meanwhile waits in the table, where it is in nobody's way.
                self.ask(Ask::Close(some.clone())).await?;
            }
            if self.send(held).await? == 0 {
                return Ok(false);
            }
            if more {
                self.send_due(due).await?;
            }
            until = Instant::now() + SETTLING;
        }
    }

    async fn open(&self, some: &[AggregateKey]) -> Result<Vec<Blocked>, Interrupted> {
        let (reply, blocks) = oneshot::channel();
        self.ask(Ask::Open(some.to_vec(), reply)).await?;
        blocks.await.map_err(|_| Interrupted::SessionEnded)
    }
}

/// Those of the aggregates in which nothing waits for a retry.
async fn quiet(due: Due<'_>, aggregates: Vec<AggregateKey>) -> Result<Vec<AggregateKey>, Interrupted> {
    let places = due.quiet(&aggregates).await?;
    Ok(places.into_iter().filter_map(|at| aggregates.get(at).cloned()).collect())
}

fn limit() -> i64 {
    i64::try_from(PASS_ROWS).unwrap_or(i64::MAX)
}
