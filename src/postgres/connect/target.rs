//! Where to connect and how: a connection string with libpq's meaning, filled up from the environment.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conninfo::ConnectInfoError;
use super::error::quoted;
use super::parameters::{Environment, Values, bad};
use crate::config::Secret;

/// One or more PostgreSQL servers, a user and a database, and everything that decides how to reach them.
///
/// Its `Debug` form is [`Target::describe`], which holds no secret.
#[derive(Clone)]
pub struct Target {
    pub(super) hosts: Vec<Host>,
    pub(super) user: String,
    pub(super) database: String,
    pub(super) password: Option<Secret>,
    pub(super) passfile: Option<PathBuf>,
    pub(super) application_name: Option<String>,
    pub(super) options: Option<String>,
    pub(super) tls: Tls,
    pub(super) channel_binding: ChannelBinding,
    /// For one address, from the first packet to the server's readiness. `None`: no limit.
    pub(super) connect_timeout: Option<Duration>,
    pub(super) session: SessionAttrs,
    pub(super) shuffle: bool,
    pub(super) tcp: Tcp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    pub place: Place,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The directory of a Unix socket.
    Unix(PathBuf),
    /// A host's name, or an address in its place.
    Tcp { name: String, address: Option<IpAddr> },
}

/// TLS settings. Files are read at each connection, so that renewed certificates are taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tls {
    pub mode: SslMode,
    pub roots: Roots,
    /// Certificate chain and key; a `Some` names files that must be there.
    pub client: Option<(PathBuf, PathBuf)>,
    /// TLS from the first byte, without asking PostgreSQL for it.
    pub direct: bool,
    pub send_name: bool,
    pub only_1_3: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Roots {
    /// Nothing to verify with; the path is where libpq would look.
    None(Option<PathBuf>),
    File(PathBuf),
    System,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChannelBinding {
    Disable,
    Prefer,
    Require,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionAttrs {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

impl SessionAttrs {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::ReadWrite => "read-write",
            Self::ReadOnly => "read-only",
            Self::Primary => "primary",
            Self::Standby => "standby",
            Self::PreferStandby => "prefer-standby",
        }
    }
}

/// Bounds for a peer that no longer answers. The defaults are ours: with the system's a dead link lives for hours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tcp {
    pub keepalives: bool,
    /// `None`: the system's default.
    pub idle: Option<Duration>,
    pub interval: Option<Duration>,
    pub count: Option<u32>,
    pub user_timeout: Option<Duration>,
}

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_COUNT: u32 = 3;
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Where Debian's and Red Hat's servers put their sockets.
const SOCKET_DIRECTORY: &str = "/var/run/postgresql";

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Target {
    /// Reads a connection string as libpq does: a `postgres://` URL or `key=value` pairs. `password` wins over one in
    /// the string. What is absent comes from libpq's `PG*` variables and its defaults; the password at last from
    /// `.pgpass`, which is read at each connection.
    ///
    /// Differences from libpq: a connection takes at most 10 s an address unless `connect_timeout` says otherwise;
    /// with several hosts `target_session_attrs` is `read-write` by default; TCP keepalives and `tcp_user_timeout` are
    /// short by default; a named `sslrootcert` that is missing is an error in every `sslmode`.
    ///
    /// # Errors
    /// A malformed string, an unknown parameter or a value that a parameter cannot take. The message never holds the
    /// password.
    pub fn parse(conninfo: &str, password: Option<&str>) -> Result<Self, ConnectInfoError> {
        let environment = Environment {
            variable: &|name| std::env::var(name).ok(),
            os_user: whoami::username().ok(),
            home: std::env::home_dir(),
        };
        Self::parse_in(conninfo, password, &environment)
    }

    /// The servers, user and database, without a secret: `user "relay", database "shop" at db1:5432, db2:5432`.
    pub fn describe(&self) -> String {
        let hosts: Vec<String> = self.hosts.iter().map(Host::describe).collect();
        format!("user {}, database {} at {}", quoted(&self.user), quoted(&self.database), hosts.join(", "))
    }

    /// The database's name.
    pub fn database(&self) -> &str {
        &self.database
    }

    /// What its sessions call themselves, when the address says so.
    pub fn application_name(&self) -> Option<&str> {
        self.application_name.as_deref()
    }

    /// The role's name.
    pub fn user(&self) -> &str {
        &self.user
    }

    pub(super) fn parse_in(
        conninfo: &str,
        password: Option<&str>,
        environment: &Environment,
    ) -> Result<Self, ConnectInfoError> {
        let values = Values::read(conninfo, environment)?;
        if (environment.variable)("PGSERVICE").is_some_and(|service| !service.is_empty()) {
            tracing::warn!("PGSERVICE is set, and service files are not supported: it is ignored");
        }
        let home = environment.home.as_deref();
        let hosts = hosts(&values)?;
        let user = values
            .text("user")
            .or_else(|| environment.os_user.clone())
            .ok_or_else(|| ConnectInfoError::new("no user: name one in the connection string or in PGUSER"))?;
        values.refuse_unless("client_encoding", &["utf8", "utf-8", "unicode", "auto"])?;
        values.refuse_unless("gssencmode", &["disable", "prefer"])?;
        let session = match values.text("target_session_attrs").as_deref() {
            None if hosts.len() > 1 => SessionAttrs::ReadWrite,
            None | Some("any") => SessionAttrs::Any,
            Some("read-write") => SessionAttrs::ReadWrite,
            Some("read-only") => SessionAttrs::ReadOnly,
            Some("primary") => SessionAttrs::Primary,
            Some("standby") => SessionAttrs::Standby,
            Some("prefer-standby") => SessionAttrs::PreferStandby,
            Some(other) => {
                return Err(bad(
                    "target_session_attrs",
                    other,
                    "any, read-write, read-only, primary, standby or prefer-standby",
                ));
            }
        };
        let password = password.map(str::to_owned).or_else(|| values.text("password"));
        Ok(Self {
            session,
            hosts,
            database: values.text("dbname").unwrap_or_else(|| user.clone()),
            user,
            password: password.filter(|password| !password.is_empty()).map(Secret),
            passfile: values.text("passfile").map(PathBuf::from).or_else(|| home.map(|home| home.join(".pgpass"))),
            application_name: values.text("application_name"),
            options: values.text("options"),
            channel_binding: values.one_of(
                "channel_binding",
                &[
                    ("prefer", ChannelBinding::Prefer),
                    ("require", ChannelBinding::Require),
                    ("disable", ChannelBinding::Disable),
                ],
            )?,
            connect_timeout: match values.number::<i64>("connect_timeout")? {
                None => Some(CONNECT_TIMEOUT),
                Some(seconds) => u64::try_from(seconds).ok().filter(|s| *s > 0).map(Duration::from_secs),
            },
            shuffle: values.one_of("load_balance_hosts", &[("disable", false), ("random", true)])?,
            tls: tls(&values, home)?,
            tcp: tcp(&values)?,
        })
    }
}

