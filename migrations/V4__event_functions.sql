-- The functions on events. All run with the caller's rights except outbox_relay_polling_allowed.
--
-- Errors of our own: OB001 a deduplication key with another payload, OB002 an illegal change of state, OB003 a lost lease.
--
-- A poller can name itself, `SET outbox_relay.worker = 'w1'`: its claims then carry that name, and a later mark_outbox_...
-- of a claim that has gone to another worker raises OB003. Without a name the claims are not told apart, as before.

-- A function of the older schema with another result cannot be replaced, only dropped. One with the same result is
-- replaced in place below, which keeps its grants.
DO $outbox_relay$
DECLARE
    old_function regprocedure;
BEGIN
    FOR old_function IN
        SELECT p.oid
        FROM pg_catalog.pg_proc p
        JOIN (VALUES
            ('enqueue_outbox_event', 'varchar', false,
             '{varchar,varchar,varchar,jsonb,text,varchar,jsonb,varchar}', NULL,
             '{p_aggregate_type,p_aggregate_id,p_event_type,p_payload,p_deduplication_key,p_tenant_id,p_headers,p_event_id}'),
            ('fetch_and_lock_outbox_events', {{events_literal}}, true, '{int}', NULL, '{p_limit}'),
            ('mark_outbox_completed', 'void', false, '{varchar}', NULL, '{p_event_id}'),
            ('mark_outbox_failed', 'void', false, '{varchar,text}', NULL, '{p_event_id,p_error_message}'),
            ('create_compensation', 'bigint', false, '{varchar,varchar,int,jsonb,text}', NULL,
             '{p_batch_id,p_operation_type,p_item_index,p_item_payload,p_failure_reason}'),
            ('retry_compensation', 'void', false, '{bigint}', NULL, '{p_id}'),
            ('resolve_compensation', 'void', false, '{bigint,bigint,text}', NULL, '{p_id,p_resolved_by,p_notes}'),
            ('mark_compensation_manual_required', 'void', false, '{bigint,text}', NULL, '{p_id,p_reason}'),
            ('get_outbox_stats', 'record', true, '{}', '{varchar,bigint}', '{status,count}'),
            ('get_dead_letter_stats', 'record', true, '{}', '{boolean,bigint}', '{handled,count}'),
            ('get_pending_manual_compensations', {{schema_literal}} || '.supply_batch_compensation', true, '{}',
             NULL, NULL)
        ) w (name, result, is_set, arguments, columns, names) ON p.proname = w.name
        WHERE p.pronamespace = {{schema_literal}}::regnamespace
          AND ARRAY(SELECT t::regtype FROM pg_catalog.unnest(p.proargtypes) WITH ORDINALITY a (t, o) ORDER BY o)
              = w.arguments::regtype[]
          AND (p.prokind <> 'f' OR p.prorettype <> w.result::regtype OR p.proretset <> w.is_set
               OR p.proallargtypes::regtype[] IS DISTINCT FROM w.columns::regtype[]
               OR p.proargnames IS DISTINCT FROM w.names::text[])
    LOOP
        EXECUTE pg_catalog.format('DROP ROUTINE %s', old_function);
    END LOOP;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.enqueue_outbox_event(
    p_aggregate_type varchar, p_aggregate_id varchar, p_event_type varchar, p_payload jsonb,
    p_deduplication_key text DEFAULT NULL, p_tenant_id varchar DEFAULT NULL,
    p_headers jsonb DEFAULT '{}', p_event_id varchar DEFAULT NULL
) RETURNS varchar
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_event_id varchar;
    v_hash     text;
