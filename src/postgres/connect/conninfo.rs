//! The syntax of a connection string: libpq's URL and its `key=value` form, each read into pairs.
//!
//! Source: PostgreSQL's documentation, "Connection Strings". What the keys mean is [`super::target`]'s business.
//! No error here repeats a part of the text whose place is in doubt: it may be a piece of the password.

/// A connection string that cannot be used. The message never holds a value that could be a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConnectInfoError {
    message: String,
}

impl ConnectInfoError {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

const ENCODE: &str = "in a URL, percent-encode the characters `%`, `@`, `:`, `/`, `?`, `#` and spaces of user and \
                      password, or use the key=value form";

/// Reads a connection string into (key, value) pairs in the order they stand; a later pair wins over an earlier one.
pub(super) fn parse(text: &str) -> Result<Vec<(String, String)>, ConnectInfoError> {
    if text.contains('\0') {
        return Err(ConnectInfoError::new("a connection string cannot hold a zero byte"));
    }
    for scheme in ["postgres://", "postgresql://"] {
        if let Some(rest) = text.strip_prefix(scheme) {
            return parse_url(rest);
        }
    }
    if text.split_once("://").is_some_and(|(scheme, _)| scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+'))
    {
        return Err(ConnectInfoError::new("the URL must begin with postgres:// or postgresql://"));
    }
    parse_pairs(text)
}

/// `[user[:password]@][host][:port][,...][/dbname][?key=value&...]`
fn parse_url(rest: &str) -> Result<Vec<(String, String)>, ConnectInfoError> {
    let mut pairs = Vec::new();
    let mut push = |key: &str, raw: &str| -> Result<(), ConnectInfoError> {
        if !raw.is_empty() {
            pairs.push((key.to_owned(), decode(key, raw)?));
        }
        Ok(())
    };

    // As libpq: an `@` before the first `/` ends the user's part, so `?` and `#` may stand unencoded in a password.
    let mut rest = rest;
    if let Some(at) = rest.find(['@', '/'])
        && let Some((who, after)) = rest.split_at_checked(at)
        && let Some(after) = after.strip_prefix('@')
    {
        let (user, password) = who.split_once(':').unwrap_or((who, ""));
        push("user", user)?;
        push("password", password)?;
        rest = after;
    }

    let (hosts, ports, after) = parse_hosts(rest)?;
    push("host", &hosts.join(","))?;
    if ports.iter().any(|port| !port.is_empty()) {
        push("port", &ports.join(","))?;
    }

    let (path, query) = after.split_once('?').unwrap_or((after, ""));
    if let Some(database) = path.strip_prefix('/') {
        if database.contains('@') {
            return Err(ConnectInfoError::new(format!("an `@` stands in the URL after the first `/`: {ENCODE}")));
        }
        push("dbname", database)?;
    }
    if !query.is_empty() {
        parse_query(query, &mut pairs)?;
    }
    Ok(pairs)
}

/// Splits `host:port,host:port` from what follows it (`/…`, `?…` or nothing). The values are still encoded.
fn parse_hosts(text: &str) -> Result<(Vec<&str>, Vec<&str>, &str), ConnectInfoError> {
    let end = text.find(['/', '?']).unwrap_or(text.len());
    let (list, after) = text.split_at_checked(end).unwrap_or((text, ""));
    if list.contains('@') {
        return Err(ConnectInfoError::new(format!("more than one `@` stands before the host: {ENCODE}")));
    }
    let (mut hosts, mut ports) = (Vec::new(), Vec::new());
    for entry in list.split(',') {
        let (host, port) = if let Some(inner) = entry.strip_prefix('[') {
            let (host, tail) = inner
                .split_once(']')
                .ok_or_else(|| ConnectInfoError::new("an IPv6 address in the URL lacks its closing `]`"))?;
            let port = match tail.strip_prefix(':') {
                Some(port) => port,
                None if tail.is_empty() => "",
                None => return Err(ConnectInfoError::new("after the `]` of an IPv6 address only `:port` may follow")),
            };
            (host, port)
        } else {
            entry.split_once(':').unwrap_or((entry, ""))
        };
        if !port.is_empty() && !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(ConnectInfoError::new(format!(
                "the port in the URL is not a number (an IPv6 address needs brackets; {ENCODE})"
            )));
        }
        hosts.push(host);
        ports.push(port);
    }
    Ok((hosts, ports, after))
}

fn parse_query(query: &str, pairs: &mut Vec<(String, String)>) -> Result<(), ConnectInfoError> {
    for part in query.split('&') {
        let Some((key, value)) = part.split_once('=') else {
            return Err(ConnectInfoError::new("a parameter after `?` in the URL lacks its `=`"));
        };
        let key = decode("parameter name", key)?;
        if value.contains('=') {
            return Err(ConnectInfoError::new(format!("the URL's parameter `{key}` has a second `=`: write it %3D")));
        }
        let value = decode(&key, value)?;
        // A spelling from JDBC that libpq understands too.
        if key == "ssl" && value == "true" {
            pairs.push(("sslmode".to_owned(), "require".to_owned()));
        } else {
            pairs.push((key, value));
        }
    }
    Ok(())
}

fn decode(what: &str, raw: &str) -> Result<String, ConnectInfoError> {
    let bad =
        || ConnectInfoError::new(format!("the URL's {what} has a `%` that two hex digits do not follow: write it %25"));
    let mut bytes = Vec::with_capacity(raw.len());
    let mut rest = raw.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit =
            || rest.next().and_then(|b| char::from(b).to_digit(16)).and_then(|d| u8::try_from(d).ok()).ok_or_else(bad);
        let value = digit()? * 16 + digit()?;
        if value == 0 {
            return Err(ConnectInfoError::new(format!("the URL's {what} holds %00, which PostgreSQL cannot take")));
        }
        bytes.push(value);
    }
    String::from_utf8(bytes).map_err(|_| ConnectInfoError::new(format!("the URL's {what} is not UTF-8 once decoded")))
}

