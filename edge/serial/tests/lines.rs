//! Lines on pairs of pseudo-terminals of the kernel, and a bridge between such a line and UDP.

use std::net::SocketAddr;
use std::time::Duration;

use cedos_lab_rig::serial::{PseudoTerminal, serial_cable};
use d2tp_serial::{
    Bridge, BridgeEvent, MobileStation, OpenLineError, SerialLine, SerialPort, StationAddress,
    StationRole,
};
use tokio::net::UdpSocket;

fn line(end: &PseudoTerminal) -> SerialLine {
    SerialLine::new(&end.device, 1_000_000)
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what)
        .await
        .expect("in time")
}

#[tokio::test]
async fn packets_of_all_sizes_cross_a_line_in_both_directions() {
    for framing in ["serial:{}@1000000", "kiss:{}@1000000,N0CALL,half-duplex"] {
        let [near, far] = serial_cable(None);
        let named = |end: &PseudoTerminal| -> SerialLine {
            let name = framing.replace("{}", &end.device.display().to_string());
            name.parse().unwrap()
        };
        let (bridge, mut at_bridge) =
            SerialPort::open(&named(&near), StationRole::Bridge).expect("a line");
        let mut mobile = MobileStation::attach(&named(&far)).expect("a line");
        let sender = mobile.sender();
        for size in [1, 29, 240, 250, 1_200, 1_500] {
            let packet: Vec<u8> = (0..size).map(|n| (n * 7) as u8).collect();
            sender.send(&packet);
            let got = within(at_bridge.recv()).await.expect("the line lasts");
            assert_eq!((got.address, &got.bytes), (mobile.address(), &packet));
            bridge.send(mobile.address(), &packet);
            assert_eq!(within(mobile.recv()).await, Some(packet));
        }
        assert_eq!(bridge.counts().dropped(), []);
    }
}

#[tokio::test]
async fn noise_costs_the_frames_that_it_hits_and_no_others() {
    let [near, far] = [PseudoTerminal::open(), PseudoTerminal::open()];
    let mut seen = 0;
    far.carry_to(&near, None, move |bytes| {
        for byte in bytes {
            seen += 1;
            if seen % 1_000 == 0 {
                *byte ^= 0x10;
            }
        }
    });
    let (bridge, mut at_bridge) = SerialPort::open(&line(&near), StationRole::Bridge).unwrap();
    let mobile = MobileStation::attach(&line(&far)).unwrap();
    let sender = mobile.sender();
    let mut arrived = 0;
    for n in 0..100_u8 {
        sender.send(&[n; 90]);
        if let Ok(Some(got)) =
            tokio::time::timeout(Duration::from_millis(100), at_bridge.recv()).await
        {
            assert_eq!(got.bytes, [got.bytes[0]; 90], "nothing damaged arrives");
            arrived += 1;
        }
    }
    let noise = bridge.counts().noise;
    assert!((85..=99).contains(&arrived), "{arrived} of 100 arrived");
    assert!((1..=20).contains(&noise), "{noise} counted");
}

#[tokio::test]
async fn a_device_that_is_in_use_or_is_not_there_is_refused_with_a_reason() {
    let [near, _far] = serial_cable(None);
    let (_open, _packets) = SerialPort::open(&line(&near), StationRole::Bridge).unwrap();
    let again = SerialPort::open(&line(&near), StationRole::Mobile).unwrap_err();
    assert!(matches!(again, OpenLineError::InUse { .. }), "{again}");
    let missing = SerialLine::new("/dev/no-such-device", 9_600);
    let missing = SerialPort::open(&missing, StationRole::Mobile).unwrap_err();
    assert!(missing.to_string().contains("plugged in"), "{missing}");
    let file = SerialLine::new("/dev/null", 9_600);
    let file = SerialPort::open(&file, StationRole::Mobile).unwrap_err();
    assert!(file.to_string().contains("no serial device"), "{file}");
}

/// A server that answers each packet with itself, and a SYN only if it is for this server.
async fn echo(name: u8) -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2_000];
        loop {
            let Ok((n, from)) = socket.recv_from(&mut buffer).await else {
                continue;
            };
            if buffer[1] == name {
                let _ = socket.send_to(&buffer[..n], from).await;
            }
        }
    });
    address
}

const SYN: u8 = 0x81;
const DATA: u8 = 0x40;

