use std::time::{Duration, Instant};

use bytes::Bytes;

use super::*;
use crate::flow::event::{LogOrigin, Origin, Outcome, Settled};

const LIMITS: Limits = Limits { events: 1000, bytes: 1 << 20, ordered: true, held: 1000 };

fn event(id: i64, aggregate: &str) -> Event {
    Event {
        id,
        event_id: id.to_string().into(),
        tenant_id: None,
        aggregate_type: "order".into(),
        aggregate_id: aggregate.into(),
        event_type: "placed".into(),
        payload: Bytes::from_static(b"{}"),
        headers: "{}".into(),
        created_at: None,
        retry_count: 0,
        max_retries: 3,
        origin: Origin::Log(LogOrigin { xid: 1, final_lsn: Lsn(1), index: 0 }),
    }
}

fn parcel(id: i64, aggregate: &str, subject: &'static str) -> Parcel {
    Parcel { event: event(id, aggregate), subject: ByteString::from_static(subject), committed_at: None }
}

fn refusal() -> Refusal {
    Refusal { code: "permission_denied", message: String::new(), hopeless: false, at: Instant::now() }
}

/// The event is refused; what follows from it for the event itself.
fn refuse(delivery: &mut Delivery, token: u64) -> (bool, Option<Duration>) {
    let refused = delivery.refused(token, refusal(), |_, _| Duration::from_secs(1));
    match &refused.reports[0].outcome {
        Outcome::Failed(rejection) => (rejection.counts, rejection.retry_in),
        other => panic!("{other:?}"),
    }
}

/// Sends what is due; the tokens.
fn send(delivery: &mut Delivery) -> Vec<u64> {
    let mut tokens = Vec::new();
    while let Some(Next { token, .. }) = delivery.next_ready() {
        delivery.sent(token, Instant::now());
        tokens.push(token);
    }
    tokens
}

#[test]
fn what_comes_behind_an_event_that_the_table_shows_as_failed_is_held() {
    let mut delivery = Delivery::new(LIMITS, Start::default());
    assert!(delivery.admit(parcel(1, "a", "s")).is_none());
    assert!(delivery.admit(parcel(2, "a", "s")).is_none());
    // Read again from the log: its failure was recorded after the blocked aggregates had been read.
    delivery.admit_waiting(&event(3, "a"));
    let held = delivery.admit(parcel(4, "a", "s"));
    assert!(matches!(held.unwrap().outcome, Outcome::Held(_)));
    assert!(delivery.admit(parcel(5, "b", "s")).is_none(), "others go on");
    assert_eq!(send(&mut delivery), [0, 3]);
    assert!(delivery.accepted(0, 1).is_some());
    assert_eq!(send(&mut delivery), [1], "and so do those before it");
}

#[test]
fn a_failure_that_is_seen_twice_counts_once() {
    let mut delivery = Delivery::new(Limits { held: 3, ..LIMITS }, Start::default());
    delivery.gate().block_as_found(AggregateKey::of(&event(1, "a")), 2);
    delivery.admit_waiting(&event(1, "a"));
    delivery.admit_waiting(&event(2, "a"));
    assert!(delivery.has_room());
    delivery.admit_waiting(&event(3, "b"));
    assert!(!delivery.has_room(), "rows that fail take room, too");
}

#[test]
fn what_is_held_takes_the_room_of_its_payload_until_the_table_shows_it() {
    let mut delivery = Delivery::new(Limits { bytes: 1000, ..LIMITS }, Start::default());
    for id in 1..=2 {
        assert!(delivery.admit(parcel(id, "a", "s")).is_none());
    }
    send(&mut delivery);
    assert_eq!(refuse(&mut delivery, 0), (true, Some(Duration::from_secs(1))), "the second one is held behind it");
    assert!(delivery.admit(parcel(3, "a", "s")).is_some(), "and so is a new one");
    assert!(!delivery.has_room());
    (0..3).for_each(|token| delivery.settle(Settled { token, gone: false }));
    assert_eq!((delivery.has_room(), delivery.bytes), (true, 0));
}

#[test]
fn when_nothing_is_accepted_no_more_is_counted_and_no_event_reaches_its_end() {
    let mut delivery = Delivery::new(LIMITS, Start::default());
    for id in 0..200 {
        let mut parcel = parcel(id, &format!("a{id}"), "s");
        parcel.event.retry_count = 2;
        assert!(delivery.admit(parcel).is_none());
    }
    let outcomes: Vec<_> = send(&mut delivery).into_iter().map(|token| refuse(&mut delivery, token)).collect();
    assert!(outcomes[..50].iter().all(|outcome| *outcome == (true, None)), "the last attempt, and it counts");
    assert!(outcomes[50..].iter().all(|outcome| *outcome == (false, Some(Duration::from_secs(1)))));
}

