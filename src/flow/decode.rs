//! Columns of a row -> an event.
//!
//! Columns are found by name, whatever their order, because a table may have been made by an older schema, and columns
//! may be added and dropped while the relay streams. Nothing is copied: an event's fields share the row's buffer.

use std::fmt::Write as _;

use bytes::Bytes;
use bytestring::ByteString;

use super::event::{Decoded, Event, Origin};

/// One column of a row, as the server sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// SQL NULL.
    Null,
    /// A large value that an UPDATE did not touch: not sent. Never part of an INSERT.
    Unchanged,
    /// The value as PostgreSQL prints it.
    Text(Bytes),
    /// What the limit on one message's size left of the value: its first bytes, or none.
    Truncated(Bytes),
}

/// Where the outbox columns stand in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns {
    id: usize,
    event_id: usize,
    aggregate_type: usize,
    aggregate_id: usize,
    event_type: usize,
    payload: usize,
    status: usize,
    next_retry_at: usize,
    tenant_id: Option<usize>,
    headers: Option<usize>,
    created_at: Option<usize>,
    retry_count: Option<usize>,
    max_retries: Option<usize>,
}

/// Columns without which a row cannot become an event are absent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the outbox table, as its publication shows it, has no column {}: run `outbox-relay migrate` if the table lacks it, \
     or take the column list out of the publication",
    .0.join(", ")
)]
pub struct MissingColumns(pub Vec<&'static str>);

impl Columns {
    /// Finds the outbox columns among a row's column names, in the row's order. Unknown names are passed over.
    ///
    /// Needed are those that every schema since the first has and without which a row cannot be delivered rightly:
    /// id, event_id, aggregate_type, aggregate_id, event_type, payload, status, next_retry_at. Rows written before the
    /// table had a tenant_id, headers and so on are events without them.
    ///
    /// # Errors
    /// Names every needed column that is absent.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, MissingColumns> {
        const NEEDED: [&str; 8] =
            ["id", "event_id", "aggregate_type", "aggregate_id", "event_type", "payload", "status", "next_retry_at"];
        const OPTIONAL: [&str; 5] = ["tenant_id", "headers", "created_at", "retry_count", "max_retries"];
        let mut needed = [None; NEEDED.len()];
        let mut optional = [None; OPTIONAL.len()];
        for (index, name) in names.into_iter().enumerate() {
            let slots = NEEDED.iter().zip(&mut needed).chain(OPTIONAL.iter().zip(&mut optional));
            if let Some((_, slot)) = slots.into_iter().find(|(known, _)| **known == name) {
                *slot = Some(index);
            }
        }
        let [tenant_id, headers, created_at, retry_count, max_retries] = optional;
        let [
            Some(id),
            Some(event_id),
            Some(aggregate_type),
            Some(aggregate_id),
            Some(event_type),
            Some(payload),
            Some(status),
            Some(next_retry_at),
        ] = needed
        else {
            let missing = NEEDED.iter().zip(needed).filter(|(_, index)| index.is_none()).map(|(name, _)| *name);
            return Err(MissingColumns(missing.collect()));
        };
        Ok(Self {
            id,
            event_id,
            aggregate_type,
            aggregate_id,
            event_type,
            payload,
            status,
            next_retry_at,
            tenant_id,
            headers,
            created_at,
            retry_count,
            max_retries,
        })
    }
}

/// What `max_retries` is when the row does not say: the column's default.
const MAX_RETRIES_DEFAULT: i32 = 5;

/// Turns a row's columns, in the order that `columns` was made from, into what the relay does with the row.
///
/// A row that is not `pending`, or that a `next_retry_at` dates, is left to the table. A row that cannot be an event
/// is unfit, with every reason found (and none of the row's values in them).
pub fn decode(columns: &Columns, values: &[Value], origin: Origin) -> Decoded {
    let mut row = Row { values, faults: String::new() };
    if row.is_left(columns) {
        return Decoded::Left;
    }
    let id = row.id(columns.id);
    let event = Event {
        id: id.unwrap_or(0),
        event_id: row.event_id(columns.event_id),
        tenant_id: row.tenant_id(columns.tenant_id),
        aggregate_type: row.filled(columns.aggregate_type, "aggregate_type"),
        aggregate_id: row.filled(columns.aggregate_id, "aggregate_id"),
        event_type: row.filled(columns.event_type, "event_type"),
        payload: row.payload(columns.payload),
        headers: row.headers(columns.headers),
        created_at: row.created_at(columns.created_at),
        retry_count: row.number(columns.retry_count, "retry_count", 0),
        max_retries: row.number(columns.max_retries, "max_retries", MAX_RETRIES_DEFAULT),
        origin,
    };
    match (id, row.faults) {
        (None, faults) => Decoded::Nameless(event, faults),
        (Some(_), faults) if faults.is_empty() => Decoded::Live(event),
        (Some(_), faults) => Decoded::Unfit(event, faults),
    }
}

