//! Faults of a whole server: each needs one of its own.

use std::time::Duration;

use rustix::process::Signal;
use tokio_postgres::NoTls;

use super::{Patient, Report, text};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::{Process, command};
use crate::harness::relay::RelaySettings;
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

async fn on(server: &Postgres) -> Patient {
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let settings = RelaySettings::new(&server.url("postgres"), &nats.url()).within(&space);
    Patient::over(server, &server.url("postgres"), &settings)
}

/// Settings of the server, and the ids that find them.
const ILL: &[(&str, &str, &str)] = &[
    ("wal_level", "replica", "wal-level"),
    ("max_replication_slots", "1", "slots-left"),
    ("max_wal_senders", "1", "replication-refused"),
    ("max_connections", "10", "connections-left"),
    ("max_slot_wal_keep_size", "64MB", "retained-wal-limit"),
    ("wal_sender_timeout", "1s", "sender-timeout"),
    ("autovacuum", "off", "autovacuum-off"),
    ("synchronous_commit", "off", "synchronous-commit"),
    ("output_plugin_libraries", "test_decoding", "output-plugin"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_settings_of_a_server_are_found_and_mended() {
    let settings: Vec<(&str, &str)> = ILL.iter().map(|(name, value, _)| (*name, *value)).collect();
    let mut server = Postgres::start(PgVersion::V18, &settings).await;
    let mut patient = on(&server).await;
    patient.operator.migrate().await;
    patient.sql("SELECT pg_create_physical_replication_slot('other')").await;
    // It takes the only sender.
    let mut receiver = command(&patient.bin.join("pg_receivewal"), &server.data(), None);
    receiver.args(["-D", ".", "-d", &server.url("postgres")]);
    let receiver = Process::spawn(&mut receiver, Signal::KILL);
    let sending = async || {
        let client = server.client().await;
        client.query_one("SELECT count(*) FROM pg_stat_replication", &[]).await.unwrap().get::<_, i64>(0) == 1
    };
    eventually(DEADLINE, "the sender is taken", sending).await;
    let report = patient.report().await;
    for (_, _, id) in ILL {
        assert!(report.has(id), "{id}: {:#?}", report.findings);
    }

    // Where someone else runs the server, the mends are theirs.
    for (role, platform, words) in [
        ("rds_superuser", "rds", "ParameterName=rds.logical_replication,ParameterValue=1"),
        ("cloudsqlsuperuser", "cloud_sql", "cloudsql.logical_decoding=on"),
        ("azure_pg_admin", "azure", "--name wal_level --value logical"),
    ] {
        patient.sql(&format!("CREATE ROLE {role}")).await;
        let report = patient.report().await;
        let finding = report.of_id("wal-level")[0];
        let mends = finding["mend"].as_array().unwrap();
        assert!(mends.iter().all(|mend| mend["platform"] == platform), "{finding}");
        assert!(text(&mends[0]["command"]).contains(words), "{finding}");
        patient.sql(&format!("DROP ROLE {role}")).await;
    }

    drop(receiver);
    let mut by_hand = Vec::new();
    for (_, _, id) in ILL {
        by_hand.extend(patient.mend(&report, id).await);
    }
    assert!(by_hand.iter().any(|step| step == "restart PostgreSQL"), "{by_hand:?}");
    server.restart().await;
    let report = patient.report().await;
    for (_, _, id) in ILL {
        assert!(!report.has(id), "{id}: {:#?}", report.findings);
    }
    assert!(report.ills().is_empty(), "{:?}", report.findings);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_holds_log_and_commits_back_is_found_and_mended() {
    let settings = [("max_prepared_transactions", "2"), ("idle_replication_slot_timeout", "1d")];
    let server = Postgres::start(PgVersion::V18, &settings).await;
    let mut patient = on(&server).await;
    patient.operator.migrate().await;
    patient.settings = patient.settings.clone().set("source.max_retained_wal", "16MiB");
    patient.sql("SELECT pg_create_physical_replication_slot('other', true)").await;
    patient.sql("CREATE TABLE t (i int)").await;
    // The connection of the session is its own: it is ended from outside.
    let (client, connection) = tokio_postgres::connect(&server.url("postgres"), NoTls).await.unwrap();
    let ended = tokio::spawn(connection);
    client.batch_execute("BEGIN; INSERT INTO t VALUES (1)").await.unwrap();
    patient.sql("BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'it''s'").await;
    patient.sql("SELECT pg_logical_emit_message(false, 'p', repeat('x', 1000000)) FROM generate_series(1, 20)").await;
    let long = async |settings: &RelaySettings| Report::of(settings, &["--patience", "1ms"]).await;
    let ids = ["long-transaction", "prepared-transaction", "other-slot-wal"];
    let report = long(&patient.settings).await;
    assert_eq!(report.ills(), ids, "{:#?}", report.findings);
    assert!(report.has("idle-slot-timeout"));
    // Nobody has waited for that long yet.
    assert!(!patient.report().await.has("long-transaction"));
    for id in ids.into_iter().chain(["idle-slot-timeout"]) {
        patient.mend(&report, id).await;
    }
    assert!(ended.await.unwrap().is_err(), "the session lives on");
    let report = long(&patient.settings).await;
    assert!(report.ills().is_empty() && !report.has("idle-slot-timeout"), "{:#?}", report.findings);

    // Standbys that are awaited and are not there.
    patient.sql("SELECT pg_create_physical_replication_slot('standby')").await;
    server.reload("synchronized_standby_slots", "standby").await;
    server.reload("synchronous_standby_names", "nosuch").await;
    let ids = ["standby-slots", "synchronous-standby"];
    let report = patient.report().await;
    assert_eq!(report.ills(), ids, "{:#?}", report.findings);
    for id in ids {
        patient.mend(&report, id).await;
    }
    assert!(patient.report().await.ills().is_empty());

    // A slot that the server has given up.
    patient.sql("SELECT pg_create_logical_replication_slot('outbox_relay', 'pgoutput', failover => true)").await;
    server.reload("max_slot_wal_keep_size", "1MB").await;
    eventually(DEADLINE, "the slot is lost", async || {
        patient.sql("SELECT pg_logical_emit_message(false, 'p', 'm'), pg_switch_wal()").await;
        patient.sql("CHECKPOINT").await;
        patient.report().await.has("slot-lost")
    })
    .await;
    let report = patient.report().await;
    assert!(!report.checked.contains(&"slot-lost".into()) && report.has("retained-wal-limit"), "{:?}", report.findings);
    for id in ["slot-lost", "retained-wal-limit"] {
        patient.mend(&report, id).await;
    }
    assert!(patient.report().await.ills().is_empty());
}

/// What keeps old rows, and what comes of it in the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_keeps_old_rows_and_transaction_ids_is_found_and_mended() {
    // A quarter of the age at which tables are frozen is much.
    let settings = [
        ("autovacuum_freeze_max_age", "100000"),
        ("max_prepared_transactions", "1"),
        ("hot_standby_feedback", "on"),
        ("wal_receiver_status_interval", "1s"),
    ];
    let mut server = Postgres::start(PgVersion::V18, &settings).await;
    let mut patient = on(&server).await;
    patient.operator.migrate().await;
    patient.sql("SELECT pg_create_logical_replication_slot('other', 'pgoutput')").await;
    patient.sql("CREATE TABLE t (i int)").await;
    let standby = server.standby().await;
    let reader = standby.client().await;
    reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM t").await.unwrap();
    patient.sql("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'p'").await;
    let xmin = "SELECT count(*) FROM pg_stat_replication WHERE backend_xmin IS NOT NULL";
    let fed = async || server.client().await.query_one(xmin, &[]).await.unwrap().get::<_, i64>(0) == 1;
    eventually(DEADLINE, "the standby feeds back", fed).await;
    assert!(patient.report().await.ills().is_empty());
    // Each block with a handler is a transaction of its own.
    let burn = "DO $$ BEGIN FOR i IN 1..26000 LOOP
          BEGIN INSERT INTO t VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END;
        END LOOP; END $$";
    patient.sql(burn).await;
    let found = async || {
        let report = Report::of(&patient.settings, &["--patience", "1ms"]).await;
        report.ills() == ["prepared-transaction", "other-slot-xmin", "standby-xmin"]
    };
    eventually(DEADLINE, "what keeps old rows is found", found).await;
    let report = Report::of(&patient.settings, &["--patience", "1ms"]).await;
    for id in ["prepared-transaction", "other-slot-xmin"] {
        patient.mend(&report, id).await;
    }
    assert_eq!(patient.mend(&report, "standby-xmin").await, ["end the long query that runs on the standby"]);
    reader.batch_execute("COMMIT").await.unwrap();
    let gone = async || patient.report().await.ills().is_empty();
    eventually(DEADLINE, "nothing keeps old rows", gone).await;
    drop(standby);

    // Nothing froze them for a thousand million transactions. What nobody can connect to would be autovacuum's.
    patient.sql("ALTER SYSTEM SET autovacuum_freeze_max_age = 2000000000").await;
    patient.sql("ALTER DATABASE template0 ALLOW_CONNECTIONS true").await;
    patient.sql("CREATE DATABASE \"it's\"").await;
    server.restart_at(1050 << 20).await;
    let report = patient.report().await;
    assert_eq!(report.of_id("wraparound").len(), 4, "{:#?}", report.findings);
    patient.mend(&report, "wraparound").await;
    assert!(patient.report().await.ills().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_servers_and_doors_are_found() {
    let server = Postgres::start(PgVersion::V15, &[]).await;
    let mut patient = on(&server).await;
    patient.operator.migrate().await;
    // A standby has the primary's tables, and takes no writes.
    let standby = server.standby().await;
    let report = Report::of(&patient.settings.clone().set("postgres.url", &standby.url("postgres")), &[]).await;
    assert_eq!(report.ills(), ["server-standby"], "{:?}", report.findings);
    let hosts = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?target_session_attrs=read-write",
        standby.port(),
        server.port()
    );
    assert!(Report::of(&patient.settings.clone().set("postgres.url", &hosts), &[]).await.ills().is_empty());
    // Statements and the log from two servers.
    let split = patient.settings.clone().set("postgres.replication_url", &standby.url("postgres"));
    assert!(Report::of(&split, &[]).await.has("servers-differ"));
    drop(standby);

    // A database whose encoding checks nothing.
    patient.sql("CREATE DATABASE ascii ENCODING 'SQL_ASCII' TEMPLATE template0").await;
    let ascii = patient.settings.clone().set("postgres.url", &server.url("ascii"));
    assert!(Report::of(&ascii, &[]).await.has("encoding"));

    // pg_hba.conf lets the relay's role in nowhere.
    patient.sql("CREATE ROLE relay LOGIN SUPERUSER").await;
    patient.settings =
        patient.settings.clone().set("postgres.url", &server.url("postgres").replace("postgres@", "relay@"));
    let doors = "local all all trust\nhost all postgres 127.0.0.1/32 trust\n";
    server.write_hba(doors).await;
    let report = patient.report().await;
    assert_eq!(report.ills(), ["postgres-refused"], "{:?}", report.findings);
    let by_hand = patient.mend(&report, "postgres-refused").await;
    let line = by_hand[0].split_once(": ").unwrap().1.replace("ADDRESS_OF_RELAY", "127.0.0.1");
    // The role has no password.
    server.write_hba(&format!("{}\n{doors}", line.replace("scram-sha-256", "trust"))).await;
    assert!(patient.report().await.ills().is_empty());
}
