use std::time::Duration;

use super::*;

#[test]
fn when_everything_is_refused_a_bounded_number_counts() {
    let (mut refusals, now) = (Refusals::default(), Instant::now());
    let counted = (0..1000).filter(|number| refusals.refused(&format!("s.{}", number % 7), now)).count();
    assert_eq!(counted, 50);
    refusals.accepted("s.1", Some(now));
    assert!(refusals.refused("s.2", now), "the run has ended");
}

#[test]
fn a_subject_that_is_refused_while_others_are_accepted_counts_however_often_it_comes() {
    let (mut refusals, start) = (Refusals::default(), Instant::now());
    let at = |seconds| start + Duration::from_secs(seconds);
    assert!(refusals.refused("bad", at(1)));
    refusals.accepted("good", Some(at(2)));
    assert_eq!((0..1000).filter(|_| refusals.refused("bad", at(3))).count(), 1000);
    // What is refused from now on together with it is another matter.
    assert_eq!((0..1000).filter(|_| refusals.refused("good", at(4))).count(), 50);
    assert!(refusals.refused("bad", at(5)));
    // Once it was accepted itself, nothing is known against it any more.
    refusals.accepted("bad", Some(at(6)));
    assert_eq!((0..1000).filter(|_| refusals.refused("bad", at(7))).count(), 50);
}

#[test]
fn what_was_sent_before_permissions_were_withdrawn_proves_nothing() {
    let (mut refusals, start) = (Refusals::default(), Instant::now());
    assert!(refusals.refused("first", start + Duration::from_secs(1)));
    refusals.accepted("other", Some(start));
    let later = start + Duration::from_secs(2);
    assert_eq!((0..1000).filter(|_| refusals.refused("first", later)).count(), 50);
}

#[test]
fn subjects_without_end_are_not_remembered_without_end() {
    let (mut refusals, now) = (Refusals::default(), Instant::now());
    for number in 0..3 * SUBJECTS {
        refusals.refused(&number.to_string(), now);
    }
    assert!(refusals.refused.len() <= SUBJECTS);
}
