-- The functions on compensations, and the statistics. `resolved` and `abandoned` are final.

-- The same item of a batch twice, while the first is not settled, is one compensation: a caller that does not know
-- whether its first call was committed can call again. The lock is on the batch, so that one with many items takes one.
CREATE OR REPLACE FUNCTION {{schema}}.create_compensation(
    p_batch_id varchar, p_operation_type varchar, p_item_index int, p_item_payload jsonb, p_failure_reason text
) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_id bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended(format('%s compensation %s', {{schema_literal}}, p_batch_id), 0));
    SELECT c.id INTO v_id
    FROM {{schema}}.supply_batch_compensation c
    WHERE c.batch_id = p_batch_id AND c.operation_type = p_operation_type AND c.item_index = p_item_index
      AND c.item_payload = p_item_payload AND c.status IN ('pending', 'retrying', 'manual_required')
    ORDER BY c.id
    LIMIT 1;
    IF NOT FOUND THEN
        INSERT INTO {{schema}}.supply_batch_compensation (
            batch_id, operation_type, item_index, item_payload, failure_reason)
        VALUES (p_batch_id, p_operation_type, p_item_index, p_item_payload, p_failure_reason)
        RETURNING id INTO v_id;
    END IF;
    RETURN v_id;
END
$outbox_relay$;

-- Creates the compensation that the headers of a dead letter ask for: `compensate` (the type of the operation), `batch_id`
-- and optionally `item_index` (0 when absent). True: it is there. False: it was asked for, but the table does not take the
-- values; they must not stop the dead letter, which keeps them. Null: none is asked for.
CREATE OR REPLACE FUNCTION {{schema}}.outbox_relay_compensate(p_headers jsonb, p_payload jsonb, p_reason text)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    IF p_headers ->> 'compensate' IS NULL THEN
        RETURN NULL;
    ELSIF p_headers ->> 'compensate' = '' OR coalesce(p_headers ->> 'batch_id', '') = '' THEN
        RETURN false;
    END IF;
    BEGIN
        PERFORM {{schema}}.create_compensation(
            p_headers ->> 'batch_id', p_headers ->> 'compensate', coalesce(p_headers ->> 'item_index', '0')::int,
            coalesce(p_payload, 'null'), p_reason);
        RETURN true;
    -- What the values are to blame for, also in the eyes of a trigger. Anything else (a lock, a full disk) is not
    -- swallowed: the dead letter is written later, and then with its compensation.
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception THEN
        RETURN false;
    END;
END
$outbox_relay$;

