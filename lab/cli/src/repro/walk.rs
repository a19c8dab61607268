//! S4: all three of super-aggregation, on a walk past three access points.
//!
//! ```text
//!  wlan0  AP 1 ───────────────┤2 s├─── AP 2 ──────┤2 s├─── AP 3, 1 % lost ────
//!  wwan0         ├──────────────── EVDO: ACKs, news of holes, what AP 3 lost ─
//!         0     10           30  32              62  64                    100 s
//! ```
//!
//! The ideal is composed as the three are measured: what the medium carries without acknowledgements on
//! it, for as long as an access point is there, and no less where it loses packets.

use super::emulated::{D2TP, Emulated, LongFlowResult, MPTCP, TCP};
use super::offload::{self, PACKET_BYTES};
use super::runner::Measured;
use anyhow::Context;
use cedos_lab_link::Medium;
use cedos_lab_scenario::{RunReport, Scenario, ScenarioFault};
use serde_json::{Map, Value, json};

const SECONDS: u32 = 100;
const CELL_FROM_S: u32 = 10;
/// When an access point is left; the next one is there so much later.
const HOLES_S: [u32; 2] = [30, 62];
const HOLE_S: u32 = 2;
const LOSS: f64 = 0.01;
/// What EVDO is lent for, in bytes a second.
const LENT: u32 = 50_000;
/// Payload bytes of a full packet: the rest is IP, UDP, and D2TP.
const PAYLOAD_BYTES: u32 = 1_432;

/// What is turned on, and what else differs.
struct WalkVariant {
    name: &'static str,
    other_link: bool,
    thin: bool,
    offload: bool,
    mirror: bool,
    congestion: &'static str,
}

const fn way(name: &'static str, other_link: bool, offload: bool, mirror: bool) -> WalkVariant {
    WalkVariant {
        name,
        other_link,
        thin: true,
        offload,
        mirror,
        congestion: "cubic",
    }
}

const OURS: WalkVariant = way("all", true, true, true);
const ALONE: WalkVariant = way("one_link", false, false, false);
/// Without the other link a hole freezes the path as well, by itself.
const BESIDE: [WalkVariant; 5] = [
    way("freeze_and_offload", true, true, false),
    way("freeze_and_mirror", true, false, true),
    ALONE,
    WalkVariant {
        thin: false,
        ..way("one_link_every_second_acked", false, false, false)
    },
    WalkVariant {
        congestion: "bbr",
        ..way("one_link_bbr", false, false, false)
    },
];

/// In virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let cycle = Medium::Dot11g.cycle(PACKET_BYTES);
    let there = f64::from(SECONDS - HOLE_S * HOLES_S.len() as u32) / f64::from(SECONDS);
    let ceiling = offload::mbps(PACKET_BYTES - 28, cycle) * there;
    let ideal = offload::mbps(PAYLOAD_BYTES, cycle) * there;
    let ours = carried(&OURS)?;
    let mut baseline = Map::new();
    for way in &BESIDE {
        baseline.insert(way.name.to_owned(), json!(carried(way)?));
    }
    let of = |name: &str| baseline[name].as_f64().unwrap_or(f64::NAN);
    Ok(Measured {
        ours: json!({
            "mbps": ours,
            "ideal_mbps": ideal,
            "of_ideal": ours / ideal,
            "udp_ceiling_mbps": ceiling,
            "of_udp_ceiling": ours / ceiling,
            "gain_over_one_link": ours / of("one_link") - 1.0,
            "gain_over_one_link_every_second_acked": ours / of("one_link_every_second_acked") - 1.0,
        }),
        baseline: Value::Object(baseline),
        mark: vec!["of_ideal >= 0.95".to_owned()],
        conditions: {
            let mut all = conditions();
            all.push("baseline, in Mb/s: D2TP too; kernels run in the lab".to_owned());
            all
        },
    })
}

