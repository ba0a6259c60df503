//! Standbys that commits or the relay wait for.

use super::chart::{Chart, Finding};
use super::parameters;
use crate::config::Source;
use crate::postgres::facts::{Server, Standbys};
use crate::postgres::remedies;
use crate::postgres::slot::detail::SlotDetail;

const AWAITED: &str = "synchronized_standby_slots";
const SYNCHRONOUS: &str = "synchronous_standby_names";

/// The slots that logical slots with `failover` wait for.
pub fn awaited(server: &Server) -> Vec<String> {
    let names = server.text(AWAITED).split(',').map(|name| name.trim().trim_matches('"').to_owned());
    names.filter(|name| !name.is_empty()).collect()
}

/// Looks at the standbys.
pub fn judge(standbys: &Standbys, slot: Option<&SlotDetail>, server: &Server, source: &Source, chart: &mut Chart) {
    chart.area("Standbys");
    chart.check("standby-slots", stalled(standbys, server));
    chart.check("standby-slots-unset", unset(standbys, slot, server));
    chart.check("slot-copies", uncopied(standbys, slot.filter(|_| source.failover)));
    match standbys.synchronous {
        _ if server.text(SYNCHRONOUS).is_empty() => chart.check("synchronous-standby", None),
        Some(0) => {
            let problem = format!("commits wait for {:?}, and none of them is there", server.text(SYNCHRONOUS));
            let why = "no commit of a producer ends, and its events are sent before it does";
            let finding = Finding::error(SYNCHRONOUS, problem, why).mends(parameters::set(server, SYNCHRONOUS, ""));
            chart.check("synchronous-standby", [finding]);
        }
        Some(_) => chart.check("synchronous-standby", None),
        None => {
            let problem = "whether a standby that commits wait for is there may not be seen by the role";
            chart.unseen("synchronous-standby", SYNCHRONOUS, problem, Some(remedies::let_see(&server.role.name)));
        }
    }
}

/// A logical slot with `failover` sends nothing that these standbys have not received.
fn stalled(standbys: &Standbys, server: &Server) -> Vec<Finding> {
    let awaited = awaited(server);
    let why = "the server sends the relay nothing that this standby has not received: all events wait";
    let found = |names: &[String], what: &str| {
        let finding = |name: &String| {
            let others: Vec<&str> = awaited.iter().filter(|other| *other != name).map(String::as_str).collect();
            Finding::error(AWAITED, format!("it names slot {name}, {what}"), why).mends(parameters::set(
                server,
                AWAITED,
                &others.join(", "),
            ))
        };
        names.iter().map(finding).collect::<Vec<_>>()
    };
    let mut findings = found(&standbys.missing, "which does not exist");
    findings.extend(found(&standbys.idle, "which no standby uses"));
    findings
}

fn unset(standbys: &Standbys, slot: Option<&SlotDetail>, server: &Server) -> Option<Finding> {
    let fails_over = slot.is_some_and(|slot| slot.failover == Some(true));
    (fails_over && awaited(server).is_empty() && !standbys.physical.is_empty()).then(|| {
        let why = "an event may be sent whose transaction is lost in a failover";
        Finding::note(AWAITED, format!("it names none of the standbys' slots ({})", standbys.physical.join(", ")), why)
            .mends(parameters::set(server, AWAITED, &standbys.physical.join(", ")))
    })
}

fn uncopied(standbys: &Standbys, slot: Option<&SlotDetail>) -> Option<Finding> {
    let slot = slot.filter(|slot| slot.failover == Some(true) && standbys.copies.kept == Some(0))?;
    let why = "after a failover there is no slot: the relay makes it anew, and reads waiting rows from the table first";
    Some(
        Finding::warning(format!("slot {}", slot.name), "no standby keeps a copy of it (source.failover)", why)
            .step(
                "on the standby: sync_replication_slots = on, hot_standby_feedback = on, primary_slot_name = its physical slot, \
                 and a dbname in primary_conninfo",
            )
            .setting("source.failover", false),
    )
}
