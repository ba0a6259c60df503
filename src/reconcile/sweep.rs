//! Rows that the log never showed: the slot was moved, or the table left its publication for a while.
//!
//! A pending row that was visible before a position of the log, and has no outcome once everything before that position
//! has one, was missed. So was one that a poller has claimed without dating its lease, once that is over.

use std::time::{Duration, Instant};

use tokio_postgres::error::SqlState;
use tracing::warn;

use super::{Ask, Interrupted, PASS_ROWS, Reconciler};
use crate::flow::lsn::Lsn;
use crate::postgres::outbox::{self, Due, LOOK_ROWS, Seen};
use crate::postgres::slot;
use crate::telemetry::metrics::waiting;

/// Rows looked at in one step, at most; the next one goes on behind them.
const STEP_ROWS: usize = 10_000;
/// Ids that one statement looks at, at most, however few of their rows have no outcome. On a slow disk that may still
/// take too long: half as many are looked at next time, down to the least.
const LOOK_IDS: i64 = 1_000_000;
const LOOK_IDS_LEAST: i64 = 10_000;
/// Steps are taken one after the other for about so long.
const AT_A_TIME: Duration = Duration::from_secs(2);

/// Where the sweep stands.
#[derive(Debug)]
pub(super) struct Sweep {
    next: Instant,
    /// Ids that one statement looks at.
    ids: i64,
    /// Rows up to this id have an outcome, as far as they were there when the sweep passed them; `None` before the
    /// first one.
    low: Option<i64>,
    /// But for these, which are looked at again each time: a poller has claimed them, or they could not be sent.
    again: Vec<i64>,
    /// Which tables the rows stood in then. A partition that is attached brings rows of any age.
    partitions: Option<String>,
    /// Whether the whole table is to be looked at once more when the transactions that were open as the session began
    /// have ended. The log does not show what they wrote while the table was out of its publication.
    late: bool,
    /// What was seen, until the log has passed it.
    seen: Option<Look>,
    /// The highest id as the first sweep began: rows that an earlier session may have sent lie no higher.
    newest: Option<i64>,
    /// Whether a sweep has passed those, and what it saw was sent.
    pub(super) over: bool,
    /// When waiting rows are counted next: also while the sweep waits for the log.
    count: Instant,
}

/// Pending rows that were seen.
#[derive(Debug)]
struct Look {
    rows: Vec<Seen>,
    /// The position of the log by which each must have an outcome.
    position: Lsn,
    /// Whether rows that an earlier session may have sent are all among them, or have an outcome.
    whole: bool,
}

impl Sweep {
    pub(super) fn new() -> Self {
        Self {
            next: Instant::now(),
            ids: LOOK_IDS,
            low: None,
            again: Vec::new(),
            partitions: None,
            late: true,
            seen: None,
            newest: None,
            over: false,
            count: Instant::now(),
        }
    }
}

impl Reconciler {
    /// Takes the sweep one step on: looks at pending rows when it is time, and sends those that were missed once the
    /// log has passed them.
    pub(super) async fn sweep(&self, due: Due<'_>, sweep: &mut Sweep) -> Result<(), Interrupted> {
        // Not before the log has shown what an earlier session left: nothing is known to be missed until then, and a
        // look at the whole of a large table would cost the server what it needs for the log.
        let passed = |position: Lsn| *self.safe.borrow() >= position;
        let shown = self.horizon.is_some_and(passed);
        let began = Instant::now();
        // Where nothing waits it goes on at once, though others are to have their turn.
        while shown && sweep.seen.is_none() && Instant::now() >= sweep.next && began.elapsed() < AT_A_TIME {
            self.look(due, sweep).await?;
        }
        if Instant::now() >= sweep.count {
            sweep.count = Instant::now() + self.sweep_interval;
            self.count(due, sweep.low).await?;
            if self.ordered {
                self.ask(Ask::Held(outbox::held_aggregates(due.client, due.tables).await?)).await?;
            }
        }
        let Some(look) = sweep.seen.take_if(|look| passed(look.position)) else { return Ok(()) };
        let sent = self.send_missed(due, sweep, &look).await;
        if sent.is_err() {
            sweep.seen = Some(look);
        }
        sent
    }

