//! The publication of the outbox: whether the table can be read through it, making it, and whether it changes under a
//! running relay.

pub mod published;

use std::fmt::{self, Display};

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::names::identifier;
use super::outbox::COLUMNS;
use super::remedies;
use crate::config::TableName;

/// What keeps the relay from reading the outbox through a publication. Names are quoted; the text ends with the mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicationFault {
    /// Publication, table.
    Missing(String, String),
    NoInserts(String),
    /// Publication, table.
    NoTable(String, String),
    /// Publication, table.
    Partitions(String, String),
    /// Publication, table, columns.
    Columns(String, String, String),
}

impl PublicationFault {
    /// What is wrong.
    pub fn problem(&self) -> String {
        match self {
            Self::Missing(name, _) => format!("publication {name} does not exist"),
            Self::NoInserts(name) => format!("publication {name} does not publish inserts"),
            Self::NoTable(name, table) => format!("publication {name} does not include {table}"),
            Self::Partitions(name, table) => {
                format!("publication {name} names the partitions of {table} instead of the table")
            }
            Self::Columns(name, table, columns) => {
                format!("the column list of publication {name} leaves out {columns} of {table}")
            }
        }
    }

    /// The statement that mends it.
    pub fn mend(&self) -> String {
        match self {
            Self::Missing(name, table) => remedies::create_publication(name, table),
            Self::NoInserts(name) => remedies::publish_inserts(name),
            Self::NoTable(name, table) => remedies::publish_table(name, table),
            Self::Partitions(name, _) => remedies::publish_via_root(name),
            Self::Columns(name, table, _) => remedies::publish_anew(name, table),
        }
    }
}

impl Display for PublicationFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let choice = match self {
            Self::Missing(..) => {
                "as the table's owner, outbox-relay publication create, or let the relay make it (source.create = true); in SQL: "
            }
            _ => "",
        };
        write!(f, "{}; run: {choice}{}", self.problem(), self.mend())
    }
}

/// A publication that works, but shows more or less than it should. Names are quoted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicationFlaw {
    /// Publication, table.
    AllTables(String, String),
    MoreThanInserts(String),
    /// Publication, table, other tables.
    OtherTables(String, String, String),
    /// Publication, table, the filter as PostgreSQL prints it.
    RowFilter(String, String, String),
}

impl PublicationFlaw {
    /// What could be better.
    pub fn problem(&self) -> String {
        match self {
            Self::AllTables(name, _) => format!("publication {name} shows every table"),
            Self::MoreThanInserts(name) => format!("publication {name} shows more than inserts"),
            Self::OtherTables(name, table, others) => format!("publication {name} shows {others} beside {table}"),
            Self::RowFilter(name, table, _) => format!("publication {name} has a row filter on {table}"),
        }
    }

    /// What it costs.
    pub fn why(&self) -> &'static str {
        match self {
            Self::RowFilter(..) => "rows that it hides are left to other relays, this one never sends them",
            _ => "the relay passes over the rest, at the cost of decoding it",
        }
    }

    /// The statement that mends it.
    pub fn mend(&self) -> String {
        match self {
            Self::AllTables(name, table) => remedies::replace_publication(name, table),
            Self::MoreThanInserts(name) => remedies::publish_inserts(name),
            Self::OtherTables(name, table, _) => remedies::publish_only(name, table),
            Self::RowFilter(name, table, _) => remedies::publish_anew(name, table),
        }
    }
}

impl Display for PublicationFlaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let when = if matches!(self, Self::RowFilter(..)) { "where there are none, run" } else { "better is" };
        write!(f, "{}: {}; {when}: {}", self.problem(), self.why(), self.mend())
    }
}

