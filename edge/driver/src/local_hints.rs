//! Where networks say that servers are: hints, each of which is tried before it is used.
//!
//! ```text
//!  a free link is in use ─▶ once a minute: DHCP's option, hosts that announce themselves ─▶ addresses
//!                                                          │ each once a minute
//!                                                          ▼
//!                                         a session of its own, over that link alone
//!             the host holds the server's key ─▶ a node of the server, for devices on this network
//!             it does not ─▶ it has had a SYN, and nothing more is sent to it
//! ```
//!
//! All devices of the process share what is known, by network and key. It is forgotten when the network is left.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use d2tp_links::{Link, LinkKind};
use d2tp_session::{EndpointConfig, PublicKey, SecretKey};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::address::NodeAddress;
use crate::announced_services;
use crate::attach::Attach;
use crate::server_list::ServerList;

/// The most addresses of one server that are kept for a network, and tried in a minute.
pub const LOCAL_HINTS_MAX: usize = 4; // a guess: a proxy with two addresses, and twice that in lies
/// How often a network is asked, and an address tried, at most.
const ASK_EVERY: Duration = Duration::from_secs(60); // as the comparison of nodes
/// The most networks that are remembered.
const NETWORKS_MAX: usize = 16; // a guess

/// Who says where a server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HintSource {
    /// The server announces itself to the hosts of the link.
    Announced,
    /// The network's DHCP has an option for it.
    Dhcp,
}

impl HintSource {
    /// The source in one word, for programs.
    pub fn as_str(self) -> &'static str {
        match self {
            HintSource::Announced => "announced",
            HintSource::Dhcp => "dhcp",
        }
    }

    /// The source in words, for users.
    pub fn describe(self) -> &'static str {
        match self {
            HintSource::Announced => "announced on this network",
            HintSource::Dhcp => "named by this network's DHCP",
        }
    }
}

/// An address at which a server may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalHint {
    /// Where the server is said to be.
    pub address: SocketAddr,
    /// Who says so.
    pub source: HintSource,
}

/// A hint, and whether it is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriedHint {
    /// The address that was named, and who named it.
    pub hint: LocalHint,
    /// Whether a host with the server's key answers there; `None`: that is not known yet.
    pub is_true: Option<bool>,
}

/// What a device needs to try a hint.
#[derive(Clone)]
pub(crate) struct HintTrial {
    pub(crate) server: PublicKey,
    pub(crate) key: SecretKey,
    pub(crate) config: EndpointConfig,
    pub(crate) attach: Arc<dyn Attach>,
}

/// One attachment of a link to a network.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LocalNetwork {
    link: String,
    index: u32,
    addresses: Vec<IpAddr>,
    gateways: Vec<Option<IpAddr>>,
    dhcp_proxy: Option<String>,
}

impl LocalNetwork {
    /// The network of a link.
    pub(crate) fn of(link: &Link) -> LocalNetwork {
        LocalNetwork {
            link: link.name.clone(),
            index: link.index,
            addresses: link.addresses.clone(),
            gateways: link.routes.iter().map(|route| route.gateway).collect(),
            dhcp_proxy: link.dhcp_proxy.clone(),
        }
    }
}

/// Sets whether this process asks local networks for its servers. Off by default.
pub fn use_local_hints(is_used: bool) {
    IS_USED.store(is_used, Ordering::Relaxed);
}

static IS_USED: AtomicBool = AtomicBool::new(false);

/// The hints for a server with this key on the network of a link, as they come: from DHCP, and from hosts that announce
/// themselves. None, unless the program has called [`use_local_hints`].
pub(crate) fn ask_kernel_link(link: &Link, key: PublicKey) -> mpsc::UnboundedReceiver<LocalHint> {
    let (found, hints) = mpsc::unbounded_channel();
    // A tunnel or a line to a bridge is no local network, and a mobile network has no hosts to ask.
    let is_local = matches!(
        link.kind,
        LinkKind::Wifi | LinkKind::Ethernet | LinkKind::Other
    );
    if !IS_USED.load(Ordering::Relaxed) || !is_local || !link.is_free() {
        return hints;
    }
    for address in dhcp_addresses(link, &key) {
        let source = HintSource::Dhcp;
        let _ = found.send(LocalHint { address, source });
    }
    let link = link.clone();
    tokio::spawn(async move {
        let (announced, mut heard) = mpsc::unbounded_channel();
        let passes_on = async {
            while let Some(address) = heard.recv().await {
                let source = HintSource::Announced;
                if found.send(LocalHint { address, source }).is_err() {
                    return;
                }
            }
        };
        let asks = announced_services::ask(&link, key, announced);
        let (asked, ()) = tokio::join!(asks, passes_on);
        if let Err(error) = asked {
            tracing::debug!(link = %link.name, %error, "the local network is not asked for proxies");
        }
    });
    hints
}

