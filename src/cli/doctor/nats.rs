//! The examination of NATS.

use super::chart::{Chart, Finding};
use super::stream;
use crate::cli::Failure;
use crate::config::{Manage, Settings};
use crate::fault::Class;
use crate::nats::connect::{self, Connection};
use crate::nats::facts::Server;
use crate::nats::stream::{Examined, Stream, StreamFault};
use crate::relay::{self, RunError};

/// The oldest nats-server that the relay works with.
const OLDEST: [u64; 2] = [2, 10];

/// Examines NATS. What is known of the stream, if there is one.
pub async fn examine(settings: &Settings, chart: &mut Chart) -> Result<Option<Examined>, Failure> {
    chart.area("NATS");
    let (connection, _inboxes) = match connect::connect(&settings.nats, settings.delivery.max_in_flight).await {
        Ok(connected) => connected,
        Err(fault) => {
            let id = if fault.class == Class::Transient { "nats-unreachable" } else { "nats-refused" };
            let why = "without NATS nothing is delivered, and rows wait in the table";
            chart.check(id, [Finding::error("nats.url", fault.text, why).step(fault.hint)]);
            return Ok(None);
        }
    };
    chart.check("nats-unreachable", None);
    chart.check("nats-refused", None);
    let server = connection.server()?;
    chart.check("nats-version", old(&server));
    let examiner = Examiner { connection: &connection, settings, stream: Stream::new(&connection, &settings.nats) };
    examiner.examine(&server, chart).await
}

fn old(server: &Server) -> Option<Finding> {
    let parts = server.version.split(['.', '-']).map_while(|part| part.parse::<u64>().ok());
    let version: Vec<u64> = parts.collect();
    (version.as_slice() < OLDEST.as_slice()).then(|| {
        let problem = format!("it is version {}, and the relay needs 2.10 or later", server.version);
        Finding::error(format!("nats-server {}", server.name), problem, "what the relay relies on is not there")
            .step("upgrade nats-server")
    })
}

struct Examiner<'a> {
    connection: &'a Connection,
    settings: &'a Settings,
    stream: Stream,
}

