//! Rows whose figures are those of a `cedos lab run`.

use anyhow::{Context, ensure};
use cedos_lab_scenario::RunReport;
use std::io::Write;
use std::process::{Child, Command, Stdio};
use tempfile::NamedTempFile;

/// D2TP through the lab's proxy; no word is said for it.
pub const D2TP: &[&str] = &[];

/// A run that has begun.
pub struct Emulated {
    child: Child,
    /// Removed when it is over.
    _file: NamedTempFile,
}

impl Emulated {
    /// Has the lab run this scenario.
    ///
    /// # Errors
    /// It could not be started.
    pub fn begin(scenario: &str, options: &[&str]) -> anyhow::Result<Emulated> {
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
        Ok(Emulated { child, _file: file })
    }

    /// Its report, once it is over.
    ///
    /// # Errors
    /// It printed none.
    pub fn report(self) -> anyhow::Result<RunReport> {
        let said = self.child.wait_with_output()?;
        serde_json::from_slice(&said.stdout).context("`cedos lab run` ended without its report")
    }
}

/// Has a shell carry out `script` on the lab's device, with these variables, while this scenario runs; the
/// report of the run.
///
/// # Errors
/// It could not be run, or the shell did not end well.
pub fn commanded_in_lab(
    scenario: &str,
    script: &str,
    variables: &[(&str, String)],
) -> anyhow::Result<RunReport> {
    commanded_beside_an_origin(scenario, None, script, variables)
}

/// Runs a command on the device while another shell carries out `servers` at the origin.
///
/// # Errors
/// It could not be run, or the shell on the device did not end well.
pub fn commanded_beside_an_origin(
    scenario: &str,
    servers: Option<&str>,
    script: &str,
    variables: &[(&str, String)],
) -> anyhow::Result<RunReport> {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile()?;
    file.write_all(scenario.as_bytes())?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let said = Command::new(program)
        .args(["lab", "run", "--json"])
        .args(servers.iter().flat_map(|servers| ["--at-origin", servers]))
        .arg(file.path())
        .args(["--", "sh", "-c", script])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .output()
        .context("`cedos lab run` cannot be run")?;
    let errors = String::from_utf8_lossy(&said.stderr);
    let last = errors.lines().next_back().unwrap_or_default();
    ensure!(
        said.status.success(),
        "`cedos lab run` ended with {}: {last}",
        said.status
    );
    // What the shell printed is before it.
    let printed = String::from_utf8_lossy(&said.stdout);
    serde_json::from_str(printed.lines().next_back().unwrap_or_default())
        .context("`cedos lab run` ended without its report")
}
