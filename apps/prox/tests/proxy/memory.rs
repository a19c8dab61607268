//! What requests make the proxy hold in memory is charged to their client, and refused without room.

use cedos_prox::{Prox, ProxConfig, flow_task_bytes};
use d2tp_driver::{MemoryPool, PublicKey};

use crate::support::*;

/// A proxy in which one client may hold `share` bytes.
fn with_share(share: u64) -> std::sync::Arc<Prox> {
    let config = ProxConfig {
        session_memory_bytes_max: 5 * share,
        ..config()
    };
    Prox::new(config).unwrap()
}

#[tokio::test]
async fn request_heads_without_room_in_memory_are_refused_and_one_that_ends_makes_room() {
    let prox = with_share(40 * 1024);
    let (serving, mut device) = start(&prox, CLIENT);
    let field = format!("X: {}\r\n", "f".repeat(1000));
    let head = format!("GET http://h/ HTTP/1.1\r\nHost: h\r\n{}", field.repeat(15));
    device.send(head).await;
    until(|| prox.session_memory().used() > 32 * 1024).await;
    let answer = ask(&prox, get("http://h/", "")).await.whole();
    assert_eq!(answer.status, 503);
    device.crash();
    ended(serving).await;
    assert_eq!(prox.session_memory().used(), 0);
}

#[tokio::test]
async fn connections_to_origins_without_room_in_memory_are_refused_and_one_that_ends_makes_room() {
    // Nobody answers there.
    let origin = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = origin.local_addr().unwrap();
    let prox = with_share(80 * 1024);
    let url = format!("http://{address}/");
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&url, "")).await;
    until(|| prox.session_memory().used() > 64 * 1024).await;
    // Of another URL: for the same one it would wait.
    let other = format!("http://{address}/other");
    let answer = ask(&prox, get(&other, "")).await.whole();
    assert_eq!(answer.status, 503);
    device.crash();
    ended(serving).await;
    assert_eq!(prox.session_memory().used(), 0);
}

#[tokio::test]
async fn all_connections_of_a_client_fit_its_share_of_memory() {
    let origin = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = origin.local_addr().unwrap();
    let prox = prox();
    let (_serving, mut device) = start(&prox, CLIENT);
    let connect = format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n");
    device.send(connect).await;
    assert_eq!(device.read_head().await.status, 200);
    let task = flow_task_bytes();
    let tunnel = prox.session_memory().used();
    // Beside what the session itself has for a flow.
    let each = task + tunnel + 5 * 1024;
    let limits = ProxConfig::default();
    let pool = MemoryPool::new(limits.session_memory_bytes_max);
    let share = pool.account(PublicKey(CLIENT)).room();
    assert!(
        u64::from(limits.client_flows_max) * each <= share,
        "{each} bytes each, {task} of them for the task"
    );
}
