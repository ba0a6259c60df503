//! `outbox-relay doctor`: each planted fault is found, and gone after what is printed for it was done to the letter.

mod broker;
mod database;
mod healthy;
mod server;

use std::path::PathBuf;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{Database, PgVersion, Postgres};
use crate::harness::process::{command, scratch};
use crate::harness::relay::RelaySettings;

/// The README's grants.
const GRANTS: &str = "GRANT SELECT, UPDATE ON outbox_events TO {role}; GRANT SELECT, INSERT ON outbox_dead_letter TO {role};
    GRANT SELECT, INSERT, UPDATE ON outbox_relay_state, supply_batch_compensation TO {role};
    CREATE PUBLICATION {publication} FOR TABLE outbox_events WITH (publish = 'insert', publish_via_partition_root = true)";

/// What `doctor --output json` said.
struct Report {
    code: i32,
    findings: Vec<Value>,
    checked: Vec<Value>,
}

impl Report {
    /// Runs the command. Its document is what the contract says, and its exit code what the findings say.
    async fn of(settings: &RelaySettings, arguments: &[&str]) -> Self {
        let arguments = [&["doctor", "--output", "json"], arguments].concat();
        let output = settings.run(&arguments).await;
        let words = String::from_utf8_lossy(&output.stderr);
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {words}"));
        let mut report = Self::read(&document);
        report.code = output.status.code().expect("an exit code");
        assert_eq!(report.code, if report.ills().is_empty() { 0 } else { 3 }, "{document:#}\n{words}");
        report
    }

    fn read(document: &Value) -> Self {
        assert_eq!(keys(document), ["checked", "findings"]);
        let list = |name: &str| document[name].as_array().expect("a list").clone();
        let report = Self { code: 0, findings: list("findings"), checked: list("checked") };
        for finding in &report.findings {
            assert_eq!(keys(finding), ["id", "mend", "object", "problem", "severity", "why"]);
            assert!(["error", "warning", "note"].contains(&text(&finding["severity"])), "{finding}");
            for field in ["object", "problem", "why"] {
                assert!(!text(&finding[field]).is_empty(), "{finding}");
            }
            let id = text(&finding["id"]);
            assert!(id.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-'), "{id}");
            assert!(!report.checked.contains(&finding["id"]), "{id} is fine and is not");
            for mend in finding["mend"].as_array().expect("a list") {
                let platform = &mend["platform"];
                assert!(platform.is_null() || ["rds", "cloud_sql", "azure"].contains(&text(platform)), "{mend}");
                let acts: Vec<_> = keys(mend).into_iter().filter(|key| *key != "platform").collect();
                assert!(
                    matches!(*acts, ["statement" | "command" | "setting" | "step"]) && !text(&mend[acts[0]]).is_empty(),
                    "{mend}"
                );
            }
        }
        report
    }

    fn of_id(&self, id: &str) -> Vec<&Value> {
        self.findings.iter().filter(|finding| text(&finding["id"]) == id).collect()
    }

    fn has(&self, id: &str) -> bool {
        !self.of_id(id).is_empty()
    }

    /// The ids of errors and warnings.
    fn ills(&self) -> Vec<&str> {
        let ill = |finding: &&Value| text(&finding["severity"]) != "note";
        self.findings.iter().filter(ill).map(|finding| text(&finding["id"])).collect()
    }

    /// What is printed for an id: kind and text of each act.
    fn mends(&self, id: &str) -> Vec<(String, String)> {
        let mends = self.of_id(id).into_iter().flat_map(|finding| finding["mend"].as_array().expect("a list"));
        mends
            .map(|mend| {
                let (kind, what) = mend.as_object().unwrap().iter().find(|(key, _)| *key != "platform").unwrap();
                (kind.clone(), text(what).to_owned())
            })
            .collect()
    }
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text"))
}

/// A set-up to be made ill: a database, a role with no more rights than it needs, and a place in NATS.
struct Patient {
    settings: RelaySettings,
    /// The same as a superuser, for what an operator runs.
    operator: RelaySettings,
    bin: PathBuf,
    url: String,
}

impl Patient {
    /// A healthy one.
    async fn new(database: &Database, nats: &Nats) -> Self {
        let space = Space::new();
        let operator = RelaySettings::shared(database, nats, &space);
        operator.migrate().await;
        let patient = Self::over(database.server(), &database.url(), &operator);
        let role = format!("{}_role", database.name);
        patient.sql(&format!("CREATE ROLE {role} LOGIN REPLICATION; {}", fill(GRANTS, database))).await;
        let settings = operator.clone().set("postgres.url", &database.url().replace("postgres@", &format!("{role}@")));
        Self { settings, ..patient }
    }

    async fn shared(version: PgVersion) -> (Database, Self) {
        let database = Postgres::shared(version).await.database().await;
        let patient = Self::new(&database, Nats::shared(NatsVersion::V2_15).await).await;
        (database, patient)
    }

    /// On any server, with the rights of its superuser.
    fn over(server: &Postgres, url: &str, settings: &RelaySettings) -> Self {
        let (settings, bin) = (settings.clone(), server.bin().to_owned());
        Self { operator: settings.clone(), settings, bin, url: url.to_owned() }
    }

    async fn report(&self) -> Report {
        Report::of(&self.settings, &[]).await
    }

    /// Runs a statement as an operator does, in psql.
    async fn sql(&self, statement: &str) {
        let mut psql = command(&self.bin.join("psql"), scratch(), None);
        psql.args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", &self.url, "-c", statement]);
        let output = finished(psql).await;
        assert!(output.status.success(), "{statement}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Does what was printed for `id`, to the letter. What is to be done by hand is given back.
    async fn mend(&mut self, report: &Report, id: &str) -> Vec<String> {
        let mut by_hand = Vec::new();
        let mends = report.mends(id);
        assert!(!mends.is_empty(), "nothing mends {id}");
        for (kind, what) in mends {
            match &*kind {
                "statement" => self.sql(&what).await,
                "command" => self.command(&what).await,
                "setting" => {
                    let (key, value) = what.split_once(" = ").expect("a line of the settings");
                    self.settings = self.settings.clone().set(key, value.trim_matches('"'));
                }
                _ => by_hand.push(what),
            }
        }
        by_hand
    }

    async fn command(&self, line: &str) {
        if let Some(arguments) = line.strip_prefix("outbox-relay ") {
            let output = self.operator.run(&arguments.split(' ').collect::<Vec<_>>()).await;
            assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
            return;
        }
        let known = ["psql ", "vacuumdb "].iter().any(|program| line.starts_with(program));
        assert!(known, "no such program here: {line}");
        let url = url::Url::parse(&self.url).expect("a URL");
        let mut shell = command(&PathBuf::from("/bin/sh"), scratch(), None);
        shell.args(["-c", line]).env("PATH", format!("{}:/usr/bin:/bin", self.bin.display()));
        shell.env("PGHOST", "127.0.0.1").env("PGPORT", url.port().unwrap().to_string()).env("PGUSER", "postgres");
        let output = finished(shell).await;
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

async fn finished(mut command: std::process::Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start");
    tokio::task::spawn_blocking(|| child.wait_with_output()).await.expect("join").expect("wait")
}

fn fill(text: &str, database: &Database) -> String {
    text.replace("{role}", &format!("{}_role", database.name))
        .replace("{database}", &database.name)
        .replace("{slot}", &database.slot)
        .replace("{publication}", &database.publication)
}
