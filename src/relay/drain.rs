//! Waiting rows from before the slot, as one transaction that ends where the slot begins.

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::prepare::{self, Ground};
use super::{Relay, Setback};
use crate::flow::event::{Change, Decoded};
use crate::flow::lsn::Lsn;
use crate::postgres::connect::{self, Session, SqlConnection};
use crate::postgres::describe;
use crate::postgres::outbox::{Tables, WaitingRows};

/// Rows handed on at a time, at most.
const BATCH_ROWS: usize = 256;
/// Bytes of payload handed on at a time, about.
const BATCH_BYTES: usize = 128 * 1024;
/// Batches that wait to be taken in.
pub const BATCHES: usize = 2;

/// A connection that sees what the slot's snapshot shows.
pub struct Drain {
    connection: SqlConnection,
    tables: Tables,
    cap: usize,
    /// Where the slot begins.
    pub point: Lsn,
}

impl Drain {
    /// Opens the snapshot that the new slot exported, which exists only until the replication connection goes on;
    /// `None`: one of the present.
    pub async fn open(relay: &Relay, ground: &Ground, snapshot: Option<&str>, point: Lsn) -> Result<Self, Setback> {
        let connection = connect::sql(&relay.postgres, &session()).await?;
        WaitingRows::enter_snapshot(&connection.client, snapshot).await?;
        Ok(Self { connection, tables: ground.tables.clone(), cap: prepare::message_cap(&relay.settings), point })
    }

    /// Reads the rows in the background. Where that fails, the session ends: the state row still asks for a drain.
    pub fn spawn(self, stop: CancellationToken) -> mpsc::Receiver<Vec<Change>> {
        let (changes, receiver) = mpsc::channel(BATCHES);
        tokio::spawn(async move {
            if let Err(error) = self.read(&changes).await {
                warn!(error = %describe(&error), "waiting rows could not be read; the drain starts over");
                stop.cancel();
            }
        });
        receiver
    }

    async fn read(self, changes: &mpsc::Sender<Vec<Change>>) -> Result<(), tokio_postgres::Error> {
        let rows = WaitingRows::read(&self.connection.client, &self.tables, self.cap, None).await?;
        if let Some(rows) = hand_on(rows, |_| self.point, changes).await? {
            info!(rows, "every waiting row from before the slot was read");
        }
        Ok(())
    }
}

/// Hands rows on as one transaction, whose end follows from their number. Returns that number; `None`: nobody takes
/// them in any more.
pub async fn hand_on(
    mut rows: WaitingRows,
    end: impl Fn(usize) -> Lsn,
    changes: &mpsc::Sender<Vec<Change>>,
) -> Result<Option<usize>, tokio_postgres::Error> {
    let (mut batch, mut bytes, mut count) = (vec![Change::Begin { committed_at: None }], 0, 0);
    while let Some(row) = rows.next().await? {
        bytes += weight(&row);
        count += 1;
        batch.push(Change::Row(Box::new(row)));
        if batch.len() >= BATCH_ROWS || bytes >= BATCH_BYTES {
            bytes = 0;
            if changes.send(std::mem::take(&mut batch)).await.is_err() {
                return Ok(None);
            }
        }
    }
    batch.push(Change::Commit { end_lsn: end(count) });
    Ok(changes.send(batch).await.is_ok().then_some(count))
}

fn weight(row: &Decoded) -> usize {
    match row {
        Decoded::Live(event) | Decoded::Unfit(event, _) | Decoded::Nameless(event, _) => event.payload.len(),
        Decoded::Left | Decoded::Waits(_) => 0,
    }
}

/// The session that reads waiting rows: as long as delivery takes.
pub fn session() -> Session {
    ["statement_timeout", "idle_in_transaction_session_timeout", "lock_timeout"]
        .into_iter()
        .fold(Session::new("outbox-relay drain"), |session, name| session.with(name, "0"))
        .with("row_security", "off")
}
