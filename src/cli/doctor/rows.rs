//! Rows that wait for someone.

use std::time::Duration;

use super::chart::{Chart, Finding};
use crate::postgres::facts::Rows;

/// Looks at the counts. `age`: for how long rows had to wait to be counted.
pub fn judge(rows: &Rows, table: &str, age: Duration, chart: &mut Chart) {
    chart.area("Rows");
    let age = humantime::format_duration(age);
    let some = |count: i64| (count > 0).then_some(count);
    chart.check(
        "dead-letters",
        some(rows.dead_letters).map(|count| {
            let why = "their events were not delivered, and will not be unless someone sees to them";
            Finding::warning("outbox_dead_letter", format!("{count} dead letters are not handled"), why)
                .command("outbox-relay dead-letters list")
                .step("replay or resolve each of them")
        }),
    );
    chart.check(
        "compensations-manual",
        some(rows.compensations).map(|count| {
            let why = "no service took them, and nothing is sent any more";
            Finding::warning("supply_batch_compensation", format!("{count} compensations want an operator"), why)
                .command("outbox-relay compensations list")
                .step("retry, resolve or abandon each of them")
        }),
    );
    chart.check(
        "rows-overdue",
        some(rows.overdue).map(|count| {
            let problem = format!("{count} rows are due for more than {age}");
            Finding::warning(format!("table {table}"), problem, "no relay runs, or it delivers nothing")
                .command("outbox-relay run")
        }),
    );
    chart.check(
        "rows-held",
        some(rows.held).map(|count| {
            let why = "each waits for an earlier event of its aggregate, which failed";
            Finding::note(format!("table {table}"), format!("{count} rows are held"), why)
        }),
    );
    match rows.waiting {
        None => {
            chart.unseen("rows-waiting", &format!("table {table}"), "counting its waiting rows took too long", None);
        }
        Some(count) => chart.check(
            "rows-waiting",
            some(count).map(|count| {
                let problem = format!("{count} rows wait for more than {age}");
                Finding::warning(format!("table {table}"), problem, "no relay runs, or it delivers nothing")
                    .command("outbox-relay run")
            }),
        ),
    }
}
