//! Parts that follow from the settings alone, and the checks that they can be made.

use std::fmt::Display;

use super::RunError;
use crate::config::{Check, Secret, Settings};
use crate::flow::route::{CompensationRoute, Router, TemplateError};
use crate::postgres::connect::{ConnectInfoError, Target};
use crate::postgres::names;

/// The checks of settings that belong to the stages: what a stage would refuse is found before any is started.
pub const CHECKS: &[Check] = &[
    Check { keys: &["route.subject"], test: |settings| problem("route.subject", &router(settings)) },
    Check { keys: &["route.source"], test: |settings| problem("route.source", &router(settings)) },
    Check {
        keys: &["compensation.subject"],
        test: |settings| problem("compensation.subject", &CompensationRoute::new(&settings.compensation.subject)),
    },
    Check { keys: &["postgres.url", "postgres.password"], test: |settings| valid(&postgres_target(settings)) },
    Check {
        keys: &["postgres.replication_url", "postgres.password"],
        test: |settings| match settings.postgres.replication_url {
            Some(_) => valid(&direct_target(settings)),
            None => Ok(()),
        },
    },
    Check { keys: &["source.table"], test: |settings| names::problem(&settings.source.table).map_or(Ok(()), Err) },
];

/// What is wrong with this key of those that make a route.
fn problem<T>(key: &str, made: &Result<T, TemplateError>) -> Result<(), String> {
    match made {
        Err(mistake) if mistake.key == key => Err(mistake.problem.clone()),
        _ => Ok(()),
    }
}

fn valid<T, E: Display>(made: &Result<T, E>) -> Result<(), String> {
    made.as_ref().map(|_| ()).map_err(ToString::to_string)
}

/// What gives events their subjects.
///
/// # Errors
/// When a template, or the source's name, is wrong.
pub fn router(settings: &Settings) -> Result<Router, TemplateError> {
    let route = &settings.route;
    Router::new(&route.subject, route.cloudevents, &route.source, &settings.nats.stream)
}

/// A filter that covers every subject which `route.subject` can make.
///
/// # Errors
/// When the template is wrong.
pub fn subject_filter(settings: &Settings) -> Result<String, RunError> {
    router(settings).map(|router| router.subject_filter()).map_err(|mistake| RunError::Unusable(mistake.to_string()))
}

/// Where compensations are sent; `None`: they are not this relay's.
///
/// # Errors
/// When the template is wrong.
pub fn compensation_route(settings: &Settings) -> Result<Option<CompensationRoute>, TemplateError> {
    let compensation = &settings.compensation;
    compensation.enabled.then(|| CompensationRoute::new(&compensation.subject)).transpose()
}

/// Where the tables are.
///
/// # Errors
/// When the address cannot be read, or what it names does not exist.
pub fn postgres_target(settings: &Settings) -> Result<Target, ConnectInfoError> {
    target(settings, &settings.postgres.url)
}

/// Where PostgreSQL itself answers. A pooler passes neither replication on nor what a session sets for itself, so that
/// all connections of a running relay go here.
///
/// # Errors
/// As [`postgres_target`].
pub fn direct_target(settings: &Settings) -> Result<Target, ConnectInfoError> {
    target(settings, settings.postgres.replication_url.as_ref().unwrap_or(&settings.postgres.url))
}

fn target(settings: &Settings, url: &Secret) -> Result<Target, ConnectInfoError> {
    Target::parse(&url.0, settings.postgres.password.as_ref().map(|password| &*password.0))
}
