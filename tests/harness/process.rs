//! Child processes that never outlive the tests, and the folder that everything they write is in.
//!
//! Each process leads a group of its own, so that Ctrl-C reaches the tests first, and so that what it started (a
//! browser) ends with it: the group is ended when the guard is dropped. For what no guard reaches (servers shared
//! through a static, a test binary that is killed) one shell waits for the end of this process, ends what is left,
//! and removes the folder.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::wait::eventually_some;

/// How long a process may take to end before it is killed.
const END: Duration = Duration::from_secs(10);

/// A running child. Dropping it ends the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    pid: Pid,
    note: PathBuf,
    end: Signal,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command`. `end` is the signal that makes its group leave at once and whole.
    pub fn spawn(command: &mut Command, end: Signal) -> Self {
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", command.get_program().display()));
        let pid = Pid::from_child(&child);
        let note = scratch().join("processes").join(child.id().to_string());
        fs::write(&note, end.as_raw().to_string()).expect("note the pid");
        Self { child, pid, note, end, status: None }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The child, to take its pipes from.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends a signal. A process that has ended already does not mind.
    pub fn signal(&self, signal: Signal) {
        if self.status.is_none() {
            self.sent(signal, kill_process(self.pid, signal));
        }
    }

    /// Sends a signal to it and to what it started.
    fn signal_group(&self, signal: Signal) {
        self.sent(signal, kill_process_group(self.pid, signal));
    }

    fn sent(&self, signal: Signal, result: rustix::io::Result<()>) {
        match result {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(error) => panic!("cannot send {signal:?} to {}: {error}", self.pid()),
        }
    }

    /// The exit status, if the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait for a child");
            if self.status.is_some() {
                let _ = fs::remove_file(&self.note);
            }
        }
        self.status
    }

    /// Waits for the process to end by itself. Panics after `deadline`.
    pub async fn wait(&mut self, deadline: Duration, what: &str) -> ExitStatus {
        eventually_some(deadline, &format!("{what} has ended"), async || self.ended()).await
    }

    fn end(&mut self) {
        self.signal_group(Signal::CONT);
        self.signal_group(self.end);
        let start = Instant::now();
        while self.ended().is_none() {
            if start.elapsed() > END {
                self.signal_group(Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            self.end();
        }
    }
}

/// The user that a server runs as when the tests run as root, which PostgreSQL refuses.
#[derive(Clone, Debug)]
pub struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// `None` when the tests do not run as root: servers then run as whoever runs the tests.
    pub fn instead_of_root() -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let users = fs::read_to_string("/etc/passwd").expect("read /etc/passwd");
        let find = |name: &str| {
            let mut fields = users.lines().map(|line| line.split(':')).find(|f| f.clone().next() == Some(name))?;
            Some(Self { uid: fields.nth(2)?.parse().ok()?, gid: fields.next()?.parse().ok()? })
        };
        let user = find("postgres").or_else(|| find("nobody"));
        Some(user.expect("PostgreSQL does not run as root: /etc/passwd needs a user `postgres` or `nobody`"))
    }
}

/// A command in `folder`, as `user`, without the settings of libpq that whoever runs the tests may have.
pub fn command(program: &Path, folder: &Path, user: Option<&User>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(folder).stdin(Stdio::null()).env("LC_ALL", "C").env_remove("TZ");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("PG") {
            command.env_remove(name);
        }
    }
    if let Some(user) = user {
        command.uid(user.uid).gid(user.gid);
    }
    command
}

/// A new folder below [`scratch`], owned by `user`.
pub fn new_folder(name: &str, user: Option<&User>) -> PathBuf {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let folder = scratch().join(format!("{name}-{}", COUNTER.fetch_add(1, Ordering::Relaxed)));
    fs::create_dir(&folder).expect("make a folder");
    give(&folder, user);
    folder
}

/// Makes `user` the owner of a file or folder.
pub fn give(path: &Path, user: Option<&User>) {
    if let Some(user) = user {
        std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid)).expect("chown");
    }
}

/// A TCP port on loopback that nobody listens on. It is taken below the range that the kernel gives to outgoing
/// connections, so that a server that is down for a while finds its port free when it comes back.
pub fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Different processes start at different places.
    let start = u16::try_from(std::process::id() * 97 % u32::from(COUNT)).expect("below 12,000");
    for _ in 0..COUNT {
        let offset = (start + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT) % COUNT;
        if std::net::TcpListener::bind(("127.0.0.1", FIRST + offset)).is_ok() {
            return FIRST + offset;
        }
    }
    panic!("no free port");
}

/// The folder of this run, removed when the process ends.
pub fn scratch() -> &'static Path {
    static SCRATCH: OnceLock<(PathBuf, Child)> = OnceLock::new();
    let (folder, _) = SCRATCH.get_or_init(|| make_scratch().expect("make a folder for the servers of this run"));
    folder
}

/// Ends what is noted in the folder `$1`, then removes it, once its standard input has come to an end.
const CARETAKER: &str = r#"
    while read -r _; do :; done
    cd "$1/processes" || exit
    for pid in *; do
        [ -f "$pid" ] && kill -CONT "-$pid" && kill -"$(cat "$pid")" "-$pid"
    done
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        alive=
        for pid in *; do
            [ -f "$pid" ] && kill -0 "-$pid" && alive="$alive -$pid"
        done
        [ -z "$alive" ] && break
        sleep 0.1
    done
    [ -z "$alive" ] || kill -KILL $alive
    cd / && rm -rf "$1"
"#;

fn make_scratch() -> io::Result<(PathBuf, Child)> {
    let folder = tempfile::Builder::new().prefix("outbox-relay-it-").tempdir()?.keep();
    fs::create_dir(folder.join("processes"))?;
    // Passable, not readable: the servers' user goes through it to the folder of its server.
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o711))?;
    let caretaker = Command::new("sh")
        .args(["-c", CARETAKER, "caretaker"])
        .arg(&folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    Ok((folder, caretaker))
}

/// The last lines of a log, for the message of a failed test.
pub fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(60)..].join("\n")
}
