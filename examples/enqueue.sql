-- Enqueues events from any language that speaks SQL: psql "$DATABASE_URL" -f examples/enqueue.sql, after
-- `outbox-relay migrate`.

-- The event is delivered if, and only if, the transaction that enqueues it commits.
BEGIN;
CREATE TEMP TABLE IF NOT EXISTS orders (id text, total numeric); -- stands for your own tables
INSERT INTO orders VALUES ('order-7', 12.50);
SELECT enqueue_outbox_event('order', 'order-7', 'placed', '{"order": "order-7", "total": "12.50"}') AS event_id;
COMMIT;

-- With a deduplication key, a second call is the same event: it returns the first one's id. Another payload under the
-- same key is an error (OB001).
SELECT enqueue_outbox_event('order', 'order-8', 'placed', '{"total": "3.00"}', 'order-8') AS event_id;
SELECT enqueue_outbox_event('order', 'order-8', 'placed', '{ "total":"3.00" }', 'order-8') AS same_event_id;

-- By name: a tenant, headers (they become NATS headers), an id of your own.
SELECT enqueue_outbox_event(
    p_aggregate_type => 'order', p_aggregate_id => 'order-9', p_event_type => 'placed', p_payload => '{"total": "1.00"}',
    p_tenant_id => 'shop-1', p_headers => '{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}',
    p_event_id => gen_random_uuid()::text) AS event_id;

-- A plain INSERT works as well, for instance many events at once. To deliver later, set next_retry_at.
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, next_retry_at)
SELECT 'order', 'order-' || n, 'reminded', jsonb_build_object('order', n), now() + interval '1 hour'
FROM generate_series(1, 3) n;