#[tokio::test]
async fn a_bridge_finds_the_server_of_each_mobile_and_keeps_to_it() {
    let servers = [echo(1).await, echo(2).await];
    let [near, far] = serial_cable(None);
    let mut bridge = Bridge::open(line(&near), servers.to_vec()).unwrap();
    let (give, mut events) = tokio::sync::mpsc::unbounded_channel();
    let runs = tokio::spawn(async move {
        bridge
            .run(|counts, event| {
                let _ = give.send((*counts, event));
            })
            .await;
    });
    let mut mobiles = [
        MobileStation::attach(&line(&far)).unwrap(),
        MobileStation::attach(&line(&far)).unwrap(),
    ];
    assert_ne!(mobiles[0].address(), mobiles[1].address());
    for (mobile, name) in mobiles.iter_mut().zip([2, 1]) {
        mobile.sender().send(&[SYN, name, 7]);
        assert_eq!(within(mobile.recv()).await, Some(vec![SYN, name, 7]));
        let (_, event) = loop {
            let next = within(events.recv()).await.expect("the bridge runs");
            if next.1 != BridgeEvent::LineOpen {
                break next;
            }
        };
        let server = servers[usize::from(name) - 1];
        let mobile_address = mobile.address();
        assert_eq!(
            event,
            BridgeEvent::Answered {
                mobile: mobile_address,
                server
            }
        );
        for n in 0..10 {
            let packet = vec![DATA, name, n];
            mobile.sender().send(&packet);
            assert_eq!(within(mobile.recv()).await, Some(packet));
        }
    }
    runs.abort();
}

#[tokio::test]
async fn a_mobile_that_talks_without_pause_leaves_the_others_their_answers() {
    let server = echo(1).await;
    let [near, far] = serial_cable(None);
    let mut bridge = Bridge::open(line(&near), vec![server]).unwrap();
    let runs = tokio::spawn(async move { bridge.run(|_, _| ()).await });
    let loud = MobileStation::attach(&line(&far)).unwrap();
    let mut quiet = MobileStation::attach(&line(&far)).unwrap();
    let talks = loud.sender();
    let talker = tokio::spawn(async move {
        loop {
            talks.send(&[DATA, 1, 0].repeat(300));
            tokio::task::yield_now().await;
        }
    });
    for n in 0..20 {
        let packet = vec![DATA, 1, n];
        quiet.sender().send(&packet);
        assert_eq!(within(quiet.recv()).await, Some(packet));
    }
    talker.abort();
    runs.abort();
}

#[tokio::test]
async fn a_bridge_goes_on_when_a_device_was_unplugged() {
    let server = echo(1).await;
    let plug = tempfile::tempdir().unwrap();
    let place = plug.path().join("ttyUSB0");
    let near = PseudoTerminal::open();
    std::os::unix::fs::symlink(&near.device, &place).unwrap();
    let at_bridge = SerialLine::new(&place, 1_000_000);
    let mut bridge = Bridge::open(at_bridge, vec![server]).unwrap();
    let (give, mut events) = tokio::sync::mpsc::unbounded_channel();
    let runs = tokio::spawn(async move {
        bridge
            .run(|_, event| {
                let _ = give.send(event);
            })
            .await;
    });
    assert_eq!(within(events.recv()).await, Some(BridgeEvent::LineOpen));
    // The other side of the terminal closes: the device hangs up.
    let second = [PseudoTerminal::open(), PseudoTerminal::open()];
    std::fs::remove_file(&place).unwrap();
    drop(near);
    let gone = within(events.recv()).await.unwrap();
    assert!(matches!(gone, BridgeEvent::LineGone { .. }), "{gone:?}");
    second[0].carry_to(&second[1], None, |_| ());
    second[1].carry_to(&second[0], None, |_| ());
    std::os::unix::fs::symlink(&second[0].device, &place).unwrap();
    assert_eq!(within(events.recv()).await, Some(BridgeEvent::LineOpen));
    let mut mobile = MobileStation::attach(&line(&second[1])).unwrap();
    mobile.sender().send(&[SYN, 1, 9]);
    assert_eq!(within(mobile.recv()).await, Some(vec![SYN, 1, 9]));
    runs.abort();
}

#[tokio::test]
async fn packets_for_a_station_address_that_nobody_has_are_dropped() {
    let [near, far] = serial_cable(None);
    let (bridge, _packets) = SerialPort::open(&line(&near), StationRole::Bridge).unwrap();
    let mut mobile = MobileStation::attach(&line(&far)).unwrap();
    let other = StationAddress(mobile.address().0.wrapping_add(1));
    bridge.send(other, b"not for this one");
    bridge.send(mobile.address(), b"for this one");
    assert_eq!(within(mobile.recv()).await, Some(b"for this one".to_vec()));
}
