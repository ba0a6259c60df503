//! `outbox-relay slot`

use std::io::{self, Write};
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::consent::Consent;
use super::human::signed_bytes as bytes;
use super::output::{self, Format, or_dash};
use super::{Failure, block_on, log_warnings, servers};
use crate::config::{Loaded, Settings};
use crate::flow::lsn::Lsn;
use crate::postgres::checks;
use crate::postgres::outbox::{RelayState, StateRow, Tables};
use crate::postgres::slot::detail::{self, SlotDetail, create_slot, is_in_use, slots};
use crate::postgres::slot::drop_slot;

/// After so long the operator is told what a new slot waits for.
const SLOW: Duration = Duration::from_secs(2);

/// Look at replication slots, make one, drop one
#[derive(clap::Subcommand)]
pub enum Slot {
    /// List the logical slots of the database
    #[command(after_help = "Example:\n  outbox-relay slot list --output json")]
    List {
        #[arg(long, value_enum, default_value_t)]
        output: Format,
    },
    /// Show one slot, and what the relay has noted about it
    #[command(after_help = "Example:\n  outbox-relay slot show")]
    Show {
        /// The slot; source.slot without it
        name: Option<String>,
        #[arg(long, value_enum, default_value_t)]
        output: Format,
    },
    /// Make the slot of the settings, as the relay does
    ///
    /// Rows from before the slot are not lost: the state row is told first that rows may wait, so that the relay reads
    /// waiting rows from the table before it streams. On PostgreSQL 17 and later the slot survives a failover
    /// (source.failover). It waits for the transactions that are open.
    #[command(after_help = "Example:\n  outbox-relay slot create --source-slot outbox_relay")]
    Create,
    /// Drop a slot of an outbox, which lets its write-ahead log go
    ///
    /// No row is lost: the state row is told first that rows may wait, so that the next relay reads them from the
    /// table. A slot that is in use, or that is not one of pgoutput in this database, is never dropped.
    #[command(after_help = "Example:\n  outbox-relay slot drop --yes")]
    Drop {
        /// The slot; source.slot without it
        name: Option<String>,
        #[command(flatten)]
        consent: Consent,
    },
}

impl Slot {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        block_on(self.go(&loaded.settings))
    }

    async fn go(self, settings: &Settings) -> Result<(), Failure> {
        let ours = &settings.source.slot;
        let connection = servers::postgres(settings, "slot").await?;
        let client = &connection.client;
        let tables = Tables::of(&settings.source.table);
        let state = |slot| RelayState { client, tables: &tables, slot };
        let mut out = io::stdout().lock();
        match self {
            Self::List { output } => Ok(list(&mut out, &slots(client, ours).await?, ours, output)?),
            Self::Show { name, output } => {
                let slot = find(client, name.as_ref().unwrap_or(ours)).await?;
                let noted = state_row(&state(&slot.name)).await?;
                Ok(show(&mut out, &slot, noted.as_ref(), *ours == slot.name, output)?)
            }
            Self::Create => {
                create(client, settings, &state(ours)).await?;
                let slot = find(client, ours).await?;
                writeln!(out, "slot {ours} created at {}", or_dash(slot.confirmed))?;
                Ok(writeln!(
                    io::stderr(),
                    "rows from before it are read from the table by the next relay that takes it"
                )?)
            }
            Self::Drop { name, consent } => {
                let name = name.as_ref().unwrap_or(ours);
                drop_one(client, &find(client, name).await?, &state(name), &consent).await?;
                Ok(writeln!(out, "slot {name} dropped")?)
            }
        }
    }
}

async fn find(client: &Client, name: &str) -> Result<SlotDetail, Failure> {
    let missing = || {
        Failure::Unfit(format!(
            "replication slot {name:?} does not exist; `outbox-relay slot list` shows those of this database, `outbox-relay \
             slot create` makes the one of the settings"
        ))
    };
    detail::slot(client, name).await?.ok_or_else(missing)
}

/// What the relay noted about a slot; nothing where there are no tables yet.
async fn state_row(state: &RelayState<'_>) -> Result<Option<StateRow>, Failure> {
    match state.find().await {
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(None),
        row => Ok(row?),
    }
}

