-- Indexes, each unless one of the same definition is there. PostgreSQL names them after the table, within its limit.
-- None covers, or is conditioned on, a column that the normal path (pending to completed) changes: that path stays HOT.
-- A partitioned table can have a unique index only over its partition key: one that it cannot have is left out, and
-- `outbox-relay migrate` says so.
DO $outbox_relay$
DECLARE
    events       CONSTANT regclass := {{events_literal}};
    dead_letters CONSTANT regclass := {{schema_literal}} || '.outbox_dead_letter';
    compensation CONSTANT regclass := {{schema_literal}} || '.supply_batch_compensation';
    wanted record;
BEGIN
    FOR wanted IN
        SELECT w.*
        FROM (VALUES
            (events, true, '{event_id}'::text[], NULL, '(event_id)'),
            (events, true, ARRAY['COALESCE(tenant_id, ''''::character varying)', 'event_type', 'deduplication_key'],
             '(deduplication_key IS NOT NULL)',
             '(coalesce(tenant_id, ''''), event_type, deduplication_key) WHERE deduplication_key IS NOT NULL'),
            (events, false, '{next_retry_at}', '(next_retry_at IS NOT NULL)',
             '(next_retry_at) WHERE next_retry_at IS NOT NULL'),
            (events, false, '{created_at}', NULL, '(created_at)'),
            (events, false, '{aggregate_type,aggregate_id}', NULL, '(aggregate_type, aggregate_id)'),
            (dead_letters, false, '{original_event_id}', NULL, '(original_event_id)'),
            (dead_letters, false, '{handled,dead_letter_at}', '(handled = false)',
             '(handled, dead_letter_at) WHERE handled = false'),
            (compensation, false, '{batch_id,status}', NULL, '(batch_id, status)'),
            (compensation, false, '{status,created_at}', NULL, '(status, created_at)')
        ) w (relation, is_unique, keys, condition, definition)
        WHERE NOT EXISTS (
            SELECT FROM pg_catalog.pg_index i
            WHERE i.indrelid = w.relation AND i.indisvalid AND (i.indisunique OR NOT w.is_unique)
              AND pg_catalog.pg_get_expr(i.indpred, i.indrelid) IS NOT DISTINCT FROM w.condition
              AND w.keys = ARRAY(SELECT pg_catalog.pg_get_indexdef(i.indexrelid, k, false)
                                 FROM pg_catalog.generate_series(1, i.indnkeyatts::int) k ORDER BY k))
    LOOP
        BEGIN
            EXECUTE pg_catalog.format('CREATE %s INDEX ON %s %s', CASE WHEN wanted.is_unique THEN 'UNIQUE' END,
                                      wanted.relation, wanted.definition);
        EXCEPTION WHEN feature_not_supported THEN
            IF NOT wanted.is_unique THEN
                RAISE;
            END IF;
        END;
    END LOOP;
END
$outbox_relay$;
