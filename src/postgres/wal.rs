//! The replication connection: commands, the stream of changes, keepalives and status updates.
//!
//! Source: PostgreSQL documentation, "Streaming Replication Protocol".

use std::io;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tokio_util::sync::CancellationToken;

use super::changes::{Assembler, ChangeError};
use super::connect::ReplicationConnection;
use super::frame::{Frame, FrameReader, FrameWriter};
use super::names::{identifier, literal};
use crate::flow::event::Change;
use crate::flow::lsn::Lsn;
use crate::pace;

/// Changes handed on at a time, at most: bounds what waits in the channel together with its capacity.
const BATCH_CHANGES: usize = 256;
/// Bytes of changes handed on at a time, about.
const BATCH_BYTES: usize = 128 * 1024;
/// How often a moving position is reported, at most.
const REPORT_EVERY: Duration = Duration::from_millis(100);
/// How often the server hears from us and is asked to answer, at least.
const PING_EVERY: Duration = Duration::from_secs(1);

/// The server's function that warns when rows are passed over for want of a publication (`pgoutput.c`). The warning's
/// code, `OBJECT_NOT_IN_PREREQUISITE_STATE`, is also that of others, as of a standby that the slot waits for, and its
/// words are translated.
const LOADS_PUBLICATIONS: &str = "LoadPublications";

/// Why the replication connection ended.
#[derive(Debug, thiserror::Error)]
pub enum WalError {
    #[error("the replication connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("PostgreSQL ended the replication connection")]
    Closed,
    #[error("PostgreSQL did not answer on the replication connection for {0:?}")]
    Silent(Duration),
    #[error("PostgreSQL refused on the replication connection: {message} (SQLSTATE {code}){hint}")]
    Server { code: String, message: String, hint: String },
    #[error("PostgreSQL passes rows over: {0}")]
    PublicationSkipped(String),
    #[error("unexpected message {tag:?} on the replication connection: {what}")]
    Protocol { tag: char, what: &'static str },
    #[error("cannot read the stream of changes: {0}")]
    Changes(#[from] ChangeError),
}

impl WalError {
    /// The SQLSTATE, when the server said one.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Self::Server { code, .. } => Some(code),
            _ => None,
        }
    }

    /// Whether the slot shows write-ahead log from before the publication, which cannot be read through it: a new slot
    /// is needed. Up to 17 the server fails (42704); from 18 on it passes over the rows, and only warns.
    pub fn needs_new_slot(&self) -> bool {
        matches!(self, Self::PublicationSkipped(_)) || self.sqlstate() == Some("42704")
    }

    /// Whether a new connection may work.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Io(_) | Self::Closed | Self::Silent(_) | Self::PublicationSkipped(_) | Self::Protocol { .. } => true,
            // 42: what is named does not exist, or may not be used. Of the others the server will tell again.
            Self::Server { code, .. } => !code.starts_with("42"),
            Self::Changes(_) => false,
        }
    }
}

/// A connection in replication mode that does not stream yet.
#[derive(Debug)]
pub struct WalConnection<S> {
    reader: FrameReader<ReadHalf<S>>,
    writer: FrameWriter<WriteHalf<S>>,
}

impl WalConnection<super::connect::Socket> {
    /// `cap`: bytes of a message beyond which only its beginning is kept.
    pub fn new(connection: ReplicationConnection, cap: usize) -> Self {
        Self::over(connection.stream, connection.buffered, cap)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> WalConnection<S> {
    fn over(stream: S, buffered: BytesMut, cap: usize) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: FrameReader::new(reader, buffered, cap), writer: FrameWriter::new(writer) }
    }

    /// Runs one command of the simple query protocol and returns its rows as text.
    pub async fn query(&mut self, command: &str) -> Result<Vec<Vec<Option<String>>>, WalError> {
        frontend::query(command, self.writer.buffer())?;
        self.writer.flush().await?;
        let (mut rows, mut refused) = (Vec::new(), None);
        loop {
            let frame = self.read().await?;
            match frame.tag {
                b'D' => rows.push(data_row(frame.body)?),
                b'E' => refused = Some(server_error(&frame.body)),
                b'Z' => return refused.map_or(Ok(rows), Err),
                b'T' | b'C' | b'N' | b'S' | b'I' => {}
                tag => return Err(unexpected(tag, "while a command ran")),
            }
        }
    }

    /// Starts to stream the slot's changes from `from` on, or from its confirmed position where that is later.
    pub async fn start(mut self, slot: &str, publication: &str, from: Lsn) -> Result<WalStream<S>, WalError> {
        let names = literal(&identifier(publication));
        let command = format!(
            "START_REPLICATION SLOT {} LOGICAL {from} (proto_version '1', publication_names {names})",
            identifier(slot)
        );
        frontend::query(&command, self.writer.buffer())?;
        self.writer.flush().await?;
        loop {
            let frame = self.read().await?;
            match frame.tag {
                b'W' => return Ok(WalStream { reader: self.reader, writer: self.writer }),
                b'E' => return Err(server_error(&frame.body)),
                b'N' | b'S' => {}
                tag => return Err(unexpected(tag, "instead of the stream of changes")),
            }
        }
    }

