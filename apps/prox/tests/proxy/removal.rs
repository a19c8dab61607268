//! What becomes of a client that the operator removes: every kind of thing that the proxy holds for it.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::wait::{until, within};
use cedos_prox::{Prox, ProxConfig, SystemResolver, serve};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, HibernationOptions, Journal,
    LinkUse, ProvidedLink, ProvidedLinks, SecretKey, Server, ServerAddress, ServerOptions,
    SessionEnd,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::pattern;

/// A proxy with the client "pad", which a device is.
struct ProxyWithClient {
    prox: Arc<Prox>,
    server: Arc<Server>,
    state: tempfile::TempDir,
    journal: Arc<Journal>,
}

impl ProxyWithClient {
    async fn start() -> ProxyWithClient {
        let state = tempfile::tempdir().unwrap();
        let journal = Arc::new(Journal::open(&state.path().join("journal")).unwrap());
        let config = ProxConfig {
            state_dir: state.path().to_owned(),
            allow_private: true,
            sleep_after: Duration::from_secs(1),
            ..Default::default()
        };
        let sleep_after = Some(config.sleep_after);
        let limits = config.relay_limits().unwrap();
        let resolver = Arc::new(SystemResolver);
        let prox = Prox::with_journal(config, resolver, Some(journal.clone())).unwrap();
        let options = ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            key: SecretKey::from_bytes([9; 32]),
            admission: prox.clients().admission(),
            config: EndpointConfig {
                silence_max: Duration::from_secs(1).into(),
                ..EndpointConfig::default()
            },
        };
        let rest = HibernationOptions {
            hibernate_after: sleep_after,
            journal: Some(journal.clone()),
        };
        let server = Arc::new(Server::bind_with(options, rest).unwrap());
        server.relay_for_devices(limits);
        server.meter_relays(prox.clone());
        tokio::spawn(prox.clone().watch_clients(server.clone()));
        tokio::spawn(prox.clone().watch_expired_flows(server.clone()));
        tokio::spawn(serve(server.clone(), prox.clone(), std::future::pending()));
        ProxyWithClient {
            prox,
            server,
            state,
            journal,
        }
    }

    /// Whether the journal knows that the file of a copy has all bytes.
    fn has_whole_copy(&self) -> bool {
        let mut is_whole = false;
        let mut look = |_: &[u8], note: &[u8]| {
            let note: Option<serde_json::Value> = serde_json::from_slice(note).ok();
            is_whole |= note.is_some_and(|note| note["whole"] == true);
        };
        self.journal.notes(&[], &mut look).unwrap();
        is_whole
    }

    /// A device with this key, enrolled under this name, and its link.
    async fn client(&self, n: u8, name: &str) -> (Device, Arc<ProvidedLinks>) {
        let clients = self.prox.clients();
        let invited = clients.invite(Some(name), Duration::from_secs(600));
        let secret = invited.unwrap().0.to_text();
        let request = format!("ENROL * HTTP/1.1\r\nhost: p\r\ninvitation: {secret}\r\n\r\n");
        // An invitation takes effect a moment after it is made.
        loop {
            let options = DeviceOptions {
                server: ServerAddress {
                    stream: Some(0),
                    ..ServerAddress::new(
                        "127.0.0.1",
                        self.server.local_addr().port(),
                        self.server.public_key(),
                    )
                },
                key: SecretKey::from_bytes([n; 32]),
                config: EndpointConfig::default(),
            };
            let links = ProvidedLinks::new();
            let mut device = Device::with_attach(options, links.clone()).await.unwrap();
            device.follow_links(links.subscribe(), |_| LinkUse::Free);
            links.add(ProvidedLink::new("net", Ipv4Addr::new(127, 0, 0, n).into()));
            let mut flow = open(&device, &request).await;
            let mut answer = String::new();
            if within(flow.read_to_string(&mut answer)).await.is_ok() {
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                return (device, links);
            }
        }
    }

    fn is_empty(&self) -> bool {
        let holdings = self.prox.holdings();
        holdings.flows == 0
            && holdings.memory_bytes + holdings.disk_bytes == holdings.cached_bytes
            && holdings.retained_copies + holdings.retained_uploads == 0
            && holdings.hibernated_copies == 0
            && std::fs::read_dir(self.state.path().join("copies"))
                .unwrap()
                .next()
                .is_none()
    }
}

async fn open(device: &Device, head: &str) -> Flow {
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let _ = flow.write_all(head.as_bytes()).await;
    let _ = flow.flush().await;
    flow
}

/// Reads the head of an answer, whose status must be 200.
async fn head_of(flow: &mut Flow) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(within(flow.read_u8()).await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    head
}

/// An origin whose objects of 3 MB nobody shares.
async fn origin() -> ScriptedOrigin {
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\nCache-Control: private\r\nETag: \"e\"\r\n\r\n";
    let mut answer = head.as_bytes().to_vec();
    answer.extend(pattern(3_000_000));
    ScriptedOrigin::fixed(answer).await
}

