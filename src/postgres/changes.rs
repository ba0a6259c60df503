//! From pgoutput messages to the changes that flow through the relay.

use std::collections::HashMap;

use bytes::{Bytes, BytesMut};

use super::pgoutput::{self, Insert, Message, ParseError, Relation};
use crate::config::TableName;
use crate::flow::decode::{Columns, MissingColumns, Value, decode};
use crate::flow::event::{Change, Decoded, LogOrigin, Origin};
use crate::flow::lsn::Lsn;

/// The stream of changes cannot be understood.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    #[error(transparent)]
    Parse(#[from] ParseError),
    #[error("{table}: {missing}; add what is missing (`outbox-relay migrate` does) or let the publication include it")]
    Columns { table: String, missing: MissingColumns },
    #[error("{what} outside its place in a transaction")]
    OutOfPlace { what: &'static str },
    #[error("a row of relation {0} without a description of that relation")]
    UnknownRelation(u32),
}

/// Puts the messages of a session together: knows the relations and the open transaction.
#[derive(Debug)]
pub struct Assembler {
    table: TableName,
    /// Every relation of the session; `None` for those that are not the outbox.
    relations: HashMap<u32, Option<Columns>>,
    open: Option<Open>,
    /// Bytes of all messages, less twice those of the rows that were handed on, and never below zero: by how much more
    /// was read that nobody keeps. Where the publication shows other tables, too, it is mostly that.
    surplus: usize,
}

#[derive(Debug)]
struct Open {
    xid: u32,
    final_lsn: Lsn,
    rows: u64,
}

impl Assembler {
    pub fn new(table: TableName) -> Self {
        Self { table, relations: HashMap::new(), open: None, surplus: 0 }
    }

    /// Takes one message; `cut` is the whole length of one of which `bytes` is only the beginning.
    pub fn push(&mut self, bytes: Bytes, cut: Option<usize>) -> Result<Option<Change>, ChangeError> {
        let length = bytes.len();
        self.surplus = self.surplus.saturating_add(length);
        let message = match cut {
            None => pgoutput::parse(bytes)?,
            // Updates, deletes and logical messages are not ours to publish, whatever they hold.
            Some(_) if matches!(bytes.first(), Some(b'U' | b'D' | b'M')) => return Ok(None),
            Some(length) => Message::Insert(pgoutput::parse_truncated(bytes, length)?),
        };
        match message {
            Message::Begin(begin) => {
                self.open = Some(Open { xid: begin.xid, final_lsn: begin.final_lsn, rows: 0 });
                Ok(Some(Change::Begin { committed_at: Some(begin.commit_time) }))
            }
            Message::Commit(commit) => {
                self.open.take().ok_or(ChangeError::OutOfPlace { what: "a commit" })?;
                Ok(Some(Change::Commit { end_lsn: commit.end_lsn }))
            }
            Message::Relation(relation) => self.relation(&relation).map(|()| None),
            Message::Insert(insert) => self.insert(&insert, length),
            // Inserts alone make events: an outbox row is not taken back by a later change of it. Types, origins and
            // logical messages carry nothing of ours.
            Message::Update(_)
            | Message::Delete(_)
            | Message::Truncate(_)
            | Message::Type(_)
            | Message::Origin(_)
            | Message::Logical(_) => Ok(None),
        }
    }

    fn relation(&mut self, relation: &Relation) -> Result<(), ChangeError> {
        let ours = relation.namespace == self.table.schema && relation.name == self.table.table;
        let columns = ours.then(|| Columns::from_names(relation.columns.iter().map(|column| &*column.name)));
        let columns =
            columns.transpose().map_err(|missing| ChangeError::Columns { table: self.table.to_string(), missing })?;
        self.relations.insert(relation.id, columns);
        Ok(())
    }

    /// `length`: bytes of the message.
    fn insert(&mut self, insert: &Insert, length: usize) -> Result<Option<Change>, ChangeError> {
        let open = self.open.as_mut().ok_or(ChangeError::OutOfPlace { what: "a row" })?;
        let columns =
            self.relations.get(&insert.relation_id).ok_or(ChangeError::UnknownRelation(insert.relation_id))?;
        let Some(columns) = columns else { return Ok(None) };
        let origin = Origin::Log(LogOrigin { xid: open.xid, final_lsn: open.final_lsn, index: open.rows });
        open.rows += 1;
        let mut row = decode(columns, &insert.tuple, origin);
        if !matches!(row, Decoded::Left) {
            // Until it is sent, a row keeps the whole of what it was read with. That may be far more than is counted.
            let own = length.saturating_mul(2);
            if self.surplus > own {
                row = decode(columns, &apart(&insert.tuple, length), origin);
            }
            self.surplus = self.surplus.saturating_sub(own);
        }
        Ok(Some(Change::Row(Box::new(row))))
    }
}

/// The values in memory of their own. `length`: bytes of their message.
fn apart(values: &[Value], length: usize) -> Vec<Value> {
    let mut memory = BytesMut::with_capacity(length);
    let copy = |value: &Value| match value {
        Value::Text(text) => {
            memory.extend_from_slice(text);
            Value::Text(memory.split().freeze())
        }
        other => other.clone(),
    };
    values.iter().map(copy).collect()
}

#[cfg(test)]
mod tests {
    use bytes::BufMut as _;

    use super::*;
    use crate::flow::event::Event;

    const CHUNK: usize = 48 * 1024;
    const OURS: u32 = 1;
    const OTHER: u32 = 2;
    const ROW: [&str; 8] = ["id", "event_id", "aggregate_type", "aggregate_id", "event_type", "payload", "status", ""];

    fn relation(id: u32, table: &str) -> Bytes {
        let mut bytes = BytesMut::from(&b"R"[..]);
        bytes.put_u32(id);
        bytes.put_slice(format!("public\0{table}\0d\0\x08").as_bytes());
        for name in ROW.map(|name| if name.is_empty() { "next_retry_at" } else { name }) {
            bytes.put_slice(format!("\0{name}\0\0\0\0\x19\0\0\0\x01").as_bytes());
        }
        bytes.freeze()
    }

    /// A row whose payload is `size` bytes.
    fn row(relation: u32, size: usize) -> Vec<u8> {
        let mut bytes = BytesMut::from(&b"I"[..]);
        bytes.put_u32(relation);
        bytes.put_slice(b"N\0\x08");
        for name in ROW {
            let text = match name {
                "id" => "7".to_owned(),
                "payload" => "1".repeat(size),
                "status" => "pending".to_owned(),
                name => name.to_owned(),
            };
            if text.is_empty() {
                bytes.put_u8(b'n');
            } else {
                bytes.put_u8(b't');
                bytes.put_u32(u32::try_from(text.len()).unwrap());
                bytes.put_slice(text.as_bytes());
            }
        }
        bytes.to_vec()
    }

    /// Knows both tables, and is amid a transaction.
    fn assembler() -> Assembler {
        let table = TableName { schema: "public".to_owned(), table: "outbox_events".to_owned() };
        let mut assembler = Assembler::new(table);
        assembler.push(relation(OURS, "outbox_events"), None).unwrap();
        assembler.push(relation(OTHER, "other"), None).unwrap();
        assembler.push(Bytes::from([&b"B"[..], &[0; 20]].concat()), None).unwrap();
        assembler
    }

    /// Reads a chunk in which the messages stand one after the other. Returns it, and the rows.
    fn read(assembler: &mut Assembler, messages: &[Vec<u8>]) -> (Bytes, Vec<Change>) {
        let (chunk, mut at, mut rows) = (Bytes::from(messages.concat()), 0, Vec::new());
        for message in messages {
            let end = at + message.len();
            rows.extend(assembler.push(chunk.slice(at..end), None).unwrap());
            at = end;
        }
        (chunk, rows)
    }

    #[test]
    fn rows_among_much_else_keep_little_more_memory_than_their_own() {
        let (ours, other) = (row(OURS, 300), row(OTHER, 1000));
        for number in [1, 2, 10, 50] {
            for last in [false, true] {
                let mut assembler = assembler();
                let mut messages = vec![other.clone(); (CHUNK - number * ours.len()) / other.len()];
                let at = if last { messages.len() } else { 0 };
                messages.splice(at..at, vec![ours.clone(); number]);
                let read: Vec<_> = (0..200).map(|_| read(&mut assembler, &messages)).collect();
                let rows: usize = read.iter().map(|(_, rows)| rows.len()).sum();
                assert_eq!(rows, 200 * number);
                let kept: usize = read.iter().map(|(chunk, _)| if chunk.is_unique() { 0 } else { chunk.len() }).sum();
                let most = 2 * rows * ours.len() + CHUNK;
                assert!(kept <= most, "{number} rows in each chunk keep {kept} bytes, more than {most}");
            }
        }
    }

    #[test]
    fn a_row_that_is_copied_is_the_same() {
        let mut assembler = assembler();
        let (chunk, rows) = read(&mut assembler, &[row(OTHER, 5000), row(OURS, 300)]);
        assert!(chunk.is_unique());
        let (_, shared) = read(&mut assembler, &[row(OURS, 3000), row(OURS, 300)]);
        let event = |change: &Change| match change {
            Change::Row(row) => match &**row {
                Decoded::Live(event) => {
                    format!("{:?}", Event { origin: Origin::Table, ..event.clone() })
                }
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        };
        assert_eq!(event(&rows[0]), event(&shared[1]));
    }

    #[test]
    fn where_all_rows_are_ours_none_is_copied() {
        let mut assembler = assembler();
        let (begin, commit) = ([&b"B"[..], &[0; 20]].concat(), [&b"C"[..], &[0; 25]].concat());
        // What describes the tables counts as well.
        (0..3).for_each(|_| drop(read(&mut assembler, &[row(OURS, 1000)])));
        for _ in 0..100 {
            let (chunk, rows) = read(&mut assembler, &[row(OURS, 100), commit.clone(), begin.clone()]);
            let Some(Change::Row(row)) = rows.first() else { panic!() };
            let Decoded::Live(event) = &**row else { panic!() };
            for text in [&event.event_id, &event.aggregate_type, &event.aggregate_id, &event.event_type] {
                assert!(chunk.as_ptr_range().contains(&text.as_ptr()));
            }
            assert!(chunk.as_ptr_range().contains(&event.payload.as_ptr()));
        }
    }
}
