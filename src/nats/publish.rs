//! Publishing into the stream, and its acknowledgements.
//!
//! Many messages are on their way at once. Each carries a reply subject that ends with the caller's token; one
//! subscription takes all replies, so that a message costs no task, no timer and no map entry here.

use std::borrow::Cow;
use std::fmt::Write;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use async_nats::header::{HeaderMap, HeaderName, HeaderValue};
use async_nats::{Message, PublishErrorKind, StatusCode, Subject, Subscriber};
use bytes::Bytes;
use bytestring::ByteString;
use futures_util::{FutureExt, StreamExt};
use memchr::memchr2;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error;
use tokio::sync::watch;

use super::connect::{Connection, Inboxes, Wire};
use crate::fault::Failure;

/// The server allows 65,535 bytes of headers (`JSStreamHeaderExceedsMaximumErr`).
const MAX_HEADERS: usize = 65_535;

/// `NATS/1.0\r\n` before and `\r\n` after the header lines.
const HEADERS_FRAME: usize = 12;

/// The headers of one message, as the lines that go over the wire.
///
/// The client's own map costs more than all else that the relay does for an event: two allocations and three hashes a
/// header. So it is given a single header, whose value goes on over the lines of all others.
#[derive(Clone, Debug, Default)]
pub struct Headers {
    lines: String,
    /// Where each line begins, and how long its name is.
    names: Vec<(usize, usize)>,
    refused: usize,
}

impl Headers {
    /// None yet.
    pub fn new() -> Self {
        // About what the relay's own headers take.
        Self { lines: String::with_capacity(512), names: Vec::with_capacity(16), refused: 0 }
    }

    /// Sets a header. One that cannot be sent (a name with other bytes than ASCII 33–126 or with `:`, a value with CR
    /// or LF), or whose exact name is set already, is left out and counted.
    pub fn set(&mut self, name: &str, value: &str) {
        let legal = !name.is_empty()
            && name.bytes().all(|b| matches!(b, 33..=126) && b != b':')
            && memchr2(b'\r', b'\n', value.as_bytes()).is_none();
        if legal && !self.has(name) {
            self.names.push((self.lines.len(), name.len()));
            for part in [name, ": ", value, "\r\n"] {
                self.lines.push_str(part);
            }
        } else {
            self.refused = self.refused.saturating_add(1);
        }
    }

    fn has(&self, name: &str) -> bool {
        let is_same = |&(start, length): &(usize, usize)| {
            length == name.len() && self.lines.get(start..).is_some_and(|line| line.starts_with(name))
        };
        self.names.iter().any(is_same)
    }

    /// How many headers were left out.
    pub fn refused(&self) -> usize {
        self.refused
    }

    pub(super) fn into_map(self) -> HeaderMap {
        let Some((name, value)) = self.lines.split_once(": ") else { return HeaderMap::new() };
        let name = HeaderName::from_str(name);
        let value = value.strip_suffix("\r\n").unwrap_or(value).to_owned();
        // What a value may hold was seen to by `set`; read like this, the ends of the lines in it are not an attack.
        let value: Result<HeaderValue, Error> = HeaderValue::deserialize(value.into_deserializer());
        match name.ok().zip(value.ok()) {
            Some(header) => [header].into_iter().collect(),
            None => self.one_by_one(),
        }
    }

    /// For a client that takes nothing but single headers.
    fn one_by_one(&self) -> HeaderMap {
        let header = |line: &str| {
            let (name, value) = line.split_once(": ")?;
            Some((HeaderName::from_str(name).ok()?, HeaderValue::from_str(value).ok()?))
        };
        self.lines.split("\r\n").filter_map(header).collect()
    }

    /// Bytes on the wire, which count toward `max_payload` and the stream's `max_msg_size`.
    pub fn size(&self) -> usize {
        if self.lines.is_empty() { 0 } else { self.lines.len().saturating_add(HEADERS_FRAME) }
    }
}

