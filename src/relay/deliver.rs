//! The delivery stage: takes changes in, hands events to NATS, matches acknowledgements, reports outcomes.
//!
//! What may happen when is decided in `flow::delivery`; this is its driver.

mod answers;
mod guard;
mod hold;
mod intake;
mod lookup;
mod seam;
mod stream;

pub use guard::{IDS_MAX, Known};
use lookup::Looked;
use seam::Seam;
pub use stream::Ended;
use stream::Shown;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytestring::ByteString;
use futures_util::future::BoxFuture;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant as TokioInstant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::gauges::{self, Ages, Counters};
use super::prepare::Ground;
use crate::config;
use crate::fault::{Class, Failure};
use crate::flow::delivery::Delivery;
use crate::flow::event::{Change, Event, Report, Settled};
use crate::flow::lsn::Lsn;
use crate::flow::route::Router;
use crate::nats::connect::{Connection, Inboxes, Link};
use crate::nats::notice::Notice;
use crate::nats::publish::{Headers, Publisher, Replies};
use crate::nats::stream::{Stream, StreamFacts};
use crate::pause::Pause;
use crate::postgres::connect::{SqlConnection, Target};
use crate::reconcile::Ask;
use crate::telemetry::health::{Health, Pulse};
use crate::telemetry::metrics::Metrics;

/// Replies taken in at a time, before events are sent again.
const REPLIES_AT_A_TIME: usize = 1024;
/// Between two looks at the clock when nothing happens.
const TICK: Duration = Duration::from_millis(250);

/// What the stage shares with the rest of a session.
#[derive(Debug)]
pub struct Wiring {
    /// Where changes come from, one after the other: the last one first, and the next one when nothing of it is to be
    /// sent any more.
    pub sources: Vec<mpsc::Receiver<Vec<Change>>>,
    /// Holds every event that may be under way, so that a report never waits.
    pub reports: mpsc::Sender<Report>,
    /// Events whose outcome is committed in the table.
    pub settled: mpsc::Receiver<Vec<Settled>>,
    /// Events that cannot wait in the table, because their rows are gone.
    pub returned: mpsc::Receiver<Report>,
    /// What the reconciler asks for.
    pub asks: mpsc::Receiver<Ask>,
    /// The position that may be confirmed.
    pub safe: watch::Sender<Lsn>,
    /// The end of the last round of which nothing is to be sent any more, where the changes are rounds.
    pub decided: Option<watch::Sender<Lsn>>,
    /// No event with unrecorded outcome is stored at or below this sequence.
    pub stream_seq: Arc<AtomicU64>,
    /// When the slot was last seen to be ours, and how long after that events may be handed to NATS.
    pub fence: watch::Receiver<Instant>,
    pub fence_limit: Duration,
    /// Ends the stage: nothing new is taken in, and what was sent comes to its end.
    pub stop: CancellationToken,
}

/// The NATS side, which outlives a session.
#[derive(Debug)]
pub struct Nats {
    pub connection: Connection,
    pub publisher: Publisher,
    pub replies: Replies,
    pub stream: Stream,
    pub link: watch::Receiver<Link>,
    pub notices: broadcast::Receiver<Notice>,
    /// The stream was seen to have lost messages that it acknowledged: the next session is to begin with that.
    pub went_back: bool,
}

impl Nats {
    pub fn new((connection, inboxes): (Connection, Inboxes), stream: Stream, facts: &StreamFacts) -> Self {
        let (publisher, replies) = Publisher::new(&connection, inboxes, &facts.name);
        let (link, notices) = (connection.link(), connection.notices());
        Self { connection, publisher, replies, stream, link, notices, went_back: false }
    }
}

/// What the stage reads and tells, beside its channels.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    pub ground: &'a Ground,
    /// Where the tables are.
    pub postgres: &'a Target,
    pub router: &'a Router,
    pub settings: &'a config::Settings,
    pub metrics: &'a Metrics,
    pub health: &'a Health,
    pub pulse: &'a Pulse,
    /// After what time since it was first sent the stream is asked for a copy of an event before it is sent again, as the
    /// stream told last; `None` where it forgets messages.
    pub proof_after: Option<Duration>,
    /// When the stream was created that the session began with, and the connection over which it was looked at.
    pub stream_created: SystemTime,
    pub epoch: u64,
    /// Where the log ended when the session began: what was committed before may have been sent already.
    pub horizon: Lsn,
}

