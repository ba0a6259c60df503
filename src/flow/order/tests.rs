use super::*;

fn key(id: &'static str) -> AggregateKey {
    AggregateKey { tenant_id: None, aggregate_type: "order".into(), aggregate_id: ByteString::from_static(id) }
}

fn blocked(gate: &Gate) -> usize {
    gate.lines.values().filter(|line| line.block.is_some()).count()
}

/// The one blocked aggregate, as it stands.
fn seen(gate: &Gate) -> Blocked {
    gate.blocks(&gate.all_blocks()).remove(0)
}

fn arrive(gate: &mut Gate, id: &'static str, token: u64) -> Turn {
    gate.arrive(key(id), token, Pass::First)
}

#[test]
fn events_of_one_aggregate_go_one_after_the_other_in_their_order() {
    let mut gate = Gate::default();
    assert_eq!([1, 2, 3].map(|token| arrive(&mut gate, "a", token)), [Turn::Go, Turn::Wait, Turn::Wait]);
    assert_eq!(gate.leave(&key("a")), Some(2));
    assert_eq!(gate.leave(&key("a")), Some(3));
    assert_eq!(gate.leave(&key("a")), None);
    assert!(gate.lines.is_empty(), "an aggregate at rest takes no memory");
}

#[test]
fn aggregates_do_not_wait_for_each_other() {
    let mut gate = Gate::default();
    assert_eq!(arrive(&mut gate, "a", 1), Turn::Go);
    assert_eq!(arrive(&mut gate, "b", 2), Turn::Go);
    let tenant = AggregateKey { tenant_id: Some("t".into()), ..key("a") };
    assert_eq!(gate.arrive(tenant, 3, Pass::First), Turn::Go, "another tenant's aggregate is another aggregate");
}

#[test]
fn what_comes_behind_a_failed_event_is_held_until_the_table_is_empty() {
    let mut gate = Gate::default();
    arrive(&mut gate, "a", 1);
    arrive(&mut gate, "a", 2);
    assert_eq!(gate.block(key("a")), [2]);
    assert_eq!(arrive(&mut gate, "a", 3), Turn::Hold);
    assert!(!seen(&gate).settled, "two holds are on their way to the table");
    gate.hold_committed(&key("a"));
    gate.hold_committed(&key("a"));
    let seen = seen(&gate);
    assert_eq!(gate.arrive(key("a"), 4, Pass::Again), Turn::Go, "the retry itself may go");
    gate.unblock(&seen);
    assert_eq!(blocked(&gate), 1, "not while it is under way");
    assert_eq!(gate.leave(&key("a")), None);
    gate.unblock(&seen);
    assert!(gate.lines.is_empty());
    assert_eq!(arrive(&mut gate, "a", 5), Turn::Go);
}

#[test]
fn a_row_that_fails_again_keeps_the_block() {
    let mut gate = Gate::default();
    gate.block_as_found(key("a"), 2);
    let seen = seen(&gate);
    assert_eq!(gate.arrive(key("a"), 1, Pass::Again), Turn::Go);
    gate.block(key("a"));
    gate.await_failure(&key("a"));
    gate.hold_committed(&key("a"));
    gate.unblock(&seen);
    assert_eq!(arrive(&mut gate, "a", 2), Turn::Hold);
}

#[test]
fn a_released_row_that_is_held_again_counts_once() {
    let mut gate = Gate::default();
    gate.block_as_found(key("a"), 3);
    for _ in 0..5 {
        assert_eq!(gate.arrive(key("a"), 1, Pass::Again), Turn::Go);
        assert_eq!(gate.arrive(key("a"), 2, Pass::Again), Turn::Wait);
        assert_eq!(gate.block(key("a")), [2]);
        gate.still_held(&key("a"));
        assert_eq!(gate.held(), 3);
    }
    let seen = seen(&gate);
    gate.unblock(&seen);
    assert_eq!((gate.held(), blocked(&gate)), (0, 0));
}

#[test]
fn a_failure_that_is_not_in_the_table_yet_keeps_the_block() {
    let mut gate = Gate::default();
    arrive(&mut gate, "a", 1);
    gate.block(key("a"));
    gate.await_failure(&key("a"));
    assert!(!seen(&gate).settled, "the table would be seen without anything that waits");
    gate.hold_committed(&key("a"));
    assert!(seen(&gate).settled);
}

#[test]
fn an_event_held_after_the_table_was_looked_at_keeps_the_block() {
    let mut gate = Gate::default();
    gate.block(key("a"));
    let seen = seen(&gate);
    assert_eq!(arrive(&mut gate, "a", 1), Turn::Hold);
    gate.unblock(&seen);
    gate.hold_committed(&key("a"));
    gate.unblock(&seen);
    assert_eq!(arrive(&mut gate, "a", 2), Turn::Hold);
}

#[test]
fn what_comes_while_the_held_rows_leave_waits_and_goes_on_behind_them() {
    let mut gate = Gate::default();
    gate.block_as_found(key("a"), 2);
    gate.open(&key("a"));
    assert_eq!(arrive(&mut gate, "a", 7), Turn::Wait);
    assert_eq!(gate.arrive(key("a"), 8, Pass::Again), Turn::Go, "the held row");
    assert_eq!(arrive(&mut gate, "a", 9), Turn::Wait);
    assert_eq!(gate.leave(&key("a")), None, "the next one is in the table");
    let seen = seen(&gate);
    assert_eq!((seen.settled, gate.held()), (true, 2));
    assert_eq!(gate.unblock(&seen), Some(7));
    assert_eq!(gate.held(), 0);
    assert_eq!(arrive(&mut gate, "a", 10), Turn::Wait);
    assert_eq!([(); 3].map(|()| gate.leave(&key("a"))), [Some(9), Some(10), None]);
    assert!(gate.lines.is_empty());
}

#[test]
fn what_came_while_the_held_rows_left_is_held_where_they_do_not_leave_after_all() {
    for fails in [false, true] {
        let mut gate = Gate::default();
        gate.block_as_found(key("a"), 2);
        gate.open(&key("a"));
        assert_eq!(gate.arrive(key("a"), 7, Pass::Again), Turn::Go);
        assert_eq!(gate.arrive(key("a"), 8, Pass::Again), Turn::Wait);
        assert_eq!(arrive(&mut gate, "a", 9), Turn::Wait);
        let before = seen(&gate);
        if fails {
            assert_eq!(gate.block(key("a")), [8, 9]);
            gate.still_held(&key("a"));
        } else {
            assert_eq!(gate.close(&key("a")), [9]);
        }
        assert_eq!(gate.held(), 3);
        assert_eq!(arrive(&mut gate, "a", 10), Turn::Hold);
        gate.unblock(&before);
        assert_eq!(blocked(&gate), 1);
    }
}
