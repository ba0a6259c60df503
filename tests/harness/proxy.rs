//! A TCP proxy that breaks connections on purpose, while they are open.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    ToServer,
    ToClient,
}

/// What happens to the bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Pass,
    /// Read and thrown away; the end of a connection is kept back too. Both ways: a half-open link.
    Drop,
    /// Not read: they wait in the kernel, and the sender blocks when its buffers are full.
    Hold,
    /// Each read waits so long before it goes on.
    Delay(Duration),
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    faults: [Fault; 2],
    refuse: bool,
    /// Connections of an earlier epoch are reset.
    epoch: u64,
}

/// Decides over one `MSG` or `HMSG` frame of NATS by its control line; true: the client never sees it.
type Filter = Arc<dyn Fn(&str) -> bool + Send + Sync>;

struct Shared {
    target: String,
    plan: watch::Sender<Plan>,
    /// Bytes that still pass in each direction before `then` happens; `u64::MAX` is no limit.
    budgets: [AtomicU64; 2],
    then: [watch::Sender<Then>; 2],
    passed: [AtomicU64; 2],
    accepted: AtomicUsize,
    open: AtomicUsize,
    filter: watch::Sender<Option<Filter>>,
    nats: bool,
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Hold,
    Cut,
}

/// A proxy before one server. Faults may be changed at any time and meet open connections too.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// A proxy before `127.0.0.1:port`.
    pub async fn start(port: u16) -> Self {
        Self::start_with(port, false).await
    }

    /// A proxy before a nats-server (without TLS): it reads the server's frames, so that [`Self::drop_messages`] can
    /// choose among them.
    pub async fn start_nats(port: u16) -> Self {
        Self::start_with(port, true).await
    }

    async fn start_with(port: u16, nats: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let plan = Plan { faults: [Fault::Pass; 2], refuse: false, epoch: 0 };
        let shared = Arc::new(Shared {
            target: format!("127.0.0.1:{port}"),
            plan: watch::Sender::new(plan),
            budgets: [const { AtomicU64::new(u64::MAX) }; 2],
            then: [watch::Sender::new(Then::Cut), watch::Sender::new(Then::Cut)],
            passed: [const { AtomicU64::new(0) }; 2],
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            filter: watch::Sender::new(None),
            nats,
        });
        let port = listener.local_addr().expect("address").port();
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { port, shared, accepting }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `127.0.0.1:port`
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The address of a server, with the proxy's port in place of the server's.
    pub fn instead_of(&self, url: &str) -> String {
        let server = self.shared.target.rsplit(':').next().expect("a port");
        let changed = url.replace(&format!(":{server}"), &format!(":{}", self.port));
        assert_ne!(changed, url, "{url} does not name port {server}");
        changed
    }

    /// Everything flows again. Connections that were cut stay cut.
    pub fn pass(&self) {
        for budget in &self.shared.budgets {
            budget.store(u64::MAX, Ordering::SeqCst);
        }
        self.shared.filter.send_replace(None);
        self.change(|plan| {
            plan.faults = [Fault::Pass; 2];
            plan.refuse = false;
        });
    }

    /// Throws bytes away silently, ends of connections included.
    pub fn drop_bytes(&self, direction: Direction) {
        self.fault(direction, Fault::Drop);
    }

    /// A half-open link: nothing arrives either way, and nobody is told.
    pub fn drop_both(&self) {
        self.change(|plan| plan.faults = [Fault::Drop; 2]);
    }

    /// Bytes wait until [`Self::pass`].
    pub fn hold(&self, direction: Direction) {
        self.fault(direction, Fault::Hold);
    }

    /// Each piece of data waits so long.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.fault(direction, Fault::Delay(delay));
    }

    /// New connections are reset at once; open ones go on.
    pub fn refuse(&self) {
        self.change(|plan| plan.refuse = true);
    }

    /// Resets (RST) every connection that is open now. New ones are welcome.
    pub fn reset_all(&self) {
        self.change(|plan| plan.epoch += 1);
    }

    /// After `bytes` more, counted over all connections, resets every connection.
    pub fn cut_after(&self, direction: Direction, bytes: u64) {
        self.limit(direction, bytes, Then::Cut);
    }

    /// After `bytes` more, counted over all connections, holds this direction.
    pub fn hold_after(&self, direction: Direction, bytes: u64) {
        self.limit(direction, bytes, Then::Hold);
    }

    /// Loses the server's messages whose control line (`MSG subject sid [reply] size`) satisfies `lost`, and passes
    /// the rest. Only with [`Self::start_nats`].
    pub fn drop_messages(&self, lost: impl Fn(&str) -> bool + Send + Sync + 'static) {
        assert!(self.shared.nats, "start the proxy with start_nats");
        self.shared.filter.send_replace(Some(Arc::new(lost)));
    }

    /// Bytes that have passed in a direction.
    pub fn passed(&self, direction: Direction) -> u64 {
        self.shared.passed[direction as usize].load(Ordering::SeqCst)
    }

    /// Connections accepted since the start, refused ones not counted.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::SeqCst)
    }

    /// Connections open now.
    pub fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    fn fault(&self, direction: Direction, fault: Fault) {
        self.change(|plan| plan.faults[direction as usize] = fault);
    }

    fn change(&self, change: impl FnOnce(&mut Plan)) {
        self.shared.plan.send_modify(change);
    }

    fn limit(&self, direction: Direction, bytes: u64, then: Then) {
        self.shared.then[direction as usize].send_replace(then);
        self.shared.budgets[direction as usize].store(bytes, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.accepting.abort();
        self.reset_all();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        let (client, _) = listener.accept().await.expect("accept");
        if shared.plan.borrow().refuse {
            let _ = client.set_zero_linger();
            continue;
        }
        shared.accepted.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            shared.open.fetch_add(1, Ordering::SeqCst);
            carry(client, &shared).await;
            shared.open.fetch_sub(1, Ordering::SeqCst);
        });
    }
}

