//! The parameters of a connection string by name, filled up from the environment.

use std::collections::HashMap;
use std::path::PathBuf;
use std::str::FromStr;

use super::conninfo::{self, ConnectInfoError};
use super::error::quoted;

/// The parameters that mean something here, with libpq's environment variable for each.
const PARAMETERS: &[(&str, &str)] = &[
    ("application_name", "PGAPPNAME"),
    ("channel_binding", "PGCHANNELBINDING"),
    ("client_encoding", "PGCLIENTENCODING"),
    ("connect_timeout", "PGCONNECT_TIMEOUT"),
    ("dbname", "PGDATABASE"),
    ("fallback_application_name", ""),
    ("gssencmode", "PGGSSENCMODE"),
    ("host", "PGHOST"),
    ("hostaddr", "PGHOSTADDR"),
    ("keepalives", ""),
    ("keepalives_count", ""),
    ("keepalives_idle", ""),
    ("keepalives_interval", ""),
    ("load_balance_hosts", "PGLOADBALANCEHOSTS"),
    ("options", "PGOPTIONS"),
    ("passfile", "PGPASSFILE"),
    ("password", "PGPASSWORD"),
    ("port", "PGPORT"),
    ("ssl_min_protocol_version", "PGSSLMINPROTOCOLVERSION"),
    ("sslcert", "PGSSLCERT"),
    ("sslcertmode", "PGSSLCERTMODE"),
    ("sslkey", "PGSSLKEY"),
    ("sslmode", "PGSSLMODE"),
    ("sslnegotiation", "PGSSLNEGOTIATION"),
    ("sslrootcert", "PGSSLROOTCERT"),
    ("sslsni", "PGSSLSNI"),
    ("target_session_attrs", "PGTARGETSESSIONATTRS"),
    ("tcp_user_timeout", ""),
    ("user", "PGUSER"),
];

/// What a connection string is filled up from, so that tests need not touch the process.
pub(super) struct Environment<'a> {
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    pub os_user: Option<String>,
    pub home: Option<PathBuf>,
}

/// The pairs of the connection string over those of the environment.
pub(super) struct Values<'a> {
    given: HashMap<String, String>,
    environment: &'a Environment<'a>,
}

impl<'a> Values<'a> {
    pub(super) fn read(conninfo: &str, environment: &'a Environment<'a>) -> Result<Self, ConnectInfoError> {
        let given: HashMap<_, _> = conninfo::parse(conninfo)?.into_iter().collect();
        for key in given.keys() {
            if key == "replication" {
                return Err(ConnectInfoError::new(
                    "the connection parameter `replication` is set by the relay itself: leave it out",
                ));
            }
            if !PARAMETERS.iter().any(|(name, _)| name == key) {
                // What stands here may be a piece of a badly quoted password: show it only when it looks like a name.
                let name = key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_').then_some(key.as_str());
                return Err(ConnectInfoError::new(format!(
                    "the connection parameter `{}` is unknown or not supported",
                    name.unwrap_or("…")
                )));
            }
        }
        Ok(Self { given, environment })
    }

    /// A value, `None` when absent or empty. A parameter given as empty is not looked up in the environment.
    pub(super) fn text(&self, key: &str) -> Option<String> {
        let value = self.given.get(key).cloned().or_else(|| {
            let (_, variable) = PARAMETERS.iter().find(|(name, variable)| *name == key && !variable.is_empty())?;
            (self.environment.variable)(variable)
        });
        value.filter(|value| !value.is_empty())
    }

    pub(super) fn number<T: FromStr>(&self, key: &str) -> Result<Option<T>, ConnectInfoError> {
        self.text(key).map(|text| text.trim().parse().map_err(|_| bad(key, &text, "a whole number"))).transpose()
    }

    /// The value's meaning among those listed; the first when absent.
    pub(super) fn one_of<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T, ConnectInfoError> {
        let text = self.text(key);
        choices
            .iter()
            .find(|(name, _)| text.as_deref().is_none_or(|text| text == *name))
            .map(|(_, value)| *value)
            .ok_or_else(|| {
                let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
                bad(key, &text.unwrap_or_default(), &names.join(", "))
            })
    }

    pub(super) fn refuse_unless(&self, key: &str, allowed: &[&str]) -> Result<(), ConnectInfoError> {
        match self.text(key) {
            Some(text) if !allowed.contains(&text.to_ascii_lowercase().as_str()) => {
                Err(bad(key, &text, &allowed.join(", ")))
            }
            _ => Ok(()),
        }
    }
}

pub(super) fn bad(key: &str, value: &str, expected: &str) -> ConnectInfoError {
    ConnectInfoError::new(format!("the connection parameter `{key}` cannot be {}: it takes {expected}", quoted(value)))
}
