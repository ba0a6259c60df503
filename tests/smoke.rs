//! The harness itself: servers of every version start, stop and come back, and the proxy breaks what it is told to.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres, connect};
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::stream;
use crate::harness::wait::{always, eventually};

const SOON: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_starts_restarts_and_recovers() {
    for version in PgVersion::ENDS {
        let mut server = Postgres::start(version, &[("wal_sender_timeout", "7s"), ("application_name", "it's")]).await;
        let client = server.client().await;
        let show = async |client: &tokio_postgres::Client, name: &str| -> String {
            client.query_one(&format!("SHOW {name}"), &[]).await.unwrap().get(0)
        };
        assert!(show(&client, "server_version").await.starts_with(&format!("{}.", version.major())));
        assert_eq!(show(&client, "wal_level").await, "logical");
        assert_eq!(show(&client, "wal_sender_timeout").await, "7s");
        server.reload("wal_sender_timeout", "9s").await;
        assert_eq!(show(&server.client().await, "wal_sender_timeout").await, "9s");

        client.batch_execute("CREATE TABLE kept (id int); INSERT INTO kept VALUES (1); CHECKPOINT").await.unwrap();
        let took = server.stop_fast().await;
        assert!(took < SOON, "a fast stop took {took:?}");
        assert!(client.is_closed() || client.batch_execute("SELECT 1").await.is_err());
        server.start_again().await;
        server.client().await.batch_execute("INSERT INTO kept VALUES (2)").await.unwrap();
        server.stop_immediate().await;
        server.start_again().await;
        let client = connect(&server.socket_url("postgres")).await;
        let kept: i64 = client.query_one("SELECT count(*) FROM kept", &[]).await.unwrap().get(0);
        assert_eq!(kept, 2);
        assert!(server.log().contains("automatic recovery in progress"), "{}", server.log());
        server.restart().await;

        server.freeze();
        let url = server.url("postgres");
        let frozen = tokio::time::timeout(QUIET, connect(&url)).await;
        assert!(frozen.is_err(), "a frozen server answered");
        server.thaw();
        server.client().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn databases_of_a_shared_server_are_apart_and_leave_no_slot() {
    let server = Postgres::shared(PgVersion::V18).await;
    let (one, two) = (server.database().await, server.database().await);
    assert_ne!(one.name, two.name);
    for database in [&one, &two] {
        let client = database.client().await;
        client.batch_execute("CREATE TABLE events (id int)").await.unwrap();
        let make = "SELECT pg_create_logical_replication_slot($1, 'pgoutput')::text";
        client.query_one(make, &[&database.slot]).await.unwrap();
    }
    let (slot, name) = (one.slot.clone(), one.name.clone());
    drop(one);
    let client = server.client().await;
    let left = "SELECT (SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1)
                     + (SELECT count(*) FROM pg_database WHERE datname = $2)";
    assert_eq!(client.query_one(left, &[&slot, &name]).await.unwrap().get::<_, i64>(0), 0);
    assert_eq!(client.query_one(left, &[&two.slot, &two.name]).await.unwrap().get::<_, i64>(0), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nats_starts_stops_and_keeps_its_store() {
    for version in NatsVersion::ENDS {
        let mut server = Nats::start_with(version, "max_payload: 2MB").await;
        let client = server.client().await;
        assert_eq!(client.server_info().max_payload, 2 * 1024 * 1024);
        assert!(client.server_info().version.starts_with(version.name()), "{}", client.server_info().version);
        let space = Space::new();
        let config = async_nats::jetstream::stream::Config {
            name: space.stream.clone(),
            subjects: vec![space.subjects()],
            ..Default::default()
        };
        let jetstream = server.jetstream().await;
        jetstream.create_stream(config).await.unwrap();
        assert_eq!(stream::read_all(&jetstream, &space.stream).await, []);
        for number in 0..300 {
            let mut headers = async_nats::HeaderMap::new();
            headers.insert("Nats-Msg-Id", number.to_string());
            let subject = format!("{}.a.{number}", space.prefix);
            let ack = jetstream.publish_with_headers(subject, headers, number.to_string().into()).await.unwrap();
            ack.await.unwrap();
        }
        server.stop().await;
        server.start_again().await;
        server.kill().await;
        server.start_again().await;
        let jetstream = server.jetstream().await;
        assert_eq!(stream::count(&jetstream, &space.stream).await, 300);
        let all = stream::read_all(&jetstream, &space.stream).await;
        for (number, stored) in all.iter().enumerate() {
            assert_eq!(stored.sequence, number as u64 + 1);
            assert_eq!(stored.subject, format!("{}.a.{number}", space.prefix));
            assert_eq!(stored.id(), number.to_string());
            assert_eq!(stored.payload, number.to_string());
        }
        assert_eq!(all.len(), 300);
    }
}

/// A server that sends back what it gets.
async fn echo() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    port
}

async fn open(proxy: &Proxy) -> TcpStream {
    TcpStream::connect(proxy.address()).await.unwrap()
}

async fn answer(stream: &mut TcpStream, words: &[u8]) {
    stream.write_all(words).await.unwrap();
    read(stream, words).await;
}

async fn read(stream: &mut TcpStream, words: &[u8]) {
    let mut back = vec![0; words.len()];
    tokio::time::timeout(SOON, stream.read_exact(&mut back)).await.expect("an answer").unwrap();
    assert_eq!(back, words);
}

async fn silent(stream: &mut TcpStream) {
    let mut byte = [0];
    let read = tokio::time::timeout(QUIET, stream.read(&mut byte)).await;
    assert!(read.is_err(), "something came: {read:?}");
}

async fn reset(stream: &mut TcpStream) {
    let mut byte = [0];
    let read = tokio::time::timeout(SOON, stream.read(&mut byte)).await.expect("a reset");
    assert_eq!(read.expect_err("a reset").kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxy_passes_holds_drops_and_delays() {
    let proxy = Proxy::start(echo().await).await;
    let mut stream = open(&proxy).await;
    answer(&mut stream, b"one").await;
    // What has come is counted a moment later.
    let passed = async |counts| {
        let now = || (proxy.passed(Direction::ToServer), proxy.passed(Direction::ToClient));
        eventually(SOON, &format!("{counts:?} bytes have passed"), async || now() == counts).await;
    };
    passed((3, 3)).await;

    proxy.hold(Direction::ToClient);
    stream.write_all(b"two").await.unwrap();
    silent(&mut stream).await;
    passed((6, 3)).await;
    proxy.pass();
    read(&mut stream, b"two").await;

    proxy.drop_both();
    stream.write_all(b"lost").await.unwrap();
    silent(&mut stream).await;
    proxy.pass();
    answer(&mut stream, b"three").await;

    proxy.delay(Direction::ToServer, QUIET);
    let start = std::time::Instant::now();
    answer(&mut stream, b"late").await;
    assert!(start.elapsed() >= QUIET);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxy_cuts_refuses_and_keeps_an_end_back() {
    let proxy = Proxy::start(echo().await).await;
    let (mut one, mut two) = (open(&proxy).await, open(&proxy).await);
    answer(&mut one, b"one").await;
    answer(&mut two, b"two").await;
    assert_eq!((proxy.accepted(), proxy.open()), (2, 2));
    proxy.reset_all();
    reset(&mut one).await;
    reset(&mut two).await;
    eventually(SOON, "both are closed", async || proxy.open() == 0).await;

    proxy.refuse();
    // The reset may come before the client has seen its connection made.
    if let Ok(mut stream) = TcpStream::connect(proxy.address()).await {
        reset(&mut stream).await;
    }
    assert_eq!(proxy.open(), 0);
    proxy.pass();
    let mut stream = open(&proxy).await;
    proxy.cut_after(Direction::ToClient, 4);
    stream.write_all(b"123456").await.unwrap();
    let mut back = Vec::new();
    let error = tokio::time::timeout(SOON, stream.read_to_end(&mut back)).await.expect("a cut").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);

    let mut stream = open(&proxy).await;
    proxy.hold_after(Direction::ToClient, 4);
    stream.write_all(b"123456").await.unwrap();
    read(&mut stream, b"1234").await;
    silent(&mut stream).await;
    proxy.pass();
    read(&mut stream, b"56").await;

    // The client goes, and the server does not hear of it: what a broken network looks like from there.
    proxy.drop_both();
    drop(stream);
    always(QUIET, "the server's side stays open", async || proxy.open() == 1).await;
    proxy.pass();
    eventually(SOON, "the end is passed on", async || proxy.open() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proxy_loses_chosen_nats_messages() {
    let server = Nats::shared(NatsVersion::V2_15).await;
    let proxy = Proxy::start_nats(server.port()).await;
    let space = Space::new();
    let config = async_nats::jetstream::stream::Config {
        name: space.stream.clone(),
        subjects: vec![space.subjects()],
        ..Default::default()
    };
    server.jetstream().await.create_stream(config).await.unwrap();
    let client = async_nats::connect(proxy.instead_of(&server.url())).await.unwrap();
    let mut jetstream = async_nats::jetstream::new(client);
    jetstream.set_timeout(QUIET);
    let publish = async |jetstream: &async_nats::jetstream::Context| {
        jetstream.publish(format!("{}.x", space.prefix), "a line\r\nand another".into()).await.unwrap().await
    };
    publish(&jetstream).await.unwrap();
    proxy.drop_messages(|line| line.contains("_INBOX."));
    publish(&jetstream).await.expect_err("the acknowledgement is lost");
    proxy.pass();
    publish(&jetstream).await.unwrap();
    assert_eq!(stream::count(&server.jetstream().await, &space.stream).await, 3);
}
