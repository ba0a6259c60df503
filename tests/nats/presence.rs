//! Whether a stream may have held what it does not hold any more.

use std::collections::{HashMap, HashSet};

use jiff::{SignedDuration, Timestamp};

use super::Rig;
use crate::harness::nats::NatsVersion;

#[tokio::test]
async fn removed_messages_are_noticed_wherever_they_stood() {
    for version in NatsVersion::ENDS {
        let (server, mut rig, stream) = Rig::with_stream(version).await;
        let events = HashSet::from(["7".to_owned(), "70".to_owned()]);
        let before = Timestamp::now() - SignedDuration::from_mins(1);
        let look = async |since| stream.look_for(&events, since).await.unwrap();
        assert_eq!(look(before).await.removed_until, None, "nothing was ever stored");
        for token in 1..=10 {
            rig.send(token, "outbox.order.paid");
        }
        rig.take(10).await;
        let whole = look(before).await;
        assert_eq!((whole.found, whole.removed_until), (HashMap::from([("7".to_owned(), 7)]), None));
        let later = Timestamp::now() + SignedDuration::from_mins(1);
        assert_eq!(look(later).await.removed_until, None, "what was stored last is there, and older");

        let jetstream = server.jetstream().await;
        let admin = jetstream.get_stream("OUTBOX").await.unwrap();
        for (removed, next) in [(5, 6), (1, 2)] {
            let next = stream.id_at(next).await.unwrap().unwrap().stored_at;
            admin.delete_message(removed).await.unwrap();
            // The youngest gap counts: the one in the middle goes on to be seen when the first message goes.
            let seen = look(before).await.removed_until.unwrap();
            assert!(seen >= next, "{seen} {next}");
        }
        admin.delete_message(10).await.unwrap();
        assert!(look(before).await.removed_until.unwrap() > a_minute_ago(), "the last one may be as young as now");
        assert!(look(later).await.removed_until.is_some());
        admin.purge().await.unwrap();
        assert!(look(before).await.removed_until.unwrap() > a_minute_ago());
    }
}

fn a_minute_ago() -> Timestamp {
    Timestamp::now() - SignedDuration::from_mins(1)
}
