//! The page of the operator, in a real browser.

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::harness::browser::Browser;
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{READY, RelaySettings};
use crate::harness::scene::Scene;
use crate::harness::wait::eventually;

/// Until the page shows what is so: it asks every two seconds, and the cores are busy.
const SHOWN: Duration = Duration::from_mins(1);

const INSERT: &str = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    SELECT 'order', 'SECRET-' || n, 'placed', '{\"card\": \"SECRET\"}' FROM generate_series(1, 7) n";

/// Larger than what NATS takes.
const TOO_LARGE: &str = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
    VALUES ('order', 'SECRET-9', 'placed', to_jsonb(repeat('SECRET', 400000)))";

/// The values that the server has written into the page at this moment and that differ from those that the script has,
/// but for those that change all the time.
const DIFFERENCES: &str = r#"
    const done = arguments[arguments.length - 1];
    const changing = /time|seconds|per_second|peak|spark/;
    fetch("/").then((answer) => answer.text()).then((text) => {
        const fresh = new DOMParser().parseFromString(text, "text/html");
        const read = (page) => [
            ...[...page.querySelectorAll("[data-key]")].filter((element) => !changing.test(element.dataset.key))
                .map((element) => `${element.dataset.key}: ${element.textContent}`),
            ...[...page.querySelectorAll("[data-rows], [data-items]")].map((element) => element.innerHTML),
            ...[...page.querySelectorAll("[data-tone], rect")].map((element) => element.cloneNode(false).outerHTML),
        ];
        const [ours, theirs] = [read(document), read(fresh)];
        done(ours.length === theirs.length ? ours.filter((value, at) => value !== theirs[at]) : ["other places"]);
    }, (error) => done([String(error)]));"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_follows_the_relay_and_asks_nobody_else() {
    let Some(browser) = Browser::start().await else { return };
    let scene = Scene::new().await;
    let settings = scene.settings.clone().set("reconcile.sweep_interval", "1s");
    let mut relay = scene.relay_with(&settings).await;
    browser.open(&relay.admin_url());
    browser.script("window.opened = true");
    assert_eq!((browser.text("h1"), browser.text("#decoded")), ("Events flow".to_owned(), "0".to_owned()));

    scene.sql(INSERT).await;
    eventually(SHOWN, "the page shows the events", async || browser.text("#decoded") == "7").await;
    scene.sql(TOO_LARGE).await;
    eventually(SHOWN, "the page shows the dead letter", async || {
        browser.text("[data-rows=dead_letters]") == "message_too_large\t1"
            && browser.text(".faults tbody").contains("an event was refused: message_too_large")
            && browser.text("[data-key='rows.dead_letters_unhandled|count']") == "1"
    })
    .await;
    assert_eq!(browser.script("return window.opened"), true, "it was not loaded anew");

    assert!(!browser.script("return document.documentElement.outerHTML").to_string().contains("SECRET"));
    assert!(!relay.get("/status").await.unwrap().1.contains("SECRET"));
    assert_eq!(browser.console(), [""; 0]);
    let requests = browser.requests();
    let own = format!("{}/", relay.admin_url());
    // The browser's own first page is part of it.
    let known = [own.as_str(), "data:", "chrome:"];
    let foreign: Vec<_> = requests.iter().filter(|url| !known.iter().any(|start| url.starts_with(start))).collect();
    assert!(
        requests.iter().filter(|url| url.starts_with(&own)).count() > 2 && foreign.is_empty(),
        "{foreign:?} of {requests:?}"
    );
    let mut last = json!(null);
    eventually(SHOWN, "script and server write the same", async || {
        last = browser.script_later(DIFFERENCES);
        last == json!([])
    })
    .await;
    // What was made to compare with may not be styled.
    browser.console();
    // A policy that nothing tries is none: what it forbids does not happen.
    let refused =
        "const done = arguments[0]; fetch('http://127.0.0.1:1/').then(() => done('sent'), () => done('refused'));
        document.body.append(Object.assign(document.createElement('script'), { text: 'window.injected = 1' }));";
    assert_eq!(browser.script_later(refused), "refused");
    assert_eq!(browser.script("return window.injected ?? null"), json!(null));
    let said = browser.console().join("\n");
    assert_eq!(said.matches("violates the following Content Security Policy").count(), 2, "{said}");

    relay.kill9().await;
    eventually(SHOWN, "the page says that nobody answers", async || {
        browser.text("#stale").contains("no longer answers") && browser.text("h1") == "Events flow"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_view_needs_no_script() {
    let Some(browser) = Browser::start().await else { return };
    let scene = Scene::new().await;
    let relay = scene.relay().await;
    scene.sql(INSERT).await;
    scene.wait_completed(7).await;
    browser.protocol("Emulation.setScriptExecutionDisabled", &json!({"value": true}));
    browser.open(&relay.admin_url());
    let page = browser.protocol("DOM.getDocument", &json!({"depth": 0}));
    let page = browser.protocol("DOM.getOuterHTML", &json!({"nodeId": page["root"]["nodeId"]}));
    let page = page["outerHTML"].as_str().unwrap();
    assert!(page.contains("id=\"decoded\"><span data-key=\"stages.0.total|count\">7</span>"), "{page}");
    assert!(page.contains(">Events flow</span></h1>"), "{page}");
    // With scripts, what is in it would be text.
    assert!(page.contains("<noscript><p>Without JavaScript"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_slot_is_shown_as_lost_and_never_as_a_lag_of_0() {
    let Some(browser) = Browser::start().await else { return };
    let postgres = Postgres::start(PgVersion::V18, &[("max_slot_wal_keep_size", "16MB")]).await;
    let nats = Nats::start(NatsVersion::V2_15).await;
    let settings = RelaySettings::new(&postgres.url("postgres"), &nats.url());
    settings.migrate().await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    browser.open(&relay.admin_url());
    let tone = || browser.script("return document.querySelector('.slot').dataset.tone");
    eventually(SHOWN, "the slot is well", async || tone() == "ok").await;
    let limit = browser.text("[data-key='slot.max_slot_wal_keep_size|limit']");
    assert_eq!(limit, "16 MiB");

    relay.signal(Signal::STOP);
    let client = postgres.client().await;
    eventually(READY, "the slot is lost", async || {
        let further = "SELECT pg_logical_emit_message(false, 'it', 'x'); SELECT pg_switch_wal(); CHECKPOINT";
        for statement in further.split("; ") {
            client.batch_execute(statement).await.unwrap();
        }
        let lost = "SELECT count(*) FROM pg_replication_slots WHERE wal_status = 'lost'";
        client.query_one(lost, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    // A new slot waits for open transactions: long enough to look at the page without one.
    client.batch_execute("BEGIN; SELECT pg_current_xact_id()").await.unwrap();
    relay.signal(Signal::CONT);
    eventually(SHOWN, "the page shows the lost slot", async || tone() == "lost").await;
    assert!(browser.text(".word").starts_with("Lost: "), "{}", browser.text(".word"));
    for key in ["slot.confirmed_lag_bytes", "slot.retained_wal_bytes", "stages.0.lag_bytes", "slot.confirmed_lsn"] {
        let value = browser.script(&format!("return document.querySelector('[data-key^=\"{key}|\"]').textContent"));
        assert_eq!(value, "–", "{key}");
    }
    assert!(browser.text(".verdict").starts_with("Not ready"), "{}", browser.text(".verdict"));
    let metric = "outbox_relay_slot_wal_status{status=\"lost\"}";
    assert_eq!(relay.metric(metric).await, Some(1.0));

    client.batch_execute("ROLLBACK").await.unwrap();
    eventually(SHOWN, "the page shows the new slot", async || tone() == "ok").await;
    assert_ne!(browser.text(".faults tbody"), "none", "it is remembered");
    assert_eq!(relay.metric(metric).await, Some(0.0));
}
