//! The format of scenario files: links, flows, expectations, a seed. `docs/scenarios.md` documents
//! every key.
//!
//! Files are strict: an unknown key is an error, which suggests a similar key, because a misspelt
//! key that is silently ignored would give a wrong result.

use crate::acks::Acks;
use crate::crash::{
    Crash, NodeDistance, Replay, StoreOutage, hibernate_after_default, one_flow, one_node,
};
use crate::energy::ScenarioEnergy;
use crate::origin::OriginKind;
use crate::podcasts::Podcasts;
use crate::properties::{Settings, table_with_properties};
use crate::transport::Transport;
use cedos_lab_link::trace::{self, Trace, TraceRow};
use cedos_lab_link::{Opportunities, TcpPassage, Time};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The most links of a scenario.
pub const LINKS_MAX: usize = 16;
/// The most flows of a scenario.
pub const FLOWS_MAX: usize = 10_000;
/// The longest run in seconds: a month.
pub const DURATION_S_MAX: f64 = 31.0 * 86_400.0;
/// The longest name of a network interface in bytes. // IFNAMSIZ less the terminating zero
pub const LINK_NAME_BYTES_MAX: usize = 15;

/// A scenario that cannot be used, because of an error in the file or an unreadable file that it
/// names.
#[derive(Debug, Error)]
#[error("{file}: {fault}")]
pub struct ScenarioFault {
    /// The file with the error.
    pub file: String,
    /// The error, and what would be right.
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
    /// The seed of all random values.
    #[serde(default = "seed_default")]
    pub seed: u64,
    /// The latest end of the run, in seconds.
    pub duration_s: f64,
    /// The web server in the lab.
    #[serde(default)]
    pub origin: OriginKind,
    /// The links of the device, in order.
    #[serde(rename = "link")]
    pub links: Vec<Link>,
    /// The transfers of the scenario.
    #[serde(default, rename = "flow")]
    pub flows: Vec<ScenarioFlow>,
    /// Generated handovers between the links.
    pub handover: Option<Handover>,
    /// Transport settings of both ends.
    #[serde(default)]
    pub transport: Transport,
    /// The idle time after which both ends hibernate, in seconds.
    #[serde(default = "hibernate_after_default")]
    pub hibernate_after_s: f64,
    /// Whether the proxy accepts streams, for networks that block UDP.
    #[serde(default)]
    pub streams: bool,
    /// The number of the proxy's nodes, 1 or 2. They share the key and no state; crashes are the first one's.
    /// Lab only.
    #[serde(default = "one_node")]
    pub nodes: u8,
    /// Whether the nodes share their sessions in a `redis-server`, and a directory of copies. Lab only.
    #[serde(default)]
    pub store: bool,
    /// The ACK settings.
    #[serde(default)]
    pub acks: Acks,
    /// The radios of the links, and when the device saves energy; none is measured if absent.
    pub energy: Option<ScenarioEnergy>,
    /// Crashes of either end.
    #[serde(default, rename = "crash")]
    pub crashes: Vec<Crash>,
    /// Outages of the nodes' store.
    #[serde(default, rename = "store_outage")]
    pub store_outages: Vec<StoreOutage>,
    /// How far away the nodes are, and when that changes. Lab only.
    #[serde(default, rename = "node_distance")]
    pub node_distances: Vec<NodeDistance>,
    /// Replays of packets.
    #[serde(default, rename = "replay")]
    pub replays: Vec<Replay>,
    /// Podcasts that the device fetches. Lab only.
    pub podcasts: Option<Podcasts>,
    /// Conditions that the report must satisfy.
    #[serde(default, rename = "expect")]
    pub expectations: Vec<Expect>,
}

