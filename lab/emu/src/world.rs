//! The lab's world: three namespaces, the links between them, and the scenario's time.
//!
//! ```text
//!   device                    relay                 proxy ──── veth ──── origin
//!   wlan0 wwan0 …  ◀─TUN─▶  link models  ◀─TUN─▶  net0                  net0
//! ```
//!
//! [`World::build`] creates everything with the links down. [`World::start`] starts time: from then
//! on a thread applies the scenario's timeline to the device's interfaces and to the models. The
//! order matters: when a link is lost, the interface changes first (packets that the device sends
//! later are its errors, and are counted); when a link comes up, the model changes first (a packet
//! that is sent at once must pass). Dropping the world ends and removes everything, also when the
//! program panics.

use crate::clock::EmuClock;
use crate::namespace::Namespace;
use crate::network::{self, RouteHop};
use crate::origin::OriginServer;
use crate::plan;
use crate::port::Port;
use crate::relay::{Relay, RelayInterface, RelayReport, RelayedBytes};
use crate::web::{self, OriginWebServer};
use anyhow::Context;
use cedos_lab_energy::RunEnergyMeter;
use cedos_lab_link::Time;
use cedos_lab_scenario::{
    Class, DataSwitch, EventKind, Family, Link, LinkReport, Scenario, ScenarioLinkEvent,
};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use tempfile::TempDir;
use tokio::sync::oneshot;

/// The port of the built-in origin.
pub const ORIGIN_PORT: u16 = 80;
/// The MTU in the lab's internet.
const INTERNET_MTU: u32 = 1500;
/// The MTU of the internet if a link is behind a NAT64, whose packets grow by the larger header on
/// the way to the device.
const INTERNET_MTU_NAT64: u32 = 1480;

/// An event in the world that was carried out.
#[derive(Clone, Debug)]
pub struct WorldEvent {
    /// When the event was carried out, in the run's time.
    pub at: Time,
    /// The link's name.
    pub link: String,
    /// The device's addresses on the link after it; `None` if it has none.
    pub addresses: Option<plan::LinkAddresses>,
    /// The event in the scenario.
    pub event: ScenarioLinkEvent,
}

/// The observations of a run.
#[derive(Clone, Debug)]
pub struct WorldObservations {
    /// The links for the report.
    pub links: Vec<LinkReport>,
    /// The switches that were found.
    pub switches: Vec<DataSwitch>,
    /// All counters, in the scenario's order of links.
    pub carried: Vec<RelayedBytes>,
    /// The energy of the links' radios, if the scenario names them.
    pub energy: Option<RunEnergyMeter>,
}

/// A running lab.
pub struct World {
    // Dropped in this order: time stops, the relay ends, the namespaces are removed.
    time: Option<RunningRelay>,
    /// The devices between which the relay will forward packets, until it starts.
    waiting: Option<(Vec<Port>, Vec<RelayInterface>)>,
    web: Option<OriginWebServer>,
    origin_server: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    device: Arc<Namespace>,
    proxy: Namespace,
    origin: Namespace,
    scenario: Scenario,
    names: bool,
    folder: TempDir,
}

struct RunningRelay {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    relay: Arc<Relay>,
    clock: EmuClock,
    fault: Arc<OnceLock<String>>,
}

