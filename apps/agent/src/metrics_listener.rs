//! Metrics over HTTP, for Prometheus: of the agent, and of `cedos prox`.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::socket_owner::ConnectionOwner;
use crate::unproven_connections::UnprovenConnections;

/// The most bytes of a request's header.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// The maximum number of simultaneous connections.
const CONNECTIONS_MAX: usize = 16; // a guess: a scraper has one
/// How long a request and its answer may take.
const ASK_MAX: Duration = Duration::from_secs(5);

/// A port at which metrics are read.
#[derive(Debug)]
pub struct MetricsListener {
    listener: TcpListener,
    /// Whether only this machine reaches the port, so that a request which names another comes from a web page.
    is_local: bool,
}

impl MetricsListener {
    /// Takes the port. Whoever reaches it may read the metrics.
    ///
    /// # Errors
    /// The address is not this machine's, or the port is in use.
    pub async fn bind(at: SocketAddr) -> anyhow::Result<MetricsListener> {
        let listener = TcpListener::bind(at).await;
        Ok(MetricsListener {
            listener: listener.with_context(|| format!("cannot listen for Prometheus at {at}"))?,
            is_local: at.ip().is_loopback(),
        })
    }

    /// The address that the listener is bound to.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Answers requests with what `render` returns, of this media type, until it is dropped. Clients are not
    /// authenticated, so a silent connection is closed in favour of others, first one of the user or host that has most.
    pub async fn serve(self, media_type: &'static str, render: impl Fn() -> String) {
        let unproven = UnprovenConnections::new(CONNECTIONS_MAX, ASK_MAX);
        let mut answering = FuturesUnordered::new();
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                Some(()) = answering.next() => continue,
            };
            match accepted {
                Ok((stream, _)) => {
                    let connection = unproven.admit(ConnectionOwner::of(&stream));
                    let render = &render;
                    answering.push(async move {
                        tokio::select! {
                            _ = answer(render, stream, media_type, self.is_local) => {}
                            () = connection.closed() => {}
                        }
                    });
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }
}

async fn answer(
    render: &impl Fn() -> String,
    mut stream: TcpStream,
    media_type: &str,
    is_local: bool,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read(&mut piece).await?;
        if read == 0 || head.len() > HEAD_BYTES_MAX {
            return Ok(());
        }
        head.extend_from_slice(&piece[..read]);
    }
    let (status, body) = match check_request(&String::from_utf8_lossy(&head), is_local) {
        Ok(()) => ("200 OK", render()),
        Err(status) => (status, String::new()),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {media_type}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

/// Checks that a request asks for the metrics, and to a port of this machine alone does not come from a web page: after
/// DNS rebinding a page still sends its own host name.
fn check_request(head: &str, is_local: bool) -> Result<(), &'static str> {
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    if words.next() != Some("GET") {
        return Err("405 Method Not Allowed");
    }
    if words.next() != Some("/metrics") {
        return Err("404 Not Found");
    }
    let host = lines
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| name.eq_ignore_ascii_case("host"))
        .map(|(_, value)| value.trim());
    let name = host.map(|host| match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    });
    match name {
        _ if !is_local => Ok(()),
        Some("127.0.0.1" | "localhost" | "::1") => Ok(()),
        _ => Err("403 Forbidden"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_by_its_own_name_is_answered() {
        let ask = |line: &str, host: &str| {
            check_request(&format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n"), true)
        };
        for host in ["127.0.0.1:9", "localhost", "[::1]:9"] {
            assert_eq!(ask("GET /metrics", host), Ok(()), "{host}");
        }
        assert_eq!(ask("GET /metrics", "evil.example"), Err("403 Forbidden"));
        assert_eq!(ask("GET /", "localhost"), Err("404 Not Found"));
        assert_eq!(
            ask("POST /metrics", "localhost"),
            Err("405 Method Not Allowed")
        );
        assert_eq!(
            check_request("GET /metrics HTTP/1.0\r\n\r\n", true),
            Err("403 Forbidden")
        );
    }

    #[tokio::test]
    async fn idle_connections_keep_nobody_out() {
        let listener = MetricsListener::bind(([127, 0, 0, 1], 0).into()).await;
        let listener = listener.unwrap();
        let at = listener.local_addr().unwrap();
        let ask = async {
            let mut idle = Vec::new();
            for _ in 0..5 * CONNECTIONS_MAX {
                idle.push(TcpStream::connect(at).await.unwrap());
            }
            let mut stream = TcpStream::connect(at).await.unwrap();
            let request = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        let answer = tokio::select! {
            () = listener.serve("text/plain", || "figures".to_owned()) => unreachable!(),
            answer = tokio::time::timeout(ASK_MAX / 2, ask) => answer,
        };
        let answer = answer.expect("long before the idle ones end");
        assert!(answer.ends_with("figures"), "{answer}");
    }
}
