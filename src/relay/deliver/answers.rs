//! What NATS answers: acknowledgements, failures, refusals, and the state of the connection.

use tokio::sync::broadcast;
use tracing::warn;

use super::Deliver;
use crate::config::{self, Manage};
use crate::fault::{Class, Failure};
use crate::flow::event::Event;
use crate::flow::retry;
use crate::nats::connect::Link;
use crate::nats::notice::Notice;
use crate::nats::publish::Reply;
use crate::relay::gauges::seconds_since;
use crate::telemetry::health::Condition;
use crate::telemetry::metrics::peer;

/// So many refusals in a row, with nothing accepted in between, are taken for a fault of the set-up: the pipeline holds
/// and counts no more of them against the rows.
const MAX_REFUSALS: u32 = 50;

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
                self.refusals = 0;
                self.goes_on();
                self.report(accepted.report);
            }
            Err(Failure::NoResponders) => match self.delivery.subject(reply.token) {
                Some(subject) if self.unanswered.is_none() => {
                    let stream = self.nats.stream.clone();
                    let answer = async move { stream.explain_no_responders(&subject).await };
                    self.unanswered = Some((reply.token, Box::pin(answer)));
                }
                _ => self.failed(reply.token, &Failure::NoResponders),
            },
            Err(failure) => self.failed(reply.token, &failure),
        }
    }

    pub(super) fn failed(&mut self, token: u64, failure: &Failure) {
        if failure.class() == Class::Transient {
            if self.delivery.send_again(token) {
                self.counters.transient.inc();
                self.hold_for(failure);
                if matches!(failure, Failure::StreamMissing(_)) && self.shared.settings.nats.manage == Manage::Create {
                    // The next session makes it again.
                    self.wiring.stop.cancel();
                }
            }
        } else {
            self.refuse(token, failure);
        }
    }

    /// The event failed for its own sake.
    pub(super) fn refuse(&mut self, token: u64, failure: &Failure) {
        let hopeless = failure.class() == Class::Hopeless;
        if !hopeless {
            self.refusals += 1;
            if self.refusals > MAX_REFUSALS {
                // When nothing at all is accepted, it is not the events' fault.
                if self.delivery.send_again(token) {
                    self.hold_for(failure);
                }
                return;
            }
        }
        let config::Retry { initial, max } = self.shared.settings.retry;
        let retry_in = |event: &Event| {
            let attempt = u32::try_from(event.retry_count).unwrap_or(0);
            let last = event.retry_count.saturating_add(1) >= event.max_retries;
            (!hopeless && !last).then(|| retry::delay(attempt.saturating_add(1), initial, max, retry::spread(event.id)))
        };
        let reports = self.delivery.refused(token, failure.code(), failure.to_string(), retry_in);
        if let Some(report) = reports.first() {
            self.counters.poison.inc();
            let (id, held) = (report.id, reports.len() - 1);
            warn!(id, code = failure.code(), hopeless, held, hint = failure.hint(), "an event was refused");
        }
        for report in reports {
            self.report(report);
        }
        let forgotten = self.delivery.take_forgotten();
        self.settle(forgotten);
    }

    pub(super) fn link(&mut self, link: &Link) {
        if link.connected {
            self.shared.health.clear(Condition::NatsDown);
            // No acknowledgement of an earlier connection comes any more.
            self.delivery.send_all_again();
            self.hold = None;
            if link.epoch > self.epoch {
                self.shared.metrics.reconnects.of(peer::NATS).inc_by(u64::from(self.epoch > 0));
                self.epoch = link.epoch;
            }
        } else {
            let reason = link.reason.as_deref().unwrap_or("the connection was lost");
            self.shared.health.raise(Condition::NatsDown, format!("NATS is away: {reason}"));
        }
    }

    pub(super) fn notice(&mut self, notice: Result<Notice, broadcast::error::RecvError>) {
        if let Ok(Notice::PublishRefused { subject }) = notice {
            // Every event under way to the subject meets the same; of a burst, not all refusals are told.
            for token in self.delivery.sent_to(&subject) {
                self.refuse(token, &Failure::PermissionDenied { action: "publish to", subject: subject.clone() });
            }
        }
    }
}
