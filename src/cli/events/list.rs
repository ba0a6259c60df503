//! `outbox-relay events list`

use std::time::Duration;

use super::super::desk::{Aggregate, Paging, duration, parts, print_page, short_error};
use super::super::human::{due, span};
use super::super::{Failure, servers};
use crate::config::Settings;
use crate::postgres::outbox::desk::{EventFilter, EventRow, Page, STATES};

/// How long a table is looked through for rows that no index knows.
const PATIENCE: Duration = Duration::from_secs(3);

const HELP: &str = "\
States: pending (waits for the relay), scheduled (its producer dated it, or it was put back and is due), held (waits \
behind an earlier event of its aggregate), processing (a poller has it), failed (waits for its next attempt), completed, \
dead_letter.

The newest rows come first. The last line on stderr, or `next_after` in JSON, says \
how to go on to the next page. Where no index serves the filters, \
the table is looked through for three seconds at a time.

Example: what waits for a retry, of one tenant
  outbox-relay events list --status failed --tenant acme

Example: the page behind row 41213, for a program
  outbox-relay events list --limit 1000 --after 41213 --output json";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct List {
    /// Rows in this state
    #[arg(long, value_name = "STATE", value_parser = STATES)]
    status: Option<String>,
    /// Rows of this aggregate type, or of this one aggregate
    #[arg(long, value_name = "TYPE[/ID]")]
    aggregate: Option<Aggregate>,
    /// Rows of this event type
    #[arg(long, value_name = "TYPE")]
    event_type: Option<String>,
    /// Rows of this tenant
    #[arg(long, value_name = "ID")]
    tenant: Option<String>,
    /// Rows made within this time, such as 2h
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    since: Option<Duration>,
    #[command(flatten)]
    paging: Paging,
}

impl List {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let Self { status, aggregate, event_type, tenant, since, paging } = self;
        let (aggregate_type, aggregate_id) = parts(aggregate.as_ref());
        let filter = EventFilter {
            state: status,
            event_type,
            tenant_id: tenant,
            aggregate_type,
            aggregate_id,
            since: since.map(|since| since.as_secs_f64()),
        };
        let page: Page<EventRow> = servers::at_desk(settings, "events list", async |desk| {
            Ok(desk.events(&filter, paging.after, paging.limit(), PATIENCE).await?)
        })?;
        let heading = ["ID", "EVENT ID", "AGGREGATE", "TYPE", "STATE", "TRIES", "AGE", "NEXT", "LAST ERROR"];
        print_page(&page, paging.output, heading, cells)
    }
}

fn cells(row: &EventRow) -> [String; 9] {
    let tenant = row.tenant_id.as_deref().map(|tenant| format!("{tenant}:")).unwrap_or_default();
    let next = match row.held_behind {
        Some(id) => format!("after {id}"),
        None => due(row.next_retry_seconds),
    };
    [
        row.id.to_string(),
        row.event_id.clone(),
        format!("{tenant}{}/{}", row.aggregate_type, row.aggregate_id),
        row.event_type.clone(),
        row.state.clone(),
        format!("{}/{}", row.retry_count, row.max_retries),
        row.age_seconds.map(span).unwrap_or_default(),
        next,
        short_error(row.error_code.as_deref(), row.error_message.as_deref()),
    ]
}
