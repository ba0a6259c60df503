//! What must hold before a migration.

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::inspect::{FUNCTIONS, SchemaState, TABLES, check_name, first, get, query, state};
use super::{HISTORY, MigrateError};
use crate::config::TableName;
use crate::postgres::names;

/// Columns of the older schema that cannot be added to a table with rows, and what the functions need them to be:
/// (table, column, types).
const NEEDED: [(Option<&str>, &str, &[&str]); 18] = [
    (None, "id", &["bigint"]),
    (None, "event_id", TEXTS),
    (None, "aggregate_type", TEXTS),
    (None, "aggregate_id", TEXTS),
    (None, "event_type", TEXTS),
    (None, "payload", &["jsonb"]),
    (Some("outbox_dead_letter"), "original_event_id", TEXTS),
    (Some("outbox_dead_letter"), "original_aggregate_type", TEXTS),
    (Some("outbox_dead_letter"), "original_aggregate_id", TEXTS),
    (Some("outbox_dead_letter"), "event_type", TEXTS),
    (Some("outbox_dead_letter"), "payload", &["jsonb"]),
    (Some("outbox_dead_letter"), "retry_count", &["integer", "bigint"]),
    (Some("supply_batch_compensation"), "id", &["bigint"]),
    (Some("supply_batch_compensation"), "batch_id", TEXTS),
    (Some("supply_batch_compensation"), "operation_type", TEXTS),
    (Some("supply_batch_compensation"), "item_index", &["integer", "bigint"]),
    (Some("supply_batch_compensation"), "item_payload", &["jsonb"]),
    (Some("supply_batch_compensation"), "status", TEXTS),
];

const TEXTS: &[&str] = &["character varying", "text"];

/// What must hold before anything is changed.
pub(super) async fn check(client: &Client, table: &TableName) -> Result<(), MigrateError> {
    check_name(table)?;
    let sql = "SELECT current_setting('server_version_num')::int, current_setting('server_version'), \
               pg_is_in_recovery()";
    let server = first(query(client, sql, &[]).await?)?;
    if get::<i32>(&server, 0)? < 150_000 {
        return Err(MigrateError::TooOld { version: get(&server, 1)? });
    }
    if get(&server, 2)? {
        return Err(MigrateError::Standby);
    }
    check_relations(client, table).await?;
    check_privileges(client, table).await
}

/// A relation that bears one of our names must be a table that V2 can adopt.
async fn check_relations(client: &Client, table: &TableName) -> Result<(), MigrateError> {
    for (name, _) in TABLES {
        let name = name.unwrap_or(&table.table);
        let relation = names::in_schema(table, name);
        let sql = "SELECT c.relkind::text, \
                          (SELECT array_agg(a.attname::text || ' ' || format_type(a.atttypid, NULL)) \
                           FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) \
                   FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                   WHERE n.nspname = $1 AND c.relname = $2";
        let found = query(client, sql, &[(&table.schema, Type::TEXT), (&name, Type::TEXT)]).await?;
        let Some(row) = found.first() else { continue };
        let kind: String = get(row, 0)?;
        if kind != "r" && kind != "p" {
            return Err(MigrateError::NotAnOutbox { relation, problem: "it is not a table".to_owned() });
        }
        let columns: Option<Vec<String>> = get(row, 1)?;
        let columns = columns.unwrap_or_default();
        let problems: Vec<String> = NEEDED
            .iter()
            .filter(|(owner, ..)| owner.unwrap_or(&table.table) == name)
            .filter(|(_, column, types)| !types.iter().any(|kind| columns.contains(&format!("{column} {kind}"))))
            .map(|(_, column, types)| format!("column {column} of type {} is missing", types.join(" or ")))
            .collect();
        if !problems.is_empty() {
            return Err(MigrateError::NotAnOutbox { relation, problem: problems.join(", ") });
        }
    }
    Ok(())
}

async fn check_privileges(client: &Client, table: &TableName) -> Result<(), MigrateError> {
    let our_tables: Vec<&str> = TABLES.iter().map(|(name, _)| name.unwrap_or(&table.table)).chain([HISTORY]).collect();
    let sql = "\
        SELECT current_user::text, m.missing FROM ( \
            SELECT format('it lacks CREATE on the database (GRANT CREATE ON DATABASE %I TO %I)', current_database(), \
                          current_user) AS missing \
            WHERE NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1) \
              AND NOT has_database_privilege(current_database(), 'CREATE') \
            UNION ALL \
            SELECT format('it lacks %s on the schema (GRANT %1$s ON SCHEMA %I TO %I)', p, n.nspname, current_user) \
            FROM pg_namespace n, unnest('{USAGE,CREATE}'::text[]) p \
            WHERE n.nspname = $1 AND NOT has_schema_privilege(n.oid, p) \
            UNION ALL \
            SELECT format('it does not own %s (GRANT %I TO %I, or run as the owner)', c.oid::regclass, \
                          pg_get_userbyid(c.relowner), current_user) \
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
            WHERE n.nspname = $1 AND c.relname = ANY ($2) AND NOT pg_has_role(c.relowner, 'USAGE') \
            UNION ALL \
            SELECT format('it does not own %s (GRANT %I TO %I, or run as the owner)', p.oid::regprocedure, \
                          pg_get_userbyid(p.proowner), current_user) \
            FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
            WHERE n.nspname = $1 AND p.proname = ANY ($3) AND NOT pg_has_role(p.proowner, 'USAGE')) m";
    // With everything applied, nothing needs a right.
    if state(client, table).await? == SchemaState::Current {
        return Ok(());
    }
    let parameters: [(&(dyn ToSql + Sync), Type); 3] =
        [(&table.schema, Type::TEXT), (&our_tables, Type::TEXT_ARRAY), (&FUNCTIONS.as_slice(), Type::TEXT_ARRAY)];
    let rows = query(client, sql, &parameters).await?;
    let missing = rows.iter().map(|row| get(row, 1)).collect::<Result<Vec<String>, _>>()?;
    match rows.first() {
        Some(row) => Err(MigrateError::Privilege { role: get(row, 0)?, missing }),
        None => Ok(()),
    }
}
