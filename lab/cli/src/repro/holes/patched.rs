//! E2: the web and a call over UDP through outages of Wi-Fi, by programs that know nothing of D2TP.
//!
//! ```text
//!  plain      curl ─ Wi-Fi ─ nginx
//!  wifi       curl ─ cedos vpn ═ Wi-Fi ═ D2Prox ─ nginx
//!  bridge     curl ─ cedos vpn ═ Wi-Fi, serial line ═ radio ═ cedos bridge ═ D2Prox ─ nginx
//!  cellular   curl ─ cedos vpn ═ Wi-Fi, 3G (metered) ═ D2Prox ─ nginx
//!  whole      as `wifi`, without outages; pages alone: what would be ideal follows from it
//! ```
//!
//! All run at once, each in a lab of its own, first with pages (browsing.rs), then with a call (call.rs).

use anyhow::{Context, bail, ensure};
use cedos_lab_emu::plan;
use cedos_lab_link::{Holes, Span};
use cedos_lab_scenario::RunReport;
use serde_json::{Map, Value, json};
use std::path::Path;

use super::browsing::{self, PagesLoaded};
use super::call::{self, UdpCall};
use super::{BRIDGE_MBPS, LEAD, WIFI, evenly_30, wifi_link};
use crate::repro::emulated::commanded_beside_an_origin;
use crate::repro::runner::Measured;

/// The length of the row on real sockets, in seconds: half an hour.
const SECONDS: u64 = 1_800;
/// The shortest part that shows anything: some holes.
const SECONDS_MIN: u64 = 60;
/// The length of the outages in seconds. Stays are drawn evenly from 0 to 30 s: Wi-Fi is there for half of the time, as in
/// the paper's experiment with traces.
const HOLE_S: u64 = 15;
/// The seed of the stays.
const SEED: u64 = 2;
/// How much longer than its programs a lab may run, in seconds.
const LAB_MARGIN_S: u64 = 30;

/// The rates of 3G: down as in M1, up assumed.
const CELLULAR_DOWN_MBPS: f64 = 1.24;
const CELLULAR_UP_MBPS: f64 = 0.6;
const CELLULAR_RTT_MS: u64 = 120;
const CELLULAR: &str = "wwan0";
/// What a byte by 3G cost in the paper's time: US$ 50 a month (the paper) for 5 GB (assumed).
const USD_PER_BYTE: f64 = 50.0 / 5e9;

/// The paper's table of pages.
const PAPER_PAGES: [(&str, u64, u64); 2] = [("wifi", 796, 203), ("bridge", 1_187, 61)];

/// What is loaded or called.
const WEB: &str = "web";
const UDP: &str = "udp";

/// How the device is connected.
#[derive(Clone, Copy)]
struct PatchKind {
    name: &'static str,
    has_vpn: bool,
    has_bridge: bool,
    has_cellular: bool,
    has_holes: bool,
}

const fn kind(
    name: &'static str,
    has_vpn: bool,
    has_bridge: bool,
    has_cellular: bool,
) -> PatchKind {
    PatchKind {
        name,
        has_vpn,
        has_bridge,
        has_cellular,
        has_holes: true,
    }
}

const PLAIN: &str = "plain";
const WIFI_ALONE: &str = "wifi";
const PATCHED: &str = "bridge";
const BY_3G: &str = "cellular";

/// Wi-Fi without outages.
const WHOLE: PatchKind = PatchKind {
    has_holes: false,
    ..kind("whole", true, false, false)
};

const KINDS: [PatchKind; 4] = [
    kind(PLAIN, false, false, false),
    kind(WIFI_ALONE, true, false, false),
    kind(PATCHED, true, true, false),
    kind(BY_3G, true, false, true),
];

/// What is run of the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchedHoles {
    /// The length of each run, in seconds.
    pub seconds: u64,
    /// `web`, `udp`; both if empty.
    pub only: Vec<String>,
}

impl Default for PatchedHoles {
    fn default() -> PatchedHoles {
        PatchedHoles {
            seconds: SECONDS,
            only: Vec::new(),
        }
    }
}

impl PatchedHoles {
    fn runs(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|name| name == part)
    }

    /// What differs from the whole row, in words: a result of less says so.
    fn conditions(&self) -> Vec<String> {
        let mut differs = Vec::new();
        if self.seconds != SECONDS {
            differs.push(format!(
                "a part of {} s instead of {SECONDS} s",
                self.seconds
            ));
        }
        if !self.only.is_empty() {
            differs.push(format!("a part with {} alone", self.only.join(", ")));
        }
        differs
    }
}