/// The stream's answer to one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// As given to [`Publisher::send`].
    pub token: u64,
    /// Whether the stream has the message.
    pub result: Result<Ack, Failure>,
}

/// The stream has the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Where it stands in the stream. For a duplicate: where the first copy stands.
    pub sequence: u64,
    /// The stream had the message id already, and stored nothing.
    pub duplicate: bool,
}

/// Sends messages.
#[derive(Debug)]
pub struct Publisher {
    wire: watch::Receiver<Option<Wire>>,
    inbox_refused: Arc<AtomicBool>,
}

/// Receives their acknowledgements.
#[derive(Debug)]
pub struct Replies {
    inboxes: Inboxes,
    current: Option<Subscriber>,
    stream: String,
}

impl Publisher {
    /// `stream`: the only stream whose acknowledgement counts.
    pub fn new(connection: &Connection, inboxes: Inboxes, stream: &str) -> (Self, Replies) {
        let publisher = Self { wire: connection.watch_wire(), inbox_refused: connection.inbox_refused() };
        (publisher, Replies { inboxes, current: None, stream: stream.to_owned() })
    }

    /// Hands a message to the connection and returns at once. `token` comes back in the [`Reply`]; when the connection's
    /// epoch ends before, no reply comes any more.
    ///
    /// # Errors
    /// [`Failure::Disconnected`] and [`Failure::SendQueueFull`]: not sent, may be sent again.
    /// [`Failure::MessageTooLarge`], [`Failure::HeadersTooLarge`], [`Failure::InvalidSubject`]: not sent, cannot be.
    pub fn send(
        &self,
        token: u64,
        subject: impl Into<ByteString>,
        headers: Headers,
        payload: Bytes,
    ) -> Result<(), Failure> {
        let wire = self.wire.borrow();
        let wire = wire.as_ref().ok_or(Failure::Disconnected)?;
        if wire.client.connection_state() == async_nats::connection::State::Disconnected {
            return Err(Failure::Disconnected);
        }
        if self.inbox_refused.load(Ordering::Relaxed) {
            return Err(Failure::SetUp {
                code: 0,
                text: "the relay's user may not subscribe to _INBOX.>, so no acknowledgement can reach it".to_owned(),
            });
        }
        let subject = subject.into();
        check_subject(&subject)?;
        let subject =
            Subject::from_utf8(subject.into_bytes()).map_err(|_| Failure::InvalidSubject("it is not UTF-8"))?;
        check_size(wire, &headers, payload.len())?;
        let mut reply = String::with_capacity(wire.inbox.len().saturating_add(21));
        // Writing to a String cannot fail.
        let _ = write!(reply, "{}.{token}", wire.inbox);
        let publish = wire.client.publish_with_reply_and_headers(subject, reply, headers.into_map(), payload);
        // Without a budget, or a busy task would find a queue with room "not ready".
        match tokio::task::unconstrained(publish).now_or_never() {
            Some(Ok(())) => Ok(()),
            None => Err(Failure::SendQueueFull),
            Some(Err(error)) => Err(match error.kind() {
                PublishErrorKind::InvalidSubject => Failure::InvalidSubject("async-nats refuses it"),
                PublishErrorKind::MaxPayloadExceeded => Failure::MessageTooLarge { size: None, limit: None },
                PublishErrorKind::Send => Failure::Disconnected,
            }),
        }
    }
}

/// Whether a message of this size may be sent: beyond `max_payload` the server would close the connection. What the
/// stream takes may be changed at any time, so that its own answer counts.
fn check_size(wire: &Wire, headers: &Headers, payload: usize) -> Result<(), Failure> {
    let headers = headers.size();
    if headers > MAX_HEADERS {
        return Err(Failure::HeadersTooLarge { size: Some(headers) });
    }
    let size = headers.saturating_add(payload);
    let limit = wire.client.max_payload();
    if size > limit { Err(Failure::MessageTooLarge { size: Some(size), limit: Some(limit) }) } else { Ok(()) }
}

