//! `outbox-relay run`

use super::{Failure, block_on};
use crate::config::Loaded;
use crate::{relay, telemetry};

pub fn run(loaded: Loaded) -> Result<(), Failure> {
    telemetry::init(&loaded.settings.log);
    block_on(relay::run(loaded.settings))
}
