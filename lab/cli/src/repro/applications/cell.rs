//! A cell: one client, one transfer, and one disturbance in its middle, in a separate lab.
//!
//! ```text
//!  0      12        24                24 + D                     24 + D + patience
//!  │prepare│ transfer ┊  disturbed      ┊ transfer, if it continues │ hung: it is ended
//!                                          retry, if it gave up ├─────┤
//! ```

use super::client::{Client, ClientCall};
use super::disturbance::{Disturbance, SEED};
use crate::repro::emulated::commanded_in_lab;
use anyhow::{Context, ensure};
use cedos_lab_emu::web;
use cedos_lab_scenario::{RunReport, content};
use serde::Serialize;
use std::fs;
use std::path::Path;

/// The size of a transfer in bytes: 25 s of the link.
pub const BYTES: u64 = 6_000_000;
/// When the transfer begins, in seconds.
pub const BEGINS_S: u32 = 12;
/// When the disturbance begins, in seconds.
pub const DISTURBED_S: u32 = 24;
/// How long after the network is back a user retries, and how long the retry may take.
const BY_HAND_AFTER_S: u32 = 5;
const BY_HAND_S: u32 = 60;
/// The additional time that a lab takes, in seconds.
const SPARE_S: u32 = 20;
/// Exit codes of `timeout` if it ended or killed the client.
const ENDED: [i32; 2] = [124, 137];
/// The shares of the object between which a transfer counts as being in its middle.
const MIDDLE: std::ops::RangeInclusive<f64> = 0.05..=0.95;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellDirection {
    Down,
    Up,
}

impl CellDirection {
    pub const ALL: [CellDirection; 2] = [CellDirection::Down, CellDirection::Up];

    /// The direction as in a cell's name.
    pub fn word(self) -> &'static str {
        match self {
            CellDirection::Down => "down",
            CellDirection::Up => "up",
        }
    }
}

/// A cell that is to be run.
#[derive(Clone, Copy)]
pub struct ApplicationCell {
    pub client: &'static Client,
    pub way: CellDirection,
    pub call: ClientCall,
    pub disturbance: Disturbance,
    pub delay_s: u32,
}

/// The result of a transfer without a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnaidedTransferEnd {
    /// The program reported success, and every byte is there.
    Right,
    /// The program reported success, and other bytes are there.
    Wrong,
    /// The program reported a failure.
    GaveUp,
    /// The program reported nothing until it was ended.
    Hung,
}

/// The result of a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CellResult {
    pub ended: UnaidedTransferEnd,
    /// The exit code of a client that gave up.
    pub code: Option<i32>,
    /// Seconds from the beginning of the disturbance to the end of the call.
    pub after_s: f64,
    /// The result of the retry; `None` if the first call was right.
    pub by_hand: Option<UnaidedTransferEnd>,
    /// The share of the object that was on the link before the disturbance, packet headers
    /// included.
    pub moved_before: f64,
    /// Whether the disturbance occurred in the middle of the transfer.
    pub in_the_middle: bool,
    /// The bytes that the links carried in this direction, over all calls, as a multiple of the
    /// object's size.
    pub carried: f64,
    /// Bytes of packets on the metered link in this direction; `None` if there is no such link.
    pub metered_bytes: Option<u64>,
}

const SCRIPT: &str = r#"
cd "$AT" || exit 1
export HOME="$AT" XDG_STATE_HOME="$AT/state" XDG_CONFIG_HOME="$AT/config" XDG_CACHE_HOME="$AT/cache"
export GPODDER_HOME="$AT/gpodder" GPODDER_DOWNLOAD_DIR="$AT/down" CEDOS_AGENT=none
unset XDG_RUNTIME_DIR CEDOS_PROX http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
export URL="$CEDOS_LAB_ORIGIN/$WHAT"
begun=$(date +%s.%N)
since() { echo "$begun $(date +%s.%N)" | awk '{ printf "%.3f", $2 - $1 }'; }
until_s() { sleep "$(echo "$1 $(since)" | awk '{ print ($1 > $2) ? $1 - $2 : 0 }')"; }
moved() { awk -v field="$FIELD" '{ sub(":", " ") } $1 == "wlan0" { print $field }' /proc/net/dev; }
right() {
    if [ "$WAY" = down ]; then [ "$(sha256sum <out | cut -d' ' -f1)" = "$WANTED" ]
    else grep -qs "$WANTED" out said; fi
}
call() {
    timeout -k 5 "$2" sh -c "$1" >said 2>>errors </dev/null
    code=$?
    right 2>/dev/null && is=1 || is=0
    echo "$code $(since) $is" >>told
}
( eval "$PREPARE" ) >prepared 2>&1 </dev/null
until_s "$BEGINS_S"
moved >moved
( until_s "$DISTURBED_S"; moved >>moved ) &
call "$FIRST" "$PATIENCE_S"
if [ "$code $is" != "0 1" ]; then
    until_s "$BY_HAND_AT_S"
    call "$BY_HAND" "$BY_HAND_S"
fi
[ -s server ] && kill "$(cat server)"
wait
exit 0
"#;

impl ApplicationCell {
    /// The name of the cell, for example `cedos/down/off/10`.
    pub fn name(&self) -> String {
        let (way, disturbance) = (self.way.word(), self.disturbance.word());
        format!("{}/{way}/{disturbance}/{}", self.client.name, self.delay_s)
    }