/// `key = value key='quoted value'`; a backslash takes the next character as it is.
fn parse_pairs(text: &str) -> Result<Vec<(String, String)>, ConnectInfoError> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let end = rest.find(|c: char| c == '=' || c.is_whitespace()).unwrap_or(rest.len());
        let (key, after) = rest.split_at_checked(end).unwrap_or((rest, ""));
        let Some(after) = after.trim_start().strip_prefix('=') else {
            let place = pairs.last().map_or_else(String::new, |(key, _)| format!(" after the value of `{key}`"));
            return Err(ConnectInfoError::new(format!(
                "the connection string is neither a postgres:// URL nor key=value pairs: a `=` is missing{place} \
                 (a value with spaces needs single quotes)"
            )));
        };
        let (value, after) = take_value(key, after.trim_start())?;
        pairs.push((key.to_owned(), value));
        rest = after.trim_start();
    }
    Ok(pairs)
}

fn take_value<'a>(key: &str, text: &'a str) -> Result<(String, &'a str), ConnectInfoError> {
    let quoted = text.strip_prefix('\'');
    let mut value = String::new();
    let mut chars = quoted.unwrap_or(text).chars();
    loop {
        let before = chars.as_str();
        match chars.next() {
            Some('\\') => value.extend(chars.next()),
            Some('\'') if quoted.is_some() => return Ok((value, chars.as_str())),
            Some(c) if c.is_whitespace() && quoted.is_none() => return Ok((value, before)),
            Some(c) => value.push(c),
            None if quoted.is_some() => {
                return Err(ConnectInfoError::new(format!("the value of `{key}` lacks its closing quote")));
            }
            None => return Ok((value, "")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> String {
        match parse(text) {
            Ok(pairs) => pairs.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join("|"),
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn urls() {
        for (text, expected) in [
            ("postgres://", ""),
            ("postgresql://localhost", "host=localhost"),
            ("postgres://u@h:5433/d", "user=u|host=h|port=5433|dbname=d"),
            ("postgres://u:p%40@h/d?sslmode=require", "user=u|password=p@|host=h|dbname=d|sslmode=require"),
            ("postgres://u:p?#@h/d", "user=u|password=p?#|host=h|dbname=d"),
            (
                "postgres://u:%25I%5CGYg-7a%40%3A%2F%3F%23%7By%20@h/d",
                r"user=u|password=%I\GYg-7a@:/?#{y |host=h|dbname=d",
            ),
            ("postgres://%2Frun%2Fpg:5433/d", "host=/run/pg|port=5433|dbname=d"),
            ("postgres:///d?host=/run/pg&port=1", "dbname=d|host=/run/pg|port=1"),
            ("postgres://[::1]:5433,[fe80::1],c/d", "host=::1,fe80::1,c|port=5433,,|dbname=d"),
            ("postgres://a:1,b:2?target_session_attrs=any", "host=a,b|port=1,2|target_session_attrs=any"),
            ("postgres://h?ssl=true", "host=h|sslmode=require"),
            ("postgres://h?options=-c%20a%3D1", "host=h|options=-c a=1"),
            ("postgres://u:a+b@h", "user=u|password=a+b|host=h"),
        ] {
            assert_eq!(pairs(text), expected, "{text}");
        }
    }

    #[test]
    fn key_value() {
        for (text, expected) in [
            ("", ""),
            ("host=h port = 5433", "host=h|port=5433"),
            ("password='a b' user=u", "password=a b|user=u"),
            (r"password='%I\\GYg-7a@:/?#{y ' user=u", r"password=%I\GYg-7a@:/?#{y |user=u"),
            (r"password=a\ b\'c", "password=a b'c"),
            (r"password='it\'s'", "password=it's"),
            ("password= user=u", "password=user=u"),
            ("password='' user=u", "password=|user=u"),
            ("password=a://b", "password=a://b"),
        ] {
            assert_eq!(pairs(text), expected, "{text}");
        }
    }

    #[test]
    fn mistakes_never_show_the_password() {
        for text in [
            "postgres://u:s3cret/x@h/d",
            "postgres://u:12/s3cret@h/d",
            "postgres://u:s3cret@x@h/d",
            "postgres://u:s3cret%zz@h/d",
            "postgres://u:s3cret%2@h/d",
            "postgres://u:s3cret%00@h/d",
            "postgres://u:s3cret%ff@h/d",
            "postgres://u:p@h:s3cret/d",
            "postgres://u:p@[::1/s3cret",
            "postgres://u:p@h/d?s3cret",
            "postgres://u:p@h/d?password=a=s3cret",
            "mysql://u:s3cret@h/d",
            "password=a s3cret",
            "password='s3cret",
            "s3cret",
        ] {
            let shown = pairs(text);
            assert!(shown.starts_with("error: "), "{text}: {shown}");
            assert!(!shown.contains("s3cret"), "{text}: {shown}");
        }
    }
}
