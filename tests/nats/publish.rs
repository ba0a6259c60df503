//! Publishing: acknowledgements, refusals, and what a broken connection leaves.

use std::time::Duration;

use futures_util::StreamExt as _;
use outbox_relay::fault::{Class, Failure};
use outbox_relay::nats::notice::Notice;
use outbox_relay::nats::publish::Headers;
use outbox_relay::nats::stream::{Stream, why_no_responders};
use rustix::process::Signal;

use super::{Rig, SOON, message_id, payload, settings, stored};
use tokio::sync::broadcast::error::RecvError;

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::stream;
use crate::harness::wait::eventually;

async fn with_stream(server: &Nats) -> (Rig, Stream) {
    let config = settings(&server.url());
    let rig = Rig::open(&config).await;
    let stream = Stream::new(&rig.connection, &config);
    stream.ensure(&config, "outbox.*.>").await.unwrap();
    (rig, stream)
}

#[tokio::test]
async fn five_thousand_in_flight_are_acknowledged_by_their_tokens() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, stream) = with_stream(&server).await;
        for token in 0..5000 {
            rig.send(token, &format!("outbox.order.kind{}", token % 7));
        }
        let replies = rig.take(5000).await;
        let ids = stream.ids_after(0, 10_000).await.unwrap();
        assert!(ids.1, "not all were read");
        assert_eq!(ids.0.len(), 5000);
        for (token, reply) in replies.iter().enumerate() {
            let ack = stored(reply);
            assert!(!ack.duplicate);
            let place = &ids.0[usize::try_from(ack.sequence).unwrap() - 1];
            assert_eq!((place.sequence, place.id.as_deref()), (ack.sequence, Some(token.to_string().as_str())));
        }
        // Once more: the stream has them, and says where.
        for token in (0..5000).step_by(500) {
            rig.send(token, "outbox.order.again");
        }
        for again in rig.take(10).await {
            let first = stored(&replies[usize::try_from(again.token).unwrap()]);
            let ack = stored(&again);
            assert!(ack.duplicate, "{again:?}");
            assert_eq!(ack.sequence, first.sequence);
        }
    }
}

#[tokio::test]
async fn ids_are_read_back_from_a_place_and_up_to_a_limit() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, stream) = with_stream(&server).await;
        assert_eq!(stream.ids_after(0, 10).await.unwrap(), (vec![], true));
        for token in 0..2500 {
            rig.send(token, "outbox.order.paid");
        }
        rig.take(2500).await;
        let client = server.client().await;
        client.publish("outbox.order.foreign", payload(1)).await.unwrap();
        eventually(SOON, "the message without an id", async || stream.facts().await.unwrap().messages == 2501).await;
        let (ids, all) = stream.ids_after(300, 5000).await.unwrap();
        assert!(all);
        assert_eq!(ids.iter().map(|id| id.sequence).collect::<Vec<_>>(), (301..=2501).collect::<Vec<_>>());
        assert_eq!(ids.last().unwrap().id, None);
        let (ids, all) = stream.ids_after(300, 1500).await.unwrap();
        assert!(!all);
        assert_eq!((ids.len(), ids[1499].sequence), (1500, 1800));
        assert_eq!(stream.ids_after(2501, 10).await.unwrap(), (vec![], true));
        assert_eq!(stream.ids_after(9999, 10).await.unwrap(), (vec![], true));
        // Deleted messages are simply not there.
        let jetstream = server.jetstream().await;
        jetstream.get_stream("OUTBOX").await.unwrap().delete_message(2000).await.unwrap();
        let (ids, all) = stream.ids_after(1998, 2).await.unwrap();
        assert!(!all);
        assert_eq!(ids.iter().map(|id| id.sequence).collect::<Vec<_>>(), [1999, 2001]);
        let left = jetstream.get_stream("OUTBOX").await.unwrap().cached_info().state.consumer_count;
        assert_eq!(left, 0, "readers were left behind");
    }
}

