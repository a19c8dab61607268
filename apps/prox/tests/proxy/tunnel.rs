//! CONNECT.

use cedos_lab_rig::port::HeldPort;
use std::time::Duration;

use crate::support::*;
use cedos_prox::{Prox, ProxConfig, ProxFlowOutcome, ResetCause, TUNNEL_BUFFER_BYTES};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A TCP server whose connection `script` plays, once.
async fn server<T>(
    script: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> (String, tokio::task::JoinHandle<T::Output>)
where
    T: Future + Send + 'static,
    T::Output: Send,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let task = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        script(stream).await
    });
    (address, task)
}

fn connect(address: &str) -> String {
    format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n")
}

#[tokio::test]
async fn bytes_go_both_ways_and_each_direction_ends_by_itself() {
    // Echoes in capitals until our direction ends, then says one more thing.
    let (address, _task) = server(|mut stream| async move {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        stream.write_all(&all.to_ascii_uppercase()).await.unwrap();
        stream.write_all(b" bye").await.unwrap();
    })
    .await;
    let (serving, mut device) = start(&prox(), CLIENT);
    // The first bytes of the tunnel ride with the head.
    device.send(format!("{}early ", connect(&address))).await;
    let head = device.read_head().await;
    assert_eq!((head.status, head.header("content-length")), (200, ""));
    device.send("late").await;
    device.finish_sending().await;
    assert_eq!(device.read_rest().await, b"EARLY LATE bye");
    device.finished();
    let report = ended(serving).await;
    assert_eq!(report.outcome, ProxFlowOutcome::Delivered);
    assert_eq!((report.bytes_up, report.bytes_down), (10, 14));
}

#[tokio::test]
async fn the_origin_may_end_first() {
    let (address, task) = server(|mut stream| async move {
        stream.write_all(b"hello").await.unwrap();
        stream.shutdown().await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        all
    })
    .await;
    let (_serving, mut device) = start(&prox(), CLIENT);
    device.send(connect(&address)).await;
    device.read_head().await;
    assert_eq!(device.read_rest().await, b"hello");
    device.send("still here").await;
    device.finish_sending().await;
    assert_eq!(task.await.unwrap(), b"still here");
}

#[tokio::test]
async fn much_data_crosses_both_ways_at_once() {
    let data = pattern(3_000_000);
    let (address, _task) = server(|stream| async move {
        stream.set_nodelay(true).unwrap();
        let (mut read, mut write) = stream.into_split();
        tokio::io::copy(&mut read, &mut write).await.unwrap();
    })
    .await;
    let (_serving, device) = start(&prox(), CLIENT);
    let mut device = device;
    device.send(connect(&address)).await;
    device.read_head().await;
    for chunk in data.chunks(10_000) {
        device.send(chunk).await;
        assert!(device.read(chunk.len()).await == chunk);
    }
}

#[tokio::test]
async fn a_server_that_resets_becomes_a_reset_and_not_an_end() {
    let (address, _task) = server(|mut stream| async move {
        stream.write_all(b"half").await.unwrap();
        // Not before the tunnel stands: a reset of the connecting socket is another case.
        stream.read_u8().await.unwrap();
        stream.set_zero_linger().unwrap();
    })
    .await;
    let (serving, mut device) = start(&prox(), CLIENT);
    device.send(connect(&address)).await;
    device.read_head().await;
    device.send("x").await;
    assert_eq!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Reset(ResetCause::TunnelReset)
    );
    assert_eq!(device.reset_code(), Some(ResetCause::TunnelReset.code()));
}

#[tokio::test]
async fn a_device_that_is_gone_becomes_a_reset_at_the_server() {
    let (address, task) = server(|mut stream| async move {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await
    })
    .await;
    let (serving, mut device) = start(&prox(), CLIENT);
    device.send(connect(&address)).await;
    device.read_head().await;
    device.send("half").await;
    device.crash_with_reset();
    assert!(matches!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Broken(_)
    ));
    assert_eq!(
        task.await.unwrap().unwrap_err().kind(),
        std::io::ErrorKind::ConnectionReset
    );
}

#[tokio::test]
async fn a_silent_tunnel_is_closed_after_its_time() {
    let (address, _task) = server(|mut stream| async move {
        let _ = stream.read_u8().await;
    })
    .await;
    let prox = Prox::new(ProxConfig {
        tunnel_idle: Duration::from_millis(40),
        ..config()
    })
    .unwrap();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(connect(&address)).await;
    assert_eq!(
        ended(serving).await.outcome,
        ProxFlowOutcome::Reset(ResetCause::TunnelIdle)
    );
}

#[tokio::test]
async fn the_servers_side_is_kept_while_the_device_takes_nothing() {
    let data = pattern(8_000_000);
    let sent = data.clone();
    let (address, task) = server(|mut stream| async move {
        stream.write_all(&sent).await.unwrap();
    })
    .await;
    let (_serving, mut device) = start(&prox(), CLIENT);
    device.send(connect(&address)).await;
    device.read_head().await;
    // The buffers fill and the server is held back, not cut off.
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    assert!(!task.is_finished());
    assert!(device.read_rest().await == data);
}

#[tokio::test]
async fn a_tunnel_that_cannot_be_made_is_an_error_answer() {
    let nobody = HeldPort::take();
    let address = nobody.address().to_string();
    let answer = ask(&prox(), connect(&address)).await.whole();
    assert_eq!(answer.status, 502);
    assert!(
        answer
            .header("proxy-status")
            .contains("error=connection_refused")
    );
    assert_eq!(ask(&prox(), connect("host.example")).await.status, 400);
}

#[tokio::test]
async fn tunnels_without_room_in_memory_are_refused_and_one_that_ends_makes_room() {
    let (address, _task) = server(|mut stream| async move {
        let _ = stream.read_u8().await;
    })
    .await;
    // A key's fifth has room for one tunnel.
    let prox = Prox::new(ProxConfig {
        session_memory_bytes_max: 5 * 100 * 1024,
        ..config()
    })
    .unwrap();
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(connect(&address)).await;
    assert_eq!(device.read_head().await.status, 200);
    let used = prox.session_memory().used();
    assert!(used >= 2 * TUNNEL_BUFFER_BYTES as u64, "{used} bytes");
    let answer = ask(&prox, connect(&address)).await.whole();
    assert_eq!(answer.status, 503);
    device.finish_sending().await;
    assert!(device.read_rest().await.is_empty());
    device.finished();
    ended(serving).await;
    assert_eq!(prox.session_memory().used(), 0);
}

#[tokio::test]
async fn a_reset_is_noticed_although_the_origin_takes_no_bytes() {
    let (address, _task) = server(|stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    })
    .await;
    let (serving, mut device) = start(&prox(), CLIENT);
    device.send(connect(&address)).await;
    assert_eq!(device.read_head().await.status, 200);
    let taken = Duration::from_millis(300);
    while tokio::time::timeout(taken, device.send([7; 100_000]))
        .await
        .is_ok()
    {}
    device.crash_with_reset();
    let report = ended(serving).await;
    assert!(
        matches!(report.outcome, ProxFlowOutcome::Broken(_)),
        "{report:?}"
    );
}
