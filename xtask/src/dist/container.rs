//! A Debian that runs: systemd-nspawn starts systemd as its process 1, in a network namespace that exists already.
//! What a package's scripts and units do there is what they do on a machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::context::call;
use super::patience::wait_for;

/// A shell's script: enters the groups up to `--`, then becomes the command after it.
const ENTER_GROUPS: &str = r#"
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit; shift; done
shift; exec "$@"
"#;

/// A container in which systemd runs. It is stopped when this is dropped.
pub struct Container {
    nspawn: Child,
    /// The container's process 1, by its number outside.
    init: u32,
    /// Control groups that were made for it.
    groups: Vec<PathBuf>,
    log: PathBuf,
}

impl Container {
    /// Starts the Debian in `root`, with the network of the namespace `network`.
    pub fn start(root: &Path, network: &str, log: &Path) -> Result<Container> {
        let groups = own_groups()?;
        let mut nspawn = Command::new("sh");
        nspawn.args(["-c", ENTER_GROUPS, "sh"]).args(&groups);
        nspawn.args(["--", "systemd-nspawn", "--quiet", "--boot"]);
        nspawn.args(["--console=pipe", "--register=no"]);
        if !groups.is_empty() {
            nspawn.arg("--keep-unit");
        }
        // The host's file of name servers is in the Debian already.
        nspawn.args(["--resolv-conf=off", "--timezone=off"]);
        nspawn.arg(format!("--network-namespace-path=/run/netns/{network}"));
        nspawn.arg("--directory").arg(root);
        let file = fs::File::create(log)?;
        nspawn.stdin(Stdio::null());
        nspawn.stdout(file.try_clone()?).stderr(file);
        let nspawn = nspawn.spawn().context("systemd-nspawn")?;
        let mut container = Container {
            nspawn,
            init: 0,
            groups,
            log: log.to_owned(),
        };
        wait_for("process 1 of the container", || {
            container.still_runs()?;
            let own = container.nspawn.id();
            let children = format!("/proc/{own}/task/{own}/children");
            let children = fs::read_to_string(children).unwrap_or_default();
            let init = children
                .split_whitespace()
                .find_map(|id| id.parse::<u32>().ok())
                .filter(|init| name_of(*init) == "systemd");
            container.init = init.unwrap_or(0);
            Ok(init.is_some())
        })?;
        wait_for("the container's systemd", || {
            container.still_runs()?;
            let mut ask = container.enter();
            ask.args(["systemctl", "is-system-running"]);
            // "degraded" is what a container is in which some unit of Debian's own does not work.
            let said = ask.output()?.stdout;
            Ok([b"running\n".as_slice(), b"degraded\n"].contains(&said.as_slice()))
        })?;
        Ok(container)
    }

    fn still_runs(&mut self) -> Result<()> {
        let ended = self.nspawn.try_wait()?;
        ensure!(
            ended.is_none(),
            "systemd-nspawn ended: {}",
            fs::read_to_string(&self.log).unwrap_or_default()
        );
        Ok(())
    }

    /// A command that runs its arguments in the container, but in this program's own network. Signals do not reach
    /// them.
    pub fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.init.to_string()]);
        command.args(["--mount", "--uts", "--ipc", "--pid", "--cgroup"]);
        command.args(["--root", "--wd"]);
        command
    }

    fn stop(&mut self) -> Result<()> {
        // systemd(1), SIGNALS: halts the machine.
        let mut halt = Command::new("kill");
        call(halt.args(["-s", "RTMIN+4", &self.init.to_string()]))?;
        wait_for("the container's end", || {
            Ok(self.nspawn.try_wait()?.is_some())
        })
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if self.init == 0 || self.stop().is_err() {
            let _ = self.nspawn.kill();
            let _ = self.nspawn.wait();
        }
        for group in &self.groups {
            remove_group(group);
        }
    }
}

/// Removes a control group and those in it, all without processes. What cannot be removed stays empty.
fn remove_group(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_group(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}

/// Control groups for a container where systemd does not run, so that nobody can be asked for a scope.
fn own_groups() -> Result<Vec<PathBuf>> {
    if Path::new("/run/systemd/system").exists() {
        return Ok(Vec::new());
    }
    let name = format!("cedos-try-{}", std::process::id());
    let mut groups = Vec::new();
    // The places of the hierarchies that nspawn uses: in a hybrid layout, and in a unified one.
    for hierarchy in ["systemd", "unified", "."] {
        let hierarchy = Path::new("/sys/fs/cgroup").join(hierarchy);
        if hierarchy.join("cgroup.procs").exists() {
            let group = hierarchy.join(&name);
            fs::create_dir(&group).with_context(|| format!("cannot make {}", group.display()))?;
            groups.push(group);
        }
    }
    Ok(groups)
}

fn name_of(process: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    name.trim().to_owned()
}
