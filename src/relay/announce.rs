//! Announcements of dead letters (`dead_letter.announce`), for whoever listens.
//!
//! Nobody waits for them: one that cannot be sent, or that comes while too many wait, is left out. The dead letter
//! itself is committed before. The payload stays in the table: it may be the very reason (too large, not allowed on its
//! subject), and must not take another way past the permissions of NATS.

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::mpsc;
use tracing::{debug, warn};

use crate::flow::event::Event;
use crate::flow::route;
use crate::nats::connect::Connection;
use crate::nats::publish::Headers;

/// Announcements that wait, at most.
const WAITING: usize = 1024;
/// How long the last ones are waited for when the session ends.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where announcements are handed in. Without a task behind it, nothing is announced.
#[derive(Debug, Default)]
pub struct Announcer(Option<mpsc::Sender<Announcement>>);

/// One announcement.
#[derive(Debug)]
struct Announcement {
    subject: String,
    body: Bytes,
}

/// The body of an announcement.
#[derive(Serialize)]
struct Body<'a> {
    event_id: &'a str,
    tenant_id: Option<&'a str>,
    aggregate_type: &'a str,
    aggregate_id: &'a str,
    event_type: &'a str,
    error_code: &'a str,
    error_message: &'a str,
    /// Failed attempts.
    retry_count: i32,
}

impl Announcer {
    /// Announces the dead letter of `event`, which is committed.
    pub fn announce(&self, event: &Event, code: &str, message: &str) {
        let Some(queue) = &self.0 else { return };
        let body = Body {
            event_id: &event.event_id,
            tenant_id: event.tenant_id.as_deref(),
            aggregate_type: &event.aggregate_type,
            aggregate_id: &event.aggregate_id,
            event_type: &event.event_type,
            error_code: code,
            error_message: message,
            retry_count: event.retry_count.saturating_add(1),
        };
        // Neither fails: strings and a number are JSON, and the names of a row that fit its columns fit a subject.
        let (Ok(subject), Ok(body)) = (route::dead_letter_subject(event), serde_json::to_vec(&body)) else { return };
        if queue.try_send(Announcement { subject, body: body.into() }).is_err() {
            debug!(id = event.id, "too many announcements wait: a dead letter is not announced");
        }
    }
}

/// Starts the task; it ends by itself once the announcer is dropped.
pub fn start(connection: Connection) -> (Announcer, tokio::task::JoinHandle<()>) {
    let (queue, waiting) = mpsc::channel(WAITING);
    (Announcer(Some(queue)), tokio::spawn(run(connection, waiting)))
}

/// Waits for the last announcements, though not for long.
pub async fn finish(mut task: tokio::task::JoinHandle<()>) {
    if tokio::time::timeout(PATIENCE, &mut task).await.is_err() {
        task.abort();
    }
}

async fn run(connection: Connection, mut waiting: mpsc::Receiver<Announcement>) {
    let mut link = connection.link();
    while let Some(Announcement { subject, body }) = waiting.recv().await {
        if link.wait_for(|link| link.connected).await.is_err() {
            return;
        }
        let mut headers = Headers::new();
        headers.set("Content-Type", "application/json");
        if let Err(failure) = connection.announce(subject, headers, body).await {
            warn!(code = failure.code(), hint = failure.hint(), "a dead letter could not be announced");
        }
    }
}
