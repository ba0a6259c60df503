//! Reading the ids of stored messages back, for the resume guard and for `verify`.

use std::time::Duration;

use async_nats::{Message, StatusCode};
use bytes::Bytes;
use futures_util::StreamExt;
use serde::Deserialize;
use serde_json::json;

use super::api::Refusal;
use super::request::header;
use super::stream::Stream;
use crate::fault::Failure;

/// Messages asked for at once.
const BATCH: u64 = 1000;
/// Without any message for so long, the reading has failed.
const PATIENCE: Duration = Duration::from_secs(5);

/// A stored message's place and its `Nats-Msg-Id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredId {
    pub sequence: u64,
    /// `None`: it was published without one.
    pub id: Option<String>,
}

#[derive(Deserialize)]
struct Created {
    name: String,
    #[serde(default)]
    num_pending: u64,
}

impl Stream {
    /// Reads the ids of all messages after `sequence` that are stored when the call begins, in order, at most `limit`
    /// messages. Headers only: payloads do not travel. Gives what it read, and whether that is all.
    ///
    /// # Errors
    /// The connection's and JetStream's failures; nothing is known then. A work queue refuses ([`Failure::UnknownApi`]).
    pub async fn ids_after(&self, sequence: u64, limit: u64) -> Result<(Vec<StoredId>, bool), Failure> {
        let consumer = self.create_reader(sequence).await?;
        let wanted = consumer.num_pending.min(limit);
        let read = self.read(&consumer.name, wanted).await;
        // It would end by itself after its inactive threshold.
        let verb = format!("CONSUMER.DELETE.{}.{}", self.name, consumer.name);
        let _ = self.api.call::<serde_json::Value>(&verb, &serde_json::Value::Null).await;
        Ok((read?, wanted == consumer.num_pending))
    }

    /// An ephemeral pull consumer, in memory, for this one reading.
    async fn create_reader(&self, sequence: u64) -> Result<Created, Failure> {
        let body = json!({
            "stream_name": self.name,
            "config": {
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": sequence.saturating_add(1),
                "ack_policy": "none",
                "headers_only": true,
                "mem_storage": true,
                "num_replicas": 1,
                "inactive_threshold": 30_000_000_000_u64,
            },
        });
        let answer = self.api.call::<Created>(&format!("CONSUMER.CREATE.{}", self.name), &body).await?;
        answer.map_err(Refusal::into_failure)
    }

    async fn read(&self, consumer: &str, wanted: u64) -> Result<Vec<StoredId>, Failure> {
        let client = self.api.connection.wire()?.client;
        let inbox = client.new_inbox();
        let mut messages = client.subscribe(inbox.clone()).await.map_err(|_| Failure::Disconnected)?;
        let next = self.api.subject(&format!("CONSUMER.MSG.NEXT.{}.{consumer}", self.name));
        let mut ids = Vec::new();
        let mut left = wanted;
        while left > 0 {
            let batch = left.min(BATCH);
            let body = json!({ "batch": batch, "expires": 4_000_000_000_u64 });
            client
                .publish_with_reply(next.clone(), inbox.clone(), Bytes::from(body.to_string()))
                .await
                .map_err(|_| Failure::Disconnected)?;
            for _ in 0..batch {
                let message = tokio::time::timeout(PATIENCE, messages.next())
                    .await
                    .map_err(|_| Failure::AckTimeout)?
                    .ok_or(Failure::Disconnected)?;
                match read_id(&message) {
                    Some(id) => ids.push(id),
                    // Fewer are left than were: they expired, or were removed meanwhile.
                    None if message.status == Some(StatusCode::TIMEOUT) => return Ok(ids),
                    None => return Err(unexpected(&message)),
                }
            }
            left = left.saturating_sub(batch);
        }
        Ok(ids)
    }
}

fn unexpected(message: &Message) -> Failure {
    if message.status == Some(StatusCode::NO_RESPONDERS) {
        return Failure::JetStreamUnavailable("the consumer is gone".to_owned());
    }
    let status = message.status.map_or(0, |status| status.as_u16());
    let text = message.description.clone().unwrap_or_default();
    Failure::UnknownAnswer(format!("while reading ids: status {status} {text}"))
}

fn read_id(message: &Message) -> Option<StoredId> {
    if message.status.is_some() {
        return None;
    }
    let sequence = stream_sequence(message.reply.as_deref()?)?;
    let id = header(message.headers.as_ref(), "Nats-Msg-Id");
    Some(StoredId { sequence, id })
}

/// From the reply subject of a delivered message: `$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.…`, or
/// `$JS.ACK.<domain>.<account>.<stream>.<consumer>.<delivered>.<stream sequence>.…` (ADR-15).
fn stream_sequence(reply: &str) -> Option<u64> {
    let tokens: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    let place = match tokens.len() {
        7 => 3,
        9.. => 5,
        _ => return None,
    };
    tokens.get(place)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_sequence_in_both_forms_of_reply() {
        assert_eq!(stream_sequence("$JS.ACK.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.HASH.S.c.1.42.7.1700000000000000000.0"), Some(42));
        assert_eq!(stream_sequence("$JS.ACK._.HASH.S.c.1.42.7.1700000000000000000.0.rnd"), Some(42));
        for reply in ["", "$JS.ACK.", "$JS.ACK.S.c.1.42", "_INBOX.a.b", "$JS.ACK.S.c.1.x.7.1.0"] {
            assert_eq!(stream_sequence(reply), None, "{reply}");
        }
    }
}
