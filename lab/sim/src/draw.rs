//! Generates the scenario of a seed: networks with all kinds of faults, which then recover.
//!
//! ```text
//!  0 s            faults: everything RELIABILITY asks for, at random              heal      end
//!  ├── links ─────access points, NATs that forget, new addresses, crashes ─────────┤──────────┤
//!      └ flows start                                                       one link good
//! ```
//!
//! One of eight seeds is of another kind: one link is good, another one never answers or ceases to,
//! and the guarantees of a device must hold (`CONNECT_S_MAX`, `SILENCE_S_MAX`).
//!
//! Networks also block UDP, and portals and middleboxes answer or reset TCP. Where the proxy accepts
//! streams, the link that recovers may go on without UDP.
//!
//! Each scenario is text in the form of a scenario file, so a failing seed can be kept as a file.

use std::fmt::Write;

use cedos_lab_link::seeded;
use cedos_lab_scenario::ScenarioState;
use rand::Rng;
use rand_pcg::Pcg32;

/// When the network recovers, in seconds, unless a long outage comes before.
const HEAL_S: f64 = 120.0;
/// The time after recovery in which all must complete, in seconds: 9 MB over 2 Mb/s beside links
/// that stay bad, and a margin. Progress is checked much earlier (`STUCK_AFTER`).
const AFTER_S: f64 = 900.0;
/// The longest time without any network.
const OUTAGE_S_MAX: f64 = 7.0 * 86_400.0;
/// The latest time of a replay.
const REPLAY_S_MAX: f64 = 86_400.0;
/// The random stream from which scenarios are drawn; runs use lower ones.
const FUZZ_STREAM: u64 = 1 << 33;

/// One seed in this many has a link that is attached and does not answer.
const UNANSWERED_EVERY: u64 = 8;
/// The most seconds from the start of a flow to its first byte over the other link: a second for
/// the first link to answer, a handshake and a request.
pub(crate) const CONNECT_S_MAX: f64 = 2.5;
/// The longest silence of a flow when its link ceases to answer.
pub(crate) const SILENCE_S_MAX: f64 = 1.5;
/// The longest silence where the link may have carried a stream: TCP has a second to repeat what is lost
/// (R-STREAM-3).
pub(crate) const STREAM_SILENCE_S_MAX: f64 = 2.0;

/// States that crashes wait for: they last only for a moment, or few runs reach them.
const AMBUSHES: [(&str, ScenarioState); 12] = [
    ("device", ScenarioState::Handshaking),
    ("device", ScenarioState::Waking),
    ("device", ScenarioState::Hibernated),
    ("device", ScenarioState::PathOpening),
    ("device", ScenarioState::FlowUnclaimed),
    ("device", ScenarioState::FlowHalfClosedThere),
    ("proxy", ScenarioState::Waking),
    ("proxy", ScenarioState::PathOpening),
    ("proxy", ScenarioState::PathOpening),
    ("proxy", ScenarioState::FlowUnclaimed),
    ("proxy", ScenarioState::FlowHalfClosedThere),
    ("proxy", ScenarioState::FlowDraining),
];

/// The scenario file of a seed.
pub fn scenario_text(seed: u64, salt: u64) -> String {
    let mut draw = Draw {
        rng: seeded(seed ^ salt.rotate_left(32), FUZZ_STREAM),
        heal_s: HEAL_S,
        outage: None,
        streams: false,
    };
    let mut out = String::new();
    let drawn = match seed % UNANSWERED_EVERY == UNANSWERED_EVERY - 1 {
        true => draw.unanswered(&mut out, seed),
        false => draw.scenario(&mut out, seed),
    };
    drawn.expect("a string takes text");
    out
}

struct Draw {
    rng: Pcg32,
    heal_s: f64,
    /// When no link is up: from, until.
    outage: Option<(f64, f64)>,
    /// Whether the proxy accepts streams.
    streams: bool,
}

impl Draw {
    fn chance(&mut self, p: f64) -> bool {
        self.rng.random::<f64>() < p
    }

    fn between(&mut self, min: f64, max: f64) -> f64 {
        let drawn = min + (max - min) * self.rng.random::<f64>();
        // Three digits, so that the file contains exactly what runs.
        (drawn * 1000.0).round() / 1000.0
    }

