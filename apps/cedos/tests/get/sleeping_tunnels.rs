//! A session with an idle tunnel sleeps at the proxy, which keeps the server's connection; the tunnel goes on when the
//! device is back.

use std::net::IpAddr;
use std::time::Duration;

use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::wait::{until_async, within};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, Flow, LinkUse, ProvidedLink, ProvidedLinks, SecretKey,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::passed_tunnels::tunnel;

/// What a server sends while the session sleeps: more than the buffers of a tunnel.
const SENT_ASLEEP: usize = 300_000;

/// A proxy, a device whose networks come and go, and a tunnel to a server.
struct Scene {
    _folder: tempfile::TempDir,
    proxy: ProxyProcess,
    metrics: HeldPort,
    links: std::sync::Arc<ProvidedLinks>,
    _device: Device,
    flow: Flow,
    server: TcpStream,
}

fn network(name: &str, last: u8) -> ProvidedLink {
    ProvidedLink::new(name, IpAddr::from([127, 0, 0, last]))
}

fn pattern(length: usize) -> Vec<u8> {
    cedos_lab_rig::origin::object(length, 5)
}

impl Scene {
    async fn start() -> Scene {
        let folder = tempfile::tempdir().unwrap();
        let (key, metrics) = (SecretKey::from_bytes([7; 32]), HeldPort::take());
        let at = metrics.address().to_string();
        let more = ["--sleep-after", "2s", "--metrics-listen", &at];
        let client = key.public().to_string();
        let proxy = ProxyProcess::start_for(&client, folder.path(), "127.0.0.1:0", &more).await;
        let links = ProvidedLinks::new();
        links.add(network("wifi", 2));
        let options = DeviceOptions {
            server: proxy.address.parse().unwrap(),
            key,
            config: EndpointConfig::default(),
        };
        let mut device = Device::with_attach(options, links.clone()).await.unwrap();
        device.follow_links(links.subscribe(), |_| LinkUse::Free);
        let (flow, server) = tunnel(&device).await;
        let mut scene = Scene {
            _folder: folder,
            proxy,
            metrics,
            links,
            _device: device,
            flow,
            server,
        };
        scene.exchange(b"first").await;
        scene
    }

    /// Sends the same to both ends.
    async fn exchange(&mut self, text: &[u8]) {
        let mut read = vec![0; text.len()];
        self.flow.write_all(text).await.unwrap();
        within(self.server.read_exact(&mut read)).await.unwrap();
        assert_eq!(read, text);
        self.server.write_all(text).await.unwrap();
        within(self.flow.read_exact(&mut read)).await.unwrap();
        assert_eq!(read, text);
        // sleep: it is acknowledged a moment later, and nothing tells of it
        tokio::time::sleep(Duration::from_millis(500)).await;
    }

    /// The number of sessions in this state.
    async fn sessions(&self, state: &str) -> Option<u64> {
        let mut stream = TcpStream::connect(self.metrics.address()).await.ok()?;
        let at = self.metrics.address();
        let request = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut text = String::new();
        within(stream.read_to_string(&mut text)).await.ok()?;
        let label = format!("sessions{{state=\"{state}\"}}");
        let line = text.lines().find(|line| line.contains(&label))?;
        line.rsplit(' ').next()?.parse().ok()
    }

    async fn until_asleep(&self) {
        until_async("the session sleeps", async || {
            (self.sessions("hibernated").await == Some(1)).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_session_with_an_idle_tunnel_sleeps_and_both_ways_go_on_when_its_device_is_back() {
    let mut scene = Scene::start().await;
    scene.links.remove("wifi");
    scene.until_asleep().await;
    assert_eq!(scene.sessions("awake").await, Some(0));
    // What the server sends meanwhile waits in the kernel, and then at the server.
    let (mut sending, sent) = (scene.server, pattern(SENT_ASLEEP));
    let bytes = sent.clone();
    let sending = tokio::spawn(async move {
        sending.write_all(&bytes).await.unwrap();
        sending
    });
    scene.links.add(network("another", 3));
    let mut got = vec![0; SENT_ASLEEP];
    within(scene.flow.read_exact(&mut got)).await.unwrap();
    assert!(got == sent, "not what the server sent");
    scene.server = within(sending).await.unwrap();
    scene.exchange(b"second").await;
    // Again, and the end of both directions.
    scene.links.remove("another");
    scene.until_asleep().await;
    scene.links.add(network("third", 4));
    scene.exchange(b"third").await;
    scene.flow.shutdown().await.unwrap();
    assert_eq!(within(scene.server.read(&mut [0])).await.unwrap(), 0);
    scene.server.write_all(b"last").await.unwrap();
    scene.server.shutdown().await.unwrap();
    let mut last = Vec::new();
    within(scene.flow.read_to_end(&mut last)).await.unwrap();
    assert_eq!(last, b"last");
}

#[tokio::test]
async fn a_tunnel_with_bytes_under_way_does_not_sleep_and_loses_none() {
    let mut scene = Scene::start().await;
    scene.links.remove("wifi");
    // The proxy has it from the server, and no device acknowledges it.
    let sent = pattern(50_000);
    scene.server.write_all(&sent).await.unwrap();
    // sleep: that nothing sleeps is the subject, and the proxy falls silent after 15 s
    tokio::time::sleep(Duration::from_secs(22)).await;
    assert_eq!(scene.sessions("hibernated").await, Some(0));
    scene.links.add(network("another", 3));
    let mut got = vec![0; sent.len()];
    within(scene.flow.read_exact(&mut got)).await.unwrap();
    assert!(got == sent, "not what the server sent");
    scene.exchange(b"second").await;
}

#[tokio::test]
async fn the_server_of_a_sleeping_tunnel_hears_a_reset_when_the_proxy_ends() {
    let mut scene = Scene::start().await;
    scene.links.remove("wifi");
    scene.until_asleep().await;
    scene.proxy.child.kill().await.unwrap();
    let ended = within(scene.server.read(&mut [0])).await;
    let error = ended.expect_err("not the clean end of what was sent");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}
