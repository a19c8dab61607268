//! A proxy of connections that holds every byte for a while, as a distant or an overloaded server does.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

/// A listener whose connections lead to a server, with a latency each way that a test may change. It and its connections
/// end when this is dropped.
pub struct LatencyProxy {
    latency: watch::Sender<Duration>,
    serving: JoinHandle<()>,
}

impl LatencyProxy {
    /// Listens at a port of the system's choice, and connects to `server`.
    pub async fn to_tcp(server: SocketAddr, latency: Duration) -> (LatencyProxy, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let (latency, changes) = watch::channel(latency);
        let serving = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let changes = changes.clone();
                connections.spawn(async move {
                    if let Ok(server) = TcpStream::connect(server).await {
                        let (client, server) = (client.into_split(), server.into_split());
                        carry_both(client, server, changes).await;
                    }
                });
            }
        });
        (LatencyProxy { latency, serving }, address)
    }

    /// Listens at the Unix socket `at`, and connects to the one of `server`.
    pub fn to_unix(server: PathBuf, at: &Path, latency: Duration) -> LatencyProxy {
        let listener = UnixListener::bind(at).expect("a socket");
        let (latency, changes) = watch::channel(latency);
        let serving = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (changes, server) = (changes.clone(), server.clone());
                connections.spawn(async move {
                    if let Ok(server) = UnixStream::connect(server).await {
                        let (client, server) = (client.into_split(), server.into_split());
                        carry_both(client, server, changes).await;
                    }
                });
            }
        });
        LatencyProxy { latency, serving }
    }

    /// Holds bytes for `latency` from now on, those that are held already included.
    pub fn set_latency(&self, latency: Duration) {
        self.latency.send_replace(latency);
    }
}

impl Drop for LatencyProxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// Carries bytes both ways until either end has closed its connection.
async fn carry_both<R, W>(client: (R, W), server: (R, W), latency: watch::Receiver<Duration>)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let up = carry(client.0, server.1, latency.clone());
    let down = carry(server.0, client.1, latency);
    tokio::join!(up, down);
}

async fn carry<R, W>(mut from: R, mut to: W, mut latency: watch::Receiver<Duration>)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let (arrived, mut held) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let reading = async move {
        let mut bytes = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut bytes).await {
            if arrived
                .send((Instant::now(), bytes[..length].to_vec()))
                .is_err()
            {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((at, bytes)) = held.recv().await {
            until_due(at, &mut latency).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
        // The other end may be gone.
        let _ = to.shutdown().await;
    };
    tokio::join!(reading, writing);
}

/// Waits until what arrived `at` that time has been held for the latency.
async fn until_due(at: Instant, latency: &mut watch::Receiver<Duration>) {
    loop {
        let due = at + *latency.borrow_and_update();
        tokio::select! {
            // sleep: the latency is what this proxy is for
            () = tokio::time::sleep_until(due) => return,
            changed = latency.changed() => {
                if changed.is_err() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_are_held_as_long_as_the_latency_says_and_arrive_in_order() {
        let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let latency = Duration::from_millis(50);
        let (proxy, at) = LatencyProxy::to_tcp(server.local_addr().unwrap(), latency).await;
        let mut client = TcpStream::connect(at).await.unwrap();
        let (mut behind, _) = server.accept().await.unwrap();
        let began = Instant::now();
        client.write_all(b"ask").await.unwrap();
        let mut read = [0; 3];
        behind.read_exact(&mut read).await.unwrap();
        assert!(began.elapsed() >= latency);
        proxy.set_latency(Duration::from_secs(3600));
        behind.write_all(b"an").await.unwrap();
        behind.write_all(b"swer").await.unwrap();
        proxy.set_latency(Duration::ZERO);
        drop(behind);
        let mut answer = Vec::new();
        crate::wait::within(client.read_to_end(&mut answer))
            .await
            .unwrap();
        assert_eq!(answer, b"answer");
    }
}
