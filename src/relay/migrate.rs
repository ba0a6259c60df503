//! Bringing the tables up to date.

use super::{RunError, postgres_target};
use crate::config::Settings;
use crate::postgres::connect::{self, Session};
use crate::postgres::migrate::{self, Report};

/// Brings the outbox's tables up to date; with `dry_run` it only says what it would do.
///
/// # Errors
/// When the server cannot be reached, or refuses.
pub async fn migrate(settings: &Settings, dry_run: bool) -> Result<Report, RunError> {
    let target = postgres_target(settings).map_err(|mistake| RunError::Unusable(mistake.to_string()))?;
    let mut connection = connect::sql(&target, &Session::new("outbox-relay migrate")).await?;
    let report = migrate::migrate(&mut connection.client, &settings.source.table, dry_run).await?;
    connection.close().await;
    Ok(report)
}
