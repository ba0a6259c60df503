//! What the kernel says of a process.

use std::fs;
use std::time::Duration;

/// The time that the process's threads have run so far.
pub fn cpu(pid: u32) -> Duration {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
    let nanoseconds = threads.filter_map(|thread| {
        let schedule = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        schedule.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}

/// The most resident memory so far, in MiB.
pub fn peak_mib(pid: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let kib = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.map_or(0.0, |kib: f64| kib / 1024.0)
}
