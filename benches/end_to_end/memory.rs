//! The most resident memory of the relay, in cases that would let it grow if anything did. Run by name only.

use std::time::Duration;

use rustix::process::Signal;

use crate::Plan;
use crate::backlog::Backlog;
use crate::harness::relay::Relay;
use crate::harness::wait::eventually;
use crate::process;
use crate::report::Report;
use crate::site::{Case, Over, PATIENCE, Site, settled};

pub async fn run(plan: &Plan, site: &mut Site, report: &mut Report) {
    for name in ["memory/bounded/idle", "memory/bounded/waiting rows", "memory/bounded/NATS frozen", "memory/held rows"]
    {
        if !plan.wants(name, true) {
            continue;
        }
        let mut case = site.case(Over::Tcp).await;
        let relay = match name {
            "memory/bounded/idle" => idle(&case).await,
            "memory/bounded/waiting rows" => waiting_rows(&case, plan.sized(1_000_000)).await,
            "memory/bounded/NATS frozen" => nats_frozen(&case, plan.sized(100_000)).await,
            _ => held_rows(&mut case, plan.sized(100_000)).await,
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
    let relay = case.relay().await;
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

/// An event that no stream takes, and behind it the others of its aggregate.
async fn held_rows(case: &mut Case<'_>, rows: u64) -> Relay {
    let placed = format!("{}.order.placed", case.space.prefix);
    case.set("nats.create.subjects", &placed);
    let relay = case.relay().await;
    case.sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 'order-0', 'stray', '{}')")
        .await;
    eventually(PATIENCE, "the event fails", async || {
        case.number("SELECT count(*) FROM outbox_events WHERE status = 'failed'").await > 0.0
    })
    .await;
    Backlog { batch: 100, aggregates: 1, ..Backlog::single(rows) }.insert(case).await;
    eventually(PATIENCE, "the rows are held, or were released again", async || {
        case.number("SELECT count(*) FROM outbox_events WHERE status = 'pending' AND next_retry_at IS NULL").await
            == 0.0
    })
    .await;
    relay
}