    /// Draws between two values, with equal probability for each order of magnitude.
    fn of_magnitude(&mut self, min: f64, max: f64) -> f64 {
        // No power functions, because their last bits differ between platforms.
        let mut decades = vec![min];
        while decades[decades.len() - 1] * 10.0 < max {
            decades.push(decades[decades.len() - 1] * 10.0);
        }
        let from = self.one_of(&decades);
        self.between(from, (from * 10.0).min(max)).clamp(min, max)
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.rng.random_range(0..list.len())]
    }

    fn scenario(&mut self, out: &mut String, seed: u64) -> std::fmt::Result {
        let links = self.rng.random_range(1..=3usize);
        let flows = self.rng.random_range(1..=3usize);
        if self.chance(0.12) {
            let from = self.between(2.0, 60.0);
            let length = self.of_magnitude(1.0, OUTAGE_S_MAX);
            self.outage = Some((from, from + length));
            self.heal_s = HEAL_S.max(from + length + 5.0);
        }
        let replays = self.replays();
        let last_replay = replays.iter().map(|(t_s, _)| *t_s).fold(0.0, f64::max);
        let end_s = (self.heal_s + AFTER_S).max(last_replay + 60.0);
        let heal_s = self.heal_s;
        writeln!(
            out,
            "about = \"Drawn from a seed: faults until {heal_s} s, then one link heals.\""
        )?;
        writeln!(out, "seed = {seed}\nduration_s = {end_s}")?;
        self.streams = self.chance(0.7);
        writeln!(out, "streams = {}", self.streams)?;
        if self.chance(0.5) {
            writeln!(out, "hibernate_after_s = {}", self.between(0.0, 30.0))?;
        }
        let healed = self.rng.random_range(0..links);
        let others_stay = self.chance(0.3);
        for number in 0..links {
            self.link(out, number, healed, others_stay)?;
        }
        let mut expected = Vec::new();
        for number in 0..flows {
            if self.flow(out, number)? {
                expected.push(number);
            }
        }
        for _ in 0..self.one_of(&[0, 0, 0, 1, 1, 2, 3]) {
            self.crash(out)?;
        }
        for (_, text) in replays {
            out.push_str(&text);
        }
        for number in expected {
            writeln!(out, "\n[[expect]]\ntext = \"flows[{number}].sha256_ok\"")?;
        }
        writeln!(
            out,
            "\n[[expect]]\ntext = \"sum(links.packets_while_down) == 0\""
        )?;
        // Drawn last, so that everything above stays the same for the seed.
        if self.chance(0.3) {
            let bytes = self.of_magnitude(1_000.0, 1_000_000.0);
            writeln!(out, "\n[transport]\nmirror = {bytes:.0}")?;
        }
        if self.chance(0.3) {
            self.ambush(out)?;
        }
        if self.streams && self.chance(0.2) {
            self.http_proxy(out)?;
        }
        Ok(())
    }

    /// Lets only an HTTP proxy pass on the last link, again and again.
    fn http_proxy(&mut self, out: &mut String) -> std::fmt::Result {
        let every_s = self.between(4.0, 40.0);
        let for_s = self.between(0.1, every_s - 0.5);
        let from = self.outage.map_or(HEAL_S, |(from, _)| from);
        let until_s = (HEAL_S - 45.0).min(from - for_s - 0.1).max(0.0);
        writeln!(
            out,
            "\n[[link.repeat]]\nevery_s = {every_s}\nfor_s = {for_s}\nonly_http_proxy = true\n\
             until_s = {until_s}"
        )
    }

    /// Two links, one of which is good all the time and the other never answers or ceases to: each
    /// flow must connect soon, and never stand still for long.
    fn unanswered(&mut self, out: &mut String, seed: u64) -> std::fmt::Result {
        writeln!(
            out,
            "about = \"Drawn from a seed: one link does not answer, the other is good.\""
        )?;
        writeln!(out, "seed = {seed}\nduration_s = 120")?;
        let streams = self.chance(0.5);
        writeln!(out, "streams = {streams}")?;
        let silent = [
            ("udp_blocked = true", "udp_blocked = false"),
            ("dead = true", "dead = false"),
            ("cut = true", "cut = false"),
            ("stall = true", "stall = false"),
            ("loss_down = 1", "loss_down = 0"),
            ("loss_up = 1", "loss_up = 0"),
        ];
        let (begins, ends) = self.one_of(&silent);
        // Only where UDP is blocked does a stream carry anything.
        let silence_s = match streams && begins == "udp_blocked = true" {
            true => STREAM_SILENCE_S_MAX,
            false => SILENCE_S_MAX,
        };
        let from_s = match self.chance(0.4) {
            true => 0.0,
            false => self.between(0.2, 12.0),
        };
        let until_s = self.chance(0.5).then(|| from_s + self.between(2.0, 40.0));
        writeln!(out, "\n[[link]]\nname = \"wlan0\"")?;
        let (down, up) = (self.between(5.0, 40.0), self.between(2.0, 10.0));
        let rtt = self.between(5.0, 80.0);
        writeln!(out, "down_mbps = {down}\nup_mbps = {up}\nrtt_ms = {rtt}")?;
        writeln!(
            out,
            "queue_ms = 60\njitter_ms = {}",
            self.between(0.0, 10.0)
        )?;
        writeln!(out, "\n[[link.at]]\nt_s = {from_s}\n{begins}")?;
        if let Some(until_s) = until_s {
            writeln!(out, "\n[[link.at]]\nt_s = {until_s}\n{ends}")?;
        }
        writeln!(out, "\n[[link]]\nname = \"wwan0\"")?;
        if self.chance(0.7) {
            writeln!(out, "class = \"metered\"")?;
        }
        let (down, up) = (self.between(2.0, 20.0), self.between(1.0, 5.0));
        let rtt = self.between(30.0, 150.0);
        writeln!(out, "down_mbps = {down}\nup_mbps = {up}\nrtt_ms = {rtt}")?;
        writeln!(
            out,
            "queue_ms = 100\njitter_ms = {}",
            self.between(0.0, 10.0)
        )?;
        let directions: &[&str] = match self.rng.random_range(0..3) {
            0 => &["down"],
            1 => &["up"],
            _ => &["down", "up"],
        };
        for (number, direction) in directions.iter().enumerate() {
            let bytes = self.one_of(&[50_000, 1_000_000, 4_000_000, 12_000_000]);
            let start_s = self.one_of(&[0.0, 0.0, 1.5, 4.0]);
            writeln!(
                out,
                "\n[[flow]]\nbytes = {bytes}\ndirection = \"{direction}\""
            )?;
            writeln!(out, "start_s = {start_s}\npolicy = \"any\"")?;
            for expected in [
                format!("flows[{number}].sha256_ok"),
                format!(
                    "flows[{number}].first_byte_s <= {}",
                    start_s + CONNECT_S_MAX
                ),
                format!("flows[{number}].silence_max_s <= {silence_s}"),
            ] {
                writeln!(out, "\n[[expect]]\ntext = \"{expected}\"")?;
            }
        }
        Ok(())
    }

    /// Adds a flow. Returns true if it must complete: a deadline may pass.
    fn flow(&mut self, out: &mut String, number: usize) -> Result<bool, std::fmt::Error> {
        let direction = if self.chance(0.35) { "up" } else { "down" };
        let bytes = self.one_of(&[0, 1, 1200, 70_000, 1_000_000, 3_000_000]);
        writeln!(out, "\n[[flow]]\nid = \"f{number}\"\nbytes = {bytes}")?;
        writeln!(out, "direction = \"{direction}\"")?;
        // Only data that exists before the first SYN can travel in it.
        let early = self.chance(0.2);
        let start = if early { 0.0 } else { self.between(0.0, 30.0) };
        writeln!(out, "start_s = {start}")?;
        if self.chance(0.4) {
            writeln!(out, "durable = true")?;
        }
        if self.chance(0.3) {
            writeln!(out, "late_end = true")?;
        }
        if early {
            writeln!(out, "early = true")?;
        }
        let by = self.chance(0.25).then(|| start + self.between(0.2, 200.0));
        match by {
            Some(by) if self.chance(0.5) => {
                writeln!(out, "deadline_s = {by}\npolicy = \"free-first\"")?;
            }
            Some(by) => writeln!(out, "deadline_s = {by}\npolicy = \"any\"")?,
            // A flow that must complete uses the link that recovers, whatever else is up: `any`
            // would stay on a free link that carries next to nothing.
            None => writeln!(out, "policy = \"fast\"")?,
        }
        Ok(by.is_none())
    }

    fn crash(&mut self, out: &mut String) -> std::fmt::Result {
        let who = self.one_of(&["device", "proxy"]);
        // Mostly during flows, and sometimes at both ends within moments.
        let t_s = match self.one_of(&[0, 1, 2, 2]) {
            0 => 20.0,
            1 => self.between(0.0, HEAL_S - 20.0),
            _ => self.between(0.0, 40.0),
        };
        writeln!(out, "\n[[crash]]\nwho = \"{who}\"\nt_s = {t_s}")?;
        writeln!(out, "for_s = {}", self.between(0.0, 10.0))?;
        if self.chance(0.5) {
            writeln!(out, "after_events = {}", self.rng.random_range(0..1000))?;
        }
        if self.chance(0.3) {
            writeln!(out, "how = \"freeze\"")?;
        } else if self.chance(0.2) {
            writeln!(out, "lost_commits = {}", self.rng.random_range(1..=8))?;
        }
        Ok(())
    }

    /// Adds an event that waits for a state, because some states last only a round trip and a
    /// random time rarely hits them.
    fn ambush(&mut self, out: &mut String) -> std::fmt::Result {
        let who = self.one_of(&["device", "proxy"]);
        let (t_s, for_s) = (self.between(0.0, 60.0), self.between(0.0, 10.0));
        let (of, when) = self.one_of(&AMBUSHES);
        let fault = self.one_of(&["crash", "crash", "lie", "freeze", "freeze", "replay"]);
        if fault == "replay" {
            let (packets, elsewhere) = (self.rng.random_range(1..200), self.chance(0.5));
            writeln!(
                out,
                "\n[[replay]]\nto = \"{who}\"\nt_s = {t_s}\npackets = {packets}"
            )?;
            writeln!(out, "elsewhere = {elsewhere}")?;
        } else {
            writeln!(
                out,
                "\n[[crash]]\nwho = \"{who}\"\nt_s = {t_s}\nfor_s = {for_s}"
            )?;
            match fault {
                "lie" => writeln!(out, "lost_commits = {}", self.rng.random_range(1..=8))?,
                how => writeln!(out, "how = \"{how}\"")?,
            }
        }
        writeln!(out, "of = \"{of}\"\nwhen = \"{}\"", when.word())
    }

    /// Draws replays: the time and the text of each.
    fn replays(&mut self) -> Vec<(f64, String)> {
        let number = self.one_of(&[0, 0, 1, 2]);
        let mut all = Vec::new();
        for _ in 0..number {
            let t_s = if self.chance(0.2) {
                self.of_magnitude(1.0, REPLAY_S_MAX)
            } else {
                self.between(1.0, HEAL_S + 20.0)
            };
            let to = self.one_of(&["device", "proxy"]);
            let packets = self.rng.random_range(1..200);
            let elsewhere = self.chance(0.4);
            all.push((
                t_s,
                format!(
                    "\n[[replay]]\nto = \"{to}\"\nt_s = {t_s}\npackets = {packets}\nelsewhere = {elsewhere}\n"
                ),
            ));
        }
        all
    }

    fn link(
        &mut self,
        out: &mut String,
        number: usize,
        healed: usize,
        others_stay: bool,
    ) -> std::fmt::Result {
        let family = self.one_of(&["v4", "v4", "v6", "both", "v6-only-nat64"]);
        writeln!(
            out,
            "\n[[link]]\nname = \"link{number}\"\nfamily = \"{family}\""
        )?;
        if self.chance(0.3) {
            writeln!(out, "class = \"metered\"")?;
        }
        let (down, up) = if self.chance(0.2) {
            // 1 kb/s to 1 Gb/s
            (
                self.of_magnitude(0.001, 1000.0),
                self.of_magnitude(0.001, 1000.0),
            )
        } else {
            (self.between(0.2, 30.0), self.between(0.1, 10.0))
        };
        writeln!(out, "down_mbps = {down}\nup_mbps = {up}")?;
        let far = self.chance(0.05);
        let rtt = if far {
            self.of_magnitude(1_000.0, 2_400_000.0)
        } else {
            self.between(1.0, 400.0)
        };
        writeln!(out, "rtt_ms = {rtt}")?;
        writeln!(out, "attach_s = {}", self.between(0.0, 2.0))?;
        if self.chance(0.5) {
            let packets = self.of_magnitude(1.0, 10_000.0) as u64;
            writeln!(out, "queue_bytes = {}", packets * 1500)?;
        }
        if self.chance(0.4) {
            writeln!(out, "loss = {}", self.between(0.0, 0.3))?;
        }
        if self.chance(0.3) {
            let (loss, length) = (self.between(0.01, 0.4), self.between(1.0, 10.0));
            writeln!(out, "burst = {{ loss = {loss}, length = {length} }}")?;
        }
        for key in ["reorder", "duplicate", "corrupt"] {
            if self.chance(0.3) {
                writeln!(out, "{key} = {}", self.between(0.0, 0.5))?;
                if key == "reorder" && self.chance(0.3) {
                    writeln!(out, "reorder_ms = {}", self.of_magnitude(1.0, 1_200_000.0))?;
                }
            }
        }
        if self.chance(0.3) {
            writeln!(out, "jitter_ms = {}", self.between(0.0, 50.0))?;
        }
        let sizes: &[u32] = if family == "v4" {
            &[576, 1000, 1227, 1228, 1280, 1400, 1492, 9000]
        } else {
            &[1280, 1340, 1400, 1492, 9000]
        };
        if self.chance(0.25) {
            writeln!(out, "mtu = {}", self.one_of(sizes))?;
        }
        if self.chance(0.1) {
            writeln!(out, "dead = true")?;
        }
        self.changes(out, sizes)?;
        self.end(out, number == healed, others_stay, far)
    }

    /// Draws the changes of a link until it recovers.
    fn changes(&mut self, out: &mut String, sizes: &[u32]) -> std::fmt::Result {
        let heal_s = HEAL_S;
        for what in [
            "up = false",
            "dead = true",
            "stall = true",
            "cut = true",
            "udp_blocked = true",
            "portal = true",
            "tcp = \"reset\"",
            "tcp = \"intercept\"",
            "loss_down = 1",
            "loss_up = 1",
            "down_mbps = 0.05\nup_mbps = 0.05\nrtt_ms = 900",
        ] {
            let p = match what.split(' ').next() {
                Some("portal" | "tcp") => 0.1,
                Some("loss_down" | "loss_up" | "down_mbps") => 0.15,
                _ => 0.35,
            };
            if self.chance(p) {
                let every_s = self.between(4.0, 40.0);
                let for_s = self.between(0.1, every_s - 0.5);
                // Changes must be undone before the long outage begins.
                let from = self.outage.map_or(heal_s, |(from, _)| from);
                let until_s = (heal_s - 45.0).min(from - for_s - 0.1).max(0.0);
                writeln!(
                    out,
                    "\n[[link.repeat]]\nevery_s = {every_s}\nfor_s = {for_s}\n{what}\nuntil_s = {until_s}"
                )?;
            }
        }
        for what in ["rebind = true", "new_address = true"] {
            if self.chance(0.3) {
                let (every_s, until_s) = (self.between(1.0, 30.0), heal_s - 1.0);
                writeln!(
                    out,
                    "\n[[link.repeat]]\nevery_s = {every_s}\n{what}\nuntil_s = {until_s}"
                )?;
            }
        }
        if self.chance(0.2) {
            let (t_s, mtu) = (self.between(1.0, heal_s - 10.0), self.one_of(sizes));
            writeln!(out, "\n[[link.at]]\nt_s = {t_s}\nmtu = {mtu}")?;
        }
        Ok(())
    }

    /// Adds the long outage, and the recovery.
    fn end(
        &mut self,
        out: &mut String,
        healed: bool,
        others_stay: bool,
        far: bool,
    ) -> std::fmt::Result {
        let heal_s = self.heal_s;
        let outage = self.outage.map(|(from, _)| from);
        // Packets on a link with a long delay would hold back those after them.
        let off = (far && healed).then_some(heal_s - 1.0);
        for t_s in outage.into_iter().chain(off) {
            writeln!(out, "\n[[link.at]]\nt_s = {t_s}\nup = false")?;
        }
        if let Some((_, to)) = self.outage.filter(|(_, to)| *to < HEAL_S - 10.0) {
            writeln!(out, "\n[[link.at]]\nt_s = {to}\nup = true")?;
        }
        writeln!(out, "\n[[link.at]]\nt_s = {heal_s}")?;
        if healed || others_stay {
            writeln!(out, "up = true\ndead = false\nstall = false\ncut = false")?;
            writeln!(out, "portal = false\ntcp = \"pass\"")?;
            // What is left then travels in a stream.
            let blocked = healed && self.streams && self.chance(0.3);
            writeln!(out, "udp_blocked = {blocked}")?;
        }
        if healed {
            writeln!(
                out,
                "loss = 0\nburst = {{ loss = 0, length = 1 }}\nreorder = 0"
            )?;
            writeln!(out, "duplicate = 0\ncorrupt = 0\njitter_ms = 0\nmtu = 1400")?;
            writeln!(
                out,
                "down_mbps = 5\nup_mbps = 2\nrtt_ms = 40\nqueue_ms = 200"
            )?;
        } else if !others_stay {
            writeln!(out, "up = false")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cedos_lab_scenario::Scenario;

    #[test]
    fn every_drawn_scenario_is_one_and_a_salt_changes_it() {
        for seed in 0..500 {
            let text = scenario_text(seed, 3);
            Scenario::parse("drawn", &text, &mut |_| unreachable!())
                .unwrap_or_else(|fault| panic!("seed {seed}: {fault}\n{text}"));
            assert_ne!(text, scenario_text(seed, 4));
        }
    }
}
