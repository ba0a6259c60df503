//! The table of keys. The file, the environment, the flags, the help texts and `config show` are made from it.

use std::time::Duration;

use super::check::{filter, nats_url, printable, publication, readable, slot_name, subjects, token};
use super::value::{Raw, Setting, Shown, within};
use super::{Settings, mask};
use crate::flow::route::stream_name;

/// One key of the settings.
pub struct Key {
    /// As sections and key of the file, joined by dots: `nats.create.subjects`.
    pub name: &'static str,
    /// As a variable would spell it; `None`: not set.
    pub default: Option<&'static str>,
    /// What a value is called in the help.
    pub kind: &'static str,
    /// Never printed, and may come from a file that `<name>_file` names.
    pub secret: bool,
    pub help: &'static str,
    pub(super) set: fn(&mut Settings, &Raw) -> Result<(), String>,
    pub(super) get: fn(&Settings) -> Shown,
}

/// `key!(section.key = default, "help", check, show)`: `check` sees the value read, `show` says how it is shown.
macro_rules! key {
    ($first:ident $(. $rest:ident)+ = $default:expr, $help:literal) => {
        key!($first $(. $rest)+ = $default, $help, |_| Ok(()))
    };
    ($first:ident $(. $rest:ident)+ = $default:expr, $help:literal, $check:expr) => {
        key!($first $(. $rest)+ = $default, $help, $check, Setting::shown)
    };
    ($first:ident $(. $rest:ident)+ = $default:expr, $help:literal, $check:expr, $show:expr) => {
        Key {
            name: concat!(stringify!($first) $(, ".", stringify!($rest))+),
            default: $default,
            kind: kind(|settings| &settings.$first $(. $rest)+),
            secret: secret(|settings| &settings.$first $(. $rest)+),
            help: $help,
            set: |settings, raw| {
                let place = &mut settings.$first $(. $rest)+;
                read(place, raw, $check)
            },
            get: |settings| show(&settings.$first $(. $rest)+, $show),
        }
    };
}

const fn kind<T: Setting>(_: fn(&Settings) -> &T) -> &'static str {
    T::KIND
}

const fn secret<T: Setting>(_: fn(&Settings) -> &T) -> bool {
    T::SECRET
}

fn read<T: Setting>(place: &mut T, raw: &Raw, check: impl Fn(&T) -> Result<(), String>) -> Result<(), String> {
    let value = T::read(raw)?;
    check(&value)?;
    *place = value;
    Ok(())
}

fn show<T: Setting>(value: &T, shown: impl Fn(&T) -> Shown) -> Shown {
    shown(value)
}

fn within_some<T: Setting + PartialOrd + Copy>(value: Option<T>, least: T, most: T) -> Result<(), String> {
    value.map_or(Ok(()), |value| within(&value, least, most))
}

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);
/// Ages of rows and messages; a century, which every server's clock can hold.
const LONGEST: Duration = Duration::from_hours(24 * 36_500);
const MIB: u64 = 1 << 20;
/// PostgreSQL and NATS count bytes in a signed 64-bit number.
const MOST_BYTES: u64 = i64::MAX.unsigned_abs();

