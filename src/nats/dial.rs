//! Making one connection to one server: addresses, credentials, TLS, and what a failed attempt means.

use std::collections::VecDeque;
use std::error::Error as _;
use std::path::Path;
use std::time::Duration;

use async_nats::rustls;
use async_nats::{Client, ConnectErrorKind, ConnectOptions, ServerAddr, ServerError};
use percent_encoding::percent_decode_str;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::config;
use crate::fault::Class;

/// The server is asked for a sign of life this often; after three unanswered times the connection counts as dead
/// (async-nats closes at the third tick with two PINGs open). A frozen server is thus noticed after 6 seconds.
const PING_INTERVAL: Duration = Duration::from_secs(2);

/// For TCP, TLS and the handshake together, per address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Why no connection could be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}; {hint}")]
pub struct ConnectFault {
    /// [`Class::Transient`]: try again. [`Class::Fatal`]: it cannot work before someone changes the settings.
    pub class: Class,
    /// What happened and where. Holds no secret.
    pub text: String,
    /// What to do.
    pub hint: &'static str,
}

impl ConnectFault {
    fn fatal(text: String, hint: &'static str) -> Self {
        Self { class: Class::Fatal, text, hint }
    }

    fn transient(text: String, hint: &'static str) -> Self {
        Self { class: Class::Transient, text, hint }
    }
}

/// Knows the servers and how to log in to them.
pub(super) struct Dialer {
    config: config::Nats,
    capacity: usize,
    /// Those of the settings, in their order.
    configured: Vec<Server>,
    /// Those that a server told about. Tried after the configured ones.
    discovered: Vec<Server>,
}

/// One address, its credentials taken out of the URL: async-nats ignores them there, and an address gets into messages.
#[derive(Clone)]
struct Server {
    address: ServerAddr,
    user: Option<(String, Option<String>)>,
}

impl Server {
    fn describe(&self) -> String {
        let (host, port) = (self.address.host(), self.address.port());
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }
}

impl Dialer {
    /// `capacity`: how many messages may be on their way at once.
    pub(super) fn new(config: &config::Nats, capacity: usize) -> Result<Self, ConnectFault> {
        let configured = config
            .url
            .iter()
            .enumerate()
            .map(|(index, url)| parse_server(url).map_err(|reason| bad_address(index, &reason)))
            .collect::<Result<Vec<_>, _>>()?;
        if configured.is_empty() {
            return Err(bad_address(0, "it is missing"));
        }
        Ok(Self { config: config.clone(), capacity, configured, discovered: Vec::new() })
    }

    /// Tries every server once. `on_event` is given what the connection tells while it lives.
    pub(super) async fn dial<F>(&mut self, on_event: F) -> Result<Client, ConnectFault>
    where
        F: Fn(async_nats::Event) + Clone + Send + Sync + 'static,
    {
        let mut worst: Option<ConnectFault> = None;
        let mut queue: VecDeque<Server> = self.configured.iter().chain(&self.discovered).cloned().collect();
        while let Some(server) = queue.pop_front() {
            match self.dial_one(&server, on_event.clone()).await {
                Ok(client) => {
                    self.learn(&client);
                    return Ok(client);
                }
                // What a server refuses says more than that another is away.
                Err(fault) if worst.as_ref().is_none_or(|worst| worst.class != Class::Fatal) => worst = Some(fault),
                Err(_) => {}
            }
        }
        // The constructor sees to it that there is a server; so there is a fault.
        Err(worst.unwrap_or_else(|| bad_address(0, "it is missing")))
    }

    async fn dial_one<F>(&self, server: &Server, on_event: F) -> Result<Client, ConnectFault>
    where
        F: Fn(async_nats::Event) + Send + Sync + 'static,
    {
        let options = self.options(server).await?.event_callback(move |event| {
            on_event(event);
            std::future::ready(())
        });
        let client = options
            .connect(server.address.clone())
            .await
            .map_err(|error| connect_fault(&error, &server.describe(), &self.config))?;
        bury(&client).await.map_err(|()| {
            ConnectFault::transient(
                format!("NATS server {} closed the connection", server.describe()),
                "see nats-server's log",
            )
        })?;
        Ok(client)
    }

