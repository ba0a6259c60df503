//! Connections to PostgreSQL: the ordinary kind and the replication kind, dialled, encrypted and authenticated by one
//! piece of code, so that no setting can be lost on one of them.
//!
//! ```text
//! conninfo ─▶ target ─▶ dial ─▶ tls ─▶ startup ─┬─▶ SqlConnection (tokio_postgres over Handover)
//!  (text)    (libpq's   (hosts)      (login)    └─▶ ReplicationConnection (a bare stream)
//!             meaning)
//! ```

mod certificate;
mod conninfo;
mod dial;
mod error;
mod parameters;
mod pgpass;
mod socket;
mod startup;
mod target;
mod tls;

use std::collections::HashMap;
use std::time::Duration;

use bytes::BytesMut;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::config::SslMode;
use tokio_postgres::tls::NoTlsStream;
use tokio_postgres::{AsyncMessage, Client, NoTls};

pub use conninfo::ConnectInfoError;
pub use error::{ConnectError, ConnectErrorKind};
pub use socket::Socket;
pub use target::Target;

use super::describe;
use dial::Dialled;
use socket::Handover;

const NO_POOLER: &str = "if a pooler stands in between, let postgres.replication_url lead to PostgreSQL itself";

/// What a session says about itself and how the server should treat it.
#[derive(Clone, Debug, Default)]
pub struct Session {
    /// Shown in `pg_stat_activity`, unless the connection string names another.
    pub application_name: String,
    /// Server settings for this session, as (`wal_sender_timeout`, `30s`). They are sent at startup. A pooler in front
    /// of an ordinary connection may refuse them: prefer `SET LOCAL` there.
    pub options: Vec<(String, String)>,
}

impl Session {
    /// A session without settings.
    pub fn new(application_name: impl Into<String>) -> Self {
        Self { application_name: application_name.into(), options: Vec::new() }
    }

    /// Adds a server setting.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.options.push((name.into(), value.into()));
        self
    }
}

/// A connection for statements.
#[derive(Debug)]
pub struct SqlConnection {
    /// Statements go through this.
    pub client: Client,
    /// Moves the bytes; ends with the connection.
    pub driver: Driver,
    /// The server process, as `pg_stat_activity.pid`.
    pub backend_pid: i32,
    /// What the server reported at login, as `server_version` and `in_hot_standby`.
    pub parameters: HashMap<String, String>,
}

impl SqlConnection {
    /// Says goodbye to the server. Dropping the connection closes it too, without the goodbye.
    pub async fn close(self) {
        let Self { client, mut driver, .. } = self;
        drop(client);
        // The driver sends Terminate when the last client is gone. A peer that does not take it is left.
        let _ = tokio::time::timeout(Duration::from_secs(1), &mut driver.task).await;
    }
}

/// The task behind a [`SqlConnection`]. Dropping it ends the task and with it the connection.
#[derive(Debug)]
pub struct Driver {
    task: JoinHandle<()>,
    ended: watch::Receiver<Option<String>>,
}

impl Driver {
    /// Waits until the connection is gone and says why. Cancel-safe; may be called again.
    pub async fn closed(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "the connection's task ended".to_owned(),
        }
    }

    /// Gives the connection up without a word to the server: every statement that waits for an answer fails.
    pub fn abandon(&self) {
        self.task.abort();
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A connection in replication mode, ready for `START_REPLICATION` and its kind. Only simple queries work on it.
#[derive(Debug)]
pub struct ReplicationConnection {
    /// The bytes to and from the server.
    pub stream: Socket,
    /// The WAL sender process, as `pg_stat_replication.pid`.
    pub backend_pid: i32,
    /// What the server reported at login, as `server_version`.
    pub parameters: HashMap<String, String>,
    /// Bytes received from `stream` and not yet read: they come before what `stream` gives. Mostly empty.
    pub buffered: BytesMut,
    /// The cluster that answers, from `IDENTIFY_SYSTEM`.
    pub system: SystemIdentity,
}

/// Which cluster a connection reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemIdentity {
    /// The same on a primary and all its standbys, as `pg_control_system().system_identifier`.
    pub identifier: String,
    /// Goes up by one with each promotion.
    pub timeline: u32,
}

/// Opens a connection for statements.
///
/// # Errors
/// See [`ConnectErrorKind`].
pub async fn sql(target: &Target, session: &Session) -> Result<SqlConnection, ConnectError> {
    // Only what PgBouncer also takes; the relay's tables hold neither intervals nor floats.
    let dialled = open(target, session, &[]).await?;
    let greeting = dialled.ready.greeting();
    let (backend_pid, parameters) = (dialled.ready.backend_pid, dialled.ready.parameters);
    let stream = Handover::new(dialled.ready.wire.socket, greeting);
    // Encryption and authentication are behind us: what is set here is swallowed by the handover.
    let mut config = tokio_postgres::Config::new();
    config.user(&target.user).ssl_mode(SslMode::Disable);
    let (client, connection) = config
        .connect_raw(stream, NoTls)
        .await
        .map_err(|error| ConnectError::new(ConnectErrorKind::Protocol, error.to_string()).at(&dialled.place))?;
    let (end, ended) = watch::channel(None);
    let task = tokio::spawn(async move {
        let reason = drive(connection).await;
        tracing::debug!(backend_pid, reason, "a PostgreSQL connection ended");
        end.send_replace(Some(reason));
    });
    Ok(SqlConnection { client, driver: Driver { task, ended }, backend_pid, parameters })
}

