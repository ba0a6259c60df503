//! `outbox-relay verify`

use std::io::{self, Write};

use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde_json::{Value, json};

use super::output::{self, Format};
use super::progress::Progress;
use super::{Failure, block_on, human, log_warnings, servers};
use crate::config::{Loaded, OnSuccess, Settings};
use crate::relay::verify::{LISTED, Moment, Request, Step, Verified, VerifyError, verify};

/// Missing events that the table for people shows.
const SHOWN: usize = 20;

const HELP: &str = "\
Looks in the stream for the event of each completed row, by its Nats-Msg-Id, in headers alone. An event is
  present  it can be read from the stream
  expired  it is not there, and the stream's limits (max_age, max_bytes, max_msgs) may have removed it
  missing  it is not there, though it was acknowledged: a server lost it, or someone deleted it
Rows are chosen by their created_at. Nothing is called missing before the whole stream was read.

With --repair each missing event is sent again with its id, as the relay sends it, and read back. Repaired events come \
late: they stand at the end of the stream, behind later events of their aggregates. Where the stream still takes a lost \
event for a duplicate, that is waited out (up to its duplicate window). It can be interrupted and run again, also beside a \
running relay.

Exit codes: 0 nothing is missing (any more), 3 something is missing, 4 the stream or the settings cannot prove anything: \
work queues, interest retention, max_msgs_per_subject, or rows that are deleted once delivered.

Example:
  outbox-relay verify --since 6h
  outbox-relay verify --since 2026-11-30T08:00:00Z --until 2026-11-30T09:00:00Z --repair
  outbox-relay verify --since 1d --output json";

/// Compare completed rows with the stream, and send again what it has lost
#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "Example (--help tells more):\n  outbox-relay verify --since 6h --repair")]
pub struct Verify {
    /// Rows created since then: a duration until now, or a time (RFC 3339, or a date in UTC)
    #[arg(long, value_name = "DURATION|TIME", default_value = "1h", value_parser = moment)]
    since: Moment,
    /// Rows created before then; until now without it
    #[arg(long, value_name = "DURATION|TIME", value_parser = moment)]
    until: Option<Moment>,
    /// Send missing events again, and read them back
    #[arg(long)]
    repair: bool,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

/// Reads `90m`, `2026-11-30T08:00:00Z` or `2026-11-30`.
fn moment(text: &str) -> Result<Moment, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return Ok(Moment::Ago(ago));
    }
    let day = || text.parse::<Date>().and_then(|date| date.to_zoned(TimeZone::UTC)).map(|day| day.timestamp());
    text.parse::<Timestamp>().or_else(|_| day()).map(Moment::At).map_err(|_| {
        "expected a duration such as 90m or 7d, a time such as 2026-11-30T08:00:00Z, or a date such as 2026-11-30"
            .to_owned()
    })
}

impl Verify {
    pub fn run(&self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let settings = &loaded.settings;
        let verified = block_on(self.verify(settings))?;
        if settings.writeback.on_success == OnSuccess::Delete {
            let reason = "writeback.on_success = delete: rows are deleted once the stream has their events";
            if verified.rows == 0 {
                return Err(Failure::Refused(format!("{reason}, so there are none to compare with it")));
            }
            writeln!(io::stderr(), "note: {reason}; only rows that are left were compared")?;
        }
        let mut out = io::stdout().lock();
        match self.output {
            Format::Json => output::json(&mut out, &as_json(&verified))?,
            Format::Table => self.print(&verified, &mut out)?,
        }
        if verified.lacking() > 0 { Err(Failure::Found) } else { Ok(()) }
    }

    async fn verify(&self, settings: &Settings) -> Result<Verified, Failure> {
        let postgres = servers::postgres(settings, "verify").await?;
        let mut progress = Progress::new();
        let request = Request { since: self.since, until: self.until, repair: self.repair };
        Ok(verify(settings, &postgres.client, request, |step| show(&mut progress, step)).await?)
    }

