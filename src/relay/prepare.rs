//! Before a session: is everything there, and is it fit? Each thing that is not gives one error with its mend.

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tracing::{info, warn};

use super::{Relay, Setback};
use crate::config::{OnSuccess, Settings, Source, TableName};
use crate::postgres::checks::{self, ServerFacts, ServerFault};
use crate::postgres::connect::{self, Session, Socket, SqlConnection};
use crate::postgres::migrate::{self, MigrateError, SchemaState};
use crate::postgres::outbox::{self, RelayState, Tables};
use crate::postgres::publication::{self, PublicationFault, PublicationFlaw};
use crate::postgres::slot::SlotInfo;
use crate::postgres::wal::WalConnection;
use crate::postgres::{grants, waits};
use crate::telemetry::health::Condition;

/// How long one step before a session may take. A server that hangs is given up then.
const ANSWER: Duration = Duration::from_secs(45);

/// How long a pooler may take to say what stands behind it.
const POOLER: Duration = Duration::from_secs(5);

/// What a session stands on.
pub struct Ground {
    /// For everything but streaming and write-back.
    pub control: SqlConnection,
    pub server: ServerFacts,
    pub tables: Tables,
    /// The outbox table and its place in the publication when they were checked.
    pub mark: String,
}

impl Ground {
    /// The relay's row of state for `slot`.
    pub fn state<'a>(&'a self, slot: &'a str) -> RelayState<'a> {
        RelayState { client: &self.control.client, tables: &self.tables, slot }
    }

    /// Waits for pollers that began before the slot was taken.
    pub async fn wait_for_pollers(&self, slot: &str) -> Result<(), Setback> {
        let client = &self.control.client;
        match self.state(slot).wait_for_pollers().await {
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                let pollers = waits::holders_of(client, &self.tables.state).await?;
                Err(Setback::Transient(format!(
                    "a program that polls the outbox has not ended its transaction ({}): the relay begins when it has",
                    pollers.as_deref().unwrap_or("it has just now")
                )))
            }
            other => Ok(other?),
        }
    }
}

/// Says who holds the lock where that is what a session came to grief on.
pub async fn told_of_locks(client: &Client, tables: &Tables, setback: Setback) -> Setback {
    match setback {
        Setback::Sql(error) | Setback::Schema(MigrateError::Database { source: error, .. })
            if outbox::is_locked(&error) =>
        {
            let holders = outbox::lock_holders(client, tables).await.unwrap_or_default();
            let holders = if holders.is_empty() { "by someone who has gone just now" } else { &holders };
            Setback::Transient(format!("the outbox is locked: {holders}; the relay begins when it is free"))
        }
        other => other,
    }
}

/// Waits for a step before the session, for as long as one may take.
pub async fn answered<T>(step: &str, taken: impl Future<Output = Result<T, Setback>>) -> Result<T, Setback> {
    match tokio::time::timeout(ANSWER, taken).await {
        Ok(answer) => answer,
        Err(_) => Err(Setback::Transient(format!("PostgreSQL did not answer for {ANSWER:?} while {step}"))),
    }
}

/// Connects and checks.
pub async fn check(relay: &Relay) -> Result<Ground, Setback> {
    let control = connect::sql(&relay.postgres, &control_session()).await?;
    let mut tables = Tables::of(&relay.settings.source.table);
    match inspect(relay, &control.client, &mut tables).await {
        Ok((server, mark)) => {
            same_for_commands(&relay.settings, &server).await?;
            Ok(Ground { control, server, tables, mark })
        }
        Err(setback) => Err(told_of_locks(&control.client, &tables, setback).await),
    }
}

async fn inspect(relay: &Relay, client: &Client, tables: &mut Tables) -> Result<(ServerFacts, String), Setback> {
    let source = &relay.settings.source;
    let server = checks::check_server(client).await?.map_err(fatal)?;
    if let Some(grant) = grants::missing_on_schema(client, &source.table).await? {
        return Err(Setback::Fatal(format!("the role may not use the outbox's schema; run: {grant}")));
    }
    match migrate::state(client, &source.table).await? {
        SchemaState::Current => {}
        state => return Err(fatal(unmigrated(&state, &source.table))),
    }
    let settings = &relay.settings;
    let deletes = settings.writeback.on_success == OnSuccess::Delete || settings.reconcile.retention.is_some();
    let grants = grants::missing(client, tables, deletes, settings.compensation.enabled).await?;
    if !grants.is_empty() {
        return Err(Setback::Fatal(format!("the role lacks privileges; run: {}", grants.join("; "))));
    }
    // First the mark, then the check: what changes in between is noticed.
    let mut mark = publication::mark(client, &source.publication, &source.table).await?;
    if mend_publication(client, source, tables).await? {
        let state = RelayState { client, tables, slot: &source.slot };
        state.read().await?;
        // Rows may have been written that no log shows.
        state.set_needs_drain(true).await?;
        mark = publication::mark(client, &source.publication, &source.table).await?;
    }
    relay.health.clear(Condition::Source);
    Ok((server, mark))
}

