//! `outbox-relay migrate`

use std::io::{self, Write};

use super::{Failure, block_on, log_warnings};
use crate::config::Loaded;
use crate::postgres::migrate::Report;
use crate::relay;

#[derive(clap::Args)]
#[command(
    after_help = "Example: what would be done, as SQL\n  outbox-relay migrate --dry-run\n\nExample: as the owner of the tables\n  outbox-relay migrate --postgres-url postgres://owner@db.example/shop"
)]
pub struct Migrate {
    /// Only say what would be done, and print the SQL
    #[arg(long)]
    dry_run: bool,
}

impl Migrate {
    pub fn run(&self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        let report = block_on(relay::migrate(&loaded.settings, self.dry_run))?;
        Ok(self.print(&report, &mut io::stdout().lock())?)
    }

    /// The lines that are no SQL are comments of SQL, so that a dry run can be read as a script.
    fn print(&self, report: &Report, out: &mut impl Write) -> io::Result<()> {
        let did = |done: &'static str, due: &'static str| if self.dry_run { due } else { done };
        if let Some(schema) = &report.created_schema {
            writeln!(out, "-- {} schema {schema}", did("created", "would create"))?;
        }
        for step in &report.applied {
            writeln!(out, "-- {} {}", did("applied", "would apply"), step.name)?;
            if self.dry_run {
                writeln!(out, "{}", step.sql.trim_end())?;
            }
        }
        for object in &report.mended {
            writeln!(out, "-- {} {object}", did("made again", "would make again"))?;
        }
        for warning in &report.warnings {
            writeln!(io::stderr(), "warning: {warning}")?;
        }
        if report.created_schema.is_none() && report.applied.is_empty() && report.mended.is_empty() {
            writeln!(out, "-- up to date")?;
        }
        Ok(())
    }
}
