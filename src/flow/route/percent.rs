//! Percent-encoding: uppercase hex, byte by byte of UTF-8.

use std::borrow::Cow;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// What a value may not bring into a subject: anything but ASCII 33-126 without `. * > %`.
pub(super) const SUBJECT: &AsciiSet = &CONTROLS.add(b' ').add(b'.').add(b'*').add(b'>').add(b'%');

/// As [`SUBJECT`], for values in which dots separate tokens.
pub(super) const SUBJECT_DOTTED: &AsciiSet = &SUBJECT.remove(b'.');

/// CloudEvents, "HTTP Protocol Binding" 3.1.3.2 (the NATS binding is the same): space, `"`, `%`, and what is not
/// ASCII 33-126.
pub(super) const CLOUDEVENTS: &AsciiSet = &CONTROLS.add(b' ').add(b'"').add(b'%');

/// Appends `value`, encoded.
pub(super) fn push(target: &mut String, value: &str, encoded: &'static AsciiSet) {
    target.extend(utf8_percent_encode(value, encoded));
}

/// `value`, encoded; borrowed when nothing needs it.
pub(super) fn encode<'a>(value: &'a str, encoded: &'static AsciiSet) -> Cow<'a, str> {
    utf8_percent_encode(value, encoded).into()
}
