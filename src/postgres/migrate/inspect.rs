//! What is there, as the catalogue says.

use tokio_postgres::types::{FromSql, ToSql, Type};
use tokio_postgres::{Client, Row};

use super::{DOLLAR_TAG, FILES, HISTORY, MigrateError, migrations};
use crate::config::TableName;
use crate::postgres::names;

/// How the schema of an events table compares with what this version needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SchemaState {
    /// Never migrated, and there is no events table.
    Missing,
    /// `pending` are yet to be applied; they adopt an events table that is there.
    Behind { pending: Vec<String> },
    /// All applied, but `missing` was dropped since; migrating again makes it anew.
    Damaged { missing: Vec<String> },
    /// The migration was applied with another text: for another table, or by another build.
    Diverged { migration: String },
    /// All applied, and `unknown` ones besides: by a newer version.
    Newer { unknown: Vec<String> },
    /// As this version needs it.
    Current,
}

impl SchemaState {
    /// What is wrong with `table` and those beside it; empty when nothing is.
    pub fn problem(&self, table: &TableName) -> String {
        match self {
            Self::Current => String::new(),
            Self::Missing => format!("table {table} does not exist"),
            Self::Behind { pending } => {
                format!("the tables are not up to date (to be applied: {})", pending.join(", "))
            }
            Self::Damaged { missing } => format!("the tables are not whole (missing: {})", missing.join(", ")),
            Self::Diverged { migration } => {
                format!("migration {migration} was applied for another table than {table}, or by another build")
            }
            Self::Newer { unknown } => format!("the tables were made by a newer version ({})", unknown.join(", ")),
        }
    }

    /// What mends it: the command where one does.
    pub fn mend(&self) -> Result<&'static str, &'static str> {
        match self {
            Self::Current | Self::Missing | Self::Behind { .. } | Self::Damaged { .. } => Ok("outbox-relay migrate"),
            Self::Diverged { .. } => {
                Err("a schema holds one outbox, so set source.table to the one that this schema was migrated for; \
                 `outbox-relay migrate` tells more")
            }
            Self::Newer { .. } => Err("run that version of outbox-relay"),
        }
    }
}

/// Every table and its columns.
pub(super) const TABLES: [(Option<&str>, &str); 4] = [
    (
        None,
        "id event_id tenant_id aggregate_type aggregate_id event_type deduplication_key payload_hash payload headers \
         status retry_count max_retries error_code error_message first_failed_at dead_letter_reason next_retry_at \
         locked_by locked_at created_at processed_at updated_at version",
    ),
    (
        Some("outbox_dead_letter"),
        "id original_event_id original_aggregate_type original_aggregate_id tenant_id event_type payload headers \
         error_code error_message retry_count first_failed_at dead_letter_at handled handled_at handler_notes created_at",
    ),
    (
        Some("supply_batch_compensation"),
        "id batch_id operation_type item_index item_payload failure_reason status retry_count max_retries \
         next_retry_at locked_by locked_at resolved_at resolved_by resolution_notes created_at updated_at created_by \
         version",
    ),
    (Some("outbox_relay_state"), "slot_name stream stream_created stream_seq needs_drain confirmed_lsn updated_at"),
];

pub(super) const FUNCTIONS: [&str; 15] = [
    "enqueue_outbox_event",
    "fetch_and_lock_outbox_events",
    "mark_outbox_completed",
    "mark_outbox_failed",
    "create_compensation",
    "retry_compensation",
    "resolve_compensation",
    "mark_compensation_manual_required",
    "get_outbox_stats",
    "get_dead_letter_stats",
    "get_pending_manual_compensations",
    "outbox_relay_polling_allowed",
    "outbox_relay_claim",
    "outbox_relay_check_lease",
    "outbox_relay_compensate",
];

pub(super) async fn query(
    client: &Client,
    sql: &str,
    parameters: &[(&(dyn ToSql + Sync), Type)],
) -> Result<Vec<Row>, MigrateError> {
    client.query_typed(sql, parameters).await.map_err(|source| MigrateError::database("read the catalogue", source))
}

/// A column of a catalogue query, as the type that the query gives it.
pub(super) fn get<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T, MigrateError> {
    row.try_get(index).map_err(|source| MigrateError::database("read the catalogue", source))
}

pub(super) fn first<T>(values: Vec<T>) -> Result<T, MigrateError> {
    values.into_iter().next().ok_or_else(|| MigrateError::Name("the catalogue query returned no row".to_owned()))
}

