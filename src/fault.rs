//! Every way in which a delivery can fail, and what follows from it.
//!
//! One match ([`Failure::class`]) decides what a failure means for the row: nothing, a counted attempt, or its end.
//! Error codes are those of nats-server's `server/errors.json`, which are stable.

use std::borrow::Cow;

/// What a failure means for the event that met it, or, at the start, for the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Not the event's fault: hold, try again, count nothing.
    Transient,
    /// The event's own: count an attempt on its row, try again later.
    Poison,
    /// The event's own, and no later attempt can succeed: dead-letter it at once.
    Hopeless,
    /// The set-up's: end with a hint. No delivery fails so; a connection or a stream can.
    Fatal,
}

/// Why an event was not stored in the stream (or is not known to be).
///
/// `Display` may show a subject, which is made of row values: it belongs in the row, not in a log. [`Failure::code`]
/// and [`Failure::hint`] never show any.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It was not sent.
    #[error("the connection to NATS is down")]
    Disconnected,
    /// It was not sent.
    #[error("the connection to NATS takes no more messages: its queue is full")]
    SendQueueFull,
    /// None came for as long as one may take (`delivery.ack_timeout`).
    #[error("no acknowledgement in time: stored or not, the outcome is unknown")]
    AckTimeout,
    /// A 503 status. What lies behind it must be asked (`nats::stream::why_no_responders`).
    #[error("nobody answers for the subject (503 no responders)")]
    NoResponders,
    /// As the stream tells of itself.
    #[error("the stream has no leader")]
    NoLeader,
    /// It is off, or its cluster incomplete. With the server's words, like the next ones.
    #[error("JetStream is not available: {0}")]
    JetStreamUnavailable(String),
    /// It reached a limit under `discard: new` (10077).
    #[error("the stream is full: {0}")]
    StreamFull(String),
    /// Mostly a full or failing disk (10077 for another reason).
    #[error("the server could not store the message: {0}")]
    StoreFailed(String),
    /// A limit of JetStream's on the server, or of the account.
    #[error("the server or the account has no room left: {0}")]
    ResourcesExhausted(String),
    /// The server does not run it (10118, 10194).
    #[error("the stream is offline: {0}")]
    StreamOffline(String),
    /// Too much waits at the server (10167).
    #[error("the server takes no more requests at present: {0}")]
    TooManyRequests(String),
    /// The same message id is on its way through Raft (10158).
    #[error("the same event id is still being stored")]
    DuplicateInFlight,
    /// With its name (10059).
    #[error("stream {0:?} does not exist")]
    StreamMissing(String),
    /// It takes no messages ever again (10109).
    #[error("the stream is sealed")]
    StreamSealed,
    /// Under `discard_new_per_subject`.
    #[error("the stream holds as many messages of this subject as it may")]
    SubjectFull,
    /// Sizes in bytes, headers included; absent when the stream refused it, which does not tell them.
    #[error("the message is too large{}{}", size_text(*.size), limit_text(*.limit))]
    MessageTooLarge { size: Option<usize>, limit: Option<usize> },
    /// Bytes.
    #[error("the headers are too large{}: at most 65535 bytes are allowed", size_text(*.size))]
    HeadersTooLarge { size: Option<usize> },
    /// `action`: what the relay's user may not do, as `publish to`.
    #[error("permission denied to {action} {subject:?}")]
    PermissionDenied { action: &'static str, subject: String },
    /// What lay behind [`Failure::NoResponders`].
    #[error("no stream listens to subject {0:?}, though the relay's stream exists")]
    NoStreamForSubject(String),
    /// The acknowledgement is another stream's, or the stream's name did not match (10060).
    #[error("the subject belongs to another stream than {expected:?}{}", actual_text(.actual.as_deref()))]
    WrongStream { expected: String, actual: Option<String> },
    /// With what is wrong.
    #[error("the subject is not legal: {0}")]
    InvalidSubject(&'static str),
    /// Bytes.
    #[error("the subject is too long: {length} bytes, at most {limit} are allowed")]
    SubjectTooLong { length: usize, limit: usize },
    /// With the reason.
    #[error("the row cannot be an event: {0}")]
    Undecodable(String),
    /// With the reason.
    #[error("the event has no subject: {0}")]
    Unroutable(String),
    /// An error that tells of the stream's or the relay's settings, not of the message.
    #[error("the set-up does not allow it: {text} (error {code})")]
    SetUp { code: u64, text: String },
    /// A JetStream error that is none of the above: its status decides.
    #[error("the server refused it: {text} (status {status}, error {code})")]
    UnknownApi { status: u64, code: u64, text: String },
    /// With what is wrong.
    #[error("the server's answer is not understood: {0}")]
    UnknownAnswer(String),
}

fn limit_text(limit: Option<usize>) -> Cow<'static, str> {
    limit.map_or(Cow::Borrowed(": more than the stream allows"), |limit| {
        Cow::Owned(format!(": at most {limit} bytes are allowed, headers included"))
    })
}

