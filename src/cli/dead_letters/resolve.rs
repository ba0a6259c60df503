//! `outbox-relay dead-letters resolve`

use super::super::consent::Consent;
use super::super::desk::{Act, already, id, report};
use super::super::output::Format;
use super::super::{Failure, servers};
use crate::config::Settings;

const HELP: &str = "\
The event itself is not touched. One that is resolved already keeps its first notes. More than one dead letter
wants --yes, or a yes on the terminal.

Example:
  outbox-relay dead-letters resolve 17 --notes \"sent by hand, ticket 4711\"";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Resolve {
    /// The dead letters, by their ids
    #[arg(value_name = "ID", required = true, value_parser = id)]
    ids: Vec<i64>,
    /// What was done, for others to read
    #[arg(long, value_name = "TEXT")]
    notes: Option<String>,
    #[command(flatten)]
    consent: Consent,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Resolve {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let acts = servers::at_desk(settings, "dead-letters resolve", async |desk| {
            let known = desk.known_dead_letters(&self.ids).await?;
            if let Some(unknown) = self.ids.iter().find(|id| !known.contains(id)) {
                return Err(Failure::Unfit(format!("there is no dead letter {unknown}; nothing was done")));
            }
            if known.len() > 1 {
                self.consent.ask(&format!("{} dead letters are marked as handled", known.len()))?;
            }
            let resolved = desk.resolve_dead_letters(&known, self.notes.as_deref()).await?;
            let mut acts = Vec::new();
            for id in known {
                // Somebody was faster, or it is done again: either way it is as was asked for.
                let before = if resolved.contains(&id) { None } else { desk.dead_letter(id, false).await? };
                let detail = before.map(|story| already("resolved", story.letter.handled_at));
                acts.push(Act { id, event_id: None, outcome: "handled", detail });
            }
            Ok::<Vec<Act>, Failure>(acts)
        })?;
        report(&acts, self.output)
    }
}
