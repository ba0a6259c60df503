//! The server and its settings.

use super::chart::{Act, Chart, Finding};
use super::parameters;
use crate::config::{OnSuccess, Settings};
use crate::postgres::checks::ServerFault;
use crate::postgres::facts::{OldDatabase, Platform, Server};
use crate::postgres::remedies;

/// Connections that a running relay opens at most.
const CONNECTIONS: i64 = 8;
/// Below this a short load on the server is taken for a dead relay. Milliseconds.
const SHORT_TIMEOUT: i64 = 5_000;
/// The least that source.max_retained_wal can be, in MiB.
const LEAST_RETAINED: u64 = 16;
/// Clocks that differ by less do no harm. Seconds.
const SKEW: f64 = 2.0;
/// Days are in seconds.
const DAY: f64 = 86_400.0;
/// Transaction ids after which a server that cannot freeze is close to its end, of 2,147 million.
const WRAPAROUND: i32 = 1_000_000_000;

/// Looks at the server, its settings, and the role.
pub fn judge(server: &Server, slot_exists: bool, settings: &Settings, chart: &mut Chart) {
    chart.area("PostgreSQL");
    let faults = server.state.faults();
    for id in ["server-too-old", "server-standby", "wal-level"] {
        chart.check(id, fault(&faults, id));
    }
    chart.check("output-plugin", output_plugin(server));
    chart.check("slots-left", slots_left(server, slot_exists));
    chart.check("connections-left", connections_left(server, slot_exists));
    chart.check("slot-wal-unlimited", unlimited(server));
    chart.check("retained-wal-limit", retained_wal(server, settings));
    chart.check("sender-timeout", sender_timeout(server));
    chart.check("idle-slot-timeout", idle_slots(server));
    chart.check("synchronous-commit", synchronous_commit(server));
    chart.check("encoding", encoding(server));
    chart.check("clock-skew", clock(server));
    chart.check("wraparound", wraparound(server));
    chart.check("autovacuum-off", autovacuum(server));
    chart.area("Role");
    chart.check("role-replication", fault(&faults, "role-replication"));
    chart.check("role-superuser", superuser(server));
    chart.check("role-limits", limits(server));
    chart.check("role-expires", expires(server));
    chart.check("role-settings", role_settings(server));
    if settings.writeback.on_success == OnSuccess::Delete && settings.reconcile.retention.is_some() {
        let why = "rows are deleted as soon as JetStream has them, so that there are none to keep for a while";
        let note = Finding::note("reconcile.retention", "it has no effect with writeback.on_success = \"delete\"", why);
        chart.check("retention-without-effect", [note]);
    }
}

/// The one of this id among what the relay refuses to start with.
fn fault(faults: &[ServerFault], id: &str) -> Option<Finding> {
    faults.iter().find(|fault| fault_id(fault) == id).map(found)
}

/// What is said of it.
pub fn found(fault: &ServerFault) -> Finding {
    let finding = |object: &str| Finding::error(object, fault.problem(), "the relay refuses to start with it");
    match fault {
        ServerFault::WalLevel(_) => finding("wal_level").mends(parameters::logical_decoding()),
        ServerFault::Standby => finding("postgres.url")
            .step("name all hosts in postgres.url: host1,host2 and target_session_attrs=read-write"),
        ServerFault::NoReplication(role) => finding(&format!("role {role}"))
            .sql(remedies::let_replicate(role))
            .on(Some(Platform::Rds), Act::Statement(remedies::let_replicate_on_rds(role))),
        ServerFault::TooOld(_) => finding("server").step("upgrade PostgreSQL to 15 or later"),
        ServerFault::Different(..) => finding("postgres.replication_url")
            .step("let postgres.url and postgres.replication_url lead to the same primary"),
    }
}

fn fault_id(fault: &ServerFault) -> &'static str {
    match fault {
        ServerFault::TooOld(_) => "server-too-old",
        ServerFault::Standby => "server-standby",
        ServerFault::WalLevel(_) => "wal-level",
        ServerFault::NoReplication(_) => "role-replication",
        ServerFault::Different(..) => "servers-differ",
    }
}

