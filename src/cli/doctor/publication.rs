//! The publication.

use super::chart::{Chart, Finding};
use crate::config::Settings;
use crate::postgres::publication::{PublicationFault, PublicationFlaw};

/// Looks at the publication. `may_publish`: whether the relay can make it.
pub fn judge(
    checked: &Result<Vec<PublicationFlaw>, PublicationFault>,
    may_publish: bool,
    settings: &Settings,
    chart: &mut Chart,
) {
    chart.area("Publication");
    let object = || format!("publication {}", settings.source.publication);
    let fault = checked.as_ref().err();
    let is_made = settings.source.create && may_publish;
    chart.check(
        "publication-missing",
        fault.filter(|fault| matches!(fault, PublicationFault::Missing(..))).map(|fault| {
            if is_made {
                return Finding::note(object(), "it does not exist yet", "the relay makes it when it starts");
            }
            let error = |why: &str| Finding::error(object(), "it does not exist", why);
            if may_publish {
                return error("source.create = false keeps the relay from making it, so that it refuses to start")
                    .command("outbox-relay publication create");
            }
            error("the relay cannot make it: its role must own the table and may CREATE in the database")
                .sql(fault.mend())
        }),
    );
    let fault_id = |fault: &PublicationFault| match fault {
        PublicationFault::Missing(..) => "publication-missing",
        PublicationFault::NoInserts(_) => "publication-no-inserts",
        PublicationFault::NoTable(..) => "publication-no-table",
        PublicationFault::Partitions(..) => "publication-partitions",
        PublicationFault::Columns(..) => "publication-columns",
    };
    for id in ["publication-no-inserts", "publication-no-table", "publication-partitions", "publication-columns"] {
        let found = fault.filter(|fault| fault_id(fault) == id).map(|fault| {
            let why = "the relay refuses to start with it: events would not come through it";
            Finding::error(object(), fault.problem(), why).sql(fault.mend())
        });
        chart.check(id, found);
    }
    let Ok(flaws) = checked else { return };
    let flaw_id = |flaw: &PublicationFlaw| match flaw {
        PublicationFlaw::AllTables(..) => "publication-all-tables",
        PublicationFlaw::MoreThanInserts(_) => "publication-operations",
        PublicationFlaw::OtherTables(..) => "publication-other-tables",
        PublicationFlaw::RowFilter(..) => "publication-row-filter",
    };
    for id in ["publication-all-tables", "publication-operations", "publication-other-tables", "publication-row-filter"]
    {
        let found = flaws.iter().filter(|flaw| flaw_id(flaw) == id);
        chart.check(id, found.map(|flaw| Finding::warning(object(), flaw.problem(), flaw.why()).sql(flaw.mend())));
    }
}
