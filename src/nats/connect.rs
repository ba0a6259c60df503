//! The connection to NATS, kept for the life of the relay.
//!
//! A client of async-nats serves one connection only and is replaced at a disconnect (see `dial::bury` for the reason).
//! So an epoch is a connection: a message whose acknowledgement has not come when its epoch ends is of unknown outcome,
//! and is never sent later behind the relay's back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, Event, ServerError, Subscriber};
use futures_util::StreamExt;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::task::JoinHandle;

use super::dial::Dialer;
use super::notice::Notice;
use crate::config;
use crate::fault::Failure;
use crate::pause::{Pause, Repeats};

pub use super::dial::ConnectFault;

/// Notices kept for a slow reader; older ones are dropped.
const NOTICES: usize = 1024;

/// Between two attempts to reconnect, first and at most.
const RECONNECT_FIRST: Duration = Duration::from_millis(50);
const RECONNECT_MAX: Duration = Duration::from_secs(4);

/// How the connection stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Whether there is a connection.
    pub connected: bool,
    /// Rises by one with every connection made; the first is 1.
    pub epoch: u64,
    /// Why there is none at present, as the last attempt to reconnect found.
    pub reason: Option<String>,
    /// The server connected to, or the last one: its name and version as it tells them.
    pub server: Option<String>,
}

/// The connection to NATS. Cheap to clone; it is closed when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    link: watch::Receiver<Link>,
    wire: watch::Receiver<Option<Wire>>,
    notices: broadcast::Sender<Notice>,
    inbox_refused: Arc<AtomicBool>,
    keeper: JoinHandle<()>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// One epoch's means.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    pub(super) client: Client,
    /// Acknowledgements arrive at `<inbox>.<token>`.
    pub(super) inbox: Arc<str>,
}

/// Where the acknowledgements of each epoch arrive; for `publish::Publisher::new`.
#[derive(Debug)]
pub struct Inboxes(pub(super) mpsc::UnboundedReceiver<Subscriber>);

/// Connects, trying every server once, and from then on keeps the connection: it reconnects for ever, with backoff.
///
/// `capacity`: how many messages may be in flight at once (`delivery.max_in_flight`).
///
/// # Errors
/// Of [`crate::fault::Class::Fatal`] when the settings cannot work (login or certificate refused, a file that cannot be
/// read); of `Transient` when no server can be reached: the caller tries again.
pub async fn connect(config: &config::Nats, capacity: usize) -> Result<(Connection, Inboxes), ConnectFault> {
    let (link_tx, link) = watch::channel(Link::default());
    let (wire_tx, wire) = watch::channel(None);
    let (inboxes_tx, inboxes) = mpsc::unbounded_channel();
    let (notices, _) = broadcast::channel(NOTICES);
    let inbox_refused = Arc::new(AtomicBool::new(false));
    let mut keeper = Keeper {
        dialer: Dialer::new(config, capacity)?,
        link: link_tx,
        wire: wire_tx,
        inboxes: inboxes_tx,
        notices: notices.clone(),
        inbox_refused: Arc::clone(&inbox_refused),
    };
    let sentinel = keeper.renew().await?;
    let keeper = tokio::spawn(keeper.keep(sentinel));
    Ok((Connection { shared: Arc::new(Shared { link, wire, notices, inbox_refused, keeper }) }, Inboxes(inboxes)))
}

impl Connection {
    /// Follows the state of the connection.
    pub fn link(&self) -> watch::Receiver<Link> {
        self.shared.link.clone()
    }

    /// What the servers tell from now on. A reader that falls behind loses the oldest.
    ///
    /// async-nats keeps 128 of them at most between two turns of its own task: when very many messages are refused at
    /// once, some refusals are never told, and their messages end by the acknowledgement's timeout.
    pub fn notices(&self) -> broadcast::Receiver<Notice> {
        self.shared.notices.subscribe()
    }

    pub(super) fn wire(&self) -> Result<Wire, Failure> {
        self.shared.wire.borrow().clone().ok_or(Failure::Disconnected)
    }

