//! Requests to JetStream's API: JSON there and back (`io.nats.jetstream.api.v1`), read leniently, so that a newer
//! server with fields and values unknown today is understood all the same.

use std::sync::atomic::Ordering;
use std::time::Duration;

use async_nats::{Message, RequestErrorKind};
use bytes::Bytes;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;

use super::connect::Connection;
use super::notice::Notice;
use super::publish::{ApiError, Headers};
use crate::fault::Failure;

/// For one answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// JetStream's API, perhaps in another domain.
#[derive(Clone, Debug)]
pub(super) struct Api {
    pub(super) connection: Connection,
    prefix: String,
}

/// An error as the server gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: u64,
    pub(super) code: u64,
    pub(super) text: String,
}

impl Refusal {
    pub(super) fn into_failure(self) -> Failure {
        Failure::from_api(self.status, self.code, &self.text)
    }
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow, default)]
    error: Option<ApiError<'a>>,
}

impl Api {
    pub(super) fn new(connection: &Connection, domain: Option<&str>) -> Self {
        let prefix = domain.map_or_else(|| "$JS.API".to_owned(), |domain| format!("$JS.{domain}.API"));
        Self { connection: connection.clone(), prefix }
    }

    pub(super) fn subject(&self, verb: &str) -> String {
        format!("{}.{verb}", self.prefix)
    }

    /// Asks, and reads the answer: the outer error is of the way there and back, the inner one of the server's.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        verb: &str,
        body: &serde_json::Value,
    ) -> Result<Result<T, Refusal>, Failure> {
        let body = if body.is_null() { Bytes::new() } else { Bytes::from(body.to_string()) };
        let answer = self.request(self.subject(verb), body).await?;
        let strange = |error: serde_json::Error| Failure::UnknownAnswer(format!("{verb}: {error}"));
        let envelope: Envelope<'_> = serde_json::from_slice(&answer).map_err(strange)?;
        if let Some(error) = envelope.error {
            let text = error.description.unwrap_or_default().into_owned();
            return Ok(Err(Refusal { status: error.code, code: error.err_code, text }));
        }
        serde_json::from_slice(&answer).map(Ok).map_err(strange)
    }

    async fn request(&self, subject: String, body: Bytes) -> Result<Bytes, Failure> {
        match request(&self.connection, &subject, Headers::new(), body, TIMEOUT).await {
            Ok(message) => Ok(message.payload),
            Err(Failure::NoResponders) => Err(Failure::JetStreamUnavailable(format!("nobody answers to {subject}"))),
            Err(Failure::AckTimeout) => {
                Err(Failure::JetStreamUnavailable(format!("no answer to {subject} within {TIMEOUT:?}")))
            }
            Err(other) => Err(other),
        }
    }
}

/// Sends a request and waits for the first reply.
///
/// # Errors
/// [`Failure::NoResponders`], [`Failure::AckTimeout`], [`Failure::PermissionDenied`] as soon as the server tells it,
/// [`Failure::Disconnected`].
pub(super) async fn request(
    connection: &Connection,
    subject: &str,
    headers: Headers,
    payload: Bytes,
    timeout: Duration,
) -> Result<Message, Failure> {
    let wire = connection.wire()?;
    // Before the request, or its refusal might be missed.
    let mut notices = connection.notices();
    if connection.inbox_refused().load(Ordering::Relaxed) {
        return Err(Refused::Inbox.failure(subject));
    }
    let answer = wire.client.request_with_headers(subject.to_owned(), headers.into_map(), payload);
    tokio::select! {
        answer = tokio::time::timeout(timeout, answer) => match answer {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(error)) => Err(match error.kind() {
                RequestErrorKind::NoResponders => Failure::NoResponders,
                RequestErrorKind::TimedOut => Failure::AckTimeout,
                RequestErrorKind::MaxPayloadExceeded => Failure::MessageTooLarge { size: None, limit: None },
                RequestErrorKind::InvalidSubject => Failure::InvalidSubject("async-nats refuses it"),
                RequestErrorKind::Other => Failure::Disconnected,
            }),
            Err(_) => Err(Failure::AckTimeout),
        },
        refused = refusal(&mut notices, subject) => Err(refused.failure(subject)),
    }
}

/// What the server refused of a request.
pub(super) enum Refused {
    Publish,
    Inbox,
}

impl Refused {
    /// The failure of a request to `subject`.
    pub(super) fn failure(self, subject: &str) -> Failure {
        let (action, subject) = match self {
            Self::Publish => ("publish to", subject),
            Self::Inbox => ("subscribe to", "_INBOX.>"),
        };
        Failure::PermissionDenied { action, subject: subject.to_owned() }
    }
}

/// Waits until the server refuses the request to `asked`, or the subscription to its answer.
pub(super) async fn refusal(notices: &mut Receiver<Notice>, asked: &str) -> Refused {
    loop {
        match notices.recv().await {
            Ok(Notice::PublishRefused { subject }) if subject == asked => return Refused::Publish,
            Ok(Notice::SubscribeRefused { subject }) if subject.starts_with("_INBOX.") => return Refused::Inbox,
            Ok(_) | Err(RecvError::Lagged(_)) => {}
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}