impl Host {
    /// `host:port`, `[address]:port` or the path of the socket.
    pub(super) fn describe(&self) -> String {
        match &self.place {
            Place::Unix(_) => self.socket().display().to_string(),
            Place::Tcp { name, .. } if name.contains(':') => format!("[{name}]:{}", self.port),
            Place::Tcp { name, .. } => format!("{name}:{}", self.port),
        }
    }

    /// The path of the socket; empty for TCP.
    pub(super) fn socket(&self) -> PathBuf {
        match &self.place {
            Place::Unix(directory) => directory.join(format!(".s.PGSQL.{}", self.port)),
            Place::Tcp { .. } => PathBuf::new(),
        }
    }

    /// What this host is called in `.pgpass`.
    pub(super) fn pgpass_name(&self) -> String {
        match &self.place {
            Place::Unix(directory) if directory == Path::new(SOCKET_DIRECTORY) => "localhost".to_owned(),
            Place::Unix(directory) => directory.display().to_string(),
            Place::Tcp { name, .. } => name.clone(),
        }
    }
}

/// Hosts, addresses and ports are lists of one length; a single port serves all.
fn hosts(values: &Values) -> Result<Vec<Host>, ConnectInfoError> {
    let list = |key: &str| -> Vec<String> {
        values.text(key).map_or_else(Vec::new, |text| text.split(',').map(|part| part.trim().to_owned()).collect())
    };
    let (names, addresses, ports) = (list("host"), list("hostaddr"), list("port"));
    let count = names.len().max(addresses.len()).max(1);
    if !names.is_empty() && !addresses.is_empty() && names.len() != addresses.len() {
        return Err(ConnectInfoError::new(format!(
            "`host` names {} hosts and `hostaddr` {}: the lists must be of one length",
            names.len(),
            addresses.len()
        )));
    }
    if ports.len() > 1 && ports.len() != count {
        return Err(ConnectInfoError::new(format!(
            "{} ports for {count} hosts: give one, or one for each",
            ports.len()
        )));
    }
    let part = |list: &[String], index: usize| list.get(index).filter(|text| !text.is_empty()).cloned();
    (0..count)
        .map(|index| {
            let text = if ports.len() == 1 { part(&ports, 0) } else { part(&ports, index) };
            let port = text.map_or(Ok(5432), |text| match text.parse::<u16>() {
                Ok(port) if port > 0 => Ok(port),
                _ => Err(ConnectInfoError::new("the connection parameter `port` takes numbers from 1 to 65535")),
            })?;
            Ok(Host { place: place(part(&names, index), part(&addresses, index))?, port })
        })
        .collect()
}

