//! The page on `/`: one document that needs nothing else. The server writes the present values into it, so that it can
//! be read without JavaScript; its script asks `/status` every two seconds and writes the same values into the same
//! places.
//!
//! Placeholders of `page.html`, each with the path of a value in [`Status`] and the form in which it is shown:
//!
//! | | |
//! |---|---|
//! | `{{path\|form}}` | the value, in an element that the script finds again |
//! | `{{=path\|form}}` | the value alone |
//! | `{{@name path\|form}}` | an attribute |
//! | `{{ul path}}` | a list of texts |
//! | `{{#path path\|form …}}` | the body of a table: a row for each item |

mod forms;

use std::fmt::Write as _;

use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use ring::rand::{SecureRandom, SystemRandom};
use serde_json::Value;

use crate::telemetry::status::Status;

const PAGE: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
const JS: &str = include_str!("page.js");

/// The page with these values.
pub fn render(status: &Status) -> Response {
    let mut random = [0; 16];
    let (Ok(()), Ok(values)) = (SystemRandom::new().fill(&mut random), serde_json::to_value(status)) else {
        return (StatusCode::INTERNAL_SERVER_ERROR, "the page cannot be made; see /status\n").into_response();
    };
    let nonce = random.iter().fold(String::new(), |nonce, byte| nonce + &format!("{byte:02x}"));
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers = [
        (header::CONTENT_SECURITY_POLICY, policy.as_str()),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers, Html(fill(&values, &nonce))).into_response()
}

fn fill(values: &Value, nonce: &str) -> String {
    let mut page = String::with_capacity(PAGE.len() + CSS.len() + JS.len() + 8192);
    let mut rest = PAGE;
    while let Some((text, behind)) = rest.split_once("{{") {
        let (placeholder, behind) = behind.split_once("}}").unwrap_or((behind, ""));
        page.push_str(text);
        match placeholder {
            "nonce" => page.push_str(nonce),
            "css" => page.push_str(CSS),
            "js" => page.push_str(JS),
            _ => put(&mut page, values, placeholder),
        }
        rest = behind;
    }
    page + rest
}

/// Writes one placeholder. Whatever stands in the values is escaped.
fn put(page: &mut String, values: &Value, placeholder: &str) {
    let written = if let Some(key) = placeholder.strip_prefix('=') {
        write!(page, "{}", shown(values, key))
    } else if let Some((name, key)) = placeholder.strip_prefix('@').and_then(|attribute| attribute.split_once(' ')) {
        write!(page, "data-set=\"{name} {key}\" {name}=\"{}\"", shown(values, key))
    } else if let Some(path) = placeholder.strip_prefix("ul ") {
        let texts: Vec<String> = items(values, path).map(|item| escaped(&forms::form("text", item))).collect();
        let list = if texts.is_empty() { String::new() } else { format!("<li>{}</li>", texts.join("</li><li>")) };
        write!(page, "<ul data-items=\"{path}\">{list}</ul>")
    } else if let Some((path, columns)) = placeholder.strip_prefix('#').and_then(|rows| rows.split_once(' ')) {
        write!(page, "<tbody data-rows=\"{path}\" data-columns=\"{columns}\">{}</tbody>", rows(values, path, columns))
    } else {
        write!(page, "<span data-key=\"{placeholder}\">{}</span>", shown(values, placeholder))
    };
    debug_assert!(written.is_ok(), "a string takes all that is written to it");
}

fn rows(values: &Value, path: &str, columns: &str) -> String {
    let mut rows = String::new();
    for item in items(values, path) {
        rows.push_str("<tr>");
        for key in columns.split(' ') {
            rows.extend(["<td>", &shown(item, key), "</td>"]);
        }
        rows.push_str("</tr>");
    }
    if rows.is_empty() {
        let columns = columns.split(' ').count();
        return format!("<tr><td colspan=\"{columns}\" class=\"none\">none</td></tr>");
    }
    rows
}

fn items<'a>(values: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    at(values, path).as_array().into_iter().flatten()
}

/// The value at `path|form`, in its form, escaped.
fn shown(values: &Value, key: &str) -> String {
    let (path, form) = key.split_once('|').unwrap_or((key, "text"));
    escaped(&forms::form(form, at(values, path)))
}

/// The value at a path such as `stages.0.total`; null where there is none.
fn at<'a>(values: &'a Value, path: &str) -> &'a Value {
    path.split('.').fold(values, |inner, step| match step.parse::<usize>() {
        Ok(place) => inner.get(place).unwrap_or(&Value::Null),
        Err(_) => inner.get(step).unwrap_or(&Value::Null),
    })
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            _ => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::health::{Condition, Health, Pulse};
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::status::Board;

    fn page(board: &Board) -> String {
        fill(&serde_json::to_value(board.status()).unwrap(), "N")
    }

    #[test]
    fn every_placeholder_names_a_value_and_a_form() {
        let board = Board::of_defaults(Health::default(), Pulse::default(), Metrics::new());
        board.health.note("event", "too large");
        board.metrics.dead_letters.of("too_large").inc();
        let values = serde_json::to_value(board.status()).unwrap();
        let check = |values: &Value, key: &str| {
            let (path, form) = key.split_once('|').unwrap_or((key, "text"));
            let (owner, name) = path.rsplit_once('.').unwrap_or(("", path));
            let owner = if owner.is_empty() { values } else { at(values, owner) };
            assert!(owner.get(name).is_some(), "no value at {path}");
            assert!(forms::NAMES.contains(&form), "no form {form}");
        };
        let mut seen = 0;
        for placeholder in PAGE.split("{{").skip(1).map(|rest| rest.split_once("}}").unwrap().0) {
            let plain = placeholder.trim_start_matches('=');
            match (plain.strip_prefix('@'), plain.strip_prefix('#')) {
                _ if ["nonce", "css", "js"].contains(&plain) => continue,
                (Some(attribute), _) => check(&values, attribute.split_once(' ').unwrap().1),
                (_, Some(rows)) => {
                    let (path, columns) = rows.split_once(' ').unwrap();
                    let first = items(&values, path).next().unwrap_or_else(|| panic!("no item at {path}"));
                    columns.split(' ').for_each(|key| check(first, key));
                }
                _ => check(&values, plain.strip_prefix("ul ").unwrap_or(plain)),
            }
            seen += 1;
        }
        assert!(seen > 40, "{seen}");
        assert!(!page(&board).contains("{{"));
    }

    #[test]
    fn what_is_shown_cannot_become_part_of_the_page() {
        let board = Board::of_defaults(Health::default(), Pulse::default(), Metrics::new());
        board.health.raise(Condition::Slot, "<script>alert(1)</script> & \"quoted' {{nonce}}");
        let page = page(&board);
        assert!(!page.contains("<script>alert"));
        let safe = "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &quot;quoted&#39; {{nonce}}";
        assert_eq!(page.matches(safe).count(), 2, "as a reason and as a fault");
        assert!(page.contains("<td>lasts</td><td>1</td><td>slot</td>"), "{page}");
    }
}
