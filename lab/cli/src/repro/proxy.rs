//! C6 and C9: what one proxy process carries awake, and what it keeps asleep.

use super::measured::by_bench;
use super::runner::Measured;
use serde::Deserialize;
use serde_json::{Value, json};

/// How many flows the authors of the paper had.
const FLOWS_AWAKE: u64 = 65_536;
const FLOWS_ASLEEP: u64 = 1_000_000;

#[derive(Deserialize)]
struct Churn {
    flows: u64,
    goodput_ratio: f64,
    jain: f64,
    jain_mean: f64,
    jain_without_churn: f64,
    mbps_without_churn: f64,
    mbps: f64,
    link_mbps: f64,
    minute_s: f64,
    scale: f64,
    window_bytes: u64,
    server_rss_bytes: u64,
    calling_s: f64,
}

/// C6, on real sockets.
pub fn churn() -> anyhow::Result<Measured> {
    let flows = FLOWS_AWAKE.to_string();
    Ok(judge_churn(&by_bench(&["churn", "--flows", &flows])?))
}

fn judge_churn(churn: &Churn) -> Measured {
    Measured {
        ours: json!({
            "flows": churn.flows,
            "goodput_ratio": churn.goodput_ratio,
            "jain": churn.jain,
            "jain_mean": churn.jain_mean,
            "mbps": churn.mbps,
            "server_rss_bytes": churn.server_rss_bytes,
            "calling_s": churn.calling_s,
        }),
        baseline: json!({
            "without_churn": { "mbps": churn.mbps_without_churn, "jain": churn.jain_without_churn }
        }),
        mark: vec![
            format!("flows >= {FLOWS_AWAKE}"),
            "goodput_ratio >= 0.9".to_owned(),
            "jain > 0.9".to_owned(),
        ],
        conditions: vec![
            format!(
                "a session, a host key and a flow each; minutes of {} s ({} times faster), a tenth of \
                 all leaves or comes in each; the protocol's own times are not scaled",
                churn.minute_s, churn.scale
            ),
            format!(
                "one server process, one process for all hosts; what limits them is the server's \
                 link, {} Mb/s where the authors had 10 Gb/s, so that both ends fit two cores; each \
                 host lets {} B be on the way to it",
                churn.link_mbps, churn.window_bytes
            ),
            "jain: the least of any minute, over the flows active in it".to_owned(),
        ],
    }
}

#[derive(Deserialize)]
struct Idle {
    flows: u64,
    rss_bytes: u64,
    woken: u64,
    woken_ok: u64,
}

/// C9, on real sockets.
pub fn asleep() -> anyhow::Result<Measured> {
    let flows = FLOWS_ASLEEP.to_string();
    Ok(judge_asleep(&by_bench(&["idle", "--flows", &flows])?))
}

fn judge_asleep(idle: &Idle) -> Measured {
    Measured {
        ours: json!({
            "flows": idle.flows,
            "rss_bytes": idle.rss_bytes,
            "bytes_a_flow": idle.rss_bytes as f64 / idle.flows as f64,
            "woken": idle.woken,
            "woken_ok": idle.woken_ok,
        }),
        baseline: Value::Null,
        mark: vec![
            format!("flows >= {FLOWS_ASLEEP}"),
            // The paper's, then ours.
            "rss_bytes <= 1000000000".to_owned(),
            "rss_bytes <= 300000000".to_owned(),
            "woken >= 1".to_owned(),
            "woken_ok == woken".to_owned(),
        ],
        conditions: vec![
            "flows of as many hosts asleep in one server process; resident memory of all of it; some \
             of them woken and their bytes compared"
                .to_owned(),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::mark;

    fn holds(measured: &Measured) -> bool {
        mark::holds(&measured.mark, &measured.ours).unwrap()
    }

    #[test]
    fn churn_holds_if_goodput_stays_and_is_shared() {
        let churn = |flows, goodput_ratio, jain| {
            judge_churn(&Churn {
                flows,
                goodput_ratio,
                jain,
                jain_mean: jain,
                jain_without_churn: 1.0,
                mbps_without_churn: 100.0,
                mbps: 90.0,
                link_mbps: 280.0,
                minute_s: 6.0,
                scale: 10.0,
                window_bytes: 4096,
                server_rss_bytes: 1,
                calling_s: 1.0,
            })
        };
        assert!(holds(&churn(65_536, 0.9, 0.91)));
        assert!(!holds(&churn(65_535, 0.95, 0.95)));
        assert!(!holds(&churn(65_536, 0.89, 0.95)));
        assert!(!holds(&churn(65_536, 0.95, 0.9)));
    }

    #[test]
    fn sleep_holds_if_it_is_small_and_everybody_asked_wakes_right() {
        let idle = |rss_bytes, woken, woken_ok| {
            judge_asleep(&Idle {
                flows: 1_000_000,
                rss_bytes,
                woken,
                woken_ok,
            })
        };
        assert!(holds(&idle(280_000_000, 1000, 1000)));
        assert!(!holds(&idle(310_000_000, 1000, 1000)));
        assert!(!holds(&idle(280_000_000, 1000, 999)));
        assert!(!holds(&idle(280_000_000, 0, 0)));
    }
}