/// Where the relay goes past a pooler: does that lead to the same server, for the commands that go through it? A pooler
/// that cannot be asked keeps no relay from its work.
async fn same_for_commands(settings: &Settings, server: &ServerFacts) -> Result<(), Setback> {
    if settings.postgres.replication_url.is_none() {
        return Ok(());
    }
    let target = super::postgres_target(settings).map_err(fatal)?;
    let asked = async {
        let connection = connect::sql(&target, &Session::new("outbox-relay check")).await?;
        Ok::<_, Setback>(checks::server_state(&connection.client).await?)
    };
    let told = tokio::time::timeout(POOLER, asked).await;
    match told.unwrap_or_else(|_| Err(Setback::PostgresLost(format!("no answer within {POOLER:?}")))) {
        Ok(Some(state)) if state.identity != server.identity => {
            Err(fatal(ServerFault::Different(state.identity, server.identity.clone())))
        }
        Ok(_) => Ok(()),
        Err(setback) => {
            warn!(reason = %setback, "postgres.url, where commands go, does not answer; the relay does without");
            Ok(())
        }
    }
}

/// What is wrong with the tables, and the mend.
fn unmigrated(state: &SchemaState, table: &TableName) -> String {
    let problem = state.problem(table);
    match state.mend() {
        Ok(command) => format!("{problem}; run: {command}"),
        Err(advice) => format!("{problem}; {advice}"),
    }
}

fn fatal(fault: impl std::fmt::Display) -> Setback {
    Setback::Fatal(fault.to_string())
}

/// Sees to a publication that shows the outbox, as far as the relay may. What its row filter hides is left out of
/// `tables`. Returns whether something was changed.
async fn mend_publication(client: &Client, source: &Source, tables: &mut Tables) -> Result<bool, Setback> {
    let (name, table) = (&source.publication, &source.table);
    match publication::check(client, name, table).await? {
        Ok(flaws) => {
            for flaw in flaws {
                warn!("{flaw}");
                if let PublicationFlaw::RowFilter(.., filter) = &flaw {
                    tables.leave_hidden(filter);
                }
            }
            Ok(false)
        }
        Err(fault @ PublicationFault::Missing(..)) if source.create => {
            info!(publication = name, "the publication is missing; it is created");
            publication::create(client, name, table).await.map_err(|error| {
                fatal(format!(
                    "cannot create publication {name:?}: {}; run as the table's owner: outbox-relay publication create (in \
                     SQL: {})",
                    crate::postgres::describe(&error),
                    fault.mend()
                ))
            })?;
            Ok(true)
        }
        // What shows other things as well is its owner's.
        Err(fault @ PublicationFault::NoTable(..)) if source.create && publication::is_empty(client, name).await? => {
            warn!(publication = name, "the publication is empty, as when its table was dropped; the outbox is added");
            publication::add_table(client, name, table)
                .await
                .map_err(|error| fatal(format!("{fault}, as its owner ({})", crate::postgres::describe(&error))))?;
            Ok(true)
        }
        Err(fault) => Err(fatal(fault)),
    }
}

/// A slot of the same name may be something else.
pub fn check_slot(info: &SlotInfo, source: &Source) -> Result<(), Setback> {
    let name = &source.slot;
    if info.plugin != "pgoutput" {
        let plugin = &info.plugin;
        return Err(fatal(format!(
            "replication slot {name:?} is not a logical slot of pgoutput (plugin {plugin:?}); give source.slot another name"
        )));
    }
    if !info.here {
        return Err(fatal(format!(
            "replication slot {name:?} belongs to another database; give source.slot another name"
        )));
    }
    Ok(())
}

/// Checks that the replication connection reaches the same server, and bounds how long it may be silent.
///
/// Returns the session's `wal_sender_timeout`.
pub async fn settle_replication(wal: &mut WalConnection<Socket>, ground: &Ground) -> Result<Duration, Setback> {
    let first = |rows: Vec<Vec<Option<String>>>| rows.into_iter().flatten().flatten().next().unwrap_or_default();
    let identity = first(wal.query(checks::IDENTITY).await?);
    if identity != ground.server.identity {
        return Err(fatal(ServerFault::Different(ground.server.identity.clone(), identity)));
    }
    let (timeout, command) = checks::bounded_timeout(&first(wal.query(checks::SENDER_TIMEOUT).await?));
    if let Some(command) = command {
        wal.query(&command).await?;
    }
    Ok(timeout)
}

/// Bytes of a row beyond which it is not read whole: such a row could not be sent either.
pub fn message_cap(settings: &Settings) -> usize {
    usize::try_from(settings.delivery.max_in_flight_bytes).unwrap_or(usize::MAX)
}

/// The replication connection's session.
pub fn replication_session() -> Session {
    Session::new(super::APPLICATION)
}

pub fn control_session() -> Session {
    Session::new("outbox-relay control").with("statement_timeout", "60s").with("lock_timeout", "10s")
}
