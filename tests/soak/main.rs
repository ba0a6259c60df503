//! A long run of faults at random, with load all the time: `make soak`. Not part of `make test`.
//!
//! `SOAK_ROUNDS` says how many faults (100), `SOAK_SEED` replays a run: the same faults in the same order.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a failed test is a panic")]

#[path = "../harness/mod.rs"]
#[allow(dead_code, reason = "a box of tools for every test; this binary needs few of them")]
mod harness;

use std::time::Duration;

use fastrand::Rng;
use rustix::process::Signal;

use crate::harness::load::{Load, Outbox};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};

/// The servers, two relays, and the faults that are done to them.
struct Field {
    postgres: Postgres,
    nats: Nats,
    settings: RelaySettings,
    relays: [Relay; 2],
    rng: Rng,
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_lose_nothing_double_nothing_and_keep_the_order() {
    let rounds = number("SOAK_ROUNDS").unwrap_or(100);
    let seed = number("SOAK_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("{rounds} rounds; replay with SOAK_SEED={seed}");
    let postgres = Postgres::start(PgVersion::V18, &[("wal_sender_timeout", "5s"), ("fsync", "on")]).await;
    let nats = Nats::start(NatsVersion::V2_15).await;
    let url = postgres.url("postgres");
    let settings = RelaySettings::new(&url, &nats.url()).set("nats.create.duplicate_window", "10s");
    settings.migrate().await;
    let outbox = Outbox::new(&url, "OUTBOX").await;
    let load = Load::start(&outbox, 3);
    let relays = [settings.start(), settings.start()];
    let mut field = Field { postgres, nats, settings, relays, rng: Rng::with_seed(seed) };
    for round in 0..rounds {
        let fault = field.fault().await;
        println!("round {round}: {fault}");
        tokio::time::sleep(Duration::from_millis(field.rng.u64(0..3000))).await;
    }
    let enqueued = load.stop().await;
    println!("{enqueued} events enqueued; waiting for the last ones");
    outbox.expect_exact(&field.nats).await;
}

impl Field {
    /// Does something bad, lets it last for a while, and ends it.
    async fn fault(&mut self) -> &'static str {
        let (relay, pause) = (self.rng.usize(0..2), Duration::from_millis(self.rng.u64(100..8000)));
        match self.rng.u32(0..8) {
            0 | 1 => {
                self.relays[relay].kill9().await;
                self.relays[relay] = self.settings.start();
                "a relay was killed"
            }
            2 => {
                self.relays[relay].signal(Signal::STOP);
                tokio::time::sleep(pause).await;
                self.relays[relay].signal(Signal::CONT);
                "a relay was frozen"
            }
            3 => {
                self.nats.signal(Signal::STOP);
                tokio::time::sleep(pause).await;
                self.nats.signal(Signal::CONT);
                "nats-server was frozen"
            }
            4 => {
                self.nats.kill().await;
                tokio::time::sleep(pause).await;
                self.nats.start_again().await;
                "nats-server was killed"
            }
            5 => {
                self.postgres.stop_immediate().await;
                self.postgres.start_again().await;
                "PostgreSQL crashed"
            }
            6 => {
                self.postgres.freeze();
                tokio::time::sleep(pause).await;
                self.postgres.thaw();
                "PostgreSQL was frozen"
            }
            _ => {
                let client = self.postgres.client().await;
                let terminate = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                                 WHERE application_name LIKE 'outbox-relay%'";
                client.batch_execute(terminate).await.unwrap();
                "the relays' backends were terminated"
            }
        }
    }
}
