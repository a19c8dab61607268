//! A scenario file: links, flows, expectations, a seed. `docs/scenarios.md` documents every key.
//!
//! Files are strict: a key that is not known is an error that says which one was probably meant,
//! because a misspelt property that is silently ignored makes a result about something else.

use crate::acks::Acks;
use crate::crash::{Crash, Replay, hibernate_after_default};
use crate::origin::OriginKind;
use crate::properties::{Settings, table_with_properties};
use crate::transport::Transport;
use cedos_lab_link::trace::{self, Trace, TraceRow};
use cedos_lab_link::{Opportunities, Time};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Links a scenario has at most.
pub const LINKS_MAX: usize = 16;
/// Flows a scenario has at most.
pub const FLOWS_MAX: usize = 10_000;
/// The longest run: a month.
pub const DURATION_S_MAX: f64 = 31.0 * 86_400.0;
/// The longest name of a network interface. // IFNAMSIZ less the closing zero
pub const LINK_NAME_BYTES_MAX: usize = 15;

/// A scenario that cannot be used: the file's fault, or a file it names that cannot be read.
#[derive(Debug, Error)]
#[error("{file}: {fault}")]
pub struct ScenarioFault {
    /// The file at fault.
    pub file: String,
    /// What is wrong and what would be right.
    pub fault: String,
}

/// A scenario: links, transfers, and what happens to them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// A name for reports; the file's name if absent.
    #[serde(default)]
    pub name: String,
    /// What the scenario shows, in a sentence.
    #[serde(default)]
    pub about: String,
    /// All chance comes from it.
    #[serde(default = "seed_default")]
    pub seed: u64,
    /// When the run ends at the latest.
    pub duration_s: f64,
    /// Which web server the lab takes.
    #[serde(default)]
    pub origin: OriginKind,
    /// The links of the device, in order.
    #[serde(rename = "link")]
    pub links: Vec<Link>,
    /// Transfers.
    #[serde(default, rename = "flow")]
    pub flows: Vec<ScenarioFlow>,
    /// Generated handovers between the links.
    pub handover: Option<Handover>,
    /// How both ends send.
    #[serde(default)]
    pub transport: Transport,
    /// Idle time after which both ends hibernate.
    #[serde(default = "hibernate_after_default")]
    pub hibernate_after_s: f64,
    /// How D2TP acknowledges.
    #[serde(default)]
    pub acks: Acks,
    /// Crashes of either end.
    #[serde(default, rename = "crash")]
    pub crashes: Vec<Crash>,
    /// Packets that arrive once more.
    #[serde(default, rename = "replay")]
    pub replays: Vec<Replay>,
    /// What must hold of the report.
    #[serde(default, rename = "expect")]
    pub expectations: Vec<Expect>,
}

table_with_properties! {
    /// A link of the device.
    Link {
        /// Name of the interface, such as `wlan0`.
        name: String,
        /// What its bytes cost.
        #[serde(default)]
        class: Class,
        /// Which addresses it gives.
        #[serde(default)]
        family: Family,
        /// What it does to IPv4 addresses.
        #[serde(default)]
        nat: NatKind,
        /// How often a rebinding NAT forgets its mappings.
        nat_rebind_s: Option<f64>,
        /// How long a NAT keeps a mapping that nothing leaves by.
        nat_idle_s: Option<f64>,
        /// Time from joining to having an address.
        #[serde(default)]
        attach_s: f64,
        /// Whether it is attached when the run begins.
        #[serde(default = "yes")]
        up: bool,
        /// Whether it carries nothing although attached, when the run begins.
        #[serde(default)]
        dead: bool,
        /// The access point it is attached to when the run begins.
        join: Option<String>,
        /// Access points of the link.
        #[serde(default, rename = "access_point")]
        access_points: Vec<AccessPoint>,
        /// Changes at given times.
        #[serde(default)]
        at: Vec<At>,
        /// Changes that come again and again.
        #[serde(default)]
        repeat: Vec<Repeat>,
        /// A CSV trace, relative to the scenario file.
        trace: Option<String>,
        /// Which of the trace's links this is; needed if it has several.
        trace_iface: Option<String>,
        /// A CSV of `t_s,event,ap` beside the trace.
        trace_events: Option<String>,
        /// Where in the trace the run begins.
        #[serde(default)]
        trace_start_s: f64,
        /// Begin the trace again at its end, instead of keeping its last row.
        #[serde(default)]
        trace_repeat: bool,
        /// A Mahimahi trace instead of a rate towards the device.
        mahimahi_down: Option<String>,
        /// A Mahimahi trace instead of a rate from the device.
        mahimahi_up: Option<String>,
        /// What the trace files said.
        #[serde(skip)]
        recorded: Recorded,
    }
}