/// Checks that the publication shows the inserts of the outbox table. What it finds beside that are flaws.
pub async fn check(
    client: &Client,
    name: &str,
    table: &TableName,
) -> Result<Result<Vec<PublicationFlaw>, PublicationFault>, Error> {
    let statement = "SELECT p.pubinsert, p.pubupdate OR p.pubdelete OR p.pubtruncate, p.pubviaroot, p.puballtables,
           c.relkind = 'p', t.attnames::text[], t.rowfilter,
           (SELECT string_agg(format('%I.%I', o.schemaname, o.tablename), ', ') FROM pg_publication_tables o
            WHERE o.pubname = p.pubname AND NOT p.puballtables
              AND NOT EXISTS (SELECT FROM pg_partition_tree(c.oid) t JOIN pg_class leaf ON leaf.oid = t.relid
                              JOIN pg_namespace n ON n.oid = leaf.relnamespace
                              WHERE n.nspname = o.schemaname AND leaf.relname = o.tablename)
              AND (o.schemaname, o.tablename) <> ($2, $3))
         FROM pg_publication p
         LEFT JOIN pg_publication_tables t ON t.pubname = p.pubname AND t.schemaname = $2 AND t.tablename = $3
         LEFT JOIN pg_class c ON c.relname = $3 AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $2)
         WHERE p.pubname = $1";
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&name, Type::TEXT), (&table.schema, Type::TEXT), (&table.table, Type::TEXT)];
    let rows = client.query_typed(statement, &parameters).await?;
    let (quoted, outbox) = (identifier(name), table.to_string());
    let Some(row) = rows.first() else {
        return Ok(Err(PublicationFault::Missing(quoted, outbox)));
    };
    let (inserts, more, via_root): (bool, bool, bool) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let (all_tables, partitioned): (bool, Option<bool>) = (row.try_get(3)?, row.try_get(4)?);
    let columns: Option<Vec<String>> = row.try_get(5)?;
    if !inserts {
        return Ok(Err(PublicationFault::NoInserts(quoted)));
    }
    if partitioned == Some(true) && !via_root {
        return Ok(Err(PublicationFault::Partitions(quoted, outbox)));
    }
    let Some(columns) = columns else {
        return Ok(Err(PublicationFault::NoTable(quoted, outbox)));
    };
    let left_out: Vec<&str> = COLUMNS.into_iter().filter(|name| !columns.iter().any(|column| column == name)).collect();
    if !left_out.is_empty() {
        return Ok(Err(PublicationFault::Columns(quoted, outbox, left_out.join(", "))));
    }
    let mut flaws = Vec::new();
    if all_tables {
        flaws.push(PublicationFlaw::AllTables(quoted.clone(), outbox.clone()));
    }
    // One that is made anew for the outbox alone shows inserts only.
    if more && !all_tables {
        flaws.push(PublicationFlaw::MoreThanInserts(quoted.clone()));
    }
    if let Some(others) = row.try_get(7)? {
        flaws.push(PublicationFlaw::OtherTables(quoted.clone(), outbox.clone(), others));
    }
    if let Some(filter) = row.try_get(6)? {
        flaws.push(PublicationFlaw::RowFilter(quoted, outbox, filter));
    }
    Ok(Ok(flaws))
}

/// Makes the publication.
pub async fn create(client: &Client, name: &str, table: &TableName) -> Result<(), Error> {
    client.batch_execute(&remedies::create_publication(&identifier(name), &table.to_string())).await
}

/// A mark of the table and of its place in the publication. Another mark means that one of them was made anew or
/// changed in between: then rows may have been written that the log does not show.
pub async fn mark(client: &Client, publication: &str, table: &TableName) -> Result<String, Error> {
    let statement = "SELECT concat_ws(' ', 'table', c.oid, 'publication', p.oid, p.xmin, 'member', r.oid, r.xmin,
           'schema', s.oid, s.xmin)
         FROM (VALUES ($1, $2, $3)) AS given(publication, schema, name)
         LEFT JOIN pg_namespace n ON n.nspname = given.schema
         LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = given.name
         LEFT JOIN pg_publication p ON p.pubname = given.publication
         LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
         LEFT JOIN pg_publication_namespace s ON s.pnpubid = p.oid AND s.pnnspid = n.oid";
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&publication, Type::TEXT), (&table.schema, Type::TEXT), (&table.table, Type::TEXT)];
    let rows = client.query_typed(statement, &parameters).await?;
    rows.first().map_or(Ok(String::new()), |row| row.try_get(0))
}

/// Whether the publication shows no table at all, as when its only one was dropped. Then nobody relies on what it
/// shows.
pub async fn is_empty(client: &Client, publication: &str) -> Result<bool, Error> {
    let statement = "SELECT FROM pg_publication p WHERE p.pubname = $1 AND NOT p.puballtables
           AND NOT EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = p.oid)
           AND NOT EXISTS (SELECT FROM pg_publication_namespace WHERE pnpubid = p.oid)";
    Ok(!client.query_typed(statement, &[(&publication, Type::TEXT)]).await?.is_empty())
}

/// Adds the table to the publication.
pub async fn add_table(client: &Client, publication: &str, table: &TableName) -> Result<(), Error> {
    client.batch_execute(&remedies::publish_table(&identifier(publication), &table.to_string())).await
}
