//! A set-up as the README describes it has nothing to be found.

use serde_json::Value;

use super::{Patient, Report};
use crate::harness::postgres::PgVersion;
use crate::harness::relay::RelaySettings;

/// What is worth knowing of a healthy set-up on the tests' servers.
const NOTES: [&str; 4] = ["slot-wal-unlimited", "slot-missing", "stream-missing", "long-transaction"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn healthy_set_up_has_no_findings() {
    for version in PgVersion::ENDS {
        let (_database, patient) = Patient::shared(version).await;
        let notes = |report: &Report, allowed: &[&str]| {
            assert!(report.ills().is_empty(), "{:?}", report.findings);
            let strange = report.findings.iter().find(|finding| !allowed.contains(&super::text(&finding["id"])));
            assert!(strange.is_none(), "{strange:?}");
        };
        notes(&patient.report().await, &NOTES);
        let mut relay = patient.settings.start();
        relay.wait_ready().await;
        let report = patient.report().await;
        notes(&report, &["slot-wal-unlimited", "long-transaction"]);
        for id in ["wal-level", "grants", "publication-no-table", "slot-holder", "nats-publish", "stream-subjects"] {
            assert!(report.checked.contains(&Value::from(id)), "{id} is not among {:?}", report.checked);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn people_can_copy_what_mends() {
    let (_database, patient) = Patient::shared(PgVersion::V18).await;
    patient.sql("ALTER TABLE outbox_events SET (fillfactor = 90)").await;
    let output = patient.settings.run(&["doctor"]).await;
    let out = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{out}");
    let lines: Vec<&str> = out.lines().map(str::trim).collect();
    assert!(lines.contains(&"ALTER TABLE public.outbox_events SET (fillfactor = 50);"), "{out}");
    assert!(lines.contains(&"WARNING  fillfactor  table public.outbox_events"), "{out}");
    assert!(lines.last().unwrap().starts_with("errors: 0, warnings: 1, notes: "), "{out}");
    assert!(!out.contains('\x1b'), "{out}");
}

/// Each side is examined whatever became of the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreachable_servers_are_findings() {
    let nowhere = RelaySettings::new("postgres://nobody:secret@127.0.0.1:1/none", "nats://127.0.0.1:1");
    let report = Report::of(&nowhere, &[]).await;
    assert_eq!(report.ills(), ["postgres-unreachable", "nats-unreachable"]);
    assert!(!format!("{:?}", report.findings).contains("secret"));
    let (_database, patient) = Patient::shared(PgVersion::V18).await;
    let report = Report::of(&patient.settings.clone().set("nats.url", "nats://127.0.0.1:1"), &[]).await;
    assert_eq!(report.ills(), ["nats-unreachable"]);
    assert!(report.checked.contains(&Value::from("grants")));
    let report = Report::of(&patient.settings.clone().set("postgres.url", "postgres://x@127.0.0.1:1/x"), &[]).await;
    assert_eq!(report.ills(), ["postgres-unreachable"]);
    assert!(report.checked.contains(&Value::from("nats-publish")));
    // Settings that cannot be used are no finding.
    let output = nowhere.set("source.slot", "A-b").run(&["doctor"]).await;
    assert_eq!(output.status.code(), Some(78));
}
