//! The typed calls for Rust programs.

use std::time::{Duration, SystemTime};

use outbox_relay::postgres::store::{
    ClaimedEvent, EnqueueError, Failed, NewEvent, StoreError, claim_batch, enqueue, mark_completed, mark_failed,
};

use super::{Outbox, one, outbox_events};
use crate::harness::postgres::PgVersion;

const LEASE: Duration = Duration::from_mins(1);

impl Outbox {
    async fn enqueue(&mut self, event: NewEvent<'_>) -> Result<String, EnqueueError> {
        let tx = self.client.transaction().await.unwrap();
        let id = enqueue(&tx, &outbox_events(), event).await?;
        tx.commit().await.unwrap();
        Ok(id)
    }

    async fn claim(&mut self, worker: &str, size: u32) -> Vec<ClaimedEvent> {
        let tx = self.client.transaction().await.unwrap();
        let claimed = claim_batch(&tx, &outbox_events(), worker, size, LEASE).await.unwrap();
        tx.commit().await.unwrap();
        claimed
    }

    async fn complete(&mut self, id: i64, worker: &str) -> Result<(), StoreError> {
        let tx = self.client.transaction().await.unwrap();
        let outcome = mark_completed(&tx, &outbox_events(), id, worker).await;
        tx.commit().await.unwrap();
        outcome
    }

    async fn fail(&mut self, event: &ClaimedEvent, worker: &str, at: SystemTime) -> Result<Failed, StoreError> {
        let tx = self.client.transaction().await.unwrap();
        let outcome = mark_failed(&tx, &outbox_events(), event, worker, "E42", at).await;
        tx.commit().await.unwrap();
        outcome
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn enqueue_tells_its_errors_apart() {
    let mut outbox = Outbox::new(PgVersion::V18).await;
    let event = NewEvent {
        deduplication_key: Some("key"),
        tenant_id: Some("tenant"),
        headers: &[("traceparent", "00-x"), ("odd \"name\"", "value")],
        event_id: Some("e1"),
        ..NewEvent::new("order", "7", "placed", r#"{"n": 9007199254740993}"#)
    };
    assert_eq!(outbox.enqueue(event).await.unwrap(), "e1");
    assert_eq!(outbox.enqueue(NewEvent { event_id: None, ..event }).await.unwrap(), "e1");
    let row = "SELECT concat_ws(' ', tenant_id, payload, headers) FROM outbox_events";
    let row: String = one(&outbox.client, row, &[]).await;
    assert_eq!(row, r#"tenant {"n": 9007199254740993} {"odd \"name\"": "value", "traceparent": "00-x"}"#);

    let error = outbox.enqueue(NewEvent { payload: "1", ..event }).await.unwrap_err();
    assert!(matches!(error, EnqueueError::DeduplicationConflict(_)), "{error}");
    let error = outbox.enqueue(NewEvent { deduplication_key: None, ..event }).await.unwrap_err();
    assert!(matches!(error, EnqueueError::EventIdUsed { .. }), "{error}");
    let plain = NewEvent::new("order", "7", "placed", "{}");
    let long = "x".repeat(65);
    for event in [
        NewEvent { payload: "{", ..plain },
        NewEvent { payload: r#""\u0000""#, ..plain },
        NewEvent { aggregate_id: "", ..plain },
        NewEvent { aggregate_type: &long, ..plain },
        NewEvent { event_id: Some("a b"), ..plain },
        NewEvent { tenant_id: Some(""), ..plain },
    ] {
        let error = outbox.enqueue(event).await.unwrap_err();
        assert!(matches!(error, EnqueueError::Invalid { .. }), "{event:?}: {error}");
    }
    outbox.client.batch_execute("DROP FUNCTION enqueue_outbox_event").await.unwrap();
    let error = outbox.enqueue(plain).await.unwrap_err();
    assert!(error.to_string().contains("enqueue_outbox_event"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_count_attempts_and_marks_need_the_lease() {
    for mut outbox in Outbox::ends().await {
        outbox.insert("a", ", max_retries, headers", ", 2, '{\"h\": \"v\"}'").await;
        outbox.insert("b", "", "").await;
        let claimed = outbox.claim("one", 1).await;
        assert_eq!(claimed.len(), 1);
        let first = claimed[0].clone();
        assert_eq!((first.event_id.as_str(), first.attempt, first.max_retries), ("a", 1, 2));
        assert_eq!((first.payload.as_str(), first.headers.as_str()), ("{}", r#"{"h": "v"}"#));
        let lease = first.lease_until.duration_since(SystemTime::now()).unwrap();
        assert!(lease <= LEASE && lease > LEASE / 2, "{lease:?}");

        assert!(matches!(outbox.complete(first.id, "two").await, Err(StoreError::LeaseLost { .. })));
        assert!(matches!(outbox.fail(&first, "two", SystemTime::now()).await, Err(StoreError::LeaseLost { .. })));
        let past = SystemTime::now() - LEASE;
        assert_eq!(outbox.fail(&first, "one", past).await.unwrap(), Failed::WillRetry);
        assert!(matches!(outbox.fail(&first, "one", past).await, Err(StoreError::LeaseLost { .. })), "counted twice");

        // The lease ends, the same worker claims again: the first claim cannot fail the second.
        let second = outbox.claim("one", 1).await.remove(0);
        assert_eq!((second.event_id.as_str(), second.attempt), ("a", 2));
        assert!(matches!(outbox.fail(&first, "one", past).await, Err(StoreError::LeaseLost { .. })));
        assert_eq!(outbox.fail(&second, "one", past).await.unwrap(), Failed::DeadLetter);
        let letter = "SELECT concat_ws(' ', original_event_id, d.headers, d.error_code, d.retry_count, status,
                                       dead_letter_reason, d.first_failed_at = e.first_failed_at, version, next_retry_at)
                      FROM outbox_dead_letter d JOIN outbox_events e ON e.event_id = original_event_id";
        let letter: String = one(&outbox.client, letter, &[]).await;
        assert_eq!(letter, r#"a {"h": "v"} E42 2 dead_letter E42 t 5"#);

        let other = outbox.claim("two", 100).await.remove(0);
        outbox.complete(other.id, "two").await.unwrap();
        assert_eq!(outbox.status("b").await, "completed");
        assert!(matches!(outbox.complete(other.id, "two").await, Err(StoreError::LeaseLost { .. })));
        assert!(outbox.claim("two", 100).await.is_empty());
    }
}
