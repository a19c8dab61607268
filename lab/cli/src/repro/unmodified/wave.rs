//! Runs several programs at once, through changes of network and a minute without any.
//!
//! ```text
//!  wlan0 ├────┤                                        ┊          ├──────────
//!  wwan0       ├─────┤             60 s                ├─────────────────────
//!        0    wifi  away                             away + 60  away + 65
//! ```
//!
//! Links return with another address.

use super::program::Program;
use super::site::ProgramFolder;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// How long there is no network, in seconds.
const AWAY_S: u32 = 60;
/// The rate of a link in Mb/s, for all programs of a batch: Wi-Fi in both directions, cellular
/// down.
const LINK_MBPS: f64 = 8.0;
const CELLULAR_UP_MBPS: f64 = 4.0;
/// The time in seconds after which a program is ended.
const PATIENCE_S: u32 = 240;

/// Programs that run at once.
pub struct ProgramBatch {
    pub programs: &'static [Program],
    /// When Wi-Fi is lost, in seconds.
    pub wifi_s: u32,
    /// When cellular is lost, in seconds.
    pub away_s: u32,
}

/// The results of the programs of a batch.
#[derive(Default)]
pub struct WaveResult {
    pub programs: Map<String, Value>,
    pub whole: usize,
    pub across: usize,
    /// Programs that were not run, and why.
    pub missing: Vec<String>,
}

impl ProgramBatch {
    /// Creates the necessary files and runs the programs.
    ///
    /// # Errors
    /// There is no lab, or it could not follow the scenario.
    pub fn run(&self, site: &ProgramFolder, came: &mut WaveResult) -> anyhow::Result<()> {
        let mut ready = Vec::new();
        for program in self.programs {
            match program.make(site) {
                Ok(()) => ready.push(program),
                Err(why) => came.missing.push(format!("not run: {why}")),
            }
        }
        if ready.is_empty() {
            return Ok(());
        }
        site.lab(&self.scenario(ready.len()), &self.script(&ready, site)?)?;
        for program in ready {
            let told = self.outcome(program, site);
            came.whole += usize::from(told["whole"] == json!(true));
            came.across += usize::from(told["across"] == json!(true));
            came.programs.insert(program.name.to_owned(), told);
        }
        Ok(())
    }

    /// The scenario for this many of its programs: each has its share of the links, so that it is
    /// not complete before they are lost.
    fn scenario(&self, programs: usize) -> String {
        let (wifi, away, back) = (self.wifi_s, self.away_s, self.away_s + AWAY_S);
        let share = programs as f64 / self.programs.len() as f64;
        let (down, up) = (LINK_MBPS * share, CELLULAR_UP_MBPS * share);
        format!(
            "seed = 11
             duration_s = {duration}
             origin = \"builtin\"
             [[link]]
             name = \"wlan0\"
             down_mbps = {down}
             up_mbps = {down}
             rtt_ms = 20
             at = [{{ t_s = {wifi}, up = false }}, {{ t_s = {again}, up = true }}]
             [[link]]
             name = \"wwan0\"
             class = \"metered\"
             up = false
             down_mbps = {down}
             up_mbps = {up}
             rtt_ms = 50
             at = [{{ t_s = {wifi}.5, up = true }}, {{ t_s = {away}, up = false }}, {{ t_s = {back}, up = true }}]\n",
            duration = PATIENCE_S + 60,
            again = back + 5,
        )
    }

    fn script(&self, programs: &[&Program], site: &ProgramFolder) -> anyhow::Result<String> {
        let shown = site.at().display();
        let mut text = String::new();
        for program in programs {
            let name = program.name;
            let call = program.filled(program.call, site);
            std::fs::write(site.at().join(format!("{name}.sh")), call + "\n")?;
            let after = program.filled(program.after, site);
            let after = if after.is_empty() { ":" } else { &after };
            writeln!(
                text,
                "( begun=$(now); timeout -k 5 {PATIENCE_S} sh {shown}/{name}.sh 2>{shown}/{name}.errors\n\
                   code=$?; ended=$(now); {after}\n\
                   echo \"$code $begun $ended\" >{shown}/{name}.ended ) &\n\
                 waits=\"$waits $!\"",
            )?;
        }
        text += "wait $waits\n";
        Ok(text)
    }

    fn outcome(&self, program: &Program, site: &ProgramFolder) -> Value {
        let name = program.name;
        let text = |ending: &str| site.text(&format!("{name}.{ending}"));
        let figures = |text: String| -> Vec<f64> {
            let words = text.split_whitespace();
            words.filter_map(|word| word.parse().ok()).collect()
        };
        let zero = figures(site.text("zero"));
        let (code, begun_s, ended_s) = match (&figures(text("ended"))[..], &zero[..]) {
            ([code, begun, ended], [zero]) => (Some(*code), begun - zero, ended - zero),
            _ => (None, f64::NAN, f64::NAN),
        };
        let errors = text("errors");
        let rung = errors
            .lines()
            .find_map(|line| line.strip_prefix("cedos run: "));
        let rung = rung.and_then(|line| line.split([':', ',']).next());
        let (right, more) = program.result(site);
        let mut told = json!({
            "rung": rung,
            "whole": code == Some(0.0) && right,
            "took_s": ended_s - begun_s,
            // It was running when the network was lost, and had not ended when it returned.
            "across": begun_s < f64::from(self.away_s) && ended_s > f64::from(self.away_s + AWAY_S),
        });
        if let (Some(told), Value::Object(more)) = (told.as_object_mut(), more) {
            told.extend(more);
        }
        if told["whole"] != json!(true) {
            let last = errors.lines().next_back().unwrap_or_default();
            told["code"] = json!(code);
            told["said"] = json!(last);
        }
        told
    }
}