table_with_properties! {
    /// A network that a link may join.
    AccessPoint {
        /// Name of the access point.
        name: String,
        /// Received signal, for a device that chooses by it.
        signal_dbm: Option<f64>,
        /// Whether the access point lets devices join and carries nothing.
        #[serde(default)]
        dead: bool,
    }
}

table_with_properties! {
    /// A change at a time.
    At {
        /// When.
        t_s: f64,
        /// Attach or detach.
        up: Option<bool>,
        /// Carry nothing although attached, or carry again.
        dead: Option<bool>,
        /// Serve nothing and keep the queues, or serve again.
        stall: Option<bool>,
        /// Let nothing pass beyond the first hop, or let it pass again.
        cut: Option<bool>,
        /// Let no UDP pass beyond the first hop, or let it pass again.
        udp_blocked: Option<bool>,
        /// Answer HTTP as a captive portal and let nothing else pass, or let everything pass again.
        portal: Option<bool>,
        /// Get another address without losing the link.
        #[serde(default)]
        new_address: bool,
        /// The NAT forgets its mappings.
        #[serde(default)]
        rebind: bool,
        /// Leave the network and join this access point.
        join: Option<String>,
    }
}

table_with_properties! {
    /// A change that comes again and again.
    Repeat {
        /// Time from one to the next.
        every_s: f64,
        /// The first time; `every_s` if absent.
        first_s: Option<f64>,
        /// No more from then on.
        until_s: Option<f64>,
        /// How long it lasts; then what it changed is as in `[[link]]` again. For ever if absent.
        for_s: Option<f64>,
        /// Attach or detach.
        up: Option<bool>,
        /// Carry nothing although attached, or carry again.
        dead: Option<bool>,
        /// Serve nothing and keep the queues, or serve again.
        stall: Option<bool>,
        /// Let nothing pass beyond the first hop, or let it pass again.
        cut: Option<bool>,
        /// Let no UDP pass beyond the first hop, or let it pass again.
        udp_blocked: Option<bool>,
        /// Answer HTTP as a captive portal and let nothing else pass, or let everything pass again.
        portal: Option<bool>,
        /// Get another address without losing the link.
        #[serde(default)]
        new_address: bool,
        /// The NAT forgets its mappings.
        #[serde(default)]
        rebind: bool,
    }
}

/// What a link's bytes cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Nothing.
    #[default]
    Free,
    /// Something.
    Metered,
    /// A lot.
    Roaming,
}

impl Class {
    /// The word used in scenario files and reports.
    pub fn word(self) -> &'static str {
        match self {
            Class::Free => "free",
            Class::Metered => "metered",
            Class::Roaming => "roaming",
        }
    }
}

/// Which addresses a link gives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Family {
    /// IPv4 only.
    #[default]
    #[serde(rename = "v4")]
    V4,
    /// IPv6 only, and no way to IPv4.
    #[serde(rename = "v6")]
    V6,
    /// Both address families.
    #[serde(rename = "both")]
    Both,
    /// IPv6 only; IPv4 is reached through a NAT64 at `64:ff9b::/96`.
    #[serde(rename = "v6-only-nat64")]
    Nat64,
}

impl Family {
    /// Whether the device has an IPv4 address on the link.
    pub fn has_v4(self) -> bool {
        matches!(self, Family::V4 | Family::Both)
    }

    /// Whether the device has an IPv6 address on the link.
    pub fn has_v6(self) -> bool {
        !matches!(self, Family::V4)
    }
}

/// What a link does to IPv4 addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NatKind {
    /// Nothing: the device's address is seen from outside.
    None,
    /// Endpoint-independent mappings that last.
    #[default]
    Stable,
    /// A NAT that forgets all its mappings every `nat_rebind_s`.
    Rebinding,
}

