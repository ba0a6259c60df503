//! Names of tables, in SQL's identifier syntax.

use std::fmt;
use std::str::FromStr;

/// PostgreSQL's `NAMEDATALEN - 1`: it would cut longer names off, silently.
pub(super) const MAX_NAME: usize = 63;

/// A schema-qualified table name, unquoted. `Display` quotes it for SQL.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableName {
    pub schema: String,
    pub table: String,
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", quoted(&self.schema), quoted(&self.table))
    }
}

impl TableName {
    /// The name as a person would write it: quoted only where it must be.
    pub fn plain(&self) -> String {
        let part = |name: &str| {
            let simple = name.bytes().enumerate().all(|(at, byte)| match byte {
                b'a'..=b'z' | b'_' => true,
                b'0'..=b'9' | b'$' => at > 0,
                _ => false,
            });
            if simple { name.to_owned() } else { quoted(name) }
        };
        format!("{}.{}", part(&self.schema), part(&self.table))
    }
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The text is not the name of a table.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TableNameError {
    #[error("a name is empty; write it as in SQL, such as public.outbox_events")]
    Empty,
    #[error("a quoted name has no closing quote")]
    Unclosed,
    #[error(
        "unexpected character {0:?}; write it as in SQL, such as public.outbox_events, and quote a name that is not \
         plain: \"Out Box\".\"Events\""
    )]
    Unexpected(char),
    #[error("too many parts; write it as schema.table")]
    Parts,
    #[error("the name {0:?} is longer than PostgreSQL's 63 bytes")]
    Long(String),
}

impl FromStr for TableName {
    type Err = TableNameError;

    /// Reads `table` or `schema.table` as SQL does: an unquoted name is folded to lower case, and a quote within
    /// quotes is doubled. Without a schema it is `public`.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (first, rest) = name(text.trim())?;
        let Some(rest) = rest else {
            return Ok(Self { schema: "public".to_owned(), table: first });
        };
        match name(rest)? {
            (table, None) => Ok(Self { schema: first, table }),
            (_, Some(_)) => Err(TableNameError::Parts),
        }
    }
}

/// The first name of `text`, and what follows the dot after it.
fn name(text: &str) -> Result<(String, Option<&str>), TableNameError> {
    let mut name = String::new();
    let mut rest = text.chars();
    if text.starts_with('"') {
        rest.next();
        loop {
            match rest.next().ok_or(TableNameError::Unclosed)? {
                '"' if rest.as_str().starts_with('"') => {
                    rest.next();
                    name.push('"');
                }
                '"' => break,
                '\0' => return Err(TableNameError::Unexpected('\0')),
                other => name.push(other),
            }
        }
    } else {
        while let Some(next) = rest.clone().next().filter(|next| *next != '.') {
            let inner = !name.is_empty() && (next.is_ascii_digit() || next == '$');
            if !(inner || next == '_' || next.is_ascii_alphabetic() || !next.is_ascii()) {
                return Err(TableNameError::Unexpected(next));
            }
            name.push(next.to_ascii_lowercase());
            rest.next();
        }
    }
    if name.is_empty() {
        return Err(TableNameError::Empty);
    }
    if name.len() > MAX_NAME {
        return Err(TableNameError::Long(name));
    }
    match rest.next() {
        None => Ok((name, None)),
        Some('.') => Ok((name, Some(rest.as_str()))),
        Some(other) => Err(TableNameError::Unexpected(other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(String, String), TableNameError> {
        text.parse::<TableName>().map(|name| (name.schema, name.table))
    }

    #[test]
    fn reads_names_as_sql_does() {
        assert_eq!(parse("outbox_events").unwrap(), ("public".into(), "outbox_events".into()));
        assert_eq!(parse("Shop.Outbox_2$").unwrap(), ("shop".into(), "outbox_2$".into()));
        assert_eq!(parse(r#""Out Box"."Ev""t""#).unwrap(), ("Out Box".into(), "Ev\"t".into()));
        assert_eq!(parse(r#""a.b".c"#).unwrap(), ("a.b".into(), "c".into()));
        assert_eq!(parse("größe.Ä").unwrap(), ("größe".into(), "Ä".into()));
    }

    #[test]
    fn refuses_what_sql_would_refuse_or_cut() {
        use TableNameError as E;
        for (text, error) in [
            ("", E::Empty),
            (".a", E::Empty),
            ("a.", E::Empty),
            ("\"\"", E::Empty),
            ("a.b.c", E::Parts),
            ("\"a", E::Unclosed),
            ("a b", E::Unexpected(' ')),
            ("a-b", E::Unexpected('-')),
            ("1a", E::Unexpected('1')),
            ("a;drop", E::Unexpected(';')),
            ("\"a\"b", E::Unexpected('b')),
            ("\"a\0\"", E::Unexpected('\0')),
            ("a\"b\"", E::Unexpected('"')),
        ] {
            assert_eq!(parse(text), Err(error), "{text:?}");
        }
        assert!(parse(&"é".repeat(31)).is_ok());
        assert!(matches!(parse(&"é".repeat(32)), Err(E::Long(_))));
    }

    #[test]
    fn prints_for_sql_and_for_people() {
        let odd = TableName { schema: "shop".into(), table: "Ev\"t".into() };
        assert_eq!(odd.to_string(), r#""shop"."Ev""t""#);
        assert_eq!(odd.plain(), r#"shop."Ev""t""#);
        for name in [odd, TableName { schema: "1".into(), table: "a.b".into() }] {
            assert_eq!(name.plain().parse(), Ok(name.clone()));
            assert_eq!(name.to_string().parse(), Ok(name));
        }
    }
}
