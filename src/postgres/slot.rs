//! Replication slots and publications.

pub mod detail;
pub mod published;
use std::fmt::{self, Display};

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::names::identifier;
use super::outbox::{COLUMNS, Tables};
use super::remedies;
use crate::config::{Source, TableName};
use crate::flow::lsn::Lsn;

/// A logical slot, as `pg_replication_slots` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotInfo {
    pub plugin: String,
    /// Whether the slot belongs to the database that the relay is connected to.
    pub here: bool,
    /// The backend that streams from it.
    pub active_pid: Option<i32>,
    /// `reserved`, `extended`, `unreserved` or `lost`.
    pub wal_status: String,
    pub confirmed: Lsn,
    /// Bytes of write-ahead log between the confirmed position and the end.
    pub lag_bytes: i64,
    /// Bytes of write-ahead log that the slot keeps.
    pub retained_bytes: i64,
    /// Bytes that may still be written before the slot is in danger; `None` when unlimited.
    pub safe_bytes: Option<i64>,
    /// The server's `max_slot_wal_keep_size` in bytes; `None` when unlimited.
    pub keep_bytes: Option<i64>,
}

impl SlotInfo {
    /// Whether the server has given the slot up: its changes are gone.
    pub fn is_lost(&self) -> bool {
        self.wal_status == "lost"
    }
}

/// Looks the slot up.
pub async fn slot_info(client: &Client, slot: &str) -> Result<Option<SlotInfo>, tokio_postgres::Error> {
    let statement = "SELECT coalesce(plugin, ''), coalesce(database = current_database(), false), active_pid,
           coalesce(wal_status, 'lost'), coalesce(confirmed_flush_lsn, '0/0')::text,
           coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn), 0)::int8,
           coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::int8, safe_wal_size,
           nullif(pg_size_bytes(current_setting('max_slot_wal_keep_size')), -1)
         FROM pg_replication_slots WHERE slot_name = $1";
    let Some(row) = client.query_typed(statement, &[(&slot, Type::TEXT)]).await?.into_iter().next() else {
        return Ok(None);
    };
    Ok(Some(SlotInfo {
        plugin: row.try_get(0)?,
        here: row.try_get(1)?,
        active_pid: row.try_get(2)?,
        wal_status: row.try_get(3)?,
        confirmed: row.try_get::<_, &str>(4)?.parse().unwrap_or(Lsn::ZERO),
        lag_bytes: row.try_get(5)?,
        retained_bytes: row.try_get(6)?,
        safe_bytes: row.try_get(7)?,
        keep_bytes: row.try_get(8)?,
    }))
}

/// Drops the slot. A slot that is gone already is no error.
pub async fn drop_slot(client: &Client, slot: &str) -> Result<(), tokio_postgres::Error> {
    match client.execute_typed("SELECT pg_drop_replication_slot($1)", &[(&slot, Type::NAME)]).await {
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_OBJECT) => Ok(()),
        other => other.map(|_| ()),
    }
}

/// The command that makes the slot, on a replication connection, and exports the snapshot that is its seam.
pub fn create_command(source: &Source, server_version: u32) -> String {
    let failover = if source.failover && server_version >= 170_000 { ", FAILOVER" } else { "" };
    format!("CREATE_REPLICATION_SLOT {} LOGICAL pgoutput (SNAPSHOT 'export'{failover})", identifier(&source.slot))
}

/// The command that holds the slot's name for as long as the replication connection lives: while rows are drained before
/// the slot itself is made, no other relay begins, and pollers rest.
pub fn reserve_command(source: &Source) -> String {
    format!("CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')", identifier(&source.slot))
}

/// The command that gives the name free again.
pub fn release_command(source: &Source) -> String {
    format!("DROP_REPLICATION_SLOT {}", identifier(&source.slot))
}

/// Ends a replication connection that waits: it does not notice that nobody waits for it any more.
pub async fn terminate(client: &Client, pid: i32) -> Result<(), tokio_postgres::Error> {
    client.execute_typed("SELECT pg_terminate_backend($1)", &[(&pid, Type::INT4)]).await.map(|_| ())
}

/// The end of the write-ahead log.
pub async fn current_wal(client: &Client) -> Result<Lsn, tokio_postgres::Error> {
    let row = client.query_typed("SELECT pg_current_wal_insert_lsn()::text", &[]).await?;
    let text = row.first().map(|row| row.try_get::<_, String>(0)).transpose()?;
    Ok(text.and_then(|text| text.parse().ok()).unwrap_or(Lsn::ZERO))
}

/// What keeps the relay from reading the outbox through a publication. Names are quoted; the text ends with the mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicationFault {
    /// Publication, table.
    Missing(String, String),
    NoInserts(String),
    /// Publication, table.
    NoTable(String, String),
    /// Publication, table.
    Partitions(String, String),
    /// Publication, table, columns.
    Columns(String, String, String),
}