/// On real sockets, all at once, each over links of its own.
pub fn on_real_sockets() -> anyhow::Result<Measured> {
    let there_s = SECONDS - HOLE_S * HOLES_S.len() as u32;
    let ideal = offload::mbps(PAYLOAD_BYTES, Medium::Dot11g.cycle(PACKET_BYTES));
    let begin = |way: &WalkVariant, options| Emulated::begin(&scenario(way), options);
    let (ours, alone) = (begin(&OURS, D2TP)?, begin(&ALONE, D2TP)?);
    let (tcp, mptcp) = (begin(&ALONE, TCP)?, begin(&OURS, MPTCP)?);
    let mbps = |run| anyhow::Ok(LongFlowResult::of(run)?.mbps(there_s));
    let (ours, mptcp) = (LongFlowResult::of(ours)?, LongFlowResult::of(mptcp)?);
    let (alone, tcp, mbps) = (mbps(alone)?, mbps(tcp)?, ours.mbps(there_s));
    let mut conditions = conditions();
    conditions.push(
        "Mb/s while an access point is there, from the first byte on; all at once, each in a lab of its own; \
         baseline: D2TP and kernel TCP (CUBIC) over Wi-Fi alone, kernel MPTCP with EVDO as backup"
            .to_owned(),
    );
    Ok(Measured {
        ours: json!({
            "mbps": mbps,
            "ideal_mbps": ideal,
            "of_ideal": mbps / ideal,
            "more_than_tcp": mbps / tcp - 1.0,
            "more_than_mptcp": mbps / mptcp.mbps(there_s) - 1.0,
            "bytes_by_link": ours.flow.bytes_by_link,
        }),
        baseline: json!({
            "one_link": alone,
            "tcp": tcp,
            "mptcp": mptcp.mbps(there_s),
            "mptcp_bytes_by_link": mptcp.flow.bytes_by_link,
        }),
        mark: vec!["of_ideal >= 0.95".to_owned()],
        conditions,
    })
}

fn conditions() -> Vec<String> {
    vec![
        format!(
            "one download for {SECONDS} s by 802.11g, RTT {} ms; nobody is told of the holes of {HOLE_S} \
                 s, which begin at {HOLES_S:?} s; {LOSS} lost both ways from {} s on",
            offload::WIFI_RTT_MS,
            HOLES_S[1] + HOLE_S
        ),
        format!(
            "EVDO as in S1 from {CELL_FROM_S} s on, metered: {} B/s of ACKs, {LENT} B/s of lost bytes",
            offload::OFFLOAD
        ),
        format!(
            "ideal: payload of full packets ({} bytes) of a lone sender while an access point is there, \
                 no acknowledgement on the air, no start; what is lost is not taken off",
            PAYLOAD_BYTES
        ),
    ]
}

fn carried(way: &WalkVariant) -> anyhow::Result<f64> {
    let text = scenario(way);
    let scenario = Scenario::parse("S4", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let report: RunReport = cedos_lab_sim::run(&scenario, None)?.report;
    let flow = report.flows.first().context("the report has no flow")?;
    let all: u64 = flow.bytes_by_link.values().sum();
    Ok((all - flow.duplicate_bytes) as f64 * 8.0 / 1e6 / f64::from(SECONDS))
}

fn scenario(way: &WalkVariant) -> String {
    let offload = if way.offload {
        offload::OFFLOAD
    } else {
        "\"never\""
    };
    let mirror = match way.mirror {
        true => LENT.to_string(),
        false => "\"never\"".to_owned(),
    };
    let (thin, congestion) = (way.thin, way.congestion);
    let mut text = format!(
        r#"
seed = 4
duration_s = {SECONDS}
origin = "builtin"
[acks]
thin = {thin}
offload = {offload}
[transport]
congestion = "{congestion}"
mirror = {mirror}
[[flow]]
bytes = 1_000_000_000
policy = "free-only"
[[link]]
name = "wlan0"
medium = "802.11g"
rtt_ms = {}
"#,
        offload::WIFI_RTT_MS
    );
    for (n, from) in HOLES_S.iter().enumerate() {
        let last = n + 1 == HOLES_S.len();
        let loss = if last { LOSS } else { 0.0 };
        text += &format!(
            "[[link.at]]\nt_s = {from}\ndead = true\n[[link.at]]\nt_s = {}\ndead = false\nloss = {loss}\n",
            from + HOLE_S
        );
    }
    if way.other_link {
        text += &format!(
            r#"
[[link]]
name = "wwan0"
class = "metered"
down_mbps = {}
up_mbps = {}
rtt_ms = {}
queue_ms = 500
up = false
[[link.at]]
t_s = {CELL_FROM_S}
up = true
"#,
            offload::EVDO_DOWN_MBPS,
            offload::EVDO_UP_MBPS,
            offload::EVDO_RTT_MS,
        );
    }
    text
}
