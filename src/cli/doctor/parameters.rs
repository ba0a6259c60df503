//! How parameters of a server are set, on servers of one's own and where someone else runs them.

use super::chart::{Act, Mend};
use crate::postgres::facts::{Platform, Server};
use crate::postgres::remedies;

/// Sets a parameter. Placeholders in capitals are the operator's to fill in.
pub fn set(server: &Server, name: &str, value: &str) -> Vec<Mend> {
    let restarts = !server.reloads(name);
    let mut mends: Vec<Mend> = vec![own(Act::Statement(remedies::set_parameter(name, value)))];
    mends.push(own(if restarts {
        Act::Step("restart PostgreSQL".to_owned())
    } else {
        Act::Statement(remedies::reload())
    }));
    mends.extend(clouds([(name, value); 3], restarts));
    mends
}

/// Turns logical decoding on, which has a name of its own in some places.
pub fn logical_decoding() -> Vec<Mend> {
    let mut mends = vec![
        own(Act::Statement(remedies::set_parameter("wal_level", "logical"))),
        own(Act::Step("restart PostgreSQL".to_owned())),
    ];
    let names = [("rds.logical_replication", "1"), ("cloudsql.logical_decoding", "on"), ("wal_level", "logical")];
    mends.extend(clouds(names, true));
    mends
}

fn own(act: Act) -> Mend {
    Mend { platform: None, act }
}

/// Name and value on RDS, Cloud SQL and Azure.
fn clouds(names: [(&str, &str); 3], restarts: bool) -> Vec<Mend> {
    let [rds, cloud_sql, azure] = names;
    let method = if restarts { "pending-reboot" } else { "immediate" };
    let mut mends = vec![(
        Platform::Rds,
        format!(
            "aws rds modify-db-parameter-group --db-parameter-group-name GROUP --parameters \
             'ParameterName={},ParameterValue={},ApplyMethod={method}'",
            rds.0, rds.1
        ),
    )];
    if restarts {
        mends.push((Platform::Rds, "aws rds reboot-db-instance --db-instance-identifier INSTANCE".to_owned()));
    }
    mends.push((
        Platform::CloudSql,
        // It replaces all flags, and restarts by itself where that is needed.
        format!(
            "gcloud sql instances patch INSTANCE --database-flags=OTHER_FLAGS_IN_USE,{}={}",
            cloud_sql.0, cloud_sql.1
        ),
    ));
    mends.push((
        Platform::Azure,
        format!(
            "az postgres flexible-server parameter set --resource-group GROUP --server-name SERVER --name {} --value {}",
            azure.0, azure.1
        ),
    ));
    if restarts {
        mends.push((
            Platform::Azure,
            "az postgres flexible-server restart --resource-group GROUP --name SERVER".to_owned(),
        ));
    }
    mends.into_iter().map(|(platform, command)| Mend { platform: Some(platform), act: Act::Command(command) }).collect()
}
