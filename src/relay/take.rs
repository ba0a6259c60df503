//! Taking the slot: waiting for it, trusting it, or making it anew with a drain before it.

use std::time::{Duration, Instant};

use tokio_postgres::Client;
use tracing::{info, warn};

use super::drain::Drain;
use super::make::{self, Making};
use super::prepare::{self, Ground, answered};
use super::setback::recovered;
use super::stages::{Progress, Streaming};
use super::{Relay, Setback, gauges};
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Socket};
use crate::postgres::outbox::StateRow;
use crate::postgres::slot::{self, SlotInfo};
use crate::postgres::wal::WalConnection;
use crate::postgres::{remedies, waits};
use crate::telemetry::health::{Condition, State};

/// Between two looks at a slot that another relay holds.
const STANDBY: Duration = Duration::from_secs(1);

/// Who holds the slot for us, and since when.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// The backend.
    pub pid: i32,
    /// The session's `wal_sender_timeout`.
    pub timeout: Duration,
    pub since: Instant,
}

/// A slot that is ours, and where to go on from.
pub struct Taken {
    pub streaming: Streaming,
    pub progress: Progress,
    pub held: Held,
    pub state: StateRow,
    /// The slot was made for this session: nothing is sent yet of what it shows.
    pub new: bool,
    /// The slot's confirmed position; zero when rows are drained first.
    pub confirmed: Lsn,
    /// Rows from before the slot.
    pub drain: Option<Drain>,
}

/// A slot that is ours.
pub enum Claim {
    Taken(Box<Taken>),
    /// It is not made yet.
    Making(Making),
}

/// The replication connection before it streams.
pub struct Idle {
    pub wal: WalConnection<Socket>,
    /// The backend.
    pub pid: i32,
    /// The session's `wal_sender_timeout`.
    pub timeout: Duration,
}

impl Idle {
    /// Streams from `from` on, or from the slot's confirmed position where that is later; `confirmed`: what is
    /// confirmed already.
    pub async fn start(self, relay: &Relay, from: Lsn, confirmed: Lsn) -> Result<(Streaming, Progress, Held), Setback> {
        let source = &relay.settings.source;
        let Self { wal, pid, timeout } = self;
        let stream = wal.start(&source.slot, &source.publication, from).await?;
        let progress = Progress::new(confirmed);
        // Before anything that may take long: the server ends a connection on which it is not answered.
        let streaming = Streaming::start(relay, stream, timeout, &progress);
        Ok((streaming, progress, Held { pid, timeout, since: Instant::now() }))
    }
}

/// Waits until the slot is ours. `None`: the relay was asked to stop meanwhile.
pub async fn take_slot(relay: &mut Relay, ground: &Ground) -> Result<Option<Claim>, Setback> {
    let slot = relay.settings.source.slot.clone();
    let mut said = None;
    loop {
        let (found, waits) = answered("it was asked for the slot", look(&ground.control.client, &slot)).await?;
        // A lost slot is shown until it is anew: the relay makes it, or an operator does.
        relay.metrics.slot.set_wal_status(found.as_ref().map(|info| &*info.wal_status));
        if let Some(holder) = found.as_ref().and_then(|info| info.active_pid) {
            recovered(&relay.health);
            // What was wrong with the slot ended our session; the one that holds it now answers for it.
            relay.health.clear(Condition::Slot);
            relay.health.set(State::Standby);
            // What was checked is fit: when the servers change hands, what they answer meanwhile is waited for.
            relay.ran = true;
            if let Some(info) = &found {
                gauges::show_slot(&relay.metrics, info);
            }
            // Mostly a slot is made at once.
            let soon = waits.is_none() && found.as_ref().is_some_and(SlotInfo::is_being_made);
            let news = Some((holder, waits.is_some()));
            if !soon && std::mem::replace(&mut said, news) != news {
                say_who_holds(relay, holder, waits);
            }
            tokio::select! {
                () = relay.stop.cancelled() => return Ok(None),
                () = tokio::time::sleep(STANDBY) => continue,
            }
        }
        match answered("the slot was taken", take(relay, ground, found)).await {
            // Another relay was faster: 55006 the slot is in use, 42710 it was just made.
            Err(Setback::Replication(error)) if matches!(error.sqlstate(), Some("55006" | "42710")) => {}
            other => return other.map(Some),
        }
    }
}

