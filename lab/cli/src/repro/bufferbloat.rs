//! D1: the round trip on cellular links whose queues loss-based congestion control fills, with and
//! without a receiver that moves its window (DRWA).
//!
//! ```text
//!            ┌ CUBIC ──────────────── as it is: the queue decides
//!  sender is ┤ CUBIC, held by DRWA ── ours
//!            └ BBR, Vegas, shaping ── what else keeps queues short, at the sender
//! ```

use super::cellular::{
    CellularDownload, CellularRow, NETWORKS, OBJECT_BYTES, OBJECTS, emulate, simulate,
    simulate_objects,
};
use super::runner::{Measured, RowVenue};
use anyhow::Context;
use cedos_lab_sim::Ends;
use d2tp_session::{CongestionKind, DrwaLambda};
use serde_json::{Map, Value, json};

/// What the mark is about: the paper's λ is 3.
const RTT_BY_MIN_MAX: f64 = 3.2;
/// How long a bulk flow is counted by itself.
const BULK_S: u32 = 60;
/// Seconds of a run on real sockets with objects beside the bulk flow.
const BESIDE_S: u32 = 30;

/// In virtual time, D2TP with and without.
pub fn in_virtual_time() -> anyhow::Result<Measured> {
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    let ends = |congestion, drwa| {
        let mut ends = Ends::default();
        ends.proxy.congestion = congestion;
        ends.device.drwa = drwa;
        ends
    };
    let cubic = ends(CongestionKind::Cubic, None);
    let held = ends(CongestionKind::Cubic, Some(DrwaLambda::default()));
    let bbr = ends(CongestionKind::Bbr, None);
    for network in &NETWORKS {
        let scenario = network.scenario(network.rtt_ms)?;
        let bulk = [
            simulate(&scenario, &cubic)?,
            simulate(&scenario, &held)?,
            simulate(&scenario, &bbr)?,
        ];
        let objects = [
            simulate_objects(&scenario, &cubic)?,
            simulate_objects(&scenario, &held)?,
            simulate_objects(&scenario, &bbr)?,
        ];
        let name = network.name;
        ours.insert(
            name.to_owned(),
            judge(&bulk[0], &bulk[1], objects[0], objects[1]),
        );
        let figures = |of: usize| json!({"bulk": bulk[of], "object_ms": objects[of]});
        baseline.insert(
            name.to_owned(),
            json!({
                "d2tp_cubic": figures(0),
                "d2tp_bbr": figures(2),
                "paper_rtt_less": network.paper_rtt_less,
            }),
        );
        mark.extend(marks(name));
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: conditions(RowVenue::Sim),
    })
}

/// On real sockets: kernel TCP and D2TP, with and without, and what else there is.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    const KINDS: [(&str, &str, &str); 2] =
        [("tcp", "tcp", "tcp-drwa"), ("d2tp", "d2tp", "d2tp-drwa")];
    let (mut ours, mut baseline, mut mark) = (Map::new(), Map::new(), Vec::new());
    for network in &NETWORKS {
        let shaped = format!("tcp-shaped-{}", network.shaped_kbps);
        let peers = [
            "tcp",
            "tcp-drwa",
            "tcp-bbr",
            "tcp-bbr-drwa",
            "tcp-vegas",
            shaped.as_str(),
            "d2tp",
            "d2tp-drwa",
        ];
        let rows = emulate(network, network.rtt_ms, &peers, BULK_S, 0)?;
        // Whose objects come sooner fetches more of them: that is not to count as lost throughput.
        let with_objects = emulate(network, network.rtt_ms, &peers, BESIDE_S, OBJECTS)?;
        let mut kinds = Map::new();
        for (kind, cubic, held) in KINDS {
            let object = |peer: &str| with_objects.object_ms(peer);
            let judged = judge(
                &bulk(rows.of(cubic)?)?,
                &bulk(rows.of(held)?)?,
                object(cubic)?,
                object(held)?,
            );
            kinds.insert(kind.to_owned(), judged);
            mark.extend(marks(&format!("{}.{kind}", network.name)));
        }
        ours.insert(network.name.to_owned(), Value::Object(kinds));
        const OURS: [&str; 2] = ["tcp-drwa", "d2tp-drwa"];
        let others = json!({"bulk": rows.but(&OURS), "with_objects": with_objects.but(&OURS)});
        baseline.insert(network.name.to_owned(), others);
    }
    Ok(Measured {
        ours: Value::Object(ours),
        baseline: Value::Object(baseline),
        mark,
        conditions: conditions(RowVenue::Lab),
    })
}

