//! Rows that wait in the log, and what `pg_recvlogical` needs to read them.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::site::Case;

/// What waits: `rows` in transactions of `batch`, spread over `aggregates`, with payloads of about `bytes`.
#[derive(Clone, Copy)]
pub struct Backlog {
    pub rows: u64,
    pub batch: u64,
    pub aggregates: u64,
    pub bytes: u64,
}

impl Backlog {
    /// Single-row transactions of 5,000 aggregates, payloads of 300 bytes.
    pub const fn single(rows: u64) -> Self {
        Self { rows, batch: 1, aggregates: 5000, bytes: 300 }
    }

    /// Commits the rows and ends the checkpoint that they cause, so that the drain does not pay for it. Payloads do not
    /// compress: PostgreSQL would store long ones as almost nothing.
    pub async fn insert(self, case: &Case<'_>) {
        let Self { rows, batch, aggregates, bytes } = self;
        let insert = format!(
            "DO $$ DECLARE noise text := (SELECT string_agg(md5(i::text), '') FROM generate_series(1, {pieces}) i);
             BEGIN FOR t IN 0..{last} LOOP
               INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
               SELECT 'order', 'order-' || i % {aggregates}, 'placed',
                 jsonb_build_object('n', i, 'note', substr(noise, 1 + i % 1000, {ballast}))
               FROM generate_series(t * {batch}, t * {batch} + {batch} - 1) i;
               COMMIT;
             END LOOP; END $$",
            last = rows.div_ceil(batch) - 1,
            ballast = bytes.saturating_sub(30),
            pieces = (bytes + 1000).div_ceil(32),
        );
        case.sql("SET synchronous_commit = off").await;
        case.sql(&insert).await;
        case.sql("CHECKPOINT").await;
    }
}

/// A slot for `pg_recvlogical`, made before the backlog.
pub async fn reference_slot(case: &Case<'_>) {
    case.sql(&format!("SELECT pg_create_logical_replication_slot('ref_{}', 'pgoutput')", case.name)).await;
}

/// How long `pg_recvlogical` takes to read the backlog through its slot, which is dropped then.
pub async fn read_by_reference(case: &Case<'_>) -> Duration {
    let slot = format!("ref_{}", case.name);
    let end: String = case.client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.expect("the end").get(0);
    let mut command = Command::new(case.site.postgres.bin().join("pg_recvlogical"));
    command.args(["-d", &case.site.postgres.url(&case.name), "-S", &slot, "--start", "--no-loop", "-f", "/dev/null"]);
    command.args(["-o", "proto_version=1", "-o", "publication_names=outbox_relay", &format!("--endpos={end}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let began = Instant::now();
    let status = tokio::task::spawn_blocking(move || command.status()).await.expect("join").expect("pg_recvlogical");
    let took = began.elapsed();
    assert!(status.success(), "pg_recvlogical: {status}");
    case.sql(&format!("SELECT pg_drop_replication_slot('{slot}')")).await;
    took
}
