//! Names in SQL text: quoting, and the names of the objects that belong to an events table.

use crate::config::TableName;

/// Longest identifier in bytes; PostgreSQL cuts longer ones off (`NAMEDATALEN - 1`).
const LONGEST: usize = 63;

/// Names in the schema of the events table that the relay needs for itself.
const TAKEN: [&str; 4] =
    ["outbox_dead_letter", "supply_batch_compensation", "outbox_relay_state", "outbox_relay_migrations"];

/// `name` as an identifier in SQL text.
#[must_use]
pub fn identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// `text` as a string constant in SQL text, where `standard_conforming_strings` is on.
#[must_use]
pub fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// The events table, qualified and quoted.
#[must_use]
pub fn events(table: &TableName) -> String {
    in_schema(table, &table.table)
}

/// The object `name` in the schema of the events table, qualified and quoted.
#[must_use]
pub fn in_schema(table: &TableName, name: &str) -> String {
    format!("{}.{}", identifier(&table.schema), identifier(name))
}

/// Why `table` cannot name an events table; `None` when it can.
#[must_use]
pub fn problem(table: &TableName) -> Option<String> {
    for (what, name) in [("schema", &table.schema), ("table", &table.table)] {
        if name.is_empty() {
            return Some(format!("the {what}'s name is empty"));
        }
        if name.len() > LONGEST {
            return Some(format!("the {what}'s name has {} bytes, PostgreSQL keeps {LONGEST}; shorten it", name.len()));
        }
        if name.contains('\0') {
            return Some(format!("the {what}'s name contains a NUL byte"));
        }
    }
    TAKEN.contains(&table.table.as_str()).then(|| {
        format!(
            "the name {} is taken by another table of the relay; give the events table a name of its own",
            table.table
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(schema: &str, table: &str) -> TableName {
        TableName { schema: schema.to_owned(), table: table.to_owned() }
    }

    #[test]
    fn quotes_what_would_end_a_name_or_a_string() {
        assert_eq!(events(&table("Out Box", "Ev\"t")), r#""Out Box"."Ev""t""#);
        assert_eq!(literal(r#""a'b"."c""#), r#"'"a''b"."c"'"#);
    }

    #[test]
    fn refuses_names_that_postgresql_would_change_or_that_are_taken() {
        assert_eq!(problem(&table("Out Box", "Ev\"t")), None);
        assert_eq!(problem(&table("s", &"é".repeat(31))), None);
        for (schema, name) in [("", "t"), ("s", ""), ("s", "a\0"), ("s", "outbox_relay_state")] {
            assert!(problem(&table(schema, name)).is_some(), "{schema:?} {name:?}");
        }
        assert!(problem(&table("s", &"é".repeat(32))).is_some());
    }
}
