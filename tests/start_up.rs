//! Every missing or wrong piece of the set-up gives its own error at the start, which names the object and the mend.

use std::time::Duration;

use async_nats::jetstream::consumer::pull::Config as PullConfig;
use async_nats::jetstream::stream::{Config, Source};

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::process::free_port;
use crate::harness::proxy::{Direction, Proxy};
use crate::harness::relay::RelaySettings;
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

/// Starts the relay, which must end by itself with `code` and one error that holds all these words.
async fn refused(what: &str, settings: &RelaySettings, code: i32, words: &[&str]) {
    let mut relay = settings.start();
    let status = relay.wait_exit(DEADLINE).await;
    let log = relay.log();
    assert_eq!(status.code(), Some(code), "{what}:\n{log}");
    assert!(!log.contains("panicked"), "{what}:\n{log}");
    let start = log.find("outbox-relay: ").unwrap_or_else(|| panic!("{what}: no error is told:\n{log}"));
    for word in words {
        assert!(log[start..].contains(word), "{what}: the error does not say {word:?}:\n{log}");
    }
}

/// What is wrong; statements that make it so, after `migrate`; settings; words of the error.
type Fault = (&'static str, &'static str, &'static [(&'static str, &'static str)], &'static [&'static str]);

const ROLE: (&str, &str) = ("postgres.url", "{url of role}");
const NOT_MADE: (&str, &str) = ("source.create", "false");
/// All that a relay's role needs when publication and slot exist.
const GRANTS: &str =
    "GRANT SELECT, UPDATE ON outbox_events TO {role}; GRANT SELECT, INSERT ON outbox_dead_letter TO {role};
    GRANT SELECT, INSERT, UPDATE ON outbox_relay_state, supply_batch_compensation TO {role};";

const FAULTS: &[Fault] = &[
    ("tables dropped", "DROP TABLE outbox_events CASCADE", &[], &["outbox_events", "outbox-relay migrate"]),
    (
        "a table of the relay dropped",
        "DROP TABLE outbox_dead_letter CASCADE",
        &[],
        &["outbox_dead_letter", "outbox-relay migrate"],
    ),
    (
        "a column dropped",
        "ALTER TABLE outbox_events DROP COLUMN version CASCADE",
        &[],
        &["version", "outbox-relay migrate"],
    ),
    ("no such table", "", &[("source.table", "public.elsewhere")], &["\"public\".\"elsewhere\"", "source.table"]),
    ("no such database", "", &[("postgres.url", "{url}_not")], &["_not\" does not exist", "postgres.url"]),
    (
        "no grants",
        "CREATE ROLE {role} LOGIN REPLICATION",
        &[ROLE],
        &["GRANT SELECT, UPDATE ON \"public\".\"outbox_events\" TO {role}", "outbox_dead_letter", "outbox_relay_state"],
    ),
    (
        "no right to delete",
        "CREATE ROLE {role} LOGIN REPLICATION; {grants}",
        &[ROLE, ("writeback.on_success", "delete")],
        &["GRANT DELETE ON"],
    ),
    (
        "no use of the schema",
        "CREATE ROLE {role} LOGIN REPLICATION; {grants} REVOKE USAGE ON SCHEMA public FROM PUBLIC",
        &[ROLE],
        &["GRANT USAGE ON SCHEMA", "{role}"],
    ),
    (
        "no use of an adopted table's sequence",
        "CREATE ROLE {role} LOGIN REPLICATION; {grants} CREATE SEQUENCE dead_ids;
         ALTER TABLE outbox_dead_letter ALTER id DROP IDENTITY, ALTER id SET DEFAULT nextval('dead_ids')",
        &[ROLE],
        &["GRANT USAGE ON SEQUENCE dead_ids TO {role}"],
    ),
    ("no replication", "CREATE ROLE {role} LOGIN; {grants}", &[ROLE], &["ALTER ROLE {role} REPLICATION"]),
    (
        "no right to make the publication",
        "CREATE ROLE {role} LOGIN REPLICATION; {grants}",
        &[ROLE],
        &["cannot create publication", "owner: outbox-relay publication create", "CREATE PUBLICATION"],
    ),
    (
        "a slot of another plugin",
        "SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')",
        &[],
        &["{slot}", "test_decoding", "source.slot"],
    ),
    (
        "a physical slot",
        "SELECT pg_create_physical_replication_slot('{slot}')",
        &[],
        &["{slot}", "not a logical slot", "source.slot"],
    ),
    (
        "no publication",
        "",
        &[NOT_MADE],
        &["{publication}", "outbox-relay publication create", "CREATE PUBLICATION", "source.create"],
    ),
    (
        "a publication without inserts",
        "CREATE PUBLICATION {publication} FOR TABLE outbox_events WITH (publish = 'update')",
        &[],
        &["does not publish inserts", "ALTER PUBLICATION"],
    ),
    (
        "a publication without the table",
        "CREATE PUBLICATION {publication} FOR TABLE outbox_dead_letter",
        &[],
        &["does not include", "outbox_events", "ADD TABLE"],
    ),
    (
        "a publication without a column",
        "CREATE PUBLICATION {publication} FOR TABLE outbox_events
           (id, event_id, aggregate_type, aggregate_id, event_type, status, next_retry_at) WITH (publish = 'insert')",
        &[],
        &["{publication}", "leaves out", "payload", "headers"],
    ),
    (
        "no slot",
        "CREATE PUBLICATION {publication} FOR TABLE outbox_events WITH (publish = 'insert')",
        &[NOT_MADE],
        &["{slot}", "source.create = false", "run: outbox-relay slot create", "pg_create_logical_replication_slot"],
    ),
    ("a slot name that cannot be", "", &[("source.slot", "A-b")], &["source.slot"]),
];

fn fill(text: &str, database: &Database) -> String {
    let role = format!("{}_role", database.name);
    text.replace("{grants}", GRANTS)
        .replace("{url of role}", &database.url().replace("postgres@", &format!("{role}@")))
        .replace("{url}", &database.url())
        .replace("{role}", &role)
        .replace("{slot}", &database.slot)
        .replace("{publication}", &database.publication)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_database_are_told() {
    let nats = Nats::shared(NatsVersion::V2_15).await;
    for (number, (what, sql, settings, words)) in FAULTS.iter().enumerate() {
        let version = PgVersion::ENDS[number % 2];
        let (database, space) = (Postgres::shared(version).await.database().await, Space::new());
        let mut relay = RelaySettings::shared(&database, nats, &space);
        relay.migrate().await;
        database
            .client()
            .await
            .batch_execute(&fill(sql, &database))
            .await
            .unwrap_or_else(|error| panic!("{what}: {error:?}"));
        for (key, value) in *settings {
            relay = relay.set(key, &fill(value, &database));
        }
        let words: Vec<_> = words.iter().map(|word| fill(word, &database)).collect();
        let code = if settings.iter().any(|(key, _)| *key == "source.slot") { 78 } else { 1 };
        refused(what, &relay, code, &words.iter().map(String::as_str).collect::<Vec<_>>()).await;
        let clean = fill("DROP OWNED BY {role}; DROP ROLE {role}", &database);
        if sql.contains("ROLE") {
            database.client().await.batch_execute(&clean).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unmigrated_database_and_slot_of_another_are_told() {
    let (server, nats) = (Postgres::shared(PgVersion::V18).await, Nats::shared(NatsVersion::V2_15).await);
    let (database, other) = (server.database().await, server.database().await);
    let settings = RelaySettings::shared(&database, nats, &Space::new());
    refused("not migrated", &settings, 1, &["\"public\".\"outbox_events\"", "does not exist", "outbox-relay migrate"])
        .await;
    settings.migrate().await;
    let make = "SELECT pg_create_logical_replication_slot($1, 'pgoutput')::text";
    other.client().await.query_one(make, &[&other.slot]).await.unwrap();
    let taken = settings.set("source.slot", &other.slot);
    refused("a slot of another database", &taken, 1, &[&other.slot, "another database", "source.slot"]).await;
}

/// NATS is not waited for before PostgreSQL's faults are told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unmigrated_database_is_told_of_while_nats_is_away() {
    let database = Postgres::shared(PgVersion::V15).await.database().await;
    let nats = Nats::shared(NatsVersion::V2_10).await;
    let away = format!("nats://127.0.0.1:{}", free_port());
    let settings = RelaySettings::shared(&database, nats, &Space::new()).set("nats.url", &away);
    refused("not migrated", &settings, 1, &["\"public\".\"outbox_events\"", "outbox-relay migrate"]).await;
}

/// Commands that go through a pooler would work on another outbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_of_two_servers_are_told() {
    let (old, new) = (Postgres::shared(PgVersion::V15).await, Postgres::shared(PgVersion::V18).await);
    let (commands, database) = (old.database().await, new.database().await);
    let settings = RelaySettings::shared(&database, Nats::shared(NatsVersion::V2_15).await, &Space::new());
    settings.migrate().await;
    let url = &database.url();
    let split = settings.set("postgres.url", &commands.url()).set("postgres.replication_url", url);
    refused("two servers", &split, 1, &["postgres.url and postgres.replication_url reach different servers"]).await;
    let mut relay = split.set("postgres.url", "postgres://postgres@127.0.0.1:1/none").start();
    relay.wait_ready().await;
    assert!(relay.log().contains("postgres.url, where commands go, does not answer"), "{}", relay.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_server_are_told() {
    let nats = Nats::shared(NatsVersion::V2_15).await;
    for version in PgVersion::ENDS {
        let space = Space::new();
        let server = Postgres::start(version, &[("wal_level", "replica")]).await;
        let settings = |url: &str| RelaySettings::new(url, &nats.url()).within(&space);
        let base = settings(&server.url("postgres"));
        base.migrate().await;
        refused("wal_level", &base, 1, &["wal_level", "ALTER SYSTEM SET wal_level", "restart"]).await;

        let standby = server.standby().await;
        let url = standby.url("postgres");
        refused("a standby", &settings(&url), 1, &["standby", "target_session_attrs=read-write"]).await;

        let client = server.client().await;
        client.batch_execute("CREATE ROLE relay LOGIN REPLICATION PASSWORD 'right'").await.unwrap();
        server.write_hba("local all all trust\nhost postgres relay 127.0.0.1/32 scram-sha-256\n").await;
        let place = format!("127.0.0.1:{}", server.port());
        let wrong = settings(&format!("postgres://relay:wrong@{place}/postgres"));
        refused("a wrong password", &wrong, 1, &["password authentication failed", "postgres.password_file"]).await;
        let none = settings(&format!("postgres://relay@{place}/postgres"));
        refused("no password", &none, 1, &["password", "postgres.password_file"]).await;
        let barred = settings(&format!("postgres://other@{place}/postgres"));
        refused("pg_hba.conf", &barred, 1, &["pg_hba.conf"]).await;
        let plain = settings(&format!("postgres://relay:right@{place}/postgres?sslmode=require"));
        refused("no TLS", &plain, 1, &["does not support SSL", "ssl = on"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfit_streams_are_told() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    for version in NatsVersion::ENDS {
        let nats = Nats::shared(version).await;
        let jetstream = nats.jetstream().await;
        let base = |space: &Space| RelaySettings::shared(&database, nats, space);
        let config = |space: &Space| Config {
            name: space.stream.clone(),
            subjects: vec![space.subjects()],
            ..Default::default()
        };
        let space = Space::new();
        base(&space).migrate().await;
        let verify = base(&space).set("nats.manage", "verify");
        refused("no stream", &verify, 1, &[&space.stream, "does not exist", "nats.manage"]).await;

        let origin = config(&space);
        jetstream.create_stream(origin).await.unwrap();
        let mirror = Space::new();
        let source = Source { name: space.stream.clone(), ..Default::default() };
        let mirrored = Config { name: mirror.stream.clone(), mirror: Some(source), ..Default::default() };
        jetstream.create_stream(mirrored).await.unwrap();
        refused("a mirror", &base(&mirror), 1, &[&mirror.stream, "mirror", "nats.stream"]).await;

        let sealed = Space::new();
        jetstream.create_stream(config(&sealed)).await.unwrap();
        jetstream.update_stream(Config { sealed: true, ..config(&sealed) }).await.unwrap();
        refused("a sealed stream", &base(&sealed), 1, &[&sealed.stream, "sealed", "nats.stream"]).await;

        let silent = Space::new();
        jetstream.create_stream(Config { no_ack: true, ..config(&silent) }).await.unwrap();
        refused("no acknowledgements", &base(&silent), 1, &[&silent.stream, "no_ack", "--ack"]).await;

        let narrow = Space::new();
        let subjects = vec![format!("{}.order.created", narrow.prefix)];
        jetstream.create_stream(Config { subjects, ..config(&narrow) }).await.unwrap();
        refused("subjects not covered", &base(&narrow), 1, &[&narrow.stream, "does not cover", "route.subject"]).await;

        let second = Space { stream: format!("{}_SECOND", space.stream), ..space.clone() };
        refused("subjects of another", &base(&second), 1, &[&second.stream, "overlap", &space.stream]).await;
        let apart = base(&second).set("nats.create.subjects", &format!("{}_apart.>", space.prefix));
        refused("created too narrow", &apart, 1, &["does not cover", "route.subject"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_nats_accounts_are_told() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    for version in NatsVersion::ENDS {
        let config = "authorization { users: [ {user: relay, password: right},
            {user: small, password: right, permissions: {publish: \"it.>\", subscribe: \"_INBOX.>\"}},
            {user: blind, password: right, permissions: {publish: {deny: \"$JS.API.CONSUMER.CREATE.>\"}}},
            {user: deaf, password: right, permissions: {publish: {deny: \"$JS.API.CONSUMER.MSG.NEXT.>\"}}},
            {user: messy, password: right, permissions: {publish: {deny: \"$JS.API.CONSUMER.DELETE.>\"}}}] }";
        let nats = Nats::start_with(version, config).await;
        let base = RelaySettings::shared(&database, &nats, &Space::new());
        let login = |user: &str, password: &str| base.clone().set("nats.user", user).set("nats.password", password);
        base.migrate().await;
        refused("no login", &base, 1, &["NATS", "nats.user"]).await;
        refused("a wrong password", &login("relay", "wrong"), 1, &["NATS", "nats.user"]).await;
        let small = login("small", "right");
        refused("no right to look at the stream", &small, 1, &["$JS.API.STREAM.INFO", "permissions"]).await;
        // Not when something has to be read for the first time, which is after a kill.
        let words = ["may not publish to \"$JS.API.CONSUMER.CREATE.", "permissions"];
        refused("no right to ask the stream", &login("blind", "right"), 1, &words).await;
        let words = ["may not publish to \"$JS.API.CONSUMER.MSG.NEXT.", ".*\"", "permissions"];
        refused("no right to read the stream", &login("deaf", "right"), 1, &words).await;
        // What is left behind ends by itself.
        login("messy", "right").start().wait_ready().await;
    }
}

/// Another's consumer takes the place that the relay needs to ask what the stream holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_cannot_be_asked_is_waited_for() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    for version in NatsVersion::ENDS {
        let (nats, space) = (Nats::shared(version).await, Space::new());
        let settings = RelaySettings::shared(&database, nats, &space);
        settings.migrate().await;
        let config = Config { max_consumers: 1, ..space.small_stream(100) };
        let stream = nats.jetstream().await.create_stream(config).await.unwrap();
        let consumer = PullConfig { durable_name: Some("it".to_owned()), ..PullConfig::default() };
        stream.create_consumer(consumer).await.unwrap();
        let mut relay = settings.start();
        relay.wait_log("maximum consumers", DEADLINE).await;
        relay.wait_unready().await;
        stream.delete_consumer("it").await.unwrap();
        relay.wait_ready().await;
    }
}

/// What may come by itself is waited for, with the reason in the log and in the probe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_are_away_are_waited_for() {
    let (server, nats) = (Postgres::shared(PgVersion::V18).await, Nats::shared(NatsVersion::V2_15).await);
    let database = server.database().await;
    let base = RelaySettings::shared(&database, nats, &Space::new());
    base.migrate().await;
    let (to_postgres, to_nats) = (Proxy::start(server.port()).await, Proxy::start(nats.port()).await);
    to_nats.refuse();
    to_postgres.refuse();
    let settings = base
        .set("postgres.url", &to_postgres.instead_of(&database.url()))
        .set("nats.url", &to_nats.instead_of(&nats.url()));
    let mut relay = settings.start();
    relay.wait_log("waiting for NATS", DEADLINE).await;
    relay.wait_unready().await;
    // Long enough for several attempts.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(relay.log().matches("waiting for NATS").count(), 1, "it is said once: {}", relay.log());
    to_nats.pass();
    relay.wait_log("NATS is reached", DEADLINE).await;
    relay.wait_log("cannot connect to PostgreSQL", DEADLINE).await;
    relay.wait_unready().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    // The ways in which it is refused take turns.
    let log = relay.log();
    let reasons =
        log.lines().filter(|line| line.contains(" WARN ")).filter_map(|line| line.split_once("next one begins soon"));
    let mut reasons: Vec<&str> = reasons.map(|(_, reason)| reason).collect();
    reasons.sort_unstable();
    assert!(!reasons.is_empty() && reasons.windows(2).all(|pair| pair[0] != pair[1]), "each is said once: {log}");
    to_postgres.pass();
    relay.wait_ready().await;
    assert!(relay.terminate(DEADLINE).await.success());

    // Nobody listens at all, and the relay is told to stop while it waits.
    let mut relay = settings.set("nats.url", &format!("nats://127.0.0.1:{}", free_port())).start();
    relay.wait_log("waiting for NATS", DEADLINE).await;
    assert!(relay.terminate(DEADLINE).await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jetstream_that_is_off_is_waited_for() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    for version in NatsVersion::ENDS {
        let accounts = |jetstream: &str| {
            format!("accounts {{ A {{ users: [{{user: a, password: a}}]\n{jetstream}\n }} }}\nno_auth_user: a\n")
        };
        let mut nats = Nats::start_with(version, &accounts("")).await;
        let settings = RelaySettings::shared(&database, &nats, &Space::new());
        settings.migrate().await;
        let mut relay = settings.start();
        relay.wait_log("enable JetStream", DEADLINE).await;
        relay.wait_unready().await;
        nats.stop().await;
        nats.configure(&accounts("jetstream: enabled"));
        nats.start_again().await;
        relay.wait_ready().await;
    }
}

/// A server that takes connections and then says nothing more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_is_given_up_with_the_reason() {
    let (server, nats) = (Postgres::shared(PgVersion::V18).await, Nats::shared(NatsVersion::V2_15).await);
    let database = server.database().await;
    let base = RelaySettings::shared(&database, nats, &Space::new());
    base.migrate().await;
    let proxy = Proxy::start(server.port()).await;
    // Enough for a login, too little for all that is checked.
    proxy.hold_after(Direction::ToClient, 2000);
    let mut relay = base.set("postgres.url", &proxy.instead_of(&database.url())).start();
    relay.wait_log("did not answer for", DEADLINE * 2).await;
    relay.wait_says(&["did not answer"]).await;
    proxy.pass();
    relay.wait_ready().await;
}

/// A claim that a poller has not ended is respected, and the poller is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poller_that_keeps_the_relay_from_beginning_is_named() {
    let (server, nats) = (Postgres::shared(PgVersion::V18).await, Nats::shared(NatsVersion::V2_15).await);
    let database = server.database().await;
    let settings = RelaySettings::shared(&database, nats, &Space::new());
    settings.migrate().await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    assert!(relay.terminate(DEADLINE).await.success());
    let poller = database.client().await;
    poller
        .batch_execute("SET application_name = 'old poller'; BEGIN; SELECT fetch_and_lock_outbox_events(1)")
        .await
        .unwrap();
    let pid: i32 = poller.query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let mut relay = settings.start();
    let name = format!("pid {pid} (old poller)");
    eventually(DEADLINE * 2, "it names the poller", async || relay.says(&[&name]).await).await;
    poller.batch_execute("ROLLBACK").await.unwrap();
    relay.wait_ready().await;
}
