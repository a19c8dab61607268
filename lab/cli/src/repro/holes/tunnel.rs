//! E1 for kernel TCP of a server and a program that know nothing of D2TP, through a VPN.
//!
//! ```text
//!  curl ─ TCP ─ cedos vpn up --tcp packets ═ Wi-Fi, bridge ═ cedos prox --tunnel-net ─ TCP ─ nginx
//! ```
//!
//! The ideal is that of the row: what the VPN carries over each link alone, without outages, for the time in which the link
//! is the one. A second one takes what TCP without a VPN carries over Wi-Fi instead.

use anyhow::{bail, ensure};
use cedos_lab_link::{Holes, Span};
use serde_json::{Value, json};

use super::lab::{CASES_LAB, course};
use super::{
    CaseTotals, HoleSessionBytes, LEAD, LinkRates, SESSION_S, WIFI, carried, least, scenario,
};
use crate::repro::emulated::{StartedLabRun, TUNNEL};
use crate::repro::runner::Measured;

/// The number of sequences of outages for each case.
const COURSES: u64 = 3;
/// The shortest session that shows anything: a stay of 30 s after a hole of 60 s.
const SESSION_S_MIN: u64 = 90;

/// What is run of the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelHoles {
    /// The length of a session, in seconds.
    pub session_s: u64,
    /// Sequences of outages for each case.
    pub courses: u64,
    /// The names of the cases; all if empty.
    pub only: Vec<String>,
}

impl Default for TunnelHoles {
    fn default() -> TunnelHoles {
        TunnelHoles {
            session_s: SESSION_S,
            courses: COURSES,
            only: Vec::new(),
        }
    }
}

impl TunnelHoles {
    /// The numbers of the cases that are run.
    fn cases(&self) -> anyhow::Result<Vec<usize>> {
        let names = || CASES_LAB.iter().map(|(name, _)| *name);
        for name in &self.only {
            if !names().any(|known| known == name) {
                let all: Vec<_> = names().collect();
                bail!("there is no case `{name}`; there are {}", all.join(", "));
            }
        }
        let is_wanted = |name: &str| self.only.is_empty() || self.only.iter().any(|n| n == name);
        let numbered = names().enumerate();
        Ok(numbered
            .filter_map(|(n, name)| is_wanted(name).then_some(n))
            .collect())
    }

    /// What differs from the whole row, in words: a result of less says so.
    fn conditions(&self) -> Vec<String> {
        let whole = TunnelHoles::default();
        let mut differs = Vec::new();
        if self.session_s != whole.session_s {
            differs.push(format!(
                "a trial with sessions of {} s instead of {SESSION_S} s",
                self.session_s
            ));
        }
        if self.courses != whole.courses {
            differs.push(format!(
                "a trial with {} sessions of each case instead of {COURSES}",
                self.courses
            ));
        }
        if !self.only.is_empty() {
            differs.push(format!("a trial of {} alone", self.only.join(", ")));
        }
        differs
    }
}

/// The whole row.
///
/// # Errors
/// A lab could not be run.
pub fn emulate() -> anyhow::Result<Measured> {
    tunnelled(&TunnelHoles::default())
}

