//! Host after host, address after address, until one gives a session that fits.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use bytes::BytesMut;
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::error::{ConnectError, ConnectErrorKind as Kind, quoted};
use super::socket::{self, Socket};
use super::startup::{self, Login, Ready};
use super::target::{Host, Place, SessionAttrs, SslMode, Target};
use super::{pgpass, tls};

/// A session, and where it leads.
pub(super) struct Dialled {
    pub ready: Ready,
    /// For messages: `host:port (user "u", database "d")`.
    pub place: String,
}

/// Tries every host and address in order. What waiting may mend on one host leads to the next; what must be mended by
/// hand ends the search.
pub(super) async fn dial(target: &Target, startup: &[(&str, &str)]) -> Result<Dialled, ConnectError> {
    match target.session {
        SessionAttrs::PreferStandby => match round(target, startup, SessionAttrs::Standby).await {
            Err(error) if error.is_transient() => round(target, startup, SessionAttrs::Any).await,
            result => result,
        },
        wanted => round(target, startup, wanted).await,
    }
}

async fn round(target: &Target, startup: &[(&str, &str)], wanted: SessionAttrs) -> Result<Dialled, ConnectError> {
    let mut hosts: Vec<&Host> = target.hosts.iter().collect();
    if target.shuffle {
        let random = RandomState::new();
        hosts.sort_by_cached_key(|host| random.hash_one(host.describe()));
    }
    let mut errors = Vec::new();
    for host in hosts {
        let place =
            format!("{} (user {}, database {})", host.describe(), quoted(&target.user), quoted(&target.database));
        let addresses = match bounded(target.connect_timeout, resolve(host)).await {
            Ok(addresses) => addresses,
            Err(error) => {
                errors.push(error.at(&place));
                continue;
            }
        };
        for address in addresses {
            let session = async {
                let mut ready = encrypted_or_not(target, host, address, startup).await?;
                check_role(&mut ready, wanted).await?;
                Ok(ready)
            };
            match bounded(target.connect_timeout, session).await {
                Ok(ready) => return Ok(Dialled { ready, place }),
                Err(error) if error.is_transient() => errors.push(error.at(&place)),
                Err(error) => return Err(error.at(&place)),
            }
        }
    }
    // `Target::parse` gives at least one host, and each leaves an error here.
    Err(ConnectError::join(errors).unwrap_or_else(|| ConnectError::new(Kind::Settings, "there is no host to try")))
}

async fn bounded<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, ConnectError>>,
) -> Result<T, ConnectError> {
    let Some(limit) = limit else { return work.await };
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        Err(ConnectError::new(Kind::Unreachable, format!("no session within {} s (connect_timeout)", limit.as_secs())))
    })
}

/// The addresses of a host; one `None` for a Unix socket.
async fn resolve(host: &Host) -> Result<Vec<Option<IpAddr>>, ConnectError> {
    match &host.place {
        Place::Unix(_) => Ok(vec![None]),
        Place::Tcp { address: Some(address), .. } => Ok(vec![Some(*address)]),
        Place::Tcp { name, address: None } => {
            let found = tokio::net::lookup_host((name.as_str(), host.port)).await.map_err(|error| {
                ConnectError::new(Kind::Unreachable, format!("the name {} does not resolve: {error}", quoted(name)))
            })?;
            let mut addresses: Vec<Option<IpAddr>> = Vec::new();
            for address in found {
                if !addresses.contains(&Some(address.ip())) {
                    addresses.push(Some(address.ip()));
                }
            }
            if addresses.is_empty() {
                let what = format!("the name {} has no address", quoted(name));
                return Err(ConnectError::new(Kind::Unreachable, what));
            }
            Ok(addresses)
        }
    }
}

