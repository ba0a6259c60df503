//! The outbox's tables: whether they are there, whole and usable, and what slows them down.

use super::chart::{Chart, Finding};
use crate::config::{OnSuccess, Settings, TableName};
use crate::postgres::facts::{Outbox, Relation, Trigger};
use crate::postgres::migrate::{ColdIndex, SchemaState};
use crate::postgres::remedies;

/// Percent above which a page has no room for the second version of each of its rows.
const FULL: i32 = 70;
/// Dead rows that a table may have whatever its size.
const DEAD: i64 = 10_000;
/// Transaction ids; a table is frozen by autovacuum at 200 million unless something is in its way.
const OLD: i32 = 500_000_000;

/// Looks at the right to use the schema. `grant`: the statement that is missing.
pub fn judge_usage(grant: Option<&String>, schema: &str, chart: &mut Chart) {
    let found = grant.map(|grant| {
        let why = "the relay refuses to start without it";
        Finding::error(format!("schema {schema:?}"), "the role may not use it", why).sql(grant)
    });
    chart.check("schema-usage", found);
}

/// Looks at the state of the schema. Whether there are tables to look at.
pub fn judge_state(state: &SchemaState, table: &TableName, chart: &mut Chart) -> bool {
    let is_fit = *state == SchemaState::Current;
    let found = (!is_fit).then(|| {
        let why = "the relay refuses to start with it";
        let finding = Finding::error(format!("table {}", table.plain()), state.problem(table), why);
        match state.mend() {
            Ok(command) => finding.command(command),
            Err(advice) => finding.step(advice),
        }
    });
    chart.check("schema-current", found);
    is_fit
}

/// Looks at the privileges.
pub fn judge_grants(grants: &[String], chart: &mut Chart) {
    let found = |grant: &String| {
        let what = grant.strip_prefix("GRANT ").and_then(|rest| rest.split_once(" ON "));
        let (privileges, object) = what.unwrap_or(("privileges", "a table"));
        let object = object.split(" TO ").next().unwrap_or(object);
        let why = "the relay refuses to start without it";
        Finding::error(format!("table {object}"), format!("the role lacks {privileges}"), why).sql(grant)
    };
    chart.check("grants", grants.iter().map(found));
}

/// Looks at the tables themselves.
pub fn judge(outbox: &Outbox, cold: &[ColdIndex], role: &str, settings: &Settings, chart: &mut Chart) {
    chart.check("row-security", outbox.hidden.iter().map(|table| hidden(table, role)));
    let deletes = settings.writeback.on_success == OnSuccess::Delete || settings.reconcile.retention.is_some();
    chart.check("triggers", outbox.triggers.iter().filter_map(|trigger| slow_trigger(trigger, deletes)));
    chart.check("sequence", sequence(outbox));
    chart.check("cold-index", cold.iter().map(cold_index));
    let each = |check: fn(&Relation) -> Option<Finding>| outbox.events.iter().filter_map(check);
    chart.check("table-unlogged", each(unlogged));
    chart.check("fillfactor", each(fillfactor));
    chart.check("replica-identity", each(identity));
    chart.check("table-autovacuum", each(autovacuum));
    chart.check("dead-rows", each(dead_rows));
    chart.check("table-age", each(age));
}

fn table(name: &str) -> String {
    format!("table {name}")
}

fn hidden(name: &str, role: &str) -> Finding {
    let why = "rows that the relay does not see are never delivered, or are taken for deleted";
    Finding::error(table(name), "row level security hides rows from the role", why)
        .sql(remedies::open_policy(name, role))
}

fn slow_trigger(trigger: &Trigger, deletes: bool) -> Option<Finding> {
    let object = format!("trigger {} of {}", trigger.name, trigger.table);
    let slow = if trigger.on_update {
        "it fires on UPDATE"
    } else if trigger.on_delete && deletes {
        "it fires on DELETE"
    } else if trigger.on_insert {
        let why = "what it changes in a new row is what the relay delivers";
        return Some(Finding::note(object, "it fires on INSERT", why));
    } else {
        return None;
    };
    let why = "it fires for every event that is written back, and its errors stop the relay";
    Some(Finding::warning(object, slow, why).sql(remedies::disable_trigger(&trigger.table, &trigger.name)))
}

fn sequence(outbox: &Outbox) -> Option<Finding> {
    let sequence = outbox.sequence.as_ref()?;
    (sequence.cache > 1 || sequence.increment < 1).then(|| {
        let problem = format!("CACHE {}, INCREMENT {}", sequence.cache, sequence.increment);
        let why = "ids do not rise with the inserts, and rows that come from the table come in the order of their ids";
        Finding::warning(format!("sequence {}", sequence.name), problem, why)
            .sql(remedies::plain_sequence(&sequence.name))
    })
}

fn cold_index(cold: &ColdIndex) -> Finding {
    let problem = format!("it covers or is conditioned on {}", cold.columns);
    let why = "every delivery changes that, so that its update is not HOT and costs about twice as much";
    Finding::warning(format!("index {}", cold.index), problem, why)
        .sql(remedies::drop_index(&cold.index, cold.partitioned))
}

fn unlogged(relation: &Relation) -> Option<Finding> {
    (!relation.logged).then(|| {
        Finding::error(table(&relation.name), "it is unlogged", "its rows are not in the log that the relay reads")
            .sql(remedies::set_logged(&relation.name))
    })
}

fn fillfactor(relation: &Relation) -> Option<Finding> {
    (relation.fillfactor > FULL).then(|| {
        let problem = format!("its fillfactor is {}", relation.fillfactor);
        let why = "pages have no room for the second version of their rows, so that few updates are HOT";
        Finding::warning(table(&relation.name), problem, why).sql(remedies::set_storage(
            &relation.name,
            "fillfactor",
            "50",
        ))
    })
}

fn identity(relation: &Relation) -> Option<Finding> {
    relation.full_identity.then(|| {
        let why = "each write-back logs the whole old row beside the new one";
        Finding::warning(table(&relation.name), "its replica identity is FULL", why)
            .sql(remedies::plain_identity(&relation.name))
    })
}

fn autovacuum(relation: &Relation) -> Option<Finding> {
    (!relation.autovacuum).then(|| {
        let why = "each delivery leaves a dead row behind, which nothing removes";
        Finding::warning(table(&relation.name), "autovacuum is off for it", why)
            .sql(remedies::reset_storage(&relation.name, "autovacuum_enabled"))
    })
}

fn dead_rows(relation: &Relation) -> Option<Finding> {
    (relation.dead > DEAD.max(relation.live)).then(|| {
        let problem = format!("{} dead rows beside {} live ones", relation.dead, relation.live);
        let why = "autovacuum does not keep up, or an old transaction or slot keeps it from removing them";
        Finding::warning(table(&relation.name), problem, why).sql(remedies::vacuum(&relation.name))
    })
}

fn age(relation: &Relation) -> Option<Finding> {
    (relation.xid_age > OLD).then(|| {
        let problem = format!("its oldest row is {} transactions old", relation.xid_age);
        let why = "nothing freezes its rows, and at 2,147 million the server takes no more writes";
        Finding::warning(table(&relation.name), problem, why).sql(remedies::freeze(&relation.name))
    })
}
