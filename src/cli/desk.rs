//! What the commands on events, dead letters and compensations have in common.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

use super::Failure;
use super::output::{self, Format};
use crate::postgres::outbox::desk::{End, Page};

/// The longest text of an error in a table.
const SHORT: usize = 60;

/// How a listing is cut into pages.
#[derive(clap::Args)]
pub struct Paging {
    /// Rows on a page
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    limit: u32,
    /// Go on behind this id: the last one of the page before
    #[arg(long, value_name = "ID")]
    pub after: Option<i64>,
    #[arg(long, value_enum, default_value_t)]
    pub output: Format,
}

impl Paging {
    pub fn limit(&self) -> usize {
        usize::try_from(self.limit).unwrap_or(usize::MAX)
    }
}

#[derive(Serialize)]
struct Listing<'a, T> {
    rows: &'a [T],
    next_after: Option<i64>,
}

/// Prints a page, and says on stderr how to go on behind it.
pub fn print_page<T: Serialize, const N: usize>(
    page: &Page<T>,
    format: Format,
    heading: [&str; N],
    cells: impl Fn(&T) -> [String; N],
) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match format {
        Format::Json => page_json(&mut out, page)?,
        Format::Table => output::table(&mut out, heading, &page.rows.iter().map(cells).collect::<Vec<_>>())?,
    }
    Ok(say_how_to_go_on(page.end)?)
}

/// The rows, and behind which id the next page begins (null: there is none).
fn page_json<T: Serialize>(out: &mut impl Write, page: &Page<T>) -> io::Result<()> {
    let next = match page.end {
        End::All => None,
        End::Full(id) | End::Patience(id) => Some(id),
    };
    output::json(out, &Listing { rows: &page.rows, next_after: next })
}

fn say_how_to_go_on(end: End) -> io::Result<()> {
    match end {
        End::All => Ok(()),
        End::Full(id) => writeln!(io::stderr(), "there may be more: --after {id}"),
        End::Patience(id) => {
            writeln!(io::stderr(), "only rows down to id {id} were looked at, the table is large: --after {id}")
        }
    }
}

/// `TYPE` or `TYPE/ID`. The id may have slashes.
#[derive(Clone, Debug)]
pub struct Aggregate {
    pub kind: String,
    pub id: Option<String>,
}

impl FromStr for Aggregate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, id) = text.split_once('/').map_or((text, None), |(kind, id)| (kind, Some(id.to_owned())));
        if kind.is_empty() || id.as_deref() == Some("") {
            return Err("expected TYPE or TYPE/ID".to_owned());
        }
        Ok(Self { kind: kind.to_owned(), id })
    }
}

/// Both parts of an aggregate that was named, or nothing.
pub fn parts(aggregate: Option<&Aggregate>) -> (Option<String>, Option<String>) {
    aggregate.map_or((None, None), |aggregate| (Some(aggregate.kind.clone()), aggregate.id.clone()))
}

pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "expected a duration such as 90s, 2h or 7d".to_owned())
}

/// The id of a dead letter or a compensation.
pub fn id(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "expected a number: `list` shows it in the column ID".to_owned())
}

/// What was done to one row.
#[derive(Debug, Serialize)]
pub struct Act {
    pub id: i64,
    pub event_id: Option<String>,
    /// A stable word for how the row is now; `left`: it is not as was asked for, and `detail` says why.
    pub outcome: &'static str,
    pub detail: Option<String>,
}

impl Act {
    pub fn left(id: i64, event_id: Option<String>, why: impl Into<String>) -> Self {
        Self { id, event_id, outcome: LEFT, detail: Some(why.into()) }
    }
}

/// What is said of a row that was put away before.
pub fn already(outcome: &str, at: Option<String>) -> String {
    format!("already {outcome}{}; what was noted then stays", at.map(|at| format!(" at {at}")).unwrap_or_default())
}

pub const LEFT: &str = "left";

