//! The screen.

use std::io::{self, IsTerminal, Write};

use serde_json::Value;

use super::report::{Nats, Postgres, Relay, Report, Rows, Slot, State, Verdict};
use crate::cli::human::{age, bytes};
use crate::cli::output;
use crate::postgres::outbox::Tally;

const LABEL: usize = 22;

/// Whether stdout is a terminal that wants colours.
pub fn coloured() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The verdict, and what it is made of.
pub fn screen(out: &mut impl Write, report: &Report, coloured: bool) -> io::Result<()> {
    let (word, style) = match report.verdict {
        Verdict::Healthy => ("Healthy", "1;32"),
        Verdict::Attention => ("Attention", "1;33"),
        Verdict::Trouble => ("Trouble", "1;31"),
    };
    let what = match report.problems.as_slice() {
        [] => "a relay holds the slot, and nothing asks for you".to_owned(),
        problems => problems.iter().map(|problem| output::clean(problem)).collect::<Vec<_>>().join("\n  "),
    };
    let (on, off) = if coloured { (format!("\x1b[{style}m"), "\x1b[0m") } else { (String::new(), "") };
    writeln!(out, "{on}{word}{off}: {what}\n")?;
    for (label, text) in lines(report) {
        writeln!(out, "{label:<LABEL$}{}", output::clean(&text))?;
    }
    Ok(())
}

fn lines(report: &Report) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    postgres(&report.postgres, &mut |label, text| lines.push((label.to_owned(), text)));
    nats(&report.nats, &mut |label, text| lines.push((label.to_owned(), text)));
    relay(&report.relay, &mut |label, text| lines.push((label.to_owned(), text)));
    lines
}

fn postgres(postgres: &Postgres, line: &mut impl FnMut(&str, String)) {
    let version = postgres.version.as_deref().unwrap_or_default();
    line("PostgreSQL", if postgres.answers { format!("{version} answers") } else { "no connection".to_owned() });
    if let Some(slot) = &postgres.slot {
        line("  slot", slot_line(slot));
        if slot.exists && !slot.is_lost() {
            let bound = bytes(slot.max_retained_wal_bytes);
            line("  not confirmed", format!("{} of {bound} (source.max_retained_wal)", size(slot.confirmed_lag_bytes)));
            let keep = slot.max_slot_wal_keep_size_bytes;
            let bound = keep.map_or(", no limit".to_owned(), |keep| format!(" of {}", bytes(keep)));
            line("  retained", format!("{}{bound} (max_slot_wal_keep_size)", size(slot.retained_wal_bytes)));
        }
    }
    if let Some(rows) = &postgres.rows {
        rows_lines(rows, &postgres.table, line);
    }
    if let Some(letters) = &postgres.dead_letters {
        line("  dead letters", format!("unhandled: {}", tallies(letters)));
    }
    if let Some(compensations) = &postgres.compensations {
        line("  compensations", tallies(compensations));
    }
    if let Some(State { stream, stream_sequence, needs_drain, updated_at, .. }) = &postgres.state {
        let stream = stream.as_deref().unwrap_or("none yet");
        let reached = stream_sequence.map_or(String::new(), |sequence| format!(" to {sequence}"));
        let drain = if *needs_drain { "; a drain is wanted" } else { "" };
        line("  state", format!("stream {stream} followed{reached}{drain}; written {updated_at:.0}"));
    }
}

fn slot_line(slot: &Slot) -> String {
    let name = &slot.name;
    if !slot.exists {
        return format!("{name}: missing");
    }
    let status = slot.wal_status.as_deref().unwrap_or("unknown");
    let held = match (slot.active_pid, &slot.holder) {
        (Some(pid), Some(holder)) => format!("held by {holder:?}, pid {pid}"),
        (Some(pid), None) => format!("held by pid {pid}"),
        (None, _) => "held by nobody".to_owned(),
    };
    let lost = if slot.is_lost() { ": the server has removed log that it still needed" } else { "" };
    let confirmed = slot.confirmed_lsn.as_deref().map_or(String::new(), |lsn| format!("; confirmed {lsn}"));
    format!("{name}: {status}{lost}; {held}{confirmed}")
}

fn rows_lines(rows: &Rows, table: &str, line: &mut impl FnMut(&str, String)) {
    let total = rows.estimated_total.map_or("size not known".to_owned(), |total| format!("about {total} rows"));
    line("  table", format!("{table}: {total}"));
    let Rows { pending, scheduled, claimed, failed, held, .. } = rows;
    let mut text = format!("{pending} pending, {failed} failed, {held} held, {scheduled} scheduled, {claimed} claimed");
    if rows.at_least {
        text = format!("at least {text}");
    }
    if rows.newest_only {
        text += " (pending: of the newest 100000)";
    }
    line("  waiting", text);
    if let Some(oldest) = rows.oldest_waiting_seconds {
        line("  oldest waiting", age(oldest));
    }
}

fn nats(nats: &Nats, line: &mut impl FnMut(&str, String)) {
    let server = nats.server.as_deref().unwrap_or_default();
    line("NATS", if nats.answers { format!("{server} answers") } else { "no connection".to_owned() });
    match &nats.stream {
        Some(stream) => {
            let leader = if stream.has_leader { "has a leader" } else { "has no leader" };
            let (messages, size, last) = (stream.messages, bytes(stream.bytes), stream.last_sequence);
            line("  stream", format!("{}: {messages} messages, {size}, last sequence {last}; {leader}", stream.name));
        }
        None if nats.answers => line("  stream", "cannot be looked at".to_owned()),
        None => {}
    }
}

fn relay(relay: &Relay, line: &mut impl FnMut(&str, String)) {
    let text = match (&relay.address, &relay.status) {
        (None, _) => "not asked: admin.listen is off".to_owned(),
        (Some(address), None) => format!("no relay answers on {address}; it may run elsewhere"),
        (Some(address), Some(status)) => said(address, status),
    };
    line("Relay", text);
}

/// What a relay says of itself, in short.
fn said(address: &str, status: &Value) -> String {
    let text = |path| status.pointer(path).and_then(Value::as_str).unwrap_or("?");
    let number = |path| status.pointer(path).and_then(Value::as_f64);
    let up = number("/uptime_seconds").map_or(String::new(), |seconds| format!(", up {}", age(seconds)));
    let rate = number("/stages/2/per_second").map_or(String::new(), |rate| format!(", {rate:.1} events/s"));
    let within = number("/delivery/commit_to_ack_p99_seconds").map_or(String::new(), |seconds| {
        format!(", commit to acknowledgement within {:.1} ms for 99 of 100", seconds * 1000.0)
    });
    let (verdict, version, slot) = (text("/verdict"), text("/version"), text("/slot/name"));
    format!("{address}: {verdict} (version {version}, slot {slot}{up}){rate}{within}")
}

fn tallies(tallies: &[Tally]) -> String {
    if tallies.is_empty() {
        return "none".to_owned();
    }
    tallies.iter().map(|tally| format!("{} {}", tally.count, tally.name)).collect::<Vec<_>>().join(", ")
}

fn size(count: Option<u64>) -> String {
    count.map_or("not known".to_owned(), bytes)
}
