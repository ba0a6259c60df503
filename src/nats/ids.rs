//! Reading the ids of stored messages back, for the resume guard, for `verify`, and wherever an answer of `duplicate`
//! has to mean a message that can be read.

use std::time::Duration;

use async_nats::{Message, StatusCode};
use bytes::Bytes;
use futures_util::StreamExt;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::json;

use super::api::{Refusal, refusal};
use super::request::header;
use super::stream::{Stream, StreamFault};
use crate::fault::Failure;

/// Messages asked for at once.
const BATCH: u64 = 1000;
/// Messages of a walk that are read at a time.
const STRIDE: u64 = 50_000;
/// Without any message for so long, the reading has failed.
const PATIENCE: Duration = Duration::from_secs(5);

/// A stored message's place and its `Nats-Msg-Id`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredId {
    /// Where it stands in the stream.
    pub sequence: u64,
    /// When it was stored, by the server's clock.
    pub stored_at: Timestamp,
    /// `None`: it was published without one.
    pub id: Option<String>,
}

/// Where a reading begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Behind this sequence.
    After(u64),
    /// With the first message stored at this time or later, by the server's clock.
    Time(Timestamp),
}

/// A walk through the stream to its end, some messages at a time, so that memory does not grow with the stream.
#[derive(Debug)]
pub struct Walk<'a> {
    stream: &'a Stream,
    /// `None`: the end was reached.
    next: Option<Start>,
}

