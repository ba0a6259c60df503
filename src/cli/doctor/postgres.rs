//! The examination of PostgreSQL: what is read, in which order, and what follows from not being able to.

use std::time::Duration;

use tokio_postgres::Client;

use super::chart::{Chart, Finding};
use super::{pins, publication, rows, schema, server, slot, standbys};
use crate::cli::Failure;
use crate::config::{OnSuccess, Settings};
use crate::postgres::checks::{self, ServerFault};
use crate::postgres::connect::{self, ConnectError, ConnectErrorKind, Session, Target};
use crate::postgres::facts::{Outbox, Pins, Rows, Server, Standbys, replication};
use crate::postgres::migrate::{self, MigrateError};
use crate::postgres::outbox::{RelayState, StateRow, Tables};
use crate::postgres::publication::check as check_publication;
use crate::postgres::slot::detail::{self, SlotDetail};
use crate::postgres::{grants, remedies};
use crate::relay;

/// What the judgement of the stream needs of the database.
#[derive(Debug, Default)]
pub struct Database {
    /// The session's `wal_sender_timeout`, as the relay bounds it.
    pub sender_timeout: Option<Duration>,
    pub state: Option<StateRow>,
}

/// Examines PostgreSQL. An error is one of the settings.
pub async fn examine(
    target: &Target,
    settings: &Settings,
    patience: Duration,
    chart: &mut Chart,
) -> Result<Database, Failure> {
    chart.area("PostgreSQL");
    let session = Session::new("outbox-relay doctor").with("statement_timeout", "10s").with("lock_timeout", "2s");
    let connection = match connect::sql(target, &session).await {
        Ok(connection) => connection,
        Err(error) => {
            refused(&error, target, chart);
            return Ok(Database::default());
        }
    };
    chart.check("postgres-unreachable", None);
    chart.check("postgres-refused", None);
    let examiner = Examiner { client: &connection.client, target, settings, patience };
    let database = examiner.examine(chart).await?;
    if connection.client.is_closed() {
        let why = "nothing can be said of what was not looked at yet";
        let finding = Finding::error(target.describe(), "the connection was lost during the examination", why);
        chart.check("postgres-unreachable", [finding.step("look into PostgreSQL's log, and run it again")]);
    }
    connection.close().await;
    Ok(database)
}

/// No session of the kind that the relay needs.
fn refused(error: &ConnectError, target: &Target, chart: &mut Chart) {
    let finding = Finding::error(target.describe(), error.to_string(), "the relay needs it, and waits or ends without");
    let finding = match error.kind() {
        ConnectErrorKind::NotAdmitted if error.sqlstate() == Some("28000") => {
            if error.to_string().contains("not permitted to log in") {
                finding.sql(remedies::let_log_in(target.user()))
            } else {
                finding
                    .step(format!(
                        "add to pg_hba.conf, before lines that match too: host {} {} ADDRESS_OF_RELAY/32 scram-sha-256",
                        target.database(),
                        target.user()
                    ))
                    .sql(remedies::reload())
            }
        }
        _ => finding.step(error.advice().unwrap_or("see that the server runs")),
    };
    chart.check(if error.is_transient() { "postgres-unreachable" } else { "postgres-refused" }, [finding]);
}

/// What cannot be read is noted, and the examination goes on.
fn seen<T>(read: Result<T, tokio_postgres::Error>, id: &'static str, object: &str, chart: &mut Chart) -> Option<T> {
    read.map_err(|error| chart.unseen(id, object, &crate::postgres::describe(&error), None)).ok()
}

struct Examiner<'a> {
    client: &'a Client,
    target: &'a Target,
    settings: &'a Settings,
    patience: Duration,
}

