//! One session: from checked servers over the taken slot to the last settled event. Whatever breaks ends the session,
//! and the next one begins from what the table and the slot say.

use std::pin::pin;
use std::sync::atomic::Ordering as Atomic;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::deliver::{self, Deliver};
use super::drain::Drain;
use super::prepare::{self, Ground, answered};
use super::resume::{self, Begun};
use super::setback::recovered;
use super::stages::{Parts, Progress, Stages, Streaming};
use super::take::{self, Claim, Taken};
use super::watcher::Watcher;
use super::{Relay, Setback, beating, rounds};
use crate::config::Ordering;
use crate::flow::delivery::Limits;
use crate::flow::lsn::Lsn;
use crate::pause::Pause;
use crate::postgres::connect::{self, Session};
use crate::postgres::outbox::{RelayState, StateRow};
use crate::telemetry::health::State;

/// Runs one session. `Ok`: the relay was asked to stop.
pub async fn run(relay: &mut Relay, nats: &mut deliver::Nats) -> Result<(), Setback> {
    let pulse = relay.pulse.clone();
    let ground = beating(&pulse, answered("it was checked", Box::pin(prepare::check(relay)))).await?;
    let result = match beating(&pulse, Box::pin(take::take_slot(relay, &ground))).await {
        Ok(Some(claim)) => {
            relay.ran = true;
            relay.metrics.leader.set(1);
            hold(relay, nats, &ground, claim).await
        }
        Ok(None) => Ok(()),
        Err(setback) => Err(setback),
    };
    match result {
        Err(setback) if !relay.stop.is_cancelled() => {
            Err(beating(&pulse, prepare::told_of_locks(&ground.control.client, &ground.tables, setback)).await)
        }
        _ => Ok(()),
    }
}

/// From when the slot's name is ours until something ends.
async fn hold(relay: &Relay, nats: &mut deliver::Nats, ground: &Ground, claim: Claim) -> Result<(), Setback> {
    let taken = match claim {
        Claim::Taken(taken) => *taken,
        Claim::Making(making) => Box::pin(rounds::run(relay, nats, ground, making)).await?,
    };
    let ended = Box::pin(stream(relay, nats, ground, taken)).await;
    if matches!(ended, Err(Setback::SourceChanged)) {
        // Rows may have been written that the log does not show. Not before all that belongs to this session has ended:
        // the end of its own drain says the opposite.
        let state = ground.state(&relay.settings.source.slot);
        let note = answered("a change was noted", async { Ok(state.set_needs_drain(true).await?) });
        beating(&relay.pulse, note).await?;
    }
    ended
}

/// Streams until something ends, and brings what was sent to its end.
async fn stream(relay: &Relay, nats: &mut deliver::Nats, ground: &Ground, taken: Taken) -> Result<(), Setback> {
    let Taken { streaming, progress, held, state, new, confirmed, drain } = taken;
    // From when the slot was taken, not from when all is ready.
    let (alive, fence) = watch::channel(held.since);
    let watcher = Watcher {
        ground,
        source: &relay.settings.source,
        held,
        metrics: &relay.metrics,
        health: &relay.health,
        alive,
        stop: streaming.stop.clone(),
        wal_stop: streaming.wal_stop.clone(),
    };
    let seam = drain.as_ref().map(|drain| drain.point);
    let drained = clear_needs_drain(relay, ground, seam, progress.safe.subscribe(), streaming.stop.clone());
    let beside = async { tokio::join!(watcher.run(), drained).0 };
    let timeout = held.timeout;
    let leg = Leg { streaming, progress, drain, fence, timeout, state, new, confirmed, horizon: None };
    let ((), why) = Box::pin(flow(relay, nats, ground, leg, beside)).await?;
    Err(Setback::Transient(why.unwrap_or("a stage of the session ended").to_owned()))
}

/// What rows flow from, and where they begin.
pub struct Leg {
    pub streaming: Streaming,
    pub progress: Progress,
    /// Rows that come before those of the stream.
    pub drain: Option<Drain>,
    /// When the slot was last seen to be ours.
    pub fence: watch::Receiver<Instant>,
    /// The session's `wal_sender_timeout`.
    pub timeout: Duration,
    pub state: StateRow,
    /// The slot was made for this session, or is not made yet.
    pub new: bool,
    pub confirmed: Lsn,
    /// What comes before this may have been sent by an earlier session; `None`: what is in the log by now.
    pub horizon: Option<Lsn>,
}

