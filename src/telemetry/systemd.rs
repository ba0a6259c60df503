//! Tells systemd how the relay is (`sd_notify(3)`): ready, what it does, that it ends, and that its loop is alive.
//!
//! Each word is one datagram to the socket that `NOTIFY_SOCKET` names. A word that does not arrive is dropped: the
//! relay does not depend on who watches it.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::health::{Health, Pulse, Readiness};

/// Without a watchdog nothing is due at fixed times.
const NO_WATCHDOG: Duration = Duration::from_hours(1);

/// The service manager that started this process.
#[derive(Debug)]
pub struct Manager {
    socket: UnixDatagram,
    /// Within which it wants to hear from the loop.
    watchdog: Option<Duration>,
}

impl Manager {
    /// `None` when this process was started by none that wants to be told, or it cannot be reached.
    pub fn of_environment() -> Option<Self> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let path = variable("NOTIFY_SOCKET")?;
        let watchdog = watchdog(variable("WATCHDOG_USEC"), variable("WATCHDOG_PID"));
        match connect(&path) {
            Ok(socket) => Some(Self { socket, watchdog }),
            Err(error) => {
                warn!(%error, socket = %path.display(), "systemd cannot be told: NOTIFY_SOCKET cannot be reached");
                None
            }
        }
    }

    /// Tells until `end` is cancelled.
    ///
    /// The watchdog hears only of a loop that has ticked since it heard last: one that stands still is restarted, also
    /// when the rest of the process still answers.
    pub async fn tell(self, health: Health, pulse: Pulse, end: CancellationToken) {
        let every = self.watchdog.map_or(NO_WATCHDOG, |watchdog| watchdog / 4);
        let mut beat = tokio::time::interval(every);
        let (mut ready, mut stopping) = (false, false);
        let mut fed = Instant::now();
        loop {
            let readiness = health.readiness();
            let mut words = format!("STATUS={}", status(&readiness));
            if !ready && matches!(readiness, Readiness::Ready | Readiness::Standby) {
                ready = true;
                words.push_str("\nREADY=1");
            }
            if !stopping && health.is_stopping() {
                stopping = true;
                words.push_str("\nSTOPPING=1");
            }
            self.say(&words);
            loop {
                tokio::select! {
                    () = health.changed(&readiness) => break,
                    () = end.cancelled() => return,
                    _ = beat.tick() => {}
                }
                if self.watchdog.is_some() && pulse.age() <= fed.elapsed() {
                    fed = Instant::now();
                    self.say("WATCHDOG=1");
                }
            }
        }
    }

    fn say(&self, words: &str) {
        let _ = self.socket.send(words.as_bytes());
    }
}

/// One line, as systemd wants it.
fn status(readiness: &Readiness) -> String {
    match readiness {
        Readiness::Ready => "ready".to_owned(),
        Readiness::Standby => "standby".to_owned(),
        Readiness::NotReady(reasons) => reasons.replace('\n', "; "),
    }
}

/// The watchdog's time, when it is meant for this process.
fn watchdog(microseconds: Option<OsString>, pid: Option<OsString>) -> Option<Duration> {
    let number = |text: OsString| text.to_str()?.parse::<u64>().ok();
    let ours = pid.is_none_or(|pid| number(pid) == Some(u64::from(std::process::id())));
    let time = Duration::from_micros(number(microseconds?)?);
    (ours && !time.is_zero()).then_some(time)
}

/// A path, or after `@` a name of Linux's that is no file.
fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let address = match name.as_bytes() {
        [b'@', abstract_name @ ..] => abstract_address(abstract_name)?,
        _ => SocketAddr::from_pathname(name)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    socket.connect_addr(&address)?;
    Ok(socket)
}

#[cfg(target_os = "linux")]
fn abstract_address(name: &[u8]) -> io::Result<SocketAddr> {
    use std::os::linux::net::SocketAddrExt;
    SocketAddr::from_abstract_name(name)
}

#[cfg(not(target_os = "linux"))]
fn abstract_address(_: &[u8]) -> io::Result<SocketAddr> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_of_another_process_is_not_ours() {
        let of = |time: &str, pid: Option<&str>| watchdog(Some(time.into()), pid.map(OsString::from));
        let own = std::process::id().to_string();
        assert_eq!(of("5000000", None), Some(Duration::from_secs(5)));
        assert_eq!(of("5000000", Some(&own)), Some(Duration::from_secs(5)));
        assert_eq!(of("5000000", Some("1")), None);
        assert_eq!(of("0", None), None);
        assert_eq!(of("soon", None), None);
        assert_eq!(watchdog(None, None), None);
    }

    #[tokio::test]
    async fn a_loop_that_stands_still_feeds_no_watchdog() {
        let (socket, systemd) = UnixDatagram::pair().unwrap();
        systemd.set_nonblocking(true).unwrap();
        let fed = || {
            let mut word = [0; 1024];
            std::iter::from_fn(|| systemd.recv(&mut word).ok().map(|length| word[..length] == *b"WATCHDOG=1"))
                .filter(|fed| *fed)
                .count()
        };
        let pulse = Pulse::of_age(Duration::from_mins(1));
        let manager = Manager { socket, watchdog: Some(Duration::from_millis(40)) };
        let end = CancellationToken::new();
        let told = tokio::spawn(manager.tell(Health::default(), pulse.clone(), end.clone()));
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(fed(), 0);
        let beats = async {
            while fed() == 0 {
                pulse.tick();
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), beats).await.unwrap();
        end.cancel();
        told.await.unwrap();
    }

    #[test]
    fn reasons_are_one_line() {
        assert_eq!(status(&Readiness::NotReady("starting\nno NATS".into())), "starting; no NATS");
    }
}
