//! While events cannot be delivered or recorded for long, the slot is kept within its bound: the log is confirmed, and
//! rows wait in the table for the drain that the state row asks for.

use std::time::{Duration, Instant};

use tracing::warn;

use super::prepare::{self, answered};
use super::{Relay, Setback, gauges};
use crate::flow::lsn::Lsn;
use crate::pause::Repeats;
use crate::postgres::connect::{self, Session, SqlConnection};
use crate::postgres::outbox::{RelayState, Tables};
use crate::postgres::slot::{self, copies::copies};

/// Between two looks at the slot.
const LOOK_EVERY: Duration = Duration::from_secs(2);

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
    if !*fit {
        answered("it was checked", Box::pin(prepare::check(relay))).await?;
        *fit = true;
    }
    bound(relay).await
}

/// Looks at the slot. Where it keeps too much of the log and nobody streams from it, that is let go.
pub async fn bound(relay: &Relay) -> Result<(), Setback> {
    let (control, end) = answered("the slot was looked at", look_at_slot(relay)).await?;
    let Some(end) = end else { return Ok(()) };
    let advance = async {
        // The log may be long.
        let session = Session::new("outbox-relay away").with("statement_timeout", "0");
        let connection = connect::sql(&relay.postgres, &session).await?;
        Ok(slot::advance(&connection.client, &relay.settings.source.slot, end).await?)
    };
    tokio::select! {
        advanced = advance => advanced,
        silent = watch(relay, &control) => Err(silent),
    }
}

/// Connects, and looks at the slot. Where it keeps too much of the log, the state row says, durably, that rows are left
/// to the table; comes with the end of the log then.
async fn look_at_slot(relay: &Relay) -> Result<(SqlConnection, Option<Lsn>), Setback> {
    let control = connect::sql(&relay.postgres, &prepare::control_session()).await?;
    let (client, source) = (&control.client, &relay.settings.source);
    let Some(info) = slot::slot_info(client, &source.slot).await? else {
        relay.metrics.forget_slot();
        return Ok((control, None));
    };
    gauges::show_slot(&relay.metrics, &info);
    gauges::show_standbys(&relay.metrics, copies(client, &source.slot).await?, source.failover);
    let behind = u64::try_from(info.lag_bytes).unwrap_or(0);
    if behind <= source.max_retained_wal || info.active_pid.is_some() || info.is_lost() {
        return Ok((control, None));
    }
    prepare::check_slot(&info, source)?;
    let state = RelayState { client, tables: &Tables::of(&source.table), slot: &source.slot };
    state.read().await?;
    state.set_needs_drain(true).await?;
    let end = slot::current_wal(client).await?;
    warn!(
        slot = %source.slot, bound_bytes = source.max_retained_wal, present = %end,
        "events cannot be delivered or recorded, and the slot keeps more than source.max_retained_wal: the log is \
         confirmed, and rows wait in the table until they can be"
    );
    Ok((control, Some(end)))
}

/// Shows the slot while its log is let go. Ends when PostgreSQL does not answer any more.
async fn watch(relay: &Relay, control: &SqlConnection) -> Setback {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let look = async { Ok(slot::slot_info(&control.client, &relay.settings.source.slot).await?) };
        match answered("the log was let go", look).await {
            Ok(Some(info)) => gauges::show_slot(&relay.metrics, &info),
            Ok(None) => relay.metrics.forget_slot(),
            Err(setback) => return setback,
        }
    }
}
