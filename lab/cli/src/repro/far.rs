//! D2: throughput over long round trips, against a receive buffer of fixed size.
//!
//! A phone's largest receive buffer was set per kind of network, and too small for servers far away.
//! A receiver that moves its window by what arrives has no such size; nor have today's receivers,
//! which grow their buffers by themselves. So there are two questions: how much more than the fixed
//! one, and whether anything is lost against growing freely.

use super::cellular::{CellularNetwork, NETWORKS, emulate, simulate};
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_sim::Ends;
use d2tp_session::DrwaLambda;
use serde_json::{Map, Value, json};

/// How long the flows of a run on real sockets are counted.
const SECONDS: u32 = 30;

/// In virtual time: D2TP with a window of fixed size, with its own, and held by DRWA.
pub fn in_virtual_time() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for network in &NETWORKS {
        let mut rows = Vec::new();
        for (rtt_ms, _) in network.far {
            let scenario = network.scenario(rtt_ms)?;
            let free = Ends::default();
            let (mut fixed, mut held) = (free.clone(), free.clone());
            fixed.device.flow_window = window_of(network.rmem_max);
            held.device.drwa = Some(DrwaLambda::default());
            rows.push([
                simulate(&scenario, &fixed)?.mbps,
                simulate(&scenario, &free)?.mbps,
                simulate(&scenario, &held)?.mbps,
            ]);
        }
        let name = network.name;
        ours.insert(name.to_owned(), judge(network, &rows));
        baseline.insert(name.to_owned(), others(network, &rows));
        mark.extend(marks(name));
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: conditions(),
    })
}

/// On real sockets, at the longest round trip of each network: kernel TCP and D2TP.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for network in &NETWORKS {
        let (rtt_ms, _) = network.far[network.far.len() - 1];
        let fixed = format!("tcp-fixed-{}", network.rmem_max);
        let peers = [fixed.as_str(), "tcp", "tcp-drwa", "d2tp", "d2tp-drwa"];
        let rows = emulate(network, rtt_ms, &peers, SECONDS, 0)?;
        let mbps = |peer: &str| rows.of(peer)?.mbps.context("the bench left a peer out");
        let fixed = mbps(&fixed)?;
        let kind = |free: f64, held: f64| {
            json!({
                "mbps": held,
                "gain_at_longest": held / fixed - 1.0,
                "mbps_by_free": held / free,
            })
        };
        let name = network.name;
        ours.insert(
            name.to_owned(),
            json!({
                "rtt_ms": rtt_ms,
                "tcp": kind(mbps("tcp")?, mbps("tcp-drwa")?),
                "d2tp": kind(mbps("d2tp")?, mbps("d2tp-drwa")?),
            }),
        );
        baseline.insert(name.to_owned(), json!(rows.but(&["tcp-drwa", "d2tp-drwa"])));
        for kind in ["tcp", "d2tp"] {
            mark.extend(marks(&format!("{name}.{kind}")));
        }
    }
    let mut conditions = conditions();
    conditions.push(
        "on real sockets: the longest round trip of each network, 30 s; fixed is kernel TCP with a \
         receive buffer of that size, free is kernel TCP with the kernel's tuning (tcp_rmem up to \
         this machine's maximum) or D2TP"
            .to_owned(),
    );
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions,
    })
}

/// What a TCP of those years offered of a buffer: a quarter was kept for overhead
/// (tcp_adv_win_scale 2).
fn window_of(rmem_max: u64) -> u64 {
    rmem_max / 4 * 3
}

/// Throughputs of the five round trips: fixed, free, held.
fn judge(network: &CellularNetwork, rows: &[[f64; 3]]) -> Value {
    let sum = |of: usize| rows.iter().map(|row| row[of]).sum::<f64>();
    let gains = rows.iter().map(|[fixed, _, held]| held / fixed - 1.0);
    let gains: Vec<f64> = gains.collect();
    let rtts: Vec<f64> = network.far.iter().map(|far| far.0).collect();
    json!({
        "rtt_ms": rtts,
        "mbps": rows.iter().map(|row| row[2]).collect::<Vec<_>>(),
        "gain_over_fixed": gains,
        "gain_at_longest": gains.last(),
        "mbps_by_free": sum(2) / sum(1),
    })
}

fn others(network: &CellularNetwork, rows: &[[f64; 3]]) -> Value {
    json!({
        "fixed_window": window_of(network.rmem_max),
        "fixed_mbps": rows.iter().map(|row| row[0]).collect::<Vec<_>>(),
        "free_mbps": rows.iter().map(|row| row[1]).collect::<Vec<_>>(),
        "paper_gain_over_fixed": network.far.map(|far| far.1),
    })
}

fn marks(name: &str) -> [String; 2] {
    [
        format!("{name}.gain_at_longest > 0"),
        format!("{name}.mbps_by_free >= 0.98"),
    ]
}

fn conditions() -> Vec<String> {
    vec![
        "the networks of D1 (lab/scenarios/bloat-*.toml) at the round trips of the paper's figure 17, \
         131 to 798 ms; 60 s of one download, its start included"
            .to_owned(),
        "fixed: a window of 3/4 of 262,144 B (HSPA+), 484,848 B (LTE), 87,380 B (EVDO): the buffers \
         Android set for such networks then; that the paper's phones had these is assumed, since the \
         text we have does not say"
            .to_owned(),
        "free: D2TP's own window, 8 MiB, without DRWA; not below it means 98 % over the five round \
         trips, since drains cost up to one in a hundred"
            .to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::mark;

    fn holds(rows: &[[f64; 3]]) -> bool {
        let figures = json!({"hspa": judge(&NETWORKS[0], rows)});
        mark::holds(&marks("hspa"), &figures).unwrap()
    }

    #[test]
    fn it_holds_if_more_than_the_fixed_window_and_no_less_than_a_free_one() {
        assert!(holds(&[[2.0, 3.0, 2.97], [1.0, 3.0, 3.0]]));
        assert!(
            !holds(&[[2.0, 3.0, 2.9], [1.0, 3.0, 2.95]]),
            "less than free"
        );
        assert!(!holds(&[[2.0, 3.0, 3.0], [3.0, 3.0, 3.0]]), "no gain");
    }

    #[test]
    fn the_scenario_files_take_another_round_trip() {
        for network in &NETWORKS {
            for (rtt_ms, _) in network.far {
                assert_eq!(network.scenario(rtt_ms).unwrap().rtt_ms(), rtt_ms);
            }
        }
    }
}
