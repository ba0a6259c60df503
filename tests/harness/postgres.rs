//! PostgreSQL servers of the tests' own.

mod standby;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls};

use super::process::{User, command, give, new_folder, scratch};
pub use super::programs::PgVersion;
use super::server::Server;
use super::wait::eventually;

/// Until a running server has read its settings again, on two busy cores.
const LOAD: Duration = Duration::from_mins(1);

/// For every server; a test's own settings come after them and win. Disks are not synced: a test may kill a server,
/// it never cuts the machine's power.
const SETTINGS: &[(&str, &str)] = &[
    ("listen_addresses", "127.0.0.1"),
    ("wal_level", "logical"),
    ("max_wal_senders", "60"),
    ("max_replication_slots", "200"),
    ("max_connections", "200"),
    ("shared_buffers", "64MB"),
    ("fsync", "off"),
    ("timezone", "UTC"),
    ("log_timezone", "UTC"),
    ("log_line_prefix", "%m [%p] %q%a "),
    ("log_checkpoints", "off"),
];

/// A running server. Dropping it stops the server and removes its data.
#[derive(Debug)]
pub struct Postgres {
    version: PgVersion,
    bin: PathBuf,
    server: Server,
    user: Option<User>,
}

impl Postgres {
    /// Starts a server for one test, with settings of `postgresql.conf` beyond the harness's own. The superuser is
    /// `postgres`, without a password from loopback and through the Unix socket.
    pub async fn start(version: PgVersion, settings: &[(&str, &str)]) -> Self {
        let template = template(version).await;
        let mut server = Self::new(version, &template.bin, "");
        server.copy_data(&template.data, settings).await;
        server.begin().await;
        server
    }

    /// A server without data, not running yet.
    fn new(version: PgVersion, bin: &Path, suffix: &str) -> Self {
        let user = User::instead_of_root();
        let name = format!("postgres-{}{suffix}", version.major());
        Self { version, bin: bin.to_owned(), server: Server::new(&name, user.as_ref(), Signal::QUIT), user }
    }

