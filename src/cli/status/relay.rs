//! What the relay on `admin.listen` says of itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PATIENCE: Duration = Duration::from_secs(2);
/// Its answer has some kilobytes.
const LONGEST: u64 = 1024 * 1024;

/// Asks for `/status`. `None`: no relay answers there, which is no fault: it may run elsewhere.
pub async fn ask(listen: SocketAddr) -> Option<Value> {
    tokio::time::timeout(PATIENCE, get(reachable(listen))).await.ok()?
}

/// What listens on every address is reached by the nearest.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

async fn get(address: SocketAddr) -> Option<Value> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    // HTTP/1.0: the body comes as it is and ends with the connection.
    stream.write_all(b"GET /status HTTP/1.0\r\n\r\n").await.ok()?;
    let mut answer = Vec::new();
    stream.take(LONGEST).read_to_end(&mut answer).await.ok()?;
    let answer = String::from_utf8(answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    if head.split(' ').nth(1)? != "200" {
        return None;
    }
    // Something else may listen there.
    serde_json::from_str(body).ok().filter(|status: &Value| status.get("verdict").is_some_and(Value::is_string))
}
