//! `deploy/sql/roles.sql`: it can be run again and again, and each role can do its work and nothing else.

use std::path::Path;
use std::process::Stdio;

use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres, connect};
use crate::harness::process::{command, scratch};
use crate::harness::relay::{READY, RelaySettings};
use crate::harness::scene::DELIVERED;
use crate::harness::wait::eventually;

/// Runs the script, and gives what it said.
fn run_script(database: &Database, url: &str, more: &[&str]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/sql/roles.sql");
    let mut psql = command(&database.server().bin().join("psql"), scratch(), None);
    psql.args(["-X", "-d", url, "-v", &format!("prefix={}", database.name)]);
    psql.args(["-v", &format!("publication={}", database.publication)]);
    for variable in more {
        psql.args(["-v", variable]);
    }
    // As input: the script's folder need not be open to the user that the servers run as.
    let output = psql.stdin(std::fs::File::open(script).unwrap()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = output.spawn().unwrap().wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    said
}

fn as_role(database: &Database, role: &str) -> String {
    database.url().replace("postgres@", &format!("{}_{role}@", database.name))
}

/// A login that belongs to a role.
async fn member(database: &Database, admin: &Client, role: &str) -> Client {
    let name = &database.name;
    admin.batch_execute(&format!("CREATE ROLE {name}_a_{role} LOGIN IN ROLE {name}_{role}")).await.unwrap();
    connect(&as_role(database, &format!("a_{role}"))).await
}

async fn refused(client: &Client, statements: &[&str]) {
    for statement in statements {
        let error = client.batch_execute(statement).await.expect_err(statement);
        assert_eq!(error.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE), "{statement}: {error:?}");
    }
}

async fn allowed(client: &Client, statements: &[&str]) {
    for statement in statements {
        client.batch_execute(statement).await.unwrap_or_else(|error| panic!("{statement}: {error:?}"));
    }
}

async fn number(client: &Client, query: &str) -> i64 {
    client.query_one(query, &[]).await.unwrap_or_else(|error| panic!("{query}: {error:?}")).get(0)
}

/// Everything that the script sets: owners, rights, publications, memberships.
async fn rights(client: &Client) -> Vec<String> {
    let query = "SELECT relname || ' ' || relowner::regrole || ' ' || coalesce(relacl::text, '') FROM pg_class
          WHERE relnamespace = 'public'::regnamespace
        UNION ALL SELECT proname || ' ' || proowner::regrole || ' ' || prosecdef || coalesce(proacl::text, '') FROM pg_proc
          WHERE pronamespace = 'public'::regnamespace
        UNION ALL SELECT attrelid::regclass || ' ' || attname || ' ' || attacl::text FROM pg_attribute WHERE attacl IS NOT NULL
        UNION ALL SELECT nspname || ' ' || coalesce(nspacl::text, '') FROM pg_namespace
        UNION ALL SELECT pubname || ' ' || pubowner::regrole FROM pg_publication ORDER BY 1";
    client.query(query, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_role_does_its_work_and_nothing_else() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let (nats, space) = (Nats::shared(NatsVersion::V2_15).await, Space::new());
        let admin = database.client().await;
        let settings = RelaySettings::shared(&database, nats, &space);

        // As its head says: the roles, the tables by their owner, the rights; and again.
        assert!(run_script(&database, &database.url(), &[]).contains("there is no table public.outbox_events yet"));
        let owner = format!("{}?options=-crole%3D{}_owner", database.url(), database.name);
        settings.clone().set("postgres.url", &owner).migrate().await;
        assert_eq!(run_script(&database, &database.url(), &[]), "");
        let first = rights(&admin).await;
        assert_eq!(run_script(&database, &database.url(), &[]), "");
        assert_eq!(rights(&admin).await, first, "running it again changes something");

        let settings = settings.set("postgres.url", &as_role(&database, "relay"));
        let mut relay = settings.start();
        relay.wait_ready().await;

        producer(&member(&database, &admin, "producer").await).await;
        let outcomes = "SELECT count(*) FROM outbox_events WHERE status = 'completed'";
        eventually(DELIVERED, "two events are delivered", async || number(&admin, outcomes).await == 2).await;
        // The relay's other rights: a dead letter, its compensation, and an attempt at that.
        let tried = "SELECT count(*) FROM outbox_dead_letter d, supply_batch_compensation c WHERE c.retry_count > 0";
        eventually(DELIVERED, "a dead letter is compensated", async || number(&admin, tried).await == 1).await;
        let as_relay = connect(&as_role(&database, "relay")).await;
        refused(&as_relay, &["DELETE FROM outbox_events", "DELETE FROM outbox_dead_letter", "CREATE TABLE t ()"]).await;
        assert!(relay.terminate(READY).await.success());

        poller(&member(&database, &admin, "poller").await, &admin).await;
        desk(&member(&database, &admin, "desk").await).await;
        reader(&member(&database, &admin, "reader").await).await;

        // What is taken back is missed at the start, not when the first event dies.
        let function = "create_compensation(varchar, varchar, int, jsonb, text)";
        let relay_role = format!("{}_relay", database.name);
        admin.batch_execute(&format!("REVOKE EXECUTE ON FUNCTION {function} FROM {relay_role}")).await.unwrap();
        let mut relay = settings.start();
        assert_eq!(relay.wait_exit(READY).await.code(), Some(1));
        let mend = "GRANT EXECUTE ON FUNCTION create_compensation(";
        assert!(relay.log().contains(mend) && relay.log().contains(&relay_role), "{}", relay.log());

        // Only who asks for it may delete.
        run_script(&database, &database.url(), &["deletes=true"]);
        allowed(&as_relay, &["DELETE FROM outbox_events WHERE false"]).await;
        run_script(&database, &database.url(), &[]);
        refused(&as_relay, &["DELETE FROM outbox_events WHERE false"]).await;
    }
}

