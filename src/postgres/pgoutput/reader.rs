//! Reading a message field by field.

use bytes::Bytes;
use bytestring::ByteString;

use super::{
    Begin, Column, Commit, Delete, Insert, LogicalMessage, Origin, ParseError, Problem, Relation, Truncate, Type,
    Update,
};
use crate::flow::decode::Value;
use crate::flow::lsn::Lsn;

/// The name of a column's value among the fields.
const VALUE: &str = "value";

/// What the end of the bytes means within a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// The message is broken.
    Absent,
    /// The message went on.
    CutOff,
}

/// Reads fields one after the other.
pub(super) struct Reader {
    bytes: Bytes,
    /// Where the next field begins.
    pub(super) at: usize,
    message: &'static str,
    column: Option<usize>,
}

impl Reader {
    pub(super) fn new(bytes: Bytes) -> Self {
        Self { bytes, at: 0, message: "(empty)", column: None }
    }

    pub(super) fn kind(&mut self) -> Result<u8, ParseError> {
        self.message = match self.bytes.first() {
            None => "(empty)",
            Some(b'B') => "Begin",
            Some(b'M') => "Message",
            Some(b'C') => "Commit",
            Some(b'O') => "Origin",
            Some(b'R') => "Relation",
            Some(b'Y') => "Type",
            Some(b'I') => "Insert",
            Some(b'U') => "Update",
            Some(b'D') => "Delete",
            Some(b'T') => "Truncate",
            Some(_) => "(unknown)",
        };
        self.u8("kind")
    }

    pub(super) fn begin(&mut self) -> Result<Begin, ParseError> {
        Ok(Begin {
            final_lsn: self.lsn("final LSN")?,
            commit_time: self.i64("commit time")?,
            xid: self.u32("transaction id")?,
        })
    }

    pub(super) fn logical_message(&mut self) -> Result<LogicalMessage, ParseError> {
        let transactional = self.flag("flags")?;
        let lsn = self.lsn("LSN")?;
        let prefix = self.text("prefix")?;
        let len = self.length("content length")?;
        Ok(LogicalMessage { transactional, lsn, prefix, content: self.take("content", len)? })
    }

    pub(super) fn commit(&mut self) -> Result<Commit, ParseError> {
        let offset = self.at;
        match self.u8("flags")? {
            0 => {}
            unknown => return Err(self.error("flags", offset, Problem::Unknown(unknown))),
        }
        Ok(Commit {
            commit_lsn: self.lsn("commit LSN")?,
            end_lsn: self.lsn("end LSN")?,
            commit_time: self.i64("commit time")?,
        })
    }

    pub(super) fn origin(&mut self) -> Result<Origin, ParseError> {
        Ok(Origin { commit_lsn: self.lsn("commit LSN")?, name: self.text("name")? })
    }

    pub(super) fn relation(&mut self) -> Result<Relation, ParseError> {
        let id = self.u32("relation id")?;
        let namespace = self.text("namespace")?;
        let name = self.text("name")?;
        let replica_identity = self.u8("replica identity")?;
        let count = self.count("number of columns")?;
        // A column takes at least 10 bytes: a false count cannot make the relay reserve more than was sent.
        let mut columns = Vec::with_capacity(count.min(self.remaining() / 10));
        for index in 0..count {
            self.column = Some(index);
            columns.push(Column {
                is_key: self.flag("flags")?,
                name: self.text("name")?,
                type_id: self.u32("type id")?,
                type_modifier: self.i32("type modifier")?,
            });
        }
        self.column = None;
        Ok(Relation { id, namespace, name, replica_identity, columns })
    }

    pub(super) fn type_(&mut self) -> Result<Type, ParseError> {
        Ok(Type { id: self.u32("type id")?, namespace: self.text("namespace")?, name: self.text("name")? })
    }

    pub(super) fn insert(&mut self, rest: Rest) -> Result<Insert, ParseError> {
        let relation_id = self.u32("relation id")?;
        let offset = self.at;
        match self.u8("new row's mark")? {
            b'N' => Ok(Insert { relation_id, tuple: self.row(rest)? }),
            unknown => Err(self.error("new row's mark", offset, Problem::Unknown(unknown))),
        }
    }

    pub(super) fn update(&mut self) -> Result<Update, ParseError> {
        let relation_id = self.u32("relation id")?;
        let mut offset = self.at;
        let mut mark = self.u8("row's mark")?;
        let mut old = None;
        if let b'K' | b'O' = mark {
            old = Some(self.row(Rest::Absent)?);
            offset = self.at;
            mark = self.u8("new row's mark")?;
        }
        match mark {
            b'N' => Ok(Update { relation_id, old, new: self.row(Rest::Absent)? }),
            unknown => Err(self.error("new row's mark", offset, Problem::Unknown(unknown))),
        }
    }

    pub(super) fn delete(&mut self) -> Result<Delete, ParseError> {
        let relation_id = self.u32("relation id")?;
        let offset = self.at;
        match self.u8("old row's mark")? {
            b'K' | b'O' => Ok(Delete { relation_id, old: self.row(Rest::Absent)? }),
            unknown => Err(self.error("old row's mark", offset, Problem::Unknown(unknown))),
        }
    }

