//! Compensations: each due one is a request to the service that undoes such operations.
//!
//! A few are asked at a time, beside everything else. An attempt counts from its claim, so that one which kills the
//! relay counts too; one that the service is not to blame for is given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::session;
use crate::config::Retry;
use crate::fault::Class;
use crate::flow::retry;
use crate::flow::route::CompensationRoute;
use crate::nats::connect::Connection;
use crate::nats::publish::Headers;
use crate::nats::request::Unanswered;
use crate::nats::stream::Stream;
use crate::pause::Pause;
use crate::postgres::connect::{self, Target};
use crate::postgres::describe;
use crate::postgres::outbox::{Attempted, Claim, Compensation, Tables, Texts};
use crate::telemetry::metrics::{Metrics, compensation};

/// Requests under way, at most.
const AT_ONCE: usize = 8;
/// How much longer than the request a lease lasts: for the way to the table and back, over a restart of PostgreSQL too.
const LEASE_MORE: Duration = Duration::from_mins(1);
/// How long an answer is waited for once the session stops.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long PostgreSQL is waited for then: over a link that is half open it never answers.
const LAST: Duration = Duration::from_secs(5);
/// Bytes of a reason that the table keeps.
const REASON: usize = 500;

/// The running task.
pub struct Compensations {
    pub target: Target,
    pub tables: Tables,
    /// Bytes of a payload beyond which it is not read.
    pub cap: usize,
    pub interval: Duration,
    /// Who holds the leases.
    pub worker: String,
    pub asker: Arc<Asker>,
    pub metrics: Metrics,
    pub stop: CancellationToken,
}

/// What a request needs.
#[derive(Debug)]
pub struct Asker {
    pub connection: Connection,
    /// Whether a silent service is to blame is seen by whether the server answers.
    pub stream: Stream,
    pub route: CompensationRoute,
    pub timeout: Duration,
    pub retry: Retry,
}

/// What is under way, whatever becomes of the connection to PostgreSQL.
#[derive(Default)]
struct Desk {
    asked: JoinSet<(Compensation, Attempted)>,
    /// Outcomes that are not recorded yet.
    answered: Vec<(Compensation, Attempted)>,
}

impl Compensations {
    /// Runs until the session stops, and no longer than `PATIENCE` beyond, or `LAST` when PostgreSQL does not answer.
    pub async fn run(self) {
        let stop = self.stop.clone();
        let last = async {
            stop.cancelled().await;
            tokio::time::sleep(LAST).await;
        };
        tokio::select! {
            () = self.work() => {}
            () = last => warn!("PostgreSQL does not answer: compensations under way are asked again when their lease ends"),
        }
    }

    async fn work(self) {
        let mut pause = Pause::new(Duration::from_millis(200), Duration::from_secs(5));
        let mut desk = Desk::default();
        loop {
            match connect::sql(&self.target, &session("outbox-relay compensations")).await {
                Ok(connection) => {
                    let claim = Claim { client: &connection.client, tables: &self.tables, worker: &self.worker };
                    match self.serve(claim, &mut desk, &mut pause).await {
                        Ok(()) => return connection.close().await,
                        Err(error) => warn!(error = %describe(&error), "compensations start over"),
                    }
                }
                Err(error) => warn!(%error, "compensations cannot connect; it is tried again"),
            }
            // What is not recorded when the session stops is asked again when its lease ends, under the same id.
            if self.stop.run_until_cancelled(tokio::time::sleep(pause.next())).await.is_none() {
                return;
            }
        }
    }

    async fn serve(&self, claim: Claim<'_>, desk: &mut Desk, pause: &mut Pause) -> Result<(), tokio_postgres::Error> {
        let mut next_look = Instant::now();
        loop {
            self.record(claim, desk).await?;
            let stopping = self.stop.is_cancelled();
            if stopping && desk.asked.is_empty() {
                return Ok(());
            }
            let room = AT_ONCE.saturating_sub(desk.asked.len());
            if !stopping && room > 0 && next_look <= Instant::now() {
                let all_taken = self.look(claim, desk, room).await?;
                pause.reset();
                next_look = Instant::now() + if all_taken { self.interval } else { Duration::ZERO };
            }
            tokio::select! {
                Some(done) = desk.asked.join_next() => desk.answered.extend(done),
                () = tokio::time::sleep_until(next_look.into()), if !stopping && desk.asked.len() < AT_ONCE => {}
                () = self.stop.cancelled(), if !stopping => {}
            }
        }
    }

