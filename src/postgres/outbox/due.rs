//! Rows that the reconciler sends: due retries, ended leases, dated rows, and rows held behind them.

use std::time::SystemTime;

use bytestring::ByteString;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Error, Row};

use super::rows::Raw;
use super::{Tables, rows};
use crate::flow::event::Decoded;
use crate::flow::order::{AggregateKey, Pass};
use crate::postgres::names::literal;

/// Bytes of payloads and headers read in one pass, about.
const PASS_BYTES: i64 = 8 * 1024 * 1024;

/// A row without a date that has no outcome.
const UNDATED: &str = "next_retry_at IS NULL AND status IN ('pending', 'failed', 'processing')";

/// How long a lease of the SQL functions lasts: migration V4 has the same. A poller of another kind dates no lease, and
/// keeps what it has claimed for as long.
const LEASE: &str = "interval '5 minutes'";

/// Of the rows without a date, one that its poller has claimed, and may be working on.
fn claimed() -> String {
    format!("(status = 'processing' AND coalesce(locked_at > now() - {LEASE}, false))")
}

/// When the lease of the row `row` ends, dated or not; of a row that nobody has claimed, the time for which it waits.
pub(super) fn lease_end(row: &str) -> String {
    format!("coalesce({row}.next_retry_at, CASE WHEN {row}.status = 'processing' THEN {row}.locked_at + {LEASE} END)")
}

/// Tells a row from one that has its id in a table that was emptied or made anew since. Not the event's id itself,
/// which may be no UTF-8. An adopted table may allow NULL.
const MARK: &str = "hashtextextended(coalesce(event_id, '')::text, 0)";

/// A row that the sweep saw.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub id: i64,
    mark: i64,
    /// A poller may be working on it: it is not sent now.
    pub claimed: bool,
}

/// A row to send.
#[derive(Debug)]
pub struct DueRow {
    pub id: i64,
    pub row: Decoded,
    /// Whether it may pass a block of its aggregate.
    pub pass: Pass,
    /// Whether its state is another since the snapshot: whatever the stream held before says nothing of it.
    pub changed: bool,
}

/// An aggregate with rows that wait: how many are held.
pub type HeldRows = (AggregateKey, u64);

/// Reads what the reconciler has to send.
#[derive(Clone, Copy, Debug)]
pub struct Due<'a> {
    pub client: &'a Client,
    pub tables: &'a Tables,
    /// Bytes of a payload beyond which it is left behind.
    pub cap: usize,
    /// The snapshot since which rows count as changed, as [`snapshot`] gave it.
    pub since: &'a str,
}

/// What is visible now.
pub async fn snapshot(client: &Client) -> Result<String, Error> {
    let rows = client.query_typed("SELECT pg_current_snapshot()::text", &[]).await?;
    rows.first().map_or(Ok(String::new()), |row| row.try_get(0))
}

/// Every aggregate with a row that failed, is held, or is a poller's under a lease, as it stands in the table. Not
/// those whose names are not UTF-8: no event of theirs is ever sent.
pub async fn blocked(client: &Client, tables: &Tables) -> Result<Vec<HeldRows>, Error> {
    let statement = format!(
        "SELECT tenant_id::text, aggregate_type::text, aggregate_id::text, count(*)
         FROM {} o WHERE next_retry_at IS NOT NULL AND {}
         GROUP BY tenant_id, aggregate_type, aggregate_id",
        tables.share,
        waits("o")
    );
    let rows = client.query_typed(&statement, &[]).await?;
    rows.iter().filter_map(|row| held_rows(row).transpose()).collect()
}

/// How many held rows are looked at for aggregates, at most.
const HELD_ROWS: i64 = 100_000;