    async fn options(&self, server: &Server) -> Result<ConnectOptions, ConnectFault> {
        let config = &self.config;
        let mut options = ConnectOptions::new()
            .name("outbox-relay")
            .ping_interval(PING_INTERVAL)
            .connection_timeout(CONNECT_TIMEOUT)
            .request_timeout(None)
            // Room for all that may be in flight, and for requests beside it: a full queue then means a dead peer.
            .client_capacity(self.capacity.saturating_mul(2).saturating_add(256))
            // A message may be answered twice (by a foreign responder, too): replies must not be lost over it.
            .subscription_capacity(self.capacity.saturating_mul(4).max(4096))
            .retain_servers_order()
            .ignore_discovered_servers()
            .max_reconnects(1)
            .reconnect_delay_callback(|_| Duration::ZERO);
        let tls = config.tls_ca.is_some() || config.tls_cert.is_some() || config.tls_key.is_some() || config.tls_first;
        options = options.require_tls(tls || server.address.tls_required());
        if config.tls_first {
            options = options.tls_first();
        }
        if let Some(path) = &config.tls_ca {
            check_certificates("nats.tls_ca", path).await?;
            options = options.add_root_certificates(path.clone());
        }
        match (&config.tls_cert, &config.tls_key) {
            (Some(cert), Some(key)) => {
                check_certificates("nats.tls_cert", cert).await?;
                check_key("nats.tls_key", key).await?;
                options = options.add_client_certificate(cert.clone(), key.clone());
            }
            (None, None) => {}
            _ => {
                return Err(ConnectFault::fatal(
                    "only one of nats.tls_cert and nats.tls_key is set".to_owned(),
                    "set both or neither",
                ));
            }
        }
        self.log_in(options, server).await
    }

    /// Files are read anew for each connection, so that credentials can be rotated under a running relay.
    async fn log_in(&self, options: ConnectOptions, server: &Server) -> Result<ConnectOptions, ConnectFault> {
        let config = &self.config;
        if let Some(path) = &config.credentials_file {
            let text = read("nats.credentials_file", path).await?;
            return options.credentials(&text).map_err(|_| {
                ConnectFault::fatal(
                    format!("nats.credentials_file {} holds no user JWT and seed", path.display()),
                    "point it to a .creds file as nsc makes it",
                )
            });
        }
        if let Some(path) = &config.nkey_file {
            let text = read("nats.nkey_file", path).await?;
            let seed = text.split_ascii_whitespace().find(|word| word.starts_with("SU"));
            return seed.map(|seed| options.nkey(seed.to_owned())).ok_or_else(|| {
                ConnectFault::fatal(
                    format!("nats.nkey_file {} holds no user seed (SU...)", path.display()),
                    "point it to the file with the seed of a user nkey",
                )
            });
        }
        let password = config.password.as_ref().map(|secret| secret.0.clone());
        if let Some(token) = &config.token {
            return Ok(options.token(token.0.clone()));
        }
        if let Some(user) = &config.user {
            return Ok(options.user_and_password(user.clone(), password.unwrap_or_default()));
        }
        Ok(match (&server.user, password) {
            // In a NATS URL a user without a password is a token.
            (Some((token, None)), None) => options.token(token.clone()),
            (Some((user, inner)), outer) => {
                options.user_and_password(user.clone(), outer.or_else(|| inner.clone()).unwrap_or_default())
            }
            (None, _) => options,
        })
    }

    /// Remembers the other servers of the cluster, which log in like the first configured one.
    fn learn(&mut self, client: &Client) {
        let scheme = self.configured.first().map_or("nats", |server| server.address.scheme());
        let user = self.configured.first().and_then(|server| server.user.clone());
        let known = |address: &ServerAddr| {
            self.configured
                .iter()
                .any(|server| server.address.host() == address.host() && server.address.port() == address.port())
        };
        self.discovered = client
            .server_info()
            .connect_urls
            .iter()
            .filter_map(|url| format!("{scheme}://{url}").parse::<ServerAddr>().ok())
            .filter(|address| !known(address))
            .map(|address| Server { address, user: user.clone() })
            .collect();
    }
}

