//! What the checks write down: findings with their mends, and what was fine.

use serde::Serialize;

use crate::postgres::facts::Platform;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The relay does not work with it.
    Error,
    /// It works, and will hurt.
    Warning,
    /// Worth knowing. What could not be seen is a note, too.
    Note,
}

/// One thing to do. They are done in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mend {
    /// `None`: on servers of one's own.
    pub platform: Option<Platform>,
    #[serde(flatten)]
    pub act: Act,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Act {
    /// SQL, in the outbox's database, as a role that may.
    Statement(String),
    /// For a shell.
    Command(String),
    /// A line of the relay's settings.
    Setting(String),
    /// What no line of text does.
    Step(String),
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    pub id: &'static str,
    pub severity: Severity,
    /// What it is about, by name.
    pub object: String,
    pub problem: String,
    /// Why it matters.
    pub why: String,
    pub mend: Vec<Mend>,
    /// The heading that it is printed under.
    #[serde(skip)]
    pub area: &'static str,
}

impl Finding {
    fn new(severity: Severity, object: impl Into<String>, problem: impl Into<String>, why: impl Into<String>) -> Self {
        let (object, problem, why) = (object.into(), problem.into(), why.into());
        Self { id: "", severity, object, problem, why, mend: Vec::new(), area: "" }
    }

    pub fn error(object: impl Into<String>, problem: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Severity::Error, object, problem, why)
    }

    pub fn warning(object: impl Into<String>, problem: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Severity::Warning, object, problem, why)
    }

    pub fn note(object: impl Into<String>, problem: impl Into<String>, why: impl Into<String>) -> Self {
        Self::new(Severity::Note, object, problem, why)
    }

    #[must_use]
    pub fn on(mut self, platform: Option<Platform>, act: Act) -> Self {
        self.mend.push(Mend { platform, act });
        self
    }

    #[must_use]
    pub fn sql(self, statement: impl Into<String>) -> Self {
        self.on(None, Act::Statement(statement.into()))
    }

    #[must_use]
    pub fn command(self, command: impl Into<String>) -> Self {
        self.on(None, Act::Command(command.into()))
    }

    /// A value is written in TOML as in JSON.
    #[must_use]
    pub fn setting(self, key: &str, value: impl Into<serde_json::Value>) -> Self {
        self.on(None, Act::Setting(format!("{key} = {}", value.into())))
    }

    #[must_use]
    pub fn step(self, step: impl Into<String>) -> Self {
        self.on(None, Act::Step(step.into()))
    }

    /// All of these, in their order.
    #[must_use]
    pub fn mends(mut self, mends: impl IntoIterator<Item = Mend>) -> Self {
        self.mend.extend(mends);
        self
    }
}

/// The result of an examination.
#[derive(Debug, Default)]
pub struct Chart {
    area: &'static str,
    platform: Option<Platform>,
    /// Whether the platform is known, so that other platforms' mends help nobody.
    platform_is_known: bool,
    pub findings: Vec<Finding>,
    /// What was looked at and is fine.
    pub checked: Vec<&'static str>,
}

impl Chart {
    /// What follows is about this.
    pub fn area(&mut self, area: &'static str) {
        self.area = area;
    }

    /// Where the server runs; `None`: nowhere that has mends of its own.
    pub fn platform(&mut self, platform: Option<Platform>) {
        self.platform = platform;
        self.platform_is_known = true;
    }

    /// Writes down what a check found; nothing: it is fine.
    pub fn check(&mut self, id: &'static str, found: impl IntoIterator<Item = Finding>) {
        let mut fine = true;
        for mut finding in found {
            (finding.id, finding.area) = (id, self.area);
            if self.platform_is_known {
                self.keep_own(&mut finding.mend);
            }
            self.findings.push(finding);
            fine = false;
        }
        if fine && !self.checked.contains(&id) {
            self.checked.push(id);
        }
    }

    /// Writes down that something could not be examined, and what would help.
    pub fn unseen(&mut self, id: &'static str, object: &str, reason: &str, mend: Option<String>) {
        let note = Finding::note(object, reason, "whether it is fine is not known");
        self.check(
            id,
            [match mend {
                Some(statement) => note.sql(statement),
                None => note,
            }],
        );
    }

    /// Adds what another chart says.
    pub fn append(&mut self, other: Self) {
        self.findings.extend(other.findings);
        self.checked.extend(other.checked);
        // What was fine in one place was not in another.
        let found: Vec<&str> = self.findings.iter().map(|finding| finding.id).collect();
        self.checked.retain(|id| !found.contains(id));
    }

    /// Whether there is more than notes.
    pub fn is_ill(&self) -> bool {
        self.findings.iter().any(|finding| finding.severity != Severity::Note)
    }

    /// Keeps the mends of the server's platform; where it has none of its own, those for every server.
    fn keep_own(&self, mend: &mut Vec<Mend>) {
        let own = self.platform.filter(|own| mend.iter().any(|mend| mend.platform == Some(*own)));
        mend.retain(|mend| mend.platform == own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(mut chart: Chart) -> Vec<Option<Platform>> {
        let finding = Finding::error("o", "p", "w").sql("a").on(Some(Platform::Rds), Act::Command("b".to_owned()));
        chart.check("id", [finding]);
        chart.findings.iter().flat_map(|finding| finding.mend.iter().map(|mend| mend.platform)).collect()
    }

    #[test]
    fn mends_of_the_servers_own_platform_are_kept() {
        let on = |platform| {
            let mut chart = Chart::default();
            chart.platform(platform);
            kept(chart)
        };
        assert_eq!(on(Some(Platform::Rds)), [Some(Platform::Rds)]);
        assert_eq!(on(Some(Platform::Azure)), [None]);
        assert_eq!(on(None), [None]);
        // A server that was not reached may be anyone's.
        assert_eq!(kept(Chart::default()), [None, Some(Platform::Rds)]);
    }

    #[test]
    fn notes_are_no_illness_and_a_fault_is_not_fine() {
        let mut chart = Chart::default();
        chart.check("a", [Finding::note("o", "p", "w")]);
        chart.check("b", None);
        assert!(!chart.is_ill());
        chart.check("c", [Finding::warning("o", "p", "w")]);
        assert!(chart.is_ill());
        assert_eq!(chart.checked, ["b"]);
    }
}
