//! The transports that are measured: one file each, all behind one trait.
//!
//! A new one is a file here, an implementation of [`BenchPeer`], and a line in [`all`].

mod bench_peer;
mod d2tp;
mod d2tp_sockets;
#[cfg(feature = "peers-all")]
mod noq;
mod quinn;
#[cfg(feature = "peers-all")]
mod s2n_quic;
mod tcp;
mod tls;
mod udp;

use anyhow::{Result, bail};
use d2tp_driver::CongestionKind;

pub use bench_peer::BenchPeer;

/// Every transport of this build, in the order of the table.
pub fn all() -> Vec<Box<dyn BenchPeer>> {
    vec![
        Box::new(udp::Udp::plain()),
        Box::new(udp::Udp::sealed()),
        Box::new(tcp::Tcp::plain()),
        Box::new(tcp::Tcp::multipath()),
        Box::new(tls::TcpTls),
        Box::new(d2tp::D2tp::with(CongestionKind::Cubic)),
        #[cfg(feature = "peers-all")]
        Box::new(s2n_quic::S2nQuic),
        Box::new(quinn::Quinn),
        #[cfg(feature = "peers-all")]
        Box::new(noq::Noq),
    ]
}

/// Variants of some peers, which are selected by name.
fn variants() -> Vec<Box<dyn BenchPeer>> {
    vec![
        Box::new(d2tp::D2tp::with(CongestionKind::NewReno)),
        Box::new(d2tp::D2tp::with(CongestionKind::Bbr)),
        Box::new(d2tp::D2tp::held()),
        Box::new(d2tp_sockets::D2tpSockets),
        Box::new(tcp::Tcp::bbr()),
    ]
}

/// The transport called `name`.
///
/// # Errors
/// This build has none of that name; the error lists the names.
pub fn named(name: &str) -> Result<Box<dyn BenchPeer>> {
    let every = || all().into_iter().chain(variants());
    if let Some(peer) = every().find(|peer| peer.name() == name) {
        return Ok(peer);
    }
    if let Some(tcp) = tcp::Tcp::named(name) {
        return Ok(Box::new(tcp));
    }
    let known: Vec<_> = every().map(|peer| peer.name()).collect();
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

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::Arc;

    use super::*;
    use crate::meter::ProcessMeter;
    use crate::receiver_info::ReceiverInfo;

    #[test]
    fn an_unknown_peer_is_refused_with_the_known_ones() {
        let error = named("carrier-pigeon").err().expect("there is none");
        assert!(error.to_string().contains("tcp-tls"), "{error}");
    }

    /// Transfers over real sockets on the machine's own loopback, until a number of bytes. A
    /// receiver whose sender failed waits forever, so it is not waited for.
    fn carry(peer: Arc<dyn BenchPeer>) -> Result<()> {
        const BYTES: u64 = 2 << 20;
        let (sent, received) = (
            ProcessMeter::counting_to(u64::MAX),
            ProcessMeter::counting_to(BYTES),
        );
        let (tell, card) = std::sync::mpsc::channel();
        let (ended, endings) = std::sync::mpsc::channel();
        let (receiver, meter, told) = (peer.clone(), received.clone(), ended.clone());
        std::thread::spawn(move || {
            let outcome = receiver.serve([127, 0, 0, 1].into(), &meter, &mut |card| {
                tell.send(card)?;
                Ok(())
            });
            let _ = told.send((true, outcome));
        });
        let (sender, meter) = (peer.clone(), sent.clone());
        std::thread::spawn(move || {
            if let Ok(card) = card.recv() {
                let _ = ended.send((false, sender.send(&card, &meter)));
            }
        });
        loop {
            match endings.recv()? {
                (true, outcome) => {
                    sent.stop();
                    outcome?;
                    break;
                }
                // The receiver ends first, so an error after its last byte is no fault.
                (false, _) if received.is_over() => {}
                (false, Ok(())) => bail!("{} stopped sending", peer.name()),
                (false, Err(error)) => return Err(error),
            }
        }
        anyhow::ensure!(received.bytes() >= BYTES && sent.bytes() > 0);
        Ok(())
    }

    #[test]
    fn every_peer_carries_a_flow_over_loopback() {
        for peer in all().into_iter().chain(variants()) {
            let name = peer.name();
            match peer.missing() {
                None => carry(peer.into()).unwrap_or_else(|error| panic!("{name}: {error:#}")),
                Some(reason) => eprintln!("{name} not tried: {reason}"),
            }
        }
    }

    #[test]
    fn a_sender_that_fails_before_it_connects_is_a_failure_and_no_wait() {
        struct Mute;
        impl BenchPeer for Mute {
            fn name(&self) -> &'static str {
                "mute"
            }
            fn serve(
                &self,
                address: IpAddr,
                _: &Arc<ProcessMeter>,
                ready: &mut dyn FnMut(ReceiverInfo) -> Result<()>,
            ) -> Result<()> {
                let listener = std::net::TcpListener::bind((address, 0))?;
                ready(ReceiverInfo {
                    address: listener.local_addr()?,
                    identity: Vec::new(),
                })?;
                listener.accept()?;
                Ok(())
            }
            fn send(&self, _: &ReceiverInfo, _: &Arc<ProcessMeter>) -> Result<()> {
                bail!("no voice")
            }
        }
        let error = carry(Arc::new(Mute)).expect_err("nothing was sent");
        assert_eq!(error.to_string(), "no voice");
    }

    #[test]
    fn names_are_unique() {
        let every = all().into_iter().chain(variants());
        let mut names: Vec<_> = every.map(|peer| peer.name()).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
