//! What a primary can tell of the standbys that a slot with `failover` (PostgreSQL 17 and later) is for.
//!
//! Whether a standby's copy of the slot is synchronised only that standby knows. But one that keeps a copy needs a
//! physical slot and `hot_standby_feedback`, and feeds back the `catalog_xmin` of its own slots, which for a copy is
//! never newer than that of the original. So a primary can see that there is surely no copy.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

/// What the primary sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    /// Standbys that may keep a copy: of 0 it is certain. `None` where there are no standbys with a slot of their own,
    /// or no copies (PostgreSQL 16 and earlier).
    pub kept: Option<i64>,
    /// Slots named in `synchronized_standby_slots` that do not exist or that nobody uses: the server sends nothing that
    /// they have not received. `None` where the slot waits for none.
    pub missing: Option<i64>,
}

/// Looks at the standbys of `slot`. A column that older servers do not have is read by way of JSON, where it is absent.
pub async fn copies(client: &Client, slot: &str) -> Result<Copies, Error> {
    // A physical slot that was never used is no standby's, nor is one whose receiver is seen to replay nothing, such as
    // pg_receivewal. A role that may not look at receivers sees no state of theirs.
    let statement = r#"WITH ours AS (
           SELECT (to_jsonb(s) ->> 'failover')::bool AS failover, catalog_xmin
           FROM pg_replication_slots s WHERE slot_name = $1),
         standbys AS (
           SELECT s.active, s.catalog_xmin
           FROM pg_replication_slots s LEFT JOIN pg_stat_replication r ON r.pid = s.active_pid
           WHERE s.slot_type = 'physical' AND NOT s.temporary AND s.restart_lsn IS NOT NULL
             AND (r.state IS NULL OR r.replay_lsn IS NOT NULL)),
         awaited AS (
           SELECT EXISTS (SELECT FROM pg_replication_slots s
             WHERE s.slot_name = name AND s.slot_type = 'physical' AND s.active) AS there
           FROM unnest(string_to_array(translate(current_setting('synchronized_standby_slots', true), '" ', ''), ',')) name
           WHERE name <> '')
         SELECT (SELECT CASE WHEN count(*) > 0 AND failover IS NOT NULL THEN count(*)
               FILTER (WHERE failover AND active AND age(standbys.catalog_xmin) >= age(ours.catalog_xmin)) END
             FROM standbys),
           (SELECT CASE WHEN count(*) > 0 AND failover THEN count(*) FILTER (WHERE NOT there) END FROM awaited)
         FROM ours"#;
    let rows = client.query_typed(statement, &[(&slot, Type::TEXT)]).await?;
    let Some(row) = rows.first() else { return Ok(Copies::default()) };
    Ok(Copies { kept: row.try_get(0)?, missing: row.try_get(1)? })
}
