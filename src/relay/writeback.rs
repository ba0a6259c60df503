//! The write-back stage: takes reports, commits outcomes, says which are settled.

mod backlog;
mod lines;
mod refused;

pub use backlog::Backlog;
pub use refused::Refused;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::announce::Announcer;
use crate::config::OnSuccess;
use crate::flow::event::{Event, Outcome, Report, Settled};
use crate::flow::lsn::Lsn;
use crate::pause::{Pause, Repeats};
use crate::postgres::connect::{self, ConnectError, Session, SqlConnection, Target};
use crate::postgres::outbox::{NOTE_REACH, Place, Recorded, Tables, Writeback, is_locked, lock_holders};
use crate::postgres::{describe, is_ending};
use crate::telemetry::health::{Condition, Health};
use crate::telemetry::metrics::{Metrics, peer, status};

/// Bytes of log after which the place is noted although no outcome was recorded.
const FAR: u64 = 1024 * 1024;
/// How often it is noted while the log grows more slowly.
const NOTE_EVERY: Duration = Duration::from_secs(5);

/// How long the server may take to answer. After that the connection counts as lost; what it was asked to write may be
/// written again.
const SILENCE: Duration = Duration::from_secs(30);

/// A lock that someone else holds for longer is told of.
const LOCKED: Duration = Duration::from_secs(1);

/// Where nothing tells how far things are, the slot must not be confirmed.
const ROW_GONE: &str = "the relay's row in outbox_relay_state is gone, so that it cannot be noted how far things are; the \
                        session ends, and the next one makes the row anew and reads further back";

/// How long, once no more reports come, rows are waited for that someone else holds. They are sent again later.
const PATIENCE: Duration = Duration::from_secs(5);

/// The running stage.
pub struct WritebackStage {
    pub target: Target,
    pub tables: Tables,
    pub slot: String,
    pub on_success: OnSuccess,
    pub reports: mpsc::Receiver<Report>,
    pub settled: mpsc::Sender<Vec<Settled>>,
    /// Reports of spared events whose rows are gone, so that they cannot wait in the table.
    pub returned: mpsc::Sender<Report>,
    /// No event with unrecorded outcome is stored at or below this sequence.
    pub stream_seq: Arc<AtomicU64>,
    /// The position that may be confirmed, and the one that is noted in the table: PostgreSQL is told no later one.
    pub safe: watch::Receiver<Lsn>,
    pub noted: watch::Sender<Lsn>,
    /// A position that someone waits for to be confirmed.
    pub wish: watch::Receiver<Lsn>,
    /// Over this connection, something was written.
    pub wrote: bool,
    /// Outcomes were recorded since the place was noted by itself, and when that was.
    pub unnoted: bool,
    pub noted_at: Instant,
    pub metrics: Metrics,
    pub health: Health,
    /// Since when the tables have been locked by someone else.
    pub locked: Option<Instant>,
    pub announcer: Announcer,
    /// Reports that are to be written, and when each may be tried.
    pub backlog: Backlog,
    pub refused: Refused,
    /// Of the present batch: what is settled or waits for a later try, should the rest of it fail.
    pub handled: HashSet<u64>,
    /// Ends the session.
    pub stop: CancellationToken,
}

/// Why a connection was given up.
#[derive(Debug, thiserror::Error)]
enum Interrupted {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{}", describe(.0))]
    Sql(#[from] tokio_postgres::Error),
    #[error("PostgreSQL did not answer for {0:?}")]
    Silent(Duration),
}

/// Whether every row would have met the error, and not the one alone.
fn is_everyones(error: &tokio_postgres::Error) -> bool {
    is_ending(error) || error.is_closed() || is_locked(error)
}

/// Waits for an answer, for as long as one may take.
async fn answer<T>(asked: impl Future<Output = Result<T, tokio_postgres::Error>>) -> Result<T, Interrupted> {
    match timeout(SILENCE, asked).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(Interrupted::Silent(SILENCE)),
    }
}

impl WritebackStage {
    /// Runs until the channel of reports is closed and everything is settled. The connection is made anew whenever it
    /// breaks: an outcome that is known is never forgotten.
    pub async fn run(mut self) {
        let mut pause = Pause::new(Duration::from_millis(100), Duration::from_secs(5));
        let mut repeats = Repeats::default();
        loop {
            let ended = match connect::sql(&self.target, &session()).await {
                Ok(connection) => self.serve(&connection).await,
                Err(error) => Err(error.into()),
            };
            let Err(error) = ended else { break };
            if std::mem::take(&mut self.wrote) {
                pause.reset();
                repeats.end();
            }
            match error {
                Interrupted::Sql(error) if !is_everyones(&error) => {
                    self.refused.all(&error, &self.health);
                    // The end of a session does not wait for it. Other outcomes would be refused as well.
                    if self.reports.is_closed() {
                        self.backlog.say_what_is_left();
                        break;
                    }
                }
                error => {
                    let reason = error.to_string();
                    if repeats.is_news(&reason, Instant::now()) {
                        warn!(reason, "write-back lost its connection; it connects again");
                    }
                }
            }
            if self.is_done() {
                break;
            }
            self.metrics.reconnects.of(peer::POSTGRES).inc();
            sleep(pause.next()).await;
        }
        // Whoever holds a lock still: nobody waits for it now.
        self.note_free();
        self.refused.end(&self.health);
    }