-- Takes a lease of 5 minutes on a pending compensation, or on one whose lease has ended (`retrying` without a lease
-- is one), and counts the attempt.
CREATE OR REPLACE FUNCTION {{schema}}.retry_compensation(p_id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_item record;
    v_now  CONSTANT timestamptz := clock_timestamp();
BEGIN
    SELECT c.status, c.retry_count, c.max_retries, c.locked_by, c.next_retry_at INTO v_item
    FROM {{schema}}.supply_batch_compensation c WHERE c.id = p_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no compensation %', p_id USING ERRCODE = 'no_data_found';
    ELSIF v_item.status = 'retrying' AND v_item.next_retry_at > v_now THEN
        RAISE EXCEPTION 'compensation % cannot be retried: % is at it until %', p_id, v_item.locked_by,
            v_item.next_retry_at
            USING ERRCODE = 'OB002', HINT = 'Wait for its outcome or for the end of its lease.';
    ELSIF v_item.status NOT IN ('pending', 'retrying') THEN
        RAISE EXCEPTION 'compensation % cannot be retried: it is %', p_id, v_item.status
            USING ERRCODE = 'OB002', HINT = 'Only a pending compensation can be retried.';
    ELSIF v_item.retry_count >= v_item.max_retries THEN
        RAISE EXCEPTION 'compensation % cannot be retried: its % attempts are used up', p_id, v_item.max_retries
            USING ERRCODE = 'OB002', HINT = 'Call mark_compensation_manual_required or resolve_compensation.';
    END IF;
    UPDATE {{schema}}.supply_batch_compensation c
    SET status = 'retrying', retry_count = c.retry_count + 1, locked_at = v_now,
        locked_by = coalesce(nullif(current_setting('outbox_relay.worker', true), ''), 'pid ' || pg_backend_pid()),
        next_retry_at = v_now + interval '5 minutes', updated_at = v_now, version = c.version + 1
    WHERE c.id = p_id;
END
$outbox_relay$;

-- A no-op on a resolved compensation: who resolved it first, and when, stays.
CREATE OR REPLACE FUNCTION {{schema}}.resolve_compensation(p_id bigint, p_resolved_by bigint, p_notes text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_item record;
    v_now  CONSTANT timestamptz := clock_timestamp();
BEGIN
    SELECT c.status, c.locked_by INTO v_item
    FROM {{schema}}.supply_batch_compensation c WHERE c.id = p_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no compensation %', p_id USING ERRCODE = 'no_data_found';
    ELSIF v_item.status = 'resolved' THEN
        RETURN;
    ELSIF v_item.status = 'abandoned' THEN
        RAISE EXCEPTION 'compensation % cannot be resolved: it is abandoned', p_id
            USING ERRCODE = 'OB002', HINT = 'An abandoned compensation is final.';
    ELSIF v_item.status = 'retrying' THEN
        PERFORM {{schema}}.outbox_relay_check_lease('compensation ' || p_id, v_item.locked_by);
    END IF;
    UPDATE {{schema}}.supply_batch_compensation c
    SET status = 'resolved', resolved_at = v_now, resolved_by = p_resolved_by, resolution_notes = p_notes,
        next_retry_at = NULL, locked_by = NULL, locked_at = NULL, updated_at = v_now, version = c.version + 1
    WHERE c.id = p_id;
END
$outbox_relay$;

-- Appends the reason. The reason that was appended last is not appended again.
CREATE OR REPLACE FUNCTION {{schema}}.mark_compensation_manual_required(p_id bigint, p_reason text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_item record;
BEGIN
    SELECT c.status, c.locked_by, c.failure_reason INTO v_item
    FROM {{schema}}.supply_batch_compensation c WHERE c.id = p_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no compensation %', p_id USING ERRCODE = 'no_data_found';
    ELSIF v_item.status IN ('resolved', 'abandoned') THEN
        RAISE EXCEPTION 'compensation % cannot be given to a person: it is %', p_id, v_item.status
            USING ERRCODE = 'OB002', HINT = 'A resolved or abandoned compensation is final.';
    ELSIF v_item.status = 'manual_required' AND (
        p_reason IS NULL OR right('; ' || v_item.failure_reason, length(p_reason) + 2) = '; ' || p_reason) THEN
        RETURN;
    ELSIF v_item.status = 'retrying' THEN
        PERFORM {{schema}}.outbox_relay_check_lease('compensation ' || p_id, v_item.locked_by);
    END IF;
    UPDATE {{schema}}.supply_batch_compensation c
    SET status = 'manual_required', failure_reason = concat_ws('; ', c.failure_reason, p_reason),
        next_retry_at = NULL, locked_by = NULL, locked_at = NULL, updated_at = clock_timestamp(),
        version = c.version + 1
    WHERE c.id = p_id;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.get_outbox_stats() RETURNS TABLE (status varchar, count bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    RETURN QUERY SELECT e.status::varchar, count(*) FROM {{events}} e GROUP BY 1 ORDER BY 1;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.get_dead_letter_stats() RETURNS TABLE (handled boolean, count bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    RETURN QUERY SELECT d.handled, count(*) FROM {{schema}}.outbox_dead_letter d GROUP BY d.handled ORDER BY d.handled;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.get_pending_manual_compensations()
RETURNS SETOF {{schema}}.supply_batch_compensation
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    RETURN QUERY
    SELECT c.* FROM {{schema}}.supply_batch_compensation c
    WHERE c.status = 'manual_required' ORDER BY c.created_at, c.id;
END
$outbox_relay$;
