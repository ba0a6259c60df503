//! How throughput changes with the size of payloads, the number of aggregates, and the rows that are kept. Run by name
//! only.

use crate::Plan;
use crate::backlog::Backlog;
use crate::drain::{BASE, Drain, measure, through_the_relay};
use crate::report::Report;
use crate::site::{Over, Site};

const PAYLOADS: [(&str, u64); 5] = [
    ("scale/payload 100 B", 100),
    ("scale/payload 1 KiB", 1 << 10),
    ("scale/payload 8 KiB", 8 << 10),
    ("scale/payload 64 KiB", 64 << 10),
    ("scale/payload 512 KiB", 512 << 10),
];
/// No more than this is written for a case of payloads.
const BYTES: u64 = 256 << 20;

const AGGREGATES: [(&str, u64); 5] = [
    ("scale/1 aggregate", 1),
    ("scale/10 aggregates", 10),
    ("scale/100 aggregates", 100),
    ("scale/1000 aggregates", 1000),
    ("scale/100000 aggregates", 100_000),
];

const KEPT: &str = "scale/10000000 kept rows";

pub async fn run(plan: &Plan, site: &mut Site, report: &mut Report) {
    for (name, bytes) in PAYLOADS.into_iter().filter(|(name, _)| plan.wants(name, true)) {
        let rows = plan.sized(100_000).min(BYTES / bytes);
        measure(&Drain { name, backlog: Backlog { bytes, ..Backlog::single(rows) }, ..BASE }, site, report).await;
    }
    for (name, aggregates) in AGGREGATES.into_iter().filter(|(name, _)| plan.wants(name, true)) {
        let rows = plan.sized(if aggregates < 100 { 20_000 } else { 100_000 });
        measure(&Drain { name, backlog: Backlog { aggregates, ..Backlog::single(rows) }, ..BASE }, site, report).await;
    }
    if plan.wants(KEPT, true) {
        for _ in 0..plan.runs {
            kept_rows(plan, site, report).await;
        }
    }
}

/// The same backlog on an empty table, and on one that keeps ten million completed rows.
async fn kept_rows(plan: &Plan, site: &mut Site, report: &mut Report) {
    let backlog = Backlog::single(plan.sized(200_000));
    let mut speeds = [0.0; 2];
    let kept = [("scale/no kept rows", 0), (KEPT, plan.sized(10_000_000))];
    for ((name, kept), speed) in kept.into_iter().zip(&mut speeds) {
        let case = site.case(Over::Tcp).await;
        case.sql(&format!(
            "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, processed_at)
             SELECT 'kept-' || i, 'order', 'order-' || i % 100000, 'placed', '{{}}', 'completed', now()
             FROM generate_series(1, {kept}) i; ANALYZE outbox_events"
        ))
        .await;
        case.make_slot().await;
        backlog.insert(&case).await;
        *speed = through_the_relay(&Drain { name, backlog, ..BASE }, &case, report).await;
        case.end().await;
    }
    report.add(KEPT, "times an empty table", speeds[1] / speeds[0]);
}
