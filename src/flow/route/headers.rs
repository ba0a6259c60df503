//! The headers of a message, in their order.

use std::borrow::Cow;
use std::fmt::Write as _;

use bytestring::ByteString;
use memchr::memchr;

use super::{TemplateError, percent, row_headers, time, trace};
use crate::flow::event::{Event, Origin};

/// The relay's headers besides those of CloudEvents.
const OWN: [&str; 4] = ["Nats-Msg-Id", "Nats-Expected-Stream", "Outbox-Position", "Content-Type"];

/// The relay's headers of CloudEvents' binary mode.
const CLOUDEVENTS: [&str; 8] =
    ["ce-specversion", "ce-id", "ce-source", "ce-type", "ce-subject", "ce-time", "ce-aggregatetype", "ce-tenantid"];

/// Prefixes that are NATS's and the relay's own.
const RESERVED: [&str; 2] = ["Nats-", "Outbox-"];

/// Headers by which the server refuses a second copy or a wrong stream. nats-server up to 2.10 looks for the name's
/// first occurrence anywhere among the headers, and takes the header for absent when that is not where a line begins:
/// nothing else may contain these names, for the order of headers is the client library's.
const GUARDS: [&str; 2] = ["Nats-Msg-Id", "Nats-Expected-Stream"];

fn hides_a_guard(text: &str) -> bool {
    // Both begin with a letter that most values lack.
    memchr(b'N', text.as_bytes()).is_some() && GUARDS.iter().any(|guard| text.contains(guard))
}

/// Whether a stream may have this name: as nats-server's `JSMaxNameLen` and its check of names, and as a header can
/// carry it.
///
/// # Errors
/// What is wrong with it.
pub fn stream_name(name: &str) -> Result<(), String> {
    let legal = |byte: u8| byte.is_ascii_graphic() && !b".*>/\\".contains(&byte);
    if !(1..=255).contains(&name.len()) || !name.bytes().all(legal) {
        return Err(format!(
            "{name:?} cannot be a stream's name; use 1 to 255 visible ASCII characters without . * > / \\"
        ));
    }
    if hides_a_guard(name) {
        return Err(format!("{name:?} contains the name of a header that guards every message"));
    }
    Ok(())
}

/// What is the same in the headers of all events.
#[derive(Clone, Debug)]
pub(super) struct Headers {
    stream: ByteString,
    /// `ce-source`, encoded; `None` without CloudEvents.
    source: Option<ByteString>,
}

impl Headers {
    pub(super) fn new(cloudevents: bool, source: &str, stream: &str) -> Result<Self, TemplateError> {
        let error = |key, problem: &str| Err(TemplateError { key, problem: problem.into() });
        if let Err(problem) = stream_name(stream) {
            return error("nats.stream", &problem);
        }
        if cloudevents && source.is_empty() {
            return error(
                "route.source",
                "it is empty, but CloudEvents need a source (or set route.cloudevents = false)",
            );
        }
        let source = cloudevents.then(|| encode(source).into_owned().into());
        Ok(Self { stream: stream.into(), source })
    }

    /// The relay's own headers.
    pub(super) fn relay(&self, event: &Event, sink: &mut impl FnMut(&str, &str)) {
        let mut text = String::with_capacity(64);
        sink("Nats-Msg-Id", &event.event_id);
        sink("Nats-Expected-Stream", &self.stream);
        if let Origin::Log(place) = event.origin {
            // Writing to a String cannot fail.
            let _ = write!(text, "{}/{}", place.final_lsn, place.index);
            sink("Outbox-Position", &text);
        }
        sink("Content-Type", "application/json");
        let Some(source) = &self.source else { return };
        sink("ce-specversion", "1.0");
        attribute(sink, "ce-id", &event.event_id);
        sink("ce-source", source);
        attribute(sink, "ce-type", &event.event_type);
        attribute(sink, "ce-subject", &event.aggregate_id);
        if let Some(created_at) = &event.created_at
            && time::write_rfc3339(created_at, &mut text)
        {
            sink("ce-time", &text);
        }
        attribute(sink, "ce-aggregatetype", &event.aggregate_type);
        if let Some(tenant_id) = &event.tenant_id {
            attribute(sink, "ce-tenantid", tenant_id);
        }
    }

    /// The row's headers. Returns how many were dropped.
    pub(super) fn row(&self, event: &Event, sink: &mut impl FnMut(&str, &str)) -> usize {
        let mut dropped = 0;
        let whole = row_headers::for_each(&event.headers, |name, value| match value {
            Some(value) if self.allows(name, value) => sink(name, value),
            _ => dropped += 1,
        });
        // What could not be read counts as one.
        dropped + usize::from(!whole)
    }

    fn allows(&self, name: &str, value: &str) -> bool {
        let is = |other: &&str| name.eq_ignore_ascii_case(other);
        let is_reserved = RESERVED
            .iter()
            .any(|prefix| name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix)));
        let is_relays = OWN.iter().any(is) || (self.source.is_some() && CLOUDEVENTS.iter().any(is));
        let is_legal_name = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b':');
        // These belong to the application, and are worse than nothing when they are broken.
        let is_broken_trace = (is(&"traceparent") && !trace::is_traceparent(value))
            || (is(&"tracestate") && !trace::is_tracestate(value));
        let hides_a_guard = hides_a_guard(name) || hides_a_guard(value);
        is_legal_name
            && !is_reserved
            && !hides_a_guard
            && !is_relays
            && !is_broken_trace
            && !value.contains(['\r', '\n'])
    }
}

/// A header of CloudEvents.
fn attribute(sink: &mut impl FnMut(&str, &str), name: &str, value: &str) {
    sink(name, &encode(value));
}

/// A value of CloudEvents. Readers must decode what need not have been encoded, too.
fn encode(value: &str) -> Cow<'_, str> {
    let encoded = percent::encode(value, percent::CLOUDEVENTS);
    if hides_a_guard(&encoded) { encoded.replace("Nats-", "%4Eats-").into() } else { encoded }
}
