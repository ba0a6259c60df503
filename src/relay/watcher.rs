//! Watches the slot and the outbox table from the side: is the slot still ours, how far behind is it, and does the log
//! still show the table?

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::prepare::Ground;
use super::take::Held;
use super::{Setback, gauges};
use crate::config::Source;
use crate::postgres::slot::copies::{Copies, copies};
use crate::postgres::slot::{self, SlotInfo};
use crate::postgres::{describe, publication};
use crate::telemetry::health::{Condition, Health};
use crate::telemetry::metrics::Metrics;

/// Between two looks at the slot, at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between two looks at the table, its publication, and the standbys.
const SOURCE_EVERY: Duration = Duration::from_secs(2);

/// The running watch.
pub struct Watcher<'a> {
    pub ground: &'a Ground,
    pub source: &'a Source,
    pub held: Held,
    pub metrics: &'a Metrics,
    pub health: &'a Health,
    /// When the slot was last seen to be ours.
    pub alive: watch::Sender<Instant>,
    pub stop: CancellationToken,
    pub wal_stop: CancellationToken,
}

impl Watcher<'_> {
    /// Runs until the session stops, and stops it when the slot is no longer ours, the table is another, or the server
    /// does not answer.
    pub async fn run(self) -> Result<(), Setback> {
        let timeout = self.held.timeout;
        let every = LOOK_EVERY.min(timeout / 6);
        let mut source_seen = None;
        loop {
            match tokio::time::timeout(timeout, self.look(&mut source_seen)).await {
                Ok(Ok(())) => {}
                Ok(Err(trouble)) => return self.end(trouble),
                Err(_) => {
                    // Others may wait for an answer on this connection as well.
                    self.ground.control.driver.abandon();
                    return self.end(Setback::PostgresLost(format!("PostgreSQL did not answer for {timeout:?}")));
                }
            }
            tokio::select! {
                () = self.stop.cancelled() => return Ok(()),
                reason = self.ground.control.driver.closed() => {
                    return self.end(Setback::PostgresLost(format!("PostgreSQL: {reason}")));
                }
                () = tokio::time::sleep(every) => {}
            }
        }
    }

    async fn look(&self, source_seen: &mut Option<Instant>) -> Result<(), Setback> {
        let client = &self.ground.control.client;
        let asked = Instant::now();
        match slot::slot_info(client, &self.source.slot).await? {
            Some(info) if info.active_pid == Some(self.held.pid) => {
                self.alive.send_replace(asked);
                self.health.clear(Condition::Slot);
                gauges::show_slot(self.metrics, &info);
                if self.keeps_too_much(&info) {
                    return Err(Setback::TooMuchRetained);
                }
            }
            Some(info) if info.is_lost() => {
                self.metrics.slot.set_wal_status(Some(&info.wal_status));
                return Err(Setback::SlotLost("the replication slot was invalidated"));
            }
            Some(info) if info.active_pid.is_none() => {
                return Err(Setback::PostgresLost("PostgreSQL ended the replication connection".to_owned()));
            }
            Some(_) => return Err(Setback::SlotLost("the replication slot was taken by someone else")),
            None => return Err(Setback::SlotLost("the replication slot was dropped")),
        }
        if source_seen.is_none_or(|seen| asked.duration_since(seen) >= SOURCE_EVERY) {
            *source_seen = Some(asked);
            // Nothing depends on it: whether the server answers at all is asked above and below.
            let copies = copies(client, &self.source.slot).await.unwrap_or_else(|error| {
                debug!(error = describe(&error), "copies of the slot cannot be counted");
                Copies::default()
            });
            gauges::show_standbys(self.metrics, copies, self.source.failover);
            let mark = publication::mark(client, &self.source.publication, &self.source.table).await?;
            if mark != self.ground.mark {
                return Err(Setback::SourceChanged);
            }
        }
        Ok(())
    }

    /// Ends the session. The replication connection is closed at once: a server that shuts down waits for it.
    fn end(self, trouble: Setback) -> Result<(), Setback> {
        // Said by who acts on it.
        if !matches!(trouble, Setback::TooMuchRetained) {
            let reason = trouble.to_string();
            warn!(reason, "the session ends");
            self.health.raise(trouble.condition(), reason);
            self.metrics.forget_slot();
        }
        self.stop.cancel();
        self.wal_stop.cancel();
        Err(trouble)
    }

    /// Whether the log grows behind the slot while events cannot be delivered, or not be recorded.
    fn keeps_too_much(&self, info: &SlotInfo) -> bool {
        let causes = [Condition::NatsDown, Condition::Holding, Condition::Refused];
        let stuck = causes.into_iter().any(|what| self.health.is_raised(what));
        stuck && u64::try_from(info.lag_bytes).is_ok_and(|lag| lag > self.source.max_retained_wal)
    }
}
