//! A core subscriber on a thread and a socket of its own, so that nothing of a client library is measured.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// When each message came, by its `Nats-Msg-Id`.
pub type Arrivals = HashMap<String, Instant>;

/// Subscribes, and hands out the arrivals once `count` messages came, or none came for `patience`.
pub fn subscribe(port: u16, subject: &str, count: usize, patience: Duration) -> Receiver<Arrivals> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("connect to nats-server");
    stream.set_nodelay(true).expect("TCP_NODELAY");
    let hello = format!("CONNECT {{\"verbose\":false,\"headers\":true}}\r\nSUB {subject} 1\r\nPING\r\n");
    stream.write_all(hello.as_bytes()).expect("subscribe");
    let mut reader = BufReader::with_capacity(1 << 20, stream);
    let mut line = String::new();
    while line.trim() != "PONG" {
        line.clear();
        reader.read_line(&mut line).expect("nats-server answers");
    }
    reader.get_ref().set_read_timeout(Some(patience)).expect("a timeout");
    let (done, arrivals) = channel();
    std::thread::spawn(move || done.send(read(&mut reader, count)));
    arrivals
}

fn read(reader: &mut BufReader<TcpStream>, count: usize) -> Arrivals {
    let mut arrivals = Arrivals::with_capacity(count);
    let (mut line, mut body) = (String::new(), Vec::new());
    while arrivals.len() < count {
        line.clear();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            break;
        }
        if line.starts_with("PING") {
            reader.get_mut().write_all(b"PONG\r\n").expect("answer");
            continue;
        }
        // HMSG <subject> <sid> <bytes of headers> <bytes in all>
        let mut sizes = line.trim_end().rsplit(' ').map_while(|word| word.parse::<usize>().ok());
        let (Some(all), Some(headers)) = (sizes.next(), sizes.next()) else { continue };
        body.resize(all + 2, 0);
        reader.read_exact(&mut body).expect("a whole message");
        let now = Instant::now();
        let headers = std::str::from_utf8(&body[..headers]).expect("headers are text");
        if let Some(id) = headers.lines().find_map(|line| line.strip_prefix("Nats-Msg-Id: ")) {
            arrivals.insert(id.to_owned(), now);
        }
    }
    arrivals
}
