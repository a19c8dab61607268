//! The call of E2: UDP at a steady rate to a server, and for how long it has a bandwidth without a break.
//!
//! ```text
//!  Wi-Fi    ██████│ hole │██████      kb/s of what arrives
//!  with it  ██████▁▁▁▁▁▁▁▁██████      ON: above 40 kb/s
//! ```

use anyhow::{Context, ensure};
use cedos_lab_emu::plan;
use serde_json::{Value, json};
use std::path::Path;

use crate::lab::udp_stream::{UdpReceived, UdpSent};

/// The rate of the call: the paper's.
const KBPS: u64 = 500;
/// Payload of a packet: what fits into one datagram of the radio's path.
const PAYLOAD_BYTES: u64 = 1_100;
/// The rate above which the call is ON: the paper's.
const ON_KBPS: u64 = 40;
/// Over how many seconds the rate is averaged. One second has four or five packets over the bridge, and says little.
const AVERAGED_S: u64 = 5; // assumed: the paper names none
/// The port of the server.
const PORT: u16 = 9_000;

/// Calls until `$END_S` seconds after `$begun`.
const SCRIPT: &str = r#"
left=$(awk -v begun="$begun" -v now="$(now)" -v end="$END_S" 'BEGIN { printf "%d", end - (now - begun) }')
"$CEDOS" lab udp-send $ORIGIN --kbps $KBPS --bytes $BYTES --seconds $left >"$AT/$KIND.sent"
"#;

/// The server of the call.
pub(super) const SERVER: &str =
    r#"exec "$CEDOS" lab udp-receive $ORIGIN --output "$AT/$KIND.received""#;

/// The script that calls for so many seconds, and its variables.
pub(super) fn script(seconds: u64) -> (&'static str, Vec<(&'static str, String)>) {
    let variables = vec![
        ("END_S", seconds.to_string()),
        ("KBPS", KBPS.to_string()),
        ("BYTES", PAYLOAD_BYTES.to_string()),
        ("ORIGIN", format!("{}:{PORT}", plan::ORIGIN_V4)),
    ];
    (SCRIPT, variables)
}

/// A call that is over.
#[derive(Clone, Debug)]
pub(super) struct UdpCall {
    sent: UdpSent,
    received: UdpReceived,
}

/// For how long a call was ON, and OFF, each time, in seconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct OnPeriods {
    on: Vec<u64>,
    off: Vec<u64>,
}

impl OnPeriods {
    fn of(states: impl Iterator<Item = bool>) -> OnPeriods {
        let mut periods = OnPeriods::default();
        let mut last = None;
        for is_on in states {
            let list = match is_on {
                true => &mut periods.on,
                false => &mut periods.off,
            };
            match (last == Some(is_on), list.last_mut()) {
                (true, Some(length)) => *length += 1,
                _ => list.push(1),
            }
            last = Some(is_on);
        }
        periods
    }
}

fn longest(periods: &[u64]) -> u64 {
    periods.iter().copied().max().unwrap_or(0)
}

fn mean(periods: &[u64]) -> Option<f64> {
    let sum: u64 = periods.iter().sum();
    (!periods.is_empty()).then(|| sum as f64 / periods.len() as f64)
}

impl UdpCall {
    /// Reads what both ends wrote.
    ///
    /// # Errors
    /// It is not there, or nothing was sent.
    pub(super) fn read(folder: &Path, kind: &str) -> anyhow::Result<UdpCall> {
        let text = |ending: &str| {
            let file = folder.join(format!("{kind}.{ending}"));
            std::fs::read_to_string(file).with_context(|| format!("{kind}: no {ending} packets"))
        };
        let call = UdpCall {
            sent: serde_json::from_str(&text("sent")?)?,
            received: serde_json::from_str(&text("received")?)?,
        };
        ensure!(
            call.sent.packets > 0 && call.sent.seconds >= AVERAGED_S,
            "{kind}: the call was too short"
        );
        Ok(call)
    }

    fn periods(&self, averaged_s: u64) -> OnPeriods {
        let begin = self.sent.begun_s + averaged_s;
        let needed = ON_KBPS * 1_000 / 8 * averaged_s;
        OnPeriods::of(
            (begin..=self.sent.begun_s + self.sent.seconds).map(|second| {
                let window = second - averaged_s..second;
                window.map(|s| self.received.in_second(s)).sum::<u64>() > needed
            }),
        )
    }

    /// The longest time ON without a break, in seconds.
    pub(super) fn on_longest_s(&self) -> u64 {
        longest(&self.periods(AVERAGED_S).on)
    }

    /// The mean time ON, in seconds; `None` if it was never.
    pub(super) fn on_mean_s(&self) -> Option<f64> {
        mean(&self.periods(AVERAGED_S).on)
    }

    /// The figures of a run.
    pub(super) fn figures(&self) -> Value {
        let periods = self.periods(AVERAGED_S);
        let on: u64 = periods.on.iter().sum();
        let all = on + periods.off.iter().sum::<u64>();
        json!({
            "packets_sent": self.sent.packets,
            "delivered_share": self.received.packets as f64 / self.sent.packets as f64,
            "on_share": on as f64 / all as f64,
            "on_longest_s": longest(&periods.on),
            "on_mean_s": mean(&periods.on),
            "off_longest_s": longest(&periods.off),
            "off_mean_s": mean(&periods.off).unwrap_or(0.0),
            "breaks": periods.off.len(),
            "on_longest_by_single_seconds_s": longest(&self.periods(1).on),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(kbps: &[u64]) -> UdpCall {
        UdpCall {
            sent: UdpSent {
                begun_s: 1_000,
                seconds: kbps.len() as u64,
                packets: 100,
            },
            received: UdpReceived {
                first_s: 1_000,
                bytes: kbps.iter().map(|kbps| kbps * 125).collect(),
                packets: 25,
            },
        }
    }

    #[test]
    fn a_call_is_on_while_more_than_40_kilobits_a_second_arrive() {
        let holed = [[500; 10], [0; 10], [500; 10]].concat();
        let periods = call(&holed).periods(1);
        assert_eq!((periods.on, periods.off), (vec![10, 10], vec![10]));
        // A mean of five seconds has some of the stay for four more.
        let periods = call(&holed).periods(5);
        assert_eq!((periods.on, periods.off), (vec![10, 10], vec![6]));
        let bridged = [[500; 10], [43; 10], [500; 10]].concat();
        let figures = call(&bridged).figures();
        assert_eq!(
            (&figures["on_longest_s"], &figures["breaks"]),
            (&json!(26), &json!(0))
        );
        assert_eq!(figures["delivered_share"], 0.25);
        // Exactly 40 is not above it.
        assert_eq!(call(&[40; 10]).on_longest_s(), 0);
    }
}