/// The addresses of the server with this key in the DHCP option of a link: literal ones, as no name is looked up for a
/// hint.
fn dhcp_addresses(link: &Link, key: &PublicKey) -> Vec<SocketAddr> {
    let text = link.dhcp_proxy.as_deref().unwrap_or_default();
    let Ok(list) = ServerList::from_str(text) else {
        return Vec::new();
    };
    let ours = list.servers().iter().filter(|server| server.key == *key);
    let nodes = ours.flat_map(|server| server.named_nodes());
    let literal = |node: NodeAddress| Some(SocketAddr::new(node.host.parse().ok()?, node.port));
    let is_host = |at: &SocketAddr| !at.ip().is_unspecified() && !at.ip().is_multicast();
    nodes.filter_map(literal).filter(is_host).collect()
}

/// What is known of one server on one network.
#[derive(Debug, Default)]
struct NetworkHints {
    asked_at: Option<Instant>,
    tried: Vec<(TriedHint, Instant)>,
}

/// The hints of all networks.
#[derive(Debug, Default)]
pub(crate) struct HintMemory {
    networks: BTreeMap<(LocalNetwork, [u8; 32]), NetworkHints>,
}

impl HintMemory {
    /// Whether a network is to be asked now for the server with this key, because that was not done lately. The caller
    /// asks it then.
    pub(crate) fn begin_question(
        &mut self,
        network: &LocalNetwork,
        key: &PublicKey,
        now: Instant,
    ) -> bool {
        let entry = (network.clone(), key.0);
        if self.networks.len() >= NETWORKS_MAX && !self.networks.contains_key(&entry) {
            let asked_at = |(_, hints): &(&_, &NetworkHints)| hints.asked_at;
            let oldest = self.networks.iter().min_by_key(asked_at);
            if let Some(oldest) = oldest.map(|(entry, _)| entry.clone()) {
                self.networks.remove(&oldest);
            }
        }
        let hints = self.networks.entry(entry).or_default();
        let is_due = hints.asked_at.is_none_or(|at| now - at >= ASK_EVERY);
        if is_due {
            hints.asked_at = Some(now);
        }
        is_due
    }

    /// Whether a hint is to be tried now. The caller tries it then.
    pub(crate) fn begin_trial(
        &mut self,
        network: &LocalNetwork,
        key: &PublicKey,
        hint: LocalHint,
        now: Instant,
    ) -> bool {
        let Some(hints) = self.networks.get_mut(&(network.clone(), key.0)) else {
            // The network was left.
            return false;
        };
        let known = hints
            .tried
            .iter_mut()
            .find(|(tried, _)| tried.hint.address == hint.address);
        if let Some((tried, at)) = known {
            let is_due = tried.is_true != Some(true) && now - *at >= ASK_EVERY;
            if is_due {
                (tried.is_true, *at) = (None, now);
            }
            return is_due;
        }
        if hints.tried.len() >= LOCAL_HINTS_MAX {
            // Lies of more than a minute ago make room.
            let is_old = |(tried, at): &(TriedHint, Instant)| {
                tried.is_true != Some(true) && now - *at >= ASK_EVERY
            };
            let Some(old) = hints.tried.iter().position(is_old) else {
                return false;
            };
            hints.tried.remove(old);
        }
        let is_true = None;
        hints.tried.push((TriedHint { hint, is_true }, now));
        true
    }

    /// Notes whether a host with the server's key answered at an address.
    pub(crate) fn end_trial(
        &mut self,
        network: &LocalNetwork,
        key: &PublicKey,
        address: SocketAddr,
        is_true: bool,
    ) {
        let hints = self.networks.get_mut(&(network.clone(), key.0));
        let tried = hints.into_iter().flat_map(|hints| &mut hints.tried);
        for (tried, _) in tried.filter(|(tried, _)| tried.hint.address == address) {
            tried.is_true = Some(is_true);
        }
    }

    /// The hints for a server on a network.
    pub(crate) fn of(&self, network: &LocalNetwork, key: &PublicKey) -> Vec<TriedHint> {
        let hints = self.networks.get(&(network.clone(), key.0));
        let tried = hints.into_iter().flat_map(|hints| &hints.tried);
        tried.map(|(tried, _)| *tried).collect()
    }

