//! What NATS answers: acknowledgements, failures, refusals, and the state of the connection.

use std::time::Instant;

use tokio::sync::broadcast;
use tracing::warn;

use super::Deliver;
use crate::config::{self, Manage};
use crate::fault::{Class, Failure};
use crate::flow::delivery::{Parcel, Refusal, Refused};
use crate::flow::event::{Event, Settled};
use crate::flow::retry;
use crate::nats::connect::Link;
use crate::nats::notice::Notice;
use crate::nats::publish::Reply;
use crate::nats::stream::{StreamFacts, why_no_responders};
use crate::relay::gauges::seconds_since;
use crate::telemetry::health::Condition;
use crate::telemetry::metrics::peer;

impl Deliver<'_> {
    pub(super) fn reply(&mut self, reply: Reply) {
        match reply.result {
            Ok(ack) => {
                let Some(accepted) = self.delivery.accepted(reply.token, ack.sequence) else { return };
                if ack.duplicate { &self.counters.duplicate } else { &self.counters.stored }.inc();
                if let Some(sent_at) = accepted.sent_at {
                    self.shared.metrics.publish_duration.observe(sent_at.elapsed().as_secs_f64());
                }
                if let Some(committed_at) = accepted.committed_at {
                    self.shared.metrics.commit_to_ack.observe(seconds_since(committed_at));
                }
                self.trouble_passed();
                self.remember(&accepted.report, ack.sequence);
                self.report(accepted.report);
                if !ack.duplicate && accepted.floor.is_some_and(|floor| ack.sequence <= floor) {
                    self.stream_went_back();
                }
            }
            Err(failure @ (Failure::NoResponders | Failure::MessageTooLarge { .. })) => {
                self.unexplained.push((reply.token, failure));
                if self.asked.is_none() {
                    let stream = self.nats.stream.clone();
                    self.asked = Some(Box::pin(async move { stream.facts().await }));
                }
            }
            Err(failure) => self.failed(reply.token, &failure),
        }
    }

    /// The stream has told of itself: why nobody answered for the events that wait for that, and what it takes.
    pub(super) fn explained(&mut self, told: &Result<StreamFacts, Failure>) {
        self.asked = None;
        if let Ok(facts) = told {
            self.note_window(facts);
        }
        for (token, failure) in std::mem::take(&mut self.unexplained) {
            let Some(Parcel { event, subject, .. }) = self.delivery.parcel(token) else { continue };
            let why = if failure == Failure::NoResponders {
                why_no_responders(told, subject)
            } else {
                let size = self.headers(event).0.size().saturating_add(event.payload.len());
                // Someone may have raised it since.
                let limit = told.as_ref().ok().and_then(|facts| facts.max_msg_size).filter(|limit| *limit < size);
                Failure::MessageTooLarge { size: Some(size), limit }
            };
            self.failed(token, &why);
        }
    }

    pub(super) fn failed(&mut self, token: u64, failure: &Failure) {
        if failure.class() == Class::Transient {
            if self.delivery.send_again(token) {
                self.counters.transient.inc();
                // An earlier copy of it may be stored, and the stream remember its id for less long than it did.
                self.unseen = true;
                self.wait_for_stream(failure);
            }
        } else {
            self.refuse(token, failure);
        }
    }

    /// Holds; where the stream is gone and may be made, the next session makes it again.
    pub(super) fn wait_for_stream(&mut self, failure: &Failure) {
        self.hold_for(failure);
        if matches!(failure, Failure::StreamMissing(_)) && self.shared.settings.nats.manage == Manage::Create {
            self.wiring.stop.cancel();
        }
    }

    /// The event failed for its own sake, or nothing at all is accepted: then nothing is counted against it, it waits
    /// in the table, and delivery pauses. What comes behind it shows whether others are accepted.
    ///
    /// Where an earlier copy of it had no answer, the stream is asked for that one before: a retry might come when the
    /// stream has forgotten its id, and store another.
    pub(super) fn refuse(&mut self, token: u64, failure: &Failure) {
        if self.shared.proof_after.is_some() && self.delivery.doubt(token) {
            self.counters.transient.inc();
            return;
        }
        let config::Retry { initial, max } = self.shared.settings.retry;
        let retry_in = |event: &Event, spared: bool| {
            let attempt = u32::try_from(event.retry_count).unwrap_or(0).saturating_add(1);
            retry::delay(if spared { u32::MAX } else { attempt }, initial, max, retry::spread(event.id))
        };
        let (hopeless, at) = (failure.class() == Class::Hopeless, Instant::now());
        let refusal = Refusal { code: failure.code(), message: failure.to_string(), hopeless, at };
        let Refused { reports, spared } = self.delivery.refused(token, refusal, retry_in);
        if let Some(report) = reports.first() {
            self.counters.poison.inc();
            if spared {
                self.hold_for(failure);
                // Until it would have been refused again.
                self.troubled_until = self.troubled_until.max(at.checked_add(max.saturating_mul(2)));
            } else {
                let (id, held) = (report.id, reports.len() - 1);
                warn!(id, code = failure.code(), hopeless, held, hint = failure.hint(), "an event was refused");
                let told = format!("an event was refused: {}: {}", failure.code(), failure.hint());
                self.shared.health.note("event", told);
            }
        }
        for report in reports {
            self.report(report);
        }
        let forgotten = self.delivery.take_forgotten().into_iter();
        self.settle(forgotten.map(|token| Settled { token, gone: false }).collect());
    }

    pub(super) fn link(&mut self, link: &Link) {
        if link.connected {
            self.shared.health.clear(Condition::NatsDown);
            // No acknowledgement of an earlier connection comes any more.
            self.delivery.send_all_again();
            self.held_until = None;
            if link.epoch > self.epoch {
                self.shared.metrics.reconnects.of(peer::NATS).inc();
                self.epoch = link.epoch;
                // The server may have been away, and have come back with less than it had.
                (self.unseen, self.look) = (true, None);
            }
        } else {
            let reason = link.reason.as_deref().unwrap_or("the connection was lost");
            self.shared.health.raise(Condition::NatsDown, format!("NATS is away: {reason}"));
        }
    }

    pub(super) fn notice(&mut self, notice: Result<Notice, broadcast::error::RecvError>) {
        if let Ok(Notice::PublishRefused { subject }) = notice {
            if self.shared.proof_after.is_some() && self.delivery.doubt_unnamed(&subject, Instant::now()) {
                return;
            }
            // Every event under way to the subject meets the same; of a burst, not all refusals are told.
            for token in self.delivery.sent_to(&subject) {
                self.refuse(token, &Failure::PermissionDenied { action: "publish to", subject: subject.clone() });
            }
        }
    }
}