    /// Whether no report is left and none will come.
    fn is_done(&self) -> bool {
        self.reports.is_closed() && self.reports.is_empty() && self.backlog.is_empty()
    }

    async fn serve(&mut self, connection: &SqlConnection) -> Result<(), Interrupted> {
        let slot = self.slot.clone();
        let Some(writeback) = self.prepare(&connection.client, &slot).await? else { return Ok(()) };
        let mut since = Instant::now();
        loop {
            if self.must_note() {
                match answer(self.note(&writeback)).await {
                    Ok(()) => self.note_free(),
                    Err(Interrupted::Sql(error)) if is_locked(&error) => self.note_locked(&connection.client).await,
                    Err(error) => return Err(error),
                }
            }
            if !self.backlog.collect(&mut self.reports).await
                || (self.reports.is_closed() && since.elapsed() > PATIENCE)
            {
                self.backlog.say_what_is_left();
                // Without this note the next session only looks up more rows than it has to.
                let _ = timeout(PATIENCE, self.note(&writeback)).await;
                return Ok(());
            }
            if !self.reports.is_closed() {
                since = Instant::now();
            }
            let began = Instant::now();
            let mut batch = self.backlog.take(began);
            if batch.is_empty() {
                continue;
            }
            if let Err(error) = answer(self.write(&writeback, &batch)).await {
                batch.retain(|(_, report)| !self.handled.contains(&report.token));
                self.backlog.put_back(batch);
                match error {
                    Interrupted::Sql(error) if is_locked(&error) => self.note_locked(&connection.client).await,
                    error => return Err(error),
                }
            } else {
                self.note_free();
            }
            backlog::gather(&self.reports, began).await;
        }
    }

    /// Prepares the statements, which waits for locks of whole tables. `None`: the session has ended meanwhile.
    async fn prepare<'c>(&mut self, client: &'c Client, slot: &'c str) -> Result<Option<Writeback<'c>>, Interrupted> {
        let mut since = Instant::now();
        loop {
            match answer(Writeback::prepare(client, &self.tables, slot, self.on_success)).await {
                Ok(writeback) => {
                    self.note_free();
                    return Ok(Some(writeback));
                }
                Err(Interrupted::Sql(error)) if is_locked(&error) => self.note_locked(client).await,
                Err(error) => return Err(error),
            }
            if !self.reports.is_closed() {
                since = Instant::now();
            } else if since.elapsed() > PATIENCE {
                self.backlog.say_what_is_left();
                return Ok(None);
            }
        }
    }

    /// Someone holds the lock of a whole table, or of the relay's row of state, so that nothing can be written. It is
    /// tried again at once, since each try waits for the lock, though not for long.
    async fn note_locked(&mut self, client: &Client) {
        if self.locked.get_or_insert_with(Instant::now).elapsed() < LOCKED {
            return;
        }
        let holders = timeout(LOCKED, lock_holders(client, &self.tables)).await;
        let holders = holders.ok().and_then(Result::ok).unwrap_or_default();
        let reason = format!("outcomes cannot be written; locked: {holders}");
        if self.health.raise(Condition::Locked, reason) {
            warn!(holders, "outcomes cannot be written while someone else holds a lock; they wait for it");
        }
    }

    fn note_free(&mut self) {
        if self.locked.take().is_some() {
            self.health.clear(Condition::Locked);
        }
    }

    /// Writes a batch. Where the server refuses it for the sake of one row, the others are written alone.
    async fn write(&mut self, writeback: &Writeback<'_>, batch: &[(u32, Report)]) -> Result<(), tokio_postgres::Error> {
        self.handled.clear();
        let reports: Vec<Report> = batch.iter().map(|(_, report)| report.clone()).collect();
        let result = self.record(writeback, &reports).await;
        let Err(error) = result else {
            self.distribute(batch, &result?).await;
            return Ok(());
        };
        if is_everyones(&error) {
            return Err(error);
        }
        debug!(error = %describe(&error), rows = batch.len(), "PostgreSQL refused a batch; its rows are tried one by one");
        for (tries, report) in batch {
            let Some(report) = self.backlog.line_up(report.clone()) else {
                self.handled.insert(report.token);
                continue;
            };
            match self.record(writeback, std::slice::from_ref(&report)).await {
                Ok(recorded) => self.distribute(&[(*tries, report)], &recorded).await,
                Err(error) if is_everyones(&error) => return Err(error),
                Err(error) => {
                    self.refused.add(*tries, &report, &error, &self.health);
                    self.handled.insert(report.token);
                    self.backlog.later(tries + 1, report);
                }
            }
        }
        Ok(())
    }

