//! The schema: what `outbox-relay migrate` runs, and whether it has run.
//!
//! The migrations are the numbered files of `migrations/`, filled in with the names of the events table and run by
//! refinery, all in one transaction. Its history is the table `outbox_relay_migrations` beside the events table: a
//! schema holds one outbox, since the functions have fixed names and know their table.

mod error;
mod inspect;
mod preflight;

use refinery::{Migration, Runner};
use tokio_postgres::{Client, types::Type};
use tracing::info;

pub use error::MigrateError;
pub use inspect::{ColdIndex, SchemaState};

use super::names;
use crate::config::TableName;

const HISTORY: &str = "outbox_relay_migrations";

const FILES: [(&str, &str); 5] = [
    ("V1__tables", include_str!("../../migrations/V1__tables.sql")),
    ("V2__adopt", include_str!("../../migrations/V2__adopt.sql")),
    ("V3__indexes", include_str!("../../migrations/V3__indexes.sql")),
    ("V4__event_functions", include_str!("../../migrations/V4__event_functions.sql")),
    ("V5__compensation_and_statistics", include_str!("../../migrations/V5__compensation_and_statistics.sql")),
];

/// Encloses the text of the functions, so no name may contain it.
const DOLLAR_TAG: &str = "$outbox_relay$";

/// What a run of [`migrate`] did or, as a dry run, would do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// The schema that was (would be) created.
    pub created_schema: Option<String>,
    /// The migrations that were (would be) applied, in order. Empty: nothing to do.
    pub applied: Vec<Step>,
    /// Something was dropped since the last run: what the migrations made (would make) again.
    pub mended: Vec<String>,
    /// What works less well than it could on this table, each with the way out.
    pub warnings: Vec<String>,
}

/// One migration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Such as `V1__tables`.
    pub name: String,
    /// The text as it is run, names filled in.
    pub sql: String,
}

/// Creates or updates everything that the relay needs beside `table`, the table included. Run again, it changes
/// nothing; run twice at once, the second run waits for the first. A table of the older schema is adopted: what is
/// missing is added, its rows stay as they are.
///
/// With `dry_run`, only says what it would do.
///
/// # Errors
/// See [`MigrateError`]. The migrations that are due are applied together or, on an error, not at all.
pub async fn migrate(client: &mut Client, table: &TableName, dry_run: bool) -> Result<Report, MigrateError> {
    preflight::check(client, table).await?;
    if dry_run {
        let created_schema = inspect::schema_is_missing(client, table).await?.then(|| table.schema.clone());
        let (applied, mended) = due(&inspect::state(client, table).await?, table)?;
        return Ok(Report { created_schema, applied, mended, warnings: Vec::new() });
    }
    prepare_session(client, table).await?;
    let outcome = run(client, table).await;
    // When this fails the session is gone, and the lock and the settings with it.
    let restored = client.batch_execute(RESTORE_SESSION).await;
    let mut report = outcome?;
    restored.map_err(|source| MigrateError::database("release the migration lock", source))?;
    report.warnings = inspect::warnings(client, table).await?;
    Ok(report)
}

/// Whether the schema of `table` is what this version needs.
///
/// # Errors
/// [`MigrateError::Database`] when the catalogue cannot be read, [`MigrateError::History`] when the history makes no
/// sense, [`MigrateError::Name`] for an impossible name.
pub async fn state(client: &Client, table: &TableName) -> Result<SchemaState, MigrateError> {
    inspect::state(client, table).await
}

/// What this version needs in the schema of `table` and does not find: tables, columns as `table.column`, functions as
/// `name()`. Needs no rights on the tables.
///
/// # Errors
/// [`MigrateError::Database`] when the catalogue cannot be read.
pub async fn missing_objects(client: &Client, table: &TableName) -> Result<Vec<String>, MigrateError> {
    inspect::missing_objects(client, table).await
}

/// Indexes of the events table that keep updates of the normal path from being HOT.
///
/// # Errors
/// [`MigrateError::Database`] when the catalogue cannot be read, or there is no such table.
pub async fn cold_indexes(client: &Client, table: &TableName) -> Result<Vec<ColdIndex>, MigrateError> {
    inspect::cold_indexes(client, table).await
}

/// The settings hold until [`RESTORE_SESSION`]. A short `lock_timeout`: while an ALTER TABLE waits for its lock, every
/// producer waits behind it.
async fn prepare_session(client: &Client, table: &TableName) -> Result<(), MigrateError> {
    let failed = |source| MigrateError::database("take the migration lock", source);
    client.batch_execute("SET lock_timeout = '60s'; SET statement_timeout = 0").await.map_err(failed)?;
    let key = format!("outbox-relay migrate {}", table.schema);
    client
        .query_typed("SELECT pg_advisory_lock(hashtextextended($1, 0))", &[(&key, Type::TEXT)])
        .await
        .map_err(failed)?;
    client
        .batch_execute(
            "SET lock_timeout = '5s'; SET client_min_messages = warning; SET standard_conforming_strings = on; \
             SET search_path = pg_catalog, pg_temp",
        )
        .await
        .map_err(failed)
}

