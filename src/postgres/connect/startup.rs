//! From an open stream to a session that is ready for queries: startup message, authentication, greeting.
//!
//! Source: PostgreSQL's documentation, "Message Flow" and "SASL Authentication"; protocol version 3.0.

use std::collections::HashMap;

use bytes::{BufMut, Bytes, BytesMut};
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ScramSha256};
use postgres_protocol::message::backend::{AuthenticationSaslBody, DataRowBody, Header, Message};
use postgres_protocol::message::frontend;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::error::{ConnectError, ConnectErrorKind as Kind, code_and_message};
use super::socket::Socket;
use super::target::ChannelBinding;

/// Nothing that a server says before or right after login is longer, bytes.
const LONGEST_MESSAGE: usize = 1 << 20;

/// Who logs in, and how.
pub(super) struct Login<'a> {
    pub user: &'a str,
    pub password: Option<&'a str>,
    pub channel_binding: ChannelBinding,
    /// The server certificate's hash, when there is a certificate that has one.
    pub end_point: Option<Vec<u8>>,
}

/// A session that is ready for queries.
pub(super) struct Ready {
    pub wire: Wire,
    pub backend_pid: i32,
    secret_key: i32,
    pub parameters: HashMap<String, String>,
}

impl Ready {
    /// The server's messages from AuthenticationOk to ReadyForQuery as they would be sent again.
    pub(super) fn greeting(&self) -> Bytes {
        let mut out = BytesMut::new();
        message(&mut out, b'R', |body| body.put_i32(0));
        for (name, value) in &self.parameters {
            message(&mut out, b'S', |body| {
                body.put_slice(name.as_bytes());
                body.put_u8(0);
                body.put_slice(value.as_bytes());
                body.put_u8(0);
            });
        }
        message(&mut out, b'K', |body| {
            body.put_i32(self.backend_pid);
            body.put_i32(self.secret_key);
        });
        message(&mut out, b'Z', |body| body.put_u8(b'I'));
        out.put_slice(&self.wire.input);
        out.freeze()
    }
}

fn message(out: &mut BytesMut, tag: u8, fill: impl FnOnce(&mut BytesMut)) {
    let mut body = BytesMut::new();
    fill(&mut body);
    out.put_u8(tag);
    // The parts came in messages below LONGEST_MESSAGE, so the length always fits.
    out.put_u32(u32::try_from(body.len()).unwrap_or(u32::MAX - 4) + 4);
    out.put_slice(&body);
}

/// Opens the session. The caller bounds the time.
pub(super) async fn open(socket: Socket, startup: &[(&str, &str)], login: Login<'_>) -> Result<Ready, ConnectError> {
    let mut wire = Wire { socket, input: BytesMut::new() };
    let mut out = BytesMut::new();
    frontend::startup_message(startup.iter().copied(), &mut out).map_err(|error| {
        ConnectError::new(Kind::Settings, format!("the startup parameters cannot be sent: {error}"))
    })?;
    wire.send(&out).await?;
    authenticate(&mut wire, login).await?;

    let (mut backend_pid, mut secret_key, mut parameters) = (0, 0, HashMap::new());
    loop {
        match wire.receive("after authentication").await? {
            Message::ParameterStatus(body) => {
                let name = body.name().map_err(ConnectError::protocol)?.to_owned();
                parameters.insert(name, body.value().map_err(ConnectError::protocol)?.to_owned());
            }
            Message::BackendKeyData(body) => (backend_pid, secret_key) = (body.process_id(), body.secret_key()),
            Message::ReadyForQuery(_) => return Ok(Ready { wire, backend_pid, secret_key, parameters }),
            _ => return Err(unexpected("after authentication")),
        }
    }
}

async fn authenticate(wire: &mut Wire, login: Login<'_>) -> Result<(), ConnectError> {
    let unbound = |login: &Login<'_>| match login.channel_binding {
        ChannelBinding::Require => Err(no_binding("the server did not ask for it")),
        _ => Ok(()),
    };
    match wire.receive("during authentication").await? {
        Message::AuthenticationOk => return unbound(&login),
        Message::AuthenticationCleartextPassword => {
            unbound(&login)?;
            if wire.socket.is_exposed() {
                return Err(ConnectError::new(
                    Kind::Authentication,
                    "the server asks for the password in the clear, and the connection is not encrypted",
                )
                .hint("use sslmode=require or stronger, or let pg_hba.conf ask for scram-sha-256"));
            }
            wire.send_password(password(&login)?.as_bytes()).await?;
        }
        Message::AuthenticationMd5Password(body) => {
            unbound(&login)?;
            let hash = md5_hash(login.user.as_bytes(), password(&login)?.as_bytes(), body.salt());
            wire.send_password(hash.as_bytes()).await?;
        }
        Message::AuthenticationSasl(body) => scram(wire, &body, &login).await?,
        Message::AuthenticationGss | Message::AuthenticationSspi | Message::AuthenticationKerberosV5 => {
            return Err(ConnectError::new(Kind::Authentication, "the server asks for Kerberos (GSSAPI or SSPI)")
                .hint("let pg_hba.conf ask for scram-sha-256 or cert"));
        }
        _ => return Err(unexpected("during authentication")),
    }
    match wire.receive("during authentication").await? {
        Message::AuthenticationOk => Ok(()),
        _ => Err(unexpected("during authentication")),
    }
}

