//! The way from bytes to events, on streams captured from real servers (`tests/data/README.md`): needs no server.

use std::collections::HashMap;

use bytes::Bytes;
use outbox_relay::flow::decode::{Columns, Value, decode};
use outbox_relay::flow::event::{Decoded, Event, LogOrigin, Origin};
use outbox_relay::flow::lsn::Lsn;
use outbox_relay::postgres::pgoutput::{Begin, Message, Problem, Relation, parse, parse_truncated};
use proptest::prelude::*;

const CAPTURES: [&str; 2] = ["pgoutput-15.bin", "pgoutput-18.bin"];
const CAPTURES_SQL_ASCII: [&str; 2] = ["pgoutput-15-sql-ascii.bin", "pgoutput-18-sql-ascii.bin"];

/// The messages of a captured stream.
fn messages(file: &str) -> Vec<Bytes> {
    let path = format!("{}/tests/data/{file}", env!("CARGO_MANIFEST_DIR"));
    let mut bytes = Bytes::from(std::fs::read(path).unwrap());
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let len = u32::from_be_bytes(bytes.split_to(4)[..].try_into().unwrap());
        messages.push(bytes.split_to(len as usize));
    }
    assert!(messages.len() > 10, "{file} is not a capture");
    messages
}

fn parsed(file: &str) -> Vec<Message> {
    messages(file).into_iter().map(|message| parse(message).unwrap()).collect()
}

fn all_messages() -> impl Iterator<Item = Bytes> {
    CAPTURES.into_iter().chain(CAPTURES_SQL_ASCII).flat_map(messages)
}

fn columns(relation: &Relation) -> Option<Columns> {
    Columns::from_names(relation.columns.iter().map(|column| &*column.name)).ok()
}

/// What becomes of every inserted row of the tables that have the outbox columns, in order.
fn outcomes(file: &str) -> Vec<Decoded> {
    let mut shapes = HashMap::new();
    let mut outcomes = Vec::new();
    let mut place = LogOrigin { xid: 0, final_lsn: Lsn::ZERO, index: 0 };
    for message in parsed(file) {
        match message {
            Message::Begin(begin) => place = LogOrigin { xid: begin.xid, final_lsn: begin.final_lsn, index: 0 },
            Message::Relation(relation) => {
                shapes.insert(relation.id, columns(&relation));
            }
            Message::Insert(insert) => {
                if let Some(columns) = &shapes[&insert.relation_id] {
                    outcomes.push(decode(columns, &insert.tuple, Origin::Log(place)));
                    place.index += 1;
                }
            }
            _ => {}
        }
    }
    outcomes
}

fn live(outcomes: &[Decoded]) -> Vec<&Event> {
    outcomes.iter().filter_map(|outcome| if let Decoded::Live(event) = outcome { Some(event) } else { None }).collect()
}

fn unfit<'a>(outcomes: &'a [Decoded]) -> Vec<(&'a str, &'a str)> {
    let reason = |outcome: &'a Decoded| match outcome {
        Decoded::Unfit(event, reason) => Some((&*event.event_id, reason.as_str())),
        _ => None,
    };
    outcomes.iter().filter_map(reason).collect()
}

#[test]
fn captured_rows_become_what_they_should() {
    for file in CAPTURES {
        let outcomes = outcomes(file);
        let live = live(&outcomes);
        let ids: Vec<&str> = live.iter().map(|event| &*event.event_id).collect();
        let mut expected: Vec<String> = vec!["single".into()];
        expected.extend((0..5).map(|n| format!("copy-{n}")));
        expected.extend((0..100).map(|n| format!("many-{n}")));
        expected.extend(["nulls", "nested", "big"].map(String::from));
        expected.extend((0..5).map(|n| format!("date-{n}")));
        expected.push("odd".into());
        expected.extend((0..4).map(|n| format!("ddl-{n}")));
        expected.extend(["parted-0", "parted-1", "message", "origin", "gone"].map(String::from));
        assert_eq!(ids, expected, "{file}");
        assert_eq!(outcomes.iter().filter(|outcome| matches!(outcome, Decoded::Left)).count(), 3);
        assert_eq!(
            unfit(&outcomes),
            [
                ("unfit-empty", "aggregate_type is empty; event_type is empty"),
                (
                    "unfit id",
                    "event_id has characters other than the visible ones of ASCII; tenant_id is empty; \
                     headers is not a JSON object"
                ),
            ]
        );
    }
}

