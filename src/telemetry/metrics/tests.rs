use super::*;

fn lines(metrics: &Metrics, start: &str) -> Vec<String> {
    let start = format!("outbox_relay_{start}");
    metrics.render().unwrap().lines().filter(|line| line.starts_with(&start)).map(str::to_owned).collect()
}

#[test]
fn names_are_those_of_the_contract() {
    let metrics = Metrics::new();
    metrics.slot.active.set(1.0);
    for known in [&metrics.oldest_unconfirmed, &metrics.slot.safe_wal, &metrics.slot.retained_wal] {
        known.set(1.0);
    }
    metrics.reconcile_last_success.set(1.0);
    metrics.slot.confirmed_lag.set_count(1);
    metrics.slot.failover_standbys.set_count(0);
    metrics.slot.missing_standbys.set_count(1);
    metrics.slot.set_wal_status(Some("reserved"));
    metrics.dead_letters.of("too_large").inc();
    metrics.set_outbox_rows(waiting::HELD, 7);
    let page = metrics.render().unwrap();
    for sample in [
        "commit_to_ack_seconds_bucket{le=\"0.0005\"} 0",
        "events_decoded_total 0",
        "publishes_total{outcome=\"stored\"} 0",
        "publish_duration_seconds_count 0",
        "publishes_in_flight 0",
        "oldest_unconfirmed_seconds 1.0",
        "writeback_rows_total{status=\"completed\"} 0",
        "writeback_duration_seconds_sum 0.0",
        "retries_total 0",
        "dead_letters_total{reason=\"too_large\"} 1",
        "compensations_total{outcome=\"manual_required\"} 0",
        "reconcile_last_success_timestamp_seconds 1.0",
        "events_without_row_total 0",
        "row_headers_dropped_total 0",
        "leader 0",
        "ready 0",
        "slot_active 1.0",
        "slot_confirmed_lag_bytes 1.0",
        "slot_retained_wal_bytes 1.0",
        "slot_safe_wal_bytes 1.0",
        "slot_failover_standbys 0.0",
        "slot_missing_standbys 1.0",
        "slot_wal_status{status=\"reserved\"} 1.0",
        "reconnects_total{peer=\"nats\"} 0",
        "outbox_rows{status=\"held\"} 7.0",
        concat!("build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
    ] {
        assert!(page.lines().any(|line| line == format!("outbox_relay_{sample}")), "{sample} in {page}");
    }
    assert!(page.contains("\noutbox_relay_start_timestamp_seconds 1"), "{page}");
    assert!(page.ends_with("# EOF\n"));
    assert_eq!(page.matches("# TYPE").count(), 27);
}

#[test]
fn what_is_not_known_is_absent_and_never_0() {
    let metrics = Metrics::new();
    let slot = || lines(&metrics, "slot_");
    assert_eq!(slot(), [""; 0]);
    metrics.slot.confirmed_lag.set_count(5 << 20);
    metrics.slot.set_wal_status(Some("lost"));
    assert!(slot().contains(&"outbox_relay_slot_confirmed_lag_bytes 5242880.0".to_owned()));
    assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"lost\"} 1.0".to_owned()));
    metrics.slot.failover_standbys.set_count(0);
    metrics.slot.missing_standbys.set_count(0);
    metrics.slot.set_wal_status(Some("new in 21"));
    assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"unknown\"} 1.0".to_owned()));
    assert!(slot().contains(&"outbox_relay_slot_wal_status{status=\"lost\"} 0.0".to_owned()));
    metrics.forget_slot();
    assert_eq!(slot(), [""; 0]);
}

#[test]
fn a_lost_slot_stays_lost_until_another_is_seen() {
    let metrics = Metrics::new();
    metrics.slot.confirmed_lag.set_count(0);
    metrics.slot.set_wal_status(Some("lost"));
    metrics.forget_slot();
    assert_eq!((metrics.slot.wal_status(), metrics.slot.confirmed_lag.get()), (Some("lost"), None));
    metrics.slot.set_wal_status(None);
    assert_eq!(metrics.slot.wal_status(), None);
}

#[test]
fn handles_and_clones_feed_the_same_metric() {
    let metrics = Metrics::new();
    let stored = metrics.clone().publishes.of(outcome::STORED);
    stored.inc();
    metrics.publishes.of(outcome::STORED).inc();
    metrics.commit_to_ack.observe(0.000_25);
    assert!(lines(&metrics, "publishes_total").contains(&r#"outbox_relay_publishes_total{outcome="stored"} 2"#.into()));
    let bucket = |le: &str, count: u32| format!("outbox_relay_commit_to_ack_seconds_bucket{{le=\"{le}\"}} {count}");
    let buckets = lines(&metrics, "commit_to_ack_seconds_bucket");
    assert!(buckets.contains(&bucket("0.0002", 0)) && buckets.contains(&bucket("0.0003", 1)), "{buckets:?}");
}