fn bulk(row: &CellularRow) -> anyhow::Result<CellularDownload> {
    let figures = || {
        Some(CellularDownload {
            mbps: row.mbps?,
            rtt_ms: row.rtt_ms?,
            rtt_by_min: row.rtt_by_min?,
        })
    };
    figures().context("the bench did not measure all of a peer")
}

/// What DRWA made of a network.
fn judge(
    cubic: &CellularDownload,
    held: &CellularDownload,
    object_ms: f64,
    object_held_ms: f64,
) -> Value {
    json!({
        "bulk": held,
        "cubic_rtt_by_min": cubic.rtt_by_min,
        "rtt_less": 1.0 - held.rtt_ms / cubic.rtt_ms,
        "mbps_by_cubics": held.mbps / cubic.mbps,
        "object_ms": object_held_ms,
        // As the paper counts speed: how much less time.
        "object_faster": 1.0 - object_held_ms / object_ms,
    })
}

fn marks(name: &str) -> [String; 4] {
    [
        format!("{name}.cubic_rtt_by_min >= 6"),
        format!("{name}.bulk.rtt_by_min <= {RTT_BY_MIN_MAX}"),
        format!("{name}.mbps_by_cubics >= 0.96"),
        format!("{name}.object_faster >= 0.39"),
    ]
}

fn conditions(place: RowVenue) -> Vec<String> {
    let mut all = vec![
        format!(
            "HSPA+ 3.83 Mb/s, 74 ms; LTE 15.78 Mb/s, 32 ms; EVDO 0.91 Mb/s, 120 ms and 0.87 Mb/s, \
             133 ms: mean rates and shortest round trips of the paper ({})",
            place.word()
        ),
        "assumed: how the rates vary, and queues of 1, 0.5, 1.8 and 1.8 s \
         (lab/scenarios/bloat-*.toml, lab/traces/cell-*.csv)"
            .to_owned(),
        "the round trip is that of the link's packets: the way, and what they waited in both queues, \
         on average over all packets from the first on"
            .to_owned(),
    ];
    let object = format!("objects of {} KiB (assumed)", OBJECT_BYTES >> 10);
    all.extend(match place {
        RowVenue::Sim => [
            format!("{BULK_S} s of one bulk download, lambda 3"),
            format!(
                "{OBJECTS} {object} beside such a download, one every 2 s from 15 s on; they are flows \
                 of the session that carries the download"
            ),
        ],
        RowVenue::Lab => [
            format!(
                "{BULK_S} s of one bulk flow of each kind, each over a link of its own with the same trace, \
                 at once; lambda 3; kernel TCP with CUBIC unless named otherwise"
            ),
            format!(
                "{object} beside such a flow in {BESIDE_S} s of their own, one a second at most, begun between \
                 the {}th and the {}th second, each over a TCP connection of its own, its handshake included",
                BESIDE_S / 2,
                BESIDE_S * 5 / 6
            ),
        ],
    });
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repro::mark;

    fn bulk(mbps: f64, rtt_by_min: f64) -> CellularDownload {
        CellularDownload {
            mbps,
            rtt_ms: 74.0 * rtt_by_min,
            rtt_by_min,
        }
    }

    fn holds(cubic: &CellularDownload, held: &CellularDownload, object_held_ms: f64) -> bool {
        let figures = json!({"hspa": judge(cubic, held, 1_000.0, object_held_ms)});
        mark::holds(&marks("hspa"), &figures).unwrap()
    }

    #[test]
    fn it_holds_if_the_queue_is_short_the_rate_the_same_and_the_page_sooner() {
        let cubic = bulk(3.8, 8.0);
        assert!(holds(&cubic, &bulk(3.7, 3.1), 600.0));
        assert!(!holds(&cubic, &bulk(3.7, 3.3), 600.0), "too long a queue");
        assert!(
            !holds(&cubic, &bulk(3.6, 3.1), 600.0),
            "5 % of the rate lost"
        );
        assert!(!holds(&cubic, &bulk(3.7, 3.1), 620.0), "38 % faster");
        assert!(
            !holds(&bulk(3.8, 5.0), &bulk(3.7, 3.1), 600.0),
            "was not bloated"
        );
    }
}
