//! The program: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    outbox_relay::cli::main(std::env::args_os())
}
