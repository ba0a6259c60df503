//! How the relay is watched: the log, the metrics, and its health.

pub mod faults;
pub mod health;
pub mod metrics;
pub mod status;
pub mod systemd;

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat};

/// Client libraries that log each of their steps, and from which level on they are heard unless the filter names them.
/// What async-nats calls an error is a step of ours: each of its clients serves one connection.
const CHATTY: [(&str, &str); 2] = [("async_nats", "=off"), ("tokio_postgres", "=warn")];

/// Starts the log on stderr. A second call changes nothing.
pub fn init(log: &Log) {
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    // A log that nobody reads any more is no reason to end: told of it on stderr, the relay would panic.
    let base = tracing_subscriber::fmt()
        .with_env_filter(filter(&log.level))
        .with_writer(io::stderr)
        .log_internal_errors(false);
    let _ = match log.format {
        LogFormat::Text => base.with_ansi(colours).try_init(),
        LogFormat::Json => base.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init(),
    };
}

/// The filter for a level or a filter that `config` found legal.
fn filter(level: &str) -> EnvFilter {
    let quieter = ["off", "error", "warn"].iter().any(|quiet| level.trim().eq_ignore_ascii_case(quiet));
    let mut directives = level.to_owned();
    for (target, heard) in CHATTY.iter().filter(|(target, _)| !quieter && !level.contains(*target)) {
        directives.extend([",", target, heard]);
    }
    EnvFilter::new(directives)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chatty_libraries_are_quiet_unless_named() {
        for (level, expected) in [
            ("info", "tokio_postgres=warn,async_nats=off,info"),
            ("error", "error"),
            ("info,async_nats=debug", "tokio_postgres=warn,async_nats=debug,info"),
        ] {
            assert_eq!(filter(level).to_string(), expected);
        }
    }
}