/// All keys, in the order of the file.
pub const KEYS: &[Key] = &[
    key!(
        postgres.url = Some("postgres://localhost:5432/postgres"),
        "The database: URL or key=value, as libpq",
        |_| Ok(()),
        |url| Shown::Text(mask::postgres(&url.0))
    ),
    key!(
        postgres.replication_url = None,
        "The database itself, for every connection of a running relay, when postgres.url goes through a pooler",
        |_| Ok(()),
        |url| url.as_ref().map_or(Shown::Unset, |url| Shown::Text(mask::postgres(&url.0)))
    ),
    key!(postgres.password = None, "The role's password; wins over one in the URL"),
    key!(source.table = Some("public.outbox_events"), "The outbox table, as SQL spells it"),
    key!(source.slot = Some("outbox_relay"), "The replication slot", |slot| slot_name(slot)),
    key!(source.publication = Some("outbox_relay"), "The publication", |name| publication(name)),
    key!(source.create = Some("true"), "Create the publication and the slot when missing"),
    key!(source.failover = Some("true"), "PostgreSQL 17 and later: a slot that survives failover"),
    key!(
        source.max_retained_wal = Some("1GiB"),
        "Past this much WAL behind the slot, while events cannot be delivered or recorded, rows wait in the table instead",
        |size| within(size, MIB, MOST_BYTES)
    ),
    key!(
        nats.url = Some("nats://localhost:4222"),
        "The servers, separated by commas",
        |urls| urls.iter().try_for_each(|url| nats_url(url)),
        |urls| Shown::List(urls.iter().map(|url| mask::nats(url)).collect())
    ),
    key!(nats.stream = Some("OUTBOX"), "The stream that this relay feeds", |name| stream_name(name)),
    key!(nats.manage = Some("create"), "Create the stream when missing and verify it, or only verify it"),
    key!(nats.credentials_file = None, "A credentials file (JWT and seed)", readable),
    key!(nats.nkey_file = None, "A file with an NKey seed", readable),
    key!(nats.user = None, "The user; wants a password", |user| user.as_deref().map_or(Ok(()), printable)),
    key!(nats.password = None, "The user's password"),
    key!(nats.token = None, "An authentication token"),
    key!(nats.tls_ca = None, "A file of certificate authorities, instead of the system's", readable),
    key!(nats.tls_cert = None, "The client's certificate", readable),
    key!(nats.tls_key = None, "The client certificate's private key", readable),
    key!(nats.tls_first = Some("false"), "TLS before the server's greeting"),
    key!(nats.domain = None, "The JetStream domain", |domain| domain.as_deref().map_or(Ok(()), token)),
    key!(nats.create.subjects = Some("outbox.>"), "The subjects of a stream that the relay creates", |list| subjects(
        list
    )),
    key!(nats.create.replicas = Some("1"), "Its replicas", |count| within(count, 1, 5)),
    key!(nats.create.storage = Some("file"), "Its storage"),
    key!(nats.create.duplicate_window = Some("2m"), "For how long it knows a message's id", |window| within(
        window,
        100 * MS,
        LONGEST
    )),
    key!(nats.create.max_age = Some("never"), "How old its messages grow", |age| within_some(*age, 100 * MS, LONGEST)),
    key!(nats.create.max_bytes = Some("unlimited"), "How large it grows", |size| within_some(*size, MIB, MOST_BYTES)),
    key!(
        route.subject = Some("outbox.{aggregate_type}.{event_type}"),
        "The template of subjects; variables: tenant_id, aggregate_type, aggregate_id, event_type, header.NAME"
    ),
    key!(route.cloudevents = Some("true"), "Add the headers of CloudEvents"),
    key!(route.source = Some("/outbox-relay"), "The header ce-source", |source| printable(source)),
    key!(
        delivery.ordering = Some("aggregate"),
        "One event of an aggregate at a time, in order; or none, for throughput"
    ),
    key!(delivery.max_in_flight = Some("4096"), "Most events without an answer", |count| within(count, 1, 1_000_000)),
    key!(delivery.max_in_flight_bytes = Some("64MiB"), "Most bytes of events without an answer", |size| within(
        size, MIB, MOST_BYTES
    )),
    key!(delivery.ack_timeout = Some("5s"), "How long an answer is waited for", |time| within(
        time,
        10 * MS,
        10 * MINUTE
    )),
    key!(delivery.max_blocked_rows = Some("100000"), "Most rows held behind failed ones before all waits", |count| {
        within(count, 1, 1_000_000_000)
    }),
    key!(
        retry.initial = Some("2s"),
        "A row's first wait after a failure, which then doubles; shortened by up to a half",
        |time| within(time, MS, DAY)
    ),
    key!(retry.max = Some("1m"), "A row's longest wait after a failure", |time| within(time, MS, 365 * DAY)),
    key!(writeback.on_success = Some("complete"), "What becomes of a row that JetStream has"),
    key!(reconcile.interval = Some("1s"), "How often due rows are looked for", |time| within(time, 10 * MS, HOUR)),
    key!(reconcile.sweep_interval = Some("30s"), "How often missed rows are looked for", |time| within(
        time,
        100 * MS,
        DAY
    )),
    key!(reconcile.retention = Some("never"), "Completed rows older than this are deleted", |time| within_some(
        *time, SECOND, LONGEST
    )),
    key!(dead_letter.announce = Some("false"), "Announce dead letters on outbox-dead-letter.>"),
    key!(compensation.enabled = Some("true"), "Send compensations"),
    key!(compensation.subject = Some("outbox-compensate.{operation_type}"), "The template of their subjects"),
    key!(compensation.timeout = Some("10s"), "How long their answer is waited for", |time| within(
        time,
        10 * MS,
        10 * MINUTE
    )),
    key!(admin.listen = Some("127.0.0.1:9464"), "Where probes and metrics are served"),
    key!(log.format = Some("text"), "The form of the log"),
    key!(log.level = Some("info"), "A level, or a filter such as info,outbox_relay=debug", |level| filter(level)),
    key!(shutdown.grace = Some("20s"), "How long the end may take", |time| within(time, Duration::ZERO, HOUR)),
];

/// A name that a value can be given under: a key's own, or for a secret also `<name>_file`.
#[derive(Clone, Copy)]
pub struct Name {
    pub key: &'static Key,
    /// The value is the path of a file that holds the secret.
    pub file: bool,
}

/// All names, in the order of the file.
pub fn names() -> impl Iterator<Item = Name> {
    KEYS.iter().flat_map(|key| {
        let file = key.secret.then_some(Name { key, file: true });
        std::iter::once(Name { key, file: false }).chain(file)
    })
}

impl Name {
    /// `nats.create.subjects`
    pub fn dotted(self) -> String {
        format!("{}{}", self.key.name, if self.file { "_file" } else { "" })
    }

    /// `OUTBOX_RELAY_NATS__CREATE__SUBJECTS`
    pub fn variable(self) -> String {
        format!("OUTBOX_RELAY_{}", self.dotted().replace('.', "__").to_ascii_uppercase())
    }

    /// `nats-create-subjects`: a flag without its dashes.
    pub fn flag(self) -> String {
        self.dotted().replace(['.', '_'], "-")
    }
}
