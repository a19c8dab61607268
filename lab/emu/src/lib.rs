//! The lab: the same link models in real time, between network namespaces.
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use cedos_lab_emu::{World, enter};
//! use cedos_lab_scenario::Scenario;
//! enter()?; // before any thread is started
//! let scenario = Scenario::load("lab/scenarios/commute.toml".as_ref())?;
//! let mut world = World::build(scenario)?;
//! world.start_origin()?;
//! world.start(|happening| eprintln!("{:?} {}", happening.at, happening.link))?;
//! let mut curl = std::process::Command::new("curl");
//! curl.args(["--interface", "wlan0", "-so", "/dev/null", "http://203.0.113.20/bytes/1000000"]);
//! world.device().spawn(curl)?.wait()?;
//! println!("{:?}", world.seen().links);
//! # Ok(())
//! # }
//! ```
//!
//! The lab does not use `netem`: the kernel provides TUN devices, namespaces and routes; one relay
//! thread implements delay, rate, loss, queues and NAT. It works as root, and for every user if the
//! system allows user namespaces. If `/dev/net/tun` cannot be opened, pairs of Ethernet devices
//! replace it. If namespaces are forbidden, [`Loopback`] and [`TcpRelays`] run the models between
//! sockets on the loopback interface.

mod clock;
mod crossing;
mod gate;
mod http_proxy;
mod icmp;
mod link_filter;
pub mod loopback;
mod multipath;
mod namespace;
mod network;
mod node_delays;
pub mod origin;
mod packet;
pub mod plan;
mod port;
mod relay;
mod rootless;
mod serial_radio;
mod tcp_relay;
pub mod web;
mod world;

pub use cedos_lab_scenario::content;
pub use clock::EmuClock;
pub use crossing::HostNetwork;
pub use loopback::{Loopback, LoopbackHappening};
pub use namespace::Namespace;
pub use network::NamespaceNetwork;
pub use relay::{DATA_PACKET_BYTES_MIN, QUANTUM, RelayedBytes};
pub use rootless::{Forbidden, enter};
pub use serial_radio::SerialRadio;
pub use tcp_relay::TcpRelays;
pub use world::{ORIGIN_PORT, World, WorldEvent, WorldObservations};
