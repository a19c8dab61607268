//! Clients without D2TP: the proxy's TCP port, over TCP and over kernel MPTCP.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig, ProxStartError, TcpFlowListener, serve};
use d2tp_tcp::multipath;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// A proxy that listens for TCP and MPTCP from loopback addresses, except 127.0.0.9.
pub struct Served {
    pub prox: Arc<Prox>,
    pub at: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<()>,
}

impl Served {
    fn new() -> Served {
        Served::with(config())
    }

    /// With these settings, but for who may come.
    pub fn with(config: ProxConfig) -> Served {
        let prox = Prox::new(ProxConfig {
            allow_any_client: false,
            allow_addresses: vec!["127.0.0.0/29".parse().unwrap()],
            // More than a busy machine needs for requests that have come.
            stop_grace: Duration::from_secs(2),
            ..config
        })
        .unwrap();
        let door = TcpFlowListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), prox.clone())
            .unwrap();
        let at = door.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(serve(door, prox.clone(), async {
            let _ = stopped.await;
        }));
        Served {
            prox,
            at,
            stop: Some(stop),
            running,
        }
    }

    /// A client's connection, over MPTCP if that is requested and available.
    async fn connect(&self, multipath: bool) -> Option<TcpStream> {
        if !multipath {
            return Some(TcpStream::connect(self.at).await.unwrap());
        }
        let at = self.at;
        let connected = tokio::task::spawn_blocking(move || multipath::connect(at));
        let stream = match connected.await.unwrap() {
            Ok(stream) => stream,
            Err(error) => {
                eprintln!("not tried, this kernel has no MPTCP: {error}");
                return None;
            }
        };
        stream.set_nonblocking(true).unwrap();
        Some(TcpStream::from_std(stream).unwrap())
    }

    /// Has the proxy accept nothing more.
    pub fn begin_stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits until the proxy has released all memory.
    async fn end(self) {
        let prox = self.prox.clone();
        self.stop().await;
        assert_eq!(prox.holdings(), Default::default());
    }

    /// Waits until the proxy serves nothing more.
    pub async fn stop(mut self) {
        if self.stop.is_some() {
            self.begin_stop();
        }
        tokio::time::timeout(PATIENCE, self.running)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(self.prox.holdings().flows, 0);
    }
}

/// The bytes that a client receives until the end, and whether the connection ended cleanly.
async fn rest(stream: &mut TcpStream) -> (Vec<u8>, bool) {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes)).await;
    let clean = read.expect("an end in time").is_ok();
    (bytes, clean)
}

#[tokio::test]
async fn an_ordinary_client_gets_the_whole_object_over_tcp_and_over_mptcp() {
    let data = pattern(3_000_000);
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n";
    let origin = ScriptedOrigin::fixed([head.as_slice(), &data].concat()).await;
    let served = Served::new();
    for by_mptcp in [false, true] {
        let Some(mut stream) = served.connect(by_mptcp).await else {
            continue;
        };
        let ask = get(&origin.url("/"), "Proxy-Connection: keep-alive\r\n");
        stream.write_all(ask.as_bytes()).await.unwrap();
        let mut first = [0; 1000];
        stream.read_exact(&mut first).await.unwrap();
        let subflows = multipath::subflows(stream.as_fd()).unwrap();
        assert_eq!(subflows.is_some(), by_mptcp, "{subflows:?}");
        let (more, clean) = rest(&mut stream).await;
        let answer = String::from_utf8_lossy(&first).into_owned();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
        assert!(more.ends_with(&data[1_000_000..]) && clean);
    }
    served.end().await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_never_looks_whole() {
    // Neither length nor validator: only the connection's end tells.
    let origin = ScriptedOrigin::play(|_, mut stream| async move {
        let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    let served = Served::new();
    for by_mptcp in [false, true] {
        let Some(mut stream) = served.connect(by_mptcp).await else {
            continue;
        };
        let ask = get(&origin.url("/"), "");
        stream.write_all(ask.as_bytes()).await.unwrap();
        let (bytes, clean) = rest(&mut stream).await;
        let said = String::from_utf8_lossy(&bytes);
        assert!(!clean, "over MPTCP: {by_mptcp}: {said}");
    }
    served.end().await;
}

#[tokio::test]
async fn a_tunnel_carries_both_ways_and_each_direction_ends_by_itself() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let origin = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all.to_ascii_uppercase()).await.unwrap();
    });
    let served = Served::new();
    let mut stream = served.connect(false).await.unwrap();
    let ask = format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\nhello");
    stream.write_all(ask.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let (bytes, clean) = rest(&mut stream).await;
    let said = String::from_utf8_lossy(&bytes);
    assert!(said.starts_with("HTTP/1.1 200 ") && clean, "{said}");
    assert!(said.ends_with("\r\n\r\nHELLO"), "{said}");
    origin.await.unwrap();
    served.end().await;
}

