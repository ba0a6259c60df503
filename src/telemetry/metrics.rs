//! The metrics: their names, which others rely on, and the handles that the stages feed.
//!
//! Units are base units: seconds, bytes, events. No label's value comes from a row. What is not known is absent: a
//! lost slot must not read as a lag of 0.

mod kinds;
mod live;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text;
pub use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry};

pub use kinds::{Counters, Histogram, Known};
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

/// What became of a publish; labels of `publishes_total`.
pub mod outcome {
    pub const STORED: &str = "stored";
    /// The stream had it already.
    pub const DUPLICATE: &str = "duplicate";
    /// Not the event's fault: sent again.
    pub const TRANSIENT: &str = "transient";
    /// The event's own fault.
    pub const POISON: &str = "poison";
    pub(super) const ALL: [&str; 4] = [STORED, DUPLICATE, TRANSIENT, POISON];
}

/// What rows were marked as; labels of `writeback_rows_total`.
pub mod status {
    pub const COMPLETED: &str = "completed";
    pub const DELETED: &str = "deleted";
    pub const FAILED: &str = "failed";
    pub const HELD: &str = "held";
    pub const DEAD_LETTER: &str = "dead_letter";
    pub(super) const ALL: [&str; 5] = [COMPLETED, DELETED, FAILED, HELD, DEAD_LETTER];
}

/// What became of attempts at compensations; labels of `compensations_total`.
pub mod compensation {
    pub const RESOLVED: &str = "resolved";
    /// Counted; another attempt follows.
    pub const FAILED: &str = "failed";
    /// Not counted: NATS was away, or the relay stopped.
    pub const RETURNED: &str = "returned";
    /// The attempts are used up.
    pub const MANUAL_REQUIRED: &str = "manual_required";
    pub(super) const ALL: [&str; 4] = [RESOLVED, FAILED, RETURNED, MANUAL_REQUIRED];
}

/// Servers; labels of `reconnects_total`.
pub mod peer {
    pub const POSTGRES: &str = "postgres";
    pub const NATS: &str = "nats";
    pub(super) const ALL: [&str; 2] = [POSTGRES, NATS];
}

/// `pg_replication_slots.wal_status`; anything else counts as `unknown`.
const WAL_STATUS: [&str; 5] = ["reserved", "extended", "unreserved", "lost", "unknown"];