/// Sees to it that the client never reconnects by itself: its pool becomes an address that cannot be connected, so that
/// it ends at the first disconnect.
///
/// Otherwise messages that wait in its queue would be sent after a reconnect, however much later: beyond the duplicate
/// window, and perhaps after another relay has taken over and sent them.
async fn bury(client: &Client) -> Result<(), ()> {
    let change = client.set_server_pool("nats://127.0.0.1:0");
    matches!(tokio::time::timeout(CONNECT_TIMEOUT, change).await, Ok(Ok(()))).then_some(()).ok_or(())
}

fn bad_address(index: usize, reason: &str) -> ConnectFault {
    ConnectFault::fatal(
        format!("nats.url: address {} is not a NATS server's: {reason}", index.saturating_add(1)),
        "give it as nats://host:4222 or tls://host:4222, several separated by commas",
    )
}

fn parse_server(url: &str) -> Result<Server, String> {
    let url = url.trim();
    let full = if url.contains("://") { url.to_owned() } else { format!("nats://{url}") };
    let mut url = url::Url::parse(&full).map_err(|error| error.to_string())?;
    if !matches!(url.scheme(), "nats" | "tls") {
        return Err(format!("scheme {:?} is not supported", url.scheme()));
    }
    if url.host_str().is_none_or(str::is_empty) {
        return Err("it names no host".to_owned());
    }
    let decode = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
    let user = (!url.username().is_empty()).then(|| (decode(url.username()), url.password().map(decode)));
    // Both succeed: the URL has a host.
    let stripped = url.set_username("").and_then(|()| url.set_password(None));
    stripped.map_err(|()| "its user and password cannot be read".to_owned())?;
    let address = ServerAddr::from_url(url).map_err(|error| error.to_string())?;
    Ok(Server { address, user })
}

async fn read(key: &str, path: &Path) -> Result<String, ConnectFault> {
    tokio::fs::read_to_string(path).await.map_err(|error| unreadable(key, path, &error.to_string()))
}

fn unreadable(key: &str, path: &Path, reason: &str) -> ConnectFault {
    ConnectFault::fatal(
        format!("{key}: cannot read {}: {reason}", path.display()),
        "see that the file exists and that the relay may read it",
    )
}

/// async-nats takes a file without any certificate for an empty list, and then trusts nobody, without a word.
async fn check_certificates(key: &str, path: &Path) -> Result<(), ConnectFault> {
    let text = read(key, path).await?;
    let good = CertificateDer::pem_slice_iter(text.as_bytes()).try_fold(0_usize, |count, one| one.map(|_| count + 1));
    match good {
        Ok(1..) => Ok(()),
        Ok(0) => Err(unreadable(key, path, "it holds no certificate in PEM form")),
        Err(error) => Err(unreadable(key, path, &error.to_string())),
    }
}

async fn check_key(key: &str, path: &Path) -> Result<(), ConnectFault> {
    let text = read(key, path).await?;
    // The error tells no part of the key.
    PrivateKeyDer::from_pem_slice(text.as_bytes())
        .map(drop)
        .map_err(|_| unreadable(key, path, "it holds no private key in PEM form"))
}

