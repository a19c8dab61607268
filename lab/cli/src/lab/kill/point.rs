//! A kill point: the program and the system call at which it is killed or fails, and the transfer
//! that is interrupted.
//!
//! The text form, as in a replay line: `device:fdatasync:2`, `device:openat:9+proxy:openat:31`
//! (both), `proxy:pwrite64:12:enospc`, `device:rename:3:power`. Calls are counted for each thread,
//! as strace does.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use cedos_lab_scenario::content;

/// The program that is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// `cedos get`.
    Device,
    /// `cedos prox`.
    Proxy,
}

/// What happens at the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KillEffect {
    /// SIGKILL, before the call has any effect.
    Kill,
    /// SIGKILL, and the disk loses unwritten data.
    Power,
    /// The call and the next two fail with ENOSPC: the disk is full.
    Full,
    /// The call and the next two fail with EIO: the disk is broken.
    Io,
}

/// Which faults a run draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KillFaultKind {
    /// The process is killed (SIGKILL)
    Kill,
    /// ENOSPC and EIO
    Disk,
    /// SIGKILL and a disk without power
    Power,
}

/// One fault at one system call of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillFault {
    /// The program that the fault affects.
    pub who: Victim,
    /// The system call: a name of [`CALLS`].
    pub call: &'static str,
    /// The number of the call in its thread, from 1.
    pub nth: u32,
    /// What happens at the call.
    pub fault: KillEffect,
}

impl KillEffect {
    /// Whether the program is killed.
    pub fn kills(self) -> bool {
        matches!(self, KillEffect::Kill | KillEffect::Power)
    }
}

/// One or two faults, and the seed of the transfer during which they occur.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillPoint {
    /// The faults, at most one for each program.
    pub blows: Vec<KillFault>,
    /// The seed for the object and its rate.
    pub seed: u64,
}

/// A system call, its name for strace, and how often a thread of either program makes it in a
/// transfer at most. Faults are drawn up to that number.
pub struct SystemCall {
    name: &'static str,
    /// The pattern for strace, with the names of the call on other architectures.
    pub pattern: &'static str,
    device_max: u32,
    proxy_max: u32,
    /// Whether the call can fail because of a full or broken disk.
    disk: bool,
}

/// All calls that change files, send to the network or receive from it. // maxima: counted with
/// strace -f -c over transfers of every shape
pub const CALLS: [SystemCall; 11] = [
    call("openat", "/^openat$", 40, 160, true),
    call("write", "/^write$", 150, 80, true),
    call("pwrite64", "/^pwrite64$", 40, 200, true),
    call("fsync", "/^fsync$", 2, 2, true),
    call("fdatasync", "/^fdatasync$", 22, 13, true),
    call("ftruncate", "/^ftruncate$", 1, 1, true),
    call("rename", "/^rename", 5, 1, true),
    call("unlink", "/^unlink", 1, 1, false),
    call("sendmsg", "/^send(msg|mmsg|to)$", 120, 80, false),
    call("recvmsg", "/^recv(msg|mmsg|from)$", 240, 150, false),
    call("close", "/^close$", 40, 160, false),
];

const fn call(
    name: &'static str,
    pattern: &'static str,
    device_max: u32,
    proxy_max: u32,
    disk: bool,
) -> SystemCall {
    SystemCall {
        name,
        pattern,
        device_max,
        proxy_max,
        disk,
    }
}

impl SystemCall {
    /// The system call of this name, if faults are tried at it.
    pub fn named(name: &str) -> Option<&'static SystemCall> {
        CALLS.iter().find(|call| call.name == name)
    }

    fn max(&self, who: Victim) -> u32 {
        match who {
            Victim::Device => self.device_max,
            Victim::Proxy => self.proxy_max,
        }
    }
}

/// Deterministic numbers from a seed.
pub struct Draws {
    seed: u64,
    drawn: u64,
}

impl Draws {
    /// The sequence of a seed from its beginning.
    pub fn of(seed: u64) -> Draws {
        Draws { seed, drawn: 0 }
    }

    /// The next number.
    pub fn next(&mut self) -> u64 {
        let mut bytes = [0; 8];
        content::fill(self.seed, self.drawn * 8, &mut bytes);
        self.drawn += 1;
        u64::from_le_bytes(bytes)
    }