/// Which way a flow's bytes go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// To the device.
    #[default]
    Down,
    /// From the device.
    Up,
}

/// Which links a flow may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Free links only.
    FreeOnly,
    /// Free ones; paid ones when the deadline needs them.
    #[default]
    FreeFirst,
    /// Paid ones where they help enough.
    Balanced,
    /// The fastest.
    Fast,
    /// Any at any time, free ones preferred.
    Any,
}

impl Policy {
    /// The word used in scenario files and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Policy::FreeOnly => "free-only",
            Policy::FreeFirst => "free-first",
            Policy::Balanced => "balanced",
            Policy::Fast => "fast",
            Policy::Any => "any",
        }
    }
}

/// A transfer.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioFlow {
    /// Its name in the report; its number, from 0, if empty.
    #[serde(default)]
    pub id: String,
    /// How many bytes; the origin makes them up from the seed. Either this or `url`.
    pub bytes: Option<u64>,
    /// Where to get it (lab only).
    pub url: Option<String>,
    /// Which way.
    #[serde(default)]
    pub direction: Direction,
    /// When it begins.
    #[serde(default)]
    pub start_s: f64,
    /// By when it must be done, in the run's time, not after its start.
    pub deadline_s: Option<f64>,
    /// Which links it may use.
    #[serde(default)]
    pub policy: Policy,
    /// Bytes it may spend on links that are not free.
    pub metered_bytes_max: Option<u64>,
    /// Whether the device ends its direction only after it read the other's end (simulator only).
    #[serde(default)]
    pub late_end: bool,
    /// Whether bytes are kept by their sender until they are safe at the receiver (simulator only).
    #[serde(default)]
    pub durable: bool,
    /// Whether its opening may travel in the first SYN (simulator only).
    #[serde(default)]
    pub early: bool,
    /// Whether the digest is compared with what the origin sent.
    #[serde(default = "yes")]
    pub integrity: bool,
}

/// Handovers drawn from the seed: one after another, each to the next of `links`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handover {
    /// The links, in turn; only the first is up at the beginning.
    pub links: Vec<String>,
    /// Shortest and longest time from one handover to the next.
    pub every_s: [f64; 2],
    /// Make before break: shortest and longest time both links are up.
    pub overlap_s: Option<[f64; 2]>,
    /// Break before make: shortest and longest time without any, the attaching not included.
    pub gap_s: Option<[f64; 2]>,
    /// Share of handovers that are make before break, if both kinds are given.
    #[serde(default = "half")]
    pub overlap_share: f64,
    /// No handover before.
    #[serde(default)]
    pub from_s: f64,
    /// No handover after; the end of the run if absent.
    pub until_s: Option<f64>,
}

/// What must hold of the report.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// An expression over the report that must be true.
    pub text: String,
}

/// What a link's trace files said.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// Rows of the CSV trace.
    pub rows: Vec<TraceRow>,
    /// Joining (an access point) and leaving (`None`).
    pub events: Vec<(Time, Option<String>)>,
    /// Delivery opportunities towards the device.
    pub down: Option<Opportunities>,
    /// Delivery opportunities from the device.
    pub upward: Option<Opportunities>,
}

fn seed_default() -> u64 {
    1
}

fn yes() -> bool {
    true
}

fn half() -> f64 {
    0.5
}

impl Scenario {
    /// Read a scenario file and the traces it names.
    ///
    /// # Errors
    /// A file that cannot be read or is not a scenario.
    pub fn load(path: &Path) -> Result<Scenario, ScenarioFault> {
        let folder = path.parent().map(PathBuf::from).unwrap_or_default();
        let text = read(path)?;
        let mut scenario = Scenario::parse(&path.display().to_string(), &text, &mut |name| {
            read(&folder.join(name))
        })?;
        if scenario.name.is_empty() {
            scenario.name = path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
        }
        Ok(scenario)
    }

