//! Several hosts, and which of them is the right one.

use std::process::Stdio;

use outbox_relay::postgres::connect::ConnectErrorKind as Kind;

use super::{admits, open, refuses};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::{User, command, free_port};

/// Makes `server` a hot standby of `primary`.
async fn follow(server: &mut Postgres, primary: &Postgres) {
    let (data, port) = (server.data(), server.port());
    server.stop_fast().await;
    std::fs::remove_dir_all(&data).unwrap();
    let folder = data.parent().unwrap();
    let mut copy = command(&primary.bin().join("pg_basebackup"), folder, User::instead_of_root().as_ref());
    copy.args(["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--pgdata"]).arg(&data);
    copy.arg("--dbname").arg(primary.socket_url("postgres")).stdout(Stdio::null());
    assert!(tokio::task::spawn_blocking(move || copy.status()).await.unwrap().unwrap().success());
    let config = std::fs::read_to_string(data.join("postgresql.conf")).unwrap();
    let own = format!("{config}\nport = {port}\nunix_socket_directories = '{}'\n", folder.display());
    server.write("postgresql.conf", own.as_bytes());
    server.start_again().await;
}

/// The port that both kinds of connection reached.
async fn reached(conninfo: &str) -> u16 {
    let (statements, replicating) = open(conninfo).await;
    let port = "SELECT current_setting('port')::int4";
    let by_sql: i32 = statements.unwrap().client.query_one(port, &[]).await.unwrap().get(0);
    let outbox_relay::postgres::connect::Socket::Tcp(stream) = replicating.unwrap().stream else {
        panic!("not TCP");
    };
    assert_eq!(stream.peer_addr().unwrap().port(), u16::try_from(by_sql).unwrap());
    u16::try_from(by_sql).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_host_that_fits() {
    let primary = Postgres::start(PgVersion::V18, &[]).await;
    let mut standby = Postgres::start(PgVersion::V18, &[]).await;
    follow(&mut standby, &primary).await;
    let read_only = Postgres::start(PgVersion::V15, &[("default_transaction_read_only", "on")]).await;
    let (dead, first, second, third) = (free_port(), standby.port(), read_only.port(), primary.port());
    let hosts = format!("127.0.0.1:{dead},127.0.0.1:{first},127.0.0.1:{second},127.0.0.1:{third}");
    let url = |attributes: &str| format!("postgres://postgres@{hosts}/postgres{attributes}");
    for (attributes, port) in [
        ("", third),
        ("?target_session_attrs=read-write", third),
        ("?target_session_attrs=any", first),
        ("?target_session_attrs=standby", first),
        ("?target_session_attrs=prefer-standby", first),
        ("?target_session_attrs=read-only", first),
        ("?target_session_attrs=primary", second),
        ("?load_balance_hosts=random", third),
    ] {
        assert_eq!(reached(&url(attributes)).await, port, "{attributes}");
    }
    // The list may be of keys, a name may stand for several addresses, and one port serves all.
    admits(&format!("host=localhost,127.0.0.1 port={third} user=postgres dbname=postgres")).await;

    let none = format!("postgres://postgres@127.0.0.1:{dead},127.0.0.1:{first}/postgres");
    refuses(&none, Kind::NoSuitableHost, "a standby").await;
    refuses(&none, Kind::NoSuitableHost, &format!("127.0.0.1:{dead}")).await;
    let no_standby = format!("postgres://postgres@127.0.0.1:{second},127.0.0.1:{third}/postgres");
    refuses(&format!("{no_standby}?target_session_attrs=standby"), Kind::NoSuitableHost, "a primary").await;
    assert_eq!(reached(&format!("{no_standby}?target_session_attrs=prefer-standby")).await, second);
    // What must be mended by hand is not hidden by a host further on.
    let wrong = format!("postgres://postgres@127.0.0.1:{third},127.0.0.1:{second}/nothing");
    refuses(&wrong, Kind::Database, "nothing").await;
}