#[tokio::test]
async fn a_refused_subject_is_named() {
    let authorization = r#"authorization { users: [ { user: r, password: p, permissions: { publish: { deny: "outbox.secret.>" } } } ] }"#;
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(version, authorization).await;
        let mut config = settings(&server.url());
        config.user = Some("r".to_owned());
        config.password = Some(outbox_relay::config::Secret("p".to_owned()));
        let mut rig = Rig::open(&config).await;
        Stream::new(&rig.connection, &config).ensure(&config, "outbox.*.>").await.unwrap();
        let mut notices = rig.connection.notices();
        let odd = r#"outbox.secret.a"b\c'd%20"#;
        for (token, subject) in [(1, "outbox.open.a"), (2, odd), (3, "outbox.open.b"), (4, "outbox.secret.plain")] {
            rig.send(token, subject);
        }
        for expected in [odd, "outbox.secret.plain"] {
            let notice = tokio::time::timeout(SOON, notices.recv()).await.unwrap().unwrap();
            assert_eq!(notice, Notice::PublishRefused { subject: expected.to_owned() });
        }
        let replies = rig.take(2).await;
        assert_eq!(replies.iter().map(|reply| reply.token).collect::<Vec<_>>(), [1, 3]);
        assert!(rig.connection.link().borrow().connected, "a refusal must not end the connection");
    }
}

/// Of more refusals at once than async-nats keeps, some are told; then the rest, when sent again.
#[tokio::test]
async fn a_burst_of_refusals_neither_blocks_nor_ends_the_connection() {
    let user = r#"{ user: u, password: p, permissions: { publish: { deny: "outbox.secret.>" } } }"#;
    for version in NatsVersion::ENDS {
        let server =
            Nats::start_with(version, &format!("authorization {{ users: [ {user} ] }}\nno_auth_user: u")).await;
        let (mut rig, _) = with_stream(&server).await;
        let mut notices = rig.connection.notices();
        for token in 0..2000 {
            rig.send(token, &format!("outbox.secret.a{token}"));
        }
        rig.send(9999, "outbox.open.a");
        assert_eq!(rig.take_one().await.token, 9999);
        for told in 0..100 {
            let notice = tokio::time::timeout(SOON, notices.recv()).await;
            match notice.unwrap_or_else(|_| panic!("only {told} refusals were told")) {
                Ok(notice) => assert!(matches!(notice, Notice::PublishRefused { .. }), "{notice:?}"),
                // So many were told that this reader fell behind.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => panic!("the connection is gone"),
            }
        }
        assert_eq!(rig.connection.link().borrow().epoch, 1);
    }
}

#[tokio::test]
async fn a_server_about_to_stop_says_so() {
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(version, "lame_duck_grace_period: 1s\nlame_duck_duration: 30s").await;
        let (rig, _) = with_stream(&server).await;
        let mut notices = rig.connection.notices();
        server.signal(Signal::USR2);
        let notice = tokio::time::timeout(SOON, notices.recv()).await.unwrap().unwrap();
        assert_eq!(notice, Notice::LameDuck);
    }
}

#[tokio::test]
async fn what_is_too_large_is_known_before_it_is_sent() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, _) = with_stream(&server).await;
        let send =
            |size: usize, headers: Headers| rig.publisher.send(1, "outbox.a.b".to_owned(), headers, payload(size));
        let limit = 1024 * 1024;
        let headers = message_id("x").size();
        let too_large = |size| Err(Failure::MessageTooLarge { size: Some(size), limit: Some(limit) });
        assert_eq!(send(limit + 1, Headers::new()), too_large(limit + 1));
        assert_eq!(send(limit - headers + 1, message_id("x")), too_large(limit + 1));
        let mut many = Headers::new();
        for number in 0..70 {
            many.set(&format!("x-{number:03}"), &"v".repeat(1000));
        }
        assert_eq!(send(1, many.clone()), Err(Failure::HeadersTooLarge { size: Some(many.size()) }));
        // The largest that fits, exactly; then that the connection lives on.
        assert_eq!(send(limit - headers, message_id("x")), Ok(()));
        assert!(stored(&rig.take_one().await).sequence > 0);
        for token in 0..10 {
            rig.send(token, "outbox.small.a");
        }
        rig.take(10).await.iter().for_each(|reply| assert!(reply.result.is_ok()));

        // The stream's own limit is the stream's to tell.
        let jetstream = server.jetstream().await;
        let mut stream_config = jetstream.get_stream("OUTBOX").await.unwrap().cached_info().config.clone();
        stream_config.max_message_size = 1000;
        jetstream.update_stream(&stream_config).await.unwrap();
        let config = settings(&server.url());
        let facts = Stream::new(&rig.connection, &config).facts().await.unwrap();
        assert_eq!(facts.max_msg_size, Some(1000));
        let send = |size: usize| rig.publisher.send(77, "outbox.a.b".to_owned(), message_id("y"), payload(size));
        send(1001 - headers).unwrap();
        let refused = rig.take_one().await.result;
        assert_eq!(refused, Err(Failure::MessageTooLarge { size: None, limit: None }));
        rig.publisher.send(78, "outbox.a.b".to_owned(), message_id("z"), payload(1000 - headers)).unwrap();
        assert!(stored(&rig.take_one().await).sequence > 0);
        assert_eq!(rig.connection.link().borrow().epoch, 1);
    }
}

