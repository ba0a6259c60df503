//! Event -> what NATS gets to see: subject and headers. The body is the event's payload as it stands.
//!
//! Rows hold anything; a subject or a header is a line of a text protocol. So every value is confined to its place
//! here: percent-encoded in subjects, and dropped from headers where it could end a line or speak for the relay.

mod aside;
mod headers;
mod percent;
mod row_headers;
mod template;
mod time;
mod trace;

use super::event::Event;
use headers::Headers;
use template::{EventVariable, Template};

pub use aside::{CompensationRoute, dead_letter_subject};
pub use headers::stream_name;
pub use template::SUBJECT_LEN_MAX;

/// Gives events their subject and headers, as the settings say.
#[derive(Clone, Debug)]
pub struct Router {
    template: Template<EventVariable>,
    headers: Headers,
}

/// A setting that the router cannot work with: its key, and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {problem}")]
pub struct TemplateError {
    /// `route.subject`, `route.source`, `nats.stream` or `compensation.subject`.
    pub key: &'static str,
    /// What is wrong with it, and where.
    pub problem: String,
}

/// No legal subject can be made: an event can only become a dead letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the subject would be longer than {SUBJECT_LEN_MAX} bytes: shorten its template or the values it names")]
pub struct Unroutable;

impl Router {
    /// `template` is `route.subject`, `source` is `route.source` (used with `cloudevents` only), `stream` is
    /// `nats.stream`.
    ///
    /// # Errors
    /// Names the setting's key and the mistake.
    pub fn new(template: &str, cloudevents: bool, source: &str, stream: &str) -> Result<Self, TemplateError> {
        let template = Template::parse(template).map_err(|problem| TemplateError { key: "route.subject", problem })?;
        let headers = Headers::new(cloudevents, source, stream)?;
        Ok(Self { template, headers })
    }

    /// The event's subject.
    ///
    /// # Errors
    /// When it would be longer than [`SUBJECT_LEN_MAX`].
    pub fn subject(&self, event: &Event) -> Result<String, Unroutable> {
        self.template.subject(event)
    }

    /// A filter that matches every subject which [`Self::subject`] can make: a stream that covers it takes them all.
    pub fn subject_filter(&self) -> String {
        self.template.filter()
    }

    /// Calls `sink` with the name and value of each header of the event's message: the relay's own, then the row's.
    /// All of them are legal: a name is visible ASCII without `:`, a value has no CR and no LF.
    ///
    /// Returns how many of the row's headers were dropped, because they are illegal or would speak for the relay.
    pub fn headers(&self, event: &Event, mut sink: impl FnMut(&str, &str)) -> usize {
        self.headers.relay(event, &mut sink);
        self.headers.row(event, &mut sink)
    }
}

#[cfg(test)]
mod tests;
