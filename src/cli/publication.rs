//! `outbox-relay publication`

use std::io::{self, Write};

use serde_json::{Value, json};
use tokio_postgres::Client;
use tokio_postgres::error::SqlState;

use super::output::{self, Format};
use super::{Failure, block_on, log_warnings, servers};
use crate::config::{Loaded, Settings, Source};
use crate::postgres::describe;
use crate::postgres::publication;
use crate::postgres::publication::published::{Published, PublishedTable, published};

/// Look at a publication, make one
#[derive(clap::Subcommand)]
pub enum Publication {
    /// Show what a publication shows, and whether the outbox can be read through it
    #[command(after_help = "Example:\n  outbox-relay publication show --output json")]
    Show {
        /// The publication; source.publication without it
        name: Option<String>,
        #[arg(long, value_enum, default_value_t)]
        output: Format,
    },
    /// Make the publication of the settings, for the inserts of the outbox alone; as the table's owner
    #[command(after_help = "Example:\n  outbox-relay publication create --source-publication outbox_relay")]
    Create,
}

/// What the relay says of a publication when it starts.
struct Judgement {
    problem: Option<String>,
    warnings: Vec<String>,
}

impl Publication {
    pub fn run(self, mut loaded: Loaded) -> Result<(), Failure> {
        log_warnings(&mut loaded);
        block_on(self.go(&loaded.settings))
    }

    async fn go(self, settings: &Settings) -> Result<(), Failure> {
        let source = &settings.source;
        let connection = servers::postgres(settings, "publication").await?;
        let client = &connection.client;
        let mut out = io::stdout().lock();
        match self {
            Self::Show { name, output } => {
                let name = name.as_ref().unwrap_or(&source.publication);
                let judged = judge(client, name, source).await?;
                let Some(found) = published(client, name).await? else {
                    return Err(Failure::Unfit(
                        judged.problem.unwrap_or_else(|| format!("publication {name:?} has gone")),
                    ));
                };
                match output {
                    Format::Json => output::json(&mut out, &as_json(&found, &judged, source))?,
                    Format::Table => show_table(&mut out, &found, &judged, source)?,
                }
                Ok(())
            }
            Self::Create => {
                create(client, source).await?;
                writeln!(out, "publication {} created", source.publication)?;
                match judge(client, &source.publication, source).await?.problem {
                    Some(problem) => Err(Failure::Unfit(problem)),
                    None => Ok(()),
                }
            }
        }
    }
}

async fn judge(client: &Client, name: &str, source: &Source) -> Result<Judgement, Failure> {
    Ok(match publication::check(client, name, &source.table).await? {
        Ok(found) => Judgement { problem: None, warnings: found.iter().map(ToString::to_string).collect() },
        Err(fault) => Judgement { problem: Some(fault.to_string()), warnings: Vec::new() },
    })
}

async fn create(client: &Client, source: &Source) -> Result<(), Failure> {
    let (name, table) = (&source.publication, &source.table);
    publication::create(client, name, table).await.map_err(|error| match error.code() {
        Some(&SqlState::DUPLICATE_OBJECT) => Failure::Unfit(format!(
            "publication {name:?} exists already; `outbox-relay publication show` tells whether it fits"
        )),
        Some(&SqlState::UNDEFINED_TABLE | &SqlState::INVALID_SCHEMA_NAME) => {
            Failure::Unfit(format!("table {table} does not exist; run: outbox-relay migrate"))
        }
        Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Failure::Unfit(format!(
            "{}; a publication is made by the table's owner, who needs CREATE on the database: run this as that role",
            describe(&error)
        )),
        _ => Failure::Sql(error),
    })
}

fn operations(found: &Published) -> Vec<&'static str> {
    let all = [
        (found.inserts, "insert"),
        (found.updates, "update"),
        (found.deletes, "delete"),
        (found.truncates, "truncate"),
    ];
    all.into_iter().filter(|(shown, _)| *shown).map(|(_, name)| name).collect()
}

fn is_outbox(table: &PublishedTable, source: &Source) -> bool {
    table.schema == source.table.schema && table.table == source.table.table
}

fn as_json(found: &Published, judged: &Judgement, source: &Source) -> Value {
    let table = |table: &PublishedTable| {
        json!({
            "schema": table.schema,
            "table": table.table,
            "outbox": is_outbox(table, source),
            "columns": table.columns_left_out.then_some(&table.columns),
            "row_filter": table.row_filter,
        })
    };
    json!({
        "name": found.name,
        "ours": found.name == source.publication,
        "owner": found.owner,
        "all_tables": found.all_tables,
        "operations": operations(found),
        "via_partition_root": found.via_root,
        "tables": found.tables.iter().map(table).collect::<Vec<_>>(),
        "fit": judged.problem.is_none(),
        "problem": judged.problem,
        "warnings": judged.warnings,
    })
}

fn show_table(out: &mut impl Write, found: &Published, judged: &Judgement, source: &Source) -> io::Result<()> {
    let ours = if found.name == source.publication { " (source.publication)" } else { "" };
    let lines = [
        ("publication", format!("{}{ours}", found.name)),
        ("owner", found.owner.clone()),
        ("operations", operations(found).join(", ")),
        ("partitions", if found.via_root { "shown as their table" } else { "shown by themselves" }.to_owned()),
        ("tables", if found.all_tables { "every table of the database" } else { "those named" }.to_owned()),
    ];
    for (name, value) in lines {
        writeln!(out, "{name:<14}{value}")?;
    }
    writeln!(out)?;
    let rows: Vec<_> = found
        .tables
        .iter()
        .map(|table| {
            [
                format!("{}{}.{}", if is_outbox(table, source) { "* " } else { "  " }, table.schema, table.table),
                if table.columns_left_out { table.columns.join(", ") } else { "all".to_owned() },
                table.row_filter.clone().unwrap_or_else(|| "-".to_owned()),
            ]
        })
        .collect();
    output::table(out, ["  TABLE", "COLUMNS", "ROW FILTER"], &rows)?;
    writeln!(out)?;
    judged.warnings.iter().try_for_each(|warning| writeln!(out, "warning: {warning}"))?;
    match &judged.problem {
        Some(problem) => writeln!(out, "unfit: {problem}"),
        None => writeln!(out, "the relay can read {} through it", source.table),
    }
}
