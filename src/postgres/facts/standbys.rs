//! Standbys, and the settings by which commits or the relay wait for them.

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Error};

use crate::postgres::slot::copies::{Copies, copies};

/// The standbys of a primary.
#[derive(Clone, Debug, Default)]
pub struct Standbys {
    /// Physical slots in use.
    pub physical: Vec<String>,
    /// Of the slots that were asked for: those that do not exist or are no physical ones.
    pub missing: Vec<String>,
    /// And those that no standby uses.
    pub idle: Vec<String>,
    /// Standbys that commits wait for; `None` when the role may not see it.
    pub synchronous: Option<i64>,
    /// What is seen of copies of the relay's slot.
    pub copies: Copies,
}

impl Standbys {
    /// Looks at the standbys. `awaited`: the slots of `synchronized_standby_slots`. `own`: the relay's slot.
    pub async fn read(client: &Client, awaited: &[String], own: &str, sees_others: bool) -> Result<Self, Error> {
        let physical = "SELECT slot_name::text, active FROM pg_replication_slots WHERE slot_type = 'physical'";
        let slots: Vec<(String, bool)> = client
            .query_typed(physical, &[])
            .await?
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect::<Result<_, Error>>()?;
        let state = |name: &str| slots.iter().find(|(slot, _)| slot == name).map(|(_, active)| *active);
        let those = |wanted: Option<bool>| awaited.iter().filter(|name| state(name) == wanted).cloned().collect();
        let synchronous = if sees_others {
            let statement = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = ANY ($1)";
            let kinds = ["sync", "quorum"];
            let rows = client.query_typed(statement, &[(&kinds.as_slice(), Type::TEXT_ARRAY)]).await?;
            rows.first().map(|row| row.try_get(0)).transpose()?
        } else {
            None
        };
        Ok(Self {
            physical: slots.iter().filter(|(_, active)| *active).map(|(name, _)| name.clone()).collect(),
            missing: those(None),
            idle: those(Some(false)),
            synchronous,
            copies: copies(client, own).await?,
        })
    }
}
