//! The stages of a session beside delivery: started together, ended in their order.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::announce::{self, Announcer};
use super::drain::Drain;
use super::prepare::{self, Ground, answered};
use super::writeback::{Backlog, Refused, WritebackStage};
use super::{Relay, Setback, deliver, make};
use crate::flow::delivery::Limits;
use crate::flow::event::Change;
use crate::flow::lsn::Lsn;
use crate::postgres::changes::Assembler;
use crate::postgres::connect::Socket;
use crate::postgres::slot;
use crate::postgres::wal::{self, WalError, WalStream};
use crate::reconcile::compensations::{Asker, Compensations};
use crate::reconcile::retention::Retention;
use crate::reconcile::{Ask, PASS_ROWS, Reconciler};
use crate::telemetry::health::{Condition, Health};

/// Batches of changes between two stages: together with what a batch may hold, this bounds the memory between them.
const BATCHES: usize = 4;
/// Batches of settled tokens between write-back and delivery.
const SETTLED_BATCHES: usize = 64;

/// For how long tasks beside the events may bring to an end what they have begun.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the stages share: how far things are.
pub struct Progress {
    /// The position that may be confirmed, as delivery tells it.
    pub safe: watch::Sender<Lsn>,
    /// The position that the table names as the last to be confirmed, as write-back tells it.
    noted: watch::Sender<Lsn>,
    /// The position before which everything in the log has its outcome.
    passed: watch::Receiver<Lsn>,
    /// The end of the last round of which nothing is to be sent any more, as delivery tells it.
    decided: Option<watch::Sender<Lsn>>,
    /// No event with unrecorded outcome is stored at or below this sequence.
    pub stream_seq: Arc<AtomicU64>,
}

impl Progress {
    pub fn new(confirmed: Lsn) -> Self {
        let safe = watch::Sender::new(confirmed);
        let passed = safe.subscribe();
        Self { safe, noted: watch::Sender::new(confirmed), passed, decided: None, stream_seq: Arc::default() }
    }

    /// Of rounds, which have no place in the log. Comes with the end of the last one of which nothing is to be sent any
    /// more.
    pub fn of_rounds() -> (Self, watch::Receiver<Lsn>) {
        let (decided, sent) = watch::channel(Lsn::ZERO);
        let nowhere = watch::channel(Lsn::ZERO).1;
        (Self { passed: nowhere, decided: Some(decided), ..Self::new(Lsn::ZERO) }, sent)
    }
}

/// The replication connection at work. It ends when this is dropped.
pub struct Streaming {
    task: JoinHandle<Result<(), WalError>>,
    changes: mpsc::Receiver<Vec<Change>>,
    /// Ends the session.
    pub stop: CancellationToken,
    /// Ends the connection.
    pub wal_stop: CancellationToken,
    guard: DropGuard,
}

impl Streaming {
    /// Starts to stream. Changes wait in their channel until they are taken in; PostgreSQL is answered meanwhile.
    pub fn start(relay: &Relay, stream: WalStream<Socket>, timeout: Duration, progress: &Progress) -> Self {
        let (safe, noted) = (progress.safe.subscribe(), progress.noted.subscribe());
        let assembler = Assembler::new(relay.settings.source.table.clone());
        let health: Health = relay.health.clone();
        Self::of(relay, BATCHES, |changes, stop, end| async move {
            let result = stream.run(assembler, wal::Wiring { changes, safe, noted, timeout, stop: end }).await;
            if let Err(error) = &result {
                // At once: what was sent is still brought to its end, which may take as long as the server is away.
                health.raise(Condition::PostgresDown, error.to_string());
            }
            // The session ends with the stream.
            stop.cancel();
            result
        })
    }

    /// Starts a task that hands on changes; it is given what ends the session, and what ends itself.
    pub fn of<T>(
        relay: &Relay,
        batches: usize,
        task: impl FnOnce(mpsc::Sender<Vec<Change>>, CancellationToken, CancellationToken) -> T,
    ) -> Self
    where
        T: Future<Output = Result<(), WalError>> + Send + 'static,
    {
        let (stop, wal_stop) = (relay.stop.child_token(), CancellationToken::new());
        let (sender, changes) = mpsc::channel(batches);
        let task = tokio::spawn(task(sender, stop.clone(), wal_stop.clone()));
        Self { task, changes, stop, guard: wal_stop.clone().drop_guard(), wal_stop }
    }

