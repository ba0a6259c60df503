//! A database whose encoding is SQL_ASCII holds any bytes.

use std::time::Duration;

use futures_util::StreamExt as _;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::outbox;
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::scene::{DELIVERED, Scene, counter};
use crate::harness::wait::{always, eventually};

/// An event with these bytes of Latin-1 in its aggregate's id, or elsewhere.
fn insert(event: &str, aggregate: &str, payload: &str) -> String {
    format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
         VALUES ('{event}', 'order', {aggregate}, 'paid', {payload});"
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_is_not_utf8_becomes_a_dead_letter_and_its_neighbours_are_delivered() {
    const LATIN1: &str = r"E'M\374ller'";
    let bad = insert("bad-id", LATIN1, "'{}'") + &insert("bad-payload", "'a'", r#"E'{"name": "M\374ller"}'"#);
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let ascii = "ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'";
        let database = Postgres::shared(postgres).await.database_with(ascii).await;
        let scene = Scene::of(database, Nats::shared(nats).await, Space::new()).await;
        let good = |event| insert(event, "'a'", r#"'{"name": "Müller"}'"#);
        // From before the slot, which the relay reads from the table; one is blocked as a poller left it.
        scene.sql(&(bad.replace("bad", "early") + &good("first"))).await;
        let late = insert("polled", LATIN1, "'{}'")
            + "UPDATE outbox_events SET status = 'failed', next_retry_at = now() + interval '5 s'
               WHERE event_id = 'polled';";
        scene.sql(&late).await;
        let mut relay = scene.relay().await;
        // From the log.
        scene.sql(&(good("second") + &bad + &good("third"))).await;
        scene.wait_completed(3).await;
        scene.wait_number("SELECT count(*) FROM outbox_dead_letter WHERE handled IS NOT TRUE", 5).await;
        let dead = outbox::dead_letters(&scene.client).await;
        let expected = ["bad-id", "bad-payload", "early-id", "early-payload", "polled"];
        assert_eq!(dead, expected.map(|id| (id.to_owned(), "undecodable".to_owned())));
        let reasons = "SELECT DISTINCT error_message FROM outbox_dead_letter ORDER BY 1";
        for reason in scene.texts(reasons).await {
            assert!(reason.contains("is not UTF-8"), "{reason}");
        }
        let kept = format!("SELECT count(*) FROM outbox_dead_letter WHERE original_aggregate_id = {LATIN1}");
        assert_eq!(scene.number(&kept).await, 3, "the dead letter keeps the bytes");
        assert_eq!(scene.ids().await, ["first", "second", "third"]);
        let texts: Vec<_> = scene.stored().await.into_iter().map(|message| message.payload).collect();
        assert!(texts.iter().all(|text| text == r#"{"name": "Müller"}"#), "{texts:?}");

        // People can look at them.
        for command in
            ["events list", "events show bad-id --payload", "dead-letters list", "dead-letters show 1 --payload"]
        {
            let output = scene.settings.run(&command.split(' ').collect::<Vec<_>>()).await;
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(said.contains("M\u{fffd}ller"), "{command}: {said}{}", String::from_utf8_lossy(&output.stderr));
        }

        let target: String = scene.client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
        let slot = &scene.database.slot;
        let passed = format!(
            "SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn >= '{target}'"
        );
        eventually(DELIVERED, "the slot moves on", async || scene.number(&passed).await == 1).await;
        relay.wait_ready().await;
        assert!(!relay.log().contains("the session ended"), "{}", relay.log());
    }
}

/// Adopted tables may allow such an id. No statement can name its row by it, and each sweep finds the row again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_whose_event_id_is_not_utf8_becomes_one_dead_letter() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let ascii = "ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'";
        let database = Postgres::shared(postgres).await.database_with(ascii).await;
        let scene = Scene::of(database, Nats::shared(nats).await, Space::new()).await;
        let often = scene.settings.clone().set("reconcile.sweep_interval", "200ms").set("reconcile.interval", "50ms");
        let bad = |name: &str| insert("", "'a'", "'{}'").replace("''", &format!(r"E'{name}-M\374ller'"));
        scene.sql("ALTER TABLE outbox_events DROP CONSTRAINT outbox_events_event_id_check").await;
        // From before the slot, and from the log.
        scene.sql(&bad("early")).await;
        let relay = scene.relay_with(&often).await;
        scene.sql(&(bad("late") + &insert("good", "'a'", "'{}'"))).await;
        scene.wait_completed(1).await;
        scene.wait_number("SELECT count(*) FROM outbox_events WHERE status = 'dead_letter'", 2).await;
        let letters = "SELECT count(*) FROM outbox_dead_letter JOIN outbox_events ON event_id = original_event_id";
        always(Duration::from_secs(2), "each is one dead letter", async || scene.number(letters).await == 2).await;
        assert_eq!(scene.number("SELECT count(*) FROM outbox_dead_letter").await, 2);
        assert_eq!(counter(&relay, "events_without_row").await, 0);
        for command in ["events list", "events show 1", "dead-letters list", "dead-letters show 1"] {
            let output = scene.settings.run(&command.split(' ').collect::<Vec<_>>()).await;
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(said.contains("M\u{fffd}ller"), "{command}: {said}{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compensation_that_is_not_utf8_is_given_to_a_person_and_its_neighbours_are_sent() {
    let ascii = "ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'";
    let database = Postgres::shared(PgVersion::V18).await.database_with(ascii).await;
    let nats = Nats::start(NatsVersion::V2_15).await;
    let mut scene = Scene::of(database, &nats, Space::new()).await;
    scene.settings = scene.settings.set("retry.initial", "50ms").set("retry.max", "100ms");
    scene.settings = scene.settings.set("reconcile.interval", "50ms");
    let service = nats.client().await;
    let mut requests = service.subscribe("outbox-compensate.>").await.unwrap();
    service.flush().await.unwrap();
    let create = r#"SELECT create_compensation('b', 'refund', 0, E'{"name": "M\374ller"}', 'no');
        SELECT create_compensation(E'M\374ller', 'refund', 0, '{}', 'no');
        SELECT create_compensation('b', 'refund', 7, '{"name": "Müller"}', 'no')"#;
    scene.sql(create).await;
    let _relay = scene.relay().await;
    let request = tokio::time::timeout(DELIVERED, requests.next()).await.expect("a request").unwrap();
    let body = String::from_utf8(request.payload.to_vec()).unwrap();
    assert!(body.contains(r#""item_index":7,"item_payload":{"name": "Müller"},"attempt":1"#), "{body}");
    service.publish(request.reply.unwrap(), "{}".into()).await.unwrap();
    scene.wait_number("SELECT count(*) FROM supply_batch_compensation WHERE status = 'resolved' AND id = 3", 1).await;
    scene.wait_number("SELECT count(*) FROM supply_batch_compensation WHERE status = 'manual_required'", 2).await;
    let reasons = scene.texts("SELECT failure_reason FROM supply_batch_compensation WHERE id < 3 ORDER BY id").await;
    assert!(
        reasons[0].contains("item_payload is not UTF-8") && reasons[1].contains("batch_id is not UTF-8"),
        "{reasons:?}"
    );

    // Whom it is given to can look at it, and at the rest of it.
    for command in [&["compensations", "list"][..], &["compensations", "show", "1", "--payload"]] {
        let output = scene.settings.run(command).await;
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains("M\u{fffd}ller"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    }
}
