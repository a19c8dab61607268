//! The trial of connections that programs have through D2Prox: systemd keeps them while it restarts the service.
//!
//! ```text
//!  cedos run -- busybox … ══ D2TP ══ D2Prox ── one TCP connection each ── a socket of the container's systemd
//!                                      │ restart                           └ a process for each connection it accepts
//!                            systemd's descriptor store
//! ```

use std::fs;
use std::process::Child;

use anyhow::{Context, Result, ensure};

use super::context::{call, output};
use super::debian::{DOWNLOAD_BYTES, DebianTrial};
use super::patience::wait_for;
use super::trial_network::{NetworkEnd, SERVER};

/// A program that is caught, and its server.
struct TunnelledKind {
    /// The name of the server's units, and of the file that the program writes.
    name: &'static str,
    port: u16,
    /// What serves a connection, which is its standard input and output.
    serves: &'static str,
    /// The program, with SERVER as its server's address.
    program: &'static str,
    /// Where the bytes arrive that are waited for, how many there are, and what the program must have written at its end.
    arrives_in: &'static str,
    bytes: u64,
    expected: &'static str,
}

/// Connections in each state that a restart finds.
const KINDS: [TunnelledKind; 3] = [
    TunnelledKind {
        name: "download",
        port: 81,
        serves: "/bin/busybox httpd -i -h /srv/www",
        program: "busybox wget -q -O - http://SERVER:81/large",
        arrives_in: "/root/tunnelled/download",
        bytes: DOWNLOAD_BYTES,
        expected: "/srv/www/large",
    },
    // Both ends have said that they send no more before the restart, and the device has taken a part.
    TunnelledKind {
        name: "answer",
        port: 82,
        serves: "/bin/cat /srv/www/answer",
        program: "busybox nc SERVER 82 < /dev/null",
        arrives_in: "/root/tunnelled/answer",
        bytes: ANSWER_BYTES,
        expected: "/srv/www/answer",
    },
    TunnelledKind {
        name: "upload",
        port: 83,
        serves: "/bin/sh -c 'tee /srv/www/uploaded | sha256sum'",
        program: "busybox nc SERVER 83 < /srv/www/large",
        arrives_in: "/srv/www/uploaded",
        bytes: DOWNLOAD_BYTES,
        expected: "/srv/www/large.sha256",
    },
];

/// What arrives of each connection before the service is restarted, and between two restarts.
const BEFORE_RESTART_BYTES: u64 = 500_000;
/// The answer: more than arrives before the last restart, and less than the proxy and its kernel take at once.
const ANSWER_BYTES: u64 = 4_000_000; // tcp_rmem: 6 MiB

