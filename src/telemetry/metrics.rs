//! The metrics: their names, which others rely on, and the handles that the stages feed.
//!
//! Units are base units: seconds, bytes, events. No label's value comes from a row. What is not known is absent: a
//! lost slot must not read as a lag of 0.

mod kinds;
mod labels;
mod live;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text;
pub use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};

pub use kinds::{Counters, Histogram, Known};
pub use labels::{compensation, outcome, peer, status, waiting};
pub use live::Live;

/// The form of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const PREFIX: &str = "outbox_relay";

/// Of delivery: a fraction of a millisecond is the normal case, an hour an outage.
const DELIVERY_SECONDS: [f64; 21] = [
    0.000_1, 0.000_2, 0.000_3, 0.000_5, 0.000_75, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    5.0, 15.0, 60.0, 300.0, 3600.0,
];

/// Of one request to a server.
const REQUEST_SECONDS: [f64; 15] =
    [0.000_1, 0.000_2, 0.000_3, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];

/// `pg_replication_slots.wal_status`; anything else counts as `unknown`.
const WAL_STATUS: [&str; 5] = ["reserved", "extended", "unreserved", "lost", "unknown"];

/// The one label of a metric, with its value. The type keeps row data out: it does not live as long as the program.
type Label = [(&'static str, &'static str); 1];

