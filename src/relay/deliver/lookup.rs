//! Looks rows up in the table that an earlier session may have sent already.
//!
//! On a connection of its own: someone may hold the table's lock for long, and meanwhile the slot is still to be
//! watched, and acknowledgements are to be taken in.

use std::collections::HashMap;
use std::time::Duration;

use bytestring::ByteString;
use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;
use tracing::warn;

use super::{Deliver, Shared};
use crate::flow::event::{Change, Decoded, Event, Origin};
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Session, SqlConnection};
use crate::postgres::{describe, outbox};
use crate::telemetry::health::Condition;

/// Changes whose rows are looked up in one statement, about. Fewer cost more round trips, more wait longer for one.
const AT_A_TIME: usize = 1024;
/// A look-up that takes longer is told of.
const LONG: Duration = Duration::from_secs(2);

/// What a look-up came to.
pub(super) struct Looked {
    batch: Vec<Change>,
    /// The connection, for the next time, and which rows are taken care of; of each, whether it waits.
    found: Result<(SqlConnection, HashMap<i64, bool>), String>,
}

impl Deliver<'_> {
    /// Receives a batch. Of rows that an earlier session may have sent already, those that have an outcome since, or
    /// that someone else has taken, are left to the table: they are looked up first, together with what waits behind
    /// them.
    pub(super) fn receive(&mut self, mut batch: Vec<Change>) {
        let mut doubtful = doubtful(&batch, self.shared.horizon);
        while !doubtful.is_empty()
            && batch.len() < AT_A_TIME
            && let Some(Ok(more)) = self.wiring.sources.last_mut().map(Receiver::try_recv)
        {
            doubtful.extend(self::doubtful(&more, self.shared.horizon));
            batch.extend(more);
        }
        if !doubtful.is_empty() {
            self.looking = Some(Box::pin(look_up(self.shared, self.lookups.take(), batch, doubtful)));
            return;
        }
        if self.lookups.is_some() && batch.iter().any(|change| matches!(change, Change::Row(_))) {
            // From here on all is new.
            self.lookups = None;
        }
        self.pending.extend(batch);
    }

    /// Whether an earlier session may have sent the event.
    pub(super) fn is_doubtful(&self, event: &Event) -> bool {
        is_doubtful(event, self.shared.horizon)
    }

    /// The table has told of the batch's rows.
    pub(super) fn looked(&mut self, Looked { mut batch, found }: Looked) {
        self.looking = None;
        match found {
            Ok((connection, taken)) => {
                self.lookups = Some(connection);
                for change in &mut batch {
                    if let Change::Row(row) = change {
                        leave_to_table(row, &taken);
                    }
                }
                self.pending.extend(batch);
            }
            Err(error) => {
                warn!(error, "rows that were read again could not be looked up; the session ends");
                self.wiring.stop.cancel();
            }
        }
    }
}

async fn look_up(
    shared: Shared<'_>,
    connection: Option<SqlConnection>,
    batch: Vec<Change>,
    doubtful: Vec<(i64, ByteString)>,
) -> Looked {
    let (ids, event_ids): (Vec<i64>, Vec<&str>) = doubtful.iter().map(|(id, event_id)| (*id, &**event_id)).unzip();
    let found = async {
        let connection = match connection {
            Some(connection) => connection,
            None => connect::sql(shared.postgres, &session()).await.map_err(|error| error.to_string())?,
        };
        let asked = outbox::taken_care_of(&connection.client, &shared.ground.tables, &ids, &event_ids);
        let taken = told_of(shared, asked).await.map_err(|error| describe(&error))?;
        Ok((connection, taken.into_iter().collect()))
    };
    let found = found.await;
    Looked { batch, found }
}

/// Waits for an answer from the table, and says what keeps it when that takes long.
async fn told_of<T>(shared: Shared<'_>, asked: impl Future<Output = T>) -> T {
    tokio::pin!(asked);
    let mut waits = false;
    loop {
        if let Ok(answer) = timeout(LONG, &mut asked).await {
            if waits {
                shared.health.clear(Condition::Locked);
            }
            return answer;
        }
        waits = true;
        let holders = outbox::lock_holders(&shared.ground.control.client, &shared.ground.tables).await;
        let holders = holders.unwrap_or_default();
        let reason = format!("rows that were read again cannot be looked up in the table; locked: {holders}");
        if shared.health.raise(Condition::Locked, reason) {
            warn!(
                holders,
                "rows that were read again cannot be looked up in the table, which seems to be locked; waiting"
            );
        }
    }
}

/// Leaves a row that is `taken` care of where it is; where it waits there, its aggregate waits for it.
fn leave_to_table(row: &mut Decoded, taken: &HashMap<i64, bool>) {
    let waits = match row {
        Decoded::Live(event) => taken.get(&event.id),
        _ => None,
    };
    if let Some(&waits) = waits
        && let Decoded::Live(event) = std::mem::replace(row, Decoded::Left)
        && waits
    {
        *row = Decoded::Waits(event);
    }
}

/// Whether an event may have been sent before: it came from the table, or was committed before `horizon`.
fn is_doubtful(event: &Event, horizon: Lsn) -> bool {
    match event.origin {
        Origin::Log(origin) => origin.final_lsn < horizon,
        Origin::Table => true,
    }
}

/// The rows whose events may have been sent before.
fn doubtful(batch: &[Change], horizon: Lsn) -> Vec<(i64, ByteString)> {
    let known = |change: &Change| match change {
        Change::Row(row) => match &**row {
            Decoded::Live(event) if is_doubtful(event, horizon) => Some((event.id, event.event_id.clone())),
            _ => None,
        },
        _ => None,
    };
    batch.iter().filter_map(known).collect()
}

/// It waits as long as it must. Whatever the statistics say, the rows are few beside the table.
fn session() -> Session {
    ["enable_seqscan", "enable_hashjoin", "enable_mergejoin", "jit"]
        .into_iter()
        .fold(Session::new("outbox-relay look-up"), |session, name| session.with(name, "off"))
        .with("lock_timeout", "0")
        .with("statement_timeout", "0")
        .with("row_security", "off")
}