#[tokio::test]
async fn a_connection_that_was_made_before_the_stop_is_served() {
    let origin = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    let mut served = Served::new();
    let mut stream = served.connect(false).await.unwrap();
    let mut before = served.connect(false).await.unwrap();
    before.write_all(b"P").await.unwrap();
    // Let in, for the one after it was answered.
    let mut after = served.connect(false).await.unwrap();
    let ask = get(&origin.url("/"), "");
    after.write_all(ask.as_bytes()).await.unwrap();
    assert!(rest(&mut after).await.0.ends_with(b"ok"));
    served.begin_stop();
    // It accepts no more.
    let mut late = served.connect(false).await.unwrap();
    stream.write_all(ask.as_bytes()).await.unwrap();
    let (answer, clean) = rest(&mut stream).await;
    assert!(clean && answer.ends_with(b"ok"));
    before.write_all(b"UT").await.unwrap();
    drop(before);
    served.end().await;
    assert!(rest(&mut late).await.0.is_empty());
}

#[tokio::test]
async fn a_request_that_comes_in_pieces_is_one_of_http_1_whatever_its_first_bytes() {
    let origin = ScriptedOrigin::fixed("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").await;
    let served = Served::new();
    let propfind = format!("PROPFIND {} HTTP/1.1\r\nHost: h\r\n\r\n", origin.url("/"));
    for (ask, status) in [
        (propfind, "200"),
        (get(&origin.url("/"), ""), "200"),
        // The beginning of HTTP/2, and then another request.
        ("PRI * HTTP/1.1\r\nHost: h\r\n\r\n".to_owned(), "501"),
        ("PRI * HTTP/2.0\r\n\r\nGET / HTTP".to_owned(), "505"),
    ] {
        let mut stream = served.connect(false).await.unwrap();
        for byte in ask.as_bytes() {
            stream.write_all(&[*byte]).await.unwrap();
            tokio::task::yield_now().await;
        }
        let answer = String::from_utf8_lossy(&rest(&mut stream).await.0).into_owned();
        let wanted = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&wanted), "{ask}: {answer}");
    }
    served.end().await;
}

#[tokio::test]
async fn who_is_not_let_in_by_address_is_reset_before_a_word() {
    let served = Served::new();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, 9], 0))).unwrap();
    if let Ok(mut stream) = socket.connect(served.at).await {
        let ask = get("http://127.0.0.1/", "");
        let _ = stream.write_all(ask.as_bytes()).await;
        assert_eq!(rest(&mut stream).await, (Vec::new(), false));
    }
    served.end().await;
}

#[tokio::test]
async fn a_client_that_goes_away_gives_its_flow_back() {
    let origin = ScriptedOrigin::play(|_, mut stream| async move {
        let head = "HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        while stream.write_all(&[7; 10_000]).await.is_ok() {}
    })
    .await;
    let served = Served::new();
    let mut stream = served.connect(false).await.unwrap();
    stream
        .write_all(get(&origin.url("/"), "").as_bytes())
        .await
        .unwrap();
    stream.read_exact(&mut [0; 100_000]).await.unwrap();
    assert_eq!(served.prox.holdings().flows, 1);
    stream.set_zero_linger().unwrap();
    drop(stream);
    until(|| served.prox.holdings().flows == 0).await;
}

#[tokio::test]
async fn nobody_is_let_in_by_address_unless_a_network_is_named() {
    let nobody = ProxConfig {
        allow_any_client: false,
        ..config()
    };
    assert!(matches!(
        Prox::new(nobody).err(),
        Some(ProxStartError::NoClients)
    ));
    // Any key may come, and yet nobody without one.
    let prox = Prox::new(config()).unwrap();
    let door =
        TcpFlowListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), prox.clone()).unwrap();
    let at = door.local_addr().unwrap();
    let running = tokio::spawn(serve(door, prox, std::future::pending()));
    if let Ok(mut stream) = TcpStream::connect(at).await {
        assert_eq!(rest(&mut stream).await, (Vec::new(), false));
    }
    running.abort();
}