/// Carries one connection to its end.
async fn carry(client: TcpStream, shared: &Shared) {
    let mut plan = shared.plan.subscribe();
    let epoch = plan.borrow_and_update().epoch;
    let Ok(server) = TcpStream::connect(&shared.target).await else {
        let _ = client.set_zero_linger();
        return;
    };
    for stream in [&client, &server] {
        let _ = stream.set_nodelay(true);
    }
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let mut to_server = Pump::new(Direction::ToServer, client_read, server_write, shared);
    let mut to_client = Pump::new(Direction::ToClient, server_read, client_write, shared);
    let ended = tokio::select! {
        ended = async { tokio::join!(to_server.run(), to_client.run()) } => ended.0 == End::Closed && ended.1 == End::Closed,
        _ = plan.wait_for(|plan| plan.epoch != epoch) => false,
    };
    if !ended {
        for half in [to_server.write, to_client.write] {
            let _ = half.as_ref().set_zero_linger();
            // Dropping it would say an orderly goodbye before the reset.
            half.forget();
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Closed,
    Broken,
}

/// One direction of one connection.
struct Pump<'a> {
    direction: Direction,
    read: OwnedReadHalf,
    write: OwnedWriteHalf,
    shared: &'a Shared,
    plan: watch::Receiver<Plan>,
    frames: Option<Frames>,
}

impl<'a> Pump<'a> {
    fn new(direction: Direction, read: OwnedReadHalf, write: OwnedWriteHalf, shared: &'a Shared) -> Self {
        let frames = (shared.nats && direction == Direction::ToClient).then(Frames::default);
        Self { direction, read, write, shared, plan: shared.plan.subscribe(), frames }
    }

    fn fault(&self) -> Fault {
        self.plan.borrow().faults[self.direction as usize]
    }

    async fn run(&mut self) -> End {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            self.while_fault(|fault| fault == Fault::Hold).await;
            // A change of plan must not wait for the next byte.
            let count = tokio::select! {
                count = self.read.read(&mut buffer) => count,
                _ = self.plan.changed() => continue,
            };
            let Ok(count) = count else { return End::Broken };
            if count == 0 {
                self.while_fault(|fault| matches!(fault, Fault::Drop | Fault::Hold)).await;
                let _ = self.write.shutdown().await;
                return End::Closed;
            }
            if let Fault::Delay(delay) = self.fault() {
                tokio::time::sleep(delay).await;
            }
            self.while_fault(|fault| fault == Fault::Hold).await;
            if self.fault() == Fault::Drop {
                continue;
            }
            let data = match &mut self.frames {
                None => buffer[..count].to_vec(),
                Some(frames) => frames.filter(&buffer[..count], self.shared.filter.borrow().as_ref()),
            };
            if self.forward(&data).await.is_err() {
                return End::Broken;
            }
        }
    }

    async fn while_fault(&mut self, waits: impl Fn(Fault) -> bool) {
        let side = self.direction as usize;
        let _ = self.plan.wait_for(|plan| !waits(plan.faults[side])).await;
    }

    /// Writes, as far as the budget goes; then does what was planned for its end, and goes on when that is over.
    async fn forward(&mut self, data: &[u8]) -> std::io::Result<()> {
        let side = self.direction as usize;
        let mut rest = data;
        while !rest.is_empty() {
            let mut allowed = 0;
            let _ = self.shared.budgets[side].fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                allowed = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                (left != u64::MAX).then(|| left - allowed as u64)
            });
            let (now, later) = rest.split_at(allowed);
            self.write.write_all(now).await?;
            self.shared.passed[side].fetch_add(now.len() as u64, Ordering::SeqCst);
            rest = later;
            if rest.is_empty() {
                break;
            }
            let then = *self.shared.then[side].borrow();
            match then {
                Then::Cut => {
                    self.shared.budgets[side].store(u64::MAX, Ordering::SeqCst);
                    self.shared.plan.send_modify(|plan| plan.epoch += 1);
                    std::future::pending::<()>().await;
                }
                Then::Hold => {
                    self.shared.plan.send_modify(|plan| plan.faults[side] = Fault::Hold);
                    self.while_fault(|fault| fault == Fault::Hold).await;
                }
            }
        }
        Ok(())
    }
}

