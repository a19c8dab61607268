//! E1 and E2: a transfer, pages and a call over Wi-Fi with outages, with and without a slow link that has none.
//!
//! ```text
//!  wlan0   ████████│ outage │████████████│  outage  │█████████   2.7 Mb/s, 100 ms
//!  bridge  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   0.048 Mb/s, 500 ms and more
//! ```
//!
//! The ideal is weighted by time: what Wi-Fi carries while it is available, and what the bridge
//! carries while it is not, each as measured alone and without outages. No program is informed of
//! an outage.

mod browsing;
mod call;
mod lab;
mod model;
mod patched;
mod tunnel;

use super::runner::Measured;
use anyhow::Context;
use cedos_lab_link::{DurationModel, Holes, Span, Time};
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Value, json};

pub use lab::emulate;
use model::TcpHoleModel;
pub use patched::{PatchedHoles, emulate as emulate_patched, patched};
pub use tunnel::{TunnelHoles, emulate as emulate_tunnel, tunnelled};

/// The length of the authors' sessions.
const SESSION_S: u64 = 240;
const SESSION: Span = Span::from_secs(SESSION_S);
/// On real sockets: when the first outage begins at the earliest. All flows have started by then.
const LEAD: Span = Span::from_secs(10);
/// The number of sessions of each case in virtual time.
const SESSIONS: u64 = 20;
/// The rate of Wi-Fi: the paper's TCP carried 2.6 Mb/s without outages.
const WIFI_MBPS: f64 = 2.7;
const WIFI_RTT_MS: u64 = 100;
/// The queue of Wi-Fi: half of the bandwidth-delay product.
const WIFI_QUEUE_MS: u64 = 50;
/// The rate of the bridge: 47 kb/s of UDP in packets of 1,472 bytes.
const BRIDGE_MBPS: f64 = 0.048;
/// The round trip of the bridge without the transmission time of a full packet, which is 250 ms.
const BRIDGE_RTT_MS: u64 = 500;
/// The queue of the bridge: eight packets.
const BRIDGE_QUEUE_BYTES: u64 = 12_000;

const WIFI: &str = "wlan0";
const BRIDGE: &str = "bridge0";

/// The lengths of stays and outages.
#[derive(Clone, Copy)]
struct HoleCase {
    stays: DurationModel,
    holes: DurationModel,
}

const fn evenly_30(hole_s: u64) -> HoleCase {
    HoleCase {
        stays: DurationModel::Evenly(Span::from_secs(30)),
        holes: DurationModel::Always(Span::from_secs(hole_s)),
    }
}

const CABERNET: HoleCase = HoleCase {
    stays: DurationModel::Always(Span::from_secs(4)),
    holes: DurationModel::Always(Span::from_secs(32)),
};
/// The authors' traces by their medians and 90th percentiles: a month of transit cars, for which
/// the 90th percentile of stays is assumed, and a route through town with dense coverage.
const CARS: HoleCase = HoleCase {
    stays: DurationModel::LogNormal {
        median: Span::from_secs(20),
        tenth: Span::from_secs(72),
    },
    holes: DurationModel::LogNormal {
        median: Span::from_secs(50),
        tenth: Span::from_secs(500),
    },
};
const TOWN: HoleCase = HoleCase {
    stays: DurationModel::LogNormal {
        median: Span::from_secs(20),
        tenth: Span::from_secs(72),
    },
    holes: DurationModel::LogNormal {
        median: Span::from_secs(10),
        tenth: Span::from_secs(150),
    },
};

/// The cases in virtual time.
const CASES: [(&str, HoleCase); 11] = [
    ("even_1", evenly_30(1)),
    ("even_2", evenly_30(2)),
    ("even_5", evenly_30(5)),
    ("even_10", evenly_30(10)),
    ("even_20", evenly_30(20)),
    ("even_30", evenly_30(30)),
    ("even_45", evenly_30(45)),
    ("even_60", evenly_30(60)),
    ("stay_4_hole_32", CABERNET),
    ("cars", CARS),
    ("town", TOWN),
];

/// The rates of the two links alone, in bytes per second.
#[derive(Clone, Copy)]
struct LinkRates {
    wifi: f64,
    bridge: f64,
}

impl LinkRates {
    fn ideal(&self, holes: &Holes) -> f64 {
        let there = holes.there();
        let gone = holes.length().saturating_sub(there);
        there.as_secs_f64() * self.wifi + gone.as_secs_f64() * self.bridge
    }
}

