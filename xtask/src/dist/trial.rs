//! `--try`: tests packages in a fresh Debian: installs, uses, upgrades them during a download, and
//! purges them.
//!
//! The Debian is a folder (debootstrap) that is entered by chroot, so systemd is not process 1
//! there: units are verified by systemd's own tool, and the service is started by its `ExecStart`,
//! as its user, in its state directory.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::bindings::{GO_MODULE, go_file, only};
use super::compile::StaticArch;
use super::context::{DistContext, call, copy, output};
use super::debs;
use super::image;
use super::tarball;
use super::tools::system_program;
use super::trial_network::{NETWORK, NetworkEnd, SERVER, TrialNetwork};
use crate::repository::root;
use crate::step::{StepOutcome, Steps};

/// Packages needed by dependencies and by the tests, which are installed before the list of files
/// for the comparison is made.
const SURROUNDINGS: &str = "systemd man-db busybox ca-certificates gcc libc6-dev pkg-config";

/// The download during which packages are upgraded.
const DOWNLOAD_BYTES: usize = 20_000_000;

/// How long to wait for an action of a program.
const PATIENCE: Duration = Duration::from_secs(180);

/// Tests the packages, with one step for each requirement. A part that was not made is skipped with
/// a message.
pub fn run<'a>(context: &'a DistContext, suite: &str, steps: &mut Steps) {
    if let Some(missing) = missing() {
        steps.run("a fresh Debian", || Ok(StepOutcome::Skipped(missing)));
        return;
    }
    let mut trial = None;
    steps.run(&format!("a fresh Debian, {suite}"), || {
        trial = Some(DebianTrial::new(context, suite)?);
        Ok(StepOutcome::Held)
    });
    let Some(mut trial) = trial else { return };
    // What is installed once is used by the steps after it.
    let installed: [(&str, TrialStep<'a>); 6] = [
        ("install", DebianTrial::install),
        ("units", DebianTrial::units),
        (
            "a service and a first download",
            DebianTrial::first_download,
        ),
        ("libd2tp for C", DebianTrial::c_library),
        ("upgrade during a download", DebianTrial::upgrade),
        ("purge leaves nothing", DebianTrial::purge),
    ];
    let mut works = true;
    for (name, step) in installed {
        steps.run(name, || {
            if !works {
                return Ok(StepOutcome::Skipped("a step before it failed".to_owned()));
            }
            works = false;
            step(&mut trial)?;
            works = true;
            Ok(StepOutcome::Held)
        });
    }
    trial.kill_proxy();
    let out = &context.out;
    let own = StaticArch::own().map(|arch| tarball::file(context, arch));
    let others: [(&str, Result<PathBuf>, TrialStep<'a>); 5] = [
        ("static program", own, DebianTrial::static_program),
        ("OCI image", Ok(image::file(context)), DebianTrial::image),
        ("wheel", only(out, "d2tp-", ".whl"), DebianTrial::wheel),
        ("npm package", only(out, "d2tp-", ".tgz"), DebianTrial::npm),
        ("Go module", Ok(go_file(context)), DebianTrial::go),
    ];
    for (name, file, step) in others {
        steps.run(name, || match file {
            Ok(file) if file.is_file() => step(&mut trial).map(|()| StepOutcome::Held),
            _ => Ok(StepOutcome::Skipped("was not made".to_owned())),
        });
    }
}

/// A step of the trial: one of its methods.
type TrialStep<'a> = fn(&mut DebianTrial<'a>) -> Result<()>;

/// The reason why packages cannot be tried on this machine, if any.
fn missing() -> Option<String> {
    let user = Command::new("id").arg("-u").output();
    if !user.is_ok_and(|user| user.stdout == b"0\n") {
        return Some("only root may enter another Debian".to_owned());
    }
    ["debootstrap", "ip", "tc"]
        .into_iter()
        .find(|tool| !system_program(tool))
        .map(|tool| format!("{tool} is not installed"))
}

/// A fresh Debian, a network, and the processes on it.
struct DebianTrial<'a> {
    context: &'a DistContext,
    root: PathBuf,
    network: TrialNetwork,
    origin: Child,
    proxy: Option<Child>,
    /// All files before the installation of packages.
    before: BTreeSet<String>,
    /// `d2tp://…` of the proxy.
    address: String,
}

