//! Both kinds of PostgreSQL connection: what lets them in, and what each refusal says.

mod hosts;
mod pooler;
mod tls;

use std::os::unix::fs::PermissionsExt as _;

use outbox_relay::postgres::connect::{
    ConnectError, ConnectErrorKind as Kind, ReplicationConnection, Session, SqlConnection, Target, replication, sql,
};

use crate::harness::postgres::{PgVersion, Postgres};

/// A password that is hard on every parser (case 21). It ends in a space.
const PASSWORD: &str = r"%I\GYg-7a@:/?#{y ";
const PASSWORD_IN_URL: &str = "%25I%5CGYg-7a%40%3A%2F%3F%23%7By%20";
const PASSWORD_QUOTED: &str = r"'%I\\GYg-7a@:/?#{y '";

/// Opens the replication connection and the one for statements.
async fn open(conninfo: &str) -> (Result<SqlConnection, ConnectError>, Result<ReplicationConnection, ConnectError>) {
    let target = Target::parse(conninfo, None).unwrap_or_else(|error| panic!("{conninfo}: {error}"));
    open_target(&target).await
}

async fn open_target(
    target: &Target,
) -> (Result<SqlConnection, ConnectError>, Result<ReplicationConnection, ConnectError>) {
    let replicating = replication(target, &Session::new("it wal").with("wal_sender_timeout", "21s")).await;
    (sql(target, &Session::new("it sql").with("lock_timeout", "3s")).await, replicating)
}

/// Both kinds connect and work.
async fn admits(conninfo: &str) {
    let (statements, replicating) = open(conninfo).await;
    let statements = statements.unwrap_or_else(|error| panic!("{conninfo}: {error}"));
    let replicating = replicating.unwrap_or_else(|error| panic!("{conninfo}: {error}"));
    let row = statements.client.query_one("SELECT pg_backend_pid(), current_setting('lock_timeout')", &[]).await;
    let row = row.unwrap();
    assert_eq!(row.get::<_, i32>(0), statements.backend_pid);
    assert_eq!(row.get::<_, String>(1), "3s");
    for parameters in [&statements.parameters, &replicating.parameters] {
        for (name, value) in [("client_encoding", "UTF8"), ("TimeZone", "UTC"), ("DateStyle", "ISO, MDY")] {
            assert_eq!(parameters[name], value);
        }
    }
    assert!(replicating.buffered.is_empty());
    let senders = "SELECT (SELECT count(*) FROM pg_stat_replication WHERE pid = $1), system_identifier::text
                   FROM pg_control_system()";
    if let Ok(row) = statements.client.query_one(senders, &[&replicating.backend_pid]).await {
        // Others than superusers and monitors may not look.
        assert_eq!((row.get(0), row.get(1)), (1_i64, replicating.system.identifier.clone()));
    }
    statements.close().await;
}

/// Both kinds are refused, for this reason, in words that hold `words` and never the password.
async fn refuses(conninfo: &str, kind: Kind, words: &str) {
    let (statements, replicating) = open(conninfo).await;
    for error in [statements.map(drop), replicating.map(drop)] {
        let error = error.expect_err(conninfo);
        assert_eq!(error.kind(), kind, "{conninfo}: {error}");
        let shown = format!("{error} {error:?}");
        assert!(shown.contains(words), "{conninfo}: {error}");
        assert!(!shown.contains("GYg-7a"), "the password shows: {error}");
    }
}

const HBA: &str = "local all clear password
    local all all trust
    host all scram all scram-sha-256
    host all md5er all md5
    host all clear all password
    host all all all reject
";

