//! What heals: rows whose time has come are sent again, and rows held behind them are released.
//!
//! Runs only while this relay holds the slot, one bounded pass at a time. It sends no event itself: rows go to the
//! delivery stage, and their outcomes take the same way as all others. Compensations and retention are tasks beside it.

pub mod compensations;
pub mod retention;
mod retries;
mod sweep;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sweep::Sweep;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::flow::lsn::Lsn;
use crate::flow::order::{AggregateKey, Blocked};
use crate::pause::Pause;
use crate::postgres::connect::{self, Session, SqlConnection, Target};
use crate::postgres::describe;
use crate::postgres::outbox::{self, Due, DueRow, HeldRows, Tables};
use crate::telemetry::metrics::Metrics;

/// Rows in one pass, at most.
pub const PASS_ROWS: usize = 500;

/// How long the outcomes of a pass are waited for before others get their turn.
const PATIENCE: Duration = Duration::from_secs(5);

/// What the reconciler asks of the delivery stage.
#[derive(Debug)]
pub enum Ask {
    /// Send these rows, but for those that are under way already, or for which there is no room. `done` is told how
    /// many were taken once each of them has its outcome in the table, or stays as it is there.
    Send { rows: Vec<DueRow>, done: oneshot::Sender<usize> },
    /// Which aggregates are blocked?
    Blocks(oneshot::Sender<Vec<AggregateKey>>),
    /// The held rows of these aggregates are about to leave: what comes now waits, and is not held. How do those of
    /// them stand that are blocked?
    Open(Vec<AggregateKey>, oneshot::Sender<Vec<Blocked>>),
    /// What comes now is held again.
    Close(Vec<AggregateKey>),
    /// The table holds rows of these aggregates, whatever held them: each is blocked until they have left.
    Held(Vec<HeldRows>),
    /// The table holds no row of these aggregates any more.
    Unblock(Vec<Blocked>),
    /// A whole pass is over: every row that was due, held behind nothing any more, or missed has been sent.
    PassOver,
}

/// The running task.
pub struct Reconciler {
    pub target: Target,
    pub tables: Tables,
    /// Bytes of a payload beyond which it is not read.
    pub cap: usize,
    pub interval: Duration,
    pub sweep_interval: Duration,
    /// The position before which every event has its outcome.
    pub safe: watch::Receiver<Lsn>,
    /// Where the log ended when the session began. `None`: the log, which may miss rows, is not read; rounds read the
    /// table instead, again and again.
    pub horizon: Option<Lsn>,
    /// Whether events of one aggregate go one after the other.
    pub ordered: bool,
    pub asks: mpsc::Sender<Ask>,
    pub metrics: Metrics,
    pub stop: CancellationToken,
}

/// Why a pass ended early.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error("{}", describe(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error("the session ended")]
    SessionEnded,
}

impl Reconciler {
    /// Runs until the session stops. A connection that breaks is made anew.
    pub async fn run(self) {
        let mut pause = Pause::new(Duration::from_millis(200), Duration::from_secs(5));
        let stop = self.stop.clone();
        let (mut since, mut sweep) = (None, Sweep::new());
        let work = async {
            loop {
                match connect::sql(&self.target, &session("outbox-relay reconciler")).await {
                    Ok(connection) => match self.serve(&connection, &mut since, &mut sweep, &mut pause).await {
                        Interrupted::SessionEnded => return,
                        error @ Interrupted::Sql(_) => warn!(%error, "the reconciler starts over"),
                    },
                    Err(error) => warn!(%error, "the reconciler cannot connect; it tries again"),
                }
                tokio::time::sleep(pause.next()).await;
            }
        };
        stop.run_until_cancelled(work).await;
    }

    /// `since`: what was visible when the session began.
    async fn serve(
        &self,
        connection: &SqlConnection,
        since: &mut Option<String>,
        sweep: &mut Sweep,
        pause: &mut Pause,
    ) -> Interrupted {
        let client = &connection.client;
        let since = match since {
            Some(since) => since,
            None => match outbox::snapshot(client).await {
                Ok(snapshot) => since.insert(snapshot),
                Err(error) => return error.into(),
            },
        };
        let due = Due { client, tables: &self.tables, cap: self.cap, since };
        loop {
            match self.pass(due, sweep).await {
                Ok(true) if self.ask(Ask::PassOver).await.is_err() => return Interrupted::SessionEnded,
                Ok(_) => {}
                Err(interrupted) => return interrupted,
            }
            pause.reset();
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.metrics.reconcile_last_success.set(now.as_secs_f64());
            tokio::time::sleep(self.interval).await;
        }
    }

    /// One pass over everything that may be due. Returns whether it was whole.
    async fn pass(&self, due: Due<'_>, sweep: &mut Sweep) -> Result<bool, Interrupted> {
        self.send_due(due).await?;
        // Before held rows leave, since it finds those that nothing blocks; but where it fails, they leave all the same.
        let swept = self.sweep(due, sweep).await;
        let released = if self.ordered { self.release(due).await? } else { self.release_all(due).await? };
        swept?;
        Ok(released && (sweep.over || self.horizon.is_none()))
    }

    /// Has rows sent, and waits for their outcomes, though not for long: someone may hold the lock of a row, and the
    /// others wait for their turn. Returns how many were sent and have their outcome; zero ends a loop.
    async fn send(&self, rows: Vec<DueRow>) -> Result<usize, Interrupted> {
        let (done, outcome) = oneshot::channel();
        self.ask(Ask::Send { rows, done }).await?;
        match tokio::time::timeout(PATIENCE, outcome).await {
            Ok(sent) => sent.map_err(|_| Interrupted::SessionEnded),
            Err(_) => Ok(0),
        }
    }

    async fn ask(&self, ask: Ask) -> Result<(), Interrupted> {
        self.asks.send(ask).await.map_err(|_| Interrupted::SessionEnded)
    }
}

/// Statistics never say how many rows are held just now: where none are expected, PostgreSQL would compare each of them
/// with each aggregate that is free, which takes minutes for 100,000 rows instead of a tenth of a second.
fn session(name: &str) -> Session {
    Session::new(name).with("statement_timeout", "60s").with("row_security", "off").with("enable_nestloop", "off")
}
