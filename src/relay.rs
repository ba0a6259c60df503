//! The wiring: tasks, channels, start and shutdown order. The only module that knows every stage.

mod announce;
mod away;
mod deliver;
mod drain;
mod gauges;
mod make;
mod prepare;
mod reach;
mod resume;
mod rounds;
mod session;
mod stages;
mod take;
pub mod verify;
mod watcher;
mod writeback;

use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::admin::{Admin, AdminError};
use crate::config::{Check, Secret, Settings};
use crate::flow::route::{CompensationRoute, Router, TemplateError};
use crate::pause::{Pause, Repeats};
use crate::postgres::connect::{self, ConnectError, ConnectInfoError, Session, Target};
use crate::postgres::migrate::{self, MigrateError, Report};
use crate::postgres::names;
use crate::postgres::wal::WalError;
use crate::telemetry::health::{Condition, Health, Pulse, State};
use crate::telemetry::metrics::{Metrics, peer};
use crate::telemetry::status::Board;
use crate::telemetry::systemd::Manager;

/// The checks of settings that belong to the stages: what a stage would refuse is found before any is started.
pub const CHECKS: &[Check] = &[
    Check { keys: &["route.subject"], test: |settings| problem("route.subject", &router(settings)) },
    Check { keys: &["route.source"], test: |settings| problem("route.source", &router(settings)) },
    Check {
        keys: &["compensation.subject"],
        test: |settings| problem("compensation.subject", &CompensationRoute::new(&settings.compensation.subject)),
    },
    Check { keys: &["postgres.url", "postgres.password"], test: |settings| valid(&postgres_target(settings)) },
    Check {
        keys: &["postgres.replication_url", "postgres.password"],
        test: |settings| match settings.postgres.replication_url {
            Some(_) => valid(&direct_target(settings)),
            None => Ok(()),
        },
    },
    Check { keys: &["source.table"], test: |settings| names::problem(&settings.source.table).map_or(Ok(()), Err) },
];

/// What is wrong with this key of those that make a route.
fn problem<T>(key: &str, made: &Result<T, TemplateError>) -> Result<(), String> {
    match made {
        Err(mistake) if mistake.key == key => Err(mistake.problem.clone()),
        _ => Ok(()),
    }
}

fn valid<T, E: Display>(made: &Result<T, E>) -> Result<(), String> {
    made.as_ref().map(|_| ()).map_err(ToString::to_string)
}

/// What gives events their subjects.
pub fn router(settings: &Settings) -> Result<Router, TemplateError> {
    let route = &settings.route;
    Router::new(&route.subject, route.cloudevents, &route.source, &settings.nats.stream)
}

/// A filter that covers every subject which `route.subject` can make.
///
/// # Errors
/// When the template is wrong.
pub fn subject_filter(settings: &Settings) -> Result<String, RunError> {
    router(settings).map(|router| router.subject_filter()).map_err(|mistake| RunError::Unusable(mistake.to_string()))
}

/// Where compensations are sent; `None`: they are not this relay's.
pub fn compensation_route(settings: &Settings) -> Result<Option<CompensationRoute>, TemplateError> {
    let compensation = &settings.compensation;
    compensation.enabled.then(|| CompensationRoute::new(&compensation.subject)).transpose()
}

/// Where the tables are.
///
/// # Errors
/// When the address cannot be read, or what it names does not exist.
pub fn postgres_target(settings: &Settings) -> Result<Target, ConnectInfoError> {
    target(settings, &settings.postgres.url)
}

/// Where PostgreSQL itself answers. A pooler passes neither replication on nor what a session sets for itself, so that
/// all connections of a running relay go here.
///
/// # Errors
/// As [`postgres_target`].
pub fn direct_target(settings: &Settings) -> Result<Target, ConnectInfoError> {
    target(settings, settings.postgres.replication_url.as_ref().unwrap_or(&settings.postgres.url))
}

