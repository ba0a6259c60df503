//! `outbox-relay stream`

use std::fmt::Write as _;
use std::io::{self, Write};

use serde_json::{Value, json};

use super::consent::Consent;
use super::output::{self, Format};
use super::{Failure, block_on, human, log_warnings, servers};
use crate::config::{Loaded, Origin};
use crate::nats::plan::{Change, Effect, Limit, StreamPlan};
use crate::nats::stream::{Stream as NatsStream, StreamFault, Unfit};
use crate::relay;

const ABOUT: &str = "\
A stream that does not exist is made with everything that nats.create says. Of one that exists, only those keys of \
nats.create are looked at that the settings file, a variable or a flag sets: everything else of it is kept.";

/// Compare the stream with nats.create, and make it so
#[derive(clap::Subcommand)]
pub enum Stream {
    /// Show what `apply` would do: exit code 0 nothing, 3 something
    #[command(after_help = format!("{ABOUT}\n\nExample:\n  outbox-relay stream plan --nats-create-max-age 7d"))]
    Plan {
        #[arg(long, value_enum, default_value_t)]
        output: Format,
    },
    /// Make the stream, or change it after showing the plan
    #[command(after_help = format!("{ABOUT}\n\nExample:\n  outbox-relay stream apply --nats-create-replicas 3 --yes"))]
    Apply {
        #[command(flatten)]
        consent: Consent,
    },
}

impl Stream {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        block_on(self.go(&loaded))
    }

    async fn go(self, loaded: &Loaded) -> Result<(), Failure> {
        let settings = &loaded.settings;
        let filter = relay::subject_filter(settings)?;
        let connection = servers::nats(settings).await?;
        let stream = NatsStream::new(&connection, &settings.nats);
        let named = |field: &str| loaded.origin(&format!("nats.create.{field}")) != Origin::Default;
        let plan = stream.plan(&settings.nats.create, named, &filter).await?;
        let mut out = io::stdout().lock();
        match self {
            Self::Plan { output } => {
                match output {
                    Format::Json => output::json(&mut out, &as_json(&plan))?,
                    Format::Table => out.write_all(as_text(&plan).as_bytes())?,
                }
                if plan.is_empty() { Ok(()) } else { Err(Failure::Found) }
            }
            Self::Apply { .. } if plan.is_empty() => Ok(out.write_all(as_text(&plan).as_bytes())?),
            Self::Apply { consent } => {
                if let Some(change) = plan.changes.iter().find(|change| change.effect == Effect::Impossible) {
                    return Err(Failure::Unfit(format!("{}{}", as_text(&plan), impossible(change))));
                }
                // A stream that is made takes nothing from anybody.
                if plan.present.is_some() {
                    consent.ask(&as_text(&plan))?;
                }
                stream.apply(&plan, &settings.nats.create).await?;
                let done = if plan.present.is_some() { "changed" } else { "created" };
                Ok(writeln!(out, "stream {} {done}", plan.stream)?)
            }
        }
    }
}

impl From<StreamFault> for Failure {
    fn from(fault: StreamFault) -> Self {
        Self::Unfit(fault.to_string())
    }
}

fn impossible(change: &Change) -> String {
    format!(
        "nothing was done: a stream keeps its {0} for life. Keep it (take nats.create.{0} out of the settings), or make \
         another stream: set nats.stream to a new name and nats.create.subjects to subjects that no stream has",
        change.field
    )
}

fn as_text(plan: &StreamPlan) -> String {
    let name = &plan.stream;
    let mut text = match plan.present {
        None => format!("stream {name} does not exist; it would be created:\n"),
        Some(_) if plan.changes.is_empty() => {
            format!("stream {name} is as the settings want it; nothing to do\n")
        }
        Some(present) => {
            let bytes = human::bytes(present.bytes);
            format!("stream {name} ({} messages, {bytes}) would be changed:\n", present.messages)
        }
    };
    // Writing to a String cannot fail.
    for change in &plan.changes {
        let present = change.present.as_ref().map_or_else(String::new, |present| format!("{} -> ", shown(present)));
        let _ = writeln!(text, "  {:<18}{present}{}{}", change.field, shown(&change.wanted), effect(change));
    }
    if let Some(Unfit { problem, mend, .. }) = &plan.unfit {
        let _ = writeln!(text, "the relay could not use it: {problem}; {mend}");
    }
    for finding in &plan.findings {
        let _ = writeln!(text, "note: {}", finding.text);
    }
    text
}

fn effect(change: &Change) -> String {
    match (change.effect, &change.wanted) {
        (Effect::None, _) => String::new(),
        (Effect::Impossible, _) => "   CANNOT BE CHANGED in a stream that exists".to_owned(),
        (Effect::Deletes, Limit::Age(Some(age))) => {
            format!("   DELETES all messages older than {}, for good", humantime::format_duration(*age))
        }
        (Effect::Deletes, wanted) => format!("   DELETES the oldest messages beyond {}, for good", shown(wanted)),
    }
}

fn shown(limit: &Limit) -> String {
    match limit {
        Limit::Subjects(subjects) => subjects.join(", "),
        Limit::Count(count) => count.to_string(),
        Limit::Age(None) => "never".to_owned(),
        Limit::Age(Some(age)) => humantime::format_duration(*age).to_string(),
        Limit::Bytes(None) => "unlimited".to_owned(),
        Limit::Bytes(Some(bytes)) => human::bytes(*bytes),
        Limit::Storage(storage) => storage.clone(),
    }
}

fn value(limit: &Limit) -> Value {
    match limit {
        Limit::Subjects(subjects) => json!(subjects),
        Limit::Count(count) => json!(count),
        Limit::Age(Some(age)) if age.subsec_nanos() == 0 => json!(age.as_secs()),
        Limit::Age(age) => json!(age.map(|age| age.as_secs_f64())),
        Limit::Bytes(bytes) => json!(bytes),
        Limit::Storage(storage) => json!(storage),
    }
}

fn as_json(plan: &StreamPlan) -> Value {
    let changes: Vec<Value> = plan
        .changes
        .iter()
        .map(|change| {
            json!({
                "field": change.field,
                "present": change.present.as_ref().map(value),
                "wanted": value(&change.wanted),
                "deletes_messages": change.effect == Effect::Deletes,
                "possible": change.effect != Effect::Impossible,
            })
        })
        .collect();
    json!({
        "stream": plan.stream,
        "action": if plan.present.is_none() { "create" } else if plan.changes.is_empty() { "none" } else { "update" },
        "messages": plan.present.map(|present| present.messages),
        "bytes": plan.present.map(|present| present.bytes),
        "changes": changes,
        "deletes_messages": plan.deletes(),
        "unfit": plan.unfit.as_ref().map(|Unfit { problem, mend, .. }| format!("{problem}; {mend}")),
        "findings": plan.findings.iter().map(|finding| json!({ "code": finding.code, "text": finding.text }))
            .collect::<Vec<_>>(),
    })
}
