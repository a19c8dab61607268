//! Addresses of peers in the forms that C programs use: `sockaddr_in`, `sockaddr_in6`, and
//! `sockaddr_d2tp`, which holds a name and the key of a server.
//!
//! ```text
//!  sockaddr_d2tp   family  port   key          host, ends with 0
//!                  2       2      32           92                   = sizeof(struct sockaddr_storage)
//! ```
//!
//! There is no room for the port of a server's streams beside the host, so that follows it as in a URL:
//! `host?stream=8443`.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use d2tp_driver::{PublicKey, ServerAddress};
use libc::{c_int, c_void, in_port_t, sa_family_t, sockaddr_in, sockaddr_in6, socklen_t};

use crate::errno::{CallResult, Errno};
use crate::header::CChar;
use crate::memory;

pub(crate) use crate::header::AF_D2TP;

/// The most bytes of a host name, without the terminating 0 (`SockaddrD2tp::sd_host`).
pub(crate) const HOST_BYTES_MAX: usize = 91;

/// The address of AF_D2TP.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SockaddrD2tp {
    /// The address family, `AF_D2TP`.
    pub(crate) sd_family: sa_family_t,
    /// The port in network byte order.
    pub(crate) sd_port: in_port_t,
    /// The server's public key; all 0: none.
    pub(crate) sd_key: [u8; 32],
    /// The host name, after which ?stream=PORT may stand for a server with a key, terminated by 0.
    pub(crate) sd_host: [CChar; 92],
}

/// The destination of a socket, as a program gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SocketName {
    /// An IP address.
    Ip(SocketAddr),
    /// A host name; with a key, that of a D2TP server.
    Host {
        host: String,
        port: u16,
        key: Option<PublicKey>,
        /// The TCP port of the server's streams, as in [`ServerAddress::stream`].
        stream: Option<u16>,
    },
}

/// What separates the port of streams from the host.
const STREAM_MARK: &str = "?stream=";

