//! From pgoutput messages to the changes that flow through the relay.

use std::collections::HashMap;

use bytes::Bytes;

use super::pgoutput::{self, Insert, Message, ParseError, Relation};
use crate::config::TableName;
use crate::flow::decode::{Columns, MissingColumns, decode};
use crate::flow::event::{Change, LogOrigin, Origin};
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
}

#[derive(Debug)]
struct Open {
    xid: u32,
    final_lsn: Lsn,
    rows: u64,
}

impl Assembler {
    pub fn new(table: TableName) -> Self {
        Self { table, relations: HashMap::new(), open: None }
    }

    /// Takes one message; `cut` is the whole length of one of which `bytes` is only the beginning.
    pub fn push(&mut self, bytes: Bytes, cut: Option<usize>) -> Result<Option<Change>, ChangeError> {
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
            Message::Insert(insert) => self.insert(&insert),
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

    fn insert(&mut self, insert: &Insert) -> Result<Option<Change>, ChangeError> {
        let open = self.open.as_mut().ok_or(ChangeError::OutOfPlace { what: "a row" })?;
        let columns =
            self.relations.get(&insert.relation_id).ok_or(ChangeError::UnknownRelation(insert.relation_id))?;
        let Some(columns) = columns else { return Ok(None) };
        let origin = LogOrigin { xid: open.xid, final_lsn: open.final_lsn, index: open.rows };
        open.rows += 1;
        Ok(Some(Change::Row(Box::new(decode(columns, &insert.tuple, Origin::Log(origin))))))
    }
}