/// Runs these cases: each session through the VPN with the bridge and without, and without a VPN.
///
/// # Errors
/// A lab could not be run, or there is no such case.
pub fn tunnelled(asked: &TunnelHoles) -> anyhow::Result<Measured> {
    let cases = asked.cases()?;
    ensure!(
        asked.session_s >= SESSION_S_MIN && asked.courses > 0,
        "a session takes {SESSION_S_MIN} s at least, and each case has one"
    );
    let session = Span::from_secs(asked.session_s);
    let length = Holes::none(session).after(LEAD).length();
    let whole = Holes::none(length);
    let over_wifi = format!("tcp:{WIFI}");
    let tcp = ["--over", over_wifi.as_str()];
    let alone = [
        (scenario(1, length, Some(&whole), false), TUNNEL),
        (scenario(1, length, None, true), TUNNEL),
        (scenario(1, length, Some(&whole), false), &tcp[..]),
    ];
    // All sessions of a course at once: each takes four minutes and little processor time.
    let alone = alone.map(|(text, options)| StartedLabRun::begin(&text, options));
    let mut sums: Vec<TunnelCaseTotals> = Vec::new();
    sums.resize_with(cases.len(), TunnelCaseTotals::default);
    let mut sessions = Vec::new();
    for n in 0..asked.courses {
        let drawn = course(n, session);
        let begun = cases.iter().map(|case| {
            let (seed, holes) = (1 + *case as u64, &drawn[*case]);
            let lab = |bridge, options: &[&str]| {
                StartedLabRun::begin(&scenario(seed, length, Some(holes), bridge), options)
            };
            anyhow::Ok([lab(true, TUNNEL)?, lab(false, TUNNEL)?, lab(false, &tcp)?])
        });
        let begun: Vec<_> = begun.collect::<anyhow::Result<_>>()?;
        for (case, labs) in cases.iter().zip(begun) {
            let [both, alone, tcp] = labs.map(ended);
            sessions.push((*case, drawn[*case].clone(), both?, alone?, tcp?));
        }
    }
    let per_s = |carried: HoleSessionBytes| carried.all / length.as_secs_f64();
    let [wifi, bridge, tcp] = alone.map(|lab| lab.and_then(ended));
    let rates = LinkRates {
        wifi: per_s(wifi?),
        bridge: per_s(bridge?),
    };
    let by_tcp = LinkRates {
        wifi: per_s(tcp?),
        ..rates
    };
    for (case, holes, both, alone, tcp) in &sessions {
        let of_case = cases.iter().zip(&mut sums).find(|(n, _)| *n == case);
        let (_, sums) = of_case.expect("only these were run");
        sums.vpn.add(&rates, holes, *both, alone.all);
        sums.tcp += tcp.all;
        sums.ideal_by_tcp += by_tcp.ideal(holes);
    }
    let names = || cases.iter().map(|case| CASES_LAB[*case].0);
    let rows = names().zip(&sums);
    let rows: serde_json::Map<_, _> = rows
        .map(|(name, sums)| (name.to_owned(), sums.row()))
        .collect();
    let beside = names().zip(&sums);
    let beside: serde_json::Map<_, _> = beside
        .map(|(name, sums)| (name.to_owned(), json!({"tcp_kbps": sums.kbps(sums.tcp)})))
        .collect();
    let of = |figure: fn(&TunnelCaseTotals) -> f64| sums.iter().map(figure).collect::<Vec<_>>();
    let ours = json!({
        "session_s": asked.session_s,
        "share_of_ideal_least": least(&of(|sums| sums.vpn.share())),
        "by_one_link_least": least(&of(|sums| sums.vpn.both.all / sums.vpn.alone)),
        "by_tcp_least": least(&of(TunnelCaseTotals::by_tcp)),
        "share_of_ideal_by_tcp_least": least(&of(TunnelCaseTotals::share_of_ideal_by_tcp)),
        "wifi_kbps": rates.wifi * 8e-3,
        "bridge_kbps": rates.bridge * 8e-3,
        "cases": rows,
    });
    let baseline = json!({"tcp_whole_kbps": by_tcp.wifi * 8e-3, "cases": beside});
    let mut measured = Measured::figures(ours, baseline, asked.courses as usize);
    measured.conditions = asked.conditions();
    Ok(measured)
}

fn ended(lab: StartedLabRun) -> anyhow::Result<HoleSessionBytes> {
    carried(&lab.report()?)
}

/// Sessions of one case: through the VPN, and without it.
#[derive(Default)]
struct TunnelCaseTotals {
    vpn: CaseTotals,
    /// What TCP carried over Wi-Fi without a VPN, in bytes.
    tcp: f64,
    /// The ideal, if Wi-Fi carries what TCP without a VPN gets from it.
    ideal_by_tcp: f64,
}

impl TunnelCaseTotals {
    fn kbps(&self, bytes: f64) -> f64 {
        bytes * 8e-3 / self.vpn.lasted_s
    }

    fn by_tcp(&self) -> f64 {
        self.vpn.both.all / self.tcp
    }

    fn share_of_ideal_by_tcp(&self) -> f64 {
        self.vpn.both.all / self.ideal_by_tcp
    }

    fn row(&self) -> Value {
        let mut row = self.vpn.row();
        let figures = row.as_object_mut().expect("a row is an object");
        // The lab cannot tell by which link a VPN got the bytes of an application.
        figures.remove("wifi_share_of_ideal");
        figures.insert("by_tcp".to_owned(), json!(self.by_tcp()));
        let share = self.share_of_ideal_by_tcp();
        figures.insert("share_of_ideal_by_tcp".to_owned(), json!(share));
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_says_how_it_differs_from_the_row_and_refuses_unknown_cases() {
        assert!(TunnelHoles::default().conditions().is_empty());
        let trial = TunnelHoles {
            session_s: 120,
            courses: 1,
            only: vec!["even_60".to_owned()],
        };
        assert_eq!(
            trial.conditions(),
            [
                "a trial with sessions of 120 s instead of 240 s",
                "a trial with 1 sessions of each case instead of 3",
                "a trial of even_60 alone",
            ]
        );
        assert_eq!(trial.cases().unwrap(), [3]);
        let only = vec!["even_61".to_owned()];
        let fault = TunnelHoles { only, ..trial }.cases().unwrap_err();
        assert!(fault.to_string().contains("even_60"), "{fault}");
    }

    #[test]
    fn shares_are_of_the_vpns_own_ideal_and_of_that_of_tcp_without_it() {
        let holes = Holes::none(Span::from_secs(10));
        let rates = LinkRates {
            wifi: 100.0,
            bridge: 1.0,
        };
        let mut sums = TunnelCaseTotals {
            tcp: 500.0,
            ideal_by_tcp: 1_250.0,
            ..TunnelCaseTotals::default()
        };
        let both = HoleSessionBytes {
            all: 1_000.0,
            wifi: 0.0,
        };
        sums.vpn.add(&rates, &holes, both, 900.0);
        let row = sums.row();
        assert_eq!(
            [
                &row["share_of_ideal"],
                &row["share_of_ideal_by_tcp"],
                &row["by_tcp"]
            ],
            [1.0, 0.8, 2.0]
        );
        assert_eq!(row["wifi_share_of_ideal"], Value::Null);
    }
}
