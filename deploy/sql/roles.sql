-- Roles with the least that each needs, for psql:
--
--   psql "$ADMIN_URL" -f deploy/sql/roles.sql                  1. the roles, and the schema's owner
--   outbox-relay migrate --postgres-url '…?options=-crole%3Doutbox_owner'
--                                                              2. the tables, as their owner
--   psql "$ADMIN_URL" -f deploy/sql/roles.sql                  3. rights on the tables, and the publication
--
-- It can be run at any time and as often as you like, and must be run again after each `migrate`: it brings ownership and
-- rights of the outbox's tables and functions to exactly what stands here, and touches nothing else. It sets no
-- passwords: `\password outbox_relay`. Run it as a superuser, or as a managed service's administrator (see managed.md).
--
-- The roles; put your own logins into those that cannot log in (GRANT outbox_producer TO shop):
--   outbox_owner     owns tables, functions, publication; runs `migrate`             no login
--   outbox_relay     the relay                                                       login, replication
--   outbox_producer  enqueues through enqueue_outbox_event, and reads nothing        no login
--   outbox_poller    programs that still poll: claims events, marks them             no login
--   outbox_desk      operators: sees all, retries, replays, resolves; deletes nothing  no login
--   outbox_reader    monitoring: sees all but payloads and headers                   no login
--
-- Variables (psql -v NAME=VALUE):
\if :{?prefix}
\else
  -- begins every role's name
  \set prefix outbox
\endif
\if :{?schema}
\else
  -- source.table, in two
  \set schema public
\endif
\if :{?table}
\else
  \set table outbox_events
\endif
\if :{?publication}
\else
  -- source.publication
  \set publication outbox_relay
\endif
\if :{?deletes}
\else
  -- true with writeback.on_success = "delete" or reconcile.retention
  \set deletes false
\endif

\set ON_ERROR_STOP on
\set QUIET on
BEGIN;
SET LOCAL client_min_messages = warning;
SELECT set_config('outbox_roles.' || name, value, true)
FROM (VALUES ('prefix', :'prefix'), ('schema', :'schema'), ('table', :'table'), ('publication', :'publication'),
             ('deletes', :'deletes')) v (name, value) \g /dev/null

-- The roles themselves.
DO $roles$
DECLARE
    prefix CONSTANT text := current_setting('outbox_roles.prefix');
    relay  CONSTANT name := prefix || '_relay';
    kind   text;
BEGIN
    FOREACH kind IN ARRAY '{owner,relay,producer,poller,desk,reader}'::text[] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = prefix || '_' || kind) THEN
            EXECUTE format('CREATE ROLE %I %s', prefix || '_' || kind,
                           CASE WHEN kind = 'relay' THEN 'LOGIN' ELSE 'NOLOGIN' END);
        END IF;
    END LOOP;

    -- An administrator who is no superuser must belong to the owner to give it things, and to act for it.
    IF NOT pg_has_role((prefix || '_owner')::name, 'USAGE') THEN
        EXECUTE format('GRANT %I TO CURRENT_USER', prefix || '_owner');
    END IF;

    -- Replication is an attribute, which no role passes on to its members; on RDS it is a role.
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication') THEN
        EXECUTE format('GRANT rds_replication TO %I', relay);
    ELSIF NOT (SELECT rolreplication FROM pg_roles WHERE rolname = relay) THEN
        BEGIN
            EXECUTE format('ALTER ROLE %I REPLICATION', relay);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE WARNING 'role % may not replicate yet', relay
                USING HINT = format('Run as a superuser: ALTER ROLE %I REPLICATION', relay);
        END;
    END IF;
END
$roles$;

-- The database and the schema.
DO $schema$
DECLARE
    prefix CONSTANT text := current_setting('outbox_roles.prefix');
    schema CONSTANT name := current_setting('outbox_roles.schema');
    kind   text;
