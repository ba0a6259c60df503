//! Settings reach the relay from wherever they stand, and its log holds no row values and no secrets.

use std::time::Duration;

use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::outbox::{count, outcome, settled};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::new_folder;
use crate::harness::relay::RelaySettings;
use crate::harness::stream;
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_of_file_environment_and_flags_reach_the_relay() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
    let file = new_folder("settings", None).join("relay.toml");
    let text = format!(
        "[postgres]\nurl = \"{}\"\n[source]\nslot = \"{}\"\npublication = \"{}\"\n\
         [nats]\nstream = \"FROM_FILE\"\n[nats.create]\nsubjects = [\"{}\"]\n\
         [route]\nsource = \"/from-file\"\nsubject = \"{}\"\n",
        database.url(),
        database.slot,
        database.publication,
        space.subjects(),
        space.template()
    );
    std::fs::write(&file, text).unwrap();
    let settings = RelaySettings::shared(&database, nats, &space)
        .unset("postgres.url")
        .unset("source.slot")
        .unset("source.publication")
        .unset("nats.url")
        .unset("nats.create.subjects")
        .unset("route.subject")
        .set("nats.stream", "FROM_ENVIRONMENT")
        .set("route.source", "/from-environment")
        .variable("OUTBOX_RELAY_CONFIG", file.to_str().unwrap())
        .variable("NATS_URL", &nats.url());
    settings.migrate().await;
    let mut relay = settings.argument(&format!("--nats-stream={}", space.stream)).start();
    relay.wait_ready().await;
    let client = database.client().await;
    let insert =
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'b', 'c', '1')";
    client.batch_execute(insert).await.unwrap();
    settled(&client, DEADLINE).await;
    let stored = stream::read_all(&nats.jetstream().await, &space.stream).await;
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].subject, format!("{}.a.c", space.prefix));
    assert_eq!(stored[0].header("ce-source"), Some("/from-environment"));
    let slot = "SELECT active FROM pg_replication_slots WHERE slot_name = $1";
    assert!(client.query_one(slot, &[&database.slot]).await.unwrap().get::<_, bool>(0));
}

/// Everything that can be said of a row is said: delivered, refused, dead, sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_lines_are_json_without_row_values() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let space = Space::new();
    let config = format!(
        "no_auth_user: admin\nauthorization {{ users: [ {{user: admin, password: admin}},
           {{user: relay, password: kept-secret, permissions: {{publish: {{deny: [\"{}.zzaggregate.zzdenied\"]}}}}}}] }}",
        space.prefix
    );
    let mut nats = Nats::start_with(NatsVersion::V2_15, &config).await;
    let settings = RelaySettings::shared(&database, &nats, &space)
        .set("nats.user", "relay")
        .set("nats.password", "kept-secret")
        .set("log.format", "json")
        .set("log.level", "trace")
        .set("retry.initial", "10m")
        .set("retry.max", "10m");
    settings.migrate().await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    let client = database.client().await;
    let sql = "INSERT INTO outbox_events (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, headers)
               SELECT $1::text, 'zztenant', 'zzaggregate', 'zzid' || $1, $2::text,
                      to_jsonb('zzpayload' || repeat('x', $3::int4)), jsonb_build_object('zzname', 'zzvalue', 'Nats-zz', 'zzreserved')";
    let insert = async |id: &str, event_type: &str, bytes: i32| {
        client.execute(sql, &[&id, &event_type, &bytes]).await.expect("insert");
    };
    insert("zz1", "zztype", 1).await;
    insert("zz2", "zzdenied", 1).await;
    insert("zz3", "zztype", 2_000_000).await;
    settled(&client, DEADLINE).await;
    eventually(DEADLINE, "one is refused", async || outcome(&client, "zz2").await.status == "failed").await;
    assert_eq!(outcome(&client, "zz3").await.status, "dead_letter");
    nats.stop().await;
    relay.wait_unready().await;
    insert("zz4", "zztype", 1).await;
    nats.start_again().await;
    settled(&client, DEADLINE).await;
    assert_eq!(count(&client, "status = 'completed'").await, 2);
    assert!(relay.terminate(DEADLINE).await.success());
    let log = relay.log();
    assert!(log.contains("permission_denied") && log.contains("message_too_large"), "the refusals are told:\n{log}");
    for line in log.lines() {
        let entry: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        for field in ["timestamp", "level", "message", "target"] {
            assert!(entry[field].is_string(), "{field}: {line}");
        }
        // Libraries under `trace` are for whoever asked for them; what counts is what the relay itself says.
        if entry["target"].as_str().is_some_and(|target| target.starts_with("outbox_relay")) {
            assert!(!line.contains("zz"), "a row's value: {line}");
        }
        assert!(!line.contains("kept-secret"), "a secret: {line}");
    }
}

/// Wherever a secret stands, and whatever goes wrong with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn secrets_are_never_logged() {
    const SECRET: &str = "kept-secret";
    let postgres = Postgres::start(PgVersion::V18, &[]).await;
    let nats = Nats::start_with(NatsVersion::V2_15, "authorization {user: relay, password: right}").await;
    postgres.client().await.batch_execute("CREATE ROLE relay LOGIN REPLICATION PASSWORD 'right'").await.unwrap();
    postgres.write_hba("local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n").await;
    let place = format!("127.0.0.1:{}", postgres.port());
    let right_nats = format!("nats://relay:right@127.0.0.1:{}", nats.port());
    let right_postgres = format!("postgres://relay:right@{place}/postgres");
    let base = |postgres: &str, nats: &str| RelaySettings::new(postgres, nats).set("log.level", "trace");
    let cases = [
        base(&format!("postgres://relay:{SECRET}@{place}/postgres"), &right_nats),
        base(
            &format!("host=127.0.0.1 port={} user=relay password={SECRET} dbname=postgres", postgres.port()),
            &right_nats,
        ),
        base(&format!("postgres://relay@{place}/postgres"), &right_nats).set("postgres.password", SECRET),
        base(&format!("postgres://relay:{SECRET}@{place}:x/postgres"), &right_nats),
        base(&format!("postgres://relay:{SECRET}@{place}/postgres?sslmode=nonsense"), &right_nats),
        base(&format!("host=127.0.0.1 password={SECRET} nonsense"), &right_nats),
        base(&right_postgres, &format!("nats://relay:{SECRET}@127.0.0.1:{}", nats.port())),
        base(&right_postgres, &format!("nats://{SECRET}@127.0.0.1:{}", nats.port())),
        base(&right_postgres, &format!("nats://relay:{SECRET}@127.0.0.1:port")),
        base(&right_postgres, &nats.url()).set("nats.user", "relay").set("nats.password", SECRET),
        base(&right_postgres, &nats.url()).set("nats.token", SECRET),
    ];
    for settings in cases {
        let mut relay = settings.start();
        let status = relay.wait_exit(DEADLINE).await;
        let log = relay.log();
        assert!(matches!(status.code(), Some(1 | 78)), "{settings:?}: {status}\n{log}");
        assert!(!log.is_empty() && !log.contains(SECRET) && !log.contains("panicked"), "{settings:?}:\n{log}");
    }
}