    async fn read(&mut self) -> Result<Frame, WalError> {
        self.reader.read().await.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => WalError::Closed,
            _ => WalError::Io(error),
        })
    }
}

/// What the streaming task shares with the rest of the relay.
#[derive(Debug)]
pub struct Wiring {
    /// Where changes go. The task waits while it is full, and goes on to answer PostgreSQL meanwhile.
    pub changes: mpsc::Sender<Vec<Change>>,
    /// The position that may be confirmed.
    pub safe: watch::Receiver<Lsn>,
    /// The position that the table names as the last to be confirmed: none beyond it is.
    pub noted: watch::Receiver<Lsn>,
    /// The session's `wal_sender_timeout`: the connection counts as dead after so long without a sign of life.
    pub timeout: Duration,
    /// Ends the stream; what is safe by then is confirmed.
    pub stop: CancellationToken,
}

impl Wiring {
    /// The position that may be told to PostgreSQL now.
    fn confirmable(&mut self) -> Lsn {
        (*self.safe.borrow_and_update()).min(*self.noted.borrow_and_update())
    }
}

/// A connection that streams changes.
#[derive(Debug)]
pub struct WalStream<S> {
    reader: FrameReader<ReadHalf<S>>,
    writer: FrameWriter<WriteHalf<S>>,
}

