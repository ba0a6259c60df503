//! The wiring: tasks, channels, start and shutdown order. The only module that knows every stage.

mod announce;
mod away;
mod deliver;
mod drain;
mod gauges;
mod make;
mod migrate;
mod parts;
mod prepare;
mod reach;
mod resume;
mod rounds;
mod session;
mod setback;
mod stages;
mod take;
pub mod verify;
mod watcher;
mod writeback;

pub use migrate::migrate;
pub use parts::{CHECKS, compensation_route, direct_target, postgres_target, router, subject_filter};

use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use setback::{Setback, say_why};

use crate::admin::{Admin, AdminError};
use crate::config::Settings;
use crate::flow::route::{CompensationRoute, Router};
use crate::pause::{Pause, Repeats};
use crate::postgres::connect::{ConnectError, Target};
use crate::postgres::migrate::MigrateError;
use crate::telemetry::health::{Condition, Health, Pulse, State};
use crate::telemetry::metrics::{Metrics, peer};
use crate::telemetry::status::Board;
use crate::telemetry::systemd::Manager;

/// What the connection that holds the slot calls itself, unless the address names another.
pub const APPLICATION: &str = "outbox-relay";

/// A session of so long was a good one: the next follows soon.
const LONG: Duration = Duration::from_secs(10);

/// Why the relay ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The settings cannot work, whatever the servers do. A restart does not mend it.
    #[error("{0}")]
    Unusable(String),
    /// What the servers have, or allow, does not fit, and has to be mended there.
    #[error("{0}")]
    Failed(String),
    /// `admin.listen` cannot be served.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// PostgreSQL cannot be reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The tables could not be brought up to date.
    #[error(transparent)]
    Migrate(#[from] MigrateError),
}

impl RunError {
    /// What the program ends with.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Unusable(_) => 78,
            Self::Failed(_) | Self::Admin(_) | Self::Connect(_) | Self::Migrate(_) => 1,
        }
    }
}

/// What outlives a session.
struct Relay {
    settings: Settings,
    /// PostgreSQL itself, for every connection of a session.
    postgres: Target,
    router: Router,
    compensations: Option<CompensationRoute>,
    metrics: Metrics,
    health: Health,
    pulse: Pulse,
    stop: CancellationToken,
    /// Whether the last session took the slot, or stood by for it.
    ran: bool,
    /// The first token that no event had yet.
    next_token: AtomicU64,
}

/// Runs the relay until it is told to stop (SIGTERM or SIGINT).
///
/// # Errors
/// When the settings, a server or the set-up are unfit at the start.
pub async fn run(settings: Settings) -> Result<(), RunError> {
    let stop = CancellationToken::new();
    let signals = tokio::spawn(stop_on_signal(stop.clone()));
    let result = run_watched(settings, stop, Manager::of_environment()).await;
    signals.abort();
    result
}

/// Runs the relay until `stop` is called. A runtime of its own serves it best: see [`crate::pace`].
///
/// # Errors
/// As [`run`].
pub async fn run_until(settings: Settings, stop: CancellationToken) -> Result<(), RunError> {
    run_watched(settings, stop, None).await
}

/// The same, watched by a service manager: it started the process, which is its program's own affair.
async fn run_watched(settings: Settings, stop: CancellationToken, manager: Option<Manager>) -> Result<(), RunError> {
    let (health, pulse, metrics) = (Health::default(), Pulse::default(), Metrics::new());
    let admin_stop = CancellationToken::new();
    let told = manager.map(|manager| tokio::spawn(manager.tell(health.clone(), pulse.clone(), admin_stop.clone())));
    let admin = match settings.admin.listen {
        Some(listen) => {
            let board = Board::new(health.clone(), pulse.clone(), metrics.clone(), &settings);
            let admin = Admin::bind(listen, board).await?;
            Some(tokio::spawn(admin.serve(admin_stop.clone())))
        }
        None => None,
    };
    let grace = settings.shutdown.grace;
    let overdue = async {
        stop.cancelled().await;
        health.set(State::Stopping);
        info!("stopping: what was sent is brought to its end");
        tokio::time::sleep(grace).await;
    };
    let result = tokio::select! {
        result = serve(settings, health.clone(), pulse, metrics, stop.clone()) => result,
        () = overdue => {
            warn!(?grace, "the grace period is over; what is not settled is sent again by the next run");
            Ok(())
        }
    };
    admin_stop.cancel();
    for watching in admin.into_iter().chain(told) {
        let _ = watching.await;
    }
    result
}