/// A server may limit the plugins that a slot can have.
fn output_plugin(server: &Server) -> Option<Finding> {
    const NAME: &str = "output_plugin_libraries";
    let list = server.text(NAME);
    let allowed = list.split(',').any(|plugin| plugin.trim().trim_matches('"') == "pgoutput");
    (server.has(NAME) && !allowed).then(|| {
        let value = if list.is_empty() { "pgoutput".to_owned() } else { format!("{list}, pgoutput") };
        Finding::error(NAME, format!("it is {list:?}, without pgoutput"), "the relay's slot decodes by pgoutput")
            .mends(parameters::set(server, NAME, &value))
    })
}

fn slots_left(server: &Server, slot_exists: bool) -> Option<Finding> {
    const NAME: &str = "max_replication_slots";
    let most = server.number(NAME)?;
    (!slot_exists && server.slots >= most).then(|| {
        let problem = format!("all {most} replication slots are in use");
        Finding::error(NAME, problem, "the relay's slot cannot be made").mends(parameters::set(
            server,
            NAME,
            &(server.slots + 4).to_string(),
        ))
    })
}

fn connections_left(server: &Server, slot_exists: bool) -> Option<Finding> {
    const NAME: &str = "max_connections";
    let most = server.number(NAME)?;
    let reserved = ["superuser_reserved_connections", "reserved_connections"];
    let reserved: i64 = reserved.into_iter().filter_map(|name| server.number(name)).sum();
    let left = most - reserved - server.sessions;
    // A relay that runs has its connections.
    (left < CONNECTIONS && !(slot_exists && server.senders > 0)).then(|| {
        let problem = format!("{} of {most} connections are left", left.max(0));
        Finding::warning(NAME, problem, format!("the relay opens up to {CONNECTIONS} connections"))
            .mends(parameters::set(server, NAME, &(most + 20).to_string()))
    })
}

fn unlimited(server: &Server) -> Option<Finding> {
    const NAME: &str = "max_slot_wal_keep_size";
    (server.number(NAME)? < 0).then(|| {
        let why = "while no relay runs, its slot lets the log grow until the disk is full";
        Finding::note(NAME, "slots may hold back any amount of the log", why)
            .mends(parameters::set(server, NAME, "10GB"))
    })
}

/// The relay leaves rows to the table at its own limit: the server must not give the slot up before.
fn retained_wal(server: &Server, settings: &Settings) -> Option<Finding> {
    const NAME: &str = "max_slot_wal_keep_size";
    let keep = u64::try_from(server.number(NAME)?).ok()?;
    let own = settings.source.max_retained_wal;
    (own >= keep).then(|| {
        let problem = format!("{own} bytes are not below {NAME} ({keep} bytes)");
        let why = "the server gives the slot up before the relay leaves rows to the table";
        let finding = Finding::warning("source.max_retained_wal", problem, why);
        let half = (keep / 2) >> 20;
        if half >= LEAST_RETAINED {
            finding.setting("source.max_retained_wal", format!("{half}MiB"))
        } else {
            finding.mends(parameters::set(server, NAME, &((own * 2) >> 20).to_string()))
        }
    })
}

fn sender_timeout(server: &Server) -> Option<Finding> {
    const NAME: &str = "wal_sender_timeout";
    let timeout = server.number(NAME)?;
    (1..SHORT_TIMEOUT).contains(&timeout).then(|| {
        let why = "a short stall of server or relay ends the stream and stops deliveries";
        Finding::warning(NAME, format!("it is only {timeout} ms"), why).mends(parameters::set(server, NAME, "30000"))
    })
}

fn idle_slots(server: &Server) -> Option<Finding> {
    const NAME: &str = "idle_replication_slot_timeout";
    let timeout = server.number(NAME)?;
    (timeout > 0).then(|| {
        let problem = format!("slots that nobody uses for {} s are given up", timeout / 1000);
        let why = "a relay that is away for longer reads every waiting row from the table";
        Finding::note(NAME, problem, why).mends(parameters::set(server, NAME, "0"))
    })
}

fn synchronous_commit(server: &Server) -> Option<Finding> {
    const NAME: &str = "synchronous_commit";
    (server.text(NAME) == "off").then(|| {
        let why = "events become visible to the relay up to three wal_writer_delay after their commit";
        Finding::note(NAME, "commits do not wait for the disk", why).mends(parameters::set(server, NAME, "on"))
    })
}

fn encoding(server: &Server) -> Option<Finding> {
    (server.encoding == "SQL_ASCII").then(|| {
        let object = format!("database {:?}", server.database);
        let why = "payloads may hold bytes that are no UTF-8, and such events become dead letters";
        Finding::warning(object, "its encoding is SQL_ASCII, which checks nothing", why)
            .step("dump the database, make it anew with ENCODING 'UTF8', and restore it")
    })
}

