//! Reading a stream back, for checks on exactly what it holds.

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use bytes::Bytes;
use futures_util::StreamExt as _;

/// Longest wait for the next message of a stream that is known to hold more.
const NEXT: Duration = Duration::from_secs(30);

/// A message as the stream holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    pub sequence: u64,
    pub subject: String,
    /// In the order of the client library, several values of a name one after the other.
    pub headers: Vec<(String, String)>,
    pub payload: Bytes,
}

impl Stored {
    /// The first value of a header, by its exact name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// `Nats-Msg-Id`, if it has one.
    pub fn id_or_none(&self) -> Option<&str> {
        self.header("Nats-Msg-Id")
    }

    /// `Nats-Msg-Id`. Panics when it is missing.
    pub fn id(&self) -> &str {
        self.header("Nats-Msg-Id").expect("Nats-Msg-Id")
    }
}

/// How many messages the stream holds; 0 when there is no such stream.
pub async fn count(jetstream: &Context, stream: &str) -> u64 {
    match jetstream.get_stream(stream).await {
        Ok(stream) => stream.cached_info().state.messages,
        Err(_) => 0,
    }
}

/// Every message that the stream holds now, in order.
pub async fn read_all(jetstream: &Context, stream: &str) -> Vec<Stored> {
    let stream = jetstream.get_stream(stream).await.expect("the stream");
    if stream.cached_info().state.messages == 0 {
        return Vec::new();
    }
    let consumer = stream.create_consumer(OrderedConfig::default()).await.expect("a consumer");
    let mut messages = consumer.messages().await.expect("messages");
    let mut all = Vec::new();
    loop {
        let next = tokio::time::timeout(NEXT, messages.next()).await.expect("the stream holds more messages");
        let message = next.expect("the consumer goes on").expect("a message");
        let info = message.info().expect("the stream's numbers");
        let (sequence, pending) = (info.stream_sequence, info.pending);
        let message = message.message;
        let headers =
            message.headers.iter().flat_map(|headers| headers.iter()).flat_map(|(name, values)| {
                values.iter().map(move |value| (name.to_string(), value.as_str().to_owned()))
            });
        let headers = headers.collect();
        all.push(Stored { sequence, subject: message.subject.to_string(), headers, payload: message.payload });
        if pending == 0 {
            return all;
        }
    }
}