    /// Forgets what a network said.
    fn forget(&mut self, left: &LocalNetwork) {
        self.networks.retain(|(network, _), _| network != left);
    }
}

fn memory() -> &'static Mutex<HintMemory> {
    static MEMORY: OnceLock<Mutex<HintMemory>> = OnceLock::new();
    MEMORY.get_or_init(Mutex::default)
}

/// Uses the process's memory of hints.
pub(crate) fn with_memory<R>(f: impl FnOnce(&mut HintMemory) -> R) -> R {
    f(&mut memory().lock())
}

/// Notified when a hint has proved true.
fn changes() -> &'static watch::Sender<()> {
    static CHANGES: OnceLock<watch::Sender<()>> = OnceLock::new();
    CHANGES.get_or_init(watch::Sender::default)
}

/// Notifies when a hint has proved true.
pub(crate) fn watch_hints() -> watch::Receiver<()> {
    changes().subscribe()
}

/// Tells this process's devices that a hint has proved true.
pub(crate) fn notify() {
    changes().send_replace(());
}

/// The networks that a device is on, so that those that it leaves are forgotten.
#[derive(Debug, Default)]
pub(crate) struct PresentNetworks(BTreeSet<LocalNetwork>);

impl PresentNetworks {
    /// Forgets what networks said that these links have left.
    pub(crate) fn update(&mut self, links: &[Link]) {
        let usable = links.iter().filter(|link| link.is_usable());
        let now: BTreeSet<LocalNetwork> = usable.map(LocalNetwork::of).collect();
        with_memory(|memory| {
            let left = self.0.difference(&now);
            left.for_each(|network| memory.forget(network));
        });
        self.0 = now;
    }
}

/// The hints for a server on the networks of these links that have proved true.
pub(crate) fn true_hints(links: &[Link], key: &PublicKey) -> Vec<LocalHint> {
    with_memory(|memory| {
        let of_link = |link: &Link| memory.of(&LocalNetwork::of(link), key);
        let tried = links.iter().flat_map(of_link);
        let is_true = |tried: &TriedHint| tried.is_true == Some(true);
        tried.filter(is_true).map(|tried| tried.hint).collect()
    })
}

/// The hints for a server that have proved true on the network of each of these links.
pub(crate) fn named_by_all(links: &[Link], key: &PublicKey) -> Vec<LocalHint> {
    let Some((first, others)) = links.split_first() else {
        return Vec::new();
    };
    let mut named = true_hints(std::slice::from_ref(first), key);
    for link in others {
        let here = true_hints(std::slice::from_ref(link), key);
        named.retain(|hint| here.iter().any(|other| other.address == hint.address));
    }
    named
}

