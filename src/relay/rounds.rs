//! Rounds: while the slot is being made, waiting rows are delivered from the table, one bounded round after the other.
//!
//! A round begins when nothing of the one before is to be sent any more, and reads from the lowest id on, so that it
//! misses no row that an old transaction has committed meanwhile. Rows whose outcome is known and not written yet,
//! since someone holds their lock, are passed over. When the slot is made, the rows under way come to their end first.
//! Then the drain of the slot's snapshot looks each row up, and finds those of the rounds done.

use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::make::{Made, Making};
use super::prepare::{self, Ground, answered};
use super::session::{self, Leg};
use super::stages::{Progress, Streaming};
use super::take::Taken;
use super::{Relay, Setback, beating, deliver, drain};
use crate::flow::event::Change;
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Target};
use crate::postgres::outbox::{StateRow, Tables, WaitingRows};
use crate::postgres::{describe, slot, waits};
use crate::telemetry::health::{Condition, Health};

/// Rows in one round, at most: its snapshot is held for as long as they take to be read.
pub const ROUND_ROWS: usize = 50_000;
/// Rounds have no place in the log. They are counted; from here on, once one has found less than it could hold: what an
/// earlier session may have left in the stream has its outcome then.
pub const WHOLE: Lsn = Lsn(1 << 62);
/// A round reads the whole table when little waits in it: the rest lasts so many times as long.
const REST: u32 = 4;
const REST_MAX: Duration = Duration::from_mins(1);
/// Between two looks at what the slot waits for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between two lines of the log about it.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// Delivers rows until the slot is made and streams.
pub async fn run(
    relay: &Relay,
    nats: &mut deliver::Nats,
    ground: &Ground,
    mut making: Making,
) -> Result<Taken, Setback> {
    let (slot, held) = (&relay.settings.source.slot, making.held);
    let state = read_state(relay, ground).await?;
    let (progress, sent) = Progress::of_rounds();
    let streaming = stream(relay, ground, sent, making.little.clone());
    let stop = streaming.stop.clone();
    let (alive, fence) = watch::channel(held.since);
    let watch = Watch { ground, slot, health: &relay.health, alive, stop: &stop };
    let made = async {
        let taken = match watch.run(&mut making).await {
            Ok(made) => answered("the new slot was taken", making.start(relay, ground, made)).await,
            Err(setback) => Err(setback),
        };
        // What the round has sent comes to its end.
        stop.cancel();
        taken
    };
    let (confirmed, horizon) = (Lsn::ZERO, Some(WHOLE));
    let (drain, timeout) = (None, held.timeout);
    let leg = Leg { streaming, progress, drain, fence, timeout, state, new: true, confirmed, horizon };
    match session::flow(relay, nats, ground, leg, made).await {
        // The rounds have moved the row on.
        Ok((taken, _)) => Ok(Taken { state: read_state(relay, ground).await?, ..taken }),
        Err(setback) => {
            making.give_up(ground).await;
            Err(setback)
        }
    }
}

/// The relay's row of state as it is now.
async fn read_state(relay: &Relay, ground: &Ground) -> Result<StateRow, Setback> {
    let state = ground.state(&relay.settings.source.slot);
    let read = answered("the relay's row of state was read", async { Ok(state.read().await?) });
    beating(&relay.pulse, read).await
}

/// Starts to read rounds, where a session otherwise streams the log.
fn stream(relay: &Relay, ground: &Ground, sent: watch::Receiver<Lsn>, little: CancellationToken) -> Streaming {
    let reader = Reader {
        target: relay.postgres.clone(),
        tables: ground.tables.clone(),
        cap: prepare::message_cap(&relay.settings),
        interval: relay.settings.reconcile.interval,
        little,
    };
    Streaming::of(relay, drain::BATCHES, |changes, stop, end| async move {
        if let Some(Err(error)) = end.run_until_cancelled(reader.run(changes, sent)).await {
            warn!(%error, "waiting rows could not be read; the session ends");
        }
        stop.cancel();
        Ok(())
    })
}

/// Reads the rounds.
struct Reader {
    target: Target,
    tables: Tables,
    /// Bytes of a payload beyond which it is not read.
    cap: usize,
    /// Between two rounds, at least, when little waits.
    interval: Duration,
    /// Called when little waits.
    little: CancellationToken,
}