/// The running stage.
pub struct Deliver<'a> {
    delivery: Delivery,
    nats: &'a mut Nats,
    shared: Shared<'a>,
    wiring: Wiring,
    counters: Counters,
    /// Changes that were received and not taken in yet.
    pending: VecDeque<Change>,
    committed_at: Option<i64>,
    /// A batch whose rows are looked up in the table, and the connection for it.
    looking: Option<BoxFuture<'a, Looked>>,
    lookups: Option<SqlConnection>,
    /// The present source has ended.
    source_ended: bool,
    /// The end of the last transaction that was taken in.
    taken_in: Lsn,
    seam: Seam,
    /// Events that an earlier session sent, as the stream shows them.
    known: Known,
    /// Asks the stream what became of events that were sent long ago.
    proof: Option<BoxFuture<'static, Result<(Shown, Known), Failure>>>,
    /// The connection is a new one, or something is to be sent again: nothing is sent before a look at the stream has
    /// shown that it is as it was, and how long it remembers.
    unseen: bool,
    look: Option<BoxFuture<'static, Result<Shown, Failure>>>,
    /// Nothing is sent before this time.
    held_until: Option<Instant>,
    pause: Pause,
    /// Something was held since the last acknowledgement; it counts as passed once nothing is under way after this
    /// time.
    troubled_until: Option<Instant>,
    /// Too many rows are held behind failed ones.
    full: bool,
    next_tick: Instant,
    ages: Ages,
    /// The connection whose acknowledgements count.
    epoch: u64,
    /// Events with an answer that leaves a question open, while the stream is asked about itself.
    unexplained: Vec<(u64, Failure)>,
    asked: Option<BoxFuture<'static, Result<StreamFacts, Failure>>>,
    /// The rows that the reconciler waits for, how many they were, and where to say that they are settled.
    pass: Option<(HashSet<u64>, usize, oneshot::Sender<usize>)>,
    /// Rows from the reconciler that are under way, by their tokens: none is taken in twice.
    rows: HashMap<u64, ByteString>,
    /// What of the stream ends the session.
    ended_by: Option<&'static str>,
}

impl<'a> Deliver<'a> {
    pub fn new(delivery: Delivery, known: Known, nats: &'a mut Nats, shared: Shared<'a>, wiring: Wiring) -> Self {
        let pause = Pause::new(Duration::from_millis(100), Duration::from_secs(5));
        Self {
            delivery,
            nats,
            shared,
            wiring,
            counters: Counters::of(shared.metrics),
            pending: VecDeque::new(),
            committed_at: None,
            looking: None,
            lookups: None,
            source_ended: false,
            taken_in: Lsn::ZERO,
            seam: Seam::default(),
            known,
            proof: None,
            unseen: false,
            look: None,
            held_until: None,
            pause,
            troubled_until: None,
            full: false,
            next_tick: Instant::now(),
            ages: Ages::default(),
            epoch: shared.epoch,
            unexplained: Vec::new(),
            asked: None,
            pass: None,
            rows: HashMap::new(),
            ended_by: None,
        }
    }

    /// Runs until `stop`, or until another stage ends; then waits until what was sent has its outcome, for as long as
    /// an acknowledgement may take.
    pub async fn run(mut self) -> Ended {
        let mut replies = Vec::with_capacity(REPLIES_AT_A_TIME);
        let mut link = self.nats.link.clone();
        link.mark_changed();
        let stop = self.wiring.stop.clone();
        let mut deadline = None;
        loop {
            self.tick();
            self.take_in();
            self.send_ready();
            self.tell();
            self.advance_source();
            if self.wiring.sources.is_empty() && deadline.is_none() {
                deadline = Some(self.wind_down());
            }
            if deadline.is_some_and(|deadline| self.delivery.is_empty() || deadline <= Instant::now()) {
                break;
            }
            let takes_in = deadline.is_none() && !self.source_ended && self.is_hungry();
            let wake = TokioInstant::from_std(self.next_wake());
            tokio::select! {
                biased;
                () = stop.cancelled(), if deadline.is_none() => deadline = Some(self.wind_down()),
                settled = self.wiring.settled.recv() => match settled {
                    Some(settled) => self.settle(settled),
                    None => break,
                },
                Some(report) = self.wiring.returned.recv() => self.returned(report),
                count = self.nats.replies.recv_many(&mut replies, REPLIES_AT_A_TIME) => {
                    if count == 0 {
                        break;
                    }
                    replies.drain(..).for_each(|reply| self.reply(reply));
                }
                Ok(()) = link.changed() => self.link(&link.borrow_and_update().clone()),
                notice = self.nats.notices.recv() => self.notice(notice),
                told = answer(&mut self.asked), if self.asked.is_some() => self.explained(&told),
                facts = answer(&mut self.look), if self.look.is_some() => self.seen(facts),
                known = answer(&mut self.proof), if self.proof.is_some() => self.proved(known),
                Some(ask) = self.wiring.asks.recv(), if deadline.is_none() => self.ask(ask),
                batch = next_batch(&mut self.wiring.sources), if takes_in => match batch {
                    Some(batch) => self.receive(batch),
                    None => self.source_ended = true,
                },
                looked = answer(&mut self.looking), if self.looking.is_some() => self.looked(looked),
                () = sleep_until(wake) => {}
            }
        }
        self.tell();
        // Where another stage has died, the rest of the session ends as well.
        stop.cancel();
        Ended { next_token: self.delivery.next_token(), why: self.ended_by }
    }

    /// These events are no longer under way.
    fn settle(&mut self, settled: Vec<Settled>) {
        for settled in settled {
            let token = settled.token;
            self.delivery.settle(settled);
            self.rows.remove(&token);
            self.seam.recorded(token);
            if let Some((waited_for, ..)) = &mut self.pass {
                waited_for.remove(&token);
            }
        }
        if self.pass.as_ref().is_some_and(|(waited_for, ..)| waited_for.is_empty())
            && let Some((_, count, done)) = self.pass.take()
        {
            // A reconciler that does not wait for the answer went on, or has ended.
            let _ = done.send(count);
        }
    }

