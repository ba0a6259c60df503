//! `outbox-relay dead-letters show`

use std::io;

use super::super::desk::{fields, id};
use super::super::output::{self, Format};
use super::super::{Failure, servers};
use super::list::row_in_words;
use crate::config::Settings;
use crate::postgres::outbox::desk::DeadLetterStory;

const HELP: &str = "\
Example:
  outbox-relay dead-letters show 17 --payload";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Show {
    /// The dead letter, by its id
    #[arg(value_parser = id)]
    id: i64,
    /// Print the payload as well
    #[arg(long)]
    payload: bool,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Show {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let story = servers::at_desk(settings, "dead-letters show", async |desk| {
            let story = desk.dead_letter(self.id, self.payload).await?;
            story.ok_or_else(|| Failure::Unfit(format!("there is no dead letter {}", self.id)))
        })?;
        Ok(output::print(&story, self.output, print)?)
    }
}

fn print(story: &DeadLetterStory, out: &mut impl io::Write) -> io::Result<()> {
    let letter = &story.letter;
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let some_headers = story.headers.as_object().is_some_and(|headers| !headers.is_empty());
    let linked = story.compensations.iter().map(|linked| format!("{} ({})", linked.id, linked.status));
    fields(
        out,
        ["DEAD LETTER", &letter.id.to_string()],
        [
            ("event_id", letter.event_id.clone()),
            ("row", row_in_words(letter)),
            ("aggregate", format!("{}/{}", letter.aggregate_type, letter.aggregate_id)),
            ("tenant", text(&letter.tenant_id)),
            ("type", letter.event_type.clone()),
            ("attempts", letter.retry_count.to_string()),
            ("first failed", text(&letter.first_failed_at)),
            ("dead since", text(&letter.dead_letter_at)),
            ("error code", text(&letter.error_code)),
            ("error", text(&letter.error_message)),
            ("handled", if letter.handled { text(&letter.handled_at) } else { "no".to_owned() }),
            ("notes", text(&letter.handler_notes)),
            ("headers", if some_headers { story.headers.to_string() } else { String::new() }),
            ("payload bytes", story.payload_bytes.to_string()),
            ("payload", story.payload.as_ref().map(|payload| payload.get().to_owned()).unwrap_or_default()),
            ("compensations", linked.collect::<Vec<_>>().join(", ")),
        ],
    )
}
