//! The shop: several tenants take orders at once, and each step of an order is a transaction with its events.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;

use super::DemoError;
use super::ledger::Ledger;
use crate::config::TableName;
use crate::postgres::connect::Target;
use crate::postgres::demo::Producer;
use crate::postgres::store::NewEvent;

pub const TENANTS: [&str; 6] = ["acorn", "birch", "cedar", "hazel", "maple", "rowan"];
const ORDERS_PER_TENANT: usize = 10;
const EVENTS_PER_ORDER: usize = 5;
pub const ORDERS: usize = TENANTS.len() * ORDERS_PER_TENANT;
pub const EVENTS: usize = ORDERS * EVENTS_PER_ORDER;

/// Between two steps of a tenant.
const PAUSE_MS: Range<u64> = 40..160;

/// Opens the shop until all orders are done.
pub async fn open(target: &Target, table: &TableName, ledger: &Ledger) -> Result<(), DemoError> {
    let producers = try_join_all(TENANTS.iter().map(|_| Producer::connect(target, table))).await?;
    let tenants = TENANTS.iter().zip(producers).enumerate().map(|(at, (tenant, producer))| {
        let first = 1000 + at * ORDERS_PER_TENANT;
        take_orders(tenant, first..first + ORDERS_PER_TENANT, producer, ledger)
    });
    try_join_all(tenants).await?;
    Ok(())
}

async fn take_orders(
    tenant: &'static str,
    orders: Range<usize>,
    mut producer: Producer,
    ledger: &Ledger,
) -> Result<(), DemoError> {
    for order in orders {
        for step in steps(tenant, order) {
            tokio::time::sleep(Duration::from_millis(random(PAUSE_MS))).await;
            let events: Vec<NewEvent<'_>> = step.iter().map(Draft::event).collect();
            let (transaction, ids) = producer.begin(&events).await?;
            let sent = Instant::now();
            // Before the commit: its events may arrive before its answer does.
            ledger.commit(&events, ids, sent);
            transaction.commit().await?;
            ledger.committed(sent.elapsed());
        }
    }
    Ok(())
}

/// Some number of a range that is not empty. Good enough for a shop.
pub fn random(range: Range<u64>) -> u64 {
    let random = RandomState::new().build_hasher().finish();
    range.start + random % (range.end - range.start)
}

/// What an event is made of.
struct Draft {
    tenant: &'static str,
    aggregate_type: &'static str,
    aggregate_id: String,
    event_type: &'static str,
    payload: String,
}

impl Draft {
    fn event(&self) -> NewEvent<'_> {
        let event = NewEvent::new(self.aggregate_type, &self.aggregate_id, self.event_type, &self.payload);
        NewEvent { tenant_id: Some(self.tenant), ..event }
    }
}

/// The transactions of one order.
fn steps(tenant: &'static str, order: usize) -> [Vec<Draft>; 3] {
    let event = |aggregate_type, aggregate_id: String, event_type, more: serde_json::Value| {
        let payload = serde_json::json!({ "order": order, "details": more }).to_string();
        Draft { tenant, aggregate_type, aggregate_id, event_type, payload }
    };
    let (pieces, cents) = (random(1..5), random(500..20_000));
    let article = format!("A-{:02}", random(1..30));
    let number = order.to_string();
    [
        vec![
            event("order", number.clone(), "placed", serde_json::json!({ "article": article, "pieces": pieces })),
            event("stock", format!("{tenant}-{article}"), "reserved", serde_json::json!({ "pieces": pieces })),
        ],
        vec![
            event("payment", format!("P-{order}"), "captured", serde_json::json!({ "cents": cents })),
            event("order", number.clone(), "paid", serde_json::json!({ "cents": cents })),
        ],
        vec![event("order", number, "shipped", serde_json::json!({ "parcel": random(0..1_000_000) }))],
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_has_as_many_events_as_is_said() {
        let steps = steps("acorn", 1000);
        assert_eq!(steps.iter().map(Vec::len).sum::<usize>(), EVENTS_PER_ORDER);
    }
}
