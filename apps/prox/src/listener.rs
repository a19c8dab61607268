//! The door for clients without D2TP: an HTTP proxy on a TCP port, which takes kernel MPTCP as well.
//!
//! ```text
//!  any program ── TCP or MPTCP ──▶ listener.rs ──▶ stream_flow.rs ──▶ flow.rs, as for D2TP
//! ```
//!
//! With MPTCP the connection outlives the loss of a network, with nothing but the client's kernel. Whoever
//! comes has no key, so networks are let in, not keys: nobody unless named. Anybody else's connection is
//! reset before a byte of it is read. To the ledger and the shelf an address is a client, under a key that
//! stands for it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::HostKey;
use d2tp_tcp::multipath;
use tokio::net::TcpListener;

use crate::prox::Prox;
use crate::serve::FlowListener;
use crate::stream_flow::StreamFlow;

/// What follows the address in a key that stands for one. Nobody has the private key that would belong
/// to it: that is as hard as finding anybody else's.
const ADDRESS_MARK: &[u8; 16] = b"an address only\0";
/// How long to wait when the system gives no more connections: some may end meanwhile.
const PATIENCE: Duration = Duration::from_millis(50);

/// A TCP port where flows come in.
pub struct TcpFlowListener {
    listener: TcpListener,
    prox: Arc<Prox>,
    flows: u64,
}

impl TcpFlowListener {
    /// Listens for those whom the proxy's configuration lets in by address.
    ///
    /// # Errors
    /// The port cannot be had.
    pub fn bind(at: SocketAddr, prox: Arc<Prox>) -> std::io::Result<TcpFlowListener> {
        let listener = multipath::listen(at)?;
        listener.set_nonblocking(true)?;
        Ok(TcpFlowListener {
            listener: TcpListener::from_std(listener)?,
            prox,
            flows: 0,
        })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What the system says.
    pub fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl FlowListener for TcpFlowListener {
    type Flow = StreamFlow;

    async fn accept(&mut self) -> Option<StreamFlow> {
        loop {
            let (stream, from) = match self.listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the TCP port");
                    tokio::time::sleep(PATIENCE).await;
                    continue;
                }
            };
            let from = from.ip().to_canonical();
            if !self.prox.config.admits(from) {
                tracing::debug!(%from, "refused a client");
                let _ = multipath::reset(stream.as_fd());
                continue;
            }
            let _ = stream.set_nodelay(true);
            self.flows += 1;
            tracing::debug!(%from, flow = self.flows, "let in");
            return Some(StreamFlow::new(stream, self.flows, key_of(from)));
        }
    }
}

/// The key that stands for an address.
fn key_of(address: IpAddr) -> HostKey {
    let words = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut key = [0; 32];
    key[..16].copy_from_slice(&words.octets());
    key[16..].copy_from_slice(ADDRESS_MARK);
    key
}

/// The address that a key stands for, if it does.
pub(crate) fn address_of(key: &HostKey) -> Option<IpAddr> {
    let (address, mark) = key.split_at(16);
    let octets: [u8; 16] = address.try_into().ok()?;
    (mark == ADDRESS_MARK).then(|| IpAddr::V6(Ipv6Addr::from(octets)).to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_stands_for_one_address_and_an_ordinary_one_for_none() {
        for address in ["192.0.2.7", "2001:db8::7"] {
            let address: IpAddr = address.parse().unwrap();
            assert_eq!(address_of(&key_of(address)), Some(address));
        }
        assert_eq!(address_of(&[7; 32]), None);
    }
}
