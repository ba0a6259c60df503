//! Whether what destroys may be done.

use std::io::{self, IsTerminal, Write};

use super::Failure;

#[derive(clap::Args)]
pub struct Consent {
    /// Do it without asking
    #[arg(long)]
    yes: bool,
}

impl Consent {
    /// Shows the plan, and asks for a yes unless it was given with the command. Without a terminal nobody can be asked.
    pub fn ask(&self, plan: &str) -> Result<(), Failure> {
        let mut stderr = io::stderr();
        writeln!(stderr, "{}", plan.trim_end())?;
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() || !stderr.is_terminal() {
            return Err(Failure::Refused("nothing was done: give --yes to do it".to_owned()));
        }
        write!(stderr, "Do it? [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        match answer.trim().to_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => Err(Failure::Refused("nothing was done".to_owned())),
        }
    }
}
