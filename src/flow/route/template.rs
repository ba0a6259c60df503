//! The template of subjects: literal text and variables in braces.

use std::borrow::Cow;

use super::{Unroutable, percent, row_headers};
use crate::flow::event::Event;

/// Bytes. Longer subjects are dead-lettered unsent.
pub const SUBJECT_LEN_MAX: usize = 2048;

/// A parsed template, with the variables `V`.
#[derive(Clone, Debug)]
pub(super) struct Template<V> {
    parts: Vec<Part<V>>,
}

#[derive(Clone, Debug)]
enum Part<V> {
    Literal(String),
    Variable(V),
}

/// What the variables of a template stand for.
pub(super) trait Variable: Sized {
    /// What has the values.
    type Source: ?Sized;

    /// The error says what is wrong with the name.
    fn parse(name: &str) -> Result<Self, String>;

    /// Whether dots in the value separate tokens.
    fn is_dotted(&self) -> bool;

    /// `None`: there is no value.
    fn value<'s>(&self, source: &'s Self::Source) -> Option<Cow<'s, str>>;
}

/// The variables of `route.subject`.
#[derive(Clone, Debug)]
pub(super) enum EventVariable {
    TenantId,
    AggregateType,
    AggregateId,
    EventType,
    /// The row's header of this name.
    Header(String),
}

impl<V: Variable> Template<V> {
    /// The error says what is wrong with the text.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        check_literals(text)?;
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some((literal, after)) = rest.split_once('{') {
            check_closing(literal)?;
            let Some((name, after)) = after.split_once('}').filter(|(name, _)| !name.contains('{')) else {
                return Err(format!("the brace before {after:?} is not closed"));
            };
            if !literal.is_empty() {
                parts.push(Part::Literal(literal.to_owned()));
            }
            parts.push(Part::Variable(V::parse(name)?));
            rest = after;
        }
        check_closing(rest)?;
        if !rest.is_empty() {
            parts.push(Part::Literal(rest.to_owned()));
        }
        Ok(Self { parts })
    }

    pub(super) fn subject(&self, source: &V::Source) -> Result<String, Unroutable> {
        let mut subject = String::with_capacity(64);
        for part in &self.parts {
            match part {
                Part::Literal(text) => subject.push_str(text),
                Part::Variable(variable) => {
                    let value = variable.value(source).unwrap_or_default();
                    // A header may be of any size: do not build what will not be used.
                    if value.len() > SUBJECT_LEN_MAX {
                        return Err(Unroutable);
                    }
                    push_value(&mut subject, &value, variable.is_dotted());
                }
            }
        }
        if subject.len() > SUBJECT_LEN_MAX { Err(Unroutable) } else { Ok(subject) }
    }

    /// Each token that holds a variable becomes `*`. After a variable that may bring several tokens, anything may
    /// follow: as many `*` as there are tokens at least, the last of them `>`.
    pub(super) fn filter(&self) -> String {
        // No literal has a wildcard, so one can stand for a variable: `>` where its value may be several tokens.
        let mut pattern = String::new();
        for part in &self.parts {
            match part {
                Part::Literal(text) => pattern.push_str(text),
                Part::Variable(variable) => pattern.push(if variable.is_dotted() { '>' } else { '*' }),
            }
        }
        // After several tokens, a place says nothing any more about the text in it.
        let mut is_shifted = false;
        let mut tokens: Vec<&str> = Vec::new();
        for token in pattern.split('.') {
            is_shifted |= token.contains('>');
            tokens.push(if is_shifted || token.contains('*') { "*" } else { token });
        }
        if is_shifted && let Some(last) = tokens.last_mut() {
            *last = ">";
        }
        tokens.join(".")
    }
}

impl Variable for EventVariable {
    type Source = Event;

    fn parse(name: &str) -> Result<Self, String> {
        Ok(match name {
            "tenant_id" => Self::TenantId,
            "aggregate_type" => Self::AggregateType,
            "aggregate_id" => Self::AggregateId,
            "event_type" => Self::EventType,
            _ => match name.strip_prefix("header.") {
                Some("") => return Err("{header.} lacks the header's name, such as {header.region}".into()),
                Some(header) => Self::Header(header.to_owned()),
                None => {
                    return Err(format!(
                        "unknown variable {{{name}}}: expected {{tenant_id}}, {{aggregate_type}}, {{aggregate_id}}, \
                         {{event_type}} or {{header.NAME}}"
                    ));
                }
            },
        })
    }

    fn is_dotted(&self) -> bool {
        matches!(self, Self::AggregateType | Self::EventType)
    }

    fn value<'s>(&self, event: &'s Event) -> Option<Cow<'s, str>> {
        match self {
            Self::TenantId => event.tenant_id.as_deref().map(Cow::Borrowed),
            Self::AggregateType => Some(Cow::Borrowed(&*event.aggregate_type)),
            Self::AggregateId => Some(Cow::Borrowed(&*event.aggregate_id)),
            Self::EventType => Some(Cow::Borrowed(&*event.event_type)),
            Self::Header(name) => row_headers::find(&event.headers, name).map(Cow::Owned),
        }
    }
}

/// A first token and values behind it, in which dots separate tokens.
pub(super) fn joined(first: &str, values: &[&str]) -> Result<String, Unroutable> {
    let mut subject = first.to_owned();
    for value in values {
        subject.push('.');
        push_value(&mut subject, value, true);
    }
    if subject.len() > SUBJECT_LEN_MAX { Err(Unroutable) } else { Ok(subject) }
}

/// Appends a value as one token, or as several where its dots separate them. Different values give different text,
/// except that an empty one counts as absent; the text begins and ends no token of its surroundings.
fn push_value(subject: &mut String, value: &str, is_dotted: bool) {
    match value {
        // An empty token would not be legal.
        "" => return subject.push('_'),
        "_" => return subject.push_str("%5F"),
        _ => {}
    }
    let has_empty_token = value.starts_with('.') || value.ends_with('.') || value.contains("..");
    let encoded = if is_dotted && !has_empty_token { percent::SUBJECT_DOTTED } else { percent::SUBJECT };
    // Subjects that begin with a dollar sign are the server's own.
    let rest = value.strip_prefix('$').inspect(|_| subject.push_str("%24")).unwrap_or(value);
    percent::push(subject, rest, encoded);
}

/// Checks what stands outside of braces.
fn check_literals(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Err("it is empty".into());
    }
    if text.starts_with('$') {
        return Err("subjects that begin with $ are the server's own".into());
    }
    if text.len() > SUBJECT_LEN_MAX {
        return Err(format!("it is longer than {SUBJECT_LEN_MAX} bytes"));
    }
    let mut depth = 0_usize;
    let mut token_is_empty = true;
    for character in text.chars() {
        match character {
            '{' => {
                depth += 1;
                token_is_empty = false;
            }
            '}' => depth = depth.saturating_sub(1),
            _ if depth > 0 => {}
            '.' if token_is_empty => return Err("it has an empty token: a dot at an end, or two in a row".into()),
            '.' => token_is_empty = true,
            '*' | '>' | '%' => return Err(format!("{character:?} cannot be part of it outside of a variable")),
            _ if character.is_ascii_graphic() => token_is_empty = false,
            _ => return Err(format!("{character:?} cannot be part of a subject: only visible ASCII can")),
        }
    }
    if token_is_empty { Err("it has an empty token: a dot at an end".into()) } else { Ok(()) }
}

fn check_closing(literal: &str) -> Result<(), String> {
    if literal.contains('}') { Err("it has a closing brace without an opening one".into()) } else { Ok(()) }
}