/// Session after session, with a pause where one fails.
async fn serve(
    settings: Settings,
    health: Health,
    pulse: Pulse,
    metrics: Metrics,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let unusable = |mistake: &dyn Display| RunError::Unusable(mistake.to_string());
    let postgres = direct_target(&settings).map_err(|mistake| unusable(&mistake))?;
    let router = router(&settings).map_err(|mistake| unusable(&mistake))?;
    let compensations = compensation_route(&settings).map_err(|mistake| unusable(&mistake))?;
    let mut relay = Relay {
        settings,
        postgres,
        router,
        compensations,
        metrics,
        health,
        pulse,
        stop,
        ran: false,
        next_token: AtomicU64::new(0),
    };
    let mut pause = Pause::new(Duration::from_millis(200), Duration::from_secs(5));
    let (mut nats, mut repeats, mut failed) = (None, Repeats::default(), 0_u32);
    while !relay.stop.is_cancelled() {
        nats = tokio::select! {
            biased;
            reached = reach::reach(&relay, nats) => reached?,
            unfit = away::keep_bounded(&relay) => return Err(RunError::Failed(unfit.to_string())),
        };
        let Some(nats) = &mut nats else { break };
        let ran = std::mem::take(&mut relay.ran);
        let began = Instant::now();
        // On the heap, as is each part of it that is large: threads of embedding programs may have little stack.
        let ended = Box::pin(session::run(&mut relay, nats)).await;
        // Old values would look like good news.
        relay.metrics.leader.set(0);
        relay.metrics.forget_slot();
        let Err(setback) = ended else { break };
        if began.elapsed() > LONG {
            pause.reset();
        }
        if relay.ran {
            // This one had come far: its end is news.
            repeats.end();
        }
        // What is unfit at the start ends the relay; what becomes unfit later is waited for.
        relay.ran |= ran;
        if !setback.is_transient() && !relay.ran {
            return Err(RunError::Failed(setback.to_string()));
        }
        // While no session comes to let rows flow, nobody else keeps the log within its bound. One may be a chance.
        failed = match relay.health.state() {
            State::Running | State::Standby if setback.is_transient() => 0,
            _ if setback.is_away() => failed,
            _ => failed.saturating_add(1),
        };
        let stuck = matches!(setback, Setback::TooMuchRetained) || (failed > 1 && !setback.is_away());
        recover(&relay, setback, stuck, pause.next(), &mut repeats).await;
    }
    info!("stopped");
    Ok(())
}

/// Between a session that ended and the next one. `stuck`: the log is to be kept within its bound meanwhile.
async fn recover(relay: &Relay, setback: Setback, stuck: bool, wait: Duration, repeats: &mut Repeats) {
    relay.health.set(State::Starting);
    // The next session finds out by itself whether anything is accepted.
    relay.health.clear(Condition::Holding);
    relay.health.clear(Condition::Locked);
    let reason = setback.to_string();
    if matches!(setback, Setback::TooMuchRetained) {
        relay.health.note("slot", reason);
    } else {
        if repeats.is_news(&reason, Instant::now()) {
            warn!(reason, "the session ended; the next one begins soon");
        } else {
            debug!(reason, "the session did not begin, as before; the next one begins soon");
        }
        say_why(&relay.health, &setback);
        relay.metrics.reconnects.of(peer::POSTGRES).inc();
    }
    let rest = async {
        if stuck && let Err(failed) = away::bound(relay).await {
            let reason = failed.to_string();
            if repeats.is_news(&reason, Instant::now()) {
                warn!(reason, "the slot cannot be kept within its bound; it is tried again");
            }
        }
        tokio::time::sleep(wait).await;
    };
    beating(&relay.pulse, relay.stop.run_until_cancelled(rest)).await;
}

/// Keeps the pulse going while something is waited for that may honestly take long.
async fn beating<T>(pulse: &Pulse, waited_for: impl Future<Output = T>) -> T {
    let mut beat = tokio::time::interval(Duration::from_secs(1));
    tokio::pin!(waited_for);
    loop {
        tokio::select! {
            done = &mut waited_for => return done,
            _ = beat.tick() => pulse.tick(),
        }
    }
}

async fn stop_on_signal(stop: CancellationToken) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        warn!("signals cannot be received: only kill -9 will end the relay");
        return;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.cancel();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_waits_for_long_lives() {
        let pulse = Pulse::of_age(Duration::from_mins(1));
        let ticked = async {
            while pulse.age() > Duration::from_secs(30) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), beating(&pulse, ticked)).await.unwrap();
    }
}
