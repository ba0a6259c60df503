//! Making the slot anew. The snapshot that it exports is the seam: rows that it shows are drained from the table, all
//! others come through the slot.
//!
//! PostgreSQL makes a slot only when every transaction that was open before has ended. That may take long; the slot's
//! name is ours meanwhile, so that rows can be delivered from the table in rounds.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::drain::Drain;
use super::prepare::Ground;
use super::rounds::ROUND_ROWS;
use super::take::{Claim, Held, Idle, Taken};
use super::{Relay, Setback};
use crate::config::Source;
use crate::flow::lsn::Lsn;
use crate::postgres::connect::Socket;
use crate::postgres::outbox::{StateRow, WaitingRows};
use crate::postgres::wal::{WalConnection, WalError};
use crate::postgres::{remedies, slot};
use crate::telemetry::health::Condition;

/// For how long the slot is simply waited for, before rows are delivered meanwhile. Mostly it is there at once.
const PROMPT: Duration = Duration::from_millis(500);

/// A slot that PostgreSQL is making for us. Its name is ours already.
pub struct Making {
    pub held: Held,
    /// Called when few rows wait any more.
    pub little: CancellationToken,
    /// More rows may wait than a round holds: until they are fewer, only the slot's name is held.
    much: bool,
    state: StateRow,
    task: JoinHandle<Result<Made, Setback>>,
}

/// A slot that was made for us and streams to nobody yet, so that its snapshot can be entered.
pub struct Made {
    wal: WalConnection<Socket>,
    point: Lsn,
    snapshot: String,
}

impl Drop for Making {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Making {
    /// Waits until the slot is made. Cancel-safe; once it has returned, there is nothing left to wait for.
    pub async fn made(&mut self) -> Result<Made, Setback> {
        (&mut self.task).await.unwrap_or(Err(Setback::Replication(WalError::Closed)))
    }

    /// Why there is no slot yet, as far as the relay itself knows.
    pub fn reason(&self) -> String {
        if self.much && !self.little.is_cancelled() {
            return format!(
                "{ROUND_ROWS} or more rows may wait in the table from before the slot: they are delivered first, then the slot \
                 is made"
            );
        }
        "the new slot is being made; waiting rows are delivered from the table meanwhile".to_owned()
    }

    /// Enters the snapshot of the slot that was made, and streams.
    pub async fn start(&self, relay: &Relay, ground: &Ground, made: Made) -> Result<Taken, Setback> {
        let Made { wal, point, snapshot } = made;
        let slot = &relay.settings.source.slot;
        info!(slot, %point, "the slot was made; waiting rows from before it are read from the table");
        // The snapshot exists only until the connection goes on.
        let drain = Drain::open(relay, ground, Some(&snapshot), point).await?;
        let idle = Idle { wal, pid: self.held.pid, timeout: self.held.timeout };
        let (streaming, progress, held) = idle.start(relay, Lsn::ZERO, Lsn::ZERO).await?;
        ground.wait_for_pollers(slot).await?;
        let state = self.state.clone();
        Ok(Taken { streaming, progress, held, state, new: true, confirmed: Lsn::ZERO, drain: Some(drain) })
    }

