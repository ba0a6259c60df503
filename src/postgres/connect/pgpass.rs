//! `.pgpass`: passwords by host, port, database and user.
//!
//! Source: PostgreSQL's documentation, "The Password File".

use std::path::Path;

/// Looks a password up. A file that others may read is ignored with a warning, as libpq does; so is one that cannot
/// be read. A missing file is no mistake.
pub(super) fn lookup(file: &Path, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
    let metadata = std::fs::metadata(file).ok()?;
    if !metadata.is_file() {
        tracing::warn!(file = %file.display(), "the password file is not a plain file and is ignored");
        return None;
    }
    #[cfg(unix)]
    if std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o077 != 0 {
        tracing::warn!(file = %file.display(), "group or others may read the password file, so it is ignored: chmod 0600");
        return None;
    }
    match std::fs::read_to_string(file) {
        Ok(text) => find(&text, host, port, database, user),
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "the password file cannot be read and is ignored");
            None
        }
    }
}

/// The password of the first line that fits.
fn find(text: &str, host: &str, port: u16, database: &str, user: &str) -> Option<String> {
    let port = port.to_string();
    text.lines().filter(|line| !line.starts_with('#')).find_map(|line| {
        let mut rest = line;
        for wanted in [host, &port, database, user] {
            let (field, after) = take_field(rest)?;
            if field.raw != "*" && field.value != wanted {
                return None;
            }
            rest = after;
        }
        // A colon in the password may stand as it is, so the whole rest of the line counts.
        let password = unescape(rest);
        (!password.is_empty()).then_some(password)
    })
}

struct Field<'a> {
    raw: &'a str,
    value: String,
}

/// Takes the text up to the first colon that no backslash precedes; `None` when the line has no such colon.
fn take_field(text: &str) -> Option<(Field<'_>, &str)> {
    let mut escaped = false;
    let end = text.find(|c| {
        let found = c == ':' && !escaped;
        escaped = c == '\\' && !escaped;
        found
    })?;
    let (raw, rest) = text.split_at_checked(end)?;
    Some((Field { raw, value: unescape(raw) }, rest.strip_prefix(':')?))
}

fn unescape(text: &str) -> String {
    let mut value = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => value.extend(chars.next()),
            c => value.push(c),
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matching() {
        let file = "# a comment\n\
                    nonsense\n\
                    h:5432:d:u:first\n\
                    h:5432:d:u:second\n\
                    h:*:d:u:any port\n\
                    \\*:1:d:u:star\n\
                    ::1:5432:d:u:unescaped\n\
                    \\:\\:1:5432:d:u:v6\n\
                    *:*:*:odd\\:user:a:b\\\\c\\:d \n\
                    *:*:*:empty:\n";
        for (host, port, database, user, expected) in [
            ("h", 5432, "d", "u", Some("first")),
            ("h", 5433, "d", "u", Some("any port")),
            ("h", 5432, "other", "u", None),
            ("*", 1, "d", "u", Some("star")),
            ("x", 1, "d", "u", None),
            ("::1", 5432, "d", "u", Some("v6")),
            ("x", 9, "y", "odd:user", Some("a:b\\c:d ")),
            ("x", 9, "y", "empty", None),
        ] {
            assert_eq!(find(file, host, port, database, user).as_deref(), expected, "{host}:{port}:{database}:{user}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_may_read_is_ignored() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pgpass");
        std::fs::write(&file, "*:*:*:*:secret").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(lookup(&file, "h", 1, "d", "u").as_deref(), Some("secret"));
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert_eq!(lookup(&file, "h", 1, "d", "u"), None);
        assert_eq!(lookup(directory.path(), "h", 1, "d", "u"), None);
        assert_eq!(lookup(&directory.path().join("missing"), "h", 1, "d", "u"), None);
    }
}
