//! The connections of sleeping tunnels in other hands than this process's, so that they outlive its crash.
//!
//! ```text
//!  a tunnel sleeps ─▶ TunnelKeeper::keep ─▶ systemd ── this process dies ──▶ LISTEN_FDS, by name ─▶ the tunnel sleeps in the next one
//!  it goes on, or expires ─▶ TunnelKeeper::forget
//! ```
//!
//! All that the next process needs to know is in the name: nothing is under way in a tunnel that sleeps.

use std::fmt::{Debug, Write as _};
use std::os::fd::OwnedFd;

use d2tp_driver::HostKey;

use crate::sleeping_tunnels::TunnelRemainder;

/// The beginning of all names.
const PREFIX: &str = "cedos-slept";
/// What was shut in a tunnel, as bits of the last part of its name.
const UP_ENDED: u8 = 1;
const UP_SHUT: u8 = 2;
const DOWN_ENDED: u8 = 4;
const DOWN_SHUT: u8 = 8;

/// Keeps connections outside of this process.
pub trait TunnelKeeper: Debug + Send + Sync {
    /// Keeps a connection under a name.
    fn keep(&self, name: String, connection: OwnedFd);
    /// Keeps the connection of this name no longer.
    fn forget(&self, name: String);
}

/// What the name of a kept connection says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeptTunnelName {
    pub(crate) number: u64,
    pub(crate) client: HostKey,
    pub(crate) remainder: TunnelRemainder,
}

impl KeptTunnelName {
    /// The name of a tunnel; none if something is under way in it.
    pub(crate) fn of(number: u64, client: &HostKey, remainder: &TunnelRemainder) -> Option<String> {
        if remainder.bytes() > 0 {
            return None;
        }
        let mut name = format!("{PREFIX}.{number:016x}.");
        for byte in client {
            let _ = write!(name, "{byte:02x}");
        }
        let bits = [
            (remainder.is_up_ended, UP_ENDED),
            (remainder.is_up_shut, UP_SHUT),
            (remainder.is_down_ended, DOWN_ENDED),
            (remainder.is_down_shut, DOWN_SHUT),
        ];
        let set = bits.into_iter().filter(|(is_set, _)| *is_set);
        let bits: u8 = set.map(|(_, bit)| bit).sum();
        let _ = write!(name, ".{bits:x}");
        Some(name)
    }

    /// Reads a name; none if it is another kind of descriptor's.
    pub(crate) fn parse(name: &str) -> Option<KeptTunnelName> {
        let mut parts = name.split('.');
        let [prefix, number, client, bits] = [(); 4].map(|()| parts.next());
        if prefix != Some(PREFIX) || parts.next().is_some() {
            return None;
        }
        let hex = client.filter(|hex| hex.len() == 64 && hex.is_ascii())?;
        let mut client = [0; 32];
        for (at, byte) in client.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
        }
        let bits = u8::from_str_radix(bits?, 16).ok()?;
        let has = |bit: u8| bits & bit != 0;
        Some(KeptTunnelName {
            number: u64::from_str_radix(number?, 16).ok()?,
            client,
            remainder: TunnelRemainder {
                is_up_ended: has(UP_ENDED),
                is_up_shut: has(UP_SHUT),
                is_down_ended: has(DOWN_ENDED),
                is_down_shut: has(DOWN_SHUT),
                ..TunnelRemainder::default()
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_all_of_a_tunnel_in_which_nothing_is_under_way() {
        let client = std::array::from_fn(|at| 7 * at as u8);
        for bits in 0..16_u8 {
            let remainder = TunnelRemainder {
                is_up_ended: bits & 1 != 0,
                is_up_shut: bits & 2 != 0,
                is_down_ended: bits & 4 != 0,
                is_down_shut: bits & 8 != 0,
                ..TunnelRemainder::default()
            };
            let number = 0x0123_4567_89ab_cdef ^ u64::from(bits);
            let name = KeptTunnelName::of(number, &client, &remainder).unwrap();
            // sd_notify(3): at most 255 characters of ASCII, and no colon.
            assert!(
                name.len() < 255 && name.is_ascii() && !name.contains(':'),
                "{name}"
            );
            let read = KeptTunnelName::parse(&name).unwrap();
            assert_eq!((read.number, read.client), (number, client));
            assert_eq!(read.remainder, remainder);
        }
        let under_way = TunnelRemainder {
            down: vec![1],
            ..TunnelRemainder::default()
        };
        assert_eq!(KeptTunnelName::of(1, &client, &under_way), None);
    }

    #[test]
    fn other_names_are_other_descriptors() {
        let good = KeptTunnelName::of(1, &[9; 32], &TunnelRemainder::default()).unwrap();
        assert!(KeptTunnelName::parse(&good).is_some());
        let short = &good[..good.len() - 4];
        let more = format!("{good}.0");
        let other = good.replace(PREFIX, "cedos-prox");
        let odd = good.replace("09", "é");
        for name in ["", "cedos-tunnel", "stored", short, &more, &other, &odd] {
            assert_eq!(KeptTunnelName::parse(name), None, "{name}");
        }
    }
}
