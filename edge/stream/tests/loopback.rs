//! Streams over real sockets on loopback: by TLS, by plain HTTP as from a reverse proxy, through an
//! HTTP proxy, and to hosts that are not D2TP servers.

use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use d2tp_stream::{
    ConnectError, PacketReceiver, PacketSender, StreamIdentity, StreamTarget, TcpStreamAcceptor,
    connect,
};
use hyper_util::client::proxy::matcher::{Intercept, Matcher};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// How long an exchange on loopback may take on a busy machine.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(9);

fn target(port: u16) -> StreamTarget {
    StreamTarget {
        host: "localhost".into(),
        port,
    }
}

fn socket(_: SocketAddr) -> std::io::Result<TcpSocket> {
    TcpSocket::new_v4()
}

/// A server that sends each packet back.
async fn echo() -> Result<SocketAddr> {
    let identity = StreamIdentity::self_signed("localhost")?;
    let acceptor = TcpStreamAcceptor::bind("127.0.0.1:0".parse()?, identity)?;
    let address = acceptor.local_addr()?;
    tokio::spawn(async move {
        while let Ok((tcp, _)) = acceptor.accept().await {
            let identity = acceptor.identity();
            tokio::spawn(async move {
                let Ok((mut sender, mut receiver)) = identity.answer(tcp).await else {
                    return;
                };
                while let Ok(mut batch) = receiver.recv().await {
                    let packets: Vec<Vec<u8>> = batch.packets().map(|p| p.to_vec()).collect();
                    for packet in packets {
                        if sender.send(&packet, packet.len()).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    Ok(address)
}

async fn exchange(halves: (PacketSender, PacketReceiver)) -> Result<()> {
    let (mut sender, mut receiver) = halves;
    let sent: Vec<u8> = (0..20_000u32).map(|n| (n % 251) as u8).collect();
    sender.send(&sent, 9_000).await?;
    let mut sizes = Vec::new();
    let mut back = Vec::new();
    while back.len() < sent.len() {
        for packet in receiver.recv().await?.packets() {
            sizes.push(packet.len());
            back.extend_from_slice(packet);
        }
    }
    anyhow::ensure!(sizes == [9_000, 9_000, 2_000], "{sizes:?}");
    anyhow::ensure!(back == sent, "the packets changed");
    Ok(())
}

// R-STREAM-6
#[tokio::test]
async fn packets_cross_a_stream_with_a_certificate_nobody_signed() -> Result<()> {
    let server = echo().await?;
    let halves = connect(&target(server.port()), server, None, socket).await?;
    exchange(halves).await
}

// A message is delivered when all of it has arrived, so on slow networks packets must not wait for many
// others.
#[tokio::test]
async fn a_large_batch_arrives_in_messages_of_few_packets() -> Result<()> {
    let identity = StreamIdentity::self_signed("localhost")?;
    let acceptor = TcpStreamAcceptor::bind("127.0.0.1:0".parse()?, identity)?;
    let address = acceptor.local_addr()?;
    let receiving = tokio::spawn(async move {
        let (tcp, _) = acceptor.accept().await?;
        let (_sender, mut receiver) = acceptor.identity().answer(tcp).await?;
        let mut messages = Vec::new();
        while messages.iter().sum::<usize>() < 9 {
            messages.push(receiver.recv().await?.packets().count());
        }
        anyhow::Ok(messages)
    });
    let halves = connect(&target(address.port()), address, None, socket).await?;
    let (mut sender, _receiver) = halves;
    sender.send(&[7; 62_804], 8_972).await?;
    sender.send(&[8; 60], 30).await?;
    assert_eq!(receiving.await??, [2, 2, 2, 1, 2]);
    Ok(())
}

/// The HTTP proxy of this address, for every host.
fn intercept(proxy: &str) -> Result<Intercept> {
    let matcher = Matcher::builder().https(proxy).build();
    let host = "https://prox.invalid:443/".parse()?;
    matcher
        .intercept(&host)
        .context("the proxy is for this host")
}

/// Starts an HTTP proxy that connects to the requested host, once; returns the requests that it
/// received.
async fn http_proxy(
    to: SocketAddr,
) -> Result<(SocketAddr, tokio::task::JoinHandle<Result<String>>)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let serving = tokio::spawn(async move {
        let (mut client, _) = listener.accept().await?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
        }
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await?;
        let mut server = TcpStream::connect(to).await?;
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut server).await });
        Ok(String::from_utf8(head)?)
    });
    Ok((address, serving))
}

#[tokio::test]
async fn a_stream_goes_through_an_http_proxy_by_connect() -> Result<()> {
    let server = echo().await?;
    let (proxy, serving) = http_proxy(server).await?;
    let target = StreamTarget {
        host: "prox.invalid".into(),
        port: 443,
    };
    let by = intercept(&format!("http://me:secret@{proxy}"))?;
    // An address that only the HTTP proxy can reach, so that no connection bypasses it.
    let nowhere = "127.0.0.1:1".parse()?;
    exchange(connect(&target, nowhere, Some(&by), socket).await?).await?;
    let asked = serving.await??;
    assert!(
        asked.starts_with("CONNECT prox.invalid:443 HTTP/1.1\r\n"),
        "{asked}"
    );
    assert!(
        asked.to_lowercase().contains("proxy-authorization: basic "),
        "{asked}"
    );
    Ok(())
}

// A device takes the settings of one network to others.
#[tokio::test]
async fn a_server_is_reached_without_an_http_proxy_that_does_not_answer() -> Result<()> {
    let server = echo().await?;
    let silent = SilentListener::start()?;
    let by = intercept(&format!("http://{}", silent.address))?;
    let place = target(server.port());
    let opening = connect(&place, server, Some(&by), socket);
    exchange(tokio::time::timeout(PATIENCE, opening).await??).await?;

    // Where a portal answers instead of the server, that is told.
    let page = TcpListener::bind("127.0.0.1:0").await?;
    let at = page.local_addr()?;
    tokio::spawn(async move {
        while let Ok((mut tcp, _)) = page.accept().await {
            let _ = tcp.write_all(b"HTTP/1.1 302 Found\r\n\r\n").await;
        }
    });
    match connect(&target(at.port()), at, Some(&by), socket).await {
        Err(ConnectError::Foreign(_)) => Ok(()),
        Err(error) => bail!("{error}"),
        Ok(_) => bail!("a page is no stream"),
    }
}

/// A port that drops every SYN, as a network does that has no such host.
struct SilentListener {
    address: SocketAddr,
    _listener: std::net::TcpListener,
    _waiting: Vec<std::net::TcpStream>,
}

impl SilentListener {
    fn start() -> Result<SilentListener> {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
        socket.bind(&"127.0.0.1:0".parse::<SocketAddr>()?.into())?;
        socket.listen(0)?;
        let listener = std::net::TcpListener::from(socket);
        let address = listener.local_addr()?;
        // Nobody accepts those, so there is no room for more.
        let mut waiting = Vec::new();
        let short = std::time::Duration::from_millis(100);
        while let Ok(tcp) = std::net::TcpStream::connect_timeout(&address, short) {
            waiting.push(tcp);
        }
        Ok(SilentListener {
            address,
            _listener: listener,
            _waiting: waiting,
        })
    }
}

// R-STREAM-7
#[tokio::test]
async fn a_portal_that_answers_everything_with_its_page_is_named() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let heard = tokio::spawn(async move {
        let (mut tcp, _) = listener.accept().await?;
        let mut heard = vec![0; 4_096];
        let n = tcp.read(&mut heard).await?;
        tcp.write_all(b"HTTP/1.1 302 Found\r\nlocation: http://portal.invalid/\r\n\r\n")
            .await?;
        anyhow::Ok(heard[..n].to_vec())
    });
    match connect(&target(address.port()), address, None, socket).await {
        Err(ConnectError::Foreign(_)) => {}
        Err(other) => bail!("{other:?}"),
        Ok(_) => bail!("that was no stream"),
    }
    // R-STREAM-7: it received only the beginning of TLS.
    assert_eq!(heard.await??[0], 0x16);
    Ok(())
}

#[tokio::test]
async fn a_web_server_that_has_no_streams_is_named_with_its_status() -> Result<()> {
    let identity = StreamIdentity::self_signed("localhost")?;
    let acceptor = TcpStreamAcceptor::bind("127.0.0.1:0".parse()?, identity)?;
    let address = acceptor.local_addr()?;
    let mut plain = TcpStream::connect(address).await?;
    tokio::spawn(async move {
        let (tcp, _) = acceptor.accept().await?;
        let _ = acceptor.identity().answer(tcp).await;
        anyhow::Ok(())
    });
    plain
        .write_all(
            b"GET /elsewhere HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
              sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        )
        .await?;
    let mut answer = String::new();
    plain.read_to_string(&mut answer).await?;
    assert!(answer.starts_with("HTTP/1.1 404"), "{answer}");
    Ok(())
}
