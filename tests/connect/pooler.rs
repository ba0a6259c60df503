//! A pooler between the relay and PostgreSQL (case 20).

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use outbox_relay::postgres::connect::{ConnectErrorKind as Kind, Session, Target, replication, sql};
use rustix::process::Signal;

use crate::harness::nats::{Nats, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::{Process, User, command, free_port, give, new_folder};
use crate::harness::programs::NatsVersion;
use crate::harness::relay::RelaySettings;
use crate::harness::wait::eventually;

/// `PGBOUNCER`, or what the system has installed. It cannot be fetched without root, so that it is missed only in CI.
fn program() -> Option<PathBuf> {
    if let Some(program) = std::env::var_os("PGBOUNCER") {
        return Some(program.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]);
    let found = folders.map(|folder| folder.join("pgbouncer")).find(|program| program.is_file());
    let missing = "pgbouncer is missing: install it (Debian: apt-get install pgbouncer) or name it in PGBOUNCER";
    assert!(found.is_some() || std::env::var_os("CI").is_none(), "{missing}");
    if found.is_none() {
        eprintln!("NOT TESTED: {missing}");
    }
    found
}

struct Pooler {
    port: u16,
    _process: Process,
}

async fn start(program: &Path, server: &Postgres, more: &str) -> Pooler {
    let user = User::instead_of_root();
    let folder = new_folder("pgbouncer", user.as_ref());
    let port = free_port();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        give(&path, user.as_ref());
        path
    };
    let users = write("users", "\"postgres\" \"\"\n");
    let config = format!(
        "[databases]\n* = host=127.0.0.1 port={}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
         unix_socket_dir =\nauth_type = trust\nauth_file = {}\npool_mode = transaction\n{more}\n",
        server.port(),
        users.display()
    );
    let mut run = command(program, &folder, user.as_ref());
    run.arg(write("config", &config)).stdout(Stdio::null()).stderr(Stdio::null());
    let mut process = Process::spawn(&mut run, Signal::KILL);
    eventually(Duration::from_secs(20), "pgbouncer listens", async || {
        assert!(process.ended().is_none(), "pgbouncer ended: is port {port} taken?");
        tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok()
    })
    .await;
    Pooler { port, _process: process }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooler_serves_statements_and_refuses_replication() {
    let Some(program) = program() else { return };
    for version in PgVersion::ENDS {
        let server = Postgres::start(version, &[]).await;
        // Both ways to be in the way: refusing the parameter, and taking it away in silence.
        for more in ["", "ignore_startup_parameters = replication,IntervalStyle,extra_float_digits"] {
            let pooler = start(&program, &server, more).await;
            let url = format!("postgres://postgres@127.0.0.1:{}/postgres", pooler.port);
            let target = Target::parse(&url, None).unwrap();
            let statements = sql(&target, &Session::new("it")).await.unwrap();
            let one: i32 = statements.client.query_typed("SELECT 1", &[]).await.unwrap()[0].get(0);
            assert_eq!(one, 1);
            let error = replication(&target, &Session::new("it")).await.unwrap_err();
            assert_eq!((error.kind(), error.is_transient()), (Kind::Pooler, false), "{more}: {error}");
            assert!(error.to_string().contains("postgres.replication_url"), "{more}: {error}");
        }
        let direct = Target::parse(&server.url("postgres"), None).unwrap();
        replication(&direct, &Session::new("it")).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_behind_a_pooler_says_so_and_runs_with_a_replication_url() {
    let Some(program) = program() else { return };
    let server = Postgres::start(PgVersion::V18, &[]).await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let pooler = start(&program, &server, "").await;
    let pooled = format!("postgres://postgres@127.0.0.1:{}/postgres", pooler.port);
    let settings = RelaySettings::new(&pooled, &nats.url()).within(&space);
    settings.migrate().await;

    let mut relay = settings.start();
    let status = relay.wait_exit(Duration::from_secs(30)).await;
    assert_eq!(status.code(), Some(1), "{}", relay.log());
    assert!(relay.log().contains("postgres.replication_url"), "{}", relay.log());

    let mut relay = settings.set("postgres.replication_url", &server.url("postgres")).start();
    relay.wait_ready().await;
    let client = server.client().await;
    let insert =
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'b', '{}')";
    client.batch_execute(insert).await.unwrap();
    eventually(Duration::from_secs(30), "the row is completed", async || {
        let done = "SELECT count(*) FROM outbox_events WHERE status = 'completed'";
        client.query_one(done, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
}
