//! What every server of the tests has: a folder, a port, a process and a log.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::process::{Process, User, free_port, new_folder, tail};
use super::wait::eventually;

/// Starting, reading back a large store, and recovery after a crash, on two busy cores.
const START: Duration = Duration::from_secs(90);
const STOP: Duration = Duration::from_mins(1);

/// The guard of a server. Dropping it ends the process and removes the folder.
#[derive(Debug)]
pub struct Server {
    name: String,
    home: PathBuf,
    end: Signal,
    port: u16,
    process: Option<Process>,
}

impl Server {
    /// A folder for a server that is not running yet. `end` makes its process leave at once, without children.
    pub fn new(name: &str, user: Option<&User>, end: Signal) -> Self {
        Self { name: name.to_owned(), home: new_folder(name, user), end, port: 0, process: None }
    }

    pub fn home(&self) -> &Path {
        &self.home
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the server is stopped")
    }

    /// Everything that the server logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.home.join("log")).unwrap_or_default()).into_owned()
    }

    /// Starts the server on a free port, which `command` takes from the server it is given. `ready` is asked with what
    /// it logged since this start.
    pub async fn start(&mut self, command: impl Fn(&Self) -> Command, ready: impl AsyncFn(&Self, &str) -> bool) {
        // Another process may take the port before the server does.
        for _ in 0..3 {
            self.port = free_port();
            if self.try_start(command(self), &ready).await {
                return;
            }
        }
        panic!("{} found no free port:\n{}", self.name, tail(&self.log()));
    }

    /// Starts the stopped server, on the same port.
    pub async fn start_again(&mut self, command: impl Fn(&Self) -> Command, ready: impl AsyncFn(&Self, &str) -> bool) {
        assert!(self.process.is_none(), "stop the server first");
        let started = self.try_start(command(self), &ready).await;
        assert!(started, "port {} was taken meanwhile:\n{}", self.port, tail(&self.log()));
    }

    /// Ends the process with `signal`; how long that took.
    pub async fn stop(&mut self, signal: Signal) -> Duration {
        let start = Instant::now();
        let mut process = self.process.take().expect("the server is stopped already");
        process.signal(signal);
        process.wait(STOP, &self.name).await;
        start.elapsed()
    }

    /// False when the port was not free; any other failure to start is the test's.
    async fn try_start(&mut self, mut command: Command, ready: &impl AsyncFn(&Self, &str) -> bool) -> bool {
        let log = File::options().create(true).append(true).open(self.home.join("log")).expect("open the log");
        let seen = self.log().len();
        command.stdout(Stdio::from(log.try_clone().expect("dup"))).stderr(Stdio::from(log));
        let mut process = Process::spawn(&mut command, self.end);
        let mut running = false;
        eventually(START, &format!("{} is ready", self.name), async || {
            running = ready(self, self.log().get(seen..).unwrap_or_default()).await;
            running || process.ended().is_some()
        })
        .await;
        if running {
            self.process = Some(process);
            return true;
        }
        let log = self.log();
        let fresh = log.get(seen..).unwrap_or_default();
        let taken = fresh.to_lowercase().contains("address already in use");
        assert!(taken, "{} did not start:\n{}", self.name, tail(fresh));
        false
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the last of the log of {}\n{}", self.name, tail(&self.log()));
        }
        self.process = None;
        let _ = fs::remove_dir_all(&self.home);
    }
}