impl Drop for RunningRelay {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl World {
    /// Builds the world of a scenario, with links down and time not started. [`crate::enter`] must
    /// be called before.
    ///
    /// # Errors
    /// The system refused something.
    pub fn build(scenario: Scenario) -> anyhow::Result<World> {
        let mut device = Namespace::new("device")?;
        let mut proxy = Namespace::new("proxy")?;
        let origin = Namespace::new("origin")?;
        let folder = tempfile::tempdir().context("no temporary folder")?;
        let hosts = folder.path().join("hosts");
        let own = nix::unistd::gethostname().unwrap_or_default();
        std::fs::write(&hosts, plan::hosts(&own.to_string_lossy()))?;
        let names = device.name_hosts(&hosts) && proxy.name_hosts(&hosts);
        join_hosts(&proxy, &origin)?;
        // Only used if TUN devices are not available.
        let relay = Arc::new(Namespace::new("relay")?);
        let nat64 = scenario
            .links
            .iter()
            .any(|link| link.family == Family::Nat64);
        let mtu = if nat64 {
            INTERNET_MTU_NAT64
        } else {
            INTERNET_MTU
        };
        let places = HOSTS
            .iter()
            .zip([&proxy, &origin])
            .map(|(host, namespace)| {
                let (v4, v6) = (IpAddr::V4(host.v4), IpAddr::V6(host.v6));
                let relay = relay.clone();
                let device = namespace.run(move |network| {
                    let device = network.port("net0", mtu, &relay)?;
                    network.raise("net0")?;
                    network.address("net0", v4, 32)?;
                    network.address("net0", v6, 128)?;
                    for (any, source) in [(ANY_V4, v4), (ANY_V6, v6)] {
                        let way = RouteHop {
                            source: Some(source),
                            ..RouteHop::default()
                        };
                        network.route("net0", (any, 0), way)?;
                    }
                    anyhow::Ok(device)
                })??;
                Ok(RelayInterface {
                    device,
                    addresses: [v4, v6],
                })
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        let devices = std::iter::zip(&scenario.links, 0..)
            .map(|(link, number)| {
                let name = link.name.clone();
                let relay = relay.clone();
                let mtu = scenario.condition_at_start(number).upward.mtu_bytes;
                device.run(move |network| network.port(&name, mtu, &relay))?
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        Ok(World {
            time: None,
            waiting: Some((devices, places)),
            web: None,
            origin_server: None,
            device: Arc::new(device),
            proxy,
            origin,
            scenario,
            names,
            folder,
        })
    }

    /// The namespace in which the device's programs run.
    pub fn device(&self) -> &Namespace {
        &self.device
    }

    /// The namespace in which the proxy runs.
    pub fn proxy(&self) -> &Namespace {
        &self.proxy
    }

    /// The namespace in which the origin runs.
    pub fn origin(&self) -> &Namespace {
        &self.origin
    }

    /// The scenario that the world carries out.
    pub fn scenario(&self) -> &Scenario {
        &self.scenario
    }

    /// Whether programs on the device and the proxy can resolve the names `origin` and `proxy`.
    pub fn has_names(&self) -> bool {
        self.names
    }

    /// The origin's web server, once [`World::start_web`] has started it.
    pub fn web(&self) -> Option<&OriginWebServer> {
        self.web.as_ref()
    }

    /// Starts the web server that the scenario requires, over HTTP and HTTPS. It serves until the
    /// world is dropped.
    ///
    /// # Errors
    /// nginx is required and not installed, or a port is not available.
    pub fn start_web(&mut self) -> anyhow::Result<&OriginWebServer> {
        let (mut web, builtin) = web::prepare(&self.scenario, self.folder.path())?;
        self.serve(builtin)?;
        web.listen(&self.origin, self.folder.path())?;
        Ok(self.web.insert(web))
    }

    /// Starts the built-in origin on IPv4 and IPv6. It serves until the world is dropped.
    ///
    /// # Errors
    /// Its port is not available, or it runs already.
    pub fn start_origin(&mut self) -> anyhow::Result<Vec<SocketAddr>> {
        let addresses = vec![
            SocketAddr::new(plan::ORIGIN_V4.into(), ORIGIN_PORT),
            SocketAddr::new(plan::ORIGIN_V6.into(), ORIGIN_PORT),
        ];
        self.serve(OriginServer {
            plain: addresses,
            seed: self.scenario.seed,
            ..OriginServer::default()
        })
    }

    fn serve(&mut self, server: OriginServer) -> anyhow::Result<Vec<SocketAddr>> {
        anyhow::ensure!(self.origin_server.is_none(), "the origin runs already");
        let (stop, stopped) = oneshot::channel();
        let (ready, wait) = channel();
        let thread = self.origin.thread("server", move || {
            let told = ready.clone();
            let on_ready = move |bound| drop(told.send(Ok(bound)));
            if let Err(error) = server.run(on_ready, stopped) {
                let _ = ready.send(Err(error));
            }
        })?;
        self.origin_server = Some((stop, thread));
        wait.recv().context("the origin's thread died")?
    }

    /// Makes the device's kernel MPTCP use all links to the origin and to the proxy, metered ones
    /// only if there is no other. Call it before time starts.
    ///
    /// # Errors
    /// The kernel or its `ip` does not support MPTCP.
    pub fn use_multipath(&self) -> anyhow::Result<()> {
        let costs = |link: &Link| link.class != Class::Free;
        let backups = self.scenario.links.iter().map(costs).collect();
        self.device
            .run(move |network| network.use_multipath(backups))??;
        for host in [&self.proxy, &self.origin] {
            host.run(|network| network.take_multipath())??;
        }
        Ok(())
    }

    /// Starts the scenario's time. `on_event` is called after each event: for those at 0 before
    /// this returns, for others on a separate thread.
    ///
    /// # Errors
    /// The events at 0 cannot be carried out, or time has already been started.
    pub fn start(
        &mut self,
        on_event: impl FnMut(&WorldEvent) + Send + 'static,
    ) -> anyhow::Result<()> {
        let (devices, places) = self
            .waiting
            .take()
            .context("the scenario's time runs already")?;
        let clock = EmuClock::start();
        let relay = Arc::new(Relay::start(&self.scenario, clock, devices, places)?);
        let mut actor = ScenarioActor {
            relay: relay.clone(),
            device: self.device.clone(),
            scenario: self.scenario.clone(),
            clock,
            addresses: vec![None; self.scenario.links.len()],
            on_event: Box::new(on_event),
        };
        let mut timeline = self.scenario.timeline();
        while timeline.next_at() == Some(Time::ZERO)
            && let Some(event) = timeline.next()
        {
            actor.act(event)?;
        }
        let fault = Arc::new(OnceLock::new());
        let first_fault = fault.clone();
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("lab-time".to_owned())
            .spawn(move || {
                for event in timeline {
                    match stopped.recv_timeout(clock.until(event.at)) {
                        Err(RecvTimeoutError::Timeout) => {}
                        Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                    }
                    if let Err(error) = actor.act(event) {
                        let fault = format!("{error:#}");
                        tracing::error!(fault, "the lab could not follow its scenario");
                        let _ = first_fault.set(fault);
                        return;
                    }
                }
            })?;
        self.time = Some(RunningRelay {
            stop: Some(stop),
            thread: Some(thread),
            relay,
            clock,
            fault,
        });
        Ok(())
    }

    /// The current time of the scenario; 0 before it starts.
    pub fn now(&self) -> Time {
        self.time
            .as_ref()
            .map_or(Time::ZERO, |time| time.clock.now())
    }

    /// Why the lab stopped following its scenario, in which case the run is not valid; `None` if it
    /// follows.
    pub fn fault(&self) -> Option<String> {
        self.time
            .as_ref()
            .and_then(|time| time.fault.get().cloned())
    }

    /// Records that no flow is active, so that the following silence is not a switch.
    pub fn idle(&self) {
        if let Some(time) = &self.time {
            time.relay.idle();
        }
    }

    /// The observations so far.
    pub fn seen(&self) -> WorldObservations {
        let RelayReport {
            carried,
            switches,
            energy,
        } = self
            .time
            .as_ref()
            .map(|time| time.relay.report())
            .unwrap_or_default();
        let links = self
            .scenario
            .links
            .iter()
            .enumerate()
            .map(|(number, link)| {
                let carried = carried.get(number).copied().unwrap_or_default();
                LinkReport {
                    name: link.name.clone(),
                    class: link.class.word().to_owned(),
                    bytes_down: carried.down.bytes_delivered,
                    bytes_up: carried.bytes_up,
                    packets_while_down: carried.upward.packets_while_down,
                    wait_down_ms: carried.down.waited_mean_ms(),
                    wait_up_ms: carried.upward.waited_mean_ms(),
                    wait_down_max_ms: carried.down.waited_max.as_millis_f64(),
                }
            });
        WorldObservations {
            links: links.collect(),
            switches,
            carried,
            energy,
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.origin_server.take() {
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

/// Applies the scenario's events to the device and the models.
struct ScenarioActor {
    relay: Arc<Relay>,
    device: Arc<Namespace>,
    scenario: Scenario,
    clock: EmuClock,
    addresses: Vec<Option<plan::LinkAddresses>>,
    on_event: Box<dyn FnMut(&WorldEvent) + Send>,
}

impl ScenarioActor {
    fn act(&mut self, event: ScenarioLinkEvent) -> anyhow::Result<()> {
        let link = event.link;
        let name = self.scenario.links[link].name.clone();
        let family = self.scenario.links[link].family;
        match event.kind {
            EventKind::Down => {
                let interface = name.clone();
                self.device
                    .run(move |network| network.leave(link, &interface))??;
                self.relay.apply(link, &event.condition);
                self.relay.lost(link);
                self.addresses[link] = None;
            }
            EventKind::Up { address } => {
                let addresses = plan::link_addresses(link, address);
                self.relay.readdress(link, addresses);
                self.relay.apply(link, &event.condition);
                let interface = name.clone();
                self.device
                    .run(move |network| network.join(link, &interface, family, &addresses))??;
                self.relay.usable(link);
                self.addresses[link] = Some(addresses);
            }
            EventKind::NewAddress { address } => {
                let addresses = plan::link_addresses(link, address);
                let interface = name.clone();
                self.device
                    .run(move |network| network.unsettle(link, &interface))??;
                self.relay.lost(link);
                self.relay.readdress(link, addresses);
                self.relay.apply(link, &event.condition);
                let interface = name.clone();
                self.device
                    .run(move |network| network.settle(link, &interface, family, &addresses))??;
                self.relay.usable(link);
                self.addresses[link] = Some(addresses);
            }
            EventKind::Rebind => self.relay.rebind(link),
            EventKind::Attaching | EventKind::Changed => self.relay.apply(link, &event.condition),
        }
        let at = self.clock.now();
        (self.on_event)(&WorldEvent {
            at,
            link: name,
            addresses: self.addresses[link],
            event,
        });
        Ok(())
    }
}

const ANY_V4: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
const ANY_V6: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// Addresses and interface of a host on the lab's internet.
struct WorldHost {
    v4: Ipv4Addr,
    v6: Ipv6Addr,
    towards: &'static str,
}

const HOSTS: [WorldHost; 2] = [
    WorldHost {
        v4: plan::PROXY_V4,
        v6: plan::PROXY_V6,
        towards: "origin0",
    },
    WorldHost {
        v4: plan::ORIGIN_V4,
        v6: plan::ORIGIN_V6,
        towards: "proxy0",
    },
];

/// Connects proxy and origin by an interface pair without a model.
fn join_hosts(proxy: &Namespace, origin: &Namespace) -> anyhow::Result<()> {
    let [here, there] = &HOSTS;
    let namespace = origin.run(|_| network::own_namespace())??;
    proxy.run(move |network| network.pair(here.towards, there.towards, &namespace))??;
    for (namespace, own, other) in [(proxy, here, there), (origin, there, here)] {
        namespace.run(move |network| {
            network.raise(own.towards)?;
            for (to, bits, source) in [
                (IpAddr::V4(other.v4), 32, IpAddr::V4(own.v4)),
                (IpAddr::V6(other.v6), 128, IpAddr::V6(own.v6)),
            ] {
                network.address(own.towards, source, bits)?;
                let way = RouteHop {
                    source: Some(source),
                    ..RouteHop::default()
                };
                network.route(own.towards, (to, bits), way)?;
            }
            anyhow::Ok(())
        })??;
    }
    Ok(())
}
