//! The most resident memory of the relay, in cases that would let it grow if anything did. Run by name only. That of a
//! large transaction and of a fast stream of events is told by the cases of `drain` and `latency`.

use std::time::Duration;

use rustix::process::Signal;

use crate::Plan;
use crate::backlog::Backlog;
use crate::harness::relay::Relay;
use crate::harness::wait::eventually;
use crate::process;
use crate::report::Report;
use crate::site::{Case, Over, PATIENCE, Site, settled};

const CASES: [&str; 5] = [
    "memory/bounded/idle",
    "memory/bounded/waiting rows",
    "memory/bounded/NATS frozen",
    "memory/bounded/begun anew",
    "memory/held rows",
];

pub async fn run(plan: &Plan, site: &Site, report: &mut Report) {
    for name in CASES.into_iter().filter(|name| plan.wants(name, true)) {
        let case = site.case(Over::Tcp).await;
        let relay = match name {
            "memory/bounded/idle" => idle(&case).await,
            "memory/bounded/waiting rows" => waiting_rows(&case, plan.sized(1_000_000)).await,
            "memory/bounded/NATS frozen" => nats_frozen(&case, plan.sized(100_000)).await,
            "memory/bounded/begun anew" => begun_anew(&case, plan.sized(1_000_000)).await,
            "memory/held rows" => held_rows(&case, plan.sized(100_000)).await,
            other => unreachable!("{other} is no case"),
        };
        report.add(name, "peak resident, MiB", process::peak_mib(relay.pid()));
        drop(relay);
        case.end().await;
    }
}

async fn idle(case: &Case<'_>) -> Relay {
    let relay = case.relay().await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    relay
}

/// Rows from before the slot, which are read from the table.
async fn waiting_rows(case: &Case<'_>, rows: u64) -> Relay {
    Backlog { batch: 10_000.min(rows), ..Backlog::single(rows) }.insert(case).await;
    // It is ready only once few of them are left.
    let relay = case.settings.start();
    settled(&relay, "completed", rows).await;
    relay
}

/// NATS answers nobody while rows come in, and then again.
async fn nats_frozen(case: &Case<'_>, rows: u64) -> Relay {
    let relay = case.relay().await;
    case.site.nats.signal(Signal::STOP);
    Backlog { batch: 10, ..Backlog::single(rows) }.insert(case).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    case.site.nats.signal(Signal::CONT);
    settled(&relay, "completed", rows).await;
    relay
}

/// A relay was killed when so many rows had been drained, of which it had noted none: the next one reads the ids of
/// what the stream holds.
async fn begun_anew(case: &Case<'_>, rows: u64) -> Relay {
    case.make_slot().await;
    Backlog { batch: 100, ..Backlog::single(rows) }.insert(case).await;
    let mut first = case.settings.start();
    settled(&first, "completed", rows).await;
    first.kill9().await;
    case.relay().await
}

/// Aggregates of which one event waits for a retry and the others behind it, until they are released all at once.
async fn held_rows(case: &Case<'_>, rows: u64) -> Relay {
    const AGGREGATES: u64 = 1000;
    case.sql(&format!(
        "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, status, next_retry_at)
         SELECT 'order', 'order-' || i, 'placed', '{{}}', 'failed', now() + interval '1 h'
         FROM generate_series(0, {AGGREGATES} - 1) i"
    ))
    .await;
    let relay = case.relay().await;
    Backlog { batch: 100, aggregates: AGGREGATES, ..Backlog::single(rows) }.insert(case).await;
    // Not all: the last ones wait in the log when as many are held as the relay allows.
    eventually(PATIENCE, "the rows are held", async || {
        let held = "SELECT count(*) FROM outbox_events WHERE status = 'pending' AND next_retry_at = 'infinity'";
        case.number(held).await >= rows as f64 * 0.95
    })
    .await;
    case.sql("UPDATE outbox_events SET next_retry_at = now() WHERE status = 'failed'").await;
    settled(&relay, "completed", rows + AGGREGATES).await;
    relay
}
