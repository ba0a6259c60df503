//! Outcomes, written back to the rows.

use std::collections::{HashMap, HashSet};

use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, Error, Row, Statement};
use tracing::warn;

use super::writeback_sql::{bury_sql, complete_sql, fail_sql, hold_sql, look_sql, note_sql};
use super::{Tables, printable};
use crate::config::OnSuccess;
use crate::flow::event::{Outcome, Rejection, Report};
use crate::flow::lsn::Lsn;
use crate::flow::order::AggregateKey;
use crate::flow::token::TokenMap;

/// The word for a row that had its outcome already.
const UNCHANGED: &str = "unchanged";

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// The outcome is committed in the table: the row's status now, `deleted`, or `unchanged`.
    Row(&'static str),
    /// The row is proven deleted; where the event failed, its dead letter is committed.
    WithoutRow,
    /// Not now: the row is locked by someone, or not visible yet.
    Later,
}

/// How far things are, noted with each batch of outcomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// No event with unrecorded outcome is stored at or below this sequence of the stream.
    pub stream_seq: u64,
    /// The slot is confirmed up to here at most: a slot found beyond it was moved by someone else. Zero: not known.
    pub confirmed: Lsn,
}

impl Place {
    fn parameters(self) -> (i64, String) {
        (i64::try_from(self.stream_seq).unwrap_or(i64::MAX), self.confirmed.to_string())
    }
}

/// The prepared statements of write-back, on a connection of its own.
#[derive(Debug)]
pub struct Writeback<'a> {
    client: &'a Client,
    slot: &'a str,
    /// What a row is once JetStream has its event.
    done: &'static str,
    complete: Statement,
    complete_unlocked: Statement,
    fail: Statement,
    hold: Statement,
    bury: Statement,
    look: Statement,
    note: Statement,
}

