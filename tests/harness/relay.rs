//! The relay as users run it: the built program, as a process.

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::nats::{Nats, Space};
use super::postgres::Database;
use super::process::{Process, free_port, tail};
use super::wait::eventually;

/// From the start of the process until it is ready, or streams again, on two busy cores.
pub const READY: Duration = Duration::from_mins(1);

/// What the relay is started with. Settings go in by their environment variables.
#[derive(Clone, Debug)]
pub struct RelaySettings {
    settings: Vec<(String, String)>,
    variables: Vec<(String, String)>,
    arguments: Vec<String>,
}

impl RelaySettings {
    /// The relay's defaults on these two servers, with the page of the operator on a free port.
    pub fn new(postgres_url: &str, nats_url: &str) -> Self {
        let empty = Self { settings: Vec::new(), variables: Vec::new(), arguments: Vec::new() };
        empty.set("postgres.url", postgres_url).set("nats.url", nats_url).set("log.level", "debug")
    }

    /// On a database and a part of a server that are shared with other tests.
    pub fn shared(database: &Database, nats: &Nats, space: &Space) -> Self {
        Self::new(&database.url(), &nats.url())
            .set("source.slot", &database.slot)
            .set("source.publication", &database.publication)
            .within(space)
    }

    /// In a part of a NATS server that is shared with other tests.
    #[must_use]
    pub fn within(self, space: &Space) -> Self {
        self.set("nats.stream", &space.stream)
            .set("nats.create.subjects", &space.subjects())
            .set("route.subject", &space.template())
    }

    /// Sets a key of the settings as the file spells it, such as `delivery.ack_timeout`.
    #[must_use]
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.retain(|(other, _)| other != key);
        self.settings.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Leaves a key at its default.
    #[must_use]
    pub fn unset(mut self, key: &str) -> Self {
        self.settings.retain(|(other, _)| other != key);
        self
    }

