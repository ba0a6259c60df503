//! Outcomes on their way into the table: gathered, and tried again where a row could not be had.

use std::time::{Duration, Instant};

use tokio::sync::mpsc::Receiver;
use tokio::time::{Instant as TokioInstant, sleep_until};
use tracing::warn;

use super::lines::Lines;
use crate::flow::event::Report;

/// Rows in one statement, at most.
const BATCH: usize = 1000;
/// How often outcomes are committed, at most, unless a whole batch waits: each commit makes the server wait for its
/// disk, and few large ones leave it more time for those of the applications.
const GATHER: Duration = Duration::from_millis(10);
/// How soon a row that could not be had is tried again; it doubles up to the longest.
const SOON: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
/// For so many tries, about five seconds, holds wait for an earlier outcome of their aggregate. A lock that someone has
/// forgotten does not make them take the room of everything that is under way.
const ORDERED_TRIES: u32 = 10;

/// Reports that are not settled yet.
#[derive(Debug, Default)]
pub struct Backlog {
    due: Vec<Report>,
    later: Vec<Late>,
    lines: Lines,
}

#[derive(Debug)]
struct Late {
    at: Instant,
    tries: u32,
    report: Report,
}

/// Lets outcomes gather after a batch that was begun at `began`. A lone one, a full batch, and the last ones of a
/// session do not wait.
pub(super) async fn gather(reports: &Receiver<Report>, began: Instant) {
    if reports.len() < BATCH && !reports.is_closed() {
        sleep_until((began + GATHER).into()).await;
    }
}

impl Backlog {
    /// Waits until something is due. `false`: all is done.
    pub(super) async fn collect(&mut self, reports: &mut Receiver<Report>) -> bool {
        let room = BATCH.saturating_sub(self.due.len());
        let next = self.next_due();
        if !self.due.is_empty() || next.is_some_and(|at| at <= Instant::now()) {
            while self.due.len() < BATCH
                && let Ok(report) = reports.try_recv()
            {
                self.due.push(report);
            }
            return true;
        }
        let look = Instant::now() + LONGEST;
        let wake = TokioInstant::from_std(next.map_or(look, |next| next.min(look)));
        tokio::select! {
            count = reports.recv_many(&mut self.due, room) => {
                if count == 0 && next.is_some() {
                    // Closed, but rows are still waited for.
                    sleep_until(wake).await;
                }
                count > 0 || next.is_some()
            }
            () = sleep_until(wake) => true,
        }
    }

    /// What may be written at `now`, with the number of tries before.
    pub(super) fn take(&mut self, now: Instant) -> Vec<(u32, Report)> {
        let ready = self.later.extract_if(.., |late| late.at <= now).map(|late| (late.tries, late.report));
        let mut batch: Vec<_> = ready.take(BATCH).collect();
        let due = self.due.drain(..BATCH.min(self.due.len()));
        batch.extend(due.filter_map(|report| Some((0, self.lines.line_up(report)?))));
        batch
    }

    /// Keeps a hold back that must not be written before another outcome. Gives back what may be written.
    pub(super) fn line_up(&mut self, report: Report) -> Option<Report> {
        self.lines.line_up(report)
    }

    /// The outcome is written, or will never be: what waited for it is due.
    pub(super) fn settled(&mut self, report: &Report) {
        let behind = self.lines.end(report);
        if !behind.is_empty() {
            // It is older than what is due already.
            self.due.splice(..0, behind);
        }
    }

    /// The batch was not written: it comes again before what came after it.
    pub(super) fn put_back(&mut self, batch: Vec<(u32, Report)>) {
        self.due.splice(..0, batch.into_iter().map(|(_, report)| report));
    }