fn clock(server: &Server) -> Option<Finding> {
    let ahead = server.clock_ahead;
    (ahead.abs() > SKEW + server.clock_doubt.as_secs_f64()).then(|| {
        let way = if ahead > 0.0 { "ahead of" } else { "behind" };
        let problem = format!("the server's clock is {:.1} s {way} this machine's", ahead.abs());
        let why = "times of retries are the server's, measured times are the difference of both clocks";
        Finding::warning("clock", problem, why).step("let both machines keep their time by NTP")
    })
}

fn wraparound(server: &Server) -> Vec<Finding> {
    let found = |database: &OldDatabase| {
        let object = format!("database {:?}", database.name);
        let problem = format!("its oldest transaction id is {} transactions old", database.age);
        let finding = Finding::warning(object, problem, "at 2,147 million the server takes no more writes");
        let finding = if database.open {
            // VACUUM sees one database, which need not be the outbox's.
            finding.command(format!("vacuumdb --freeze --dbname={}", quoted(&database.name)))
        } else {
            finding.step("autovacuum alone gets there: it does when nothing holds old rows back")
        };
        finding.step("end what holds old rows back: see the findings about transactions and slots")
    };
    server.oldest.iter().filter(|database| database.age > WRAPAROUND).map(found).collect()
}

/// For a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn autovacuum(server: &Server) -> Vec<Finding> {
    let off = |name: &str| {
        let why = "each delivery leaves a dead row behind, which nothing removes";
        Finding::warning(name, "it is off", why).mends(parameters::set(server, name, "on"))
    };
    ["autovacuum", "track_counts"].into_iter().filter(|name| server.text(name) == "off").map(off).collect()
}

fn superuser(server: &Server) -> Option<Finding> {
    let role = &server.role;
    role.superuser.then(|| {
        let why = "a relay needs LOGIN, REPLICATION and grants on its tables, no more";
        Finding::note(format!("role {}", role.name), "it is a superuser", why)
            .step("give the relay a role of its own: see the quick start of README.md")
    })
}

fn limits(server: &Server) -> Vec<Finding> {
    let (role, mut found) = (&server.role, Vec::new());
    let why = || format!("the relay opens up to {CONNECTIONS} connections");
    let few = |limit: i32| (0..CONNECTIONS).contains(&i64::from(limit));
    if few(role.connection_limit) && !role.superuser {
        let problem = format!("it may have {} connections", role.connection_limit);
        found.push(
            Finding::error(format!("role {}", role.name), problem, why()).sql(remedies::lift_role_limit(&role.name)),
        );
    }
    if few(server.database_limit) && !role.superuser {
        let problem = format!("it takes {} connections", server.database_limit);
        found.push(
            Finding::error(format!("database {:?}", server.database), problem, why())
                .sql(remedies::lift_database_limit(&server.database)),
        );
    }
    found
}

fn expires(server: &Server) -> Option<Finding> {
    let role = &server.role;
    let left = role.expires_in.filter(|left| *left < 30.0 * DAY)?;
    let problem = format!("its password expires in {:.0} days", left / DAY);
    Some(
        Finding::warning(format!("role {}", role.name), problem, "the relay cannot connect from then on")
            .sql(remedies::never_expire(&role.name)),
    )
}

/// Settings that end or spoil the relay's sessions, and that a role can have for itself.
fn role_settings(server: &Server) -> Vec<Finding> {
    let role = &server.role.name;
    let mut found = Vec::new();
    if server.text("default_transaction_read_only") == "on" {
        let finding = Finding::error("default_transaction_read_only", "it is on", "the relay writes to the outbox");
        found.push(finding.sql(remedies::set_for_role(role, "default_transaction_read_only", "off")));
    }
    if let Some(timeout) = server.number("idle_session_timeout").filter(|timeout| *timeout > 0) {
        let problem = format!("sessions that are idle for {} s are ended", timeout / 1000);
        let why = "the relay's sessions rest while there is nothing to do, and are taken down again and again";
        found.push(Finding::warning("idle_session_timeout", problem, why).sql(remedies::set_for_role(
            role,
            "idle_session_timeout",
            "0",
        )));
    }
    found
}
