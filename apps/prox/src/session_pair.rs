//! For tests: a server and a device of the real driver over loopback sockets, with a flow between them.

use std::net::IpAddr;
use std::sync::Arc;

use cedos_lab_rig::wait::within;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, LinkUse, ProvidedLink,
    ProvidedLinks, SecretKey, Server, ServerAddress, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A server, a device whose links come and go, and both ends of a flow.
pub(crate) struct SessionPair {
    pub(crate) links: Arc<ProvidedLinks>,
    pub(crate) device: Device,
    /// The device's end of the flow.
    pub(crate) near: Flow,
    /// The server's end of the flow.
    pub(crate) far: Flow,
    _server: Server,
}

/// A link of this name over a loopback address.
pub(crate) fn local_link(name: &str, last: u8) -> ProvidedLink {
    ProvidedLink::new(name, IpAddr::from([127, 0, 0, last]))
}

impl SessionPair {
    /// A server with this configuration, and a device with a link `wifi`.
    pub(crate) async fn start(config: EndpointConfig) -> SessionPair {
        let server = Server::bind(ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            key: SecretKey::from_bytes([2; 32]),
            admission: Admission::Anybody,
            config,
        })
        .unwrap();
        let options = DeviceOptions {
            server: ServerAddress::new(
                "127.0.0.1",
                server.local_addr().port(),
                server.public_key(),
            ),
            key: SecretKey::from_bytes([1; 32]),
            config: EndpointConfig::default(),
        };
        let links = ProvidedLinks::new();
        links.add(local_link("wifi", 2));
        let mut device = Device::with_attach(options, links.clone()).await.unwrap();
        device.follow_links(links.subscribe(), |_| LinkUse::Free);
        let mut near = device.open(FlowSettings::default()).unwrap();
        near.write_all(b"!").await.unwrap();
        let mut far = within(server.accept()).await.unwrap();
        within(far.read_exact(&mut [0])).await.unwrap();
        SessionPair {
            links,
            device,
            near,
            far,
            _server: server,
        }
    }

    /// Sends some bytes each way.
    pub(crate) async fn exchange(&mut self) {
        self.near.write_all(b"there").await.unwrap();
        within(self.far.read_exact(&mut [0; 5])).await.unwrap();
        self.far.write_all(b"back").await.unwrap();
        within(self.near.read_exact(&mut [0; 4])).await.unwrap();
    }
}
