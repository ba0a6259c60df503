//! The relay's row in `outbox_relay_state`.

use std::time::SystemTime;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::Tables;
use crate::flow::lsn::Lsn;

/// Bytes of log by which a noted position may lie ahead of what was safe: what the note itself adds to the log.
pub const NOTE_REACH: u64 = 1024;

/// What the row says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateRow {
    /// The stream that the row speaks of.
    pub stream: Option<String>,
    /// When that stream was created; another time means another stream of the same name.
    pub stream_created: Option<SystemTime>,
    /// No event whose outcome is unrecorded is stored at or below this sequence.
    pub stream_seq: u64,
    /// Whether rows may wait that the slot does not show.
    pub needs_drain: bool,
    /// The slot was confirmed up to here at most; zero when it never was.
    pub confirmed: Lsn,
    /// When it was written last.
    pub updated_at: Option<SystemTime>,
}

impl StateRow {
    /// The position before which everything has its outcome, for certain: what was noted may reach a little ahead of
    /// it.
    pub fn proven(&self) -> Lsn {
        Lsn(self.confirmed.0.saturating_sub(NOTE_REACH))
    }
}

/// Reads and writes the row of one slot.
#[derive(Debug)]
pub struct RelayState<'a> {
    pub client: &'a Client,
    pub tables: &'a Tables,
    pub slot: &'a str,
}

impl RelayState<'_> {
    /// Makes the row when missing, and reads it.
    pub async fn read(&self) -> Result<StateRow, tokio_postgres::Error> {
        let state = &self.tables.state;
        let insert = format!("INSERT INTO {state} (slot_name) VALUES ($1) ON CONFLICT DO NOTHING");
        self.client.execute(&insert, &[&self.slot]).await?;
        // What was just made is there.
        Ok(self.find().await?.unwrap_or_default())
    }

    /// Reads the row, if there is one.
    pub async fn find(&self) -> Result<Option<StateRow>, tokio_postgres::Error> {
        let select = format!(
            "SELECT stream, stream_created, coalesce(stream_seq, 0), needs_drain, coalesce(confirmed_lsn, '0/0')::text,
               updated_at
             FROM {} WHERE slot_name = $1",
            self.tables.state
        );
        let rows = self.client.query_typed(&select, &[(&self.slot, Type::TEXT)]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(StateRow {
            stream: row.try_get(0)?,
            stream_created: row.try_get(1)?,
            stream_seq: u64::try_from(row.try_get::<_, i64>(2)?).unwrap_or(0),
            needs_drain: row.try_get(3)?,
            confirmed: row.try_get::<_, &str>(4)?.parse().unwrap_or(Lsn::ZERO),
            updated_at: row.try_get(5)?,
        }))
    }

    /// The sequence of this stream at or below which no other slot's relay has left an event of unknown outcome, as far as
    /// it stands at `reach` or higher. Rows of slots that are long gone may name a lower one: the highest of those is
    /// taken where there is no other. `None`: nobody has fed the stream.
    pub async fn left_by_others(
        &self,
        stream: &str,
        created: SystemTime,
        reach: u64,
    ) -> Result<Option<u64>, tokio_postgres::Error> {
        let select = format!(
            "SELECT coalesce(min(stream_seq) FILTER (WHERE stream_seq >= $4), max(stream_seq))
             FROM {} WHERE slot_name <> $1 AND stream = $2 AND stream_created = $3",
            self.tables.state
        );
        let reach = i64::try_from(reach).unwrap_or(i64::MAX);
        let row = self.client.query_one(&select, &[&self.slot, &stream, &created, &reach]).await?;
        Ok(row.try_get::<_, Option<i64>>(0)?.and_then(|sequence| u64::try_from(sequence).ok()))
    }

    /// Waits for pollers that began before the slot was taken; later ones see that it is, and rest. They hold the table
    /// in a mode that only this lock conflicts with.
    pub async fn wait_for_pollers(&self) -> Result<(), tokio_postgres::Error> {
        let lock = format!("BEGIN; LOCK TABLE {} IN EXCLUSIVE MODE; COMMIT", self.tables.state);
        let locked = self.client.batch_execute(&lock).await;
        if locked.is_err() {
            // The connection goes on, and is asked whom it waited for.
            self.client.batch_execute("ROLLBACK").await?;
        }
        locked
    }

    /// Notes which stream the sequence belongs to, and starts to count at `stream_seq`.
    pub async fn follow_stream(
        &self,
        stream: &str,
        created: SystemTime,
        stream_seq: u64,
    ) -> Result<(), tokio_postgres::Error> {
        let statement = format!(
            "UPDATE {} SET stream = $2, stream_created = $3, stream_seq = $4, updated_at = now() WHERE slot_name = $1",
            self.tables.state
        );
        let sequence = i64::try_from(stream_seq).unwrap_or(i64::MAX);
        self.client.execute(&statement, &[&self.slot, &stream, &created, &sequence]).await?;
        Ok(())
    }

    /// Notes durably whether rows may wait that the slot does not show.
    pub async fn set_needs_drain(&self, needs_drain: bool) -> Result<(), tokio_postgres::Error> {
        let statement =
            format!("UPDATE {} SET needs_drain = $2, updated_at = now() WHERE slot_name = $1", self.tables.state);
        self.client.execute(&statement, &[&self.slot, &needs_drain]).await?;
        Ok(())
    }
}
