//! What keeps the server from removing log and dead rows.

use super::chart::{Chart, Finding};
use crate::config::Settings;
use crate::postgres::facts::{OpenTransaction, OtherSlot, Pins, Server};
use crate::postgres::remedies;

/// Looks at open transactions and at other slots.
pub fn judge(pins: &Pins, server: &Server, settings: &Settings, chart: &mut Chart) {
    chart.area("Log and dead rows");
    if pins.unseen > 0 && !server.role.sees_others {
        let problem = format!("the role may not see what {} other sessions do", pins.unseen);
        chart.unseen("long-transaction", "sessions", &problem, Some(remedies::let_see(&server.role.name)));
    } else {
        chart.check("long-transaction", pins.sessions.iter().filter_map(session));
    }
    chart.check("prepared-transaction", pins.prepared.iter().map(prepared));
    let most = i64::try_from(settings.source.max_retained_wal).unwrap_or(i64::MAX);
    let old = i32::try_from(server.number("autovacuum_freeze_max_age").unwrap_or(i64::MAX) / 4).unwrap_or(i32::MAX);
    chart.check("other-slot-wal", pins.slots.iter().filter(|slot| slot.retained > most).map(keeps_log));
    chart.check("other-slot-lost", pins.slots.iter().filter(|slot| slot.wal_status == "lost").map(lost));
    chart.check("other-slot-xmin", pins.slots.iter().filter(|slot| slot.xid_age > old).map(keeps_rows));
    let standbys = pins.standbys.iter().filter(|(_, age)| *age > old);
    chart.check(
        "standby-xmin",
        standbys.map(|(name, age)| {
            let problem = format!("it keeps dead rows of the last {age} transactions (hot_standby_feedback)");
            let why = "tables grow, the outbox's and the catalogue's alike";
            Finding::warning(format!("standby {name:?}"), problem, why)
                .step("end the long query that runs on the standby")
        }),
    );
}

fn session(open: &OpenTransaction) -> Option<Finding> {
    let pid = open.pid()?;
    let object =
        format!("process {pid} (application {:?}, user {:?}, database {:?})", open.name, open.user, open.database);
    let why = "the slot keeps the log since then, a new slot waits for its end, and no dead row goes";
    let problem = format!("its transaction is open for {:.0} s", open.age);
    Some(Finding::warning(object, problem, why).sql(remedies::terminate(pid)))
}

fn prepared(open: &OpenTransaction) -> Finding {
    let object = format!("prepared transaction {:?} (user {:?}, database {:?})", open.name, open.user, open.database);
    let why =
        "the slot keeps the log since then, and no dead row goes; if its outcome is to be kept, commit it instead";
    let problem = format!("it waits for its end for {:.0} s", open.age);
    Finding::warning(object, problem, why).sql(remedies::roll_back_prepared(&open.name))
}

fn other(slot: &OtherSlot) -> String {
    format!("slot {}", slot.name)
}

fn unless_needed(slot: &OtherSlot, finding: Finding) -> Finding {
    if slot.active {
        finding.step("see why its reader is behind")
    } else {
        finding.sql(remedies::drop_slot(&slot.name))
    }
}

fn keeps_log(slot: &OtherSlot) -> Finding {
    let used = if slot.active { "in use" } else { "not in use" };
    let problem = format!("it keeps {} bytes of log, and is {used}", slot.retained);
    unless_needed(slot, Finding::warning(other(slot), problem, "the log grows on the disk of the outbox's server"))
}

fn lost(slot: &OtherSlot) -> Finding {
    let why = "it is of no use to anybody, and takes one of max_replication_slots";
    unless_needed(slot, Finding::note(other(slot), "the server has given it up", why))
}

fn keeps_rows(slot: &OtherSlot) -> Finding {
    let problem = format!("it keeps dead rows of the last {} transactions", slot.xid_age);
    unless_needed(slot, Finding::warning(other(slot), problem, "tables grow, the outbox's and the catalogue's alike"))
}
