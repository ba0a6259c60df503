//! The outbox's tables as the catalogue describes them: what slows the write-back, hides rows, or breaks their order.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row};

use crate::config::TableName;
use crate::postgres::names;

/// The tables of an outbox.
#[derive(Clone, Debug)]
pub struct Outbox {
    /// The events table, or its partitions; without those that hold no rows themselves.
    pub events: Vec<Relation>,
    /// Tables whose rows are hidden from the role by row level security, quoted.
    pub hidden: Vec<String>,
    /// Of the events table; a trigger of the owner's own.
    pub triggers: Vec<Trigger>,
    /// Where the events' ids come from, if it is known.
    pub sequence: Option<Sequence>,
    /// Whether the connected role may make a publication for the table.
    pub may_publish: bool,
}

/// A table that holds rows.
#[derive(Clone, Debug)]
pub struct Relation {
    /// Qualified and quoted.
    pub name: String,
    /// Whether its changes are in the log.
    pub logged: bool,
    /// Percent.
    pub fillfactor: i32,
    /// Whether autovacuum may see to it.
    pub autovacuum: bool,
    /// Whether each update logs the whole old row.
    pub full_identity: bool,
    /// Rows, as the statistics say.
    pub live: i64,
    pub dead: i64,
    /// Of its oldest transaction id.
    pub xid_age: i32,
}

/// A trigger.
#[derive(Clone, Debug)]
pub struct Trigger {
    /// The table, qualified and quoted.
    pub table: String,
    /// Quoted.
    pub name: String,
    pub on_insert: bool,
    pub on_update: bool,
    pub on_delete: bool,
}

/// A sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Qualified and quoted.
    pub name: String,
    /// Numbers that a session takes at once.
    pub cache: i64,
    pub increment: i64,
}

/// The events table and its partitions.
const TREE: &str =
    "(SELECT $1::text::regclass::oid AS oid UNION SELECT relid FROM pg_partition_tree($1::text::regclass))";

impl Outbox {
    /// Reads the catalogue. The table must exist.
    pub async fn read(client: &Client, table: &TableName) -> Result<Self, Error> {
        let events = names::events(table);
        Ok(Self {
            events: relations(client, &events).await?,
            hidden: hidden(client, table).await?,
            triggers: triggers(client, &events).await?,
            sequence: sequence(client, &events).await?,
            may_publish: may_publish(client, &events).await?,
        })
    }
}

async fn select(client: &Client, statement: &str, events: &str) -> Result<Vec<Row>, Error> {
    client.query_typed(statement, &[(&events, Type::TEXT)]).await
}

async fn relations(client: &Client, events: &str) -> Result<Vec<Relation>, Error> {
    let statement = format!(
        "SELECT format('%I.%I', n.nspname, c.relname), c.relpersistence = 'p',
           coalesce((SELECT option_value::int4 FROM pg_options_to_table(c.reloptions)
                     WHERE option_name = 'fillfactor'), 100),
           coalesce((SELECT option_value::bool FROM pg_options_to_table(c.reloptions)
                     WHERE option_name = 'autovacuum_enabled'), true),
           c.relreplident = 'f', coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), age(c.relfrozenxid)
         FROM {TREE} t JOIN pg_class c ON c.oid = t.oid AND c.relkind = 'r'
         JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
         ORDER BY 1"
    );
    let rows = select(client, &statement, events).await?;
    rows.iter()
        .map(|row| {
            Ok(Relation {
                name: row.try_get(0)?,
                logged: row.try_get(1)?,
                fillfactor: row.try_get(2)?,
                autovacuum: row.try_get(3)?,
                full_identity: row.try_get(4)?,
                live: row.try_get(5)?,
                dead: row.try_get(6)?,
                xid_age: row.try_get(7)?,
            })
        })
        .collect()
}

/// A policy for every row that holds for the role opens the table, unless a restrictive one stands beside it.
async fn hidden(client: &Client, table: &TableName) -> Result<Vec<String>, Error> {
    let statement = "SELECT format('%I.%I', n.nspname, c.relname)
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE n.nspname = $1 AND c.relname = ANY ($2) AND c.relrowsecurity AND row_security_active(c.oid)
           AND (EXISTS (SELECT FROM pg_policy WHERE polrelid = c.oid AND NOT polpermissive)
             OR NOT EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = c.oid AND p.polpermissive AND p.polcmd = '*'
               AND pg_get_expr(p.polqual, p.polrelid) = 'true'
               AND coalesce(pg_get_expr(p.polwithcheck, p.polrelid), 'true') = 'true'
               AND EXISTS (SELECT FROM unnest(p.polroles) AS r WHERE r = 0 OR pg_has_role(r, 'USAGE'))))
         ORDER BY 1";
    let relations = [&*table.table, "outbox_dead_letter", "supply_batch_compensation", "outbox_relay_state"];
    let rows = client
        .query_typed(statement, &[(&table.schema, Type::TEXT), (&relations.as_slice(), Type::TEXT_ARRAY)])
        .await?;
    rows.iter().map(|row| row.try_get(0)).collect()
}

/// Those that fire for an ordinary session. What a constraint brings with it is not the owner's.
async fn triggers(client: &Client, events: &str) -> Result<Vec<Trigger>, Error> {
    let statement = format!(
        "SELECT format('%I.%I', n.nspname, c.relname), quote_ident(g.tgname), g.tgtype & 4 <> 0, g.tgtype & 16 <> 0,
           g.tgtype & 8 <> 0
         FROM {TREE} t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
         JOIN pg_trigger g ON g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgenabled IN ('O', 'A') AND g.tgparentid = 0
         ORDER BY 1, 2"
    );
    let rows = select(client, &statement, events).await?;
    rows.iter()
        .map(|row| {
            Ok(Trigger {
                table: row.try_get(0)?,
                name: row.try_get(1)?,
                on_insert: row.try_get(2)?,
                on_update: row.try_get(3)?,
                on_delete: row.try_get(4)?,
            })
        })
        .collect()
}

async fn sequence(client: &Client, events: &str) -> Result<Option<Sequence>, Error> {
    let statement = "SELECT format('%I.%I', n.nspname, c.relname), s.seqcache, s.seqincrement
         FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE s.seqrelid = pg_get_serial_sequence($1, 'id')::regclass";
    let rows = select(client, statement, events).await?;
    let read = |row: &Row| Ok(Sequence { name: row.try_get(0)?, cache: row.try_get(1)?, increment: row.try_get(2)? });
    rows.first().map(read).transpose()
}

async fn may_publish(client: &Client, events: &str) -> Result<bool, Error> {
    let statement = "SELECT pg_has_role(relowner, 'USAGE') AND has_database_privilege(current_database(), 'CREATE')
         FROM pg_class WHERE oid = $1::text::regclass";
    let rows = select(client, statement, events).await?;
    Ok(rows.first().map(|row| row.try_get(0)).transpose()?.unwrap_or(false))
}
