//! One session: from checked servers over the taken slot to the last settled event. Whatever breaks ends the session,
//! and the next one begins from what the table and the slot say.

use std::sync::atomic::Ordering as Atomic;

use tokio::sync::watch;

use super::deliver::{self, Deliver};
use super::prepare::{self, Ground};
use super::stages::{Parts, Progress, Stages, Streaming};
use super::take::{self, Taken};
use super::{Relay, Setback, beating, resume};
use crate::config::Ordering;
use crate::flow::delivery::Limits;
use crate::flow::lsn::Lsn;
use crate::telemetry::health::{Condition, State};

/// Runs one session. `Ok`: the relay was asked to stop.
pub async fn run(relay: &mut Relay, nats: &mut deliver::Nats) -> Result<(), Setback> {
    let pulse = relay.pulse.clone();
    let ground = beating(&pulse, prepare::check(relay)).await?;
    let Some(taken) = beating(&pulse, take::take_slot(relay, &ground)).await? else { return Ok(()) };
    relay.ran = true;
    relay.metrics.leader.set(1);
    let result = stream(relay, nats, &ground, taken).await;
    relay.metrics.leader.set(0);
    relay.metrics.forget_slot();
    if relay.stop.is_cancelled() { Ok(()) } else { result }
}

/// Streams until something ends, and brings what was sent to its end.
async fn stream(relay: &mut Relay, nats: &mut deliver::Nats, ground: &Ground, taken: Taken) -> Result<(), Setback> {
    let Taken { stream, held, state, confirmed, drain } = taken;
    let (progress, limits) = (Progress::new(confirmed), limits(relay));
    // Before anything that may take long: the server ends a connection on which it is not answered.
    let streaming = Streaming::start(relay, stream, held.timeout, &progress);
    relay.health.clear(Condition::PostgresDown);
    let begun = beating(&relay.pulse, resume::begin(relay, &nats.stream, ground, (&state, confirmed), limits)).await;
    let (delivery, known, proof_after) = match begun {
        Ok(begun) => begun,
        Err(setback) => {
            streaming.end().await;
            return Err(setback);
        }
    };
    let (seam, horizon) = (drain.as_ref().map(|drain| drain.point), delivery.horizon());
    let drained = clear_needs_drain(ground, &relay.settings.source.slot, seam, progress.safe.subscribe());
    progress.stream_seq.store(delivery.stream_seq(), Atomic::Relaxed);
    let (stages, wiring, watcher) =
        Stages::start(relay, nats, ground, Parts { streaming, held, drain, limits, progress });
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
    };
    relay.health.set(State::Running);
    let deliver = Deliver::new(delivery, known, nats, shared, wiring).run();
    let (next_token, trouble, cleared) = tokio::join!(deliver, watcher.run(), drained);
    let ended = stages.finish(relay, ground).await;
    relay.next_token = next_token;
    trouble.and(cleared).and(ended)?;
    Err(Setback::Transient("a stage of the session ended".to_owned()))
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

/// Once every row from before the slot has its outcome, the next session needs no drain.
async fn clear_needs_drain(
    ground: &Ground,
    slot: &str,
    seam: Option<Lsn>,
    mut safe: watch::Receiver<Lsn>,
) -> Result<(), Setback> {
    if let Some(seam) = seam
        && safe.wait_for(|&safe| safe >= seam).await.is_ok()
    {
        ground.state(slot).set_needs_drain(false).await?;
    }
    Ok(())
}
