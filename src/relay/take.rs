//! Taking the slot: waiting for it, trusting it, or making it anew with a drain before it.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::drain::Drain;
use super::prepare::{self, Ground};
use super::{Relay, Setback};
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Socket};
use crate::postgres::names::literal;
use crate::postgres::outbox::StateRow;
use crate::postgres::slot::{self, SlotInfo};
use crate::postgres::wal::{WalConnection, WalStream};
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
    pub stream: WalStream<Socket>,
    pub held: Held,
    pub state: StateRow,
    /// The slot's confirmed position; zero when rows are drained first.
    pub confirmed: Lsn,
    /// Rows from before the slot.
    pub drain: Option<Drain>,
}

/// Waits until the slot is ours. `None`: the relay was asked to stop meanwhile.
pub async fn take_slot(relay: &mut Relay, ground: &Ground) -> Result<Option<Taken>, Setback> {
    let slot = relay.settings.source.slot.clone();
    let mut said = false;
    loop {
        let found = slot::slot_info(&ground.control.client, &slot).await?;
        if let Some(holder) = found.as_ref().and_then(|info| info.active_pid) {
            relay.health.clear(Condition::PostgresDown);
            // What was wrong with the slot ended our session; the one that holds it now answers for it.
            relay.health.clear(Condition::Slot);
            relay.health.set(State::Standby);
            // What was checked is fit: when the servers change hands, what they answer meanwhile is waited for.
            relay.ran = true;
            relay.metrics.slot_active.set(1.0);
            if !std::mem::replace(&mut said, true) {
                info!(slot, holder, "another process holds the slot; standing by");
            }
            tokio::select! {
                () = relay.stop.cancelled() => return Ok(None),
                () = tokio::time::sleep(STANDBY) => continue,
            }
        }
        match take(relay, ground, found).await {
            // Another relay was faster: 55006 the slot is in use, 42710 it was just made.
            Err(Setback::Replication(error)) if matches!(error.sqlstate(), Some("55006" | "42710")) => {}
            other => return other.map(Some),
        }
    }
}

/// Takes a slot that nobody holds: the one that exists, if it can be trusted, or a new one.
async fn take(relay: &Relay, ground: &Ground, found: Option<SlotInfo>) -> Result<Taken, Setback> {
    let source = &relay.settings.source;
    if let Some(info) = &found {
        prepare::check_slot(info, source)?;
    }
    let connection = connect::replication(&relay.postgres, &prepare::replication_session()).await?;
    let pid = connection.backend_pid;
    let mut wal = WalConnection::new(connection, prepare::message_cap(&relay.settings));
    let timeout = prepare::settle_replication(&mut wal, ground).await?;
    let row = ground.state(&source.slot).read().await?;
    let kept = found.filter(|info| !info.is_lost());
    let made = match kept {
        Some(_) => None,
        None => Some(make_slot(relay, ground, &mut wal).await?),
    };
    let from = match kept {
        Some(_) => noted(ground, &row).await?,
        None => Lsn::ZERO,
    };
    let stream = wal.start(&source.slot, &source.publication, from).await?;
    let since = Instant::now();
    // From here on pollers see that the slot is taken.
    ground.state(&source.slot).wait_for_pollers().await?;
    let drain = match (made, &kept) {
        (None, Some(info)) if row.needs_drain || info.confirmed > row.confirmed => {
            Some(drain_beside(relay, ground, info).await?)
        }
        (made, _) => made,
    };
    let confirmed = if drain.is_some() { Lsn::ZERO } else { kept.map_or(Lsn::ZERO, |info| info.confirmed.max(from)) };
    info!(slot = %source.slot, %confirmed, drain = drain.is_some(), "the slot is ours");
    Ok(Taken { stream, held: Held { pid, timeout, since }, state: row, confirmed, drain })
}

/// The position that the table says is confirmed. A slot keeps its own only at checkpoints, so that a server which crashed
/// finds an older one, and shows again what has its outcome: where the rows are gone by now, nothing tells that it has. A
/// position that this server's log has not reached yet is another server's.
async fn noted(ground: &Ground, row: &StateRow) -> Result<Lsn, Setback> {
    let end = slot::current_wal(&ground.control.client).await?;
    Ok(if row.confirmed <= end { row.proven() } else { Lsn::ZERO })
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

/// Makes the slot anew. The snapshot that it exports is the seam: rows that it shows are drained from the table, all
/// others come through the slot.
async fn make_slot(relay: &Relay, ground: &Ground, wal: &mut WalConnection<Socket>) -> Result<Drain, Setback> {
    let source = &relay.settings.source;
    if !source.create {
        return Err(Setback::Fatal(format!(
            "replication slot {:?} is missing, lost, or does not show every waiting row, and source.create = false keeps \
             the relay from making it; run: SELECT pg_create_logical_replication_slot({}, 'pgoutput')",
            source.slot,
            literal(&source.slot)
        )));
    }
    // Durable before the slot exists: a relay that dies during the drain leaves word for the next one.
    ground.state(&source.slot).set_needs_drain(true).await?;
    // Only a lost slot goes: another relay may have made the slot anew since, and not have begun to stream yet.
    let found = slot::slot_info(&ground.control.client, &source.slot).await?;
    if found.is_some_and(|info| info.is_lost() && info.active_pid.is_none()) {
        slot::drop_slot(&ground.control.client, &source.slot).await?;
    }
    let made = wal.query(&slot::create_command(source, ground.server.version)).await?;
    let mut fields = made.into_iter().flatten().flatten().skip(1);
    let (Some(Ok(point)), Some(snapshot)) = (fields.next().map(|text| text.parse()), fields.next()) else {
        return Err(Setback::Transient("PostgreSQL made the slot but did not say where it begins".to_owned()));
    };
    info!(slot = %source.slot, %point, "the slot was made; waiting rows from before it are read from the table");
    Drain::open(relay, ground, Some(&snapshot), point).await
}
