//! `outbox-relay dead-letters replay`

mod way;

use std::collections::HashSet;

use self::way::Ways;
use super::super::consent::Consent;
use super::super::desk::{Act, id, report};
use super::super::output::Format;
use super::super::{Failure, servers};
use super::list::Which;
use crate::config::{Ordering, Settings};
use crate::postgres::outbox::desk::{Candidate, Desk, Replay as Way};

/// Dead letters for which the stream is asked at once.
const AT_A_TIME: i64 = 10_000;
/// Dead letters put back in one transaction.
const IN_ONE_STEP: usize = 500;

const HELP: &str = "\
The event goes back into the outbox with its own id and all its attempts, and its dead letter is marked as handled, in one \
transaction; the relay takes it at its next pass. Its row, where it is still there, comes back in its aggregate's order: \
behind earlier ones that wait for a retry, before later ones that do. Events that were delivered meanwhile stay delivered. \
Where the row is gone (deleted, or inserted and deleted in one transaction), it is made anew and comes last.

Within its duplicate window (stream setting, 2 minutes) JetStream takes an event id that it stored for a duplicate, also \
when the message was removed since; the event would count as delivered, and nobody could read it. So the stream is asked \
first. `replayed`: it does not have the id, and sends under it are stored. `stored`: it has the event already, which is \
then completed and not sent again. `renamed`: it has removed messages within the window, and the event may have been among \
them, so that it gets the new id EVENT_ID.rN, N being the dead letter's id. From work queue and interest streams, which \
remove what was consumed, a duplicate was delivered: there the id stays. --offline asks nobody, and keeps the id.

More than one dead letter, one with a compensation, and --all always, wants --yes, or a yes on the terminal. What was left \
as it is makes the command fail (exit code 1).

Example: one, after what it met is mended
  outbox-relay dead-letters replay 17

Example: all that a missing permission killed within a day
  outbox-relay dead-letters replay --all --reason permission_denied --since 1d --yes";

/// What goes with all of them, and not with ids.
const WITH_ALL: [&str; 6] = ["all", "reason", "event_type", "aggregate", "tenant", "since"];

#[derive(clap::Args)]
#[command(after_long_help = HELP, after_help = "Example (--help says how order and ids are kept):\n  outbox-relay dead-letters replay 17")]
pub struct Replay {
    /// The dead letters, by their ids
    #[arg(value_name = "ID", required_unless_present = "all", conflicts_with_all = WITH_ALL, value_parser = id)]
    ids: Vec<i64>,
    /// All that were not handled, and that the other options mean
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    which: Which,
    /// Also such as were handled before
    #[arg(long, conflicts_with = "all")]
    again: bool,
    /// Do not ask the stream whether it has the events
    #[arg(long)]
    offline: bool,
    #[command(flatten)]
    consent: Consent,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Replay {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let acts = servers::at_desk(settings, "dead-letters replay", async |desk| {
            if self.all { self.all(settings, &desk).await } else { self.named(settings, &desk).await }
        })?;
        report(&acts, self.output)
    }

    async fn named(&self, settings: &Settings, desk: &Desk<'_>) -> Result<Vec<Act>, Failure> {
        let candidates = desk.candidates(&self.ids).await?;
        if let Some(unknown) = self.ids.iter().find(|id| !candidates.iter().any(|candidate| candidate.id == **id)) {
            return Err(Failure::Unfit(format!("there is no dead letter {unknown}; nothing was done")));
        }
        let compensated = candidates.iter().filter(|candidate| !candidate.compensations.is_empty()).count();
        if candidates.len() > 1 || compensated > 0 {
            self.consent.ask(&plan(candidates.len(), compensated))?;
        }
        self.replay(&Ways::new(settings, self.offline).await?, settings, desk, candidates).await
    }

    async fn all(&self, settings: &Settings, desk: &Desk<'_>) -> Result<Vec<Act>, Failure> {
        let filter = self.which.filter(false);
        let (count, compensated) = desk.count_dead_letters(&filter).await?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let size = |count| usize::try_from(count).unwrap_or(usize::MAX);
        self.consent.ask(&plan(size(count), size(compensated)))?;
        let ways = Ways::new(settings, self.offline).await?;
        let (mut acts, mut after) = (Vec::new(), i64::MIN);
        loop {
            let candidates = desk.candidates_after(&filter, after, AT_A_TIME).await?;
            let Some(last) = candidates.last() else { return Ok(acts) };
            after = last.id;
            acts.extend(self.replay(&ways, settings, desk, candidates).await?);
        }
    }