/// Lets rows flow until something ends, and brings what was sent to its end. What goes on beside it has to end with the
/// streaming's `stop`. Returns what that gave, and what of the stream ended it.
pub async fn flow<T>(
    relay: &Relay,
    nats: &mut deliver::Nats,
    ground: &Ground,
    leg: Leg,
    beside: impl Future<Output = Result<T, Setback>>,
) -> Result<(T, Option<&'static str>), Setback> {
    let Leg { streaming, progress, drain, fence, timeout, state, new, confirmed, horizon } = leg;
    let limits = limits(relay);
    recovered(&relay.health);
    // Before the stream is looked at over it.
    let epoch = nats.link.borrow().epoch;
    let begin = resume::begin(relay, nats, ground, (&state, new), (confirmed, horizon), limits);
    // Where PostgreSQL does not answer any more, the stream notices.
    let stop = streaming.stop.clone();
    let begun = match beating(&relay.pulse, stop.run_until_cancelled(begin)).await {
        Some(begun) => begun,
        None => Err(Setback::Transient("the session ended before it began".to_owned())),
    };
    let Begun { delivery, known, proof_after, stream_created } = match begun {
        Ok(begun) => begun,
        Err(setback) => {
            beating(&relay.pulse, streaming.end(relay, ground)).await?;
            return Err(setback);
        }
    };
    nats.went_back = false;
    let horizon = delivery.horizon();
    progress.stream_seq.store(delivery.stream_seq(), Atomic::Relaxed);
    let parts = Parts { streaming, drain, limits, progress, fence, fence_limit: timeout * 2 / 3, horizon };
    let (stages, wiring) = Stages::start(relay, nats, ground, parts);
    let shared = deliver::Shared {
        ground,
        postgres: &relay.postgres,
        router: &relay.router,
        settings: &relay.settings,
        metrics: &relay.metrics,
        health: &relay.health,
        pulse: &relay.pulse,
        horizon,
        proof_after,
        stream_created,
        epoch,
    };
    relay.health.set(State::Running);
    let deliver = Box::pin(Deliver::new(delivery, known, nats, shared, wiring).run());
    // Delivery has its own beat. What goes on beside it may end later.
    let (deliver::Ended { next_token, why }, beside) = match select(deliver, pin!(beside)).await {
        Either::Left((ended, beside)) => (ended, beating(&relay.pulse, beside).await),
        Either::Right((beside, deliver)) => (deliver.await, beside),
    };
    relay.metrics.forget_delivery();
    let ended = beating(&relay.pulse, stages.finish(relay, ground)).await;
    relay.next_token.store(next_token, Atomic::Relaxed);
    let value = beside?;
    ended?;
    Ok((value, why))
}

fn limits(relay: &Relay) -> Limits {
    let delivery = &relay.settings.delivery;
    Limits {
        events: delivery.max_in_flight,
        bytes: delivery.max_in_flight_bytes,
        ordered: delivery.ordering == Ordering::Aggregate,
        held: delivery.max_blocked_rows,
    }
}

/// Once every row from before the slot has its outcome, the next session needs no drain. Someone may hold the lock of
/// the row that says so: on a connection of its own, this keeps nobody else waiting, and is tried until it is done.
async fn clear_needs_drain(
    relay: &Relay,
    ground: &Ground,
    seam: Option<Lsn>,
    mut safe: watch::Receiver<Lsn>,
    stop: CancellationToken,
) {
    let Some(seam) = seam else { return };
    // What is lent by the channel keeps its sender waiting: it is given back at once.
    let passed = async { safe.wait_for(|&safe| safe >= seam).await.is_ok() };
    if stop.run_until_cancelled(passed).await != Some(true) {
        return;
    }
    let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(5));
    while !stop.is_cancelled() {
        match note_drained(relay, ground).await {
            Ok(()) => return,
            Err(error) => debug!(%error, "that waiting rows are drained could not be noted; it is tried again"),
        }
        stop.run_until_cancelled(tokio::time::sleep(pause.next())).await;
    }
}

/// Not given up while the server may still carry it out: it would say of the next session what is true of this one
/// only.
async fn note_drained(relay: &Relay, ground: &Ground) -> Result<(), Setback> {
    let note = async {
        let connection = connect::sql(&relay.postgres, &note_session()).await?;
        let (client, tables, slot) = (&connection.client, &ground.tables, &*relay.settings.source.slot);
        Ok(RelayState { client, tables, slot }.set_needs_drain(false).await?)
    };
    // Longer than the statement's own limit, and shorter than a session may take to end.
    let noted = tokio::time::timeout(Duration::from_secs(15), note).await;
    noted.unwrap_or_else(|_| Err(Setback::PostgresLost("PostgreSQL does not answer".to_owned())))
}

/// The session that notes the end of a drain.
fn note_session() -> Session {
    Session::new("outbox-relay drained").with("lock_timeout", "100ms").with("statement_timeout", "10s")
}
