//! `events list`, `show` and `retry`.

use serde_json::{Value, json as value};

use super::{acted, assert_one_line, insert, json, listed, refusing_scene, run, shape};
use crate::harness::nats::{NatsVersion, PERMITTING};
use crate::harness::postgres::PgVersion;
use crate::harness::process::free_port;
use crate::harness::scene::{DELIVERED, Scene};
use crate::harness::wait::eventually;

/// A row of each state, without a relay.
const ONE_OF_EACH: &str = "INSERT INTO outbox_events (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload,
      status, retry_count, next_retry_at, error_code, error_message, first_failed_at, processed_at, locked_by, locked_at,
      dead_letter_reason, headers)
    VALUES
      ('done', NULL, 'order', '1', 'placed', '{\"secret\": \"salt\"}', 'completed', 0, NULL, NULL, NULL, NULL, now(), NULL,
        NULL, NULL, '{\"k\": \"v\"}'),
      ('sick', 'acme', 'order', '2', 'placed', '{}', 'failed', 3, now() + interval '1 hour', 'permission_denied', 'no',
        now(), NULL, NULL, NULL, NULL, '{}'),
      ('behind', 'acme', 'order', '2', 'placed', '{}', 'pending', 0, 'infinity', NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{}'),
      ('dated', NULL, 'order', '3', 'placed', '{}', 'pending', 0, now() + interval '1 day', NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, '{}'),
      ('claimed', NULL, 'order', '4', 'paid', '{}', 'processing', 0, now() + interval '1 hour', NULL, NULL, NULL, NULL, 'w1',
        now(), NULL, '{}'),
      ('dead', NULL, 'order', '5', 'paid', '{}', 'dead_letter', 5, NULL, 'message_too_large', 'fat', now(), NULL, NULL, NULL,
        'fat', '{}'),
      ('second', 'acme', 'order', '2', 'placed', '{}', 'failed', 1, now() + interval '1 hour', NULL, NULL, now(), NULL, NULL,
        NULL, NULL, '{}'),
      ('new', NULL, 'invoice', '6', 'paid', '{}', 'pending', 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, '{}');
    INSERT INTO outbox_dead_letter (original_event_id, original_aggregate_type, original_aggregate_id, event_type, payload,
      headers, retry_count, first_failed_at)
    VALUES ('dead', 'order', '5', 'paid', '{}', '{\"compensate\": \"refund\", \"batch_id\": \"b\", \"item_index\": \" 007\"}', 5, now());
    SELECT create_compensation('b', 'refund', 7, '{}', 'fat')";

fn events(list: &Value) -> Vec<&str> {
    list.as_array().unwrap().iter().map(|row| row["event_id"].as_str().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_are_found_by_what_they_are_and_page_by_page() {
    for version in PgVersion::ENDS {
        let scene = Scene::on(version, NatsVersion::V2_15).await;
        assert_eq!(listed(&scene.settings, &["events", "list"]).await, value!([]));
        scene.sql(ONE_OF_EACH).await;
        for (arguments, expected) in [
            (&[][..], &["new", "second", "dead", "claimed", "dated", "behind", "sick", "done"][..]),
            (&["--status", "pending"], &["new"]),
            (&["--status", "scheduled"], &["dated"]),
            (&["--status", "held"], &["behind"]),
            (&["--status", "processing"], &["claimed"]),
            (&["--status", "failed"], &["second", "sick"]),
            (&["--status", "completed"], &["done"]),
            (&["--status", "dead_letter"], &["dead"]),
            (&["--aggregate", "invoice"], &["new"]),
            (&["--aggregate", "order/2"], &["second", "behind", "sick"]),
            (&["--tenant", "acme", "--status", "failed"], &["second", "sick"]),
            (&["--event-type", "paid", "--since", "1h"], &["new", "dead", "claimed"]),
            (&["--since", "0s"], &[]),
            (&["--after", "3"], &["sick", "done"]),
        ] {
            let list = listed(&scene.settings, &[&["events", "list"], arguments].concat()).await;
            assert_eq!(events(&list), expected, "{arguments:?}");
        }
        let first = run(&scene.settings, 0, &["events", "list", "--limit", "3"]).await;
        assert_eq!(first.err, "there may be more: --after 6\n");
        assert_eq!(first.out.lines().count(), 4, "{}", first.out);
        let last = run(&scene.settings, 0, &["events", "list", "--limit", "2", "--after", "3"]).await;
        assert_eq!(last.err, "", "nothing is left");
        let page = json(&scene.settings, 0, &["events", "list", "--limit", "3"]).await;
        assert_eq!(page["next_after"], 6);
        let held = run(&scene.settings, 0, &["events", "list", "--status", "held"]).await;
        assert!(held.out.contains("acme:order/2") && held.out.contains("after 2"), "{}", held.out);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fields_of_the_json_stay_and_hold_no_payload() {
    const ROW: &str = "age_seconds: number, aggregate_id: text, aggregate_type: text, created_at: text, error_code: text, \
                       error_message: text, event_id: text, event_type: text, held_behind: null, id: number, \
                       max_retries: number, next_retry_at: text, next_retry_seconds: number, retry_count: number, \
                       state: text, tenant_id: text";
    let scene = Scene::new().await;
    scene.sql(ONE_OF_EACH).await;
    let list = listed(&scene.settings, &["events", "list", "--status", "failed"]).await;
    assert_eq!(shape(&list[1]), ROW);
    let everything = run(&scene.settings, 0, &["events", "list", "--output", "json"]).await;
    assert!(!everything.out.contains("salt"), "{}", everything.out);

    let story = json(&scene.settings, 0, &["events", "show", "dead", "--offline"]).await;
    assert_eq!(
        shape(&story),
        "age_seconds: number, aggregate_id: text, aggregate_type: text, behind: null, compensations: array, \
         created_at: text, dead_letter_reason: text, dead_letters: array, deduplication_key: null, error_code: text, \
         error_message: text, event_id: text, event_type: text, explanation: text, first_failed_at: text, headers: object, held_behind: null, \
         id: number, locked_at: null, locked_by: null, max_retries: number, next_retry_at: null, next_retry_seconds: null, \
         payload: null, payload_bytes: number, processed_at: null, processed_seconds: null, retry_count: number, \
         state: text, stream: object, tenant_id: null, updated_at: text, version: number"
    );
    assert_eq!(story["compensations"], value!([{ "id": 1, "status": "pending" }]));
    assert_eq!(story["dead_letters"][0]["row_status"], "dead_letter");
    assert_eq!(shape(&story["stream"]), "reason: text, sequence: null, state: text, stored_at: null");
    let time = story["created_at"].as_str().unwrap();
    assert!(time.ends_with('Z') && time.parse::<jiff::Timestamp>().is_ok(), "RFC 3339 in UTC: {time}");

    for payload in [false, true] {
        let arguments = ["events", "show", "done", "--offline", if payload { "--payload" } else { "--offline" }];
        let arguments = if payload { &arguments[..] } else { &arguments[..4] };
        let table = run(&scene.settings, 0, arguments).await;
        assert_eq!(table.out.contains(r#"{"secret": "salt"}"#), payload, "{}", table.out);
        let story = json(&scene.settings, 0, arguments).await;
        assert_eq!(story["payload"]["secret"] == "salt", payload);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_tells_in_words_what_it_waits_for() {
    let scene = Scene::new().await;
    scene.sql(ONE_OF_EACH).await;
    for (event, words) in [
        ("done", "was delivered 0 s ago"),
        ("2", "failed 3 of 5 times, next attempt in 59 min"),
        ("behind", "is held behind event 2, which failed 3 of 5 times, next attempt in 59 min"),
        ("dated", "is to be delivered in 23 h, not before"),
        ("claimed", "is claimed by w1, for 59 min more"),
        ("dead", "dead letter after 5 of 5 attempts: fat"),
        ("second", "next attempt in 59 min; it comes behind event 2, which failed 3 of 5 times"),
        ("new", "waits for the relay since"),
    ] {
        let story = json(&scene.settings, 0, &["events", "show", event, "--offline"]).await;
        assert!(story["explanation"].as_str().unwrap().contains(words), "{event}: {}", story["explanation"]);
    }
    let wrong = run(&scene.settings, 1, &["events", "show", "no-such"]).await;
    assert_one_line(&wrong, "has no event \"no-such\"");

    let nobody = scene.settings.clone().set("nats.url", &format!("nats://127.0.0.1:{}", free_port()));
    let story = json(&nobody, 0, &["events", "show", "done"]).await;
    assert_eq!(story["stream"]["state"], "unknown", "an unreachable NATS is no failure: {story}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delivered_row_is_found_in_the_stream() {
    for (postgres, nats) in PgVersion::ENDS.into_iter().zip(NatsVersion::ENDS) {
        let scene = Scene::on(postgres, nats).await;
        let _relay = scene.relay().await;
        insert(&scene, "one", "a", "placed", 5).await;
        insert(&scene, "two", "a", "placed", 5).await;
        scene.wait_completed(2).await;
        let story = json(&scene.settings, 0, &["events", "show", "two"]).await;
        assert_eq!((&story["stream"]["state"], &story["stream"]["sequence"]), (&value!("stored"), &value!(2)));
        let stream = scene.jetstream.get_stream(&scene.space.stream).await.unwrap();
        stream.delete_message(2).await.unwrap();
        let story = json(&scene.settings, 0, &["events", "show", "two"]).await;
        assert_eq!(story["stream"]["state"], "absent", "{story}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_comes_at_once_and_a_held_row_cannot_overtake() {
    let (mut nats, scene) = refusing_scene(PgVersion::V18, NatsVersion::V2_15).await;
    let slow = scene.settings.clone().set("retry.initial", "1h").set("retry.max", "1h");
    let _relay = scene.relay_with(&slow).await;
    insert(&scene, "A", "a", "refused", 5).await;
    insert(&scene, "B", "a", "fine", 5).await;
    let held = "SELECT count(*) FROM outbox_events WHERE event_id = 'B' AND next_retry_at = 'infinity'";
    scene.wait_number(held, 1).await;

    let acts = acted(&slow, 1, &["events", "retry", "B"]).await;
    assert_eq!(acts[0]["outcome"], "left");
    let why = acts[0]["detail"].as_str().unwrap();
    assert!(why.contains("behind event 1, which failed 1 of 5 times") && why.contains("retry that one"), "{why}");

    // What it met is still there: the attempt is made, and counted.
    json(&slow, 0, &["events", "retry", "A"]).await;
    let twice = "SELECT retry_count::int8 FROM outbox_events WHERE event_id = 'A'";
    scene.wait_number(twice, 2).await;
    nats.reload(PERMITTING).await;
    let acts = acted(&slow, 0, &["events", "retry", "1"]).await;
    assert_eq!(acts, value!([{ "id": 1, "event_id": "A", "outcome": "due", "detail": null }]));
    scene.wait_completed(2).await;
    assert_eq!(scene.ids().await, ["A", "B"]);
    let again = run(&slow, 1, &["events", "retry", "A"]).await;
    assert!(again.err.contains("it has not failed: it was delivered"), "{}", again.err);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_rows_are_retried_only_with_consent() {
    let scene = Scene::new().await;
    scene.sql(ONE_OF_EACH).await;
    let failed =
        "SELECT count(*) FROM outbox_events WHERE status = 'failed' AND next_retry_at <= now() AND retry_count = 0";
    for arguments in [&["events", "retry", "--all-failed"][..], &["events", "retry", "sick", "second"]] {
        let refused = run(&scene.settings, 4, arguments).await;
        assert!(refused.err.contains("2 failed rows become due now"), "{}", refused.err);
        assert_eq!(scene.number(failed).await, 0);
    }
    let none =
        acted(&scene.settings, 0, &["events", "retry", "--all-failed", "--event-type", "other", "--reset"]).await;
    assert_eq!(none, value!([]));
    let acts = acted(&scene.settings, 0, &["events", "retry", "--all-failed", "--reset", "--yes"]).await;
    assert_eq!(events(&acts), ["sick"], "the second one of the aggregate has to wait");
    assert_eq!(scene.number(failed).await, 1);
    let wrong = run(&scene.settings, 1, &["events", "retry", "second", "no-such", "--yes"]).await;
    assert_one_line(&wrong, "there is no event \"no-such\"; nothing was done");
    // Without an order nobody waits.
    let none = scene.settings.clone().set("delivery.ordering", "none");
    let acts = acted(&none, 0, &["events", "retry", "second"]).await;
    assert_eq!(acts[0]["outcome"], "due");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_pipe_ends_a_listing_without_a_word() {
    let scene = Scene::new().await;
    scene
        .sql(
            "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
             SELECT 'order', n::text, 'placed', '{}' FROM generate_series(1, 5000) n",
        )
        .await;
    let mut command = scene.settings.clone().unset("log.level").command(&["events", "list", "--limit", "5000"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = tokio::task::spawn_blocking(move || child.wait_with_output()).await.unwrap().unwrap();
    assert_eq!((output.status.code(), String::from_utf8(output.stderr).unwrap()), (Some(0), String::new()));
}

/// A role that is no superuser, with the rights that the commands need.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_with_few_rights_is_enough() {
    let (mut nats, scene) = refusing_scene(PgVersion::V15, NatsVersion::V2_10).await;
    let _relay = scene.relay().await;
    insert(&scene, "A", "a", "refused", 1).await;
    scene.wait_number("SELECT count(*) FROM outbox_dead_letter", 1).await;
    let role = format!("desk_{}", scene.database.name);
    scene
        .sql(&format!(
            "CREATE ROLE {role} LOGIN;
             GRANT SELECT, INSERT, UPDATE ON outbox_events TO {role};
             GRANT SELECT, UPDATE ON outbox_dead_letter, supply_batch_compensation TO {role};
             DELETE FROM outbox_events; SELECT create_compensation('b', 'refund', 0, '{{}}', 'no')"
        ))
        .await;
    let address = scene.database.url();
    let (_, host) = address.split_once('@').unwrap_or(("", address.trim_start_matches("postgres://")));
    let desk = scene.settings.clone().set("postgres.url", &format!("postgres://{role}@{host}"));
    nats.reload(PERMITTING).await;
    // The row is gone: it has to be made anew.
    json(&desk, 0, &["dead-letters", "replay", "1"]).await;
    eventually(DELIVERED, "it is delivered", async || scene.ids().await == ["A"]).await;
    json(&desk, 0, &["compensations", "resolve", "1"]).await;
    json(&desk, 0, &["events", "show", "A"]).await;
    listed(&desk, &["dead-letters", "list", "--handled"]).await;
    listed(&desk, &["compensations", "list"]).await;
    json(&desk, 1, &["events", "retry", "A"]).await;
    scene.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_stands_in_the_way_comes_with_what_to_do() {
    let scene = Scene::on(PgVersion::V18, NatsVersion::V2_15).await;
    let stranger = format!("{}_stranger", scene.database.name);
    scene.sql(&format!("CREATE ROLE {stranger} LOGIN")).await;
    let url = scene.database.url().replace("postgres@", &format!("{stranger}@"));
    let with = |key: &str, value: &str| scene.settings.clone().set(key, value);
    for (settings, words) in [
        (with("source.table", "public.nowhere"), "run: outbox-relay migrate"),
        (with("postgres.url", &url), "deploy/sql/roles.sql"),
        (with("postgres.url", "postgres://postgres@127.0.0.1:1/postgres"), "postgres.url (or DATABASE_URL)"),
    ] {
        assert_one_line(&run(&settings, 1, &["events", "list"]).await, words);
    }
    let wrong = run(&scene.settings, 2, &["dead-letters", "replay", "not-a-number"]).await;
    assert!(wrong.err.contains("`list` shows it"), "{}", wrong.err);
}
