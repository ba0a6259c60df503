//! The pure stages, one event at a time: `cargo bench`.

use std::hint::black_box;

use bytes::Bytes;
use criterion::{Criterion, criterion_group, criterion_main};
use outbox_relay::flow::confirm::Ledger;
use outbox_relay::flow::decode::{Columns, Value, decode};
use outbox_relay::flow::event::{Decoded, Event, LogOrigin, Origin};
use outbox_relay::flow::lsn::Lsn;
use outbox_relay::flow::order::{AggregateKey, Gate, Pass};
use outbox_relay::flow::route::Router;

const ROW: [(&str, &str); 11] = [
    ("id", "4711"),
    ("event_id", "0b4f7f0e-2f6c-4d43-9d0a-8a2f5a4d2a55"),
    ("tenant_id", "acme"),
    ("aggregate_type", "order"),
    ("aggregate_id", "order-4711"),
    ("event_type", "placed"),
    ("payload", r#"{"order": "order-4711", "total": "12.50", "lines": [{"sku": "a", "count": 1}]}"#),
    ("headers", "{}"),
    ("status", "pending"),
    ("next_retry_at", ""),
    ("created_at", "2026-11-29 20:55:28.123456+00"),
];

fn row() -> (Columns, Vec<Value>) {
    let columns = Columns::from_names(ROW.map(|(name, _)| name)).unwrap_or_else(|missing| panic!("{missing}"));
    let value = |(_, text): (&str, &'static str)| match text {
        "" => Value::Null,
        text => Value::Text(Bytes::from_static(text.as_bytes())),
    };
    (columns, ROW.map(value).to_vec())
}

fn event() -> Event {
    let (columns, values) = row();
    let origin = Origin::Log(LogOrigin { xid: 7, final_lsn: Lsn(1 << 33), index: 0 });
    match decode(&columns, &values, origin) {
        Decoded::Live(event) => event,
        other => panic!("{other:?}"),
    }
}

fn flow(criterion: &mut Criterion) {
    let (columns, values) = row();
    criterion.bench_function("decode", |bencher| {
        bencher.iter(|| decode(black_box(&columns), black_box(&values), Origin::Table));
    });
    let router = Router::new("outbox.{aggregate_type}.{event_type}", true, "/outbox-relay", "OUTBOX")
        .unwrap_or_else(|error| panic!("{error}"));
    let event = event();
    criterion.bench_function("route", |bencher| {
        bencher.iter(|| {
            let subject = router.subject(black_box(&event));
            let mut bytes = 0;
            router.headers(&event, |name, value| bytes += name.len() + value.len());
            (subject, bytes)
        });
    });
    criterion.bench_function("order", |bencher| {
        let mut gate = Gate::default();
        bencher.iter(|| {
            let turn = gate.arrive(AggregateKey::of(black_box(&event)), 1, Pass::First);
            (turn, gate.leave(&AggregateKey::of(&event)))
        });
    });
    criterion.bench_function("confirm", |bencher| {
        let (mut ledger, mut number) = (Ledger::new(Lsn::ZERO), 0);
        bencher.iter(|| {
            number += 1;
            ledger.begin();
            ledger.add(number);
            ledger.commit(Lsn(number));
            ledger.settle(number);
            ledger.safe()
        });
    });
}

criterion_group!(benches, flow);
criterion_main!(benches);
