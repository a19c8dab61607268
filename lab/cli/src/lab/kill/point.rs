//! A kill point: whose which system call is the last, or fails, and what transfer it interrupts.
//!
//! In words, as a replay line has it: `device:fdatasync:2`, `device:openat:9+proxy:openat:31` (both),
//! `proxy:pwrite64:12:enospc`, `device:rename:3:power`. Calls are counted for each thread, as strace does.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use cedos_lab_scenario::content;

/// Who is struck.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// `cedos get`.
    Device,
    /// `cedos prox`.
    Proxy,
}

/// What happens at the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, before the call does anything.
    Kill,
    /// SIGKILL, and its disk loses what was not safe.
    Power,
    /// The call and the next two fail: the disk is full.
    Full,
    /// The call and the next two fail: the disk is broken.
    Io,
}

/// Which faults a run draws from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KillFaultKind {
    /// SIGKILL
    Kill,
    /// ENOSPC and EIO
    Disk,
    /// SIGKILL and a disk without power
    Power,
}

/// One blow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillFault {
    /// Whom it hits.
    pub who: Victim,
    /// At which system call: a name of [`CALLS`].
    pub call: &'static str,
    /// The how manyth of a thread.
    pub nth: u32,
    /// What happens there.
    pub fault: Fault,
}

impl Fault {
    /// The program ends by it, without a word.
    pub fn kills(self) -> bool {
        matches!(self, Fault::Kill | Fault::Power)
    }
}

/// One or two blows, and the seed that the transfer under them is made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KillPoint {
    /// At most one for each program.
    pub blows: Vec<KillFault>,
    /// Makes the object and its pace.
    pub seed: u64,
}

/// A system call, how strace names it, and how often a thread of either program makes it in a transfer
/// at most. Beyond that nothing is struck.
pub struct SystemCall {
    name: &'static str,
    /// Pattern for strace, with the names that other machines have for the call.
    pub pattern: &'static str,
    device_max: u32,
    proxy_max: u32,
    /// The call fails for want of space or by a bad disk.
    disk: bool,
}

/// What matters: everything that changes a file, and everything that goes to the network or comes
/// from there. // maxima: counted with strace -f -c over transfers of every shape
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
    /// The call of this name.
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

/// Numbers from a seed, one after the other.
pub struct Draws {
    seed: u64,
    drawn: u64,
}

impl Draws {
    /// From the beginning.
    pub fn of(seed: u64) -> Draws {
        Draws { seed, drawn: 0 }
    }

    /// The next one.
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
    /// Number `index` of a run. Whoever and whichever call is next in turn, so that few points are
    /// spread over all of them; small counts as likely as large ones.
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
            (KillFaultKind::Kill, _) => Fault::Kill,
            (KillFaultKind::Power, _) => Fault::Power,
            (KillFaultKind::Disk, 0) => Fault::Full,
            (KillFaultKind::Disk, _) => Fault::Io,
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

    /// The blow that hits this one.
    pub fn on(&self, who: Victim) -> Option<&KillFault> {
        self.blows.iter().find(|blow| blow.who == who)
    }

    /// The command that repeats it.
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
                Fault::Kill => "",
                Fault::Power => ":power",
                Fault::Full => ":enospc",
                Fault::Io => ":eio",
            };
            let joint = if n > 0 { "+" } else { "" };
            write!(f, "{joint}{who}:{}:{}{fault}", blow.call, blow.nth)?;
        }
        Ok(())
    }
}

/// The blows of a point, as they are written in a replay line.
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
            [] => Fault::Kill,
            ["power"] => Fault::Power,
            ["enospc"] => Fault::Full,
            ["eio"] => Fault::Io,
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
