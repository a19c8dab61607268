//! TCP ports that no other program takes between their choice and their use.

use std::net::{Ipv4Addr, SocketAddr};

use socket2::{Domain, Socket, Type};

/// A TCP port of 127.0.0.1 that the system gives to no other program while this is held. Nobody listens there:
/// connections are refused, until a server listens that sets `SO_REUSEADDR`, as most do.
#[derive(Debug)]
pub struct HeldPort {
    socket: Socket,
}

impl HeldPort {
    /// Takes a port of the system's choice.
    pub fn take() -> HeldPort {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        // Both sockets have to allow the other one.
        socket.set_reuse_address(true).expect("set");
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        socket.bind(&any.into()).expect("a port");
        HeldPort { socket }
    }

    /// The address of the port.
    pub fn address(&self) -> SocketAddr {
        let address = self.socket.local_addr().expect("its address");
        address.as_socket().expect("an address of IPv4")
    }

    /// The number of the port.
    pub fn number(&self) -> u16 {
        self.address().port()
    }
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_held_port_refuses_connections_until_a_server_listens_there() {
        let port = HeldPort::take();
        let refused = TcpStream::connect(port.address()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let _server = TcpListener::bind(port.address()).unwrap();
        TcpStream::connect(port.address()).unwrap();
    }
}