/// Prints what was done. Rows that were left as they are make it a failure; of a single one the failure says all.
pub fn report(acts: &[Act], format: Format) -> Result<(), Failure> {
    let left = acts.iter().filter(|act| act.outcome == LEFT).count();
    let mut out = io::stdout().lock();
    match format {
        Format::Json => output::rows_json(&mut out, acts)?,
        Format::Table if acts.is_empty() => writeln!(io::stderr(), "nothing fits; nothing was done")?,
        Format::Table if acts.len() == left && left == 1 => {}
        Format::Table => {
            let detail = |act: &Act| act.detail.clone().unwrap_or_default();
            if acts.iter().any(|act| act.event_id.is_some()) {
                let event = |act: &Act| act.event_id.clone().unwrap_or_default();
                let rows = acts.iter().map(|act| [act.id.to_string(), event(act), act.outcome.to_owned(), detail(act)]);
                output::table(&mut out, ["ID", "EVENT ID", "OUTCOME", "DETAIL"], &rows.collect::<Vec<_>>())?;
            } else {
                let rows = acts.iter().map(|act| [act.id.to_string(), act.outcome.to_owned(), detail(act)]);
                output::table(&mut out, ["ID", "OUTCOME", "DETAIL"], &rows.collect::<Vec<_>>())?;
            }
        }
    }
    match acts {
        _ if left == 0 => Ok(()),
        [Act { id, detail: Some(why), .. }] => Err(Failure::Unfit(format!("{id} was left as it was: {why}"))),
        _ => Err(Failure::Unfit(format!("{left} of {} were left as they were; see why above", acts.len()))),
    }
}

/// An error that a function of ours raised, as one line; any other as it is.
pub fn refusal(error: tokio_postgres::Error) -> Failure {
    const OURS: [&str; 3] = ["OB002", "OB003", "P0002"];
    match error.as_db_error() {
        Some(raised) if OURS.contains(&raised.code().code()) => {
            Failure::Unfit(one_line(raised.message(), raised.hint()))
        }
        _ => Failure::Sql(error),
    }
}

fn one_line(message: &str, hint: Option<&str>) -> String {
    hint.map_or_else(|| message.to_owned(), |hint| format!("{message}. {}", hint.trim_end_matches('.')))
}

/// Names and values, one a line.
pub fn fields<const N: usize>(out: &mut impl Write, title: [&str; 2], fields: [(&str, String); N]) -> io::Result<()> {
    let known = fields.into_iter().filter(|(_, value)| !value.is_empty());
    let rows: Vec<[String; 2]> = known.map(|(name, value)| [name.to_owned(), value]).collect();
    output::table(out, title, &rows)
}

/// The code of an error and the beginning of its text.
pub fn short_error(code: Option<&str>, message: Option<&str>) -> String {
    let mut text = code.unwrap_or_default().to_owned();
    if let Some(message) = message {
        let _ = write!(text, "{}{message}", if text.is_empty() { "" } else { ": " }); // A String takes all.
    }
    shorten(&text)
}

pub fn shorten(text: &str) -> String {
    match text.char_indices().nth(SHORT) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_aggregate_is_named_by_its_type_or_also_by_its_id() {
        let both: Aggregate = "order/a/b".parse().unwrap();
        assert_eq!(parts(Some(&both)), (Some("order".to_owned()), Some("a/b".to_owned())));
        assert_eq!(parts("order".parse().ok().as_ref()), (Some("order".to_owned()), None));
        assert!("/a".parse::<Aggregate>().is_err() && "order/".parse::<Aggregate>().is_err());
    }

    #[test]
    fn long_errors_are_cut_between_characters() {
        assert_eq!(short_error(Some("poison"), None), "poison");
        assert_eq!(short_error(Some("a"), Some("b")), "a: b");
        assert_eq!(short_error(None, Some(&"é".repeat(90))), format!("{}…", "é".repeat(60)));
    }
}
