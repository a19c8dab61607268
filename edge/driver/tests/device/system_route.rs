//! A device that uses the system's route as long as no link of its own leads to the server.

use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Attach, Device, DeviceOptions, EndpointConfig, Flow, PathState, ProvidedLinks, ServerAddress,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{flow, key, server, usage, wifi};

/// Sends a byte each way and reads it.
async fn carries(near: &mut Flow, far: &mut Flow) {
    near.write_all(b"a").await.unwrap();
    far.write_all(b"b").await.unwrap();
    assert_eq!(within(far.read_u8()).await.unwrap(), b'a');
    assert_eq!(within(near.read_u8()).await.unwrap(), b'b');
}

/// Whether paths over this link answer, and there are no others.
fn goes_by(device: &Device, name: &str) -> bool {
    let paths = device.paths();
    let is_it = |link| device.link_name(link).as_deref() == Some(name);
    paths.iter().all(|path| is_it(path.addresses.link))
        && paths.iter().any(|path| path.state == PathState::Active)
}

#[tokio::test]
async fn a_link_that_comes_up_takes_the_place_of_the_systems_route_and_gives_it_back() {
    let (server, links) = (server(), ProvidedLinks::new());
    let attach: std::sync::Arc<dyn Attach> = links.clone();
    let options = DeviceOptions {
        server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()),
        key: key(1),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, attach).await.unwrap();
    device.follow_links_or_route(links.subscribe(), usage, <[_]>::is_empty);
    let (mut near, mut far) = flow(&device, &server).await;
    assert_eq!(within(far.read_u8()).await.unwrap(), b'!');
    carries(&mut near, &mut far).await;
    assert!(goes_by(&device, "any"), "{:?}", device.paths());
    for _ in 0..2 {
        links.add(wifi(2));
        until("the link is used alone", || goes_by(&device, "wifi")).await;
        carries(&mut near, &mut far).await;
        links.remove("wifi");
        until("the system's route is used", || goes_by(&device, "any")).await;
        carries(&mut near, &mut far).await;
    }
}
