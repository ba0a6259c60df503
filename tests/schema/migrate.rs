//! Running the migrations: once, twice, at once, on odd names, and where they cannot run.

use outbox_relay::postgres::migrate::{MigrateError, Report, SchemaState, migrate, missing_objects, state};
use tokio_postgres::Client;

use super::{Outbox, code, one, outbox_events, table};
use crate::harness::postgres::{PgVersion, Postgres, connect};

const FILES: [&str; 5] =
    ["V1__tables", "V2__adopt", "V3__indexes", "V4__event_functions", "V5__compensation_and_statistics"];

fn names(report: &Report) -> Vec<&str> {
    report.applied.iter().map(|step| step.name.as_str()).collect()
}

/// Every catalogue row of every object outside the system schemas, down to the transaction that wrote it last.
async fn catalogue(client: &Client) -> String {
    let sql = "
        SELECT coalesce(string_agg(entry, E'\\n' ORDER BY entry), '') FROM (
            SELECT format('schema %s %s', nspname, xmin) AS entry FROM pg_namespace
            UNION ALL SELECT format('%s %s %s', oid::regclass, relfilenode, xmin) FROM pg_class
                      WHERE relnamespace <> 'pg_catalog'::regnamespace AND relkind <> 't'
            UNION ALL SELECT format('%s.%s %s', a.attrelid, a.attname, a.xmin) FROM pg_attribute a JOIN pg_class c
                      ON c.oid = a.attrelid WHERE c.relnamespace <> 'pg_catalog'::regnamespace
            UNION ALL SELECT format('%s %s', oid::regprocedure, xmin) FROM pg_proc
            UNION ALL SELECT format('%s %s', conname, xmin) FROM pg_constraint) entries";
    one(client, sql, &[]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_run_changes_nothing() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let mut client = database.client().await;
        assert_eq!(state(&client, &outbox_events()).await.unwrap(), SchemaState::Missing);
        let first = migrate(&mut client, &outbox_events(), false).await.unwrap();
        assert_eq!(names(&first), FILES);
        assert_eq!((first.created_schema, first.mended, first.warnings), (None, vec![], vec![]));
        assert_eq!(state(&client, &outbox_events()).await.unwrap(), SchemaState::Current);

        let before = catalogue(&client).await;
        let second = migrate(&mut client, &outbox_events(), false).await.unwrap();
        assert_eq!(second, Report::default());
        assert_eq!(catalogue(&client).await, before);
        let kept: i64 = one(&client, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())", &[]).await;
        assert_eq!(kept, 0, "the migration lock is held on");
        let timeout: String = one(&client, "SHOW lock_timeout", &[]).await;
        assert_eq!(timeout, "0", "the session's settings are changed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_says_what_it_would_do_and_does_nothing() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let mut client = database.client().await;
    let before = catalogue(&client).await;
    let report = migrate(&mut client, &table("new", "events"), true).await.unwrap();
    assert_eq!(names(&report), FILES);
    assert_eq!(report.created_schema.as_deref(), Some("new"));
    assert!(report.applied[0].sql.contains(r#"CREATE TABLE IF NOT EXISTS "new"."events" ("#));
    assert_eq!(catalogue(&client).await, before);

    migrate(&mut client, &table("new", "events"), false).await.unwrap();
    let before = catalogue(&client).await;
    assert_eq!(migrate(&mut client, &table("new", "events"), true).await.unwrap(), Report::default());
    assert_eq!(catalogue(&client).await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_names_work_in_every_function() {
    let long = format!("{}'$", "é".repeat(30));
    let odd = [("Out Box", "Ev\"t"), ("{{events}}", "it's $$ %s \\ {{schema}}"), ("outbox", long.as_str())];
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let mut client = database.client().await;
        for (schema, name) in odd {
            let odd = table(schema, name);
            let report = migrate(&mut client, &odd, false).await.unwrap();
            assert_eq!(report.created_schema.as_deref(), Some(schema));
            assert_eq!(state(&client, &odd).await.unwrap(), SchemaState::Current);
            // With nothing on the caller's own search_path.
            let set = format!("SET search_path = \"{schema}\"");
            client.batch_execute(&set).await.unwrap();
            let calls = "
                SELECT enqueue_outbox_event('a', '1', 't', '{}', 'key', NULL, '{}', 'e1');
                SELECT enqueue_outbox_event('a', '1', 't', '{}', 'key');
                SELECT enqueue_outbox_event('a', '1', 't', '{}', p_event_id => 'e2');
                SELECT * FROM fetch_and_lock_outbox_events(1);
                SELECT mark_outbox_completed('e1'), mark_outbox_failed('e2', 'no');
                SELECT retry_compensation(create_compensation('b', 'o', 1, '{}', 'no'));
                SELECT mark_compensation_manual_required(1, 'no'), resolve_compensation(1, 1, 'done');
                SELECT * FROM get_outbox_stats(), get_dead_letter_stats(), get_pending_manual_compensations();
                RESET search_path";
            client.batch_execute(calls).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_runs_at_once_one_does_the_work() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let (mut one, mut two) = (database.client().await, database.client().await);
        let fresh = table("fresh", "outbox_events");
        let (one, two) = tokio::join!(migrate(&mut one, &fresh, false), migrate(&mut two, &fresh, false));
        let mut applied = [one.unwrap().applied.len(), two.unwrap().applied.len()];
        applied.sort_unstable();
        assert_eq!(applied, [0, FILES.len()]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_dropped_is_made_again() {
    let mut outbox = Outbox::new(PgVersion::V18).await;
    let client = &mut outbox.client;
    client.batch_execute("DROP FUNCTION get_outbox_stats; ALTER TABLE outbox_events DROP headers").await.unwrap();
    let missing = vec!["get_outbox_stats()".to_owned(), "outbox_events.headers".to_owned()];
    let mut found = missing_objects(client, &outbox_events()).await.unwrap();
    found.sort();
    assert_eq!(found, missing);
    client.batch_execute("DROP TABLE outbox_events CASCADE").await.unwrap();
    let SchemaState::Damaged { missing } = state(client, &outbox_events()).await.unwrap() else { panic!("not seen") };
    assert!(missing.contains(&"outbox_events".to_owned()), "{missing:?}");

    let report = migrate(client, &outbox_events(), false).await.unwrap();
    assert_eq!(report.mended, missing);
    assert_eq!(state(client, &outbox_events()).await.unwrap(), SchemaState::Current);
    client.batch_execute("SELECT enqueue_outbox_event('a', '1', 't', '{}')").await.unwrap();
    let indexes: i64 = one(client, "SELECT count(*) FROM pg_indexes WHERE schemaname = 'public'", &[]).await;
    assert_eq!(indexes, 14, "an index was made twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_history_that_is_not_ours_is_told_apart() {
    let mut outbox = Outbox::new(PgVersion::V15).await;
    let client = &mut outbox.client;
    client.batch_execute("CREATE TABLE other (LIKE outbox_events INCLUDING ALL)").await.unwrap();
    let other = table("public", "other");
    assert_eq!(
        state(client, &other).await.unwrap(),
        SchemaState::Diverged { migration: "V1__tables".to_owned() },
        "a second outbox in the schema"
    );
    let error = migrate(client, &other, false).await.unwrap_err();
    assert!(error.to_string().contains("A schema holds one outbox"), "{error}");

    let newer = "INSERT INTO outbox_relay_migrations VALUES (99, 'future', '2030-01-01T00:00:00Z', '1')";
    client.batch_execute(newer).await.unwrap();
    let unknown = vec!["V99__future".to_owned()];
    assert_eq!(state(client, &outbox_events()).await.unwrap(), SchemaState::Newer { unknown });
    let error = migrate(client, &outbox_events(), false).await.unwrap_err();
    assert!(matches!(error, MigrateError::Newer { .. }), "{error}");

    client.batch_execute("UPDATE outbox_relay_migrations SET checksum = 'x' WHERE version = 2").await.unwrap();
    let error = state(client, &outbox_events()).await.unwrap_err();
    assert!(matches!(error, MigrateError::History { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_an_outbox_is_refused() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let mut client = database.client().await;
    let setup = "
        CREATE TABLE strange (id uuid, event_id text, payload text);
        CREATE VIEW view AS SELECT 1;
        CREATE TABLE twice (id bigint, event_id text, aggregate_type text, aggregate_id text, event_type text,
                            payload jsonb);
        INSERT INTO twice SELECT 1, 'same', 'a', '1', 't', '{}' FROM generate_series(1, 2)";
    client.batch_execute(setup).await.unwrap();
    let before = catalogue(&client).await;
    for (schema, name, reason) in [
        ("public", "strange", "column id of type bigint is missing"),
        ("public", "strange", "column aggregate_type of type character varying or text is missing"),
        ("public", "view", "it is not a table"),
        ("public", "outbox_relay_state", "is taken by another table"),
        ("public", "$outbox_relay$", "must not contain"),
        ("", "events", "name is empty"),
    ] {
        let error = migrate(&mut client, &table(schema, name), false).await.unwrap_err().to_string();
        assert!(error.contains(reason), "{name}: {error}");
    }
    assert_eq!(catalogue(&client).await, before);
    let error = migrate(&mut client, &table("public", "twice"), false).await.unwrap_err();
    assert!(matches!(error, MigrateError::Duplicates(_)), "{error}");
    let columns: i64 =
        one(&client, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'twice'::regclass AND attnum > 0", &[]).await;
    assert_eq!(columns, 6, "half a migration");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rights_are_named_with_the_grant() {
    let server = Postgres::shared(PgVersion::V15).await;
    let database = server.database().await;
    let owner = database.client().await;
    let role = format!("{}_migrator", database.name);
    owner.batch_execute(&format!("CREATE ROLE \"{role}\" LOGIN")).await.unwrap();
    let url = database.url().replace("postgres@", &format!("{role}@"));
    let mut client = connect(&url).await;

    let error = migrate(&mut client, &table("mine", "events"), false).await.unwrap_err().to_string();
    let grant = format!("GRANT CREATE ON DATABASE {} TO {role}", database.name);
    assert!(error.contains(&grant), "{error}");
    let error = migrate(&mut client, &outbox_events(), false).await.unwrap_err().to_string();
    assert!(error.contains(&format!("GRANT CREATE ON SCHEMA public TO {role}")), "{error}");

    owner.batch_execute(&format!("GRANT CREATE ON SCHEMA public TO \"{role}\"")).await.unwrap();
    let older = "CREATE TABLE outbox_events (id bigint, event_id text UNIQUE, aggregate_type text, aggregate_id text,
                                             event_type text, payload jsonb)";
    owner.batch_execute(older).await.unwrap();
    let error = migrate(&mut client, &outbox_events(), false).await.unwrap_err().to_string();
    assert!(error.contains(&format!("does not own outbox_events (GRANT postgres TO {role}")), "{error}");
    let error = migrate(&mut client, &outbox_events(), true).await.unwrap_err().to_string();
    assert!(error.contains("does not own outbox_events"), "a dry run finds it too: {error}");

    owner.batch_execute(&format!("ALTER TABLE outbox_events OWNER TO \"{role}\"")).await.unwrap();
    migrate(&mut client, &outbox_events(), false).await.unwrap();
    // A role without any rights can see that all is done.
    owner.batch_execute(&format!("CREATE ROLE \"{role}_2\" LOGIN")).await.unwrap();
    let mut stranger = connect(&database.url().replace("postgres@", &format!("{role}_2@"))).await;
    assert_eq!(state(&stranger, &outbox_events()).await.unwrap(), SchemaState::Current);
    assert_eq!(migrate(&mut stranger, &outbox_events(), true).await.unwrap(), Report::default());
    owner.batch_execute(&format!("DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\", \"{role}_2\"")).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_in_use_is_not_waited_for_long() {
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let (mut client, mut other) = (database.client().await, database.client().await);
    let older = "CREATE TABLE outbox_events (id bigint, event_id text UNIQUE, aggregate_type text, aggregate_id text,
                                             event_type text, payload jsonb)";
    client.batch_execute(older).await.unwrap();
    let user = other.transaction().await.unwrap();
    user.batch_execute("SELECT FROM outbox_events").await.unwrap();
    let error = migrate(&mut client, &outbox_events(), false).await.unwrap_err();
    assert!(matches!(error, MigrateError::Locked), "{error}");
    user.commit().await.unwrap();
    assert_eq!(names(&migrate(&mut client, &outbox_events(), false).await.unwrap()), FILES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_constraints_refuse_what_cannot_be_delivered() {
    for outbox in Outbox::ends().await {
        for (column, values) in [
            ("event_id", vec!["''", "'a b'", "E'a\\nb'", "E'a\\n'", "'é'", "E'\\x7f'"]),
            ("tenant_id", vec!["''"]),
            ("aggregate_type", vec!["''"]),
            ("aggregate_id", vec!["''"]),
            ("event_type", vec!["''"]),
            ("status", vec!["'done'", "''"]),
            ("headers", vec!["'[]'", "'\"x\"'", "'null'", r#"'{"a": 1}'"#, r#"'{"a": null}'"#, r#"'{"a": ["x"]}'"#]),
        ] {
            for value in values {
                outbox.client.batch_execute("SELECT enqueue_outbox_event('a', '1', 't', '{}')").await.unwrap();
                let update = format!(
                    "UPDATE outbox_events SET {column} = {value} WHERE id = (SELECT max(id) FROM outbox_events)"
                );
                let error = outbox.client.batch_execute(&update).await.expect_err(&update);
                assert_eq!(code(&error), "23514", "{column} = {value}: {error:?}");
            }
        }
        let good = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
                    VALUES ('!~', ' ', ' ', ' ', 'null', '{\"a\": \"\", \"b\": \"x\"}')";
        outbox.client.batch_execute(good).await.unwrap();
        let bare = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
                    VALUES ('a', '1', 't', '1') RETURNING event_id::text";
        assert_eq!(one::<String>(&outbox.client, bare, &[]).await.len(), 36);
        drop(outbox.database);
    }
}
