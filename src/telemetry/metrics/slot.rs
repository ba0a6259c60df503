//! What is measured of the replication slot. What is not known is absent.

use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::{Known, Label, add, known};

/// `pg_replication_slots.wal_status`; anything else counts as `unknown`.
const WAL_STATUS: [&str; 5] = ["reserved", "extended", "unreserved", "lost", "unknown"];

/// The slot, as the server told of it last.
#[derive(Clone, Debug)]
pub struct Slot {
    /// 1 while it is in use, otherwise 0.
    pub active: Known,
    /// Bytes of WAL since the position that it has confirmed.
    pub confirmed_lag: Known,
    /// Bytes of WAL that the server keeps for it.
    pub retained_wal: Known,
    /// How many bytes of WAL may be written before it is lost; no value when unlimited.
    pub safe_wal: Known,
    /// Standbys that may keep a copy of it; no value where none is wanted or possible.
    pub failover_standbys: Known,
    /// Standbys that it waits for and that are not there; no value where it waits for none.
    pub missing_standbys: Known,
    wal_status: Family<Label, Known>,
}

impl Slot {
    pub(super) fn new(r: &mut Registry) -> Self {
        Self {
            active: known(r, "slot_active", "Whether the slot is in use"),
            confirmed_lag: known(
                r,
                "slot_confirmed_lag_bytes",
                "WAL written since the position that the slot has confirmed",
            ),
            retained_wal: known(r, "slot_retained_wal_bytes", "WAL that the server keeps for the slot"),
            safe_wal: known(
                r,
                "slot_safe_wal_bytes",
                "WAL that can still be written before the slot may be lost; absent when unlimited",
            ),
            failover_standbys: known(
                r,
                "slot_failover_standbys",
                "Standbys that may keep a copy of the slot: of 0 it is certain; absent without failover or standbys",
            ),
            missing_standbys: known(
                r,
                "slot_missing_standbys",
                "Standbys of synchronized_standby_slots that are not there, so that the slot waits; absent when it names none",
            ),
            wal_status: add(
                r,
                "slot_wal_status",
                "Whether the server still keeps the WAL that the slot needs: 1 for the status that holds",
                Family::default(),
            ),
        }
    }

    /// Says which `wal_status` holds; `None` when it is not known, and then no status is reported.
    pub fn set_wal_status(&self, current: Option<&str>) {
        let known = current.map(|current| WAL_STATUS.into_iter().find(|name| *name == current).unwrap_or("unknown"));
        for name in WAL_STATUS {
            let gauge = self.wal_status.get_or_create_owned(&[("status", name)]);
            match known {
                Some(known) => gauge.set(if known == name { 1.0 } else { 0.0 }),
                None => gauge.unset(),
            }
        }
    }

    /// The `wal_status` that holds, as far as it is known.
    pub fn wal_status(&self) -> Option<&'static str> {
        let holds = |name: &&'static str| self.wal_status.get_or_create_owned(&[("status", *name)]).get() == Some(1.0);
        WAL_STATUS.into_iter().find(holds)
    }

    /// Forgets what was told of it. Only a slot that is lost stays lost, until another one is seen in its place.
    pub(super) fn forget(&self) {
        for known in [
            &self.active,
            &self.confirmed_lag,
            &self.retained_wal,
            &self.safe_wal,
            &self.failover_standbys,
            &self.missing_standbys,
        ] {
            known.unset();
        }
        if self.wal_status() != Some("lost") {
            self.set_wal_status(None);
        }
    }
}
