//! One line on a terminal that says how far a command is. Nowhere else.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Between two renewals of the line.
const EVERY: Duration = Duration::from_millis(100);
/// Characters of the bar.
const WIDTH: usize = 24;

/// The line, on standard error.
pub struct Progress {
    shown: bool,
    terminal: bool,
    next: Instant,
}

impl Progress {
    pub fn new() -> Self {
        Self { shown: false, terminal: io::stderr().is_terminal(), next: Instant::now() }
    }

    /// Shows how far it is; `share` of the whole goes from 0 to 1.
    pub fn show(&mut self, share: f64, text: &str) {
        let now = Instant::now();
        if !self.terminal || now < self.next {
            return;
        }
        (self.next, self.shown) = (now + EVERY, true);
        // Nobody is to be told that the terminal is gone.
        let _ = write!(io::stderr(), "\r{} {text}\x1b[K", bar(share));
    }

    /// Takes the line away.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "0 to WIDTH")]
fn bar(share: f64) -> String {
    let share = share.clamp(0.0, 1.0);
    let full = (share * WIDTH as f64) as usize;
    format!("[{}{}] {:3.0}%", "=".repeat(full), " ".repeat(WIDTH - full.min(WIDTH)), share * 100.0)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_bar_keeps_its_width() {
        assert_eq!(super::bar(0.0), format!("[{}]   0%", " ".repeat(24)));
        assert_eq!(super::bar(0.5), format!("[{}{}]  50%", "=".repeat(12), " ".repeat(12)));
        assert_eq!(super::bar(7.0), format!("[{}] 100%", "=".repeat(24)));
        assert_eq!(super::bar(f64::NAN).len(), super::bar(0.0).len());
    }
}
