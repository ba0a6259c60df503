//! Whether a server and its tables are fit for the relay.

use tokio_postgres::Client;

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

/// The server is not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ServerFault {
    #[error("PostgreSQL {0} is too old: the relay needs 15 or later")]
    TooOld(String),
    #[error(
        "wal_level is {0:?}, but a replication slot needs wal_level = logical; run: ALTER SYSTEM SET wal_level = \
         'logical'; and restart PostgreSQL (managed services: rds.logical_replication = 1, cloudsql.logical_decoding = on)"
    )]
    WalLevel(String),
    #[error(
        "the server is a standby; the relay writes to the outbox and needs the primary: name all hosts in postgres.url \
         with target_session_attrs=read-write"
    )]
    Standby,
    #[error("role {0} may not replicate; run: ALTER ROLE {0} REPLICATION (RDS: GRANT rds_replication TO {0})")]
    NoReplication(String),
    #[error(
        "postgres.url and postgres.replication_url reach different servers ({0} and {1}): both must be the same primary"
    )]
    Different(String, String),
}

/// The statement that tells a server's identity; works on both kinds of connection.
pub const IDENTITY: &str =
    "SELECT system_identifier::text || ' started ' || pg_postmaster_start_time()::text FROM pg_control_system()";

/// Checks the server behind a connection.
pub async fn check_server(client: &Client) -> Result<Result<ServerFacts, ServerFault>, tokio_postgres::Error> {
    let statement = "SELECT current_setting('server_version_num')::int4, current_setting('server_version'),
           coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
           pg_is_in_recovery(), quote_ident(current_user),
           (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user)
             OR EXISTS (SELECT FROM pg_roles WHERE rolname IN ('rds_replication')
               AND pg_has_role(current_user, oid, 'MEMBER'))";
    let rows = client.query_typed(statement, &[]).await?;
    let identity = client.query_typed(IDENTITY, &[]).await?;
    let (Some(row), Some(identity)) = (rows.first(), identity.first()) else {
        return Ok(Err(ServerFault::TooOld("that does not tell its version".to_owned())));
    };
    let version = u32::try_from(row.try_get::<_, i32>(0)?).unwrap_or(0);
    let (name, wal_level): (String, String) = (row.try_get(1)?, row.try_get(2)?);
    let (standby, user): (bool, String) = (row.try_get(3)?, row.try_get(4)?);
    let replicates = row.try_get::<_, Option<bool>>(5)?.unwrap_or(false);
    // From 19 on, the level rises by itself when the first logical slot is made.
    let level_is_fit = wal_level == "logical" || (version >= 190_000 && wal_level == "replica");
    Ok(if version < OLDEST {
        Err(ServerFault::TooOld(name))
    } else if standby {
        Err(ServerFault::Standby)
    } else if !level_is_fit {
        Err(ServerFault::WalLevel(wal_level))
    } else if !replicates {
        Err(ServerFault::NoReplication(user))
    } else {
        Ok(ServerFacts { version, identity: identity.try_get(0)? })
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