async fn create(client: &Client, settings: &Settings, state: &RelayState<'_>) -> Result<(), Failure> {
    let source = &settings.source;
    if let Some(slot) = detail::slot(client, &source.slot).await? {
        let lost = if slot.is_lost() { ", but it is lost: drop it first (outbox-relay slot drop)" } else { "" };
        let what = slot.foreign().unwrap_or_else(|| format!("replication slot {:?} exists already", slot.name));
        return Err(Failure::Unfit(format!("{what}{lost}")));
    }
    let server = checks::check_server(client).await?.map_err(|fault| Failure::Unfit(fault.to_string()))?;
    // Durable before the slot exists, as the relay does it: whoever takes the slot drains first.
    match state.read().await {
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => {
            return Err(Failure::Unfit(format!(
                "the tables of {} do not exist; run: outbox-relay migrate",
                settings.source.table
            )));
        }
        row => row?,
    };
    state.set_needs_drain(true).await?;
    let made = create_slot(client, source, server.version);
    tokio::pin!(made);
    tokio::select! {
        made = &mut made => made?,
        () = tokio::time::sleep(SLOW) => {
            writeln!(io::stderr(), "waiting for the transactions that are open to end; see pg_stat_activity")?;
            made.await?
        }
    };
    Ok(())
}

async fn drop_one(
    client: &Client,
    slot: &SlotDetail,
    state: &RelayState<'_>,
    consent: &Consent,
) -> Result<(), Failure> {
    let name = &slot.name;
    if let Some(foreign) = slot.foreign() {
        return Err(Failure::Refused(format!("{foreign}, so it is no outbox's; nothing was done")));
    }
    if let Some(pid) = slot.active_pid {
        let who = slot.application_name.as_deref().filter(|name| !name.is_empty()).unwrap_or("an unnamed application");
        return Err(Failure::Refused(format!(
            "replication slot {name:?} is in use by {who} (pid {pid}); stop that first; nothing was done"
        )));
    }
    let noted = state_row(state).await?;
    let frees = slot.retained_bytes.map_or_else(String::new, |kept| format!(", which lets {} of WAL go", bytes(kept)));
    let after = if noted.is_some() {
        "Rows that wait are not lost: the relay's note says that the next one reads them from the table first."
    } else {
        "No relay has noted anything about it in this outbox: a relay that makes it anew reads waiting rows from the table \
         first. Should it belong to another outbox, run this with that one's source.table."
    };
    consent.ask(&format!("Drop replication slot {name:?}{frees}.\n{after}"))?;
    if noted.is_some() {
        state.set_needs_drain(true).await?;
    }
    match drop_slot(client, name).await {
        Err(error) if is_in_use(&error) => {
            Err(Failure::Refused(format!("replication slot {name:?} was taken into use just now; it was not dropped")))
        }
        dropped => Ok(dropped?),
    }
}

fn list(out: &mut impl Write, slots: &[SlotDetail], ours: &str, output: Format) -> io::Result<()> {
    if output == Format::Json {
        return output::rows_json(out, &slots.iter().map(|slot| as_json(slot, slot.name == ours)).collect::<Vec<_>>());
    }
    let rows: Vec<_> = slots
        .iter()
        .map(|slot| {
            [
                format!("{}{}", if slot.name == ours { "* " } else { "  " }, slot.name),
                or_dash(slot.plugin.as_deref()),
                or_dash(slot.active_pid),
                or_dash(slot.wal_status.as_deref()),
                or_dash(slot.lag_bytes.filter(|_| !slot.is_lost()).map(bytes)),
                or_dash(slot.retained_bytes.map(bytes)),
                safe(slot),
                or_dash(slot.failover.map(yes)),
                or_dash(slot.inactive_since.as_deref()),
                slot.invalidation_reason.clone().unwrap_or_default(),
            ]
        })
        .collect();
    let heading =
        ["  SLOT", "PLUGIN", "PID", "WAL", "LAG", "RETAINED", "SAFE", "FAILOVER", "INACTIVE SINCE", "INVALIDATED"];
    output::table(out, heading, &rows)
}