/// What the network of a link says of where servers are, as far as this process has asked.
pub fn local_hints(link: &Link) -> Vec<TriedHint> {
    let network = LocalNetwork::of(link);
    with_memory(|memory| {
        let here = memory.networks.iter();
        let here = here.filter(|((known, _), _)| *known == network);
        let tried = here.flat_map(|(_, hints)| &hints.tried);
        tried.map(|(tried, _)| *tried).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::attach::tests::link;

    const KEY: PublicKey = PublicKey([7; 32]);

    fn hint(last: u8) -> LocalHint {
        LocalHint {
            address: SocketAddr::from(([192, 168, 1, last], 4433)),
            source: HintSource::Announced,
        }
    }

    #[test]
    fn a_network_is_asked_once_a_minute_for_each_server() {
        let (mut memory, now) = (HintMemory::default(), Instant::now());
        let network = LocalNetwork::of(&link(&["192.168.1.7"]));
        let other = LocalNetwork::of(&link(&["192.168.2.7"]));
        assert!(memory.begin_question(&network, &KEY, now));
        assert!(!memory.begin_question(&network, &KEY, now));
        assert!(memory.begin_question(&other, &KEY, now));
        assert!(memory.begin_question(&network, &PublicKey([8; 32]), now));
        let later = now + ASK_EVERY - Duration::from_millis(1);
        assert!(!memory.begin_question(&network, &KEY, later));
        assert!(memory.begin_question(&network, &KEY, now + ASK_EVERY));
    }

    #[test]
    fn an_address_is_tried_once_and_a_lie_again_after_a_minute() {
        let (mut memory, now) = (HintMemory::default(), Instant::now());
        let network = LocalNetwork::of(&link(&["192.168.1.7"]));
        memory.begin_question(&network, &KEY, now);
        for last in [1, 2] {
            assert!(memory.begin_trial(&network, &KEY, hint(last), now));
            assert!(!memory.begin_trial(&network, &KEY, hint(last), now));
            memory.end_trial(&network, &KEY, hint(last).address, last == 1);
        }
        let tried = memory.of(&network, &KEY);
        let is_true: Vec<_> = tried.iter().map(|tried| tried.is_true).collect();
        assert_eq!(is_true, [Some(true), Some(false)]);
        let later = now + ASK_EVERY;
        assert!(!memory.begin_trial(&network, &KEY, hint(1), later));
        assert!(memory.begin_trial(&network, &KEY, hint(2), later));
    }

    #[test]
    fn hints_are_bounded_and_only_old_lies_make_room() {
        let (mut memory, now) = (HintMemory::default(), Instant::now());
        let network = LocalNetwork::of(&link(&["192.168.1.7"]));
        memory.begin_question(&network, &KEY, now);
        for last in 0..=u8::MAX {
            let is_tried = memory.begin_trial(&network, &KEY, hint(last), now);
            assert_eq!(is_tried, usize::from(last) < LOCAL_HINTS_MAX);
            memory.end_trial(&network, &KEY, hint(last).address, last == 0);
        }
        let later = now + ASK_EVERY;
        for last in 100..110 {
            let is_tried = memory.begin_trial(&network, &KEY, hint(last), later);
            assert_eq!(is_tried, usize::from(last) < 99 + LOCAL_HINTS_MAX);
        }
        let tried = memory.of(&network, &KEY);
        assert_eq!(tried.len(), LOCAL_HINTS_MAX);
        assert_eq!(tried[0].is_true, Some(true), "the true one stays");
        for n in 0..200 {
            let network = LocalNetwork::of(&link(&[&format!("192.168.3.{n}")]));
            memory.begin_question(&network, &KEY, later);
            assert!(memory.networks.len() <= NETWORKS_MAX);
        }
    }

    #[test]
    fn what_a_network_said_is_forgotten_when_it_is_left() {
        let now = Instant::now();
        let home = link(&["192.168.9.7"]);
        let network = LocalNetwork::of(&home);
        let away = link(&["192.168.8.7"]);
        let mut down = home.clone();
        down.carrier = false;
        let mut renewed = home.clone();
        renewed.dhcp_proxy = Some("another option".into());
        for after in [vec![away], vec![down], vec![renewed], Vec::new()] {
            let mut present = PresentNetworks::default();
            present.update(std::slice::from_ref(&home));
            with_memory(|memory| {
                memory.begin_question(&network, &KEY, now);
                memory.begin_trial(&network, &KEY, hint(1), now);
            });
            present.update(&[home.clone(), link(&["192.168.7.7"])]);
            assert_eq!(local_hints(&home).len(), 1);
            present.update(&after);
            assert_eq!(local_hints(&home), []);
            // What is found out later is of no use any more.
            with_memory(|memory| {
                memory.end_trial(&network, &KEY, hint(1).address, true);
                assert!(!memory.begin_trial(&network, &KEY, hint(2), now));
            });
            assert_eq!(local_hints(&home), []);
        }
    }

    #[test]
    fn dhcp_names_literal_addresses_of_the_pinned_key_and_nothing_else() {
        let mut here = link(&["192.168.1.7"]);
        let mut of = |text: &str| {
            here.dhcp_proxy = Some(text.to_owned());
            let found = dhcp_addresses(&here, &KEY);
            found.iter().map(SocketAddr::to_string).collect::<Vec<_>>()
        };
        let other = PublicKey([9; 32]);
        let named = format!("d2tp://a.example:1,192.168.1.5:2,[fd00::5]:3/{KEY}");
        assert_eq!(of(&named), ["192.168.1.5:2", "[fd00::5]:3"]);
        let two = format!("d2tp://192.168.1.6:1/{other} d2tp://192.168.1.5:2/{KEY}");
        assert_eq!(of(&two), ["192.168.1.5:2"]);
        for text in [
            "",
            "http://192.168.1.5/",
            &format!("d2tp://192.168.1.5:1/{other}"),
            &format!("d2tp://192.168.1.5/{KEY}"),
            &format!("d2tp://example.org/{KEY}"),
            &format!("d2tp://0.0.0.0:1,224.0.0.1:1/{KEY}"),
        ] {
            assert_eq!(of(text), [""; 0], "{text}");
        }
    }
}
