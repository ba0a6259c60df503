//! What the relay is to reach, against what this run shows.

use std::fmt::Write as _;

use crate::report::{Report, number};
use crate::scale::KEPT;

/// The sign says on which side of the limit the figure must be.
enum Limit {
    Least(f64),
    Most(f64),
}

/// Each bar: the case, the figure, the limit.
const BARS: [(&str, &str, Limit); 8] = [
    ("drain/tcp/complete", "times pg_recvlogical", Limit::Least(0.75)),
    ("drain/tcp/delete", "times pg_recvlogical", Limit::Least(1.10)),
    ("drain/socket/complete", "times pg_recvlogical", Limit::Least(1.00)),
    ("drain/socket/delete", "times pg_recvlogical", Limit::Least(1.60)),
    ("latency/500", "p50, ms", Limit::Most(0.20)),
    ("latency/500", "p99, ms", Limit::Most(0.60)),
    ("drain/tcp/complete", "relay CPU, us/event", Limit::Most(6.0)),
    (KEPT, "times an empty table", Limit::Least(0.9)),
];

/// Peak resident memory, in MiB: of every case that bounds it, and of held rows.
const MEMORY: [(&str, f64); 4] =
    [("drain/", 64.0), ("latency/", 64.0), ("memory/bounded/", 64.0), ("memory/held rows", 128.0)];

pub fn table(report: &Report) -> String {
    let mut table = String::from("| bar | wanted | seen | met |\n|---|---:|---:|---|\n");
    let mut line = |case: &str, what: &str, limit: &Limit, seen: Option<f64>| {
        let Some(seen) = seen else { return };
        let (sign, limit, met) = match *limit {
            Limit::Least(limit) => ("≥", limit, seen >= limit),
            Limit::Most(limit) => ("≤", limit, seen <= limit),
        };
        let _ = writeln!(
            table,
            "| {case}: {what} | {sign} {} | {} | {} |",
            number(limit),
            number(seen),
            if met { "yes" } else { "NO" }
        );
    };
    for (case, what, limit) in &BARS {
        line(case, what, limit, report.median(case, what));
    }
    for (prefix, limit) in MEMORY {
        line(prefix, "peak resident, MiB", &Limit::Most(limit), report.largest(prefix, "peak resident, MiB"));
    }
    table
}
