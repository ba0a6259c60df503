//! Reaching NATS: the connection, and a stream that is there and fit.

use std::time::{Duration, Instant};

use tracing::{debug, info, warn};

use super::{Relay, RunError, beating, deliver};
use crate::fault::Class;
use crate::nats::connect::{self, ConnectFault, Connection, Inboxes};
use crate::nats::stream::{Finding, Stream, StreamFacts, StreamFault};
use crate::pause::{Pause, Repeats};
use crate::reconcile::PASS_ROWS;
use crate::telemetry::health::Condition;

/// Connects to NATS, where it is not, and waits until the stream is there and fit. `None`: the relay was asked to stop.
pub async fn reach(relay: &Relay, mut nats: Option<deliver::Nats>) -> Result<Option<deliver::Nats>, RunError> {
    let Relay { health, pulse, stop, .. } = relay;
    let mut pause = Pause::new(Duration::from_millis(200), Duration::from_secs(5));
    let (mut connection, mut repeats) = (None, Repeats::default());
    while !stop.is_cancelled() {
        let tried = stop.run_until_cancelled(try_nats(relay, &mut nats, &mut connection));
        let Some(tried) = beating(pulse, tried).await else { break };
        match tried {
            Ok(()) => {
                health.clear(Condition::NatsDown);
                if repeats.end() {
                    info!("NATS is reached, and the stream is fit");
                }
                return Ok(nats);
            }
            // What became unfit while the relay runs is waited for.
            Err(setback) if setback.is_transient() || nats.is_some() => {
                let reason = setback.to_string();
                if repeats.is_news(&reason, Instant::now()) {
                    warn!(reason, "waiting for NATS");
                }
                health.raise(Condition::NatsDown, reason);
            }
            Err(setback) => return Err(RunError::Failed(setback.to_string())),
        }
        let wait = pause.next();
        beating(pulse, stop.run_until_cancelled(tokio::time::sleep(wait))).await;
    }
    Ok(None)
}

/// Connects, if that was not done, and looks at the stream.
async fn try_nats(
    relay: &Relay,
    nats: &mut Option<deliver::Nats>,
    made: &mut Option<(Connection, Inboxes)>,
) -> Result<(), NatsSetback> {
    let settings = &relay.settings.nats;
    if let Some(nats) = nats {
        look(relay, &nats.stream).await?;
        return Ok(());
    }
    let connection = match made.take() {
        Some(made) => made,
        None => connect::connect(settings, relay.settings.delivery.max_in_flight + PASS_ROWS).await?,
    };
    let stream = Stream::new(&connection.0, settings);
    let (facts, findings) = match first_look(relay, &stream).await {
        Ok(checked) => checked,
        Err(fault) => {
            *made = Some(connection);
            return Err(fault.into());
        }
    };
    for finding in findings {
        warn!(code = finding.code, "{}", finding.text);
        relay.health.note("stream", finding.text);
    }
    *nats = Some(deliver::Nats::new(connection, stream, &facts));
    Ok(())
}

/// Looks at the stream before anything is sent to it. Where it is to be asked one day for what an earlier session has
/// sent, it is seen now that it can be: until a relay is killed, there is nothing to ask for.
async fn first_look(relay: &Relay, stream: &Stream) -> Result<(StreamFacts, Vec<Finding>), StreamFault> {
    let (facts, findings) = look(relay, stream).await?;
    if facts.remembers() {
        stream.try_ids(facts.last_sequence).await?;
    }
    Ok((facts, findings))
}

/// Makes the stream when it is missing, and sees whether it and its neighbours are fit.
async fn look(relay: &Relay, stream: &Stream) -> Result<(StreamFacts, Vec<Finding>), StreamFault> {
    let looked = stream.ensure(&relay.settings.nats, &relay.router.subject_filter()).await?;
    if let Some(route) = &relay.compensations {
        leave_to_services(stream, &route.filter()).await?;
    }
    Ok(looked)
}

/// A stream that takes the requests to services answers in their place, and nothing is compensated. Streams that the
/// relay may not see are found when it asks.
async fn leave_to_services(stream: &Stream, filter: &str) -> Result<(), StreamFault> {
    match stream.capturing(filter).await {
        Ok(Some(name)) => Err(StreamFault::Unfit {
            problem: format!("stream {name:?} captures {filter:?} of compensation.subject, so no service is asked"),
            fix:
                "take it out of the stream's subjects, change compensation.subject, or set compensation.enabled = false"
                    .into(),
        }),
        Ok(None) => Ok(()),
        Err(failure) => {
            debug!(code = failure.code(), "whether a stream captures compensation.subject cannot be seen");
            Ok(())
        }
    }
}

/// Why NATS or the stream cannot be used.
#[derive(Debug, thiserror::Error)]
enum NatsSetback {
    #[error(transparent)]
    Connect(#[from] ConnectFault),
    #[error(transparent)]
    Stream(#[from] StreamFault),
}

impl NatsSetback {
    fn is_transient(&self) -> bool {
        let class = match self {
            Self::Connect(fault) => fault.class,
            Self::Stream(fault) => fault.class(),
        };
        class == Class::Transient
    }
}
