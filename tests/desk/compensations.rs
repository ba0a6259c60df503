//! `compensations list`, `show`, `retry`, `resolve` and `abandon`.

use futures_util::StreamExt as _;
use serde_json::{Value, json as value};

use super::{Said, acted, assert_one_line, json, listed, run, shape};
use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::PgVersion;
use crate::harness::scene::{DELIVERED, Scene};

/// One of each status, with the ids from 1 to 5.
const ONE_OF_EACH: &str = "INSERT INTO supply_batch_compensation
      (batch_id, operation_type, item_index, item_payload, failure_reason, status, retry_count, locked_by, next_retry_at)
    VALUES ('b', 'refund', 0, '{\"secret\": \"salt\"}', 'no; again no', 'pending', 1, NULL, now() + interval '1 hour'),
      ('b', 'refund', 1, '{}', 'no', 'retrying', 1, 'w1', now() + interval '1 hour'),
      ('b', 'refund', 2, '{}', 'no', 'resolved', 1, NULL, NULL),
      ('b', 'recall', 3, '{}', 'no', 'manual_required', 3, NULL, NULL),
      ('c', 'refund', 4, '{}', 'no', 'abandoned', 3, NULL, NULL)";

async fn status(scene: &Scene, id: i64) -> String {
    let query = format!("SELECT status || ' ' || retry_count FROM supply_batch_compensation WHERE id = {id}");
    scene.texts(&query).await.remove(0)
}

fn ids(list: &Value) -> Vec<i64> {
    list.as_array().unwrap().iter().map(|row| row["id"].as_i64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn they_are_listed_and_shown() {
    let scene = Scene::new().await;
    assert_eq!(listed(&scene.settings, &["compensations", "list"]).await, value!([]));
    scene.sql(ONE_OF_EACH).await;
    for (arguments, expected) in [
        (&[][..], &[5, 4, 3, 2, 1][..]),
        (&["--status", "manual_required"], &[4]),
        (&["--batch", "c"], &[5]),
        (&["--operation", "refund", "--after", "3"], &[2, 1]),
        (&["--limit", "2"], &[5, 4]),
    ] {
        let list = listed(&scene.settings, &[&["compensations", "list"], arguments].concat()).await;
        assert_eq!(ids(&list), expected, "{arguments:?}");
    }
    let list = listed(&scene.settings, &["compensations", "list", "--status", "pending"]).await;
    assert_eq!(
        shape(&list[0]),
        "age_seconds: number, batch_id: text, created_at: text, failure_reason: text, id: number, item_index: number, \
         max_retries: number, next_retry_at: text, next_retry_seconds: number, operation_type: text, retry_count: number, \
         status: text"
    );
    let table = run(&scene.settings, 0, &["compensations", "list"]).await;
    assert!(table.out.contains("again no") && table.out.contains("in 59 min"), "{}", table.out);
    let show = json(&scene.settings, 0, &["compensations", "show", "1"]).await;
    assert_eq!((&show["item_payload"], &show["item_payload_bytes"]), (&Value::Null, &value!(18)));
    let table = run(&scene.settings, 0, &["compensations", "show", "1", "--payload"]).await;
    assert!(table.out.contains("salt"), "{}", table.out);
    assert_one_line(&run(&scene.settings, 1, &["compensations", "show", "9"]).await, "there is no compensation 9");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_legal_changes_are_made_and_the_others_say_why() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        scene.sql(ONE_OF_EACH).await;
        for (arguments, why) in [
            (&["retry", "2"][..], "w1 is at it"),
            (&["retry", "3"], "it is resolved, which is final"),
            (&["resolve", "5"], "compensation 5 cannot be resolved: it is abandoned"),
            (&["abandon", "2", "--yes"], "w1 is at it"),
            (&["abandon", "3", "--notes", "x", "--yes"], "it is resolved, which is final"),
        ] {
            let said = run(&scene.settings, 1, &[&["compensations"], arguments].concat()).await;
            let plan = "1 compensation is given up for good\n";
            assert_one_line(&Said { err: said.err.trim_start_matches(plan).to_owned(), ..said }, why);
        }
        run(&scene.settings, 4, &["compensations", "abandon", "4", "--notes", "x"]).await;
        run(&scene.settings, 4, &["compensations", "retry", "1", "4"]).await;
        assert_one_line(&run(&scene.settings, 1, &["compensations", "resolve", "1", "9"]).await, "no compensation 9");
        assert_eq!(
            (status(&scene, 1).await, status(&scene, 4).await),
            ("pending 1".into(), "manual_required 3".into())
        );

        let acts = acted(&scene.settings, 0, &["compensations", "retry", "1", "4", "--yes"]).await;
        assert_eq!(acts[1], value!({ "id": 4, "event_id": null, "outcome": "due", "detail": null }));
        assert_eq!((status(&scene, 1).await, status(&scene, 4).await), ("pending 1".into(), "pending 0".into()));
        json(&scene.settings, 0, &["compensations", "resolve", "1", "--by", "42", "--notes", "by hand"]).await;
        let show = json(&scene.settings, 0, &["compensations", "show", "1"]).await;
        assert_eq!((&show["resolved_by"], &show["resolution_notes"]), (&value!(42), &value!("by hand")));
        let again = acted(&scene.settings, 0, &["compensations", "resolve", "1", "--notes", "again"]).await;
        assert_eq!(again[0]["outcome"], "resolved");
        assert!(again[0]["detail"].as_str().unwrap().starts_with("already resolved at 20"), "{again:?}");
        let show = json(&scene.settings, 0, &["compensations", "show", "1"]).await;
        assert_eq!((&show["resolved_by"], &show["resolution_notes"]), (&value!(42), &value!("by hand")));
        json(&scene.settings, 0, &["compensations", "abandon", "4", "--notes", "no", "--yes"]).await;
        assert_eq!(status(&scene, 4).await, "abandoned 0");
        let again = acted(&scene.settings, 0, &["compensations", "abandon", "4", "--notes", "again", "--yes"]).await;
        assert!(again[0]["detail"].as_str().unwrap().starts_with("already abandoned at 20"), "{again:?}");
        let show = json(&scene.settings, 0, &["compensations", "show", "4"]).await;
        assert_eq!((&show["status"], &show["resolution_notes"]), (&value!("abandoned"), &value!("no")));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_to_a_person_can_go_back_to_the_service() {
    let nats = Nats::start(NatsVersion::V2_15).await;
    let mut scene = Scene::before(PgVersion::V18, &nats, Space::new()).await;
    scene.settings = scene.settings.set("retry.initial", "50ms").set("reconcile.interval", "50ms");
    let _relay = scene.relay().await;
    scene.sql("SELECT create_compensation('b', 'refund', 0, '{}', 'no')").await;
    // Nobody listens.
    scene.wait_number("SELECT count(*) FROM supply_batch_compensation WHERE status = 'manual_required'", 1).await;
    let service = nats.client().await;
    let mut requests = service.subscribe("outbox-compensate.refund").await.unwrap();
    service.flush().await.unwrap();
    json(&scene.settings, 0, &["compensations", "retry", "1"]).await;
    let request = tokio::time::timeout(DELIVERED, requests.next()).await.expect("a request").unwrap();
    service.publish(request.reply.unwrap(), "{}".into()).await.unwrap();
    scene.wait_number("SELECT count(*) FROM supply_batch_compensation WHERE status = 'resolved'", 1).await;
    assert_eq!(status(&scene, 1).await, "resolved 1", "its attempts were given again");
}
