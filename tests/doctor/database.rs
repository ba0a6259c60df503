//! Faults of a database, a role, the tables, the publication and the slot.

use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;

use super::{Patient, Report, fill, text};
use crate::harness::postgres::{Database, PgVersion};
use crate::harness::process::{Process, command, scratch};
use crate::harness::wait::eventually;

const DEADLINE: Duration = Duration::from_mins(1);

/// How it is planted, as a superuser; settings; the id that finds it.
type Fault = (&'static str, &'static [(&'static str, &'static str)], &'static str);

const NOT_MADE: (&str, &str) = ("source.create", "false");

const FAULTS: &[Fault] = &[
    ("ALTER ROLE {role} NOLOGIN", &[], "postgres-refused"),
    ("ALTER ROLE {role} NOREPLICATION", &[], "role-replication"),
    ("ALTER ROLE {role} CONNECTION LIMIT 3", &[], "role-limits"),
    ("ALTER DATABASE {database} CONNECTION LIMIT 5", &[], "role-limits"),
    (
        "DO $$ BEGIN EXECUTE format('ALTER ROLE {role} VALID UNTIL %L', now() + interval '3 days'); END $$",
        &[],
        "role-expires",
    ),
    ("ALTER ROLE {role} SET idle_session_timeout = '10min'", &[], "role-settings"),
    ("ALTER ROLE {role} SET default_transaction_read_only = on", &[], "role-settings"),
    ("REVOKE USAGE ON SCHEMA public FROM PUBLIC", &[], "schema-usage"),
    ("REVOKE UPDATE ON outbox_events FROM {role}", &[], "grants"),
    ("", &[("writeback.on_success", "delete")], "grants"),
    ("DROP TABLE outbox_dead_letter CASCADE", &[], "schema-current"),
    ("ALTER TABLE outbox_events DROP COLUMN version CASCADE", &[], "schema-current"),
    ("ALTER TABLE outbox_events ENABLE ROW LEVEL SECURITY", &[], "row-security"),
    (
        "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
         CREATE TRIGGER \"On Upd\" BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION audit()",
        &[],
        "triggers",
    ),
    ("ALTER TABLE outbox_events ALTER COLUMN id SET CACHE 50", &[], "sequence"),
    ("CREATE INDEX \"By status\" ON outbox_events (status)", &[], "cold-index"),
    ("ALTER TABLE outbox_events SET (fillfactor = 100)", &[], "fillfactor"),
    ("ALTER TABLE outbox_events REPLICA IDENTITY FULL", &[], "replica-identity"),
    ("ALTER TABLE outbox_events SET (autovacuum_enabled = off)", &[], "table-autovacuum"),
    (
        "ALTER TABLE outbox_events SET (autovacuum_enabled = off);
         INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
           SELECT 'a', '1', 'e', '{}' FROM generate_series(1, 11000);
         DELETE FROM outbox_events",
        &[],
        "dead-rows",
    ),
    (
        "DROP PUBLICATION {publication}; ALTER TABLE outbox_events SET UNLOGGED;
         CREATE PUBLICATION {publication} FOR ALL TABLES",
        &[],
        "table-unlogged",
    ),
    ("DROP PUBLICATION {publication}", &[], "publication-missing"),
    ("ALTER PUBLICATION {publication} SET (publish = 'update')", &[], "publication-no-inserts"),
    ("ALTER PUBLICATION {publication} SET (publish = 'insert, delete')", &[], "publication-operations"),
    // A table that is dropped and made again leaves its publication like this.
    ("ALTER PUBLICATION {publication} DROP TABLE outbox_events", &[], "publication-no-table"),
    ("ALTER PUBLICATION {publication} ADD TABLE outbox_dead_letter", &[], "publication-other-tables"),
    ("DROP PUBLICATION {publication}; CREATE PUBLICATION {publication} FOR ALL TABLES", &[], "publication-all-tables"),
    (
        "ALTER PUBLICATION {publication} SET TABLE outbox_events WHERE (tenant_id IS NULL)",
        &[],
        "publication-row-filter",
    ),
    (
        "ALTER PUBLICATION {publication} SET TABLE outbox_events
           (id, event_id, aggregate_type, aggregate_id, event_type, status, next_retry_at)",
        &[],
        "publication-columns",
    ),
    ("", &[NOT_MADE], "slot-missing"),
    ("SELECT pg_create_logical_replication_slot('{slot}', 'test_decoding')", &[], "slot-plugin"),
    ("SELECT pg_create_physical_replication_slot('{slot}')", &[], "slot-plugin"),
    ("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)", &[], "slot-two-phase"),
    ("SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", &[], "slot-failover"),
];

/// What a fault may leave behind: the next one begins without a slot.
const CLEAN: &str = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{slot}'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_the_database_are_found_and_mended() {
    tokio::join!(treat(PgVersion::V15), treat(PgVersion::V18));
}

