//! The replication slot, and what the relay noted about it.

use super::chart::{Chart, Finding};
use crate::config::Settings;
use crate::postgres::facts::Server;
use crate::postgres::outbox::StateRow;
use crate::postgres::remedies;
use crate::postgres::slot::detail::SlotDetail;

/// Unlike a statement of SQL, it notes first that rows may wait.
const CREATE: &str = "outbox-relay slot create";

/// Looks at the slot.
pub fn judge(
    slot: Option<&SlotDetail>,
    state: Option<&StateRow>,
    server: &Server,
    own_name: &str,
    settings: &Settings,
    chart: &mut Chart,
) {
    chart.area("Slot");
    chart.check("slot-missing", missing(slot, settings));
    if let Some(slot) = slot {
        judge_slot(&Named { slot, server, settings }, own_name, chart);
    }
    chart.check(
        "needs-drain",
        state.filter(|state| state.needs_drain).map(|_| {
            let why = "they are read from the table first when the relay takes the slot";
            Finding::note(object(settings), "rows may wait that the slot does not show", why)
        }),
    );
}

fn judge_slot(named: &Named<'_>, own_name: &str, chart: &mut Chart) {
    chart.check("slot-plugin", plugin(named));
    if named.slot.plugin.as_deref() != Some("pgoutput") {
        return;
    }
    chart.check("slot-database", database(named));
    chart.check("slot-temporary", temporary(named));
    chart.check("slot-two-phase", two_phase(named));
    chart.check("slot-synced", synced(named));
    chart.check("slot-lost", lost(named));
    chart.check("slot-endangered", endangered(named));
    chart.check("slot-lag", lag(named));
    chart.check("slot-holder", holder(named, own_name));
    chart.check("slot-failover", failover(named));
}

/// A slot with what is said of it.
struct Named<'a> {
    slot: &'a SlotDetail,
    server: &'a Server,
    settings: &'a Settings,
}

impl Named<'_> {
    fn error(&self, problem: impl Into<String>, why: &str) -> Finding {
        Finding::error(object(self.settings), problem, why)
    }

    fn warning(&self, problem: impl Into<String>, why: &str) -> Finding {
        Finding::warning(object(self.settings), problem, why)
    }

    fn note(&self, problem: impl Into<String>, why: &str) -> Finding {
        Finding::note(object(self.settings), problem, why)
    }

    /// Another slot in the place of this one. The relay makes its own where it may.
    fn anew(&self, finding: Finding) -> Finding {
        let dropped = finding.command("outbox-relay slot drop --yes");
        if self.settings.source.create { dropped } else { dropped.command(CREATE) }
    }
}

fn object(settings: &Settings) -> String {
    format!("slot {}", settings.source.slot)
}

fn missing(slot: Option<&SlotDetail>, settings: &Settings) -> Option<Finding> {
    if slot.is_some() {
        return None;
    }
    Some(if settings.source.create {
        let why = "the relay makes it when it starts, and reads the rows that wait from the table";
        Finding::note(object(settings), "it does not exist yet", why)
    } else {
        let why = "source.create = false keeps the relay from making it, so that it refuses to start";
        Finding::error(object(settings), "it does not exist", why).command(CREATE)
    })
}

fn plugin(named: &Named<'_>) -> Option<Finding> {
    let plugin = named.slot.plugin.as_deref();
    (plugin != Some("pgoutput")).then(|| {
        let kind = plugin.map_or_else(|| "a physical slot".to_owned(), |plugin| format!("a slot of {plugin}"));
        let finding = named.error(format!("it is {kind}, not of pgoutput"), "the relay refuses to start with it");
        finding.setting("source.slot", another(named))
    })
}

fn database(named: &Named<'_>) -> Option<Finding> {
    (!named.slot.here).then(|| {
        let finding = named.error("it belongs to another database", "the relay refuses to start with it");
        finding.setting("source.slot", another(named))
    })
}

