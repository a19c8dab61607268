//! The trial of the Debian packages: installs, uses, upgrades them during a download, and purges them.
//!
//! The service is systemd's: what its unit confines is confined here, too.

use std::fs;
use std::process::{Child, Command};

use anyhow::{Context, Result, ensure};

use super::context::{call, copy, output};
use super::debian::{DOWNLOAD_BYTES, DebianTrial, USER, USER_NAME};
use super::debs;
use super::patience::wait_for;
use super::trial_network::{NETWORK, NetworkEnd, SERVER};
use crate::repository::root;

/// Empty folders that base-files makes and does not own. dpkg removes them with the last package that had something there,
/// here what Chrome reads; base-files makes them again with its next upgrade.
const UNOWNED: [&str; 1] = ["/etc/opt"];

impl DebianTrial<'_> {
    pub fn install(&mut self) -> Result<()> {
        for deb in debs::made(self.context)? {
            let name = deb.file_name().context("a package without a name")?;
            copy(&deb, &self.root.join("packages").join(name))?;
        }
        call(&mut self.system_shell("apt-get install -y -q ./packages/*.deb")?)?;
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

    pub fn units(&mut self) -> Result<()> {
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

    /// Waits for the service; returns the number of its process.
    pub fn service(&self) -> Result<u32> {
        let ask = "systemctl show --property=ActiveState,SubState,MainPID,NRestarts cedos-prox";
        let mut process = None;
        let there = wait_for("the service", || {
            let said = output(&mut self.system_shell(ask)?)?;
            ensure!(
                !said.contains("ActiveState=failed"),
                "{said}{}",
                self.service_log()
            );
            ensure!(
                said.contains("NRestarts=0\n"),
                "{said}{}",
                self.service_log()
            );
            let line = said.lines().find_map(|line| line.strip_prefix("MainPID="));
            process = line.and_then(|id| id.parse().ok());
            let key = self.root.join("var/lib/cedos-prox/key").exists();
            Ok(said.contains("SubState=running\n") && key)
        });
        there.with_context(|| self.service_log())?;
        process.context("systemd names no process")
    }

    /// The service was started by the installation. It is configured, invites the device, and fetches for it.
    pub fn first_download(&mut self) -> Result<()> {
        self.service()?;
        let enabled = "systemctl is-enabled cedos-prox";
        call(&mut self.system_shell(enabled)?)?;
        fs::write(
            self.root.join("etc/default/cedos-prox"),
            format!("CEDOS_PROX_OPTIONS=\"--allow-net {NETWORK} --stream-listen 0.0.0.0:443\"\n"),
        )?;
        call(&mut self.system_shell("systemctl restart cedos-prox")?)?;
        let process = self.service()?;
        call(&mut self.system_shell("systemctl reload cedos-prox")?)?;
        ensure!(self.service()? == process, "a reload is no restart");
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
        self.doctor()
    }

    /// `cedos doctor` of the device that joined finds nothing wrong, and the proxy over UDP and over TCP: the unit lets
    /// the service have port 443.
    fn doctor(&self) -> Result<()> {
        // Its exit code says whether anything is wrong, and what it prints says what.
        let mut doctor = self.shell_at(NetworkEnd::Device, "cedos doctor --json");
        let said: serde_json::Value = serde_json::from_slice(&doctor.output()?.stdout)?;
        for name in ["proxy over UDP", "proxy over TCP", "proxy key"] {
            let is_good = said["checks"].as_array().is_some_and(|checks| {
                checks
                    .iter()
                    .any(|check| check["name"] == name && check["status"] == "good")
            });
            ensure!(is_good, "{name} is not good: {said:#}");
        }
        Ok(())
    }

    /// The unit of the sockets, put in place as its own comment says. A service that was stopped is started by what a
    /// device sends. Afterwards the service has sockets of its own again.
    pub fn sockets_held(&mut self) -> Result<()> {
        let unit = self
            .root
            .join("usr/share/doc/cedos-prox/examples/cedos-prox.socket");
        let text = fs::read_to_string(unit)?;
        let lines: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("#   "))
            .collect();
        let [copy, begin, end] = lines.as_slice() else {
            anyhow::bail!(
                "the unit of the sockets has other commands than to copy, begin and end: {lines:?}"
            );
        };
        call(&mut self.system_shell(&format!("{copy} && {begin}"))?)?;
        self.service()?;
        let download = || {
            call(&mut self.shell("rm -f /root/downloads/small"))?;
            call(&mut self.get("small"))
        };
        download()?;
        call(&mut self.system_shell("systemctl stop cedos-prox.service")?)?;
        download()?;
        self.service()?;
        let ask = "systemctl show --property=SubState cedos-prox.socket";
        let held = output(&mut self.system_shell(ask)?)?;
        ensure!(
            held == "SubState=running\n",
            "systemd holds no sockets: {held}"
        );
        call(&mut self.system_shell(&format!(
            "{end} && systemctl disable cedos-prox.socket && rm /etc/systemd/system/cedos-prox.socket && \
             systemctl daemon-reload && systemctl start cedos-prox.service"
        ))?)?;
        self.service()?;
        // The unit allows five starts a minute, and the upgrade follows.
        call(&mut self.system_shell("systemctl reset-failed cedos-prox.service")?)
    }

    /// `cedos get` of a file of the origin, on the device, through the proxy that it joined.
    pub fn get(&self, file: &str) -> Command {
        self.shell_at(
            NetworkEnd::Device,
            &format!("mkdir -p /root/downloads; cd /root/downloads; exec cedos get http://{SERVER}/{file}"),
        )
    }

    /// The agent under a user's systemd: as its unit says, and with the drop-in that confines it further.
    pub fn agent(&mut self) -> Result<()> {
        call(&mut self.system_shell(&format!("systemctl start user@{USER}.service"))?)?;
        // The other end: a machine reaches its own addresses over no link.
        let url = format!("http://{}/small", NetworkEnd::Device.address());
        self.as_user(&format!(
            "systemctl --user enable --now cedos-agent; cd; cedos get {url} -o plain --detach; cedos wait 1; test -s plain"
        ))?;
        // A user's systemd cannot cover the file of kernel messages that nspawn puts into a container: it has no name.
        self.as_user(&format!(
            "unit=$HOME/.config/systemd/user/cedos-agent.service.d; mkdir -p $unit; \
             grep -v ProtectKernelLogs /usr/share/doc/cedos/examples/cedos-agent-hardened.conf > $unit/hardened.conf; \
             systemctl --user daemon-reload; systemctl --user restart cedos-agent; \
             cd; cedos get {url} -o confined --detach; cedos wait 2; test -s confined; \
             systemctl --user show --property=ActiveState,NRestarts,ProtectSystem cedos-agent > state; cat state; \
             grep -q ProtectSystem=strict state; grep -q NRestarts=0 state; \
             systemctl --user disable --now cedos-agent"
        ))?;
        call(&mut self.system_shell(&format!("systemctl stop user@{USER}.service"))?)
    }

    /// Runs a script of the user without privileges, which has a systemd of its own.
    fn as_user(&self, script: &str) -> Result<()> {
        let script = format!(
            "exec runuser -u {USER_NAME} -- env HOME=/home/{USER_NAME} XDG_RUNTIME_DIR=/run/user/{USER} /bin/sh -ec '{script}'"
        );
        let ran = call(&mut self.system_shell(&script)?);
        ran.with_context(|| {
            let log = self.system_shell("journalctl --no-pager --lines=60 --output=cat");
            log.and_then(|mut log| output(&mut log)).unwrap_or_default()
        })
    }

    pub fn c_library(&mut self) -> Result<()> {
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

    /// Installs packages of the next revision while a download and programs' connections run. Their scripts restart the
    /// service.
    pub fn upgrade(&mut self) -> Result<()> {
        let next = format!("{}.1", self.context.deb_version);
        for deb in debs::made(self.context)? {
            let name = debs::field(&deb, "Package")?;
            let to = self.root.join("packages").join(format!("{name}-next.deb"));
            debs::repack(self.context, &deb, &next, &to)?;
        }
        let mut programs = self.start_tunnelled()?;
        let mut get = self.get("large").spawn()?;
        let held = self
            .wait_for_progress(&mut programs)
            .and_then(|()| self.upgrade_beside(&mut get, &next))
            .and_then(|()| self.end_tunnelled(programs));
        if held.is_err() {
            let _ = get.kill();
            let _ = get.wait();
        }
        held
    }

    /// Upgrades to the version `next` while `get` runs, and waits for its end.
    pub fn upgrade_beside(&mut self, get: &mut Child, next: &str) -> Result<()> {
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
        let before = self.service()?;
        call(&mut self.system_shell("apt-get install -y -q ./packages/*-next.deb")?)?;
        let version = "dpkg-query -W -f '${Version}' cedos-prox";
        let version = output(&mut self.shell(version))?;
        ensure!(version == next, "not upgraded: {version}");
        ensure!(
            self.service()? != before,
            "the upgrade did not restart the service"
        );
        ensure!(
            get.try_wait()?.is_none(),
            "the download ended before the upgrade did"
        );
        self.ensure_under_way(DOWNLOAD_BYTES)?;
        let status = get.wait()?;
        ensure!(
            status.success(),
            "the download ended with {status}: {}",
            self.service_log()
        );
        call(&mut self.shell("cmp /root/downloads/large /srv/www/large"))
    }

    pub fn purge(&mut self) -> Result<()> {
        self.service()?;
        let purge =
            "apt-get purge -y -q cedos cedos-prox cedos-lab libd2tp1 libd2tp-dev webext-cedos";
        call(&mut self.system_shell(purge)?)?;
        let runs = self
            .system_shell("systemctl is-active cedos-prox")?
            .output()?;
        ensure!(!runs.status.success(), "the service still runs");
        let after = self.files()?;
        let left: Vec<&String> = after.difference(&self.before).collect();
        ensure!(left.is_empty(), "left behind: {left:?}");
        let gone: Vec<&String> = self.before.difference(&after).collect();
        let gone: Vec<&String> = gone
            .into_iter()
            .filter(|folder| !UNOWNED.contains(&folder.as_str()))
            .collect();
        ensure!(gone.is_empty(), "not ours, and gone: {gone:?}");
        let user = self.shell("getent passwd cedos-prox").output()?;
        ensure!(!user.status.success(), "the user cedos-prox is left behind");
        Ok(())
    }
}