    /// Read a scenario from `text`; `open` reads the traces it names. `file` is for messages.
    ///
    /// # Errors
    /// What is not a scenario, with the line where there is one; whatever `open` could not read.
    pub fn parse(
        file: &str,
        text: &str,
        open: &mut dyn FnMut(&str) -> Result<String, ScenarioFault>,
    ) -> Result<Scenario, ScenarioFault> {
        let at_fault = |fault: String| ScenarioFault {
            file: file.to_owned(),
            fault,
        };
        let mut scenario: Scenario =
            toml::from_str(text).map_err(|e| at_fault(crate::suggest::explain(&e)))?;
        for (number, flow) in scenario.flows.iter_mut().enumerate() {
            if flow.id.is_empty() {
                flow.id = number.to_string();
            }
        }
        scenario.check().map_err(at_fault)?;
        for link in &mut scenario.links {
            link.read_traces(open)?;
        }
        Ok(scenario)
    }

    /// The number of the link of this name.
    pub fn link_number(&self, name: &str) -> Option<usize> {
        self.links.iter().position(|link| link.name == name)
    }

    /// The largest round-trip time of any link as the run begins, without queueing.
    pub fn rtt_ms(&self) -> f64 {
        self.links
            .iter()
            .map(|link| link.settings().rtt_ms())
            .fold(0.0, f64::max)
    }
}

impl Link {
    /// The properties as the run begins, access point and Mahimahi traces included.
    pub(crate) fn settings(&self) -> Settings {
        self.settings_at(self.join.as_deref())
    }

    /// The properties when joined to this access point.
    pub(crate) fn settings_at(&self, access_point: Option<&str>) -> Settings {
        let mut settings = Settings::default();
        settings.apply(&self.properties());
        let rate = |o: &Opportunities| cedos_lab_link::Rate::Opportunities(o.clone());
        if let Some(o) = &self.recorded.down {
            settings.down = rate(o);
        }
        if let Some(o) = &self.recorded.upward {
            settings.upward = rate(o);
        }
        if let Some(ap) = self.access_point(access_point) {
            settings.apply(&ap.properties());
        }
        settings
    }

    pub(crate) fn access_point(&self, name: Option<&str>) -> Option<&AccessPoint> {
        self.access_points
            .iter()
            .find(|ap| Some(ap.name.as_str()) == name)
    }

    fn read_traces(
        &mut self,
        open: &mut dyn FnMut(&str) -> Result<String, ScenarioFault>,
    ) -> Result<(), ScenarioFault> {
        if let Some(file) = &self.trace {
            let at_fault = |fault: String| ScenarioFault {
                file: file.clone(),
                fault,
            };
            let trace = Trace::from_csv(&open(file)?).map_err(|e| at_fault(e.to_string()))?;
            let ifaces = trace.ifaces().collect::<Vec<_>>();
            let iface = match &self.trace_iface {
                Some(iface) => iface.as_str(),
                None if ifaces.len() == 1 => ifaces[0],
                None => {
                    let names = ifaces.join(", ");
                    return Err(at_fault(format!(
                        "has the links {names}: choose with trace_iface"
                    )));
                }
            };
            let rows = trace.rows(iface).ok_or_else(|| {
                at_fault(format!("has no link {iface}, only {}", ifaces.join(", ")))
            })?;
            self.recorded.rows = rows.to_vec();
        }
        if let Some(file) = &self.trace_events {
            self.recorded.events = events(&open(file)?).map_err(|fault| ScenarioFault {
                file: file.clone(),
                fault,
            })?;
        }
        for (file, slot) in [
            (&self.mahimahi_down, &mut self.recorded.down),
            (&self.mahimahi_up, &mut self.recorded.upward),
        ] {
            if let Some(file) = file {
                let opportunities =
                    trace::from_mahimahi(&open(file)?).map_err(|e| ScenarioFault {
                        file: file.clone(),
                        fault: e.to_string(),
                    })?;
                *slot = Some(opportunities);
            }
        }
        Ok(())
    }
}

fn read(path: &Path) -> Result<String, ScenarioFault> {
    std::fs::read_to_string(path).map_err(|e| ScenarioFault {
        file: path.display().to_string(),
        fault: format!("cannot be read: {e}"),
    })
}

