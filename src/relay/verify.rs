//! Compares completed rows with the stream, and sends again what it has lost.
//!
//! An acknowledged message can be gone: a server that loses power may lose what it had not yet written to its disk, and
//! people delete and purge. The table knows what was acknowledged, and the stream's headers tell what is there.

mod compare;
mod repair;

use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;
use tokio_postgres::Client;

use crate::config::Settings;
use crate::fault::{Class, Failure};
use crate::nats::connect::{self, ConnectFault};
use crate::nats::stream::{Retention, Stream, StreamFacts};
use crate::postgres::outbox::{Completed, CompletedRow, Tables};
use compare::Compare;
use repair::{Outcome, Repair};

/// Events that are named in the result, at most: a lost stream can be of any length.
pub const LISTED: usize = 1000;

/// Rows read at a time.
const ROWS: i64 = 50_000;
/// Rows that are looked for in the whole stream at once.
const SUSPECTS: usize = 200_000;

/// For so long a failure that may pass is waited out.
const PATIENCE: Duration = Duration::from_mins(1);
/// Between two attempts at what failed so.
const PAUSE: Duration = Duration::from_millis(500);

/// A point in time, by PostgreSQL's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// So long before now.
    Ago(Duration),
    /// That time.
    At(Timestamp),
}

/// What to compare.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Rows created from here on are compared.
    pub since: Moment,
    /// `None`: until now.
    pub until: Option<Moment>,
    /// Whether missing events are sent again.
    pub repair: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Step {
    /// Rows are compared with the part of the stream from their time: how many were, and what share of the time is done
    /// (0 to 1).
    Comparing { rows: u64, share: f64 },
    /// What was not found there is looked for in the whole stream, of which a share (0 to 1) was read.
    Searching { rows: usize, share: f64 },
    /// Missing events are sent again: so many of them are done.
    Repairing { done: usize, of: usize },
    /// The stream calls events duplicates that it does not have: it still has to forget their ids.
    Waiting { events: usize, at_most: Duration },
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// The stream that was compared.
    pub stream: String,
    /// Rows created from here on were compared ...
    pub since: Timestamp,
    /// ... up to here.
    pub until: Timestamp,
    /// How many those were.
    pub rows: u64,
    /// Events of them that the stream has.
    pub present: u64,
    /// Not there, but no longer to be expected under the stream's limits.
    pub expired: u64,
    /// Not there, though they should be; those that were repaired included.
    pub missing: u64,
    /// Sent again and read back.
    pub repaired: u64,
    /// The first [`LISTED`] of the missing.
    pub events: Vec<MissingEvent>,
}

impl Verified {
    /// Events that should be in the stream and are not.
    pub fn lacking(&self) -> u64 {
        self.missing.saturating_sub(self.repaired)
    }
}

/// An event that was acknowledged and is not in the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingEvent {
    /// The row's primary key.
    pub id: i64,
    /// Its global id.
    pub event_id: String,
    /// When it was inserted.
    pub created_at: Timestamp,
    /// When its acknowledgement was written back.
    pub processed_at: Timestamp,
    /// Where it stands now, if it was repaired.
    pub sequence: Option<u64>,
    /// Why it was not repaired, where that was tried.
    pub problem: Option<String>,
}

