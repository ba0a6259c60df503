//! While nothing can be delivered for long, the slot is kept within its bound: the log is confirmed, and rows wait in
//! the table for the drain that the state row asks for.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Relay, Setback, gauges, prepare};
use crate::flow::event::Change;
use crate::flow::lsn::Lsn;
use crate::pause::Repeats;
use crate::postgres::changes::Assembler;
use crate::postgres::connect::{self, SqlConnection};
use crate::postgres::outbox::{RelayState, Tables};
use crate::postgres::slot::{self, copies::copies};
use crate::postgres::wal::{self, WalConnection};

/// Between two looks at the slot.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Batches of changes on their way to be passed over.
const BATCHES: usize = 4;

/// Keeps the slot within `source.max_retained_wal` for as long as it is polled. Ends when a relay that begins finds
/// PostgreSQL unfit, which it need not wait for NATS to say.
pub async fn keep_bounded(relay: &Relay) -> Setback {
    let (mut repeats, mut fit) = (Repeats::default(), relay.ran);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        match look(relay, &mut fit).await {
            Ok(()) => _ = repeats.end(),
            Err(setback) if !setback.is_transient() && !relay.ran => return setback,
            Err(setback) => {
                relay.metrics.forget_slot();
                let reason = setback.to_string();
                if repeats.is_news(&reason, Instant::now()) {
                    warn!(reason, "NATS is away, and the slot cannot be looked at either");
                }
            }
        }
    }
}

/// `fit`: PostgreSQL was found to have what a session needs.
async fn look(relay: &Relay, fit: &mut bool) -> Result<(), Setback> {
    let control = if *fit {
        connect::sql(&relay.postgres, &prepare::control_session()).await?
    } else {
        prepare::check(relay).await?.control
    };
    *fit = true;
    let Some(info) = slot::slot_info(&control.client, &relay.settings.source.slot).await? else {
        relay.metrics.forget_slot();
        return Ok(());
    };
    gauges::show_slot(&relay.metrics, &info);
    let source = &relay.settings.source;
    gauges::show_standbys(&relay.metrics, copies(&control.client, &source.slot).await?, source.failover);
    let behind = u64::try_from(info.lag_bytes).unwrap_or(0);
    if behind > relay.settings.source.max_retained_wal && info.active_pid.is_none() && !info.is_lost() {
        prepare::check_slot(&info, &relay.settings.source)?;
        leave_to_table(relay, &control).await?;
    }
    Ok(())
}

/// Confirms the log up to the present without delivering what it shows. First the state row says so, durably.
pub async fn leave_to_table(relay: &Relay, control: &SqlConnection) -> Result<(), Setback> {
    let source = &relay.settings.source;
    let tables = Tables::of(&source.table);
    let state = RelayState { client: &control.client, tables: &tables, slot: &source.slot };
    state.read().await?;
    state.set_needs_drain(true).await?;
    let present = slot::current_wal(&control.client).await?;
    warn!(
        slot = %source.slot, bound_bytes = source.max_retained_wal, %present,
        "nothing can be delivered and the slot keeps more than source.max_retained_wal: the log is confirmed, and rows \
         wait in the table until they can be delivered"
    );
    let connection = connect::replication(&relay.postgres, &prepare::replication_session()).await?;
    let wal = WalConnection::new(connection, prepare::message_cap(&relay.settings));
    let stream = wal.start(&source.slot, &source.publication, Lsn::ZERO).await?;
    let (changes, received) = mpsc::channel(BATCHES);
    let (safe, confirmed) = watch::channel(Lsn::ZERO);
    // The state row asks for a drain, whatever the slot says.
    let (_, noted) = watch::channel(Lsn(u64::MAX));
    let stop = CancellationToken::new();
    let wiring = wal::Wiring { changes, safe: confirmed, noted, timeout: prepare::TIMEOUT, stop: stop.clone() };
    let streaming = stream.run(Assembler::new(source.table.clone()), wiring);
    let (ended, ()) = tokio::join!(streaming, pass_over(received, present, safe, stop));
    Ok(ended?)
}

/// Takes changes until the log's position `present` is reached.
async fn pass_over(
    mut changes: mpsc::Receiver<Vec<Change>>,
    present: Lsn,
    safe: watch::Sender<Lsn>,
    stop: CancellationToken,
) {
    while let Some(batch) = changes.recv().await {
        let ends = batch.iter().filter_map(|change| match change {
            Change::Commit { end_lsn } => Some(*end_lsn),
            Change::Mark(position) => Some(*position),
            Change::Begin { .. } | Change::Row(_) => None,
        });
        let Some(end) = ends.max() else { continue };
        safe.send_if_modified(|told| std::mem::replace(told, end.max(*told)) < end);
        if end >= present {
            break;
        }
    }
    stop.cancel();
}
