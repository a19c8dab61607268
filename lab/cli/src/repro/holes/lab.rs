//! E1 on real sockets.

use std::io::Write;
use std::ops::Range;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, ensure};
use cedos_lab_link::{Holes, Span};
use cedos_lab_scenario::RunReport;
use serde::Deserialize;
use serde_json::json;

use super::model::TcpHoleModel;
use super::{
    CABERNET, CaseTotals, HoleCase, HoleSessionBytes, LEAD, LinkRates, SESSION, bridge_properties,
    carried, evenly_30, least, scenario, wifi_link, wifi_properties,
};
use crate::repro::measured::by_bench;
use crate::repro::runner::Measured;

/// The cases on real sockets.
pub(super) const CASES_LAB: [(&str, HoleCase); 5] = [
    ("even_5", evenly_30(5)),
    ("even_15", evenly_30(15)),
    ("even_30", evenly_30(30)),
    ("even_60", evenly_30(60)),
    ("stay_4_hole_32", CABERNET),
];

/// The most links of one scenario. It is even, so that pairs are measured together.
const LANES_MAX: usize = 16;
/// The number of further sequences of outages for each case that TCP is run with, because it loses
/// packets at random.
const COURSES_MORE: u64 = 4;
/// The number of sequences of outages for each case that D2TP is run with.
const COURSES: u64 = 3;

/// The measurements of the bench.
#[derive(Deserialize)]
struct HoleLabMeasurements {
    rows: Vec<HoleLabLink>,
}

#[derive(Deserialize)]
struct HoleLabLink {
    from_s: f64,
    mbps: f64,
}

impl HoleLabLink {
    fn bytes_per_s(&self) -> f64 {
        self.mbps * 1e6 / 8.0
    }
}

/// On real sockets: D2TP over both links, and over each alone; kernel TCP without the bridge, and
/// with it by switching as the authors did; the model compared with the measurement.
pub fn emulate() -> anyhow::Result<Measured> {
    let holes = course(0, SESSION);
    let length = Holes::none(SESSION).after(LEAD).length();
    let whole = Holes::none(length);
    let per_s = |carried: HoleSessionBytes| carried.all / length.as_secs_f64();
    // All at once: each takes four minutes and little processor time.
    let by_themselves = [
        scenario(1, length, Some(&whole), false),
        scenario(1, length, None, true),
    ]
    .map(|text| Lab::start(&text));
    let (tcp, first) = std::thread::scope(|scope| {
        let d2tp = scope.spawn(|| both_and_alone(&holes));
        (tcp_lanes(&whole, &holes), d2tp.join())
    });
    let (tcp, first) = (tcp?, first.expect("it does not panic")?);
    let [wifi, bridge] = by_themselves.map(|lab| lab.and_then(Lab::end));
    let rates = LinkRates {
        wifi: per_s(wifi?),
        bridge: per_s(bridge?),
    };
    let model = TcpHoleModel::of(tcp.rows[0].bytes_per_s());
    let mut d2tp = vec![(holes.clone(), first)];
    let mut more = vec![TcpBesideModel::default(); CASES_LAB.len()];
    for n in 1..COURSES {
        let holes = course(n, SESSION);
        let came = std::thread::scope(|scope| {
            let d2tp = scope.spawn(|| both_and_alone(&holes));
            let from = 1 + (n - 1) * COURSES_MORE;
            more_of_tcp(&model, from..from + COURSES_MORE, &mut more)?;
            d2tp.join().expect("it does not panic")
        })?;
        d2tp.push((holes, came));
    }
    let (mut cases, mut baseline) = (serde_json::Map::new(), serde_json::Map::new());
    let (mut shares, mut by_alone, mut errors) = (Vec::new(), Vec::new(), Vec::new());
    for (n, ((name, _), holes)) in CASES_LAB.iter().zip(&holes).enumerate() {
        let mut sums = CaseTotals::default();
        for (holes, came) in &d2tp {
            let (both, alone) = came[n];
            sums.add(&rates, &holes[n], both, alone.all);
        }
        shares.push(sums.share());
        by_alone.push(sums.both.all / sums.alone);
        cases.insert((*name).to_owned(), sums.row());
        let [cubic, reno, bridged] = &tcp.rows[1 + 3 * n..][..3] else {
            unreachable!("three of each case were asked for")
        };
        let mut beside = more[n].clone();
        beside.add(&model, holes, cubic, reno);
        let error = beside.error();
        errors.push(error);
        baseline.insert(
            (*name).to_owned(),
            json!({
                "sessions": 2 * beside.courses,
                "tcp_kbps": beside.mean(beside.cubic),
                "tcp_reno_kbps": beside.mean(beside.reno),
                "model_kbps": beside.mean(beside.said),
                "model_error": error,
                "tcp_over_bridge_kbps": bridged.mbps * 1e3,
            }),
        );
    }
    let ours = json!({
        "share_of_ideal_least": least(&shares),
        "by_one_link_least": least(&by_alone),
        "model_error_mean": errors.iter().sum::<f64>() / errors.len() as f64,
        "wifi_kbps": rates.wifi * 8e-3,
        "bridge_kbps": rates.bridge * 8e-3,
        "cases": cases,
    });
    let baseline = json!({"tcp_whole_kbps": tcp.rows[0].mbps * 1e3, "cases": baseline});
    Ok(Measured::figures(ours, baseline, COURSES as usize))
}

/// The model and what TCP carried, in kb/s summed over sequences of outages.
#[derive(Clone, Default)]
struct TcpBesideModel {
    courses: u64,
    said: f64,
    cubic: f64,
    reno: f64,
}

