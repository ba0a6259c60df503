//! The NATS side of `outbox-relay demo`: a plain subscriber, and the removal of the demo's stream.

use std::time::Instant;

use async_nats::Subscriber;
use futures_util::StreamExt;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::api::{Api, Refusal};
use super::connect::Connection;
use super::stream::NOT_FOUND;
use crate::config;
use crate::fault::Failure;

/// A message as the subscriber has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// When it was handed to the subscriber.
    pub at: Instant,
    /// Where it was published.
    pub subject: String,
    /// `Nats-Msg-Id`; empty when there is none.
    pub id: String,
}

/// A subscription of core NATS, without JetStream.
#[derive(Debug)]
pub struct Listener(Subscriber);

impl Listener {
    /// Subscribes, and makes sure that the server has heard of it and has JetStream.
    ///
    /// # Errors
    /// When the connection is down, or JetStream does not answer.
    pub async fn open(connection: &Connection, config: &config::Nats, filter: String) -> Result<Self, Failure> {
        let subscriber = connection.wire()?.client.subscribe(filter).await.map_err(|_| Failure::Disconnected)?;
        // On the same connection, so that the answer comes after the subscription was taken.
        let answer = Api::new(connection, config.domain.as_deref()).call::<IgnoredAny>("INFO", &Value::Null).await?;
        answer.map(|_| Self(subscriber)).map_err(Refusal::into_failure)
    }

    /// Waits for the next message; `None` when the connection was lost.
    pub async fn next(&mut self) -> Option<Received> {
        let message = self.0.next().await?;
        let at = Instant::now();
        let id = message.headers.as_ref().and_then(|headers| headers.get(async_nats::header::NATS_MESSAGE_ID));
        let id = id.map(|id| id.as_str().to_owned()).unwrap_or_default();
        Some(Received { at, subject: message.subject.into_string(), id })
    }
}

/// Deletes a stream. One that is gone already is no error.
///
/// # Errors
/// When the server does not answer, or refuses.
pub async fn remove_stream(connection: &Connection, config: &config::Nats, name: &str) -> Result<(), Failure> {
    let api = Api::new(connection, config.domain.as_deref());
    match api.call::<IgnoredAny>(&format!("STREAM.DELETE.{name}"), &Value::Null).await? {
        Err(refusal) if refusal.code != NOT_FOUND => Err(refusal.into_failure()),
        _ => Ok(()),
    }
}
