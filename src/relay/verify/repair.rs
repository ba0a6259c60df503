//! Sends missing events again, as the relay would, and reads them back.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use tokio::sync::broadcast::Receiver;
use tokio::time::{sleep, timeout_at};

use super::{PATIENCE, PAUSE, Step, VerifyError, patiently};
use crate::config::Settings;
use crate::fault::{Class, Failure};
use crate::flow::event::{Decoded, Event};
use crate::flow::route::{Router, Unroutable};
use crate::nats::connect::{Connection, Inboxes};
use crate::nats::ids::Start;
use crate::nats::notice::Notice;
use crate::nats::publish::{Ack, Headers, Publisher, Replies};
use crate::nats::stream::{Stream, StreamFacts, why_no_responders};
use crate::postgres::outbox::{Completed, CompletedRow};
use crate::relay::prepare;

/// Events that are on their way at a time.
const BATCH: usize = 256;
/// How long an acknowledged message may take to be seen: in a cluster another server may be asked than the one that
/// stored it.
const SEEN: Duration = Duration::from_secs(10);
/// The longest duplicate window that is waited for.
const LONGEST_WINDOW: Duration = Duration::from_mins(10);

/// What became of a missing event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It can be read at this sequence.
    Readable(u64),
    Failed(String),
}

/// Sends events again.
pub struct Repair<'a> {
    settings: &'a Settings,
    router: &'a Router,
    completed: Completed<'a>,
    stream: &'a Stream,
    window: Duration,
    publisher: Publisher,
    replies: Replies,
    notices: Receiver<Notice>,
    /// No two messages have the same, so that a late answer is not taken for another's.
    next_token: u64,
    accepted_at: Instant,
}

/// What the stream said to one event.
enum Answer {
    Stored(Ack),
    Refused(Failure),
}

