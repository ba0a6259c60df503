//! Dead letters: the compensation that one asks for comes with it, and who listens hears of it.

use std::time::{Duration, SystemTime};

use futures_util::StreamExt as _;
use outbox_relay::config::TableName;
use outbox_relay::postgres::store;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::stream;
use crate::harness::wait::eventually;

const SOON: Duration = Duration::from_mins(1);

/// An event that can never be sent, for its headers are too long; `$3` are more of them.
const HOPELESS: &str =
    "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
    VALUES ($1, $2, $1, 'placed', '{\"n\": 1.10}',
      jsonb_build_object('filler', repeat('x', 70000)) || $3::text::jsonb)";

struct Site {
    space: Space,
    database: Database,
    client: Client,
    nats: &'static Nats,
    settings: RelaySettings,
}

impl Site {
    /// Compensations are left in the table as they are made.
    async fn new(postgres: PgVersion) -> Self {
        let space = Space::new();
        let database = Postgres::shared(postgres).await.database().await;
        let nats = Nats::shared(NatsVersion::V2_15).await;
        let settings = RelaySettings::shared(&database, nats, &space).set("compensation.enabled", "false");
        settings.migrate().await;
        let client = database.client().await;
        Self { space, database, client, nats, settings }
    }

    async fn start(&self) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    async fn hopeless(&self, event_id: &str, headers: &Value) {
        let parameters = [event_id, &self.space.prefix, &headers.to_string()];
        self.client.execute(HOPELESS, &[&parameters[0], &parameters[1], &parameters[2]]).await.unwrap();
    }

    async fn dead(&self) -> i64 {
        self.client.query_one("SELECT count(*) FROM outbox_dead_letter", &[]).await.unwrap().get(0)
    }

    async fn wait_dead(&self, count: i64) {
        eventually(SOON, &format!("there are {count} dead letters"), async || self.dead().await >= count).await;
        assert_eq!(self.dead().await, count);
    }

    /// Every compensation, with the dead letter of its transaction: `now()` is the time at which one began.
    async fn compensations(&self) -> Vec<(String, String, i32, String, String, Option<String>)> {
        let select = "SELECT batch_id::text, operation_type::text, item_index, item_payload::text, c.status::text,
              (SELECT original_event_id::text FROM outbox_dead_letter d
               WHERE d.created_at = c.created_at AND d.error_message IS NOT DISTINCT FROM c.failure_reason)
            FROM supply_batch_compensation c ORDER BY id";
        let rows = self.client.query(select, &[]).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(2), row.get(3), row.get(4), row.get(5))).collect()
    }
}