/// Why no more rounds are read.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error("{0}")]
    Connect(#[from] connect::ConnectError),
    #[error("{}", describe(.0))]
    Sql(#[from] tokio_postgres::Error),
}

impl Reader {
    /// Runs until nobody takes the rows in any more.
    async fn run(self, changes: mpsc::Sender<Vec<Change>>, mut sent: watch::Receiver<Lsn>) -> Result<(), Interrupted> {
        let connection = connect::sql(&self.target, &drain::session()).await?;
        let mut last = Lsn::ZERO;
        loop {
            let began = Instant::now();
            let end = |rows| Lsn(last.0 + 1).max(if rows < ROUND_ROWS { WHOLE } else { Lsn::ZERO });
            let rows = WaitingRows::read(&connection.client, &self.tables, self.cap, Some(ROUND_ROWS)).await?;
            let Some(rows) = drain::hand_on(rows, end, &changes).await? else { return Ok(()) };
            let (took, end) = (began.elapsed(), end(rows));
            if sent.wait_for(|&sent| sent >= end).await.is_err() {
                return Ok(());
            }
            last = end;
            if rows == ROUND_ROWS {
                info!(rows, "waiting rows were delivered from the table while the slot is being made");
            } else {
                self.little.cancel();
                tokio::time::sleep(self.interval.max((took * REST).min(REST_MAX))).await;
            }
        }
    }
}

/// Looks at the slot that is being made: is it still ours, and what does it wait for?
struct Watch<'a> {
    ground: &'a Ground,
    slot: &'a str,
    health: &'a Health,
    /// When the slot was last seen to be ours.
    alive: watch::Sender<Instant>,
    stop: &'a CancellationToken,
}

impl Watch<'_> {
    /// Returns once the slot is made.
    async fn run(&self, making: &mut Making) -> Result<Made, Setback> {
        let every = LOOK_EVERY.min(making.held.timeout / 6);
        let mut said = None;
        loop {
            let asked = Instant::now();
            let look = tokio::time::timeout(making.held.timeout, self.look(making, &mut said));
            match look.await {
                Ok(Ok(())) => {}
                // Made in this very moment, it is nobody's until it streams; and between its name and itself it is not
                // there.
                Ok(Err(trouble)) => match tokio::time::timeout(LOOK_EVERY, making.made()).await {
                    Ok(made) => return made,
                    Err(_) if self.look(making, &mut said).await.is_ok() => {}
                    Err(_) => return Err(trouble),
                },
                Err(_) => {
                    // Others may wait for an answer on this connection as well.
                    self.ground.control.driver.abandon();
                    let timeout = making.held.timeout;
                    return Err(Setback::PostgresLost(format!("PostgreSQL did not answer for {timeout:?}")));
                }
            }
            self.alive.send_replace(asked);
            tokio::select! {
                made = making.made() => return made,
                () = self.stop.cancelled() => return Err(Setback::Transient("a stage of the session ended".to_owned())),
                reason = self.ground.control.driver.closed() => {
                    return Err(Setback::PostgresLost(format!("PostgreSQL: {reason}")));
                }
                () = tokio::time::sleep(every) => {}
            }
        }
    }

    /// Is it ours? Says what it waits for.
    async fn look(&self, making: &Making, said: &mut Option<Instant>) -> Result<(), Setback> {
        let pid = making.held.pid;
        let client = &self.ground.control.client;
        let found = slot::slot_info(client, self.slot).await?;
        if found.is_none_or(|info| info.active_pid != Some(pid)) {
            return Err(Setback::SlotLost("the replication slot was lost while it was being made"));
        }
        let waits = waits::for_old_transactions(client, pid).await?;
        let reason = match waits {
            Some(waits) => format!("{waits}; waiting rows are delivered from the table meanwhile"),
            None => making.reason(),
        };
        if said.is_none_or(|said| said.elapsed() > SAY_EVERY) {
            *said = Some(Instant::now());
            warn!(slot = self.slot, "{reason}");
        }
        self.health.raise(Condition::Slot, reason);
        Ok(())
    }
}