impl SocketName {
    /// Reads the address that a program points at, for a socket of `domain`.
    pub(crate) fn read(
        from: *const c_void,
        len: socklen_t,
        domain: c_int,
    ) -> CallResult<SocketName> {
        let len = len as usize;
        if !(size_of::<sa_family_t>()..=size_of::<libc::sockaddr_storage>()).contains(&len) {
            return Err(Errno(libc::EINVAL));
        }
        let mut bytes = memory::read(from, len)?;
        let family = c_int::from(sa_family_t::from_ne_bytes([bytes[0], bytes[1]]));
        let least = match family {
            libc::AF_INET => size_of::<sockaddr_in>(),
            libc::AF_INET6 if domain == libc::AF_INET => return Err(Errno(libc::EAFNOSUPPORT)),
            // sin6_scope_id was added later (RFC 2553); the kernel accepts the structure without
            // it.
            libc::AF_INET6 => size_of::<sockaddr_in6>() - 4,
            AF_D2TP => size_of::<SockaddrD2tp>(),
            _ => return Err(Errno(libc::EAFNOSUPPORT)),
        };
        if len < least {
            return Err(Errno(libc::EINVAL));
        }
        bytes.resize(size_of::<libc::sockaddr_storage>(), 0);
        let port = u16::from_be_bytes([bytes[2], bytes[3]]);
        Ok(match family {
            libc::AF_INET => {
                let ip: [u8; 4] = bytes[4..8].try_into().expect("four bytes");
                SocketName::Ip((Ipv4Addr::from(ip), port).into())
            }
            libc::AF_INET6 => {
                let ip: [u8; 16] = bytes[8..24].try_into().expect("sixteen bytes");
                let scope = u32::from_ne_bytes(bytes[24..28].try_into().expect("four bytes"));
                SocketName::Ip(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
            }
            _ => {
                let key: [u8; 32] = bytes[4..36].try_into().expect("thirty-two bytes");
                let host = &bytes[36..];
                let end = host.iter().position(|b| *b == 0);
                let host = end.and_then(|end| std::str::from_utf8(&host[..end]).ok());
                let host = host.filter(|host| !host.is_empty());
                let host = host.ok_or(Errno(libc::EINVAL))?;
                let key = (key != [0; 32]).then_some(PublicKey(key));
                let (host, stream) = match host.split_once(STREAM_MARK) {
                    Some((host, port)) if key.is_some() && !host.is_empty() => {
                        let port = port.parse().map_err(|_| Errno(libc::EINVAL))?;
                        (host, Some(port))
                    }
                    _ => (host, None),
                };
                SocketName::Host {
                    host: host.to_owned(),
                    port,
                    key,
                    stream,
                }
            }
        })
    }

    /// The destination that a call to an agent names: the proxy's `target`, or a server.
    pub(crate) fn from_agent_call(server: &str, target: Option<&str>) -> Option<SocketName> {
        let Some(target) = target else {
            let server: ServerAddress = server.parse().ok()?;
            return Some(SocketName::Host {
                host: server.host,
                port: server.port,
                key: Some(server.key),
                stream: server.stream,
            });
        };
        if let Ok(address) = target.parse() {
            return Some(SocketName::Ip(address));
        }
        let (host, port) = target.rsplit_once(':')?;
        Some(SocketName::Host {
            host: host.to_owned(),
            port: port.parse().ok()?,
            key: None,
            stream: None,
        })
    }

    /// The address as the bytes of a sockaddr. An IPv4 address of an IPv6 socket is written as a
    /// mapped one.
    pub(crate) fn to_bytes(&self, domain: c_int) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_of::<SockaddrD2tp>());
        match self {
            SocketName::Ip(address) => match (address.ip(), domain) {
                (IpAddr::V4(ip), d) if d != libc::AF_INET6 => {
                    bytes.extend((libc::AF_INET as sa_family_t).to_ne_bytes());
                    bytes.extend(address.port().to_be_bytes());
                    bytes.extend(ip.octets());
                    bytes.resize(size_of::<sockaddr_in>(), 0);
                }
                (ip, _) => {
                    let ip = match ip {
                        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                        IpAddr::V6(ip) => ip,
                    };
                    let scope = match address {
                        SocketAddr::V6(v6) => v6.scope_id(),
                        SocketAddr::V4(_) => 0,
                    };
                    bytes.extend((libc::AF_INET6 as sa_family_t).to_ne_bytes());
                    bytes.extend(address.port().to_be_bytes());
                    bytes.extend([0; 4]);
                    bytes.extend(ip.octets());
                    bytes.extend(scope.to_ne_bytes());
                }
            },
            SocketName::Host {
                host,
                port,
                key,
                stream,
            } => {
                bytes.extend((AF_D2TP as sa_family_t).to_ne_bytes());
                bytes.extend(port.to_be_bytes());
                bytes.extend(key.map_or([0; 32], |key| key.0));
                bytes.extend(host.as_bytes());
                if let Some(stream) = stream
                    && self.fits()
                {
                    bytes.extend(format!("{STREAM_MARK}{stream}").as_bytes());
                }
                // The name ends with 0.
                bytes.truncate(size_of::<SockaddrD2tp>() - 1);
                bytes.resize(size_of::<SockaddrD2tp>(), 0);
            }
        }
        bytes
    }

    /// Whether a `sockaddr` has room for the name.
    pub(crate) fn fits(&self) -> bool {
        match self {
            SocketName::Ip(_) => true,
            SocketName::Host { host, stream, .. } => {
                let port = stream.map_or(0, |port| STREAM_MARK.len() + port.to_string().len());
                host.len() + port <= HOST_BYTES_MAX
            }
        }
    }

    /// `host:port` in the form of CONNECT.
    pub(crate) fn authority(&self) -> String {
        match self {
            SocketName::Ip(address) => unmapped(*address).to_string(),
            SocketName::Host { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            SocketName::Host { host, port, .. } => format!("{host}:{port}"),
        }
    }

    /// The D2TP server with this key at this address.
    pub(crate) fn server(&self, key: PublicKey) -> ServerAddress {
        let (host, port, stream) = match self {
            SocketName::Ip(address) => (unmapped(*address).ip().to_string(), address.port(), None),
            SocketName::Host {
                host, port, stream, ..
            } => (host.clone(), *port, *stream),
        };
        ServerAddress {
            stream,
            ..ServerAddress::new(host, port, key)
        }
    }
}

