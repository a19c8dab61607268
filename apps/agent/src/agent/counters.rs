//! The agent's counters, in the format of Prometheus. No label contains an address, URL or
//! transfer.

use std::collections::BTreeMap;
use std::fmt::Write;

use d2tp_links::CostClass;

/// Bucket bounds of the slack at the end of a transfer, in seconds before its deadline.
const SLACK_S: [f64; 6] = [0.0, 60.0, 600.0, 3_600.0, 21_600.0, 86_400.0];
/// Bucket bounds of the silence at a switch between links, in seconds.
const SILENCE_S: [f64; 6] = [0.05, 0.1, 0.5, 1.0, 5.0, 60.0];

/// A histogram with upper bucket bounds.
#[derive(Debug)]
struct MetricHistogram {
    edges: [f64; 6],
    counts: [u64; 7],
    sum: f64,
}

impl MetricHistogram {
    fn new(edges: [f64; 6]) -> MetricHistogram {
        MetricHistogram {
            edges,
            counts: [0; 7],
            sum: 0.0,
        }
    }

    fn add(&mut self, value: f64) {
        let place = self.edges.iter().position(|edge| value <= *edge);
        self.counts[place.unwrap_or(self.edges.len())] += 1;
        self.sum += value;
    }

    fn write(&self, out: &mut String, name: &str) {
        let mut below = 0;
        for (edge, count) in self.edges.iter().zip(self.counts) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{le=\"{edge}\"}} {below}");
        }
        let all: u64 = self.counts.iter().sum();
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {all}");
        let _ = writeln!(out, "{name}_sum {}\n{name}_count {all}", self.sum);
    }
}

/// The agent's metrics.
#[derive(Debug)]
pub struct AgentCounters {
    bytes: BTreeMap<(&'static str, &'static str), u64>,
    leaked: u64,
    met: u64,
    missed: u64,
    ended: BTreeMap<&'static str, u64>,
    slack: MetricHistogram,
    silence: MetricHistogram,
    wakeups: BTreeMap<&'static str, u64>,
    avoidable: [u64; 2],
}

impl Default for AgentCounters {
    fn default() -> AgentCounters {
        AgentCounters {
            bytes: BTreeMap::new(),
            leaked: 0,
            met: 0,
            missed: 0,
            ended: BTreeMap::new(),
            slack: MetricHistogram::new(SLACK_S),
            silence: MetricHistogram::new(SILENCE_S),
            wakeups: [("look", 0), ("start", 0), ("retry", 0)].into(),
            avoidable: [0; 2],
        }
    }
}

fn word(class: CostClass) -> &'static str {
    match class {
        CostClass::Free => "free",
        CostClass::Metered => "metered",
        CostClass::Roaming => "roaming",
    }
}

impl AgentCounters {
    /// Counts payload that links of a class carried; `down`: to this device.
    pub fn carried(&mut self, class: CostClass, down: bool, bytes: u64) {
        let kind = if down { "download" } else { "upload" };
        *self.bytes.entry((word(class), kind)).or_default() += bytes;
    }

    /// Counts payload that was received more than once.
    pub fn repeated(&mut self, bytes: u64) {
        *self.bytes.entry(("any", "duplicate")).or_default() += bytes;
    }

    /// Counts payload that was carried against the policy.
    pub fn leaked(&mut self, bytes: u64) {
        self.leaked += bytes;
    }

    /// Counts the end of a transfer; `slack_s`: seconds before its deadline, negative after it.
    pub fn ended(&mut self, how: &'static str, met: Option<bool>, slack_s: Option<f64>) {
        *self.ended.entry(how).or_default() += 1;
        match met {
            Some(true) => self.met += 1,
            Some(false) => self.missed += 1,
            None => {}
        }
        if let Some(slack_s) = slack_s {
            self.slack.add(slack_s);
        }
    }

    /// Counts a switch to another link after this silence.
    pub fn switched(&mut self, silence_s: f64) {
        self.silence.add(silence_s);
    }

    /// Counts a wake-up while no byte moved: to `look` for links, to `start` on a metered one, to
    /// `retry`.
    pub fn woke(&mut self, what: &'static str) {
        *self.wakeups.entry(what).or_default() += 1;
    }

    /// Sets the avoidable metered bytes so far, by downloads and by uploads.
    pub fn avoidable(&mut self, bytes: [u64; 2]) {
        self.avoidable = bytes;
    }