/// Sorts a failed attempt.
fn connect_fault(error: &async_nats::ConnectError, server: &str, config: &config::Nats) -> ConnectFault {
    let at = format!("NATS server {server}");
    match error.kind() {
        ConnectErrorKind::AuthorizationViolation => return refused(&at, "authorization violation", config),
        ConnectErrorKind::Authentication => {
            return ConnectFault::fatal(
                format!("cannot sign the challenge of {at}"),
                "see that nats.credentials_file or nats.nkey_file holds the seed of a user",
            );
        }
        ConnectErrorKind::ServerParse => return bad_address(0, "it cannot be read"),
        _ => {}
    }
    let source = error.source();
    if let Some(ServerError::Other(text)) = source.and_then(|source| source.downcast_ref()) {
        let lower = text.to_ascii_lowercase();
        if lower.contains("authentication expired") || lower.contains("authentication revoked") {
            return refused(&at, text, config);
        }
        return ConnectFault::transient(format!("{at} answers: {text}"), "see nats-server's log");
    }
    let inner = source.and_then(|source| source.downcast_ref::<std::io::Error>()).and_then(std::io::Error::get_ref);
    if let Some(tls) = inner.and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        return tls_fault(&at, tls, config);
    }
    if error.kind() == ConnectErrorKind::Tls {
        let text = format!("TLS cannot be set up for {at}: {error}");
        return ConnectFault::fatal(text, "see nats.tls_ca, nats.tls_cert and nats.tls_key");
    }
    let hint = if config.tls_first {
        "see that it runs, can be reached, and does TLS first (handshake_first)"
    } else {
        "see that it runs and can be reached, and that nats.url (or NATS_URL) names it (a server with handshake_first \
         wants nats.tls_first = true)"
    };
    ConnectFault::transient(format!("{at} cannot be reached: {error}"), hint)
}

fn refused(at: &str, text: &str, config: &config::Nats) -> ConnectFault {
    let hint = if config.credentials_file.is_some() {
        "see nats.credentials_file"
    } else if config.nkey_file.is_some() {
        "see nats.nkey_file"
    } else if config.token.is_some() {
        "see nats.token_file"
    } else if config.user.is_some() {
        "see nats.user and nats.password_file"
    } else {
        "give credentials: nats.credentials_file, nats.nkey_file, nats.user with nats.password_file, nats.token_file, \
         or user and password in nats.url"
    };
    ConnectFault::fatal(format!("{at} refuses the login: {text}"), hint)
}

fn tls_fault(at: &str, error: &rustls::Error, config: &config::Nats) -> ConnectFault {
    let text = format!("TLS with {at} fails: {error}");
    match error {
        rustls::Error::InvalidCertificate(_) => ConnectFault::fatal(
            text,
            "see that nats.tls_ca holds the authority that signed the server's certificate, that the certificate names \
             the host of nats.url, and that it has not expired",
        ),
        rustls::Error::AlertReceived(_) if config.tls_cert.is_none() => {
            ConnectFault::fatal(text, "the server may want a client certificate: see nats.tls_cert and nats.tls_key")
        }
        rustls::Error::AlertReceived(_) => {
            ConnectFault::fatal(text, "the server rejects the certificate of nats.tls_cert; see nats-server's log")
        }
        rustls::Error::InvalidMessage(_) => ConnectFault::fatal(
            text,
            "the server does not speak TLS here: a server without handshake_first wants nats.tls_first = false, one \
             without TLS wants no nats.tls_* and no tls:// in nats.url",
        ),
        _ => ConnectFault::transient(text, "see nats-server's log"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_credentials_out_of_the_address() {
        let server = parse_server("nats://us%40er:p%2Fw%25@[::1]:4333").unwrap();
        assert_eq!(server.user, Some(("us@er".to_owned(), Some("p/w%".to_owned()))));
        assert_eq!(server.describe(), "[::1]:4333");
        assert!(!server.address.as_url_str().contains("us"), "{}", server.address.as_url_str());
        let token = parse_server("tls://s3cret@host").unwrap();
        assert_eq!(token.user, Some(("s3cret".to_owned(), None)));
        assert_eq!(token.describe(), "host:4222");
        assert!(token.address.tls_required());
        assert_eq!(parse_server(" localhost ").unwrap().describe(), "localhost:4222");
    }

    #[test]
    fn refuses_what_is_no_address_without_showing_it() {
        for url in
            ["", "nats://", "http://user:hunter2@host", "ws://user:hunter2@host", "nats://user:hunter2@ho st", "h:x"]
        {
            let reason = parse_server(url).err().unwrap_or_else(|| panic!("{url} is taken"));
            assert!(!reason.contains("hunter2"), "{reason}");
        }
    }
}
