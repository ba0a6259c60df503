//! What went wrong on the way to a PostgreSQL session, and whether to try again.

use std::fmt;
use std::io;

use postgres_protocol::message::backend::{ErrorFields, ErrorResponseBody};
use tokio_postgres::fallible_iterator::FallibleIterator;

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectErrorKind {
    /// No route, no listener, no answer in time, a name that does not resolve, or a connection that broke.
    Unreachable,
    /// 57P03: the server starts up, or waits for recovery.
    StartingUp,
    /// 57P01, 57P02: the server goes down, or an administrator ended the session.
    ShuttingDown,
    /// Class 53: no connection, memory or WAL sender is left.
    TooManyConnections,
    /// Every host answered, but none is what `target_session_attrs` asks for.
    NoSuitableHost,
    /// The password is missing or wrong.
    Password,
    /// 28000: `pg_hba.conf`, or the role itself, does not admit the session.
    NotAdmitted,
    /// 42501: the role lacks a privilege, as REPLICATION.
    Privilege,
    /// 3D000: the database does not exist.
    Database,
    /// Authentication that the relay cannot or must not do.
    Authentication,
    /// Encryption is missing, or a certificate was refused.
    Tls,
    /// A pooler stands in the way of a replication connection.
    Pooler,
    /// A file that the settings name cannot be used.
    Settings,
    /// The peer does not speak PostgreSQL's protocol.
    Protocol,
    /// The server refused for another reason.
    Server,
}

impl ConnectErrorKind {
    /// Whether waiting may help.
    pub fn is_transient(self) -> bool {
        matches!(
            self,
            Self::Unreachable | Self::StartingUp | Self::ShuttingDown | Self::TooManyConnections | Self::NoSuitableHost
        )
    }
}

/// A connection that failed: where, why, and what to do. It never holds a password.
#[derive(Debug, Clone)]
pub struct ConnectError {
    kind: ConnectErrorKind,
    place: String,
    what: String,
    hint: Option<String>,
    sqlstate: Option<String>,
}

impl ConnectError {
    pub(super) fn new(kind: ConnectErrorKind, what: impl Into<String>) -> Self {
        Self { kind, place: String::new(), what: what.into(), hint: None, sqlstate: None }
    }

    #[must_use]
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Says where: `host:port (user "u", database "d")`.
    #[must_use]
    pub(super) fn at(mut self, place: impl Into<String>) -> Self {
        self.place = place.into();
        self
    }

    /// Why, for the caller to decide by.
    pub fn kind(&self) -> ConnectErrorKind {
        self.kind
    }

    /// Whether waiting may help.
    pub fn is_transient(&self) -> bool {
        self.kind.is_transient()
    }

    /// What the operator can do about it.
    pub fn advice(&self) -> Option<&str> {
        let usual = (self.kind == ConnectErrorKind::Unreachable)
            .then_some("see that the server runs and can be reached, and that postgres.url (or DATABASE_URL) names it");
        self.hint.as_deref().or(usual)
    }

    /// The server's code, when the server refused.
    pub fn sqlstate(&self) -> Option<&str> {
        self.sqlstate.as_deref()
    }

    /// Joins what several hosts answered; the kind is that of the last one.
    pub(super) fn join(mut errors: Vec<Self>) -> Option<Self> {
        let last = errors.pop()?;
        if errors.is_empty() {
            return Some(last);
        }
        let mut parts: Vec<String> = errors.iter().map(|error| format!("{}: {}", error.place, error.what)).collect();
        parts.push(format!("{}: {}", last.place, last.what));
        Some(Self { place: "any host".to_owned(), what: parts.join("; "), ..last })
    }

