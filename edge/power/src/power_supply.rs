//! What the machine runs on, as Linux says in `/sys/class/power_supply`.
//!
//! ```text
//!  AC0/    type=Mains    online=0
//!  BAT0/   type=Battery  status=Discharging  capacity=63        ─▶ battery, 63 %
//!  hid-…/  type=Battery  scope=Device                            a mouse: does not count
//! ```

use std::fs;
use std::path::Path;

use d2tp_sched::PowerSource;

/// The directory of the kernel.
pub const POWER_SUPPLIES: &str = "/sys/class/power_supply";

/// The most supplies that are read.
const SUPPLIES_MAX: usize = 64; // a guess: laptops have five

/// A battery of the machine.
struct Battery {
    status: String,
    percent: Option<u8>,
    /// The charge of the full battery, in the unit of its driver.
    full: Option<f64>,
}

/// Reads what the machine runs on from a directory such as [`POWER_SUPPLIES`].
///
/// Unknown if it has no battery and no supply that is said to be on: a desktop, a server, or a container.
/// Of several batteries, one that is discharged is enough to run on battery, and what is left is that of all
/// together.
pub fn read_power_source(directory: &Path) -> PowerSource {
    let supplies = fs::read_dir(directory).into_iter().flatten().flatten();
    let (mut batteries, mut is_external) = (Vec::new(), false);
    for supply in supplies.take(SUPPLIES_MAX) {
        let folder = supply.path();
        let text = |name: &str| {
            let text = fs::read_to_string(folder.join(name)).ok()?;
            Some(text.trim().to_owned())
        };
        // A battery of a mouse, a headset or a pen.
        if text("scope").as_deref() == Some("Device") {
            continue;
        }
        let number = |name: &str| text(name)?.parse::<f64>().ok().filter(|n| *n >= 0.0);
        match text("type").as_deref() {
            Some("Battery") if text("present").as_deref() != Some("0") => {
                let percent = number("capacity").map(|n| n.min(100.0) as u8);
                batteries.push(Battery {
                    status: text("status").unwrap_or_default(),
                    percent,
                    full: number("energy_full").or_else(|| number("charge_full")),
                });
            }
            // 1 is fixed, 2 is programmable voltage of USB PD.
            Some("Mains" | "USB" | "Wireless") => is_external |= number("online") >= Some(1.0),
            _ => {}
        }
    }
    let is = |status: &str| batteries.iter().any(|battery| battery.status == status);
    if is("Discharging") && !is("Charging") {
        return PowerSource::Battery {
            percent: together(&batteries),
        };
    }
    match is_external || is("Charging") || is("Full") || is("Not charging") {
        true => PowerSource::External,
        false => PowerSource::Unknown,
    }
}

/// The remaining charge of all batteries together in percent, weighted by their sizes if all report them.
fn together(batteries: &[Battery]) -> Option<u8> {
    let known: Vec<(f64, Option<f64>)> = batteries
        .iter()
        .filter_map(|battery| Some((f64::from(battery.percent?), battery.full)))
        .collect();
    let all_sized = known
        .iter()
        .all(|(_, full)| full.is_some_and(|full| full > 0.0));
    let weight = |full: Option<f64>| full.filter(|_| all_sized).unwrap_or(1.0);
    let sum: f64 = known.iter().map(|(_, full)| weight(*full)).sum();
    let left: f64 = known
        .iter()
        .map(|(percent, full)| percent * weight(*full))
        .sum();
    (sum > 0.0).then(|| (left / sum).round() as u8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Supplies, each with its files.
    type Tree<'a> = &'a [(&'a str, &'a [(&'a str, &'a str)])];

    fn source(tree: Tree<'_>) -> PowerSource {
        let root = tempfile::tempdir().expect("a directory");
        for (supply, files) in tree {
            let folder = root.path().join(supply);
            fs::create_dir(&folder).expect("a folder");
            for (name, text) in *files {
                fs::write(folder.join(name), format!("{text}\n")).expect("a file");
            }
        }
        read_power_source(root.path())
    }

    const MAINS_OFF: (&str, &[(&str, &str)]) = ("AC0", &[("type", "Mains"), ("online", "0")]);
    const MAINS_ON: (&str, &[(&str, &str)]) = ("AC0", &[("type", "Mains"), ("online", "1")]);

    fn battery(percent: Option<u8>) -> PowerSource {
        PowerSource::Battery { percent }
    }

    #[test]
    fn a_battery_that_is_discharged_is_what_the_machine_runs_on() {
        let low: Tree<'_> = &[
            MAINS_OFF,
            (
                "BAT0",
                &[
                    ("type", "Battery"),
                    ("status", "Discharging"),
                    ("capacity", "63"),
                ],
            ),
        ];
        assert_eq!(source(low), battery(Some(63)));
        let silent: Tree<'_> = &[("BAT0", &[("type", "Battery"), ("status", "Discharging")])];
        assert_eq!(source(silent), battery(None));
    }

    #[test]
    fn a_battery_that_is_charged_or_full_is_not() {
        for status in ["Charging", "Full", "Not charging"] {
            let tree: Tree<'_> = &[
                MAINS_ON,
                ("BAT0", &[("type", "Battery"), ("status", status)]),
            ];
            assert_eq!(source(tree), PowerSource::External, "{status}");
        }
        let by_usb: Tree<'_> = &[
            ("BAT0", &[("type", "Battery"), ("status", "Unknown")]),
            ("usb", &[("type", "USB"), ("online", "1")]),
        ];
        assert_eq!(source(by_usb), PowerSource::External);
    }

    #[test]
    fn a_mouse_and_a_bay_without_a_battery_do_not_count() {
        let mouse: &[(&str, &str)] = &[
            ("type", "Battery"),
            ("scope", "Device"),
            ("status", "Discharging"),
            ("capacity", "5"),
        ];
        assert_eq!(source(&[("hid-1", mouse)]), PowerSource::Unknown);
        assert_eq!(source(&[("hid-1", mouse), MAINS_ON]), PowerSource::External);
        let bay: &[(&str, &str)] = &[
            ("type", "Battery"),
            ("present", "0"),
            ("status", "Discharging"),
        ];
        assert_eq!(source(&[("BAT1", bay), MAINS_ON]), PowerSource::External);
    }

    #[test]
    fn of_several_batteries_each_counts_by_its_size() {
        let of = |percent, full| -> [(&'static str, &'static str); 4] {
            let status = (
                "status",
                if percent == "0" {
                    "Unknown"
                } else {
                    "Discharging"
                },
            );
            [
                ("type", "Battery"),
                status,
                ("capacity", percent),
                ("energy_full", full),
            ]
        };
        let (first, second) = (of("0", "10000000"), of("80", "30000000"));
        assert_eq!(
            source(&[MAINS_OFF, ("BAT0", &first), ("BAT1", &second)]),
            battery(Some(60))
        );
    }

    #[test]
    fn a_machine_that_says_nothing_or_nonsense_is_unknown() {
        assert_eq!(
            read_power_source(Path::new("/nonexistent")),
            PowerSource::Unknown
        );
        assert_eq!(source(&[]), PowerSource::Unknown);
        let nonsense: Tree<'_> = &[(
            "BAT0",
            &[
                ("type", "Battery"),
                ("status", "\u{0}?"),
                ("capacity", "-7"),
            ],
        )];
        assert_eq!(source(nonsense), PowerSource::Unknown);
    }
}
