//! The values of labels.

/// What became of a publish; labels of `publishes_total`.
pub mod outcome {
    /// The stream has it.
    pub const STORED: &str = "stored";
    /// The stream had it already.
    pub const DUPLICATE: &str = "duplicate";
    /// Not the event's fault: sent again.
    pub const TRANSIENT: &str = "transient";
    /// The event's own fault.
    pub const POISON: &str = "poison";
    pub(in super::super) const ALL: [&str; 4] = [STORED, DUPLICATE, TRANSIENT, POISON];
}

/// What rows were marked as; labels of `writeback_rows_total`.
pub mod status {
    /// Delivered, and kept.
    pub const COMPLETED: &str = "completed";
    /// Delivered, and deleted as `writeback.on_success` wants it.
    pub const DELETED: &str = "deleted";
    /// Waits for a retry.
    pub const FAILED: &str = "failed";
    /// Waits behind a failed row of its aggregate.
    pub const HELD: &str = "held";
    /// Never tried again by itself.
    pub const DEAD_LETTER: &str = "dead_letter";
    pub(in super::super) const ALL: [&str; 5] = [COMPLETED, DELETED, FAILED, HELD, DEAD_LETTER];
}

/// What became of attempts at compensations; labels of `compensations_total`.
pub mod compensation {
    /// A service has done it.
    pub const RESOLVED: &str = "resolved";
    /// Counted; another attempt follows.
    pub const FAILED: &str = "failed";
    /// Not counted: NATS was away, or the relay stopped.
    pub const RETURNED: &str = "returned";
    /// The attempts are used up.
    pub const MANUAL_REQUIRED: &str = "manual_required";
    pub(in super::super) const ALL: [&str; 4] = [RESOLVED, FAILED, RETURNED, MANUAL_REQUIRED];
}

/// Servers; labels of `reconnects_total`.
pub mod peer {
    /// PostgreSQL.
    pub const POSTGRES: &str = "postgres";
    /// NATS.
    pub const NATS: &str = "nats";
    pub(in super::super) const ALL: [&str; 2] = [POSTGRES, NATS];
}

/// Where a waiting row stands; labels of `outbox_rows`.
pub mod waiting {
    /// Waits for its turn, or for the time that its producer set.
    pub const PENDING: &str = "pending";
    /// Waits for a retry.
    pub const FAILED: &str = "failed";
    /// Waits behind a failed row of its aggregate.
    pub const HELD: &str = "held";
    pub(in super::super) const ALL: [&str; 3] = [PENDING, FAILED, HELD];
}
