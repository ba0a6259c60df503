//! The relay end to end, on real servers: `make bench`. See benches/README.md for how to read what it prints.
//!
//! `BENCH_ONLY=drain/,latency/500` runs only what contains one of these words (`drain/tcp/complete$`: ends with it),
//! `BENCH_RUNS` says how often what is repeated is run (5), `BENCH_SCALE` by what the sizes are multiplied (1.0).
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failed measurement is a panic"
)]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "figures")]

#[allow(dead_code, unused_imports, reason = "the tests' box of tools; few of them are needed here")]
#[path = "../../tests/harness/mod.rs"]
mod harness;

mod backlog;
mod bars;
mod drain;
mod latency;
mod memory;
mod plot;
mod process;
mod report;
mod scale;
mod site;
mod subscriber;

use report::Report;
use site::Site;

/// What a run is asked to do.
struct Plan {
    only: Vec<String>,
    runs: usize,
    scale: f64,
}

impl Plan {
    fn from_environment() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let only =
            variable("BENCH_ONLY").map(|words| words.split(',').map(str::to_owned).collect()).unwrap_or_default();
        let runs = variable("BENCH_RUNS").map_or(5, |runs| runs.parse().expect("BENCH_RUNS is a number"));
        let scale = variable("BENCH_SCALE").map_or(1.0, |scale| scale.parse().expect("BENCH_SCALE is a number"));
        Self { only, runs, scale }
    }

    /// Whether the case is asked for. Cases that take long are run only by name.
    fn wants(&self, case: &str, long: bool) -> bool {
        let meant = |word: &String| match word.strip_suffix('$') {
            Some(end) => case.ends_with(end),
            None => case.contains(word.as_str()),
        };
        if self.only.is_empty() { !long } else { self.only.iter().any(meant) }
    }

    fn sized(&self, rows: u64) -> u64 {
        ((rows as f64 * self.scale) as u64).max(1000)
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let plan = Plan::from_environment();
    let mut report = Report::new();
    let site = Site::start().await;
    drain::run(&plan, &site, &mut report).await;
    latency::run(&plan, &site, &mut report).await;
    scale::run(&plan, &site, &mut report).await;
    memory::run(&plan, &site, &mut report).await;
    println!("\n{}", report.table());
    println!("{}", bars::table(&report));
    let json = report.write_json();
    println!("figures: {}", json.display());
    if let Some(plot) = plot::of(&report) {
        std::fs::write(json.with_file_name("scale.svg"), plot).expect("write the plot");
    }
}