    pub(super) fn truncate(&mut self) -> Result<Truncate, ParseError> {
        let count = self.length("number of relations")?;
        let offset = self.at;
        let options = self.u8("options")?;
        if options & !0b11 != 0 {
            return Err(self.error("options", offset, Problem::Unknown(options)));
        }
        let mut relation_ids = Vec::with_capacity(count.min(self.remaining() / 4));
        for _ in 0..count {
            relation_ids.push(self.u32("relation id")?);
        }
        Ok(Truncate { cascade: options & 1 != 0, restart_identity: options & 2 != 0, relation_ids })
    }

    /// `TupleData`: the values of a row.
    fn row(&mut self, rest: Rest) -> Result<Vec<Value>, ParseError> {
        let count = self.count("number of columns")?;
        // A value takes at least one byte, unless it was cut off; then the count (below 65,536) is the bound.
        let capacity = if rest == Rest::CutOff { count } else { count.min(self.remaining()) };
        let mut values = Vec::with_capacity(capacity);
        for index in 0..count {
            self.column = Some(index);
            values.push(match self.value() {
                Err(ParseError { problem: Problem::Short { .. }, field, .. }) if rest == Rest::CutOff => {
                    let first_bytes = if field == VALUE { self.bytes.slice(self.at..) } else { Bytes::new() };
                    self.at = self.bytes.len();
                    Value::Truncated(first_bytes)
                }
                value => value?,
            });
        }
        self.column = None;
        Ok(values)
    }

    fn value(&mut self) -> Result<Value, ParseError> {
        let offset = self.at;
        match self.u8("kind")? {
            b'n' => Ok(Value::Null),
            b'u' => Ok(Value::Unchanged),
            b't' => {
                let len = self.length("length")?;
                Ok(Value::Text(self.take(VALUE, len)?))
            }
            b'b' => Err(self.error("kind", offset, Problem::Binary)),
            unknown => Err(self.error("kind", offset, Problem::Unknown(unknown))),
        }
    }

    pub(super) fn error(&self, field: &'static str, offset: usize, problem: Problem) -> ParseError {
        ParseError { message: self.message, field, column: self.column, offset, problem }
    }

    pub(super) fn remaining(&self) -> usize {
        // `at` only grows, and never past the end.
        self.bytes.len() - self.at
    }

    /// The next `len` bytes. The only way forward: it never passes the end.
    fn take(&mut self, field: &'static str, len: usize) -> Result<Bytes, ParseError> {
        let remaining = self.remaining();
        if len > remaining {
            return Err(self.error(field, self.at, Problem::Short { needed: len, remaining }));
        }
        let taken = self.bytes.slice(self.at..self.at + len);
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], ParseError> {
        let remaining = self.remaining();
        let Some(array) = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk).copied() else {
            return Err(self.error(field, self.at, Problem::Short { needed: N, remaining }));
        };
        self.at += N;
        Ok(array)
    }

    /// Text ended by a zero byte. A name that is not UTF-8 (from a database with the encoding SQL_ASCII) gets
    /// replacement characters: it may belong to a column that the relay does not need.
    fn text(&mut self, field: &'static str) -> Result<ByteString, ParseError> {
        let len = self.bytes.get(self.at..).and_then(|rest| memchr::memchr(0, rest));
        let Some(len) = len else { return Err(self.error(field, self.at, Problem::Unterminated)) };
        let text = self.take(field, len)?;
        self.u8(field)?;
        Ok(ByteString::try_from(text.clone()).unwrap_or_else(|_| String::from_utf8_lossy(&text).into_owned().into()))
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, ParseError> {
        self.array(field).map(u8::from_be_bytes)
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, ParseError> {
        self.array(field).map(u32::from_be_bytes)
    }

    fn i32(&mut self, field: &'static str) -> Result<i32, ParseError> {
        self.array(field).map(i32::from_be_bytes)
    }

    fn i64(&mut self, field: &'static str) -> Result<i64, ParseError> {
        self.array(field).map(i64::from_be_bytes)
    }

    fn lsn(&mut self, field: &'static str) -> Result<Lsn, ParseError> {
        self.array(field).map(|bytes| Lsn(u64::from_be_bytes(bytes)))
    }

    /// A byte whose only defined values are 0 and 1.
    fn flag(&mut self, field: &'static str) -> Result<bool, ParseError> {
        let offset = self.at;
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            unknown => Err(self.error(field, offset, Problem::Unknown(unknown))),
        }
    }

    /// A 32-bit length or count.
    fn length(&mut self, field: &'static str) -> Result<usize, ParseError> {
        let offset = self.at;
        let length = self.i32(field)?;
        usize::try_from(length).map_err(|_| self.error(field, offset, Problem::Negative(length)))
    }

    /// A 16-bit count.
    fn count(&mut self, field: &'static str) -> Result<usize, ParseError> {
        let offset = self.at;
        let count = self.array(field).map(i16::from_be_bytes)?;
        usize::try_from(count).map_err(|_| self.error(field, offset, Problem::Negative(count.into())))
    }

    pub(super) fn end(&self) -> Result<(), ParseError> {
        match self.remaining() {
            0 => Ok(()),
            trailing => Err(self.error("end", self.at, Problem::Trailing(trailing))),
        }
    }
}