    pub(super) fn later(&mut self, tries: u32, report: Report) {
        let Some(report) = self.lines.line_up(report) else { return };
        if tries < ORDERED_TRIES {
            self.lines.begin(&report);
        } else {
            self.settled(&report);
        }
        let wait = SOON.saturating_mul(1 << tries.min(10)).min(LONGEST);
        self.later.push(Late { at: Instant::now() + wait, tries, report });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.due.is_empty() && self.later.is_empty()
    }

    pub(super) fn say_what_is_left(&self) {
        let rows = self.later.len() + self.due.len() + self.lines.len();
        if rows > 0 {
            warn!(rows, "the outcomes of some rows could not be written; they are sent again, under the same ids");
        }
    }

    fn next_due(&self) -> Option<Instant> {
        self.later.iter().map(|late| late.at).min()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::sync::mpsc;

    use super::*;
    use crate::flow::event::{Event, Origin, Outcome, Rejection};

    fn report(token: u64) -> Report {
        Report { token, id: 1, event_id: "e".into(), xid: None, outcome: Outcome::Completed }
    }

    fn event(aggregate: &str) -> Event {
        Event {
            id: 1,
            event_id: "e".into(),
            tenant_id: None,
            aggregate_type: "order".into(),
            aggregate_id: aggregate.into(),
            event_type: "placed".into(),
            payload: bytes::Bytes::new(),
            headers: "{}".into(),
            created_at: None,
            retry_count: 0,
            max_retries: 3,
            origin: Origin::Table,
        }
    }

    fn held(token: u64, aggregate: &str) -> Report {
        Report::held(token, event(aggregate))
    }

    fn failed(token: u64, aggregate: &str) -> Report {
        let retry_in = Some(Duration::from_secs(1));
        let rejection =
            Rejection { event: event(aggregate), code: "code", message: String::new(), retry_in, counts: true };
        Report::rejected(token, rejection)
    }

    /// What may be written at `now`.
    fn tokens(backlog: &mut Backlog, now: Instant) -> Vec<u64> {
        backlog.take(now).iter().map(|(_, report)| report.token).collect()
    }

    fn due(backlog: &mut Backlog, reports: impl IntoIterator<Item = Report>) {
        backlog.due.extend(reports);
    }

    fn channel(reports: u64) -> (mpsc::Sender<Report>, Receiver<Report>) {
        let (sender, receiver) = mpsc::channel(10_000);
        (0..reports).for_each(|token| sender.try_send(report(token)).unwrap());
        (sender, receiver)
    }

    #[tokio::test]
    async fn only_few_outcomes_soon_after_a_batch_are_gathered() {
        let (_sender, few) = channel(BATCH as u64 - 1);
        assert_eq!(gather(&few, Instant::now()).now_or_never(), None);
        gather(&few, Instant::now()).await;
        assert_eq!(
            gather(&few, Instant::now().checked_sub(2 * GATHER).unwrap()).now_or_never(),
            Some(()),
            "the last batch was long ago"
        );
        let (_sender, full) = channel(BATCH as u64);
        assert_eq!(gather(&full, Instant::now()).now_or_never(), Some(()), "a full batch");
        let (sender, last) = channel(1);
        drop(sender);
        assert_eq!(gather(&last, Instant::now()).now_or_never(), Some(()), "the session ends");
    }

    #[tokio::test]
    async fn a_lone_outcome_is_taken_at_once() {
        let (_sender, mut reports) = channel(1);
        let mut backlog = Backlog::default();
        assert_eq!(backlog.collect(&mut reports).now_or_never(), Some(true));
        assert_eq!(backlog.take(Instant::now()).len(), 1);
    }

    #[tokio::test]
    async fn what_waits_when_the_session_ends_is_taken_to_the_last_one_in_batches() {
        let (sender, mut reports) = channel(2500);
        drop(sender);
        let mut backlog = Backlog::default();
        backlog.later(0, report(2500));
        let mut taken = Vec::new();
        while backlog.collect(&mut reports).await {
            let batch = backlog.take(Instant::now());
            assert!(batch.len() <= BATCH + 1);
            taken.extend(batch.iter().map(|(_, report)| report.token));
            gather(&reports, Instant::now()).await;
        }
        taken.sort_unstable();
        assert_eq!(taken, (0..=2500).collect::<Vec<_>>());
    }

    #[test]
    fn a_row_that_cannot_be_had_waits_longer_each_time_and_others_do_not() {
        let mut backlog = Backlog::default();
        for tries in 0..20 {
            backlog.later(tries, report(u64::from(tries)));
        }
        backlog.put_back(vec![(7, report(100))]);
        let now: Vec<u64> = backlog.take(Instant::now()).iter().map(|(_, report)| report.token).collect();
        assert_eq!(now, [100]);
        let waits: Vec<_> = backlog.later.windows(2).map(|pair| pair[0].at < pair[1].at + SOON).collect();
        assert!(waits.iter().all(|longer| *longer));
        assert_eq!(backlog.take(Instant::now() + LONGEST).len(), 20, "and none longer than the longest");
    }

    #[test]
    fn a_hold_waits_for_the_earlier_outcome_of_its_aggregate_and_others_do_not() {
        for first in [failed(1, "a"), held(1, "a")] {
            let mut backlog = Backlog::default();
            backlog.later(0, first.clone());
            due(&mut backlog, [held(2, "a"), held(3, "b"), report(4), failed(5, "a"), held(6, "a")]);
            assert_eq!(tokens(&mut backlog, Instant::now()), [3, 4, 5], "what failed again is not behind it");
            // The next one could not be had either, as the statement holds none behind one that it did not get.
            backlog.later(1, held(7, "a"));
            let soon = Instant::now() + LONGEST;
            assert_eq!(tokens(&mut backlog, soon), [1], "it is tried without them");
            backlog.put_back(vec![(1, first.clone())]);
            assert_eq!(tokens(&mut backlog, soon), [1], "nor does it wait for itself");
            backlog.later(2, first.clone());
            assert_eq!(tokens(&mut backlog, soon), [1]);
            due(&mut backlog, [held(8, "a")]);
            backlog.settled(&first);
            assert_eq!(tokens(&mut backlog, soon), [2, 6, 7, 8]);
            assert_eq!(backlog.lines.len(), 0);
        }
    }

    #[test]
    fn a_row_that_is_locked_for_very_long_is_no_longer_waited_for() {
        let mut backlog = Backlog::default();
        for tries in 0..ORDERED_TRIES {
            backlog.later(tries, held(1, "a"));
            due(&mut backlog, [held(2 + u64::from(tries), "a")]);
            assert_eq!(tokens(&mut backlog, Instant::now() + LONGEST), [1]);
        }
        backlog.later(ORDERED_TRIES, held(1, "a"));
        due(&mut backlog, [held(100, "a")]);
        let behind: Vec<u64> = (2..2 + u64::from(ORDERED_TRIES)).chain([100]).collect();
        assert_eq!(tokens(&mut backlog, Instant::now()), behind);
        // One of them was in one statement with the locked row, and waits for itself alone.
        backlog.later(1, held(100, "a"));
        assert_eq!(tokens(&mut backlog, Instant::now() + LONGEST), [1, 100]);
    }

    #[test]
    fn very_many_that_waited_are_taken_in_batches_and_in_their_order_also_again() {
        let mut backlog = Backlog::default();
        backlog.later(0, held(0, "a"));
        due(&mut backlog, (1..=2 * BATCH as u64).map(|token| held(token, "a")));
        while !tokens(&mut backlog, Instant::now()).is_empty() || !backlog.due.is_empty() {}
        backlog.settled(&held(0, "a"));
        let first = backlog.take(Instant::now());
        backlog.put_back(first);
        let all: Vec<u64> = (0..2).flat_map(|_| tokens(&mut backlog, Instant::now())).collect();
        assert_eq!(all, (1..=2 * BATCH as u64).collect::<Vec<_>>());
    }
}