/// Why nothing can be said.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// Comparing would prove nothing.
    #[error("{0}")]
    Unprovable(String),
    /// The settings cannot work.
    #[error("{0}")]
    Settings(String),
    /// NATS cannot be reached.
    #[error(transparent)]
    Nats(#[from] ConnectFault),
    /// The stream cannot be asked, or takes nothing.
    #[error("stream {stream:?}: {failure}")]
    JetStream { stream: String, failure: Failure },
    /// PostgreSQL refused a statement, or is away.
    #[error("PostgreSQL: {}", crate::postgres::describe(.0))]
    Sql(#[from] tokio_postgres::Error),
}

/// Compares the completed rows of a range of time with the stream, and with `request.repair` sends again those that are
/// missing, with the ids that they had. It can be ended at any time and run again: what was repaired is present then.
///
/// Memory does not grow with the number of rows or messages.
///
/// # Errors
/// When the stream forgets messages by design, or one of the servers cannot be asked.
pub async fn verify(
    settings: &Settings,
    client: &Client,
    request: Request,
    mut tell: impl FnMut(Step),
) -> Result<Verified, VerifyError> {
    let router = super::router(settings).map_err(|mistake| VerifyError::Settings(mistake.to_string()))?;
    let (connection, inboxes) = connect::connect(&settings.nats, settings.delivery.max_in_flight).await?;
    let stream = Stream::new(&connection, &settings.nats);
    let failed = |failure| VerifyError::JetStream { stream: settings.nats.stream.clone(), failure };
    let facts = stream.facts().await.map_err(failed)?;
    if let Some(reason) = unprovable(&facts) {
        return Err(VerifyError::Unprovable(format!("stream {:?} {reason}", facts.name)));
    }
    let tables = Tables::of(&settings.source.table);
    let completed = Completed { client, tables: &tables };
    let now = completed.now().await?;
    let (since, until) = (time(request.since, now), request.until.map_or(now, |until| time(until, now)));
    let mut verified = Verified {
        stream: facts.name.clone(),
        since: timestamp(since),
        until: timestamp(until),
        rows: 0,
        present: 0,
        expired: 0,
        missing: 0,
        repaired: 0,
        events: Vec::new(),
    };
    let mut compare = Compare::new(&stream);
    let mut repair =
        request.repair.then(|| Repair::new(settings, &router, completed, (&connection, inboxes), (&stream, &facts)));
    let mut rows = completed.created(since, until).await?;
    loop {
        let chunk = rows.next(ROWS).await?;
        let end = chunk.is_empty();
        verified.rows += chunk.len() as u64;
        let share = chunk.last().map_or(1.0, |last| share(since, last.created_at, until));
        compare.chunk(chunk).await.map_err(failed)?;
        tell(Step::Comparing { rows: verified.rows, share });
        if compare.suspects.len() >= SUSPECTS || end {
            let missing = compare.settle(&mut tell).await.map_err(failed)?;
            verified.missing += missing.len() as u64;
            let outcomes = match &mut repair {
                Some(repair) => repair.send_again(&missing, &mut tell).await?,
                None => Vec::new(),
            };
            verified.note(missing, outcomes);
        }
        if end {
            break;
        }
    }
    verified.expired = compare.expired;
    verified.present = verified.rows.saturating_sub(verified.missing + verified.expired);
    Ok(verified)
}

impl Verified {
    /// Notes missing rows, and what became of each if it was sent again.
    fn note(&mut self, missing: Vec<CompletedRow>, outcomes: Vec<Outcome>) {
        let mut outcomes = outcomes.into_iter();
        for row in missing {
            let (sequence, problem) = match outcomes.next() {
                Some(Outcome::Readable(sequence)) => (Some(sequence), None),
                Some(Outcome::Failed(problem)) => (None, Some(problem)),
                None => (None, None),
            };
            self.repaired += u64::from(sequence.is_some());
            if self.events.len() < LISTED {
                let (created_at, processed_at) = (timestamp(row.created_at), timestamp(row.processed_at));
                let CompletedRow { id, event_id, .. } = row;
                self.events.push(MissingEvent { id, event_id, created_at, processed_at, sequence, problem });
            }
        }
    }
}

/// Why the absence of a message proves nothing, if so.
fn unprovable(facts: &StreamFacts) -> Option<&'static str> {
    match facts.retention {
        Retention::Limits if facts.limited_per_subject => Some(
            "keeps only so many messages a subject (max_msgs_per_subject): one that is gone may have been followed by newer \
             ones, so nothing is proved by its absence",
        ),
        Retention::Limits => None,
        Retention::WorkQueue => {
            Some("is a work queue: it removes messages once consumed, so nothing is proved by their absence")
        }
        Retention::Interest => Some(
            "keeps messages only as long as a consumer waits for them (retention interest), so nothing is proved by their \
             absence",
        ),
        Retention::Other => Some("has a retention that this version does not know, so nothing can be proved"),
    }
}

/// Asks the stream, and asks again where the connection or a server fails for a while.
async fn patiently<T>(mut ask: impl AsyncFnMut() -> Result<T, Failure>) -> Result<T, Failure> {
    let start = Instant::now();
    loop {
        match ask().await {
            Err(failure) if failure.class() == Class::Transient && start.elapsed() < PATIENCE => {
                tokio::time::sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

fn time(moment: Moment, now: SystemTime) -> SystemTime {
    match moment {
        Moment::Ago(duration) => now.checked_sub(duration).unwrap_or(SystemTime::UNIX_EPOCH),
        Moment::At(timestamp) => timestamp.into(),
    }
}

/// Rows come with times between 1970 and the present; a wilder one of the request is shown as the nearest there is.
fn timestamp(time: SystemTime) -> Timestamp {
    let end = if time < SystemTime::UNIX_EPOCH { Timestamp::MIN } else { Timestamp::MAX };
    Timestamp::try_from(time).unwrap_or(end)
}

/// How much of the range lies before `at`, from 0 to 1.
fn share(since: SystemTime, at: SystemTime, until: SystemTime) -> f64 {
    let seconds = |to: SystemTime| to.duration_since(since).unwrap_or_default().as_secs_f64();
    (seconds(at) / seconds(until).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
}