async fn treat(version: PgVersion) {
    let (database, mut patient) = Patient::shared(version).await;
    let healthy = patient.settings.clone();
    // Every other one on each version. A slot survives a failover from PostgreSQL 17 on.
    let turn = usize::from(version == PgVersion::V18);
    let own = FAULTS.iter().enumerate().filter(|(number, (.., id))| match *id {
        "slot-failover" => version == PgVersion::V18,
        _ => number % 2 == turn,
    });
    for (_, (plant, settings, id)) in own {
        patient.settings = healthy.clone();
        for (key, value) in *settings {
            patient.settings = patient.settings.clone().set(key, value);
        }
        if !plant.is_empty() {
            patient.sql(&fill(plant, &database)).await;
        }
        let mut report = patient.report().await;
        assert!(report.ills().contains(id), "{plant} is not found as {id}, but {:?}", report.findings);
        patient.mend(&report, id).await;
        report = patient.report().await;
        assert!(!report.ills().contains(id), "{plant}: what mends {id} does not: {:?}", report.of_id(id));
        // What the fault brought with it, such as the grants of a table that was made again.
        for _ in 0..3 {
            if report.ills().is_empty() {
                break;
            }
            for id in report.ills() {
                patient.mend(&report, id).await;
            }
            report = patient.report().await;
        }
        assert!(report.ills().is_empty(), "{plant}: {:?}", report.findings);
        patient.sql(&fill(CLEAN, &database)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slot_that_someone_else_has_is_found_and_freed() {
    let (database, mut patient) = Patient::shared(PgVersion::V18).await;
    let make = "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', failover => true)";
    patient.sql(&fill(make, &database)).await;
    let mut foreign = command(&patient.bin.join("pg_recvlogical"), scratch(), None);
    foreign.args(["--start", "--no-loop", "-f", "-", "--slot", &database.slot, "-d", &database.url()]);
    foreign.args(["-o", "proto_version=1", "-o", &format!("publication_names={}", database.publication)]);
    let mut foreign = Process::spawn(foreign.stdout(Stdio::null()).stderr(Stdio::null()), Signal::KILL);
    eventually(DEADLINE, "the other one holds the slot", async || patient.report().await.has("slot-holder")).await;
    let report = patient.report().await;
    assert!(text(&report.of_id("slot-holder")[0]["problem"]).contains("pg_recvlogical"), "{:?}", report.findings);
    patient.mend(&report, "slot-holder").await;
    foreign.wait(DEADLINE, "the other one").await;
    assert!(patient.report().await.ills().is_empty());

    // The same name in another database.
    let (other, mut patient) = Patient::shared(PgVersion::V18).await;
    patient.settings = patient.settings.clone().set("source.slot", &database.slot);
    let report = patient.report().await;
    assert!(report.has("slot-database"), "{:?}", report.findings);
    patient.mend(&report, "slot-database").await;
    assert!(patient.report().await.ills().is_empty());
    drop(other);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitioned_outbox_is_examined_partition_by_partition() {
    let (database, mut patient) = Patient::shared(PgVersion::V18).await;
    patient.sql("DROP TABLE outbox_events CASCADE").await;
    // As V1 makes it, but for the key.
    patient
        .sql(
            "CREATE TABLE outbox_events (id bigint GENERATED BY DEFAULT AS IDENTITY, event_id varchar(64) NOT NULL DEFAULT
               gen_random_uuid()::text, aggregate_type varchar(64) NOT NULL, aggregate_id varchar(128) NOT NULL,
               event_type varchar(128) NOT NULL, payload jsonb NOT NULL, PRIMARY KEY (id)) PARTITION BY RANGE (id);
             CREATE TABLE early PARTITION OF outbox_events FOR VALUES FROM (0) TO (1000);
             CREATE TABLE late PARTITION OF outbox_events FOR VALUES FROM (1000) TO (MAXVALUE)",
        )
        .await;
    patient.operator.migrate().await;
    let grants = "GRANT SELECT, UPDATE ON outbox_events TO {role};
        ALTER PUBLICATION {publication} ADD TABLE outbox_events;
        ALTER PUBLICATION {publication} SET (publish_via_partition_root = false)";
    patient.sql(&fill(grants, &database)).await;
    patient.sql("ALTER TABLE late SET (fillfactor = 100); CREATE INDEX ON outbox_events (status)").await;
    let report = patient.report().await;
    assert_eq!(report.ills(), ["cold-index", "fillfactor", "publication-partitions"], "{:?}", report.findings);
    assert_eq!(text(&report.of_id("fillfactor")[0]["object"]), "table public.late");
    for id in report.ills() {
        patient.mend(&report, id).await;
    }
    assert!(patient.report().await.ills().is_empty());
}

/// Rows that wait for a relay, and the log behind its slot, wait no more when one runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_relay_is_found_and_goes_when_one_runs() {
    for version in PgVersion::ENDS {
        let (database, mut patient) = Patient::shared(version).await;
        patient.settings =
            patient.settings.clone().set("source.max_retained_wal", "16MiB").set("source.failover", "false");
        let make = "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')";
        patient.sql(&fill(make, &database)).await;
        let rows = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status, created_at,
               next_retry_at, first_failed_at)
             SELECT 'a', '1', 'e', '{}'::jsonb, 'pending', now() - interval '1 hour', NULL::timestamptz, NULL::timestamptz
             UNION ALL SELECT 'a', '2', 'e', '{}', 'failed', now(), now() - interval '1 hour', now()";
        patient.sql(rows).await;
        // Some more than that, since the newest of it may not be written yet.
        patient
            .sql("SELECT pg_logical_emit_message(false, 'p', repeat('x', 1000000)) FROM generate_series(1, 36)")
            .await;
        let ids = ["slot-lag", "rows-overdue", "rows-waiting"];
        let report = patient.report().await;
        for id in ids {
            assert!(report.has(id), "{id}: {:?}", report.findings);
            assert!(report.mends(id).contains(&("command".to_owned(), "outbox-relay run".to_owned())));
        }
        let mut relay = patient.settings.start();
        relay.wait_ready().await;
        let own = |report: &Report| ids.iter().any(|id| report.has(id));
        eventually(DEADLINE, "nothing waits any more", async || !own(&patient.report().await)).await;
        // The relay itself is no stranger to its slot.
        assert!(!patient.report().await.has("slot-holder"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_want_an_operator_are_counted() {
    let (database, patient) = Patient::shared(PgVersion::V15).await;
    patient
        .sql(
            "INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id,
               event_type, payload, retry_count, first_failed_at) VALUES ('secret-id', 'a', '1', 'e', '{}', 5, now());
             INSERT INTO supply_batch_compensation (batch_id, operation_type, item_index, item_payload, status)
               VALUES ('b', 'o', 0, '{}', 'manual_required');
             INSERT INTO outbox_relay_state (slot_name, needs_drain) VALUES ('IT', true)",
        )
        .await;
    let noted = |settings| async move { Report::of(&settings, &[]).await };
    let report = noted(patient.settings.clone()).await;
    assert_eq!(report.ills(), ["dead-letters", "compensations-manual"], "{:?}", report.findings);
    assert!(!format!("{:?}", report.findings).contains("secret-id"), "a row's value is shown");
    assert!(!report.has("needs-drain"));
    patient.sql(&fill("UPDATE outbox_relay_state SET slot_name = '{slot}'", &database)).await;
    patient.sql("UPDATE outbox_dead_letter SET handled = true; DELETE FROM supply_batch_compensation").await;
    let report = noted(patient.settings.clone()).await;
    assert!(report.has("needs-drain") && report.ills().is_empty(), "{:?}", report.findings);
}

/// Nothing that `doctor` does is seen afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_examination_changes_nothing() {
    let (database, patient): (Database, Patient) = Patient::shared(PgVersion::V18).await;
    patient.report().await;
    let left = "SELECT (SELECT count(*) FROM outbox_relay_state) + (SELECT count(*) FROM pg_replication_slots
                  WHERE database = current_database()) + (SELECT count(*) FROM pg_stat_activity
                  WHERE application_name LIKE 'outbox-relay%' AND datname = current_database())";
    let client = database.client().await;
    eventually(DEADLINE, "nothing is left", async || client.query_one(left, &[]).await.unwrap().get::<_, i64>(0) == 0)
        .await;
}
