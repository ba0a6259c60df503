//! What flows through the relay: events, and the transactions that carry them.

use std::time::Duration;

use bytes::Bytes;
use bytestring::ByteString;

use super::lsn::Lsn;

/// One outbox row, as it was inserted. Its fields share the buffer that they were read into.
#[derive(Clone, Debug)]
pub struct Event {
    /// The row's primary key.
    pub id: i64,
    /// The row's global id; becomes `Nats-Msg-Id`.
    pub event_id: ByteString,
    /// As in the row.
    pub tenant_id: Option<ByteString>,
    /// The kind of thing that the event is about.
    pub aggregate_type: ByteString,
    /// Which one of them: events of one are sent in the order of their commits.
    pub aggregate_id: ByteString,
    /// What happened to it.
    pub event_type: ByteString,
    /// The payload exactly as PostgreSQL prints the `jsonb`.
    pub payload: Bytes,
    /// The row's `headers`: the text of a JSON object of strings.
    pub headers: ByteString,
    /// `created_at` as PostgreSQL prints it with `DateStyle=ISO`, `TimeZone=UTC`.
    pub created_at: Option<ByteString>,
    /// Failed attempts that the row already counts.
    pub retry_count: i32,
    /// Attempts after which the row becomes a dead letter.
    pub max_retries: i32,
    /// Where it was read.
    pub origin: Origin,
}

impl Event {
    /// The transaction that inserted the row; `None` when the row was seen in the table.
    pub fn xid(&self) -> Option<u32> {
        match self.origin {
            Origin::Log(origin) => Some(origin.xid),
            Origin::Table => None,
        }
    }
}

/// Where an event was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// From the write-ahead log.
    Log(LogOrigin),
    /// From the table: its row was visible when it was read.
    Table,
}

/// A row's place in the write-ahead log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOrigin {
    /// The transaction that inserted the row.
    pub xid: u32,
    /// `Begin.final_lsn`: where the transaction's commit record begins.
    pub final_lsn: Lsn,
    /// 0-based index among the transaction's outbox rows.
    pub index: u64,
}

/// What a decoded row asks of the relay.
#[derive(Clone, Debug)]
pub enum Decoded {
    /// Pending and due: goes live.
    Live(Event),
    /// Not `pending`, or dated by `next_retry_at`: stays in the table.
    Left,
    /// Read again, and by now the table shows that it failed or is held: it stays there, and later events of its
    /// aggregate wait for it.
    Waits(Event),
    /// Cannot be an event (the reason says why): becomes a dead letter. Fields that could not be read are empty.
    Unfit(Event, String),
    /// As `Unfit`, and its id (0 here) could not be read either, so that no statement can address its row by it.
    Nameless(Event, String),
}

impl Decoded {
    /// The event's id; `None` when the row is left to the table.
    pub fn event_id(&self) -> Option<&ByteString> {
        match self {
            Self::Live(event) | Self::Unfit(event, _) | Self::Nameless(event, _) => Some(&event.event_id),
            Self::Left | Self::Waits(_) => None,
        }
    }
}

/// One step of the stream of changes, in the order in which it was committed.
#[derive(Clone, Debug)]
pub enum Change {
    /// A transaction begins. `committed_at`: when it was committed, microseconds since 2000-01-01 UTC by
    /// PostgreSQL's clock; `None` for rows that are read from the table.
    Begin { committed_at: Option<i64> },
    /// One outbox row of the open transaction.
    Row(Box<Decoded>),
    /// The open transaction ends; once all its rows have an outcome, `end_lsn` may be confirmed.
    Commit { end_lsn: Lsn },
    /// Nothing of ours lies before this position that was not delivered already.
    Mark(Lsn),
}

/// What became of an event, on its way back to the event's row.
#[derive(Clone, Debug)]
pub struct Report {
    /// The event under way, as [`super::delivery::Delivery`] numbers it.
    pub token: u64,
    /// The row's primary key; 0 when it could not be read.
    pub id: i64,
    /// The row's global id.
    pub event_id: ByteString,
    /// The transaction that inserted the row; `None` when the row was seen in the table.
    pub xid: Option<u32>,
    /// What is to be written to the row.
    pub outcome: Outcome,
}

impl Report {
    /// JetStream has the event.
    pub fn completed(token: u64, event: &Event) -> Self {
        Self { token, id: event.id, event_id: event.event_id.clone(), xid: event.xid(), outcome: Outcome::Completed }
    }

    /// The event failed for its own sake.
    pub fn rejected(token: u64, rejection: Rejection) -> Self {
        let Event { id, ref event_id, .. } = rejection.event;
        let (event_id, xid) = (event_id.clone(), rejection.event.xid());
        Self { token, id, event_id, xid, outcome: Outcome::Failed(Box::new(rejection)) }
    }

    /// The event waits in the table, behind an earlier one of its aggregate.
    pub fn held(token: u64, event: Event) -> Self {
        let (id, event_id, xid) = (event.id, event.event_id.clone(), event.xid());
        Self { token, id, event_id, xid, outcome: Outcome::Held(Box::new(event)) }
    }
}

/// An event whose outcome is committed in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settled {
    /// As in the report.
    pub token: u64,
    /// Its row is gone: should the log show the event again, only the stream can tell that it was sent.
    pub gone: bool,
}

/// The outcome of an event.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// JetStream has it.
    Completed,
    /// It failed for its own sake.
    Failed(Box<Rejection>),
    /// It waits in the table, behind an earlier event of its aggregate that failed.
    Held(Box<Event>),
}

impl Outcome {
    /// Whether the event failed, and nothing is counted against it.
    pub fn is_spared(&self) -> bool {
        matches!(self, Self::Failed(rejection) if !rejection.counts)
    }

    /// What the dead letter says when the event's row is gone: the event, the kind of failure, and the reason. An event
    /// that is spared does not become one.
    pub fn without_row(&self) -> Option<(&Event, &'static str, &str)> {
        match self {
            Self::Completed => None,
            Self::Failed(rejection) if !rejection.counts => None,
            Self::Failed(rejection) => Some((&rejection.event, rejection.code, &rejection.message)),
            Self::Held(event) => Some((
                event,
                "row_deleted",
                "an earlier event of its aggregate waits for a retry, and the row was deleted meanwhile",
            )),
        }
    }
}

/// Why an event failed, and the event itself, in case that its row is gone.
#[derive(Clone, Debug)]
pub struct Rejection {
    /// The event.
    pub event: Event,
    /// The kind of failure, for the row's `error_code`.
    pub code: &'static str,
    /// What happened, for the row's `error_message`.
    pub message: String,
    /// When the row may be tried again; `None`: never, it becomes a dead letter at once.
    pub retry_in: Option<Duration>,
    /// Whether the attempt is counted on the row.
    pub counts: bool,
}
