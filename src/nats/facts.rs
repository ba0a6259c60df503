//! What `doctor` wants to know of NATS: who answers, and what the relay's user may do. What is published for that
//! reaches nobody: the server must refuse it.

use std::time::Duration;

use async_nats::HeaderMap;
use bytes::Bytes;
use tokio::sync::broadcast::error::RecvError;

use super::api::Api;
use super::connect::Connection;
use super::notice::Notice;
use super::stream::Stream;
use crate::fault::Failure;

/// For the server's word about one subject.
const PATIENCE: Duration = Duration::from_secs(3);

/// The beginning of subjects that servers use among themselves. They take no message that asks for its answer there.
const RESERVED: &str = "_R_.outbox-relay-doctor";

/// What no stream can be called: its name would have a dot.
const NO_STREAM: &str = "outbox-relay-doctor-no.such.stream";

/// The server that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `server_name`, as it tells it.
    pub name: String,
    /// As `2.10.26`.
    pub version: String,
    /// Bytes.
    pub max_payload: usize,
    /// Whether it belongs to a cluster.
    pub clustered: bool,
}

impl Connection {
    /// The server that this connection is to.
    ///
    /// # Errors
    /// When it is down at present.
    pub fn server(&self) -> Result<Server, Failure> {
        let info = self.wire()?.client.server_info();
        let clustered = info.cluster.is_some_and(|name| !name.is_empty());
        Ok(Server { name: info.server_name, version: info.version, max_payload: info.max_payload, clustered })
    }

    /// Whether the user may publish to a subject; `None` when the server does not say.
    ///
    /// No message goes anywhere: it asks for its answer on a subject of the servers' own, for which a server refuses
    /// every message, after it has looked whether its subject is allowed. So there are two kinds of refusal, and always
    /// one. In case a server ever takes such a message, it names a stream that cannot be, so that none stores it.
    ///
    /// # Errors
    /// When the connection is down.
    pub async fn may_publish(&self, subject: &str) -> Result<Option<bool>, Failure> {
        let client = self.wire()?.client;
        // Before the message, or the answer might be missed.
        let mut notices = self.notices();
        let reply = format!("{RESERVED}.{}", fastrand::u64(..));
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Expected-Stream", NO_STREAM);
        client
            .publish_with_reply_and_headers(subject.to_owned(), reply.clone(), headers, Bytes::new())
            .await
            .map_err(|_| Failure::Disconnected)?;
        let answer = async {
            loop {
                match notices.recv().await {
                    Ok(Notice::PublishRefused { subject: refused }) if refused == subject => return Some(false),
                    Ok(Notice::Error(text)) if text.contains(&reply) => return Some(true),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => return None,
                }
            }
        };
        Ok(tokio::time::timeout(PATIENCE, answer).await.unwrap_or_default())
    }
}

impl Stream {
    /// The subjects of JetStream's API that a relay publishes to, each with what it is for. `create`: the stream, too.
    pub fn api_subjects(&self, create: bool) -> Vec<(String, &'static str)> {
        let stream = &self.name;
        let mut verbs = vec![(format!("STREAM.INFO.{stream}"), "to look at the stream")];
        if create {
            verbs.push((format!("STREAM.CREATE.{stream}"), "to create the stream (nats.manage = \"create\")"));
        }
        let reads = "to read which events the stream holds, so that none is stored twice";
        verbs.push((format!("CONSUMER.CREATE.{stream}"), reads));
        verbs.push((format!("CONSUMER.MSG.NEXT.{stream}.*"), reads));
        verbs.push((format!("CONSUMER.DELETE.{stream}.*"), reads));
        let api: &Api = &self.api;
        verbs.into_iter().map(|(verb, what)| (api.subject(&verb), what)).collect()
    }
}
