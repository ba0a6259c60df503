//! Retention: completed rows that are old enough are deleted, in small steps beside everything else.
//!
//! A relay that reads a part of the log again knows by the row that an event has been delivered. So a row stays,
//! however old, until the slot has confirmed the log up to a time at which it was completed already. An idle outbox
//! confirms nothing by itself, so that this is asked for.

use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::session;
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Target};
use crate::postgres::outbox::{self, Tables};
use crate::postgres::{describe, slot};

/// Rows in one statement, at most.
const STEP: i64 = 1000;
/// Between two statements, so that others get their turn.
const BREATH: Duration = Duration::from_millis(20);
/// Between two looks, at most and at least.
const LOOK: Duration = Duration::from_mins(1);
const LOOK_SOONEST: Duration = Duration::from_secs(1);

/// The running task.
pub struct Retention {
    pub target: Target,
    pub tables: Tables,
    pub slot: String,
    /// `reconcile.retention`
    pub age: Duration,
    /// A position that is to be confirmed as soon as it may be.
    pub wish: watch::Sender<Lsn>,
    pub stop: CancellationToken,
}

/// Up to which time rows may go.
#[derive(Default)]
struct Proof {
    /// A time, and where the log ended then: to be confirmed.
    awaited: Option<(SystemTime, Lsn)>,
    /// The log is confirmed up to this time.
    proven: Option<SystemTime>,
}

impl Retention {
    /// Runs until the session stops.
    pub async fn run(self) {
        let every = (self.age / 10).clamp(LOOK_SOONEST, LOOK);
        let work = async {
            let mut proof = Proof::default();
            loop {
                if let Err(reason) = self.pass(&mut proof).await {
                    warn!(reason, "old rows could not be deleted; it is tried again");
                }
                let soon = proof.proven.is_none() && proof.awaited.is_some();
                tokio::time::sleep(if soon { LOOK_SOONEST } else { every }).await;
            }
        };
        self.stop.run_until_cancelled(work).await;
    }

    async fn pass(&self, proof: &mut Proof) -> Result<(), String> {
        // Passes are rare, and a connection is not cheap to keep.
        let session = session("outbox-relay retention");
        let connection = connect::sql(&self.target, &session).await.map_err(|error| error.to_string())?;
        let done = self.delete_old(&connection.client, proof).await.map_err(|error| describe(&error));
        connection.close().await;
        done
    }

    /// Deletes what may go by now, and asks for the log to be confirmed where more could.
    async fn delete_old(
        &self,
        client: &tokio_postgres::Client,
        proof: &mut Proof,
    ) -> Result<(), tokio_postgres::Error> {
        let rows = outbox::Retention { client, tables: &self.tables };
        if !rows.any(self.age).await? {
            return Ok(());
        }
        let Some(info) = slot::slot_info(client, &self.slot).await? else { return Ok(()) };
        if let Some((time, _)) = proof.awaited.take_if(|(_, position)| *position <= info.confirmed) {
            proof.proven = Some(time);
        }
        if proof.awaited.is_none() {
            proof.awaited = rows.now().await?;
            if let Some((_, position)) = proof.awaited {
                self.wish.send_replace(position);
            }
        }
        let Some(proven) = proof.proven else { return Ok(()) };
        let mut all = 0;
        loop {
            let deleted = rows.delete(self.age, proven, STEP).await?;
            all += deleted;
            if deleted < STEP.unsigned_abs() {
                break;
            }
            tokio::time::sleep(BREATH).await;
        }
        if all > 0 {
            debug!(rows = all, "deleted completed rows that were older than reconcile.retention");
        }
        Ok(())
    }
}