async fn producer(client: &Client) {
    let enqueue = "SELECT enqueue_outbox_event('order', '1', 'placed', '{\"total\": 1}', 'key')";
    allowed(client, &[enqueue, enqueue, "SELECT enqueue_outbox_event('order', '2', 'placed', '{}')"]).await;
    // Its headers are larger than NATS allows, and it asks for a compensation.
    let hopeless = "SELECT enqueue_outbox_event('order', '3', 'placed', '{}', p_headers => jsonb_build_object(
        'filler', repeat('x', 70000), 'compensate', 'refund', 'batch_id', 'b1'))";
    allowed(client, &[hopeless]).await;
    let other = client.batch_execute(&enqueue.replace(": 1", ": 2")).await.expect_err("another payload");
    assert_eq!(other.code().map(SqlState::code), Some("OB001"));
    refused(
        client,
        &[
            "SELECT payload FROM outbox_events",
            "SELECT count(*) FROM outbox_events",
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'b', 'c', '{}')",
            "UPDATE outbox_events SET status = 'completed'",
            "DELETE FROM outbox_events",
            "SELECT fetch_and_lock_outbox_events()",
            "SELECT outbox_relay_polling_allowed()",
            "SELECT get_outbox_stats()",
        ],
    )
    .await;
}

async fn poller(client: &Client, admin: &Client) {
    for id in ["p1", "p2"] {
        let enqueue = format!("SELECT enqueue_outbox_event('order', '{id}', 'placed', '{{}}', p_event_id => '{id}')");
        admin.batch_execute(&enqueue).await.unwrap();
    }
    let last = "UPDATE outbox_events SET max_retries = 1, headers = '{\"compensate\": \"refund\", \"batch_id\": \"p\"}'
        WHERE event_id = 'p2'";
    admin.batch_execute(last).await.unwrap();
    assert_eq!(number(client, "SELECT count(*) FROM fetch_and_lock_outbox_events()").await, 2);
    allowed(client, &["SELECT mark_outbox_completed('p1')", "SELECT mark_outbox_failed('p2', 'no')"]).await;
    assert_eq!(number(admin, "SELECT count(*) FROM outbox_dead_letter WHERE original_event_id = 'p2'").await, 1);
    assert_eq!(number(admin, "SELECT count(*) FROM supply_batch_compensation WHERE batch_id = 'p'").await, 1);
    refused(
        client,
        &[
            "DELETE FROM outbox_events",
            "SELECT payload FROM outbox_dead_letter",
            "SELECT stream FROM outbox_relay_state",
        ],
    )
    .await;
}

async fn desk(client: &Client) {
    allowed(
        client,
        &[
            "SELECT payload FROM outbox_dead_letter",
            "UPDATE outbox_dead_letter SET handled = true, handled_at = now(), handler_notes = 'seen'",
            "UPDATE outbox_events SET next_retry_at = now() WHERE status = 'failed'",
            "SELECT create_compensation('b2', 'refund', 0, '{}', 'by hand')",
            "SELECT resolve_compensation(id, 7, 'done') FROM supply_batch_compensation WHERE batch_id = 'b2'",
            "SELECT get_pending_manual_compensations(), get_outbox_stats(), get_dead_letter_stats()",
        ],
    )
    .await;
    refused(client, &["DELETE FROM outbox_dead_letter", "UPDATE outbox_relay_state SET stream_seq = 0"]).await;
}

async fn reader(client: &Client) {
    allowed(
        client,
        &[
            "SELECT get_outbox_stats(), get_dead_letter_stats()",
            "SELECT id, event_id, status, error_code, created_at FROM outbox_events",
            "SELECT original_event_id, error_message FROM outbox_dead_letter",
            "SELECT id, status FROM supply_batch_compensation",
            "SELECT * FROM outbox_relay_state",
        ],
    )
    .await;
    refused(
        client,
        &[
            "SELECT payload FROM outbox_events",
            "SELECT headers FROM outbox_dead_letter",
            "SELECT item_payload FROM supply_batch_compensation",
            "SELECT * FROM outbox_events",
            "UPDATE outbox_events SET status = 'pending'",
            "SELECT resolve_compensation(1, 1, '')",
        ],
    )
    .await;
}

/// As the administrator of a managed service, who is no superuser.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_administrator_without_superuser_can_run_it() {
    for version in PgVersion::ENDS {
        let database = Postgres::shared(version).await.database().await;
        let (admin, name) = (database.client().await, &database.name);
        let sql = format!(
            "CREATE ROLE {name}_admin LOGIN CREATEROLE CREATEDB;
             ALTER DATABASE {name} OWNER TO {name}_admin; ALTER SCHEMA public OWNER TO {name}_admin"
        );
        admin.batch_execute(&sql).await.unwrap();
        let url = as_role(&database, "admin");
        // It cannot give what it has not, and says who can.
        assert!(run_script(&database, &url, &[]).contains(&format!("ALTER ROLE {name}_relay REPLICATION")));
        let settings = RelaySettings::new(&url, "nats://127.0.0.1:1");
        settings.migrate().await;
        admin.batch_execute(&format!("ALTER ROLE {name}_relay REPLICATION")).await.unwrap();
        assert_eq!(run_script(&database, &url, &[]), "");
        producer_enqueues(&database, &admin).await;
    }
}

async fn producer_enqueues(database: &Database, admin: &Client) {
    let client = member(database, admin, "producer").await;
    allowed(&client, &["SELECT enqueue_outbox_event('order', '1', 'placed', '{}')"]).await;
    refused(&client, &["SELECT payload FROM outbox_events"]).await;
}