impl<'a> Repair<'a> {
    pub fn new(
        settings: &'a Settings,
        router: &'a Router,
        completed: Completed<'a>,
        (connection, inboxes): (&Connection, Inboxes),
        (stream, facts): (&'a Stream, &StreamFacts),
    ) -> Self {
        let (publisher, replies) = Publisher::new(connection, inboxes, &facts.name);
        Self {
            settings,
            router,
            completed,
            stream,
            window: facts.duplicate_window,
            publisher,
            replies,
            notices: connection.notices(),
            next_token: 0,
            accepted_at: Instant::now(),
        }
    }

    /// Sends the events of these rows, in their order, and makes sure that each can be read. Gives the outcome of each
    /// row.
    pub async fn send_again(
        &mut self,
        missing: &[CompletedRow],
        tell: &mut impl FnMut(Step),
    ) -> Result<Vec<Outcome>, VerifyError> {
        let mut outcomes: HashMap<i64, Outcome> = HashMap::new();
        let mut ghosts = Vec::new();
        let ids: Vec<i64> = missing.iter().map(|row| row.id).collect();
        let mut left = ids.as_slice();
        self.accepted_at = Instant::now();
        while let Some(first) = left.get(..left.len().min(BATCH)).filter(|first| !first.is_empty()) {
            let events = self.completed.events(first, prepare::message_cap(self.settings)).await?;
            // A row that is not read although one behind it is, has gone; so have all where none is read.
            let read = events.last().and_then(event_of).map_or(i64::MAX, |event| event.id);
            let taken = first.partition_point(|id| *id <= read).max(1);
            ghosts.extend(self.batch(events, &mut outcomes).await?);
            left = left.get(taken..).unwrap_or_default();
            tell(Step::Repairing { done: ids.len().saturating_sub(left.len()), of: ids.len() });
        }
        self.outwait(ghosts, &mut outcomes, tell).await?;
        let gone = || Outcome::Failed("its row was deleted or changed meanwhile".to_owned());
        Ok(ids.iter().map(|id| outcomes.remove(id).unwrap_or_else(gone)).collect())
    }

    /// Sends a few events. Returns those that the stream calls duplicates of messages that cannot be read.
    async fn batch(
        &mut self,
        events: Vec<Decoded>,
        outcomes: &mut HashMap<i64, Outcome>,
    ) -> Result<Vec<Event>, VerifyError> {
        let mut sendable = Vec::new();
        for decoded in events {
            match decoded {
                Decoded::Live(event) => sendable.push(event),
                Decoded::Unfit(event, reason) | Decoded::Nameless(event, reason) => {
                    outcomes.insert(event.id, Outcome::Failed(Failure::Undecodable(reason).to_string()));
                }
                Decoded::Left | Decoded::Waits(_) => {}
            }
        }
        let answers = self.publish(&sendable).await?;
        let claimed = answers.iter().zip(&sendable).filter_map(|(answer, event)| match answer {
            Answer::Stored(ack) => Some((&*event.event_id, *ack)),
            Answer::Refused(_) => None,
        });
        let seen = self.read_back(claimed.collect()).await?;
        let mut ghosts = Vec::new();
        for (event, answer) in sendable.into_iter().zip(answers) {
            let outcome = match answer {
                Answer::Stored(ack) if seen.contains(&ack.sequence) => Outcome::Readable(ack.sequence),
                Answer::Stored(ack) if ack.duplicate => {
                    ghosts.push(event);
                    continue;
                }
                Answer::Stored(_) => Outcome::Failed("the stream acknowledged it, but it cannot be read".to_owned()),
                // Its text may show a subject, which is made of the row's values.
                Answer::Refused(failure) => Outcome::Failed(format!("{}: {}", failure.code(), failure.hint())),
            };
            outcomes.insert(event.id, outcome);
        }
        Ok(ghosts)
    }

    /// Which of the sequences that the stream answered with hold the messages that it spoke of.
    async fn read_back(&self, claimed: Vec<(&str, Ack)>) -> Result<HashSet<u64>, VerifyError> {
        let (mut seen, mut fresh) = (HashSet::new(), HashMap::new());
        for (id, Ack { sequence, duplicate }) in claimed {
            if !duplicate {
                fresh.insert(sequence, id);
                continue;
            }
            let stored = patiently(async || self.stream.id_at(sequence).await).await;
            let stored = stored.map_err(|failure| self.failed(failure))?;
            if stored.is_some_and(|stored| stored.id.as_deref() == Some(id)) {
                seen.insert(sequence);
            }
        }
        let deadline = Instant::now() + SEEN;
        while let (Some(first), Some(last)) = (fresh.keys().min(), fresh.keys().max()) {
            // What was just stored stands close together.
            let (after, count) = (first.saturating_sub(1), last - first + 1);
            let stored = patiently(async || self.stream.ids_after(after, count).await).await;
            for stored in stored.map_err(|failure| self.failed(failure))?.0 {
                if stored.id.as_deref().is_some_and(|id| fresh.get(&stored.sequence) == Some(&id)) {
                    fresh.remove(&stored.sequence);
                    seen.insert(stored.sequence);
                }
            }
            if Instant::now() > deadline {
                break;
            }
            if !fresh.is_empty() {
                sleep(PAUSE).await;
            }
        }
        Ok(seen)
    }

    /// Waits until the stream has forgotten the ids of messages that it has lost, and takes the events. A repeated id
    /// does not begin its window anew.
    async fn outwait(
        &mut self,
        mut ghosts: Vec<Event>,
        outcomes: &mut HashMap<i64, Outcome>,
        tell: &mut impl FnMut(Step),
    ) -> Result<(), VerifyError> {
        let (window, start) = (self.window, Instant::now());
        let pause = (window / 20).clamp(PAUSE, Duration::from_secs(5));
        while !ghosts.is_empty() && window <= LONGEST_WINDOW && start.elapsed() < window + 2 * pause {
            tell(Step::Waiting { events: ghosts.len(), at_most: window.saturating_sub(start.elapsed()) });
            sleep(pause).await;
            let mut left = Vec::new();
            for events in ghosts.chunks(BATCH) {
                left.extend(self.batch(events.iter().cloned().map(Decoded::Live).collect(), outcomes).await?);
            }
            ghosts = left;
        }
        for event in ghosts {
            let window = humantime::format_duration(window);
            let problem = format!(
                "the stream takes it for a duplicate of a message that it does not have any more; it forgets the id within \
                 its duplicate window of {window}: run this again after that"
            );
            outcomes.insert(event.id, Outcome::Failed(problem));
        }
        Ok(())
    }

    /// Publishes events until each has an answer that does not pass. Gives the answers in the order of the events.
    async fn publish(&mut self, events: &[Event]) -> Result<Vec<Answer>, VerifyError> {
        let mut answers: Vec<Option<Answer>> = events.iter().map(|_| None).collect();
        let facts = patiently(async || self.stream.facts().await).await.map_err(|failure| self.failed(failure))?;
        loop {
            let (trouble, asked) = self.attempt(events, &mut answers).await;
            if answers.iter().all(Option::is_some) {
                return Ok(answers.into_iter().flatten().collect());
            }
            if let Some(failure) = trouble.filter(|_| self.accepted_at.elapsed() > PATIENCE) {
                return Err(self.failed(failure));
            }
            if asked {
                sleep(PAUSE).await;
                self.look_for_sent(facts.last_sequence, events, &mut answers).await?;
            }
        }
    }

    /// What was stored behind `after` although its answer did not come. Past the duplicate window another copy would be
    /// stored, so the stream is asked before anything is sent once more.
    async fn look_for_sent(
        &self,
        after: u64,
        events: &[Event],
        answers: &mut [Option<Answer>],
    ) -> Result<(), VerifyError> {
        let open = events.iter().zip(&*answers).enumerate().filter(|(_, (_, answer))| answer.is_none());
        let open: HashMap<&str, usize> = open.map(|(at, (event, _))| (&*event.event_id, at)).collect();
        let mut walk = self.stream.walk(Start::After(after));
        while let Some(stored) = patiently(async || walk.next().await).await.map_err(|failure| self.failed(failure))? {
            for stored in stored {
                if let Some(at) = stored.id.as_deref().and_then(|id| open.get(id)) {
                    set(answers, *at, Answer::Stored(Ack { sequence: stored.sequence, duplicate: true }));
                }
            }
        }
        Ok(())
    }

    /// Sends those without an answer once, and takes their answers in. Returns what kept one from an answer, and
    /// whether to pause before the next attempt.
    async fn attempt(&mut self, events: &[Event], answers: &mut [Option<Answer>]) -> (Option<Failure>, bool) {
        let (mut waiting, mut trouble) = (HashMap::new(), None);
        for (at, event) in events.iter().enumerate() {
            if answers.get(at).is_some_and(Option::is_some) {
                continue;
            }
            let token = self.next_token;
            self.next_token += 1;
            let subject = self.router.subject(event).map_err(|Unroutable| Failure::Unroutable(Unroutable.to_string()));
            let sent = subject.and_then(|subject| self.send(token, event, &subject).map(|()| subject));
            match sent {
                Ok(subject) => _ = waiting.insert(token, (at, subject)),
                Err(failure) if failure.class() == Class::Transient => {
                    trouble = Some(failure);
                    break;
                }
                Err(failure) => set(answers, at, Answer::Refused(failure)),
            }
        }
        let deadline = tokio::time::Instant::now() + self.settings.delivery.ack_timeout;
        let mut replies = Vec::new();
        while !waiting.is_empty() {
            match timeout_at(deadline, self.replies.recv_many(&mut replies, BATCH)).await {
                Ok(1..) => {}
                Ok(0) => return (Some(Failure::Disconnected), true),
                Err(_) => break,
            }
            for reply in replies.drain(..) {
                let Some((at, subject)) = waiting.remove(&reply.token) else { continue };
                let result = match reply.result {
                    Err(Failure::NoResponders) => Err(why_no_responders(&self.stream.facts().await, &subject)),
                    result => result,
                };
                match result {
                    Ok(ack) => {
                        self.accepted_at = Instant::now();
                        set(answers, at, Answer::Stored(ack));
                    }
                    Err(failure) if failure.class() == Class::Transient => trouble = Some(failure),
                    Err(failure) => set(answers, at, Answer::Refused(failure)),
                }
            }
        }
        if !waiting.is_empty() {
            trouble = Some(Failure::AckTimeout);
            self.refused_subjects(&waiting, answers);
        }
        let pause = trouble.is_some();
        (trouble, pause)
    }

    fn send(&self, token: u64, event: &Event, subject: &str) -> Result<(), Failure> {
        let mut headers = Headers::new();
        self.router.headers(event, |name, value| headers.set(name, value));
        self.publisher.send(token, subject.to_owned(), headers, event.payload.clone())
    }

    /// A publish that permissions forbid has no answer, only a notice.
    fn refused_subjects(&mut self, waiting: &HashMap<u64, (usize, String)>, answers: &mut [Option<Answer>]) {
        while let Ok(notice) = self.notices.try_recv() {
            let Notice::PublishRefused { subject: refused } = notice else { continue };
            for (at, _) in waiting.values().filter(|(_, subject)| *subject == refused) {
                let subject = refused.clone();
                set(answers, *at, Answer::Refused(Failure::PermissionDenied { action: "publish to", subject }));
            }
        }
    }

    fn failed(&self, failure: Failure) -> VerifyError {
        VerifyError::JetStream { stream: self.settings.nats.stream.clone(), failure }
    }
}

fn set(answers: &mut [Option<Answer>], at: usize, answer: Answer) {
    if let Some(place) = answers.get_mut(at) {
        *place = Some(answer);
    }
}

fn event_of(decoded: &Decoded) -> Option<&Event> {
    match decoded {
        Decoded::Live(event) | Decoded::Unfit(event, _) | Decoded::Nameless(event, _) => Some(event),
        Decoded::Left | Decoded::Waits(_) => None,
    }
}
