//! `outbox-relay doctor`

mod chart;
mod nats;
mod parameters;
mod pins;
mod postgres;
mod print;
mod publication;
mod rows;
mod schema;
mod server;
mod slot;
mod standbys;
mod stream;

use std::io;
use std::time::Duration;

use super::output::Format;
use super::{Failure, block_on, log_warnings};
use crate::config::{Loaded, Settings};
use crate::relay;
use chart::Chart;

/// Looks at everything that a relay needs, changes nothing, and says what is wrong and how it is mended.
#[derive(clap::Args)]
#[command(after_help = "\
It leaves no trace but lines \"Publish Violation\" in nats-server's log: the server is asked what the relay's user may \
publish by messages that it must refuse.

Exit codes: 0 nothing found (notes do not count), 3 something was found, 1 it could not run, 78 unusable configuration

Example:
  outbox-relay doctor --config relay.toml
  outbox-relay doctor --output json | jq -r '.findings[] | select(.severity != \"note\").mend[].statement // empty'")]
pub struct Doctor {
    #[arg(long, value_enum, default_value_t)]
    output: Format,
    /// For how long a transaction may be open, or a row wait, before it is told
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = humantime::parse_duration)]
    patience: Duration,
}

impl Doctor {
    pub fn run(&self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let chart = block_on(examine(&loaded.settings, self.patience))?;
        print::print(&mut io::stdout().lock(), &chart, self.output)?;
        if chart.is_ill() { Err(Failure::Found) } else { Ok(()) }
    }
}

/// Each side is examined whatever the other is like; then what lies between them.
async fn examine(settings: &Settings, patience: Duration) -> Result<Chart, Failure> {
    let target = relay::direct_target(settings)?;
    let (mut chart, mut beyond) = (Chart::default(), Chart::default());
    let (database, broker) =
        tokio::join!(postgres::examine(&target, settings, patience, &mut chart), nats::examine(settings, &mut beyond));
    let (database, broker) = (database?, broker?);
    if let Some(facts) = &broker {
        stream::judge_both(facts, &database, settings, &mut beyond);
    }
    chart.append(beyond);
    Ok(chart)
}