async fn scram(wire: &mut Wire, offer: &AuthenticationSaslBody, login: &Login<'_>) -> Result<(), ConnectError> {
    let (mut plain, mut plus) = (false, false);
    let mut mechanisms = offer.mechanisms();
    while let Some(mechanism) = mechanisms.next().map_err(ConnectError::protocol)? {
        plain |= mechanism == sasl::SCRAM_SHA_256;
        plus |= mechanism == sasl::SCRAM_SHA_256_PLUS;
    }
    let channel = match (&wire.socket, &login.end_point) {
        (Socket::Tls(_), Some(_)) => Channel::Bindable,
        (Socket::Tls(_), None) => Channel::Tls,
        _ => Channel::Clear,
    };
    let choice = choose(plain, plus, channel, login.channel_binding)?;
    let (mechanism, binding) = match (choice, &login.end_point) {
        (Choice::Bound, Some(hash)) => {
            (sasl::SCRAM_SHA_256_PLUS, sasl::ChannelBinding::tls_server_end_point(hash.clone()))
        }
        (Choice::Offered, _) => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unrequested()),
        _ => (sasl::SCRAM_SHA_256, sasl::ChannelBinding::unsupported()),
    };
    let refused = |error: std::io::Error| {
        ConnectError::new(
            Kind::Authentication,
            format!("the server failed to prove that it knows the password: {error}"),
        )
    };

    let mut scram = ScramSha256::new(password(login)?.as_bytes(), binding);
    let mut out = BytesMut::new();
    frontend::sasl_initial_response(mechanism, scram.message(), &mut out).map_err(ConnectError::protocol)?;
    wire.send(&out).await?;
    match wire.receive("during authentication").await? {
        Message::AuthenticationSaslContinue(body) => scram.update(body.data()).map_err(refused)?,
        _ => return Err(unexpected("during authentication")),
    }
    out.clear();
    frontend::sasl_response(scram.message(), &mut out).map_err(ConnectError::protocol)?;
    wire.send(&out).await?;
    match wire.receive("during authentication").await? {
        Message::AuthenticationSaslFinal(body) => scram.finish(body.data()).map_err(refused),
        _ => Err(unexpected("during authentication")),
    }
}

/// How to say in SCRAM whether the session is bound to the TLS channel (RFC 5802, gs2-cbind-flag).
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Choice {
    /// `p`: bound.
    Bound,
    /// `y`: we could bind, but the server does not offer it. A server that did offer it detects a man in the middle.
    Offered,
    /// `n`: we cannot or must not.
    Unbound,
}

/// What the session's bytes go through.
#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Channel {
    Clear,
    Tls,
    /// And the server's certificate has a hash to bind to.
    Bindable,
}

fn choose(plain: bool, plus: bool, channel: Channel, wanted: ChannelBinding) -> Result<Choice, ConnectError> {
    if plus && channel == Channel::Clear {
        let what = "the server offers SCRAM-SHA-256-PLUS over a connection without TLS: someone may be in between";
        return Err(ConnectError::new(Kind::Authentication, what));
    }
    let can = channel == Channel::Bindable && wanted != ChannelBinding::Disable;
    match (plus && can, wanted, channel) {
        (true, ..) => Ok(Choice::Bound),
        (false, ChannelBinding::Require, Channel::Clear) => Err(no_binding("it exists only over TLS")),
        (false, ChannelBinding::Require, Channel::Tls) => {
            Err(no_binding("it is not defined for the signature of the server's certificate"))
        }
        (false, ChannelBinding::Require, Channel::Bindable) => Err(no_binding("the server does not offer it")),
        (false, ..) if !plain => {
            Err(ConnectError::new(Kind::Authentication, "the server offers no SASL mechanism that the relay can use")
                .hint("let pg_hba.conf ask for scram-sha-256"))
        }
        (false, ..) => Ok(if can { Choice::Offered } else { Choice::Unbound }),
    }
}

fn no_binding(why: &str) -> ConnectError {
    ConnectError::new(Kind::Authentication, format!("channel_binding=require cannot be met: {why}"))
}

fn password<'a>(login: &Login<'a>) -> Result<&'a str, ConnectError> {
    login.password.ok_or_else(|| {
        ConnectError::new(Kind::Password, "the server asks for a password, and none is set")
            .hint("set it in postgres.url, postgres.password_file, PGPASSWORD or ~/.pgpass (mode 0600)")
    })
}

