//! A device and a server of the real driver over loopback sockets.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, Flow, FlowEnd, FlowIo, FlowSettings,
    SecretKey, SendSource, Server, ServerAddress, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

fn server(admission: Admission) -> Server {
    Server::bind(ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission,
        config: EndpointConfig::default(),
    })
    .unwrap()
}

async fn device(server: &Server) -> Device {
    let address = ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key());
    let options = DeviceOptions {
        server: address,
        key: key(1),
        config: EndpointConfig::default(),
    };
    let device = Device::new(options).await.unwrap();
    device.use_default_route().unwrap();
    device
}

#[tokio::test]
async fn a_flow_echoes_and_ends_cleanly() {
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"hello").await.unwrap();
    flow.shutdown().await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    assert_eq!(far.peer(), key(1).public().0);
    let mut text = String::new();
    within(far.read_to_string(&mut text)).await.unwrap();
    assert_eq!(text, "hello");
    far.write_all(b"and back").await.unwrap();
    far.shutdown().await.unwrap();
    let mut back = Vec::new();
    within(flow.read_to_end(&mut back)).await.unwrap();
    assert_eq!(back, b"and back");
    within(std::future::poll_fn(|cx| far.poll_finished(cx)))
        .await
        .unwrap();
    within(std::future::poll_fn(|cx| flow.poll_finished(cx)))
        .await
        .unwrap();
}

#[tokio::test]
async fn an_exchange_takes_a_turn_of_the_engine_for_each_packet_and_no_more() {
    const EXCHANGES: u64 = 200;
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"hello").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    let mut text = [0; 5];
    within(far.read_exact(&mut text)).await.unwrap();
    let before = server.engine_counts();
    for _ in 0..EXCHANGES {
        far.write_all(b"and back").await.unwrap();
        let mut back = [0; 8];
        within(flow.read_exact(&mut back)).await.unwrap();
        flow.write_all(b"hello").await.unwrap();
        within(far.read_exact(&mut text)).await.unwrap();
    }
    let after = server.engine_counts();
    let packets = after.datagrams_in + after.datagrams_out;
    let packets = packets - before.datagrams_in - before.datagrams_out;
    let turns = after.turns - before.turns;
    // Some turns are for timers.
    assert!(
        turns <= packets + packets / 4,
        "{turns} turns for {packets} packets"
    );
}

#[tokio::test]
async fn large_transfers_over_a_link_with_jumbo_frames_use_them() {
    const SMALL: usize = 100_000;
    const LARGE: usize = 2_000_000;
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    // The loopback device has an MTU of 65,536 bytes.
    for (bytes, size) in [(SMALL, 1_472), (LARGE, 8_972)] {
        let mut flow = device.open(FlowSettings::default()).unwrap();
        let sends = tokio::spawn(async move {
            flow.write_all(&vec![7; bytes]).await.unwrap();
            flow.shutdown().await.unwrap();
            within(flow.read_to_end(&mut Vec::new())).await.unwrap();
        });
        let mut far = within(server.accept()).await.unwrap();
        let mut received = Vec::new();
        within(far.read_to_end(&mut received)).await.unwrap();
        far.shutdown().await.unwrap();
        within(sends).await.unwrap();
        assert_eq!(received.len(), bytes);
        assert_eq!(device.paths()[0].mtu, size, "after {bytes} bytes");
    }
}

#[tokio::test]
async fn a_device_that_closes_waits_for_the_server_alone() {
    let server = server(Admission::Anybody);
    let mut shortest = Duration::MAX;
    for _ in 0..5 {
        let device = device(&server).await;
        let mut flow = device.open(FlowSettings::default()).unwrap();
        flow.write_all(b"hello").await.unwrap();
        within(server.accept()).await.unwrap();
        let begun = std::time::Instant::now();
        device.close().await;
        shortest = shortest.min(begun.elapsed());
        until("the server has heard it", || server.counts().0 == 0).await;
    }
    // A fifth of what a device waits for a server that does not answer.
    assert!(shortest < Duration::from_millis(4), "{shortest:?}");
}

struct Pattern(u64);

fn pattern(offset: u64) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9) >> 11) as u8
}

impl SendSource for Pattern {
    fn poll_read_at(
        &self,
        _: &mut Context<'_>,
        offset: u64,
        max: usize,
    ) -> Poll<io::Result<Bytes>> {
        let n = (self.0 - offset).min(max as u64);
        Poll::Ready(Ok((offset..offset + n)
            .map(pattern)
            .collect::<Vec<u8>>()
            .into()))
    }
}

