//! Requests to services, and announcements.

use std::time::Duration;

use futures_util::StreamExt as _;
use outbox_relay::fault::Failure;
use outbox_relay::nats::publish::Headers;
use outbox_relay::nats::request::Unanswered;
use serde_json::json;

use super::{Rig, SOON, payload, settings};
use crate::harness::nats::{Nats, NatsVersion};

const TIMEOUT: Duration = Duration::from_millis(500);

#[tokio::test]
async fn each_way_of_not_being_answered_is_told_apart() {
    let user = r#"{ user: u, password: p, permissions: { publish: { deny: "denied" } } }"#;
    for version in NatsVersion::ENDS {
        let server =
            Nats::start_with(version, &format!("authorization {{ users: [ {user} ] }}\nno_auth_user: u")).await;
        let rig = Rig::open(&settings(&server.url())).await;
        let ask = |subject: &'static str| rig.connection.ask(subject, Headers::new(), "{}".into(), TIMEOUT);
        let client = server.client().await;
        let mut requests = client.subscribe("service.*").await.unwrap();
        client.publish("service.own", "".into()).await.unwrap();
        tokio::time::timeout(SOON, requests.next()).await.unwrap().unwrap();
        tokio::spawn(async move {
            while let Some(request) = requests.next().await {
                let reply = request.reply.unwrap();
                match request.subject.as_str() {
                    "service.good" => client.publish(reply, r#"{"stream":"is my name"}"#.into()).await.unwrap(),
                    "service.bad" => {
                        let mut headers = async_nats::HeaderMap::new();
                        headers.insert("Nats-Service-Error", "no such batch");
                        headers.insert("Nats-Service-Error-Code", "404");
                        client.publish_with_headers(reply, headers, "".into()).await.unwrap();
                    }
                    _ => {}
                }
            }
        });
        assert_eq!(ask("service.good").await.unwrap(), r#"{"stream":"is my name"}"#);
        let service = Unanswered::Service { code: "404".to_owned(), text: "no such batch".to_owned() };
        assert_eq!(ask("service.bad").await, Err(service));
        assert_eq!(ask("service.mute").await, Err(Unanswered::Silence(TIMEOUT)));
        assert_eq!(ask("nobody").await, Err(Unanswered::NoResponder));
        let denied = Failure::PermissionDenied { action: "publish to", subject: "denied".to_owned() };
        assert_eq!(ask("denied").await, Err(Unanswered::NotSent(denied)));
        assert!(matches!(ask("a.*").await, Err(Unanswered::NotSent(Failure::InvalidSubject(_)))));
        super::stream::ask(&server, "STREAM.CREATE.GREEDY", &json!({ "name": "GREEDY", "subjects": ["greedy"] })).await;
        assert_eq!(ask("greedy").await, Err(Unanswered::Captured("GREEDY".to_owned())));
    }
}

#[tokio::test]
async fn an_announcement_reaches_who_listens() {
    for version in NatsVersion::ENDS {
        let server = Nats::start(version).await;
        let rig = Rig::open(&settings(&server.url())).await;
        let client = server.client().await;
        let mut heard = client.subscribe("outbox-dead-letter.>").await.unwrap();
        client.publish("outbox-dead-letter.own", "".into()).await.unwrap();
        tokio::time::timeout(SOON, heard.next()).await.unwrap().unwrap();
        let mut headers = Headers::new();
        headers.set("x", "y");
        rig.connection.announce("outbox-dead-letter.order.paid".to_owned(), headers, payload(3)).await.unwrap();
        let message = tokio::time::timeout(SOON, heard.next()).await.unwrap().unwrap();
        assert_eq!((message.subject.as_str(), message.payload), ("outbox-dead-letter.order.paid", payload(3)));
        assert_eq!(message.headers.unwrap().get("x").unwrap().as_str(), "y");
    }
}
