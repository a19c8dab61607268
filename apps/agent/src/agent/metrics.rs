//! The figures for Prometheus, over HTTP on a loopback port.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::state::{Agent, lock};
use crate::unproven_connections::UnprovenConnections;

/// The most bytes of a request's header.
const HEAD_BYTES_MAX: usize = 8 * 1024;
/// Connections at once.
const CONNECTIONS_MAX: usize = 16; // a guess: a scraper has one
/// How long a request and its answer may take.
const ASK_MAX: Duration = Duration::from_secs(5);

/// Takes the port.
///
/// # Errors
/// It is not this machine's own, or somebody else has it.
pub(super) async fn listen(at: SocketAddr) -> anyhow::Result<TcpListener> {
    if !at.ip().is_loopback() {
        bail!("{at} is not a loopback address; metrics are for this machine only");
    }
    let listener = TcpListener::bind(at).await;
    listener.with_context(|| format!("cannot listen for Prometheus at {at}"))
}

/// Answers requests. Nobody proves anything here, so a connection that says nothing gives way to others.
pub(super) async fn serve(agent: Arc<Agent>, listener: TcpListener) {
    serve_with(listener, move || {
        lock(&agent.meter).render(&agent.state_counts())
    })
    .await;
}

async fn serve_with(listener: TcpListener, render: impl Fn() -> String + 'static) {
    let (render, unproven) = (
        Rc::new(render),
        UnprovenConnections::new(CONNECTIONS_MAX, ASK_MAX),
    );
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let (render, connection) = (render.clone(), unproven.admit());
                tokio::task::spawn_local(async move {
                    tokio::select! {
                        _ = answer(&*render, stream) => {}
                        () = connection.closed() => {}
                    }
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn answer(render: &impl Fn() -> String, mut stream: TcpStream) -> std::io::Result<()> {
    let mut head = Vec::new();
    let mut piece = [0; 1024];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let read = stream.read(&mut piece).await?;
        if read == 0 || head.len() > HEAD_BYTES_MAX {
            return Ok(());
        }
        head.extend_from_slice(&piece[..read]);
    }
    let (status, body) = match check_request(&String::from_utf8_lossy(&head)) {
        Ok(()) => ("200 OK", render()),
        Err(status) => (status, String::new()),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(answer.as_bytes()).await?;
    stream.shutdown().await
}

/// Checks that a request asks for the metrics, and does not come from a web page: after DNS rebinding a
/// page still sends its own host name.
fn check_request(head: &str) -> Result<(), &'static str> {
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
            check_request(&format!("{line} HTTP/1.1\r\nHost: {host}\r\n\r\n"))
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
            check_request("GET /metrics HTTP/1.0\r\n\r\n"),
            Err("403 Forbidden")
        );
    }

    #[tokio::test]
    async fn idle_connections_keep_nobody_out() {
        let listener = listen(([127, 0, 0, 1], 0).into()).await.unwrap();
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
        let served = tokio::task::LocalSet::new();
        let answer = served.run_until(async {
            tokio::select! {
                () = serve_with(listener, || "figures".to_owned()) => unreachable!(),
                answer = tokio::time::timeout(ASK_MAX / 2, ask) => answer,
            }
        });
        let answer = answer.await.expect("long before the idle ones end");
        assert!(answer.ends_with("figures"), "{answer}");
    }
}
