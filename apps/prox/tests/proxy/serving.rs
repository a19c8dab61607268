//! Running and stopping a proxy.

use std::time::Duration;

use crate::support::*;
use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_prox::{Prox, ProxConfig, ProxStartError, ResetCause, run, serve};
use tokio::sync::{mpsc, oneshot};

#[tokio::test]
async fn an_order_to_stop_lets_flows_finish_and_resets_those_that_do_not() {
    let origin = ScriptedOrigin::fixed(
        "HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n".to_owned() + &"x".repeat(100_000),
    )
    .await;
    let stuck = ScriptedOrigin::play(|_, _stream| std::future::pending()).await;
    let prox = Prox::new(ProxConfig {
        // More than a busy machine needs for what the first flow waits for.
        stop_grace: Duration::from_secs(2),
        ..config()
    })
    .unwrap();
    let (flows, listener) = mpsc::channel(8);
    let (stop, stopped) = oneshot::channel::<()>();
    let running = tokio::spawn(serve(listener, prox.clone(), async {
        let _ = stopped.await;
    }));
    let (good, mut finishes) = flow(CLIENT, None);
    let (bad, mut hangs) = flow(CLIENT, None);
    flows.send(good).await.unwrap();
    flows.send(bad).await.unwrap();
    finishes.send(get(&origin.url("/"), "")).await;
    hangs.send(get(&stuck.url("/"), "")).await;
    assert_eq!(finishes.read_head().await.status, 200);
    until(|| !stuck.requests().is_empty()).await;
    stop.send(()).unwrap();
    assert_eq!(finishes.read(100_000).await.len(), 100_000);
    finishes.finished();
    tokio::time::timeout(PATIENCE, running)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(hangs.reset_code(), Some(ResetCause::Stopping.code()));
    assert!(flows.send(flow(CLIENT, None).0).await.is_err());
    assert_eq!(prox.holdings(), Default::default());
}

#[tokio::test]
async fn a_listener_that_ends_ends_the_proxy() {
    let (flows, listener) = mpsc::channel::<MemoryFlow>(1);
    drop(flows);
    run(listener, config(), std::future::pending())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_proxy_for_nobody_and_one_without_a_state_directory_do_not_start() {
    let start = |config| Prox::new(config).err().unwrap();
    assert!(matches!(
        start(ProxConfig::default()),
        ProxStartError::NoClients
    ));
    let config = ProxConfig {
        state_dir: "/nonexistent/dir".into(),
        ..config()
    };
    assert!(matches!(start(config), ProxStartError::StateDir { .. }));
}