    async fn replay(
        &self,
        ways: &Ways,
        settings: &Settings,
        desk: &Desk<'_>,
        candidates: Vec<Candidate>,
    ) -> Result<Vec<Act>, Failure> {
        let (fit, mut acts) = self.sort(candidates);
        let ways = ways.of(&fit).await?;
        let ordered = settings.delivery.ordering == Ordering::Aggregate;
        for (fit, ways) in fit.chunks(IN_ONE_STEP).zip(ways.chunks(IN_ONE_STEP)) {
            let letters: Vec<(i64, Way)> =
                fit.iter().zip(ways).map(|(candidate, way)| (candidate.id, way.clone())).collect();
            let replayed = desk.replay(&letters, ordered, self.again).await?;
            for (candidate, way) in fit.iter().zip(ways) {
                let row = replayed.iter().find(|replayed| replayed.letter == candidate.id);
                acts.push(row.map_or_else(
                    || left(candidate, "it has changed meanwhile"),
                    |row| done(candidate, way, row.row_id),
                ));
            }
        }
        acts.sort_by_key(|act| act.id);
        Ok(acts)
    }

    /// Those that can be replayed; and why the others cannot. Of several dead letters of one event the newest counts.
    fn sort(&self, candidates: Vec<Candidate>) -> (Vec<Candidate>, Vec<Act>) {
        let (mut fit, mut acts, mut seen) = (Vec::new(), Vec::new(), HashSet::new());
        for candidate in candidates.into_iter().rev() {
            match self.obstacle(&candidate) {
                Some(why) => acts.push(left(&candidate, why)),
                None if seen.insert(candidate.event_id.clone()) => fit.push(candidate),
                None => acts.push(Act {
                    outcome: "handled",
                    detail: Some("with a later dead letter of its event".to_owned()),
                    ..left(&candidate, "")
                }),
            }
        }
        fit.reverse();
        (fit, acts)
    }

    fn obstacle(&self, candidate: &Candidate) -> Option<String> {
        if candidate.handled && !self.again {
            return Some("it was handled before: --again replays it all the same".to_owned());
        }
        match (candidate.row_id, candidate.row_status.as_deref()) {
            (_, Some("dead_letter")) => None,
            (Some(row), Some(status)) => Some(format!(
                "its event is not dead any more: row {row} is {status}; `dead-letters resolve` puts it away"
            )),
            _ if candidate.is_whole => None,
            _ => {
                Some("its row is gone, and what is kept of it is not a whole event: insert it anew by hand".to_owned())
            }
        }
    }
}

fn plan(letters: usize, compensated: usize) -> String {
    let plan = if letters == 1 {
        "1 dead letter goes back into the outbox, and is delivered".to_owned()
    } else {
        format!("{letters} dead letters go back into the outbox, and are delivered")
    };
    if compensated == 0 {
        return plan;
    }
    format!(
        "{plan}\n{compensated} of them asked for a compensation, which is not abandoned: the event and its compensation may \
         both take effect (see `outbox-relay compensations`)"
    )
}

fn left(candidate: &Candidate, why: impl Into<String>) -> Act {
    Act::left(candidate.id, Some(candidate.event_id.clone()), why)
}

fn done(candidate: &Candidate, way: &Way, row: Option<i64>) -> Act {
    let row = row.map(|row| format!("row {row}"));
    let (outcome, detail) = match way {
        Way::Again => ("replayed", row),
        Way::Renamed(name) => ("renamed", Some(format!("{}as {name}", row.map(|row| row + " ").unwrap_or_default()))),
        Way::Stored(sequence) => ("stored", Some(format!("the stream has it at sequence {sequence}; not sent again"))),
    };
    Act { id: candidate.id, event_id: Some(candidate.event_id.clone()), outcome, detail }
}