fn size_text(size: Option<usize>) -> Cow<'static, str> {
    size.map_or(Cow::Borrowed(""), |size| Cow::Owned(format!(" ({size} bytes)")))
}

fn actual_text(actual: Option<&str>) -> Cow<'static, str> {
    actual.map_or(Cow::Borrowed(""), |actual| Cow::Owned(format!(": {actual:?}")))
}

impl Failure {
    /// What the failure means for its event. The only place that decides it.
    pub fn class(&self) -> Class {
        match self {
            Self::Disconnected
            | Self::SendQueueFull
            | Self::AckTimeout
            | Self::NoResponders
            | Self::NoLeader
            | Self::JetStreamUnavailable(_)
            | Self::StreamFull(_)
            | Self::StoreFailed(_)
            | Self::ResourcesExhausted(_)
            | Self::StreamOffline(_)
            | Self::TooManyRequests(_)
            | Self::DuplicateInFlight
            | Self::StreamMissing(_)
            | Self::UnknownAnswer(_)
            // Every event meets these alike: counting them would dead-letter the whole table for one wrong setting.
            | Self::StreamSealed
            | Self::SetUp { .. } => Class::Transient,
            Self::SubjectFull
            | Self::PermissionDenied { .. }
            | Self::NoStreamForSubject(_)
            | Self::WrongStream { .. } => Class::Poison,
            Self::MessageTooLarge { .. }
            | Self::HeadersTooLarge { .. }
            | Self::InvalidSubject(_)
            | Self::SubjectTooLong { .. }
            | Self::Undecodable(_)
            | Self::Unroutable(_) => Class::Hopeless,
            // A server's fault passes. A 4xx is about this request: other events may fare better, so it must not hold
            // them up; were it the same for all, the pipeline's bound on consecutive refusals stops the counting.
            Self::UnknownApi { status, .. } => match status {
                400..=499 if !matches!(status, 408 | 409 | 425 | 429) => Class::Poison,
                _ => Class::Transient,
            },
        }
    }

