//! A server, and a device over links that the test provides.

use std::net::IpAddr;
use std::sync::Arc;

use cedos_lab_rig::wait::within;
use d2tp_driver::{
    Admission, Attach, Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, LinkUse,
    PathState, ProvidedLink, ProvidedLinks, SecretKey, Server, ServerAddress, ServerOptions,
};
use d2tp_links::{CostClass, Link};
use tokio::io::AsyncWriteExt;

pub fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

pub fn server() -> Server {
    server_with(EndpointConfig::default())
}

pub fn server_with(config: EndpointConfig) -> Server {
    Server::bind(ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config,
    })
    .unwrap()
}

/// The use of a link by its cost class: free links are free, metered ones paid.
pub fn usage(link: &Link) -> LinkUse {
    match link.class.class {
        CostClass::Free => LinkUse::Free,
        _ => LinkUse::Paid,
    }
}

pub async fn device(
    server: &Server,
    links: &Arc<ProvidedLinks>,
    attach: Arc<dyn Attach>,
) -> Device {
    device_by_way_of(server.local_addr().port(), server, links, attach).await
}

/// A device that reaches the server at another port than the server's own.
pub async fn device_by_way_of(
    port: u16,
    server: &Server,
    links: &Arc<ProvidedLinks>,
    attach: Arc<dyn Attach>,
) -> Device {
    let options = options_at(port, server);
    let mut device = Device::with_attach(options, attach).await.unwrap();
    device.follow_links(links.subscribe(), usage);
    device
}

/// The options of a device that reaches the server at this port.
pub fn options_at(port: u16, server: &Server) -> DeviceOptions {
    DeviceOptions {
        server: ServerAddress::new("127.0.0.1", port, server.public_key()),
        key: key(1),
        config: EndpointConfig::default(),
    }
}

pub fn at(last: u8) -> IpAddr {
    [127, 0, 0, last].into()
}

pub fn wifi(last: u8) -> ProvidedLink {
    ProvidedLink::new("wifi", at(last))
}

/// A flow with the handles of both ends.
pub async fn flow(device: &Device, server: &Server) -> (Flow, Flow) {
    let mut near = device.open(FlowSettings::default()).unwrap();
    near.write_all(b"!").await.unwrap();
    let far = within(server.accept()).await.unwrap();
    (near, far)
}

/// The source addresses of a link's answering paths: one port for each socket.
pub fn active(device: &Device, name: &str) -> Vec<d2tp_driver::LinkId> {
    device
        .paths()
        .iter()
        .filter(|p| p.state == PathState::Active)
        .map(|p| p.addresses.link)
        .filter(|link| device.link_name(*link).as_deref() == Some(name))
        .collect()
}
