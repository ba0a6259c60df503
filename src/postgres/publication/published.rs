//! What a publication shows.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

/// A publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub name: String,
    pub owner: String,
    pub all_tables: bool,
    pub inserts: bool,
    pub updates: bool,
    pub deletes: bool,
    pub truncates: bool,
    /// Whether rows of a partition are shown as the partitioned table's.
    pub via_root: bool,
    pub tables: Vec<PublishedTable>,
}

/// A table of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedTable {
    pub schema: String,
    pub table: String,
    /// Its columns that are shown.
    pub columns: Vec<String>,
    /// Whether that is fewer than it has.
    pub columns_left_out: bool,
    /// The condition on rows that are shown, as SQL.
    pub row_filter: Option<String>,
}

/// Looks a publication up.
pub async fn published(client: &Client, name: &str) -> Result<Option<Published>, Error> {
    let statement =
        "SELECT pubname::text, pg_get_userbyid(pubowner)::text, puballtables, pubinsert, pubupdate, pubdelete,
           pubtruncate, pubviaroot
         FROM pg_publication WHERE pubname = $1";
    let Some(row) = client.query_typed(statement, &[(&name, Type::TEXT)]).await?.into_iter().next() else {
        return Ok(None);
    };
    Ok(Some(Published {
        name: row.try_get(0)?,
        owner: row.try_get(1)?,
        all_tables: row.try_get(2)?,
        inserts: row.try_get(3)?,
        updates: row.try_get(4)?,
        deletes: row.try_get(5)?,
        truncates: row.try_get(6)?,
        via_root: row.try_get(7)?,
        tables: tables(client, name).await?,
    }))
}

async fn tables(client: &Client, name: &str) -> Result<Vec<PublishedTable>, Error> {
    let statement = "SELECT t.schemaname::text, t.tablename::text, t.attnames::text[], t.rowfilter,
           EXISTS (SELECT FROM pg_attribute a
             JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE n.nspname = t.schemaname AND c.relname = t.tablename AND a.attnum > 0 AND NOT a.attisdropped
               AND a.attgenerated = '' AND a.attname <> ALL (t.attnames))
         FROM pg_publication_tables t WHERE t.pubname = $1 ORDER BY 1, 2";
    let rows = client.query_typed(statement, &[(&name, Type::TEXT)]).await?;
    rows.iter()
        .map(|row| {
            Ok(PublishedTable {
                schema: row.try_get(0)?,
                table: row.try_get(1)?,
                columns: row.try_get(2)?,
                row_filter: row.try_get(3)?,
                columns_left_out: row.try_get(4)?,
            })
        })
        .collect()
}
