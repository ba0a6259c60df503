//! The rules of the house, kept by reading what each source file names: `use` lines and paths alike.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What each top-level module may name of the others. `relay` knows every stage; `lib` and `main` only join.
const MAY_NAME: &[(&str, &[&str])] = &[
    ("flow", &[]),
    ("pace", &[]),
    ("pause", &[]),
    ("fault", &["flow"]),
    ("config", &["fault", "flow"]),
    ("telemetry", &["config", "fault", "flow"]),
    ("admin", &["config", "fault", "flow", "pace", "pause", "telemetry"]),
    ("postgres", &["config", "fault", "flow", "pace", "pause", "telemetry"]),
    ("nats", &["config", "fault", "flow", "pace", "pause", "telemetry"]),
    ("reconcile", &["config", "fault", "flow", "nats", "pace", "pause", "postgres", "telemetry"]),
    ("cli", &["admin", "config", "fault", "flow", "nats", "pace", "pause", "postgres", "relay", "telemetry"]),
    ("main", &["cli"]),
];

/// The pipeline's stages: `cli` reaches them only through `relay`.
const STAGES: &[&str] = &["postgres::wal", "postgres::pgoutput", "nats::publish", "flow::order", "flow::confirm"];

/// Crates and the one top-level module that may name each.
const ONLY_IN: &[(&str, &str)] =
    &[("async_nats", "nats"), ("backoff", "pause"), ("postgres_protocol", "postgres"), ("refinery", "postgres")];

/// What `flow`, being pure, names none of. It may be handed an `Instant`; it never reads the clock.
const NOT_PURE: &[&str] =
    &["tokio", "tokio_util", "std::net", "std::fs", "std::time::Instant::now", "Instant::now", "SystemTime::now"];

/// How a string that is an SQL statement begins.
const SQL: &[&str] =
    &["SELECT ", "INSERT INTO ", "UPDATE ", "DELETE FROM ", "START_REPLICATION ", "CREATE_REPLICATION_"];

#[test]
fn modules_name_only_what_they_may() {
    let mistakes = check(&sources());
    assert!(mistakes.is_empty(), "\n{}", mistakes.join("\n"));
}

/// A check that cannot fail is none: each rule broken once.
#[test]
fn each_rule_notices_its_breach() {
    let breaches = [
        ("flow/order.rs", "use crate::config::Settings;", "may not name `config`"),
        ("flow/order.rs", "use tokio::sync::mpsc;", "is pure"),
        ("flow/order.rs", "fn f() { let late = Instant::now() > at; }", "is pure"),
        ("flow.rs", "fn f() { super::nats::connect(); }", "may not name `nats`"),
        ("postgres/wal.rs", "use crate::{config, nats::stream::{self, Facts}};", "may not name `nats`"),
        ("postgres/wal.rs", "use super::super::nats::stream;", "may not name `nats`"),
        ("nats/publish.rs", "fn f() { let x = crate::postgres::slot::Slot; }", "may not name `postgres`"),
        ("telemetry.rs", "use crate::relay;", "may not name `relay`"),
        ("cli/run.rs", "use crate::postgres::wal::Stream;", "only through `relay`"),
        ("cli/run.rs", "use crate::{nats::{connect, publish::Publisher}};", "only through `relay`"),
        ("relay.rs", "use async_nats::Client;", "only `nats`"),
        ("cli/events.rs", "use postgres_protocol::message;", "only `postgres`"),
        ("cli/events.rs", "const Q: &str = \"SELECT id FROM t\";", "SQL"),
        ("cli/events.rs", "const Q: &str = r#\"\n  DELETE FROM t\"#;", "SQL"),
        ("brand_new.rs", "", "has no rule"),
        ("flow/mod.rs", "", "beside its folder"),
    ];
    for (path, text, expected) in breaches {
        let mistakes = check(&[(path.to_owned(), text.to_owned())]);
        assert!(mistakes.iter().any(|mistake| mistake.contains(expected)), "{path}: {text}: {mistakes:?}");
    }
    let fine = [
        (
            "flow/order.rs",
            "use super::event::Event; // crate::config is not for us\n/* crate::nats */ use crate::flow::lsn::Lsn;",
        ),
        ("config.rs", "mod tests { use super::*; }"),
        ("fault.rs", "fn hint() -> &'static str { \"crate::nats is only text; 'a' \\\" use tokio\" }"),
        ("relay.rs", "use crate::{config, nats, postgres};"),
        ("flow/delivery.rs", "use std::time::{Duration, Instant}; fn f(now: Instant) {}"),
        ("flow/retry.rs", "#[cfg(test)]\nmod tests { fn f() { Instant::now(); } }"),
        ("flow/retry/tests.rs", "fn f() { Instant::now(); }"),
        ("relay/start.rs", "use super::super::nats; use crate::postgres::wal;"),
    ];
    for (path, text) in fine {
        let mistakes = check(&[(path.to_owned(), text.to_owned())]);
        assert!(mistakes.is_empty(), "{path}: {text}: {mistakes:?}");
    }
}

