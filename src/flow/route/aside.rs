//! The subjects of messages that are meant for no stream: compensations, and announcements of dead letters.

use std::borrow::Cow;

use super::template::{Template, Variable};
use super::{TemplateError, Unroutable};
use crate::flow::event::Event;

/// Gives compensations their subject.
#[derive(Clone, Debug)]
pub struct CompensationRoute {
    template: Template<OperationType>,
}

/// The variable of `compensation.subject`.
#[derive(Clone, Debug)]
struct OperationType;

impl Variable for OperationType {
    type Source = str;

    fn parse(name: &str) -> Result<Self, String> {
        if name == "operation_type" {
            Ok(Self)
        } else {
            Err(format!("unknown variable {{{name}}}: expected {{operation_type}}"))
        }
    }

    fn is_dotted(&self) -> bool {
        false
    }

    fn value<'s>(&self, operation_type: &'s str) -> Option<Cow<'s, str>> {
        Some(Cow::Borrowed(operation_type))
    }
}

impl CompensationRoute {
    /// `template` is `compensation.subject`.
    ///
    /// # Errors
    /// Names the mistake.
    pub fn new(template: &str) -> Result<Self, TemplateError> {
        let template = Template::parse(template);
        template
            .map(|template| Self { template })
            .map_err(|problem| TemplateError { key: "compensation.subject", problem })
    }

    /// The subject of requests to compensate an operation of this type, which is one token of it.
    ///
    /// # Errors
    /// When it would be longer than [`super::SUBJECT_LEN_MAX`].
    pub fn subject(&self, operation_type: &str) -> Result<String, Unroutable> {
        self.template.subject(operation_type)
    }

    /// A filter that matches every subject which [`Self::subject`] can make.
    pub fn filter(&self) -> String {
        self.template.filter()
    }
}

/// Where the dead letter of an event is announced: `outbox-dead-letter.{aggregate_type}.{event_type}`, the values
/// encoded as in `route.subject`.
///
/// # Errors
/// When it would be longer than [`super::SUBJECT_LEN_MAX`].
pub fn dead_letter_subject(event: &Event) -> Result<String, Unroutable> {
    super::template::joined("outbox-dead-letter", &[&event.aggregate_type, &event.event_type])
}