#[test]
fn an_event_that_was_spared_and_has_no_row_is_sent_again() {
    for ordered in [true, false] {
        let mut delivery = Delivery::new(Limits { ordered, ..LIMITS }, Start::default());
        delivery.ledger().begin();
        assert!(delivery.admit(parcel(1, "a", "s")).is_none());
        delivery.ledger().commit(Lsn(9));
        let token = send(&mut delivery)[0];
        refuse(&mut delivery, token);
        delivery.take_back(token, parcel(1, "a", "s"));
        assert_eq!(send(&mut delivery), [token]);
        assert_eq!(delivery.safe(), Lsn::ZERO, "the slot waits for it");
        assert!(delivery.accepted(token, 1).is_some());
        delivery.settle(Settled { token, gone: false });
        assert_eq!(delivery.safe(), Lsn(9));
        assert_eq!((delivery.is_empty(), delivery.bytes), (true, 0));
        assert_eq!(delivery.gate().all_blocks().len(), usize::from(ordered), "the table is asked whether more waits");
    }
}

/// Time that passes between a send and the next.
fn later() -> Instant {
    std::thread::sleep(Duration::from_millis(1));
    Instant::now()
}

/// The event is refused; what the next event to send needs.
fn refuse_and_look(delivery: &mut Delivery, token: u64) -> Option<bool> {
    if !delivery.doubt(token) {
        refuse(delivery, token);
    }
    delivery.next_ready().map(|next| next.needs_proof(Instant::now(), Duration::from_hours(1)))
}

#[test]
fn an_event_refused_with_a_second_copy_is_asked_for_in_the_stream_and_its_aggregate_waits() {
    for stored in [true, false] {
        let mut delivery = Delivery::new(LIMITS, Start { last_seq: 40, ..Start::default() });
        for (id, aggregate) in [(1, "a"), (2, "a"), (3, "b")] {
            assert!(delivery.admit(parcel(id, aggregate, "s")).is_none());
        }
        assert_eq!(send(&mut delivery), [0, 2]);
        assert!(delivery.accepted(2, 41).is_some());
        later();
        assert!(delivery.send_again(0), "nobody answered");
        assert_eq!(send(&mut delivery), [0]);
        assert_eq!(refuse_and_look(&mut delivery, 0), Some(true));
        assert_eq!(delivery.copies(), (["1".into()].into(), 40), "where its copy may stand");
        let found = delivery.prove(|event_id| (stored && event_id == "1").then_some(42));
        if stored {
            assert!(matches!(found[..], [Report { token: 0, outcome: Outcome::Completed, .. }]));
            assert_eq!(send(&mut delivery), [1], "the next one of its aggregate");
        } else {
            assert!(found.is_empty());
            later();
            assert_eq!(send(&mut delivery), [0], "it may be accepted by now");
            assert!(!delivery.doubt(0), "no other copy is in question");
            assert_eq!(refuse(&mut delivery, 0), (true, Some(Duration::from_secs(1))));
        }
    }
}

#[test]
fn an_event_refused_with_its_first_copy_is_asked_for_nowhere() {
    let mut delivery = Delivery::new(LIMITS, Start::default());
    assert!(delivery.admit(parcel(1, "a", "s")).is_none());
    let token = send(&mut delivery)[0];
    later();
    assert_eq!(refuse_and_look(&mut delivery, token), None, "it waits in the table");
}

#[test]
fn of_several_events_when_it_is_not_said_which_is_refused_the_first_may_be_stored() {
    let mut delivery = Delivery::new(LIMITS, Start::default());
    let admit = |delivery: &mut Delivery, id: i64| assert!(delivery.admit(parcel(id, &id.to_string(), "s")).is_none());
    let doubt = |delivery: &mut Delivery| delivery.doubt_unnamed("s", Instant::now());
    (1..=3).for_each(|id| admit(&mut delivery, id));
    assert_eq!(send(&mut delivery), [0, 1, 2]);
    assert!(doubt(&mut delivery));
    assert!(delivery.next_ready().is_some_and(|next| next.needs_proof(Instant::now(), Duration::from_hours(1))));
    assert_eq!(delivery.copies().0, ["1".into(), "2".into(), "3".into()].into());
    assert_eq!(delivery.prove(|event_id| (event_id == "1").then_some(1)).len(), 1);
    assert_eq!(send(&mut delivery), [1, 2], "they may be accepted by now");
    assert!(doubt(&mut delivery), "the subject was accepted in between");
    assert!(delivery.prove(|_| None).is_empty(), "nothing was asked yet");
    delivery.copies();
    assert!(delivery.prove(|_| None).is_empty());
    assert_eq!(send(&mut delivery), [1, 2]);
    assert!(!doubt(&mut delivery), "neither was sent before the subject was refused");
    assert_eq!(refuse(&mut delivery, 1), (true, Some(Duration::from_secs(1))));
    assert!(delivery.accepted(2, 2).is_some());
    admit(&mut delivery, 4);
    assert_eq!(send(&mut delivery), [3]);
    assert!(!doubt(&mut delivery), "there is only one that it can be");
}