    /// The server of this version that tests share, each with a [`Database`] of its own. It is never stopped, broken
    /// or reconfigured.
    pub async fn shared(version: PgVersion) -> &'static Self {
        static SHARED: [OnceCell<Postgres>; 3] = [const { OnceCell::const_new() }; 3];
        SHARED[version as usize].get_or_init(|| Self::start(version, &[])).await
    }

    /// A new database of this server, with names for what is not confined to a database.
    pub async fn database(&'static self) -> Database {
        self.database_with("").await
    }

    /// The same, with options of `CREATE DATABASE`.
    pub async fn database_with(&'static self, options: &str) -> Database {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name = format!("it_{}", COUNTER.fetch_add(1, Ordering::Relaxed));
        let create = format!("CREATE DATABASE \"{name}\" {options}");
        self.client().await.batch_execute(&create).await.expect("create a database");
        Database { server: self, slot: format!("{name}_slot"), publication: format!("{name}_publication"), name }
    }

    pub fn version(&self) -> PgVersion {
        self.version
    }

    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// The URL of a database, over loopback TCP, as the superuser.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port())
    }

    /// The connection string of a database through the Unix socket, as key=value.
    pub fn socket_url(&self, database: &str) -> String {
        socket_url(&self.server, database)
    }

    /// The folder with the programs: `pg_recvlogical`, `pgbench`, `psql` and so on.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    pub fn data(&self) -> PathBuf {
        data(&self.server)
    }

    /// The postmaster's pid.
    pub fn pid(&self) -> u32 {
        self.server.process().pid()
    }

    /// A connection to the database `postgres` as the superuser.
    pub async fn client(&self) -> Client {
        connect(&self.url("postgres")).await
    }

    pub async fn create_database(&self, name: &str) {
        self.client().await.batch_execute(&format!("CREATE DATABASE \"{name}\"")).await.expect("create a database");
    }

    /// Everything that the server logged.
    pub fn log(&self) -> String {
        self.server.log()
    }

    /// `pg_ctl stop -m fast`; how long that took.
    pub async fn stop_fast(&mut self) -> Duration {
        self.server.stop(Signal::INT).await
    }

    /// `pg_ctl stop -m immediate`: a crash, as far as the data is concerned.
    pub async fn stop_immediate(&mut self) {
        self.server.stop(Signal::QUIT).await;
    }

    /// Starts the stopped server again, on the same port.
    pub async fn start_again(&mut self) {
        let command = self.command();
        self.server.start_again(command, ready).await;
    }

    /// A fast stop and a start.
    pub async fn restart(&mut self) {
        self.stop_fast().await;
        self.start_again().await;
    }

    /// A restart after which the next transaction has this id, as if all before had been used up. A multiple of 2^20,
    /// so that the server need not know what became of them.
    pub async fn restart_at(&mut self, xid: u32) {
        assert!(xid.is_multiple_of(1 << 20));
        self.stop_fast().await;
        let mut reset = command(&self.bin.join("pg_resetwal"), self.server.home(), self.user.as_ref());
        run(reset.arg("--next-transaction-id").arg(xid.to_string()).arg(self.data())).await;
        self.start_again().await;
    }

    /// Sends a signal to the postmaster alone. Its children go on: use [`Self::freeze`] to stop everything.
    pub fn signal(&self, signal: Signal) {
        self.server.process().signal(signal);
    }

    /// SIGSTOP for the postmaster and every child it has.
    pub fn freeze(&self) {
        self.signal_all(Signal::STOP);
    }

    /// SIGCONT for the postmaster and every child it has.
    pub fn thaw(&self) {
        self.signal_all(Signal::CONT);
    }

    /// Changes a setting that needs no restart, and waits until new sessions see it.
    pub async fn reload(&self, setting: &str, value: &str) {
        let client = self.client().await;
        let value = value.replace('\'', "''");
        client.batch_execute(&format!("ALTER SYSTEM SET {setting} = '{value}'")).await.expect("ALTER SYSTEM");
        self.reload_files().await;
    }

    /// Replaces `pg_hba.conf` and loads it. Keep `local all all trust` in it, or the harness locks itself out.
    pub async fn write_hba(&self, lines: &str) {
        self.write("pg_hba.conf", lines.as_bytes());
        self.reload_files().await;
    }

    /// Writes a file into the data folder, readable by the server alone (as it demands of a TLS key).
    pub fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let path = self.data().join(name);
        fs::write(&path, content).expect("write into the data folder");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        give(&path, self.user.as_ref());
        path
    }

    async fn reload_files(&self) {
        let client = connect(&self.socket_url("postgres")).await;
        let loaded = "SELECT pg_conf_load_time()::text";
        let before: String = client.query_one(loaded, &[]).await.expect("load time").get(0);
        client.batch_execute("SELECT pg_reload_conf()").await.expect("pg_reload_conf");
        eventually(LOAD, "the settings are loaded again", async || {
            let client = connect(&self.socket_url("postgres")).await;
            client.query_one(loaded, &[]).await.expect("load time").get::<_, String>(0) != before
        })
        .await;
    }

    fn signal_all(&self, signal: Signal) {
        self.signal(signal);
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", self.pid())).expect("children");
        for pid in children.split_whitespace() {
            let pid = pid.parse().ok().and_then(rustix::process::Pid::from_raw).expect("a pid");
            // One that ended since the list was read is no matter.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    async fn copy_data(&self, template: &Path, settings: &[(&str, &str)]) {
        let mut copy = command(Path::new("cp"), self.server.home(), self.user.as_ref());
        run(copy.arg("-a").arg(template).arg(self.data())).await;
        let mut config = fs::read_to_string(self.data().join("postgresql.conf")).expect("postgresql.conf");
        let home = self.server.home().display();
        let _ = writeln!(config, "\nunix_socket_directories = '{home}'");
        for (name, value) in SETTINGS.iter().chain(settings) {
            let _ = writeln!(config, "{name} = '{}'", value.replace('\'', "''"));
        }
        self.write("postgresql.conf", config.as_bytes());
    }

    /// Starts it for the first time.
    async fn begin(&mut self) {
        let command = self.command();
        self.server.start(command, ready).await;
    }

    /// How the server is started, from what it is now.
    fn command(&self) -> impl Fn(&Server) -> Command + use<> {
        let (program, user) = (self.bin.join("postgres"), self.user.clone());
        move |server| {
            let mut postgres = command(&program, server.home(), user.as_ref());
            postgres.arg("-D").arg(data(server)).arg("-p").arg(server.port().to_string());
            postgres
        }
    }
}