    /// Gives up what is being made: PostgreSQL would hold the name until it notices that nobody waits for it any more.
    pub async fn give_up(self, ground: &Ground) {
        const PATIENCE: Duration = Duration::from_secs(2);
        self.task.abort();
        let ended = slot::terminate(&ground.control.client, self.held.pid);
        // Where PostgreSQL does not answer there is nothing to be ended by us.
        let _ = tokio::time::timeout(PATIENCE, ended).await;
    }
}

/// How an operator makes the slot where the relay must not, in the place of one that `exists` or not.
pub(super) fn by_hand(slot: &str, exists: bool) -> String {
    let create = remedies::create_slot(slot);
    if exists {
        let drop = remedies::drop_slot(slot);
        return format!("run: outbox-relay slot drop, then outbox-relay slot create (in SQL: {drop}; {create})");
    }
    format!("run: outbox-relay slot create (in SQL: {create})")
}

/// Begins to make the slot anew, and waits for a while. Where much waits in the table, it is delivered first: a
/// snapshot that is held for long keeps PostgreSQL from cleaning up.
pub async fn begin(relay: &Relay, ground: &Ground, idle: Idle, state: StateRow) -> Result<Claim, Setback> {
    let source = &relay.settings.source;
    let client = &ground.control.client;
    if !source.create {
        let (slot, found) = (&source.slot, slot::slot_info(client, &source.slot).await?);
        let lost = found.is_some();
        if found.is_some_and(|info| !info.is_lost()) {
            return Err(Setback::Transient(format!("replication slot {slot:?} was made a moment ago")));
        }
        return Err(Setback::Fatal(format!(
            "replication slot {slot:?} is {}, and source.create = false keeps the relay from making it; {}",
            if lost { "lost" } else { "missing" },
            by_hand(slot, lost)
        )));
    }
    // Durable before the slot exists: a relay that dies during the drain leaves word for the next one.
    ground.state(&source.slot).set_needs_drain(true).await?;
    // Only a lost slot goes: another relay may have made the slot anew since, and not have begun to stream yet.
    let found = slot::slot_info(client, &source.slot).await?;
    if found.is_some_and(|info| info.is_lost() && info.active_pid.is_none()) {
        slot::drop_slot(client, &source.slot).await?;
    }
    let much = WaitingRows::may_be_more_than(client, &ground.tables, ROUND_ROWS).await?;
    let Idle { wal, pid, timeout } = idle;
    let little = CancellationToken::new();
    let command = slot::create_command(source, ground.server.version);
    let task = tokio::spawn(make(wal, source.clone(), command, much.then(|| little.clone())));
    let mut making = Making { held: Held { pid, timeout, since: Instant::now() }, little, much, state, task };
    loop {
        if let Ok(made) = tokio::time::timeout(PROMPT, making.made()).await {
            let taken = making.start(relay, ground, made?).await?;
            return Ok(Claim::Taken(Box::new(taken)));
        }
        let asked = Instant::now();
        if slot::slot_info(client, &source.slot).await?.is_some_and(|info| info.active_pid == Some(pid)) {
            making.held.since = asked;
            relay.health.raise(Condition::Slot, making.reason());
            // From here on pollers see that the slot is taken.
            ground.wait_for_pollers(&source.slot).await?;
            return Ok(Claim::Making(making));
        }
    }
}

/// Lets PostgreSQL notice when nobody waits any more for the slot that it makes next. Where its platform cannot,
/// another relay says who keeps the name.
async fn notice_our_end(wal: &mut WalConnection<Socket>) -> Result<(), WalError> {
    match wal.query(slot::CHECK_CLIENT).await {
        Err(error @ WalError::Server { .. }) => {
            debug!(%error, "PostgreSQL cannot notice a client's end while it waits");
            Ok(())
        }
        other => other.map(|_| ()),
    }
}

/// Makes the slot; with `after`, only when that is called, and until then holds its name.
async fn make(
    mut wal: WalConnection<Socket>,
    source: Source,
    command: String,
    after: Option<CancellationToken>,
) -> Result<Made, Setback> {
    if let Some(little) = after {
        notice_our_end(&mut wal).await?;
        wal.query(&slot::reserve_command(&source)).await?;
        little.cancelled().await;
        wal.query(&slot::release_command(&source)).await?;
    }
    notice_our_end(&mut wal).await?;
    let made = wal.query(&command).await?;
    let mut fields = made.into_iter().flatten().flatten().skip(1);
    let (Some(Ok(point)), Some(snapshot)) = (fields.next().map(|text| text.parse()), fields.next()) else {
        return Err(Setback::Transient("PostgreSQL made the slot but did not say where it begins".to_owned()));
    };
    Ok(Made { wal, point, snapshot })
}