    /// A socket's error; a broken TLS session is told apart from a broken line.
    pub(super) fn io(during: &str, error: &io::Error) -> Self {
        if let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
            return super::tls::explain(tls);
        }
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Self::new(ConnectErrorKind::Unreachable, format!("the server closed the connection {during}"))
            }
            io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => Self::protocol(error),
            _ => Self::new(ConnectErrorKind::Unreachable, format!("the connection broke {during}: {error}")),
        }
    }

    pub(super) fn protocol(detail: impl fmt::Display) -> Self {
        let detail = quoted(&detail.to_string());
        Self::new(ConnectErrorKind::Protocol, format!("the peer does not speak PostgreSQL's protocol: {detail}"))
            .hint("does the address belong to a PostgreSQL server?")
    }

    /// An ErrorResponse. Before authentication its text comes from a stranger, so it is cut and cleaned.
    pub(super) fn server(body: &ErrorResponseBody) -> Self {
        let (code, message) = code_and_message(body.fields());
        let (kind, hint) = sort(&code, &message);
        Self {
            kind,
            place: String::new(),
            what: format!("{message} (SQLSTATE {code})"),
            hint: hint.map(str::to_owned),
            sqlstate: Some(code),
        }
    }
}

/// SQLSTATE and primary message of an error or a notice.
pub(super) fn code_and_message(mut fields: ErrorFields<'_>) -> (String, String) {
    let (mut code, mut message) = (String::new(), String::new());
    while let Ok(Some(field)) = fields.next() {
        match field.type_() {
            b'C' => code = clean(&String::from_utf8_lossy(field.value_bytes())),
            b'M' => message = clean(&String::from_utf8_lossy(field.value_bytes())),
            _ => {}
        }
    }
    (code, message)
}

/// The meaning of a server's refusal at login.
fn sort(code: &str, message: &str) -> (ConnectErrorKind, Option<&'static str>) {
    use ConnectErrorKind as Kind;
    match code {
        "57P03" => (Kind::StartingUp, None),
        "57P01" | "57P02" => (Kind::ShuttingDown, None),
        "53300" if message.contains("standby") => (Kind::TooManyConnections, Some("raise max_wal_senders")),
        _ if code.starts_with("53") => (Kind::TooManyConnections, Some("raise max_connections or close sessions")),
        "28P01" => (
            Kind::Password,
            Some("check user and password (postgres.url, postgres.password_file, PGPASSWORD, .pgpass)"),
        ),
        "28000" if message.contains("pg_hba") => (
            Kind::NotAdmitted,
            Some(
                "add a line for this user, database and address to pg_hba.conf and reload (a logical replication \
                 connection matches the database's name, not the word `replication`; `no encryption` means that \
                 sslmode matters)",
            ),
        ),
        "28000" if message.contains("client certificate") => (Kind::NotAdmitted, Some("set sslcert and sslkey")),
        "28000" => (Kind::NotAdmitted, Some("check that the role exists and may log in")),
        "42501" => (
            Kind::Privilege,
            Some(
                "ALTER ROLE … WITH REPLICATION as a superuser (RDS: GRANT rds_replication), and GRANT CONNECT on the \
                 database",
            ),
        ),
        "3D000" => (Kind::Database, Some("check the database's name in postgres.url")),
        // PgBouncer's words for a parameter that it does not pass on.
        _ if message.contains("unsupported startup parameter") => (
            Kind::Pooler,
            Some(
                "a pooler answers here: let postgres.replication_url lead to PostgreSQL itself (for other parameters: \
                 ignore_startup_parameters of PgBouncer)",
            ),
        ),
        // 08: connection exceptions, which proxies and poolers send when their own server is away.
        _ if code.starts_with("08") => (Kind::Unreachable, None),
        _ => (Kind::Server, None),
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot connect to PostgreSQL at {}: {}", self.place, self.what)?;
        match self.advice() {
            Some(hint) => write!(f, "; {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConnectError {}

/// Text from outside in quotes, safe to print.
pub(super) fn quoted(text: &str) -> String {
    format!("\"{}\"", clean(text))
}

fn clean(text: &str) -> String {
    const LONGEST: usize = 500;
    text.chars().take(LONGEST).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
