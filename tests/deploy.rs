//! The files of `deploy/` say what the program does. What their own tools can tell, `deploy/check` checks.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use outbox_relay::config::{KEYS, Name, names};
use outbox_relay::telemetry::metrics::Metrics;
use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::process::new_folder;
use crate::harness::relay::RelaySettings;
use crate::harness::scene::DELIVERED;
use crate::harness::wait::eventually;

const RULES: &str = include_str!("../deploy/prometheus/rules.yaml");
const RULES_TEST: &str = include_str!("../deploy/prometheus/rules_test.yaml");
const DASHBOARD: &str = include_str!("../deploy/grafana/dashboard.json");
const RUNBOOK: &str = include_str!("../deploy/runbook.md");
const COMPOSE: &str = include_str!("../deploy/compose/compose.yaml");
const UNIT: &str = include_str!("../deploy/systemd/outbox-relay.service");
const NATS_DROP_IN: &str = include_str!("../deploy/systemd/nats-credentials.conf");
const DEPLOYMENT: &str = include_str!("../deploy/helm/outbox-relay/templates/deployment.yaml");

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path)
}

fn read(path: &str) -> String {
    fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The scripts of the shell below a folder, by their paths in the checkout.
fn scripts(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            scripts(&path, found);
        } else if fs::read(&path).is_ok_and(|bytes| {
            let first = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
            first.starts_with(b"#!") && first.ends_with(b"sh")
        }) {
            let inside = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap();
            found.insert(inside.to_str().unwrap().to_owned());
        }
    }
}

/// Every word that begins so.
fn words<'a>(text: &'a str, start: &str) -> BTreeSet<&'a str> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    text.split(|c| !is_word(c)).filter(|word| word.starts_with(start)).collect()
}

#[test]
fn every_metric_of_rules_and_dashboard_exists() {
    let metrics = Metrics::new();
    metrics.dead_letters.of("too_large").inc();
    metrics.slot.set_wal_status(Some("reserved"));
    let page = metrics.render().unwrap();
    let mut known = BTreeSet::new();
    for (name, kind) in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')) {
        match kind {
            "counter" => known.insert(format!("{name}_total")),
            "histogram" => known.insert(format!("{name}_bucket")),
            _ => known.insert(name.to_owned()),
        };
    }
    let used: BTreeSet<&str> =
        [RULES, RULES_TEST, DASHBOARD, RUNBOOK].into_iter().flat_map(|text| words(text, "outbox_relay_")).collect();
    let unknown: Vec<_> = used.iter().filter(|name| !known.contains(**name)).collect();
    assert!(unknown.is_empty(), "there are no such metrics: {unknown:?}");
}

/// Label values are compared as text, where a mistake is an alert that never fires.
#[test]
fn every_label_value_of_the_rules_exists() {
    let metrics = Metrics::new();
    metrics.slot.set_wal_status(Some("reserved"));
    let page = metrics.render().unwrap();
    for (label, values) in [
        ("outcome", &["transient", "poison", "stored", "duplicate", "manual_required"][..]),
        ("status", &["dead_letter", "lost", "unreserved"]),
    ] {
        for part in RULES.split(&format!("{label}=")).skip(1) {
            let quoted = part.split('"').nth(1).unwrap();
            for value in quoted.split('|') {
                assert!(values.contains(&value), "the rules name {label}={value}, which this test does not know");
                assert!(page.contains(&format!("{label}=\"{value}\"")), "there is no {label}={value}");
            }
        }
    }
}

