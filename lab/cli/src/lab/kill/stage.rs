//! Runs one kill point from an empty folder to the result: an origin, a proxy with a state folder,
//! a downloading device, the faults, and the restarts.

use cedos_terminal::print_stderr;
use std::fs::{File, OpenOptions};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use nix::libc::SIGKILL;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::disk::MountedDisk;
use super::origin::{KillOriginRequest, Origin};
use super::point::{Draws, KillEffect, KillFault, KillPoint, Victim};
use super::remains::{DeviceRemains, ProxyRemains};
use super::strace;
use super::verdict::ContractViolations;
use crate::lab::file_sha256;
use cedos_agent::key;
use cedos_lab_scenario::content;

/// The time after which a transfer counts as hung. Normally they take up to five seconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time in which a proxy must free a copy after the end was reported.
const FREED_WITHIN: Duration = Duration::from_secs(10);
/// The most starts of one program; more indicate an error.
const STARTS_MAX: usize = 8;
/// The folders, each on its own disk if power is cut.
const DEVICE: &str = "device";
const PROXY: &str = "proxy";

/// State that all points share.
#[derive(Debug)]
pub struct KillSetting {
    /// The origin that serves all points.
    pub origin: Origin,
    /// The path of `cedos`.
    pub program: PathBuf,
    /// The folder for the files of failed points.
    pub keep: Option<PathBuf>,
}

/// One point while it is being tried.
pub(super) struct KillCase<'a> {
    stage: &'a KillSetting,
    pub(super) point: &'a KillPoint,
    /// Disks of programs that can lose power. They precede the folder, so that they are unmounted
    /// first.
    disks: Vec<(Victim, MountedDisk)>,
    folder: TempDir,
    /// The path of the object at the origin.
    path: String,
    /// Whether the proxy may keep the object for others.
    is_shared: bool,
    /// Whether the origin says how long the object is.
    is_known: bool,
    pub(super) seed: u64,
    pub(super) bytes: u64,
    /// The address of the proxy.
    place: SocketAddr,
    client: String,
    /// The `d2tp://…` address, once a proxy has printed it.
    address: String,
    proxies: usize,
    pub(super) devices: usize,
    pub(super) device_remains: Option<DeviceRemains>,
    pub(super) proxy_remains: Option<ProxyRemains>,
    pub(super) verdict: ContractViolations,
}

/// The transfer cannot be checked any further.
pub(super) struct CaseAborted;

impl KillSetting {
    /// Tries one point.
    ///
    /// # Errors
    /// The point could not be tried.
    pub async fn run(&self, point: &KillPoint) -> anyhow::Result<ContractViolations> {
        let mut case = KillCase::new(self, point)?;
        let _ = case.play().await;
        case.look_for_words();
        case.disks.clear();
        let verdict = std::mem::take(&mut case.verdict);
        if let Some(keep) = self.keep.as_ref().filter(|_| !verdict.holds()) {
            let from = case.folder.keep();
            let name = format!("{point}@{}", point.seed);
            // To another file system it would have to be copied, so it is left where it is.
            let to = keep.join(name);
            match std::fs::rename(&from, &to) {
                Ok(()) => print_stderr(&format!("  kept in {}", to.display())),
                Err(_) => print_stderr(&format!("  kept in {}", from.display())),
            }
        }
        Ok(verdict)
    }
}

impl<'a> KillCase<'a> {
    fn new(stage: &'a KillSetting, point: &'a KillPoint) -> anyhow::Result<KillCase<'a>> {
        let folder = match &stage.keep {
            Some(keep) => tempfile::tempdir_in(keep),
            None => tempfile::tempdir(),
        }
        .context("no folder")?;
        let mut draws = Draws::of(point.seed);
        let bytes = 800_000 + draws.below(3_200_000);
        // From half a second to five, so that every timer matters in some transfers.
        let millis = 400 + draws.below(4_200);
        let rate = bytes * 1000 / millis;
        let length = if draws.below(4) == 0 {
            "unknown"
        } else {
            "known"
        };
        let sharing = match draws.below(2) {
            0 => "shared",
            _ => "private",
        };
        let unique = folder
            .path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let device_key = key::generate()?;
        key::write_new(&device_key, &folder.path().join("device.key"))?;
        key::write_new(&key::generate()?, &folder.path().join("proxy.key"))?;
        std::fs::create_dir(folder.path().join("scratch"))?;
        std::fs::create_dir(folder.path().join(DEVICE))?;
        let which = draws.next();
        let mut disks = Vec::new();
        for blow in point.blows.iter().filter(|b| b.fault == KillEffect::Power) {
            let place = match blow.who {
                Victim::Device => DEVICE,
                Victim::Proxy => PROXY,
            };
            disks.push((
                blow.who,
                MountedDisk::new(&folder.path().join(place), which)?,
            ));
        }
        Ok(KillCase {
            stage,
            point,
            path: format!("/{unique}/{}/{bytes}/{rate}/{length}/{sharing}", point.seed),
            is_shared: sharing == "shared",
            is_known: length == "known",
            seed: point.seed,
            bytes,
            place: place_of_its_own()?,
            client: device_key.public().to_string(),
            address: String::new(),
            disks,
            folder,
            proxies: 0,
            devices: 0,
            device_remains: None,
            proxy_remains: None,
            verdict: ContractViolations::default(),
        })
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of the device's file and state.
    pub(super) fn device_disk(&self) -> PathBuf {
        self.folder().join(DEVICE)
    }

