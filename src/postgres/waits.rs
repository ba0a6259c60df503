//! Who keeps the relay waiting inside PostgreSQL, in words for an operator. Never what they run.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error, Row};

use super::names::literal;

/// Why a slot is not made yet: its making, by the backend `pid`, waits for every transaction that was open when it
/// began. `None`: it waits for none just now.
pub async fn for_old_transactions(client: &Client, pid: i32) -> Result<Option<String>, Error> {
    // Each transaction that writes holds a lock on its own number. Without pg_read_all_stats the beginnings of other
    // roles' transactions are hidden.
    let statement = "WITH wait AS (SELECT min(waitstart) AS since FROM pg_locks WHERE pid = $1 AND NOT granted),
         held AS (
           SELECT DISTINCT l.pid, coalesce(a.xact_start, p.prepared) AS began, p.gid, a.application_name AS name,
             coalesce(l.pid = ANY (pg_blocking_pids($1)), false) AS blocks
           FROM pg_locks l
           LEFT JOIN pg_stat_activity a ON a.pid = l.pid
           LEFT JOIN pg_prepared_xacts p ON l.pid IS NULL AND p.transaction = l.transactionid
           WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted AND l.pid IS DISTINCT FROM $1)
         SELECT count(*) OVER (), pid, to_char(began AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'), gid, name
         FROM held, wait WHERE wait.since IS NOT NULL AND coalesce(began <= wait.since, true)
         ORDER BY began NULLS LAST, blocks DESC LIMIT 1";
    let rows = client.query_typed(statement, &[(&pid, Type::INT4)]).await?;
    rows.first().map(describe).transpose()
}

fn describe(row: &Row) -> Result<String, Error> {
    let (count, pid): (i64, Option<i32>) = (row.try_get(0)?, row.try_get(1)?);
    let (since, gid): (Option<&str>, Option<&str>) = (row.try_get(2)?, row.try_get(3)?);
    let name = row.try_get::<_, Option<&str>>(4)?.filter(|name| !name.is_empty());
    let since = since.map_or_else(String::new, |since| format!(" since {since}"));
    let transactions = if count == 1 { "an older transaction" } else { "older transactions" };
    let which = match (pid, gid) {
        (Some(pid), _) => {
            let name = name.map_or_else(String::new, |name| format!(" ({name})"));
            format!("the oldest is open{since}, pid {pid}{name}; end it with SELECT pg_terminate_backend({pid})")
        }
        (None, Some(gid)) => {
            format!("the oldest is prepared{since}; end it with COMMIT PREPARED or ROLLBACK PREPARED {}", literal(gid))
        }
        (None, None) => "see pg_prepared_xacts".to_owned(),
    };
    Ok(format!("the new slot waits for {transactions} ({count}): {which}"))
}

/// The sessions that hold a lock on `table` which keeps it from being locked exclusively.
pub async fn holders_of(client: &Client, table: &str) -> Result<Option<String>, Error> {
    let statement =
        "SELECT string_agg(DISTINCT concat('pid ', l.pid, ' (' || nullif(a.application_name, '') || ')'), ', ')
         FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
         WHERE l.locktype = 'relation' AND l.relation = $1::text::regclass AND l.granted AND l.mode <> 'AccessShareLock'
           AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
           AND l.pid <> pg_backend_pid()";
    let rows = client.query_typed(statement, &[(&table, Type::TEXT)]).await?;
    rows.first().map_or(Ok(None), |row| row.try_get(0))
}