fn place(name: Option<String>, address: Option<String>) -> Result<Place, ConnectInfoError> {
    let address = address
        .map(|text| text.parse::<IpAddr>().map_err(|_| bad("hostaddr", &text, "IP addresses without brackets")))
        .transpose()?;
    match (name, address) {
        (Some(name), Some(address)) => Ok(Place::Tcp { name, address: Some(address) }),
        (None, Some(address)) => Ok(Place::Tcp { name: address.to_string(), address: Some(address) }),
        (Some(name), None) if name.starts_with('/') => Ok(Place::Unix(name.into())),
        (Some(name), None) if name.starts_with('@') => Err(bad("host", &name, "a name, an address or a directory")),
        (Some(name), None) => {
            let address = name.parse().ok();
            Ok(Place::Tcp { name, address })
        }
        (None, None) if cfg!(unix) && Path::new(SOCKET_DIRECTORY).is_dir() => Ok(Place::Unix(SOCKET_DIRECTORY.into())),
        (None, None) => Ok(Place::Tcp { name: "localhost".to_owned(), address: None }),
    }
}

fn tls(values: &Values, home: Option<&Path>) -> Result<Tls, ConnectInfoError> {
    let default = |name: &str| home.map(|home| home.join(".postgresql").join(name));
    let roots = match values.text("sslrootcert") {
        Some(system) if system == "system" => Roots::System,
        Some(file) => Roots::File(file.into()),
        None => match default("root.crt") {
            Some(file) if file.exists() => Roots::File(file),
            missing => Roots::None(missing),
        },
    };
    let mode = match values.text("sslmode").as_deref() {
        None if roots == Roots::System => SslMode::VerifyFull,
        None | Some("prefer") => SslMode::Prefer,
        Some("disable") => SslMode::Disable,
        Some("allow") => SslMode::Allow,
        Some("require") => SslMode::Require,
        Some("verify-ca") => SslMode::VerifyCa,
        Some("verify-full") => SslMode::VerifyFull,
        Some(other) => return Err(bad("sslmode", other, "disable, allow, prefer, require, verify-ca or verify-full")),
    };
    if roots == Roots::System && mode != SslMode::VerifyFull {
        return Err(ConnectInfoError::new(
            "sslrootcert=system trusts every public authority, so it needs sslmode=verify-full",
        ));
    }
    if let (SslMode::VerifyCa | SslMode::VerifyFull, Roots::None(path)) = (mode, &roots) {
        let path = path.as_ref().map_or_else(|| "~/.postgresql/root.crt".to_owned(), |path| path.display().to_string());
        return Err(ConnectInfoError::new(format!(
            "sslmode verify-ca and verify-full need the authority's certificate: name it in `sslrootcert`, put it at \
             {path}, or set sslrootcert=system for the system's authorities"
        )));
    }
    let direct = values.one_of("sslnegotiation", &[("postgres", false), ("direct", true)])?;
    if direct && matches!(mode, SslMode::Disable | SslMode::Allow | SslMode::Prefer) {
        return Err(ConnectInfoError::new("sslnegotiation=direct needs sslmode=require, verify-ca or verify-full"));
    }
    let client = match (values.text("sslcert"), values.text("sslkey")) {
        _ if values.text("sslcertmode").as_deref() == Some("disable") => None,
        (None, key) => default("postgresql.crt")
            .filter(|file| file.exists())
            .and_then(|certificate| Some((certificate, key.map(PathBuf::from).or_else(|| default("postgresql.key"))?))),
        (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
        (Some(certificate), None) => match default("postgresql.key").filter(|file| file.exists()) {
            Some(key) => Some((certificate.into(), key)),
            None => return Err(ConnectInfoError::new("`sslcert` is given without `sslkey`")),
        },
    };
    values.refuse_unless("sslcertmode", &["disable", "allow"])?;
    Ok(Tls {
        mode,
        roots,
        client,
        direct,
        send_name: values.one_of("sslsni", &[("1", true), ("0", false)])?,
        only_1_3: values.one_of("ssl_min_protocol_version", &[("TLSv1.2", false), ("TLSv1.3", true)])?,
    })
}

fn tcp(values: &Values) -> Result<Tcp, ConnectInfoError> {
    // Zero means the system's default, as for libpq.
    let duration = |key: &str, unit: fn(u64) -> Duration, default: Duration| {
        Ok(match values.number::<u64>(key)? {
            None => Some(default),
            Some(0) => None,
            Some(number) => Some(unit(number)),
        })
    };
    Ok(Tcp {
        keepalives: values.one_of("keepalives", &[("1", true), ("0", false)])?,
        idle: duration("keepalives_idle", Duration::from_secs, KEEPALIVE_IDLE)?,
        interval: duration("keepalives_interval", Duration::from_secs, KEEPALIVE_INTERVAL)?,
        count: Some(values.number("keepalives_count")?.unwrap_or(KEEPALIVE_COUNT)).filter(|count| *count > 0),
        user_timeout: duration("tcp_user_timeout", Duration::from_millis, TCP_USER_TIMEOUT)?,
    })
}

#[cfg(test)]
mod tests;
