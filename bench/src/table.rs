//! Rounds combined into rows: medians, spread, ratios; as a table for people or as JSON.

use std::fmt;

use cedos_lab_scenario::TextTable;
use serde::Serialize;

use crate::median::median;
use crate::meter::MeterReport;

/// The peer to which ratios refer, if it was measured.
const REFERENCE: &str = "quinn";
/// If a process waited for a core for longer than this share of its window, it was disturbed.
const DISTURBED: f64 = 0.02;

/// The measurement of one peer in one round.
#[derive(Clone, Debug)]
pub struct BenchRound {
    /// What the sending process measured.
    pub sent: MeterReport,
    /// What the receiving process measured.
    pub received: MeterReport,
}

/// Every measurement of a run.
#[derive(Debug)]
pub struct BenchTable {
    title: String,
    networks: Vec<(&'static str, String)>,
    cells: Vec<(&'static str, &'static str, Vec<BenchRound>)>,
    failures: Vec<(&'static str, &'static str, String)>,
}

/// The machine-readable result.
#[derive(Debug, Serialize)]
pub struct BenchTableRows {
    rows: Vec<BenchTableRow>,
}

/// Medians of one peer on one network.
#[derive(Debug, Serialize)]
struct BenchTableRow {
    peer: &'static str,
    net: &'static str,
    /// Payload that arrived.
    gbps: f64,
    /// CPU-seconds per GB that the sender's transport accepted.
    snd_cpu_s_per_gb: f64,
    /// CPU-seconds per GB that arrived.
    rcv_cpu_s_per_gb: f64,
}

impl BenchTable {
    /// Creates an empty table with this title.
    pub fn new(title: String) -> Self {
        Self {
            title,
            networks: Vec::new(),
            cells: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Adds the description of a network.
    pub fn note_network(&mut self, name: &'static str, notes: String) {
        self.networks.push((name, notes));
    }

    /// Adds a measurement. Rows keep the order in which they first appear.
    pub fn add(&mut self, peer: &'static str, net: &'static str, round: BenchRound) {
        match self
            .cells
            .iter_mut()
            .find(|(p, n, _)| (*p, *n) == (peer, net))
        {
            Some((_, _, rounds)) => rounds.push(round),
            None => self.cells.push((peer, net, vec![round])),
        }
    }

    /// Adds a round without a result.
    pub fn add_failure(&mut self, peer: &'static str, net: &'static str, reason: String) {
        self.failures.push((peer, net, reason));
    }

    /// Peers that failed in every round on a network, as `peer over net`.
    pub fn never_measured(&self) -> Vec<String> {
        let mut absent: Vec<_> = self
            .failures
            .iter()
            .filter(|(peer, net, _)| !self.cells.iter().any(|(p, n, _)| (p, n) == (peer, net)))
            .map(|(peer, net, _)| format!("{peer} over {net}"))
            .collect();
        absent.dedup();
        absent
    }

    /// The medians as rows.
    pub fn rows(&self) -> BenchTableRows {
        let rows = self
            .cells
            .iter()
            .map(|(peer, net, rounds)| BenchTableRow::of(peer, net, rounds))
            .collect();
        BenchTableRows { rows }
    }
}

impl BenchTableRow {
    fn of(peer: &'static str, net: &'static str, rounds: &[BenchRound]) -> Self {
        Self {
            peer,
            net,
            gbps: median(rounds.iter().map(|r| r.received.gbps())),
            snd_cpu_s_per_gb: median(rounds.iter().map(|r| r.sent.cpu_s_per_gb())),
            rcv_cpu_s_per_gb: median(rounds.iter().map(|r| r.received.cpu_s_per_gb())),
        }
    }
}

impl fmt::Display for BenchTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let rows = self.rows().rows;
        for (net, notes) in &self.networks {
            writeln!(f, "\n{net}: {notes}")?;
            let mut table = TextTable::new([
                "",
                "Gb/s",
                "(min … max)",
                "CPU-s/GB →",
                "→ CPU-s/GB",
                "÷ quinn",
                "→ cost",
                "cost →",
            ]);
            let reference = rows.iter().find(|r| r.peer == REFERENCE && r.net == *net);
            for row in rows.iter().filter(|row| row.net == *net) {
                let rounds = self.rounds_of(row);
                let rates = || rounds.iter().map(|r| r.received.gbps());
                let against = |ours: f64, theirs: fn(&BenchTableRow) -> f64| {
                    reference.map_or("-".to_owned(), |r| format!("{:.2}", ours / theirs(r)))
                };
                table.row([
                    row.peer.to_owned(),
                    format!("{:.2}", row.gbps),
                    format!(
                        "({:.2} … {:.2})",
                        rates().fold(f64::INFINITY, f64::min),
                        rates().fold(0.0, f64::max)
                    ),
                    format!("{:.3}", row.snd_cpu_s_per_gb),
                    format!("{:.3}", row.rcv_cpu_s_per_gb),
                    against(row.gbps, |r| r.gbps),
                    against(row.snd_cpu_s_per_gb, |r| r.snd_cpu_s_per_gb),
                    against(row.rcv_cpu_s_per_gb, |r| r.rcv_cpu_s_per_gb),
                ]);
            }
            writeln!(f, "{}", table.to_text())?;
            for row in rows.iter().filter(|row| row.net == *net) {
                write_notes(f, row.peer, self.rounds_of(row))?;
            }
            for (peer, _, reason) in self.failures.iter().filter(|(_, n, _)| n == net) {
                writeln!(f, "    {peer}: a round FAILED: {reason}")?;
            }
        }
        Ok(())
    }
}

impl BenchTable {
    fn rounds_of(&self, row: &BenchTableRow) -> &[BenchRound] {
        self.cells
            .iter()
            .find(|(peer, net, _)| (*peer, *net) == (row.peer, row.net))
            .map_or(&[], |(_, _, rounds)| rounds)
    }
}

/// Writes the settings of the last round, the losses, and whether other load disturbed it.
fn write_notes(f: &mut fmt::Formatter<'_>, peer: &str, rounds: &[BenchRound]) -> fmt::Result {
    let Some(last) = rounds.last() else {
        return Ok(());
    };
    let mut notes: Vec<String> = [&last.sent.notes, &last.received.notes]
        .into_iter()
        .filter(|notes| !notes.is_empty())
        .cloned()
        .collect();
    let missing = median(
        rounds
            .iter()
            .map(|r| 1.0 - r.received.gbps() / r.sent.gbps()),
    );
    if missing > 0.01 {
        notes.push(format!(
            "{:.0} % of what was sent did not arrive",
            missing * 100.0
        ));
    }
    let waited = |of: fn(&BenchRound) -> &MeterReport| {
        median(rounds.iter().map(|r| of(r).waited_s / of(r).window_s))
    };
    let (sender, receiver) = (waited(|r| &r.sent), waited(|r| &r.received));
    if sender.max(receiver) > DISTURBED {
        notes.push(format!(
            "DISTURBED: waited for a core {:.0} % (sender) and {:.0} % (receiver) of the time",
            sender * 100.0,
            receiver * 100.0
        ));
    }
    writeln!(f, "    {peer}: {}", notes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(bytes: u64, cpu_s: f64) -> MeterReport {
        MeterReport {
            bytes,
            window_s: 1.0,
            cpu_s,
            ..MeterReport::default()
        }
    }

    fn round(gigabytes: u64) -> BenchRound {
        BenchRound {
            sent: report(2 * gigabytes * 1_000_000_000, 1.0),
            received: report(gigabytes * 1_000_000_000, 0.5),
        }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(median([4.0, 1.0, 3.0, 2.0].into_iter()), 2.5);
        assert_eq!(median([9.0, 1.0, 5.0].into_iter()), 5.0);
    }

    #[test]
    fn json_has_exactly_the_promised_members() {
        let mut table = BenchTable::new(String::new());
        table.add("udp", "lo1500", round(1));
        let json = serde_json::to_string(&table.rows()).expect("serialises");
        assert_eq!(
            json,
            r#"{"rows":[{"peer":"udp","net":"lo1500","gbps":8.0,"snd_cpu_s_per_gb":0.5,"rcv_cpu_s_per_gb":0.5}]}"#
        );
    }

    #[test]
    fn ratios_are_against_quinn_on_the_same_network() {
        let mut table = BenchTable::new(String::new());
        table.note_network("lo1500", String::new());
        for gigabytes in [3, 1, 2] {
            table.add("udp", "lo1500", round(4 * gigabytes));
            table.add("quinn", "lo1500", round(gigabytes));
        }
        let shown = table.to_string();
        let udp = shown
            .lines()
            .find(|line| line.trim_start().starts_with("udp "))
            .expect("a row for udp");
        assert_eq!(
            udp.split_whitespace().collect::<Vec<_>>(),
            [
                "udp", "64.00", "(32.00", "…", "96.00)", "0.062", "0.062", "4.00", "0.25", "0.25"
            ]
        );
    }

    #[test]
    fn a_failed_round_is_said_and_only_a_peer_without_any_is_absent() {
        let mut table = BenchTable::new(String::new());
        table.note_network("lo1500", String::new());
        table.add("quinn", "lo1500", round(1));
        table.add_failure("quinn", "lo1500", "gaps".to_owned());
        assert!(table.never_measured().is_empty());
        assert!(table.to_string().contains("quinn: a round FAILED: gaps"));
        table.add_failure("noq", "lo1500", "gaps".to_owned());
        table.add_failure("noq", "lo1500", "gaps".to_owned());
        assert_eq!(table.never_measured(), ["noq over lo1500"]);
    }

    #[test]
    fn bytes_that_did_not_arrive_are_said() {
        let mut table = BenchTable::new(String::new());
        table.note_network("lo1500", String::new());
        table.add("udp", "lo1500", round(1));
        assert!(
            table
                .to_string()
                .contains("50 % of what was sent did not arrive")
        );
    }
}