/// A session: bytes that the application received, and those of them that arrived by Wi-Fi.
#[derive(Clone, Copy, Default)]
struct HoleSessionBytes {
    all: f64,
    wifi: f64,
}

/// Sessions of one case.
#[derive(Default)]
struct CaseTotals {
    sessions: u64,
    lasted_s: f64,
    there_s: f64,
    ideal: f64,
    ideal_wifi: f64,
    both: HoleSessionBytes,
    alone: f64,
    share_least: Option<f64>,
    by_alone_least: Option<f64>,
}

impl CaseTotals {
    fn add(&mut self, rates: &LinkRates, holes: &Holes, both: HoleSessionBytes, alone: f64) {
        let least = |before: Option<f64>, now: f64| Some(before.map_or(now, |b: f64| b.min(now)));
        let ideal = rates.ideal(holes);
        self.sessions += 1;
        self.lasted_s += holes.length().as_secs_f64();
        self.there_s += holes.there().as_secs_f64();
        self.ideal += ideal;
        self.ideal_wifi += holes.there().as_secs_f64() * rates.wifi;
        self.both.all += both.all;
        self.both.wifi += both.wifi;
        self.alone += alone;
        self.share_least = least(self.share_least, both.all / ideal);
        if alone > 0.0 {
            self.by_alone_least = least(self.by_alone_least, both.all / alone);
        }
    }

    fn share(&self) -> f64 {
        self.both.all / self.ideal
    }

    fn row(&self) -> Value {
        let kbps = |bytes: f64| bytes * 8e-3 / self.lasted_s;
        json!({
            "sessions": self.sessions,
            "wifi_there": self.there_s / self.lasted_s,
            "ideal_kbps": kbps(self.ideal),
            "kbps": kbps(self.both.all),
            "share_of_ideal": self.share(),
            "share_of_ideal_least_session": self.share_least,
            "wifi_share_of_ideal": self.both.wifi / self.ideal_wifi,
            "one_link_kbps": kbps(self.alone),
            "one_link_share_of_ideal": self.alone / self.ideal_wifi,
            "by_one_link": self.both.all / self.alone,
            "by_one_link_least_session": self.by_alone_least,
        })
    }
}

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let whole = Holes::none(SESSION);
    let per_s = |carried: HoleSessionBytes| carried.all / SESSION.as_secs_f64();
    let rates = LinkRates {
        wifi: per_s(in_virtual_time(
            1,
            &scenario(1, SESSION, Some(&whole), false),
        )?),
        bridge: per_s(in_virtual_time(1, &scenario(1, SESSION, None, true))?),
    };
    let model = TcpHoleModel::of(rates.wifi);
    let run = &|(name, case): (&'static str, HoleCase)| {
        let (mut sums, mut tcp) = (CaseTotals::default(), 0.0);
        for seed in 1..=SESSIONS {
            let holes = Holes::drawn(seed, case.stays, case.holes, SESSION);
            let both = in_virtual_time(seed, &scenario(seed, SESSION, Some(&holes), true))?;
            let alone = in_virtual_time(seed, &scenario(seed, SESSION, Some(&holes), false))?;
            sums.add(&rates, &holes, both, alone.all);
            tcp += model.carries(&holes, 0.0);
        }
        anyhow::Ok((name, sums, tcp))
    };
    let done: Vec<_> = std::thread::scope(|scope| {
        let running = CASES.map(|case| scope.spawn(move || run(case)));
        running
            .map(|case| case.join().expect("a case does not panic"))
            .into()
    });
    let (mut cases, mut baseline) = (serde_json::Map::new(), serde_json::Map::new());
    let (mut shares, mut by_alone) = (Vec::new(), Vec::new());
    for case in done {
        let (name, sums, tcp) = case?;
        baseline.insert(
            name.to_owned(),
            json!({
                "model_tcp_kbps": tcp * 8e-3 / (SESSIONS as f64 * SESSION.as_secs_f64()),
                "by_model_tcp": sums.both.all / tcp,
            }),
        );
        shares.push(sums.share());
        by_alone.push(sums.both.all / sums.alone);
        cases.insert(name.to_owned(), sums.row());
    }
    let ours = json!({
        "share_of_ideal_least": least(&shares),
        "by_one_link_least": least(&by_alone),
        "wifi_kbps": rates.wifi * 8e-3,
        "bridge_kbps": rates.bridge * 8e-3,
        "cases": cases,
    });
    let baseline = json!({"cases": baseline});
    Ok(Measured::figures(ours, baseline, SESSIONS as usize))
}

fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

fn in_virtual_time(seed: u64, text: &str) -> anyhow::Result<HoleSessionBytes> {
    let scenario = Scenario::parse("E1", text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report = cedos_lab_sim::run(&scenario, None)
        .with_context(|| format!("session {seed}"))?
        .report;
    carried(&report)
}

fn carried(report: &RunReport) -> anyhow::Result<HoleSessionBytes> {
    let flow = report.flows.first().context("no flow in the report")?;
    let wifi = flow.bytes_by_link.get(WIFI).copied().unwrap_or(0);
    Ok(HoleSessionBytes {
        all: flow.bytes as f64,
        wifi: wifi as f64,
    })
}

/// A scenario of this length with a download over a Wi-Fi with these outages, if there is one, and
/// the bridge, if there is one.
fn scenario(seed: u64, length: Span, wifi: Option<&Holes>, bridge: bool) -> String {
    let mut text = format!(
        "seed = {seed}\nduration_s = {}\n\n[[flow]]\nbytes = 100_000_000\n",
        length.as_secs_f64()
    );
    if let Some(holes) = wifi {
        text += &wifi_link(WIFI, holes, "stable", "dead = true", "dead = false");
    }
    if bridge {
        text += &format!("\n[[link]]\nname = \"{BRIDGE}\"\n{}", bridge_properties());
    }
    text
}

/// A Wi-Fi link with these settings in its outages, and outside.
fn wifi_link(name: &str, holes: &Holes, nat: &str, gone: &str, there: &str) -> String {
    let mut text = format!(
        "\n[[link]]\nname = \"{name}\"\nnat = \"{nat}\"\n{}",
        wifi_properties()
    );
    let second = |at: Time| at.since(Time::ZERO).as_secs_f64();
    let end = Time::ZERO + holes.length();
    for (from, to) in holes.iter() {
        text += &format!("[[link.at]]\nt_s = {}\n{gone}\n", second(from));
        // Nothing changes after the end.
        if to < end {
            text += &format!("[[link.at]]\nt_s = {}\n{there}\n", second(to));
        }
    }
    text
}

fn wifi_properties() -> String {
    format!(
        "down_mbps = {WIFI_MBPS}\nup_mbps = {WIFI_MBPS}\nrtt_ms = {WIFI_RTT_MS}\n\
         queue_ms = {WIFI_QUEUE_MS}\n"
    )
}

fn bridge_properties() -> String {
    format!(
        "down_mbps = {BRIDGE_MBPS}\nup_mbps = {BRIDGE_MBPS}\nrtt_ms = {BRIDGE_RTT_MS}\n\
         queue_bytes = {BRIDGE_QUEUE_BYTES}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: LinkRates = LinkRates {
        wifi: 320_000.0,
        bridge: 5_500.0,
    };

    #[test]
    fn the_ideal_is_each_link_for_the_time_it_is_the_one() {
        let holes = Holes::drawn(1, CABERNET.stays, CABERNET.holes, Span::from_secs(36));
        assert_eq!(holes.there(), Span::from_secs(4));
        assert_eq!(RATES.ideal(&holes), 4.0 * 320_000.0 + 32.0 * 5_500.0);
    }

    #[test]
    fn scenarios_parse_with_every_hole_in_them() {
        let holes = Holes::drawn(3, CABERNET.stays, CABERNET.holes, SESSION);
        let text = scenario(3, SESSION, Some(&holes), true);
        let scenario = Scenario::parse("E1", &text, &mut |_| unreachable!()).unwrap();
        assert_eq!(scenario.links.len(), 2);
        let begins = scenario.links[0]
            .at
            .iter()
            .filter(|at| at.dead == Some(true));
        assert_eq!(begins.count(), holes.iter().count());
        let link = wifi_link(
            "lane0",
            &holes,
            "none",
            &bridge_properties(),
            &wifi_properties(),
        );
        let text = format!("duration_s = 300\n{link}");
        Scenario::parse("lanes", &text, &mut |_| unreachable!()).unwrap();
    }
}