    /// Whether the place moved without outcomes being recorded, so that it is to be noted by itself: soon after the
    /// last outcome, and every few seconds while the log grows. In an idle database nothing is written for ever: what
    /// the note itself adds to the log lies within the reach of the note.
    fn must_note(&self) -> bool {
        let (safe, noted, wish) = (*self.safe.borrow(), *self.noted.borrow(), *self.wish.borrow());
        let due = self.unnoted || safe.0.saturating_sub(noted.0) >= FAR || self.noted_at.elapsed() >= NOTE_EVERY;
        (noted < wish && wish <= safe) || (safe > noted && due && self.reports.is_empty())
    }

    async fn note(&mut self, writeback: &Writeback<'_>) -> Result<(), tokio_postgres::Error> {
        let place = self.place();
        let noted = writeback.note(place).await?;
        (self.unnoted, self.noted_at) = (false, Instant::now());
        self.written(place, noted);
        Ok(())
    }

    /// A statement was carried out, and with it the place was noted, unless the row is gone that tells it.
    fn written(&mut self, place: Place, noted: bool) {
        self.wrote = true;
        self.refused.over(&self.health);
        if noted {
            self.noted.send_replace(place.confirmed);
        } else if !self.stop.is_cancelled() {
            warn!("{ROW_GONE}");
            self.health.note("write-back", ROW_GONE);
            self.stop.cancel();
        }
    }

    /// How far things are, reaching as far as the note of it will move the log.
    fn place(&self) -> Place {
        // In this order: up to the sequence nothing is open that comes before the position.
        let stream_seq = self.stream_seq.load(Ordering::Acquire);
        let safe = *self.safe.borrow();
        let reach = if safe == Lsn::ZERO { 0 } else { NOTE_REACH };
        Place { stream_seq, confirmed: Lsn(safe.0.saturating_add(reach)) }
    }

    async fn record(
        &mut self,
        writeback: &Writeback<'_>,
        reports: &[Report],
    ) -> Result<Vec<Recorded>, tokio_postgres::Error> {
        let started = Instant::now();
        let place = self.place();
        let (recorded, noted) = writeback.record(reports, place).await?;
        self.written(place, noted);
        self.metrics.writeback_duration.observe(started.elapsed().as_secs_f64());
        Ok(recorded)
    }

    async fn distribute(&mut self, batch: &[(u32, Report)], recorded: &[Recorded]) {
        self.unnoted = true;
        let mut settled = Vec::with_capacity(batch.len());
        for ((tries, report), recorded) in batch.iter().zip(recorded) {
            self.handled.insert(report.token);
            if *recorded != Recorded::Later {
                self.backlog.settled(report);
                self.refused.settled(report.token, &self.health);
            }
            match recorded {
                Recorded::Row(status) => {
                    self.metrics.writeback_rows.of(status).inc();
                    if let (&status::DEAD_LETTER, Outcome::Failed(rejection)) = (status, &report.outcome) {
                        self.dead_letter(&rejection.event, rejection.code, &rejection.message);
                    }
                }
                Recorded::WithoutRow if report.outcome.is_spared() => {
                    // Without a receiver the session has ended, and the next one reads the event again.
                    let _ = self.returned.send(report.clone()).await;
                    continue;
                }
                Recorded::WithoutRow => {
                    self.metrics.events_without_row.inc();
                    if let Some((event, code, reason)) = report.outcome.without_row() {
                        self.dead_letter(event, code, reason);
                    }
                }
                Recorded::Later => {
                    debug!(id = report.id, "a row is locked or not visible yet; its outcome is written later");
                    self.backlog.later(tries + 1, report.clone());
                    continue;
                }
            }
            let gone = matches!(recorded, Recorded::WithoutRow | Recorded::Row(status::DELETED));
            settled.push(Settled { token: report.token, gone });
        }
        // The receiver is gone only when the session is: then nobody waits for it.
        let _ = self.settled.send(settled).await;
    }

    /// A dead letter is committed.
    fn dead_letter(&self, event: &Event, code: &'static str, reason: &str) {
        self.metrics.dead_letters.of(code).inc();
        self.announcer.announce(event, code, reason);
    }
}

fn session() -> Session {
    let session = Session::new("outbox-relay write-back");
    Writeback::SESSION.iter().fold(session, |session, &(name, value)| session.with(name, value))
}