    /// Ends the connection; nothing was taken in.
    pub async fn end(self, relay: &Relay, ground: &Ground) -> Result<(), Setback> {
        self.wal_stop.cancel();
        end_stream(self.task, relay, ground).await
    }
}

/// What the stages are made of.
pub struct Parts {
    pub streaming: Streaming,
    pub drain: Option<Drain>,
    pub limits: Limits,
    pub progress: Progress,
    /// When the slot was last seen to be ours, and how long after that events may be handed to NATS.
    pub fence: watch::Receiver<Instant>,
    pub fence_limit: Duration,
    /// What comes before this may have been sent by an earlier session.
    pub horizon: Lsn,
}

/// The running stages.
pub struct Stages {
    wal: JoinHandle<Result<(), WalError>>,
    wal_stop: CancellationToken,
    writeback: JoinHandle<()>,
    announcements: Option<JoinHandle<()>>,
    reconciler: JoinHandle<()>,
    beside: JoinSet<()>,
    _guard: DropGuard,
}

impl Stages {
    /// Starts the stages. Returns them with the ends of their channels that delivery holds.
    pub fn start(relay: &Relay, nats: &deliver::Nats, ground: &Ground, parts: Parts) -> (Self, deliver::Wiring) {
        let Parts { streaming, drain, limits, progress, fence, fence_limit, horizon } = parts;
        let Streaming { task: wal, changes: from_wal, stop, wal_stop, guard } = streaming;
        // A report for every event that may be under way.
        let (reports, to_write) = mpsc::channel(limits.events + PASS_ROWS);
        let (asks_tx, asks) = mpsc::channel(1);
        let (settled_tx, settled) = mpsc::channel(SETTLED_BATCHES);
        let (returned_tx, returned) = mpsc::channel(limits.events + PASS_ROWS);
        let (wish, wished) = watch::channel(Lsn::ZERO);
        let Progress { safe, noted, passed, decided, stream_seq } = progress;
        let (announcer, announcements) = announce(relay, nats);
        let writeback = WritebackStage {
            target: relay.postgres.clone(),
            tables: ground.tables.clone(),
            slot: relay.settings.source.slot.clone(),
            on_success: relay.settings.writeback.on_success,
            reports: to_write,
            settled: settled_tx,
            returned: returned_tx,
            stream_seq: Arc::clone(&stream_seq),
            safe: passed.clone(),
            noted,
            wish: wished,
            wrote: false,
            unnoted: true,
            noted_at: Instant::now(),
            metrics: relay.metrics.clone(),
            health: relay.health.clone(),
            locked: None,
            announcer,
            backlog: Backlog::default(),
            refused: Refused::default(),
            handled: HashSet::new(),
            stop: stop.clone(),
        };
        let horizon = decided.is_none().then_some(horizon);
        let stages = Self {
            wal,
            wal_stop,
            writeback: tokio::spawn(writeback.run()),
            announcements,
            reconciler: tokio::spawn(reconciler(relay, ground, (limits, horizon), asks_tx, passed, stop.clone()).run()),
            beside: beside(relay, nats, ground, wish, &stop),
            _guard: guard,
        };
        // The last source is read first.
        let mut sources = vec![from_wal];
        sources.extend(drain.map(|drain| drain.spawn(stop.clone())));
        let wiring = deliver::Wiring {
            sources,
            reports,
            settled,
            returned,
            asks,
            safe,
            decided,
            stream_seq,
            fence,
            fence_limit,
            stop,
        };
        (stages, wiring)
    }

