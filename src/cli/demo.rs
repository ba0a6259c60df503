//! `outbox-relay demo`: a shop's orders, from producers' commits to a subscriber, through a relay in this process.
//!
//! It works in a schema, slot, publication and stream of its own, and removes them at its end, also after Ctrl-C.

mod ledger;
mod screen;
mod shop;

use std::io;
use std::time::{Duration, Instant};

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use self::ledger::{Ledger, Summary};
use self::screen::Screen;
use super::{block_on, log_warnings};
use crate::config::value::Shown;
use crate::config::{Loaded, Manage, OnSuccess, Settings, Storage, TableName, entries};
use crate::fault::Failure;
use crate::nats;
use crate::nats::connect::{ConnectFault, Connection};
use crate::nats::demo::Listener;
use crate::nats::stream::Stream;
use crate::pace;
use crate::postgres::connect::{ConnectError, ConnectInfoError, Target};
use crate::postgres::demo::{self, Overseer};
use crate::postgres::store::EnqueueError;
use crate::relay::{self, RunError};

/// From the start of the relay until it streams.
const START: Duration = Duration::from_mins(1);
/// The longest wait for the next event, and for the last rows to be completed.
const SILENCE: Duration = Duration::from_secs(20);
/// How long the relay may take to end.
const GRACE: Duration = Duration::from_secs(5);

/// Why the demo did not end well.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    #[error(
        "the demo needs a PostgreSQL and a NATS server: {0}\nRun `make demo`, which brings servers of its own, or name \
         yours with DATABASE_URL and NATS_URL"
    )]
    Unreachable(String),
    #[error(transparent)]
    Settings(#[from] ConnectInfoError),
    #[error("PostgreSQL: {}", crate::postgres::describe(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error(transparent)]
    Enqueue(#[from] EnqueueError),
    #[error("NATS: {}", super::hinted(.0))]
    Nats(#[from] Failure),
    #[error(transparent)]
    Run(#[from] RunError),
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    #[error("interrupted; the demo's objects were removed")]
    Interrupted,
    #[error("{0}")]
    Unexpected(String),
    #[error("cannot remove what the demo made: {reason}\nRemove it by hand: {by_hand}")]
    Remains { reason: String, by_hand: String },
}

impl From<ConnectError> for DemoError {
    fn from(error: ConnectError) -> Self {
        Self::Unreachable(error.to_string())
    }
}

impl From<ConnectFault> for DemoError {
    fn from(fault: ConnectFault) -> Self {
        Self::Unreachable(fault.to_string())
    }
}

pub fn run(mut loaded: Loaded) -> Result<(), super::Failure> {
    log_warnings(&mut loaded);
    let nats_url = nats_url(&loaded);
    block_on(demo(loaded.settings, &nats_url))
}

/// The addresses as `config show` prints them, without a password.
fn nats_url(loaded: &Loaded) -> String {
    match entries(loaded).into_iter().find(|entry| entry.key == "nats.url").map(|entry| entry.value) {
        Some(Shown::List(urls)) => urls.join(","),
        _ => String::new(),
    }
}

/// What the demo stands on.
struct Stage {
    settings: Settings,
    target: Target,
    /// The name of the schema, the slot and the publication.
    name: String,
    overseer: Overseer,
    nats: Connection,
}

async fn demo(settings: Settings, nats_url: &str) -> Result<(), DemoError> {
    let interrupted = interrupted()?;
    tokio::pin!(interrupted);
    let stage = tokio::select! {
        stage = prepare(settings) => stage?,
        () = &mut interrupted => return Err(DemoError::Interrupted),
    };
    let stop = CancellationToken::new();
    let (tell, mut relay_ended) = oneshot::channel();
    let result = tokio::select! {
        result = show(&stage, nats_url, &stop, tell) => Ok(result),
        () = &mut interrupted => Ok(Err(DemoError::Interrupted)),
        ended = &mut relay_ended => Err(premature(ended)),
    };
    let result = match result {
        Ok(result) => {
            stop.cancel();
            // An error says that the relay was never started.
            let _ = tokio::time::timeout(GRACE * 2, relay_ended).await;
            result
        }
        Err(premature) => Err(premature),
    };
    match (stage.clear().await, result) {
        (Err(remains), Err(error)) if !matches!(error, DemoError::Interrupted) => {
            Err(DemoError::Unexpected(format!("{error}\n{remains}")))
        }
        (Err(remains), _) => Err(remains),
        (Ok(()), result) => result,
    }
}

/// Completes when the demo is told to end.
fn interrupted() -> io::Result<impl Future<Output = ()>> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    })
}

fn premature(ended: Result<Result<(), RunError>, oneshot::error::RecvError>) -> DemoError {
    match ended {
        Ok(Err(error)) => error.into(),
        Ok(Ok(())) | Err(_) => DemoError::Unexpected("the relay ended before its time".to_owned()),
    }
}