#[tokio::test]
async fn all_that_the_proxy_holds_for_a_removed_client_goes_with_it() {
    let proxy = ProxyWithClient::start().await;
    let (device, _links) = proxy.client(1, "pad").await;
    let (friend, _friends_links) = proxy.client(2, "friend").await;
    let origin = origin().await;
    let get = format!("GET {} HTTP/1.1\r\nhost: h\r\n\r\n", origin.url("/a"));
    // A copy that is read, and one whose flow the device broke.
    let mut download = open(&device, &get).await;
    head_of(&mut download).await;
    let mut broken = open(&device, &get.replace("/a", "/b")).await;
    head_of(&mut broken).await;
    drop(broken);
    until("a retained copy", || {
        proxy.prox.holdings().retained_copies == 1
    })
    .await;
    // An upload that broke off, and one that is under way.
    let url = origin.url("/upload");
    let put = |token: &str| {
        format!(
            "PUT {url} HTTP/1.1\r\nhost: h\r\ncontent-length: 100000\r\nexpect: 100-continue\r\n\
             cedos-upload: {token}\r\n\r\n"
        )
    };
    let mut upload = open(&device, &put("0123456789abcdef")).await;
    within(upload.read_u8()).await.unwrap();
    upload.write_all(&[0; 1_000]).await.unwrap();
    let mut left = open(&device, &put("fedcba9876543210")).await;
    within(left.read_u8()).await.unwrap();
    drop(left);
    until("a retained upload", || {
        proxy.prox.holdings().retained_uploads == 1
    })
    .await;
    // A tunnel.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    let mut tunnel = open(
        &device,
        &format!("CONNECT {at} HTTP/1.1\r\nhost: h\r\n\r\n"),
    )
    .await;
    let (mut tunnelled, _) = within(listener.accept()).await.unwrap();
    head_of(&mut tunnel).await;
    // A relay, a mailbox, and a device that can be called.
    let relay = format!("RELAY {at} HTTP/1.1\r\nhost: h\r\n\r\n");
    let mut relay = open(&device, &relay).await;
    head_of(&mut relay).await;
    let mut mailbox = open(&device, "MAILBOX * HTTP/1.1\r\nhost: h\r\n\r\n").await;
    let number = head_of(&mut mailbox).await;
    let number = number.split("mailbox: ").nth(1).unwrap().trim().to_owned();
    let mut listens = open(&device, "LISTEN * HTTP/1.1\r\nhost: h\r\n\r\n").await;
    head_of(&mut listens).await;

    let began = std::time::Instant::now();
    proxy.prox.clients().remove("pad").unwrap();
    until("the session ended", || device.ended().is_some()).await;
    assert!(
        matches!(
            device.ended(),
            Some(SessionEnd::Peer { .. } | SessionEnd::Refused(_))
        ),
        "{:?}",
        device.ended()
    );
    until("nothing is held", || proxy.is_empty()).await;
    eprintln!("all was gone after {:?}", began.elapsed());
    // The tunnel's server sees a reset.
    assert!(within(tunnelled.read_u8()).await.is_err());
    // Nobody waits in the mailbox, and nobody is called.
    for head in [
        format!("MAILBOX {number} HTTP/1.1\r\nhost: h\r\n\r\n"),
        format!(
            "RELAY {} HTTP/1.1\r\nhost: h\r\n\r\n",
            SecretKey::from_bytes([1; 32]).public()
        ),
    ] {
        let mut flow = open(&friend, &head).await;
        let mut answer = [0; 12];
        within(flow.read_exact(&mut answer)).await.unwrap();
        assert_eq!(&answer, b"HTTP/1.1 404", "{head}");
    }
    proxy.prox.persist_copies().await.unwrap();
}

#[tokio::test]
async fn a_removed_client_that_is_away_has_its_hibernated_flows_freed() {
    let proxy = ProxyWithClient::start().await;
    let (device, links) = proxy.client(1, "pad").await;
    let origin = origin().await;
    let get = format!("GET {} HTTP/1.1\r\nhost: h\r\n\r\n", origin.url("/a"));
    let mut download = open(&device, &get).await;
    head_of(&mut download).await;
    links.remove("net");
    until("the flow sleeps", || {
        proxy.prox.holdings().hibernated_copies == 1
    })
    .await;
    proxy.prox.clients().remove("pad").unwrap();
    until("nothing is held", || proxy.is_empty()).await;
    proxy.prox.persist_copies().await.unwrap();
}

#[tokio::test]
async fn of_a_copy_that_is_on_the_disk_for_a_flow_that_sleeps_nothing_is_listed_in_memory() {
    let proxy = ProxyWithClient::start().await;
    let (device, links) = proxy.client(1, "pad").await;
    let origin = origin().await;
    let get = format!("GET {} HTTP/1.1\r\nhost: h\r\n\r\n", origin.url("/a"));
    let mut download = open(&device, &get).await;
    head_of(&mut download).await;
    assert_eq!(proxy.prox.holdings().listed_clients, 1);
    until("the copy is on the disk", || proxy.has_whole_copy()).await;
    links.remove("net");
    until("the flow sleeps", || {
        proxy.prox.holdings().hibernated_copies == 1
    })
    .await;
    until("nothing is listed", || {
        proxy.prox.holdings().listed_clients == 0
    })
    .await;
    proxy.prox.persist_copies().await.unwrap();
}
