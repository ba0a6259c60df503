//! `outbox-relay demo`: it shows what it promises, and leaves nothing behind, however it ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::process::Process;
use crate::harness::relay::RelaySettings;

/// For the whole demo, on two busy cores.
const DEMO: Duration = Duration::from_mins(2);

/// What a demo made and is still there: schemas, publications and slots, and streams.
async fn remains(database: &Database, nats: &Nats) -> (Vec<String>, u64) {
    let statement = r"SELECT nspname::text FROM pg_namespace WHERE nspname LIKE 'outbox\_demo\_%'
        UNION ALL SELECT pubname FROM pg_publication
        UNION ALL SELECT slot_name FROM pg_replication_slots WHERE database = current_database()";
    let rows = database.client().await.query(statement, &[]).await.unwrap();
    let info = nats.jetstream().await.query_account().await.unwrap();
    (rows.iter().map(|row| row.get(0)).collect(), u64::try_from(info.streams).unwrap())
}

async fn servers(version: usize) -> (Database, Nats) {
    (Postgres::shared(PgVersion::ENDS[version]).await.database().await, Nats::start(NatsVersion::ENDS[version]).await)
}

fn settings(database: &Database, nats: &Nats) -> RelaySettings {
    RelaySettings::new(&database.url(), &nats.url()).unset("log.level")
}

/// Starts a demo and waits until its first event is on the screen.
async fn started(settings: &RelaySettings) -> (Process, BufReader<std::process::ChildStdout>) {
    let mut command = settings.command(&["demo"]);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut demo = Process::spawn(&mut command, Signal::KILL);
    let mut out = BufReader::new(demo.child().stdout.take().unwrap());
    let reading = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        while !line.contains("order.placed") {
            line.clear();
            assert!(out.read_line(&mut line).unwrap() > 0, "the demo ended before its first event");
        }
        out
    });
    let out = tokio::time::timeout(DEMO, reading).await.expect("a first event").unwrap();
    (demo, out)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_delivers_every_event_and_leaves_nothing() {
    for version in [0, 1] {
        let (database, nats) = servers(version).await;
        let output = tokio::time::timeout(DEMO, settings(&database, &nats).run(&["demo"])).await.expect("an end");
        let (out, log) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert_eq!(output.status.code(), Some(0), "{out}{log}");
        for line in [
            "sent          300 events in 180 transactions",
            "received      300 by the subscriber, 0 more than once",
            "stream        300 messages",
            "outbox table  300 completed",
            "OK: every event came once",
        ] {
            assert!(out.contains(line), "{line:?} is not in\n{out}");
        }
        assert!(!out.contains('\x1b'), "colours in a pipe");
        assert!(!log.contains(" INFO "), "{log}");
        assert_eq!(remains(&database, &nats).await, (vec![], 0));
    }
}

/// Ctrl-C cleans up; what `kill -9` leaves is removed by the next demo, which spares one that runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_that_is_interrupted_or_killed_leaves_nothing_for_long() {
    let (database, nats) = servers(1).await;
    let settings = settings(&database, &nats);
    let (mut killed, _out) = started(&settings).await;
    killed.signal(Signal::KILL);
    killed.wait(DEMO, "the killed demo").await;
    let (left, streams) = remains(&database, &nats).await;
    assert_eq!((left.len(), streams), (3, 1), "{left:?}");

    let (mut first, mut first_out) = started(&settings).await;
    let (mut second, _out) = started(&settings).await;
    let (both, streams) = remains(&database, &nats).await;
    assert!(both.len() == 6 && streams == 2 && !both.contains(&left[0]), "{both:?} with {left:?}");

    second.signal(Signal::INT);
    let status = second.wait(DEMO, "the interrupted demo").await;
    assert_eq!(status.code(), Some(1));
    let rest = tokio::task::spawn_blocking(move || {
        let mut rest = String::new();
        first_out.read_to_string(&mut rest).unwrap();
        rest
    });
    let rest = tokio::time::timeout(DEMO, rest).await.expect("an end").unwrap();
    assert!(rest.contains("OK: every event came once"), "{rest}");
    assert!(first.wait(DEMO, "the demo").await.success());
    assert_eq!(remains(&database, &nats).await, (vec![], 0));
}

#[tokio::test]
async fn demo_without_servers_says_how_to_have_some() {
    let nowhere = RelaySettings::new("postgres://nobody@127.0.0.1:1/none", "nats://127.0.0.1:1").run(&["demo"]).await;
    let log = String::from_utf8(nowhere.stderr).unwrap();
    assert_eq!(nowhere.status.code(), Some(1), "{log}");
    assert!(log.contains("`make demo`") && log.contains("DATABASE_URL") && log.contains("NATS_URL"), "{log}");
    assert!(nowhere.stdout.is_empty());
}