/// A server with a role for each way to log in, each with [`PASSWORD`].
async fn server_with_roles(version: PgVersion, settings: &[(&str, &str)], hba: &str) -> Postgres {
    let server = Postgres::start(version, settings).await;
    let client = server.client().await;
    let password = PASSWORD.replace('\'', "''");
    for (encryption, role) in [("scram-sha-256", "scram"), ("md5", "md5er"), ("scram-sha-256", "clear")] {
        let create = format!(
            "SET password_encryption = '{encryption}'; SET standard_conforming_strings = on;
             CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{password}'"
        );
        client.batch_execute(&create).await.unwrap();
    }
    client.batch_execute("CREATE ROLE stranger LOGIN REPLICATION; CREATE ROLE plain LOGIN").await.unwrap();
    server.write_hba(hba).await;
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_ipv6_and_unix_sockets() {
    for version in PgVersion::ENDS {
        let server = Postgres::start(version, &[("listen_addresses", "127.0.0.1,::1")]).await;
        let port = server.port();
        admits(&server.url("postgres")).await;
        admits(&format!("postgresql://postgres@[::1]:{port}/postgres?sslmode=disable")).await;
        admits(&format!("host=localhost port={port} user=postgres dbname=postgres")).await;
        admits(&format!("host=no.such.host.invalid hostaddr=::1 port={port} user=postgres dbname=postgres")).await;
        admits(&server.socket_url("postgres")).await;
        let socket = server.data().parent().unwrap().display().to_string();
        admits(&format!("postgres://postgres@{}:{port}/postgres", socket.replace('/', "%2F"))).await;
        admits(&format!("postgres:///postgres?host={socket}&port={port}&user=postgres")).await;
        // What the connection string asks of the session reaches both kinds.
        let asking = format!("{}?application_name=asked&options=-c%20statement_timeout%3D4s", server.url("postgres"));
        let (statements, replicating) = open(&asking).await;
        let (statements, replicating) = (statements.unwrap(), replicating.unwrap());
        let timeout: String = statements.client.query_one("SHOW statement_timeout", &[]).await.unwrap().get(0);
        assert_eq!(timeout, "4s");
        for parameters in [&statements.parameters, &replicating.parameters] {
            assert_eq!(parameters["application_name"], "asked");
        }
        // TLS does not exist on a Unix socket, whatever is asked for.
        admits(&format!("{} sslmode=require", server.socket_url("postgres"))).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_of_any_characters() {
    for version in PgVersion::ENDS {
        let server = server_with_roles(version, &[], HBA).await;
        let (port, socket) = (server.port(), server.data().parent().unwrap().display().to_string());
        for role in ["scram", "md5er"] {
            admits(&format!("postgres://{role}:{PASSWORD_IN_URL}@127.0.0.1:{port}/postgres")).await;
            admits(&format!("host=127.0.0.1 port={port} user={role} dbname=postgres password={PASSWORD_QUOTED}")).await;
            let wrong = format!("host=127.0.0.1 port={port} user={role} dbname=postgres");
            refuses(&format!("{wrong} password=GYg-7a"), Kind::Password, "password authentication failed").await;
            refuses(&wrong, Kind::Password, "none is set").await;
        }
        let from_elsewhere = format!("postgres://scram:wrong@127.0.0.1:{port}/postgres");
        let target = Target::parse(&from_elsewhere, Some(PASSWORD)).unwrap();
        let (statements, replicating) = open_target(&target).await;
        statements.unwrap();
        replicating.unwrap();

        // In the clear: not where others can read along, but through a Unix socket.
        let clear = format!("port={port} user=clear dbname=postgres password={PASSWORD_QUOTED}");
        refuses(&format!("host=127.0.0.1 {clear}"), Kind::Authentication, "in the clear").await;
        admits(&format!("host={socket} {clear}")).await;
        refuses(
            &format!("host=127.0.0.1 port={port} user=scram dbname=postgres password={PASSWORD_QUOTED} channel_binding=require"),
            Kind::Authentication,
            "channel_binding=require",
        )
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_from_a_file() {
    let server = server_with_roles(PgVersion::V18, &[], HBA).await;
    let port = server.port();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pgpass");
    let escaped = PASSWORD.replace('\\', r"\\").replace(':', r"\:");
    std::fs::write(&file, format!("# ours\n*:*:*:other:x\n127.0.0.1:{port}:postgres:scram:{escaped}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let conninfo = format!("host=127.0.0.1 port={port} user=scram dbname=postgres passfile={}", file.display());
    admits(&conninfo).await;
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    refuses(&conninfo, Kind::Password, "none is set").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_refusal_has_its_reason() {
    for version in PgVersion::ENDS {
        // Those that were refused may still be on their way out.
        let server = server_with_roles(version, &[("max_wal_senders", "4")], HBA).await;
        let (port, unix) = (server.port(), server.data().parent().unwrap().display().to_string());
        let local = |user: &str, database: &str| format!("host={unix} port={port} user={user} dbname={database}");
        refuses(&local("postgres", "nothing"), Kind::Database, "\"nothing\"").await;
        refuses(&local("nobody", "postgres"), Kind::NotAdmitted, "\"nobody\"").await;
        let stranger = format!("postgres://stranger@127.0.0.1:{port}/postgres");
        refuses(&stranger, Kind::NotAdmitted, "pg_hba").await;
        refuses(&format!("{stranger}?sslmode=require"), Kind::Tls, "does not support SSL").await;

        let (statements, replicating) = open(&local("plain", "postgres")).await;
        statements.unwrap();
        let error = replicating.unwrap_err();
        assert_eq!(error.kind(), Kind::Privilege, "{error}");
        assert!(error.to_string().contains("WITH REPLICATION"), "{error}");

        let mut senders = Vec::new();
        let error = loop {
            match open(&local("postgres", "postgres")).await.1 {
                Ok(sender) => senders.push(sender),
                Err(error) => break error,
            }
            assert!(senders.len() <= 4);
        };
        assert_eq!((error.kind(), error.is_transient()), (Kind::TooManyConnections, true), "{error}");
        assert!(error.to_string().contains("max_wal_senders"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waiting_may_mend() {
    let mut server = Postgres::start(PgVersion::V18, &[]).await;
    let url = format!("{}?connect_timeout=1", server.url("postgres"));
    let open_sql = sql(&Target::parse(&url, None).unwrap(), &Session::new("it")).await.unwrap();
    server.freeze();
    refuses(&url, Kind::Unreachable, "connect_timeout").await;
    server.thaw();
    server.stop_fast().await;
    refuses(&url, Kind::Unreachable, &format!("127.0.0.1:{}", server.port())).await;
    refuses("postgres://u@no.such.host.invalid/d", Kind::Unreachable, "does not resolve").await;
    let reason = open_sql.driver.closed().await;
    assert!(reason.contains("57P01"), "{reason}");
    assert_eq!(open_sql.driver.closed().await, reason);

    // Something that is no PostgreSQL at all.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
            // Read on, so that the answer is not lost in a reset.
            let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
        }
    });
    refuses(&format!("postgres://u@127.0.0.1:{port}/d?sslmode=disable"), Kind::Protocol, "does not speak").await;
}
