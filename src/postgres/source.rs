//! The outbox table and its place in the publication, beyond the first check: did they change under a running relay, and may
//! the relay mend it?

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::names::identifier;
use crate::config::TableName;

/// A mark of the table and of its place in the publication. Another mark means that one of them was made anew or changed in
/// between: then rows may have been written that the log does not show.
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

/// The row filter that the publication has on the table, as PostgreSQL prints it; `None`: it shows every row.
pub async fn row_filter(client: &Client, publication: &str, table: &TableName) -> Result<Option<String>, Error> {
    let statement = "SELECT rowfilter FROM pg_publication_tables
         WHERE pubname = $1 AND schemaname = $2 AND tablename = $3";
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&publication, Type::TEXT), (&table.schema, Type::TEXT), (&table.table, Type::TEXT)];
    let rows = client.query_typed(statement, &parameters).await?;
    rows.first().map_or(Ok(None), |row| row.try_get(0))
}

/// Whether the publication shows no table at all, as when its only one was dropped. Then nobody relies on what it shows.
pub async fn is_empty(client: &Client, publication: &str) -> Result<bool, Error> {
    let statement = "SELECT FROM pg_publication p WHERE p.pubname = $1 AND NOT p.puballtables
           AND NOT EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = p.oid)
           AND NOT EXISTS (SELECT FROM pg_publication_namespace WHERE pnpubid = p.oid)";
    Ok(!client.query_typed(statement, &[(&publication, Type::TEXT)]).await?.is_empty())
}

/// The statement that adds the table to the publication.
pub fn add_table_sql(publication: &str, table: &TableName) -> String {
    format!("ALTER PUBLICATION {} ADD TABLE {table}", identifier(publication))
}

/// Adds the table to the publication.
pub async fn add_table(client: &Client, publication: &str, table: &TableName) -> Result<(), Error> {
    client.batch_execute(&add_table_sql(publication, table)).await
}
