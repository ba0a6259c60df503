//! Watches the slot from the side: is it still ours, and how far behind is it?

use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::Setback;
use super::prepare::Ground;
use crate::postgres::slot::{self, SlotInfo};
use crate::telemetry::health::{Condition, Health};
use crate::telemetry::metrics::Metrics;

/// Between two looks, at most.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The running watch.
pub struct Watcher<'a> {
    pub ground: &'a Ground,
    pub slot: &'a str,
    /// The backend that holds the slot for us.
    pub pid: i32,
    /// The session's `wal_sender_timeout`.
    pub timeout: Duration,
    pub metrics: &'a Metrics,
    pub health: &'a Health,
    /// Bytes of log behind the confirmed position that are kept while nothing can be delivered.
    pub max_retained_wal: u64,
    /// When the slot was last seen to be ours.
    pub alive: watch::Sender<Instant>,
    pub stop: CancellationToken,
    pub wal_stop: CancellationToken,
}

impl Watcher<'_> {
    /// Runs until the session stops, and stops it when the slot is no longer ours or the server does not answer.
    pub async fn run(self) -> Result<(), Setback> {
        let every = LOOK_EVERY.min(self.timeout / 6);
        loop {
            let asked = Instant::now();
            let look = tokio::time::timeout(self.timeout, slot::slot_info(&self.ground.control.client, self.slot));
            let trouble = match look.await {
                Ok(Ok(Some(info))) if info.active_pid == Some(self.pid) => {
                    self.alive.send_replace(asked);
                    self.show(&info);
                    if self.keeps_too_much(&info) {
                        self.stop.cancel();
                        self.wal_stop.cancel();
                        return Err(Setback::TooMuchRetained);
                    }
                    None
                }
                Ok(Ok(Some(info))) if info.is_lost() => Some("the replication slot was invalidated".to_owned()),
                Ok(Ok(Some(info))) if info.active_pid.is_none() => {
                    Some("PostgreSQL ended the replication connection".to_owned())
                }
                Ok(Ok(Some(_))) => Some("the replication slot was taken by someone else".to_owned()),
                Ok(Ok(None)) => Some("the replication slot was dropped".to_owned()),
                Ok(Err(error)) => Some(format!("PostgreSQL: {}", crate::postgres::describe(&error))),
                Err(_) => {
                    // Others may wait for an answer on this connection as well.
                    self.ground.control.driver.abandon();
                    Some(format!("PostgreSQL did not answer for {:?}", self.timeout))
                }
            };
            if let Some(reason) = trouble {
                return self.end(reason);
            }
            tokio::select! {
                () = self.stop.cancelled() => return Ok(()),
                reason = self.ground.control.driver.closed() => return self.end(format!("PostgreSQL: {reason}")),
                () = tokio::time::sleep(every) => {}
            }
        }
    }

    /// Ends the session. The replication connection is closed at once: a server that shuts down waits for it.
    fn end(self, reason: String) -> Result<(), Setback> {
        warn!(reason, "the session ends");
        self.health.raise(Condition::Slot, reason.clone());
        self.metrics.forget_slot();
        self.stop.cancel();
        self.wal_stop.cancel();
        Err(Setback::Transient(reason))
    }

    /// Whether the log grows behind the slot while nothing can be delivered.
    fn keeps_too_much(&self, info: &SlotInfo) -> bool {
        let stuck = [Condition::NatsDown, Condition::Holding].into_iter().any(|what| self.health.is_raised(what));
        stuck && u64::try_from(info.lag_bytes).is_ok_and(|lag| lag > self.max_retained_wal)
    }

    fn show(&self, info: &SlotInfo) {
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        self.health.clear(Condition::Slot);
        self.metrics.slot_active.set(1.0);
        self.metrics.slot_confirmed_lag.set_bytes(bytes(info.lag_bytes));
        self.metrics.slot_retained_wal.set_bytes(bytes(info.retained_bytes));
        match info.safe_bytes {
            Some(safe) => self.metrics.slot_safe_wal.set_bytes(bytes(safe)),
            None => self.metrics.slot_safe_wal.unset(),
        }
        self.metrics.set_slot_wal_status(Some(&info.wal_status));
    }
}