impl Examiner<'_> {
    async fn examine(&self, server: &Server, chart: &mut Chart) -> Result<Option<Examined>, Failure> {
        let unusable = |error: crate::flow::route::TemplateError| RunError::Unusable(error.to_string());
        let filter = relay::router(self.settings).map_err(unusable)?.subject_filter();
        let compensations = relay::compensation_route(self.settings).map_err(unusable)?;
        let compensations = compensations.map(|route| route.filter());
        let looked = self.stream.examine(&filter).await;
        let creates = self.settings.nats.manage == Manage::Create && matches!(looked, Ok(None));
        self.permissions(&filter, compensations.as_deref(), creates, chart).await;
        chart.area("Stream");
        let examined = match looked {
            Ok(examined) => examined,
            Err(fault) => {
                unknown(&fault, chart);
                return Ok(None);
            }
        };
        chart.check("jetstream", None);
        chart.check("nats-inbox", None);
        match &examined {
            Some(examined) => stream::judge(examined, server, self.settings, chart),
            None => self.missing(server, chart).await,
        }
        if let Some(filter) = compensations {
            self.captured(&filter, chart).await;
        }
        Ok(examined)
    }

    /// Whether the relay's user may publish what a relay publishes.
    async fn permissions(&self, filter: &str, compensations: Option<&str>, creates: bool, chart: &mut Chart) {
        let mut wanted = vec![("nats-publish", filter, "to send events")];
        wanted.extend(compensations.map(|filter| ("nats-publish", filter, "to ask services for compensations")));
        if self.settings.dead_letter.announce {
            wanted.push(("nats-publish", "outbox-dead-letter.*.>", "to announce dead letters"));
        }
        let api = self.stream.api_subjects(creates);
        wanted.extend(api.iter().map(|(subject, what)| ("nats-api", &**subject, *what)));
        let asked = wanted.iter().map(|(_, filter, _)| async { self.connection.may_publish(&sample(filter)).await });
        // At once: a server that does not say makes one wait.
        let answers = futures_util::future::join_all(asked).await;
        for ((id, filter, what), answer) in wanted.into_iter().zip(answers) {
            let object = format!("subject {filter}");
            match answer {
                Ok(Some(true)) => chart.check(id, None),
                Ok(Some(false)) => {
                    let problem = "the relay's user may not publish to it";
                    let finding = Finding::error(object, problem, format!("it is needed {what}"));
                    chart.check(id, [finding.step(format!("add {filter} to what the user may publish"))]);
                }
                Ok(None) => chart.unseen(id, &object, "the server does not say whether it may be published to", None),
                Err(failure) => chart.unseen(id, &object, &failure.to_string(), None),
            }
        }
    }

    async fn missing(&self, server: &Server, chart: &mut Chart) {
        let nats = &self.settings.nats;
        let object = format!("stream {}", nats.stream);
        chart.check("stream-replicas-setting", stream::replicas_setting(None, server, self.settings));
        if nats.manage == Manage::Verify {
            let finding = Finding::error(object, "it does not exist", "the relay refuses to start without it");
            chart.check("stream-missing", [finding.command("outbox-relay stream apply --yes")]);
            return;
        }
        let mut others = Vec::new();
        for subject in &nats.create.subjects {
            others.extend(self.stream.capturing(subject).await.ok().flatten());
        }
        others.dedup();
        let overlap = (!others.is_empty()).then(|| {
            let problem = format!("its subjects {:?} overlap with those of stream {others:?}", nats.create.subjects);
            let other = others.first().cloned().unwrap_or_default();
            Finding::error(object.clone(), problem, "the relay cannot make it").setting("nats.stream", other)
        });
        chart.check("stream-overlap", overlap);
        let note = Finding::note(object, "it does not exist yet", "the relay makes it when it starts");
        chart.check("stream-missing", [note]);
    }

    async fn captured(&self, filter: &str, chart: &mut Chart) {
        const ID: &str = "compensation-captured";
        match self.stream.capturing(filter).await {
            Ok(None) => chart.check(ID, None),
            Ok(Some(name)) => {
                let problem = format!("it captures {filter} of compensation.subject");
                let why = "it answers in the services' place, so that nothing is compensated";
                let finding = Finding::error(format!("stream {name}"), problem, why);
                chart.check(
                    ID,
                    [finding
                        .setting("compensation.enabled", false)
                        .step("or take the subject out of the stream, or change compensation.subject")],
                );
            }
            Err(failure) => chart.unseen(ID, &format!("subject {filter}"), &failure.to_string(), None),
        }
    }
}

/// The stream could not be looked at.
fn unknown(fault: &StreamFault, chart: &mut Chart) {
    match fault {
        // The other permissions were asked for one by one.
        StreamFault::Denied { action: "publish to", subject } => {
            chart.unseen("jetstream", &format!("subject {subject}"), "the stream may not be looked at", None);
        }
        StreamFault::Denied { subject, .. } => {
            let why = "the relay's user receives no answers, so that nothing is ever acknowledged";
            let finding = Finding::error(format!("subject {subject}"), "it may not be subscribed to", why);
            chart.check("nats-inbox", [finding.step(format!("add {subject} to what the user may subscribe to"))]);
        }
        StreamFault::Waiting { failure, .. } => {
            let finding = Finding::error("JetStream", failure.to_string(), "without it nothing is delivered");
            chart.check("jetstream", [finding.step(failure.hint())]);
        }
        StreamFault::Missing(_) | StreamFault::Unfit { .. } => {
            let finding = Finding::error("stream", fault.to_string(), "without it nothing is delivered");
            chart.check("jetstream", [finding]);
        }
    }
}

/// A subject that a filter matches.
fn sample(filter: &str) -> String {
    let tokens = filter.split('.').map(|token| if matches!(token, "*" | ">") { "doctor" } else { token });
    tokens.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let of = |version: &str| Server {
            name: "n".to_owned(),
            version: version.to_owned(),
            max_payload: 0,
            clustered: false,
        };
        for fine in ["2.10.0", "2.15.1-RC.1", "3.0.0"] {
            assert!(old(&of(fine)).is_none(), "{fine}");
        }
        assert!(old(&of("2.9.25")).is_some());
    }

    #[test]
    fn a_sample_is_one_of_the_filters_subjects() {
        assert_eq!(sample("outbox.*.>"), "outbox.doctor.doctor");
        assert!(crate::flow::subject::covers("outbox.*.>", &sample("outbox.*.>")));
    }
}
