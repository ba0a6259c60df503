//! `outbox-relay completions`

use std::io::{self, Write};

#[derive(clap::Args)]
#[command(after_help = "Example:\n  outbox-relay completions bash > /etc/bash_completion.d/outbox-relay")]
pub struct Completions {
    /// The shell that reads it
    shell: clap_complete::Shell,
}

impl Completions {
    pub fn run(self, mut command: clap::Command) -> io::Result<()> {
        // Into memory first: the generator panics where it cannot write.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut command, "outbox-relay", &mut script);
        io::stdout().lock().write_all(&script)
    }
}