/// A subject that may be published to: tokens of ASCII 33–126 joined by dots, no wildcard.
///
/// The router makes no other; but what slipped through here would become a protocol command.
pub(super) fn check_subject(subject: &str) -> Result<(), Failure> {
    if !subject.bytes().all(|b| matches!(b, 33..=126)) {
        return Err(Failure::InvalidSubject("it holds other bytes than ASCII 33 to 126"));
    }
    if subject.split('.').any(|token| matches!(token, "" | "*" | ">")) {
        return Err(Failure::InvalidSubject("it has an empty token or a wildcard"));
    }
    Ok(())
}

impl Replies {
    /// Waits until at least one reply is there, then appends those that are, at most `limit`, and tells how many.
    /// Zero: the connection was closed for good. Safe to cancel: what was not appended stays.
    pub async fn recv_many(&mut self, replies: &mut Vec<Reply>, limit: usize) -> usize {
        std::future::poll_fn(|cx| self.poll_many(cx, replies, limit)).await
    }

    fn poll_many(&mut self, cx: &mut Context<'_>, replies: &mut Vec<Reply>, limit: usize) -> Poll<usize> {
        let mut count = 0;
        while count < limit {
            let Some(subscriber) = &mut self.current else {
                match self.inboxes.0.poll_recv(cx) {
                    Poll::Ready(Some(next)) => self.current = Some(next),
                    Poll::Ready(None) => return Poll::Ready(count),
                    Poll::Pending => break,
                }
                continue;
            };
            match subscriber.poll_next_unpin(cx) {
                Poll::Ready(Some(message)) => {
                    if let Some(reply) = read_reply(&message, &self.stream) {
                        replies.push(reply);
                        count += 1;
                    } else {
                        tracing::debug!("a reply was passed over that is none of JetStream's, or has no token");
                    }
                }
                // The epoch is over, and all its replies are read.
                Poll::Ready(None) => self.current = None,
                Poll::Pending => break,
            }
        }
        if count == 0 && limit > 0 { Poll::Pending } else { Poll::Ready(count) }
    }
}

/// `PubAck` of JetStream's wire protocol (`io.nats.jetstream.api.v1.pub_ack_response`).
#[derive(Deserialize)]
struct PubAck<'a> {
    #[serde(borrow, default)]
    stream: Option<Cow<'a, str>>,
    #[serde(default)]
    seq: u64,
    #[serde(default)]
    duplicate: bool,
    #[serde(borrow, default)]
    error: Option<ApiError<'a>>,
}

/// The error of any JetStream answer.
#[derive(Deserialize)]
pub(super) struct ApiError<'a> {
    #[serde(default)]
    pub(super) code: u64,
    #[serde(default)]
    pub(super) err_code: u64,
    #[serde(borrow, default)]
    pub(super) description: Option<Cow<'a, str>>,
}

/// `None` when it is no answer of JetStream's. Another responder on the subject may well answer first: its words decide
/// nothing, and the acknowledgement is still to come.
fn read_reply(message: &Message, stream: &str) -> Option<Reply> {
    let token = message.subject.rsplit('.').next()?.parse().ok()?;
    if message.status == Some(StatusCode::NO_RESPONDERS) {
        return Some(Reply { token, result: Err(Failure::NoResponders) });
    }
    read_ack(&message.payload, stream).map(|result| Reply { token, result })
}

