//! The tree of settings without any source.

use std::time::Duration;

use super::keys::KEYS;
use super::value::Raw;
use super::{
    Admin, Compensation, DeadLetter, Delivery, Log, LogFormat, Manage, Nats, NatsCreate, OnSuccess, Ordering, Postgres,
    Reconcile, Retry, Route, Secret, Settings, Shutdown, Source, Storage, TableName, Writeback,
};

impl Default for Settings {
    /// The defaults of [`KEYS`].
    fn default() -> Self {
        let mut settings = blank();
        for key in KEYS {
            if let Some(default) = key.default {
                // A unit test reads every default.
                let _ = (key.set)(&mut settings, &Raw::Text(default.to_owned()));
            }
        }
        settings
    }
}

/// A tree to write values into.
pub(super) fn blank() -> Settings {
    let text = String::new;
    Settings {
        postgres: Postgres { url: Secret(text()), replication_url: None, password: None },
        source: Source {
            table: TableName { schema: text(), table: text() },
            slot: text(),
            publication: text(),
            create: false,
            failover: false,
            max_retained_wal: 0,
        },
        nats: Nats {
            url: Vec::new(),
            stream: text(),
            manage: Manage::Create,
            create: NatsCreate {
                subjects: Vec::new(),
                replicas: 0,
                storage: Storage::File,
                duplicate_window: Duration::ZERO,
                max_age: None,
                max_bytes: None,
            },
            credentials_file: None,
            nkey_file: None,
            user: None,
            password: None,
            token: None,
            tls_ca: None,
            tls_cert: None,
            tls_key: None,
            tls_first: false,
            domain: None,
        },
        route: Route { subject: text(), cloudevents: false, source: text() },
        delivery: Delivery {
            ordering: Ordering::Aggregate,
            max_in_flight: 0,
            max_in_flight_bytes: 0,
            ack_timeout: Duration::ZERO,
            max_blocked_rows: 0,
        },
        retry: Retry { initial: Duration::ZERO, max: Duration::ZERO },
        writeback: Writeback { on_success: OnSuccess::Complete },
        reconcile: Reconcile { interval: Duration::ZERO, sweep_interval: Duration::ZERO, retention: None },
        dead_letter: DeadLetter { announce: false },
        compensation: Compensation { enabled: false, subject: text(), timeout: Duration::ZERO },
        admin: Admin { listen: None },
        log: Log { format: LogFormat::Text, level: text() },
        shutdown: Shutdown { grace: Duration::ZERO },
    }
}
