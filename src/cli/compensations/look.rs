//! `outbox-relay compensations list` and `show`

use std::io;

use super::super::desk::{Paging, fields, id, print_page, shorten};
use super::super::human::{due, span};
use super::super::output::{self, Format};
use super::super::{Failure, servers};
use crate::config::Settings;
use crate::postgres::outbox::desk::{CompensationFilter, CompensationRow, CompensationStory};

const STATUSES: [&str; 5] = ["pending", "retrying", "resolved", "manual_required", "abandoned"];

const LIST_HELP: &str = "\
Example: what waits for a person
  outbox-relay compensations list --status manual_required";

const SHOW_HELP: &str = "\
Example:
  outbox-relay compensations show 5 --payload";

#[derive(clap::Args)]
#[command(after_help = LIST_HELP)]
pub struct List {
    /// Compensations of this status
    #[arg(long, value_name = "STATUS", value_parser = STATUSES)]
    status: Option<String>,
    /// Compensations of this batch
    #[arg(long, value_name = "ID")]
    batch: Option<String>,
    /// Compensations of this operation type
    #[arg(long, value_name = "TYPE")]
    operation: Option<String>,
    #[command(flatten)]
    paging: Paging,
}

impl List {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let Self { status, batch, operation, paging } = self;
        let filter = CompensationFilter { status, batch_id: batch, operation_type: operation };
        let page = servers::at_desk(settings, "compensations list", async |desk| {
            Ok(desk.compensations(&filter, paging.after, paging.limit()).await?)
        })?;
        let heading = ["ID", "BATCH", "ITEM", "OPERATION", "STATUS", "TRIES", "AGE", "NEXT", "REASON"];
        print_page(&page, paging.output, heading, cells)
    }
}

fn cells(row: &CompensationRow) -> [String; 9] {
    // The latest reason stands last.
    let reason = row.failure_reason.as_deref().unwrap_or_default();
    [
        row.id.to_string(),
        row.batch_id.clone(),
        row.item_index.to_string(),
        row.operation_type.clone(),
        row.status.clone(),
        format!("{}/{}", row.retry_count, row.max_retries),
        row.age_seconds.map(span).unwrap_or_default(),
        due(row.next_retry_seconds),
        shorten(reason.rsplit("; ").next().unwrap_or_default()),
    ]
}

#[derive(clap::Args)]
#[command(after_help = SHOW_HELP)]
pub struct Show {
    /// The compensation, by its id
    #[arg(value_parser = id)]
    id: i64,
    /// Print the item's payload as well
    #[arg(long)]
    payload: bool,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Show {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let story = servers::at_desk(settings, "compensations show", async |desk| {
            let story = desk.compensation(self.id, self.payload).await?;
            story.ok_or_else(|| Failure::Unfit(format!("there is no compensation {}", self.id)))
        })?;
        Ok(output::print(&story, self.output, print)?)
    }
}

fn print(story: &CompensationStory, out: &mut impl io::Write) -> io::Result<()> {
    let row = &story.row;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    fields(
        out,
        ["COMPENSATION", &row.id.to_string()],
        [
            ("batch", row.batch_id.clone()),
            ("operation", row.operation_type.clone()),
            ("item", row.item_index.to_string()),
            ("status", row.status.clone()),
            ("attempts", format!("{} of {}", row.retry_count, row.max_retries)),
            ("next attempt", text(&row.next_retry_at)),
            ("reasons", text(&row.failure_reason)),
            ("claimed by", text(&story.locked_by)),
            ("claimed", text(&story.locked_at)),
            ("resolved", text(&story.resolved_at)),
            ("resolved by", story.resolved_by.map(|by| by.to_string()).unwrap_or_default()),
            ("notes", text(&story.resolution_notes)),
            ("created", text(&row.created_at)),
            ("created by", story.created_by.map(|by| by.to_string()).unwrap_or_default()),
            ("updated", text(&story.updated_at)),
            ("version", story.version.to_string()),
            ("payload bytes", story.item_payload_bytes.to_string()),
            ("payload", story.item_payload.as_ref().map(|payload| payload.get().to_owned()).unwrap_or_default()),
        ],
    )
}
