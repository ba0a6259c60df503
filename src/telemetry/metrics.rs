//! The metrics: their names, which others rely on, and the handles that the stages feed.
//!
//! Units are base units: seconds, bytes, events. No label's value comes from a row. What is not known is absent: a
//! lost slot must not read as a lag of 0.

mod kinds;
mod labels;
mod live;
mod slot;

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
pub use slot::Slot;

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

/// The one label of a metric, with its value. The type keeps row data out: it does not live as long as the program.
type Label = [(&'static str, &'static str); 1];

/// All metrics. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    /// Seconds from an event's commit to its acknowledgement.
    pub commit_to_ack: Histogram,
    /// Rows taken in from the log, or from the table before it.
    pub decoded: Counter,
    /// By [`outcome`].
    pub publishes: Counters,
    /// Seconds from a publish to its outcome.
    pub publish_duration: Histogram,
    /// Publishes that wait for an outcome.
    pub in_flight: Gauge,
    /// Seconds since the oldest event came whose outcome is not in the table.
    pub oldest_unconfirmed: Known,
    /// By [`status`].
    pub writeback_rows: Counters,
    /// Seconds that a batch of rows takes to be written back.
    pub writeback_duration: Histogram,
    /// Failed rows that were sent again.
    pub retries: Counter,
    /// By reason.
    pub dead_letters: Counters,
    /// By [`compensation`].
    pub compensations: Counters,
    /// When the reconciler last finished a pass, in seconds since the Unix epoch.
    pub reconcile_last_success: Known,
    /// Events whose row was deleted before it could be written back.
    pub events_without_row: Counter,
    /// Headers of rows that were left out.
    pub row_headers_dropped: Counter,
    /// 1 while this relay holds the slot, otherwise 0.
    pub leader: Gauge,
    /// What `/readyz` answers: set when the metrics are asked for.
    pub ready: Gauge,
    /// What the server tells of the slot.
    pub slot: Slot,
    /// By [`peer`].
    pub reconnects: Counters,
    outbox_rows: Family<Label, Known>,
    /// What `/status` tells, and the page of metrics does not.
    pub live: Live,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Metrics that have counted nothing yet.
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix(PREFIX);
        let metrics = Self::registered(&mut registry);
        tell_of_process(&mut registry);
        Self { registry: Arc::new(registry), ..metrics }
    }

    /// All but the registry itself.
    fn registered(r: &mut Registry) -> Self {
        Self {
            commit_to_ack: add(
                r,
                "commit_to_ack_seconds",
                "Time from a row's commit to its acknowledgement by JetStream",
                Histogram::new(&DELIVERY_SECONDS),
            ),
            decoded: counter(r, "events_decoded", "Events read from the write-ahead log, or from the table in a drain"),
            publishes: family(r, "publishes", "Publishes that have an outcome", "outcome", &outcome::ALL),
            publish_duration: request(r, "publish_duration_seconds", "Time from a publish to its outcome"),
            in_flight: gauge(r, "publishes_in_flight", "Publishes that wait for an outcome"),
            oldest_unconfirmed: known(
                r,
                "oldest_unconfirmed_seconds",
                "Age of the oldest event whose outcome is not in the table",
            ),
            writeback_rows: family(r, "writeback_rows", "Rows that were written back", "status", &status::ALL),
            writeback_duration: request(
                r,
                "writeback_duration_seconds",
                "Time that a batch of rows takes to be written back",
            ),
            retries: counter(r, "retries", "Failed rows that were sent again"),
            dead_letters: family(r, "dead_letters", "Rows that became dead letters", "reason", &[]),
            compensations: family(
                r,
                "compensations",
                "Attempts at compensations that have an outcome",
                "outcome",
                &compensation::ALL,
            ),
            reconcile_last_success: known(
                r,
                "reconcile_last_success_timestamp_seconds",
                "When the reconciler last finished a pass",
            ),
            events_without_row: counter(
                r,
                "events_without_row",
                "Events whose row was deleted before it could be written back",
            ),
            row_headers_dropped: counter(
                r,
                "row_headers_dropped",
                "Headers of rows that were left out because they are reserved or not legal",
            ),
            leader: gauge(r, "leader", "Whether this relay holds the slot"),
            ready: gauge(r, "ready", "Whether rows flow, or this relay stands by"),
            slot: Slot::new(r),
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
        }
    }

    /// Says how many rows wait, by [`waiting`].
    pub fn set_outbox_rows(&self, status: &'static str, rows: u64) {
        self.outbox_rows.get_or_create_owned(&[("status", status)]).set_count(rows);
    }

    /// What [`Self::set_outbox_rows`] was told last.
    pub fn outbox_rows(&self, status: &'static str) -> Option<u64> {
        self.outbox_rows.get_or_create_owned(&[("status", status)]).count()
    }

    /// Forgets what only a look at the database tells: when it cannot be asked, old values would look like good news.
    pub fn forget_slot(&self) {
        self.slot.forget();
        self.live.forget();
        for status in waiting::ALL {
            self.outbox_rows.get_or_create_owned(&[("status", status)]).unset();
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

/// What does not change while the process runs.
fn tell_of_process(registry: &mut Registry) {
    let build: Family<Label, Gauge> = add(registry, "build_info", "The running version", Family::default());
    build.get_or_create(&[("version", env!("CARGO_PKG_VERSION"))]).set(1);
    let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    known(registry, "start_timestamp_seconds", "When this process started").set(start);
}

/// Registers a metric. The prefix is put before its name; `_total` after a counter's.
fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(name, help, metric.clone());
    metric
}

fn counter(registry: &mut Registry, name: &str, help: &str) -> Counter {
    add(registry, name, help, Counter::default())
}

fn gauge(registry: &mut Registry, name: &str, help: &str) -> Gauge {
    add(registry, name, help, Gauge::default())
}

fn known(registry: &mut Registry, name: &str, help: &str) -> Known {
    add(registry, name, help, Known::default())
}

fn request(registry: &mut Registry, name: &str, help: &str) -> Histogram {
    add(registry, name, help, Histogram::new(&REQUEST_SECONDS))
}

fn family(registry: &mut Registry, name: &str, help: &str, label: &'static str, known: &[&'static str]) -> Counters {
    add(registry, name, help, Counters::new(label, known))
}

#[cfg(test)]
mod tests;