/// The aggregates of held rows, as they stand in the table.
pub async fn held_aggregates(client: &Client, tables: &Tables) -> Result<Vec<HeldRows>, Error> {
    let statement = format!(
        "SELECT tenant_id, aggregate_type, aggregate_id, count(*) FROM (
           SELECT tenant_id::text, aggregate_type::text, aggregate_id::text FROM {} o
           WHERE next_retry_at = 'infinity' AND status = 'pending' LIMIT {HELD_ROWS}) AS held
         GROUP BY tenant_id, aggregate_type, aggregate_id",
        tables.share
    );
    let rows = client.query_typed(&statement, &[]).await?;
    rows.iter().filter_map(|row| held_rows(row).transpose()).collect()
}

impl Due<'_> {
    /// The server's time.
    pub async fn now(&self) -> Result<SystemTime, Error> {
        let rows = self.client.query_typed("SELECT now()", &[]).await?;
        rows.first().map_or(Ok(SystemTime::UNIX_EPOCH), |row| row.try_get(0))
    }

    /// Rows whose time had come at `time`, the earliest first, at most `limit`. A row that failed before, or whose
    /// poller's lease ended, is what its aggregate waits for; one that a producer dated comes for the first time.
    pub async fn rows(&self, time: SystemTime, limit: i64) -> Result<Vec<DueRow>, Error> {
        let condition = "next_retry_at <= $2 AND status IN ('pending', 'failed', 'processing')";
        self.select(condition, "e.next_retry_at, e.id", limit, &[(&time, Type::TIMESTAMPTZ)]).await
    }

    /// Held rows of aggregates in which nothing waits for a retry any more, in the order of their ids.
    pub async fn released(&self, aggregates: &[AggregateKey], limit: i64) -> Result<Vec<DueRow>, Error> {
        let (tenants, types, ids) = columns(aggregates);
        let events = &self.tables.events;
        let condition = format!(
            "status = 'pending' AND next_retry_at = 'infinity' AND EXISTS (
               SELECT FROM unnest($2::text[], $3::text[], $4::text[]) AS free(tenant, type, id)
               WHERE {} AND {})",
            same_aggregate("e"),
            nothing_waits(events)
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&tenants, Type::TEXT_ARRAY), (&types, Type::TEXT_ARRAY), (&ids, Type::TEXT_ARRAY)];
        self.select(&condition, "e.id", limit, &parameters).await
    }

    /// Held rows, whatever waits before them, in the order of their ids: for a relay that keeps no order and so blocks
    /// nothing, but finds what one before it held.
    pub async fn held(&self, limit: i64) -> Result<Vec<DueRow>, Error> {
        self.select("status = 'pending' AND next_retry_at = 'infinity'", "e.id", limit, &[]).await
    }

    /// Those of the aggregates in which nothing waits for a retry any more, by their places.
    pub async fn quiet(&self, aggregates: &[AggregateKey]) -> Result<Vec<usize>, Error> {
        let (tenants, types, ids) = columns(aggregates);
        let statement = format!(
            "SELECT place - 1 FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY
               AS free(tenant, type, id, place)
             WHERE {}",
            nothing_waits(&self.tables.events),
        );
        let parameters: [(&(dyn ToSql + Sync), Type); 3] =
            [(&tenants, Type::TEXT_ARRAY), (&types, Type::TEXT_ARRAY), (&ids, Type::TEXT_ARRAY)];
        let rows = self.client.query_typed(&statement, &parameters).await?;
        rows.iter().map(|row| Ok(usize::try_from(row.try_get::<_, i64>(0)?).unwrap_or(usize::MAX))).collect()
    }

    /// Up to which id the rows above `low` are looked at in one statement that is to look at so many `ids`, and whether
    /// there are others above that.
    pub async fn reach(&self, low: i64, ids: i64) -> Result<(i64, bool), Error> {
        let statement = format!("SELECT min(id), max(id) FROM {} WHERE id > $1", self.tables.events);
        let row = self.client.query_typed(&statement, &[(&low, Type::INT8)]).await?.pop();
        let ends = |row: Row| Ok((row.try_get::<_, Option<i64>>(0)?, row.try_get::<_, Option<i64>>(1)?));
        let (first, last) = row.map_or(Ok((None, None)), ends)?;
        let high = first.unwrap_or(low).saturating_add(ids);
        Ok((high, last.is_some_and(|last| last > high)))
    }

    /// Undated rows without an outcome: those above `low` and up to `high`, at most `limit`, and those of `again` that
    /// are no higher than `low`; in the order of their ids.
    pub async fn undated(&self, low: i64, high: i64, limit: usize, again: &[i64]) -> Result<Vec<Seen>, Error> {
        let select = format!("SELECT id, {MARK} AS mark, {} AS claimed FROM {} e", claimed(), self.tables.share);
        let statement = format!(
            "({select} WHERE id = ANY($2) AND id <= $1 AND {UNDATED})
             UNION ALL
             ({select} WHERE id > $1 AND id <= $3 AND {UNDATED} ORDER BY id LIMIT {limit})
             ORDER BY id",
        );
        let parameters = [(&low as _, Type::INT8), (&again as _, Type::INT8_ARRAY), (&high as _, Type::INT8)];
        let rows = self.client.query_typed(&statement, &parameters).await?;
        let seen = |row: &Row| Ok(Seen { id: row.try_get(0)?, mark: row.try_get(1)?, claimed: row.try_get(2)? });
        rows.iter().map(seen).collect()
    }

    /// Those of the rows that are still undated, without an outcome and nobody's, in the order of their ids: as many of
    /// the first as fit into a pass. One that is not new cannot be held in the table, and may be what its aggregate
    /// waits for: it passes a block.
    pub async fn missed(&self, seen: &[Seen]) -> Result<Vec<DueRow>, Error> {
        let (ids, marks): (Vec<i64>, Vec<i64>) = seen.iter().map(|seen| (seen.id, seen.mark)).unzip();
        let condition = format!("id = ANY($2) AND {MARK} = ANY($3) AND {UNDATED} AND NOT {}", claimed());
        self.select(&condition, "e.id", i64::MAX, &[(&ids, Type::INT8_ARRAY), (&marks, Type::INT8_ARRAY)]).await
    }

    /// Whether every transaction that was open when the session began has ended.
    pub async fn earlier_have_ended(&self) -> Result<bool, Error> {
        let statement = format!(
            "SELECT pg_snapshot_xmin(pg_current_snapshot()) >= pg_snapshot_xmax({}::pg_snapshot)",
            literal(self.since)
        );
        let rows = self.client.query_typed(&statement, &[]).await?;
        rows.first().map_or(Ok(false), |row| row.try_get(0))
    }

    /// The highest id in the table.
    pub async fn highest_id(&self) -> Result<Option<i64>, Error> {
        let statement = format!("SELECT max(id) FROM {}", self.tables.events);
        let rows = self.client.query_typed(&statement, &[]).await?;
        rows.first().map_or(Ok(None), |row| row.try_get(0))
    }

    /// Which tables the rows stand in: changes when a partition is attached or detached, also when the same one comes
    /// back.
    pub async fn partitions(&self) -> Result<Option<String>, Error> {
        let statement = format!(
            "SELECT string_agg(concat_ws(':', t.relid::oid, i.xmin), ' ' ORDER BY t.relid::oid)
             FROM pg_partition_tree({}::regclass) t LEFT JOIN pg_inherits i ON i.inhrelid = t.relid",
            literal(&self.tables.events)
        );
        let rows = self.client.query_typed(&statement, &[]).await?;
        rows.first().map_or(Ok(None), |row| row.try_get(0))
    }

    async fn select(
        &self,
        condition: &str,
        order: &str,
        limit: i64,
        more: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Vec<DueRow>, Error> {
        // What is selected as text keeps its column's name, so that the order has to name the table.
        let since = literal(self.since);
        let found = format!(
            "(SELECT *, xmin::text::int8 AS outbox_relay_xid
             FROM {} e WHERE {condition} ORDER BY {order} LIMIT {limit})",
            self.tables.share
        );
        let statement = format!(
            "SELECT {}, e.status = 'pending' AND e.next_retry_at IS DISTINCT FROM 'infinity',
               NOT pg_visible_in_snapshot({}, {since}::pg_snapshot), e.id
             FROM {} AS e ORDER BY {order}",
            rows::select_list(),
            full_xid("outbox_relay_xid", &format!("pg_snapshot_xmax({since}::pg_snapshot)::text::int8")),
            rows::first_that_fit(&found, order, PASS_BYTES),
        );
        let cap = i32::try_from(self.cap).unwrap_or(i32::MAX);
        let mut parameters: Vec<(&(dyn ToSql + Sync), Type)> = vec![(&cap, Type::INT4)];
        parameters.extend(more.iter().cloned());
        let found = self.client.query_typed(&statement, &parameters).await?;
        let due = |row: &Row| {
            let pass = if row.try_get(rows::READ)? { Pass::First } else { Pass::Again };
            let (changed, id) = (row.try_get(rows::READ + 1)?, row.try_get(rows::READ + 2)?);
            Ok(DueRow { id, row: rows::read(row)?, pass, changed })
        };
        found.iter().map(due).collect()
    }
}

