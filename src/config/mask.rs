//! Hides the passwords within addresses. When in doubt, it hides more.

use percent_encoding::percent_decode_str;

const MASK: &str = "***";

/// A connection string of libpq, URL or key=value, without its passwords.
pub fn postgres(text: &str) -> String {
    match text.split_once("://") {
        Some((scheme, rest)) if scheme.bytes().all(|byte| byte.is_ascii_alphabetic()) => {
            let rest = postgres_user(rest);
            match rest.split_once('?') {
                Some((before, query)) => format!("{scheme}://{before}?{}", parameters(query)),
                None => format!("{scheme}://{rest}"),
            }
        }
        _ => pairs(text).unwrap_or_else(|| MASK.to_owned()),
    }
}

/// Hides what stands between the first `:` and the last `@`: so a password is hidden whole even if it holds an `@`, `/`
/// or `?` that should have been encoded.
fn postgres_user(rest: &str) -> String {
    let before_query = rest.split('?').next().unwrap_or_default();
    if let Some((user, host)) = before_query.split_once('@')
        && !user.contains(':')
        && !host.contains('@')
    {
        return rest.to_owned(); // A user without a password: an `@` in the query is nothing to hide.
    }
    let Some((user, host)) = rest.rsplit_once('@') else { return rest.to_owned() };
    user.split_once(':').map_or_else(|| rest.to_owned(), |(name, _)| format!("{name}:{MASK}@{host}"))
}

/// An address of a NATS server without its password or token: a user without a password is a token there.
pub fn nats(text: &str) -> String {
    let (scheme, rest) = match text.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), text),
    };
    match rest.rsplit_once('@') {
        None => text.to_owned(),
        Some((user, host)) => match user.split_once(':') {
            Some((name, _)) => format!("{scheme}{name}:{MASK}@{host}"),
            None => format!("{scheme}{MASK}@{host}"),
        },
    }
}

fn is_secret(name: &str) -> bool {
    let name = percent_decode_str(name.trim()).decode_utf8_lossy().to_ascii_lowercase();
    name.contains("password") || name.contains("secret") || name.contains("scram")
}

/// The parameters of a URL.
fn parameters(query: &str) -> String {
    let shown = query.split('&').map(|parameter| match parameter.split_once('=') {
        Some((name, _)) if is_secret(name) => format!("{name}={MASK}"),
        _ => parameter.to_owned(),
    });
    shown.collect::<Vec<_>>().join("&")
}

/// `key = value` pairs as libpq reads them: a value is quoted, or ends at white space; a backslash escapes.
/// `None` when the text is not of this form.
fn pairs(text: &str) -> Option<String> {
    let mut shown = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=')?;
        let name = name.trim_end();
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return None;
        }
        let after = after.trim_start();
        let length = value_length(after)?;
        let (value, following) = after.split_at_checked(length)?;
        shown.push(format!("{name}={}", if is_secret(name) { MASK } else { value }));
        rest = following.trim_start();
    }
    Some(shown.join(" "))
}

/// The length in bytes of the value at the start of `text`; `None` when its quote is not closed.
fn value_length(text: &str) -> Option<usize> {
    let quoted = text.starts_with('\'');
    let mut escaped = false;
    for (at, next) in text.char_indices().skip(usize::from(quoted)) {
        match next {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '\'' if quoted => return Some(at + 1),
            space if !quoted && space.is_ascii_whitespace() => return Some(at),
            _ => {}
        }
    }
    (!quoted).then_some(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_of_postgresql_are_hidden() {
        for (given, shown) in [
            ("postgres://localhost:5432/postgres", "postgres://localhost:5432/postgres"),
            ("postgres://me@h:1/db", "postgres://me@h:1/db"),
            ("postgres://me:pw@h1:1,h2:2/db?sslmode=require", "postgres://me:***@h1:1,h2:2/db?sslmode=require"),
            ("postgres://me:p@w:x@h/db", "postgres://me:***@h/db"),
            ("postgres://me:p/w?q@h/db", "postgres://me:***@h/db"),
            ("postgres://m@e:pw@h/db", "postgres://m@e:***@h/db"),
            ("postgres://me@h/db?application_name=a@b", "postgres://me@h/db?application_name=a@b"),
            ("postgresql:///db?user=me&password=pw&host=/run", "postgresql:///db?user=me&password=***&host=/run"),
            ("postgres:///db?%70assword=pw&sslPassword=x", "postgres:///db?%70assword=***&sslPassword=***"),
            ("host=h user=me password=pw dbname=db", "host=h user=me password=*** dbname=db"),
            ("host = h password = 'p\\'w x' dbname=db", "host=h password=*** dbname=db"),
            (r"password=a\ b user=me", "password=*** user=me"),
            ("password='open", "***"),
            ("just a pw", "***"),
            ("", ""),
        ] {
            assert_eq!(postgres(given), shown, "{given}");
        }
    }

    #[test]
    fn credentials_of_nats_are_hidden() {
        for (given, shown) in [
            ("nats://localhost:4222", "nats://localhost:4222"),
            ("localhost", "localhost"),
            ("nats://me:pw@h:1", "nats://me:***@h:1"),
            ("nats://token@h:1", "nats://***@h:1"),
            ("me:p@w@h", "me:***@h"),
            ("tls://to@ken@h", "tls://***@h"),
        ] {
            assert_eq!(nats(given), shown, "{given}");
        }
    }
}