/// Connects to both servers, and removes what killed runs have left. Makes nothing yet.
async fn prepare(mut settings: Settings) -> Result<Stage, DemoError> {
    let digits = format!("{:08x}", shop::random(0..1 << 32));
    let name = format!("{}{digits}", demo::PREFIX);
    let target = Target::parse(&settings.postgres.url.0, settings.postgres.password.as_ref().map(|word| &*word.0))?;
    // Both are tried before one is complained about.
    let (overseer, nats) =
        tokio::join!(Overseer::open(&target, &name), nats::connect::connect(&settings.nats, shop::EVENTS));
    let (overseer, (nats, _)) = match (overseer, nats) {
        (Err(postgres), Err(nats)) => return Err(DemoError::Unreachable(format!("{postgres}\n{nats}"))),
        (overseer, nats) => (overseer??, nats?),
    };
    name.clone_into(&mut settings.source.slot);
    name.clone_into(&mut settings.source.publication);
    settings.source.table = TableName { schema: name.clone(), table: "outbox_events".to_owned() };
    settings.source.create = true;
    settings.source.failover = false;
    settings.nats.stream = stream_of(&name);
    settings.nats.manage = Manage::Create;
    settings.nats.create.subjects = vec![format!("outbox-demo-{digits}.>")];
    settings.nats.create.replicas = 1;
    settings.nats.create.storage = Storage::File;
    settings.route.subject = format!("outbox-demo-{digits}.{{aggregate_type}}.{{event_type}}");
    settings.writeback.on_success = OnSuccess::Complete;
    settings.reconcile.retention = None;
    settings.dead_letter.announce = false;
    settings.compensation.enabled = false;
    settings.admin.listen = None;
    settings.shutdown.grace = GRACE;
    let stage = Stage { settings, target, name, overseer, nats };
    for left in stage.overseer.leftovers().await? {
        stage.remove(&left).await?;
    }
    Ok(stage)
}

/// The stream of a run.
fn stream_of(name: &str) -> String {
    name.to_uppercase()
}

impl Stage {
    async fn remove(&self, name: &str) -> Result<(), DemoError> {
        let stream = stream_of(name);
        let removed = async {
            // The schema goes last: as long as it is there, a later run knows that there is something to remove.
            nats::demo::remove_stream(&self.nats, &self.settings.nats, &stream).await?;
            Ok::<_, DemoError>(self.overseer.remove(name).await?)
        };
        let by_hand = || format!("nats stream rm {stream}, and in SQL: {}", Overseer::removal_by_hand(name));
        removed.await.map_err(|error| DemoError::Remains { reason: error.to_string(), by_hand: by_hand() })
    }

    async fn clear(self) -> Result<(), DemoError> {
        self.remove(&self.name).await?;
        self.overseer.close().await;
        Ok(())
    }
}

/// Everything between the first line and the last. `ended` tells when the relay ends.
async fn show(
    stage: &Stage,
    nats_url: &str,
    stop: &CancellationToken,
    ended: oneshot::Sender<Result<(), RunError>>,
) -> Result<(), DemoError> {
    let settings = &stage.settings;
    let mut screen = Screen::new(io::stdout());
    let server = stage.nats.link().borrow().server.clone().unwrap_or_default();
    screen.introduce(
        &format!("{}, version {}", stage.target.describe(), stage.overseer.server_version()),
        &format!("{nats_url}, server {server}"),
    )?;
    relay::migrate(settings, false).await?;
    let prefix = settings.route.subject.split('.').next().unwrap_or_default();
    let mut listener = Listener::open(&stage.nats, &settings.nats, format!("{prefix}.>")).await?;
    start_relay(settings.clone(), stop.clone(), ended)?;
    let streaming = wait_until(START, async || stage.overseer.is_streaming().await);
    if !streaming.await? {
        return Err(DemoError::Unexpected(format!("the relay did not begin to stream within {START:?}")));
    }

    let ledger = Ledger::default();
    let started = Instant::now();
    let produce = shop::open(&stage.target, &settings.source.table, &ledger);
    let receive = receive(&mut listener, prefix, &ledger, &mut screen);
    tokio::try_join!(produce, receive)?;
    let took = started.elapsed();

    let statuses = async || stage.overseer.statuses(&settings.source.table).await;
    let complete = async || Ok(statuses().await?.iter().all(|(status, _)| status == "completed"));
    wait_until::<tokio_postgres::Error>(SILENCE, complete).await?;
    let stored = Stream::new(&stage.nats, &settings.nats).facts().await?.messages;
    let summary = Summary { took, stored, statuses: statuses().await?, ..ledger.summary() };
    screen.summarise(&summary)?;
    summary.verdict().map_err(|problems| DemoError::Unexpected(format!("the demo failed: {problems}")))
}

/// The relay has a thread of its own, as it otherwise is a process of its own.
fn start_relay(
    settings: Settings,
    stop: CancellationToken,
    ended: oneshot::Sender<Result<(), RunError>>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().on_thread_park(pace::rest).build()?;
    std::thread::Builder::new().name("relay".to_owned()).spawn(move || {
        // An error says that the demo has ended.
        let _ = ended.send(runtime.block_on(relay::run_until(settings, stop)));
    })?;
    Ok(())
}

/// Asks until it is so; `false` when it was not within `limit`.
async fn wait_until<E>(limit: Duration, mut is_so: impl AsyncFnMut() -> Result<bool, E>) -> Result<bool, E> {
    let start = Instant::now();
    while !is_so().await? {
        if start.elapsed() > limit {
            return Ok(false);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(true)
}

/// Takes what the subscriber gets until it has every event of the demo.
async fn receive(
    listener: &mut Listener,
    prefix: &str,
    ledger: &Ledger,
    screen: &mut Screen<io::Stdout>,
) -> Result<(), DemoError> {
    while ledger.received() < shop::EVENTS {
        let next = tokio::time::timeout(SILENCE, listener.next()).await;
        let message = match next {
            Ok(Some(message)) => message,
            Ok(None) => return Err(DemoError::Unexpected("the subscriber lost its connection to NATS".to_owned())),
            Err(_) => {
                let received = ledger.received();
                let all = shop::EVENTS;
                return Err(DemoError::Unexpected(format!(
                    "no event came for {SILENCE:?}; the subscriber has {received} of {all}"
                )));
            }
        };
        if let Some(arrival) = ledger.receive(&message.id, message.at) {
            let subject = message.subject.strip_prefix(prefix).unwrap_or(&message.subject).trim_start_matches('.');
            screen.arrival(&arrival, subject, ledger)?;
        }
    }
    Ok(())
}