/// Opens a connection in replication mode (`replication=database`).
///
/// # Errors
/// See [`ConnectErrorKind`]; [`ConnectErrorKind::Pooler`] when what answers does not speak the replication protocol.
pub async fn replication(target: &Target, session: &Session) -> Result<ReplicationConnection, ConnectError> {
    const OPEN: &[(&str, &str)] =
        &[("replication", "database"), ("IntervalStyle", "postgres"), ("extra_float_digits", "3")];
    let dialled = open(target, session, OPEN).await.map_err(|error| {
        // PostgreSQL itself gives a reason that is known above; some poolers have words of their own.
        if error.kind() == ConnectErrorKind::Server { error.hint(NO_POOLER) } else { error }
    })?;
    let (mut ready, place) = (dialled.ready, dialled.place);
    let identity = async {
        let rows = ready.wire.query("IDENTIFY_SYSTEM").await?;
        identity(&rows).ok_or_else(|| pooler("the answer to IDENTIFY_SYSTEM has no system identifier"))
    };
    let limit = target.connect_timeout.unwrap_or(Duration::MAX);
    let system = match tokio::time::timeout(limit, identity).await {
        Ok(Ok(system)) => system,
        // A syntax error: the statement went to an ordinary session, so someone dropped `replication=database`.
        Ok(Err(error)) if error.sqlstate() == Some("42601") => return Err(pooler(&error.to_string()).at(place)),
        Ok(Err(error)) => return Err(error.at(place)),
        Err(_) => {
            return Err(ConnectError::new(ConnectErrorKind::Unreachable, "no answer to IDENTIFY_SYSTEM").at(place));
        }
    };
    Ok(ReplicationConnection {
        backend_pid: ready.backend_pid,
        parameters: ready.parameters,
        stream: ready.wire.socket,
        buffered: ready.wire.input,
        system,
    })
}

/// Opens a session that speaks UTF-8. A database whose encoding is SQL_ASCII converts nothing, and an answer with one
/// byte that is not UTF-8 would be an error in the place of all its rows: there the bytes come as they are.
async fn open(target: &Target, session: &Session, more: &[(&str, &str)]) -> Result<Dialled, ConnectError> {
    const PLAIN: &str = "SQL_ASCII";
    let dialled = dial::dial(target, &startup_parameters(target, session, "UTF8", more)).await?;
    if dialled.ready.parameters.get("server_encoding").is_none_or(|encoding| encoding != PLAIN) {
        return Ok(dialled);
    }
    // Not by SET: a pooler would let the next one have the session as it was left.
    dial::dial(target, &startup_parameters(target, session, PLAIN, more)).await
}

fn startup_parameters<'a>(
    target: &'a Target,
    session: &'a Session,
    encoding: &'a str,
    more: &[(&'a str, &'a str)],
) -> Vec<(&'a str, &'a str)> {
    let mut parameters = vec![
        ("user", target.user.as_str()),
        ("database", target.database.as_str()),
        ("client_encoding", encoding),
        ("DateStyle", "ISO"),
        ("TimeZone", "UTC"),
    ];
    parameters.extend_from_slice(more);
    let name = target.application_name.as_deref().unwrap_or(&session.application_name);
    if !name.is_empty() {
        parameters.push(("application_name", name));
    }
    if let Some(options) = &target.options {
        parameters.push(("options", options));
    }
    parameters.extend(session.options.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    parameters
}

fn identity(rows: &[Vec<Option<String>>]) -> Option<SystemIdentity> {
    let row = rows.first()?;
    Some(SystemIdentity { identifier: row.first()?.clone()?, timeline: row.get(1)?.as_deref()?.parse().ok()? })
}

fn pooler(what: &str) -> ConnectError {
    ConnectError::new(ConnectErrorKind::Pooler, format!("no replication protocol here: {what}")).hint(NO_POOLER)
}

async fn drive(mut connection: tokio_postgres::Connection<Handover, NoTlsStream>) -> String {
    loop {
        match std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            // Not the text: a trigger may have put a row's values there.
            Some(Ok(AsyncMessage::Notice(notice))) => {
                tracing::debug!(
                    severity = notice.severity(),
                    sqlstate = notice.code().code(),
                    "a notice from PostgreSQL"
                );
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => return describe(&error),
            None => return "closed".to_owned(),
        }
    }
}