#[test]
fn a_copy_under_way_while_the_stream_is_asked_may_be_stored_afterwards() {
    let mut delivery = Delivery::new(LIMITS, Start::default());
    assert!(delivery.admit(parcel(1, "a", "s")).is_none());
    send(&mut delivery);
    assert_eq!(delivery.copies().0, ["1".into()].into());
    later();
    assert!(delivery.send_again(0), "while it is asked");
    assert!(delivery.prove(|_| None).is_empty());
    send(&mut delivery);
    assert_eq!(refuse_and_look(&mut delivery, 0), Some(true));
}

#[test]
fn what_is_forgotten_at_the_end_leaves_nothing_behind_that_others_would_wait_for() {
    let mut delivery = Delivery::new(LIMITS, Start { last_seq: 40, ..Start::default() });
    delivery.gate().block_as_found(AggregateKey::of(&event(9, "blocked")), 1);
    delivery.gate().open(&AggregateKey::of(&event(9, "blocked")));
    for (id, aggregate) in [(1, "a"), (2, "a"), (3, "b"), (4, "b"), (5, "c"), (6, "blocked")] {
        assert!(delivery.admit(parcel(id, aggregate, "s")).is_none());
    }
    for _ in 0..2 {
        let token = delivery.next_ready().unwrap().token;
        delivery.sent(token, Instant::now());
    }
    // One of c is ready, and the second of a and b, and the one of the blocked aggregate, wait.
    delivery.forget_unsent();
    assert_eq!(delivery.under_way(), (2, 0));
    assert!(delivery.accepted(0, 41).is_some());
    assert!(delivery.send_again(2));
    assert_eq!(send(&mut delivery), [2], "nothing that was forgotten stands before it");
    let refused = delivery.refused(2, refusal(), |_, _| Duration::from_secs(1));
    assert_eq!(refused.reports.len(), 1, "nobody waited behind it");
    for token in [0, 2] {
        delivery.settle(Settled { token, gone: false });
    }
    assert_eq!((delivery.is_empty(), delivery.bytes, delivery.floors.lowest()), (true, 0, None));
    let blocks = delivery.gate().all_blocks();
    let stand = delivery.gate().blocks(&blocks);
    assert!(blocks.len() == 2 && stand.iter().all(|block| block.settled), "{stand:?}");
    for block in stand {
        delivery.unblock(&block);
    }
    for (id, aggregate) in [(11, "a"), (12, "b"), (13, "c"), (14, "blocked")] {
        assert!(delivery.admit(parcel(id, aggregate, "s")).is_none());
    }
    assert_eq!(send(&mut delivery).len(), 4, "no aggregate waits for what was forgotten");
}

#[test]
fn what_was_sent_and_is_forgotten_at_the_end_is_asked_for_in_the_stream_by_the_next_session() {
    let mut delivery = Delivery::new(LIMITS, Start { last_seq: 40, ..Start::default() });
    delivery.reconciled();
    assert!(delivery.admit(parcel(1, "a", "s")).is_none());
    send(&mut delivery);
    delivery.send_again(0);
    delivery.forget_unsent();
    assert!(delivery.admit(parcel(2, "b", "s")).is_none());
    send(&mut delivery);
    assert!(delivery.accepted(1, 42).is_some());
    delivery.settle(Settled { token: 1, gone: false });
    assert_eq!(delivery.stream_seq(), 40);
}

#[test]
fn what_was_sent_from_the_table_and_deleted_is_looked_for_while_the_log_may_show_it_again() {
    let mut delivery = Delivery::new(LIMITS, Start { last_seq: 40, ..Start::default() });
    delivery.reconciled();
    delivery.gate().block_as_found(AggregateKey::of(&event(9, "blocked")), 1);
    for (id, aggregate) in [(1, "blocked"), (2, "a")] {
        delivery.ledger().begin();
        let held = delivery.admit(parcel(id, aggregate, "s"));
        assert_eq!(held.is_some(), aggregate == "blocked");
        delivery.ledger().commit(Lsn(id.unsigned_abs()));
    }
    assert_eq!(send(&mut delivery), [1]);
    refuse(&mut delivery, 1);
    delivery.settle(Settled { token: 1, gone: false });
    // Someone holds the row that is to be held. Behind it, the other one is tried again.
    assert!(delivery.admit_row(parcel(2, "a", "s"), Pass::Again).is_none());
    assert_eq!(send(&mut delivery), [2]);
    assert!(delivery.accepted(2, 41).is_some());
    delivery.settle(Settled { token: 2, gone: true });
    assert_eq!((delivery.safe(), delivery.stream_seq()), (Lsn::ZERO, 40), "the log shows both again");
    delivery.settle(Settled { token: 0, gone: false });
    assert_eq!((delivery.safe(), delivery.stream_seq()), (Lsn(2), 41));
}
