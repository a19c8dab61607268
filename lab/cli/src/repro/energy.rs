//! S5: the energy that 10 MB cost a phone's battery, with acknowledgements over the other radio and
//! without.
//!
//! The authors' model counts only the bytes on the other radio. A cellular radio with little
//! traffic is awake all the time and some seconds longer, so each download is computed twice: as
//! they did, and with the whole radio.

use super::runner::Measured;
use anyhow::ensure;
use cedos_lab_energy::{RadioDirection, RadioEnergyMeter, Span, Time, radios};
use cedos_lab_scenario::{Scenario, ScenarioFault};
use cedos_lab_sim::PassedPacket;
use serde_json::{Map, Value, json};

const BYTES: u64 = 10_000_000;
/// The media of S1.
const MEDIA: [(&str, &str); 2] = [("b", "802.11b"), ("g", "802.11g")];
/// The limit for ACKs on the other link, in bytes per second, as in S1.
const OFFLOAD: &str = "16000";
/// The time after which every radio sleeps again.
const AFTER: Span = Span::from_secs(30);

/// Ways to use the two radios: thinned ACKs, offload, policy.
const WAYS: [(&str, bool, &str, &str); 4] = [
    ("every_second", false, "\"never\"", "free-only"),
    ("thinned", true, "\"never\"", "free-only"),
    ("offloaded", true, OFFLOAD, "free-only"),
    ("aggregated", true, "\"never\"", "any"),
];

/// Phones, each with two radios: Wi-Fi and cellular.
const PHONES: [(&str, &str, &str); 2] = [
    ("g1", "g1-wifi", "g1-3g"),
    ("thunderbolt", "thunderbolt-wifi", "thunderbolt-3g"),
];

/// Runs the row in virtual time.
pub fn simulate() -> anyhow::Result<Measured> {
    let mut ours = Map::new();
    for (short, standard) in MEDIA {
        let mut by_phone = Map::new();
        for (way, thin, offload, policy) in WAYS {
            let (took, passages) = download(standard, thin, offload, policy)?;
            for (phone, wifi, cell) in PHONES {
                let energy = [
                    consumed(wifi, 0, &passages, took),
                    consumed(cell, 1, &passages, took),
                ];
                let figures = json!({
                    "seconds": took.as_secs_f64(),
                    "as_the_paper_j": energy[0].0 + energy[1].1,
                    "both_radios_j": energy[0].0 + energy[1].0,
                });
                let of_phone = by_phone.entry(phone).or_insert_with(|| json!({}));
                of_phone[way] = figures;
            }
        }
        ours.insert(short.to_owned(), Value::Object(by_phone));
    }
    let baseline = json!({ "paper_j": {
        "offloaded": 65.69, "tcp": 65.82, "simple_aggregation": 79.51,
    } });
    Ok(Measured::figures(Value::Object(ours), baseline, 1))
}

/// Runs a download. Returns when it was complete, and the packets that passed the device.
fn download(
    standard: &str,
    thin: bool,
    offload: &str,
    policy: &str,
) -> anyhow::Result<(Span, Vec<PassedPacket>)> {
    let links = links(standard);
    let text = format!(
        "seed = 1\nduration_s = 120\n[acks]\nthin = {thin}\noffload = {offload}\n{links}\n\
         [[flow]]\nbytes = {BYTES}\npolicy = \"{policy}\"\n"
    );
    let scenario = Scenario::parse("S5", &text, &mut |name| {
        Err(ScenarioFault {
            file: name.to_owned(),
            fault: "this scenario reads no files".to_owned(),
        })
    })?;
    let (outcome, passages) = cedos_lab_sim::run_watched(&scenario)?;
    let flow = &outcome.report.flows[0];
    ensure!(flow.sha256_ok, "the download did not complete");
    let took = Span::from_secs_f64(flow.finished_s.unwrap_or(f64::NAN));
    Ok((took, passages))
}

/// The energy of a radio above idle, in joules: in total, and for bytes alone.
fn consumed(radio: &str, link: usize, passages: &[PassedPacket], took: Span) -> (f64, f64) {
    let end = Time::ZERO + took;
    let mut meter = RadioEnergyMeter::new(radios::radio(radio), Time::ZERO);
    for passage in passages.iter().filter(|p| p.link == link && p.at <= end) {
        let way = match passage.way {
            cedos_lab_link::LinkDirection::Down => RadioDirection::Down,
            cedos_lab_link::LinkDirection::Up => RadioDirection::Up,
        };
        meter.on_bytes(passage.at, u64::from(passage.bytes), way);
    }
    let energy = meter.until(end + AFTER);
    (energy.total() - energy.idle, energy.bytes)
}

/// Wi-Fi of this standard, and EVDO, as in S1.
fn links(standard: &str) -> String {
    format!(
        r#"
[[link]]
name = "wlan0"
medium = "{standard}"
rtt_ms = 50
[[link]]
name = "wwan0"
class = "metered"
down_mbps = 0.42
up_mbps = 0.15
rtt_ms = 133
queue_ms = 500
"#
    )
}