impl PublicationFault {
    /// What is wrong.
    pub fn problem(&self) -> String {
        match self {
            Self::Missing(name, _) => format!("publication {name} does not exist"),
            Self::NoInserts(name) => format!("publication {name} does not publish inserts"),
            Self::NoTable(name, table) => format!("publication {name} does not include {table}"),
            Self::Partitions(name, table) => {
                format!("publication {name} names the partitions of {table} instead of the table")
            }
            Self::Columns(name, table, columns) => {
                format!("the column list of publication {name} leaves out {columns} of {table}")
            }
        }
    }

    /// The statement that mends it.
    pub fn mend(&self) -> String {
        match self {
            Self::Missing(name, table) => remedies::create_publication(name, table),
            Self::NoInserts(name) => remedies::publish_inserts(name),
            Self::NoTable(name, table) => format!("ALTER PUBLICATION {name} ADD TABLE {table}"),
            Self::Partitions(name, _) => format!("ALTER PUBLICATION {name} SET (publish_via_partition_root = true)"),
            Self::Columns(name, table, _) => remedies::publish_anew(name, table),
        }
    }
}

impl Display for PublicationFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let choice = match self {
            Self::Missing(..) => "let the relay create it (source.create = true) or ",
            _ => "",
        };
        write!(f, "{}; {choice}run: {}", self.problem(), self.mend())
    }
}

/// A publication that works, but shows more or less than it should. Names are quoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicationFlaw {
    /// Publication, table.
    AllTables(String, String),
    MoreThanInserts(String),
    /// Publication, table, other tables.
    OtherTables(String, String, String),
    /// Publication, table.
    RowFilter(String, String),
}

impl PublicationFlaw {
    /// What could be better.
    pub fn problem(&self) -> String {
        match self {
            Self::AllTables(name, _) => format!("publication {name} shows every table"),
            Self::MoreThanInserts(name) => format!("publication {name} shows more than inserts"),
            Self::OtherTables(name, table, others) => format!("publication {name} shows {others} beside {table}"),
            Self::RowFilter(name, table) => format!("publication {name} has a row filter on {table}"),
        }
    }

    /// What it costs.
    pub fn why(&self) -> &'static str {
        match self {
            Self::RowFilter(..) => "rows that it hides are left to other relays, this one never sends them",
            _ => "the relay passes over the rest, at the cost of decoding it",
        }
    }

    /// The statement that mends it.
    pub fn mend(&self) -> String {
        match self {
            Self::AllTables(name, table) => {
                format!("BEGIN; DROP PUBLICATION {name}; {}; COMMIT", remedies::create_publication(name, table))
            }
            Self::MoreThanInserts(name) => remedies::publish_inserts(name),
            Self::OtherTables(name, table, _) => format!("ALTER PUBLICATION {name} SET TABLE {table}"),
            Self::RowFilter(name, table) => remedies::publish_anew(name, table),
        }
    }
}

impl Display for PublicationFlaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; better is: {}", self.problem(), self.why(), self.mend())
    }
}

/// Checks that the publication shows the inserts of the outbox table. What it finds beside that are flaws.
pub async fn check_publication(
    client: &Client,
    name: &str,
    table: &TableName,
) -> Result<Result<Vec<PublicationFlaw>, PublicationFault>, tokio_postgres::Error> {
    let statement = "SELECT p.pubinsert, p.pubupdate OR p.pubdelete OR p.pubtruncate, p.pubviaroot, p.puballtables,
           c.relkind = 'p', t.attnames::text[], t.rowfilter IS NOT NULL,
           (SELECT string_agg(format('%I.%I', o.schemaname, o.tablename), ', ') FROM pg_publication_tables o
            WHERE o.pubname = p.pubname AND NOT p.puballtables
              AND NOT EXISTS (SELECT FROM pg_partition_tree(c.oid) t JOIN pg_class leaf ON leaf.oid = t.relid
                              JOIN pg_namespace n ON n.oid = leaf.relnamespace
                              WHERE n.nspname = o.schemaname AND leaf.relname = o.tablename)
              AND (o.schemaname, o.tablename) <> ($2, $3))
         FROM pg_publication p
         LEFT JOIN pg_publication_tables t ON t.pubname = p.pubname AND t.schemaname = $2 AND t.tablename = $3
         LEFT JOIN pg_class c ON c.relname = $3 AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $2)
         WHERE p.pubname = $1";
    let parameters: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
        [(&name, Type::TEXT), (&table.schema, Type::TEXT), (&table.table, Type::TEXT)];
    let rows = client.query_typed(statement, &parameters).await?;
    let (quoted, outbox) = (identifier(name), table.to_string());
    let Some(row) = rows.first() else {
        return Ok(Err(PublicationFault::Missing(quoted, outbox)));
    };
    let (inserts, more, via_root): (bool, bool, bool) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let (all_tables, partitioned): (bool, Option<bool>) = (row.try_get(3)?, row.try_get(4)?);
    let columns: Option<Vec<String>> = row.try_get(5)?;
    if !inserts {
        return Ok(Err(PublicationFault::NoInserts(quoted)));
    }
    if partitioned == Some(true) && !via_root {
        return Ok(Err(PublicationFault::Partitions(quoted, outbox)));
    }
    let Some(columns) = columns else {
        return Ok(Err(PublicationFault::NoTable(quoted, outbox)));
    };
    let left_out: Vec<&str> = COLUMNS.into_iter().filter(|name| !columns.iter().any(|column| column == name)).collect();
    if !left_out.is_empty() {
        return Ok(Err(PublicationFault::Columns(quoted, outbox, left_out.join(", "))));
    }
    let mut flaws = Vec::new();
    if all_tables {
        flaws.push(PublicationFlaw::AllTables(quoted.clone(), outbox.clone()));
    }
    // One that is made anew for the outbox alone shows inserts only.
    if more && !all_tables {
        flaws.push(PublicationFlaw::MoreThanInserts(quoted.clone()));
    }
    if let Some(others) = row.try_get(7)? {
        flaws.push(PublicationFlaw::OtherTables(quoted.clone(), outbox.clone(), others));
    }
    if row.try_get(6)? {
        flaws.push(PublicationFlaw::RowFilter(quoted, outbox));
    }
    Ok(Ok(flaws))
}

