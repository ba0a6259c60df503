//! nats-server with JetStream, of the tests' own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_nats::jetstream::stream::{Config, DiscardPolicy};
use rustix::process::Signal;
use tokio::sync::OnceCell;

use super::process::command;
pub use super::programs::NatsVersion;
use super::server::Server;
use super::wait::eventually;

/// Until a running server has read its configuration again, on two busy cores.
const LOAD: Duration = Duration::from_mins(1);

/// A running server. Dropping it stops the server and removes its store.
#[derive(Debug)]
pub struct Nats {
    version: NatsVersion,
    server: Server,
    config: String,
}

impl Nats {
    /// Starts a server with JetStream for one test. It takes some 50 ms: rather one more than a shared one.
    pub async fn start(version: NatsVersion) -> Self {
        Self::start_with(version, "").await
    }

    /// The same with more lines of its configuration file, such as `max_payload: 2MB` or `authorization {…}`.
    /// What the harness sets itself is `listen`, `server_name` and `jetstream.store_dir`.
    pub async fn start_with(version: NatsVersion, config: &str) -> Self {
        let server = Server::new(&format!("nats-server-{}", version.name()), None, Signal::KILL);
        let mut nats = Self { version, server, config: config.to_owned() };
        let command = nats.command();
        nats.server.start(command, ready).await;
        nats
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
        self.server.port()
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port())
    }

    pub fn pid(&self) -> u32 {
        self.server.process().pid()
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
        self.server.log()
    }

    /// An orderly stop.
    pub async fn stop(&mut self) {
        self.server.stop(Signal::TERM).await;
    }

    /// `kill -9`.
    pub async fn kill(&mut self) {
        self.server.stop(Signal::KILL).await;
    }

    /// Starts the stopped server again, on the same port and store.
    pub async fn start_again(&mut self) {
        let command = self.command();
        self.server.start_again(command, ready).await;
    }

    /// Keeps a copy of what the stopped server has stored, for [`Self::put_store_back`].
    pub fn keep_store(&self) {
        copy_folder(&self.server.home().join("store"), &self.server.home().join("kept"));
    }

    /// Makes the stopped server forget what it has stored since [`Self::keep_store`].
    pub fn put_store_back(&self) {
        copy_folder(&self.server.home().join("kept"), &self.server.home().join("store"));
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
        write_config(&self.server, &self.config);
        let before = loads(self);
        self.signal(Signal::HUP);
        eventually(LOAD, "nats-server loads its configuration", async || loads(self) > before).await;
    }

    /// Sends a signal, such as STOP or CONT.
    pub fn signal(&self, signal: Signal) {
        self.server.process().signal(signal);
    }

    /// How the server is started, from what it is now.
    fn command(&self) -> impl Fn(&Server) -> Command + use<> {
        let (program, config) = (self.version.program(), self.config.clone());
        move |server| {
            let mut nats = command(&program, server.home(), None);
            nats.arg("--config").arg(write_config(server, &config));
            nats
        }
    }
}

fn copy_folder(from: &Path, to: &Path) {
    if to.exists() {
        fs::remove_dir_all(to).expect("remove a folder");
    }
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("start cp");
    assert!(copied.success(), "copy {}", from.display());
}

async fn ready(_: &Server, log: &str) -> bool {
    log.contains("Server is ready")
}

/// Writes the configuration file; its path.
fn write_config(server: &Server, more: &str) -> PathBuf {
    let file = server.home().join("nats.conf");
    let port = server.port();
    let store = server.home().join("store");
    let config = format!(
        "listen: \"127.0.0.1:{port}\"\nserver_name: \"it-{port}\"\njetstream {{ store_dir: \"{}\" }}\n{more}\n",
        store.display(),
    );
    fs::write(&file, config).expect("write nats.conf");
    file
}

/// Everyone may do everything.
pub const PERMITTING: &str = "authorization { users: [{ user: it, password: it }] }\nno_auth_user: it";

/// Everyone may do everything but publish to this subject or filter.
pub fn denying(subject: &str) -> String {
    format!(
        "authorization {{ users: [
           {{ user: it, password: it, permissions: {{ publish: {{ deny: [\"{subject}\"] }} }} }}] }}
         no_auth_user: it"
    )
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

    /// A stream that takes so many messages and no more.
    pub fn small_stream(&self, most: i64) -> Config {
        Config {
            name: self.stream.clone(),
            subjects: vec![self.subjects()],
            discard: DiscardPolicy::New,
            max_messages: most,
            ..Config::default()
        }
    }

    /// The default template of the relay under this prefix.
    pub fn template(&self) -> String {
        format!("{}.{{aggregate_type}}.{{event_type}}", self.prefix)
    }
}