/// Programs with connections through D2Prox. They are ended when this is dropped.
pub struct TunnelledPrograms(Vec<(&'static TunnelledKind, Child)>);

impl DebianTrial<'_> {
    /// The service is restarted twice while programs have connections through it. Each connection goes on.
    pub fn tunnels_kept(&mut self) -> Result<()> {
        let mut programs = self.start_tunnelled()?;
        wait_for("the end of the answer's server", || {
            let ask = "systemctl show --property=NAccepted,NConnections answer-server.socket";
            let said = output(&mut self.system_shell(ask)?)?;
            Ok(said.contains("NAccepted=1\n") && said.contains("NConnections=0\n"))
        })?;
        for _ in 0..2 {
            self.wait_for_progress(&mut programs)?;
            let before = self.service()?;
            call(&mut self.system_shell("systemctl restart cedos-prox")?)?;
            ensure!(self.service()? != before, "the service was not restarted");
        }
        self.end_tunnelled(programs)?;
        // The unit allows five starts a minute, and others follow.
        call(&mut self.system_shell("systemctl reset-failed cedos-prox.service")?)
    }

    /// Starts a program of each kind, and its server.
    pub fn start_tunnelled(&self) -> Result<TunnelledPrograms> {
        call(&mut self.shell(&format!(
            "cd /srv/www && head -c {ANSWER_BYTES} large > answer && sha256sum < large > large.sha256 && rm -f uploaded; \
             rm -rf /root/tunnelled && mkdir /root/tunnelled"
        )))?;
        let mut programs = TunnelledPrograms(Vec::new());
        for kind in &KINDS {
            let TunnelledKind {
                name, port, serves, ..
            } = kind;
            call(&mut self.system_shell(&format!(
                "set -e; cd /run/systemd/system; systemctl stop {name}-server.socket 2> /dev/null || true; \
                 printf '[Socket]\\nListenStream={SERVER}:{port}\\nAccept=yes\\n' > {name}-server.socket; \
                 printf '%s\\n' '[Service]' \"ExecStart={serves}\" StandardInput=socket > {name}-server@.service; \
                 systemctl daemon-reload; systemctl start {name}-server.socket"
            ))?)?;
            let program = kind.program.replace("SERVER", SERVER);
            let mut command = self.shell_at(
                NetworkEnd::Device,
                &format!(
                    "exec cedos run --rung preload -- sh -c 'exec {program}' > /root/tunnelled/{name}"
                ),
            );
            programs.0.push((kind, command.spawn()?));
        }
        Ok(programs)
    }

    /// Waits until more has arrived of each connection; none may be at its end.
    pub fn wait_for_progress(&self, programs: &mut TunnelledPrograms) -> Result<()> {
        let before: Vec<u64> = KINDS.iter().map(|kind| self.arrived(kind)).collect();
        let all_moved = || {
            let mut all = KINDS.iter().zip(&before);
            all.all(|(kind, before)| self.arrived(kind) >= before + BEFORE_RESTART_BYTES)
        };
        wait_for("more of each connection", || {
            for (kind, program) in &mut programs.0 {
                let ended = program.try_wait()?;
                ensure!(ended.is_none(), "{}", self.early_end(kind));
            }
            Ok(all_moved())
        })
        .with_context(|| self.service_log())?;
        self.ensure_under_way(0)
    }

    /// Checks that no connection of `bytes_min` or more is at its end.
    pub fn ensure_under_way(&self, bytes_min: u64) -> Result<()> {
        for kind in KINDS.iter().filter(|kind| kind.bytes >= bytes_min) {
            ensure!(
                self.arrived(kind) < kind.bytes,
                "the {} was whole before it mattered",
                kind.name
            );
        }
        Ok(())
    }

    /// Waits for the end of each program: its bytes are whole, and its server has seen one connection.
    pub fn end_tunnelled(&self, mut programs: TunnelledPrograms) -> Result<()> {
        for (kind, program) in &mut programs.0 {
            let name = kind.name;
            let ended = wait_for(&format!("the end of the {name}"), || {
                Ok(program.try_wait()?.is_some())
            });
            ended.with_context(|| self.service_log())?;
            let status = program.wait()?;
            ensure!(
                status.success(),
                "{}, with {status}: {}",
                self.early_end(kind),
                self.service_log()
            );
            call(&mut self.shell(&format!("cmp /root/tunnelled/{name} {}", kind.expected)))?;
            let ask = format!("systemctl show --property=NAccepted {name}-server.socket");
            let accepted = output(&mut self.system_shell(&ask)?)?;
            ensure!(
                accepted == "NAccepted=1\n",
                "the server of the {name} has seen other connections than one: {accepted}"
            );
            call(&mut self.system_shell(&format!("systemctl stop {name}-server.socket"))?)?;
        }
        let ask = "systemctl show --property=NFileDescriptorStore cedos-prox";
        let stored = output(&mut self.system_shell(ask)?)?;
        ensure!(
            stored == "NFileDescriptorStore=0\n",
            "systemd keeps connections on: {stored}"
        );
        Ok(())
    }

    fn early_end(&self, kind: &TunnelledKind) -> String {
        let (arrived, of) = (self.arrived(kind), kind.bytes);
        format!("the {} ended after {arrived} of {of} bytes", kind.name)
    }

    fn arrived(&self, kind: &TunnelledKind) -> u64 {
        let file = self.root.join(kind.arrives_in.trim_start_matches('/'));
        fs::metadata(file).map_or(0, |file| file.len())
    }
}

impl Drop for TunnelledPrograms {
    fn drop(&mut self) {
        for (_, program) in &mut self.0 {
            // By a signal that cannot wait: what it started ends with its connection.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}
