//! Where things stand when a session begins: the log, the stream, and the aggregates that are blocked.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tracing::{error, info};

use super::deliver::Known;
use super::prepare::Ground;
use super::{Relay, Setback};
use crate::flow::delivery::{Delivery, Limits, Start};
use crate::flow::lsn::Lsn;
use crate::nats::stream::{Stream, StreamFacts};
use crate::postgres::outbox::{self, StateRow};
use crate::postgres::slot;

/// Where the stream and the log stand before anything is sent: what an earlier session left in the stream without
/// recording it, which aggregates are blocked, and after what time the stream is to be asked again before an event is
/// repeated.
pub async fn begin(
    relay: &Relay,
    stream: &Stream,
    ground: &Ground,
    (state, confirmed, horizon): (&StateRow, Lsn, Option<Lsn>),
    limits: Limits,
) -> Result<(Delivery, Known, Option<Duration>), Setback> {
    let facts = stream.facts().await.map_err(|fault| Setback::Transient(fault.to_string()))?;
    let stream_seq = follow(relay, ground, state, &facts).await?;
    let mut known = Known::default();
    if facts.remembers() && stream_seq < facts.last_sequence {
        known = Known::read(stream, stream_seq).await.map_err(|fault| Setback::Transient(fault.to_string()))?;
        info!(after = stream_seq, read = known.len(), "the stream was asked for events of unknown outcome");
    }
    let horizon = match horizon {
        Some(horizon) => horizon,
        None => slot::current_wal(&ground.control.client).await?,
    };
    let start = Start {
        confirmed,
        horizon,
        stream_seq,
        last_seq: facts.last_sequence,
        first_token: relay.next_token.load(Ordering::Relaxed),
    };
    let mut delivery = Delivery::new(limits, start);
    if limits.ordered {
        block_as_found(ground, &mut delivery).await?;
    }
    Ok((delivery, known, facts.remembers().then_some(facts.duplicate_window / 2)))
}

/// Up to which sequence of this very stream every event has its outcome in the table.
async fn follow(relay: &Relay, ground: &Ground, row: &StateRow, facts: &StreamFacts) -> Result<u64, Setback> {
    let created = facts.created_as_noted();
    let first_time = row.stream.is_none();
    let same = row.stream.as_deref() == Some(&*facts.name) && row.stream_created == Some(created);
    if same && row.stream_seq <= facts.last_sequence {
        return Ok(row.stream_seq);
    }
    if same {
        let (recorded, last) = (row.stream_seq, facts.last_sequence);
        error!(
            recorded,
            last,
            "the stream ends before messages that it acknowledged: the server lost them; compare the completed rows with the stream"
        );
    }
    // Before the first session there was none that left anything open. Another stream is read from its start.
    let stream_seq = if same || first_time { facts.last_sequence } else { 0 };
    ground.state(&relay.settings.source.slot).follow_stream(&facts.name, created, stream_seq).await?;
    Ok(stream_seq)
}

/// Blocks the aggregates that the table shows as blocked.
async fn block_as_found(ground: &Ground, delivery: &mut Delivery) -> Result<(), Setback> {
    for (aggregate, rows) in outbox::blocked(&ground.control.client, &ground.tables).await? {
        delivery.gate().block_as_found(aggregate, rows);
    }
    Ok(())
}