fn unexpected(during: &str) -> ConnectError {
    ConnectError::protocol(format!("an unexpected message {during}"))
}

/// Whole messages over a stream. Only for login and a few first queries: reading is not cancel-safe for the session.
pub(super) struct Wire {
    pub socket: Socket,
    /// Bytes received and not yet taken.
    pub input: BytesMut,
}

impl Wire {
    async fn send(&mut self, bytes: &[u8]) -> Result<(), ConnectError> {
        let sent = async {
            self.socket.write_all(bytes).await?;
            self.socket.flush().await
        };
        sent.await.map_err(|error| ConnectError::io("while the relay was writing", &error))
    }

    async fn send_password(&mut self, password: &[u8]) -> Result<(), ConnectError> {
        let mut out = BytesMut::new();
        frontend::password_message(password, &mut out).map_err(|_| {
            ConnectError::new(Kind::Password, "the password holds a zero byte, which PostgreSQL cannot take")
        })?;
        self.send(&out).await
    }

    /// The next message. Notices are logged and skipped; the server's error becomes ours.
    async fn receive(&mut self, during: &str) -> Result<Message, ConnectError> {
        loop {
            if let Some(header) = Header::parse(&self.input).map_err(ConnectError::protocol)?
                && usize::try_from(header.len()).is_ok_and(|length| length > LONGEST_MESSAGE)
            {
                return Err(ConnectError::protocol(format!("a message of {} bytes {during}", header.len())));
            }
            match Message::parse(&mut self.input).map_err(ConnectError::protocol)? {
                Some(Message::NoticeResponse(body)) => {
                    // Nothing here can hold a row: no query of ours has run yet.
                    let (sqlstate, notice) = code_and_message(body.fields());
                    tracing::debug!(sqlstate, notice, "PostgreSQL says at login");
                }
                Some(Message::ErrorResponse(body)) => return Err(ConnectError::server(&body)),
                Some(message) => return Ok(message),
                None => {
                    let read = self.socket.read_buf(&mut self.input).await;
                    if read.map_err(|error| ConnectError::io(during, &error))? == 0 {
                        return Err(ConnectError::io(during, &std::io::ErrorKind::UnexpectedEof.into()));
                    }
                }
            }
        }
    }

    /// Runs one statement by the simple protocol and returns its rows as text.
    pub(super) async fn query(&mut self, statement: &str) -> Result<Vec<Vec<Option<String>>>, ConnectError> {
        let mut out = BytesMut::new();
        frontend::query(statement, &mut out).map_err(ConnectError::protocol)?;
        self.send(&out).await?;
        let mut rows = Vec::new();
        loop {
            match self.receive("during the first query").await? {
                Message::DataRow(row) => rows.push(cells(&row)?),
                Message::ReadyForQuery(_) => return Ok(rows),
                Message::RowDescription(_) | Message::CommandComplete(_) | Message::ParameterStatus(_) => {}
                _ => return Err(unexpected("during the first query")),
            }
        }
    }
}

fn cells(row: &DataRowBody) -> Result<Vec<Option<String>>, ConnectError> {
    let mut ranges = row.ranges();
    let mut cells = Vec::new();
    while let Some(range) = ranges.next().map_err(ConnectError::protocol)? {
        let bytes = range.map(|range| row.buffer().get(range).ok_or_else(|| unexpected("in a row"))).transpose()?;
        cells.push(bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned()));
    }
    Ok(cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sasl_choice() {
        use Channel::{Bindable, Clear, Tls};
        use ChannelBinding::{Disable, Prefer, Require};
        for (plain, plus, channel, wanted, expected) in [
            (true, false, Clear, Prefer, Some(Choice::Unbound)),
            (true, true, Bindable, Prefer, Some(Choice::Bound)),
            (true, true, Bindable, Require, Some(Choice::Bound)),
            (false, true, Bindable, Prefer, Some(Choice::Bound)),
            (true, true, Bindable, Disable, Some(Choice::Unbound)),
            (true, false, Bindable, Prefer, Some(Choice::Offered)),
            (true, false, Bindable, Disable, Some(Choice::Unbound)),
            // An Ed25519 certificate has no defined hash.
            (true, true, Tls, Prefer, Some(Choice::Unbound)),
            (true, true, Tls, Require, None),
            (true, false, Bindable, Require, None),
            (true, false, Clear, Require, None),
            // Offered without TLS: the offer was tampered with.
            (true, true, Clear, Prefer, None),
            (false, false, Bindable, Prefer, None),
            (false, true, Bindable, Disable, None),
        ] {
            let choice = choose(plain, plus, channel, wanted).ok();
            assert_eq!(choice, expected, "plain {plain} plus {plus} {channel:?} {wanted:?}");
        }
    }
}
