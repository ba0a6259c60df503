use std::fs;
use std::path::Path;

use std::time::Duration;

use super::*;
use crate::config::defaults::blank;
use crate::config::{Secret, entries, names, toml, value};

fn variables(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect()
}

fn flag(flag: &str, value: &str) -> (Name, String) {
    (names().find(|name| name.flag() == flag).unwrap(), value.to_owned())
}

fn environment(pairs: &[(&str, &str)]) -> Sources {
    Sources { environment: variables(pairs), ..Sources::default() }
}

/// Writes a settings file, and gives the sources that name it.
fn file(directory: &Path, text: &str) -> Sources {
    let path = directory.join("relay.toml");
    fs::write(&path, text).unwrap();
    Sources { file: Some(path), ..Sources::default() }
}

fn problems(sources: &Sources) -> Vec<String> {
    load(sources, &[]).map(|_| ()).unwrap_err().0.iter().map(ToString::to_string).collect()
}

#[test]
fn every_default_can_be_read_and_passes_its_checks() {
    let mut settings = blank();
    for key in KEYS {
        if let Some(default) = key.default {
            assert_eq!((key.set)(&mut settings, &Raw::Text(default.to_owned())), Ok(()), "{}", key.name);
            let shown = (key.get)(&settings).toml().unwrap();
            assert!(shown.contains(default), "{}: {shown} is shown for {default}", key.name);
        } else {
            assert_eq!((key.get)(&settings), value::Shown::Unset, "{}", key.name);
        }
    }
    let loaded = load(&Sources::default(), &[]).unwrap();
    assert_eq!(format!("{:?}", loaded.settings), format!("{:?}", Settings::default()));
    assert_eq!(loaded.settings.delivery.ack_timeout, Duration::from_secs(5));
    assert_eq!(loaded.settings.reconcile.retention, None);
}

#[test]
fn what_is_shown_can_be_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let mut sources = environment(&[
        ("OUTBOX_RELAY_SOURCE__TABLE", "\"Out Box\".\"Ev\"\"t\""),
        ("OUTBOX_RELAY_ADMIN__LISTEN", "off"),
        ("OUTBOX_RELAY_RECONCILE__RETENTION", "7d"),
        ("OUTBOX_RELAY_NATS__CREATE__MAX_BYTES", "1.5GiB"),
        ("OUTBOX_RELAY_NATS__URL", "a:1, b:2"),
    ]);
    sources.flags = vec![flag("delivery-ordering", "none")];
    let first = load(&sources, &[]).unwrap();
    let again = load(&file(directory.path(), &toml(&first)), &[]).unwrap();
    assert_eq!(format!("{:?}", first.settings), format!("{:?}", again.settings));
    assert_eq!(again.settings.nats.url, ["a:1", "b:2"]);
    assert!(toml(&first).contains("# OUTBOX_RELAY_ADMIN__LISTEN"));
    assert!(toml(&first).contains("# --delivery-ordering"));
}

#[test]
fn flags_win_over_variables_and_variables_over_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let mut sources = file(directory.path(), "[nats]\nstream = \"FILE\"\nurl = [\"f:1\", \"f:2\"]\ntls_first = true\n");
    sources.environment = variables(&[("NATS_URL", "nats://fallback"), ("DATABASE_URL", "postgres://fallback")]);
    let loaded = load(&sources, &[]).unwrap();
    assert_eq!((&*loaded.settings.nats.stream, loaded.settings.nats.tls_first), ("FILE", true));
    assert_eq!(loaded.settings.nats.url, ["f:1", "f:2"]);
    assert_eq!(loaded.settings.postgres.url.0, "postgres://fallback");
    assert_eq!(loaded.origin("postgres.url"), Origin::Variable("DATABASE_URL".into()));
    assert_eq!(loaded.origin("nats.stream").to_string(), format!("{}:2", sources.file.clone().unwrap().display()));

    sources.environment.extend(variables(&[("OUTBOX_RELAY_NATS__STREAM", "VARIABLE"), ("OUTBOX_RELAY_NATS__URL", "")]));
    let loaded = load(&sources, &[]).unwrap();
    assert_eq!(loaded.settings.nats.stream, "VARIABLE");
    assert_eq!(loaded.settings.nats.url, ["f:1", "f:2"], "an empty variable counts as not set");

    sources.flags = vec![flag("nats-stream", "FLAG")];
    let loaded = load(&sources, &[]).unwrap();
    assert_eq!(loaded.settings.nats.stream, "FLAG");
    assert_eq!(loaded.origin("nats.stream"), Origin::Flag("--nats-stream".into()));
}

