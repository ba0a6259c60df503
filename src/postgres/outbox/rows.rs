//! Rows of the outbox, read from the table as events.

use bytes::Bytes;
use tokio_postgres::{Error, Row};

use crate::flow::decode::{Columns, MissingColumns, Value, decode};
use crate::flow::event::{Decoded, Origin};

/// What is read of a row, as text, in this order.
pub const COLUMNS: [&str; 13] = [
    "id",
    "event_id",
    "tenant_id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "payload",
    "headers",
    "retry_count",
    "max_retries",
    "created_at",
    "status",
    "next_retry_at",
];
/// Where the columns stand that may be of any size.
const LARGE: [usize; 2] = [6, 7];
/// How many columns [`select_list`] reads: a statement may add more behind them.
pub(super) const READ: usize = COLUMNS.len() + 1;

/// The list of columns to select. Payloads and headers of more bytes than the parameter `$1` are left behind.
///
/// The statement's own condition says which rows are due, so that each one reads as pending and undated.
pub(super) fn select_list() -> String {
    let text = |name: &&str| match *name {
        "payload" | "headers" => format!("CASE WHEN octet_length({name}::text) <= $1 THEN {name}::text END"),
        "status" => "'pending'".to_owned(),
        "next_retry_at" => "NULL::text".to_owned(),
        name => format!("{name}::text"),
    };
    let columns: Vec<String> = COLUMNS.iter().map(text).collect();
    format!("{}, octet_length(payload::text) > $1 OR octet_length(headers::text) > $1", columns.join(", "))
}

/// Reads a row that was selected by [`select_list`].
pub(super) fn read(row: &Row) -> Result<Decoded, Error> {
    let columns = Columns::from_names(COLUMNS).unwrap_or_else(|MissingColumns(missing)| {
        // `COLUMNS` names every column that an event needs; any test that reads a row says so.
        unreachable!("the statement reads too little: {missing:?}")
    });
    let over_cap = row.try_get::<_, Option<bool>>(COLUMNS.len())?.unwrap_or(false);
    let values = (0..COLUMNS.len()).map(|at| {
        Ok(match row.try_get::<_, Option<&str>>(at)? {
            Some(text) => Value::Text(Bytes::copy_from_slice(text.as_bytes())),
            None if over_cap && LARGE.contains(&at) => Value::Truncated(Bytes::new()),
            None => Value::Null,
        })
    });
    let values = values.collect::<Result<Vec<_>, Error>>()?;
    Ok(decode(&columns, &values, Origin::Table))
}