/// Turns an IPv4-mapped IPv6 address into an IPv4 address, and an unspecified address into loopback, as
/// the kernel's sockets do on connect.
fn unmapped(address: SocketAddr) -> SocketAddr {
    let ip = address.ip().to_canonical();
    let ip = match ip {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    match (ip, address) {
        (IpAddr::V6(ip), SocketAddr::V6(v6)) => {
            SocketAddrV6::new(ip, v6.port(), 0, v6.scope_id()).into()
        }
        (ip, address) => (ip, address.port()).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(name: &SocketName) -> CallResult<SocketName> {
        let bytes = name.to_bytes(libc::AF_INET);
        SocketName::read(
            bytes.as_ptr().cast(),
            bytes.len() as socklen_t,
            libc::AF_INET6,
        )
    }

    #[test]
    fn addresses_and_names_come_back() {
        for text in ["192.0.2.1:80", "[2001:db8::1]:443"] {
            let name = SocketName::Ip(text.parse().unwrap());
            assert_eq!(back(&name), Ok(name));
        }
        for key in [None, Some(PublicKey([7; 32]))] {
            let name = SocketName::Host {
                host: "h".repeat(HOST_BYTES_MAX),
                port: 9,
                key,
                stream: None,
            };
            assert_eq!(name.to_bytes(libc::AF_INET).len(), 128);
            assert_eq!(back(&name), Ok(name));
        }
        let streams = SocketName::Host {
            host: "prox.example".into(),
            port: 4433,
            key: Some(PublicKey([7; 32])),
            stream: Some(8443),
        };
        assert_eq!(streams.to_bytes(libc::AF_INET).len(), 128);
        assert_eq!(back(&streams), Ok(streams));
    }

    #[test]
    fn a_name_without_room_for_its_streams_goes_without_them_and_one_too_long_ends_with_0() {
        let named = |length: usize, stream| SocketName::Host {
            host: "h".repeat(length),
            port: 9,
            key: Some(PublicKey([7; 32])),
            stream,
        };
        assert_eq!(
            back(&named(HOST_BYTES_MAX - 3, Some(8443))),
            Ok(named(HOST_BYTES_MAX - 3, None))
        );
        assert_eq!(
            back(&named(HOST_BYTES_MAX + 9, None)),
            Ok(named(HOST_BYTES_MAX, None))
        );
    }

    #[test]
    fn where_an_agent_called_is_where_the_program_wanted() {
        let names = [
            SocketName::Ip("192.0.2.1:80".parse().unwrap()),
            SocketName::Ip("[2001:db8::1]:443".parse().unwrap()),
            SocketName::Host {
                host: "example.org".into(),
                port: 443,
                key: None,
                stream: None,
            },
        ];
        for name in names {
            assert_eq!(
                SocketName::from_agent_call("", Some(&name.authority())),
                Some(name)
            );
        }
        let key = PublicKey([7; 32]);
        let server = SocketName::Host {
            host: "example.org".into(),
            port: 4433,
            key: Some(key),
            stream: Some(8443),
        };
        let text = server.server(key).to_string();
        assert_eq!(SocketName::from_agent_call(&text, None), Some(server));
        assert_eq!(SocketName::from_agent_call("nonsense", None), None);
    }

    #[test]
    fn what_is_no_address_is_an_error_and_no_crash() {
        let v4 = SocketName::Ip("192.0.2.1:80".parse().unwrap()).to_bytes(libc::AF_INET);
        let read = |from: *const u8, len: usize| {
            SocketName::read(from.cast(), len as socklen_t, libc::AF_INET6)
        };
        assert_eq!(read(std::ptr::null(), 16), Err(Errno(libc::EFAULT)));
        assert_eq!(read(8 as *const u8, 16), Err(Errno(libc::EFAULT)));
        assert_eq!(read(v4.as_ptr(), 15), Err(Errno(libc::EINVAL)));
        assert_eq!(read(v4.as_ptr(), 1), Err(Errno(libc::EINVAL)));
        assert_eq!(read(v4.as_ptr(), 500), Err(Errno(libc::EINVAL)));
        let unix = [1u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(read(unix.as_ptr(), 16), Err(Errno(libc::EAFNOSUPPORT)));
        let mut endless = [b'h'; 128];
        endless[..2].copy_from_slice(&(AF_D2TP as sa_family_t).to_ne_bytes());
        assert_eq!(read(endless.as_ptr(), 128), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn an_ipv6_socket_hears_of_ipv4_addresses_as_mapped_ones() {
        let name = SocketName::Ip("192.0.2.1:80".parse().unwrap());
        let bytes = name.to_bytes(libc::AF_INET6);
        let mapped = SocketName::read(
            bytes.as_ptr().cast(),
            bytes.len() as socklen_t,
            libc::AF_INET6,
        )
        .unwrap();
        assert_eq!(mapped.authority(), "192.0.2.1:80");
        assert_eq!(bytes.len(), size_of::<sockaddr_in6>());
    }
}