impl TcpBesideModel {
    fn add(
        &mut self,
        model: &TcpHoleModel,
        holes: &Holes,
        cubic: &HoleLabLink,
        reno: &HoleLabLink,
    ) {
        let said =
            |lane: &HoleLabLink| model.carries(holes, lane.from_s) * 8e-3 / SESSION.as_secs_f64();
        self.courses += 1;
        self.said += (said(cubic) + said(reno)) / 2.0;
        self.cubic += cubic.mbps * 1e3;
        self.reno += reno.mbps * 1e3;
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / self.courses as f64
    }

    fn error(&self) -> f64 {
        let was = (self.cubic + self.reno) / 2.0;
        (self.said - was).abs() / was
    }
}

/// A sequence of outages for each case, in sessions of this length.
pub(super) fn course(n: u64, session: Span) -> Vec<Holes> {
    (CASES_LAB.iter().zip(1..))
        .map(|((_, case), seed)| (case, 100 * n + seed))
        .map(|(case, seed)| Holes::drawn(seed, case.stays, case.holes, session).after(LEAD))
        .collect()
}

/// What D2TP carries in each case, over both links and over Wi-Fi alone.
fn both_and_alone(holes: &[Holes]) -> anyhow::Result<Vec<(HoleSessionBytes, HoleSessionBytes)>> {
    let begun = |(seed, holes): (u64, &Holes)| {
        let lab = |bridge| Lab::start(&scenario(seed, holes.length(), Some(holes), bridge));
        anyhow::Ok((lab(true)?, lab(false)?))
    };
    let labs: anyhow::Result<Vec<_>> = (1..).zip(holes).map(begun).collect();
    let ended = |(both, alone): (Lab, Lab)| anyhow::Ok((both.end()?, alone.end()?));
    labs?.into_iter().map(ended).collect()
}

/// Further sessions of kernel TCP for each case.
fn more_of_tcp(
    model: &TcpHoleModel,
    courses: Range<u64>,
    more: &mut [TcpBesideModel],
) -> anyhow::Result<()> {
    let dead = ("dead = true".to_owned(), "dead = false".to_owned());
    let drawn: Vec<Vec<Holes>> = courses.map(|n| course(n, SESSION)).collect();
    let courses: Vec<Vec<Holes>> = (0..CASES_LAB.len())
        .map(|case| drawn.iter().map(|course| course[case].clone()).collect())
        .collect();
    let links: Vec<_> = (courses.iter().flatten())
        .flat_map(|holes| [(holes, "tcp", &dead), (holes, "tcp-reno", &dead)])
        .collect();
    let measured: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = (links.chunks(LANES_MAX))
            .map(|links| scope.spawn(move || lanes(links)))
            .collect();
        let ended = running.into_iter().map(|run| run.join());
        ended.map(|run| run.expect("it does not panic")).collect()
    });
    let rows: Vec<HoleLabLink> = (measured
        .into_iter()
        .collect::<anyhow::Result<Vec<HoleLabMeasurements>>>()?)
    .into_iter()
    .flat_map(|lanes| lanes.rows)
    .collect();
    let mut pairs = rows.chunks(2);
    for (courses, beside) in courses.iter().zip(more) {
        for holes in courses {
            let [cubic, reno] = pairs.next().expect("as many as were asked for") else {
                unreachable!("two of each course were asked for")
            };
            beside.add(model, holes, cubic, reno);
        }
    }
    Ok(())
}

fn tcp_lanes(whole: &Holes, holes: &[Holes]) -> anyhow::Result<HoleLabMeasurements> {
    let dead = ("dead = true".to_owned(), "dead = false".to_owned());
    let bridged = (bridge_properties(), wifi_properties());
    let mut links = vec![(whole, "tcp", &dead)];
    for holes in holes {
        links.extend([
            (holes, "tcp", &dead),
            (holes, "tcp-reno", &dead),
            (holes, "tcp", &bridged),
        ]);
    }
    lanes(&links)
}

/// Runs a flow over each of these Wi-Fi links, with settings for the times in outages and outside.
fn lanes(links: &[(&Holes, &str, &(String, String))]) -> anyhow::Result<HoleLabMeasurements> {
    let mut text = "duration_s = 86_400\n".to_owned();
    for (n, (holes, _, (gone, there))) in links.iter().enumerate() {
        text += &wifi_link(&format!("lane{n}"), holes, "none", gone, there);
    }
    let file = file_of(&text)?;
    let path = file
        .path()
        .to_str()
        .context("an odd folder for temporary files")?;
    let peers: Vec<_> = links.iter().map(|(_, peer, _)| *peer).collect();
    let seconds = SESSION.as_secs_f64().to_string();
    let lanes: HoleLabMeasurements = by_bench(&[
        "lanes",
        "--scenario",
        path,
        "--peers",
        &peers.join(","),
        "--seconds",
        &seconds,
    ])?;
    ensure!(lanes.rows.len() == links.len(), "the bench left a lane out");
    Ok(lanes)
}

fn file_of(text: &str) -> anyhow::Result<tempfile::NamedTempFile> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile()?;
    file.write_all(text.as_bytes())?;
    Ok(file)
}

/// A `cedos lab run` that is under way.
struct Lab {
    child: Child,
    _file: tempfile::NamedTempFile,
}

impl Lab {
    fn start(text: &str) -> anyhow::Result<Lab> {
        let file = file_of(text)?;
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let child = Command::new(program)
            .args(["lab", "run", "--json"])
            .arg(file.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("`cedos lab run` cannot be run")?;
        Ok(Lab { child, _file: file })
    }

    fn end(self) -> anyhow::Result<HoleSessionBytes> {
        let told = self.child.wait_with_output()?;
        let report: RunReport = serde_json::from_slice(&told.stdout)
            .context("`cedos lab run` ended without its report")?;
        carried(&report)
    }
}