/// Path below `src/` and text of every source file.
fn sources() -> Vec<(String, String)> {
    fn walk(folder: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("read src") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    walk(&root, &mut files);
    assert!(files.len() > 5, "the sources are in src/");
    files.sort();
    let name = |path: &Path| path.strip_prefix(&root).expect("below src").to_str().expect("UTF-8").to_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a source file"))).collect()
}

fn check(sources: &[(String, String)]) -> Vec<String> {
    let mut mistakes = Vec::new();
    for (file, text) in sources {
        let module = module_path(file);
        if module.last().is_some_and(|last| last == "mod") {
            mistakes.push(format!("src/{file} stands beside its folder here, under the folder's name"));
        }
        let (code, strings) = split(text);
        let top = module.first().map_or("lib", String::as_str);
        let names = names(&code);
        if !matches!(top, "lib" | "relay") {
            check_modules(file, &module, &names, &mut mistakes);
        }
        for (name, owner) in ONLY_IN {
            if top != *owner && names.iter().any(|path| path.starts_with(&[(*name).to_owned()])) {
                mistakes.push(format!("src/{file} names the crate `{name}`, which only `{owner}` may"));
            }
        }
        if top == "flow" && module.last().is_some_and(|last| last != "tests") {
            for name in &self::names(before_tests(&code)) {
                let name = name.join("::");
                if NOT_PURE.iter().any(|taboo| name == *taboo || name.starts_with(&format!("{taboo}::"))) {
                    mistakes.push(format!("src/{file} names `{name}`, but `flow` is pure"));
                }
            }
        }
        if top != "postgres" {
            for string in strings.iter().filter(|string| SQL.iter().any(|begin| string.trim_start().starts_with(begin)))
            {
                mistakes.push(format!("src/{file} has SQL, which lives in src/postgres/: {:?}", string.trim()));
            }
        }
    }
    mistakes
}

/// Tests may read the clock.
fn before_tests(code: &str) -> &str {
    code.find("#[cfg(test)]\nmod tests {").map_or(code, |end| &code[..end])
}

fn check_modules(file: &str, module: &[String], names: &BTreeSet<Vec<String>>, mistakes: &mut Vec<String>) {
    let top = module.first().map_or("lib", String::as_str);
    let Some((_, allowed)) = MAY_NAME.iter().find(|(name, _)| *name == top) else {
        mistakes.push(format!("src/{file}: `{top}` has no rule in tests/layering.rs: decide what it may name"));
        return;
    };
    for path in names.iter().filter_map(|name| resolve(module, name)) {
        let Some(other) = path.first() else { continue };
        // Names that are no module of ours come from `super::Thing` in a module inside a file.
        let ours = MAY_NAME.iter().any(|(name, _)| name == other) || other == "relay";
        if ours && other != top && !allowed.contains(&other.as_str()) {
            mistakes.push(format!("src/{file}: `{top}` may not name `{other}` ({})", path.join("::")));
        }
        let stage = path.join("::");
        if top == "cli" && STAGES.iter().any(|name| stage == *name || stage.starts_with(&format!("{name}::"))) {
            mistakes.push(format!("src/{file}: `cli` reaches `{stage}` only through `relay`"));
        }
    }
}

/// `postgres/wal.rs` is `[postgres, wal]`, `flow.rs` is `[flow]`, `lib.rs` is `[]`.
fn module_path(file: &str) -> Vec<String> {
    let mut parts: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if parts == ["lib"] {
        parts.pop();
    }
    parts
}

/// A path from the root of the crate; `None` for a path that does not lead into it. `super` counts from the file's
/// own module, which is one too many inside `mod tests`: such a path names no module of ours, and is passed over.
fn resolve(module: &[String], name: &[String]) -> Option<Vec<String>> {
    match name.first()?.as_str() {
        "crate" | "outbox_relay" => Some(name[1..].to_vec()),
        "super" => {
            let ups = name.iter().take_while(|part| *part == "super").count();
            let base = &module[..module.len().saturating_sub(ups)];
            Some(base.iter().chain(&name[ups..]).cloned().collect())
        }
        _ => None,
    }
}

/// Every path in the code, with `a::{b, c::d}` taken apart, as lists of their parts.
fn names(code: &str) -> BTreeSet<Vec<String>> {
    let tokens = tokens(code);
    let mut found = BTreeSet::new();
    let mut at = 0;
    while at < tokens.len() {
        let next = if is_word(&tokens[at]) { path(&tokens, at, &[], &mut found) } else { at + 1 };
        at = next.max(at + 1);
    }
    found
}

/// Reads one path at `at` into `found`; returns where it ends.
fn path(tokens: &[String], mut at: usize, before: &[String], found: &mut BTreeSet<Vec<String>>) -> usize {
    let mut parts = before.to_vec();
    while let Some(token) = tokens.get(at) {
        if is_word(token) {
            parts.push(token.clone());
            at += 1;
            if tokens.get(at).is_some_and(|token| token == "::") {
                at += 1;
                continue;
            }
        } else if token == "{" && at > 0 && tokens[at - 1] == "::" {
            at += 1;
            while tokens.get(at).is_some_and(|token| token != "}") {
                at = if is_word(&tokens[at]) { path(tokens, at, &parts, found) } else { at + 1 };
            }
            at += 1;
        }
        break;
    }
    found.insert(parts);
    at
}

fn is_word(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// Words, `::`, and single characters for the rest.
fn tokens(code: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let length = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(length);
        tokens.push(token.to_owned());
        rest = after.trim_start();
    }
    tokens
}

/// The code without comments and literals, and the string literals.
fn split(text: &str) -> (String, Vec<String>) {
    let (mut code, mut strings) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let raw = rest.strip_prefix('r').map(|after| after.trim_start_matches('#'));
        let in_word = code.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !code.ends_with('b');
        let used = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(after) = raw.filter(|after| after.starts_with('"') && !in_word) {
            let hashes = rest.len() - after.len() - 1;
            let close = format!("\"{}", "#".repeat(hashes));
            let body = &after[1..];
            let length = body.find(&close).unwrap_or(body.len());
            strings.push(body[..length].to_owned());
            (hashes + 2 + length + close.len()).min(rest.len())
        } else if first == '"' {
            let length = literal(rest, '"');
            strings.push(rest[1..length.saturating_sub(1).max(1)].to_owned());
            length
        } else if first == '\'' && is_char_literal(rest) {
            literal(rest, '\'')
        } else {
            code.push(first);
            first.len_utf8()
        };
        if used > first.len_utf8() {
            code.push(' ');
        }
        rest = &rest[used..];
    }
    (code, strings)
}

/// The length of the literal at the start of `text`, its quotes included.
fn literal(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if !escaped && c == quote {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

/// `'a'` and `'\n'`, as opposed to the lifetime `'a`.
fn is_char_literal(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    match chars.next() {
        Some('\\') => true,
        Some(_) => chars.next() == Some('\''),
        None => false,
    }
}
