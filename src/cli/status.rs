//! `outbox-relay status`: is it healthy, how far behind is it, what waits, what is dead?

mod look;
mod print;
mod relay;
mod report;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use super::output::{self, Format};
use super::{Failure, block_on, log_warnings};
use crate::config::{Loaded, Settings};

const HELP: &str = "\
It asks PostgreSQL, NATS, and the relay on admin.listen, and shows what answers. Large tables are not read through: \
counts end at 100000, and rows that wait without a date are looked for among the newest 100000.

Example:
  outbox-relay status --watch 5
  outbox-relay status --output json | jq -r .verdict";

#[derive(clap::Args)]
#[command(after_help = HELP)]
pub struct Status {
    /// Show it again every so many seconds, until Ctrl-C
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2",
        value_parser = clap::value_parser!(u64).range(1..))]
    watch: Option<u64>,
    /// With --watch, JSON is one document a line
    #[arg(long, value_enum, default_value_t)]
    output: Format,
}

impl Status {
    pub fn run(&self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        block_on(async {
            match self.watch {
                None => {
                    let report = look::look(&loaded.settings).await;
                    self.print(&mut io::stdout().lock(), &report)?;
                    if report.nobody_answers() {
                        return Err(Failure::Unfit("neither PostgreSQL nor NATS answers".to_owned()));
                    }
                    Ok(())
                }
                Some(seconds) => tokio::select! {
                    watched = self.watch(&loaded.settings, Duration::from_secs(seconds)) => watched,
                    interrupted = tokio::signal::ctrl_c() => Ok(interrupted?),
                },
            }
        })
    }

    /// Looks again and again. On a terminal each look takes the place of the one before.
    async fn watch(&self, settings: &Settings, every: Duration) -> Result<(), Failure> {
        let redraw = io::stdout().is_terminal() && self.output == Format::Table;
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut first = true;
        loop {
            tick.tick().await;
            let report = look::look(settings).await;
            let mut shown = Vec::new();
            self.print(&mut shown, &report)?;
            let mut out = io::stdout().lock();
            if redraw {
                // Home, and whatever stood there: lines are overwritten, so that nothing flickers.
                let start = if first { "\x1b[2J\x1b[H" } else { "\x1b[H" };
                let text = String::from_utf8_lossy(&shown).replace('\n', "\x1b[K\n");
                write!(out, "{start}{text}\x1b[J")?;
            } else {
                if !first && self.output == Format::Table {
                    writeln!(out)?;
                }
                out.write_all(&shown)?;
            }
            out.flush()?;
            first = false;
        }
    }

    fn print(&self, out: &mut impl Write, report: &report::Report) -> io::Result<()> {
        match self.output {
            Format::Table => print::screen(out, report, print::coloured()),
            Format::Json if self.watch.is_some() => {
                serde_json::to_writer(&mut *out, report)?;
                writeln!(out)
            }
            Format::Json => output::json(out, report),
        }
    }
}
