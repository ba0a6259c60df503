//! `outbox-relay dead-letters list`

use std::time::Duration;

use super::super::desk::{Aggregate, Paging, duration, parts, print_page, short_error};
use super::super::human::span;
use super::super::{Failure, servers};
use crate::config::Settings;
use crate::postgres::outbox::desk::{DeadLetterFilter, DeadLetterRow};

const HELP: &str = "\
ROW is the event's row in the outbox and its status now, if it is still there.

Example: what is dead and waits for somebody
  outbox-relay dead-letters list

Example: what was refused for its size within a day, for a program
  outbox-relay dead-letters list --reason message_too_large --since 1d --output json";

/// Which dead letters are meant.
#[derive(clap::Args)]
pub struct Which {
    /// Dead letters with this error code
    #[arg(long, value_name = "CODE")]
    reason: Option<String>,
    /// Dead letters of this event type
    #[arg(long, value_name = "TYPE")]
    event_type: Option<String>,
    /// Dead letters of this aggregate type, or of this one aggregate
    #[arg(long, value_name = "TYPE[/ID]")]
    aggregate: Option<Aggregate>,
    /// Dead letters of this tenant
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
    /// Dead for no longer than this, such as 2h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    since: Option<Duration>,
}

impl Which {
    pub fn filter(&self, handled: bool) -> DeadLetterFilter {
        let (aggregate_type, aggregate_id) = parts(self.aggregate.as_ref());
        DeadLetterFilter {
            handled: Some(handled),
            reason: self.reason.clone(),
            event_type: self.event_type.clone(),
            tenant_id: self.tenant.clone(),
            aggregate_type,
            aggregate_id,
            since: self.since.map(|since| since.as_secs_f64()),
        }
    }
}

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct List {
    /// Those that were handled, instead of those that wait for somebody
    #[arg(long)]
    handled: bool,
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    paging: Paging,
}

impl List {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let filter = self.which.filter(self.handled);
        let page = servers::at_desk(settings, "dead-letters list", async |desk| {
            Ok(desk.dead_letters(&filter, self.paging.after, self.paging.limit()).await?)
        })?;
        let heading = ["ID", "EVENT ID", "AGGREGATE", "TYPE", "DEAD FOR", "TRIES", "ROW", "REASON", "NOTES"];
        print_page(&page, self.paging.output, heading, cells)
    }
}

fn cells(letter: &DeadLetterRow) -> [String; 9] {
    let tenant = letter.tenant_id.as_deref().map(|tenant| format!("{tenant}:")).unwrap_or_default();
    [
        letter.id.to_string(),
        letter.event_id.clone(),
        format!("{tenant}{}/{}", letter.aggregate_type, letter.aggregate_id),
        letter.event_type.clone(),
        letter.age_seconds.map(span).unwrap_or_default(),
        letter.retry_count.to_string(),
        row_in_words(letter),
        short_error(letter.error_code.as_deref(), letter.error_message.as_deref()),
        letter.handler_notes.clone().unwrap_or_default(),
    ]
}

/// The event's row and its status.
pub fn row_in_words(letter: &DeadLetterRow) -> String {
    match (letter.row_id, &letter.row_status) {
        (Some(id), Some(status)) => format!("{id} ({status})"),
        _ => "gone".to_owned(),
    }
}