fn read_ack(payload: &[u8], stream: &str) -> Option<Result<Ack, Failure>> {
    let ack: PubAck<'_> = serde_json::from_slice(payload).ok()?;
    if let Some(error) = ack.error {
        return Some(Err(
            match Failure::from_api(error.code, error.err_code, error.description.as_deref().unwrap_or("")) {
                Failure::WrongStream { .. } => {
                    Failure::WrongStream { expected: stream.to_owned(), actual: ack.stream.map(Cow::into_owned) }
                }
                Failure::StreamMissing(_) => Failure::StreamMissing(stream.to_owned()),
                other => other,
            },
        ));
    }
    let actual = ack.stream.filter(|_| ack.seq > 0)?;
    if actual != stream {
        let actual = Some(actual.into_owned());
        return Some(Err(Failure::WrongStream { expected: stream.to_owned(), actual }));
    }
    Some(Ok(Ack { sequence: ack.seq, duplicate: ack.duplicate }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_cannot_be_sent_are_counted_and_left_out() {
        let mut headers = Headers::new();
        assert_eq!(headers.size(), 0);
        headers.set("Nats-Msg-Id", "a");
        for (name, value) in [
            ("", "v"),
            ("a b", "v"),
            ("a:b", "v"),
            ("é", "v"),
            ("a\r\nb", "v"),
            ("a", "v\r\nNats-Rollup: all"),
            ("a", "\n"),
        ] {
            headers.set(name, value);
        }
        headers.set("Nats-Msg-Id", "again");
        assert_eq!(headers.refused(), 8);
        headers.set("x", "é ü");
        headers.set("y", "");
        // As async-nats writes them, which counts toward the limits.
        let wire = "NATS/1.0\r\nNats-Msg-Id: a\r\nx: é ü\r\ny: \r\n\r\n".len();
        assert_eq!(headers.size(), wire);
        let sent: Vec<_> =
            headers.clone().into_map().iter().map(|(name, value)| format!("{name}: {}", value[0])).collect();
        assert_eq!(sent, ["Nats-Msg-Id: a\r\nx: é ü\r\ny: "], "all of it leaves as one");
        let single = headers.one_by_one();
        assert_eq!(
            ["Nats-Msg-Id", "x", "y"].map(|name| single.get(name).map(HeaderValue::as_str)),
            [Some("a"), Some("é ü"), Some("")]
        );
        assert!(Headers::new().into_map().is_empty());
    }

    #[test]
    fn subjects_that_are_no_place_to_publish_to_are_refused() {
        for subject in ["a", "a.b", "outbox.a%20b.*x", "a.b>", "a.$x"] {
            assert_eq!(check_subject(subject), Ok(()), "{subject}");
        }
        for subject in ["", ".", "a.", ".a", "a..b", "a.*", ">", "a b", "a\r\nPUB x 0", "a\t", "é", "a\u{7f}"] {
            assert!(check_subject(subject).is_err(), "{subject:?}");
        }
    }

    #[test]
    fn reads_acknowledgements() {
        let ok = |sequence, duplicate| Some(Ok(Ack { sequence, duplicate }));
        assert_eq!(read_ack(br#"{"stream":"S","seq":7}"#, "S"), ok(7, false));
        assert_eq!(
            read_ack(br#"{"stream":"S", "domain":"hub","seq":7,"duplicate": true,"new":[1]}"#, "S"),
            ok(7, true)
        );
        assert_eq!(read_ack(b"{\"stream\":\"\\u0053\",\"seq\":7}", "S"), ok(7, false));
        let wrong = |actual: &str| {
            Some(Err(Failure::WrongStream { expected: "S".to_owned(), actual: Some(actual.to_owned()) }))
        };
        assert_eq!(read_ack(br#"{"stream":"T","seq":7}"#, "S"), wrong("T"));
        let mismatch = br#"{"error":{"code":400,"err_code":10060,"description":"expected stream does not match"},"stream":"T","seq":0}"#;
        assert_eq!(read_ack(mismatch, "S"), wrong("T"));
        let full =
            br#"{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"stream":"S","seq":0}"#;
        assert_eq!(read_ack(full, "S"), Some(Err(Failure::StreamFull("maximum bytes exceeded".to_owned()))));
    }

    #[test]
    fn what_is_no_acknowledgement_decides_nothing() {
        for payload in [
            "",
            "ok",
            "{}",
            "[]",
            "null",
            r#"{"stream":"S"}"#,
            r#"{"seq":1}"#,
            r#"{"stream":"S","seq":-1}"#,
            r#"{"stream":"S","seq":1"#,
        ] {
            assert_eq!(read_ack(payload.as_bytes(), "S"), None, "{payload}");
        }
    }
}
