//! `outbox-relay compensations retry`, `resolve` and `abandon`

use super::super::consent::Consent;
use super::super::desk::{Act, already, id, refusal, report};
use super::super::human::due;
use super::super::output::Format;
use super::super::{Failure, servers};
use crate::config::Settings;
use crate::postgres::outbox::desk::{CompensationStory, Desk};

const RETRY_HELP: &str = "\
The relay asks the service at its next pass, before any later date. One that has no attempts left gets them again. More than
one wants --yes, or a yes on the terminal.

Example:
  outbox-relay compensations retry 5";

const RESOLVE_HELP: &str = "\
One that is resolved already keeps its first notes. More than one wants --yes, or a yes on the terminal.

Example:
  outbox-relay compensations resolve 5 --by 42 --notes \"refunded by hand\"";

const ABANDON_HELP: &str = "\
This is final, and wants --yes, or a yes on the terminal. One that is abandoned already keeps its first notes.

Example:
  outbox-relay compensations abandon 5 --notes \"the customer is gone\" --yes";

#[derive(clap::Args)]
#[command(after_help = RETRY_HELP)]
pub struct Retry {
    #[command(flatten)]
    which: Which,
}

#[derive(clap::Args)]
#[command(after_help = RESOLVE_HELP)]
pub struct Resolve {
    #[command(flatten)]
    which: Which,
    /// Who did it: a number of your own
    #[arg(long, value_name = "NUMBER")]
    by: Option<i64>,
    /// What was done, for others to read
    #[arg(long, value_name = "TEXT")]
    notes: Option<String>,
}

#[derive(clap::Args)]
#[command(after_help = ABANDON_HELP)]
pub struct Abandon {
    #[command(flatten)]
    which: Which,
    /// Why, for others to read
    #[arg(long, value_name = "TEXT")]
    notes: Option<String>,
}

#[derive(clap::Args)]
struct Which {
    /// The compensations, by their ids
    #[arg(value_name = "ID", required = true, value_parser = id)]
    ids: Vec<i64>,
    #[command(flatten)]
    consent: Consent,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

/// What became of a change.
enum Change {
    Made,
    /// There was nothing left to do, since then.
    MadeBefore(Option<String>),
    Illegal,
}

impl Change {
    fn of(made: bool) -> Self {
        if made { Self::Made } else { Self::Illegal }
    }
}

impl Retry {
    pub fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let change = async |desk: &Desk<'_>, id| Ok(Change::of(desk.retry_compensation(id).await?));
        self.which.each(settings, "compensations retry", ["due", "sent to the service again"], false, &change)
    }
}

impl Resolve {
    pub fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let change = async |desk: &Desk<'_>, id| {
            // A look before: the function does not say that there was nothing left to do.
            let before = desk.compensation(id, false).await?.filter(|story| story.row.status == "resolved");
            let resolved = desk.resolve_compensation(id, self.by, self.notes.as_deref()).await.map_err(refusal);
            resolved.map(|()| before.map_or(Change::Made, |story| Change::MadeBefore(story.resolved_at)))
        };
        self.which.each(settings, "compensations resolve", ["resolved", "marked as resolved"], false, &change)
    }
}

impl Abandon {
    pub fn run(&self, settings: &Settings) -> Result<(), Failure> {
        let change =
            async |desk: &Desk<'_>, id| Ok(Change::of(desk.abandon_compensation(id, self.notes.as_deref()).await?));
        self.which.each(settings, "compensations abandon", ["abandoned", "given up for good"], true, &change)
    }
}

impl Which {
    /// Changes each. `words`: the outcome, and what the plan says. `is_final`: it wants consent also for one.
    fn each(
        &self,
        settings: &Settings,
        command: &str,
        [outcome, plan]: [&'static str; 2],
        is_final: bool,
        change: &impl AsyncFn(&Desk<'_>, i64) -> Result<Change, Failure>,
    ) -> Result<(), Failure> {
        let acts = servers::at_desk(settings, command, async |desk| {
            let mut ids = self.ids.clone();
            ids.sort_unstable();
            ids.dedup();
            for &id in &ids {
                if desk.compensation(id, false).await?.is_none() {
                    return Err(Failure::Unfit(format!("there is no compensation {id}; nothing was done")));
                }
            }
            if is_final || ids.len() > 1 {
                let what = if ids.len() == 1 { "compensation is" } else { "compensations are" };
                self.consent.ask(&format!("{} {what} {plan}", ids.len()))?;
            }
            let mut acts = Vec::new();
            for id in ids {
                let done = |detail| Act { id, event_id: None, outcome, detail };
                acts.push(match change(&desk, id).await {
                    Ok(Change::Made) => done(None),
                    Ok(Change::MadeBefore(at)) => done(Some(already(outcome, at))),
                    Ok(Change::Illegal) => match desk.compensation(id, false).await? {
                        Some(now) if now.row.status == outcome => done(Some(already(outcome, now.updated_at))),
                        now => Act::left(id, None, why_not(now.as_ref())),
                    },
                    Err(Failure::Unfit(why)) => Act::left(id, None, why),
                    Err(failure) => return Err(failure),
                });
            }
            Ok::<Vec<Act>, Failure>(acts)
        })?;
        report(&acts, self.output)
    }
}

/// The state that stood in the way.
fn why_not(now: Option<&CompensationStory>) -> String {
    match now {
        None => "it is gone".to_owned(),
        Some(story) if story.row.status == "retrying" => format!(
            "{} is at it: wait for the outcome, or for the end of the lease {}",
            story.locked_by.as_deref().unwrap_or("a worker"),
            due(story.row.next_retry_seconds)
        ),
        Some(story) => format!("it is {}, which is final", story.row.status),
    }
}
