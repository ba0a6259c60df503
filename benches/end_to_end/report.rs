//! The figures of a run: medians and spread, as a table and as JSON.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

/// What was measured, in the order of the first sample of each figure.
pub struct Report {
    figures: Vec<Figure>,
}

struct Figure {
    case: String,
    what: &'static str,
    samples: Vec<f64>,
}

impl Report {
    pub fn new() -> Self {
        Self { figures: Vec::new() }
    }

    /// Notes one sample of a figure, such as `drain/tcp/complete`, `events/s`.
    pub fn add(&mut self, case: &str, what: &'static str, value: f64) {
        println!("{case:<44} {what:<28} {}", number(value));
        match self.figures.iter_mut().find(|figure| figure.case == case && figure.what == what) {
            Some(figure) => figure.samples.push(value),
            None => self.figures.push(Figure { case: case.to_owned(), what, samples: vec![value] }),
        }
    }

    /// The median of a figure; `None` when it was not measured.
    pub fn median(&self, case: &str, what: &str) -> Option<f64> {
        let figure = self.figures.iter().find(|figure| figure.case == case && figure.what == what)?;
        Some(median(&figure.samples))
    }

    /// The largest sample of a figure over all cases that have it and begin with `prefix`.
    pub fn largest(&self, prefix: &str, what: &str) -> Option<f64> {
        let figures = self.figures.iter().filter(|figure| figure.what == what && figure.case.starts_with(prefix));
        figures.flat_map(|figure| figure.samples.iter().copied()).max_by(f64::total_cmp)
    }

    /// All figures, as Markdown.
    pub fn table(&self) -> String {
        let mut table =
            String::from("| case | figure | median | least | most | runs |\n|---|---|---:|---:|---:|---:|\n");
        for Figure { case, what, samples } in &self.figures {
            let (least, most) = (fold(samples, f64::min), fold(samples, f64::max));
            let middle = number(median(samples));
            let _ = writeln!(
                table,
                "| {case} | {what} | {middle} | {} | {} | {} |",
                number(least),
                number(most),
                samples.len()
            );
        }
        table
    }

    /// Writes the figures below `target/bench/`; where.
    pub fn write_json(&self) -> PathBuf {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../bench");
        fs::create_dir_all(&folder).expect("make target/bench");
        let seconds = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
        let file = fs::canonicalize(folder).expect("target/bench").join(format!("end-to-end-{seconds}.json"));
        let figures = self.figures.iter().map(|Figure { case, what, samples }| {
            json!({ "case": case, "figure": what, "median": median(samples), "samples": samples })
        });
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        let all = json!({ "time": seconds, "cores": cores, "figures": figures.collect::<Vec<_>>() });
        fs::write(&file, format!("{all:#}\n")).expect("write the figures");
        file
    }
}

fn fold(samples: &[f64], best: fn(f64, f64) -> f64) -> f64 {
    samples.iter().copied().reduce(best).unwrap_or(f64::NAN)
}

/// The value that a part `at` of the samples does not exceed.
pub fn quantile(sorted: &[f64], at: f64) -> f64 {
    let rank = (sorted.len() as f64 * at).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get((sorted.len().max(1) - 1) / 2), sorted.get(sorted.len() / 2));
    low.zip(high).map_or(f64::NAN, |(low, high)| f64::midpoint(*low, *high))
}

/// Three significant digits.
pub fn number(value: f64) -> String {
    let digits = (3 - value.abs().max(1e-6).log10().floor() as i32 - 1).clamp(0, 4);
    format!("{value:.*}", digits as usize)
}