impl Examiner<'_> {
    async fn examine(&self, chart: &mut Chart) -> Result<Database, Failure> {
        let mut database = Database::default();
        let Some(read) = seen(Server::read(self.client).await, "wal-level", "server", chart) else {
            return Ok(database);
        };
        let Some(server) = read else {
            let finding = Finding::error(self.target.describe(), "it does not answer as PostgreSQL", "nothing works");
            chart.check("server-too-old", [finding.step("let postgres.url lead to PostgreSQL")]);
            return Ok(database);
        };
        chart.platform(server.platform);
        database.sender_timeout = Some(checks::bounded_timeout(server.text("wal_sender_timeout")).0);
        self.connections(&server, chart).await?;
        let found = if server.state.standby {
            None
        } else {
            seen(detail::slot(self.client, &self.settings.source.slot).await, "slot-missing", "slot", chart)
        };
        server::judge(&server, found.as_ref().is_some_and(Option::is_some), self.settings, chart);
        // A standby has the primary's tables; how they stand is seen there.
        if server.state.standby {
            return Ok(database);
        }
        let tables = Tables::of(&self.settings.source.table);
        let usable = self.tables(&server, &tables, chart).await;
        if usable {
            let state = RelayState { client: self.client, tables: &tables, slot: &self.settings.source.slot };
            database.state = seen(state.find().await, "needs-drain", "outbox_relay_state", chart).flatten();
        }
        let slot = found.flatten();
        let own_name = self.target.application_name().unwrap_or(relay::APPLICATION);
        slot::judge(slot.as_ref(), database.state.as_ref(), &server, own_name, self.settings, chart);
        self.neighbours(&server, slot.as_ref(), chart).await;
        if usable && let Some(counts) = self.rows(&tables, chart).await {
            rows::judge(&counts, &self.settings.source.table.plain(), self.patience, chart);
        }
        Ok(database)
    }

    /// The other connections that a relay and its commands make.
    async fn connections(&self, server: &Server, chart: &mut Chart) -> Result<(), Failure> {
        // Without the right it is refused anyway.
        if server.state.replicates {
            match replication(self.target).await {
                Ok(Ok(other)) => {
                    chart.check("replication-refused", None);
                    chart.check("servers-differ", differ(server, &other));
                }
                Ok(Err(error)) => chart.unseen("servers-differ", "server", &error.to_string(), None),
                Err(error) => {
                    let why = "the relay reads the log through such a connection";
                    let finding = Finding::error("replication connection", error.to_string(), why);
                    let finding = match error.advice() {
                        Some(_) if error.sqlstate() == Some("53300") => {
                            let more = (server.number("max_wal_senders").unwrap_or(0) + 4).to_string();
                            finding.mends(super::parameters::set(server, "max_wal_senders", &more))
                        }
                        advice => finding.step(advice.unwrap_or("look into PostgreSQL's log")),
                    };
                    chart.check("replication-refused", [finding]);
                }
            }
        }
        if self.settings.postgres.replication_url.is_none() {
            return Ok(());
        }
        let commands = relay::postgres_target(self.settings)?;
        match connect::sql(&commands, &Session::new("outbox-relay doctor")).await {
            Ok(other) => {
                let state = seen(checks::server_state(&other.client).await, "servers-differ", "postgres.url", chart);
                if let Some(state) = state.flatten() {
                    chart.check("servers-differ", differ(server, &state.identity));
                }
            }
            Err(error) => {
                let why = "commands such as `outbox-relay migrate` go there";
                let finding = Finding::warning("postgres.url", error.to_string(), why);
                let advice = error.advice().unwrap_or("see that what postgres.url names runs and can be reached");
                chart.check("commands-refused", [finding.step(advice)]);
            }
        }
        Ok(())
    }

    /// Whether the tables can be read.
    async fn tables(&self, server: &Server, tables: &Tables, chart: &mut Chart) -> bool {
        chart.area("Tables");
        let (client, source) = (self.client, &self.settings.source);
        let grant =
            seen(grants::missing_on_schema(client, &source.table).await, "schema-usage", "schema", chart).flatten();
        let state = match (&grant, migrate::state(client, &source.table).await) {
            (None, Ok(state)) => state,
            (_, Err(MigrateError::Database { source: error, .. })) if grant.is_none() => {
                chart.unseen("schema-current", &source.table.plain(), &crate::postgres::describe(&error), None);
                return false;
            }
            (None, Err(error)) => {
                let finding = Finding::error(source.table.plain(), error.to_string(), "the relay refuses to start");
                chart.check("schema-current", [finding.command("outbox-relay migrate")]);
                return false;
            }
            (Some(grant), _) => {
                schema::judge_usage(Some(grant), &source.table.schema, chart);
                return false;
            }
        };
        schema::judge_usage(None, &source.table.schema, chart);
        if !schema::judge_state(&state, &source.table, chart) {
            return false;
        }
        let deletes =
            self.settings.writeback.on_success == OnSuccess::Delete || self.settings.reconcile.retention.is_some();
        let grants = grants::missing(client, tables, deletes, self.settings.compensation.enabled).await;
        let grants = seen(grants, "grants", "tables", chart);
        if let Some(grants) = &grants {
            schema::judge_grants(grants, chart);
        }
        let outbox = seen(Outbox::read(client, &source.table).await, "row-security", "tables", chart);
        match (&outbox, migrate::cold_indexes(client, &source.table).await) {
            (Some(outbox), Ok(cold)) => schema::judge(outbox, &cold, &server.role.name, self.settings, chart),
            (_, Err(error)) => chart.unseen("cold-index", "indexes", &error.to_string(), None),
            (None, Ok(_)) => {}
        }
        let checked = check_publication(client, &source.publication, &source.table).await;
        if let Some(checked) = seen(checked, "publication-missing", "publication", chart) {
            publication::judge(&checked, outbox.is_some_and(|outbox| outbox.may_publish), self.settings, chart);
        }
        grants.is_some_and(|grants| grants.is_empty())
    }

    async fn neighbours(&self, server: &Server, slot: Option<&SlotDetail>, chart: &mut Chart) {
        let read = Pins::read(self.client, &self.settings.source.slot, self.patience).await;
        if let Some(pins) = seen(read, "long-transaction", "sessions", chart) {
            pins::judge(&pins, server, self.settings, chart);
        }
        let (awaited, source) = (standbys::awaited(server), &self.settings.source);
        let read = Standbys::read(self.client, &awaited, &source.slot, server.role.sees_others).await;
        if let Some(found) = seen(read, "standby-slots", "standbys", chart) {
            standbys::judge(&found, slot, server, source, chart);
        }
    }

    async fn rows(&self, tables: &Tables, chart: &mut Chart) -> Option<Rows> {
        seen(Rows::read(self.client, tables, self.patience).await, "rows-waiting", "rows", chart)
    }
}

fn differ(server: &Server, identity: &str) -> Option<Finding> {
    (server.state.identity != identity).then(|| {
        let fault = ServerFault::Different(server.state.identity.clone(), identity.to_owned());
        server::found(&fault)
    })
}