#[test]
fn captured_values_are_exact() {
    for file in CAPTURES {
        let outcomes = outcomes(file);
        let live = live(&outcomes);
        let find = |event_id: &str| *live.iter().find(|event| event.event_id == event_id).unwrap();
        let single = find("single");
        assert_eq!((single.id, &*single.aggregate_type, &*single.aggregate_id), (1, "order", "42"));
        assert_eq!((single.tenant_id.as_deref(), &*single.event_type), (Some("acme"), "created"));
        assert_eq!(single.payload, r#"{"d": 0.1234567890123456789, "id": 9007199254740993}"#);
        assert_eq!(&*single.headers, r#"{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}"#);
        assert_eq!(single.created_at.as_deref(), Some("2026-11-29 21:04:05.678+00"));
        assert_eq!((single.retry_count, single.max_retries), (0, 5));
        let nulls = find("nulls");
        assert_eq!((&nulls.payload[..], &*nulls.headers, &nulls.tenant_id), (&b"null"[..], "{}", &None));
        let nested = find("nested");
        assert_eq!((&nested.payload[..], &*nested.headers), (&br#"{"a": [], "b": null}"#[..], "{}"));
        assert_eq!(find("big").payload, format!("\"{}\"", "0123456789".repeat(1000)));
        let dates: Vec<_> = (0..4).map(|n| find(&format!("date-{n}")).created_at.as_deref().unwrap()).collect();
        assert_eq!(dates[..3], ["infinity", "-infinity", "0044-03-15 00:00:00+00 BC"]);
        assert_eq!(dates[3], "294276-12-31 23:59:59.999999+00");
        assert_eq!((find("odd").id, &find("odd").payload[..]), (i64::MIN, "{\"x\": \"é€😀\"}".as_bytes()));
        assert_eq!((&*find("ddl-0").headers, &*find("ddl-1").headers), ("{}", r#"{"a": "b"}"#));
        assert_eq!((&*find("ddl-3").aggregate_id, find("parted-1").id), ("1", 101));
        let places: Vec<_> = (0..5).map(|n| find(&format!("copy-{n}")).origin).collect();
        let Origin::Log(first) = places[0] else { panic!() };
        let expected = [0, 1, 2, 3, 4].map(|index| Origin::Log(LogOrigin { index, ..first }));
        assert_eq!(places, expected);
    }
}

/// A row shares the buffer that its message came in.
#[test]
fn nothing_is_copied() {
    for message in messages(CAPTURES[1]) {
        let Message::Insert(insert) = parse(message.clone()).unwrap() else { continue };
        for value in insert.tuple {
            let Value::Text(text) = value else { continue };
            assert!(text.is_empty() || message.as_ptr_range().contains(&text.as_ptr()));
        }
    }
}

#[test]
fn bytes_that_are_not_utf8_make_their_row_unfit_and_no_other() {
    for file in CAPTURES_SQL_ASCII {
        let outcomes = outcomes(file);
        assert_eq!(live(&outcomes).iter().map(|event| &*event.event_id).collect::<Vec<_>>(), ["good"]);
        let hint = "is not UTF-8 (does the database have the encoding SQL_ASCII?)";
        let unfit: Vec<_> = unfit(&outcomes).into_iter().map(|(id, reason)| (id, reason.replace(hint, "*"))).collect();
        let expected = [("bad-text", "aggregate_id *"), ("bad-payload", "payload *"), ("bad-headers", "headers *")];
        assert_eq!(unfit, expected.map(|(id, reason)| (id, reason.to_owned())));
    }
}

#[test]
fn every_kind_of_message_is_read_as_the_protocol_says() {
    for file in CAPTURES {
        let messages = parsed(file);
        let mut open: Option<Begin> = None;
        let mut end = Lsn::ZERO;
        for message in &messages {
            match message {
                Message::Begin(begin) => assert!(open.replace(begin.clone()).is_none() && begin.final_lsn >= end),
                Message::Commit(commit) => {
                    let begin = open.take().unwrap();
                    assert_eq!((begin.final_lsn, begin.commit_time), (commit.commit_lsn, commit.commit_time));
                    // Between 2020 and 2100.
                    assert!((20..100).contains(&(commit.commit_time / 1_000_000 / 86_400 / 365)));
                    assert!(commit.end_lsn > commit.commit_lsn);
                    end = commit.end_lsn;
                }
                _ => {}
            }
        }
        let names = |message: &Message| match message {
            Message::Relation(relation) => Some((relation.namespace.to_string(), relation.name.to_string())),
            _ => None,
        };
        let mut tables: Vec<_> = messages.iter().filter_map(names).collect();
        tables.sort();
        tables.dedup();
        let expected = [
            ("Out Box", "Ev\"t"),
            ("public", "outbox_events"),
            ("public", "parted"),
            ("public", "typed"),
            ("public", "whole"),
        ];
        // The root, and the partitions that the server describes besides.
        tables.retain(|(_, name)| !name.starts_with("parted_"));
        assert_eq!(tables, expected.map(|(schema, name)| (schema.to_owned(), name.to_owned())), "{file}");
        let debug: Vec<String> = messages.iter().map(|message| format!("{message:?}")).collect();
        let count = |part: &str| debug.iter().filter(|text| text.contains(part)).count();
        assert_eq!(count(r#"prefix: "prefix", content: b"in a transaction""#), 1, "{file}");
        assert_eq!((count("transactional: true"), count("transactional: false")), (1, 1), "{file}");
        assert_eq!(count(r#"Origin(Origin { commit_lsn: 16/B374D848, name: "elsewhere" })"#), 1, "{file}");
        assert!(count(r#"namespace: "shop", name: "mood" }"#) >= 1, "{file}");
        assert_eq!(count("cascade: true, restart_identity: true"), 1, "{file}");
        assert_eq!(count("cascade: false, restart_identity: false"), 1, "{file}");
        assert_eq!(count("odd \\\"column\\\" é"), 2, "{file}");
        let update = |message: &Message| match message {
            Message::Update(update) => Some((update.old.is_some(), update.new.contains(&Value::Unchanged))),
            _ => None,
        };
        let updates: Vec<_> = messages.iter().filter_map(update).collect();
        assert_eq!(updates, [(false, true), (true, false), (true, false)], "{file}");
        let deletes = messages.iter().filter(|message| matches!(message, Message::Delete(_))).count();
        assert_eq!(deletes, 3, "{file}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    for message in all_messages() {
        for len in 0..message.len() {
            let error = parse(message.slice(..len)).unwrap_err();
            assert!(matches!(error.problem, Problem::Short { .. } | Problem::Unterminated), "{error}");
            assert!(error.offset <= len, "{error}");
        }
    }
}

#[test]
fn every_trailing_byte_is_an_error() {
    for message in all_messages() {
        let longer = Bytes::from([&message[..], &[0]].concat());
        let error = parse(longer).unwrap_err();
        assert_eq!((error.problem, error.offset), (Problem::Trailing(1), message.len()));
    }
}

#[test]
fn no_changed_byte_panics() {
    for message in all_messages() {
        let mut bytes = message.to_vec();
        for at in 0..bytes.len() {
            let original = bytes[at];
            for changed in [0, 1, 0x7F, 0xFF, original ^ 1, original ^ 0x80, b'b', b'n', b't', b'u'] {
                bytes[at] = changed;
                let changed = Bytes::copy_from_slice(&bytes);
                if let Ok(Message::Relation(relation)) = parse(changed.clone()) {
                    let _ = columns(&relation);
                }
                let _ = parse_truncated(changed.slice(..at), changed.len());
            }
            bytes[at] = original;
        }
    }
}

/// A message cut by the limit on its size gives what was whole, and says what was not.
#[test]
fn a_cut_insert_gives_the_values_before_the_cut() {
    for message in all_messages() {
        let Message::Insert(whole) = parse(message.clone()).unwrap() else { continue };
        for len in 0..message.len() {
            let cut = parse_truncated(message.slice(..len), message.len());
            // Kind, relation, mark and number of columns.
            if len < 8 {
                assert!(matches!(cut.unwrap_err().problem, Problem::Short { .. }));
                continue;
            }
            let cut = cut.unwrap();
            assert_eq!((cut.relation_id, cut.tuple.len()), (whole.relation_id, whole.tuple.len()));
            let mut is_cut = false;
            for (cut, whole) in cut.tuple.iter().zip(&whole.tuple) {
                match (cut, whole) {
                    (Value::Truncated(start), Value::Text(text)) => {
                        assert!(text.starts_with(start) && start.len() < text.len().max(1));
                    }
                    (Value::Truncated(start), _) => assert!(start.is_empty()),
                    (cut, whole) => assert!(!is_cut && cut == whole),
                }
                is_cut |= matches!(cut, Value::Truncated(_));
            }
            assert!(is_cut);
        }
        let longer = parse_truncated(message.clone(), message.len() + 3).unwrap_err();
        assert_eq!(longer.problem, Problem::Trailing(3));
        assert_eq!(parse_truncated(message.clone(), message.len()), Ok(whole));
    }
}

#[test]
fn only_an_insert_can_be_cut() {
    for message in all_messages().filter(|message| message[0] != b'I') {
        let cut = parse_truncated(message.slice(..message.len() - 1), message.len());
        assert_eq!(cut.unwrap_err().problem, Problem::Unknown(message[0]));
    }
}

#[test]
fn errors_say_which_message_field_and_byte() {
    for (bytes, expected) in [
        (&b""[..], "pgoutput (empty) message, kind, at byte 0: 1 bytes are needed, 0 remain"),
        (b"S", "pgoutput (unknown) message, kind, at byte 0: byte 0x53 is not defined here by protocol version 1"),
        (b"B\0\0", "pgoutput Begin message, final LSN, at byte 1: 8 bytes are needed, 2 remain"),
        (b"C\x01", "pgoutput Commit message, flags, at byte 1: byte 0x01 is not defined here by protocol version 1"),
        (b"O\0\0\0\0\0\0\0\0abc", "pgoutput Origin message, name, at byte 9: the text has no end"),
        (
            b"I\0\0\0\x01N\0\x02nt\xFF\xFF\xFF\xFF",
            "pgoutput Insert message, length of column 1, at byte 10: a length or count of -1 is impossible",
        ),
        (
            b"I\0\0\0\x01N\x80\0",
            "pgoutput Insert message, number of columns, at byte 6: a length or count of -32768 is impossible",
        ),
        (
            b"I\0\0\0\x01N\0\x01b\0\0\0\0",
            "pgoutput Insert message, kind of column 0, at byte 8: the value is in binary format, which the relay never \
             asks for (start replication without `binary`)",
        ),
        (b"I\0\0\0\x01N\0\0x", "pgoutput Insert message, end, at byte 8: 1 bytes follow where the message should end"),
    ] {
        assert_eq!(parse(Bytes::from_static(bytes)).unwrap_err().to_string(), expected);
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(kind in "[BMCORYIUDT]|.", mut bytes: Vec<u8>, total: usize) {
        bytes.splice(..0, kind.bytes());
        let bytes = Bytes::from(bytes);
        let whole = parse(bytes.clone());
        let cut = parse_truncated(bytes.clone(), total);
        prop_assert!(total > bytes.len() || cut.map(Message::Insert).ok() == whole.ok().filter(|_| bytes[0] == b'I'));
    }
}