BEGIN
    IF p_deduplication_key IS NULL THEN
        INSERT INTO {{events}} (event_id, tenant_id, aggregate_type, aggregate_id, event_type, payload, headers)
        VALUES (coalesce(p_event_id, gen_random_uuid()::text), p_tenant_id, p_aggregate_type, p_aggregate_id,
                p_event_type, p_payload, coalesce(p_headers, '{}'))
        RETURNING event_id INTO v_event_id;
        RETURN v_event_id;
    END IF;

    v_hash := encode(sha256(convert_to(p_payload::text, 'UTF8')), 'hex');
    -- More than once only when the first event is deleted between the two statements.
    FOR v_attempt IN 1..10 LOOP
        -- Waits for an open transaction with the same key. A conflict on anything but the key is an error.
        INSERT INTO {{events}} (event_id, tenant_id, aggregate_type, aggregate_id, event_type, deduplication_key,
                                payload_hash, payload, headers)
        VALUES (coalesce(p_event_id, gen_random_uuid()::text), p_tenant_id, p_aggregate_type, p_aggregate_id,
                p_event_type, p_deduplication_key, v_hash, p_payload, coalesce(p_headers, '{}'))
        ON CONFLICT (coalesce(tenant_id, ''), event_type, deduplication_key) WHERE deduplication_key IS NOT NULL
        DO NOTHING
        RETURNING event_id INTO v_event_id;
        IF FOUND THEN
            RETURN v_event_id;
        END IF;

        DECLARE
            v_same boolean;
        BEGIN
            SELECT e.event_id,
                   coalesce(e.payload_hash, encode(sha256(convert_to(e.payload::text, 'UTF8')), 'hex')) = v_hash
            INTO v_event_id, v_same
            FROM {{events}} e
            WHERE coalesce(e.tenant_id, '') = coalesce(p_tenant_id, '') AND e.event_type = p_event_type
              AND e.deduplication_key = p_deduplication_key;
            IF v_same THEN
                RETURN v_event_id;
            ELSIF FOUND THEN
                RAISE EXCEPTION 'the deduplication key was used before, with another payload'
                    USING ERRCODE = 'OB001', DETAIL = format('The first event has the event_id %s.', v_event_id),
                          HINT = 'Use one key for one event, or send the same payload again.';
            END IF;
        END;
    END LOOP;
    RAISE EXCEPTION 'the first event of this deduplication key cannot be read'
        USING ERRCODE = 'serialization_failure',
              HINT = 'Try the transaction again. If this goes on, a row level security policy hides the event.';
END
$outbox_relay$;

-- Whether pollers may take rows now: not while a relay holds its slot. The relay locks outbox_relay_state once it has
-- its slot: this function's lock, kept to the end of the caller's transaction, makes it wait for claims that passed
-- before. The slot is looked at in a statement of its own, after that lock.
-- With its owner's rights: a caller that may poll needs no rights on the relay's state.
CREATE OR REPLACE FUNCTION {{schema}}.outbox_relay_polling_allowed() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    PERFORM FROM {{schema}}.outbox_relay_state FOR KEY SHARE;
    RETURN NOT EXISTS (
        SELECT FROM pg_replication_slots s
        JOIN {{schema}}.outbox_relay_state r ON r.slot_name = s.slot_name
        WHERE s.active AND s.database = current_database());
END
$outbox_relay$;

-- Claims up to p_limit due rows in order of id: new ones, retries whose time has come, claims whose lease has ended. A
-- `processing` row without a lease is another poller's for five minutes after it was locked; where it does not say when,
-- its lease has ended. Of the rows that a relay held behind an earlier one of their aggregate, it takes one whose turn it
-- is: nothing before it in its aggregate waits or is being worked on.
-- p_attempts is added to retry_count.
CREATE OR REPLACE FUNCTION {{schema}}.outbox_relay_claim(
    p_worker text, p_limit int, p_lease interval, p_attempts int
) RETURNS SETOF {{events}}
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    -- In a variable: an index can serve a comparison with it, but not with the volatile function.
    v_now CONSTANT timestamptz := clock_timestamp();
BEGIN
    IF NOT {{schema}}.outbox_relay_polling_allowed() THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH due AS MATERIALIZED (
        SELECT e.id
        FROM {{events}} e
        WHERE e.status IN ('pending', 'failed', 'processing')
          AND (e.next_retry_at IS NULL
                   AND (e.status <> 'processing' OR coalesce(e.locked_at <= v_now - interval '5 minutes', true))
               OR e.next_retry_at <= v_now
               OR e.next_retry_at = 'infinity' AND e.status <> 'processing' AND e.id IN (
                   SELECT min(w.id)
                   FROM {{events}} w
                   WHERE w.next_retry_at IS NOT NULL
                     AND (w.status IN ('failed', 'processing')
                          OR w.status = 'pending' AND w.next_retry_at = 'infinity')
                   GROUP BY coalesce(w.tenant_id, ''), w.aggregate_type, w.aggregate_id))
        ORDER BY e.id
        LIMIT greatest(p_limit, 0)
        FOR NO KEY UPDATE OF e SKIP LOCKED
    ), claimed AS (
        UPDATE {{events}} e
        SET status = 'processing', locked_by = p_worker, locked_at = v_now, next_retry_at = v_now + p_lease,
            retry_count = e.retry_count + p_attempts, updated_at = v_now, version = e.version + 1
        FROM due
        WHERE e.id = due.id
        RETURNING e.*
    )
    SELECT * FROM claimed ORDER BY id;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.fetch_and_lock_outbox_events(p_limit int DEFAULT 100) RETURNS SETOF {{events}}
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    RETURN QUERY
    SELECT c.*
    FROM {{schema}}.outbox_relay_claim(
        coalesce(nullif(current_setting('outbox_relay.worker', true), ''), 'pid ' || pg_backend_pid()),
        coalesce(p_limit, 100), interval '5 minutes', 0) c
    ORDER BY c.id;
