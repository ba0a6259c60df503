//! Asks everybody at once.

use std::time::Duration;

use jiff::{Timestamp, Unit};

use super::relay;
use super::report::{Nats, Postgres, Relay, Report, Rows, Slot, State, Stream, Verdict};
use crate::cli::{Failure, servers};
use crate::config::{Settings, Source};
use crate::flow::lsn::Lsn;
use crate::nats::stream::Stream as NatsStream;
use crate::postgres::outbox::{self, Overview, StateRow};
use crate::postgres::slot::detail::{self, SlotDetail};

/// For a server's whole answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// For one statement.
const STATEMENT: &str = "SET statement_timeout = '5s'; SET lock_timeout = '2s'";

pub async fn look(settings: &Settings) -> Report {
    let (postgres, nats, relay) = tokio::join!(postgres(settings), nats(settings), relay(settings));
    let now = Timestamp::now();
    let time = now.round(Unit::Millisecond).unwrap_or(now);
    let mut report = Report { verdict: Verdict::Trouble, problems: Vec::new(), time, postgres, nats, relay };
    report.judge();
    report
}

async fn relay(settings: &Settings) -> Relay {
    let Some(listen) = settings.admin.listen else { return Relay { address: None, answers: false, status: None } };
    let status = relay::ask(listen).await;
    Relay { address: Some(listen.to_string()), answers: status.is_some(), status }
}

/// What went wrong while a server was asked.
async fn error_of(server: &str, asked: impl Future<Output = Result<(), Failure>>) -> Option<String> {
    match tokio::time::timeout(PATIENCE, asked).await {
        Ok(Ok(())) => None,
        Ok(Err(failure)) => Some(failure.to_string()),
        Err(_) => Some(format!("{server}: no answer within {PATIENCE:?}")),
    }
}

async fn postgres(settings: &Settings) -> Postgres {
    let mut found = Postgres { table: settings.source.table.plain(), ..Postgres::default() };
    found.error = error_of("PostgreSQL", ask_postgres(settings, &mut found)).await;
    found
}

async fn ask_postgres(settings: &Settings, found: &mut Postgres) -> Result<(), Failure> {
    let connection = servers::postgres(settings, "status").await?;
    found.answers = true;
    found.version = connection.parameters.get("server_version").cloned();
    let (client, source) = (&connection.client, &settings.source);
    client.batch_execute(STATEMENT).await?;
    found.slot = Some(slot(detail::slot(client, &source.slot).await?, source));
    tables(outbox::overview(client, source).await?, found);
    connection.close().await;
    Ok(())
}

fn bytes(count: i64) -> u64 {
    u64::try_from(count).unwrap_or(0)
}

fn slot(found: Option<SlotDetail>, source: &Source) -> Slot {
    let mut slot = Slot {
        name: source.slot.clone(),
        exists: false,
        active: false,
        active_pid: None,
        holder: None,
        wal_status: None,
        confirmed_lsn: None,
        confirmed_lag_bytes: None,
        retained_wal_bytes: None,
        safe_wal_bytes: None,
        max_retained_wal_bytes: source.max_retained_wal,
        max_slot_wal_keep_size_bytes: None,
    };
    let Some(found) = found else { return slot };
    (slot.exists, slot.active, slot.active_pid) = (true, found.active_pid.is_some(), found.active_pid);
    slot.max_slot_wal_keep_size_bytes = found.keep_bytes.map(bytes);
    slot.wal_status = Some("lost".to_owned());
    if !found.is_lost() {
        slot.confirmed_lsn = found.confirmed.as_ref().map(ToString::to_string);
        slot.confirmed_lag_bytes = found.lag_bytes.map(bytes);
        slot.retained_wal_bytes = found.retained_bytes.map(bytes);
        slot.safe_wal_bytes = found.safe_bytes.map(bytes);
        slot.wal_status = found.wal_status;
    }
    slot.holder = found.application_name;
    slot
}

fn tables(look: Overview, found: &mut Postgres) {
    let waiting = look.waiting;
    found.rows = Some(Rows {
        pending: bytes(waiting.pending),
        scheduled: bytes(waiting.scheduled),
        claimed: bytes(waiting.claimed),
        failed: bytes(waiting.failed),
        held: bytes(waiting.held),
        dead_letters_unhandled: bytes(waiting.unhandled),
        oldest_waiting_seconds: waiting.oldest_seconds,
        estimated_total: look.estimated_rows.map(bytes),
        at_least: waiting.cut,
        newest_only: look.newest_only,
    });
    found.dead_letters = Some(look.dead_letters);
    found.compensations = Some(look.compensations);
    found.state = look.state.map(|row: StateRow| State {
        stream_sequence: row.stream.as_ref().map(|_| row.stream_seq),
        stream: row.stream,
        needs_drain: row.needs_drain,
        confirmed_lsn: (row.confirmed > Lsn::ZERO).then(|| row.confirmed.to_string()),
        updated_at: row.updated_at.and_then(|time| Timestamp::try_from(time).ok()).unwrap_or_default(),
    });
}

async fn nats(settings: &Settings) -> Nats {
    let mut found = Nats::default();
    found.error = error_of("NATS", ask_nats(settings, &mut found)).await;
    found
}

async fn ask_nats(settings: &Settings, found: &mut Nats) -> Result<(), Failure> {
    let connection = servers::nats(settings).await?;
    found.answers = true;
    found.server.clone_from(&connection.link().borrow().server);
    let facts = NatsStream::new(&connection, &settings.nats).facts().await?;
    found.stream = Some(Stream {
        name: facts.name,
        messages: facts.messages,
        bytes: facts.bytes,
        last_sequence: facts.last_sequence,
        has_leader: facts.has_leader,
    });
    Ok(())
}