/// A name like the slot's that a slot can have.
fn another(named: &Named<'_>) -> String {
    let name: String = named.settings.source.slot.chars().take(61).collect();
    format!("{name}_2")
}

fn temporary(named: &Named<'_>) -> Option<Finding> {
    named.slot.temporary.then(|| {
        let finding = named.error("it is temporary", "it ends with the session that made it, and only that can use it");
        match named.slot.active_pid {
            Some(pid) => finding.sql(remedies::terminate(pid)),
            None => named.anew(finding),
        }
    })
}

fn two_phase(named: &Named<'_>) -> Option<Finding> {
    named.slot.two_phase.then(|| {
        let why = "it shows transactions that are only prepared, which the relay does not understand";
        named.anew(named.error("it was made with two_phase", why))
    })
}

fn synced(named: &Named<'_>) -> Option<Finding> {
    (named.slot.synced == Some(true) && named.server.state.standby)
        .then(|| named.note("it is a standby's copy of the primary's slot", "it can be used after the failover only"))
}

fn lost(named: &Named<'_>) -> Option<Finding> {
    named.slot.is_lost().then(|| {
        let reason = named.slot.invalidation_reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        let problem = format!("the server has given it up{reason}");
        if named.settings.source.create {
            let why = "the relay makes it anew and reads the rows that wait from the table: see why it fell behind";
            return named.anew(named.warning(problem, why));
        }
        named.anew(named.error(problem, "the relay refuses to start, since source.create = false"))
    })
}

fn endangered(named: &Named<'_>) -> Option<Finding> {
    (named.slot.wal_status.as_deref() == Some("unreserved")).then(|| {
        let why = "the server gives it up at the next checkpoint unless the relay confirms before";
        named
            .error("it keeps more of the log than max_slot_wal_keep_size", why)
            .step("see that a relay runs and delivers; else raise max_slot_wal_keep_size for the time being")
    })
}

fn lag(named: &Named<'_>) -> Option<Finding> {
    let slot = named.slot;
    let lag = slot.lag_bytes.and_then(|lag| u64::try_from(lag).ok()).unwrap_or(0);
    let most = named.settings.source.max_retained_wal;
    (lag > most && !slot.is_lost()).then(|| {
        let held = if slot.active_pid.is_some() { "a relay holds it" } else { "no relay holds it" };
        let why = "the log grows on the server's disk until it is read";
        let problem = format!("{lag} bytes of log are unconfirmed, more than source.max_retained_wal ({most}); {held}");
        let finding = named.warning(problem, why);
        match slot.active_pid {
            Some(_) => finding.step("see in the relay's log what it waits for"),
            None => finding.command("outbox-relay run"),
        }
    })
}

/// `own_name`: what the relay's session calls itself.
fn holder(named: &Named<'_>, own_name: &str) -> Option<Finding> {
    let pid = named.slot.active_pid?;
    let text = |text: &'_ Option<String>| text.clone().unwrap_or_default();
    let (name, user) = (text(&named.slot.application_name), text(&named.slot.user));
    (name != own_name).then(|| {
        let problem = format!("process {pid} holds it: application {name:?}, user {user:?}");
        let why = "a relay stands by until it is free, and what that one confirms comes late, from the table";
        named.warning(problem, why).sql(remedies::terminate(pid))
    })
}

fn failover(named: &Named<'_>) -> Option<Finding> {
    let wanted = named.settings.source.failover && named.slot.failover == Some(false) && !named.slot.is_lost();
    wanted.then(|| {
        let why = "after a failover the slot is gone, and every waiting row is read from the table";
        let finding = named.warning("it does not survive a failover, though source.failover = true", why);
        finding.step("stop the relay, which must not hold the slot meanwhile").command(format!(
            "psql 'dbname={} replication=database' -c '{}'",
            named.server.database,
            remedies::fail_over(&named.settings.source.slot)
        ))
    })
}