/// The whole row.
///
/// # Errors
/// A lab could not be run.
pub fn emulate() -> anyhow::Result<Measured> {
    patched(&PatchedHoles::default())
}

/// Runs a part of the row, or all of it.
///
/// # Errors
/// A lab could not be run, or there is no such part.
pub fn patched(asked: &PatchedHoles) -> anyhow::Result<Measured> {
    for part in &asked.only {
        if ![WEB, UDP].contains(&part.as_str()) {
            bail!("there is no part `{part}` of E2; there are {WEB}, {UDP}");
        }
    }
    ensure!(
        asked.seconds >= SECONDS_MIN,
        "a part takes {SECONDS_MIN} s at least"
    );
    let case = evenly_30(HOLE_S);
    let session = Span::from_secs(asked.seconds);
    let holes = Holes::drawn(SEED, case.stays, case.holes, session).after(LEAD);
    let folder = tempfile::tempdir().context("no temporary folder")?;
    browsing::write_pages(folder.path(), &format!("http://{}", plan::ORIGIN_V4))?;
    let mut ours = json!({
        "seconds": asked.seconds,
        "wifi_there": holes.there().as_secs_f64() / holes.length().as_secs_f64(),
        "longest_stay_s": longest_stay_s(&holes),
    });
    if asked.runs(WEB) {
        let kinds = [&KINDS[..], &[WHOLE]].concat();
        let reports = at_once(&kinds, &holes, folder.path(), browsing::script, None)?;
        web_figures(&mut ours, folder.path(), &holes, &reports)?;
    }
    if asked.runs(UDP) {
        let server = Some(call::SERVER);
        let reports = at_once(&KINDS, &holes, folder.path(), call::script, server)?;
        udp_figures(&mut ours, folder.path(), &reports)?;
    }
    let paper = PAPER_PAGES.map(|(name, pages, timeouts)| {
        let figures = json!({"pages_done": pages, "timeouts": timeouts});
        (name.to_owned(), figures)
    });
    let baseline = json!({"paper_in_two_hours": Map::from_iter(paper)});
    let mut measured = Measured::figures(ours, baseline, 1);
    measured.conditions = asked.conditions();
    Ok(measured)
}

fn longest_stay_s(holes: &Holes) -> f64 {
    let mut from = cedos_lab_link::Time::ZERO;
    let mut longest = Span::ZERO;
    for (begin, end) in holes.iter() {
        longest = longest.max(begin.since(from));
        from = end;
    }
    let rest = (cedos_lab_link::Time::ZERO + holes.length()).since(from);
    longest.max(rest).as_secs_f64()
}

/// What every script begins with: it waits until the VPN carries what is for the origin, if there is one. `$begun` is before that.
const BEGIN: &str = r#"
now() { date +%s.%N; }
begun=$(now)
if [ "$VPN" = 1 ]; then
    until ip route get "$ORIGIN_IP" | grep -q cedos0; do sleep 0.05; done
fi
"#;

/// A script and its variables, for a time in seconds.
type PatchScript = fn(u64) -> (&'static str, Vec<(&'static str, String)>);

/// Runs a script in these kinds at once, each beside a server, if there is one. Returns the labs' reports.
fn at_once(
    kinds: &[PatchKind],
    holes: &Holes,
    folder: &Path,
    script: PatchScript,
    server: Option<&str>,
) -> anyhow::Result<Vec<RunReport>> {
    let seconds = holes.length().as_secs_f64() as u64;
    let (script, variables) = script(seconds);
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let run = |kind: PatchKind| -> anyhow::Result<RunReport> {
        let mut variables = variables.clone();
        variables.extend([
            ("AT", folder.display().to_string()),
            ("CEDOS", program.display().to_string()),
            ("KIND", kind.name.to_owned()),
            ("ORIGIN_IP", plan::ORIGIN_V4.to_string()),
            ("VPN", u8::from(kind.has_vpn).to_string()),
        ]);
        let bits = ((BRIDGE_MBPS * 1e6) as u32).to_string();
        let mut options = match kind.has_vpn {
            true => vec!["--client", "vpn"],
            false => vec!["--direct"],
        };
        if kind.has_bridge {
            options.extend(["--bridge", bits.as_str()]);
        }
        let none = Holes::none(holes.length());
        let holes = if kind.has_holes { holes } else { &none };
        let text = scenario(holes, seconds + LAB_MARGIN_S, kind);
        let script = format!("{BEGIN}{script}\nexit 0\n");
        commanded_beside_an_origin(&text, &options, server, &script, &variables)
            .with_context(|| kind.name)
    };
    std::thread::scope(|scope| {
        let run = &run;
        let running = kinds.iter().map(|kind| scope.spawn(move || run(*kind)));
        let running: Vec<_> = running.collect();
        let ended = running.into_iter().map(|lab| lab.join());
        ended.map(|lab| lab.expect("it does not panic")).collect()
    })
}