    /// Renders every counter as Prometheus text; `statuses`: how many transfers are in each state.
    pub fn render(&self, statuses: &BTreeMap<&'static str, u64>) -> String {
        let mut out = String::new();
        let head = |name: &str, kind: &str, help: &str| {
            format!("# HELP {name} {help}\n# TYPE {name} {kind}\n")
        };
        out += &head(
            "cedos_bytes_total",
            "counter",
            "Payload carried, by class of link and kind.",
        );
        for ((class, kind), bytes) in &self.bytes {
            let _ = writeln!(
                out,
                "cedos_bytes_total{{class=\"{class}\",kind=\"{kind}\"}} {bytes}"
            );
        }
        out += &head(
            "cedos_leaked_bytes_total",
            "counter",
            "Payload carried on links that the policy forbids; must stay 0.",
        );
        let _ = writeln!(out, "cedos_leaked_bytes_total {}", self.leaked);
        out += &head(
            "cedos_deadlines_total",
            "counter",
            "Transfers that ended, by whether they were on time.",
        );
        let _ = writeln!(out, "cedos_deadlines_total{{outcome=\"met\"}} {}", self.met);
        let _ = writeln!(
            out,
            "cedos_deadlines_total{{outcome=\"missed\"}} {}",
            self.missed
        );
        out += &head(
            "cedos_transfers_ended_total",
            "counter",
            "Transfers that ended, by how.",
        );
        for (how, count) in &self.ended {
            let _ = writeln!(out, "cedos_transfers_ended_total{{how=\"{how}\"}} {count}");
        }
        out += &head("cedos_transfers", "gauge", "Transfers, by state.");
        for (standing, count) in statuses {
            let _ = writeln!(out, "cedos_transfers{{standing=\"{standing}\"}} {count}");
        }
        out += &head(
            "cedos_slack_seconds",
            "histogram",
            "Time left to the deadline when a transfer was whole.",
        );
        self.slack.write(&mut out, "cedos_slack_seconds");
        out += &head(
            "cedos_switch_seconds",
            "histogram",
            "Silence of a transfer when it moves to another link.",
        );
        self.silence.write(&mut out, "cedos_switch_seconds");
        out += &head(
            "cedos_wakeups_total",
            "counter",
            "Times the agent woke up although nothing moved, by cause.",
        );
        for (what, count) in &self.wakeups {
            let _ = writeln!(out, "cedos_wakeups_total{{for=\"{what}\"}} {count}");
        }
        out += &head(
            "cedos_avoidable_bytes_total",
            "counter",
            "Payload on metered links that free links could have carried in time, as it turned \
             out.",
        );
        for (kind, bytes) in ["download", "upload"].iter().zip(self.avoidable) {
            let _ = writeln!(
                out,
                "cedos_avoidable_bytes_total{{kind=\"{kind}\"}} {bytes}"
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_told_in_the_words_of_prometheus() {
        let mut meter = AgentCounters::default();
        meter.carried(CostClass::Free, true, 3);
        meter.carried(CostClass::Free, true, 4);
        meter.carried(CostClass::Metered, false, 5);
        meter.ended("done", Some(true), Some(90.0));
        meter.ended("done", Some(false), Some(-3.0));
        meter.switched(0.07);
        let text = meter.render(&BTreeMap::from([("waiting", 2)]));
        for line in [
            "cedos_bytes_total{class=\"free\",kind=\"download\"} 7",
            "cedos_bytes_total{class=\"metered\",kind=\"upload\"} 5",
            "cedos_leaked_bytes_total 0",
            "cedos_deadlines_total{outcome=\"met\"} 1",
            "cedos_deadlines_total{outcome=\"missed\"} 1",
            "cedos_transfers{standing=\"waiting\"} 2",
            "cedos_slack_seconds_bucket{le=\"0\"} 1",
            "cedos_slack_seconds_bucket{le=\"600\"} 2",
            "cedos_slack_seconds_bucket{le=\"+Inf\"} 2",
            "cedos_switch_seconds_bucket{le=\"0.1\"} 1",
        ] {
            assert!(
                text.lines().any(|told| told == line),
                "no {line} in\n{text}"
            );
        }
        // Every line is a comment, or a name and a number.
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (_, value) = line.rsplit_once(' ').expect("two words");
            assert!(value.parse::<f64>().is_ok(), "{line}");
        }
    }
}
