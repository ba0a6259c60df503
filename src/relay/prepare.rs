//! Before a session: is everything there, and is it fit? Each thing that is not gives one error with its mend.

use std::time::Duration;

use tracing::{info, warn};

use super::{Relay, Setback};
use crate::config::{OnSuccess, Settings, Source, TableName};
use crate::postgres::checks::{self, ServerFacts, ServerFault};
use crate::postgres::connect::{self, Session, Socket, SqlConnection};
use crate::postgres::migrate::{self, SchemaState};
use crate::postgres::outbox::{RelayState, Tables};
use crate::postgres::slot::{self, PublicationFault, SlotInfo};
use crate::postgres::wal::WalConnection;

/// For how long a replication connection may be silent that only catches up.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// What a session stands on.
pub struct Ground {
    /// For everything but streaming and write-back.
    pub control: SqlConnection,
    pub server: ServerFacts,
    pub tables: Tables,
}

impl Ground {
    /// The relay's row of state for `slot`.
    pub fn state<'a>(&'a self, slot: &'a str) -> RelayState<'a> {
        RelayState { client: &self.control.client, tables: &self.tables, slot }
    }
}

/// Connects and checks.
pub async fn check(relay: &Relay) -> Result<Ground, Setback> {
    let source = &relay.settings.source;
    let control = connect::sql(&relay.postgres, &control_session()).await?;
    let client = &control.client;
    let server = checks::check_server(client).await?.map_err(fatal)?;
    if let Some(grant) = slot::missing_schema_grant(client, &source.table).await? {
        return Err(Setback::Fatal(format!("the role may not use the outbox's schema; run: {grant}")));
    }
    match migrate::state(client, &source.table).await? {
        SchemaState::Current => {}
        state => return Err(fatal(unmigrated(&state, &source.table))),
    }
    let tables = Tables::of(&source.table);
    let settings = &relay.settings;
    let deletes = settings.writeback.on_success == OnSuccess::Delete || settings.reconcile.retention.is_some();
    let grants = slot::missing_grants(client, &tables, deletes, settings.compensation.enabled).await?;
    if !grants.is_empty() {
        return Err(Setback::Fatal(format!("the role lacks privileges; run: {}", grants.join("; "))));
    }
    publication(client, source).await?;
    Ok(Ground { control, server, tables })
}

/// What is wrong with the tables, and the mend.
fn unmigrated(state: &SchemaState, table: &TableName) -> String {
    let what = match state {
        SchemaState::Missing => format!("table {table} does not exist"),
        SchemaState::Behind { pending } => {
            format!("the tables are not up to date (to be applied: {})", pending.join(", "))
        }
        SchemaState::Damaged { missing } => format!("the tables are not whole (missing: {})", missing.join(", ")),
        SchemaState::Diverged { migration } => {
            return format!(
                "migration {migration} was applied for another table than {table}, or by another build: a schema holds \
                 one outbox, so set source.table to the one that this schema was migrated for; `outbox-relay migrate` \
                 tells more"
            );
        }
        SchemaState::Newer { unknown } => {
            return format!("the tables were made by a newer version ({}); run that one", unknown.join(", "));
        }
        SchemaState::Current => return String::new(),
    };
    format!("{what}; run: outbox-relay migrate")
}

fn fatal(fault: impl std::fmt::Display) -> Setback {
    Setback::Fatal(fault.to_string())
}

async fn publication(client: &tokio_postgres::Client, source: &Source) -> Result<(), Setback> {
    match slot::check_publication(client, &source.publication, &source.table).await? {
        Ok(None) => Ok(()),
        Ok(Some(warning)) => {
            warn!("{warning}");
            Ok(())
        }
        Err(PublicationFault::Missing(name, statement)) if source.create => {
            info!(publication = name, "the publication is missing; it is created");
            slot::create_publication(client, &source.publication, &source.table).await.map_err(|error| {
                fatal(format!(
                    "cannot create publication {name}: {}; run as the table's owner: {statement}",
                    crate::postgres::describe(&error)
                ))
            })
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
    Session::new("outbox-relay")
}

pub fn control_session() -> Session {
    Session::new("outbox-relay control").with("statement_timeout", "60s").with("lock_timeout", "30s")
}