fn show(
    out: &mut impl Write,
    slot: &SlotDetail,
    noted: Option<&StateRow>,
    ours: bool,
    output: Format,
) -> io::Result<()> {
    let meaning = meaning(slot, noted);
    if output == Format::Json {
        let state = noted.map(|row| {
            json!({
                "stream": row.stream,
                "stream_created": row.stream_created.and_then(|time| jiff::Timestamp::try_from(time).ok())
                    .map(|time| time.to_string()),
                "stream_sequence": row.stream_seq,
                "needs_drain": row.needs_drain,
                "confirmed_lsn": lsn(Some(row.confirmed).filter(|position| *position > Lsn::ZERO)),
            })
        });
        let mut json = as_json(slot, ours);
        json.extend([("state".to_owned(), json!(state)), ("meaning".to_owned(), json!(meaning))]);
        return output::json(out, &json);
    }
    let holder = slot.active_pid.map(|pid| {
        let who = slot.application_name.as_deref().unwrap_or("?");
        let from = slot.client_address.as_ref().map_or_else(String::new, |address| format!(" from {address}"));
        format!("pid {pid}, {who}{from}")
    });
    let mut lines = vec![
        ("slot", format!("{}{}", slot.name, if ours { " (source.slot)" } else { "" })),
        ("plugin", or_dash(slot.plugin.as_deref())),
        ("database", or_dash(slot.database.as_deref())),
        ("in use by", or_dash(holder)),
        ("WAL status", or_dash(slot.wal_status.as_deref())),
        ("confirmed", or_dash(slot.confirmed)),
        ("lag", or_dash(slot.lag_bytes.filter(|_| !slot.is_lost()).map(bytes))),
        ("retained WAL", or_dash(slot.retained_bytes.map(bytes))),
        ("safe WAL", safe(slot)),
        ("failover", or_dash(slot.failover.map(yes))),
        ("synced copy", or_dash(slot.synced.map(yes))),
        ("inactive since", or_dash(slot.inactive_since.as_deref())),
        ("invalidated", or_dash(slot.invalidation_reason.as_deref())),
    ];
    if let Some(row) = noted {
        lines.push(("stream", or_dash(row.stream.as_deref())));
        lines.push(("stream sequence", row.stream_seq.to_string()));
        lines.push(("needs a drain", yes(row.needs_drain).to_owned()));
        lines.push(("noted as confirmed", row.confirmed.to_string()));
    }
    for (name, value) in lines {
        writeln!(out, "{name:<20}{value}")?;
    }
    writeln!(out)?;
    meaning.iter().try_for_each(|line| writeln!(out, "- {line}"))
}

/// What a relay makes of the slot and its note.
fn meaning(slot: &SlotDetail, noted: Option<&StateRow>) -> Vec<String> {
    if let Some(foreign) = slot.foreign() {
        return vec![format!("{foreign}: a relay does not use it")];
    }
    let mut lines = Vec::new();
    if slot.is_lost() {
        lines.push(
            "The server has given the slot up: its changes are gone. The relay makes it anew, and reads waiting rows from \
             the table first (with source.create = false: outbox-relay slot drop, then slot create)."
                .to_owned(),
        );
    }
    if slot.wal_status.as_deref() == Some("unreserved") {
        lines.push(
            "The server may give the slot up at its next checkpoint: it is behind by more than it may be.".to_owned(),
        );
    }
    if slot.synced == Some(true) {
        lines.push("A copy that the primary keeps here: it can be used only once this server is promoted.".to_owned());
    }
    let Some(row) = noted else {
        lines.push(
            "No relay has used it for this outbox: the first one reads waiting rows from the table first.".to_owned(),
        );
        return lines;
    };
    lines.push(if row.needs_drain {
        "Rows may wait in the table that the slot does not show: the next relay session reads them from the table first."
            .to_owned()
    } else if slot.confirmed.is_some_and(|confirmed| confirmed > row.confirmed) {
        "The slot stands beyond what the relay confirmed: someone moved it or made it anew. The next relay session reads \
         waiting rows from the table first."
            .to_owned()
    } else {
        "The slot shows every row whose outcome is not known: a relay goes on from it.".to_owned()
    });
    if let Some(stream) = &row.stream {
        lines.push(format!(
            "In stream {stream}, no event whose outcome is unknown is stored at or below sequence {}.",
            row.stream_seq
        ));
    }
    lines
}

fn as_json(slot: &SlotDetail, ours: bool) -> Map<String, Value> {
    let fields = [
        ("name", json!(slot.name)),
        ("ours", json!(ours)),
        ("plugin", json!(slot.plugin)),
        ("database", json!(slot.database)),
        ("active_pid", json!(slot.active_pid)),
        ("application_name", json!(slot.application_name)),
        ("client_address", json!(slot.client_address)),
        ("wal_status", json!(slot.wal_status)),
        ("restart_lsn", json!(lsn(slot.restart))),
        ("confirmed_lsn", json!(lsn(slot.confirmed))),
        ("confirmed_lag_bytes", json!(slot.lag_bytes.filter(|_| !slot.is_lost()))),
        ("retained_wal_bytes", json!(slot.retained_bytes)),
        ("safe_wal_bytes", json!(slot.safe_bytes)),
        ("failover", json!(slot.failover)),
        ("synced", json!(slot.synced)),
        ("inactive_since", json!(slot.inactive_since)),
        ("invalidation_reason", json!(slot.invalidation_reason)),
    ];
    fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn lsn(position: Option<Lsn>) -> Option<String> {
    position.map(|position| position.to_string())
}

fn safe(slot: &SlotDetail) -> String {
    match slot.safe_bytes {
        Some(left) => bytes(left),
        None if slot.is_lost() => "-".to_owned(),
        None => "unlimited".to_owned(),
    }
}

fn yes(answer: bool) -> &'static str {
    if answer { "yes" } else { "no" }
}