    /// Runs the cell, in `folder`.
    ///
    /// # Errors
    /// There is no lab, or it could not follow the scenario.
    pub fn run(&self, patience_s: u32, folder: &Path) -> anyhow::Result<CellResult> {
        let at = folder.join(self.name().replace('/', "-"));
        if at.exists() {
            fs::remove_dir_all(&at)?; // An earlier run without a result.
        }
        fs::create_dir(&at)?;
        let file = folder.join("content");
        let back_s = DISTURBED_S + self.delay_s;
        let bound_s = back_s + patience_s;
        let by_hand_at_s = back_s + BY_HAND_AFTER_S;
        let duration_s = bound_s.max(by_hand_at_s) + BY_HAND_S + SPARE_S;
        // Columns of /proc/net/dev: bytes received, bytes sent.
        let (what, field) = match self.way {
            CellDirection::Down => (format!("bytes/{BYTES}"), 2),
            CellDirection::Up => ("upload/file".to_owned(), 10),
        };
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let environment = [
            ("AT", at.display().to_string()),
            ("FILE", file.display().to_string()),
            ("CEDOS", program.display().to_string()),
            ("WAY", self.way.word().to_owned()),
            ("WHAT", what),
            ("BYTES", BYTES.to_string()),
            ("FIELD", field.to_string()),
            ("WANTED", hex::encode(content::sha256(SEED, BYTES))),
            ("PREPARE", self.client.prepare.to_owned()),
            ("FIRST", self.call.first.to_owned()),
            ("BY_HAND", self.call.by_hand.to_owned()),
            ("BEGINS_S", BEGINS_S.to_string()),
            ("DISTURBED_S", DISTURBED_S.to_string()),
            ("PATIENCE_S", (bound_s - BEGINS_S).to_string()),
            ("BY_HAND_AT_S", by_hand_at_s.to_string()),
            ("BY_HAND_S", BY_HAND_S.to_string()),
        ];
        let scenario = self
            .disturbance
            .scenario(DISTURBED_S, self.delay_s, duration_s);
        let report = commanded_in_lab(&scenario, SCRIPT, &environment)?;
        let read = |name: &str| fs::read_to_string(at.join(name)).unwrap_or_default();
        told(&read("told"), &read("moved"), self.way, &report)
    }
}

/// Creates the object for uploads and the script that controls a browser.
pub fn furnish(folder: &Path) -> std::io::Result<()> {
    let browser = include_str!("../programs/browser.py");
    fs::write(folder.join("browser.py"), browser)?;
    web::write_content(&folder.join("content"), SEED, BYTES)
}

/// Parses the script's output: a line for each call, `code seconds right`, and the interface's
/// counter at the start and at the disturbance.
fn told(
    calls: &str,
    moved: &str,
    way: CellDirection,
    report: &RunReport,
) -> anyhow::Result<CellResult> {
    let mut calls = calls.lines().map(|line| {
        let words: Vec<f64> = line.split(' ').filter_map(|w| w.parse().ok()).collect();
        match words[..] {
            [code, at_s, right] => Ok((code as i32, at_s, right == 1.0)),
            _ => Err(anyhow::anyhow!("a cell's script wrote `{line}`")),
        }
    });
    let (code, at_s, right) = calls.next().context("a cell's call never ended")??;
    let by_hand = calls.next().transpose()?;
    let moved: Vec<f64> = moved
        .lines()
        .filter_map(|n| n.trim().parse().ok())
        .collect();
    ensure!(moved.len() == 2, "a cell's interface was not counted");
    let moved_before = (moved[1] - moved[0]) / BYTES as f64;
    let bytes = |link: &cedos_lab_scenario::LinkReport| match way {
        CellDirection::Down => link.bytes_down,
        CellDirection::Up => link.bytes_up,
    };
    let carried: u64 = report.links.iter().map(bytes).sum();
    let ended = ended(code, right);
    Ok(CellResult {
        ended,
        code: (ended == UnaidedTransferEnd::GaveUp).then_some(code),
        after_s: at_s - f64::from(DISTURBED_S),
        by_hand: by_hand.map(|(code, _, right)| self::ended(code, right)),
        moved_before,
        in_the_middle: MIDDLE.contains(&moved_before),
        carried: carried as f64 / BYTES as f64,
        metered_bytes: report.links.iter().find(|l| l.name == "wwan0").map(bytes),
    })
}

fn ended(code: i32, right: bool) -> UnaidedTransferEnd {
    match (code, right) {
        (0, true) => UnaidedTransferEnd::Right,
        (0, false) => UnaidedTransferEnd::Wrong,
        (code, _) if ENDED.contains(&code) => UnaidedTransferEnd::Hung,
        _ => UnaidedTransferEnd::GaveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_script_wrote_is_told() {
        let judged = |calls: &str| {
            told(
                calls,
                "1000\n3001000\n",
                CellDirection::Down,
                &RunReport::default(),
            )
        };
        let right = judged("0 40.5 1\n").unwrap();
        assert_eq!(
            (right.ended, right.after_s, right.by_hand),
            (UnaidedTransferEnd::Right, 16.5, None)
        );
        assert_eq!((right.moved_before, right.in_the_middle), (0.5, true));
        let gave_up = judged("56 30 0\n0 50 1\n").unwrap();
        assert_eq!(
            (gave_up.ended, gave_up.code),
            (UnaidedTransferEnd::GaveUp, Some(56))
        );
        assert_eq!(gave_up.by_hand, Some(UnaidedTransferEnd::Right));
        let hung = judged("124 90 0\n0 99 0\n").unwrap();
        assert_eq!(
            (hung.ended, hung.by_hand),
            (UnaidedTransferEnd::Hung, Some(UnaidedTransferEnd::Wrong))
        );
        assert!(judged("").is_err());
    }

    #[test]
    fn a_transfer_that_was_over_was_not_disturbed_in_its_middle() {
        let told = told(
            "0 23 1\n",
            "0\n6100000\n",
            CellDirection::Down,
            &RunReport::default(),
        )
        .unwrap();
        assert!(!told.in_the_middle);
    }
}
