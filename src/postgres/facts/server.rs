//! The server, its settings, and the connected role.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use crate::postgres::checks::{self, ServerState};

/// A service that runs PostgreSQL for its customers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Platform {
    /// Amazon RDS and Aurora.
    Rds,
    /// Google Cloud SQL.
    CloudSql,
    /// Azure Database for PostgreSQL, Flexible Server.
    Azure,
}

/// The role that is connected.
#[derive(Clone, Debug)]
pub struct Role {
    /// Quoted.
    pub name: String,
    pub superuser: bool,
    /// Most connections that the role may have; negative: no limit.
    pub connection_limit: i32,
    /// Seconds until its password expires.
    pub expires_in: Option<f64>,
    /// Whether it sees what other sessions do.
    pub sees_others: bool,
}

/// A database with the age of its oldest transaction id.
#[derive(Clone, Debug)]
pub struct OldDatabase {
    pub name: String,
    /// Whether it can be connected to.
    pub open: bool,
    /// Transactions.
    pub age: i32,
}

/// A server, as `doctor` looks at it.
#[derive(Clone, Debug)]
pub struct Server {
    pub state: ServerState,
    pub platform: Option<Platform>,
    pub role: Role,
    pub database: String,
    /// Most connections to the database; negative: no limit.
    pub database_limit: i32,
    /// `server_encoding`
    pub encoding: String,
    /// Replication slots of every kind and database.
    pub slots: i64,
    /// Sessions that stream the log.
    pub senders: i64,
    /// Sessions of clients.
    pub sessions: i64,
    /// The databases with the oldest transaction ids, the oldest first.
    pub oldest: Vec<OldDatabase>,
    /// Seconds by which the server's clock is ahead of ours.
    pub clock_ahead: f64,
    /// How long the question for the time took: the clocks cannot be compared better.
    pub clock_doubt: Duration,
    settings: BTreeMap<String, Setting>,
}

#[derive(Clone, Debug)]
struct Setting {
    value: String,
    unit: Option<String>,
    /// Whether it can be set without a restart.
    reloads: bool,
}

/// The settings that are looked at. Those that a version does not have are absent.
const NAMES: [&str; 18] = [
    "autovacuum",
    "autovacuum_freeze_max_age",
    "default_transaction_read_only",
    "idle_replication_slot_timeout",
    "idle_session_timeout",
    "max_connections",
    "max_replication_slots",
    "max_slot_wal_keep_size",
    "max_wal_senders",
    "output_plugin_libraries",
    "reserved_connections",
    "superuser_reserved_connections",
    "synchronized_standby_slots",
    "synchronous_commit",
    "synchronous_standby_names",
    "track_counts",
    "wal_level",
    "wal_sender_timeout",
];

impl Server {
    /// Asks. `None`: what answers is no PostgreSQL that the relay knows.
    pub async fn read(client: &Client) -> Result<Option<Self>, Error> {
        let Some(state) = checks::server_state(client).await? else { return Ok(None) };
        let settings = read_settings(client).await?;
        let asked = SystemTime::now();
        let now: f64 = one(client, "SELECT extract(epoch FROM clock_timestamp())::float8").await?;
        let clock_doubt = asked.elapsed().unwrap_or_default();
        let ours = asked.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() + clock_doubt / 2;
        let statement = "SELECT CASE
             WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_superuser') THEN 'rds'
             WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = 'cloudsqlsuperuser') THEN 'cloudsql'
             WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = 'azure_pg_admin') THEN 'azure' ELSE '' END,
           r.rolsuper, r.rolconnlimit,
           CASE WHEN isfinite(r.rolvaliduntil) THEN extract(epoch FROM r.rolvaliduntil - now())::float8 END,
           pg_has_role(r.oid, 'pg_read_all_stats', 'USAGE'), d.datname::text, d.datconnlimit,
           current_setting('server_encoding'), (SELECT count(*) FROM pg_replication_slots),
           (SELECT count(*) FROM pg_stat_replication),
           (SELECT coalesce(sum(numbackends), 0)::int8 FROM pg_stat_database)
         FROM pg_roles r, pg_database d WHERE r.rolname = current_user AND d.datname = current_database()";
        let Some(row) = client.query_typed(statement, &[]).await?.into_iter().next() else { return Ok(None) };
        Ok(Some(Self {
            platform: match row.try_get(0)? {
                "rds" => Some(Platform::Rds),
                "cloudsql" => Some(Platform::CloudSql),
                "azure" => Some(Platform::Azure),
                _ => None,
            },
            role: Role {
                name: state.role.clone(),
                superuser: row.try_get(1)?,
                connection_limit: row.try_get(2)?,
                expires_in: row.try_get(3)?,
                sees_others: row.try_get(4)?,
            },
            database: row.try_get(5)?,
            database_limit: row.try_get(6)?,
            encoding: row.try_get(7)?,
            slots: row.try_get(8)?,
            senders: row.try_get(9)?,
            sessions: row.try_get(10)?,
            oldest: oldest(client).await?,
            clock_ahead: now - ours.as_secs_f64(),
            clock_doubt,
            state,
            settings,
        }))
    }

    /// A setting as text; empty when the server has none of that name.
    pub fn text(&self, name: &str) -> &str {
        self.settings.get(name).map_or("", |setting| &setting.value)
    }

    /// Whether the server has such a setting.
    pub fn has(&self, name: &str) -> bool {
        self.settings.contains_key(name)
    }

    /// Whether a new value takes effect without a restart.
    pub fn reloads(&self, name: &str) -> bool {
        self.settings.get(name).is_some_and(|setting| setting.reloads)
    }

    /// A number: bytes where the setting is a size, milliseconds where it is a time. Negative where it means "no
    /// limit".
    pub fn number(&self, name: &str) -> Option<i64> {
        let setting = self.settings.get(name)?;
        let value: i64 = setting.value.parse().ok()?;
        let unit = match setting.unit.as_deref() {
            Some("kB") => 1 << 10,
            Some("MB") => 1 << 20,
            Some("s") => 1000,
            Some("min") => 60_000,
            _ => 1,
        };
        Some(if value < 0 { value } else { value.saturating_mul(unit) })
    }
}

async fn read_settings(client: &Client) -> Result<BTreeMap<String, Setting>, Error> {
    let statement = "SELECT name, setting, unit, context <> 'postmaster' FROM pg_settings WHERE name = ANY ($1)";
    let rows = client.query_typed(statement, &[(&NAMES.as_slice(), Type::TEXT_ARRAY)]).await?;
    rows.iter()
        .map(|row| {
            let setting = Setting { value: row.try_get(1)?, unit: row.try_get(2)?, reloads: row.try_get(3)? };
            Ok((row.try_get(0)?, setting))
        })
        .collect()
}

async fn oldest(client: &Client) -> Result<Vec<OldDatabase>, Error> {
    let statement =
        "SELECT datname::text, datallowconn, age(datfrozenxid) FROM pg_database ORDER BY 3 DESC, 1 LIMIT 10";
    let rows = client.query_typed(statement, &[]).await?;
    rows.iter()
        .map(|row| Ok(OldDatabase { name: row.try_get(0)?, open: row.try_get(1)?, age: row.try_get(2)? }))
        .collect()
}

async fn one(client: &Client, statement: &str) -> Result<f64, Error> {
    let rows = client.query_typed(statement, &[]).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.unwrap_or_default())
}