#[tokio::test]
async fn without_a_stream_nobody_answers_and_the_reason_can_be_asked() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, stream) = with_stream(&server).await;
        let jetstream = server.jetstream().await;
        rig.send(1, "elsewhere.a");
        assert_eq!(rig.take_one().await.result, Err(Failure::NoResponders));
        let explained = why_no_responders(&stream.facts().await, "elsewhere.a");
        assert_eq!(explained, Failure::NoStreamForSubject("elsewhere.a".to_owned()));
        assert_eq!(explained.class(), Class::Poison);
        assert_eq!(why_no_responders(&stream.facts().await, "outbox.a.b"), Failure::NoResponders);
        jetstream.delete_stream("OUTBOX").await.unwrap();
        rig.send(2, "outbox.a.b");
        assert_eq!(rig.take_one().await.result, Err(Failure::NoResponders));
        let explained = why_no_responders(&stream.facts().await, "outbox.a.b");
        assert_eq!(explained, Failure::StreamMissing("OUTBOX".to_owned()));
        assert_eq!(explained.class(), Class::Transient);
        // A subscriber that answers in the stream's place is not taken for it.
        let client = server.client().await;
        let mut requests = client.subscribe("outbox.>").await.unwrap();
        // Its own message proves that the server has the subscription.
        client.publish("outbox.own", "".into()).await.unwrap();
        tokio::time::timeout(SOON, requests.next()).await.unwrap().unwrap();
        rig.send(3, "outbox.a.b");
        let request = tokio::time::timeout(SOON, requests.next()).await.unwrap().unwrap();
        let reply = request.reply.unwrap();
        client.publish(reply.clone(), "thanks".into()).await.unwrap();
        // Read behind it: what was passed over has come.
        client.publish(reply, r#"{"stream":"OUTBOX","seq":7}"#.into()).await.unwrap();
        assert_eq!(stored(&rig.take_one().await).sequence, 7);
    }
}

#[tokio::test]
async fn a_full_stream_refuses_until_it_is_purged() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, stream) = with_stream(&server).await;
        let jetstream = server.jetstream().await;
        let handle = jetstream.get_stream("OUTBOX").await.unwrap();
        let mut config = handle.cached_info().config.clone();
        config.discard = async_nats::jetstream::stream::DiscardPolicy::New;
        for (limit, text) in [("bytes", "maximum bytes exceeded"), ("messages", "maximum messages exceeded")] {
            config.max_bytes = if limit == "bytes" { 4000 } else { -1 };
            config.max_messages = if limit == "messages" { 5 } else { -1 };
            jetstream.update_stream(&config).await.unwrap();
            let mut token = 100;
            let failure = loop {
                let id = format!("{limit}{token}");
                rig.publisher.send(token, "outbox.a.b".to_owned(), message_id(&id), payload(300)).unwrap();
                match rig.take_one().await.result {
                    Ok(_) => token += 1,
                    Err(failure) => break failure,
                }
                assert!(token < 150, "never full");
            };
            assert_eq!(failure, Failure::StreamFull(text.to_owned()));
            assert_eq!(failure.class(), Class::Transient);
            handle.purge().await.unwrap();
            // The refused id must not count as a duplicate.
            let id = format!("{limit}{token}");
            rig.publisher.send(token, "outbox.a.b".to_owned(), message_id(&id), payload(300)).unwrap();
            assert!(!stored(&rig.take_one().await).duplicate);
            handle.purge().await.unwrap();
        }
        config.max_messages = -1;
        config.max_messages_per_subject = 1;
        config.discard_new_per_subject = true;
        jetstream.update_stream(&config).await.unwrap();
        for (token, subject) in [(1, "outbox.a.b"), (2, "outbox.a.b"), (3, "outbox.a.c")] {
            rig.publisher.send(token, subject.to_owned(), message_id(&format!("s{token}")), payload(3)).unwrap();
        }
        let replies = rig.take(3).await;
        assert_eq!(replies[1].result, Err(Failure::SubjectFull));
        assert!(replies[0].result.is_ok() && replies[2].result.is_ok(), "{replies:?}");
        assert_eq!(stream.facts().await.unwrap().messages, 2);
    }
}

