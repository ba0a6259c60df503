//! Looking for stored messages: by their ids, by their places, by the time at which they were stored.

use std::time::Duration;

use futures_util::future::join_all;
use jiff::{SignedDuration, Timestamp};
use outbox_relay::nats::ids::Start;
use outbox_relay::nats::stream::Stream;
use rustix::process::Signal;

use super::{Rig, message_id, payload, settings};
use crate::harness::nats::NatsVersion;
use crate::harness::proxy::{Direction, Proxy};

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

/// A pull that is over because the server had no time is not the end of the stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reading_outlasts_a_server_that_stands_still() {
    join_all(NatsVersion::ENDS.map(read_while_the_server_stands_still)).await;
}

async fn read_while_the_server_stands_still(version: NatsVersion) {
    let (server, mut rig, _) = Rig::with_stream(version).await;
    // Headers so large that a pull takes the server a while.
    for chunk in 0..6 {
        for number in 0..1000 {
            let token = chunk * 1000 + number;
            let mut headers = message_id(&token.to_string());
            headers.set("Large", &"x".repeat(8000));
            rig.publisher.send(token, "outbox.order.paid".to_owned(), headers, payload(1)).unwrap();
        }
        rig.take(1000).await;
    }
    let proxy = Proxy::start_nats(server.port()).await;
    let config = settings(&format!("nats://{}", proxy.address()));
    let reader = Rig::open(&config).await;
    let stream = Stream::new(&reader.connection, &config);
    let reading = tokio::spawn(async move { stream.ids_after(0, u64::MAX).await });
    // Now and then only, so that it is at work on a pull when it stops for long.
    let slowly = async {
        while proxy.passed(Direction::ToClient) < 12_000_000 {
            server.signal(Signal::CONT);
            tokio::time::sleep(Duration::from_millis(1)).await;
            server.signal(Signal::STOP);
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
    };
    tokio::time::timeout(super::SOON, slowly).await.expect("the reading is under way");
    // Longer than a pull lasts, and shorter than a silence that is taken for a failure.
    tokio::time::sleep(Duration::from_millis(4300)).await;
    server.signal(Signal::CONT);
    let (ids, all) = reading.await.unwrap().unwrap();
    assert_eq!((ids.len(), all), (6_000, true), "{version:?}");
}
