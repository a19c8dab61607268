//! A radio beside the scenario's links, and a `cedos bridge` at its other end.
//!
//! ```text
//!  device: cedos vpn ── serial line ═ radio ═ serial line ── cedos bridge, on the origin's host ── proxy
//! ```

use anyhow::{Context, bail};
use cedos_lab_emu::{SerialRadio, World, plan};
use cedos_lab_scenario::LinkReport;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::end;

/// The bit rate of the serial lines, which is more than the radio carries.
const BAUD: u32 = 115_200;
/// What the radio takes each way: E1 has 500 ms for a round trip.
const DELAY: Duration = Duration::from_millis(250);
/// The name of the radio in reports.
const NAME: &str = "bridge0";

/// A radio, and the bridge at its other end.
pub struct LabBridge {
    radio: SerialRadio,
    bridge: Child,
}

impl LabBridge {
    /// Starts the bridge of a radio that carries so many bits per second.
    ///
    /// # Errors
    /// The bridge did not start; the error contains its output.
    pub fn start(
        world: &World,
        program: &Path,
        folder: &Path,
        bits_per_second: u32,
    ) -> anyhow::Result<LabBridge> {
        let radio = SerialRadio::connect(u64::from(bits_per_second / 8), DELAY)?;
        let log = folder.join("bridge.log");
        let mut command = Command::new(program);
        command
            .args(["bridge", "--baud", &BAUD.to_string(), "--serial"])
            .arg(&radio.devices()[1])
            .arg("--prox")
            .arg(SocketAddr::new(plan::PROXY_V4.into(), plan::PROXY_PORTS[0]).to_string())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?);
        let mut bridge = world.origin().spawn(command)?;
        let mut out = BufReader::new(bridge.stdout.take().context("the bridge's output")?);
        let mut line = String::new();
        out.read_line(&mut line)?;
        if !line.contains("bytes per second") {
            end(&mut bridge);
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("`cedos bridge` does not start: {}", said.trim());
        }
        // What it says later is not needed, but must go somewhere.
        std::thread::spawn(move || std::io::copy(&mut out, &mut std::io::sink()));
        Ok(LabBridge { radio, bridge })
    }

    /// The serial line of the device, as a `--link` option names it.
    pub fn line(&self) -> String {
        format!("serial:{}@{BAUD}", self.radio.devices()[0].display())
    }

    /// What the radio has carried.
    pub fn report(&self) -> LinkReport {
        let [up, down] = self.radio.carried();
        LinkReport {
            name: NAME.to_owned(),
            class: "free".to_owned(),
            bytes_down: down,
            bytes_up: up,
            ..LinkReport::default()
        }
    }
}

impl Drop for LabBridge {
    fn drop(&mut self) {
        end(&mut self.bridge);
    }
}
