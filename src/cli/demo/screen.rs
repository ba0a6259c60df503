//! What the demo prints on stdout: lines only, so that it reads the same in a file.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use super::ledger::{Arrival, Ledger, Summary};
use super::shop;

/// So many arrivals are shown one by one, then one line for every so many.
const EACH: usize = 30;
const THEN_EVERY: usize = 30;

const DIM: &str = "2";
const BOLD: &str = "1";
const GREEN: &str = "1;32";
const RED: &str = "1;31";

/// Where the demo prints.
#[derive(Debug)]
pub struct Screen<W> {
    out: W,
    coloured: bool,
}

impl Screen<io::Stdout> {
    /// Coloured on a terminal, unless `NO_COLOR` is set.
    pub fn new(out: io::Stdout) -> Self {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let coloured = out.is_terminal() && !unwanted && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self { out, coloured }
    }
}

impl<W: Write> Screen<W> {
    pub fn introduce(&mut self, postgres: &str, nats: &str) -> io::Result<()> {
        let (tenants, orders, events) = (shop::TENANTS.len(), shop::ORDERS, shop::EVENTS);
        let title = self.paint(BOLD, "A shop's orders, from PostgreSQL to NATS JetStream");
        let after = self.paint(BOLD, "AFTER");
        writeln!(
            self.out,
            "{title}\n\n\
             {tenants} tenants take {orders} orders at once. An order is 3 transactions with {events_per} events: placed \
             with its stock reserved,\nthen paid, then shipped. Producers call the SQL function enqueue_outbox_event in \
             their own transactions; the relay\nreads the write-ahead log and publishes to a stream; a plain NATS \
             subscriber shows what comes.\n\n\
             PostgreSQL  {postgres}\nNATS        {nats}\n\n\
             {after} is the time from the moment a producer sends COMMIT to the moment the subscriber has the event. \
             Both are read\nfrom the one clock of this process, so the commit itself is part of it.\n",
            events_per = events / orders,
        )?;
        let heading = line(["#", "AFTER", "TENANT", "SUBJECT", "AGGREGATE", "TRANSACTION"]);
        let heading = self.paint(DIM, &heading);
        writeln!(self.out, "{heading}")
    }

    /// Shows an event that has come, or now and then how many have.
    pub fn arrival(&mut self, arrival: &Arrival, subject: &str, ledger: &Ledger) -> io::Result<()> {
        let number = arrival.number;
        if number <= EACH {
            let place = arrival.place;
            let transaction = format!("{}, event {} of {}", place.transaction, place.event, place.of);
            let (number, after) = (number.to_string(), milliseconds(arrival.after));
            let text = line([&number, &after, &arrival.tenant, subject, &arrival.aggregate, &transaction]);
            return writeln!(self.out, "{text}");
        }
        if number.is_multiple_of(THEN_EVERY) || number == shop::EVENTS {
            let median = milliseconds(ledger.median());
            let text = format!("{number:>5} of {} have come; half of them within {median}", shop::EVENTS);
            let text = self.paint(DIM, &text);
            writeln!(self.out, "{text}")?;
        }
        Ok(())
    }

    pub fn summarise(&mut self, summary: &Summary) -> io::Result<()> {
        let statuses: Vec<String> = summary.statuses.iter().map(|(status, rows)| format!("{rows} {status}")).collect();
        let percentiles = |[half, most, all]: [Duration; 3]| {
            let [half, most, all] = [half, most, all].map(milliseconds);
            format!("p50 {half}   p99 {most}   max {all}")
        };
        writeln!(
            self.out,
            "\nsent          {} events in {} transactions, in {:.1} s\n\
             received      {} by the subscriber, {} more than once\n\
             stream        {} messages\n\
             outbox table  {}\n\
             COMMIT sent to received   {}\n\
             COMMIT sent to answered   {}\n",
            summary.sent,
            summary.transactions,
            summary.took.as_secs_f64(),
            summary.received,
            summary.surplus,
            summary.stored,
            if statuses.is_empty() { "empty".to_owned() } else { statuses.join(", ") },
            percentiles(summary.after),
            percentiles(summary.commit),
        )?;
        let verdict = match summary.verdict() {
            Ok(()) => self.paint(
                GREEN,
                "OK: every event came once, in the order of its aggregate, and its row is marked completed.",
            ),
            Err(problems) => self.paint(RED, &format!("FAILED: {problems}.")),
        };
        writeln!(self.out, "{verdict}")
    }

    fn paint(&self, style: &str, text: &str) -> String {
        if self.coloured { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

fn line([number, after, tenant, subject, aggregate, transaction]: [&str; 6]) -> String {
    format!("{number:>5}  {after:>10}  {tenant:<6}  {subject:<16}  {aggregate:<16}  {transaction}")
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1000.0)
}