const RESTORE_SESSION: &str = "SELECT pg_advisory_unlock_all(); RESET lock_timeout; RESET statement_timeout; \
    RESET client_min_messages; RESET standard_conforming_strings; RESET search_path";

async fn run(client: &mut Client, table: &TableName) -> Result<Report, MigrateError> {
    let mut report = Report::default();
    if inspect::schema_is_missing(client, table).await? {
        client
            .batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {}", names::identifier(&table.schema)))
            .await
            .map_err(|source| MigrateError::database("create the schema", source))?;
        report.created_schema = Some(table.schema.clone());
    }
    (report.applied, report.mended) = due(&inspect::state(client, table).await?, table)?;
    if report.applied.is_empty() {
        return Ok(report);
    }
    let history = names::in_schema(table, HISTORY);
    if !report.mended.is_empty() {
        // Each migration can be run again. Until they have, an empty history is the truth.
        client
            .batch_execute(&format!("DELETE FROM {history}"))
            .await
            .map_err(|source| MigrateError::database("clear the history of migrations", source))?;
    }
    let mut runner = Runner::new(&migrations(table)?).set_grouped(true);
    runner.set_migration_table_name(&history);
    runner.run_async(client).await.map_err(MigrateError::from_runner)?;
    for step in &report.applied {
        info!(migration = %step.name, table = %names::events(table), "applied");
    }
    Ok(report)
}

/// The migrations that `state` calls for, and what was dropped if that is the reason.
fn due(state: &SchemaState, table: &TableName) -> Result<(Vec<Step>, Vec<String>), MigrateError> {
    let steps = || FILES.iter().map(|(name, text)| Step { name: (*name).to_owned(), sql: fill_in(text, table) });
    match state {
        SchemaState::Current => Ok((Vec::new(), Vec::new())),
        SchemaState::Missing => Ok((steps().collect(), Vec::new())),
        SchemaState::Behind { pending } => {
            Ok((steps().filter(|step| pending.contains(&step.name)).collect(), Vec::new()))
        }
        SchemaState::Damaged { missing } => Ok((steps().collect(), missing.clone())),
        SchemaState::Newer { unknown } => Err(MigrateError::Newer { unknown: unknown.join(", ") }),
        SchemaState::Diverged { migration } => Err(MigrateError::Diverged {
            migration: migration.clone(),
            table: names::events(table),
            history: names::in_schema(table, HISTORY),
        }),
    }
}

fn migrations(table: &TableName) -> Result<Vec<Migration>, MigrateError> {
    FILES
        .iter()
        .map(|(name, text)| Migration::unapplied(name, &fill_in(text, table)))
        .collect::<Result<_, _>>()
        .map_err(MigrateError::from_runner)
}

/// Replaces every `{{name}}` in one pass, so that a name that looks like one is not replaced again.
fn fill_in(text: &str, table: &TableName) -> String {
    let mut filled = String::with_capacity(text.len() + 1024);
    let mut rest = text;
    while let Some((before, (name, after))) =
        rest.split_once("{{").and_then(|(before, tail)| Some((before, tail.split_once("}}")?)))
    {
        filled.push_str(before);
        match name {
            "schema" => filled.push_str(&names::identifier(&table.schema)),
            "events" => filled.push_str(&names::events(table)),
            "schema_literal" => filled.push_str(&names::literal(&names::identifier(&table.schema))),
            "events_literal" => filled.push_str(&names::literal(&names::events(table))),
            other => {
                filled.push_str("{{");
                filled.push_str(other);
                filled.push_str("}}");
            }
        }
        rest = after;
    }
    filled.push_str(rest);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fills_in_every_name_once() {
        let table = TableName { schema: "{{events}}".to_owned(), table: "it's".to_owned() };
        assert_eq!(
            fill_in("{{schema}}|{{events}}|{{events_literal}}|{{ x", &table),
            r#""{{events}}"|"{{events}}"."it's"|'"{{events}}"."it''s"'|{{ x"#
        );
    }

    #[test]
    fn the_files_use_only_known_names() {
        let table = TableName { schema: "s".to_owned(), table: "t".to_owned() };
        for (name, text) in FILES {
            assert!(!fill_in(text, &table).contains("}}"), "{name}");
        }
    }

    #[test]
    fn every_file_is_a_migration_in_order() {
        let table = TableName { schema: "s".to_owned(), table: "t".to_owned() };
        let versions: Vec<_> = migrations(&table).unwrap().iter().map(Migration::version).collect();
        assert_eq!(versions, (1..=i32::try_from(FILES.len()).unwrap()).collect::<Vec<_>>());
    }
}
