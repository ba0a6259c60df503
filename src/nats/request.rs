//! Messages outside the stream: requests to services, and announcements that nobody need hear.

use std::borrow::Cow;
use std::time::Duration;

use async_nats::{HeaderMap, Message};
use bytes::Bytes;
use serde::Deserialize;

use super::api;
use super::connect::Connection;
use super::publish::{Headers, check_subject};
use crate::fault::Failure;

/// Why a request was not fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unanswered {
    /// It was not sent, or its answer cannot come; the service is not to blame.
    #[error("{0}")]
    NotSent(Failure),
    /// At the moment: one may come.
    #[error("no service listens to the subject")]
    NoResponder,
    /// It may have done what it was asked for all the same.
    #[error("no answer within {0:?}")]
    Silence(Duration),
    /// The service answered with an error (`Nats-Service-Error`).
    #[error("the service answers with error {code}: {text}")]
    Service { code: String, text: String },
    /// A stream answered in the service's place: it captures the subject.
    #[error("stream {0:?} captures the subject, so no service answers")]
    Captured(String),
}

impl Connection {
    /// Sends a request, and gives the body of the service's answer.
    pub async fn ask(
        &self,
        subject: &str,
        headers: Headers,
        payload: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, Unanswered> {
        check_subject(subject).map_err(Unanswered::NotSent)?;
        match api::request(self, subject, headers, payload, timeout).await {
            Ok(message) => read_answer(message),
            Err(Failure::NoResponders) => Err(Unanswered::NoResponder),
            Err(Failure::AckTimeout) => Err(Unanswered::Silence(timeout)),
            Err(failure) => Err(Unanswered::NotSent(failure)),
        }
    }

    /// Sends a message that nobody acknowledges. `Ok` says only that it was handed to the connection.
    pub async fn announce(&self, subject: String, headers: Headers, payload: Bytes) -> Result<(), Failure> {
        check_subject(&subject)?;
        let client = self.wire()?.client;
        let sent = client.publish_with_headers(subject, headers.into_map(), payload).await;
        sent.map_err(|error| match error.kind() {
            async_nats::PublishErrorKind::MaxPayloadExceeded => Failure::MessageTooLarge { size: None, limit: None },
            async_nats::PublishErrorKind::InvalidSubject => Failure::InvalidSubject("async-nats refuses it"),
            async_nats::PublishErrorKind::Send => Failure::Disconnected,
        })
    }
}

#[derive(Deserialize)]
struct MaybePubAck<'a> {
    #[serde(borrow)]
    stream: Cow<'a, str>,
    #[serde(rename = "seq")]
    _sequence: u64,
}

fn read_answer(message: Message) -> Result<Bytes, Unanswered> {
    if let Some(text) = header(message.headers.as_ref(), "Nats-Service-Error") {
        let code = header(message.headers.as_ref(), "Nats-Service-Error-Code").unwrap_or_default();
        return Err(Unanswered::Service { code, text });
    }
    match serde_json::from_slice::<MaybePubAck<'_>>(&message.payload) {
        Ok(ack) => Err(Unanswered::Captured(ack.stream.into_owned())),
        Err(_) => Ok(message.payload),
    }
}

/// Names are matched exactly: case is significant in NATS.
pub(super) fn header(headers: Option<&HeaderMap>, wanted: &str) -> Option<String> {
    let (_, values) = headers?.iter().find(|(name, _)| AsRef::<str>::as_ref(*name) == wanted)?;
    values.first().map(|value| value.as_str().to_owned())
}
