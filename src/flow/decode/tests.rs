use proptest::prelude::*;

use super::*;

/// Names of the outbox columns, and a row that is a live event.
const ROW: [(&str, &str); 13] = [
    ("id", "7"),
    ("event_id", "e-7"),
    ("tenant_id", "acme"),
    ("aggregate_type", "order"),
    ("aggregate_id", "42"),
    ("event_type", "created"),
    ("payload", "{}"),
    ("headers", "{}"),
    ("status", "pending"),
    ("retry_count", "1"),
    ("max_retries", "9"),
    ("next_retry_at", "\0"),
    ("created_at", "infinity"),
];

/// `ROW` with one column's value changed; `"\0"` stands for NULL.
fn decode_with(column: &str, value: &Value) -> Decoded {
    let columns = Columns::from_names(ROW.map(|(name, _)| name)).unwrap();
    let text =
        |text: &'static str| if text == "\0" { Value::Null } else { Value::Text(Bytes::from_static(text.as_bytes())) };
    let values = ROW.map(|(name, ordinary)| if name == column { value.clone() } else { text(ordinary) });
    decode(&columns, &values, Origin::Table)
}

fn text(text: &'static [u8]) -> Value {
    Value::Text(Bytes::from_static(text))
}

#[test]
fn a_row_is_live_left_or_unfit() {
    let Decoded::Live(event) = decode_with("", &Value::Null) else { panic!() };
    assert_eq!((event.id, &*event.event_id, event.retry_count, event.max_retries), (7, "e-7", 1, 9));
    for (column, value) in [
        ("status", text(b"completed")),
        ("status", text(b"Pending")),
        ("status", text(b"")),
        ("next_retry_at", text(b"infinity")),
        ("next_retry_at", text(b"2020-01-01 00:00:00+00")),
    ] {
        assert!(matches!(decode_with(column, &value), Decoded::Left), "{column}");
    }
    for (column, value) in [
        ("tenant_id", Value::Null),
        ("headers", Value::Null),
        ("headers", text(b"null")),
        ("headers", text(br#"{"a": 1}"#)),
        ("created_at", Value::Null),
        ("created_at", text(b"\xE9")),
        ("retry_count", Value::Null),
        ("max_retries", Value::Null),
        ("event_id", text(b"!~")),
    ] {
        assert!(matches!(decode_with(column, &value), Decoded::Live(_)), "{column}");
    }
    let cut = || Value::Truncated(Bytes::from_static(b"{"));
    for (column, value, reason) in [
        ("event_id", Value::Null, "event_id is NULL"),
        ("event_id", text(b""), "event_id is empty"),
        ("event_id", text("é".as_bytes()), "event_id has characters other than the visible ones of ASCII"),
        ("tenant_id", text(b""), "tenant_id is empty"),
        ("aggregate_type", text(b""), "aggregate_type is empty"),
        ("aggregate_id", Value::Null, "aggregate_id is NULL"),
        ("event_type", text(b"\xFF"), "event_type is not UTF-8 (does the database have the encoding SQL_ASCII?)"),
        ("payload", Value::Null, "payload is NULL"),
        ("payload", Value::Unchanged, "payload was not sent"),
        ("payload", cut(), "payload is cut off, because the row is larger than the relay reads"),
        ("headers", text(b"[]"), "headers is not a JSON object"),
        ("status", Value::Null, "status is NULL"),
        ("next_retry_at", cut(), "next_retry_at is cut off, because the row is larger than the relay reads"),
        ("retry_count", text(b"1.5"), "retry_count is not a 32-bit integer"),
    ] {
        let Decoded::Unfit(event, got) = decode_with(column, &value) else { panic!("{column}") };
        assert_eq!((event.id, got.as_str()), (7, reason));
    }
    for value in [Value::Null, text(b"x"), text(b"9223372036854775808"), text(b" 7"), cut()] {
        let Decoded::Nameless(event, reason) = decode_with("id", &value) else { panic!() };
        assert!(event.id == 0 && &*event.event_id == "e-7" && reason.starts_with("id "), "{reason}");
    }
}

#[test]
fn a_row_shorter_than_its_table_is_unfit() {
    let columns = Columns::from_names(ROW.map(|(name, _)| name)).unwrap();
    let Decoded::Nameless(_, reason) = decode(&columns, &[], Origin::Table) else { panic!() };
    assert!(reason.contains("status is missing from the row"), "{reason}");
}

#[test]
fn missing_columns_are_all_named() {
    let error = Columns::from_names(["status", "payload", "headers", "ID", "version"]).unwrap_err();
    assert_eq!(error.0, ["id", "event_id", "aggregate_type", "aggregate_id", "event_type", "next_retry_at"]);
    assert!(error.to_string().contains("id, event_id, aggregate_type, aggregate_id, event_type, next_retry_at"));
}

proptest! {
    #[test]
    fn columns_are_found_in_any_order(order in Just(ROW.to_vec()).prop_shuffle(), unknown in 0..ROW.len()) {
        let mut order = order;
        order.insert(unknown, ("version", "1"));
        let columns = Columns::from_names(order.iter().map(|(name, _)| *name)).unwrap();
        let values: Vec<Value> =
            order.iter().map(|(_, v)| if *v == "\0" { Value::Null } else { text(v.as_bytes()) }).collect();
        let Decoded::Live(event) = decode(&columns, &values, Origin::Table) else { panic!() };
        let Decoded::Live(expected) = decode_with("", &Value::Null) else { panic!() };
        prop_assert_eq!(format!("{event:?}"), format!("{expected:?}"));
    }

    #[test]
    fn random_rows_never_panic(values: Vec<(u8, Vec<u8>)>) {
        let value = |(kind, bytes): (u8, Vec<u8>)| match kind % 8 {
            0 => Value::Null,
            1 => Value::Unchanged,
            2 => Value::Truncated(bytes.into()),
            3 => text(b"pending"),
            _ => Value::Text(bytes.into()),
        };
        let values: Vec<Value> = values.into_iter().map(value).collect();
        let columns = Columns::from_names(ROW.map(|(name, _)| name)).unwrap();
        decode(&columns, &values, Origin::Table);
    }
}
