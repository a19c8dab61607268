//! A fresh Debian for the trial of packages: a folder (debootstrap), a container in which it runs, and a network. What
//! needs no system is started in the folder by chroot.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::compile::StaticArch;
use super::container::Container;
use super::context::{DistContext, call, copy, output};
use super::patience::wait_for;
use super::trial_network::{NETWORK, NetworkEnd, SERVER, TrialNetwork};

/// Packages needed by dependencies and by the tests, which are installed before the list of files
/// for the comparison is made.
const SURROUNDINGS: &str =
    "systemd dbus libpam-systemd man-db busybox ca-certificates gcc libc6-dev pkg-config";

/// A user without privileges.
pub const USER_NAME: &str = "tester";

/// The number of this user.
pub const USER: u32 = 1000;

/// The download during which packages are upgraded.
pub const DOWNLOAD_BYTES: u64 = 20_000_000;

/// A fresh Debian, a network, and the processes on it.
pub struct DebianTrial<'a> {
    /// What all parts of `dist` share.
    pub context: &'a DistContext,
    /// The folder of the Debian.
    pub root: PathBuf,
    /// A device's and a server's network.
    pub network: TrialNetwork,
    origins: [Child; 2],
    /// The Debian, running: from the start until its packages are purged.
    pub container: Option<Container>,
    /// All files before the installation of packages.
    pub before: BTreeSet<String>,
    /// `d2tp://…` of the proxy.
    pub address: String,
}

impl<'a> DebianTrial<'a> {
    /// Makes a Debian, its network, and an origin at each end.
    pub fn new(context: &'a DistContext, suite: &str) -> Result<DebianTrial<'a>> {
        let base = base(context, suite)?;
        let root = context.target.join("packages-try/root");
        remove_debian(&root)?;
        call(Command::new("cp").arg("-a").arg(&base).arg(&root))?;
        fs::create_dir_all(root.join("packages"))?;
        fs::create_dir_all(root.join("srv/www"))?;
        fs::write(root.join("srv/www/small"), "a small file\n")?;
        let mut large = Command::new("head");
        large.args(["-c", &DOWNLOAD_BYTES.to_string(), "/dev/urandom"]);
        call(large.stdout(fs::File::create(root.join("srv/www/large"))?))?;
        let network = TrialNetwork::new()?;
        let log = context.scratch("container-log")?.join("log");
        let container = Container::start(&root, network.name(NetworkEnd::Server), &log)?;
        // For programs that are started by chroot. nspawn would take this one for its own.
        call(
            Command::new("mount")
                .args(["-t", "proc", "proc"])
                .arg(root.join("proc")),
        )?;
        let origin = |end| {
            let mut origin = network.enter(end);
            origin.arg("chroot").arg(&root);
            origin.args(["busybox", "httpd", "-f", "-h", "/srv/www", "-p"]);
            origin.arg(format!("{}:80", end.address())).spawn()
        };
        let origins = [origin(NetworkEnd::Server)?, origin(NetworkEnd::Device)?];
        let mut trial = DebianTrial {
            context,
            root,
            network,
            origins,
            container: Some(container),
            before: BTreeSet::new(),
            address: String::new(),
        };
        call(&mut trial.system_shell(&format!("useradd --create-home --uid {USER} {USER_NAME}"))?)?;
        trial.before = trial.files()?;
        Ok(trial)
    }

    /// A shell in the running Debian, with the machine's own network.
    pub fn system_shell(&self, script: &str) -> Result<Command> {
        let container = self.container.as_ref();
        let mut command = container.context("the Debian does not run")?.enter();
        shell_words(&mut command, script);
        Ok(command)
    }

    /// A shell in the Debian's folder, with the machine's own network.
    pub fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.root);
        shell_words(&mut command, script);
        command
    }

    /// A shell in the Debian's folder, at an end of the network.
    pub fn shell_at(&self, end: NetworkEnd, script: &str) -> Command {
        let mut command = self.network.enter(end);
        command.arg("chroot").arg(&self.root);
        shell_words(&mut command, script);
        command
    }

    /// All files except those that apt, dpkg, systemd and logs keep, and those that the trial itself writes.
    pub fn files(&self) -> Result<BTreeSet<String>> {
        let kept = [
            "proc",
            "sys",
            "dev",
            "run",
            "tmp",
            "root",
            "home",
            "srv",
            "packages",
            "var/log",
            "var/cache",
        ];
        let kept = kept.into_iter().chain(["var/lib/dpkg", "var/lib/apt"]);
        // systemd's own: when timers ran, a seed.
        let kept = kept.chain(["var/lib/systemd"]);
        let mut find = Command::new("find");
        find.arg(&self.root).arg("-xdev");
        for folder in kept {
            find.arg("-path")
                .arg(self.root.join(folder))
                .args(["-prune", "-o"]);
        }
        let found = output(find.arg("-print"))?;
        let own = self.root.display().to_string();
        Ok(found
            .lines()
            .map(|line| line.strip_prefix(&own).unwrap_or(line).to_owned())
            .collect())
    }

    /// What the service has logged.
    pub fn service_log(&self) -> String {
        let log = self.system_shell("journalctl --unit=cedos-prox --no-pager --output=cat");
        log.and_then(|mut log| output(&mut log)).unwrap_or_default()
    }

    /// Checks that a program prints the small file.
    pub fn page(&self, program: &mut Command) -> Result<()> {
        let said = output(program)?;
        ensure!(
            said.contains("a small file"),
            "no page in {said:?}: {}",
            self.service_log()
        );
        Ok(())
    }

    /// A `cedos` outside of the Debian, for the other end of what is tried: the static one, else the one that packages
    /// were made of.
    pub fn program(&self) -> Result<PathBuf> {
        let unpacked = self.root.join("tmp").join(StaticArch::own()?.name());
        let built = self.context.built(None);
        let program = [unpacked, built]
            .into_iter()
            .map(|folder| folder.join("cedos"))
            .find(|file| file.is_file());
        program.context("no program was made")
    }

    /// Starts a proxy for any client at the server's end; its address.
    pub fn proxy_of(&self, words: &[&std::ffi::OsStr], state: &str) -> Result<(Child, String)> {
        let log = self.context.scratch("proxy-log")?.join("log");
        let mut command = self.network.enter(NetworkEnd::Server);
        command
            .args(words)
            .args(["--allow-any-client", "--allow-net", NETWORK]);
        if !state.is_empty() {
            command.args(["--state-dir", state]);
        }
        let file = fs::File::create(&log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let mut proxy = command.spawn()?;
        let mut key = None;
        wait_for("the proxy's address", || {
            let log = fs::read_to_string(&log)?;
            if let Some(status) = proxy.try_wait()? {
                bail!("the proxy ended with {status}: {log}");
            }
            key = log
                .split_whitespace()
                .find(|word| word.starts_with("d2tp://"))
                .and_then(|address| address.rsplit('/').next().map(str::to_owned));
            Ok(key.is_some())
        })?;
        let key = key.context("no key")?;
        Ok((proxy, format!("d2tp://{SERVER}:4433/{key}")))
    }
}