    pub(super) fn watch_wire(&self) -> watch::Receiver<Option<Wire>> {
        self.shared.wire.clone()
    }

    /// Whether the user may not receive replies: then nothing is ever acknowledged.
    pub(super) fn inbox_refused(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.shared.inbox_refused)
    }
}

struct Keeper {
    dialer: Dialer,
    link: watch::Sender<Link>,
    wire: watch::Sender<Option<Wire>>,
    inboxes: mpsc::UnboundedSender<Subscriber>,
    notices: broadcast::Sender<Notice>,
    inbox_refused: Arc<AtomicBool>,
}

impl Keeper {
    async fn keep(mut self, mut sentinel: Subscriber) {
        loop {
            // Nobody publishes to it: it ends when its client does.
            while sentinel.next().await.is_some() {}
            self.wire.send_replace(None);
            self.link.send_modify(|link| {
                link.connected = false;
                link.reason = Some("the connection was lost".to_owned());
            });
            tracing::warn!("connection to NATS lost, reconnecting");
            sentinel = self.reconnect().await;
        }
    }

    async fn reconnect(&mut self) -> Subscriber {
        let (mut pause, mut repeats) = (Pause::new(RECONNECT_FIRST, RECONNECT_MAX), Repeats::default());
        loop {
            match self.renew().await {
                Ok(sentinel) => return sentinel,
                Err(fault) => {
                    if repeats.is_news(&fault.to_string(), Instant::now()) {
                        tracing::warn!(%fault, "cannot reconnect to NATS, trying again");
                    }
                    self.link.send_modify(|link| link.reason = Some(fault.to_string()));
                }
            }
            tokio::time::sleep(pause.next()).await;
        }
    }

    /// Makes a new connection, subscribes to its replies, and only then announces it: no publish can precede them.
    async fn renew(&mut self) -> Result<Subscriber, ConnectFault> {
        self.inbox_refused.store(false, Ordering::Relaxed);
        let (notices, refused) = (self.notices.clone(), Arc::clone(&self.inbox_refused));
        let client = self.dialer.dial(move |event| tell(event, &notices, &refused)).await?;
        let inbox: Arc<str> = client.new_inbox().into();
        let lost = |_| ConnectFault {
            class: crate::fault::Class::Transient,
            text: "the NATS server closed the new connection".to_owned(),
            hint: "see nats-server's log",
        };
        let replies = client.subscribe(format!("{inbox}.*")).await.map_err(lost)?;
        let sentinel = client.subscribe(client.new_inbox()).await.map_err(lost)?;
        // Fails only when the replies are not wanted any more.
        let _ = self.inboxes.send(replies);
        let info = client.server_info();
        let epoch = self.link.borrow().epoch.saturating_add(1);
        self.wire.send_replace(Some(Wire { client, inbox }));
        let server = format!("{} ({})", info.server_name, info.version);
        tracing::info!(server, epoch, "connected to NATS");
        self.link.send_replace(Link { connected: true, epoch, reason: None, server: Some(server) });
        Ok(sentinel)
    }
}

fn tell(event: Event, notices: &broadcast::Sender<Notice>, inbox_refused: &AtomicBool) {
    let notice = match event {
        Event::ServerError(ServerError::Other(text)) => Notice::from_error(&text),
        Event::ServerError(error @ ServerError::AuthorizationViolation) => Notice::Error(error.to_string()),
        Event::ServerError(ServerError::SlowConsumer(_)) | Event::SlowConsumer(_) => Notice::RepliesLost,
        Event::LameDuckMode => Notice::LameDuck,
        Event::Connected | Event::Disconnected | Event::Draining | Event::Closed | Event::ClientError(_) => return,
    };
    if matches!(&notice, Notice::SubscribeRefused { subject } if subject.starts_with("_INBOX.")) {
        inbox_refused.store(true, Ordering::Relaxed);
    }
    // An error says that nobody listens.
    let _ = notices.send(notice);
}
