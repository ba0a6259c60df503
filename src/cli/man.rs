//! `outbox-relay man`

use std::io::{self, Write};
use std::path::PathBuf;

use super::Failure;

#[derive(clap::Args)]
#[command(
    after_help = "Example:\n  outbox-relay man | man -l -\n  outbox-relay man --directory /usr/local/share/man/man1"
)]
pub struct Man {
    /// Write a page for every command into this folder instead
    #[arg(long, value_name = "FOLDER")]
    directory: Option<PathBuf>,
}

impl Man {
    pub fn run(self, command: clap::Command) -> Result<(), Failure> {
        if let Some(directory) = self.directory {
            return clap_mangen::generate_to(command, &directory)
                .map_err(|error| Failure::Unfit(format!("cannot write into {}: {error}", directory.display())));
        }
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        Ok(io::stdout().lock().write_all(&page)?)
    }
}
