//! What `doctor` prints.

use std::io::{self, Write};

use serde::Serialize;

use super::chart::{Act, Chart, Finding, Severity};
use crate::cli::output::{self, Format, clean};
use crate::postgres::facts::Platform;

#[derive(Serialize)]
struct Document<'a> {
    findings: &'a [Finding],
    checked: &'a [&'static str],
}

/// Prints the chart.
pub fn print(out: &mut impl Write, chart: &Chart, format: Format) -> io::Result<()> {
    match format {
        Format::Json => output::json(out, &Document { findings: &chart.findings, checked: &chart.checked }),
        Format::Table => table(out, chart),
    }
}

fn table(out: &mut impl Write, chart: &Chart) -> io::Result<()> {
    let mut area = "";
    for finding in &chart.findings {
        if finding.area != area {
            area = finding.area;
            writeln!(out, "{area}")?;
        }
        block(out, finding)?;
    }
    let count = |severity| chart.findings.iter().filter(|finding| finding.severity == severity).count();
    let (errors, warnings, notes) = (count(Severity::Error), count(Severity::Warning), count(Severity::Note));
    let fine = chart.checked.len();
    let mut mends = chart.findings.iter().flat_map(|finding| &finding.mend);
    if mends.any(|mend| matches!(&mend.act, Act::Command(text) if text.starts_with("outbox-relay "))) {
        writeln!(
            out,
            "run commands of outbox-relay with the settings of this one: the same --config, variables and flags"
        )?;
    }
    writeln!(out, "errors: {errors}, warnings: {warnings}, notes: {notes}; checks that found nothing: {fine}")
}

fn block(out: &mut impl Write, finding: &Finding) -> io::Result<()> {
    let severity = match finding.severity {
        Severity::Error => "ERROR",
        Severity::Warning => "WARNING",
        Severity::Note => "note",
    };
    writeln!(out, "  {severity}  {}  {}", finding.id, clean(&finding.object))?;
    writeln!(out, "    {}", clean(&finding.problem))?;
    writeln!(out, "    why: {}", clean(&finding.why))?;
    for mend in &finding.mend {
        let platform = match mend.platform {
            None => "",
            Some(Platform::Rds) => " on Amazon RDS",
            Some(Platform::CloudSql) => " on Cloud SQL",
            Some(Platform::Azure) => " on Azure",
        };
        let (kind, text, end) = match &mend.act {
            Act::Statement(text) => ("SQL", text, ";"),
            Act::Command(text) => ("shell", text, ""),
            Act::Setting(text) => ("settings of the relay", text, ""),
            Act::Step(text) => ("by hand", text, ""),
        };
        writeln!(out, "    mend{platform}, {kind}:")?;
        writeln!(out, "      {}{end}", clean(text))?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mend_stands_on_a_line_of_its_own() {
        let mut chart = Chart::default();
        chart.area("Slot");
        let finding = Finding::error("slot \"s\u{1b}\"", "it is gone", "nothing is read").sql("VACUUM").step("wait");
        chart.check("slot-gone", [finding]);
        chart.check("fine", None);
        let mut out = Vec::new();
        print(&mut out, &chart, Format::Table).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "Slot\n  ERROR  slot-gone  slot \"s\\u{1b}\"\n    it is gone\n    why: nothing is read\n    mend, SQL:\n      \
             VACUUM;\n    mend, by hand:\n      wait\n\nerrors: 1, warnings: 0, notes: 0; checks that found nothing: 1\n"
        );
    }
}
