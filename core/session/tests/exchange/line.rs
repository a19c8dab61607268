//! Sessions of one endpoint that wait in line to send.

use std::net::SocketAddr;

use bytes::Bytes;
use d2tp_session::*;

const SERVER: [u8; 4] = [203, 0, 113, 1];

struct Device {
    core: Endpoint,
    session: SessionId,
    address: SocketAddr,
}

fn at(link: LinkId, remote: SocketAddr) -> Addresses {
    Addresses {
        link,
        local: None,
        remote,
    }
}

/// Everything `from` has to say reaches `to`.
fn carry(now: Time, from: &mut Endpoint, own: SocketAddr, to: &mut Endpoint) -> usize {
    let mut buffer = vec![0; 1 << 16];
    let mut datagrams = 0;
    while let Some(t) = from.poll_transmit(now, &mut buffer) {
        let addresses = at(t.link, own);
        let bytes = &mut buffer[..t.len];
        datagrams += t.len.div_ceil(t.segment);
        to.handle_datagrams(now, IncomingDatagram { addresses, bytes }, t.segment);
    }
    datagrams
}

/// A server and as many devices, with a session each, and nothing left to say.
fn settled(count: u8) -> (Time, Endpoint, Vec<Device>) {
    let mut now = Time::ZERO + Span::from_secs(1);
    let server_key = SecretKey::from_bytes([200; 32]);
    let server_at: SocketAddr = (SERVER, 443).into();
    let config = EndpointConfig::default();
    let mut server = Endpoint::new(
        config.clone(),
        server_key.clone(),
        Admission::Anybody,
        [201; 32],
        [202; 32],
    );
    let mut devices = Vec::new();
    for n in 1..=count {
        let key = SecretKey::from_bytes([n; 32]);
        let mut core = Endpoint::new(config.clone(), key, Admission::Nobody, [n; 32], [n; 32]);
        let session = core.connect(now, server_key.public(), u64::from(n), 1..100);
        core.with(session, |s| {
            s.open_path(now, at(LinkId(0), server_at), false)
        })
        .unwrap();
        let address: SocketAddr = ([192, 0, 2, n], 5000).into();
        for _ in 0..20 {
            carry(now, &mut core, address, &mut server);
            // Only this device has been heard, so what leaves is for it.
            carry(now, &mut server, server_at, &mut core);
            now += Span::from_millis(30);
            core.handle_timeouts(now);
            server.handle_timeouts(now);
        }
        devices.push(Device {
            core,
            session,
            address,
        });
    }
    (now, server, devices)
}

#[test]
fn sessions_in_line_are_not_visited_again_and_again_for_what_they_are_in_line_for() {
    let (mut now, mut server, mut devices) = settled(3);
    for device in &mut devices {
        device
            .core
            .with(device.session, |s| {
                let flow = s.open(FlowOptions::default()).unwrap();
                s.write(flow, Bytes::from_static(b"?")).unwrap();
            })
            .unwrap();
        let sent = carry(now, &mut device.core, device.address, &mut server);
        assert!(sent > 0);
    }
    // Every acknowledgement is due, and nobody has asked for packets yet.
    now += Span::from_millis(25);
    assert!(server.next_timeout() <= now);
    server.handle_timeouts(now);
    assert!(server.next_timeout() > now, "time has nothing to tell them");

    let mut buffer = vec![0; 1 << 16];
    let mut answered = std::collections::BTreeSet::new();
    while let Some(t) = server.poll_transmit(now, &mut buffer) {
        answered.insert(t.remote);
    }
    assert_eq!(answered.len(), 3, "each had its turn");
    assert!(server.next_timeout() > now);
    assert_ne!(server.next_timeout(), Time::NEVER, "and its timers again");
}

#[test]
fn an_ack_that_is_due_does_not_wait_behind_the_payload_of_a_long_line() {
    let (mut now, mut server, mut devices) = settled(100);
    let mut buffer = vec![0; 1 << 16];
    for device in &mut devices {
        device
            .core
            .with(device.session, |s| {
                let flow = s.open(FlowOptions::default()).unwrap();
                s.write(flow, Bytes::from_static(b"?")).unwrap();
            })
            .unwrap();
        assert!(carry(now, &mut device.core, device.address, &mut server) > 0);
        while let Some((id, event)) = server.poll_event() {
            if let SessionEvent::Opened(flow) = event {
                let much = Bytes::from(vec![7; 100_000]);
                server.with(id, |s| s.write(flow, much).unwrap()).unwrap();
            }
        }
    }
    // All have much to say, and whoever asks now is the last of them.
    now += Span::from_millis(25);
    server.handle_timeouts(now);
    let mut acks = 0;
    while let Some(t) = server.poll_transmit(now, &mut buffer) {
        if t.len > 200 {
            break;
        }
        acks += 1;
    }
    assert_eq!(
        acks, 100,
        "each hears that it was heard before anybody has payload"
    );
    // Nobody's is said twice, and the line goes on.
    now += Span::from_millis(1);
    server.handle_timeouts(now);
    let mut with_payload = 0;
    while let Some(t) = server.poll_transmit(now, &mut buffer) {
        assert!(t.len > 200);
        with_payload += 1;
        if with_payload == 99 {
            break;
        }
    }
}