/// The scenario of a kind: Wi-Fi with its outages, and 3G if the kind has it.
fn scenario(holes: &Holes, seconds: u64, kind: PatchKind) -> String {
    let mut text = format!("seed = {SEED}\nduration_s = {seconds}\norigin = \"nginx\"\n");
    text += &wifi_link(WIFI, holes, "stable", "dead = true", "dead = false");
    if kind.has_cellular {
        text += &format!(
            "\n[[link]]\nname = \"{CELLULAR}\"\nclass = \"metered\"\ndown_mbps = {CELLULAR_DOWN_MBPS}\n\
             up_mbps = {CELLULAR_UP_MBPS}\nrtt_ms = {CELLULAR_RTT_MS}\n"
        );
    }
    text
}

/// Bytes that each link carried, both ways, in the report of a lab.
fn carried(report: &RunReport) -> Value {
    let links = report.links.iter();
    let bytes = links.map(|link| (link.name.clone(), json!(link.bytes_down + link.bytes_up)));
    Value::Object(bytes.collect())
}

/// Adds what 3G carried and cost to the figures of its kind.
fn add_cost(figures: &mut Value, report: &RunReport) {
    let both = |link: &cedos_lab_scenario::LinkReport| link.bytes_down + link.bytes_up;
    let all: u64 = report.links.iter().map(both).sum();
    let metered = report.links.iter().filter(|link| link.name == CELLULAR);
    let metered: u64 = metered.map(both).sum();
    figures["metered_bytes"] = json!(metered);
    figures["metered_share"] = json!(metered as f64 / all.max(1) as f64);
    figures["metered_usd"] = json!(metered as f64 * USD_PER_BYTE);
}

fn web_figures(
    ours: &mut Value,
    folder: &Path,
    holes: &Holes,
    reports: &[RunReport],
) -> anyhow::Result<()> {
    let mut web = Map::new();
    let mut done = Map::new();
    for (kind, report) in KINDS.iter().zip(reports) {
        let loaded = PagesLoaded::read(folder, kind.name)?;
        let mut figures = loaded.figures();
        figures["bytes_by_link"] = carried(report);
        if kind.has_cellular {
            add_cost(&mut figures, report);
        }
        done.insert(kind.name.to_owned(), json!(loaded.done()));
        web.insert(kind.name.to_owned(), figures);
    }
    let pages = |name: &str| done[name].as_f64().unwrap_or(0.0);
    // By duty: what is loaded over Wi-Fi by itself without outages, and what the radio has time for in them, headers not counted.
    let whole = PagesLoaded::read(folder, WHOLE.name)?.done() as f64;
    let (there_s, all_s) = (holes.there().as_secs_f64(), holes.length().as_secs_f64());
    let by_wifi = whole * there_s / all_s;
    let radio = BRIDGE_MBPS * 1e6 / 8.0 * (all_s - there_s) / browsing::mean_bytes() as f64;
    ours["pages_without_holes"] = json!(whole);
    ours["pages_share_of_ideal"] = ratio(pages(PATCHED), by_wifi + radio);
    ours["wifi_pages_share_of_ideal"] = ratio(pages(WIFI_ALONE), by_wifi);
    ours["ideal_by_plain"] = ratio(by_wifi + radio, pages(PLAIN));
    ours["mean_page_bytes"] = json!(browsing::mean_bytes());
    ours["pages_done"] = Value::Object(done.clone());
    ours["pages_by_plain"] = ratio(pages(PATCHED), pages(PLAIN));
    ours["pages_by_wifi"] = ratio(pages(PATCHED), pages(WIFI_ALONE));
    ours["pages_by_3g"] = ratio(pages(PATCHED), pages(BY_3G));
    let more = pages(BY_3G) - pages(WIFI_ALONE);
    let metered = web[BY_3G]["metered_bytes"].as_f64().unwrap_or(0.0);
    let per_page = ratio(metered, more.max(0.0));
    web[BY_3G]["metered_bytes_for_a_page_more"] = per_page;
    ours[WEB] = Value::Object(web);
    Ok(())
}

