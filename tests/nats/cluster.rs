//! A cluster of three whose leader dies while events are published.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use outbox_relay::fault::{Class, Failure};
use outbox_relay::nats::stream::{Stream, why_no_responders};

use super::{Rig, settings};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::process::free_port;
use crate::harness::wait::{eventually, eventually_some};

const PATIENCE: Duration = Duration::from_mins(1);
const COUNT: u64 = 600;

/// Three servers that know each other, and their stream of three replicas.
async fn cluster(version: NatsVersion) -> (Vec<Nats>, outbox_relay::config::Nats) {
    let ports = [free_port(), free_port(), free_port()];
    let configs = ports.map(|own| {
        let others = ports.iter().filter(|port| **port != own).map(|port| format!("'nats://127.0.0.1:{port}'"));
        let routes = others.collect::<Vec<_>>().join(", ");
        format!("cluster {{ name: c, listen: '127.0.0.1:{own}', routes: [{routes}] }}")
    });
    // One after the other: of those that dial each other at once, nats-server 2.10 takes one for absent now and then.
    let mut servers = Vec::new();
    for config in &configs {
        servers.push(Nats::start_with(version, config).await);
    }
    let mut config = settings("");
    config.url = servers.iter().map(Nats::url).collect();
    config.create.replicas = 3;
    (servers, config)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_a_leader_is_transient_and_loses_nothing() {
    for version in NatsVersion::ENDS {
        let (mut servers, config) = cluster(version).await;
        let mut rig = Rig::open(&config).await;
        let stream = Stream::new(&rig.connection, &config);
        // Until the cluster has a leader that can make streams, the relay waits.
        eventually(PATIENCE, "the stream is made", async || match stream.ensure(&config, "outbox.*.>").await {
            Ok(_) => true,
            Err(fault) => {
                assert_eq!(fault.class(), Class::Transient, "{fault}");
                false
            }
        })
        .await;
        let mut open: BTreeSet<u64> = (0..COUNT).collect();
        let mut sent: Vec<(u64, Instant)> = Vec::new();
        let mut killed = false;
        let start = Instant::now();
        while !open.is_empty() {
            assert!(start.elapsed() < PATIENCE, "{} are left", open.len());
            // Everything that is open and not on its way is sent, a few at a time.
            for token in open.iter().copied().take(20) {
                let id = || super::message_id(&token.to_string());
                let on_its_way =
                    |(other, at): &(u64, Instant)| *other == token && at.elapsed() < Duration::from_secs(1);
                if sent.iter().any(on_its_way) {
                    continue;
                }
                match rig.publisher.send(token, "outbox.a.b".to_owned(), id(), super::payload(100)) {
                    Ok(()) => sent.push((token, Instant::now())),
                    Err(failure) => assert_eq!(failure, Failure::Disconnected),
                }
            }
            let mut replies = Vec::new();
            let _ = tokio::time::timeout(Duration::from_millis(50), rig.replies.recv_many(&mut replies, 100)).await;
            for reply in replies {
                sent.retain(|(token, _)| *token != reply.token);
                match reply.result {
                    Ok(_) => _ = open.remove(&reply.token),
                    Err(Failure::NoResponders) => {
                        let explained = why_no_responders(&stream.facts().await, "outbox.a.b");
                        assert_eq!(explained.class(), Class::Transient, "{explained}");
                    }
                    Err(failure) => assert_eq!(failure.class(), Class::Transient, "{failure}"),
                }
            }
            if !killed && open.len() < 500 {
                killed = true;
                let leader = leader(&servers).await;
                servers[leader].kill().await;
            }
        }
        let (ids, all) = eventually_some(PATIENCE, "the ids", async || stream.ids_after(0, 10_000).await.ok()).await;
        assert!(all);
        let stored: Vec<u64> = ids.iter().filter_map(|id| id.id.as_ref()?.parse().ok()).collect();
        assert_eq!(stored.len(), ids.len());
        assert_eq!(stored.iter().copied().collect::<BTreeSet<_>>(), (0..COUNT).collect(), "lost");
        assert_eq!(u64::try_from(stored.len()).unwrap(), COUNT, "stored twice");
    }
}

async fn leader(servers: &[Nats]) -> usize {
    let info = servers[0].jetstream().await.get_stream("OUTBOX").await.unwrap().cached_info().clone();
    let name = info.cluster.unwrap().leader.unwrap();
    servers.iter().position(|server| name == format!("it-{}", server.port())).unwrap()
}
