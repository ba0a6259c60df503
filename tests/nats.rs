//! The relay's side of NATS against real servers, without PostgreSQL.

mod cluster;
mod ids;
mod login;
mod presence;
mod publish;
mod request;
pub mod stream;

use std::time::Duration;

use bytes::Bytes;
use outbox_relay::config::{self, Manage, Storage};
use outbox_relay::nats::connect::{Connection, connect};
use outbox_relay::nats::publish::{Ack, Headers, Publisher, Replies, Reply};
use outbox_relay::nats::stream::Stream;

use crate::harness::nats::{Nats, NatsVersion};

/// On two busy cores.
const SOON: Duration = Duration::from_secs(20);

/// `[nats]` with its defaults.
fn settings(url: &str) -> config::Nats {
    config::Nats {
        url: vec![url.to_owned()],
        stream: "OUTBOX".to_owned(),
        manage: Manage::Create,
        create: config::NatsCreate {
            subjects: vec!["outbox.>".to_owned()],
            replicas: 1,
            storage: Storage::File,
            duplicate_window: Duration::from_mins(2),
            max_age: None,
            max_bytes: None,
        },
        credentials_file: None,
        nkey_file: None,
        user: None,
        password: None,
        token: None,
        tls_ca: None,
        tls_cert: None,
        tls_key: None,
        tls_first: false,
        domain: None,
    }
}

/// A connection, and both ends of publishing on it.
struct Rig {
    connection: Connection,
    publisher: Publisher,
    replies: Replies,
}

impl Rig {
    async fn open(config: &config::Nats) -> Self {
        let (connection, inboxes) = connect(config, 8192).await.unwrap();
        let (publisher, replies) = Publisher::new(&connection, inboxes, &config.stream);
        Self { connection, publisher, replies }
    }

    /// On a server of its own, with the stream that the settings ask for.
    async fn with_stream(version: NatsVersion) -> (Nats, Self, Stream) {
        let server = Nats::start(version).await;
        let config = settings(&server.url());
        let rig = Self::open(&config).await;
        let stream = Stream::new(&rig.connection, &config);
        stream.ensure(&config, "outbox.*.>").await.unwrap();
        (server, rig, stream)
    }

    /// The next `count` replies, sorted by token.
    async fn take(&mut self, count: usize) -> Vec<Reply> {
        let mut replies = Vec::new();
        while replies.len() < count {
            let left = count - replies.len();
            let got = tokio::time::timeout(SOON, self.replies.recv_many(&mut replies, left)).await;
            assert_ne!(got.unwrap_or_else(|_| panic!("{} of {count} replies", replies.len())), 0);
        }
        replies.sort_by_key(|reply| reply.token);
        replies
    }

    async fn take_one(&mut self) -> Reply {
        self.take(1).await.pop().unwrap()
    }

    fn send(&self, token: u64, subject: &str) {
        self.publisher.send(token, subject.to_owned(), message_id(&token.to_string()), payload(300)).unwrap();
    }
}

fn message_id(id: &str) -> Headers {
    let mut headers = Headers::new();
    headers.set("Nats-Msg-Id", id);
    headers.set("Nats-Expected-Stream", "OUTBOX");
    headers
}

fn payload(size: usize) -> Bytes {
    Bytes::from(vec![b'x'; size])
}

fn stored(reply: &Reply) -> Ack {
    reply.result.clone().unwrap_or_else(|failure| panic!("token {}: {failure}", reply.token))
}