fn row(batch: &str, index: i32, event: &str) -> (String, String, i32, String, String, Option<String>) {
    let [batch, operation, payload, status] = [batch, "refund", "{\"n\": 1.10}", "pending"].map(str::to_owned);
    (batch, operation, index, payload, status, Some(event.to_owned()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_brings_its_compensation_with_it() {
    for version in PgVersion::ENDS {
        let site = Site::new(version).await;
        let _relay = site.start().await;
        site.hopeless("whole", &json!({ "compensate": "refund", "batch_id": "b1", "item_index": "7" })).await;
        site.wait_dead(1).await;
        site.hopeless("no-index", &json!({ "compensate": "refund", "batch_id": "b2" })).await;
        site.wait_dead(2).await;
        // Its row is gone when its outcome is written: what is known of it is what was decoded.
        let gone = format!("{HOPELESS}; DELETE FROM outbox_events WHERE event_id = 'gone'")
            .replace("$1", "'gone'")
            .replace("$2", &format!("'{}'", site.space.prefix))
            .replace("$3", r#"'{"compensate": "refund", "batch_id": "b3", "item_index": "-1"}'"#);
        site.client.batch_execute(&gone).await.unwrap();
        site.wait_dead(3).await;
        site.hopeless("none", &json!({ "batch_id": "b4" })).await;
        site.wait_dead(4).await;
        assert_eq!(
            site.compensations().await,
            [row("b1", 7, "whole"), row("b2", 0, "no-index"), row("b3", -1, "gone")]
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_do_not_fit_never_stop_it() {
    let site = Site::new(PgVersion::V18).await;
    let refuse = "ALTER TABLE supply_batch_compensation ADD CHECK (batch_id <> 'refused');
        CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
        CREATE TRIGGER no BEFORE INSERT ON supply_batch_compensation FOR EACH ROW WHEN (NEW.batch_id = 'raised')
        EXECUTE FUNCTION no()";
    site.client.batch_execute(refuse).await.unwrap();
    let relay = site.start().await;
    let long = "x".repeat(200);
    let asked = [
        json!({ "compensate": "refund" }),
        json!({ "compensate": "", "batch_id": "b" }),
        json!({ "compensate": "refund", "batch_id": "" }),
        json!({ "compensate": long, "batch_id": "b" }),
        json!({ "compensate": "refund", "batch_id": long }),
        json!({ "compensate": "refund", "batch_id": "b", "item_index": "" }),
        json!({ "compensate": "refund", "batch_id": "b", "item_index": "first" }),
        json!({ "compensate": "refund", "batch_id": "b", "item_index": "99999999999" }),
        json!({ "compensate": "refund", "batch_id": "refused" }),
        json!({ "compensate": "refund", "batch_id": "raised" }),
    ];
    for (number, headers) in asked.iter().enumerate() {
        site.hopeless(&format!("e{number}"), headers).await;
    }
    site.wait_dead(10).await;
    assert_eq!(site.compensations().await, []);
    relay.wait_log("asks for a compensation with headers that do not fit", SOON).await;
    let good =
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'b', 'c', '{}')";
    site.client.batch_execute(good).await.unwrap();
    let jetstream = site.nats.jetstream().await;
    let stored = async || stream::count(&jetstream, &site.space.stream).await == 1;
    eventually(SOON, "the flow goes on", stored).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_of_pollers_bring_it_too() {
    let mut site = Site::new(PgVersion::V18).await;
    let insert = |id: &str, batch: &str| {
        format!(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers, max_retries)
             VALUES ('{id}', 'a', '{id}', 'c', '{{\"n\": 1.10}}',
               '{{\"compensate\": \"refund\", \"batch_id\": \"{batch}\"}}', 1)"
        )
    };
    let by_function = format!("{}; SELECT mark_outbox_failed('one', 'no')", insert("one", "b1"));
    site.client.batch_execute(&by_function).await.unwrap();
    site.client.batch_execute(&insert("two", "b2")).await.unwrap();
    let table = TableName { schema: "public".to_owned(), table: "outbox_events".to_owned() };
    let tx = site.client.transaction().await.unwrap();
    let claimed = store::claim_batch(&tx, &table, "w", 9, SOON).await.unwrap();
    let failed = store::mark_failed(&tx, &table, &claimed[0], "w", "refused", SystemTime::now()).await.unwrap();
    assert_eq!(failed, store::Failed::DeadLetter);
    tx.commit().await.unwrap();
    site.wait_dead(2).await;
    let select =
        "SELECT string_agg(batch_id || ' ' || failure_reason, ', ' ORDER BY id) FROM supply_batch_compensation";
    let made: String = site.client.query_one(select, &[]).await.unwrap().get(0);
    assert_eq!(made, "b1 no, b2 refused");
    drop(site.database);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_announced_once_it_is_committed() {
    let mut site = Site::new(PgVersion::V18).await;
    let nats = site.nats.client().await;
    let mut heard = nats.subscribe(format!("outbox-dead-letter.{}.>", site.space.prefix)).await.unwrap();
    nats.flush().await.unwrap();
    let relay = site.start().await;
    site.hopeless("quiet", &json!({})).await;
    site.wait_dead(1).await;
    drop(relay);
    site.settings = site.settings.set("dead_letter.announce", "true");
    let _relay = site.start().await;
    site.hopeless("loud", &json!({})).await;
    let message = tokio::time::timeout(SOON, heard.next()).await.expect("an announcement").unwrap();
    assert!(site.dead().await == 2, "the dead letter is committed");
    assert_eq!(message.subject.as_str(), format!("outbox-dead-letter.{}.placed", site.space.prefix));
    let body: Value = serde_json::from_slice(&message.payload).unwrap();
    let expected = json!({ "event_id": "loud", "tenant_id": null, "aggregate_type": site.space.prefix,
        "aggregate_id": "loud", "event_type": "placed", "error_code": "headers_too_large",
        "error_message": body["error_message"], "retry_count": 1 });
    assert_eq!(body, expected);
    assert!(body["error_message"].as_str().is_some_and(|text| text.contains("headers are too large")), "{body}");
}
