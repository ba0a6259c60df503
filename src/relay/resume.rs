//! Where things stand when a session begins: the log, the stream, and the aggregates that are blocked.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use tracing::{error, info, warn};

use super::deliver::{self, IDS_MAX, Known};
use super::prepare::Ground;
use super::{Relay, Setback};
use crate::flow::delivery::{Delivery, Limits, Start};
use crate::flow::lsn::Lsn;
use crate::nats::stream::StreamFacts;
use crate::postgres::outbox::{self, StateRow};
use crate::postgres::slot;

/// Where things stand.
pub struct Begun {
    /// Knows which aggregates are blocked.
    pub delivery: Delivery,
    /// What an earlier session left in the stream without recording it.
    pub known: Known,
    /// After what time the stream is to be asked again before an event is repeated.
    pub proof_after: Option<Duration>,
    pub stream_created: SystemTime,
}

/// Looks at the stream and the log before anything is sent. `new`: the slot was made for this session.
pub async fn begin(
    relay: &Relay,
    nats: &deliver::Nats,
    ground: &Ground,
    (state, new): (&StateRow, bool),
    (confirmed, horizon): (Lsn, Option<Lsn>),
    limits: Limits,
) -> Result<Begun, Setback> {
    let stream = &nats.stream;
    let facts = stream.facts().await.map_err(|fault| Setback::Transient(fault.to_string()))?;
    let stream_seq = follow(relay, ground, (state, new), &facts, nats.went_back).await?;
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
    Ok(Begun { delivery, known, proof_after: facts.proof_after(), stream_created: facts.created_as_noted() })
}

/// Up to which sequence of this very stream every event has its outcome in the table. `went_back`: it was seen to have
/// lost what it acknowledged.
async fn follow(
    relay: &Relay,
    ground: &Ground,
    (row, new): (&StateRow, bool),
    facts: &StreamFacts,
    went_back: bool,
) -> Result<u64, Setback> {
    let (created, recorded, last) = (facts.created_as_noted(), row.stream_seq, facts.last_sequence);
    let named = row.stream.as_deref() == Some(&*facts.name);
    let same = named && row.stream_created == Some(created);
    if same && !went_back && recorded <= last {
        return Ok(recorded);
    }
    // From here on, all ids can be compared.
    let reach = last.saturating_sub(IDS_MAX);
    let state = ground.state(&relay.settings.source.slot);
    let stream_seq = if same {
        let text = "the stream has lost messages that it acknowledged; `outbox-relay verify` compares the completed rows \
                    with it";
        error!(recorded, last, "{text}");
        relay.health.note("stream", text);
        // What was stored since has numbers that were given before.
        recorded.min(reach)
    } else if row.stream.is_some() {
        if named {
            let text = "the stream was deleted and made anew: what it held before is gone; `outbox-relay verify` compares \
                        the completed rows with it";
            warn!("{text}");
            relay.health.note("stream", text);
        }
        // Another stream is read from its start.
        0
    } else if !new {
        // What an earlier session noted of the slot is lost.
        reach
    } else {
        // Under another slot's name, events may have been left open.
        match state.left_by_others(&facts.name, created, reach).await? {
            Some(left) if left <= last => left,
            // It was noted a moment ago, or the stream has lost its end since.
            Some(_) => reach,
            None => last,
        }
    };
    state.follow_stream(&facts.name, created, stream_seq).await?;
    Ok(stream_seq)
}

/// Blocks the aggregates that the table shows as blocked.
async fn block_as_found(ground: &Ground, delivery: &mut Delivery) -> Result<(), Setback> {
    for (aggregate, rows) in outbox::blocked(&ground.control.client, &ground.tables).await? {
        delivery.gate().block_as_found(aggregate, rows);
    }
    Ok(())
}
