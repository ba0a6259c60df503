//! The settings as the binary takes them: what it prints, and how it ends.

use std::fs;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

use crate::harness::postgres::{PgVersion, Postgres};

/// The binary, in an environment of its own.
fn relay(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_outbox-relay"));
    command.env_clear().args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs to the end; gives exit code, stdout and stderr.
fn run(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let stderr = text(&stderr);
    assert!(!stderr.contains("panicked"), "{stderr}");
    (status.code().unwrap(), text(&stdout), stderr)
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of settings")]
fn every_wrong_setting_has_its_own_error() {
    let long = "x".repeat(64);
    for (key, value, right) in [
        ("postgres.url", "postgres://me:s3cret@h:port/db", "port"),
        ("postgres.url", "host=h sslmod=require", "sslmod"),
        ("postgres.replication_url", "host=h sslmode=maybe", "maybe"),
        ("postgres.password_file", "/none", "cannot read /none"),
        ("source.table", "a.b.c", "schema.table"),
        ("source.table", "\"open", "closing quote"),
        ("source.table", &long, "63 bytes"),
        ("source.table", "outbox_relay_state", "a name of its own"),
        ("source.slot", "A-b", "a-z, 0-9 and _"),
        ("source.slot", &long, "a-z, 0-9 and _"),
        ("source.slot", "pg_conflict_detection", "another name"),
        ("source.publication", &long, "63"),
        ("source.create", "yes", "true or false"),
        ("source.failover", "1", "true or false"),
        ("source.max_retained_wal", "1KiB", "1MiB to"),
        ("source.max_retained_wal", "much", "64MiB"),
        ("nats.url", "http://h", "nats://host:4222"),
        ("nats.url", "a,,b", "empty"),
        ("nats.stream", "a.b", "visible ASCII"),
        ("nats.stream", "\u{fc}", "visible ASCII"),
        ("nats.stream", "x-Nats-Msg-Id", "guards every message"),
        ("nats.manage", "delete", "create or verify"),
        ("nats.credentials_file", "/none", "cannot read /none"),
        ("nats.nkey_file", "/", "cannot read /"),
        ("nats.user", "me", "nats.password"),
        ("nats.password", "s3cret", "nats.user"),
        ("nats.token_file", "/none", "cannot read /none"),
        ("nats.tls_ca", "/none", "cannot read /none"),
        ("nats.tls_cert", file!(), "nats.tls_key"),
        ("nats.tls_key", file!(), "nats.tls_cert"),
        ("nats.tls_first", "no", "true or false"),
        ("nats.domain", "a.b", "one word"),
        ("nats.create.subjects", "a..b", "words joined by dots"),
        ("nats.create.subjects", "$SYS.>", "leading $"),
        ("nats.create.replicas", "0", "1 to 5"),
        ("nats.create.replicas", "6", "1 to 5"),
        ("nats.create.storage", "disk", "file or memory"),
        ("nats.create.duplicate_window", "99ms", "100ms to"),
        ("nats.create.max_age", "1s", "nats.create.duplicate_window"),
        ("nats.create.max_age", "old", "never"),
        ("nats.create.max_bytes", "1B", "1MiB to"),
        ("route.subject", "{x}", "unknown variable"),
        ("route.cloudevents", "on", "true or false"),
        ("route.source", "a b", "white space"),
        ("delivery.ordering", "total", "aggregate or none"),
        ("delivery.max_in_flight", "0", "1 to"),
        ("delivery.max_in_flight", "-1", "whole number"),
        ("delivery.max_in_flight", "18446744073709551616", "whole number"),
        ("delivery.max_in_flight_bytes", "1KiB", "1MiB to"),
        ("delivery.ack_timeout", "5", "\"5s\""),
        ("delivery.ack_timeout", "0s", "10ms to"),
        ("delivery.max_blocked_rows", "0", "1 to"),
        ("retry.initial", "2m", "retry.max"),
        ("retry.max", "0s", "1ms to"),
        ("writeback.on_success", "drop", "complete or delete"),
        ("reconcile.interval", "0s", "10ms to"),
        ("reconcile.sweep_interval", "1ms", "100ms to"),
        ("reconcile.retention", "0s", "1s to"),
        ("reconcile.retention", "off", "never"),
        ("dead_letter.announce", "maybe", "true or false"),
        ("compensation.enabled", "maybe", "true or false"),
        ("compensation.subject", "{x}", "unknown variable"),
        ("compensation.timeout", "1h", "10ms to"),
        ("admin.listen", "9464", "127.0.0.1:9464"),
        ("log.format", "xml", "text or json"),
        ("log.level", "inof", "info"),
        ("shutdown.grace", "2h", "0s to 1h"),
    ] {
        let variable = format!("OUTBOX_RELAY_{}", key.replace('.', "__").to_uppercase());
        let (code, stdout, stderr) = run(relay(&["config", "check"]).env(&variable, value));
        assert_eq!((code, &*stdout), (78, ""), "{key} = {value}: {stderr}");
        let line = stderr.lines().nth(1).unwrap_or_default();
        assert!(line.starts_with(&format!("  {key}: ")), "{key} = {value}: {stderr}");
        assert!(line.contains(right) && line.ends_with(&format!("({variable})")), "{key} = {value}: {stderr}");
        assert_eq!(stderr.lines().count(), 2, "one mistake, one error: {stderr}");
        assert_eq!(line.matches(&format!("{key}: ")).count(), 1, "{stderr}");
        assert!(!stderr.contains("s3cret"), "{stderr}");
        if value.starts_with('-') {
            continue; // As a flag, clap takes it for another flag.
        }
        let flag = format!("--{}", key.replace(['.', '_'], "-"));
        let (code, _, stderr) = run(&mut relay(&["run", &flag, value]));
        assert_eq!(code, 78, "{key} = {value}: {stderr}");
        assert!(stderr.contains(&format!("{key}: ")) && stderr.contains(&format!("({flag})")), "{stderr}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("relay.toml");
    fs::write(&file, "[source]\nslot = \"A-b\"\ntabel = \"x\"\n\n[nat]\nurl = \"x\"\n").unwrap();
    let (code, stdout, stderr) = run(relay(&["config", "check", "--delivery-ack-timeout", "soon"])
        .env("OUTBOX_RELAY_CONFIG", &file)
        .env("OUTBOX_RELAY_NATS_STREAM", "S")
        .env("OUTBOX_RELAY_RETRY__MAX", "x"));
    assert_eq!((code, &*stdout), (78, ""));
    for part in [
        "6 mistakes in the settings".to_owned(),
        format!("source.slot: \"A-b\" is not a slot's name; use 1 to 63 of a-z, 0-9 and _ ({}:2)", file.display()),
        format!("source.tabel: unknown key; did you mean source.table? ({}:3)", file.display()),
        format!("nat: unknown key; did you mean nats? ({}:5)", file.display()),
        "OUTBOX_RELAY_NATS_STREAM: unknown variable; did you mean OUTBOX_RELAY_NATS__STREAM?".to_owned(),
        "delivery.ack_timeout: ".to_owned(),
        "retry.max: ".to_owned(),
    ] {
        assert!(stderr.contains(&part), "{part:?} in {stderr}");
    }
}

#[test]
fn the_settings_in_effect_are_shown_without_secrets() {
    let directory = tempfile::tempdir().unwrap();
    let (file, secret) = (directory.path().join("relay.toml"), directory.path().join("secret"));
    fs::write(&secret, "s3cret\n").unwrap();
    fs::write(&file, "[nats]\nstream = \"FILE\"\npassword = \"s3cret\"\nuser = \"me\"\n[log]\nlevel = \"warn\"\n")
        .unwrap();
    let show = |output: &str| {
        let mut command = relay(&["--config", file.to_str().unwrap(), "config", "show", "--output", output]);
        command
            .args(["--log-level", "error", "--postgres-replication-url", "host=h password='s3cret'"])
            .env("OUTBOX_RELAY_LOG__LEVEL", "debug")
            .env("OUTBOX_RELAY_POSTGRES__PASSWORD_FILE", &secret)
            .env("DATABASE_URL", "postgres://me:s3cret@db:5432/shop");
        let (code, stdout, stderr) = run(&mut command);
        assert_eq!((code, &*stderr), (0, ""));
        assert!(!stdout.contains("s3cret"), "{stdout}");
        stdout
    };
    let table = show("table");
    for (line, origin) in [
        ("url = \"postgres://me:***@db:5432/shop\"", "# DATABASE_URL".to_owned()),
        ("replication_url = \"host=h password=***\"", "# --postgres-replication-url".to_owned()),
        ("password = \"***\"", "# OUTBOX_RELAY_POSTGRES__PASSWORD_FILE".to_owned()),
        ("stream = \"FILE\"", format!("# {}:2", file.display())),
        ("level = \"error\"", "# --log-level".to_owned()),
        ("ack_timeout = \"5s\"", "# default".to_owned()),
        ("max_in_flight_bytes = \"64MiB\"", "# default".to_owned()),
        ("# token = ...", "# not set".to_owned()),
    ] {
        let found = table.lines().any(|shown| shown.starts_with(line) && shown.ends_with(&origin));
        assert!(found, "{line} {origin} in {table}");
    }
    let list: serde_json::Value = serde_json::from_str(&show("json")).unwrap();
    let entry = |key: &str| list["rows"].as_array().unwrap().iter().find(|entry| entry["key"] == key).unwrap();
    assert_eq!(entry("delivery.max_in_flight_bytes")["value"], 64 << 20);
    assert_eq!(entry("nats.create.duplicate_window")["value"], 120);
    assert_eq!(entry("nats.token")["value"], serde_json::Value::Null);
    assert_eq!(entry("log.level")["origin"], "--log-level");
}

#[test]
fn usage_errors_end_with_2() {
    for arguments in [
        &["nonsense"][..],
        &[],
        &["run", "--nats-ulr", "x"],
        &["run", "--nats-url"],
        &["config", "show", "--output", "x"],
    ] {
        let (code, stdout, stderr) = run(&mut relay(arguments));
        assert_eq!((code, &*stdout), (2, ""), "{arguments:?}");
        assert!(!stderr.is_empty());
    }
    let (code, stdout, stderr) = run(&mut relay(&["--version"]));
    assert_eq!((code, &*stdout, &*stderr), (0, concat!("outbox-relay ", env!("CARGO_PKG_VERSION"), "\n"), ""));
}

#[test]
fn flags_are_listed_in_the_long_help_only() {
    let (code, short, _) = run(&mut relay(&["run", "-h"]));
    assert!(code == 0 && !short.contains("--nats-create-subjects") && short.contains("--config"), "{short}");
    let (code, long, _) = run(&mut relay(&["run", "--help"]));
    assert!(code == 0 && long.contains("--nats-create-subjects") && long.contains("--nats-token-file"), "{long}");
}

#[test]
fn completions_and_the_manual_page_come_from_the_same_definitions() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let (code, script, _) = run(&mut relay(&["completions", shell]));
        assert!(code == 0 && script.contains("nats-create-subjects"), "{shell}");
    }
    let (code, page, _) = run(&mut relay(&["man"]));
    assert!(code == 0 && page.contains("OUTBOX_RELAY_NATS__URL") && page.contains(".TH"), "{page}");
    let directory = tempfile::tempdir().unwrap();
    let (code, _, stderr) = run(&mut relay(&["man", "--directory", directory.path().to_str().unwrap()]));
    assert_eq!(code, 0, "{stderr}");
    assert!(directory.path().join("outbox-relay-dead-letters-replay.1").exists());
    let (code, _, stderr) = run(&mut relay(&["man", "--directory", "/nonexistent/man"]));
    assert!(code == 1 && stderr.contains("/nonexistent/man"), "{code} {stderr}");
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for arguments in [&["config", "show"][..], &["completions", "bash"], &["man"], &["--help"]] {
        let mut child = relay(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        assert!(child.wait().unwrap().success(), "{arguments:?}");
        assert_eq!(stderr, "", "{arguments:?}");
    }
}

#[test]
fn an_admin_port_in_use_is_one_clear_error() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = other.local_addr().unwrap().to_string();
    let (code, _, stderr) = run(&mut relay(&["run", "--admin-listen", &listen]));
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains(&format!("{listen}, the address of admin.listen")), "{stderr}");
}

#[tokio::test]
async fn migrate_says_what_it_does_and_a_second_run_has_nothing_to_do() {
    let server = Postgres::start(PgVersion::V18, &[]).await;
    let url = server.socket_url("postgres");
    let migrate = |arguments: &[&str]| {
        run(relay(&["migrate", "--source-table", "shop.\"Ev\"\"t\""]).args(arguments).env("DATABASE_URL", &url))
    };
    let (code, script, stderr) = migrate(&["--dry-run"]);
    assert_eq!(code, 0, "{stderr}");
    assert!(script.starts_with("-- would create schema shop\n-- would apply V1__"), "{script}");
    assert!(script.contains("\"shop\".\"Ev\"\"t\""), "{script}");
    let (code, done, stderr) = migrate(&[]);
    assert_eq!(code, 0, "{stderr}");
    assert!(done.starts_with("-- created schema shop\n-- applied V1__") && !done.contains("CREATE"), "{done}");
    for arguments in [&[][..], &["--dry-run"]] {
        let (code, again, stderr) = migrate(arguments);
        assert_eq!((code, &*again), (0, "-- up to date\n"), "{stderr}");
    }
    drop(server);
    let (code, stdout, stderr) = migrate(&[]);
    assert_eq!((code, &*stdout, stderr.lines().count() > 0), (1, "", true));
}

#[test]
fn check_says_what_it_read() {
    let folder = crate::harness::process::new_folder("config", None);
    let file = folder.join("relay.toml");
    fs::write(&file, "[source]\nslot = \"one\"\n[nats]\nstream = \"ONE\"\n").unwrap();
    let path = file.to_str().unwrap();
    let mut check = relay(&["--config", path, "--nats-stream", "TWO", "config", "check"]);
    check.env("OUTBOX_RELAY_LOG__LEVEL", "warn").env("NATS_URL", "nats://h:4222").env("DATABASE_URL", "");
    let said = format!("settings file: {path}\nvariables: NATS_URL, OUTBOX_RELAY_LOG__LEVEL\nflags: --nats-stream\n");
    assert_eq!(run(&mut check), (0, "the settings are usable\n".to_owned(), said));
    let by_variable = run(relay(&["config", "check"]).env("OUTBOX_RELAY_CONFIG", path)).2;
    assert_eq!(by_variable, format!("settings file: {path}\n"));
    let without = run(&mut relay(&["config", "check"])).2;
    assert_eq!(without, "settings file: none is named by --config or OUTBOX_RELAY_CONFIG\n");
}
