//! Throughput against payload size and against the number of aggregates, as one picture.

use std::fmt::Write as _;

use crate::report::{Report, number};
use crate::scale::{AGGREGATES, PAYLOADS};

/// Of one panel's field, in pixels.
const FIELD: (f64, f64) = (280.0, 190.0);
const TOP: f64 = 40.0;
/// Powers of ten at the lower and at the upper end of the axis of events a second.
const DECADES: (i32, i32) = (2, 5);

/// Colours that can be read on a light and on a dark page.
const STYLE: &str = "text{font:12px system-ui,sans-serif;fill:#59636e}.title{font-weight:600}.grid{stroke:#8c959f55}
path{fill:none;stroke-width:2}.relay{stroke:#0969da}.reference{stroke:#8c959f;stroke-dasharray:5 4}
circle{fill:#0969da}@media(prefers-color-scheme:dark){text{fill:#9198a1}.relay{stroke:#4493f8}circle{fill:#4493f8}}";

/// The picture; `None` unless each of its cases was measured.
pub fn of(report: &Report) -> Option<String> {
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-10 0 750 290\" role=\"img\" \
         aria-label=\"Events a second against payload size and number of aggregates\"><style>{STYLE}</style>\n"
    );
    panel(&mut svg, 50.0, "events/s by payload", &points(report, &PAYLOADS, "payload ")?);
    panel(&mut svg, 430.0, "events/s by number of aggregates", &points(report, &AGGREGATES, "")?);
    svg.push_str(
        "<path class=\"relay\" d=\"M50 275h24\"/><text x=\"80\" y=\"279\">outbox-relay, complete</text>\n\
         <path class=\"reference\" d=\"M230 275h24\"/><text x=\"260\" y=\"279\">pg_recvlogical (reads only)</text>\n</svg>\n",
    );
    Some(svg)
}

struct Point {
    label: String,
    relay: f64,
    reference: f64,
}

fn points(report: &Report, cases: &[(&str, u64)], prefix: &str) -> Option<Vec<Point>> {
    let point = |(case, _): &(&str, u64)| {
        let label = case.trim_start_matches("scale/").trim_start_matches(prefix);
        Some(Point {
            label: label.trim_end_matches(" aggregates").trim_end_matches(" aggregate").to_owned(),
            relay: report.median(case, "events/s")?,
            reference: report.median(case, "pg_recvlogical, events/s")?,
        })
    };
    cases.iter().map(point).collect()
}

fn panel(svg: &mut String, left: f64, title: &str, points: &[Point]) {
    let (width, height) = FIELD;
    let _ = writeln!(svg, "<text class=\"title\" x=\"{left}\" y=\"20\">{title}</text>");
    for power in DECADES.0..=DECADES.1 {
        let y = at(10_f64.powi(power));
        let _ = writeln!(svg, "<path class=\"grid\" style=\"stroke-width:1\" d=\"M{left} {y:.1}h{width}\"/>");
        let label = ["100", "1,000", "10,000", "100,000"][(power - DECADES.0) as usize];
        let _ = writeln!(svg, "<text text-anchor=\"end\" x=\"{:.0}\" y=\"{:.1}\">{label}</text>", left - 4.0, y + 4.0);
    }
    let x = |index: usize| left + 25.0 + index as f64 * (width - 50.0) / (points.len() - 1) as f64;
    for (class, value) in
        [("reference", (|point| point.reference) as fn(&Point) -> f64), ("relay", |point| point.relay)]
    {
        let line = points.iter().enumerate().map(|(index, point)| format!("{:.1} {:.1}", x(index), at(value(point))));
        let _ = writeln!(svg, "<path class=\"{class}\" d=\"M{}\"/>", line.collect::<Vec<_>>().join("L"));
    }
    for (index, point) in points.iter().enumerate() {
        let (x, y) = (x(index), at(point.relay));
        let (label, relay) = (&point.label, number(point.relay));
        let _ = writeln!(svg, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>");
        let _ =
            writeln!(svg, "<text text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">{relay}</text>", x - 12.0, y + 18.0);
        let _ =
            writeln!(svg, "<text text-anchor=\"middle\" x=\"{x:.1}\" y=\"{:.0}\">{label}</text>", TOP + height + 18.0);
    }
}

/// Where a number of events a second stands.
fn at(value: f64) -> f64 {
    let (low, high) = (f64::from(DECADES.0), f64::from(DECADES.1));
    let part = ((value.max(1.0).log10() - low) / (high - low)).clamp(0.0, 1.06);
    TOP + FIELD.1 * (1.0 - part)
}