/// The slot, and what it waits for if it is being made.
async fn look(client: &Client, slot: &str) -> Result<(Option<SlotInfo>, Option<String>), Setback> {
    let found = slot::slot_info(client, slot).await?;
    let maker = found.as_ref().filter(|info| info.is_being_made()).and_then(|info| info.active_pid);
    let waits = match maker {
        Some(maker) => waits::for_old_transactions(client, maker).await?,
        None => None,
    };
    Ok((found, waits))
}

/// Says why this relay stands by. `waits`: what a slot waits for that is being made.
fn say_who_holds(relay: &Relay, holder: i32, waits: Option<String>) {
    let slot = &relay.settings.source.slot;
    let Some(waits) = waits else {
        info!(slot, holder, "another process holds the slot; standing by");
        return;
    };
    let reason = format!(
        "the slot is being made by process {holder} for another relay: {waits}; if no relay waits for process {holder} any \
         more, end that with {}",
        remedies::terminate(holder)
    );
    warn!(slot, "{reason}; standing by");
    relay.health.note("slot", reason);
}

/// Takes a slot that nobody holds: the one that exists, if it can be trusted, or a new one.
async fn take(relay: &Relay, ground: &Ground, found: Option<SlotInfo>) -> Result<Claim, Setback> {
    let source = &relay.settings.source;
    if let Some(info) = &found {
        prepare::check_slot(info, source)?;
    }
    let connection = connect::replication(&relay.postgres, &prepare::replication_session()).await?;
    let pid = connection.backend_pid;
    let mut wal = WalConnection::new(connection, prepare::message_cap(&relay.settings));
    let timeout = prepare::settle_replication(&mut wal, ground).await?;
    let idle = Idle { wal, pid, timeout };
    let state = ground.state(&source.slot).read().await?;
    match found.filter(|info| !info.is_lost()) {
        Some(info) => keep(relay, ground, idle, (info, state)).await.map(|taken| Claim::Taken(Box::new(taken))),
        None => make::begin(relay, ground, idle, state).await,
    }
}

/// Goes on with the slot that exists.
async fn keep(
    relay: &Relay,
    ground: &Ground,
    idle: Idle,
    (info, state): (SlotInfo, StateRow),
) -> Result<Taken, Setback> {
    let from = noted(ground, &state).await?;
    let drains = state.needs_drain || info.confirmed > state.confirmed;
    let confirmed = if drains { Lsn::ZERO } else { info.confirmed.max(from) };
    let (streaming, progress, held) = idle.start(relay, from, confirmed).await?;
    // From here on pollers see that the slot is taken.
    ground.wait_for_pollers(&relay.settings.source.slot).await?;
    let drain = if drains { Some(drain_beside(relay, ground, &info).await?) } else { None };
    info!(slot = %relay.settings.source.slot, %confirmed, drain = drains, "the slot is ours");
    Ok(Taken { streaming, progress, held, state, new: false, confirmed, drain })
}

/// The position that the table says is confirmed. A slot keeps its own only at checkpoints, so that a server which
/// crashed finds an older one, and shows again what has its outcome: where the rows are gone by now, nothing tells that
/// it has. A position that this server's log has not reached yet is another server's.
async fn noted(ground: &Ground, row: &StateRow) -> Result<Lsn, Setback> {
    let (proven, end) = (row.proven(), slot::current_wal(&ground.control.client).await?);
    Ok(if proven <= end { proven } else { Lsn::ZERO })
}

/// Rows wait in the table that the slot does not show: it was confirmed past them on purpose, or it stands beyond what
/// the relay confirmed, because someone else advanced it or made it anew. Waiting rows are drained first. The log may
/// show some of them again: each batch is looked up.
async fn drain_beside(relay: &Relay, ground: &Ground, info: &SlotInfo) -> Result<Drain, Setback> {
    warn!(
        slot = %relay.settings.source.slot, confirmed = %info.confirmed,
        "the slot does not show every waiting row (it was moved, made anew, or confirmed past them); waiting rows are read \
         from the table first"
    );
    Drain::open(relay, ground, None, info.confirmed).await
}