    /// Cuts the power of this program's disk, if it has one.
    fn cut_power(&mut self, who: Victim) -> Result<(), CaseAborted> {
        let disk = self.disks.iter().find(|(whose, _)| *whose == who);
        match disk.map(|(_, disk)| disk.cut()) {
            Some(Err(error)) => self.lose(format!("the disk does not come back: {error:#}")),
            _ => Ok(()),
        }
    }

    pub(super) fn scratch(&self) -> PathBuf {
        self.folder().join("scratch")
    }

    pub(super) fn asked(&self) -> Vec<KillOriginRequest> {
        self.stage.origin.asked(&self.path)
    }

    fn append(&self, name: &str) -> std::io::Result<File> {
        let path = self.folder().join(name);
        OpenOptions::new().create(true).append(true).open(path)
    }

    /// The standard error of a program, over all its starts.
    pub(super) fn said(&self, name: &str) -> String {
        let bytes = std::fs::read(self.folder().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The reports of the device, one list for each start.
    pub(super) fn reports(&self) -> Vec<Vec<Value>> {
        (0..self.devices)
            .map(|n| {
                let text = self.said(&format!("device-{n}.json"));
                text.lines()
                    .filter_map(|line| serde_json::from_str(line).ok())
                    .collect()
            })
            .collect()
    }

    fn command(&self, blow: Option<&KillFault>) -> Command {
        let log = self.folder().join(match blow.map(|blow| blow.who) {
            Some(Victim::Proxy) => "strace-proxy",
            _ => "strace-device",
        });
        let written = ["got.part", "got.part.json.new"].map(|name| self.device_disk().join(name));
        let paths: Vec<&Path> = written.iter().map(PathBuf::as_path).collect();
        // On other files a write may only wake a thread, which no disk can fail.
        let paths = match blow {
            Some(blow) if blow.call == "write" => &paths[..],
            _ => &[],
        };
        let mut command = strace::command(&self.stage.program, blow, &log, paths);
        command
            .current_dir(self.folder())
            .env_remove("CEDOS_PROX")
            .env_remove("QLOGDIR")
            .env("CEDOS_KEY_FILE", self.folder().join("device.key"))
            .env("XDG_CONFIG_HOME", self.folder())
            .env("XDG_STATE_HOME", self.device_disk().join("state"))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Starts a proxy and waits until it answers. If it is killed before, it is started again.
    async fn start_proxy(&mut self, mut blow: Option<&KillFault>) -> Result<Child, CaseAborted> {
        loop {
            self.proxies += 1;
            if self.proxies > STARTS_MAX {
                return self.lose("the proxy does not start any more".into());
            }
            let mut command = self.command(blow.take());
            command.args([
                "prox",
                "--listen",
                &self.place.to_string(),
                "--allow-private",
            ]);
            command.args(["--key", "proxy.key", "--state-dir", PROXY]);
            command.args(["--allow-client", &self.client, "--log", "json"]);
            command.stdout(Stdio::piped());
            let said = self.append("proxy.err").map(Stdio::from);
            let spawned = said.and_then(|said| command.stderr(said).spawn());
            let mut child = match spawned {
                Ok(child) => child,
                Err(error) => return self.lose(format!("the proxy cannot be run: {error}")),
            };
            let Some(out) = child.stdout.take() else {
                return self.lose("the proxy has no output".into());
            };
            let mut lines = BufReader::new(out).lines();
            match timeout(PATIENCE, lines.next_line()).await {
                Ok(Ok(Some(address))) => {
                    self.address = address;
                    return Ok(child);
                }
                Ok(_) => {
                    let ended = child.wait().await;
                    self.proxy_ended(ended.map_err(|error| error.to_string()))?;
                }
                Err(_) => return self.lose("the proxy starts and says nothing".into()),
            }
        }
    }

    fn proxy_ended(&mut self, ended: Result<ExitStatus, String>) -> Result<(), CaseAborted> {
        let status = match ended {
            Ok(status) => status,
            Err(error) => return self.lose(error),
        };
        let scratch = self.scratch();
        let first = self.proxy_remains.is_none();
        let struck = self.point.on(Victim::Proxy).filter(|_| first);
        if struck.is_some_and(|blow| blow.fault == KillEffect::Power) {
            self.cut_power(Victim::Proxy)?;
        }
        let remains = ProxyRemains::of(&self.folder().join(PROXY), &scratch);
        if let Some(damage) = &remains.damage {
            self.verdict
                .lost
                .push(format!("the proxy's journal: {damage}"));
        }
        self.proxy_remains = Some(remains);
        if let Some(blow) = struck {
            if status.signal() == Some(SIGKILL) && blow.fault.kills() {
                return Ok(());
            }
            if !blow.fault.kills() && status.signal().is_none() {
                return Ok(()); // Its output is checked later.
            }
        }
        let said = self.said("proxy.err");
        let last = said.lines().last().unwrap_or_default().to_owned();
        self.lose(format!("the proxy ended by itself ({status}): {last}"))
    }

    fn start_device(
        &mut self,
        blow: Option<&KillFault>,
        more: Option<&str>,
    ) -> Result<Child, CaseAborted> {
        let n = self.devices;
        self.devices += 1;
        if n > STARTS_MAX {
            return self.lose("the device does not come to an end".into());
        }
        let (output, qlog) = (format!("device-{n}.json"), format!("qlog-{n}"));
        let url = self.stage.origin.url(more.unwrap_or(&self.path));
        let file = if more.is_some() { "other" } else { "got" };
        let file = format!("{DEVICE}/{file}");
        let mut command = self.command(blow);
        command.args([
            "get",
            "--alone",
            "--json",
            "-o",
            &file,
            &url,
            "--prox",
            &self.address,
        ]);
        command.args(["--qlog", &qlog, "--qlog-packets", "none"]);
        let spawned = self.append(&output).and_then(|out| {
            let said = self.append("device.err")?;
            command.stdout(out).stderr(said).spawn()
        });
        spawned.or_else(|error| self.lose(format!("the device cannot be run: {error}")))
    }

    /// Handles the end of the device's process. Returns whether the transfer is over.
    fn device_ended(&mut self, ended: std::io::Result<ExitStatus>) -> Result<bool, CaseAborted> {
        let status = match ended {
            Ok(status) => status,
            Err(error) => return self.lose(error.to_string()),
        };
        if status.success() {
            return Ok(true);
        }
        let first = self.device_remains.is_none();
        let blow = self.point.on(Victim::Device).filter(|_| first);
        let expected = blow.is_some_and(|blow| match blow.fault {
            KillEffect::Kill | KillEffect::Power => status.signal() == Some(SIGKILL),
            KillEffect::Full | KillEffect::Io => status.code().is_some(),
        });
        if expected {
            if blow.is_some_and(|blow| blow.fault == KillEffect::Power) {
                self.cut_power(Victim::Device)?;
            }
            let remains = DeviceRemains::of(&self.device_disk(), &self.scratch());
            for damage in &remains.damage {
                self.verdict
                    .lost
                    .push(format!("the device's journal: {damage}"));
            }
            let whole = remains.is_whole;
            self.device_remains = Some(remains);
            return Ok(whole);
        }
        let last = self
            .reports()
            .pop()
            .and_then(|report| report.last().cloned());
        let text = last.map_or_else(|| self.said("device.err"), |last| last["text"].to_string());
        self.lose(format!("the device ended with {status}: {text}"))
    }

    pub(super) fn lose<T>(&mut self, text: String) -> Result<T, CaseAborted> {
        self.verdict.lost.push(text);
        Err(CaseAborted)
    }

    async fn play(&mut self) -> Result<(), CaseAborted> {
        let point = self.point;
        let mut proxy = self.start_proxy(point.on(Victim::Proxy)).await?;
        let mut device = self.start_device(point.on(Victim::Device), None)?;
        let until = Instant::now() + PATIENCE;
        loop {
            tokio::select! {
                ended = device.wait() => {
                    if self.device_ended(ended)? {
                        break;
                    }
                    device = self.start_device(None, None)?;
                }
                ended = proxy.wait() => {
                    self.proxy_ended(ended.map_err(|error| error.to_string()))?;
                    proxy = self.start_proxy(None).await?;
                }
                () = sleep(until.saturating_duration_since(Instant::now())) => {
                    let text = format!("no end after {PATIENCE:?}: {:?}", self.last_words());
                    return self.lose(text);
                }
            }
        }
        // A file that was reported as complete is durable.
        self.cut_power(Victim::Device)?;
        self.judge_bytes();
        if self.is_shared {
            let _ = proxy.kill().await;
            self.judge();
            return self.see_it_shared().await;
        }
        self.see_it_freed(&mut proxy).await?;
        let _ = proxy.kill().await;
        self.judge();
        Ok(())
    }

    /// Checks what the next process of the proxy gives to another device: the right bytes, and, if none of its
    /// processes ended while the object was being fetched, those that it has.
    async fn see_it_shared(&mut self) -> Result<(), CaseAborted> {
        let (asked, proxies) = (self.asked().len(), self.proxies);
        let had_trouble = self.point.on(Victim::Proxy).is_some();
        let _proxy = self.start_proxy(None).await?;
        let path = self.path.clone();
        let mut other = self.start_device(None, Some(&path))?;
        match timeout(PATIENCE, other.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            ended => return self.lose(format!("the shared object does not arrive: {ended:?}")),
        }
        let right = content::sha256(self.seed, self.bytes);
        if file_sha256(&self.device_disk().join("other")) != Some(right) {
            return self.lose("the shared object has other bytes".into());
        }
        // Without a length the copy counts once the journal knows that it is complete.
        let asked_again = self.asked().len() > asked;
        if asked_again && proxies == 1 && !had_trouble && self.is_known {
            self.verdict
                .repeated
                .push("a complete object was not in the cache of the next process".into());
        }
        Ok(())
    }

    /// Checks that the proxy frees a copy that has arrived: at once, or when it is next informed.
    async fn see_it_freed(&mut self, proxy: &mut Child) -> Result<(), CaseAborted> {
        if self.device_remains.is_some() {
            return Ok(()); // The proxy keeps data for a device that died for an hour.
        }
        if self.is_freed(proxy).await? {
            return Ok(());
        }
        // It may have died with the report. The next connection of the device repeats it.
        let small = format!("/{}-small/1/1000/1000000/known/private", self.seed);
        let mut other = self.start_device(None, Some(&small))?;
        match timeout(PATIENCE, other.wait()).await {
            Ok(Ok(status)) if status.success() => {}
            ended => return self.lose(format!("the next download fails: {ended:?}")),
        }
        if !self.is_freed(proxy).await? {
            self.verdict
                .wrong
                .push("the proxy keeps a copy that nobody wants".into());
        }
        Ok(())
    }

    async fn is_freed(&mut self, proxy: &mut Child) -> Result<bool, CaseAborted> {
        let until = Instant::now() + FREED_WITHIN;
        let copies = self.folder().join(PROXY).join("copies");
        let copies = || std::fs::read_dir(&copies).map_or(0, Iterator::count);
        let mut dead_at_first = false;
        while copies() > 0 {
            if Instant::now() >= until {
                return Ok(false);
            }
            let soon = Instant::now() + Duration::from_millis(20);
            if let Ok(ended) = timeout_at(soon, proxy.wait()).await {
                self.proxy_ended(ended.map_err(|error| error.to_string()))?;
                *proxy = self.start_proxy(None).await?;
                if dead_at_first {
                    return Ok(false);
                }
                dead_at_first = true;
            }
        }
        Ok(true)
    }

    fn last_words(&self) -> Option<Value> {
        self.reports().pop()?.pop()
    }

    /// Checks the programs' output, and whether the faults occurred.
    fn look_for_words(&mut self) {
        let mut struck = true;
        for blow in &self.point.blows {
            let (log, said, remains) = match blow.who {
                Victim::Device => ("strace-device", "device.err", self.device_remains.is_some()),
                Victim::Proxy => ("strace-proxy", "proxy.err", self.proxy_remains.is_some()),
            };
            let log = self.said(log);
            struck &= match blow.fault {
                KillEffect::Kill | KillEffect::Power => remains,
                KillEffect::Full | KillEffect::Io => log.contains("(INJECTED)"),
            };
            for file in strace::synced_again(&log) {
                let text = format!("{file} was synced again after a failed sync");
                self.verdict.wrong.push(text);
            }
            let said = self.said(said);
            if let Some(line) = said.lines().find(|line| line.contains("panicked at")) {
                self.verdict.wrong.push(line.to_owned());
            }
        }
        self.verdict.struck = struck;
    }
}

/// An address that no other point uses: all of 127/8 belongs to this machine.
fn place_of_its_own() -> anyhow::Result<SocketAddr> {
    let mut random = [0; 3];
    aws_lc_rs::rand::fill(&mut random).map_err(|_| anyhow::anyhow!("no randomness"))?;
    let [a, b, c] = random;
    let host = Ipv4Addr::new(127, 1 + a % 250, b, 1 + c % 250);
    let socket = UdpSocket::bind((host, 0)).context("no port for the proxy")?;
    Ok(socket.local_addr()?)
}
