//! Rows of the outbox, read from the table as events.

use std::error::Error;

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

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

/// Those of the rows `from` that come first in `order` and fit into so many bytes of payloads and headers, about, and
/// always the first. Their columns keep their names; needs an alias.
///
/// What is stored may be a hundred times smaller than what is read. It is known at once, so that what does not even fit
/// as it is stored is not read for its size.
pub(super) fn first_that_fit(from: &str, order: &str, bytes: i64) -> String {
    let fit = |from: &str, size: [&str; 2], before: &str| {
        let [payload, headers] = size.map(|size| format!("coalesce({size}, 0)::int8"));
        format!(
            "(SELECT * FROM (
               SELECT e.*, sum({payload} + {headers}) OVER (ORDER BY {order}) - {payload} - {headers} AS {before}
               FROM {from} AS e) AS e WHERE {before} < {bytes})"
        )
    };
    let stored = fit(from, ["pg_column_size(e.payload)", "pg_column_size(e.headers)"], "outbox_relay_stored");
    fit(&stored, ["octet_length(e.payload::text)", "octet_length(e.headers::text)"], "outbox_relay_before")
}

/// The bytes of a text, which are not always UTF-8 where the database's encoding is SQL_ASCII.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a>(pub &'a [u8]);

impl<'a> FromSql<'a> for Raw<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(raw))
    }

    fn accepts(ty: &Type) -> bool {
        matches!(*ty, Type::TEXT | Type::VARCHAR)
    }
}

/// Reads a row that was selected by [`select_list`].
pub(super) fn read(row: &Row) -> Result<Decoded, tokio_postgres::Error> {
    let columns = Columns::from_names(COLUMNS).unwrap_or_else(|MissingColumns(missing)| {
        // `COLUMNS` names every column that an event needs; any test that reads a row says so.
        unreachable!("the statement reads too little: {missing:?}")
    });
    let over_cap = row.try_get::<_, Option<bool>>(COLUMNS.len())?.unwrap_or(false);
    let values = (0..COLUMNS.len()).map(|at| {
        Ok(match row.try_get::<_, Option<Raw<'_>>>(at)? {
            Some(Raw(text)) => Value::Text(Bytes::copy_from_slice(text)),
            None if over_cap && LARGE.contains(&at) => Value::Truncated(Bytes::new()),
            None => Value::Null,
        })
    });
    let values = values.collect::<Result<Vec<_>, tokio_postgres::Error>>()?;
    Ok(decode(&columns, &values, Origin::Table))
}