#[test]
fn the_variable_names_the_file_when_no_flag_does() {
    let directory = tempfile::tempdir().unwrap();
    let path = file(directory.path(), "[source]\nslot = \"from_file\"\n").file.unwrap();
    let sources = environment(&[("OUTBOX_RELAY_CONFIG", path.to_str().unwrap())]);
    assert_eq!(load(&sources, &[]).unwrap().settings.source.slot, "from_file");
    let missing = Sources { file: Some(directory.path().join("none.toml")), ..sources };
    assert!(matches!(&problems(&missing)[..], [one] if one.contains("none.toml") && one.contains("(--config)")));
}

#[test]
fn every_mistake_is_reported_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let mut sources = file(
        directory.path(),
        "# a comment\n[nats.create]\nreplicas = 7\nsubjects = [1]\n[delivery]\nmax_inflight = 3\n[retry]\n\
         initial = \"2m\"\n[log]\nlevel = \"inof\"\n[admin]\nlisten = 9464\n[compensation]\nenabled = \"yes\"\n",
    );
    sources.environment = variables(&[
        ("OUTBOX_RELAY_SOURCE__SLOT", "A-b"),
        ("OUTBOX_RELAY_SORUCE__SLOT", "x"),
        ("OUTBOX_RELAY_SERVERS", "/servers"),
        ("OUTBOX_RELAY_SERVICE_HOST", "10.0.0.1"),
    ]);
    sources.flags = vec![flag("shutdown-grace", "20")];
    let problems = problems(&sources);
    assert_eq!(problems.len(), 10, "{problems:#?}");
    for (key, place, right) in [
        ("nats.create.replicas", "relay.toml:3)", "1 to 5"),
        ("nats.create.subjects", "relay.toml:4)", "list"),
        ("delivery.max_inflight", "relay.toml:6)", "did you mean delivery.max_in_flight?"),
        ("retry.initial", "relay.toml:8)", "retry.max (1m)"),
        ("log.level", "relay.toml:10)", "info"),
        ("admin.listen", "relay.toml:12)", "or \"off\""),
        ("compensation.enabled", "relay.toml:14)", "true or false"),
        ("source.slot", "(OUTBOX_RELAY_SOURCE__SLOT)", "a-z"),
        ("OUTBOX_RELAY_SORUCE__SLOT", "", "OUTBOX_RELAY_SOURCE__SLOT"),
        ("shutdown.grace", "(--shutdown-grace)", "\"5s\""),
    ] {
        let found = problems.iter().filter(|problem| problem.starts_with(&format!("{key}: "))).count();
        assert_eq!(found, 1, "{key} in {problems:#?}");
        let problem = problems.iter().find(|problem| problem.starts_with(&format!("{key}: "))).unwrap();
        assert!(problem.contains(place) && problem.contains(right), "{problem}");
    }
}

#[test]
fn a_file_that_is_not_toml_shows_no_line_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let problems = problems(&file(directory.path(), "[nats]\npassword = s3cret\ntoken = \"s3cret\n"));
    assert!(problems.iter().any(|problem| problem.contains("relay.toml:2")), "{problems:?}");
    assert!(problems.iter().all(|problem| !problem.contains("s3cret")), "{problems:?}");
}

#[test]
fn secrets_come_from_files_and_are_never_shown() {
    let directory = tempfile::tempdir().unwrap();
    let secret = directory.path().join("secret");
    for (content, expected) in [("s3cret\n", "s3cret"), ("s3cret \n\n", "s3cret \n"), ("s3cret\r\n", "s3cret")] {
        fs::write(&secret, content).unwrap();
        let path = secret.to_str().unwrap();
        let sources = environment(&[
            ("OUTBOX_RELAY_POSTGRES__URL", "postgres://me:s3cret@db/x?sslpassword=s3cret"),
            ("OUTBOX_RELAY_POSTGRES__REPLICATION_URL", "host=db password=s3cret"),
            ("OUTBOX_RELAY_POSTGRES__PASSWORD_FILE", path),
            ("OUTBOX_RELAY_NATS__TOKEN_FILE", path),
        ]);
        let loaded = load(&sources, &[]).unwrap();
        assert_eq!(loaded.settings.postgres.password, Some(Secret(expected.to_owned())));
        assert_eq!(loaded.settings.nats.token, Some(Secret(expected.to_owned())));
        assert_eq!(loaded.origin("nats.token").to_string(), "OUTBOX_RELAY_NATS__TOKEN_FILE");
        let json: Vec<_> = entries(&loaded).iter().map(|entry| entry.value.json()).collect();
        for shown in [toml(&loaded), format!("{loaded:?}"), format!("{json:?}")] {
            assert!(!shown.contains("s3cret"), "{shown}");
        }
        let mut url = environment(&[("OUTBOX_RELAY_NATS__URL", "nats://me:s3cret@h:4222")]);
        assert!(toml(&load(&url, &[]).unwrap()).contains("nats://me:***@h:4222"));
        url.environment.extend(sources.environment);
        assert!(problems(&url).iter().all(|problem| !problem.contains("s3cret")));
    }
}