/// Makes the publication.
pub async fn create_publication(client: &Client, name: &str, table: &TableName) -> Result<(), tokio_postgres::Error> {
    client.batch_execute(&remedies::create_publication(&identifier(name), &table.to_string())).await
}

/// The statement that lets the connected role use the schema of the tables, when it may not.
pub async fn missing_schema_grant(client: &Client, table: &TableName) -> Result<Option<String>, tokio_postgres::Error> {
    let statement = "SELECT 'GRANT USAGE ON SCHEMA ' || quote_ident(nspname) || ' TO ' || quote_ident(current_user)
         FROM pg_namespace WHERE nspname = $1 AND NOT has_schema_privilege(oid, 'USAGE')";
    let rows = client.query_typed(statement, &[(&table.schema, Type::TEXT)]).await?;
    rows.first().map(|row| row.try_get(0)).transpose()
}

/// The privileges that the connected role lacks on the tables, as statements that grant them.
pub async fn missing_grants(
    client: &Client,
    tables: &Tables,
    delete: bool,
    compensate: bool,
) -> Result<Vec<String>, tokio_postgres::Error> {
    let delete = if delete { ", DELETE" } else { "" };
    // A dead letter may ask for a compensation, whoever sees to it.
    let compensate = if compensate { ", UPDATE" } else { "" };
    let wanted = [
        (&tables.events, format!("SELECT, UPDATE{delete}")),
        (&tables.dead_letter, "SELECT, INSERT".to_owned()),
        (&tables.state, "SELECT, INSERT, UPDATE".to_owned()),
        (&tables.compensation, format!("SELECT, INSERT{compensate}")),
    ];
    let mut grants = Vec::new();
    for (table, privileges) in wanted {
        let mut lacking = Vec::new();
        for privilege in privileges.split(", ") {
            let rows = client
                .query_typed(
                    "SELECT has_table_privilege($1, $2), quote_ident(current_user)",
                    &[(table, Type::TEXT), (&privilege, Type::TEXT)],
                )
                .await?;
            let has = rows.first().map(|row| row.try_get::<_, bool>(0)).transpose()?;
            if has != Some(true) {
                lacking.push(privilege);
            }
        }
        if !lacking.is_empty() {
            let user: String = client
                .query_typed("SELECT quote_ident(current_user)", &[])
                .await?
                .first()
                .map_or(Ok("CURRENT_USER".to_owned()), |row| row.try_get(0))?;
            grants.push(format!("GRANT {} ON {table} TO {user}", lacking.join(", ")));
        }
    }
    // Everyone may call a function, unless that was taken back, as deploy/sql/roles.sql does.
    let functions = "SELECT 'GRANT EXECUTE ON FUNCTION ' || p.oid::regprocedure || ' TO ' || quote_ident(current_user)
         FROM pg_proc p JOIN pg_class c ON c.relnamespace = p.pronamespace
         WHERE c.oid = to_regclass($1) AND p.proname IN ('outbox_relay_compensate', 'create_compensation')
           AND NOT has_function_privilege(p.oid, 'EXECUTE') ORDER BY p.proname DESC";
    for row in client.query_typed(functions, &[(&tables.events, Type::TEXT)]).await? {
        grants.push(row.try_get(0)?);
    }
    Ok(grants)
}