fn data(server: &Server) -> PathBuf {
    server.home().join("data")
}

fn socket_url(server: &Server, database: &str) -> String {
    format!("host={} port={} user=postgres dbname={database}", server.home().display(), server.port())
}

async fn ready(server: &Server, _: &str) -> bool {
    tokio_postgres::connect(&socket_url(server, "postgres"), NoTls).await.is_ok()
}

/// A database of a shared server. Slots and roles are the whole server's, so their names are unique too.
#[derive(Debug)]
pub struct Database {
    server: &'static Postgres,
    pub name: String,
    pub slot: String,
    pub publication: String,
}

impl Database {
    pub fn server(&self) -> &'static Postgres {
        self.server
    }

    pub fn url(&self) -> String {
        self.server.url(&self.name)
    }

    pub fn socket_url(&self) -> String {
        self.server.socket_url(&self.name)
    }

    /// A connection to this database as the superuser.
    pub async fn client(&self) -> Client {
        connect(&self.url()).await
    }
}

impl Drop for Database {
    /// Slots left behind would pin the WAL of the shared server for the rest of the run.
    fn drop(&mut self) {
        let sql = [
            format!("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{}'", self.name),
            format!(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = '{}'",
                self.name
            ),
            format!("DROP DATABASE \"{}\" WITH (FORCE)", self.name),
        ];
        let mut psql = command(&self.server.bin.join("psql"), self.server.server.home(), None);
        psql.args(["-X", "-q", "-d"]).arg(self.server.socket_url("postgres"));
        for statement in &sql {
            psql.args(["-c", statement]);
        }
        let _ = psql.stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

/// Connects without TLS, and drives the connection on the test's runtime.
pub async fn connect(url: &str) -> Client {
    let (client, connection) =
        tokio_postgres::connect(url, NoTls).await.unwrap_or_else(|error| panic!("connect to {url}: {error:?}"));
    tokio::spawn(connection);
    client
}

struct Template {
    bin: PathBuf,
    data: PathBuf,
}

/// A data folder as `initdb` leaves it, made once for each version, and the programs in a place that the server's
/// user can reach.
async fn template(version: PgVersion) -> &'static Template {
    static TEMPLATES: [OnceCell<Template>; 3] = [const { OnceCell::const_new() }; 3];
    TEMPLATES[version as usize].get_or_init(|| make_template(version)).await
}

async fn make_template(version: PgVersion) -> Template {
    let user = User::instead_of_root();
    let home = new_folder(&format!("template-{}", version.major()), user.as_ref());
    let bin = reachable(&version.bin(), &home, user.as_ref()).await;
    let data = home.join("data");
    let mut initdb = command(&bin.join("initdb"), &home, user.as_ref());
    initdb.args(["--no-sync", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--pgdata"]);
    run(initdb.arg(&data)).await;
    Template { bin, data }
}

/// The programs themselves, or a copy of their installation when it lies where `user` cannot go (below `/root`).
async fn reachable(bin: &Path, home: &Path, user: Option<&User>) -> PathBuf {
    let mut probe = command(&bin.join("initdb"), home, user);
    if probe.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
    {
        return bin.to_owned();
    }
    let copy = home.join("installation");
    let mut cp = command(Path::new("cp"), scratch(), None);
    run(cp.arg("-a").arg(bin.parent().expect("PG_BIN is a folder `bin` in an installation")).arg(&copy)).await;
    copy.join("bin")
}

async fn run(command: &mut Command) {
    let what = format!("{command:?}");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.unwrap_or_else(|error| panic!("cannot start {what}: {error}"));
    let output = tokio::task::spawn_blocking(|| child.wait_with_output()).await.expect("join").expect("wait");
    assert!(
        output.status.success(),
        "{what} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