table_with_properties! {
    /// A link of the device.
    Link {
        /// Name of the interface, such as `wlan0`.
        name: String,
        /// The cost class of the link.
        #[serde(default)]
        class: Class,
        /// The address families that the link provides.
        #[serde(default)]
        family: Family,
        /// The NAT for IPv4 addresses.
        #[serde(default)]
        nat: NatKind,
        /// How often a rebinding NAT forgets its mappings.
        nat_rebind_s: Option<f64>,
        /// How long a NAT keeps a mapping without outgoing packets.
        nat_idle_s: Option<f64>,
        /// The time from joining to having an address.
        #[serde(default)]
        attach_s: f64,
        /// Whether the link is attached when the run begins.
        #[serde(default = "yes")]
        up: bool,
        /// Whether the link is attached but carries nothing when the run begins.
        #[serde(default)]
        dead: bool,
        /// The access point that the link is attached to when the run begins.
        join: Option<String>,
        /// The access points of the link.
        #[serde(default, rename = "access_point")]
        access_points: Vec<AccessPoint>,
        /// Changes at given times.
        #[serde(default)]
        at: Vec<At>,
        /// Repeated changes.
        #[serde(default)]
        repeat: Vec<Repeat>,
        /// A CSV trace, relative to the scenario file.
        trace: Option<String>,
        /// The name of the link in the trace, which is needed if it has several.
        trace_iface: Option<String>,
        /// A CSV of `t_s,event,ap` beside the trace.
        trace_events: Option<String>,
        /// The time in the trace at which the run begins.
        #[serde(default)]
        trace_start_s: f64,
        /// Whether the trace starts again at its end, instead of keeping its last row.
        #[serde(default)]
        trace_repeat: bool,
        /// A Mahimahi trace instead of a rate towards the device.
        mahimahi_down: Option<String>,
        /// A Mahimahi trace instead of a rate from the device.
        mahimahi_up: Option<String>,
        /// The content of the trace files.
        #[serde(skip)]
        recorded: RecordedTraces,
    }
}

table_with_properties! {
    /// A network that a link may join.
    AccessPoint {
        /// Name of the access point.
        name: String,
        /// The received signal strength, for devices that choose by it.
        signal_dbm: Option<f64>,
        /// Whether the access point lets devices join and carries nothing.
        #[serde(default)]
        dead: bool,
    }
}

table_with_properties! {
    /// A change at a given time.
    At {
        /// The time of the change.
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
        /// Let only TCP to an HTTP proxy pass, which devices are told of, or everything again.
        only_http_proxy: Option<bool>,
        /// What happens to TCP connections beyond the first hop: `pass`, `intercept` or `reset`.
        tcp: Option<TcpPassage>,
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
    /// A repeated change.
    Repeat {
        /// The time from one change to the next.
        every_s: f64,
        /// The time of the first change; `every_s` if absent.
        first_s: Option<f64>,
        /// The time after which there are no more changes.
        until_s: Option<f64>,
        /// How long a change lasts, after which the keys are as in `[[link]]` again; forever if
        /// absent.
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
        /// Let only TCP to an HTTP proxy pass, which devices are told of, or everything again.
        only_http_proxy: Option<bool>,
        /// What happens to TCP connections beyond the first hop: `pass`, `intercept` or `reset`.
        tcp: Option<TcpPassage>,
        /// Get another address without losing the link.
        #[serde(default)]
        new_address: bool,
        /// The NAT forgets its mappings.
        #[serde(default)]
        rebind: bool,
    }
}

/// The cost class of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Free: bytes cost nothing.
    #[default]
    Free,
    /// Metered: bytes cost something.
    Metered,
    /// Roaming: bytes cost a lot.
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

/// The address families that a link provides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Family {
    /// The link has IPv4 only.
    #[default]
    #[serde(rename = "v4")]
    V4,
    /// IPv6 only, without access to IPv4.
    #[serde(rename = "v6")]
    V6,
    /// The link has IPv4 and IPv6.
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

/// The NAT of a link for IPv4 addresses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NatKind {
    /// No NAT: the device's address is visible from outside.
    None,
    /// Endpoint-independent mappings that last.
    #[default]
    Stable,
    /// A NAT that forgets all its mappings every `nat_rebind_s`.
    Rebinding,
}

/// The direction of a flow's bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// Payload towards the device: a download.
    #[default]
    Down,
    /// Payload from the device: an upload.
    Up,
}

/// The links that a flow may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Free links only.
    FreeOnly,
    /// Free links, and metered ones if the deadline needs them.
    #[default]
    FreeFirst,
    /// Metered links if they help enough.
    Balanced,
    /// The fastest link at any time.
    Fast,
    /// Any link at any time, free ones preferred.
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

