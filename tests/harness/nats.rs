//! nats-server with JetStream, of the tests' own.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::OnceCell;

use super::process::{Process, command, free_port, new_folder, tail};
pub use super::programs::NatsVersion;
use super::wait::eventually;

/// Starting, and reading back a large store, on two busy cores.
const START: Duration = Duration::from_mins(1);
const STOP: Duration = Duration::from_secs(30);

/// A running server. Dropping it stops the server and removes its store.
#[derive(Debug)]
pub struct Nats {
    version: NatsVersion,
    home: PathBuf,
    port: u16,
    config: String,
    process: Option<Process>,
}

impl Nats {
    /// Starts a server with JetStream for one test. It takes some 50 ms: rather one more than a shared one.
    pub async fn start(version: NatsVersion) -> Self {
        Self::start_with(version, "").await
    }

    /// The same with more lines of its configuration file, such as `max_payload: 2MB` or `authorization {…}`.
    /// What the harness sets itself is `listen`, `server_name` and `jetstream.store_dir`.
    pub async fn start_with(version: NatsVersion, config: &str) -> Self {
        let home = new_folder("nats", None);
        let mut server = Self { version, home, port: 0, config: config.to_owned(), process: None };
        for _ in 0..3 {
            server.port = free_port();
            if server.try_start().await {
                return server;
            }
        }
        panic!("nats-server {} found no free port:\n{}", version.name(), tail(&server.log()));
    }

    /// The server of this version that tests share, each with a [`Space`] of its own. It is never stopped or broken.
    pub async fn shared(version: NatsVersion) -> &'static Self {
        static SHARED: [OnceCell<Nats>; 2] = [const { OnceCell::const_new() }; 2];
        SHARED[version as usize].get_or_init(|| Self::start(version)).await
    }

    pub fn version(&self) -> NatsVersion {
        self.version
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn pid(&self) -> u32 {
        self.process().pid()
    }

    /// A connection without credentials.
    pub async fn client(&self) -> async_nats::Client {
        async_nats::connect(self.url()).await.expect("connect to nats-server")
    }

    /// JetStream on a new connection.
    pub async fn jetstream(&self) -> async_nats::jetstream::Context {
        async_nats::jetstream::new(self.client().await)
    }

    /// Everything that the server logged.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.home.join("log")).unwrap_or_default()).into_owned()
    }

    /// An orderly stop.
    pub async fn stop(&mut self) {
        self.end(Signal::TERM).await;
    }

    /// `kill -9`.
    pub async fn kill(&mut self) {
        self.end(Signal::KILL).await;
    }

    /// Starts the stopped server again, on the same port and store.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "stop the server first");
        assert!(self.try_start().await, "port {} was taken meanwhile:\n{}", self.port, tail(&self.log()));
    }

    /// Replaces the lines given to [`Self::start_with`], for the next [`Self::start_again`].
    pub fn configure(&mut self, config: &str) {
        config.clone_into(&mut self.config);
    }

    /// Replaces the lines given to [`Self::start_with`], and has the running server load them.
    pub async fn reload(&mut self, config: &str) {
        const LOADED: &str = "Reloaded server configuration";
        let loads = |server: &Self| server.log().matches(LOADED).count();
        self.configure(config);
        self.write_config();
        let before = loads(self);
        self.signal(Signal::HUP);
        eventually(START, "nats-server loads its configuration", async || loads(self) > before).await;
    }

    /// Sends a signal, such as STOP or CONT.
    pub fn signal(&self, signal: Signal) {
        self.process().signal(signal);
    }

    fn process(&self) -> &Process {
        self.process.as_ref().expect("the server is stopped")
    }

    async fn end(&mut self, signal: Signal) {
        let mut process = self.process.take().expect("the server is stopped already");
        process.signal(signal);
        process.wait(STOP, "nats-server").await;
    }

    /// Writes the configuration file; its path.
    fn write_config(&self) -> PathBuf {
        let file = self.home.join("nats.conf");
        let port = self.port;
        let store = self.home.join("store");
        let config = format!(
            "listen: \"127.0.0.1:{port}\"\nserver_name: \"it-{port}\"\njetstream {{ store_dir: \"{}\" }}\n{}\n",
            store.display(),
            self.config
        );
        fs::write(&file, config).expect("write nats.conf");
        file
    }

    /// False when the port was not free; any other failure to start is the test's.
    async fn try_start(&mut self) -> bool {
        let file = self.write_config();
        let log = File::options().create(true).append(true).open(self.home.join("log")).expect("open the log");
        let seen = self.log().len();
        let mut nats = command(&self.version.program(), &self.home, None);
        nats.arg("--config").arg(file).stdout(Stdio::from(log.try_clone().expect("dup"))).stderr(Stdio::from(log));
        let mut process = Process::spawn(&mut nats, Signal::KILL);
        let mut running = false;
        eventually(START, "nats-server is ready", async || {
            running = self.log().get(seen..).is_some_and(|log| log.contains("Server is ready"));
            running || process.ended().is_some()
        })
        .await;
        if running {
            self.process = Some(process);
            return true;
        }
        let log = self.log();
        let fresh = log.get(seen..).unwrap_or_default();
        assert!(
            fresh.contains("address already in use"),
            "nats-server {} did not start:\n{}",
            self.version.name(),
            tail(fresh)
        );
        false
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the last of nats-server's log\n{}", tail(&self.log()));
        }
        self.process = None;
        let _ = fs::remove_dir_all(&self.home);
    }
}

/// One test's part of a shared server.
#[derive(Clone, Debug)]
pub struct Space {
    pub stream: String,
    /// The first token of the subjects, such as `it7`.
    pub prefix: String,
}

impl Space {
    /// A stream name and a subject prefix that no other test of this process uses. Nothing is created.
    #[allow(clippy::new_without_default, reason = "two of them are never equal")]
    pub fn new() -> Self {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        Self { stream: format!("IT_{number}"), prefix: format!("it{number}") }
    }

    /// What the stream takes: `<prefix>.>`.
    pub fn subjects(&self) -> String {
        format!("{}.>", self.prefix)
    }

    /// The default template of the relay under this prefix.
    pub fn template(&self) -> String {
        format!("{}.{{aggregate_type}}.{{event_type}}", self.prefix)
    }
}