impl Walk<'_> {
    /// The next messages; `None` at the end. After a failure the same can be asked for again.
    ///
    /// # Errors
    /// As [`Stream::ids_after`].
    pub async fn next(&mut self) -> Result<Option<Vec<StoredId>>, Failure> {
        let Some(start) = self.next else { return Ok(None) };
        let (stored, all) = self.stream.ids_from(start, STRIDE).await?;
        self.next = stored.last().filter(|_| !all).map(|last| Start::After(last.sequence));
        Ok((!stored.is_empty()).then_some(stored))
    }
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
    /// The connection's and JetStream's failures; nothing is known then. A work queue refuses
    /// ([`Failure::UnknownApi`]).
    pub async fn ids_after(&self, sequence: u64, limit: u64) -> Result<(Vec<StoredId>, bool), Failure> {
        self.ids_from(Start::After(sequence), limit).await
    }

    /// Sees whether ids can be read, mostly from behind the last message, `last`, where there is nothing to be read.
    pub async fn try_ids(&self, last: u64) -> Result<(), StreamFault> {
        let tried = async {
            let reader = self.create_reader(Start::After(last)).await?;
            let read = self.read(&reader.name, Pulls { wanted: 1, at_once: true, ..Pulls::default() }).await;
            self.remove_reader(&reader.name).await;
            read
        };
        tried.await.map(|_| ()).map_err(|failure| self.fault(failure))
    }

    /// Walks through the ids of all messages from `start` on.
    pub fn walk(&self, start: Start) -> Walk<'_> {
        Walk { stream: self, next: Some(start) }
    }

    /// The message at this sequence; `None` when there is none any more. In a cluster the message of a fresh
    /// acknowledgement may come to be seen a moment later: ask again before taking it for lost.
    ///
    /// # Errors
    /// As [`Self::ids_after`].
    pub async fn id_at(&self, sequence: u64) -> Result<Option<StoredId>, Failure> {
        let (stored, _) = self.ids_after(sequence.saturating_sub(1), 1).await?;
        Ok(stored.into_iter().find(|stored| stored.sequence == sequence))
    }

    /// The first message with this id among those from `start` on. It reads them all until then, and goes on to `until`
    /// at most, by the server's clock.
    ///
    /// # Errors
    /// As [`Self::ids_after`].
    pub async fn find(&self, id: &str, start: Start, until: Option<Timestamp>) -> Result<Option<StoredId>, Failure> {
        let mut walk = self.walk(start);
        while let Some(stored) = walk.next().await? {
            let ends = stored.last().is_some_and(|last| until.is_some_and(|until| last.stored_at > until));
            let found = stored.into_iter().find(|stored| stored.id.as_deref() == Some(id));
            if found.is_some() || ends {
                return Ok(found);
            }
        }
        Ok(None)
    }

    async fn ids_from(&self, start: Start, limit: u64) -> Result<(Vec<StoredId>, bool), Failure> {
        let reader = self.create_reader(start).await?;
        let wanted = reader.num_pending.min(limit);
        let read = self.read(&reader.name, Pulls { wanted, ..Pulls::default() }).await;
        self.remove_reader(&reader.name).await;
        Ok((read?, wanted == reader.num_pending))
    }

    /// An ephemeral pull consumer, in memory, for this one reading.
    async fn create_reader(&self, start: Start) -> Result<Created, Failure> {
        let (policy, option, value) = match start {
            Start::After(sequence) => ("by_start_sequence", "opt_start_seq", json!(sequence.saturating_add(1))),
            Start::Time(time) => ("by_start_time", "opt_start_time", json!(time.to_string())),
        };
        let body = json!({
            "stream_name": self.name,
            "config": {
                "deliver_policy": policy,
                option: value,
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

    /// It would end by itself after its inactive threshold.
    async fn remove_reader(&self, reader: &str) {
        let verb = format!("CONSUMER.DELETE.{}.{reader}", self.name);
        let _ = self.api.call::<serde_json::Value>(&verb, &serde_json::Value::Null).await;
    }

    async fn read(&self, reader: &str, mut pulls: Pulls) -> Result<Vec<StoredId>, Failure> {
        let client = self.api.connection.wire()?.client;
        let mut notices = self.api.connection.notices();
        let inbox = client.new_inbox();
        let mut messages = client.subscribe(inbox.clone()).await.map_err(|_| Failure::Disconnected)?;
        let next_of = |reader: &str| self.api.subject(&format!("CONSUMER.MSG.NEXT.{}.{reader}", self.name));
        let next = next_of(reader);
        let mut ids = Vec::new();
        while pulls.read < pulls.wanted {
            while let Some(body) = pulls.next() {
                client
                    .publish_with_reply(next.clone(), inbox.clone(), Bytes::from(body.to_string()))
                    .await
                    .map_err(|_| Failure::Disconnected)?;
            }
            let message = tokio::select! {
                message = tokio::time::timeout(PATIENCE, messages.next()) => message,
                refused = refusal(&mut notices, &next) => return Err(refused.failure(&next_of("*"))),
            };
            let message = message.map_err(|_| Failure::AckTimeout)?.ok_or(Failure::Disconnected)?;
            if let Some(id) = read_id(&message) {
                ids.push(id);
                pulls.read += 1;
            } else if message.status == Some(StatusCode::NOT_FOUND) {
                // Fewer are left than were: they expired, or were removed meanwhile.
                return Ok(ids);
            } else {
                pulls.over(&message)?;
            }
        }
        Ok(ids)
    }
}

/// What is asked for of a consumer, in messages.
///
/// A pull that is over before its messages have come says nothing of whether there are more: the server was slow, or they
/// are gone. So it is asked again, and only its word that there are none is the end.
#[derive(Debug, Default)]
struct Pulls {
    wanted: u64,
    asked: u64,
    read: u64,
    /// There is one pull at a time, which does not wait, as when earlier ones were over.
    at_once: bool,
    /// How much was read when it was made.
    anew: Option<u64>,
}

impl Pulls {
    /// The next pull, if one is to be made now.
    fn next(&mut self) -> Option<serde_json::Value> {
        // The next messages are on their way while these are read.
        let ahead = if self.at_once { 1 } else { 2 * BATCH };
        if self.asked >= self.wanted || self.asked >= self.read + ahead {
            return None;
        }
        let batch = BATCH.min(self.wanted - self.asked);
        self.asked += batch;
        if self.at_once {
            self.anew = Some(self.read);
            return Some(json!({ "batch": batch, "no_wait": true }));
        }
        Some(json!({ "batch": batch, "expires": 4_000_000_000_u64 }))
    }

    /// A pull is over, and says how many messages it did not bring.
    fn over(&mut self, message: &Message) -> Result<(), Failure> {
        let left = header(message.headers.as_ref(), "Nats-Pending-Messages").and_then(|left| left.parse::<u64>().ok());
        let (Some(StatusCode::TIMEOUT), Some(left)) = (message.status, left) else { return Err(unexpected(message)) };
        if self.anew == Some(self.read) {
            return Err(Failure::AckTimeout);
        }
        self.asked = self.asked.saturating_sub(left).max(self.read);
        self.at_once = true;
        Ok(())
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
    let (sequence, stored_at) = place(message.reply.as_deref()?)?;
    let id = header(message.headers.as_ref(), "Nats-Msg-Id");
    Some(StoredId { sequence, stored_at, id })
}

/// Sequence and time of a delivered message, from its reply subject:
/// `$JS.ACK.<stream>.<consumer>.<delivered>.<stream sequence>.<consumer sequence>.<nanoseconds since 1970>.<pending>`,
/// or the same with `<domain>.<account>.` before the stream and perhaps more behind (ADR-15).
fn place(reply: &str) -> Option<(u64, Timestamp)> {
    let tokens: Vec<&str> = reply.strip_prefix("$JS.ACK.")?.split('.').collect();
    let sequence = match tokens.len() {
        7 => 3,
        9.. => 5,
        _ => return None,
    };
    let nanoseconds = tokens.get(sequence + 2)?.parse().ok()?;
    Some((tokens.get(sequence)?.parse().ok()?, Timestamp::from_nanosecond(nanoseconds).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pull is over without so many of its messages.
    fn over(left: u64) -> Message {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert("Nats-Pending-Messages", left.to_string());
        Message {
            subject: "_INBOX.a".into(),
            reply: None,
            payload: Bytes::new(),
            headers: Some(headers),
            status: Some(StatusCode::TIMEOUT),
            description: None,
            length: 0,
        }
    }

    #[test]
    fn what_a_pull_did_not_bring_is_asked_for_again_until_there_is_none() {
        let mut pulls = Pulls { wanted: 2500, ..Pulls::default() };
        let batches = |pulls: &mut Pulls| -> Vec<(u64, bool)> {
            let next = std::iter::from_fn(|| pulls.next());
            next.map(|body| (body["batch"].as_u64().unwrap(), body["no_wait"] == true)).collect()
        };
        assert_eq!(batches(&mut pulls), [(1000, false), (1000, false)]);
        pulls.read = 400;
        assert_eq!(batches(&mut pulls), [(500, false)]);
        assert_eq!(pulls.over(&over(600)), Ok(()));
        assert!(batches(&mut pulls).is_empty(), "the others may still bring theirs");
        assert_eq!(pulls.over(&over(1000)), Ok(()));
        assert_eq!(pulls.over(&over(500)), Ok(()));
        assert_eq!(batches(&mut pulls), [(1000, true)]);
        pulls.read = 900;
        assert_eq!(pulls.over(&over(500)), Ok(()), "it brought some");
        assert_eq!(batches(&mut pulls), [(1000, true)]);
        assert_eq!(pulls.over(&over(1000)), Err(Failure::AckTimeout), "neither messages nor word that there are none");
    }

    #[test]
    fn finds_sequence_and_time_in_both_forms_of_reply() {
        let found = Some((42, "2023-11-14T22:13:20.000000001Z".parse().unwrap()));
        assert_eq!(place("$JS.ACK.S.c.1.42.7.1700000000000000001.0"), found);
        assert_eq!(place("$JS.ACK._.HASH.S.c.1.42.7.1700000000000000001.0"), found);
        assert_eq!(place("$JS.ACK._.HASH.S.c.1.42.7.1700000000000000001.0.rnd"), found);
        for reply in
            ["", "$JS.ACK.", "$JS.ACK.S.c.1.42", "_INBOX.a.b", "$JS.ACK.S.c.1.x.7.1.0", "$JS.ACK.S.c.1.2.7.x.0"]
        {
            assert_eq!(place(reply), None, "{reply}");
        }
    }
}
