//! The transports that are measured: one file each, all behind one trait.
//!
//! A new one is a file here, an implementation of [`Peer`], and a line in [`all`].

mod d2tp;
#[cfg(feature = "peers-all")]
mod noq;
mod quinn;
#[cfg(feature = "peers-all")]
mod s2n_quic;
mod tcp;
mod tls;
mod udp;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::meter::Meter;
use crate::process::Card;

/// Bytes an application hands over or asks for in one call, where the transport has no unit of
/// its own. Single readings for TCP on lo: 30 Gb/s with 64 kB, 38 with 256 kB, 47 with 4 MB; what
/// copies through ordinary programs looks like the middle one.
pub const CALL_BYTES: usize = 256 << 10;

/// How often an asynchronous peer looks whether the measurement is over.
const LOOK: Duration = Duration::from_millis(50);

/// A transport that carries one flow of meaningless payload from one process to another.
///
/// Both sides run until [`Meter::is_over`]; each counts payload, not headers. What a reader needs
/// to judge the figure (segment size, buffers, congestion control) goes to [`Meter::note`], read
/// back from the running connection rather than from the source.
pub trait Peer: Sync {
    /// The name on the command line, in tables and in JSON.
    fn name(&self) -> &'static str;

    /// Why this machine cannot run it, if it cannot.
    fn missing(&self) -> Option<String> {
        None
    }

    /// Listens on any port of `address`, hands `ready` what a sender needs, takes one flow and
    /// counts its bytes as the application gets them.
    fn serve(
        &self,
        address: IpAddr,
        meter: &Arc<Meter>,
        ready: &mut dyn FnMut(Card) -> Result<()>,
    ) -> Result<()>;

    /// Opens one flow and fills it, counting bytes as the transport accepts them.
    fn send(&self, card: &Card, meter: &Arc<Meter>) -> Result<()>;
}

/// Every transport of this build, in the order of the table.
pub fn all() -> Vec<Box<dyn Peer>> {
    vec![
        Box::new(udp::Udp),
        Box::new(tcp::Tcp::plain()),
        Box::new(tcp::Tcp::multipath()),
        Box::new(tls::TcpTls),
        Box::new(d2tp::D2tp),
        #[cfg(feature = "peers-all")]
        Box::new(s2n_quic::S2nQuic),
        Box::new(quinn::Quinn),
        #[cfg(feature = "peers-all")]
        Box::new(noq::Noq),
    ]
}

/// The transport called `name`.
///
/// # Errors
/// When this build has none of that name; says which it has.
pub fn named(name: &str) -> Result<Box<dyn Peer>> {
    if let Some(peer) = all().into_iter().find(|peer| peer.name() == name) {
        return Ok(peer);
    }
    let known: Vec<_> = all().iter().map(|peer| peer.name()).collect();
    bail!(
        "no peer is called {name:?}; this build has {}{}",
        known.join(", "),
        if cfg!(feature = "peers-all") {
            ""
        } else {
            " (s2n-quic and noq need --features peers-all)"
        }
    )
}

/// Runs an asynchronous peer on one thread, since its process has one core.
fn on_this_thread(flow: impl Future<Output = Result<()>>) -> Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(flow)
}

/// Runs `flow` until it ends or the measurement is over. The other process may leave without a
/// word, and nothing else would wake a flow that waits for it.
async fn measured(meter: &Meter, flow: impl Future<Output = Result<()>>) -> Result<()> {
    let over = async {
        while !meter.is_over() {
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        outcome = flow => outcome,
        () = over => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_peer_is_refused_with_the_known_ones() {
        let error = named("carrier-pigeon").err().expect("there is none");
        assert!(error.to_string().contains("tcp-tls"), "{error}");
    }

    /// Real sockets on the machine's own loopback; ends by bytes, not by time.
    fn carries_a_flow(peer: &dyn Peer) {
        const BYTES: u64 = 2 << 20;
        let (sent, received) = (Meter::counting_to(u64::MAX), Meter::counting_to(BYTES));
        let (tell, card) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let sent = &sent;
            scope.spawn(move || {
                let Ok(card) = card.recv() else { return };
                // The receiver leaves first, so an error at the end is no fault.
                let _ = peer.send(&card, sent);
            });
            let outcome = peer.serve([127, 0, 0, 1].into(), &received, &mut |card| {
                tell.send(card)?;
                Ok(())
            });
            sent.stop();
            drop(tell);
            outcome.unwrap_or_else(|error| panic!("{}: {error:#}", peer.name()));
        });
        assert!(received.bytes() >= BYTES, "{}", peer.name());
        assert!(sent.bytes() > 0, "{}", peer.name());
    }

    #[test]
    fn every_peer_carries_a_flow_over_loopback() {
        for peer in all() {
            match peer.missing() {
                None => carries_a_flow(peer.as_ref()),
                Some(reason) => eprintln!("{} not tried: {reason}", peer.name()),
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = all().iter().map(|peer| peer.name()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
