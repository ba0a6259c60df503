-- Brings tables of the older schema up to V1: adds what is missing, drops the two indexes that cost most, and touches
-- nothing else. In particular no CHECK goes on a column that was there before, not even NOT VALID: a row that breaks it
-- could never be updated again, and the relay has to write to it that it became a dead letter.

ALTER TABLE {{events}}
    ADD COLUMN IF NOT EXISTS tenant_id          varchar(64) CHECK (tenant_id <> ''),
    ADD COLUMN IF NOT EXISTS deduplication_key  text,
    ADD COLUMN IF NOT EXISTS payload_hash       text,
    ADD COLUMN IF NOT EXISTS headers            jsonb NOT NULL DEFAULT '{}' CHECK (
        jsonb_typeof(headers) = 'object' AND NOT jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")')),
    ADD COLUMN IF NOT EXISTS status             varchar(20) NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'processing', 'completed', 'failed', 'dead_letter')),
    ADD COLUMN IF NOT EXISTS retry_count        int NOT NULL DEFAULT 0,
    ADD COLUMN IF NOT EXISTS max_retries        int NOT NULL DEFAULT 5,
    ADD COLUMN IF NOT EXISTS error_code         text,
    ADD COLUMN IF NOT EXISTS error_message      text,
    ADD COLUMN IF NOT EXISTS first_failed_at    timestamptz,
    ADD COLUMN IF NOT EXISTS dead_letter_reason text,
    ADD COLUMN IF NOT EXISTS next_retry_at      timestamptz,
    ADD COLUMN IF NOT EXISTS locked_by          text,
    ADD COLUMN IF NOT EXISTS locked_at          timestamptz,
    ADD COLUMN IF NOT EXISTS created_at         timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN IF NOT EXISTS processed_at       timestamptz,
    ADD COLUMN IF NOT EXISTS updated_at         timestamptz NOT NULL DEFAULT now(),
    ADD COLUMN IF NOT EXISTS version            bigint NOT NULL DEFAULT 1;

ALTER TABLE {{schema}}.outbox_dead_letter
    ADD COLUMN IF NOT EXISTS tenant_id  varchar(64),
    ADD COLUMN IF NOT EXISTS headers    jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN IF NOT EXISTS error_code text;

ALTER TABLE {{schema}}.supply_batch_compensation
    ADD COLUMN IF NOT EXISTS next_retry_at timestamptz,
    ADD COLUMN IF NOT EXISTS locked_by     text,
    ADD COLUMN IF NOT EXISTS locked_at     timestamptz;

-- The two indexes, known by what they index, since their names are the owner's choice. One on (status, next_retry_at)
-- makes every change of status a non-HOT update; a second one on event_id only costs. Whatever a constraint, a foreign
-- key or the replica identity stands on stays, and so does the only unique index on event_id.
DO $outbox_relay$
DECLARE
    events CONSTANT regclass := {{events_literal}};
    old_index regclass;
BEGIN
    FOR old_index IN
        WITH tables AS (
            SELECT events::oid AS oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(events)
        ), indexes AS (
            SELECT i.indexrelid, i.indrelid, i.indpred, i.indisunique AND i.indisvalid AS is_unique,
                   ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, k, false)
                         FROM pg_catalog.generate_series(1, i.indnkeyatts::int) k ORDER BY k) AS keys,
                   i.indisreplident OR c.relispartition
                       OR EXISTS (SELECT FROM pg_catalog.pg_constraint r WHERE r.conindid = i.indexrelid) AS is_needed
            FROM pg_catalog.pg_index i
            JOIN tables t ON t.oid = i.indrelid
            JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
            JOIN pg_catalog.pg_am m ON m.oid = c.relam
            WHERE m.amname = 'btree' AND i.indnatts = i.indnkeyatts
        )
        SELECT i.indexrelid
        FROM indexes i
        WHERE NOT i.is_needed
          AND (i.keys = ARRAY['status', 'next_retry_at']
               OR i.keys = ARRAY['event_id'] AND i.indpred IS NULL AND i.indexrelid <> (
                   SELECT o.indexrelid FROM indexes o
                   WHERE o.indrelid = i.indrelid AND o.keys = i.keys AND o.indpred IS NULL AND o.is_unique
                   ORDER BY o.is_needed DESC, o.indexrelid LIMIT 1))
    LOOP
        EXECUTE pg_catalog.format('DROP INDEX %s', old_index);
    END LOOP;
END
$outbox_relay$;

-- Room on each page for the second version of each of its rows: with fillfactor 50 every update of the normal path is
-- HOT. Vacuum in small, frequent steps. A setting that the owner made stays. A partitioned table holds no rows itself:
-- its partitions get the settings.
DO $outbox_relay$
DECLARE
    events CONSTANT regclass := {{events_literal}};
    target regclass;
    setting text;
BEGIN
    FOR target, setting IN
        SELECT c.oid, w.name || ' = ' || w.value
        FROM (SELECT events::oid AS oid UNION SELECT relid FROM pg_catalog.pg_partition_tree(events)) t
        JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind = 'r'
        CROSS JOIN (VALUES ('fillfactor', '50'),
                           ('autovacuum_vacuum_scale_factor', '0.02'),
                           ('autovacuum_vacuum_insert_scale_factor', '0.05'),
                           ('autovacuum_analyze_scale_factor', '0.05')) w (name, value)
        WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_options_to_table(c.reloptions) o WHERE o.option_name = w.name)
    LOOP
        EXECUTE pg_catalog.format('ALTER TABLE %s SET (%s)', target, setting);
    END LOOP;
END
$outbox_relay$;