/// A transfer of the scenario.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioFlow {
    /// The name in the report; the flow's number, from 0, if empty.
    #[serde(default)]
    pub id: String,
    /// The number of equal flows that this table stands for, each with a process of its own.
    #[serde(default = "one_flow")]
    pub count: u32,
    /// The size in bytes; the origin generates the content from the seed. Either this or `url`.
    pub bytes: Option<u64>,
    /// The URL of the object (lab only).
    pub url: Option<String>,
    /// The direction of the transfer.
    #[serde(default)]
    pub direction: Direction,
    /// The time at which the transfer begins.
    #[serde(default)]
    pub start_s: f64,
    /// The deadline in the run's time, not relative to the start.
    pub deadline_s: Option<f64>,
    /// The links that the transfer may use.
    #[serde(default)]
    pub policy: Policy,
    /// The most bytes on links that are not free.
    pub metered_bytes_max: Option<u64>,
    /// Whether the device ends its direction only after it has read the other's end (simulator
    /// only).
    #[serde(default)]
    pub late_end: bool,
    /// Whether the sender keeps bytes until they are durable at the receiver (simulator only).
    #[serde(default)]
    pub durable: bool,
    /// Whether its OPEN may travel in the first SYN (simulator only).
    #[serde(default)]
    pub early: bool,
    /// Whether the proxy must be able to send at any time (simulator only).
    #[serde(default)]
    pub reachable: bool,
    /// Whether the digest is compared with that of the origin's content.
    #[serde(default = "yes")]
    pub integrity: bool,
}

/// Random handovers, one after another, each to the next of `links`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Handover {
    /// The links, in turn; only the first one is up at the beginning.
    pub links: Vec<String>,
    /// The shortest and longest time from one handover to the next.
    pub every_s: [f64; 2],
    /// The shortest and longest time for which both links are up, in make before break.
    pub overlap_s: Option<[f64; 2]>,
    /// The shortest and longest time without any link, in break before make; it does not include
    /// the attaching.
    pub gap_s: Option<[f64; 2]>,
    /// Share of handovers that are make before break, if both kinds are given.
    #[serde(default = "half")]
    pub overlap_share: f64,
    /// The time before which there is no handover.
    #[serde(default)]
    pub from_s: f64,
    /// The time after which there is no handover; the end of the run if absent.
    pub until_s: Option<f64>,
}

/// A condition that the report must satisfy.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    /// An expression over the report that must be true.
    pub text: String,
}

/// The content of a link's trace files.
#[derive(Clone, Debug, Default)]
pub struct RecordedTraces {
    /// Rows of the CSV trace.
    pub rows: Vec<TraceRow>,
    /// Events of joining an access point, or leaving (`None`).
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
    /// Reads a scenario file and its traces.
    ///
    /// # Errors
    /// A file cannot be read, or is no valid scenario.
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

    /// Reads a scenario from `text`; `open` reads its traces. `file` is for messages.
    ///
    /// # Errors
    /// The error in the scenario, with its line if known, or the error of `open`.
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
        scenario.repeat_flows().map_err(at_fault)?;
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

    /// Puts `count` flows in the place of each flow that has a `count`. Their ids are its own and a number.
    fn repeat_flows(&mut self) -> Result<(), String> {
        let all: u64 = self.flows.iter().map(|flow| u64::from(flow.count)).sum();
        if all > FLOWS_MAX as u64 {
            return Err(format!("{all} flows, at most {FLOWS_MAX}"));
        }
        let mut repeated = Vec::with_capacity(all as usize);
        for flow in std::mem::take(&mut self.flows) {
            if flow.count == 0 {
                return Err(format!("flow {}: count is 0, expected at least 1", flow.id));
            }
            if flow.count == 1 {
                repeated.push(flow);
                continue;
            }
            for number in 1..=flow.count {
                repeated.push(ScenarioFlow {
                    id: format!("{}{number}", flow.id),
                    count: 1,
                    ..flow.clone()
                });
            }
        }
        self.flows = repeated;
        Ok(())
    }

    /// The number of the link of this name.
    pub fn link_number(&self, name: &str) -> Option<usize> {
        self.links.iter().position(|link| link.name == name)
    }

    /// The largest round-trip time of any link at the start of the run, without queueing.
    pub fn rtt_ms(&self) -> f64 {
        self.links
            .iter()
            .map(|link| link.settings().rtt_ms())
            .fold(0.0, f64::max)
    }
}

impl Link {
    /// The properties at the start of the run, including those of the access point and of Mahimahi
    /// traces.
    pub(crate) fn settings(&self) -> Settings {
        self.settings_at(self.join.as_deref())
    }

    /// The properties while joined to this access point.
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
