//! `outbox-relay man`

use std::io::{self, Write};
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Man {
    /// Write a page for every command into this folder instead
    #[arg(long, value_name = "FOLDER")]
    directory: Option<PathBuf>,
}

impl Man {
    pub fn run(self, command: clap::Command) -> io::Result<()> {
        if let Some(directory) = self.directory {
            return clap_mangen::generate_to(command, directory);
        }
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        io::stdout().lock().write_all(&page)
    }
}