BEGIN
    IF to_regnamespace(quote_ident(schema)) IS NULL THEN
        EXECUTE format('CREATE SCHEMA %I AUTHORIZATION %I', schema, prefix || '_owner');
    END IF;
    EXECUTE format('GRANT CREATE ON SCHEMA %I TO %I', schema, prefix || '_owner');
    FOREACH kind IN ARRAY '{owner,relay,producer,poller,desk,reader}'::text[] LOOP
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), prefix || '_' || kind);
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', schema, prefix || '_' || kind);
    END LOOP;
    IF EXISTS (SELECT FROM pg_namespace n, aclexplode(n.nspacl) a
               WHERE n.nspname = schema AND a.grantee = 0 AND a.privilege_type = 'CREATE') THEN
        RAISE WARNING 'every role may create in schema %', schema
            USING HINT = format('Functions with their owner''s rights look there: REVOKE CREATE ON SCHEMA %I FROM PUBLIC',
                                schema);
    END IF;
END
$schema$;

-- What is there of the outbox: who owns it, and who may do what.
DO $objects$
DECLARE
    prefix      CONSTANT text := current_setting('outbox_roles.prefix');
    schema      CONSTANT name := current_setting('outbox_roles.schema');
    events      CONSTANT name := current_setting('outbox_roles.table');
    publication CONSTANT name := current_setting('outbox_roles.publication');
    deletes     CONSTANT text := CASE WHEN current_setting('outbox_roles.deletes')::boolean THEN ', DELETE' END;
    owner       CONSTANT name := prefix || '_owner';
    everyone    CONSTANT text := (SELECT string_agg(quote_ident(prefix || '_' || kind), ', ')
                                  FROM unnest('{relay,producer,poller,desk,reader}'::text[]) kind);
    tables      CONSTANT name[] := ARRAY[events, 'outbox_dead_letter', 'supply_batch_compensation',
                                         'outbox_relay_state', 'outbox_relay_migrations'];
    functions   CONSTANT name[] := '{enqueue_outbox_event,
        fetch_and_lock_outbox_events,mark_outbox_completed,mark_outbox_failed,
        create_compensation,retry_compensation,resolve_compensation,mark_compensation_manual_required,
        get_outbox_stats,get_dead_letter_stats,get_pending_manual_compensations,
        outbox_relay_polling_allowed,outbox_relay_claim,outbox_relay_check_lease,outbox_relay_compensate}';
    -- Rows hold what the business says; monitoring need not know it.
    secret      CONSTANT name[] := '{payload,headers,payload_hash,item_payload}';
    object      record;
    wanted      record;