    /// Any other environment variable.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Any argument of the command line, such as `--nats-stream=S`.
    #[must_use]
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Starts `outbox-relay run`.
    pub fn start(&self) -> Relay {
        let port = free_port();
        let mut settings = self.clone();
        if !settings.settings.iter().any(|(key, _)| key == "admin.listen") {
            settings = settings.set("admin.listen", &format!("127.0.0.1:{port}"));
        }
        let mut command = settings.command(&["run"]);
        command.stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = Process::spawn(&mut command, Signal::KILL);
        let mut stderr = process.child().stderr.take().expect("stderr is piped");
        let log = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&log);
        // Ends with the process: its pipe then closes.
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = stderr.read(&mut buffer) {
                sink.lock().expect("the log").extend_from_slice(&buffer[..count]);
            }
        });
        Relay { process, log, reader, port }
    }

    /// Runs another command to its end, such as `&["migrate"]`.
    pub async fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.command(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().expect("start outbox-relay");
        tokio::task::spawn_blocking(|| child.wait_with_output()).await.expect("join").expect("wait")
    }

    /// Runs `outbox-relay migrate`. Panics with its words when it fails.
    pub async fn migrate(&self) {
        let output = self.run(&["migrate"]).await;
        assert!(output.status.success(), "migrate: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The program with these settings, and with none of whoever runs the tests.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_outbox-relay"));
        command.args(arguments).args(&self.arguments).current_dir(super::process::scratch());
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if text.starts_with("OUTBOX_RELAY_") || text.starts_with("PG") || text.ends_with("_URL") {
                command.env_remove(name);
            }
        }
        for (key, value) in &self.settings {
            command.env(format!("OUTBOX_RELAY_{}", key.to_uppercase().replace('.', "__")), value);
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

/// A running relay. Dropping it kills the process.
#[derive(Debug)]
pub struct Relay {
    process: Process,
    log: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
    port: u16,
}

impl Relay {
    /// Everything that the relay wrote to standard error so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&self.log.lock().expect("the log")).into_owned()
    }

    /// Waits until the log says `text`. Panics after `deadline`.
    pub async fn wait_log(&self, text: &str, deadline: Duration) {
        eventually(deadline, &format!("the relay's log says {text:?}"), async || self.log().contains(text)).await;
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The address of the operator's page, unless the settings gave it another.
    pub fn admin_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Status and body of a path such as `/metrics`; `None` when nobody listens.
    pub async fn get(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.ok()?;
        // HTTP/1.0: the body comes as it is and ends with the connection.
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
    }

    /// Whether `/readyz` says that the relay is not ready, for reasons with all these words.
    pub async fn says(&self, words: &[&str]) -> bool {
        let answer = self.get("/readyz").await;
        answer.is_some_and(|(status, body)| status == 503 && words.iter().all(|word| body.contains(word)))
    }

    /// Waits until `/readyz` says so. Panics after [`READY`].
    pub async fn wait_says(&self, words: &[&str]) {
        eventually(READY, &format!("/readyz says {words:?}"), async || self.says(words).await).await;
    }

    /// The value of a metric whose line begins with `series` (name and labels). `None` when there is none.
    pub async fn metric(&self, series: &str) -> Option<f64> {
        let (_, body) = self.get("/metrics").await?;
        body.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.trim().parse().ok())
    }

    /// Waits for a value of a metric: what is counted once it is committed can be seen in the table a moment earlier.
    pub async fn wait_metric(&self, series: &str, value: f64) {
        eventually(READY, &format!("{series} is {value}"), async || self.metric(series).await == Some(value)).await;
    }

    /// Waits until `/readyz` answers 200 with something else than `standby`: the slot is held and rows flow. Panics
    /// when the relay ends, or after [`READY`].
    pub async fn wait_ready(&mut self) {
        self.wait_readyz(|status, body| status == 200 && !body.contains("standby"), "the relay is ready").await;
    }

    /// Waits until `/readyz` says that this relay stands by.
    pub async fn wait_standby(&mut self) {
        self.wait_readyz(|status, body| status == 200 && body.contains("standby"), "the relay stands by").await;
    }

    /// Waits until `/readyz` says that the relay is not ready.
    pub async fn wait_unready(&mut self) {
        self.wait_readyz(|status, _| status == 503, "the relay is not ready").await;
    }

    async fn wait_readyz(&mut self, wanted: impl Fn(u16, &str) -> bool, what: &str) {
        let mut last = None;
        let reached = tokio::time::timeout(READY, async {
            loop {
                let ended = self.process.ended();
                assert!(ended.is_none(), "{what}: it ended with {ended:?}\n{}", tail(&self.log()));
                last = self.get("/readyz").await;
                if last.as_ref().is_some_and(|(status, body)| wanted(*status, body)) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let reached = reached.await;
        assert!(reached.is_ok(), "waited {READY:?} in vain: {what}; /readyz last said {last:?}");
    }

    /// Sends a signal, such as STOP or CONT.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// `kill -9`, and waits for the end.
    pub async fn kill9(&mut self) {
        self.process.signal(Signal::KILL);
        self.wait_exit(Duration::from_secs(10)).await;
    }

    /// SIGTERM, and waits for the end. Panics after `deadline`.
    pub async fn terminate(&mut self, deadline: Duration) -> ExitStatus {
        self.process.signal(Signal::TERM);
        self.wait_exit(deadline).await
    }

    /// Waits for the relay to end by itself; its log is then complete. Panics after `deadline`.
    pub async fn wait_exit(&mut self, deadline: Duration) -> ExitStatus {
        let status = self.process.wait(deadline, "the relay").await;
        eventually(deadline, "the relay's last words are read", async || self.reader.is_finished()).await;
        status
    }

    /// The exit status, if the relay has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Resident memory now, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        self.status_kilobytes("VmRSS:") * 1024
    }

    /// The most resident memory so far, in bytes.
    pub fn peak_resident_bytes(&self) -> u64 {
        self.status_kilobytes("VmHWM:") * 1024
    }

    fn status_kilobytes(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let status = std::fs::read_to_string(Path::new(&path)).expect("the relay runs");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("a field of /proc/PID/status");
        line.trim().trim_end_matches(" kB").parse().expect("kilobytes")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the last of the relay's log\n{}", tail(&self.log()));
        }
    }
}
