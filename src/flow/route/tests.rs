use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::flow::event::{LogOrigin, Origin};
use crate::flow::lsn::Lsn;
use crate::flow::subject::covers;

const DEFAULT: &str = "outbox.{aggregate_type}.{event_type}";

fn event() -> Event {
    Event {
        id: 1,
        event_id: "e-1".into(),
        tenant_id: None,
        aggregate_type: "order".into(),
        aggregate_id: "42".into(),
        event_type: "created".into(),
        payload: Bytes::from_static(b"{}"),
        headers: "{}".into(),
        created_at: Some("2026-11-29 21:04:05.678+00".into()),
        retry_count: 0,
        max_retries: 5,
        origin: Origin::Log(LogOrigin { xid: 7, final_lsn: Lsn(0x1A2_B3C8), index: 3 }),
    }
}

fn router(template: &str) -> Router {
    Router::new(template, true, "/outbox-relay", "OUTBOX").unwrap()
}

fn subject(template: &str, event: &Event) -> String {
    router(template).subject(event).unwrap()
}

/// The headers that are sent, and how many of the row's were dropped.
fn headers(router: &Router, event: &Event) -> (Vec<(String, String)>, usize) {
    let mut sent = Vec::new();
    let dropped = router.headers(event, |name, value| sent.push((name.to_owned(), value.to_owned())));
    (sent, dropped)
}

/// The row's headers that are sent, and how many were dropped.
fn row_headers(json: &str) -> (Vec<(String, String)>, usize) {
    let router = router(DEFAULT);
    let (own, _) = headers(&router, &event());
    let (sent, dropped) = headers(&router, &Event { headers: json.into(), ..event() });
    (sent[own.len()..].to_vec(), dropped)
}

fn is_legal_subject(subject: &str) -> bool {
    let is_legal = |byte: u8| byte.is_ascii_graphic() && !b"*>".contains(&byte);
    !subject.starts_with('$') && subject.split('.').all(|token| !token.is_empty() && token.bytes().all(is_legal))
}

#[test]
fn the_default_subject() {
    assert_eq!(subject(DEFAULT, &event()), "outbox.order.created");
    let event = Event { aggregate_type: "shop.order".into(), event_type: "item.added.v2".into(), ..event() };
    assert_eq!(subject(DEFAULT, &event), "outbox.shop.order.item.added.v2");
}

