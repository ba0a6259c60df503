//! The statements that mend what is wrong with a server or its tables, as an operator runs them in psql. Names that
//! come in are quoted already.

use super::names::{identifier, literal};

/// Lets a role replicate.
pub fn let_replicate(role: &str) -> String {
    format!("ALTER ROLE {role} REPLICATION")
}

/// The same on Amazon RDS, where no role has the attribute.
pub fn let_replicate_on_rds(role: &str) -> String {
    format!("GRANT rds_replication TO {role}")
}

/// Makes the publication of the outbox.
pub fn create_publication(name: &str, table: &str) -> String {
    format!("CREATE PUBLICATION {name} FOR TABLE {table} WITH (publish = 'insert', publish_via_partition_root = true)")
}

/// Makes the publication of the outbox in the place of another one. Nothing is missed between the two.
pub fn replace_publication(name: &str, table: &str) -> String {
    format!("BEGIN; DROP PUBLICATION {name}; {}; COMMIT", create_publication(name, table))
}

/// Takes a table into a publication.
pub fn publish_table(name: &str, table: &str) -> String {
    format!("ALTER PUBLICATION {name} ADD TABLE {table}")
}

/// Leaves a publication this table only.
pub fn publish_only(name: &str, table: &str) -> String {
    format!("ALTER PUBLICATION {name} SET TABLE {table}")
}

/// Lets a publication show rows of partitions as the partitioned table's.
pub fn publish_via_root(name: &str) -> String {
    format!("ALTER PUBLICATION {name} SET (publish_via_partition_root = true)")
}

/// Leaves a publication its inserts only.
pub fn publish_inserts(name: &str) -> String {
    format!("ALTER PUBLICATION {name} SET (publish = 'insert')")
}

/// Takes a table into a publication anew, without a column list and a row filter. Nothing is missed between the two.
pub fn publish_anew(name: &str, table: &str) -> String {
    format!("BEGIN; ALTER PUBLICATION {name} DROP TABLE {table}; ALTER PUBLICATION {name} ADD TABLE {table}; COMMIT")
}

/// Sets a parameter of the whole server. A list has its commas: its parts are quoted each.
pub fn set_parameter(name: &str, value: &str) -> String {
    let parts: Vec<String> = value.split(',').map(|part| literal(part.trim())).collect();
    format!("ALTER SYSTEM SET {name} = {}", parts.join(", "))
}

/// Loads what [`set_parameter`] set, where no restart is needed.
pub fn reload() -> String {
    "SELECT pg_reload_conf()".to_owned()
}

/// Sets a parameter for the sessions of a role.
pub fn set_for_role(role: &str, name: &str, value: &str) -> String {
    format!("ALTER ROLE {role} SET {name} = {}", literal(value))
}

/// Lets a role see what other sessions do.
pub fn let_see(role: &str) -> String {
    format!("GRANT pg_read_all_stats TO {role}")
}

/// Lifts a role's limit of connections.
pub fn lift_role_limit(role: &str) -> String {
    format!("ALTER ROLE {role} CONNECTION LIMIT -1")
}

/// Lifts a database's limit of connections.
pub fn lift_database_limit(database: &str) -> String {
    format!("ALTER DATABASE {} CONNECTION LIMIT -1", identifier(database))
}

/// Lets a role's password be valid for ever.
pub fn never_expire(role: &str) -> String {
    format!("ALTER ROLE {role} VALID UNTIL 'infinity'")
}

/// Lets a role log in.
pub fn let_log_in(role: &str) -> String {
    format!("ALTER ROLE {} LOGIN", identifier(role))
}

/// Makes a slot in the database of the session.
pub fn create_slot(slot: &str) -> String {
    format!("SELECT pg_create_logical_replication_slot({}, 'pgoutput')", literal(slot))
}

/// Drops a slot, whatever its database.
pub fn drop_slot(slot: &str) -> String {
    format!("SELECT pg_drop_replication_slot({})", literal(slot))
}

/// Lets a slot survive a failover: a command of the replication protocol, for PostgreSQL 17 and later.
pub fn fail_over(slot: &str) -> String {
    format!("ALTER_REPLICATION_SLOT {} (FAILOVER true)", identifier(slot))
}

/// Ends a session.
pub fn terminate(pid: i32) -> String {
    format!("SELECT pg_terminate_backend({pid})")
}

/// Ends a prepared transaction, undoing it.
pub fn roll_back_prepared(gid: &str) -> String {
    format!("ROLLBACK PREPARED {}", literal(gid))
}

/// Lets a role see and change every row of a table in spite of row level security.
pub fn open_policy(table: &str, role: &str) -> String {
    format!("CREATE POLICY outbox_relay ON {table} TO {role} USING (true) WITH CHECK (true)")
}

/// Stops a trigger.
pub fn disable_trigger(table: &str, trigger: &str) -> String {
    format!("ALTER TABLE {table} DISABLE TRIGGER {trigger}")
}

/// Lets a sequence give out numbers in the order of the inserts.
pub fn plain_sequence(sequence: &str) -> String {
    format!("ALTER SEQUENCE {sequence} INCREMENT BY 1 CACHE 1")
}

/// Drops an index, where possible without stopping the table's writers.
pub fn drop_index(index: &str, partitioned: bool) -> String {
    format!("DROP INDEX {}{index}", if partitioned { "" } else { "CONCURRENTLY " })
}

/// Sets a storage parameter of a table.
pub fn set_storage(table: &str, parameter: &str, value: &str) -> String {
    format!("ALTER TABLE {table} SET ({parameter} = {value})")
}

/// Lets a storage parameter of a table be the default.
pub fn reset_storage(table: &str, parameter: &str) -> String {
    format!("ALTER TABLE {table} RESET ({parameter})")
}

/// Lets a table's rows survive a crash, and be in the log.
pub fn set_logged(table: &str) -> String {
    format!("ALTER TABLE {table} SET LOGGED")
}

/// Lets a table's updates log its key only.
pub fn plain_identity(table: &str) -> String {
    format!("ALTER TABLE {table} REPLICA IDENTITY DEFAULT")
}

/// Removes a table's dead rows.
pub fn vacuum(table: &str) -> String {
    format!("VACUUM (ANALYZE) {table}")
}

/// The same, and renews the age of what stays.
pub fn freeze(table: &str) -> String {
    format!("VACUUM (FREEZE, ANALYZE) {table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_list_are_quoted_each() {
        assert_eq!(set_parameter("a", "b"), "ALTER SYSTEM SET a = 'b'");
        assert_eq!(set_parameter("a", "b, it's"), "ALTER SYSTEM SET a = 'b', 'it''s'");
    }
}
