//! `outbox-relay events show`

use std::io;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::super::desk::fields;
use super::super::human::span;
use super::super::output::{self, Format};
use super::super::{Failure, servers};
use super::words;
use crate::config::Settings;
use crate::nats::ids::Start;
use crate::nats::stream::Stream;
use crate::postgres::outbox::desk::{DeadLetterRow, Desk, EventStory, LinkedCompensation};

/// How long the stream is searched.
const PATIENCE: Duration = Duration::from_secs(10);
/// By how much the clocks of the servers may differ.
const SKEW: SignedDuration = SignedDuration::from_mins(1);

const HELP: &str = "\
The message is looked for in the stream by its id, from the time on at which the row was made. With --offline, or \
where NATS is out of reach or the stream cannot tell, its place is `unknown`.

Example:
  outbox-relay events show 41213
  outbox-relay events show 018f6a1e-0b5e-7cc3-9a39-6f4c1c1f6f57 --payload --output json";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Show {
    /// The row's id, or its event_id; what is a number is an id first
    #[arg(value_name = "ID|EVENT_ID")]
    name: String,
    /// Print the payload as well
    #[arg(long)]
    payload: bool,
    /// Do not ask NATS
    #[arg(long)]
    offline: bool,
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Story {
    #[serde(flatten)]
    event: EventStory,
    /// The state in words.
    explanation: String,
    stream: Place,
    dead_letters: Vec<DeadLetterRow>,
    compensations: Vec<LinkedCompensation>,
}

/// Where the stream has the event.
#[derive(Default, Serialize)]
struct Place {
    /// `stored`, `absent` or `unknown`.
    state: &'static str,
    sequence: Option<u64>,
    stored_at: Option<String>,
    /// Why it is unknown.
    reason: Option<String>,
}

impl Show {
    pub fn run(self, settings: &Settings) -> Result<(), Failure> {
        let story = servers::at_desk(settings, "events show", async |desk| self.read(settings, &desk).await)?;
        Ok(output::print(&story, self.output, Story::print)?)
    }

    async fn read(&self, settings: &Settings, desk: &Desk<'_>) -> Result<Story, Failure> {
        let Some(event) = desk.event(&self.name, self.payload).await? else {
            return Err(Failure::Unfit(format!("{} has no event {:?}", settings.source.table, self.name)));
        };
        let before = match event.row.held_behind.or(event.behind) {
            Some(id) => desk.event(&id.to_string(), false).await?,
            None => None,
        };
        let dead_letters = desk.dead_letters_of(&event.row.event_id).await?;
        let compensations = linked(desk, &dead_letters).await?;
        let stream = if self.offline { Place::unknown("NATS was not asked") } else { place(settings, &event).await };
        let explanation = words::state(&event, before.as_ref());
        Ok(Story { event, explanation, stream, dead_letters, compensations })
    }
}

/// The compensations that dead letters of one event asked for.
async fn linked(desk: &Desk<'_>, letters: &[DeadLetterRow]) -> Result<Vec<LinkedCompensation>, Failure> {
    let mut all: Vec<LinkedCompensation> = Vec::new();
    for letter in letters {
        all.extend(desk.linked_compensations(letter.id).await?);
    }
    all.sort_by_key(|compensation| compensation.id);
    all.dedup_by_key(|compensation| compensation.id);
    Ok(all)
}

/// Where the stream has the event, if that can be found out soon.
async fn place(settings: &Settings, event: &EventStory) -> Place {
    let ago = |seconds: Option<f64>| {
        let span = SignedDuration::try_from_secs_f64(seconds?).ok()?;
        Timestamp::now().checked_sub(span).ok()
    };
    let since = ago(event.row.age_seconds).and_then(|made| made.checked_sub(SKEW).ok());
    let until = ago(event.processed_seconds).and_then(|done| done.checked_add(SKEW).ok());
    let search = async {
        let connection = servers::nats(settings).await.map_err(|failure| failure.to_string())?;
        let stream = Stream::new(&connection, &settings.nats);
        let start = Start::Time(since.unwrap_or(Timestamp::UNIX_EPOCH));
        stream.find(&event.row.event_id, start, until).await.map_err(|failure| failure.to_string())
    };
    match tokio::time::timeout(PATIENCE, search).await {
        Err(_) => Place::unknown(format!("not found within {PATIENCE:?}")),
        Ok(Err(reason)) => Place::unknown(reason),
        Ok(Ok(None)) => Place { state: "absent", ..Place::default() },
        Ok(Ok(Some(found))) => Place {
            state: "stored",
            sequence: Some(found.sequence),
            stored_at: Some(found.stored_at.to_string()),
            reason: None,
        },
    }
}

impl Place {
    fn unknown(reason: impl Into<String>) -> Self {
        Self { state: "unknown", reason: Some(reason.into()), ..Self::default() }
    }

    fn in_words(&self) -> String {
        match (self.sequence, &self.reason) {
            (Some(sequence), _) => {
                format!("stored at sequence {sequence}, {}", self.stored_at.as_deref().unwrap_or_default())
            }
            (None, Some(reason)) => format!("{}: {reason}", self.state),
            (None, None) => self.state.to_owned(),
        }
    }
}

impl Story {
    fn print(&self, out: &mut impl io::Write) -> io::Result<()> {
        let EventStory { row, .. } = &self.event;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let some_headers = self.event.headers.as_object().is_some_and(|headers| !headers.is_empty());
        fields(
            out,
            ["EVENT", &row.id.to_string()],
            [
                ("event_id", row.event_id.clone()),
                ("state", format!("{}: {}", row.state, self.explanation)),
                ("aggregate", format!("{}/{}", row.aggregate_type, row.aggregate_id)),
                ("tenant", text(&row.tenant_id)),
                ("type", row.event_type.clone()),
                ("created", text(&row.created_at)),
                ("attempts", format!("{} of {}", row.retry_count, row.max_retries)),
                ("first failed", text(&self.event.first_failed_at)),
                ("next attempt", text(&row.next_retry_at)),
                ("error code", text(&row.error_code)),
                ("error", text(&row.error_message)),
                ("claimed by", text(&self.event.locked_by)),
                ("claimed", text(&self.event.locked_at)),
                ("processed", text(&self.event.processed_at)),
                ("updated", text(&self.event.updated_at)),
                ("version", self.event.version.to_string()),
                ("deduplication key", text(&self.event.deduplication_key)),
                ("headers", if some_headers { self.event.headers.to_string() } else { String::new() }),
                ("payload bytes", self.event.payload_bytes.to_string()),
                ("payload", self.event.payload.as_ref().map(|payload| payload.get().to_owned()).unwrap_or_default()),
                ("stream", self.stream.in_words()),
                ("dead letters", list(&self.dead_letters, letter_in_words)),
                ("compensations", list(&self.compensations, |linked| format!("{} ({})", linked.id, linked.status))),
            ],
        )
    }
}

fn letter_in_words(letter: &DeadLetterRow) -> String {
    let age = letter.age_seconds.map(span).unwrap_or_default();
    format!("{} ({age} ago, {})", letter.id, if letter.handled { "handled" } else { "open" })
}

fn list<T>(items: &[T], words: impl Fn(&T) -> String) -> String {
    items.iter().map(words).collect::<Vec<_>>().join(", ")
}
