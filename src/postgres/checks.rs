//! Whether a server and its tables are fit for the relay.

use tokio_postgres::Client;

use super::remedies;

/// The oldest PostgreSQL that the relay works with, as `server_version_num` counts.
const OLDEST: u32 = 150_000;
/// The session's own `wal_sender_timeout`, at most: a link that is half open is noticed by then on both sides.
const TIMEOUT_MS_MAX: u64 = 30_000;

/// What the relay needs to know of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerFacts {
    /// `server_version_num`, e.g. 180006.
    pub version: u32,
    /// Which cluster, and which run of it: another pair means another server, or one that was restarted.
    pub identity: String,
}

/// The server is not fit. Its text ends with the mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerFault {
    TooOld(String),
    WalLevel(String),
    Standby,
    /// The role.
    NoReplication(String),
    Different(String, String),
}

impl ServerFault {
    /// What is wrong.
    pub fn problem(&self) -> String {
        match self {
            Self::TooOld(name) => format!("PostgreSQL {name} is too old: the relay needs 15 or later"),
            Self::WalLevel(level) => {
                format!("wal_level is {level:?}, but a replication slot needs wal_level = logical")
            }
            Self::Standby => "the server is a standby; the relay writes to the outbox and needs the primary".to_owned(),
            Self::NoReplication(role) => format!("role {role} may not replicate"),
            Self::Different(sql, replication) => format!(
                "postgres.url and postgres.replication_url reach different servers ({sql} and {replication}): both \
                 must be the same primary"
            ),
        }
    }

    fn mend(&self) -> String {
        match self {
            Self::TooOld(_) | Self::Different(..) => String::new(),
            Self::WalLevel(_) => format!(
                "; run: {}; and restart PostgreSQL (managed services: rds.logical_replication = 1, \
                 cloudsql.logical_decoding = on)",
                remedies::set_parameter("wal_level", "logical")
            ),
            Self::Standby => ": name all hosts in postgres.url with target_session_attrs=read-write".to_owned(),
            Self::NoReplication(role) => {
                let (run, on_rds) = (remedies::let_replicate(role), remedies::let_replicate_on_rds(role));
                format!("; run: {run} (RDS: {on_rds})")
            }
        }
    }
}

impl std::fmt::Display for ServerFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.problem(), self.mend())
    }
}

/// The statement that tells a server's identity; works on both kinds of connection.
pub const IDENTITY: &str =
    "SELECT system_identifier::text || ' started ' || pg_postmaster_start_time()::text FROM pg_control_system()";

/// What a server says of itself, and of the connected role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerState {
    /// `server_version_num`, e.g. 180006.
    pub version: u32,
    /// As people write it.
    pub version_name: String,
    /// `wal_level` as it is in effect.
    pub wal_level: String,
    pub standby: bool,
    /// The role, quoted.
    pub role: String,
    /// Whether the role may replicate.
    pub replicates: bool,
    /// As [`ServerFacts::identity`].
    pub identity: String,
}

impl ServerState {
    /// All that keeps the relay from working with this server, the worst first.
    pub fn faults(&self) -> Vec<ServerFault> {
        // From 19 on, the level rises by itself when the first logical slot is made.
        let level_is_fit = self.wal_level == "logical" || (self.version >= 190_000 && self.wal_level == "replica");
        let mut faults = Vec::new();
        if self.version < OLDEST {
            faults.push(ServerFault::TooOld(self.version_name.clone()));
        }
        if self.standby {
            faults.push(ServerFault::Standby);
        }
        if !level_is_fit {
            faults.push(ServerFault::WalLevel(self.wal_level.clone()));
        }
        if !self.replicates {
            faults.push(ServerFault::NoReplication(self.role.clone()));
        }
        faults
    }
}

/// Asks the server behind a connection. `None`: it does not answer as PostgreSQL does.
pub async fn server_state(client: &Client) -> Result<Option<ServerState>, tokio_postgres::Error> {
    let statement = "SELECT current_setting('server_version_num')::int4, current_setting('server_version'),
           coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
           pg_is_in_recovery(), quote_ident(current_user),
           (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user)
             OR EXISTS (SELECT FROM pg_roles WHERE rolname IN ('rds_replication')
               AND pg_has_role(current_user, oid, 'MEMBER'))";
    let rows = client.query_typed(statement, &[]).await?;
    let identity = client.query_typed(IDENTITY, &[]).await?;
    let (Some(row), Some(identity)) = (rows.first(), identity.first()) else { return Ok(None) };
    Ok(Some(ServerState {
        version: u32::try_from(row.try_get::<_, i32>(0)?).unwrap_or(0),
        version_name: row.try_get(1)?,
        wal_level: row.try_get(2)?,
        standby: row.try_get(3)?,
        role: row.try_get(4)?,
        replicates: row.try_get::<_, Option<bool>>(5)?.unwrap_or(false),
        identity: identity.try_get(0)?,
    }))
}

/// Checks the server behind a connection.
pub async fn check_server(client: &Client) -> Result<Result<ServerFacts, ServerFault>, tokio_postgres::Error> {
    let Some(state) = server_state(client).await? else {
        return Ok(Err(ServerFault::TooOld("that does not tell its version".to_owned())));
    };
    Ok(match state.faults().into_iter().next() {
        Some(fault) => Err(fault),
        None => Ok(ServerFacts { version: state.version, identity: state.identity }),
    })
}

/// Statements for the replication connection: what `wal_sender_timeout` is, in milliseconds, and how to bound it.
pub const SENDER_TIMEOUT: &str = "SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'";

/// The bound for a `wal_sender_timeout` of `setting` milliseconds (zero: off), and the command that sets it, if needed.
pub fn bounded_timeout(setting: &str) -> (std::time::Duration, Option<String>) {
    let now = setting.parse().unwrap_or(0);
    let bounded = if now == 0 { TIMEOUT_MS_MAX } else { TIMEOUT_MS_MAX.min(now) };
    let command = (bounded != now).then(|| format!("SET wal_sender_timeout = {bounded}"));
    (std::time::Duration::from_millis(bounded), command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_timeout_is_bounded_and_never_off() {
        assert_eq!(bounded_timeout("0").0.as_secs(), 30);
        assert_eq!(bounded_timeout("60000").1.as_deref(), Some("SET wal_sender_timeout = 30000"));
        assert_eq!(bounded_timeout("5000"), (std::time::Duration::from_secs(5), None));
    }
}
