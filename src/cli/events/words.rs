//! A row's state in words.

use super::super::human::span;
use crate::postgres::outbox::desk::EventStory;

/// What the row waits for, or what became of it. `before`: the row that it waits for, if it waits for one.
pub fn state(event: &EventStory, before: Option<&EventStory>) -> String {
    let row = &event.row;
    let behind = |id: Option<i64>| match (before, id) {
        (Some(before), _) => format!("behind event {}, which {}", before.row.id, cause(before)),
        (None, Some(id)) => format!("behind event {id}"),
        (None, None) => "behind an earlier event, whose turn is over: the relay releases it next".to_owned(),
    };
    match &*row.state {
        "pending" => format!("waits for the relay{}", for_so_long(row.age_seconds)),
        "scheduled" => match row.next_retry_seconds {
            Some(seconds) if seconds > 0.0 => format!("is to be delivered in {}, not before", span(seconds)),
            _ => "is due: the relay takes it next, in its aggregate's order".to_owned(),
        },
        "held" => format!("is held {}", behind(row.held_behind)),
        "failed" if event.behind.is_some() => format!("{}; it comes {}", cause(event), behind(event.behind)),
        "completed" => format!("was delivered {} ago", event.processed_seconds.map_or("some time".to_owned(), span)),
        "dead_letter" => format!(
            "dead letter after {} of {} attempts{}",
            row.retry_count,
            row.max_retries,
            event.dead_letter_reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default()
        ),
        _ => cause(event),
    }
}

/// Why others may wait for the row.
pub fn cause(event: &EventStory) -> String {
    let row = &event.row;
    match &*row.state {
        "failed" => {
            let next = match row.next_retry_seconds {
                Some(seconds) if seconds > 0.0 => format!("next attempt in {}", span(seconds)),
                _ => "the next attempt is due".to_owned(),
            };
            format!("failed {} of {} times, {next}", row.retry_count, row.max_retries)
        }
        "processing" => {
            let worker = event.locked_by.as_deref().unwrap_or("a poller");
            match row.next_retry_seconds {
                Some(seconds) if seconds > 0.0 => format!("is claimed by {worker}, for {} more", span(seconds)),
                _ => format!("was claimed by {worker}, whose lease has ended: it is due"),
            }
        }
        state => format!("is {state}"),
    }
}

fn for_so_long(seconds: Option<f64>) -> String {
    seconds.map(|seconds| format!(" since {}", span(seconds))).unwrap_or_default()
}
