//! What was sent and what was received: the producers and the subscriber write to it, and share one clock.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::postgres::store::NewEvent;

/// The demo's books. One task uses them.
#[derive(Debug, Default)]
pub struct Ledger(RefCell<Books>);

#[derive(Debug, Default)]
struct Books {
    /// By event id.
    sent: HashMap<String, Sent>,
    /// For each aggregate, how many of its events were sent, and the newest that was received.
    aggregates: HashMap<String, (usize, usize)>,
    transactions: usize,
    commits: Vec<Duration>,
    arrivals: Vec<Duration>,
    /// Messages that were received before, or never sent.
    surplus: usize,
    /// Events that came before an earlier one of their aggregate.
    overtaken: usize,
}

#[derive(Debug)]
struct Sent {
    committed: Instant,
    tenant: String,
    aggregate: String,
    /// Among the events of its aggregate, counted from 1.
    turn: usize,
    place: Place,
    received: bool,
}

/// Where an event stands: the number of its transaction, and which of how many events of it this is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub transaction: usize,
    pub event: usize,
    pub of: usize,
}

/// An event that has come.
#[derive(Debug)]
pub struct Arrival {
    /// Counted from 1.
    pub number: usize,
    /// Since its producer sent COMMIT.
    pub after: Duration,
    pub tenant: String,
    pub aggregate: String,
    pub place: Place,
}

impl Ledger {
    /// Notes the events of a transaction whose COMMIT is sent now.
    pub fn commit(&self, events: &[NewEvent<'_>], ids: Vec<String>, now: Instant) {
        let books = &mut *self.0.borrow_mut();
        books.transactions += 1;
        for (at, (event, id)) in events.iter().zip(ids).enumerate() {
            let aggregate = format!("{} {}", event.aggregate_type, event.aggregate_id);
            let (turn, _) = books.aggregates.entry(aggregate.clone()).or_default();
            *turn += 1;
            let place = Place { transaction: books.transactions, event: at + 1, of: events.len() };
            let sent = Sent {
                committed: now,
                tenant: event.tenant_id.unwrap_or_default().to_owned(),
                aggregate,
                turn: *turn,
                place,
                received: false,
            };
            books.sent.insert(id, sent);
        }
    }

    /// Notes how long a COMMIT took, as its producer saw it.
    pub fn committed(&self, took: Duration) {
        self.0.borrow_mut().commits.push(took);
    }

    /// Notes a message. `None` when it was received before, or never sent.
    pub fn receive(&self, id: &str, at: Instant) -> Option<Arrival> {
        let books = &mut *self.0.borrow_mut();
        let Some(sent) = books.sent.get_mut(id).filter(|sent| !sent.received) else {
            books.surplus += 1;
            return None;
        };
        sent.received = true;
        let after = at.saturating_duration_since(sent.committed);
        books.arrivals.push(after);
        let (_, newest) = books.aggregates.entry(sent.aggregate.clone()).or_default();
        if sent.turn < *newest {
            books.overtaken += 1;
        }
        *newest = sent.turn.max(*newest);
        let number = books.arrivals.len();
        Some(Arrival {
            number,
            after,
            tenant: sent.tenant.clone(),
            aggregate: sent.aggregate.clone(),
            place: sent.place,
        })
    }

    pub fn received(&self) -> usize {
        self.0.borrow().arrivals.len()
    }

    /// The median so far.
    pub fn median(&self) -> Duration {
        percentile(&self.0.borrow().arrivals, 50)
    }

    /// What the books say; the rest is zero.
    pub fn summary(&self) -> Summary {
        let books = self.0.borrow();
        Summary {
            sent: books.sent.len(),
            transactions: books.transactions,
            received: books.arrivals.len(),
            surplus: books.surplus,
            overtaken: books.overtaken,
            after: [50, 99, 100].map(|percent| percentile(&books.arrivals, percent)),
            commit: [50, 99, 100].map(|percent| percentile(&books.commits, percent)),
            took: Duration::ZERO,
            stored: 0,
            statuses: Vec::new(),
        }
    }
}

/// The smallest value that so many per cent of all do not exceed; zero when there are none.
fn percentile(values: &[Duration], percent: usize) -> Duration {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or_default()
}

/// The outcome of the demo.
#[derive(Clone, Debug)]
pub struct Summary {
    pub sent: usize,
    pub transactions: usize,
    pub received: usize,
    pub surplus: usize,
    pub overtaken: usize,
    /// From COMMIT sent to received: half, 99 per cent, and all within.
    pub after: [Duration; 3],
    /// From COMMIT sent to COMMIT answered.
    pub commit: [Duration; 3],
    pub took: Duration,
    /// Messages in the stream.
    pub stored: u64,
    /// Rows of the outbox by status.
    pub statuses: Vec<(String, u64)>,
}

impl Summary {
    /// Whether all is as it must be; if not, what is not.
    ///
    /// # Errors
    /// The problems, as one sentence.
    pub fn verdict(&self) -> Result<(), String> {
        let sent = u64::try_from(self.sent).unwrap_or(u64::MAX);
        let completed = self.statuses.iter().find(|(status, _)| status == "completed").map_or(0, |(_, rows)| *rows);
        let problems: Vec<String> = [
            (self.received != self.sent, format!("{} of {sent} events were received", self.received)),
            (self.surplus > 0, format!("{} messages came twice or were not ours", self.surplus)),
            (self.overtaken > 0, format!("{} events overtook another of their aggregate", self.overtaken)),
            (self.stored != sent, format!("the stream holds {} messages instead of {sent}", self.stored)),
            (completed != sent, format!("{completed} of {sent} rows are completed")),
        ]
        .into_iter()
        .filter_map(|(is_wrong, problem)| is_wrong.then_some(problem))
        .collect();
        if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: &str) -> NewEvent<'_> {
        NewEvent::new("order", id, "placed", "{}")
    }

    fn finished(ledger: &Ledger) -> Summary {
        Summary { stored: 3, statuses: vec![("completed".to_owned(), 3)], ..ledger.summary() }
    }

    fn sent() -> (Ledger, Instant) {
        let (ledger, now) = (Ledger::default(), Instant::now());
        ledger.commit(&[event("1"), event("2")], vec!["a".into(), "b".into()], now);
        ledger.commit(&[event("1")], vec!["c".into()], now);
        (ledger, now)
    }

    #[test]
    fn all_received_once_in_order_is_well() {
        let (ledger, now) = sent();
        let ms = |ms| now + Duration::from_millis(ms);
        let arrivals = [ledger.receive("b", ms(1)), ledger.receive("a", ms(2)), ledger.receive("c", ms(3))];
        let last = arrivals.into_iter().flatten().last().unwrap();
        assert_eq!((last.number, last.place.transaction, last.place.of), (3, 2, 1));
        assert_eq!(ledger.summary().after, [2, 3, 3].map(Duration::from_millis));
        assert_eq!(finished(&ledger).verdict(), Ok(()));
    }

    #[test]
    fn what_is_lost_doubled_or_overtaken_shows() {
        let (ledger, now) = sent();
        for id in ["c", "a", "a", "x"] {
            ledger.receive(id, now);
        }
        let problems = finished(&ledger).verdict().unwrap_err();
        assert!(problems.contains("2 of 3 events were received"), "{problems}");
        assert!(problems.contains("2 messages came twice"), "{problems}");
        assert!(problems.contains("1 events overtook"), "{problems}");
        let nothing = ledger.summary().verdict().unwrap_err();
        assert!(nothing.contains("0 of 3 rows are completed") && nothing.contains("holds 0 messages"), "{nothing}");
    }
}
