//! Two paths at once: what a download gets of the sum of both.
//!
//! ```text
//!               ┌ 10 Mb/s, 20 or 200 ms ──────────┐
//!  origin ──────┤                                 ├── device
//!               └ 10 or 1 Mb/s, 20 or 200 ms ─────┘
//! ```
//!
//! On real sockets beside the kernel's MPTCP over both and its TCP over the better one.

use super::emulated::{D2TP, MPTCP, TCP, emulated, mbps};
use super::plot::{Chart, Series};
use super::runner::{Measured, RowVenue};
use anyhow::{Context, ensure};
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Map, Value, json};
use toml::Table;

/// Name and content.
macro_rules! scenario {
    ($name:literal) => {
        (
            $name,
            include_str!(concat!("../../../scenarios/two-paths-", $name, ".toml")),
        )
    };
}

/// Name and file, `lab/scenarios/two-paths-….toml`.
const SCENARIOS: [(&str, &str); 5] = [
    scenario!("even"),
    scenario!("even-far"),
    scenario!("uneven"),
    scenario!("uneven-far"),
    scenario!("uneven-near"),
];

/// Payload of a full packet of TCP with timestamps: more than D2TP or MPTCP have, so the sum is what
/// none of the three quite reaches.
const PAYLOAD_SHARE: f64 = 1448.0 / 1500.0;
/// How long both links carry the object at best.
const SECONDS: f64 = 30.0;

/// In virtual time, beside D2TP over the better path alone.
pub fn in_virtual_time() -> anyhow::Result<Measured> {
    measure(RowVenue::Sim, |pair| {
        let ours = simulate(&pair.text)?;
        let alone = simulate(&pair.alone)?;
        Ok((ours, alone, json!({"d2tp_better_mbps": alone})))
    })
}

/// On real sockets, in turn.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    measure(RowVenue::Lab, |pair| {
        let ours = emulated(&pair.text, D2TP)?;
        let several = emulated(&pair.text, MPTCP)?;
        let alone = mbps(&emulated(&pair.text, TCP)?)?;
        let mptcp = mbps(&several)?;
        let baseline = json!({
            "mptcp_mbps": mptcp,
            "mptcp_of_sum": mptcp / pair.sum_mbps,
            "mptcp_by_tcp_better": mptcp / alone,
            "mptcp_bytes_by_link": both(&several)?,
            "tcp_better_mbps": alone,
        });
        both(&ours)?;
        Ok((mbps(&ours)?, alone, baseline))
    })
}

/// Two paths, and an object for them.
struct TwoPathSetup {
    text: String,
    /// With the better path alone.
    alone: String,
    sum_mbps: f64,
}

impl TwoPathSetup {
    /// The set-up of a scenario file, with an object that both links carry in so many seconds.
    fn of(file: &str, seconds: f64) -> anyhow::Result<TwoPathSetup> {
        let mut table: Table = file.parse()?;
        let links = table["link"].as_array().context("no links")?;
        let rate = |link: &toml::Value| {
            let rate = &link["down_mbps"];
            rate.as_float()
                .or(rate.as_integer().map(|whole| whole as f64))
        };
        let rates: Option<Vec<f64>> = links.iter().map(rate).collect();
        let sum_mbps = rates.context("no rate")?.iter().sum::<f64>() * PAYLOAD_SHARE;
        let better = links[0].clone();
        let bytes = (sum_mbps * 1e6 / 8.0 * seconds) as i64;
        table["flow"][0]["bytes"] = bytes.into();
        // The better path alone takes twice as long at most, where both are alike.
        table["duration_s"] = (4.0 * seconds).into();
        // They are about the file's own object.
        table.remove("expect");
        table.insert("origin".to_owned(), "builtin".into());
        let text = table.to_string();
        table["link"] = vec![better].into();
        Ok(TwoPathSetup {
            text,
            alone: table.to_string(),
            sum_mbps,
        })
    }
}

/// Measures each pair: ours, the better path alone, and further figures.
fn measure(
    place: RowVenue,
    run: impl Fn(&TwoPathSetup) -> anyhow::Result<(f64, f64, Value)>,
) -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for (name, file) in SCENARIOS {
        let pair = TwoPathSetup::of(file, SECONDS)?;
        let (mbps, alone, beside) = run(&pair).context(name)?;
        ours.insert(name.to_owned(), judge(mbps, alone, pair.sum_mbps));
        baseline.insert(name.to_owned(), beside);
        mark.extend(marks(name));
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: conditions(place, SECONDS),
    })
}

fn judge(mbps: f64, alone: f64, sum_mbps: f64) -> Value {
    json!({
        "mbps": mbps,
        "sum_mbps": sum_mbps,
        "better_alone_mbps": alone,
        "of_sum": mbps / sum_mbps,
    })
}