    /// Nothing more is taken in or sent. Returns when the wait for acknowledgements ends.
    fn wind_down(&mut self) -> Instant {
        self.pending.clear();
        self.looking = None;
        self.delivery.forget_unsent();
        let connected = self.nats.link.borrow().connected;
        Instant::now() + if connected { self.shared.settings.delivery.ack_timeout } else { Duration::ZERO }
    }

    /// Whether there is room for another batch, with none waiting.
    fn is_hungry(&self) -> bool {
        self.pending.is_empty() && self.looking.is_none() && self.delivery.has_room()
    }

    /// When to look at the clock again, whatever happens until then.
    fn next_wake(&self) -> Instant {
        self.held_until.map_or(self.next_tick, |until| until.min(self.next_tick))
    }

    /// Hands over what is due, unless the pipeline holds.
    fn send_ready(&mut self) {
        let now = Instant::now();
        self.held_until = self.held_until.filter(|until| now < *until);
        if self.held_until.is_some() || !self.is_leader(now) || self.proof.is_some() {
            return;
        }
        if self.unseen || self.nats.link.borrow().epoch != self.epoch {
            return self.look_at_stream();
        }
        while let Some(next) = self.delivery.next_ready() {
            // At each of them: the relay may be frozen between two.
            let now = Instant::now();
            if !self.is_leader(now) {
                return;
            }
            if self.shared.proof_after.is_some_and(|age| next.needs_proof(now, age)) {
                return self.ask_for_copies();
            }
            let (token, parcel) = (next.token, next.parcel);
            let (headers, dropped) = self.headers(&parcel.event);
            match self.nats.publisher.send(token, parcel.subject.clone(), headers, parcel.event.payload.clone()) {
                Ok(()) => {
                    self.counters.headers_dropped.inc_by(dropped as u64);
                    self.delivery.sent(token, now);
                }
                Err(failure) if failure.class() == Class::Transient => return self.hold_for(&failure),
                Err(failure) => self.refuse(token, &failure),
            }
        }
    }

    /// The event's headers, and how many of its row's cannot be sent.
    fn headers(&self, event: &Event) -> (Headers, usize) {
        let mut headers = Headers::new();
        let dropped = self.shared.router.headers(event, |name, value| headers.set(name, value));
        let dropped = dropped + headers.refused();
        (headers, dropped)
    }

    /// Whether PostgreSQL has lately shown the slot to be ours. A relay that was frozen may have a successor by now.
    fn is_leader(&self, now: Instant) -> bool {
        now.saturating_duration_since(*self.wiring.fence.borrow()) < self.wiring.fence_limit
    }

    fn report(&mut self, report: Report) {
        if self.reads_table() {
            self.seam.decided(&report);
        }
        // The channel holds as many reports as events may be under way, so that it is never full; when it is closed,
        // write-back has ended and so does this stage.
        if self.wiring.reports.try_send(report).is_err() {
            self.wiring.stop.cancel();
        }
    }

    /// Looks at the clock: are answers overdue?
    fn tick(&mut self) {
        let now = Instant::now();
        if now < self.next_tick {
            return;
        }
        self.next_tick = now + TICK;
        while let Some(token) = self.delivery.overdue(now, self.shared.settings.delivery.ack_timeout) {
            self.failed(token, &Failure::AckTimeout);
        }
        self.look_at_held();
        if self.troubled_until.is_some_and(|until| until <= now) && self.delivery.is_empty() && !self.unseen {
            // Every event that met it has its outcome by now, though none was accepted.
            self.trouble_passed();
        }
        self.shared.pulse.tick();
        let sent = self.delivery.in_flight();
        self.shared.metrics.in_flight.set(i64::try_from(sent).unwrap_or(i64::MAX));
        gauges::show(self.shared.metrics, &mut self.delivery, sent);
        let oldest = self.ages.oldest(now, self.delivery.next_token(), self.delivery.ledger().oldest());
        self.shared.metrics.oldest_unconfirmed.set(oldest.as_secs_f64());
    }

    /// Tells the other stages how far things are.
    fn tell(&mut self) {
        let safe = self.delivery.safe();
        self.wiring.safe.send_if_modified(|told| std::mem::replace(told, safe) != safe);
        // Behind the position, which it belongs to: who reads it first finds that position, or a later one.
        self.wiring.stream_seq.store(self.delivery.stream_seq(), Ordering::Release);
    }
}

/// The next batch of the last source; `None` when it has ended.
async fn next_batch(sources: &mut [mpsc::Receiver<Vec<Change>>]) -> Option<Vec<Change>> {
    sources.last_mut()?.recv().await
}

/// The answer to what was asked, once it has come.
async fn answer<T>(asked: &mut Option<BoxFuture<'_, T>>) -> T {
    match asked {
        Some(answer) => answer.await,
        None => std::future::pending().await,
    }
}