#[tokio::test]
async fn a_source_is_sent_whole_after_what_was_written_before() {
    const SIZE: u64 = 20_000_000;
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"get").await.unwrap();
    flow.shutdown().await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    far.write_all(b"head").await.unwrap();
    far.send_source(Arc::new(Pattern(SIZE)));
    let read = async {
        let mut head = [0; 4];
        flow.read_exact(&mut head).await.unwrap();
        assert_eq!(&head, b"head");
        let mut at = 0u64;
        while let Some(chunk) = flow.read_chunk().await.unwrap() {
            for b in chunk.iter() {
                assert_eq!(*b, pattern(at));
                at += 1;
            }
        }
        assert_eq!(at, SIZE);
    };
    within(read).await;
    let mut got = Vec::new();
    within(far.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, b"get");
    within(std::future::poll_fn(|cx| far.poll_finished(cx)))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_reset_reaches_the_other_end_with_its_code() {
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let mut flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"x").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    far.reset(0xd205);
    let mut buf = [0; 10];
    let error = within(flow.read(&mut buf)).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert!(error.to_string().contains("0xd205"), "{error}");
}

#[tokio::test]
async fn a_deadline_ends_a_flow_that_gets_nothing() {
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    // On a busy machine the deadline may pass before the server has the flow.
    let accepted = tokio::spawn(async move { (server.accept().await, server) });
    let settings = FlowSettings {
        within: Some(Duration::from_millis(300)),
        ..FlowSettings::default()
    };
    let mut flow = device.open(settings).unwrap();
    flow.write_all(b"x").await.unwrap();
    let error = within(flow.read(&mut [0; 10])).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert_eq!(flow.end(), Some(FlowEnd::DeadlinePassed));
    assert_eq!(flow.deadline_left(), Some(Duration::ZERO));
    accepted.abort();
}

#[tokio::test]
async fn a_device_that_is_not_admitted_hears_so() {
    let server = server(Admission::Only([key(9).public()].into()));
    let device = device(&server).await;
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let error = within(flow.read(&mut [0; 10])).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotConnected);
    assert!(
        device
            .ended()
            .unwrap()
            .to_string()
            .contains("does not admit")
    );
}

#[tokio::test]
async fn a_dropped_flow_resets_what_is_not_over() {
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let mut flow: Flow = device.open(FlowSettings::default()).unwrap();
    flow.write_all(b"x").await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    drop(flow);
    let mut got = Vec::new();
    let error = within(far.read_to_end(&mut got)).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn what_was_sent_whole_is_read_after_its_sender_has_left() {
    let server = server(Admission::Anybody);
    let device = device(&server).await;
    let sent: Vec<u8> = (0..100_000).map(pattern).collect();
    let mut flows = Vec::new();
    for _ in 0..2 {
        let mut flow = device.open(FlowSettings::default()).unwrap();
        flow.write_all(&sent).await.unwrap();
        flow.shutdown().await.unwrap();
        flows.push(flow);
    }
    let mut half = device.open(FlowSettings::default()).unwrap();
    half.write_all(b"not all").await.unwrap();
    let mut first = within(server.accept()).await.unwrap();
    until("all is delivered", || {
        flows.iter().all(Flow::is_flushed) && half.is_flushed()
    })
    .await;
    device.close().await;
    until("its session is gone", || server.counts().0 == 0).await;
    let mut got = Vec::new();
    within(first.read_to_end(&mut got)).await.unwrap();
    assert_eq!(got, sent);
    // The second flow was not accepted yet.
    let mut second = within(server.accept()).await.unwrap();
    assert_eq!(second.peer(), key(1).public().0);
    got.clear();
    while let Some(chunk) = within(second.read_chunk()).await.unwrap() {
        got.extend_from_slice(&chunk);
    }
    assert_eq!(got, sent);
    let third = tokio::time::timeout(Duration::from_millis(50), server.accept());
    assert!(third.await.is_err(), "what was not said whole is over");
}

#[tokio::test]
async fn many_flows_at_once_on_one_session() {
    let server = Arc::new(server(Admission::Anybody));
    let device = device(&server).await;
    let accepting = server.clone();
    tokio::spawn(async move {
        while let Some(mut flow) = accepting.accept().await {
            tokio::spawn(async move {
                let mut got = Vec::new();
                flow.read_to_end(&mut got).await.unwrap();
                flow.write_all(&got).await.unwrap();
                flow.shutdown().await.unwrap();
                let _ = std::future::poll_fn(|cx| flow.poll_finished(cx)).await;
            });
        }
    });
    let mut tasks = Vec::new();
    for i in 0..100u8 {
        let mut flow = device.open(FlowSettings::default()).unwrap();
        tasks.push(tokio::spawn(async move {
            let sent = vec![i; 10_000];
            flow.write_all(&sent).await.unwrap();
            flow.shutdown().await.unwrap();
            let mut got = Vec::new();
            flow.read_to_end(&mut got).await.unwrap();
            assert_eq!(got, sent);
        }));
    }
    for task in tasks {
        within(task).await.unwrap();
    }
}
