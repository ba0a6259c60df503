//! The byte stream to a server, whatever carries it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
#[cfg(unix)]
use tokio::net::UnixStream;
use tokio_rustls::client::TlsStream;

use super::target::Tcp;

/// A stream to a PostgreSQL server.
#[derive(Debug)]
pub enum Socket {
    /// TCP without encryption.
    Tcp(TcpStream),
    /// A Unix socket.
    #[cfg(unix)]
    Unix(UnixStream),
    /// TLS over TCP.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Socket {
    /// Whether others on the network could read along.
    pub(super) fn is_exposed(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }
}

/// Sets what makes a link whose peer has vanished end in bounded time, and sends small messages at once.
pub(super) fn prepare(stream: &TcpStream, tcp: &Tcp) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    if tcp.keepalives {
        let mut keepalive = TcpKeepalive::new();
        if let Some(idle) = tcp.idle {
            keepalive = keepalive.with_time(idle);
        }
        #[cfg(any(target_os = "linux", target_os = "android", target_os = "macos", target_os = "freebsd", windows))]
        if let Some(interval) = tcp.interval {
            keepalive = keepalive.with_interval(interval);
        }
        #[cfg(any(target_os = "linux", target_os = "android", target_os = "macos", target_os = "freebsd"))]
        if let Some(count) = tcp.count {
            keepalive = keepalive.with_retries(count);
        }
        socket.set_tcp_keepalive(&keepalive)?;
    }
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(tcp.user_timeout)?;
    Ok(())
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            #[cfg(unix)]
            Self::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            #[cfg(unix)]
            Self::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            #[cfg(unix)]
            Self::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            #[cfg(unix)]
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// A session that is already open, given to a client that believes it opens one.
///
/// `tokio_postgres` writes its startup message and then reads the server's greeting. This stream swallows the first
/// and replays a greeting for the second, so that one piece of code authenticates both kinds of connection.
pub(super) struct Handover {
    socket: Socket,
    greeting: Bytes,
    reading: bool,
}

impl Handover {
    pub(super) fn new(socket: Socket, greeting: Bytes) -> Self {
        Self { socket, greeting, reading: false }
    }
}

impl AsyncRead for Handover {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.reading = true;
        if self.greeting.is_empty() {
            return Pin::new(&mut self.socket).poll_read(cx, buf);
        }
        let count = self.greeting.len().min(buf.remaining());
        buf.put_slice(self.greeting.get(..count).unwrap_or_default());
        self.greeting.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Handover {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        // What is written before the first read is the startup message.
        if self.reading { Pin::new(&mut self.socket).poll_write(cx, buf) } else { Poll::Ready(Ok(buf.len())) }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_dead_link_ends_in_bounded_time() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (idle, interval) = (Some(Duration::from_secs(7)), Some(Duration::from_secs(3)));
        let user_timeout = Some(Duration::from_millis(9500));
        let tcp = Tcp { keepalives: true, idle, interval, count: Some(4), user_timeout };

        let stream = TcpStream::connect(address).await.unwrap();
        prepare(&stream, &tcp).unwrap();
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap() && stream.nodelay().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(7));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(3));
        assert_eq!(socket.tcp_keepalive_retries().unwrap(), 4);
        assert_eq!(socket.tcp_user_timeout().unwrap(), user_timeout);

        let stream = TcpStream::connect(address).await.unwrap();
        prepare(&stream, &Tcp { keepalives: false, ..tcp }).unwrap();
        assert!(!SockRef::from(&stream).keepalive().unwrap());
    }
}
