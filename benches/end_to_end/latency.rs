//! From the moment at which a producer's COMMIT has returned until a core subscriber has the message. What the COMMIT
//! itself takes is the database's, and is told beside it.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use crate::Plan;
use crate::harness::postgres::connect;
use crate::process;
use crate::report::{Report, quantile};
use crate::site::{Case, Over, Site};
use crate::subscriber::subscribe;

struct Pace {
    name: &'static str,
    /// Events a second, each in a transaction of its own.
    rate: u32,
    /// Connections that share them: a commit takes longer than the time between two events of a high rate.
    producers: u32,
    seconds: u32,
    /// Of each payload.
    bytes: usize,
    /// Run only by name.
    long: bool,
}

const BASE: Pace = Pace { name: "", rate: 100, producers: 1, seconds: 10, bytes: 300, long: false };

const PACES: [Pace; 6] = [
    Pace { name: "latency/100", ..BASE },
    Pace { name: "latency/500", rate: 500, producers: 2, seconds: 8, ..BASE },
    Pace { name: "latency/5000", rate: 5000, producers: 16, seconds: 4, ..BASE },
    Pace { name: "scale/latency of 8 KiB", bytes: 8 << 10, seconds: 4, long: true, ..BASE },
    Pace { name: "scale/latency of 64 KiB", bytes: 64 << 10, seconds: 4, long: true, ..BASE },
    Pace { name: "scale/latency of 512 KiB", bytes: 512 << 10, rate: 20, seconds: 5, long: true, ..BASE },
];

/// Not measured: one event in so many, of the first moments, in which connections, plans and caches are new.
const WARM_UP_SHARE: usize = 20;

pub async fn run(plan: &Plan, site: &Site, report: &mut Report) {
    for _ in 0..plan.runs {
        for pace in PACES.iter().filter(|pace| plan.wants(pace.name, pace.long)) {
            let case = site.case(Over::Tcp).await;
            measure(pace, &case, report).await;
            case.end().await;
        }
    }
}

async fn measure(pace: &Pace, case: &Case<'_>, report: &mut Report) {
    let mut relay = case.relay().await;
    let count = pace.rate * pace.seconds;
    let arrivals = subscribe(case.site.nats.port(), &case.space.subjects(), count as usize, Duration::from_secs(20));
    let cpu = process::cpu(relay.pid());
    let url = case.site.postgres.url(&case.name);
    let (rate, producers, share, bytes) = (pace.rate, pace.producers, count / pace.producers, pace.bytes);
    // A thread of their own: what the measurement itself does must not delay them.
    let commits = std::thread::spawn(move || produce(&url, (rate, producers), share, bytes));
    let commits = tokio::task::spawn_blocking(|| commits.join().expect("the producers end")).await.expect("join");
    let arrivals = tokio::task::spawn_blocking(move || arrivals.recv_timeout(Duration::from_mins(1)));
    let arrivals = match arrivals.await.expect("join") {
        Ok(arrivals) => arrivals,
        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => panic!("the subscriber ended"),
    };
    assert_eq!(arrivals.len(), commits.len(), "every event arrives");
    let mut latencies = Vec::new();
    let mut commit_times = Vec::new();
    for Commit { id, began, returned } in commits.iter().skip(commits.len() / WARM_UP_SHARE) {
        // Zero where the message came before the producer heard of its own commit.
        latencies.push(arrivals[id].saturating_duration_since(*returned).as_secs_f64() * 1e3);
        commit_times.push(returned.saturating_duration_since(*began).as_secs_f64() * 1e3);
    }
    latencies.sort_by(f64::total_cmp);
    commit_times.sort_by(f64::total_cmp);
    report.add(pace.name, "p50, ms", quantile(&latencies, 0.5));
    report.add(pace.name, "p99, ms", quantile(&latencies, 0.99));
    report.add(pace.name, "p99.9, ms", quantile(&latencies, 0.999));
    report.add(pace.name, "COMMIT itself p50, ms", quantile(&commit_times, 0.5));
    let cpu = process::cpu(relay.pid()).saturating_sub(cpu);
    report.add(pace.name, "relay CPU, us/event", cpu.as_secs_f64() * 1e6 / f64::from(count));
    report.add(pace.name, "peak resident, MiB", process::peak_mib(relay.pid()));
    relay.terminate(crate::site::PATIENCE).await;
}

struct Commit {
    id: String,
    began: Instant,
    returned: Instant,
}

fn produce(url: &str, (rate, producers): (u32, u32), share: u32, bytes: usize) -> Vec<Commit> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let start = Instant::now() + Duration::from_millis(300);
        let tasks: Vec<_> = (0..producers)
            .map(|producer| {
                // Each at its own moments, so that together they make an even pace.
                let first = start + Duration::from_secs(1) * producer / rate;
                let step = Duration::from_secs(1) * producers / rate;
                tokio::spawn(producer_task(url.to_owned(), producer, (share, bytes), first, step))
            })
            .collect();
        let mut commits = Vec::new();
        for task in tasks {
            commits.extend(task.await.expect("a producer"));
        }
        commits.sort_by_key(|commit| commit.began);
        commits
    })
}

async fn producer_task(
    url: String,
    producer: u32,
    (share, bytes): (u32, usize),
    first: Instant,
    step: Duration,
) -> Vec<Commit> {
    let client = connect(&url).await;
    let insert = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                  VALUES ($1, 'order', $2, 'placed', jsonb_build_object('note', $3::text))";
    let insert = client.prepare(insert).await.expect("prepare");
    let note: String = std::iter::repeat_with(fastrand::alphanumeric).take(bytes.saturating_sub(30)).collect();
    let mut commits = Vec::with_capacity(share as usize);
    for number in 0..share {
        tokio::time::sleep_until((first + step * number).into()).await;
        let (id, aggregate) = (format!("{producer}-{number}"), format!("order-{}", number * 16 + producer));
        let began = Instant::now();
        client.execute(&insert, &[&id, &aggregate, &note]).await.expect("insert");
        commits.push(Commit { id, began, returned: Instant::now() });
    }
    commits
}