impl Drop for DebianTrial<'_> {
    fn drop(&mut self) {
        self.container = None;
        for origin in &mut self.origins {
            let _ = origin.kill();
            let _ = origin.wait();
        }
        if let Err(error) = remove_debian(&self.root) {
            eprintln!("{} is left: {error:#}", self.root.display());
        }
    }
}

/// The Debian that is copied for each trial: made once, with the dependencies of packages.
fn base(context: &DistContext, suite: &str) -> Result<PathBuf> {
    let base = context.target.join("packages-try").join(suite);
    let complete = base.join("var/lib/cedos-try-complete");
    if fs::read_to_string(&complete).is_ok_and(|packages| packages == SURROUNDINGS) {
        return Ok(base);
    }
    remove_debian(&base)?;
    let mirror = std::env::var("CEDOS_TRY_MIRROR");
    let mirror = mirror.unwrap_or_else(|_| "http://deb.debian.org/debian".to_owned());
    let mut make = Command::new("debootstrap");
    make.arg("--variant=minbase")
        .arg(suite)
        .arg(&base)
        .arg(mirror);
    call(make.stdout(Stdio::null()))?;
    for file in ["etc/resolv.conf", "etc/hosts"] {
        copy(&Path::new("/").join(file), &base.join(file))?;
    }
    let mut install = Command::new("chroot");
    install.arg(&base);
    shell_words(
        &mut install,
        &format!(
            "apt-get update -q && apt-get install -y -q --no-install-recommends {SURROUNDINGS}"
        ),
    );
    call(install.stdout(Stdio::null()))?;
    fs::write(&complete, SURROUNDINGS)?;
    Ok(base)
}

/// Removes a Debian, and its mounts.
fn remove_debian(root: &Path) -> Result<()> {
    if root.join("proc/version").exists() {
        call(Command::new("umount").arg(root.join("proc")))?;
    }
    call(
        Command::new("rm")
            .args(["-rf", "--one-file-system"])
            .arg(root),
    )
}

fn shell_words(command: &mut Command, script: &str) {
    command.args(["/bin/sh", "-c", script]);
    command.env_clear();
    command.env(
        "PATH",
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    );
    command.env("HOME", "/root").env("LANG", "C.UTF-8");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(Stdio::null());
}

/// Ends a proxy, which must say that all went well.
pub fn end(mut proxy: Child) -> Result<()> {
    let status = end_by_signal(&mut proxy)?;
    ensure!(status.success(), "the proxy ended with {status}");
    Ok(())
}

/// Ends a program by SIGTERM, and waits for its end.
pub fn end_by_signal(program: &mut Child) -> Result<ExitStatus> {
    if let Some(status) = program.try_wait()? {
        return Ok(status);
    }
    call(
        Command::new("kill")
            .arg("-TERM")
            .arg(program.id().to_string()),
    )?;
    Ok(program.wait()?)
}
