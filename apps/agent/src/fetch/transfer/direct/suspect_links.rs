//! Links on which another host answers: a captive portal, which answers for every origin with its
//! sign-in page, or a host whose certificate is not the origin's.
//!
//! ```text
//!  a stranger, or a page where none is due
//!     ├─ another link may be used now ──▶ pass this one over, go on there
//!     ├─ the origin was reached before ──▶ pass this one over, wait: `portal`
//!     └─ neither: cannot tell a portal from an origin like that ──▶ an error that says both
//! ```
//!
//! A link is suspected for a time that increases each time, or until it has another address. This
//! is only for downloads without a proxy: a proxy proves its identity, and a link on which it does
//! not answer is not used.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use d2tp_links::Link;

use crate::fetch::boot_clock::BootInstant;

/// How long a link is avoided the first time; it doubles.
const SUSPECT_FIRST: Duration = Duration::from_secs(30); // a guess: somebody types a password

/// How long a link is avoided at most.
const SUSPECT_MAX: Duration = Duration::from_secs(600); // a guess

/// Why a link is avoided, and for how long.
#[derive(Debug)]
struct SuspectLink {
    until: BootInstant,
    length: Duration,
    /// The link's addresses: another address means another network.
    addresses: Vec<IpAddr>,
}

/// Links that led to another host than the origin.
#[derive(Debug, Default)]
pub(super) struct SuspectLinks(BTreeMap<String, SuspectLink>);

impl SuspectLinks {
    /// Whether `link` is avoided now.
    pub(super) fn contains(&self, link: &Link, now: BootInstant) -> bool {
        self.0
            .get(&link.name)
            .is_some_and(|suspect| suspect.until > now && suspect.addresses == link.addresses)
    }

    /// The links avoided now, for users.
    pub(super) fn names(&self, links: &[Link], now: BootInstant) -> Option<String> {
        let names: Vec<&str> = links
            .iter()
            .filter(|link| link.is_usable() && self.contains(link, now))
            .map(|link| link.name.as_str())
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// Avoids `link`, which has `addresses`, from now on. Returns for how long.
    pub(super) fn insert(
        &mut self,
        link: &str,
        addresses: Vec<IpAddr>,
        now: BootInstant,
    ) -> Duration {
        let before = self.0.get(link).map(|suspect| suspect.length);
        let length = before.map_or(SUSPECT_FIRST, |before| (before * 2).min(SUSPECT_MAX));
        let suspect = SuspectLink {
            until: now.after(length),
            length,
            addresses,
        };
        self.0.insert(link.to_owned(), suspect);
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use d2tp_links::{CostAssessment, CostClass, LinkKind};

    fn wifi(address: u8) -> Link {
        Link {
            name: "wlan0".into(),
            index: 1,
            kind: LinkKind::Wifi,
            class: CostAssessment {
                class: CostClass::Free,
                because: "test".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 1500,
            dhcp_proxy: None,
            addresses: vec![IpAddr::from([192, 0, 2, address])],
            routes: Vec::new(),
        }
    }

    #[test]
    fn a_link_is_passed_over_longer_each_time_and_not_with_another_address() {
        let mut suspects = SuspectLinks::default();
        let now = BootInstant::from_boot(Duration::from_secs(1000));
        let mut lengths = Vec::new();
        for _ in 0..6 {
            let link = wifi(1);
            lengths.push(
                suspects
                    .insert(&link.name, link.addresses.clone(), now)
                    .as_secs(),
            );
        }
        assert_eq!(lengths, [30, 60, 120, 240, 480, 600]);
        assert!(suspects.contains(&wifi(1), now.after(Duration::from_secs(599))));
        assert!(!suspects.contains(&wifi(1), now.after(Duration::from_secs(600))));
        assert!(!suspects.contains(&wifi(2), now));
    }
}