    /// Draws a number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

impl KillPoint {
    /// Draws point number `index` of a run. Programs and calls take turns, so that a few points
    /// cover all of them; small counts are as likely as large ones.
    pub fn draw(run: u64, index: u64, kind: KillFaultKind) -> KillPoint {
        let mut draws = Draws::of(run.wrapping_mul(0x9e37_79b9).wrapping_add(index));
        let seed = draws.next() >> 32;
        let calls: Vec<&SystemCall> = CALLS
            .iter()
            .filter(|call| kind != KillFaultKind::Disk || call.disk)
            .collect();
        let parties: &[&[Victim]] = match kind {
            KillFaultKind::Kill | KillFaultKind::Power => &[
                &[Victim::Device],
                &[Victim::Proxy],
                &[Victim::Device, Victim::Proxy],
            ],
            KillFaultKind::Disk => &[&[Victim::Device], &[Victim::Proxy]],
        };
        let party = parties[(index % parties.len() as u64) as usize];
        let turn = index / parties.len() as u64;
        let call = calls[(turn % calls.len() as u64) as usize];
        let fault = match (kind, turn / calls.len() as u64 % 2) {
            (KillFaultKind::Kill, _) => KillEffect::Kill,
            (KillFaultKind::Power, _) => KillEffect::Power,
            (KillFaultKind::Disk, 0) => KillEffect::Full,
            (KillFaultKind::Disk, _) => KillEffect::Io,
        };
        let blows = party.iter().map(|who| {
            let doublings = u64::from(call.max(*who).ilog2()) + 1;
            let most = 1u64 << draws.below(doublings + 1);
            let nth = 1 + draws.below(most.min(u64::from(call.max(*who)))) as u32;
            KillFault {
                who: *who,
                call: call.name,
                nth,
                fault,
            }
        });
        KillPoint {
            blows: blows.collect(),
            seed,
        }
    }

    /// The fault that affects this program.
    pub fn on(&self, who: Victim) -> Option<&KillFault> {
        self.blows.iter().find(|blow| blow.who == who)
    }

    /// The command that repeats the point.
    pub fn replay(&self) -> String {
        format!("cedos lab kill --at {self} --seed {}", self.seed)
    }
}

impl fmt::Display for KillPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, blow) in self.blows.iter().enumerate() {
            let who = match blow.who {
                Victim::Device => "device",
                Victim::Proxy => "proxy",
            };
            let fault = match blow.fault {
                KillEffect::Kill => "",
                KillEffect::Power => ":power",
                KillEffect::Full => ":enospc",
                KillEffect::Io => ":eio",
            };
            let joint = if n > 0 { "+" } else { "" };
            write!(f, "{joint}{who}:{}:{}{fault}", blow.call, blow.nth)?;
        }
        Ok(())
    }
}

/// The faults of a point, in the form of a replay line.
#[derive(Clone, Debug)]
pub struct KillFaults(pub Vec<KillFault>);

impl FromStr for KillFaults {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<KillFaults> {
        let blows: Vec<KillFault> = text.split('+').map(blow).collect::<anyhow::Result<_>>()?;
        let both = matches!(&blows[..], [one, two] if one.who == two.who);
        ensure!(blows.len() <= 2 && !both, "one blow for each program");
        Ok(KillFaults(blows))
    }
}

fn blow(text: &str) -> anyhow::Result<KillFault> {
    let parts: Vec<&str> = text.split(':').collect();
    let [who, name, nth, fault @ ..] = &parts[..] else {
        bail!("{text:?} is not WHO:CALL:N, such as device:fsync:2");
    };
    let names = || CALLS.map(|call| call.name).join(", ");
    let call =
        SystemCall::named(name).with_context(|| format!("{name:?} is none of {}", names()))?;
    Ok(KillFault {
        who: match *who {
            "device" => Victim::Device,
            "proxy" => Victim::Proxy,
            _ => bail!("{who:?} is neither device nor proxy"),
        },
        call: call.name,
        nth: nth.parse().context("the count")?,
        fault: match fault {
            [] => KillEffect::Kill,
            ["power"] => KillEffect::Power,
            ["enospc"] => KillEffect::Full,
            ["eio"] => KillEffect::Io,
            _ => bail!("{fault:?} is none of power, enospc, eio"),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_line_names_its_point() {
        for kind in [
            KillFaultKind::Kill,
            KillFaultKind::Disk,
            KillFaultKind::Power,
        ] {
            for index in 0..200 {
                let point = KillPoint::draw(5, index, kind);
                let KillFaults(blows) = point.to_string().parse().unwrap();
                assert_eq!(blows, point.blows);
                assert_eq!(point, KillPoint::draw(5, index, kind));
            }
        }
        for wrong in [
            "",
            "device",
            "moon:write:1",
            "device:fork:1",
            "device:write:x",
            "device:write:1:late",
            "device:write:1+device:fsync:1",
        ] {
            assert!(wrong.parse::<KillFaults>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_few_points_reach_every_call_of_everybody() {
        let points: Vec<KillPoint> = (0..33)
            .map(|n| KillPoint::draw(1, n, KillFaultKind::Kill))
            .collect();
        for who in [Victim::Device, Victim::Proxy] {
            for call in &CALLS {
                let hits = |p: &&KillPoint| p.on(who).is_some_and(|blow| blow.call == call.name);
                assert_eq!(
                    points.iter().filter(hits).count(),
                    2,
                    "{} of {who:?}",
                    call.name
                );
            }
        }
    }
}