#[tokio::test]
async fn another_stream_and_a_sealed_one_say_so() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (mut rig, _) = with_stream(&server).await;
        let jetstream = server.jetstream().await;
        let other = async_nats::jetstream::stream::Config {
            name: "OTHER".to_owned(),
            subjects: vec!["other.>".to_owned()],
            ..Default::default()
        };
        jetstream.create_stream(other).await.unwrap();
        rig.send(1, "other.a");
        let failure = rig.take_one().await.result.unwrap_err();
        assert!(matches!(&failure, Failure::WrongStream { expected, .. } if expected == "OUTBOX"), "{failure:?}");
        // Without the header that guards it, too.
        rig.publisher.send(2, "other.a".to_owned(), Headers::new(), payload(1)).unwrap();
        let failure = rig.take_one().await.result.unwrap_err();
        let expected = Failure::WrongStream { expected: "OUTBOX".to_owned(), actual: Some("OTHER".to_owned()) };
        assert_eq!(failure, expected);
        super::stream::update(&server, "OUTBOX", |config| config["sealed"] = true.into()).await;
        rig.send(3, "outbox.a.b");
        assert_eq!(rig.take_one().await.result, Err(Failure::StreamSealed));
    }
}

#[tokio::test]
async fn after_a_kill_a_new_epoch_begins_and_the_publisher_works_again() {
    for version in NatsVersion::ENDS {
        let mut server = Nats::start(version).await;
        let (mut rig, stream) = with_stream(&server).await;
        rig.send(1, "outbox.a.b");
        rig.take(1).await;
        let mut link = rig.connection.link();
        for epoch in 2..=3 {
            server.kill().await;
            tokio::time::timeout(SOON, link.wait_for(|link| !link.connected)).await.unwrap().unwrap();
            let refused = rig.publisher.send(9, "outbox.a.b".to_owned(), message_id("9"), payload(1));
            assert_eq!(refused, Err(Failure::Disconnected));
            assert_eq!(stream.facts().await, Err(Failure::Disconnected));
            server.start_again().await;
            tokio::time::timeout(SOON, link.wait_for(|link| link.connected)).await.unwrap().unwrap();
            assert_eq!(link.borrow().epoch, epoch);
            let sent = rig.publisher.send(epoch, "outbox.a.b".to_owned(), message_id(&epoch.to_string()), payload(1));
            assert_eq!(sent, Ok(()));
            assert_eq!(rig.take_one().await.token, epoch);
        }
        // Known after the restart, from the store.
        rig.send(1, "outbox.a.b");
        assert!(stored(&rig.take_one().await).duplicate);
    }
}

#[tokio::test]
async fn a_frozen_server_is_noticed_and_nothing_waits_to_be_sent_later() {
    const COUNT: u64 = 4000;
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let (rig, stream) = with_stream(&server).await;
        let mut link = rig.connection.link();
        server.signal(Signal::STOP);
        let frozen = std::time::Instant::now();
        for token in 0..COUNT {
            let id = message_id(&token.to_string());
            rig.publisher.send(token, "outbox.a.b".to_owned(), id, payload(20_000)).unwrap();
        }
        tokio::time::timeout(SOON, link.wait_for(|link| !link.connected)).await.unwrap().unwrap();
        let noticed = frozen.elapsed();
        assert!(noticed < Duration::from_secs(9), "noticed after {noticed:?}");
        server.signal(Signal::CONT);
        tokio::time::timeout(SOON, link.wait_for(|link| link.connected)).await.unwrap().unwrap();
        // What the kernel had taken is stored; what had not left the relay must not follow now.
        let mut last = u64::MAX;
        eventually(SOON, "the stream stands still", async || {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let now = stream.facts().await.unwrap().messages;
            std::mem::replace(&mut last, now) == now
        })
        .await;
        assert!(last < COUNT / 2, "{last} of {COUNT} were stored, most of them after the reconnect");
        assert_eq!(stream::count(&server.jetstream().await, "OUTBOX").await, last);
    }
}