#[test]
fn every_alert_says_what_it_is_and_has_its_section() {
    let alerts: Vec<&str> = RULES.split("- alert: ").skip(1).collect();
    assert!(alerts.len() >= 15);
    let mut sections: BTreeSet<&str> = RUNBOOK.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    for alert in alerts {
        let name = alert.lines().next().unwrap();
        for line in ["severity: ", "summary: ", "description: "] {
            assert!(alert.contains(line), "{name} has no {line}");
        }
        let anchor = format!("runbook_url: deploy/runbook.md#{}\n", name.to_lowercase());
        assert!(alert.contains(&anchor), "{name} does not lead to {anchor}");
        assert!(sections.remove(name), "runbook.md has no section {name}");
        let section = RUNBOOK.split(&format!("## {name}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
        for part in ["**Means.**", "**See.**", "**Do.**"] {
            assert!(section.contains(part), "the section {name} has no {part}");
        }
        let fires = RULES_TEST.contains(&format!("alertname: {name}\n        exp_alerts:"));
        let silent = RULES_TEST.contains(&format!("alertname: {name}}}"));
        assert!(fires && silent, "{name} is not shown to fire and to be silent");
    }
    assert!(sections.is_empty(), "no alert leads to {sections:?}");
    // The chart puts the operator's address in the place of the path.
    let path = "deploy/runbook.md";
    assert!(read("helm/outbox-relay/values.yaml").contains(&format!("\n  runbookUrl: {path}\n")));
    let replaced = format!("replace \"{path}\" .Values.prometheusRule.runbookUrl");
    assert!(read("helm/outbox-relay/templates/prometheusrule.yaml").contains(&replaced));
}

#[test]
fn addresses_and_times_agree_with_the_settings() {
    let default = |name: &str| KEYS.iter().find(|key| key.name == name).unwrap().default.unwrap();
    let port = default("admin.listen").rsplit(':').next().unwrap();
    let places = [
        ("docker/Dockerfile", format!("EXPOSE {port}\n")),
        ("compose/relay.toml", format!("listen = \"0.0.0.0:{port}\"\n")),
        ("compose/prometheus.yaml", format!("port: {port},")),
        ("compose/compose.yaml", format!(":{port}\"]\n")),
        ("helm/outbox-relay/values.yaml", format!("\nport: {port}\n")),
        ("helm/outbox-relay/templates/deployment.yaml", "path: /livez,".to_owned()),
        ("helm/outbox-relay/templates/deployment.yaml", "path: /readyz,".to_owned()),
        ("helm/outbox-relay/templates/servicemonitor.yaml", "path: /metrics,".to_owned()),
        ("helm/outbox-relay/Chart.yaml", concat!("\nappVersion: ", env!("CARGO_PKG_VERSION"), "\n").to_owned()),
        ("sql/roles.sql", format!("\\set publication {}\n", default("source.publication"))),
        ("sql/roles.sql", format!("\\set table {}\n", default("source.table").split('.').next_back().unwrap())),
    ];
    for (path, text) in places {
        assert!(read(path).contains(&text), "deploy/{path} lacks {text:?}");
    }
    // Who ends the relay waits for longer than the relay does.
    let seconds = |text: &str| -> u64 { text.trim().trim_end_matches('s').parse().unwrap() };
    let after = |text: &str, start: &str| seconds(text.split(start).nth(1).unwrap().lines().next().unwrap());
    let grace = seconds(default("shutdown.grace"));
    assert!(after(UNIT, "\nTimeoutStopSec=") > grace);
    assert!(after(COMPOSE, "stop_grace_period:") > grace);
    assert!(after(&read("helm/outbox-relay/values.yaml"), "\nterminationGracePeriodSeconds:") > grace);
}

#[test]
fn every_script_is_checked() {
    let mut found = BTreeSet::new();
    for folder in [".ci", "benches", "deploy", "examples", "migrations", "src", "tests"] {
        scripts(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
    }
    let list = read("checks/scripts");
    assert_eq!(list.lines().map(str::to_owned).collect::<BTreeSet<_>>(), found, "deploy/checks/scripts");
}

#[test]
fn every_variable_is_a_setting() {
    let known: BTreeSet<String> = names().map(Name::variable).chain(["OUTBOX_RELAY_CONFIG".to_owned()]).collect();
    let migrate = read("helm/outbox-relay/templates/migrate.yaml");
    for text in [COMPOSE, UNIT, NATS_DROP_IN, DEPLOYMENT, &migrate] {
        let variables = words(text, "OUTBOX_RELAY_");
        assert!(!variables.is_empty());
        for variable in variables {
            assert!(known.contains(variable), "there is no setting {variable}");
        }
    }
}

/// The chart's schema refuses what is no setting: so it must know each that is.
#[test]
fn the_chart_knows_every_setting() {
    let schema: Value = serde_json::from_str(&read("helm/outbox-relay/values.schema.json")).unwrap();
    let mut found = BTreeSet::new();
    collect(&schema["properties"]["settings"], String::new(), &mut found);
    // What is secret comes from a Secret; where the relay listens is the chart's own affair.
    let wanted = KEYS.iter().filter(|key| !key.name.starts_with("admin."));
    let wanted = wanted.filter(|key| !key.secret || key.name.ends_with("url"));
    assert_eq!(found, wanted.map(|key| key.name.to_owned()).collect());

    let files: Vec<&str> = schema["properties"]["secretFiles"]["items"]["properties"]["setting"]["enum"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    let known: BTreeSet<String> = names().map(Name::dotted).collect();
    assert!(files.iter().all(|name| known.contains(*name)), "{files:?}");
    for name in names().filter(|name| name.file) {
        assert!(files.contains(&name.dotted().as_str()), "secretFiles lacks {}", name.dotted());
    }
}

fn collect(schema: &Value, name: String, found: &mut BTreeSet<String>) {
    let Some(properties) = schema["properties"].as_object() else {
        found.insert(name);
        return;
    };
    assert_eq!(schema["additionalProperties"], false, "{name} takes any key");
    for (key, inner) in properties {
        let dot = if name.is_empty() { "" } else { "." };
        collect(inner, format!("{name}{dot}{key}"), found);
    }
}

/// `config check` with these variables and nothing else of the environment.
fn check_settings(config: &Path, variables: &[(String, String)]) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outbox-relay"));
    command.env_clear().args(["config", "check"]).env("OUTBOX_RELAY_CONFIG", config);
    let output = command.envs(variables.iter().cloned()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", config.display());
}

#[test]
fn settings_of_compose_and_of_the_unit_are_usable() {
    let folder = new_folder("deploy", None);
    for name in ["relay_password", "nats_password", "postgres_password", "nats.creds"] {
        fs::write(folder.join(name), "secret").unwrap();
    }
    let folder = folder.to_str().unwrap();

    // Compose mounts secrets where the settings look for them.
    let settings = read("compose/relay.toml");
    let moved = Path::new(folder).join("relay.toml");
    for secret in settings.split("/run/secrets/").skip(1).map(|rest| rest.split('"').next().unwrap()) {
        assert!(COMPOSE.contains(&format!("  {secret}: {{file: ./secrets/{secret}}}")), "{secret}");
    }
    fs::write(&moved, settings.replace("/run/secrets", folder)).unwrap();
    check_settings(&moved, &[]);

    // systemd puts a credential under its name into the folder that %d stands for.
    let mut variables = Vec::new();
    for line in UNIT.lines().chain(NATS_DROP_IN.lines()) {
        let variable = line.strip_prefix("Environment=").and_then(|rest| rest.split_once("=%d/"));
        if let Some((name, credential)) = variable {
            let load = format!("\nLoadCredential={credential}:/etc/outbox-relay/");
            assert!(UNIT.contains(&load) || NATS_DROP_IN.contains(&load), "{credential}");
            variables.push((name.to_owned(), format!("{folder}/{credential}")));
        }
    }
    assert_eq!(variables.len(), 2);
    let own = Path::new(folder).join("own.toml");
    fs::write(&own, "[postgres]\nurl = \"postgres://outbox_relay@db.example/shop\"\n").unwrap();
    check_settings(&own, &variables);
}

/// A relay with the permissions that Compose gives it creates its stream, delivers, asks the stream what it holds,
/// announces a dead letter, and tries a compensation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_permissions_of_compose_are_enough() {
    let config = read("compose/nats.conf");
    let authorization = format!("authorization {}", config.split("authorization ").nth(1).unwrap());
    let authorization = authorization.replace("users = [", "users = [ {user: it, password: it},");
    let authorization = authorization.replace("$NATS_PASSWORD", "kept");
    let nats = Nats::start_with(NatsVersion::V2_15, &format!("no_auth_user: it\n{authorization}")).await;
    let database = Postgres::shared(PgVersion::V18).await.database().await;
    let client = database.client().await;
    let settings = RelaySettings::new(&database.url(), &nats.url())
        .set("source.slot", &database.slot)
        .set("source.publication", &database.publication)
        .set("nats.user", "relay")
        .set("nats.password", "kept")
        .set("dead_letter.announce", "true");
    settings.migrate().await;
    let mut relay = settings.start();
    relay.wait_ready().await;
    // The second one's headers are larger than NATS allows.
    let enqueue = "SELECT enqueue_outbox_event('order', '1', 'placed', '{}');
        SELECT enqueue_outbox_event('order', '2', 'placed', '{}', p_headers => jsonb_build_object(
            'filler', repeat('x', 70000), 'compensate', 'refund', 'batch_id', 'b1'))";
    client.batch_execute(enqueue).await.unwrap();
    let tried = "SELECT count(*) FROM outbox_events e, supply_batch_compensation c
        WHERE e.status = 'completed' AND c.retry_count > 0";
    eventually(DELIVERED, "delivered, and compensated", async || {
        client.query_one(tried, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    relay.kill9().await;
    client.batch_execute("UPDATE outbox_relay_state SET stream_seq = 0").await.unwrap();
    let mut relay = settings.start();
    relay.wait_ready().await;
    assert!(relay.terminate(Duration::from_mins(1)).await.success());
    assert!(!nats.log().contains("Violation"), "{}", nats.log());
}
