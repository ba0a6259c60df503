//! What the connected role lacks, as statements that grant it.

use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error};

use super::outbox::Tables;
use crate::config::TableName;

/// The statement that lets the connected role use the schema of the tables, when it may not.
pub async fn missing_on_schema(client: &Client, table: &TableName) -> Result<Option<String>, Error> {
    let statement = "SELECT 'GRANT USAGE ON SCHEMA ' || quote_ident(nspname) || ' TO ' || quote_ident(current_user)
         FROM pg_namespace WHERE nspname = $1 AND NOT has_schema_privilege(oid, 'USAGE')";
    let rows = client.query_typed(statement, &[(&table.schema, Type::TEXT)]).await?;
    rows.first().map(|row| row.try_get(0)).transpose()
}

/// The privileges that the connected role lacks on the tables, as statements that grant them.
pub async fn missing(client: &Client, tables: &Tables, delete: bool, compensate: bool) -> Result<Vec<String>, Error> {
    let delete = if delete { ", DELETE" } else { "" };
    // A dead letter may ask for a compensation, whoever sees to it.
    let compensate = if compensate { ", UPDATE" } else { "" };
    let wanted = [
        (&tables.events, format!("SELECT, UPDATE{delete}")),
        (&tables.dead_letter, "SELECT, INSERT".to_owned()),
        (&tables.state, "SELECT, INSERT, UPDATE".to_owned()),
        (&tables.compensation, format!("SELECT, INSERT{compensate}")),
    ];
    let mut grants = Vec::new();
    for (table, privileges) in wanted {
        let mut lacking = Vec::new();
        for privilege in privileges.split(", ") {
            let statement = "SELECT has_table_privilege($1, $2)";
            let rows = client.query_typed(statement, &[(table, Type::TEXT), (&privilege, Type::TEXT)]).await?;
            let has = rows.first().map(|row| row.try_get::<_, bool>(0)).transpose()?;
            if has != Some(true) {
                lacking.push(privilege);
            }
        }
        if !lacking.is_empty() {
            let user: String = client
                .query_typed("SELECT quote_ident(current_user)", &[])
                .await?
                .first()
                .map_or(Ok("CURRENT_USER".to_owned()), |row| row.try_get(0))?;
            grants.push(format!("GRANT {} ON {table} TO {user}", lacking.join(", ")));
        }
    }
    // Everyone may call a function, unless that was taken back, as deploy/sql/roles.sql does.
    let functions = "SELECT 'GRANT EXECUTE ON FUNCTION ' || p.oid::regprocedure || ' TO ' || quote_ident(current_user)
         FROM pg_proc p JOIN pg_class c ON c.relnamespace = p.pronamespace
         WHERE c.oid = to_regclass($1) AND p.proname IN ('outbox_relay_compensate', 'create_compensation')
           AND NOT has_function_privilege(p.oid, 'EXECUTE') ORDER BY p.proname DESC";
    for row in client.query_typed(functions, &[(&tables.events, Type::TEXT)]).await? {
        grants.push(row.try_get(0)?);
    }
    // Tables that were adopted may count by sequences of their own, which identity columns do without a privilege.
    let sequences = "SELECT DISTINCT 'GRANT USAGE ON SEQUENCE ' || s.oid::regclass || ' TO ' || quote_ident(current_user)
         FROM pg_attrdef d
         JOIN pg_depend n ON n.classid = 'pg_attrdef'::regclass AND n.objid = d.oid AND n.refclassid = 'pg_class'::regclass
         JOIN pg_class s ON s.oid = n.refobjid
         WHERE d.adrelid IN (to_regclass($1), to_regclass($2))
           AND CASE WHEN s.relkind = 'S' THEN NOT has_sequence_privilege(s.oid, 'USAGE, UPDATE') END
         ORDER BY 1";
    let written: [(&(dyn ToSql + Sync), Type); 2] =
        [(&tables.dead_letter, Type::TEXT), (&tables.compensation, Type::TEXT)];
    for row in client.query_typed(sequences, &written).await? {
        grants.push(row.try_get(0)?);
    }
    Ok(grants)
}