impl<S: AsyncRead + AsyncWrite + Unpin> WalStream<S> {
    /// Streams until the connection ends or `stop` is called. Status updates leave on time whatever waits elsewhere.
    pub async fn run(mut self, assembler: Assembler, mut wiring: Wiring) -> Result<(), WalError> {
        let mut intake = Intake { assembler, batch: Vec::new(), bytes: 0, reply_asked: false, heard: Instant::now() };
        let ping_every = PING_EVERY.min(wiring.timeout / 4);
        let mut ping = interval(ping_every);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut moved, mut reported) = (false, Instant::now());
        let (stop, changes) = (wiring.stop.clone(), wiring.changes.clone());
        loop {
            let blocked = intake.take_in(&mut self.reader)?;
            if std::mem::take(&mut intake.reply_asked) {
                self.report(wiring.confirmable(), false);
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                sent = self.writer.flush(), if self.writer.is_pending() => sent?,
                _ = ping.tick() => {
                    if !blocked && intake.heard.elapsed() > wiring.timeout {
                        return Err(WalError::Silent(wiring.timeout));
                    }
                    self.report(wiring.confirmable(), true);
                }
                Ok(()) = wiring.safe.changed(), if !moved => moved = true,
                Ok(()) = wiring.noted.changed(), if !moved => moved = true,
                () = sleep_until(reported + REPORT_EVERY), if moved => {
                    self.report(wiring.confirmable(), false);
                    (moved, reported) = (false, Instant::now());
                }
                permit = changes.reserve(), if !intake.batch.is_empty() => match permit {
                    Ok(permit) => permit.send(intake.hand_on()),
                    // Nobody takes changes in any more, but what is safe still moves until `stop`: it is confirmed
                    // then, and not before its last move.
                    Err(_) => drop(intake.hand_on()),
                },
                read = self.reader.fill(), if !blocked => {
                    if read? == 0 {
                        return Err(WalError::Closed);
                    }
                    intake.heard = Instant::now();
                }
            }
            if blocked {
                // What the server sent meanwhile was not read: silence counts from here.
                intake.heard = Instant::now();
            }
        }
        let safe = wiring.confirmable();
        self.finish(safe).await
    }

    /// Queues a standby status update, unless earlier ones could not be sent yet: the next one says it all.
    fn report(&mut self, safe: Lsn, ask_for_answer: bool) {
        if !self.writer.is_pending() {
            status_update(self.writer.buffer(), safe, ask_for_answer);
        }
    }

    /// Confirms `safe` and ends the copy.
    async fn finish(mut self, safe: Lsn) -> Result<(), WalError> {
        const PATIENCE: Duration = Duration::from_secs(2);
        status_update(self.writer.buffer(), safe, false);
        frontend::copy_done(self.writer.buffer());
        let goodbye = async {
            self.writer.flush().await?;
            // The server reads the update before it answers the end of the copy.
            loop {
                match self.reader.read().await {
                    Ok(frame) if frame.tag != b'C' => {}
                    Ok(_) => return Ok(()),
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
        };
        match tokio::time::timeout(PATIENCE, goodbye).await {
            Ok(done) => Ok(done?),
            Err(_) => Err(WalError::Silent(PATIENCE)),
        }
    }
}

/// What was received and is not handed on yet.
struct Intake {
    assembler: Assembler,
    batch: Vec<Change>,
    bytes: usize,
    reply_asked: bool,
    heard: Instant,
}

impl Intake {
    /// Takes in what has arrived. Returns whether the batch is full, so that nothing more may be read.
    fn take_in<R: AsyncRead + Unpin>(&mut self, reader: &mut FrameReader<R>) -> Result<bool, WalError> {
        while self.batch.len() < BATCH_CHANGES && self.bytes < BATCH_BYTES {
            let Some(frame) = reader.take()? else { return Ok(false) };
            self.frame(frame)?;
        }
        Ok(true)
    }

    fn frame(&mut self, frame: Frame) -> Result<(), WalError> {
        match frame.tag {
            b'd' => self.copy_data(frame),
            b'E' => Err(server_error(&frame.body)),
            b'c' | b'C' | b'Z' => Err(WalError::Closed),
            b'N' if field(&frame.body, b'R').as_deref() == Some(LOADS_PUBLICATIONS) => {
                Err(WalError::PublicationSkipped(field(&frame.body, b'M').unwrap_or_default()))
            }
            b'N' | b'S' => Ok(()),
            tag => Err(unexpected(tag, "in the stream of changes")),
        }
    }

    /// `XLogData` (`w`): start, end and send time before the data. Keepalive (`k`): end, send time, reply wanted.
    fn copy_data(&mut self, frame: Frame) -> Result<(), WalError> {
        const XLOG_HEADER: usize = 24;
        let cut = frame.is_cut().then_some(frame.length);
        let mut body = frame.body;
        match body.try_get_u8() {
            Ok(b'w') if body.len() >= XLOG_HEADER => {
                body.advance(XLOG_HEADER);
                self.bytes += body.len();
                let length = cut.map(|length| length - XLOG_HEADER - 1);
                if let Some(change) = self.assembler.push(body, length)? {
                    self.batch.push(change);
                    pace::note();
                }
                Ok(())
            }
            Ok(b'k') if body.len() >= 17 => {
                let end = Lsn(body.get_u64());
                body.advance(8);
                self.reply_asked |= body.get_u8() == 1;
                match self.batch.last_mut() {
                    Some(Change::Mark(mark)) => *mark = end,
                    _ => self.batch.push(Change::Mark(end)),
                }
                Ok(())
            }
            _ => Err(unexpected(frame.tag, "with an unknown or short replication message")),
        }
    }

    fn hand_on(&mut self) -> Vec<Change> {
        self.bytes = 0;
        std::mem::take(&mut self.batch)
    }
}

/// Appends a standby status update: written, flushed and applied up to `safe`.
fn status_update(buffer: &mut BytesMut, safe: Lsn, ask_for_answer: bool) {
    /// From the Unix epoch to 2000-01-01, in microseconds.
    const POSTGRES_EPOCH: u64 = 946_684_800_000_000;
    let since_epoch = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let now = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX).saturating_sub(POSTGRES_EPOCH);
    buffer.put_u8(b'd');
    buffer.put_i32(4 + 1 + 8 * 4 + 1);
    buffer.put_u8(b'r');
    buffer.put_u64(safe.0);
    buffer.put_u64(safe.0);
    buffer.put_u64(safe.0);
    buffer.put_u64(now);
    buffer.put_u8(u8::from(ask_for_answer));
}

fn unexpected(tag: u8, what: &'static str) -> WalError {
    WalError::Protocol { tag: char::from(tag), what }
}

/// One field of an `ErrorResponse` or a `NoticeResponse`, which are fields of a type byte and a text.
fn field(body: &[u8], kind: u8) -> Option<String> {
    let mut fields = body.split(|&byte| byte == 0).filter_map(<[u8]>::split_first);
    fields.find_map(|(first, text)| (*first == kind).then(|| String::from_utf8_lossy(text).into_owned()))
}

fn server_error(body: &[u8]) -> WalError {
    let field = |kind| field(body, kind);
    let hint = field(b'H').map(|hint| format!("; hint: {hint}")).unwrap_or_default();
    WalError::Server { code: field(b'C').unwrap_or_default(), message: field(b'M').unwrap_or_default(), hint }
}

/// Reads a `DataRow`: a count, then values with their lengths, -1 for NULL.
fn data_row(mut body: Bytes) -> Result<Vec<Option<String>>, WalError> {
    let short = |_| unexpected(b'D', "that ends early");
    let count = body.try_get_u16().map_err(short)?;
    (0..count)
        .map(|_| {
            let Ok(length) = usize::try_from(body.try_get_i32().map_err(short)?) else { return Ok(None) };
            if body.len() < length {
                return Err(unexpected(b'D', "that ends early"));
            }
            Ok(Some(String::from_utf8_lossy(&body.split_to(length)).into_owned()))
        })
        .collect()
}
