//! How throughput changes with the size of payloads, the number of aggregates, the rows that are kept, and a second
//! relay. Run by name only.

use std::time::Instant;

use crate::Plan;
use crate::backlog::Backlog;
use crate::drain::{BASE, Drain, measure, through_the_relay};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::wait::eventually;
use crate::process;
use crate::report::Report;
use crate::site::{Case, Over, PATIENCE, Site, settled};

pub const PAYLOADS: [(&str, u64); 5] = [
    ("scale/payload 100 B", 100),
    ("scale/payload 1 KiB", 1 << 10),
    ("scale/payload 8 KiB", 8 << 10),
    ("scale/payload 64 KiB", 64 << 10),
    ("scale/payload 512 KiB", 512 << 10),
];
/// No more than this is written for a case of payloads.
const BYTES: u64 = 256 << 20;

pub const AGGREGATES: [(&str, u64); 5] = [
    ("scale/1 aggregate", 1),
    ("scale/10 aggregates", 10),
    ("scale/100 aggregates", 100),
    ("scale/1000 aggregates", 1000),
    ("scale/100000 aggregates", 100_000),
];

const EMPTY: &str = "scale/no kept rows";
pub const KEPT: &str = "scale/10000000 kept rows";

const SHARED: [(&str, usize); 2] = [("scale/shared by 1 relay", 1), ("scale/shared by 2 relays", 2)];

pub async fn run(plan: &Plan, site: &Site, report: &mut Report) {
    for (name, bytes) in PAYLOADS.into_iter().filter(|(name, _)| plan.wants(name, true)) {
        let rows = plan.sized(100_000).min(BYTES / bytes);
        measure(&Drain { name, backlog: Backlog { bytes, ..Backlog::single(rows) }, ..BASE }, site, report).await;
    }
    for (name, aggregates) in AGGREGATES.into_iter().filter(|(name, _)| plan.wants(name, true)) {
        let rows = plan.sized(if aggregates < 100 { 20_000 } else { 100_000 });
        measure(&Drain { name, backlog: Backlog { aggregates, ..Backlog::single(rows) }, ..BASE }, site, report).await;
    }
    for (name, relays) in SHARED.into_iter().filter(|(name, _)| plan.wants(name, true)) {
        shared(name, relays, Backlog::single(plan.sized(200_000)), site, report).await;
    }
    if plan.wants(KEPT, true) {
        kept_rows(plan, site, report).await;
    }
}

/// The same backlog on a table that was empty before the first, and on one that keeps ten million completed rows. By
/// turns: what a shared machine has left for us changes within minutes.
async fn kept_rows(plan: &Plan, site: &Site, report: &mut Report) {
    let backlog = Backlog::single(plan.sized(200_000));
    let cases = [(EMPTY, keeping(0, site).await), (KEPT, keeping(plan.sized(10_000_000), site).await)];
    for run in 0..plan.runs {
        for (name, case) in &cases {
            catch_up(case, backlog.rows * run as u64).await;
            backlog.insert(case).await;
            through_the_relay(&Drain { name, backlog, ..BASE }, case, report).await;
        }
    }
    for (_, case) in cases {
        case.end().await;
    }
    let speed = |name| report.median(name, "events/s").unwrap_or(f64::NAN);
    let ratio = speed(KEPT) / speed(EMPTY);
    report.add(KEPT, "times an empty table", ratio);
}

/// A database whose table keeps so many completed rows.
async fn keeping(rows: u64, site: &Site) -> Case<'_> {
    let case = site.case(Over::Tcp).await;
    case.sql(&format!(
        "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, status, processed_at)
         SELECT 'kept-' || i, 'order', 'order-' || i % 100000, 'placed', '{{}}', 'completed', now()
         FROM generate_series(1, {rows}) i"
    ))
    .await;
    // Now, so that the server does not do it while it is measured.
    case.sql("VACUUM ANALYZE outbox_events").await;
    case.make_slot().await;
    case
}

/// Has a relay pass what the log holds of the other case, and note how far the stream goes, which the next one would
/// read first otherwise.
async fn catch_up(case: &Case<'_>, stored: u64) {
    let mut relay = case.relay().await;
    let end = case.wal().await;
    let position =
        format!("SELECT min(confirmed_flush_lsn - '0/0') FROM pg_replication_slots WHERE slot_name = '{}'", case.name);
    eventually(PATIENCE, "the log is passed, and it is noted how far the stream goes", async || {
        case.number(&position).await >= end
            && case.number("SELECT coalesce(max(stream_seq), 0) FROM outbox_relay_state").await >= stored as f64
    })
    .await;
    relay.terminate(PATIENCE).await;
}

/// Relays on one database that share its rows by the row filters of their publications.
async fn shared(name: &str, relays: usize, backlog: Backlog, site: &Site, report: &mut Report) {
    let case = site.case(Over::Tcp).await;
    let mut shares = Vec::new();
    for number in 0..relays {
        shares.push(share(&case, relays, number).await);
    }
    for (settings, _) in &shares {
        let mut relay = settings.start();
        relay.wait_ready().await;
        relay.terminate(PATIENCE).await;
    }
    backlog.insert(&case).await;
    let mut rows = Vec::new();
    for (_, filter) in &shares {
        rows.push(case.number(&format!("SELECT count(*) FROM outbox_events WHERE {filter}")).await as u64);
    }
    let began = Instant::now();
    let running: Vec<Relay> = shares.iter().map(|(settings, _)| settings.start()).collect();
    for (relay, rows) in running.iter().zip(rows) {
        settled(relay, "completed", rows).await;
    }
    report.add(name, "events/s", backlog.rows as f64 / began.elapsed().as_secs_f64());
    let cpu: f64 = running.iter().map(|relay| process::cpu(relay.pid()).as_secs_f64()).sum();
    report.add(name, "relay CPU, us/event", cpu * 1e6 / backlog.rows as f64);
    for mut relay in running {
        relay.terminate(PATIENCE).await;
    }
    case.end().await;
}

/// The settings of one relay of several, and the filter of its publication.
async fn share(case: &Case<'_>, relays: usize, number: usize) -> (RelaySettings, String) {
    let (name, filter) = (format!("share_{number}"), format!("abs(hashtext(aggregate_id)) % {relays} = {number}"));
    let publication =
        format!("CREATE PUBLICATION {name} FOR TABLE outbox_events WHERE ({filter}) WITH (publish = 'insert')");
    case.sql(&publication).await;
    let slot = format!("{}_{number}", case.name);
    (case.settings.clone().set("source.slot", &slot).set("source.publication", &name), filter)
}
