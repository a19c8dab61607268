//! C2: do a hundred flows that end on one device share its bottleneck as evenly as TCP's do?

use super::measured::by_bench;
use super::runner::Measured;
use anyhow::Context;
use serde::Deserialize;
use serde_json::{Map, Value, json};

const ROUNDS: &str = "3";

#[derive(Deserialize)]
struct Fairness {
    rows: Vec<ReproFairnessRow>,
    network: String,
    conditions: String,
}

#[derive(Deserialize)]
struct ReproFairnessRow {
    case: String,
    jain: f64,
    tcp_share: f64,
    jain_in_session: Option<f64>,
    mbps: f64,
    jain_range: (f64, f64),
    tcp_share_range: (f64, f64),
}

/// On real sockets over an emulated bottleneck: eleven minutes.
pub fn emulate() -> anyhow::Result<Measured> {
    judge(&by_bench(&["fairness", "--rounds", ROUNDS])?)
}

fn judge(fairness: &Fairness) -> anyhow::Result<Measured> {
    let tcp = fairness
        .rows
        .iter()
        .find(|row| row.case == "tcp")
        .context("TCP alone was not measured")?;
    let (mut ours, mut mark) = (Map::new(), Vec::new());
    for row in fairness.rows.iter().filter(|row| row.case != "tcp") {
        let name = row.case.replace('-', "_");
        mark.push(format!("{name}.jain >= 0.95"));
        mark.push(format!("{name}.jain_beyond_tcps >= -0.02"));
        let mut figures = json!({
            "jain": row.jain,
            "jain_beyond_tcps": row.jain - tcp.jain,
            "jain_range": row.jain_range,
            "mbps": row.mbps,
        });
        if row.tcp_share > 0.0 {
            let (tcp, d2tp) = (row.tcp_share, 1.0 - row.tcp_share);
            figures["tcp_share"] = json!(tcp);
            figures["tcp_share_range"] = json!(row.tcp_share_range);
            figures["smaller_half_by_larger"] = json!(tcp.min(d2tp) / tcp.max(d2tp));
        }
        if let Some(jain) = row.jain_in_session {
            figures["jain_in_session"] = json!(jain);
        }
        if row.case == "mixed" {
            mark.push(format!("{name}.smaller_half_by_larger >= 0.9"));
        }
        ours.insert(name, figures);
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: json!({
            "tcp": { "jain": tcp.jain, "jain_range": tcp.jain_range, "mbps": tcp.mbps }
        }),
        mark,
        conditions: vec![
            format!("100 flows; mixed: 50 of TCP and 50 of D2TP. {}", fairness.network),
            format!("medians of {ROUNDS} rounds; {}", fairness.conditions),
            "a session counts as one connection, whatever it carries (docs/decisions/0007); the flows \
             in it are compared with each other (jain_in_session), which take turns of 32 packets: beside \
             50 connections each of them has two or three turns in all"
                .to_owned(),
        ],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::mark;

    fn row(case: &str, jain: f64, tcp_share: f64) -> ReproFairnessRow {
        ReproFairnessRow {
            case: case.to_owned(),
            jain,
            tcp_share,
            jain_in_session: case.ends_with("session").then_some(0.99),
            mbps: 90.0,
            jain_range: (jain, jain),
            tcp_share_range: (tcp_share, tcp_share),
        }
    }

    fn holds(d2tp: ReproFairnessRow, mixed: ReproFairnessRow) -> bool {
        let fairness = Fairness {
            rows: vec![
                row("tcp", 0.98, 1.0),
                d2tp,
                mixed,
                row("mixed-one-session", 0.98, 0.98),
            ],
            network: "a link".to_owned(),
            conditions: "quiet".to_owned(),
        };
        let measured = judge(&fairness).unwrap();
        mark::holds(&measured.mark, &measured.ours).unwrap()
    }

    #[test]
    fn it_holds_if_we_are_as_even_as_tcp_and_neither_half_takes_more() {
        assert!(holds(row("d2tp", 0.97, 0.0), row("mixed", 0.965, 0.51)));
        assert!(
            !holds(row("d2tp", 0.955, 0.0), row("mixed", 0.965, 0.51)),
            "TCP has 0.98"
        );
        assert!(!holds(row("d2tp", 0.97, 0.0), row("mixed", 0.94, 0.51)));
        assert!(!holds(row("d2tp", 0.97, 0.0), row("mixed", 0.965, 0.54)));
        assert!(!holds(row("d2tp", 0.97, 0.0), row("mixed", 0.965, 0.46)));
    }
}
