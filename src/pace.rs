//! The pace of a busy relay: it looks at its sockets a few thousand times a second, not at once for every message.
//!
//! PostgreSQL sends each change by itself. A reader that is woken for each of them costs both sides a system call and a
//! switch of processes for every message, and halves what the server can decode. So while changes come fast, the
//! thread rests for a moment before it looks again; everything that came meanwhile (changes, acknowledgements,
//! outcomes) is then read, sent and answered at once. An idle relay never rests: a lone event is on its way at once.

use std::cell::Cell;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// In so short a time ...
const WINDOW: Duration = Duration::from_micros(500);
/// ... so many changes (three make a transaction of one row) are a sign of more to come.
const BUSY: u32 = 12;
/// How long the thread rests. What the server sends meanwhile must fit into the buffer of a Unix socket.
const REST: Duration = Duration::from_micros(300);

thread_local! {
    static WATCH: Cell<Option<Watch>> = const { Cell::new(None) };
}

#[derive(Clone, Copy)]
struct Watch {
    since: Instant,
    changes: u32,
}

/// A change was received.
pub(crate) fn note() {
    WATCH.with(|watch| {
        let now = watch.get().unwrap_or_else(|| Watch { since: Instant::now(), changes: 0 });
        watch.set(Some(Watch { changes: now.changes.saturating_add(1), ..now }));
    });
}

/// For `on_thread_park` of a runtime with one thread that runs nothing but relays: called when that has nothing left to
/// do and is about to wait for events, it sleeps for 300 µs if much has come just before.
pub fn rest() {
    WATCH.with(|watch| {
        let Some(Watch { since, changes }) = watch.get() else { return };
        if changes >= BUSY {
            sleep(REST);
        } else if since.elapsed() < WINDOW {
            return;
        }
        watch.set(None);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted() -> Option<u32> {
        WATCH.with(|watch| watch.get().map(|watch| watch.changes))
    }

    #[test]
    fn only_a_busy_thread_rests() {
        rest();
        assert_eq!(noted(), None, "nothing came");
        let began = Instant::now();
        (1..BUSY).for_each(|_| note());
        rest();
        if began.elapsed() < WINDOW {
            assert_eq!(noted(), Some(BUSY - 1), "a few changes are no reason to rest, nor to forget them at once");
        }
        (0..BUSY).for_each(|_| note());
        let began = Instant::now();
        rest();
        assert!(began.elapsed() >= REST, "many are");
        assert_eq!(noted(), None, "and are counted anew then");
    }
}
