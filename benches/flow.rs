//! The pure stages, one event at a time: `cargo bench --bench flow`, and benches/instructions.
#![allow(clippy::cast_possible_truncation, reason = "the row is a small one")]

use std::hint::black_box;

use bytes::{BufMut, Bytes, BytesMut};
use criterion::Criterion;
use outbox_relay::flow::confirm::Ledger;
use outbox_relay::flow::decode::{Columns, Value, decode};
use outbox_relay::flow::event::{Decoded, Event, LogOrigin, Origin};
use outbox_relay::flow::lsn::Lsn;
use outbox_relay::flow::order::{AggregateKey, Gate, Pass};
use outbox_relay::flow::route::Router;
use outbox_relay::nats::publish::Headers;
use outbox_relay::postgres::pgoutput;

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

/// An `I` message of pgoutput with that row.
fn message() -> Bytes {
    let mut bytes = BytesMut::from(&b"I\0\0\0\x07N"[..]);
    bytes.put_u16(ROW.len() as u16);
    for (_, text) in ROW {
        if text.is_empty() {
            bytes.put_u8(b'n');
        } else {
            bytes.put_u8(b't');
            bytes.put_u32(text.len() as u32);
            bytes.put_slice(text.as_bytes());
        }
    }
    bytes.freeze()
}

type Stage = (&'static str, Box<dyn FnMut()>);

/// What each stage does for one event.
fn stages() -> [Stage; 5] {
    let message = message();
    let parse = move || drop(black_box(pgoutput::parse(black_box(message.clone()))));
    let (columns, values) = row();
    let decode = move || drop(black_box(decode(black_box(&columns), black_box(&values), Origin::Table)));
    let router = Router::new("outbox.{aggregate_type}.{event_type}", true, "/outbox-relay", "OUTBOX")
        .unwrap_or_else(|error| panic!("{error}"));
    let routed = event();
    let route = move || {
        let mut headers = Headers::new();
        let subject = router.subject(black_box(&routed));
        router.headers(&routed, |name, value| headers.set(name, value));
        drop(black_box((subject, headers)));
    };
    let (mut gate, ordered) = (Gate::default(), event());
    let order = move || {
        let turn = gate.arrive(AggregateKey::of(black_box(&ordered)), 1, Pass::First);
        black_box((turn, gate.leave(&AggregateKey::of(&ordered))));
    };
    let (mut ledger, mut number) = (Ledger::new(Lsn::ZERO), 0);
    let confirm = move || {
        number += 1;
        ledger.begin();
        ledger.add(number);
        ledger.commit(Lsn(number));
        ledger.settle(number, None);
        black_box(ledger.safe());
    };
    [
        ("parse", Box::new(parse)),
        ("decode", Box::new(decode)),
        ("route", Box::new(route)),
        ("order", Box::new(order)),
        ("confirm", Box::new(confirm)),
    ]
}

fn main() {
    // For benches/instructions: one stage, so often, and nothing else.
    if let (Ok(wanted), Ok(count)) = (std::env::var("STAGE"), std::env::var("COUNT")) {
        let count: u32 = count.parse().unwrap_or_else(|error| panic!("COUNT: {error}"));
        for (_, mut stage) in stages().into_iter().filter(|(name, _)| *name == wanted) {
            (0..count).for_each(|_| stage());
        }
        return;
    }
    let mut criterion = Criterion::default().configure_from_args();
    for (name, mut stage) in stages() {
        criterion.bench_function(name, |bencher| bencher.iter(&mut stage));
    }
    criterion.final_summary();
}