/// The events file beside a trace: `t_s,event,ap` with `attach` and `detach`.
fn events(text: &str) -> Result<Vec<(Time, Option<String>)>, String> {
    let mut out: Vec<(Time, Option<String>)> = Vec::new();
    for (number, line) in text.lines().enumerate().skip(1) {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        let wrong = || format!("line {}: expected t_s,attach|detach,ap", number + 1);
        let [t, event, ap] = line.split(',').collect::<Vec<_>>()[..] else {
            return Err(wrong());
        };
        let t: f64 = t.trim().parse().map_err(|_| wrong())?;
        let at = Time::from_secs_f64(t);
        if out.last().is_some_and(|(before, _)| *before > at) {
            return Err(format!("line {}: t_s goes back", number + 1));
        }
        match event.trim() {
            "attach" => out.push((at, Some(ap.trim().to_owned()))),
            "detach" => out.push((at, None)),
            _ => return Err(wrong()),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Scenario, String> {
        Scenario::parse("test.toml", text, &mut |name| {
            Err(ScenarioFault {
                file: name.to_owned(),
                fault: "no such file".to_owned(),
            })
        })
        .map_err(|fault| fault.to_string())
    }

    const LINK: &str = "duration_s = 10\n[[link]]\nname = \"wlan0\"\n";

    #[test]
    fn the_least_scenario_has_the_defaults() {
        let scenario = parse(LINK).unwrap();
        assert_eq!(scenario.seed, 1);
        assert_eq!(scenario.rtt_ms(), RTT);
        assert!(scenario.links[0].up);
        const RTT: f64 = crate::properties::RTT_MS_DEFAULT;
    }

    #[test]
    fn a_misspelt_key_is_named_and_the_right_one_suggested() {
        let fault = parse(&format!("{LINK}rtt_sm = 5\n")).unwrap_err();
        assert!(
            fault.contains("rtt_sm") && fault.contains("did you mean `rtt_ms`?"),
            "{fault}"
        );
        assert!(fault.contains("line 4"), "{fault}");
    }

    #[test]
    fn values_out_of_range_are_refused_with_the_range() {
        for (line, says) in [
            ("loss = 2", "link wlan0: loss is 2, expected 0 to 1"),
            ("rtt_ms = -1", "rtt_ms is -1"),
            ("rtt_ms = nan", "rtt_ms is NaN"),
            ("mtu = 100", "mtu is 100, expected 576 to 9000"),
            ("queue_ms = 1\nqueue_bytes = 1", "keep one"),
            ("medium = \"802.11b\"\nup_mbps = 1", "no down_mbps, up_mbps"),
            ("medium = \"802.11x\"", "802.11x"),
            ("nat = \"rebinding\"", "nat_rebind_s"),
            ("nat_idle_s = 0", "nat_idle_s is 0"),
            ("nat = \"none\"\nnat_idle_s = 5", "nat_idle_s needs a NAT"),
            ("join = \"cafe\"", "no [[link.access_point]]"),
            ("[[flow]]", "either bytes or url"),
            (
                "[[flow]]\nbytes = 1\nstart_s = 5\ndeadline_s = 4",
                "not after start_s",
            ),
            ("[[link]]\nname = \"wlan0\"", "two links are called wlan0"),
            (
                "[handover]\nlinks = [\"eth0\"]\nevery_s = [1, 2]\ngap_s = [0, 1]",
                "no link is called eth0",
            ),
            ("[[expect]]\ntext = \"1 +\"", "expect `1 +`"),
            ("trace = \"gone.csv\"", "gone.csv: no such file"),
        ] {
            let fault = parse(&format!("{LINK}{line}\n")).unwrap_err();
            assert!(fault.contains(says), "{line}: {fault}");
        }
    }

    #[test]
    fn a_trace_with_several_links_wants_a_choice() {
        let text = format!("{LINK}trace = \"t.csv\"\n");
        let csv = format!("{}\n0,wifi,1,,,,\n0,cell,1,,,,\n", trace::CSV_HEADER);
        let read = |text: &str| Scenario::parse("s", text, &mut |_| Ok(csv.clone()));
        assert!(
            read(&text)
                .unwrap_err()
                .to_string()
                .contains("choose with trace_iface")
        );
        let chosen = read(&format!("{text}trace_iface = \"cell\"\n")).unwrap();
        assert_eq!(chosen.links[0].recorded.rows.len(), 1);
    }
}
