//! Devices that are not enrolled, and a proxy with an open invitation.

use std::sync::Arc;
use std::time::Duration;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::wait::within;
use cedos_prox::{InvitationSecret, Prox, ProxConfig, SystemResolver, serve};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, FlowSettings, HibernationOptions, Journal, SecretKey,
    Server, ServerAddress, ServerOptions, SessionEnd,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

struct InvitingProxy {
    prox: Arc<Prox>,
    server: Arc<Server>,
    _state: tempfile::TempDir,
}

impl InvitingProxy {
    async fn start() -> InvitingProxy {
        let state = tempfile::tempdir().unwrap();
        let journal = Arc::new(Journal::open(&state.path().join("journal")).unwrap());
        let config = ProxConfig {
            state_dir: state.path().to_owned(),
            allow_private: true,
            ..Default::default()
        };
        let resolver = Arc::new(SystemResolver);
        let prox = Prox::with_journal(config, resolver, Some(journal.clone())).unwrap();
        let options = ServerOptions {
            listen: "127.0.0.1:0".parse().unwrap(),
            key: SecretKey::from_bytes([9; 32]),
            admission: prox.clients().admission(),
            config: EndpointConfig::default(),
        };
        let rest = HibernationOptions {
            hibernate_after: Some(Duration::from_secs(60)),
            journal: Some(journal),
        };
        let server = Arc::new(Server::bind_with(options, rest).unwrap());
        tokio::spawn(prox.clone().watch_clients(server.clone()));
        tokio::spawn(serve(server.clone(), prox.clone(), std::future::pending()));
        InvitingProxy {
            prox,
            server,
            _state: state,
        }
    }

    fn invite(&self) -> InvitationSecret {
        let clients = self.prox.clients();
        clients.invite(None, Duration::from_secs(600)).unwrap().0
    }

    async fn device(&self, n: u8) -> Device {
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
        let device = Device::new(options).await.unwrap();
        device.use_default_route().unwrap();
        device
    }
}

/// The status and the body of the answer to a request.
async fn ask(device: &Device, head: &str) -> std::io::Result<(u16, String)> {
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(head.as_bytes()).await?;
    flow.shutdown().await?;
    let mut answer = String::new();
    within(flow.read_to_string(&mut answer)).await?;
    let status = answer.split(' ').nth(1).and_then(|text| text.parse().ok());
    let body = answer
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned());
    Ok((status.unwrap_or(0), body.unwrap_or_default()))
}

fn enrol(secret: &InvitationSecret) -> String {
    let secret = secret.to_text();
    format!("ENROL * HTTP/1.1\r\nhost: p\r\ninvitation: {secret}\r\ndevice-name: my%20pad\r\n\r\n")
}

#[tokio::test]
async fn a_device_that_is_not_admitted_is_served_enrolment_and_nothing_else() {
    let origin = ScriptedOrigin::start(|_| {
        OriginReply(
            reply("200 OK", &[("content-length", "2")], b"hi"),
            ReplyEnd::Close,
        )
    })
    .await;
    let (url, place) = (origin.url("/x"), origin.address);
    let get = format!("GET {url} HTTP/1.1\r\nhost: {place}\r\n\r\n");
    let proxy = InvitingProxy::start().await;
    // Nobody was invited: not even the handshake is answered with more than no.
    let early = proxy.device(1).await;
    assert!(ask(&early, &get).await.is_err());
    assert!(
        matches!(early.ended(), Some(SessionEnd::Refused(_))),
        "{:?}",
        early.ended()
    );
    let secret = proxy.invite();
    let device = until_some_device(&proxy, 1).await;
    let key = cedos_prox::show_key(&[3; 32]);
    for request in [
        get.clone(),
        format!("HEAD {url} HTTP/1.1\r\nhost: {place}\r\n\r\n"),
        format!("CONNECT {place} HTTP/1.1\r\nhost: {place}\r\n\r\n"),
        format!("RELAY {place} HTTP/1.1\r\nhost: {place}\r\n\r\n"),
        format!("RELAY {key} HTTP/1.1\r\nhost: p\r\n\r\n"),
        "LISTEN * HTTP/1.1\r\nhost: p\r\n\r\n".to_owned(),
        format!("PUT {url} HTTP/1.1\r\nhost: {place}\r\ncontent-length: 0\r\n\r\n"),
        "no request at all\r\n\r\n".to_owned(),
        enrol(&InvitationSecret::generate(u64::from(u32::MAX))),
        "ENROL * HTTP/1.1\r\nhost: p\r\n\r\n".to_owned(),
    ] {
        let (status, body) = ask(&device, &request).await.unwrap();
        assert_eq!(status, 403, "{request}: {body}");
    }
    assert!(
        origin.requests().is_empty(),
        "nothing was asked of an origin"
    );
    assert_eq!(proxy.prox.holdings().memory_bytes, 0);
    let (status, _) = ask(&device, &enrol(&secret)).await.unwrap();
    assert_eq!(status, 200);
    assert_eq!(proxy.prox.clients().enrolled()[0].name, "my pad");
    // The session that it was enrolled in is an ordinary one from now on.
    assert_eq!(ask(&device, &get).await.unwrap(), (200, "hi".to_owned()));
    let (status, body) = ask(&device, &enrol(&secret)).await.unwrap();
    assert_eq!(
        (status, body.contains("by this device")),
        (409, true),
        "{body}"
    );
    // What is being written to the disk waits for the journal's task, which ends with the test.
    proxy.prox.persist_copies().await.unwrap();
}

/// A device whose handshake the proxy accepts: an invitation takes effect a moment after it is made.
async fn until_some_device(proxy: &InvitingProxy, n: u8) -> Device {
    for _ in 0..100 {
        let device = proxy.device(n).await;
        let asked = ask(&device, "OPTIONS * HTTP/1.1\r\nhost: p\r\n\r\n").await;
        if asked.is_ok() {
            return device;
        }
    }
    panic!("no device is let in to ask");
}

#[tokio::test]
async fn what_a_client_of_tcp_says_of_an_invitation_is_not_heard() {
    use tokio::net::TcpStream;
    let state = tempfile::tempdir().unwrap();
    let journal = Arc::new(Journal::open(&state.path().join("journal")).unwrap());
    let config = ProxConfig {
        state_dir: state.path().to_owned(),
        allow_addresses: vec!["127.0.0.0/8".parse().unwrap()],
        ..Default::default()
    };
    let prox = Prox::with_journal(config, Arc::new(SystemResolver), Some(journal)).unwrap();
    let secret = prox
        .clients()
        .invite(None, Duration::from_secs(600))
        .unwrap();
    let listener = cedos_prox::TcpFlowListener::bind("127.0.0.1:0".parse().unwrap(), prox.clone());
    let listener = listener.unwrap();
    let at = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, prox.clone(), std::future::pending()));
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(enrol(&secret.0).as_bytes()).await.unwrap();
    let mut answer = String::new();
    within(stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 501"), "{answer}");
    assert!(prox.clients().enrolled().is_empty() && prox.clients().is_inviting());
}