/// Whether the row `row` waits in the table, so that its aggregate is blocked: it failed, is held, or is a poller's
/// under a lease.
pub(super) fn waits(row: &str) -> String {
    format!(
        "({row}.next_retry_at IS NOT NULL AND ({row}.status IN ('failed', 'processing')
           OR ({row}.status = 'pending' AND {row}.next_retry_at = 'infinity')))"
    )
}

/// A transaction id of 32 bits, completed to the one nearest to `xmax`.
pub(super) fn full_xid(xid: &str, xmax: &str) -> String {
    format!("({xmax} + ((({xid} - {xmax} % 4294967296) + 6442450944) % 4294967296 - 2147483648))::text::xid8")
}

fn held_rows(row: &Row) -> Result<Option<HeldRows>, Error> {
    let mut names = [const { None }; 3];
    for (at, name) in names.iter_mut().enumerate() {
        if let Some(Raw(bytes)) = row.try_get(at)? {
            let Ok(text) = std::str::from_utf8(bytes) else { return Ok(None) };
            *name = Some(ByteString::from(text));
        }
    }
    let [tenant_id, aggregate_type, aggregate_id] = names;
    let aggregate = AggregateKey {
        tenant_id,
        aggregate_type: aggregate_type.unwrap_or_default(),
        aggregate_id: aggregate_id.unwrap_or_default(),
    };
    Ok(Some((aggregate, u64::try_from(row.try_get::<_, i64>(3)?).unwrap_or(0))))
}

fn columns(aggregates: &[AggregateKey]) -> (Vec<Option<&str>>, Vec<&str>, Vec<&str>) {
    let tenants = aggregates.iter().map(|key| key.tenant_id.as_deref()).collect();
    let types = aggregates.iter().map(|key| &*key.aggregate_type).collect();
    let ids = aggregates.iter().map(|key| &*key.aggregate_id).collect();
    (tenants, types, ids)
}

/// Whether a row belongs to the aggregate `free`.
fn same_aggregate(row: &str) -> String {
    format!(
        "{row}.aggregate_type = free.type AND {row}.aggregate_id = free.id AND {row}.tenant_id IS NOT DISTINCT FROM free.tenant"
    )
}

/// Whether no row of an aggregate waits for a retry, or for a poller whose lease runs. What has no date waits for
/// nothing: the sweep sends it.
fn nothing_waits(events: &str) -> String {
    format!(
        "NOT EXISTS (SELECT FROM {events} w WHERE {} AND w.status IN ('failed', 'processing')
           AND w.next_retry_at IS NOT NULL)",
        same_aggregate("w")
    )
}
