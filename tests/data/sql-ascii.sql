-- A database without an encoding sends bytes as they are.
CREATE TABLE outbox_events (
    id bigint PRIMARY KEY, event_id text, aggregate_type text, aggregate_id text, event_type text, payload jsonb,
    headers jsonb, status text DEFAULT 'pending', next_retry_at timestamptz
);
DO $$ BEGIN EXECUTE format('ALTER TABLE outbox_events ADD %I text', 'caf' || chr(233)); END $$;
CREATE PUBLICATION capture FOR TABLE outbox_events WITH (publish = 'insert');
SELECT pg_create_logical_replication_slot('capture', 'pgoutput');
INSERT INTO outbox_events VALUES (1, 'good', 'order', '1', 'created', '1', '{}');
INSERT INTO outbox_events VALUES (2, 'bad-text', 'order', chr(233), 'created', '1', '{}');
INSERT INTO outbox_events VALUES (3, 'bad-payload', 'order', '1', 'created', to_jsonb(chr(233)), '{}');
INSERT INTO outbox_events VALUES (4, 'bad-headers', 'order', '1', 'created', '1', jsonb_build_object('a', chr(233)));