fn target(settings: &Settings, url: &Secret) -> Result<Target, ConnectInfoError> {
    Target::parse(&url.0, settings.postgres.password.as_ref().map(|password| &*password.0))
}

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
    #[error("{0}")]
    Failed(String),
    #[error(transparent)]
    Admin(#[from] AdminError),
    #[error(transparent)]
    Connect(#[from] ConnectError),
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

/// Why a session ended, or did not begin.
#[derive(Debug, thiserror::Error)]
enum Setback {
    /// Passes: the next session may work.
    #[error("{0}")]
    Transient(String),
    /// Does not pass without an operator.
    #[error("{0}")]
    Fatal(String),
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error(transparent)]
    Replication(#[from] WalError),
    /// Nothing can be delivered, and the log grows behind the slot.
    #[error("the slot keeps more of the log than source.max_retained_wal while nothing can be delivered")]
    TooMuchRetained,
    /// What was inserted since may not be in the log.
    #[error("the outbox table or its publication was changed or made anew; both are checked again")]
    SourceChanged,
    #[error("PostgreSQL: {}", crate::postgres::describe(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Schema(#[from] MigrateError),
}

impl Setback {
    fn is_transient(&self) -> bool {
        match self {
            Self::Transient(_) | Self::TooMuchRetained | Self::SourceChanged => true,
            Self::Connect(error) => error.is_transient(),
            Self::Replication(error) => error.is_transient(),
            Self::Sql(error) | Self::Schema(MigrateError::Database { source: error, .. }) => may_pass(error),
            Self::Fatal(_) | Self::Schema(_) => false,
        }
    }
}

/// Whether a statement that the server refused may work later. Class 42: what is named does not exist, or may not be
/// used.
fn may_pass(error: &tokio_postgres::Error) -> bool {
    !error.code().is_some_and(|code| code.code().starts_with("42"))
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
    let (mut nats, mut repeats) = (None, Repeats::default());
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
        recover(&relay, setback, pause.next(), &mut repeats).await;
    }
    info!("stopped");
    Ok(())
}

/// Between a session that ended and the next one.
async fn recover(relay: &Relay, setback: Setback, wait: Duration, repeats: &mut Repeats) {
    relay.health.set(State::Starting);
    // The next session finds out by itself whether anything is accepted.
    relay.health.clear(Condition::Holding);
    relay.health.clear(Condition::Locked);
    if matches!(setback, Setback::TooMuchRetained) {
        relay.health.note("slot", setback.to_string());
        let confirm = async {
            let control = connect::sql(&relay.postgres, &prepare::control_session()).await?;
            away::leave_to_table(relay, &control).await
        };
        if let Err(failed) = beating(&relay.pulse, confirm).await {
            warn!(reason = %failed, "the log could not be confirmed; it is tried again");
        }
    } else {
        let reason = setback.to_string();
        if repeats.is_news(&reason, Instant::now()) {
            warn!(reason, "the session ended; the next one begins soon");
        } else {
            debug!(reason, "the session did not begin, as before; the next one begins soon");
        }
        relay.health.raise(Condition::PostgresDown, reason);
        relay.metrics.reconnects.of(peer::POSTGRES).inc();
    }
    beating(&relay.pulse, relay.stop.run_until_cancelled(tokio::time::sleep(wait))).await;
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

/// Brings the outbox's tables up to date; with `dry_run` it only says what it would do.
///
/// # Errors
/// When the server cannot be reached, or refuses.
pub async fn migrate(settings: &Settings, dry_run: bool) -> Result<Report, RunError> {
    let target = postgres_target(settings).map_err(|mistake| RunError::Unusable(mistake.to_string()))?;
    let mut connection = connect::sql(&target, &Session::new("outbox-relay migrate")).await?;
    let report = migrate::migrate(&mut connection.client, &settings.source.table, dry_run).await?;
    connection.close().await;
    Ok(report)
}