impl<'a> Writeback<'a> {
    /// How the connection's session must be set. No wait for a lock is long, commits are local, and the plans are
    /// those for a large table and a small batch whatever the statistics say.
    pub const SESSION: &'static [(&'static str, &'static str)] = &[
        ("synchronous_commit", "local"),
        ("lock_timeout", "100ms"),
        ("statement_timeout", "60s"),
        ("idle_in_transaction_session_timeout", "0"),
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("row_security", "off"),
        ("plan_cache_mode", "force_generic_plan"),
        ("enable_seqscan", "off"),
        ("enable_hashjoin", "off"),
        ("enable_mergejoin", "off"),
        ("jit", "off"),
    ];

    /// Prepares the statements, on a connection with [`Self::SESSION`]. It waits for locks of whole tables.
    pub async fn prepare(
        client: &'a Client,
        tables: &Tables,
        slot: &'a str,
        on_success: OnSuccess,
    ) -> Result<Self, Error> {
        Ok(Self {
            client,
            slot,
            done: match on_success {
                OnSuccess::Complete => "completed",
                OnSuccess::Delete => "deleted",
            },
            complete: client.prepare(&complete_sql(tables, on_success, false)).await?,
            complete_unlocked: client.prepare(&complete_sql(tables, on_success, true)).await?,
            fail: client.prepare(&fail_sql(tables)).await?,
            hold: client.prepare(&hold_sql(tables)).await?,
            bury: client.prepare(&bury_sql(tables)).await?,
            look: client.prepare(&look_sql(tables)).await?,
            note: client.prepare(&note_sql(tables)).await?,
        })
    }

    /// Notes the place alone. `false`: the relay's row is gone, so that it is not noted.
    pub async fn note(&self, place: Place) -> Result<bool, Error> {
        let (sequence, position) = place.parameters();
        Ok(self.client.execute(&self.note, &[&self.slot, &sequence, &position]).await? > 0)
    }

    /// Commits the outcomes, together with the place. Returns what became of each report, in their order, and whether
    /// the place was noted, as [`Self::note`] does.
    ///
    /// An error means that nothing is known of any of them; all may be recorded again.
    pub async fn record(&self, reports: &[Report], place: Place) -> Result<(Vec<Recorded>, bool), Error> {
        let (sequence, position) = place.parameters();
        let place = (sequence, &*position);
        let of = |wanted: fn(&Outcome) -> bool| -> Vec<&Report> {
            reports.iter().filter(|report| wanted(&report.outcome)).collect()
        };
        let completed = of(|outcome| matches!(outcome, Outcome::Completed));
        let mut written: TokenMap<&'static str> = TokenMap::default();
        let mut noted = true;
        if !completed.is_empty() {
            let done;
            (done, noted) = self.complete(&completed, place).await?;
            if done.len() == reports.len() {
                return Ok((vec![Recorded::Row(self.done); done.len()], noted));
            }
            written.extend(done.into_iter().map(|token| (token, self.done)));
        }
        // Before the holds: none may stand in the table without the failure that it waits behind.
        let mut unwritten = HashSet::new();
        for report in reports {
            if let Outcome::Failed(rejection) = &report.outcome {
                let (status, and_place) = self.fail(report, rejection, place).await?;
                noted &= and_place;
                match status {
                    Some(status) => {
                        written.insert(report.token, status);
                    }
                    None => unwritten.extend(AggregateKey::of_waiting(&report.outcome)),
                }
            }
        }
        let (held, and_place) = self.hold(reports, &unwritten, place).await?;
        noted &= and_place;
        written.extend(held.into_iter().map(|token| (token, "held")));
        let missing: Vec<&Report> = reports.iter().filter(|report| !written.contains_key(&report.token)).collect();
        let seen = if missing.is_empty() { HashMap::new() } else { self.look(&missing).await? };
        for report in missing {
            if seen.get(&report.token) == Some(&Recorded::WithoutRow) {
                self.bury(&report.outcome).await?;
            }
        }
        let outcome = |report: &Report| match written.get(&report.token) {
            Some(status) => Recorded::Row(status),
            None => seen.get(&report.token).copied().unwrap_or(Recorded::Later),
        };
        Ok((reports.iter().map(outcome).collect(), noted))
    }

    /// Completes the rows in one statement; where one of them stays locked, in another that passes over locked rows.
    /// Returns the tokens of the reports that were written, and whether the place was noted.
    async fn complete(
        &self,
        reports: &[&Report],
        (sequence, position): (i64, &str),
    ) -> Result<(Vec<u64>, bool), Error> {
        let (ids, event_ids) = names(reports);
        let parameters: [&(dyn ToSql + Sync); 5] = [&ids, &event_ids, &self.slot, &sequence, &position];
        let mut done = self.client.query_one(&self.complete, &parameters).await;
        if done.as_ref().is_err_and(|error| error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)) {
            done = self.client.query_one(&self.complete_unlocked, &parameters).await;
        }
        written(reports, &done?)
    }

    /// Holds the rows, but for those of aggregates in which a failure is `unwritten`. Returns the tokens of the reports
    /// that were written: none behind another of its aggregate that could not be had. And whether the place was noted.
    async fn hold(
        &self,
        reports: &[Report],
        unwritten: &HashSet<AggregateKey>,
        (sequence, position): (i64, &str),
    ) -> Result<(Vec<u64>, bool), Error> {
        let (mut held, mut lines, mut numbers) = (Vec::new(), Vec::new(), HashMap::new());
        for report in reports {
            if let Outcome::Held(event) = &report.outcome {
                let aggregate = AggregateKey::of(event);
                if !unwritten.contains(&aggregate) {
                    // Named after its first row.
                    lines.push(*numbers.entry(aggregate).or_insert(report.id));
                    held.push(report);
                }
            }
        }
        if held.is_empty() {
            return Ok((Vec::new(), true));
        }
        let (ids, event_ids) = names(&held);
        let parameters: [&(dyn ToSql + Sync); 6] = [&ids, &event_ids, &self.slot, &sequence, &position, &lines];
        written(&held, &self.client.query_one(&self.hold, &parameters).await?)
    }

    /// Counts the failure on the row, and buries it when it was the last. `None`: the row could not be had. And whether
    /// the place was noted.
    async fn fail(
        &self,
        report: &Report,
        rejection: &Rejection,
        (sequence, position): (i64, &str),
    ) -> Result<(Option<&'static str>, bool), Error> {
        let retry_in = rejection.retry_in.map(|delay| delay.as_secs_f64());
        let message = printable(&rejection.message);
        let row = self
            .client
            .query_one(
                &self.fail,
                &[
                    &report.id,
                    &&*report.event_id,
                    &rejection.code,
                    &message,
                    &retry_in,
                    &self.slot,
                    &sequence,
                    &position,
                    &rejection.event.retry_count,
                    &rejection.counts,
                ],
            )
            .await?;
        say_if_unfit(report.id, row.try_get(1)?);
        let status: Option<&str> = row.try_get(0)?;
        Ok((status.map(|status| if status == "failed" { "failed" } else { "dead_letter" }), row.try_get(2)?))
    }

    /// Looks for rows that no statement found: are they recorded already, gone, or not to be had now?
    async fn look(&self, reports: &[&Report]) -> Result<HashMap<u64, Recorded>, Error> {
        let (ids, event_ids) = names(reports);
        let xids: Vec<Option<i64>> = reports.iter().map(|report| report.xid.map(i64::from)).collect();
        let rows = self.client.query(&self.look, &[&ids, &event_ids, &xids]).await?;
        let mut found = HashMap::with_capacity(reports.len());
        for row in rows {
            let position = usize::try_from(row.try_get::<_, i64>(0)? - 1).unwrap_or(usize::MAX);
            let status: Option<&str> = row.try_get(1)?;
            let visible: bool = row.try_get(2)?;
            let failures: Option<i32> = row.try_get(3)?;
            let Some(report) = reports.get(position) else { continue };
            let waits: bool = row.try_get(4)?;
            let has_outcome = match &report.outcome {
                Outcome::Completed => false,
                Outcome::Failed(rejection) if !rejection.counts => status == Some("failed"),
                Outcome::Failed(rejection) => failures.is_some_and(|failures| failures > rejection.event.retry_count),
                Outcome::Held(_) => status != Some("pending") || waits,
            };
            let recorded = match status {
                Some("completed" | "dead_letter") => Recorded::Row(UNCHANGED),
                Some(_) if has_outcome => Recorded::Row(UNCHANGED),
                None if visible => Recorded::WithoutRow,
                Some(_) | None => Recorded::Later,
            };
            found.insert(report.token, recorded);
        }
        Ok(found)
    }

    /// Writes a dead letter from the event itself, once: its row is gone, so nothing can be retried or held.
    async fn bury(&self, outcome: &Outcome) -> Result<(), Error> {
        let Some((event, code, message)) = outcome.without_row() else { return Ok(()) };
        let payload = json_or_null(&event.payload);
        let headers = json_or_null(event.headers.as_bytes());
        let buried = self
            .client
            .query_opt(
                &self.bury,
                &[
                    &&*event.event_id,
                    &&*event.aggregate_type,
                    &&*event.aggregate_id,
                    &event.tenant_id.as_deref(),
                    &&*event.event_type,
                    &payload,
                    &headers,
                    &code,
                    &printable(message),
                    &event.retry_count.saturating_add(1),
                ],
            )
            .await?;
        if let Some(row) = buried {
            say_if_unfit(event.id, row.try_get(0)?);
        }
        Ok(())
    }
}

