//! The stream.

use std::time::Duration;

use super::chart::{Chart, Finding};
use super::postgres::Database;
use crate::config::Settings;
use crate::nats::facts::Server;
use crate::nats::stream::{Examined, Finding as Oddity, Mend, SHORT_WINDOW, StreamFacts};

/// What the relay itself gives its sessions, where PostgreSQL could not be asked.
const SENDER_TIMEOUT: Duration = Duration::from_secs(30);
/// The window that is advised where nothing wants a longer one.
const GOOD_WINDOW: Duration = Duration::from_mins(2);

/// Codes of what makes a stream unfit, with the ids of their findings.
const UNFIT: [(&str, &str); 7] = [
    ("mirror", "stream-mirror"),
    ("sealed", "stream-sealed"),
    ("template", "stream-template"),
    ("counter", "stream-counter"),
    ("no_ack", "stream-no-ack"),
    ("persist_async", "stream-persist-async"),
    ("subjects", "stream-subjects"),
];

/// Codes of what the operator should know, with the ids of their findings; whether it is chosen on purpose by those who
/// have it; and how the stream is edited.
const ODD: [(&str, &str, bool, &str); 10] = [
    ("retention_workqueue", "stream-workqueue", true, ""),
    ("retention_interest", "stream-interest", true, "--retention limits"),
    ("max_age_short", "stream-max-age", true, "--max-age 7d"),
    ("discard_old", "stream-discard-old", true, "--discard new"),
    ("max_msgs_per_subject", "stream-msgs-per-subject", true, "--max-msgs-per-subject=-1"),
    ("discard_new_per_subject", "stream-subject-full", false, "--no-discard-per-subject"),
    ("nearly_full", "stream-nearly-full", false, ""),
    ("storage_memory", "stream-memory", false, ""),
    ("replicas_few", "stream-replicas", false, "--replicas 3"),
    ("subject_transform", "stream-transform", true, ""),
];

/// Looks at the stream by itself.
pub fn judge(examined: &Examined, server: &Server, settings: &Settings, chart: &mut Chart) {
    let name = &examined.facts.name;
    let object = || format!("stream {name}");
    chart.check("stream-missing", None);
    for (code, id) in UNFIT {
        let unfit = examined.unfit.as_ref().filter(|unfit| unfit.code == code);
        let found = unfit.map(|unfit| {
            let finding = Finding::error(object(), &*unfit.problem, "the relay refuses to start with it");
            match &unfit.mend {
                Mend::Command(command) => finding.command(command),
                Mend::Advice(advice) => finding.step(advice),
            }
        });
        chart.check(id, found);
    }
    for (code, id, on_purpose, edit) in ODD {
        let found = examined.findings.iter().find(|found| found.code == code);
        chart.check(id, found.map(|odd| oddity(odd, object(), on_purpose, edit, name)));
    }
    chart.check(
        "stream-leader",
        (!examined.facts.has_leader).then(|| {
            let finding = Finding::error(object(), "it has no leader", "it stores nothing until one is elected");
            finding.step("see that a majority of its replicas runs")
        }),
    );
    chart.check("stream-message-size", small_messages(&examined.facts, server, object()));
    chart.check("stream-window-setting", window_setting(&examined.facts, settings));
    chart.check("stream-replicas-setting", replicas_setting(Some(&examined.facts), server, settings));
}

fn oddity(odd: &Oddity, object: String, on_purpose: bool, edit: &str, name: &str) -> Finding {
    let (problem, why) = match odd.text.split_once(": ") {
        Some((problem, why)) => (problem.to_owned(), why.to_owned()),
        None => (odd.text.clone(), "events can be lost to their consumers, or stored twice".to_owned()),
    };
    let finding = if on_purpose { Finding::note(object, problem, why) } else { Finding::warning(object, problem, why) };
    match (odd.code, edit) {
        ("storage_memory", _) => finding.step("make a stream with file storage, and set nats.stream to it"),
        ("nearly_full", _) => finding
            .step(format!("raise max_bytes or max_msgs of stream {name}, set max_age, or purge what was consumed")),
        (_, "") => finding,
        (_, edit) => finding.command(format!("nats stream edit {name} {edit} --force")),
    }
}

fn small_messages(facts: &StreamFacts, server: &Server, object: String) -> Option<Finding> {
    let most = facts.max_msg_size.filter(|most| *most < server.max_payload)?;
    let problem = format!("it takes messages of {most} bytes at most, the server {} bytes", server.max_payload);
    Some(
        Finding::note(object, problem, "larger events become dead letters")
            .command(format!("nats stream edit {} --max-msg-size=-1 --force", facts.name)),
    )
}