/// Cuts the server's side of the NATS client protocol into frames (docs.nats.io, "Client Protocol").
#[derive(Default)]
struct Frames {
    unfinished: Vec<u8>,
}

impl Frames {
    /// The whole frames so far, without the lost ones; what is not whole yet is kept for the next call.
    fn filter(&mut self, data: &[u8], lost: Option<&Filter>) -> Vec<u8> {
        self.unfinished.extend_from_slice(data);
        let mut kept = Vec::with_capacity(data.len());
        let mut start = 0;
        while let Some((line, length)) = frame(&self.unfinished[start..]) {
            let message = line.starts_with("MSG ") || line.starts_with("HMSG ");
            if !(message && lost.is_some_and(|lost| lost(line))) {
                kept.extend_from_slice(&self.unfinished[start..start + length]);
            }
            start += length;
        }
        self.unfinished.drain(..start);
        kept
    }
}

/// The control line and the whole length of the first frame, when it is there wholly.
fn frame(data: &[u8]) -> Option<(&str, usize)> {
    let end = data.windows(2).position(|pair| pair == b"\r\n")?;
    let line = std::str::from_utf8(&data[..end]).expect("a control line is text");
    let mut length = end + 2;
    if line.starts_with("MSG ") || line.starts_with("HMSG ") {
        let size: usize = line.rsplit(' ').next()?.parse().expect("a size ends the control line");
        length += size + 2;
    }
    (data.len() >= length).then_some((line, length))
}