/// One address, with the second try that `sslmode` allow and prefer give.
async fn encrypted_or_not(
    target: &Target,
    host: &Host,
    address: Option<IpAddr>,
    startup: &[(&str, &str)],
) -> Result<Ready, ConnectError> {
    let (first, second) = match (address, target.tls.mode) {
        (None, _) | (_, SslMode::Disable) => (false, None),
        (_, SslMode::Allow) => (false, Some(true)),
        (_, SslMode::Prefer) => (true, Some(false)),
        (_, SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => (true, None),
    };
    let error = match once(target, host, address, startup, first).await {
        Ok(ready) => return Ok(ready),
        Err(error) => error,
    };
    // Only what the other way may mend: encryption itself, or a pg_hba.conf that asks for or forbids it.
    let Some(second) = second.filter(|_| matches!(error.kind(), Kind::Tls | Kind::NotAdmitted)) else {
        return Err(error);
    };
    match once(target, host, address, startup, second).await {
        Ok(ready) => {
            tracing::warn!(encrypted = second, first = %error, "PostgreSQL admits the relay at the second try only");
            Ok(ready)
        }
        // The first error tells more, unless TLS came second and worked.
        Err(again) => Err(if second && again.kind() != Kind::Tls { again } else { error }),
    }
}

async fn once(
    target: &Target,
    host: &Host,
    address: Option<IpAddr>,
    startup: &[(&str, &str)],
    encrypt: bool,
) -> Result<Ready, ConnectError> {
    let socket = match address {
        None => unix(host).await?,
        Some(address) => {
            let address = SocketAddr::new(address, host.port);
            let stream =
                TcpStream::connect(address).await.map_err(|error| unreachable(&address.to_string(), &error))?;
            socket::prepare(&stream, &target.tcp)
                .map_err(|error| ConnectError::new(Kind::Settings, format!("TCP options cannot be set: {error}")))?;
            if encrypt { negotiate(target, host, stream).await? } else { Socket::Tcp(stream) }
        }
    };
    let end_point = match &socket {
        Socket::Tls(stream) => tls::end_point(stream),
        _ => None,
    };
    let from_file = match (&target.password, &target.passfile) {
        (None, Some(file)) => pgpass::lookup(file, &host.pgpass_name(), host.port, &target.database, &target.user),
        _ => None,
    };
    let password = target.password.as_ref().map(|secret| secret.0.as_str()).or(from_file.as_deref());
    let login = Login { user: &target.user, password, channel_binding: target.channel_binding, end_point };
    startup::open(socket, startup, login).await
}

fn unreachable(place: &str, error: &std::io::Error) -> ConnectError {
    ConnectError::new(Kind::Unreachable, format!("cannot reach {place}: {error}"))
}

#[cfg(unix)]
async fn unix(host: &Host) -> Result<Socket, ConnectError> {
    let path = host.socket();
    let stream = tokio::net::UnixStream::connect(&path).await;
    stream.map(Socket::Unix).map_err(|error| unreachable(&path.display().to_string(), &error))
}

#[cfg(not(unix))]
async fn unix(_: &Host) -> Result<Socket, ConnectError> {
    Err(ConnectError::new(Kind::Settings, "this system has no Unix sockets"))
}

/// Asks for TLS and shakes hands. Under `prefer` a server without TLS is taken as it is.
async fn negotiate(target: &Target, host: &Host, mut stream: TcpStream) -> Result<Socket, ConnectError> {
    let config = tls::client_config(&target.tls)?;
    let Place::Tcp { name, .. } = &host.place else {
        return Err(ConnectError::new(Kind::Settings, "TLS over a Unix socket does not exist"));
    };
    if !target.tls.direct {
        let mut request = BytesMut::new();
        frontend::ssl_request(&mut request);
        let answer = async {
            stream.write_all(&request).await?;
            stream.read_u8().await
        };
        match answer.await.map_err(|error| ConnectError::io("when asked for TLS", &error))? {
            b'S' => {}
            b'N' if target.tls.mode == SslMode::Prefer => return Ok(Socket::Tcp(stream)),
            b'N' => {
                return Err(ConnectError::new(Kind::Tls, "the server does not support SSL, and sslmode asks for it")
                    .hint("set ssl = on in postgresql.conf, or sslmode=disable where the network is trusted"));
            }
            // An error from a server that nobody has authenticated yet: its text is not to be believed.
            b'E' => {
                return Err(ConnectError::new(Kind::Unreachable, "the server answered the TLS request by an error"));
            }
            _ => return Err(ConnectError::protocol("an unknown answer to the request for TLS")),
        }
    }
    let stream = tls::handshake(stream, config, name, target.tls.direct).await?;
    Ok(Socket::Tls(Box::new(stream)))
}

/// Whether the server is what `target_session_attrs` asks for.
async fn check_role(ready: &mut Ready, wanted: SessionAttrs) -> Result<(), ConnectError> {
    if wanted == SessionAttrs::Any {
        return Ok(());
    }
    let read_only = ready.wire.query("SHOW transaction_read_only").await?;
    let standby = ready.wire.query("SELECT pg_catalog.pg_is_in_recovery()").await?;
    let is = |rows: &[Vec<Option<String>>], value: &str| {
        rows.first().and_then(|row| row.first()).and_then(Option::as_deref) == Some(value)
    };
    let (read_only, standby) = (is(&read_only, "on"), is(&standby, "t"));
    let fits = match wanted {
        SessionAttrs::ReadWrite => !read_only && !standby,
        SessionAttrs::ReadOnly => read_only || standby,
        SessionAttrs::Primary => !standby,
        SessionAttrs::Standby => standby,
        SessionAttrs::Any | SessionAttrs::PreferStandby => true,
    };
    if fits {
        return Ok(());
    }
    let found = match (standby, read_only) {
        (true, _) => "a standby",
        (false, true) => "a primary whose sessions are read-only",
        (false, false) => "a primary",
    };
    let what = format!("the server is {found}, and target_session_attrs={} asks for another", wanted.name());
    Err(ConnectError::new(Kind::NoSuitableHost, what))
}