    fn print(&self, verified: &Verified, out: &mut impl Write) -> io::Result<()> {
        let Verified { stream, since, until, rows, present, expired, missing, repaired, events } = verified;
        writeln!(out, "{rows} completed rows of {since:.0} to {until:.0} against stream {stream}")?;
        let counts = [("present", present), ("expired", expired), ("missing", missing)];
        for (name, count) in counts.iter().chain(self.repair.then_some(&("repaired", repaired))) {
            writeln!(out, "{name:<9}{count:>12}")?;
        }
        let lacking: Vec<_> = events.iter().filter(|event| event.sequence.is_none()).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        writeln!(out)?;
        let rows: Vec<_> = lacking
            .iter()
            .take(SHOWN)
            .map(|event| {
                let problem = event.problem.clone().unwrap_or_default();
                [event.id.to_string(), event.event_id.clone(), format!("{:.0}", event.created_at), problem]
            })
            .collect();
        output::table(
            out,
            ["ID", "EVENT ID", "CREATED AT", if self.repair { "NOT REPAIRED BECAUSE" } else { "" }],
            &rows,
        )?;
        let more = verified.lacking().saturating_sub(rows.len() as u64);
        if more > 0 {
            writeln!(out, "and {more} more; --output json names up to {LISTED}")?;
        }
        if !self.repair {
            writeln!(
                io::stderr(),
                "to send them again: outbox-relay verify --repair, with the same --since and --until"
            )?;
        }
        Ok(())
    }
}

fn show(progress: &mut Progress, step: Step) {
    #[allow(clippy::cast_precision_loss, reason = "it is shown as a percentage")]
    let part = |done: usize, of: usize| done as f64 / of.max(1) as f64;
    match step {
        Step::Comparing { rows, share } => progress.show(share, &format!("{rows} rows compared")),
        Step::Searching { rows, share } => {
            progress.show(share, &format!("looking for {rows} events in the whole stream"));
        }
        Step::Repairing { done, of } => progress.show(part(done, of), &format!("{done} of {of} events sent again")),
        Step::Waiting { events, at_most } => {
            let at_most = human::duration(at_most);
            progress.show(1.0, &format!("the stream still takes {events} events for duplicates: {at_most} at most"));
        }
    }
}

fn as_json(verified: &Verified) -> Value {
    let Verified { stream, since, until, rows, present, expired, missing, repaired, events } = verified;
    let events: Vec<Value> = events
        .iter()
        .map(|event| {
            json!({
                "id": event.id,
                "event_id": event.event_id,
                "created_at": event.created_at.to_string(),
                "processed_at": event.processed_at.to_string(),
                "stream_sequence": event.sequence,
                "problem": event.problem,
            })
        })
        .collect();
    json!({
        "stream": stream,
        "since": since.to_string(),
        "until": until.to_string(),
        "rows": rows,
        "present": present,
        "expired": expired,
        "missing": missing,
        "repaired": repaired,
        "missing_events": events,
    })
}

impl From<VerifyError> for Failure {
    fn from(error: VerifyError) -> Self {
        match error {
            VerifyError::Unprovable(reason) => Self::Refused(reason),
            VerifyError::Nats(fault) => Self::Nats(fault),
            VerifyError::Sql(error) => Self::Sql(error),
            VerifyError::Settings(problem) => Self::Unfit(problem),
            VerifyError::JetStream { stream, failure } => {
                let told = super::hinted(&failure);
                Self::Unfit(match failure {
                    crate::fault::Failure::StreamMissing(_) => told,
                    _ => format!("stream {stream:?}: {told}"),
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_moment_is_a_duration_a_time_or_a_day() {
        assert_eq!(moment("90m"), Ok(Moment::Ago(Duration::from_mins(90))));
        let at = |text: &str| Moment::At(text.parse().unwrap());
        assert_eq!(moment("2026-11-30T08:00:00+02:00"), Ok(at("2026-11-30T06:00:00Z")));
        assert_eq!(moment("2026-11-30"), Ok(at("2026-11-30T00:00:00Z")));
        for text in ["", "5", "yesterday", "2026-13-01", "-5m"] {
            assert!(moment(text).unwrap_err().contains("90m"), "{text:?}");
        }
    }
}