BEGIN
    IF to_regclass(format('%I.%I', schema, events)) IS NULL THEN
        RAISE WARNING 'there is no table %.% yet', schema, events
            USING HINT = format('Run `outbox-relay migrate` as role %s, and then this again.', owner);
        RETURN;
    END IF;

    -- Ownership; and nothing for anyone, before each gets what is its own.
    FOR object IN
        SELECT 'TABLE' AS kind, c.oid::regclass::text AS name, c.relowner AS owner
        FROM pg_class c WHERE c.relnamespace = quote_ident(schema)::regnamespace AND c.relname = ANY (tables)
        UNION ALL
        SELECT 'FUNCTION', p.oid::regprocedure::text, p.proowner
        FROM pg_proc p WHERE p.pronamespace = quote_ident(schema)::regnamespace AND p.proname = ANY (functions)
    LOOP
        IF object.owner <> quote_ident(owner)::regrole THEN
            EXECUTE format('ALTER %s %s OWNER TO %I', object.kind, object.name, owner);
        END IF;
        EXECUTE format('REVOKE ALL ON %s %s FROM PUBLIC, %s', object.kind, object.name, everyone);
    END LOOP;
    -- Which migrations were applied is no secret, and both the relay and its commands look.
    EXECUTE format('GRANT SELECT ON %I.outbox_relay_migrations TO PUBLIC', schema);

    -- On tables. A serial column, as adopted tables have, also wants its sequence.
    FOR wanted IN
        SELECT * FROM (VALUES
            ('relay', events, 'SELECT, UPDATE' || coalesce(deletes, '')),
            ('relay', 'outbox_dead_letter', 'SELECT, INSERT'),
            ('relay', 'supply_batch_compensation', 'SELECT, INSERT, UPDATE'),
            ('relay', 'outbox_relay_state', 'SELECT, INSERT, UPDATE'),
            ('poller', events, 'SELECT, UPDATE'),
            ('poller', 'outbox_dead_letter', 'INSERT'),
            ('poller', 'supply_batch_compensation', 'SELECT, INSERT'),
            ('desk', events, 'SELECT, INSERT, UPDATE'),
            ('desk', 'outbox_dead_letter', 'SELECT, INSERT, UPDATE'),
            ('desk', 'supply_batch_compensation', 'SELECT, INSERT, UPDATE'),
            ('desk', 'outbox_relay_state', 'SELECT'),
            ('reader', 'outbox_relay_state', 'SELECT')
        ) w (kind, relation, privileges)
    LOOP
        EXECUTE format('GRANT %s ON %I.%I TO %I', wanted.privileges, schema, wanted.relation, prefix || '_' || wanted.kind);
        IF wanted.privileges LIKE '%INSERT%' AND wanted.relation <> 'outbox_relay_state' THEN
            FOR object IN
                SELECT pg_get_serial_sequence(format('%I.%I', schema, wanted.relation), 'id') AS name
            LOOP
                IF object.name IS NOT NULL THEN
                    EXECUTE format('GRANT USAGE ON SEQUENCE %s TO %I', object.name, prefix || '_' || wanted.kind);
                END IF;
            END LOOP;
        END IF;
    END LOOP;
    FOR object IN
        SELECT a.attrelid::regclass AS name, string_agg(quote_ident(a.attname), ', ') AS columns
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = quote_ident(schema)::regnamespace
          AND c.relname IN (events, 'outbox_dead_letter', 'supply_batch_compensation')
          AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (secret)
        GROUP BY a.attrelid
    LOOP
        EXECUTE format('GRANT SELECT (%s) ON %s TO %I', object.columns, object.name, prefix || '_reader');
    END LOOP;

    -- On functions. A producer enqueues with the owner's rights: it needs none on the table, and sees nothing of it. The
    -- function fixes its own search path.
    FOR wanted IN
        SELECT p.oid::regprocedure AS routine, w.kind
        FROM (VALUES
            ('enqueue_outbox_event', '{producer,desk}'::text[]),
            ('fetch_and_lock_outbox_events', '{poller}'),
            ('mark_outbox_completed', '{poller,desk}'),
            ('mark_outbox_failed', '{poller,desk}'),
            ('outbox_relay_polling_allowed', '{poller,desk}'),
            ('outbox_relay_claim', '{poller}'),
            ('outbox_relay_check_lease', '{poller,desk}'),
            ('outbox_relay_compensate', '{relay,poller,desk}'),
            ('create_compensation', '{relay,poller,desk}'),
            ('retry_compensation', '{desk}'),
            ('resolve_compensation', '{desk}'),
            ('mark_compensation_manual_required', '{desk}'),
            ('get_pending_manual_compensations', '{desk}'),
            ('get_outbox_stats', '{desk,reader}'),
            ('get_dead_letter_stats', '{desk,reader}')
        ) f (name, kinds)
        JOIN pg_proc p ON p.proname = f.name AND p.pronamespace = quote_ident(schema)::regnamespace
        CROSS JOIN unnest(f.kinds) w (kind)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', wanted.routine, prefix || '_' || wanted.kind);
    END LOOP;
    FOR object IN
        SELECT p.oid::regprocedure AS name FROM pg_proc p
        WHERE p.pronamespace = quote_ident(schema)::regnamespace AND p.proname = 'enqueue_outbox_event'
          AND NOT p.prosecdef
    LOOP
        EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER', object.name);
    END LOOP;

    -- Inserts only: the relay's own updates would come back to it.
    IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication) THEN
        EXECUTE format('CREATE PUBLICATION %I FOR TABLE %I.%I WITH (publish = ''insert'', publish_via_partition_root = true)',
                       publication, schema, events);
    END IF;
END
$objects$;
COMMIT;