/// All metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub commit_to_ack: Histogram,
    pub decoded: Counter,
    /// By [`outcome`].
    pub publishes: Counters,
    pub publish_duration: Histogram,
    pub in_flight: Gauge,
    pub oldest_unconfirmed: Known,
    /// By [`status`].
    pub writeback_rows: Counters,
    pub writeback_duration: Histogram,
    pub retries: Counter,
    /// By reason.
    pub dead_letters: Counters,
    /// By [`compensation`].
    pub compensations: Counters,
    /// When the reconciler last finished a pass, in seconds since the Unix epoch.
    pub reconcile_last_success: Known,
    pub events_without_row: Counter,
    pub row_headers_dropped: Counter,
    pub leader: Gauge,
    /// What `/readyz` answers: set when the metrics are asked for.
    pub ready: Gauge,
    pub slot_active: Known,
    pub slot_confirmed_lag: Known,
    pub slot_retained_wal: Known,
    /// How much more WAL may be written before the slot is lost; no value when unlimited.
    pub slot_safe_wal: Known,
    /// Standbys that may keep a copy of the slot; no value where none is wanted or possible.
    pub slot_failover_standbys: Known,
    /// Standbys that the slot waits for and that are not there; no value where it waits for none.
    pub slot_missing_standbys: Known,
    slot_wal_status: Family<Label, Known>,
    /// By [`peer`].
    pub reconnects: Counters,
    outbox_rows: Family<Label, Known>,
    pub live: Live,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let r = &mut registry;
        let metrics = Self {
            commit_to_ack: add(
                r,
                "commit_to_ack_seconds",
                "Time from a row's commit to its acknowledgement by JetStream",
                Histogram::new(&DELIVERY_SECONDS),
            ),
            decoded: add(
                r,
                "events_decoded",
                "Events read from the write-ahead log, or from the table in a drain",
                Counter::default(),
            ),
            publishes: family(r, "publishes", "Publishes that have an outcome", "outcome", &outcome::ALL),
            publish_duration: add(
                r,
                "publish_duration_seconds",
                "Time from a publish to its outcome",
                Histogram::new(&REQUEST_SECONDS),
            ),
            in_flight: add(r, "publishes_in_flight", "Publishes that wait for an outcome", Gauge::default()),
            oldest_unconfirmed: add(
                r,
                "oldest_unconfirmed_seconds",
                "Age of the oldest event whose outcome is not in the table",
                Known::default(),
            ),
            writeback_rows: family(r, "writeback_rows", "Rows that were written back", "status", &status::ALL),
            writeback_duration: add(
                r,
                "writeback_duration_seconds",
                "Time that a batch of rows takes to be written back",
                Histogram::new(&REQUEST_SECONDS),
            ),
            retries: add(r, "retries", "Failed rows that were sent again", Counter::default()),
            dead_letters: family(r, "dead_letters", "Rows that became dead letters", "reason", &[]),
            compensations: family(
                r,
                "compensations",
                "Attempts at compensations that have an outcome",
                "outcome",
                &compensation::ALL,
            ),
            reconcile_last_success: add(
                r,
                "reconcile_last_success_timestamp_seconds",
                "When the reconciler last finished a pass",
                Known::default(),
            ),
            events_without_row: add(
                r,
                "events_without_row",
                "Events whose row was deleted before it could be written back",
                Counter::default(),
            ),
            row_headers_dropped: add(
                r,
                "row_headers_dropped",
                "Headers of rows that were left out because they are reserved or not legal",
                Counter::default(),
            ),
            leader: add(r, "leader", "Whether this relay holds the slot", Gauge::default()),
            ready: add(r, "ready", "Whether rows flow, or this relay stands by", Gauge::default()),
            slot_active: add(r, "slot_active", "Whether the slot is in use", Known::default()),
            slot_confirmed_lag: add(
                r,
                "slot_confirmed_lag_bytes",
                "WAL written since the position that the slot has confirmed",
                Known::default(),
            ),
            slot_retained_wal: add(
                r,
                "slot_retained_wal_bytes",
                "WAL that the server keeps for the slot",
                Known::default(),
            ),
            slot_safe_wal: add(
                r,
                "slot_safe_wal_bytes",
                "WAL that can still be written before the slot may be lost; absent when unlimited",
                Known::default(),
            ),
            slot_failover_standbys: add(
                r,
                "slot_failover_standbys",
                "Standbys that may keep a copy of the slot: of 0 it is certain; absent without failover or standbys",
                Known::default(),
            ),
            slot_missing_standbys: add(
                r,
                "slot_missing_standbys",
                "Standbys of synchronized_standby_slots that are not there, so that the slot waits; absent when it names none",
                Known::default(),
            ),
            slot_wal_status: add(
                r,
                "slot_wal_status",
                "Whether the server still keeps the WAL that the slot needs: 1 for the status that holds",
                Family::default(),
            ),
            reconnects: family(
                r,
                "reconnects",
                "Connections that were lost, or tried or made again; of PostgreSQL also sessions that ended",
                "peer",
                &peer::ALL,
            ),
            outbox_rows: add(
                r,
                "outbox_rows",
                "Rows that wait, as the last sweep saw them; each status is counted up to 100000",
                Family::default(),
            ),
            live: Live::default(),
            registry: Arc::default(),
        };
        let build: Family<Label, Gauge> = add(r, "build_info", "The running version", Family::default());
        build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        add(r, "start_timestamp_seconds", "When this process started", Known::default()).set(start);
        Self { registry: Arc::new(registry), ..metrics }
    }

    /// Says which `wal_status` holds; `None` when it is not known, and then no status is reported.
    pub fn set_slot_wal_status(&self, current: Option<&str>) {
        let known = current.map(|current| WAL_STATUS.into_iter().find(|name| *name == current).unwrap_or("unknown"));
        for name in WAL_STATUS {
            let gauge = self.slot_wal_status.get_or_create_owned(&[("status", name)]);
            match known {
                Some(known) => gauge.set(if known == name { 1.0 } else { 0.0 }),
                None => gauge.unset(),
            }
        }
    }

    /// The `wal_status` that holds, as far as it is known.
    pub fn slot_wal_status(&self) -> Option<&'static str> {
        let holds =
            |name: &&'static str| self.slot_wal_status.get_or_create_owned(&[("status", *name)]).get() == Some(1.0);
        WAL_STATUS.into_iter().find(holds)
    }

    /// Says how many rows wait, by [`waiting`].
    pub fn set_outbox_rows(&self, status: &'static str, rows: u64) {
        self.outbox_rows.get_or_create_owned(&[("status", status)]).set_bytes(rows);
    }

    /// What [`Self::set_outbox_rows`] was told last.
    pub fn outbox_rows(&self, status: &'static str) -> Option<f64> {
        self.outbox_rows.get_or_create_owned(&[("status", status)]).get()
    }

    /// Forgets what only a look at the database tells: when it cannot be asked, old values would look like good news.
    /// Only a slot that is lost stays lost, until another one is seen in its place.
    pub fn forget_slot(&self) {
        for known in [
            &self.slot_active,
            &self.slot_confirmed_lag,
            &self.slot_retained_wal,
            &self.slot_safe_wal,
            &self.slot_failover_standbys,
            &self.slot_missing_standbys,
        ] {
            known.unset();
        }
        self.live.forget();
        for status in waiting::ALL {
            self.outbox_rows.get_or_create_owned(&[("status", status)]).unset();
        }
        if self.slot_wal_status() != Some("lost") {
            self.set_slot_wal_status(None);
        }
    }

    /// Nothing is delivered any more: what was under way has come to its end, or is forgotten.
    pub fn forget_delivery(&self) {
        self.in_flight.set(0);
        self.oldest_unconfirmed.unset();
    }

    /// All metrics in the form of [`CONTENT_TYPE`].
    pub fn render(&self) -> Result<String, std::fmt::Error> {
        let mut page = String::new();
        text::encode(&mut page, &self.registry)?;
        Ok(page)
    }
}

/// Registers a metric. The prefix is put before its name; `_total` after a counter's.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

fn family(registry: &mut Registry, name: &str, help: &str, label: &'static str, known: &[&'static str]) -> Counters {
    add(registry, name, help, Counters::new(label, known))
}

#[cfg(test)]
mod tests;