/// `compensated`: whether the compensation that a dead letter asks for is there; `None`: none is asked for.
fn say_if_unfit(id: i64, compensated: Option<bool>) {
    if compensated == Some(false) {
        warn!(
            id,
            "a dead letter asks for a compensation with headers that do not fit; call create_compensation by hand"
        );
    }
}

fn names<'r>(reports: &[&'r Report]) -> (Vec<i64>, Vec<&'r str>) {
    reports.iter().map(|report| (report.id, &*report.event_id)).unzip()
}

/// What a statement wrote: the tokens of the reports whose positions, counted from one, it returned, and whether the
/// place was noted. Not by the rows' ids: two reports can have the same one when the table was truncated between them.
/// One row for all: a row for each costs both sides more than its update.
fn written(reports: &[&Report], row: &Row) -> Result<(Vec<u64>, bool), Error> {
    let at = |position: i64| reports.get(usize::try_from(position - 1).ok()?).map(|report| report.token);
    let positions: Vec<i64> = row.try_get(0)?;
    Ok((positions.into_iter().filter_map(at).collect(), row.try_get(1)?))
}

/// The text, if it is JSON; what could not be read whole is kept out of the dead letter.
fn json_or_null(text: &[u8]) -> Option<&str> {
    serde_json::from_slice::<serde::de::IgnoredAny>(text).ok()?;
    std::str::from_utf8(text).ok()
}
