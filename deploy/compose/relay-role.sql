-- The roles, and the relay's password from its file.
\ir /sql/roles.sql
\set password `cat /run/secrets/relay_password`
ALTER ROLE outbox_relay PASSWORD :'password';
