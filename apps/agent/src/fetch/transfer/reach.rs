//! How the origin can be reached now: the usable links, and the address to leave each by.
//!
//! A link needs a default route, except for an origin named by an address that routing reaches
//! anyway: this machine itself, or a network we stand in.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use d2tp_links::{CostClass, Link};
use url::{Host, Url};

use super::{BootInstant, Dial, EgressLink, LinkCandidate, TransferRun};

impl<D: Dial> TransferRun<'_, D> {
    /// The links this origin can be reached by.
    pub(super) fn link_candidates(&mut self) -> Vec<LinkCandidate> {
        let links = self.links.borrow().clone();
        let near = self.near(&links);
        let usable: Vec<(String, CostClass, u32)> = match &near {
            Some(LocalOrigin::ThisMachine) => vec![("lo".into(), CostClass::Free, 0)],
            _ => links
                .iter()
                .filter(|link| link.kind != d2tp_links::LinkKind::Loopback)
                .filter(|link| {
                    link.is_usable()
                        || matches!(&near, Some(LocalOrigin::OnLink(n, _)) if *n == link.name)
                })
                .filter(|link| !self.is_suspect(&link.name, &link.addresses))
                .map(|link| {
                    (
                        link.name.clone(),
                        link.class.class,
                        link.metric().unwrap_or(u32::MAX),
                    )
                })
                .collect(),
        };
        let now = BootInstant::now();
        usable
            .into_iter()
            .map(|(name, class, metric)| {
                self.classes.insert(name.clone(), class);
                LinkCandidate {
                    rate_bytes_per_s: self.rates.get(&name).copied(),
                    stalled: self
                        .stalled_until
                        .get(&name)
                        .is_some_and(|until| *until > now),
                    in_use: self.current.as_ref() == Some(&name),
                    name,
                    class: class.into(),
                    metric,
                }
            })
            .collect()
    }

    fn near(&self, links: &[Link]) -> Option<LocalOrigin> {
        if self.dial.needs_no_link() {
            return Some(LocalOrigin::ThisMachine);
        }
        near(&self.job.url, links)
    }

    /// How to leave by this link, while it can be used.
    pub(super) fn egress_link(&self, name: &str) -> Option<EgressLink> {
        let links = self.links.borrow();
        match self.near(&links) {
            Some(LocalOrigin::ThisMachine) => {
                return Some(EgressLink {
                    device: None,
                    sources: Vec::new(),
                });
            }
            Some(LocalOrigin::OnLink(link, source)) if link == name => {
                return Some(EgressLink {
                    device: Some(link),
                    sources: vec![source],
                });
            }
            _ => {}
        }
        let link = links
            .iter()
            .find(|link| link.name == name && link.is_usable())?;
        Some(EgressLink {
            device: Some(link.name.clone()),
            sources: link.source_addresses().collect(),
        })
    }
}

/// An origin that no default route is needed for.
enum LocalOrigin {
    ThisMachine,
    OnLink(String, IpAddr),
}

/// Whether the URL names this machine, or an address on one of its own networks.
fn near(url: &Url, links: &[Link]) -> Option<LocalOrigin> {
    let ip = match url.host()? {
        Host::Domain(name) if name == "localhost" || name.ends_with(".localhost") => {
            return Some(LocalOrigin::ThisMachine);
        }
        // Of d2tp: the host is what is written, an address too.
        Host::Domain(name) => name.parse().ok()?,
        Host::Ipv4(ip) => IpAddr::V4(ip),
        Host::Ipv6(ip) => IpAddr::V6(ip),
    };
    if ip.is_loopback() || links.iter().any(|link| link.addresses.contains(&ip)) {
        return Some(LocalOrigin::ThisMachine);
    }
    on_link(ip, links).map(|(name, source)| LocalOrigin::OnLink(name, source))
}

/// The link on whose own network this address is as routing sees it, and the address to send from.
pub(in crate::fetch) fn on_link(ip: IpAddr, links: &[Link]) -> Option<(String, IpAddr)> {
    // Connecting a UDP socket sends nothing; it asks routing for the source address.
    let any = SocketAddr::new(
        if ip.is_ipv6() {
            [0u16; 8].into()
        } else {
            [0u8; 4].into()
        },
        0,
    );
    let probe = UdpSocket::bind(any).ok()?;
    probe.connect((ip, 9)).ok()?;
    let source = probe.local_addr().ok()?.ip();
    let link = links
        .iter()
        .find(|link| link.up && link.carrier && link.addresses.contains(&source))?;
    Some((link.name.clone(), source))
}
