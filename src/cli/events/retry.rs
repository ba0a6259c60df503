//! `outbox-relay events retry`

use std::time::Duration;

use super::super::consent::Consent;
use super::super::desk::{Act, Aggregate, duration, parts, report};
use super::super::output::Format;
use super::super::{Failure, servers};
use super::words;
use crate::config::{Ordering, Settings};
use crate::postgres::outbox::desk::{Desk, EventFilter, EventStory};

/// Rows made due in one transaction.
const AT_A_TIME: i64 = 1000;

const HELP: &str = "\
The row becomes due, and the relay takes it at its next pass; how often it failed stays counted, unless --reset gives it \
its attempts again. The order of its aggregate stays: a row that waits behind an earlier one is left as it is, and the \
answer names the one that it waits for. More than one row, and --all-failed always, wants --yes, or a yes on the terminal. Rows that were left as \
they are make the command fail (exit code 1).

Example: two rows, which then have all their attempts before them
  outbox-relay events retry 41213 41290 --reset --yes

Example: all that failed, of one type of event, once what they met is mended
  outbox-relay events retry --all-failed --event-type invoice.sent";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Retry {
    /// The rows, by id or event_id
    #[arg(value_name = "ID|EVENT_ID", required_unless_present = "all_failed", conflicts_with = "all_failed")]
    names: Vec<String>,
    /// All rows that failed and wait for their next attempt
    #[arg(long)]
    all_failed: bool,
    /// Of all: rows of this event type
    #[arg(long, value_name = "TYPE", requires = "all_failed")]
    event_type: Option<String>,
    /// Of all: rows of this aggregate type, or of this one aggregate
    #[arg(long, value_name = "TYPE[/ID]", requires = "all_failed")]
    aggregate: Option<Aggregate>,
    /// Of all: rows of this tenant
    #[arg(long, value_name = "ID", requires = "all_failed")]
    tenant: Option<String>,
    /// Of all: rows made within this time
    #[arg(long, value_name = "DURATION", value_parser = duration, requires = "all_failed")]
    since: Option<Duration>,
    /// Count their attempts from zero again
    #[arg(long)]
    reset: bool,
    #[command(flatten)]
    consent: Consent,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Retry {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let acts = servers::at_desk(settings, "events retry", async |desk| {
            let ordered = settings.delivery.ordering == Ordering::Aggregate;
            if self.all_failed { self.all(&desk, ordered).await } else { self.named(&desk, ordered).await }
        })?;
        report(&acts, self.output)
    }

    async fn named(&self, desk: &Desk<'_>, ordered: bool) -> Result<Vec<Act>, Failure> {
        let mut events = Vec::new();
        for name in &self.names {
            let found = desk.event(name, false).await?;
            events.push(found.ok_or_else(|| Failure::Unfit(format!("there is no event {name:?}; nothing was done")))?);
        }
        if events.len() > 1 {
            self.consent.ask(&self.plan(events.len()))?;
        }
        let ids: Vec<i64> = events.iter().map(|event| event.row.id).collect();
        let due = desk.retry(&ids, self.reset, ordered).await?;
        let mut acts = Vec::new();
        for event in events {
            let is_due = due.iter().any(|(id, _)| *id == event.row.id);
            acts.push(if is_due { made_due(event.row.id, event.row.event_id) } else { why_not(desk, &event).await? });
        }
        Ok(acts)
    }

    async fn all(&self, desk: &Desk<'_>, ordered: bool) -> Result<Vec<Act>, Failure> {
        let (aggregate_type, aggregate_id) = parts(self.aggregate.as_ref());
        let filter = EventFilter {
            state: Some("failed".to_owned()),
            event_type: self.event_type.clone(),
            tenant_id: self.tenant.clone(),
            aggregate_type,
            aggregate_id,
            since: self.since.map(|since| since.as_secs_f64()),
        };
        let count = desk.count_events(&filter).await?;
        if count == 0 {
            return Ok(Vec::new());
        }
        self.consent.ask(&self.plan(usize::try_from(count).unwrap_or(usize::MAX)))?;
        let (mut acts, mut after) = (Vec::new(), i64::MIN);
        loop {
            let ids = desk.failed_after(&filter, after, AT_A_TIME).await?;
            let Some(&last) = ids.last() else { return Ok(acts) };
            after = last;
            let due = desk.retry(&ids, self.reset, ordered).await?;
            acts.extend(due.into_iter().map(|(id, event_id)| made_due(id, event_id)));
        }
    }

    fn plan(&self, rows: usize) -> String {
        let attempts = if self.reset { ", with all their attempts before them" } else { "" };
        let rows = if rows == 1 { "1 failed row becomes".to_owned() } else { format!("{rows} failed rows become") };
        format!("{rows} due now{attempts}; those that wait behind another one of their aggregate stay as they are")
    }
}

fn made_due(id: i64, event_id: String) -> Act {
    Act { id, event_id: Some(event_id), outcome: "due", detail: None }
}

/// Why a row was not made due.
async fn why_not(desk: &Desk<'_>, event: &EventStory) -> Result<Act, Failure> {
    let row = &event.row;
    let before = match row.held_behind.or(event.behind) {
        Some(id) => desk.event(&id.to_string(), false).await?,
        None => None,
    };
    let why = match (&*row.state, before) {
        ("dead_letter", _) => "it is a dead letter: see `outbox-relay dead-letters replay`".to_owned(),
        ("completed", _) => format!("it has not failed: it {}", words::state(event, None)),
        (_, Some(before)) => {
            format!("it waits behind event {}, which {}: retry that one", before.row.id, words::cause(&before))
        }
        ("failed", None) => "it has changed meanwhile".to_owned(),
        (_, None) => format!("it has not failed: it {}", words::state(event, None)),
    };
    Ok(Act::left(row.id, Some(row.event_id.clone()), why))
}
