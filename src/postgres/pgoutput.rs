//! pgoutput, protocol version 1: bytes -> messages.
//!
//! Source: PostgreSQL documentation, "Logical Replication Message Formats". With version 1 the server sends whole
//! committed transactions only: Begin, the changes, Commit. A Relation message describes a table before its first
//! change, and again after the table has changed.
//!
//! Every read is checked: whatever the bytes, the answer is a message or an error. Nothing is copied: a message's
//! values share the buffer that it was read into.

mod reader;

use std::fmt;

use bytes::Bytes;
use bytestring::ByteString;

use crate::flow::decode::Value;
use crate::flow::lsn::Lsn;
use reader::{Reader, Rest};

/// A pgoutput message.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    Begin(Begin),
    Logical(LogicalMessage),
    Commit(Commit),
    Origin(Origin),
    Relation(Relation),
    Type(Type),
    Insert(Insert),
    Update(Update),
    Delete(Delete),
    Truncate(Truncate),
}

/// `B`: a transaction begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Where the transaction's commit record begins.
    pub final_lsn: Lsn,
    /// When it committed: microseconds since 2000-01-01 00:00 UTC.
    pub commit_time: i64,
    pub xid: u32,
}

/// `M`: what `pg_logical_emit_message` wrote. Sent only when the option `messages` asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalMessage {
    pub transactional: bool,
    pub lsn: Lsn,
    pub prefix: ByteString,
    pub content: Bytes,
}

/// `C`: the open transaction ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Where the transaction's commit record begins.
    pub commit_lsn: Lsn,
    /// Where it ends: the last byte + 1.
    pub end_lsn: Lsn,
    /// Microseconds since 2000-01-01 00:00 UTC.
    pub commit_time: i64,
}

/// `O`: the open transaction came from another server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Where it committed there.
    pub commit_lsn: Lsn,
    pub name: ByteString,
}

/// `R`: the shape of a table from here on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Relation {
    pub id: u32,
    /// Empty for `pg_catalog`.
    pub namespace: ByteString,
    pub name: ByteString,
    /// As in `pg_class.relreplident`: `d`, `n`, `f` or `i`.
    pub replica_identity: u8,
    pub columns: Vec<Column>,
}

/// A column of a [`Relation`]. Values of a row come in the order of the columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Part of the replica identity.
    pub is_key: bool,
    pub name: ByteString,
    pub type_id: u32,
    pub type_modifier: i32,
}

/// `Y`: a type that is not built in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    pub id: u32,
    /// Empty for `pg_catalog`.
    pub namespace: ByteString,
    pub name: ByteString,
}

/// `I`: a row was inserted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Insert {
    pub relation_id: u32,
    pub tuple: Vec<Value>,
}

/// `U`: a row was updated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    pub relation_id: u32,
    /// The old row, or its key, where the replica identity asks for it.
    pub old: Option<Vec<Value>>,
    pub new: Vec<Value>,
}

/// `D`: a row was deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delete {
    pub relation_id: u32,
    /// The row, or its key, as the replica identity says.
    pub old: Vec<Value>,
}

/// `T`: tables were truncated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Truncate {
    pub cascade: bool,
    pub restart_identity: bool,
    pub relation_ids: Vec<u32>,
}

/// The bytes are not a pgoutput message of protocol version 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pgoutput {message} message, {field}{}, at byte {offset}: {problem}", Nth(*.column))]
pub struct ParseError {
    /// The message's name in the protocol.
    pub message: &'static str,
    /// The field that was being read.
    pub field: &'static str,
    /// For fields of a column: which, from 0.
    pub column: Option<usize>,
    /// Where the field begins in the message.
    pub offset: usize,
    pub problem: Problem,
}

/// What is wrong with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("{needed} bytes are needed, {remaining} remain")]
    Short { needed: usize, remaining: usize },
    #[error("the text has no end")]
    Unterminated,
    #[error("a length or count of {0} is impossible")]
    Negative(i32),
    #[error("byte {0:#04x} is not defined here by protocol version 1")]
    Unknown(u8),
    #[error("the value is in binary format, which the relay never asks for (start replication without `binary`)")]
    Binary,
    #[error("{0} bytes follow where the message should end")]
    Trailing(usize),
}

/// ` of column 3`, or nothing.
struct Nth(Option<usize>);

impl fmt::Display for Nth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |column| write!(f, " of column {column}"))
    }
}

/// Reads one whole message.
///
/// # Errors
/// When the bytes are not exactly one message of protocol version 1.
pub fn parse(bytes: Bytes) -> Result<Message, ParseError> {
    let mut reader = Reader::new(bytes);
    let message = match reader.kind()? {
        b'B' => Message::Begin(reader.begin()?),
        b'M' => Message::Logical(reader.logical_message()?),
        b'C' => Message::Commit(reader.commit()?),
        b'O' => Message::Origin(reader.origin()?),
        b'R' => Message::Relation(reader.relation()?),
        b'Y' => Message::Type(reader.type_()?),
        b'I' => Message::Insert(reader.insert(Rest::Absent)?),
        b'U' => Message::Update(reader.update()?),
        b'D' => Message::Delete(reader.delete()?),
        b'T' => Message::Truncate(reader.truncate()?),
        unknown => return Err(reader.error("kind", 0, Problem::Unknown(unknown))),
    };
    reader.end()?;
    Ok(message)
}

/// Reads what is left of an Insert of `total_len` bytes that was cut because it is larger than the relay reads: the
/// values wholly present are given, the one cut and those after it are [`Value::Truncated`].
///
/// # Errors
/// When the bytes are not the beginning of an Insert, or end before the row's values.
pub fn parse_truncated(prefix: Bytes, total_len: usize) -> Result<Insert, ParseError> {
    let is_cut = prefix.len() < total_len;
    let mut reader = Reader::new(prefix);
    match reader.kind()? {
        b'I' => {}
        other => return Err(reader.error("kind", 0, Problem::Unknown(other))),
    }
    let insert = reader.insert(if is_cut { Rest::CutOff } else { Rest::Absent })?;
    if is_cut && !insert.tuple.iter().any(|value| matches!(value, Value::Truncated(_))) {
        return Err(reader.error("end", reader.at, Problem::Trailing(total_len - reader.at)));
    }
    reader.end()?;
    Ok(insert)
}