END
$outbox_relay$;

-- Raises OB003 when the session has named itself and the claim is another worker's.
CREATE OR REPLACE FUNCTION {{schema}}.outbox_relay_check_lease(p_what text, p_locked_by text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
BEGIN
    IF p_locked_by <> nullif(current_setting('outbox_relay.worker', true), '') THEN
        RAISE EXCEPTION 'the lease on % is lost: another worker has taken it over', p_what
            USING ERRCODE = 'OB003', HINT = 'Leave it to that worker, or work faster than the lease lasts.';
    END IF;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.mark_outbox_completed(p_event_id varchar) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_event record;
BEGIN
    SELECT e.id, e.status, e.locked_by INTO v_event
    FROM {{events}} e WHERE e.event_id = p_event_id FOR NO KEY UPDATE;
    IF NOT FOUND OR v_event.status = 'completed' THEN
        RETURN;
    ELSIF v_event.status NOT IN ('pending', 'processing', 'failed') THEN
        RAISE EXCEPTION 'event % cannot be completed: it is %', p_event_id, v_event.status
            USING ERRCODE = 'OB002', HINT = 'Only a pending, processing or failed event can be completed.';
    ELSIF v_event.status = 'processing' THEN
        PERFORM {{schema}}.outbox_relay_check_lease('event ' || p_event_id, v_event.locked_by);
    END IF;
    UPDATE {{events}} e
    SET status = 'completed', processed_at = clock_timestamp(), next_retry_at = NULL, locked_by = NULL,
        locked_at = NULL, updated_at = clock_timestamp(), version = e.version + 1
    WHERE e.id = v_event.id;
END
$outbox_relay$;

CREATE OR REPLACE FUNCTION {{schema}}.mark_outbox_failed(p_event_id varchar, p_error_message text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, {{schema}}, pg_temp AS $outbox_relay$
DECLARE
    v_event {{events}};
    v_now   CONSTANT timestamptz := clock_timestamp();
    v_dead  boolean;
BEGIN
    -- The lock makes a concurrent call wait here, see `failed`, and stop: one failure counts once.
    SELECT e.* INTO v_event FROM {{events}} e WHERE e.event_id = p_event_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    ELSIF v_event.status NOT IN ('pending', 'processing') THEN
        RAISE EXCEPTION 'event % cannot fail: it is %', p_event_id, v_event.status
            USING ERRCODE = 'OB002', HINT = 'Only a pending or processing event can fail; a failure is reported once.';
    ELSIF v_event.status = 'processing' THEN
        PERFORM {{schema}}.outbox_relay_check_lease('event ' || p_event_id, v_event.locked_by);
    END IF;

    v_event.retry_count := v_event.retry_count + 1;
    v_event.first_failed_at := coalesce(v_event.first_failed_at, v_now);
    v_dead := v_event.retry_count >= v_event.max_retries;
    UPDATE {{events}} e
    SET status = CASE WHEN v_dead THEN 'dead_letter' ELSE 'failed' END,
        retry_count = v_event.retry_count, first_failed_at = v_event.first_failed_at,
        error_code = NULL, error_message = p_error_message,
        dead_letter_reason = CASE WHEN v_dead THEN p_error_message ELSE e.dead_letter_reason END,
        next_retry_at = CASE WHEN NOT v_dead
            -- The inner limit keeps the power within a double.
            THEN v_now + make_interval(secs => least(60, power(2, least(v_event.retry_count, 10)))) END,
        locked_by = NULL, locked_at = NULL, updated_at = v_now, version = e.version + 1
    WHERE e.id = v_event.id;
    IF v_dead THEN
        INSERT INTO {{schema}}.outbox_dead_letter (
            original_event_id, original_aggregate_type, original_aggregate_id, tenant_id, event_type, payload, headers,
            error_message, retry_count, first_failed_at)
        VALUES (
            -- An adopted table may allow NULL where this one does not.
            v_event.event_id, coalesce(v_event.aggregate_type, ''), coalesce(v_event.aggregate_id, ''),
            v_event.tenant_id, coalesce(v_event.event_type, ''), coalesce(v_event.payload, 'null'),
            coalesce(v_event.headers, '{}'), p_error_message, v_event.retry_count, v_event.first_failed_at);
        PERFORM {{schema}}.outbox_relay_compensate(v_event.headers, v_event.payload, p_error_message);
    END IF;
END
$outbox_relay$;