    /// Claims and asks at most `room` compensations. Returns whether there were fewer.
    async fn look(&self, claim: Claim<'_>, desk: &mut Desk, room: usize) -> Result<bool, tokio_postgres::Error> {
        if !self.asker.connection.link().borrow().connected {
            return Ok(true);
        }
        let given_up = claim.give_up().await?;
        self.metrics.compensations.of(compensation::MANUAL_REQUIRED).inc_by(given_up);
        let claimed = claim.due(room, self.asker.timeout.saturating_add(LEASE_MORE), self.cap).await?;
        let count = claimed.len();
        for compensation in claimed {
            let (asker, stop) = (Arc::clone(&self.asker), self.stop.clone());
            desk.asked.spawn(async move {
                let stopped = async {
                    stop.cancelled().await;
                    tokio::time::sleep(PATIENCE).await;
                };
                let attempted = tokio::select! {
                    attempted = asker.attempt(&compensation) => attempted,
                    () = stopped => Attempted::Returned { retry_in: Duration::ZERO },
                };
                (compensation, attempted)
            });
        }
        Ok(count < room)
    }

    async fn record(&self, claim: Claim<'_>, desk: &mut Desk) -> Result<(), tokio_postgres::Error> {
        while let Some((claimed, attempted)) = desk.answered.last() {
            let (id, attempt) = (claimed.id, claimed.attempt);
            let status = claim.record(claimed, attempted).await?;
            let outcome = match (status.as_deref(), attempted) {
                (None, _) => {
                    debug!(id, attempt, "someone else has changed a compensation's state meanwhile; theirs stands");
                    None
                }
                (_, Attempted::Resolved) => Some(compensation::RESOLVED),
                (_, Attempted::Returned { .. }) => Some(compensation::RETURNED),
                (Some("manual_required"), Attempted::Failed { .. }) => Some(compensation::MANUAL_REQUIRED),
                (Some(_), Attempted::Failed { .. }) => Some(compensation::FAILED),
            };
            if let Some(outcome) = outcome {
                self.metrics.compensations.of(outcome).inc();
                info!(id, attempt, outcome, "a compensation was attempted");
            }
            desk.answered.pop();
        }
        Ok(())
    }
}

/// The body of a request.
#[derive(Serialize)]
struct Body<'a> {
    id: i64,
    batch_id: &'a str,
    operation_type: &'a str,
    item_index: i32,
    item_payload: &'a RawValue,
    attempt: i32,
}

impl Asker {
    async fn attempt(&self, compensation: &Compensation) -> Attempted {
        let texts = match &compensation.texts {
            Ok(texts) => texts,
            Err(reason) => return self.failed(compensation, reason),
        };
        let subject = self.route.subject(&texts.operation_type);
        let (subject, body) = match (subject, body(compensation, texts)) {
            (Ok(subject), Ok(body)) => (subject, body),
            (Err(reason), _) => return self.failed(compensation, &reason.to_string()),
            (_, Err(reason)) => return self.failed(compensation, &reason),
        };
        let mut headers = Headers::new();
        headers.set("Outbox-Compensation-Id", &request_id(compensation));
        headers.set("Content-Type", "application/json");
        match self.connection.ask(&subject, headers, body, self.timeout).await {
            Ok(_) => Attempted::Resolved,
            Err(reason) if self.is_to_blame(&reason).await => self.failed(compensation, &reason.to_string()),
            Err(_) => Attempted::Returned { retry_in: self.retry.initial },
        }
    }

    /// Whether the row, its service or the set-up is to blame, and not the way to it.
    async fn is_to_blame(&self, reason: &Unanswered) -> bool {
        match reason {
            Unanswered::NotSent(failure) => failure.class() != Class::Transient,
            // A server that is frozen or cut off is silent as well.
            Unanswered::Silence(_) => self.stream.facts().await.is_ok(),
            Unanswered::NoResponder | Unanswered::Service { .. } | Unanswered::Captured(_) => true,
        }
    }

    fn failed(&self, compensation: &Compensation, reason: &str) -> Attempted {
        let attempt = u32::try_from(compensation.attempt).unwrap_or(1);
        let Retry { initial, max } = self.retry;
        let retry_in = retry::delay(attempt, initial, max, retry::spread(compensation.id));
        let end = reason.floor_char_boundary(REASON);
        Attempted::Failed { reason: reason.get(..end).unwrap_or_default().to_owned(), retry_in }
    }
}

/// The same for every attempt. With the time of the row's creation, because ids of another database, or of a table that
/// was truncated, are the same numbers.
fn request_id(compensation: &Compensation) -> String {
    format!("{}-{}", compensation.id, compensation.created_at)
}

fn body(compensation: &Compensation, texts: &Texts) -> Result<Bytes, String> {
    let unreadable = |error: serde_json::Error| format!("its item_payload cannot be sent: {error}");
    let body = Body {
        id: compensation.id,
        batch_id: &texts.batch_id,
        operation_type: &texts.operation_type,
        item_index: compensation.item_index,
        // As PostgreSQL prints it: never parsed into numbers and printed again.
        item_payload: serde_json::from_str(&texts.item_payload).map_err(unreadable)?,
        attempt: compensation.attempt,
    };
    serde_json::to_vec(&body).map(Bytes::from).map_err(unreadable)
}