/// What both bring, and the better path alone, of the sum.
pub fn charts(ours: &Value, _: &Value) -> Vec<Chart> {
    let pairs = ours.as_object().into_iter().flatten();
    let points = |figure: &str| {
        let of = |(n, (_, pair)): (usize, (&String, &Value))| {
            Some((
                n as f64 + 1.0,
                100.0 * pair[figure].as_f64()? / pair["sum_mbps"].as_f64()?,
            ))
        };
        pairs.clone().enumerate().filter_map(of).collect()
    };
    let names: Vec<String> = (pairs.clone().zip(1..))
        .map(|((name, _), n)| format!("{n} {}", name.replace('_', " ")))
        .collect();
    let mark = vec![(0.0, 90.0), (names.len() as f64 + 0.5, 90.0)];
    vec![Chart {
        title: names.join(", "),
        x: "pair of paths".to_owned(),
        y: "% of the sum".to_owned(),
        series: vec![
            Series::line("mark", mark),
            Series::dots("both", points("mbps")),
            Series::dots("the better one alone", points("better_alone_mbps")),
        ],
    }]
}

fn marks(name: &str) -> [String; 2] {
    [
        format!("{name}.mbps >= 0.9 * {name}.sum_mbps"),
        format!("{name}.mbps >= {name}.better_alone_mbps"),
    ]
}

fn simulate(text: &str) -> anyhow::Result<f64> {
    let scenario = Scenario::parse("two-paths", text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    mbps(&cedos_lab_sim::run(&scenario, None)?.report)
}

/// What each of the two links brought: a run over one of them shows nothing.
fn both(report: &RunReport) -> anyhow::Result<Value> {
    let flow = report.flows.first().context("the report has no flow")?;
    for link in &report.links {
        ensure!(
            flow.bytes_by_link.get(&link.name).is_some_and(|n| *n > 0),
            "{} carried nothing: {:?}",
            link.name,
            flow.bytes_by_link
        );
    }
    Ok(json!(flow.bytes_by_link))
}

fn conditions(place: RowVenue, seconds: f64) -> Vec<String> {
    let mut all = vec![
        format!(
            "lab/scenarios/two-paths-*.toml ({}): 10 + 10 Mb/s at 20 and 20, 20 and 200 ms; 10 + 1 Mb/s at \
             20 and 20, 20 and 200, 200 and 20 ms; queues of 125 kB",
            place.word()
        ),
        format!(
            "one download that both links carry in {seconds} s, from its first byte to its last, slow \
             start included"
        ),
        "the sum is that of the links' rates, times 1,448 / 1,500: the payload of full TCP packets"
            .to_owned(),
    ];
    all.extend(match place {
        RowVenue::Sim => vec!["better_alone: D2TP over the first link".to_owned()],
        RowVenue::Lab => vec![
            "in turn: D2TP through the proxy, kernel MPTCP and kernel TCP straight from the origin; all \
             with CUBIC on each path, the two of the kernel without encryption"
                .to_owned(),
            "MPTCP: the kernel's scheduler and path manager, `subflow fullmesh` endpoints on both links, \
             buffers of up to 32 MB (receiver) and 16 MB (sender); better_alone: TCP over the first link"
                .to_owned(),
        ],
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::mark;

    #[test]
    fn it_holds_from_nine_tenths_of_the_sum_on_and_never_below_the_better_path() {
        let holds = |mbps, alone| {
            let figures = json!({"even": judge(mbps, alone, 20.0)});
            mark::holds(&marks("even"), &figures).unwrap()
        };
        assert!(holds(18.0, 9.5));
        assert!(!holds(17.9, 9.5));
        assert!(!holds(18.5, 18.6));
    }

    #[test]
    fn every_pair_is_read_and_has_an_object_of_its_own() {
        for (name, file) in SCENARIOS {
            let pair = TwoPathSetup::of(file, 10.0).unwrap();
            let parse = |text: &str| {
                Scenario::parse(name, text, &mut |_| unreachable!()).expect("a scenario")
            };
            let (two, one) = (parse(&pair.text), parse(&pair.alone));
            assert_eq!((two.links.len(), one.links.len()), (2, 1));
            let seconds = two.flows[0].bytes.unwrap() as f64 * 8e-6 / pair.sum_mbps;
            assert!((seconds - 10.0).abs() < 1e-3, "{name}: {seconds}");
            assert!(one.duration_s > 2.0 * seconds, "{name}");
        }
    }

    #[test]
    fn a_run_over_one_of_the_links_is_none() {
        let mut report = RunReport::default();
        report.flows.push(Default::default());
        report.links.resize_with(2, Default::default);
        for (link, name) in report.links.iter_mut().zip(["wlan0", "wlan1"]) {
            link.name = name.to_owned();
        }
        report.flows[0].bytes_by_link.insert("wlan0".to_owned(), 9);
        assert!(both(&report).is_err());
        report.flows[0].bytes_by_link.insert("wlan1".to_owned(), 1);
        assert!(both(&report).is_ok());
    }
}
