//! Links that the program describes itself: for platforms whose links cannot be read, and for
//! networks that exist inside a program (tests, the demonstration).

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use d2tp_links::{CostAssessment, CostClass, DefaultRoute, Link, LinkKind};
use d2tp_udp::{BindError, BindOptions, LinkSocket};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::attach::{Attach, Attachment};

/// A link as the program describes it.
#[derive(Debug)]
pub struct ProvidedLink {
    /// The name of the link in events and reports.
    pub name: String,
    /// The kind of network.
    pub kind: LinkKind,
    /// The cost class of the link.
    pub class: CostClass,
    /// This device's address on the link.
    pub local: IpAddr,
    /// The server's address over this link, if it differs from that over others.
    pub remote: Option<SocketAddr>,
    /// A socket to use instead of one bound to `local`: for example one that is excluded from a
    /// VPN, or one created by a more privileged process. It is used as long as the link is
    /// provided.
    pub socket: Option<UdpSocket>,
}

impl ProvidedLink {
    /// A free link with the address `local`.
    pub fn new(name: impl Into<String>, local: IpAddr) -> ProvidedLink {
        ProvidedLink {
            name: name.into(),
            kind: LinkKind::Other,
            class: CostClass::Free,
            local,
            remote: None,
            socket: None,
        }
    }

    /// Returns the link with another cost class.
    pub fn with_class(self, class: CostClass) -> ProvidedLink {
        ProvidedLink { class, ..self }
    }

    /// Returns the link with another address of the server.
    pub fn with_remote(self, remote: SocketAddr) -> ProvidedLink {
        ProvidedLink {
            remote: Some(remote),
            ..self
        }
    }
}

struct ProvidedSocket {
    remote: Option<SocketAddr>,
    socket: Option<UdpSocket>,
}

/// Links that the program provides, in place of [`crate::KernelLinks`] and a link monitor.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
/// # use d2tp_driver::*;
/// # let server = Server::bind(ServerOptions { listen: "127.0.0.1:0".parse()?,
/// #     key: SecretKey::from_bytes([2; 32]), admission: Admission::Anybody, config: EndpointConfig::default() })?;
/// # let options = DeviceOptions { key: SecretKey::from_bytes([1; 32]), config: EndpointConfig::default(),
/// #     server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()) };
/// let links = ProvidedLinks::new();
/// let mut device = Device::with_attach(options, links.clone()).await?;
/// device.follow_links(links.subscribe(), |_| LinkUse::Free);
/// links.add(ProvidedLink::new("wifi", "127.0.0.2".parse()?));
/// // … later, at another place:
/// links.remove("wifi");
/// links.add(ProvidedLink::new("wifi", "127.0.0.3".parse()?));
/// # let mut events = device.events();
/// # while !matches!(events.recv().await?, (_, SessionEvent::PathUp { .. })) {}
/// # Ok(()) }
/// ```
pub struct ProvidedLinks {
    publish: watch::Sender<Arc<Vec<Link>>>,
    sockets: Mutex<(BTreeMap<String, ProvidedSocket>, u32)>,
}

impl ProvidedLinks {
    /// Creates a provider without links.
    pub fn new() -> Arc<ProvidedLinks> {
        Arc::new(ProvidedLinks {
            publish: watch::channel(Arc::default()).0,
            sockets: Mutex::default(),
        })
    }

    /// The current links and their changes, for [`crate::Device::follow_links`].
    pub fn subscribe(&self) -> watch::Receiver<Arc<Vec<Link>>> {
        self.publish.subscribe()
    }

    /// Adds a link; one of the same name is replaced.
    pub fn add(&self, given: ProvidedLink) {
        let mut held = self.sockets.lock();
        let (sockets, index) = &mut *held;
        *index += 1;
        let link = Link {
            name: given.name.clone(),
            // Another index means another attachment: sockets of the previous one are dropped.
            index: *index,
            kind: given.kind,
            class: CostAssessment {
                class: given.class,
                because: "the program says so".into(),
            },
            up: true,
            carrier: true,
            mtu_bytes: 0,
            dhcp_proxy: None,
            addresses: vec![given.local],
            routes: vec![DefaultRoute {
                // Links that were added first are preferred.
                metric: *index,
                ipv6: given.local.is_ipv6(),
                gateway: None,
                table: 254, // the main routing table
            }],
        };
        let (remote, socket) = (given.remote, given.socket);
        sockets.insert(given.name, ProvidedSocket { remote, socket });
        self.publish.send_modify(|links| {
            let mut now: Vec<Link> = links.to_vec();
            now.retain(|l| l.name != link.name);
            now.push(link);
            *links = Arc::new(now);
        });
    }

    /// Records that a link lost its carrier, or has it again. For a short time it counts as the
    /// same attachment.
    pub fn set_carrier(&self, name: &str, carrier: bool) {
        self.publish.send_modify(|links| {
            let mut now: Vec<Link> = links.to_vec();
            now.iter_mut()
                .filter(|l| l.name == name)
                .for_each(|l| l.carrier = carrier);
            *links = Arc::new(now);
        });
    }

    /// Removes a link.
    pub fn remove(&self, name: &str) {
        self.sockets.lock().0.remove(name);
        self.publish.send_modify(|links| {
            *links = Arc::new(links.iter().filter(|l| l.name != name).cloned().collect());
        });
    }
}

impl Attach for ProvidedLinks {
    fn probe_addresses(&self, link: &Link, servers: &[SocketAddr]) -> Vec<SocketAddr> {
        let held = self.sockets.lock();
        // A link with a socket or an address of its own is the program's affair.
        let is_plain = |s: &ProvidedSocket| s.socket.is_none() && s.remote.is_none();
        let local = link.addresses.first().copied();
        let local = local.filter(|_| held.0.get(&link.name).is_some_and(is_plain));
        let of_family = |server: &SocketAddr| Some(server.is_ipv6()) == local.map(|l| l.is_ipv6());
        servers
            .iter()
            .copied()
            .find(of_family)
            .into_iter()
            .collect()
    }

    fn probe_socket(&self, link: &Link, _to: SocketAddr) -> std::io::Result<UdpSocket> {
        let local = link.addresses.first().copied();
        let local = local.ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        UdpSocket::bind(SocketAddr::new(local, 0))
    }

    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        let held = self.sockets.lock();
        let Some(mine) = held.0.get(&link.name) else {
            return Ok(Vec::new());
        };
        let Some(local) = link.addresses.first().copied() else {
            return Ok(Vec::new());
        };
        let remote = mine.remote.or_else(|| {
            servers
                .iter()
                .copied()
                .find(|s| s.is_ipv6() == local.is_ipv6())
        });
        let Some(remote) = remote else {
            return Ok(Vec::new());
        };
        let at = SocketAddr::new(local, 0);
        let socket = match &mine.socket {
            Some(own) => own
                .try_clone()
                .and_then(LinkSocket::from_std)
                .map_err(|cause| BindError {
                    local: at,
                    device: None,
                    step: "taking over the given socket",
                    cause,
                })?,
            None => LinkSocket::bind(&BindOptions::at(at))?,
        };
        Ok(vec![Attachment { socket, remote }])
    }
}
