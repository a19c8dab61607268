//! Tests of datagram sockets: size limits, addresses and ends.

use std::io::ErrorKind;
use std::time::Duration;

use d2tp_sockets::{ConnectSettings, ConnectionPersist, DatagramSocket, SendRoute};

/// The longest wait: a handshake may take long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn heard(socket: &DatagramSocket) -> (String, std::net::SocketAddr) {
    let mut message = [0; 1500];
    let (bytes, from) = socket.recv_from(&mut message).unwrap();
    (String::from_utf8_lossy(&message[..bytes]).into(), from)
}

#[test]
fn messages_keep_their_bounds_and_senders_their_names_until_one_goes() {
    let home = tempfile::tempdir().unwrap();
    // SAFETY: only the test's own thread runs yet.
    unsafe { std::env::set_var("XDG_CONFIG_HOME", home.path()) };
    let server = DatagramSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (at, address) = (server.local_addr().unwrap(), server.address().unwrap());
    let taken = DatagramSocket::bind(at).unwrap_err();
    assert_eq!(taken.kind(), ErrorKind::AddrInUse, "{taken}");
    let [one, other] = [(); 2].map(|()| DatagramSocket::connect(&address).unwrap());
    for socket in [&server, &one, &other] {
        socket.set_expiry(PATIENCE).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    let said = |text: &str, by: &DatagramSocket| {
        assert_eq!(by.send(text.as_bytes()).unwrap(), text.len());
        let (heard, from) = heard(&server);
        assert_eq!(heard, text);
        from
    };
    let first = said("first", &one);
    let stranger = said("other", &other);
    assert_ne!(first.ip(), stranger.ip());
    assert_eq!(said("", &one), first);
    one.set_route(SendRoute::Each).unwrap();
    assert_eq!(said("second", &one), first);
    for (to, text, by) in [(stranger, "to other", &other), (first, "to one", &one)] {
        assert_eq!(server.send_to(text.as_bytes(), to).unwrap(), text.len());
        assert_eq!(heard(by).0, text);
    }

    let error = one.send(&[0; 3000]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE), "{error}");
    for nonsense in [Duration::ZERO, Duration::from_secs(86_401)] {
        let error = one.set_expiry(nonsense).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    one.set_read_timeout(Some(Duration::from_nanos(1))).unwrap();
    let late = one.recv(&mut [0; 10]).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::WouldBlock, "{late}");
    let kept = ConnectSettings {
        persist: ConnectionPersist::Written,
        ..Default::default()
    };
    let error = kept.connect_datagrams(&address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let error = DatagramSocket::connect("127.0.0.1:9").unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::NetworkUnreachable,
        "no key: {error}"
    );

    // Its last datagram arrives, and the address is free when it is gone.
    server.send_to(b"farewell", stranger).unwrap();
    assert_eq!(heard(&other).0, "farewell");
    drop(server);
    let error = other.recv(&mut [0; 10]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    DatagramSocket::bind(at).unwrap();
}