/// What `nats.create` says holds for a stream that the relay makes; this one may have been made otherwise.
fn window_setting(facts: &StreamFacts, settings: &Settings) -> Option<Finding> {
    let wanted = settings.nats.create.duplicate_window;
    (facts.duplicate_window < wanted && facts.max_age.is_none_or(|age| age >= wanted)).then(|| {
        let problem = format!(
            "its duplicate window is {}, nats.create.duplicate_window {}",
            humantime::format_duration(facts.duplicate_window),
            humantime::format_duration(wanted)
        );
        let why = "what nats.create says holds only for a stream that the relay makes";
        Finding::note(format!("stream {}", facts.name), problem, why).command("outbox-relay stream apply --yes")
    })
}

/// Replicas are on as many servers. `facts`: of the stream, if there is one.
pub fn replicas_setting(facts: Option<&StreamFacts>, server: &Server, settings: &Settings) -> Option<Finding> {
    const KEY: &str = "nats.create.replicas";
    let wanted = settings.nats.create.replicas;
    if server.clustered || wanted < 2 {
        return None;
    }
    let problem = format!("it is {wanted}, and nats-server {} belongs to no cluster", server.name);
    let finding = match facts {
        None => Finding::error(KEY, problem, "the stream cannot be made"),
        Some(facts) => {
            let why = format!("stream {} is on one server alone, and is gone with its disk", facts.name);
            Finding::warning(KEY, problem, why)
        }
    };
    Some(finding.setting(KEY, 1).step("or run a cluster of as many servers"))
}

/// Looks at the stream beside what PostgreSQL tells.
pub fn judge_both(examined: &Examined, database: &Database, settings: &Settings, chart: &mut Chart) {
    let facts = &examined.facts;
    chart.check("stream-window", short_window(facts, database.sender_timeout.unwrap_or(SENDER_TIMEOUT), settings));
    if let Some(state) = &database.state {
        let same =
            state.stream.as_deref() == Some(&*facts.name) && state.stream_created == Some(facts.created_as_noted());
        chart.check(
            "stream-lost",
            (same && facts.last_sequence < state.stream_seq).then(|| {
                let problem =
                    format!("it ends at message {}, and {} were acknowledged", facts.last_sequence, state.stream_seq);
                let why = "the server lost events after it had acknowledged them";
                Finding::error(format!("stream {}", facts.name), problem, why).command("outbox-relay verify --repair")
            }),
        );
        chart.check(
            "stream-changed",
            (state.stream.is_some() && !same).then(|| {
                let problem = "it is not the stream that the relay fed last: another name, or made anew";
                let why = "what was delivered before is not in it; the relay reads it from its start";
                Finding::note(format!("stream {}", facts.name), problem, why)
            }),
        );
    }
}

/// A successor takes over when PostgreSQL has let go of the dead relay, and sends again what was under way; a stream
/// that forgets its messages knows them by its window alone, also when a row is tried again.
fn short_window(facts: &StreamFacts, sender_timeout: Duration, settings: &Settings) -> Option<Finding> {
    let takeover = sender_timeout + settings.delivery.ack_timeout;
    let retry = if facts.remembers() { Duration::ZERO } else { settings.retry.max + settings.delivery.ack_timeout };
    let needed = takeover.max(retry).max(SHORT_WINDOW);
    let window = facts.duplicate_window;
    (window < needed).then(|| {
        let human = |duration| humantime::format_duration(duration);
        let why = format!(
            "{} pass until another relay takes over (wal_sender_timeout, delivery.ack_timeout){}; what is sent again later \
             is known only by a look into the stream",
            human(takeover),
            if retry > takeover { format!(", {} until a row is tried again", human(retry)) } else { String::new() }
        );
        let problem = format!("its duplicate window is {}, less than {}", human(window), human(needed));
        let good = human(needed.max(GOOD_WINDOW)).to_string().replace(' ', "");
        let age = facts.max_age.filter(|age| *age < needed.max(GOOD_WINDOW));
        let age = age.map(|_| format!(" --max-age {good}")).unwrap_or_default();
        Finding::warning(format!("stream {}", facts.name), problem, why)
            .command(format!("nats stream edit {} --dupe-window {good}{age} --force", facts.name))
    })
}
