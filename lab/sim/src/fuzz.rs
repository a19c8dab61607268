//! Scenarios drawn from seeds: networks that do their worst, then heal; then all must complete.
//!
//! ```text
//!  0 s            faults: loss, bursts, reordering, twins, damage, outages, dead      heal      end
//!  ├── links ─────access points, NATs that forget, new addresses, crashes ─────────────┤──────────┤
//!      └ flows start                                                          one link perfect
//! ```
//!
//! Each is text in the form of a scenario file, so a seed that fails is at once a file to keep.

use std::cell::RefCell;
use std::fmt::Write;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use cedos_lab_link::seeded;
use cedos_lab_scenario::Scenario;
use rand::Rng;
use rand_pcg::Pcg32;

/// When the network heals.
const HEAL_S: f64 = 120.0;
/// Time after healing in which all must complete: 3 MB over 2 Mb/s, and patience.
const AFTER_S: f64 = 240.0;

/// Runs the scenario of a seed.
///
/// # Errors
/// What went wrong, in words: a fault, a panic of the core, or a flow that did not complete.
pub fn try_seed(seed: u64, salt: u64) -> Result<(), String> {
    let text = scenario_text(seed, salt);
    let scenario = Scenario::parse("fuzz", &text, &mut |name| {
        unreachable!("no scenario drawn here names {name}")
    })
    .map_err(|fault| fault.to_string())?;
    try_scenario(&scenario)
}

/// Runs a scenario.
///
/// # Errors
/// What went wrong, in words: a fault, a panic of the core, or an expectation that does not hold.
pub fn try_scenario(scenario: &Scenario) -> Result<(), String> {
    listen_to_panics();
    PANIC.set(Some(String::new()));
    let ended = catch_unwind(AssertUnwindSafe(|| crate::run(scenario, None)));
    let panicked = PANIC.take().unwrap_or_default();
    match ended {
        Ok(Ok(outcome)) if outcome.report.holds() => Ok(()),
        Ok(Ok(outcome)) => {
            let broken = outcome.report.expectations.iter().filter(|e| !e.holds);
            let broken: Vec<_> = broken.map(|e| format!("{} ({})", e.text, e.why)).collect();
            Err(broken.join(", "))
        }
        Ok(Err(fault)) => Err(fault.to_string()),
        Err(_) => Err(panicked),
    }
}

thread_local! {
    /// What the last panic of this thread said; none while nobody here listens.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on a panic during [`try_seed`] is kept with its place instead of being printed.
fn listen_to_panics() {
    static LISTENS: Once = Once::new();
    LISTENS.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let listens = PANIC.with_borrow_mut(|kept| {
                kept.as_mut()
                    .map(|kept| *kept = info.to_string().replace('\n', " "))
                    .is_some()
            });
            if !listens {
                before(info);
            }
        }));
    });
}

/// The scenario file of a seed.
pub fn scenario_text(seed: u64, salt: u64) -> String {
    let mut draw = Draw(seeded(seed ^ salt.rotate_left(32), FUZZ_STREAM));
    let mut out = String::new();
    draw.scenario(&mut out, seed).expect("a string takes text");
    out
}

/// The stream of chance that scenarios are drawn from; runs use lower ones.
const FUZZ_STREAM: u64 = 1 << 33;

struct Draw(Pcg32);

impl Draw {
    fn chance(&mut self, p: f64) -> bool {
        self.0.random::<f64>() < p
    }

    fn between(&mut self, min: f64, max: f64) -> f64 {
        let drawn = min + (max - min) * self.0.random::<f64>();
        // Three digits, so that the file says exactly what runs.
        (drawn * 1000.0).round() / 1000.0
    }

