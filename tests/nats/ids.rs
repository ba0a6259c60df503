//! Looking for stored messages: by their ids, by their places, by the time at which they were stored.

use jiff::{SignedDuration, Timestamp};
use outbox_relay::nats::ids::Start;

use super::Rig;
use crate::harness::nats::NatsVersion;

#[tokio::test]
async fn a_message_is_found_by_its_id_from_a_place_or_a_time_on() {
    for version in NatsVersion::ENDS {
        let (server, mut rig, stream) = Rig::with_stream(version).await;
        assert_eq!(stream.find("7", Start::After(0), None).await, Ok(None));
        assert_eq!(stream.id_at(7).await, Ok(None));
        let before = Timestamp::now() - SignedDuration::from_secs(1);
        for token in 1..=3000 {
            rig.send(token, "outbox.order.paid");
        }
        rig.take(3000).await;
        for start in [Start::After(0), Start::After(1233), Start::Time(before)] {
            let found = stream.find("1234", start, None).await.unwrap().unwrap();
            assert_eq!((found.sequence, found.id.as_deref()), (1234, Some("1234")));
            assert!(found.stored_at > before && found.stored_at < Timestamp::now() + SignedDuration::from_secs(1));
            assert_eq!(stream.id_at(1234).await, Ok(Some(found)));
        }
        // A place between two messages: the second of them on, however close they are.
        let place = stream.id_at(1234).await.unwrap().unwrap().stored_at;
        assert_eq!(stream.find("1234", Start::Time(place), None).await.unwrap().unwrap().sequence, 1234);
        let after = place + SignedDuration::from_nanos(1);
        assert_eq!(stream.find("1234", Start::Time(after), None).await, Ok(None));
        assert_eq!(stream.find("1235", Start::Time(after), None).await.unwrap().unwrap().sequence, 1235);
        assert_eq!(stream.find("1234", Start::After(1234), None).await, Ok(None));
        let late = Timestamp::now() + SignedDuration::from_mins(1);
        assert_eq!(stream.find("1234", Start::Time(late), None).await, Ok(None));

        // What was removed is not there, though the server would still call it a duplicate.
        server.jetstream().await.get_stream("OUTBOX").await.unwrap().delete_message(1234).await.unwrap();
        assert_eq!(stream.find("1234", Start::After(0), None).await, Ok(None));
        assert_eq!(stream.id_at(1234).await, Ok(None));
        rig.send(1234, "outbox.order.paid");
        let again = rig.take_one().await.result.unwrap();
        assert_eq!((again.duplicate, again.sequence), (true, 1234));
    }
}