impl<'a> DebianTrial<'a> {
    fn new(context: &'a DistContext, suite: &str) -> Result<DebianTrial<'a>> {
        let base = base(context, suite)?;
        let root = context.target.join("packages-try/root");
        remove_debian(&root)?;
        call(Command::new("cp").arg("-a").arg(&base).arg(&root))?;
        call(
            Command::new("mount")
                .args(["-t", "proc", "proc"])
                .arg(root.join("proc")),
        )?;
        fs::create_dir_all(root.join("packages"))?;
        fs::create_dir_all(root.join("srv/www"))?;
        fs::write(root.join("srv/www/small"), "a small file\n")?;
        let mut large = Command::new("head");
        large.args(["-c", &DOWNLOAD_BYTES.to_string(), "/dev/urandom"]);
        call(large.stdout(fs::File::create(root.join("srv/www/large"))?))?;
        let network = TrialNetwork::new()?;
        let mut origin = network.enter(NetworkEnd::Server);
        origin
            .arg("chroot")
            .arg(&root)
            .args(["busybox", "httpd", "-f", "-h", "/srv/www", "-p"]);
        let origin = origin.arg(format!("{SERVER}:80")).spawn()?;
        let mut trial = DebianTrial {
            context,
            root,
            network,
            origin,
            proxy: None,
            before: BTreeSet::new(),
            address: String::new(),
        };
        trial.before = trial.files()?;
        Ok(trial)
    }

    /// A shell in the Debian, with the machine's own network.
    fn shell(&self, script: &str) -> Command {
        let mut command = Command::new("chroot");
        command.arg(&self.root);
        shell_words(&mut command, script);
        command
    }

    /// A shell in the Debian, at an end of the network.
    fn shell_at(&self, end: NetworkEnd, script: &str) -> Command {
        let mut command = self.network.enter(end);
        command.arg("chroot").arg(&self.root);
        shell_words(&mut command, script);
        command
    }

    /// All files except those that apt, dpkg and logs keep, and those that the trial itself writes.
    fn files(&self) -> Result<BTreeSet<String>> {
        let kept = [
            "proc",
            "sys",
            "dev",
            "run",
            "tmp",
            "root",
            "srv",
            "packages",
            "var/log",
            "var/cache",
        ];
        let kept = kept.into_iter().chain(["var/lib/dpkg", "var/lib/apt"]);
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

    fn install(&mut self) -> Result<()> {
        for deb in debs::made(self.context)? {
            let name = deb.file_name().context("a package without a name")?;
            copy(&deb, &self.root.join("packages").join(name))?;
        }
        call(&mut self.shell("apt-get install -y -q ./packages/*.deb"))?;
        let told = output(&mut self.shell("cedos --version && cedos-lab --version"))?;
        ensure!(
            told.contains(&self.context.version),
            "another version: {told}"
        );
        // Shells and man(1) use these files, and cedos finds cedos-lab.
        call(&mut self.shell(
            "set -e; cedos lab --help > /tmp/help; test -s /usr/share/man/man1/cedos-get.1.gz; \
             test -s /usr/share/bash-completion/completions/cedos; test -s /usr/share/zsh/vendor-completions/_cedos; \
             id cedos-prox; /sbin/ldconfig -p | grep libd2tp.so.1",
        ))
    }

    fn units(&mut self) -> Result<()> {
        let service = "/usr/lib/systemd/system/cedos-prox.service";
        call(&mut self.shell(&format!("systemd-analyze verify {service}")))?;
        // The operator decides whether systemd holds the sockets: only the service is enabled and started.
        call(&mut self.shell(
            "set -e; grep -q cedos-prox.service /var/lib/dpkg/info/cedos-prox.postinst; \
             ! grep -q cedos-prox.socket /var/lib/dpkg/info/cedos-prox.postinst",
        ))?;
        // systemd's manager of users wants a folder of the session's.
        call(&mut self.shell(
            "XDG_RUNTIME_DIR=/tmp systemd-analyze verify --user /usr/lib/systemd/user/cedos-agent.service \
             /usr/lib/systemd/user/cedos-agent.socket",
        ))?;
        // systemd's own measure of the exposure of a service, from 0.0 to 10.0; 2.0 is "OK".
        call(&mut self.shell(&format!(
            "systemd-analyze security --offline=yes --threshold=20 --no-pager {service} > /tmp/exposure; held=$?; \
             tail -n 1 /tmp/exposure; exit $held"
        )))
    }

    /// Starts the proxy like its unit.
    fn start_proxy(&mut self) -> Result<()> {
        let unit = self.root.join("usr/lib/systemd/system/cedos-prox.service");
        let unit = fs::read_to_string(unit)?;
        let start = exec_start(&unit)?;
        let script = format!(
            "set -e; install -d -m 700 -o cedos-prox -g cedos-prox /var/lib/cedos-prox; \
             STATE_DIRECTORY=/var/lib/cedos-prox; . /etc/default/cedos-prox; umask 077; \
             exec setpriv --reuid=cedos-prox --regid=cedos-prox --init-groups --no-new-privs {start}"
        );
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.root.join("tmp/prox.log"))?;
        let mut proxy = self.shell_at(NetworkEnd::Server, &script);
        proxy.stdout(log.try_clone()?).stderr(log);
        self.proxy = Some(proxy.spawn()?);
        wait_for("the proxy", || {
            let log = fs::read_to_string(self.root.join("tmp/prox.log")).unwrap_or_default();
            Ok(log.contains("d2tp://") && self.root.join("var/lib/cedos-prox/key").exists())
        })
    }

    /// Ends the proxy like systemd.
    fn stop_proxy(&mut self) -> Result<()> {
        let mut proxy = self.proxy.take().context("no proxy runs")?;
        call(
            Command::new("kill")
                .arg("-TERM")
                .arg(proxy.id().to_string()),
        )?;
        let status = proxy.wait()?;
        ensure!(
            status.success(),
            "the proxy ended with {status}: {}",
            self.proxy_log()
        );
        Ok(())
    }

    /// Ends a proxy that a failed step left: the ones after it use its port.
    fn kill_proxy(&mut self) {
        if let Some(mut proxy) = self.proxy.take() {
            let _ = proxy.kill();
            let _ = proxy.wait();
        }
    }

    fn proxy_log(&self) -> String {
        fs::read_to_string(self.root.join("tmp/prox.log")).unwrap_or_default()
    }

    /// The proxy is started, invites the device, and fetches for it.
    fn first_download(&mut self) -> Result<()> {
        fs::write(
            self.root.join("etc/default/cedos-prox"),
            format!("CEDOS_PROX_OPTIONS=\"--allow-net {NETWORK}\"\n"),
        )?;
        self.start_proxy()?;
        let mut invite = self.shell_at(
            NetworkEnd::Server,
            &format!("cedos prox invite --host {SERVER} --json"),
        );
        let said: serde_json::Value = serde_json::from_str(&output(&mut invite)?)?;
        let line = said["line"]
            .as_str()
            .context("an invitation without a line")?;
        let address = line
            .split('#')
            .next()
            .context("an invitation without an address")?;
        self.address = address.to_owned();
        fs::write(self.root.join("tmp/invitation"), format!("{line}\n"))?;
        call(&mut self.shell_at(NetworkEnd::Device, "cedos join - < /tmp/invitation"))?;
        call(&mut self.get("small"))?;
        let got = fs::read(self.root.join("root/downloads/small"))?;
        ensure!(
            got == b"a small file\n",
            "other bytes: {}",
            String::from_utf8_lossy(&got)
        );
        Ok(())
    }

    /// `cedos get` of a file of the origin, on the device, through the proxy that it joined.
    fn get(&self, file: &str) -> Command {
        self.shell_at(
            NetworkEnd::Device,
            &format!("mkdir -p /root/downloads; cd /root/downloads; exec cedos get http://{SERVER}/{file}"),
        )
    }

    fn c_library(&mut self) -> Result<()> {
        for file in ["get.c", "bsd.h"] {
            copy(
                &root().join("edge/capi/tests/c").join(file),
                &self.root.join("tmp").join(file),
            )?;
        }
        call(&mut self.shell(
            "cd /tmp && cc -DWITH_D2TP -o get get.c $(pkg-config --cflags --libs d2tp) && ldd get | grep libd2tp.so.1",
        ))?;
        self.page(&mut self.shell_at(
            NetworkEnd::Device,
            &format!("CEDOS_PROX={} /tmp/get {SERVER} 80 /small", self.address),
        ))
    }

    /// Checks that a program prints the small file.
    fn page(&self, program: &mut Command) -> Result<()> {
        let said = output(program)?;
        ensure!(
            said.contains("a small file"),
            "no page in {said:?}: {}",
            self.proxy_log()
        );
        Ok(())
    }

    /// Installs packages of the next revision while a download runs, and restarts the service, as
    /// systemd does then.
    fn upgrade(&mut self) -> Result<()> {
        let next = format!("{}.1", self.context.deb_version);
        for deb in debs::made(self.context)? {
            let name = debs::field(&deb, "Package")?;
            let to = self.root.join("packages").join(format!("{name}-next.deb"));
            debs::repack(self.context, &deb, &next, &to)?;
        }
        let mut get = self.get("large").spawn()?;
        let held = self.upgrade_beside(&mut get, &next);
        if held.is_err() {
            let _ = get.kill();
            let _ = get.wait();
        }
        held
    }

    /// Upgrades to the version `next` while `get` runs, and waits for its end.
    fn upgrade_beside(&mut self, get: &mut Child, next: &str) -> Result<()> {
        let downloads = self.root.join("root/downloads");
        wait_for("the first megabyte", || {
            ensure!(
                get.try_wait()?.is_none(),
                "the download has ended before it began"
            );
            let used = output(
                Command::new("du")
                    .args(["-s", "--block-size=1"])
                    .arg(&downloads),
            )?;
            let used = used
                .split_whitespace()
                .next()
                .and_then(|bytes| bytes.parse::<u64>().ok());
            Ok(used.is_some_and(|bytes| bytes > 1_000_000))
        })?;
        call(&mut self.shell("apt-get install -y -q ./packages/*-next.deb"))?;
        let version = "dpkg-query -W -f '${Version}' cedos-prox";
        let version = output(&mut self.shell(version))?;
        ensure!(version == next, "not upgraded: {version}");
        self.stop_proxy()?;
        ensure!(
            get.try_wait()?.is_none(),
            "the download ended before the upgrade did"
        );
        self.start_proxy()?;
        let status = get.wait()?;
        ensure!(
            status.success(),
            "the download ended with {status}: {}",
            self.proxy_log()
        );
        call(&mut self.shell("cmp /root/downloads/large /srv/www/large"))
    }

    fn purge(&mut self) -> Result<()> {
        self.stop_proxy()?;
        call(
            &mut self.shell("apt-get purge -y -q cedos cedos-prox cedos-lab libd2tp1 libd2tp-dev"),
        )?;
        let after = self.files()?;
        let left: Vec<&String> = after.difference(&self.before).collect();
        ensure!(left.is_empty(), "left behind: {left:?}");
        let gone: Vec<&String> = self.before.difference(&after).collect();
        ensure!(gone.is_empty(), "not ours, and gone: {gone:?}");
        let user = self.shell("getent passwd cedos-prox").output()?;
        ensure!(!user.status.success(), "the user cedos-prox is left behind");
        Ok(())
    }

    /// Tests the program of the tarball, in a Debian that has none of the packages, as proxy and as
    /// device.
    fn static_program(&mut self) -> Result<()> {
        let file = tarball::file(self.context, StaticArch::own()?);
        let mut unpack = Command::new("tar");
        unpack
            .arg("-C")
            .arg(self.root.join("tmp"))
            .arg("--strip-components=1")
            .arg("-xzf");
        call(unpack.arg(&file))?;
        let linked = self.shell("ldd /tmp/cedos").output()?;
        ensure!(
            !linked.status.success(),
            "not static: {}",
            String::from_utf8_lossy(&linked.stdout)
        );
        let (proxy, address) = self.proxy_of(
            &[
                "chroot".as_ref(),
                self.root.as_os_str(),
                "/tmp/cedos".as_ref(),
                "prox".as_ref(),
            ],
            "/tmp/static-state",
        )?;
        let held = self
            .page(&mut self.shell_at(
                NetworkEnd::Device,
                &format!("/tmp/cedos get http://{SERVER}/small --prox {address} -o -"),
            ))
            // Its library, in a program of glibc.
            .and_then(|()| {
                self.page(&mut self.shell_at(
                    NetworkEnd::Device,
                    &format!("/tmp/cedos run --rung preload --prox {address} -- busybox wget -q -O - http://{SERVER}/small"),
                ))
            });
        end(proxy)?;
        held
    }

    /// Tests the image, unpacked like by a runtime, with its entry point and its user.
    fn image(&mut self) -> Result<()> {
        let file = image::file(self.context);
        let folder = self.context.scratch("image-try")?;
        let entry = image::unpack(&file, &folder)?;
        let user = format!("--userspec={0}:{0}", image::USER);
        let mut words: Vec<&std::ffi::OsStr> =
            vec!["chroot".as_ref(), user.as_ref(), folder.as_os_str()];
        words.extend(entry.iter().map(std::ffi::OsStr::new));
        let (proxy, address) = self.proxy_of(&words, "")?;
        let mut get = self.network.enter(NetworkEnd::Device);
        get.arg(self.program()?)
            .args(["get", "-o", "-", "--prox", &address]);
        get.arg(format!("http://{SERVER}/small"))
            .env("HOME", self.context.scratch("image-home")?);
        let held = self.page(&mut get);
        end(proxy)?;
        held
    }

    /// A `cedos` outside of the Debian, for the other end of what is tried: the static one, else the one that packages
    /// were made of.
    fn program(&self) -> Result<PathBuf> {
        let unpacked = self.root.join("tmp/cedos");
        let built = self.context.built(None).join("cedos");
        let program = [unpacked, built].into_iter().find(|file| file.is_file());
        program.context("no program was made")
    }

    /// Starts a proxy for any client at the server's end; its address.
    fn proxy_of(&self, words: &[&std::ffi::OsStr], state: &str) -> Result<(Child, String)> {
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

    fn wheel(&mut self) -> Result<()> {
        let wheel = only(&self.context.out, "d2tp-", ".whl")?;
        let folder = self.context.scratch("wheel-try")?;
        let environment = folder.join("venv");
        call(
            Command::new("python3")
                .args(["-m", "venv"])
                .arg(&environment),
        )?;
        let mut pip = Command::new(environment.join("bin/pip"));
        call(pip.args(["install", "--quiet", "--no-index"]).arg(&wheel))?;
        let program = environment.join("bin/python");
        self.language(
            &folder,
            &[program.as_os_str(), "-c".as_ref(), PYTHON.as_ref()],
        )
    }

    fn npm(&mut self) -> Result<()> {
        let package = only(&self.context.out, "d2tp-", ".tgz")?;
        let folder = self.context.scratch("npm-try")?;
        fs::write(folder.join("package.json"), "{}")?;
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--offline", "--no-audit"])
            .arg(&package);
        call(npm.current_dir(&folder))?;
        fs::write(folder.join("try.js"), NODE)?;
        let script = folder.join("try.js");
        self.language(&folder, &["node".as_ref(), script.as_os_str()])
    }

    fn go(&mut self) -> Result<()> {
        let folder = self.context.scratch("go-try")?;
        call(
            Command::new("tar")
                .arg("-C")
                .arg(&folder)
                .arg("-xzf")
                .arg(go_file(self.context)),
        )?;
        let prefix = folder.join("prefix");
        let mut install = Command::new("sh");
        install
            .arg(root().join("edge/capi/install.sh"))
            .arg(&prefix);
        call(
            install
                .env("LIBRARIES", self.context.built(None))
                .stderr(Stdio::null()),
        )?;
        fs::write(folder.join("main.go"), GO)?;
        let version = format!("v{}", self.context.version);
        fs::write(
            folder.join("go.mod"),
            format!("module try\n\ngo 1.21\n\nrequire {GO_MODULE} {version}\n"),
        )?;
        let go = |arguments: &[&str]| {
            let mut go = Command::new("go");
            go.args(arguments).current_dir(&folder);
            go.env(
                "GOPROXY",
                format!("file://{}", folder.join("proxy").display()),
            );
            go.env("GOFLAGS", "-mod=mod -modcacherw")
                .env("GONOSUMDB", "*")
                .env("GONOSUMCHECK", "1");
            go.env("GOMODCACHE", folder.join("modules"));
            go.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
            call(&mut go)
        };
        go(&["build", "-o", "try", "."])?;
        let library = format!("LD_LIBRARY_PATH={}", prefix.join("lib").display());
        let program = folder.join("try");
        self.language(
            &folder,
            &["env".as_ref(), library.as_ref(), program.as_os_str()],
        )
    }

    /// Runs a program of a language at the device's end, through a proxy; it must print the small
    /// file.
    fn language(&self, folder: &Path, words: &[&std::ffi::OsStr]) -> Result<()> {
        let prox = self.program()?;
        let state = folder.join("state");
        let (proxy, address) = self.proxy_of(
            &[prox.as_os_str(), "prox".as_ref()],
            &state.display().to_string(),
        )?;
        let mut program = self.network.enter(NetworkEnd::Device);
        program.args(words).current_dir(folder);
        program
            .env("HOME", folder)
            .env("XDG_CONFIG_HOME", folder)
            .env("CEDOS_AGENT", "none");
        let held = self.page(program.env("CEDOS_PROX", &address));
        end(proxy)?;
        held
    }
}

impl Drop for DebianTrial<'_> {
    fn drop(&mut self) {
        for child in [Some(&mut self.origin), self.proxy.as_mut()]
            .into_iter()
            .flatten()
        {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Err(error) = remove_debian(&self.root) {
            eprintln!("{} is left: {error:#}", self.root.display());
        }
    }
}

const PYTHON: &str = "\
import d2tp
with d2tp.connect(('198.51.100.1', 80), timeout=60) as sock:
    sock.sendall(b'GET /small HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n')
    while data := sock.recv(65536):
        print(data.decode(), end='')
";

const NODE: &str = "\
const d2tp = require('d2tp');
const agent = d2tp.agent({ proxy: process.env.CEDOS_PROX });
require('http').get('http://198.51.100.1/small', { agent }, (answer) => answer.pipe(process.stdout));
";

const GO: &str = r#"package main

import (
	"fmt"
	"io"
	"log"
	"net/http"

	d2tp "github.com/cedos/cedos/bindings/go"
)

func main() {
	client := http.Client{Transport: &http.Transport{DialContext: (&d2tp.Dialer{}).DialContext}}
	answer, err := client.Get("http://198.51.100.1/small")
	if err != nil {
		log.Fatal(err)
	}
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(body))
}
"#;

/// The Debian that is copied for each trial: made once, with the dependencies of packages.
fn base(context: &DistContext, suite: &str) -> Result<PathBuf> {
    let base = context.target.join("packages-try").join(suite);
    let complete = base.join("var/lib/cedos-try-complete");
    if complete.exists() {
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
    fs::write(&complete, "")?;
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

/// The command that a unit starts, for a shell.
fn exec_start(unit: &str) -> Result<&str> {
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let line = line.context("a unit without ExecStart")?;
    if line.ends_with('\\') {
        bail!("ExecStart goes on in the next line, which is not read here");
    }
    Ok(line)
}

fn end(mut proxy: Child) -> Result<()> {
    call(
        Command::new("kill")
            .arg("-TERM")
            .arg(proxy.id().to_string()),
    )?;
    let status = proxy.wait()?;
    ensure!(status.success(), "the proxy ended with {status}");
    Ok(())
}

/// Polls for the condition, which depends on files of another program.
fn wait_for(what: &str, mut there: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !there()? {
        ensure!(
            begun.elapsed() < PATIENCE,
            "{what} did not come within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_proxys_unit_is_started_by_one_line_of_it() {
        let unit = root().join("packaging/systemd/cedos-prox.service");
        let unit = fs::read_to_string(unit).expect("a unit");
        let start = exec_start(&unit).expect("one line");
        assert!(
            start.starts_with("/usr/bin/cedos prox --state-dir ${STATE_DIRECTORY}"),
            "{start}"
        );
    }
}