/// Reads a row's fields and gathers what is wrong with them.
struct Row<'a> {
    values: &'a [Value],
    /// Reasons, joined by `; `. Empty while the row is fit.
    faults: String,
}

impl Row<'_> {
    fn fault(&mut self, column: &str, problem: &str) {
        let separator = if self.faults.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        let _ = write!(self.faults, "{separator}{column} {problem}");
    }

    /// The column's bytes; `None` when it is NULL, or when it could not be read, which is a fault.
    fn bytes(&mut self, index: usize, column: &str) -> Option<Bytes> {
        match self.values.get(index) {
            Some(Value::Text(bytes)) => return Some(bytes.clone()),
            Some(Value::Null) => {}
            Some(Value::Truncated(_)) => {
                self.fault(column, "is cut off, because the row is larger than the relay reads");
            }
            Some(Value::Unchanged) => self.fault(column, "was not sent"),
            None => self.fault(column, "is missing from the row"),
        }
        None
    }

    /// The column's text; `None` as [`Self::bytes`] and when it is not UTF-8, which is a fault.
    fn text(&mut self, index: usize, column: &str) -> Option<ByteString> {
        let text = ByteString::try_from(self.bytes(index, column)?);
        if text.is_err() {
            self.fault(column, "is not UTF-8 (does the database have the encoding SQL_ASCII?)");
        }
        text.ok()
    }

    /// The text of a column that must have one.
    fn needed(&mut self, index: usize, column: &str) -> Option<ByteString> {
        let faults_before = self.faults.len();
        let text = self.text(index, column);
        if text.is_none() && self.faults.len() == faults_before {
            self.fault(column, "is NULL");
        }
        text
    }

    /// The text of a column that must have one and that must not be empty.
    fn filled(&mut self, index: usize, column: &str) -> ByteString {
        let text = self.needed(index, column);
        if text.as_deref() == Some("") {
            self.fault(column, "is empty");
        }
        text.unwrap_or_default()
    }

    /// Whether the row stays in the table for now. What cannot be told is a fault: a row that nobody would ever look
    /// at again must not be left.
    fn is_left(&mut self, columns: &Columns) -> bool {
        let status = self.needed(columns.status, "status");
        let dated = self.text(columns.next_retry_at, "next_retry_at").is_some();
        dated || status.is_some_and(|status| &*status != "pending")
    }

    fn id(&mut self, index: usize) -> Option<i64> {
        let id = self.needed(index, "id")?.parse().ok();
        if id.is_none() {
            self.fault("id", "is not a 64-bit integer");
        }
        id
    }

    /// The id becomes a header that NATS compares byte by byte, so it must survive the way there unchanged.
    fn event_id(&mut self, index: usize) -> ByteString {
        let event_id = self.filled(index, "event_id");
        if !event_id.bytes().all(|byte| byte.is_ascii_graphic()) {
            self.fault("event_id", "has characters other than the visible ones of ASCII");
        }
        event_id
    }

    fn tenant_id(&mut self, index: Option<usize>) -> Option<ByteString> {
        let tenant_id = self.text(index?, "tenant_id")?;
        if tenant_id.is_empty() {
            self.fault("tenant_id", "is empty");
        }
        Some(tenant_id)
    }

    /// The payload is JSON on the wire, which is UTF-8. It is not looked into otherwise.
    fn payload(&mut self, index: usize) -> Bytes {
        self.needed(index, "payload").unwrap_or_default().into_bytes()
    }

    /// A JSON object. NULL and JSON's null say "no headers". What is inside is judged header by header when routed.
    fn headers(&mut self, index: Option<usize>) -> ByteString {
        const NONE: ByteString = ByteString::from_static("{}");
        match index.and_then(|index| self.text(index, "headers")) {
            Some(headers) if headers.starts_with('{') => headers,
            None => NONE,
            Some(headers) if &*headers == "null" => NONE,
            Some(_) => {
                self.fault("headers", "is not a JSON object");
                NONE
            }
        }
    }

    /// Information only, so never a fault.
    fn created_at(&self, index: Option<usize>) -> Option<ByteString> {
        match self.values.get(index?) {
            Some(Value::Text(bytes)) => ByteString::try_from(bytes.clone()).ok(),
            _ => None,
        }
    }

    fn number(&mut self, index: Option<usize>, column: &str, default: i32) -> i32 {
        let Some(text) = index.and_then(|index| self.text(index, column)) else { return default };
        text.parse().unwrap_or_else(|_| {
            self.fault(column, "is not a 32-bit integer");
            default
        })
    }
}

#[cfg(test)]
mod tests;