#[test]
fn every_variable_stands_where_the_template_says() {
    let event = Event { tenant_id: Some("acme".into()), headers: r#"{"a": "x", "region.x": "eu"}"#.into(), ..event() };
    let template = "{tenant_id}.x-{aggregate_type}{event_type}.{aggregate_id}.{header.region.x}";
    assert_eq!(subject(template, &event), "acme.x-ordercreated.42.eu");
}

/// Case 28 of the field reports.
#[test]
fn a_value_cannot_inject_a_subject_or_a_command() {
    for (event_type, expected) in [
        ("a.b c", "outbox.order.a.b%20c"),
        ("a.b 0\r\n\r\nPUB evil.x 2\r\nhi", "outbox.order.a.b%200%0D%0A%0D%0APUB%20evil.x%202%0D%0Ahi"),
        ("a..b", "outbox.order.a%2E%2Eb"),
        ("a.>", "outbox.order.a.%3E"),
        ("*", "outbox.order.%2A"),
        (".a.b", "outbox.order.%2Ea%2Eb"),
        ("a.b.", "outbox.order.a%2Eb%2E"),
        (".", "outbox.order.%2E"),
        ("50%", "outbox.order.50%25"),
        ("_", "outbox.order.%5F"),
        ("_a", "outbox.order._a"),
        ("$JS.API", "outbox.order.%24JS.API"),
        ("a.$b", "outbox.order.a.$b"),
        ("é€😀\u{7f}", "outbox.order.%C3%A9%E2%82%AC%F0%9F%98%80%7F"),
        ("{tenant_id}", "outbox.order.{tenant_id}"),
    ] {
        assert_eq!(subject(DEFAULT, &Event { event_type: event_type.into(), ..event() }), expected);
    }
}

#[test]
fn dots_separate_tokens_only_in_types() {
    let event = Event {
        tenant_id: Some("a.b".into()),
        aggregate_id: "c.d".into(),
        headers: r#"{"h": "e.f"}"#.into(),
        ..event()
    };
    assert_eq!(subject("x.{tenant_id}.{aggregate_id}.{header.h}", &event), "x.a%2Eb.c%2Ed.e%2Ef");
}

#[test]
fn absent_values_and_leading_dollars() {
    assert_eq!(subject("{tenant_id}.x", &event()), "_.x");
    for headers in ["{}", r#"{"g": "1"}"#, r#"{"h": ""}"#, r#"{"h": null}"#, r#"{"h": 1e999}"#, r#"{"h": ["x"]}"#] {
        assert_eq!(subject("x.{header.h}", &Event { headers: headers.into(), ..event() }), "x._", "{headers}");
    }
    let event = Event { tenant_id: Some("$SYS".into()), ..event() };
    assert_eq!(subject("{tenant_id}.x", &event), "%24SYS.x");
}

#[test]
fn a_subject_is_at_most_2048_bytes() {
    let router = router("x.{header.h}");
    let with = |len: usize| Event { headers: format!(r#"{{"h": "{}"}}"#, "a".repeat(len)).into(), ..event() };
    assert_eq!(router.subject(&with(2046)).unwrap().len(), 2048);
    assert_eq!(router.subject(&with(2047)), Err(Unroutable));
    assert_eq!(router.subject(&with(1 << 20)), Err(Unroutable));
    let event = Event { headers: format!(r#"{{"h": "{}"}}"#, "é".repeat(400)).into(), ..event() };
    assert_eq!(router.subject(&event), Err(Unroutable), "what counts is the length once encoded");
}

#[test]
fn a_wrong_template_names_the_setting_and_the_mistake() {
    for (template, mistake) in [
        ("", "empty"),
        ("outbox.{aggregate}", "unknown variable {aggregate}"),
        ("outbox.{}", "unknown variable {}"),
        ("outbox.{header.}", "header's name"),
        ("outbox.{event_type", "not closed"),
        ("outbox.{event_type{tenant_id}}", "not closed"),
        ("outbox.event_type}", "closing brace"),
        ("{event_type}}", "closing brace"),
        ("outbox..{event_type}", "empty token"),
        (".{event_type}", "empty token"),
        ("{event_type}.", "empty token"),
        ("outbox.>", "'>'"),
        ("outbox.*", "'*'"),
        ("outbox.%41", "'%'"),
        ("out box", "' '"),
        ("outbox\r\n", "'\\r'"),
        ("büro", "'ü'"),
        ("$JS.{event_type}", "server's own"),
    ] {
        let error = Router::new(template, true, "/", "S").unwrap_err().to_string();
        assert!(error.starts_with("route.subject: ") && error.contains(mistake), "{template:?}: {error}");
    }
    assert!(Router::new(&"x".repeat(2049), true, "/", "S").is_err());
}

#[test]
fn a_wrong_source_or_stream_names_the_setting() {
    let key = |cloudevents, source, stream| Router::new("x", cloudevents, source, stream).err().map(|error| error.key);
    assert_eq!(key(true, "", "S"), Some("route.source"));
    assert_eq!(key(false, "", "S"), None);
    assert_eq!(key(true, "/", "OUTBOX-1_x"), None);
    let long = "a".repeat(256);
    for stream in ["", "a b", "a.b", "a\r\nb", "*", "a>", "a/b", "a\\b", "\u{fc}", "x-Nats-Msg-Id", &long] {
        assert_eq!(key(true, "/", stream), Some("nats.stream"), "{stream:?}");
    }
}

#[test]
fn the_filter_takes_every_subject() {
    for (template, filter) in [
        (DEFAULT, "outbox.*.>"),
        ("outbox", "outbox"),
        ("outbox.{aggregate_type}.done", "outbox.*.>"),
        ("outbox.x{event_type}", "outbox.>"),
        ("{tenant_id}.{aggregate_id}.x", "*.*.x"),
        ("a.{tenant_id}-{header.h}.{event_type}", "a.*.>"),
    ] {
        assert_eq!(router(template).subject_filter(), filter, "{template}");
    }
}

#[test]
fn the_relays_headers_in_order() {
    let event = Event {
        event_id: "e-1%\"".into(),
        tenant_id: Some("acme ü".into()),
        event_type: "a b".into(),
        aggregate_id: "Euro € 😀".into(),
        headers: r#"{"app": "x y"}"#.into(),
        ..event()
    };
    let (sent, dropped) = headers(&router(DEFAULT), &event);
    let expected = [
        ("Nats-Msg-Id", "e-1%\""),
        ("Nats-Expected-Stream", "OUTBOX"),
        ("Outbox-Position", "0/1A2B3C8/3"),
        ("Content-Type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-id", "e-1%25%22"),
        ("ce-source", "/outbox-relay"),
        ("ce-type", "a%20b"),
        ("ce-subject", "Euro%20%E2%82%AC%20%F0%9F%98%80"),
        ("ce-time", "2026-11-29T21:04:05.678Z"),
        ("ce-aggregatetype", "order"),
        ("ce-tenantid", "acme%20%C3%BC"),
        ("app", "x y"),
    ];
    assert_eq!(sent, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    assert_eq!(dropped, 0);
}

#[test]
fn no_position_from_the_table_and_no_time_without_form() {
    let event = Event { origin: Origin::Table, created_at: Some("infinity".into()), ..event() };
    let (sent, _) = headers(&router(DEFAULT), &event);
    assert!(!sent.iter().any(|(name, _)| ["Outbox-Position", "ce-time", "ce-tenantid"].contains(&name.as_str())));
}

#[test]
fn cloudevents_switched_off_leaves_their_names_to_the_row() {
    let router = Router::new(DEFAULT, false, "", "S").unwrap();
    let event = Event { headers: r#"{"ce-id": "mine", "content-type": "x"}"#.into(), ..event() };
    let (sent, dropped) = headers(&router, &event);
    let names: Vec<&str> = sent.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["Nats-Msg-Id", "Nats-Expected-Stream", "Outbox-Position", "Content-Type", "ce-id"]);
    assert_eq!(dropped, 1);
}

/// nats-server up to 2.10 would not see the real header behind another mention of its name.
#[test]
fn no_value_hides_the_headers_that_guard_a_message() {
    let event = Event {
        event_id: "Nats-Msg-Id".into(),
        tenant_id: Some("Nats-Expected-Stream".into()),
        aggregate_type: "x Nats-Msg-Id: y".into(),
        aggregate_id: "Nats-Nats-Msg-Id".into(),
        event_type: "Nats-".into(),
        ..event()
    };
    let router = Router::new(DEFAULT, true, "/Nats-Msg-Id", "OUTBOX").unwrap();
    let (sent, _) = headers(&router, &event);
    for guard in ["Nats-Msg-Id", "Nats-Expected-Stream"] {
        let mentions = sent.iter().filter(|(name, value)| name != guard && format!("{name}: {value}").contains(guard));
        assert_eq!(mentions.count(), 0);
    }
    let find = |wanted: &str| sent.iter().find(|(name, _)| name == wanted).unwrap().1.as_str();
    assert_eq!(find("Nats-Msg-Id"), "Nats-Msg-Id");
    assert_eq!(find("ce-id"), "%4Eats-Msg-Id");
    assert_eq!(find("ce-type"), "Nats-");
    assert!(Router::new(DEFAULT, true, "/", "Nats-Msg-Id").is_err());
}

/// Cases 28 and 29 of the field reports.
#[test]
fn row_headers_cannot_speak_for_the_relay() {
    for json in [
        r#"{"Nats-Msg-Id": "x"}"#,
        r#"{"nats-msg-id": "x"}"#,
        r#"{"Nats-Expected-Last-Sequence": "1"}"#,
        r#"{"NATS-Rollup": "all"}"#,
        r#"{"outbox-position": "x"}"#,
        r#"{"Outbox-Compensation-Id": "x"}"#,
        r#"{"content-type": "x"}"#,
        r#"{"CE-Type": "x"}"#,
        r#"{"ce-tenantid": "x"}"#,
        r#"{"a": "v\r\nNats-Rollup: all"}"#,
        r#"{"a": "v\nx"}"#,
        r#"{"a": "v\rx"}"#,
        r#"{"a\r\nNats-Rollup": "all"}"#,
        r#"{"a:b": "x"}"#,
        r#"{"a b": "x"}"#,
        r#"{"": "x"}"#,
        r#"{"é": "x"}"#,
        r#"{"a": 1}"#,
        r#"{"a": 1e999}"#,
        r#"{"a": null}"#,
        r#"{"a": {"b": "c"}}"#,
        r#"{"X-Nats-Msg-Id": "x"}"#,
        r#"{"a": "see Nats-Msg-Id"}"#,
        r#"{"a": "Nats-Expected-Stream: S"}"#,
        r#"{"traceparent": "00-x"}"#,
        r#"{"tracestate": "x"}"#,
    ] {
        assert_eq!(row_headers(json), (vec![], 1), "{json}");
        // Its neighbours are not touched.
        let json = format!(r#"{{"first": "1", {}, "last": "2"}}"#, &json[1..json.len() - 1]);
        let neighbours = [("first", "1"), ("last", "2")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(row_headers(&json), (neighbours.to_vec(), 1), "{json}");
    }
}

#[test]
fn other_row_headers_are_copied_as_they_are() {
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    for (name, value) in [
        ("traceparent", parent),
        ("tracestate", "congo=t61rcWkgMzE"),
        ("X-App", "grün \u{2028} \t \" \\ %41"),
        ("empty", ""),
        ("Natsy", "x"),
        ("ce-dataschema", "x"),
    ] {
        let json = serde_json::json!({ name: value }).to_string();
        assert_eq!(row_headers(&json), (vec![(name.to_owned(), value.to_owned())], 0));
    }
    let (sent, dropped) = row_headers(r#"{"A": "1", "a": "2"}"#);
    assert_eq!((sent.len(), dropped), (2, 0), "names differ by case");
}

#[test]
fn headers_that_are_no_json_count_as_one() {
    for json in ["", "[]", "{", r#"{"a": "#, r#"{"a": "\ud800"}"#] {
        assert_eq!(row_headers(json), (vec![], 1), "{json}");
    }
    assert_eq!(row_headers(r#"{"a": "1", "b"#), (vec![("a".to_owned(), "1".to_owned())], 1));
}

/// Any text, with what is dangerous in subjects often in it.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-c._$%*> ]{0,6}",
        "\\PC{0,12}",
        proptest::collection::vec(any::<char>(), 0..8).prop_map(String::from_iter),
        Just("_".to_owned()),
        Just("%5F".to_owned()),
        Just("%2E".to_owned()),
    ]
}

fn any_event() -> impl Strategy<Value = Event> {
    let header = proptest::option::of(any_value());
    (proptest::option::of(any_value()), any_value(), any_value(), any_value(), header).prop_map(
        |(tenant_id, aggregate_type, aggregate_id, event_type, header)| Event {
            tenant_id: tenant_id.map(Into::into),
            aggregate_type: aggregate_type.into(),
            aggregate_id: aggregate_id.into(),
            event_type: event_type.into(),
            headers: header.map_or("{}".into(), |value| serde_json::json!({ "h": value }).to_string().into()),
            ..event()
        },
    )
}

/// What the subject must tell apart: an empty value counts as an absent one.
fn single_token_values(event: &Event) -> [Option<String>; 3] {
    let header = row_headers::find(&event.headers, "h");
    let tenant = event.tenant_id.as_ref().map(ToString::to_string);
    [tenant, Some(event.aggregate_id.to_string()), header].map(|value| value.filter(|value| !value.is_empty()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn subjects_are_legal_and_covered_by_the_filter(event in any_event()) {
        for template in [
            DEFAULT,
            "{aggregate_type}",
            "{tenant_id}.{event_type}.x",
            "a{event_type}b{aggregate_id}c.{header.h}{tenant_id}",
        ] {
            let router = router(template);
            let subject = router.subject(&event).unwrap();
            prop_assert!(is_legal_subject(&subject), "{}", subject);
            prop_assert!(covers(&router.subject_filter(), &subject), "{}", subject);
        }
    }

    /// A value stays between the text that the template puts around it.
    #[test]
    fn values_stay_in_their_place(event in any_event()) {
        let subject = subject("a.{tenant_id}.b.{aggregate_id}.c.{header.h}.d", &event);
        let tokens: Vec<&str> = subject.split('.').collect();
        prop_assert_eq!(tokens.len(), 7);
        prop_assert_eq!([tokens[0], tokens[2], tokens[4], tokens[6]], ["a", "b", "c", "d"]);
    }

    #[test]
    fn single_token_variables_are_injective_together(one in any_event(), other in any_event()) {
        let template = "{tenant_id}.{aggregate_id}.{header.h}";
        let is_same = subject(template, &one) == subject(template, &other);
        prop_assert_eq!(is_same, single_token_values(&one) == single_token_values(&other));
    }

    #[test]
    fn each_dotted_variable_is_injective(one in any_value(), other in any_value()) {
        let of = |value: &str| subject("x.{event_type}", &Event { event_type: value.into(), ..event() });
        prop_assert_eq!(of(&one) == of(&other), one == other);
    }

    /// What was encoded can be decoded: nothing is lost.
    #[test]
    fn percent_decoding_gives_the_value_back(value in any_value()) {
        let subject = subject("x.{event_type}", &Event { event_type: value.as_str().into(), ..event() });
        let decoded = percent_encoding::percent_decode_str(&subject[2..]).decode_utf8().unwrap();
        prop_assert_eq!(if value.is_empty() { "_" } else { &value }, decoded);
    }

    /// Whatever the row holds, every header can be written as a line of its own.
    #[test]
    fn headers_are_always_legal(event in any_event(), name in any_value(), value in any_value()) {
        let event = Event { headers: serde_json::json!({ name: value }).to_string().into(), ..event };
        let (sent, _) = headers(&router(DEFAULT), &event);
        for (name, value) in sent {
            prop_assert!(!name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':'));
            prop_assert!(!value.contains(['\r', '\n']));
            if name.starts_with("ce-") {
                prop_assert!(value.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'"'));
            }
        }
    }

    #[test]
    fn no_headers_text_panics(headers in "[{}\\[\\]\":,a\\\\u0-9 ]{0,20}") {
        row_headers(&headers);
    }
}