    fn one_of<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.0.random_range(0..list.len())]
    }

    fn scenario(&mut self, out: &mut String, seed: u64) -> std::fmt::Result {
        let links = self.0.random_range(1..=3usize);
        let flows = self.0.random_range(1..=3usize);
        let end_s = HEAL_S + AFTER_S;
        writeln!(
            out,
            "about = \"Drawn from a seed: faults until {HEAL_S} s, then one link heals.\""
        )?;
        writeln!(out, "seed = {seed}\nduration_s = {end_s}")?;
        if self.chance(0.5) {
            writeln!(out, "hibernate_after_s = {}", self.between(0.0, 30.0))?;
        }
        let healed = self.0.random_range(0..links);
        let others_stay = self.chance(0.3);
        for number in 0..links {
            self.link(out, number, healed, others_stay)?;
        }
        for number in 0..flows {
            let direction = if self.chance(0.3) { "up" } else { "down" };
            let bytes = self.one_of(&[0, 1, 1200, 70_000, 1_000_000, 3_000_000]);
            writeln!(out, "\n[[flow]]\nid = \"f{number}\"\nbytes = {bytes}")?;
            writeln!(out, "direction = \"{direction}\"\npolicy = \"any\"")?;
            writeln!(out, "start_s = {}", self.between(0.0, 30.0))?;
        }
        for _ in 0..self.one_of(&[0, 0, 0, 1, 2]) {
            let who = self.one_of(&["device", "proxy"]);
            let (t_s, for_s) = (self.between(1.0, HEAL_S - 20.0), self.between(0.0, 10.0));
            writeln!(
                out,
                "\n[[crash]]\nwho = \"{who}\"\nt_s = {t_s}\nfor_s = {for_s}"
            )?;
        }
        writeln!(
            out,
            "\n[[expect]]\ntext = \"count(flows[sha256_ok=false]) == 0\""
        )?;
        writeln!(
            out,
            "\n[[expect]]\ntext = \"sum(links.packets_while_down) == 0\""
        )
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
        let (down, up) = (self.between(0.2, 30.0), self.between(0.1, 10.0));
        writeln!(out, "down_mbps = {down}\nup_mbps = {up}")?;
        writeln!(out, "rtt_ms = {}", self.between(1.0, 400.0))?;
        writeln!(out, "attach_s = {}", self.between(0.0, 2.0))?;
        if self.chance(0.5) {
            writeln!(
                out,
                "queue_bytes = {}",
                self.one_of(&[3000, 20_000, 200_000, 2_000_000])
            )?;
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
            }
        }
        if self.chance(0.3) {
            writeln!(out, "jitter_ms = {}", self.between(0.0, 50.0))?;
        }
        if self.chance(0.2) {
            writeln!(out, "mtu = {}", self.one_of(&[1280, 1340, 1400, 1492]))?;
        }
        for what in ["up = false", "dead = true", "stall = true"] {
            if self.chance(0.4) {
                let every_s = self.between(4.0, 40.0);
                let for_s = self.between(0.1, every_s - 0.5);
                writeln!(
                    out,
                    "\n[[link.repeat]]\nevery_s = {every_s}\nfor_s = {for_s}"
                )?;
                writeln!(out, "{what}\nuntil_s = {}", HEAL_S - 45.0)?;
            }
        }
        for what in ["rebind = true", "new_address = true"] {
            if self.chance(0.3) {
                writeln!(
                    out,
                    "\n[[link.repeat]]\nevery_s = {}",
                    self.between(1.0, 30.0)
                )?;
                writeln!(out, "{what}\nuntil_s = {}", HEAL_S - 1.0)?;
            }
        }
        writeln!(out, "\n[[link.at]]\nt_s = {HEAL_S}")?;
        if number == healed || others_stay {
            writeln!(out, "up = true\ndead = false\nstall = false")?;
        }
        if number == healed {
            writeln!(
                out,
                "loss = 0\nburst = {{ loss = 0, length = 1 }}\nreorder = 0"
            )?;
            writeln!(out, "duplicate = 0\ncorrupt = 0\njitter_ms = 0")?;
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

    #[test]
    fn every_drawn_scenario_is_one_and_a_salt_changes_it() {
        for seed in 0..200 {
            let text = scenario_text(seed, 3);
            Scenario::parse("drawn", &text, &mut |_| unreachable!()).unwrap();
            assert_ne!(text, scenario_text(seed, 4));
        }
    }
}
