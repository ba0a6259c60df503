//! What the kernel says of a process.

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

/// The time that the process's threads have run so far.
pub fn cpu(pid: u32) -> Duration {
    threads_cpu(pid).expect("the process runs")
}

/// `None`: it has ended.
fn threads_cpu(pid: u32) -> Option<Duration> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let nanoseconds = threads.filter_map(|thread| {
        let schedule = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        schedule.split(' ').next()?.parse::<u64>().ok()
    });
    Some(Duration::from_nanos(nanoseconds.sum()))
}

/// The same of each process that `pid` has started: those of a PostgreSQL server.
pub fn cpu_of_children(pid: u32) -> HashMap<u32, Duration> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("the process runs");
    let children = children.split_whitespace().filter_map(|child| child.parse().ok());
    children.filter_map(|child| Some((child, threads_cpu(child)?))).collect()
}

/// How long all processors together have had nothing to do.
pub fn idle() -> Duration {
    /// Of the kernel, in a second (`USER_HZ`).
    const TICKS: u64 = 100;
    let all = fs::read_to_string("/proc/stat").expect("/proc/stat");
    let ticks = all.split_whitespace().nth(4).and_then(|ticks| ticks.parse::<u64>().ok());
    Duration::from_millis(ticks.expect("idle time") * 1000 / TICKS)
}

/// The most resident memory so far, in MiB.
pub fn peak_mib(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(0.0, |kib: f64| kib / 1024.0)
}