    /// Notes the pending rows, and then where the log ends: what commits in between is not among the rows.
    async fn look(&self, due: Due<'_>, sweep: &mut Sweep) -> Result<(), Interrupted> {
        let partitions = due.partitions().await?;
        if sweep.partitions != partitions {
            (sweep.low, sweep.partitions) = (None, partitions);
        }
        // Before the rows are looked at, so that they are all seen.
        if sweep.late && due.earlier_have_ended().await? {
            (sweep.low, sweep.late) = (None, false);
        }
        let newest = match sweep.newest {
            Some(newest) => newest,
            None => *sweep.newest.insert(due.highest_id().await?.unwrap_or(0)),
        };
        let low = sweep.low.unwrap_or(0);
        let limit = STEP_ROWS.saturating_sub(sweep.again.len());
        let (high, more) = due.reach(low, sweep.ids).await?;
        let rows = due.undated(low, high, limit, &sweep.again).await;
        if rows.as_ref().is_err_and(|error| error.code() == Some(&SqlState::QUERY_CANCELED)) {
            sweep.ids = (sweep.ids / 2).max(LOOK_IDS_LEAST);
        }
        let rows = rows?;
        let position = slot::current_wal(due.client).await?;
        let above: Vec<Seen> = rows.iter().filter(|seen| seen.id > low).copied().collect();
        // Up to which id all was looked at; `None`: to the end.
        let step = match above.last() {
            Some(step) if above.len() >= limit => Some(step.id),
            None if limit == 0 => Some(low),
            _ => more.then_some(high),
        };
        // What is left of a large table is not kept waiting, unless all room is taken by rows that cannot be sent.
        let rests = step.is_none() || limit == 0;
        sweep.next = Instant::now() + if rests { self.sweep_interval } else { Duration::ZERO };
        sweep.low = Some(match step {
            Some(step) => step,
            None => next_low(due, &above).await?,
        });
        sweep.again = rows.iter().filter(|seen| seen.claimed).map(|seen| seen.id).collect();
        // Where new rows come faster than they are sent, the end of the table is never reached.
        let whole = step.is_none_or(|step| step >= newest);
        sweep.over |= whole && rows.is_empty();
        sweep.seen = (!rows.is_empty()).then_some(Look { rows, position, whole });
        Ok(())
    }

    /// Sends those of the rows that still have no outcome.
    async fn send_missed(&self, due: Due<'_>, sweep: &mut Sweep, look: &Look) -> Result<(), Interrupted> {
        let mut whole = look.whole;
        for mut seen in look.rows.chunks(PASS_ROWS) {
            // In parts where their payloads are large.
            loop {
                let missed = due.missed(seen).await?;
                let (Some(end), count) = (missed.last().map(|row| row.id), missed.len()) else { break };
                warn!(rows = count, "pending rows were not in the log; they are sent from the table");
                if self.send(missed).await? < count {
                    // What was not taken, or has no outcome yet, is looked at again.
                    sweep.again.extend(seen.iter().filter(|seen| !seen.claimed).map(|seen| seen.id));
                    whole = false;
                    break;
                }
                (_, seen) = seen.split_at(seen.partition_point(|seen| seen.id <= end));
            }
        }
        sweep.over |= whole;
        Ok(())
    }

    /// Shows how many rows wait: before the first sweep, among the newest.
    async fn count(&self, due: Due<'_>, low: Option<i64>) -> Result<(), Interrupted> {
        let low = match low {
            Some(low) => low,
            None => due.highest_id().await?.unwrap_or(0).saturating_sub(LOOK_ROWS),
        };
        let found = outbox::waiting(due.client, due.tables, low).await?;
        let whole = |rows: i64| u64::try_from(rows).unwrap_or(0);
        self.metrics.set_outbox_rows(waiting::PENDING, whole(found.pending + found.scheduled));
        self.metrics.set_outbox_rows(waiting::FAILED, whole(found.failed));
        self.metrics.set_outbox_rows(waiting::HELD, whole(found.held));
        self.metrics.live.unhandled.set_count(whole(found.unhandled));
        Ok(())
    }
}

/// The next sweep starts behind rows that have an outcome, or are looked at each time. Ids that are given out but not
/// committed yet may lie lower: those rows come through the log, or the whole table is looked at again.
async fn next_low(due: Due<'_>, rows: &[Seen]) -> Result<i64, tokio_postgres::Error> {
    match rows.iter().find(|seen| !seen.claimed) {
        Some(first) => Ok(first.id.saturating_sub(1)),
        // A table that was emptied may count its rows from one again.
        None => Ok(due.highest_id().await?.unwrap_or(0)),
    }
}
