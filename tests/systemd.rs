//! What systemd is told, through a socket as it makes one: a unit of `Type=notify` with a watchdog relies on it.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::process::Signal;

use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::process::new_folder;
use crate::harness::proxy::Proxy;
use crate::harness::relay::{READY, RelaySettings};
use crate::harness::scene::Scene;
use crate::harness::wait::eventually;

const WATCHDOG: Duration = Duration::from_secs(2);

/// The end of the socket that systemd reads.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<String>,
}

impl Manager {
    fn of(socket: UnixDatagram) -> Self {
        socket.set_nonblocking(true).unwrap();
        Self { socket, heard: Vec::new() }
    }

    /// Every line heard so far.
    fn heard(&mut self) -> &[String] {
        let mut datagram = [0; 4096];
        while let Ok(length) = self.socket.recv(&mut datagram) {
            let words = std::str::from_utf8(&datagram[..length]).expect("text");
            self.heard.extend(words.lines().map(str::to_owned));
        }
        &self.heard
    }

    fn count(&mut self, word: &str) -> usize {
        self.heard().iter().filter(|line| *line == word).count()
    }

    async fn wait(&mut self, word: &str, times: usize) {
        eventually(READY, &format!("systemd hears {word} {times} times"), async || self.count(word) >= times).await;
    }
}

fn watched(settings: &RelaySettings, socket: &str) -> RelaySettings {
    settings.clone().variable("NOTIFY_SOCKET", socket).variable("WATCHDOG_USEC", &WATCHDOG.as_micros().to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_hears_ready_only_when_it_is_and_a_frozen_relay_no_more() {
    let scene = Scene::new().await;
    let nats = Nats::shared(NatsVersion::V2_15).await;
    let proxy = Proxy::start_nats(nats.port()).await;
    proxy.refuse();
    let path = new_folder("systemd", None).join("notify");
    let mut manager = Manager::of(UnixDatagram::bind(&path).unwrap());
    let settings = scene.settings.clone().set("nats.url", &proxy.instead_of(&nats.url()));
    let mut relay = watched(&settings, path.to_str().unwrap()).start();

    // It lives, and says what it waits for.
    manager.wait("WATCHDOG=1", 3).await;
    assert!(manager.heard().iter().any(|line| line.starts_with("STATUS=starting; ")), "{:?}", manager.heard());
    assert_eq!(manager.count("READY=1"), 0, "{:?}", manager.heard());

    proxy.pass();
    manager.wait("READY=1", 1).await;
    manager.wait("STATUS=ready", 1).await;
    let fed = manager.count("WATCHDOG=1");
    manager.wait("WATCHDOG=1", fed + 3).await;

    relay.signal(Signal::STOP);
    // What was on its way when it stopped is not counted.
    tokio::time::sleep(WATCHDOG / 4).await;
    let fed = manager.count("WATCHDOG=1");
    tokio::time::sleep(WATCHDOG).await;
    assert_eq!(manager.count("WATCHDOG=1"), fed, "a relay that is stopped is not alive");
    relay.signal(Signal::CONT);
    manager.wait("WATCHDOG=1", fed + 1).await;

    assert_eq!(manager.count("STOPPING=1"), 0);
    assert!(relay.terminate(READY).await.success());
    assert_eq!((manager.count("STOPPING=1"), manager.count("READY=1")), (1, 1), "{:?}", manager.heard());
    assert!(manager.count("STATUS=stopping") > 0, "{:?}", manager.heard());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_relay_that_stands_by_is_ready_for_systemd() {
    let scene = Scene::new().await;
    let _leader = scene.relay().await;
    let name = format!("outbox-relay-test-{}", scene.database.slot);
    let name = format!("{name}-{}", std::process::id());
    // A socket without a file, as inside some containers.
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let mut manager = Manager::of(UnixDatagram::bind_addr(&address).unwrap());
    let mut relay = watched(&scene.settings, &format!("@{name}")).start();
    manager.wait("READY=1", 1).await;
    manager.wait("STATUS=standby", 1).await;
    relay.wait_standby().await;
    manager.wait("WATCHDOG=1", 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_that_nobody_reads_is_no_obstacle() {
    let scene = Scene::new().await;
    let mut relay = watched(&scene.settings, "/nonexistent/notify").start();
    relay.wait_ready().await;
    relay.wait_log("systemd cannot be told", READY).await;
}