pub(super) fn check_name(table: &TableName) -> Result<(), MigrateError> {
    if let Some(problem) = names::problem(table) {
        return Err(MigrateError::Name(problem));
    }
    if table.schema.contains(DOLLAR_TAG) || table.table.contains(DOLLAR_TAG) {
        return Err(MigrateError::Name(format!("a name must not contain {DOLLAR_TAG}")));
    }
    Ok(())
}

pub(super) async fn schema_is_missing(client: &Client, table: &TableName) -> Result<bool, MigrateError> {
    let sql = "SELECT FROM pg_namespace WHERE nspname = $1";
    Ok(query(client, sql, &[(&table.schema, Type::TEXT)]).await?.is_empty())
}

pub(super) async fn state(client: &Client, table: &TableName) -> Result<SchemaState, MigrateError> {
    check_name(table)?;
    let applied = history(client, table).await?;
    if applied.is_empty() {
        let name = names::literal(&names::events(table));
        let there = first(query(client, &format!("SELECT to_regclass({name}) IS NOT NULL"), &[]).await?)?;
        return Ok(if get(&there, 0)? { behind(&[]) } else { SchemaState::Missing });
    }
    let ours = migrations(table)?;
    let known = |version: i32| ours.iter().find(|ours| ours.version() == version);
    if let Some(ours) = applied.iter().find_map(|a| known(a.version).filter(|ours| ours.checksum() != a.checksum)) {
        return Ok(SchemaState::Diverged { migration: ours.to_string() });
    }
    let unknown = applied.iter().filter(|applied| known(applied.version).is_none());
    let unknown: Vec<String> = unknown.map(|applied| format!("V{}__{}", applied.version, applied.name)).collect();
    if !unknown.is_empty() {
        return Ok(SchemaState::Newer { unknown });
    }
    if applied.len() < ours.len() {
        return Ok(behind(&applied));
    }
    let missing = missing_objects(client, table).await?;
    Ok(if missing.is_empty() { SchemaState::Current } else { SchemaState::Damaged { missing } })
}

fn behind(applied: &[Applied]) -> SchemaState {
    let is_applied = |name: &str| applied.iter().any(|a| name == format!("V{}__{}", a.version, a.name));
    let pending = FILES.iter().filter(|(name, _)| !is_applied(name)).map(|(name, _)| (*name).to_owned()).collect();
    SchemaState::Behind { pending }
}

/// A row of the history.
struct Applied {
    version: i32,
    name: String,
    checksum: u64,
}

/// What was applied; nothing when there is no history yet. The migration library takes each row at its word and would
/// panic on another form, so the form is checked here.
async fn history(client: &Client, table: &TableName) -> Result<Vec<Applied>, MigrateError> {
    let history = names::in_schema(table, HISTORY);
    let sql = format!("SELECT to_regclass({}) IS NOT NULL", names::literal(&history));
    if !get::<bool>(&first(query(client, &sql, &[]).await?)?, 0)? {
        return Ok(Vec::new());
    }
    let sql =
        format!("SELECT version::int, name::text, applied_on::text, checksum::text FROM {history} ORDER BY version");
    let rows = client
        .query_typed(&sql, &[])
        .await
        .map_err(|source| MigrateError::database("read the history of migrations", source))?;
    rows.iter()
        .map(|row| {
            let version: Option<i32> = get(row, 0)?;
            let name: Option<String> = get(row, 1)?;
            let applied_on: Option<String> = get(row, 2)?;
            let checksum: Option<String> = get(row, 3)?;
            let is_time = applied_on.is_some_and(|text| text.parse::<jiff::Timestamp>().is_ok());
            match (version, name, checksum.and_then(|text| text.parse().ok())) {
                (Some(version), Some(name), Some(checksum)) if is_time => Ok(Applied { version, name, checksum }),
                _ => Err(MigrateError::History {
                    history: history.clone(),
                    problem: format!("the row of version {version:?} is incomplete"),
                }),
            }
        })
        .collect()
}

