//! Rows whose figures come from a `cedos lab run`.

use anyhow::{Context, ensure};
use cedos_lab_scenario::RunReport;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use tempfile::NamedTempFile;

/// The options for D2TP through the lab's proxy: none.
pub const D2TP: &[&str] = &[];

/// The options for kernel TCP through a VPN that carries it as packets.
pub const TUNNEL: &[&str] = &["--client", "vpn"];

/// A `cedos lab run` in a process of its own.
pub struct StartedLabRun {
    child: Child,
    /// The scenario file, which is removed when the run is over.
    _file: NamedTempFile,
}

impl StartedLabRun {
    /// Starts a lab run of this scenario.
    ///
    /// # Errors
    /// It could not be started.
    pub fn begin(scenario: &str, options: &[&str]) -> anyhow::Result<StartedLabRun> {
        let mut file = tempfile::Builder::new().suffix(".toml").tempfile()?;
        file.write_all(scenario.as_bytes())?;
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        let child = Command::new(program)
            .args(["lab", "run", "--json"])
            .args(options)
            .arg(file.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("`cedos lab run` cannot be run")?;
        Ok(StartedLabRun { child, _file: file })
    }

    /// Waits for the end of the run, and returns its report.
    ///
    /// # Errors
    /// It printed none.
    pub fn report(self) -> anyhow::Result<RunReport> {
        let said = self.child.wait_with_output()?;
        serde_json::from_slice(&said.stdout).context("`cedos lab run` ended without its report")
    }
}

/// Runs the shell script `script` on the lab's device, with these variables, while this scenario
/// runs. Returns the report of the run.
///
/// # Errors
/// It could not be run, or the script failed.
pub fn commanded_in_lab(
    scenario: &str,
    script: &str,
    variables: &[(&str, String)],
) -> anyhow::Result<RunReport> {
    commanded_beside_an_origin(scenario, D2TP, None, script, variables)
}

/// How many of the last lines of a failed run an error repeats.
const ERROR_LINES: usize = 8;

/// Runs a shell script on the device while another one, `servers`, runs at the origin. `options`: those of the client and its
/// links.
///
/// # Errors
/// It could not be run, or the script on the device failed.
pub fn commanded_beside_an_origin(
    scenario: &str,
    options: &[&str],
    servers: Option<&str>,
    script: &str,
    variables: &[(&str, String)],
) -> anyhow::Result<RunReport> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile()?;
    file.write_all(scenario.as_bytes())?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let said = Command::new(program)
        .args(["lab", "run", "--json"])
        .args(options)
        .args(servers.iter().flat_map(|servers| ["--at-origin", servers]))
        .arg(file.path())
        .args(["--", "sh", "-c", script])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .output()
        .context("`cedos lab run` cannot be run")?;
    let errors = String::from_utf8_lossy(&said.stderr);
    // The last lines are of links.
    let lines: Vec<&str> = errors.lines().collect();
    let last = &lines[lines.len().saturating_sub(ERROR_LINES)..];
    ensure!(
        said.status.success(),
        "`cedos lab run` ended with {}: {}",
        said.status,
        last.join("\n")
    );
    // The script's own output precedes it.
    let printed = String::from_utf8_lossy(&said.stdout);
    serde_json::from_str(printed.lines().next_back().unwrap_or_default())
        .context("`cedos lab run` ended without its report")
}