/// Where a waiting row stands; labels of `outbox_rows`.
pub mod waiting {
    /// Waits for its turn, or for the time that its producer set.
    pub const PENDING: &str = "pending";
    /// Waits for a retry.
    pub const FAILED: &str = "failed";
    /// Waits behind a failed row of its aggregate.
    pub const HELD: &str = "held";
    pub(super) const ALL: [&str; 3] = [PENDING, FAILED, HELD];
}

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
            decoded: add(r, "events_decoded", "Events read from the write-ahead log", Counter::default()),
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
            slot_wal_status: add(
                r,
                "slot_wal_status",
                "Whether the server still keeps the WAL that the slot needs: 1 for the status that holds",
                Family::default(),
            ),
            reconnects: family(r, "reconnects", "Connections that were made again", "peer", &peer::ALL),
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

    /// Forgets what only a look at the database tells: when it cannot be asked, old values would look like good news. Only a slot that
    /// is lost stays lost, until another one is seen in its place.
    pub fn forget_slot(&self) {
        for known in [&self.slot_active, &self.slot_confirmed_lag, &self.slot_retained_wal, &self.slot_safe_wal] {
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
mod tests {
    use super::*;

    fn lines(metrics: &Metrics, start: &str) -> Vec<String> {
        let start = format!("outbox_relay_{start}");
        metrics.render().unwrap().lines().filter(|line| line.starts_with(&start)).map(str::to_owned).collect()
    }

    #[test]
    fn names_are_those_of_the_contract() {
        let metrics = Metrics::new();
        metrics.slot_active.set(1.0);
        for known in [&metrics.oldest_unconfirmed, &metrics.slot_safe_wal, &metrics.slot_retained_wal] {
            known.set(1.0);
        }
        metrics.reconcile_last_success.set(1.0);
        metrics.slot_confirmed_lag.set_bytes(1);
        metrics.set_slot_wal_status(Some("reserved"));
        metrics.dead_letters.of("too_large").inc();
        metrics.set_outbox_rows(waiting::HELD, 7);
        let page = metrics.render().unwrap();
        for sample in [
            "commit_to_ack_seconds_bucket{le=\"0.0005\"} 0",
            "events_decoded_total 0",
            "publishes_total{outcome=\"stored\"} 0",
            "publish_duration_seconds_count 0",
            "publishes_in_flight 0",
            "oldest_unconfirmed_seconds 1.0",
            "writeback_rows_total{status=\"completed\"} 0",
            "writeback_duration_seconds_sum 0.0",
            "retries_total 0",
            "dead_letters_total{reason=\"too_large\"} 1",
            "compensations_total{outcome=\"manual_required\"} 0",
            "reconcile_last_success_timestamp_seconds 1.0",
            "events_without_row_total 0",
            "row_headers_dropped_total 0",
            "leader 0",
            "ready 0",
            "slot_active 1.0",
            "slot_confirmed_lag_bytes 1.0",
            "slot_retained_wal_bytes 1.0",
            "slot_safe_wal_bytes 1.0",
            "slot_wal_status{status=\"reserved\"} 1.0",
            "reconnects_total{peer=\"nats\"} 0",
            "outbox_rows{status=\"held\"} 7.0",
            concat!("build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
        ] {
            assert!(page.lines().any(|line| line == format!("outbox_relay_{sample}")), "{sample} in {page}");
        }
        assert!(page.contains("\noutbox_relay_start_timestamp_seconds 1"), "{page}");
        assert!(page.ends_with("# EOF\n"));
        assert_eq!(page.matches("# TYPE").count(), 25);
    }

    #[test]
    fn what_is_not_known_is_absent_and_never_0() {
        let metrics = Metrics::new();
        let slot = || lines(&metrics, "slot_");
        assert_eq!(slot(), [""; 0]);
        metrics.slot_confirmed_lag.set_bytes(5 << 20);
        metrics.set_slot_wal_status(Some("lost"));
        assert!(slot().contains(&"outbox_relay_slot_confirmed_lag_bytes 5242880.0".to_owned()));
        assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"lost\"} 1.0".to_owned()));
        metrics.set_slot_wal_status(Some("new in 21"));
        assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"unknown\"} 1.0".to_owned()));
        assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"lost\"} 0.0".to_owned()));
        metrics.forget_slot();
        assert_eq!(slot(), [""; 0]);
    }

    #[test]
    fn a_lost_slot_stays_lost_until_another_is_seen() {
        let metrics = Metrics::new();
        metrics.slot_confirmed_lag.set_bytes(0);
        metrics.set_slot_wal_status(Some("lost"));
        metrics.forget_slot();
        assert_eq!((metrics.slot_wal_status(), metrics.slot_confirmed_lag.get()), (Some("lost"), None));
        metrics.set_slot_wal_status(None);
        assert_eq!(metrics.slot_wal_status(), None);
    }

    #[test]
    fn handles_and_clones_feed_the_same_metric() {
        let metrics = Metrics::new();
        let stored = metrics.clone().publishes.of(outcome::STORED);
        stored.inc();
        metrics.publishes.of(outcome::STORED).inc();
        metrics.commit_to_ack.observe(0.000_25);
        assert!(
            lines(&metrics, "publishes_total").contains(&r#"outbox_relay_publishes_total{outcome="stored"} 2"#.into())
        );
        let bucket = |le: &str, count: u32| format!("outbox_relay_commit_to_ack_seconds_bucket{{le=\"{le}\"}} {count}");
        let buckets = lines(&metrics, "commit_to_ack_seconds_bucket");
        assert!(buckets.contains(&bucket("0.0002", 0)) && buckets.contains(&bucket("0.0003", 1)), "{buckets:?}");
    }
}
