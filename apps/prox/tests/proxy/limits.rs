//! Limits on what one client transfers, and what the metrics and the access log say of it.

use std::sync::Arc;
use std::time::Duration;

use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::wait::until_some;
use cedos_prox::{
    AccessDetail, ClientLimits, Prox, ProxConfig, ProxFlowOutcome, ResetCause, SystemResolver,
};
use d2tp_driver::{HostKey, Journal};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::support::*;

const OTHER: HostKey = [2; 32];
const THIRD: HostKey = [3; 32];

fn prox_with(set: impl FnOnce(&mut ProxConfig)) -> Arc<Prox> {
    let mut config = config();
    set(&mut config);
    Prox::new(config).unwrap()
}

async fn origin(bytes: usize) -> (ScriptedOrigin, Vec<u8>) {
    let data = pattern(bytes);
    // Nobody shares it, so that each client has its own.
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\nCache-Control: private\r\nETag: \"e\"\r\n\r\n"
    );
    let mut answer = head.into_bytes();
    answer.extend_from_slice(&data);
    (ScriptedOrigin::fixed(answer).await, data)
}

/// Downloads as `client`, and returns the time that took.
async fn download(prox: &Arc<Prox>, client: HostKey, url: &str) -> (ProxyReply, Duration) {
    let began = Instant::now();
    let (serving, mut device) = start(prox, client);
    device.send(get(url, "")).await;
    device.finish_sending().await;
    let answer = device.answer().await;
    ended(serving).await;
    (answer, began.elapsed())
}

/// The least time for this many bytes with a burst of one second.
fn least(bytes: usize, rate: usize) -> Duration {
    Duration::from_secs_f64(bytes as f64 / rate as f64) - Duration::from_secs(1)
}

#[tokio::test]
async fn all_downloads_of_a_client_share_its_rate_and_others_do_not_feel_it() {
    let (origin, data) = origin(300_000).await;
    let prox = prox_with(|config| config.client_down_bytes_per_s = 300_000);
    let url = origin.url("/");
    let began = Instant::now();
    let (one, two) = tokio::join!(download(&prox, CLIENT, &url), download(&prox, CLIENT, &url),);
    assert!(one.0.whole().body == data && two.0.whole().body == data);
    let took = began.elapsed();
    assert!(took >= least(600_000, 300_000), "{took:?}");
    // The other one has a second's worth of its own.
    let wait = ProcessorWait::of(&[]);
    let (answer, alone) = download(&prox, OTHER, &url).await;
    assert!(answer.whole().body == data);
    let alone = alone.saturating_sub(wait.so_far());
    assert!(alone < took, "{alone:?} of {took:?}");
}

#[tokio::test]
async fn uploads_and_tunnels_have_the_rate_of_their_direction() {
    let prox = prox_with(|config| {
        config.client_up_bytes_per_s = 100_000;
        config.client_down_bytes_per_s = 100_000;
    });
    let data = pattern(160_000);
    let store = ScriptedOrigin::play(|request, mut stream| async move {
        let body = request.body(&mut stream).await.map_or(0, |body| body.len());
        let length = body.to_string();
        let answer = format!(
            "HTTP/1.1 201 Created\r\nContent-Length: {}\r\n\r\n{length}",
            length.len()
        );
        let _ = stream.write_all(answer.as_bytes()).await;
    })
    .await;
    let began = Instant::now();
    let (serving, mut device) = start(&prox, CLIENT);
    let head = format!(
        "PUT {} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n",
        store.url("/"),
        data.len()
    );
    device.send(head).await;
    device.send(&data).await;
    device.finish_sending().await;
    let answer = device.answer().await.whole();
    ended(serving).await;
    assert_eq!(answer.body, b"160000");
    assert!(began.elapsed() >= least(160_000, 100_000));

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = listener.local_addr().unwrap();
    let sent = data.clone();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.write_all(&sent).await;
    });
    let began = Instant::now();
    let (_serving, mut device) = start(&prox, OTHER);
    device
        .send(format!("CONNECT {place} HTTP/1.1\r\nHost: h\r\n\r\n"))
        .await;
    device.read_head().await;
    assert!(device.read_rest().await == data);
    assert!(began.elapsed() >= least(160_000, 100_000));
}