    /// Brings the stages to their end, once delivery has ended. An outcome that is known is written before the next
    /// session reads the table, and the last position is confirmed.
    pub async fn finish(mut self, relay: &Relay, ground: &Ground) -> Result<(), Setback> {
        let _ = self.reconciler.await;
        let ended = async { while self.beside.join_next().await.is_some() {} };
        if tokio::time::timeout(PATIENCE, ended).await.is_err() {
            // PostgreSQL does not answer them. What they had begun is begun again when its lease ends.
            self.beside.shutdown().await;
        }
        let _ = self.writeback.await;
        if let Some(announcements) = self.announcements {
            announce::finish(announcements).await;
        }
        self.wal_stop.cancel();
        end_stream(self.wal, relay, ground).await
    }
}

/// Waits for the end of the stream, and looks at why it ended.
async fn end_stream(stream: JoinHandle<Result<(), WalError>>, relay: &Relay, ground: &Ground) -> Result<(), Setback> {
    let ended = stream.await.unwrap_or(Err(WalError::Closed));
    if ended.as_ref().is_err_and(WalError::needs_new_slot) {
        answered("the slot was given up", give_slot_up(relay, ground)).await?;
    }
    Ok(ended?)
}

/// The slot shows what cannot be read through it. Nothing after that was confirmed: the next session makes the slot
/// anew, and finds the rows in the table.
async fn give_slot_up(relay: &Relay, ground: &Ground) -> Result<(), Setback> {
    let source = &relay.settings.source;
    ground.state(&source.slot).set_needs_drain(true).await?;
    if source.create {
        slot::drop_slot(&ground.control.client, &source.slot).await?;
        return Ok(());
    }
    Err(Setback::Fatal(format!(
        "replication slot {:?} shows log from before publication {:?}, which cannot be read through it, and source.create = \
         false keeps the relay from making the slot anew; {}",
        source.slot,
        source.publication,
        make::by_hand(&source.slot, true)
    )))
}

fn announce(relay: &Relay, nats: &deliver::Nats) -> (Announcer, Option<JoinHandle<()>>) {
    if !relay.settings.dead_letter.announce {
        return (Announcer::default(), None);
    }
    let (announcer, task) = announce::start(nats.connection.clone());
    (announcer, Some(task))
}

fn reconciler(
    relay: &Relay,
    ground: &Ground,
    (limits, horizon): (Limits, Option<Lsn>),
    asks: mpsc::Sender<Ask>,
    safe: watch::Receiver<Lsn>,
    stop: CancellationToken,
) -> Reconciler {
    Reconciler {
        target: relay.postgres.clone(),
        tables: ground.tables.clone(),
        cap: prepare::message_cap(&relay.settings),
        interval: relay.settings.reconcile.interval,
        sweep_interval: relay.settings.reconcile.sweep_interval,
        safe,
        horizon,
        ordered: limits.ordered,
        asks,
        metrics: relay.metrics.clone(),
        stop,
    }
}

/// What goes on beside the events, as the settings want it.
fn beside(
    relay: &Relay,
    nats: &deliver::Nats,
    ground: &Ground,
    wish: watch::Sender<Lsn>,
    stop: &CancellationToken,
) -> JoinSet<()> {
    let settings = &relay.settings;
    let mut tasks = JoinSet::new();
    if let Some(route) = relay.compensations.clone() {
        let compensations = Compensations {
            target: relay.postgres.clone(),
            tables: ground.tables.clone(),
            cap: prepare::message_cap(settings),
            interval: settings.reconcile.interval,
            worker: format!("outbox-relay {}", settings.source.slot),
            asker: Arc::new(Asker {
                connection: nats.connection.clone(),
                stream: nats.stream.clone(),
                route,
                timeout: settings.compensation.timeout,
                retry: settings.retry.clone(),
            }),
            metrics: relay.metrics.clone(),
            stop: stop.clone(),
        };
        tasks.spawn(compensations.run());
    }
    if let Some(age) = settings.reconcile.retention {
        let retention = Retention {
            target: relay.postgres.clone(),
            tables: ground.tables.clone(),
            slot: settings.source.slot.clone(),
            age,
            wish,
            stop: stop.clone(),
        };
        tasks.spawn(retention.run());
    }
    tasks
}
