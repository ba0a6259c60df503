//! What the README says of settings and metrics is what the program has.

use outbox_relay::config::KEYS;
use outbox_relay::telemetry::metrics::Metrics;

const README: &str = include_str!("../README.md");

#[test]
fn readme_names_every_setting_with_its_default() {
    for key in KEYS {
        let secret = if key.secret { " ⚿" } else { "" };
        let default = key.default.map(|value| format!(" `{value}`")).unwrap_or_default();
        let row = format!("| `{}`{secret} |{default} | ", key.name);
        assert!(README.contains(&row), "README.md lacks a row that begins: {row}");
    }
    let section = README.split("## Settings\n").nth(1).unwrap().split("\n## ").next().unwrap();
    let rows = section.lines().filter(|line| line.starts_with("| `")).count();
    assert_eq!(rows, KEYS.len(), "README.md has rows of settings that there are not");
}

#[test]
fn readme_names_every_metric() {
    let metrics = Metrics::new();
    metrics.slot.active.set(1.0);
    metrics.set_outbox_rows("held", 1);
    let page = metrics.render().unwrap();
    let types = page.lines().filter_map(|line| line.strip_prefix("# TYPE outbox_relay_"));
    let mut names = 0;
    for (name, kind) in types.filter_map(|line| line.split_once(' ')) {
        let total = if kind == "counter" { "_total" } else { "" };
        let quoted = format!("`{name}{total}");
        assert!(
            README.contains(&format!("{quoted}`")) || README.contains(&format!("{quoted}{{")),
            "README.md does not name {name}{total} ({kind})"
        );
        names += 1;
    }
    assert!(names > 15, "{page}");
}