#[tokio::test]
async fn a_month_that_is_used_up_ends_running_flows_and_refuses_new_ones_until_its_end() {
    let (origin, data) = origin(300_000).await;
    let prox = prox_with(|config| config.client_month_bytes_max = 100_000);
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    let answer = device.answer().await;
    assert_eq!(answer.cause(), Some(ResetCause::MonthUsedUp));
    assert!(answer.body.len() < data.len());
    let report = ended(serving).await;
    assert_eq!(
        report.outcome,
        ProxFlowOutcome::Reset(ResetCause::MonthUsedUp)
    );
    let (refused, _) = download(&prox, CLIENT, &origin.url("/")).await;
    let refused = refused.whole();
    assert_eq!(refused.status, 429);
    let text = String::from_utf8(refused.body.clone()).unwrap();
    assert!(
        text.contains("has used the 100 kB") && text.contains("-01 00:00 UTC"),
        "{text}"
    );
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=31 * 86_400).contains(&wait), "{wait}");
    let metrics = prox.metrics(None);
    assert!(
        metrics.contains("cedos_prox_limited_total{limit=\"client_month\"} 2"),
        "{metrics}"
    );
    // Another client has its own month.
    let (answer, _) = download(&prox, OTHER, &origin.url("/")).await;
    assert_eq!(answer.cause(), Some(ResetCause::MonthUsedUp));
}

#[tokio::test]
async fn limits_of_one_client_hold_at_once_and_after_a_restart() {
    let state = tempfile::tempdir().unwrap();
    let open = async || {
        let config = ProxConfig {
            state_dir: state.path().to_owned(),
            allow_private: true,
            ..Default::default()
        };
        // The task that writes an earlier one ends soon.
        let path = state.path().join("journal");
        let journal = until_some("the journal is free", || Journal::open(&path).ok()).await;
        let journal = Arc::new(journal);
        Prox::with_journal(config, Arc::new(SystemResolver), Some(journal)).unwrap()
    };
    let prox = open().await;
    let (secret, _) = prox
        .clients()
        .invite(Some("pad"), Duration::from_secs(600))
        .unwrap();
    let (serving, mut device) = start(&prox, CLIENT);
    let secret = secret.to_text();
    device
        .send(format!(
            "ENROL * HTTP/1.1\r\nHost: h\r\nInvitation: {secret}\r\n\r\n"
        ))
        .await;
    device.finish_sending().await;
    assert_eq!(device.answer().await.status, 200);
    ended(serving).await;
    let slow = ClientLimits {
        down_bytes_per_s: Some(200),
        deadline_s: Some(60),
        ..Default::default()
    };
    prox.set_client_limits("pad", Some(&slow)).unwrap();
    let (origin, data) = origin(100_000).await;
    let (serving, mut device) = start(&prox, CLIENT);
    device.send(get(&origin.url("/"), "")).await;
    device.finish_sending().await;
    // Much longer than a test takes, unless the running flow gets the new rate.
    device.read(100).await;
    prox.set_client_limits("pad", None).unwrap();
    let rest = device.read_rest().await;
    assert!(rest.ends_with(&data[1_000..]));
    device.finished();
    ended(serving).await;
    let now = prox.client_usage(&CLIENT);
    assert!(now.month.down > 100_000 && now.flows == 0, "{now:?}");

    prox.set_client_limits("pad", Some(&slow)).unwrap();
    prox.save_clients();
    prox.persist_copies().await.unwrap();
    drop(prox);
    let again = open().await;
    let after = again.client_usage(&CLIENT);
    assert_eq!(after.limits.down_bytes_per_s, 200);
    assert_eq!(after.month, now.month);
    let (serving, mut device) = start_until(&again, CLIENT, Some(Duration::from_secs(90)));
    device.send(get(&origin.url("/"), "")).await;
    device.finish_sending().await;
    let refused = device.answer().await.whole();
    assert_eq!(refused.status, 403, "{:?}", String::from_utf8(refused.body));
    ended(serving).await;
    again.persist_copies().await.unwrap();
}

#[tokio::test]
async fn metrics_tell_what_happened_and_nothing_of_whom() {
    let (origin, _) = origin(10_000).await;
    let prox = prox();
    let url = origin.url("/secret-path?secret-query");
    for client in [CLIENT, OTHER] {
        download(&prox, client, &url).await;
    }
    ask(&prox, "BAD\r\n\r\n").await;
    let metrics = prox.metrics(None);
    for line in [
        "cedos_prox_cache_lookups_total{result=\"miss\"} 2",
        "cedos_prox_origin_requests_total 2",
        "cedos_prox_flows_ended_total{outcome=\"delivered\"} 3",
        "cedos_prox_refusals_total{error=\"http_request_error\"} 1",
        "cedos_prox_flows{state=\"awake\"} 0",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is not in\n{metrics}");
    }
    let keys = [CLIENT, OTHER].map(|key| cedos_prox::show_key(&key));
    let port = origin.address.port().to_string();
    let told = [
        "secret",
        "127.0.0.1",
        "http:",
        "://",
        &port,
        &keys[0],
        &keys[0][..8],
        &keys[1],
    ];
    for personal in told {
        assert!(!metrics.contains(personal), "{personal} is in\n{metrics}");
    }
}