#[test]
fn a_secret_has_one_source() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty");
    fs::write(&empty, "\n").unwrap();
    let mut sources = environment(&[
        ("OUTBOX_RELAY_POSTGRES__PASSWORD", "a"),
        ("OUTBOX_RELAY_POSTGRES__PASSWORD_FILE", "/none"),
        ("OUTBOX_RELAY_POSTGRES__URL_FILE", "/none"),
        ("OUTBOX_RELAY_NATS__TOKEN_FILE", empty.to_str().unwrap()),
    ]);
    let found = problems(&sources);
    for (key, problem) in [
        ("postgres.password_file: ", "postgres.password is set too"),
        ("postgres.url_file: ", "cannot read /none"),
        ("nats.token_file: ", "empty"),
    ] {
        assert!(found.iter().any(|line| line.starts_with(key) && line.contains(problem)), "{key} in {found:#?}");
    }
    sources.flags = ["postgres-password", "postgres-url", "nats-token"].map(|name| flag(name, "b")).to_vec();
    assert_eq!(load(&sources, &[]).unwrap().settings.postgres.password, Some(Secret("b".into())), "a flag wins");
}

#[test]
fn keys_are_checked_against_each_other() {
    let path = file!();
    for (set, key) in [
        (&[("nats-create-max-age", "1m")][..], "nats.create.max_age: "),
        (&[("retry-initial", "3m")], "retry.initial: "),
        (&[("retry-max", "1s")], "retry.max: "),
        (&[("nats-tls-cert", path)], "nats.tls_cert: "),
        (&[("nats-tls-key", path)], "nats.tls_key: "),
        (&[("nats-user", "me")], "nats.user: "),
        (&[("nats-password", "x")], "nats.password: "),
        (&[("nats-token", "x"), ("nats-nkey-file", path)], "nats.nkey_file: "),
        (&[("nats-token", "x"), ("nats-url", "nats://t@h")], "nats.token: "),
    ] {
        let flags = set.iter().map(|(name, value)| flag(name, value)).collect();
        let problems = problems(&Sources { flags, ..Sources::default() });
        assert!(matches!(&problems[..], [one] if one.starts_with(key)), "{set:?}: {problems:?}");
    }
}

#[test]
fn checks_of_other_modules_run_on_what_could_be_read() {
    let check = Check { keys: &["route.subject", "nats.stream"], test: |settings| Err(settings.route.subject.clone()) };
    let mistakes = load(&environment(&[("OUTBOX_RELAY_NATS__STREAM", "S")]), &[check]).unwrap_err().0;
    assert!(matches!(&mistakes[..], [one] if one.key == "nats.stream" && one.problem.contains("{event_type}")));
    let mistakes = load(&environment(&[("OUTBOX_RELAY_NATS__STREAM", "a b")]), &[check]).unwrap_err().0;
    assert!(matches!(&mistakes[..], [one] if one.problem.contains("a b")), "{mistakes:?}");
}

#[cfg(unix)]
#[test]
fn variables_need_not_be_text() {
    use std::os::unix::ffi::OsStringExt;
    let odd = OsString::from_vec(vec![b'a', 0xFF]);
    let other = Sources { environment: vec![(odd.clone(), odd.clone())], ..Sources::default() };
    assert!(load(&other, &[]).is_ok());
    let ours = Sources { environment: vec![("OUTBOX_RELAY_NATS__USER".into(), odd)], ..Sources::default() };
    assert!(matches!(&problems(&ours)[..], [one] if one.contains("nats.user") && one.contains("UTF-8")));
}
