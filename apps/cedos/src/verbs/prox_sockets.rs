//! The sockets of `cedos prox`: bound by itself, or passed by systemd (sd_listen_fds(3)) or by the process that it
//! replaces.
//!
//! ```text
//!  cedos-prox.socket ── LISTEN_FDS ──┐
//!  the running proxy ── SCM_RIGHTS ──┼─▶ PassedSockets ── of an option's address? ─▶ used
//!                                    │                └─ of none? ───────────────▶ closed, with a warning
//!  else: bound as the option says ◀──┘
//! ```

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use anyhow::{Context, bail};
use cedos_prox::PassedTunnels;
use listenfd::ListenFd;
use socket2::{Socket, Type};

/// Sockets that were bound before this process started.
#[derive(Debug, Default)]
pub struct PassedSockets {
    sockets: Vec<(SocketAddr, Type, Socket)>,
    tunnels: Option<PassedTunnels>,
}

impl PassedSockets {
    /// The sockets that systemd passes, and the tunnels that it kept; none if it passes none.
    ///
    /// # Errors
    /// One is not an IP socket.
    pub fn from_systemd() -> anyhow::Result<PassedSockets> {
        let tunnels = PassedTunnels::from_manager();
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut listed = ListenFd::from_env();
        let mut sockets = Vec::new();
        for index in 0..listed.len() {
            if names.next().is_some_and(PassedTunnels::is_name_of_one) {
                continue;
            }
            // Each is UDP or TCP: the other kind is refused, and stays.
            if let Ok(Some(udp)) = listed.take_udp_socket(index) {
                sockets.push(udp.into());
            } else {
                let passed = listed.take_tcp_listener(index);
                let passed = passed.context("systemd passes a socket of another kind")?;
                sockets.extend(passed.map(OwnedFd::from));
            }
        }
        let passed = PassedSockets::of(sockets)?;
        Ok(PassedSockets { tunnels, ..passed })
    }

    /// The tunnels that systemd kept, if it kept any.
    pub fn take_tunnels(&mut self) -> Option<PassedTunnels> {
        self.tunnels.take()
    }

    /// Takes sockets that another process passed.
    ///
    /// # Errors
    /// One is not an IP socket, or serves both families.
    pub fn of(sockets: Vec<OwnedFd>) -> anyhow::Result<PassedSockets> {
        let mut passed = PassedSockets::default();
        for socket in sockets.into_iter().map(Socket::from) {
            let address = socket.local_addr()?.as_socket();
            let address = address.context("a passed socket has no IP address")?;
            let kind = socket.r#type()?;
            if kind == Type::DGRAM && address.ip().is_unspecified() && is_dual(&address, &socket)? {
                bail!(
                    "the passed UDP socket at {address} serves IPv4 too: pass one for each family \
                     (BindIPv6Only=ipv6-only, and ListenDatagram=0.0.0.0:{})",
                    address.port()
                );
            }
            passed.sockets.push((address, kind, socket));
        }
        Ok(passed)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.sockets.is_empty()
    }

    /// The UDP sockets for an option that names this address.
    pub fn take_udp(&mut self, at: SocketAddr) -> Vec<UdpSocket> {
        let taken = self.take(at, Type::DGRAM);
        taken.into_iter().map(UdpSocket::from).collect()
    }

    /// The TCP listeners for an option that names this address.
    pub fn take_tcp(&mut self, at: SocketAddr) -> Vec<TcpListener> {
        let taken = self.take(at, Type::STREAM);
        taken.into_iter().map(TcpListener::from).collect()
    }

    fn take(&mut self, at: SocketAddr, kind: Type) -> Vec<Socket> {
        let is_meant = |(address, is, _): &mut (SocketAddr, Type, Socket)| {
            let is_port = at.port() == 0 || address.port() == at.port();
            let is_both = at.ip().is_unspecified() && at.is_ipv6();
            let is_v4 = is_both && address.ip() == IpAddr::V4(Ipv4Addr::UNSPECIFIED);
            *is == kind && is_port && (address.ip() == at.ip() || is_v4)
        };
        let taken = self.sockets.extract_if(.., is_meant);
        taken.map(|(_, _, socket)| socket).collect()
    }

    /// Warns of sockets that no option named, and closes them.
    pub fn close_unused(&mut self) {
        for (address, kind, _) in self.sockets.drain(..) {
            let protocol = if kind == Type::DGRAM { "UDP" } else { "TCP" };
            tracing::warn!(%address, protocol, "a socket that was passed is not used: no option names its address");
        }
    }
}

/// Whether an IPv6 socket receives IPv4 as well.
fn is_dual(address: &SocketAddr, socket: &Socket) -> io::Result<bool> {
    Ok(address.is_ipv6() && !socket.only_v6()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn udp(at: &str) -> OwnedFd {
        UdpSocket::bind(at).unwrap().into()
    }

    #[test]
    fn a_passed_socket_is_used_by_the_option_that_names_its_address() {
        let passed = vec![udp("127.0.0.1:0"), udp("127.0.0.2:0")];
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let tcp_at = tcp.local_addr().unwrap();
        let mut sockets =
            PassedSockets::of(passed.into_iter().chain([tcp.into()]).collect()).unwrap();
        assert!(sockets.take_udp("127.0.0.3:0".parse().unwrap()).is_empty());
        assert!(sockets.take_udp("127.0.0.1:1".parse().unwrap()).is_empty());
        assert_eq!(sockets.take_udp("127.0.0.1:0".parse().unwrap()).len(), 1);
        assert!(sockets.take_udp("127.0.0.1:0".parse().unwrap()).is_empty());
        assert_eq!(sockets.take_tcp(tcp_at).len(), 1);
        assert!(!sockets.is_empty());
        sockets.close_unused();
        assert!(sockets.is_empty());
    }

    #[test]
    fn a_udp_socket_for_both_families_is_refused() {
        let both = Socket::new(socket2::Domain::IPV6, Type::DGRAM, None).unwrap();
        both.set_only_v6(false).unwrap();
        let at: SocketAddr = "[::]:0".parse().unwrap();
        // A machine without IPv6 has no such socket.
        if both.bind(&at.into()).is_ok() {
            let refused = PassedSockets::of(vec![both.into()]).unwrap_err();
            assert!(refused.to_string().contains("BindIPv6Only"), "{refused}");
        }
    }
}