#[tokio::test]
async fn the_access_log_says_no_more_than_its_detail_and_is_opened_again() {
    use std::os::unix::fs::PermissionsExt;
    let (origin, _) = origin(10_000).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("access.log");
    let url = origin.url("/path?query");
    let details = [
        AccessDetail::Counts,
        AccessDetail::Origin,
        AccessDetail::Full,
    ];
    for (n, detail) in details.into_iter().enumerate() {
        let prox = prox();
        prox.log_access(Some(&path), detail).unwrap();
        download(&prox, CLIENT, &url).await;
        prox.flush_access_log().await;
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), n + 1, "appended: {text}");
        let line = &lines[n];
        assert_eq!(
            (&line["kind"], &line["status"]),
            (&"fetch".into(), &200.into())
        );
        assert!(line["down_bytes"].as_u64().unwrap() > 10_000, "{line}");
        let says = |text: &str| line.to_string().contains(text);
        assert_eq!(says("127.0.0.1"), detail >= AccessDetail::Origin, "{line}");
        assert_eq!(says("query"), detail == AccessDetail::Full, "{line}");
        assert_eq!(
            says(&cedos_prox::show_key(&CLIENT)),
            detail == AccessDetail::Full
        );
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        if detail == AccessDetail::Full {
            std::fs::rename(&path, folder.path().join("access.log.1")).unwrap();
            prox.reopen_access_log();
            download(&prox, CLIENT, &url).await;
            prox.flush_access_log().await;
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 1);
        }
    }
}

#[tokio::test]
async fn a_client_at_every_limit_costs_an_honest_one_nothing() {
    let rate = 400_000;
    let prox = prox_with(|config| {
        // Those that were named are remembered without a flow.
        config.allow_clients = vec![CLIENT, OTHER, THIRD];
        config.client_flows_max = 40;
        config.client_down_bytes_per_s = rate;
        config.client_up_bytes_per_s = rate;
        config.client_pinned_bytes_max = 3_000_000;
    });
    let (origin, data) = origin(200_000).await;
    let url = origin.url("/");
    let honest = async |client| {
        let began = Instant::now();
        for _ in 0..5 {
            let (answer, _) = download(&prox, client, &url).await;
            assert!(answer.whole().body == data);
        }
        began.elapsed()
    };
    let alone = honest(THIRD).await;
    let (mut hostile, began) = (Vec::new(), Instant::now());
    // Twice as many flows as it may have: downloads, most of which never get far, and uploads without an end.
    for n in 0..80 {
        let (serving, mut device) = start(&prox, OTHER);
        let head = match n % 2 {
            0 => get(&url, ""),
            _ => format!("PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 2900000\r\n\r\n"),
        };
        device.send(head).await;
        let sending = tokio::spawn(async move {
            if n % 2 == 1 {
                device.send(vec![0; 100_000]).await;
            }
            device.read_rest().await
        });
        hostile.push((serving, sending));
    }
    let wait = ProcessorWait::of(&[]);
    let beside = honest(CLIENT).await.saturating_sub(wait.so_far());
    eprintln!("five downloads took {alone:?} alone, and {beside:?} beside the hostile client");
    // Nothing but the honest one's own rate: with its share of a slow machine it takes a second and a half both times.
    assert!(beside < 5 * alone, "{beside:?} instead of {alone:?}");
    let used = prox.client_usage(&OTHER);
    let seconds = began.elapsed().as_secs_f64() + 1.0;
    assert!(
        used.flows <= 40 && used.pinned_bytes <= 3_000_000,
        "{used:?}"
    );
    // A second's worth at first, and what the buffers of flows round up.
    let most = seconds * rate as f64 * 1.1;
    assert!(
        (used.month.down as f64) < most && (used.month.up as f64) < most,
        "{used:?} in {seconds} s"
    );
    let honest = prox.client_usage(&CLIENT).month.down;
    assert!(honest > 1_000_000, "{honest}");
    for (serving, sending) in hostile {
        serving.abort();
        sending.abort();
    }
}