fn udp_figures(ours: &mut Value, folder: &Path, reports: &[RunReport]) -> anyhow::Result<()> {
    let mut udp = Map::new();
    let mut calls = Vec::new();
    for (kind, report) in KINDS.iter().zip(reports) {
        let call = UdpCall::read(folder, kind.name)?;
        let mut figures = call.figures();
        figures["bytes_by_link"] = carried(report);
        if kind.has_cellular {
            add_cost(&mut figures, report);
        }
        udp.insert(kind.name.to_owned(), figures);
        calls.push((kind.name, call));
    }
    let of = |name: &str| {
        let call = calls.iter().find(|(known, _)| *known == name);
        &call.expect("every kind was run").1
    };
    let longest = |name: &str| of(name).on_longest_s() as f64;
    let mean = |name: &str| of(name).on_mean_s().unwrap_or(0.0);
    // Wi-Fi alone, with the VPN or without it, whichever was ON for longer.
    let alone = longest(PLAIN).max(longest(WIFI_ALONE));
    ours["on_longest_by_wifi"] = ratio(longest(PATCHED), alone);
    let alone = mean(PLAIN).max(mean(WIFI_ALONE));
    ours["on_mean_by_wifi"] = ratio(mean(PATCHED), alone);
    ours[UDP] = Value::Object(udp);
    Ok(())
}

/// `null` where nothing is compared with.
fn ratio(a: f64, b: f64) -> Value {
    match b > 0.0 {
        true => json!(a / b),
        false => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_scenario::Scenario;

    #[test]
    fn a_part_says_how_it_differs_from_the_row_and_refuses_unknown_ones() {
        assert!(PatchedHoles::default().conditions().is_empty());
        let only = |name: &str| PatchedHoles {
            seconds: 300,
            only: vec![name.to_owned()],
        };
        assert_eq!(
            only("udp").conditions(),
            ["a part of 300 s instead of 1800 s", "a part with udp alone"]
        );
        let fault = patched(&only("tcp")).unwrap_err().to_string();
        assert!(fault.contains("web, udp"), "{fault}");
        let short = PatchedHoles {
            seconds: 10,
            ..PatchedHoles::default()
        };
        assert!(patched(&short).is_err());
    }

    #[test]
    fn scenarios_of_all_kinds_parse_and_the_stays_leave_room_for_the_mark() {
        let case = evenly_30(HOLE_S);
        for seconds in [300, SECONDS] {
            let session = Span::from_secs(seconds);
            let holes = Holes::drawn(SEED, case.stays, case.holes, session).after(LEAD);
            for kind in KINDS {
                let text = scenario(&holes, seconds + LAB_MARGIN_S, kind);
                let scenario = Scenario::parse("E2", &text, &mut |_| unreachable!()).unwrap();
                assert_eq!(scenario.links.len(), 1 + usize::from(kind.has_cellular));
            }
            // The mark asks for 8.5 times the longest stay without a break.
            assert!(8.5 * longest_stay_s(&holes) < seconds as f64, "{seconds}");
        }
    }

    #[test]
    fn what_3g_carried_is_a_share_of_all_bytes_and_has_a_price() {
        let link = |name: &str, bytes_down| cedos_lab_scenario::LinkReport {
            name: name.to_owned(),
            bytes_down,
            ..cedos_lab_scenario::LinkReport::default()
        };
        let mut report: RunReport = serde_json::from_value(
            json!({"flows": [], "links": [], "switches": [], "expectations": []}),
        )
        .unwrap();
        report.links = vec![link(WIFI, 9_000_000), link(CELLULAR, 1_000_000)];
        let mut figures = json!({});
        add_cost(&mut figures, &report);
        assert_eq!(
            (&figures["metered_share"], &figures["metered_usd"]),
            (&json!(0.1), &json!(0.01))
        );
        assert_eq!(
            carried(&report),
            json!({"wlan0": 9_000_000, "wwan0": 1_000_000})
        );
    }
}
