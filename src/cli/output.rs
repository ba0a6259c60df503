//! What commands print on stdout: tables for people, JSON for programs.

use std::io::{self, StdoutLock, Write};

use serde::Serialize;

/// The form of a listing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Table,
    /// For programs: bytes and seconds are numbers, names of fields stay
    Json,
}

/// Prints one JSON document, with a line end.
pub fn json(out: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)
}

/// Prints one thing on stdout in the form that was asked for.
pub fn print<T: Serialize>(
    thing: &T,
    format: Format,
    table: impl FnOnce(&T, &mut StdoutLock<'static>) -> io::Result<()>,
) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match format {
        Format::Json => json(&mut out, thing),
        Format::Table => table(thing, &mut out),
    }
}

/// A dash where there is nothing.
pub fn or_dash(text: Option<impl ToString>) -> String {
    text.map_or_else(|| "-".to_owned(), |text| text.to_string())
}

#[derive(Serialize)]
struct Rows<'a, T> {
    rows: &'a [T],
}

/// Prints a list as JSON: an object, so that more can be said beside the rows one day.
pub fn rows_json<T: Serialize>(out: &mut impl Write, rows: &[T]) -> io::Result<()> {
    json(out, &Rows { rows })
}

/// Text from elsewhere, for a terminal: control characters, which could command it, are shown escaped.
pub fn clean(text: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(escape).collect()
}

/// Prints rows under a heading, each column as wide as its widest cell. Control characters are shown
/// escaped.
pub fn table<const N: usize>(out: &mut impl Write, heading: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let lines: Vec<[String; N]> = std::iter::once(heading.map(clean))
        .chain(rows.iter().map(|row| row.each_ref().map(|cell| clean(cell))))
        .collect();
    let mut widths = [0; N];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    for line in &lines {
        let cells = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_control_characters_escaped() {
        let mut out = Vec::new();
        let rows = [["é".to_owned(), "1".to_owned()], ["a\u{1b}[2J".to_owned(), String::new()]];
        table(&mut out, ["NAME", "N"], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "NAME        N\né           1\na\\u{1b}[2J\n");
    }
}