pub(super) async fn missing_objects(client: &Client, table: &TableName) -> Result<Vec<String>, MigrateError> {
    let columns = TABLES.iter().flat_map(|(name, columns)| {
        let name = name.unwrap_or(&table.table);
        columns.split_whitespace().map(move |column| (name, column))
    });
    let (relations, columns): (Vec<&str>, Vec<&str>) = columns.unzip();
    let sql = "\
        SELECT CASE WHEN c.oid IS NULL THEN w.relation ELSE w.relation || '.' || w.name END \
        FROM unnest($2::text[], $3::text[]) w (relation, name) \
        LEFT JOIN (pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = $1) \
            ON c.relname = w.relation AND c.relkind IN ('r', 'p') \
        WHERE NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = w.name) \
        GROUP BY 1 \
        UNION ALL \
        SELECT f || '()' FROM unnest($4::text[]) f \
        WHERE NOT EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
                          WHERE n.nspname = $1 AND p.proname = f)";
    let parameters: [(&(dyn ToSql + Sync), Type); 4] = [
        (&table.schema, Type::TEXT),
        (&relations, Type::TEXT_ARRAY),
        (&columns, Type::TEXT_ARRAY),
        (&FUNCTIONS.as_slice(), Type::TEXT_ARRAY),
    ];
    query(client, sql, &parameters).await?.iter().map(|row| get(row, 0)).collect()
}

/// An index that keeps updates of the normal path from being HOT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdIndex {
    /// Qualified and quoted.
    pub index: String,
    /// The columns that it covers or is conditioned on, and that every delivery changes.
    pub columns: String,
    /// Of a partitioned table: it goes at once or not at all.
    pub partitioned: bool,
}

/// The cold indexes of the events table and its partitions.
pub(super) async fn cold_indexes(client: &Client, table: &TableName) -> Result<Vec<ColdIndex>, MigrateError> {
    let events = names::literal(&names::events(table));
    // pg_depend knows the columns of keys, expressions and conditions alike. BRIN indexes do not stand in the way of
    // HOT from PostgreSQL 16 on.
    let sql = format!(
        "\
        SELECT format('%I.%I', n.nspname, c.relname), string_agg(DISTINCT a.attname::text, ', '), bool_or(c.relkind = 'I') \
        FROM pg_index i \
        JOIN (SELECT {events}::regclass::oid AS oid UNION SELECT relid FROM pg_partition_tree({events}::regclass)) t \
            ON t.oid = i.indrelid \
        JOIN pg_class c ON c.oid = i.indexrelid AND NOT c.relispartition \
        JOIN pg_namespace n ON n.oid = c.relnamespace \
        JOIN pg_am m ON m.oid = c.relam AND (m.amname <> 'brin' OR current_setting('server_version_num')::int < 160000) \
        JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = i.indexrelid AND d.refobjid = i.indrelid \
        JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid \
        WHERE a.attname IN ('status', 'processed_at', 'updated_at', 'version') \
        GROUP BY 1 ORDER BY 1"
    );
    let rows = query(client, &sql, &[]).await?;
    rows.iter()
        .map(|row| Ok(ColdIndex { index: get(row, 0)?, columns: get(row, 1)?, partitioned: get(row, 2)? }))
        .collect()
}

/// What the table's owner may want to change: indexes that keep updates of the normal path from being HOT, unique
/// indexes that a partitioned table cannot have.
pub(super) async fn warnings(client: &Client, table: &TableName) -> Result<Vec<String>, MigrateError> {
    let events = names::literal(&names::events(table));
    let mut warnings: Vec<String> = cold_indexes(client, table)
        .await?
        .iter()
        .map(|ColdIndex { index, columns, .. }| {
            format!(
                "index {index} covers or is conditioned on {columns}, which every delivery changes: updates of its \
                 table are not HOT and cost about twice as much; drop it if no query needs it"
            )
        })
        .collect();
    let sql = format!(
        "\
        SELECT w.warning FROM (VALUES \
            ('{{event_id}}'::text[], 'event_id cannot be unique in this partitioned table, since it is not the partition \
key: nothing but its producers keeps it unique, and mark_outbox_... looks for an event_id in every partition'), \
            (ARRAY['COALESCE(tenant_id, ''''::character varying)', 'event_type', 'deduplication_key'], \
             'enqueue_outbox_event with a deduplication key does not work on this partitioned table: it needs a unique \
index on the key, which would have to contain the partition key; without a key it works')) w (keys, warning) \
        WHERE NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = {events}::regclass AND i.indisunique AND \
            w.keys = ARRAY(SELECT pg_get_indexdef(i.indexrelid, k, false) \
                           FROM generate_series(1, i.indnkeyatts::int) k ORDER BY k))"
    );
    for row in query(client, &sql, &[]).await? {
        warnings.push(get(&row, 0)?);
    }
    Ok(warnings)
}