    /// A stable name, for the row's `error_code` and for metric labels.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::SendQueueFull => "send_queue_full",
            Self::AckTimeout => "ack_timeout",
            Self::NoResponders => "no_responders",
            Self::NoLeader => "no_leader",
            Self::JetStreamUnavailable(_) => "jetstream_unavailable",
            Self::StreamFull(_) => "stream_full",
            Self::StoreFailed(_) => "store_failed",
            Self::ResourcesExhausted(_) => "resources_exhausted",
            Self::StreamOffline(_) => "stream_offline",
            Self::TooManyRequests(_) => "too_many_requests",
            Self::DuplicateInFlight => "duplicate_in_flight",
            Self::StreamMissing(_) => "stream_missing",
            Self::StreamSealed => "stream_sealed",
            Self::SubjectFull => "subject_full",
            Self::MessageTooLarge { .. } => "message_too_large",
            Self::HeadersTooLarge { .. } => "headers_too_large",
            Self::PermissionDenied { .. } => "permission_denied",
            Self::NoStreamForSubject(_) => "no_stream_for_subject",
            Self::WrongStream { .. } => "wrong_stream",
            Self::InvalidSubject(_) => "invalid_subject",
            Self::SubjectTooLong { .. } => "subject_too_long",
            Self::Undecodable(_) => "undecodable",
            Self::Unroutable(_) => "unroutable",
            Self::SetUp { .. } => "set_up",
            Self::UnknownApi { .. } => "unknown_api_error",
            Self::UnknownAnswer(_) => "unknown_answer",
        }
    }

    /// What the operator can do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Disconnected => "the relay reconnects by itself; see that the servers of nats.url can be reached",
            Self::SendQueueFull | Self::AckTimeout => {
                "the server is slow or frozen, or the disk under JetStream fails; see nats-server's log"
            }
            Self::NoResponders => "see that the stream of nats.stream exists, has a leader and covers the subject",
            Self::NoLeader => "wait for the election to end; if it does not, see that a majority of the replicas runs",
            Self::JetStreamUnavailable(_) => "enable JetStream on the servers and for the account of the relay's user",
            Self::StreamFull(_) => {
                "purge the stream, raise its max_bytes or max_msgs, or set max_age; rows wait until then"
            }
            Self::StoreFailed(_) => "see nats-server's log: mostly a full or failing disk",
            Self::ResourcesExhausted(_) => {
                "raise the JetStream limits of the server or the account, or free some space"
            }
            Self::StreamOffline(_) => {
                "the server cannot run the stream (often after a downgrade); see nats-server's log"
            }
            Self::TooManyRequests(_) => "lower delivery.max_in_flight, or raise JetStream's limits on pending messages",
            Self::DuplicateInFlight => "nothing: it is sent again until the first copy is acknowledged",
            Self::StreamMissing(_) => {
                "make it (`outbox-relay stream apply`), or set nats.manage = \"create\" and restart the relay"
            }
            Self::StreamSealed => "a sealed stream takes no messages ever again: set nats.stream to another one",
            Self::SubjectFull => {
                "consume or purge the subject, raise max_msgs_per_subject, or unset discard_new_per_subject"
            }
            Self::MessageTooLarge { .. } => {
                "make the payload smaller (or store it elsewhere and send a reference), or raise max_payload on the \
                 servers and max_msg_size on the stream; then replay the dead letter"
            }
            Self::HeadersTooLarge { .. } => "make the row's headers smaller; then replay the dead letter",
            Self::PermissionDenied { .. } => "allow it to the relay's user in the permissions of the NATS account",
            Self::NoStreamForSubject(_) => "add the subject to the stream's subjects, or change route.subject",
            Self::WrongStream { .. } => {
                "take the subject out of the other stream and add it to nats.stream, or change route.subject"
            }
            Self::InvalidSubject(_) | Self::SubjectTooLong { .. } => {
                "change the values that route.subject is made of; then replay the dead letter"
            }
            Self::Undecodable(_) | Self::Unroutable(_) => "mend the row's values; then replay the dead letter",
            Self::SetUp { .. } => {
                "the stream or its settings do not fit: look at the error that the row or the log names"
            }
            Self::UnknownApi { .. } | Self::UnknownAnswer(_) => "look up the error in nats-server's documentation",
        }
    }

    /// Reads a JetStream API error: `status` as HTTP has them, `code` as in `server/errors.json`, and its text.
    pub fn from_api(status: u64, code: u64, text: &str) -> Self {
        let own = || text.to_owned();
        match code {
            10_077 if text.contains("per subject") => Self::SubjectFull,
            10_077 if text.contains("maximum messages exceeded") || text.contains("maximum bytes exceeded") => {
                Self::StreamFull(own())
            }
            10_077 => Self::StoreFailed(own()),
            // Account, server, consumers, memory, storage, in this order.
            10_002 | 10_023 | 10_026 | 10_028 | 10_047 => Self::ResourcesExhausted(own()),
            // Clustering: incomplete, not assigned, unavailable, not the leader. Off: server, account, no account.
            10_004 | 10_007 | 10_008 | 10_009 | 10_035 | 10_039 | 10_076 => Self::JetStreamUnavailable(own()),
            10_118 | 10_194 => Self::StreamOffline(own()),
            10_167 => Self::TooManyRequests(own()),
            10_158 => Self::DuplicateInFlight,
            10_054 => Self::MessageTooLarge { size: None, limit: None },
            10_097 => Self::HeadersTooLarge { size: None },
            10_059 => Self::StreamMissing(String::new()),
            10_060 => Self::WrongStream { expected: String::new(), actual: None },
            10_109 => Self::StreamSealed,
            // Subjects overlap; no limit present for the account; stream wants a header that the relay never sends.
            10_065 | 10_120 | 10_169 => Self::SetUp { code, text: own() },
            _ => Self::UnknownApi { status, code, text: own() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_suffers_is_transient() {
        for code in [10_077, 10_023, 10_047, 10_028, 10_002, 10_008, 10_118, 10_194, 10_167, 10_158, 10_059, 10_109] {
            // The status is not what decides: 10002 comes as 400.
            assert_eq!(Failure::from_api(400, code, "").class(), Class::Transient, "{code}");
        }
        let full = Failure::from_api(503, 10_077, "maximum bytes exceeded");
        assert_eq!((full.code(), full.class()), ("stream_full", Class::Transient));
        assert_eq!(Failure::from_api(503, 10_077, "no space left on device").code(), "store_failed");
    }

    #[test]
    fn what_the_message_suffers_is_its_own() {
        assert_eq!(Failure::from_api(400, 10_054, "").class(), Class::Hopeless);
        assert_eq!(Failure::from_api(400, 10_097, "").class(), Class::Hopeless);
        assert_eq!(Failure::from_api(400, 10_060, "").class(), Class::Poison);
        assert_eq!(
            Failure::from_api(503, 10_077, "maximum messages per subject exceeded").class(),
            Class::Poison,
            "a full subject must not hold up the others"
        );
    }

    #[test]
    fn unknown_errors_go_by_their_status() {
        for (status, class) in [
            (400, Class::Poison),
            (404, Class::Poison),
            (408, Class::Transient),
            (409, Class::Transient),
            (429, Class::Transient),
            (500, Class::Transient),
            (503, Class::Transient),
            (0, Class::Transient),
            (700, Class::Transient),
        ] {
            assert_eq!(Failure::from_api(status, 19_999, "new").class(), class, "{status}");
        }
    }
}
