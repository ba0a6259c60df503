//! How fast a backlog in the log is relayed, against `pg_recvlogical` that reads the same backlog just before.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::Plan;
use crate::backlog::{Backlog, read_by_reference, reference_slot};
use crate::process;
use crate::report::Report;
use crate::site::{Case, Over, PATIENCE, Site, settled};

pub struct Drain {
    pub name: &'static str,
    pub over: Over,
    pub on_success: &'static str,
    pub ordering: &'static str,
    pub backlog: Backlog,
    /// Run once, and only by name.
    pub long: bool,
}

pub const BASE: Drain = Drain {
    name: "",
    over: Over::Tcp,
    on_success: "complete",
    ordering: "aggregate",
    backlog: Backlog::single(200_000),
    long: false,
};

const CASES: [Drain; 9] = [
    Drain { name: "drain/tcp/complete", ..BASE },
    Drain { name: "drain/tcp/delete", on_success: "delete", ..BASE },
    Drain { name: "drain/socket/complete", over: Over::Socket, ..BASE },
    Drain { name: "drain/socket/delete", over: Over::Socket, on_success: "delete", ..BASE },
    Drain { name: "drain/tcp/complete/unordered", ordering: "none", ..BASE },
    Drain {
        name: "drain/tcp/complete/one hot aggregate",
        backlog: Backlog { aggregates: 1, ..Backlog::single(20_000) },
        ..BASE
    },
    Drain { name: "drain/tcp/complete/100 rows", backlog: Backlog { batch: 100, ..Backlog::single(200_000) }, ..BASE },
    Drain {
        name: "drain/tcp/delete/100 rows",
        on_success: "delete",
        backlog: Backlog { batch: 100, ..Backlog::single(200_000) },
        ..BASE
    },
    Drain {
        name: "drain/tcp/complete/1000000 rows",
        backlog: Backlog { batch: 1_000_000, ..Backlog::single(1_000_000) },
        long: true,
        ..BASE
    },
];

pub async fn run(plan: &Plan, site: &Site, report: &mut Report) {
    for run in 0..plan.runs {
        for drain in CASES.iter().filter(|drain| plan.wants(drain.name, false) && !(drain.long && run > 0)) {
            let rows = plan.sized(drain.backlog.rows);
            let backlog = Backlog { rows, batch: drain.backlog.batch.min(rows), ..drain.backlog };
            measure(&Drain { backlog, ..*drain }, site, report).await;
        }
    }
}

/// Measures one drain.
pub async fn measure(drain: &Drain, site: &Site, report: &mut Report) {
    let Drain { name, over, on_success, ordering, backlog, .. } = drain;
    let mut case = site.case(*over).await;
    case.set("writeback.on_success", on_success);
    case.set("delivery.ordering", ordering);
    case.make_slot().await;
    reference_slot(&case).await;
    backlog.insert(&case).await;
    let rows = backlog.rows as f64;
    let reference = rows / read_by_reference(&case).await.as_secs_f64();
    report.add(name, "pg_recvlogical, events/s", reference);
    let speed = through_the_relay(drain, &case, report).await;
    report.add(name, "times pg_recvlogical", speed / reference);
    case.end().await;
}

/// From the start of the relay's process until the outcome of the last row is committed. Events a second.
pub async fn through_the_relay(drain: &Drain, case: &Case<'_>, report: &mut Report) -> f64 {
    let (name, rows) = (drain.name, drain.backlog.rows as f64);
    let status = if drain.on_success == "delete" { "deleted" } else { "completed" };
    let wal = case.wal().await;
    let before = Servers::now(case);
    let began = Instant::now();
    let mut relay = case.settings.start();
    settled(&relay, status, drain.backlog.rows).await;
    let took = began.elapsed();
    let after = Servers::now(case);
    let speed = rows / took.as_secs_f64();
    report.add(name, "events/s", speed);
    for (what, share) in after.since(&before) {
        report.add(name, what, share.as_secs_f64() * 1e6 / rows);
    }
    report.add(name, "relay CPU, us/event", process::cpu(relay.pid()).as_secs_f64() * 1e6 / rows);
    report.add(name, "peak resident, MiB", process::peak_mib(relay.pid()));
    report.add(name, "WAL of write-back, B/event", (case.wal().await - wal) / rows);
    relay.terminate(PATIENCE).await;
    if status == "completed" {
        let share = "SELECT 100.0 * n_tup_hot_upd / greatest(n_tup_upd, 1) FROM pg_stat_user_tables WHERE relname = 'outbox_events'";
        report.add(name, "HOT updates, %", case.number(share).await);
    }
    speed
}

/// What the servers have used of the processors so far, and what nobody used.
struct Servers {
    nats: Duration,
    postgres: HashMap<u32, Duration>,
    idle: Duration,
}

impl Servers {
    fn now(case: &Case<'_>) -> Self {
        Self {
            nats: process::cpu(case.site.nats.pid()),
            postgres: process::cpu_of_children(case.site.postgres.pid()),
            idle: process::idle(),
        }
    }

    fn since(&self, before: &Self) -> [(&'static str, Duration); 3] {
        let ran =
            |(pid, now): (&u32, &Duration)| now.saturating_sub(before.postgres.get(pid).copied().unwrap_or_default());
        [
            ("nats-server CPU, us/event", self.nats.saturating_sub(before.nats)),
            ("PostgreSQL CPU, us/event", self.postgres.iter().map(ran).sum()),
            ("idle processors, us/event", self.idle.saturating_sub(before.idle)),
        ]
    }
}
