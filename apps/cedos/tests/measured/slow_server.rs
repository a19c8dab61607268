//! A server that is slower than Wi-Fi: no metered byte can help, and a transfer beside it does not wait.
//! Judged by what the kernel counted on the metered link.

use std::path::Path;
use std::time::Duration;

use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, received, wifi_on};
use cedos_lab_rig::origin::{ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{AgentProcess, CedosRun, ProxyProcess, cedos as program_at, ended};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::{PATIENCE, this_test};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::time::{Instant, interval, sleep, timeout};

/// 60 s of what the slow server sends.
const SLOW_BYTES: usize = 7_200_000;
/// What the slow server sends each tenth of a second.
const PIECE_BYTES: usize = 12_000;

const FAST_BYTES: usize = 3_000_000; // 1.2 s at 20 Mb/s
/// The time for the fast transfer beside the slow one, with the start of a program.
const FAST_WITHIN: Duration = Duration::from_secs(12);

/// Handshakes, validation and acknowledgements of two sessions on the metered link; a tenth of what was
/// paid in vain before.
const CONTROL_BYTES_MAX: u64 = 24_000; // 6,000 for each session, and as much for neighbours and routes

/// The end of this time is near the end of the epoch in which a transfer asks.
const LATE_HEAD_AFTER: Duration = Duration::from_millis(800);

/// The time in which a transfer is back on the free link, if the metered one is no faster: twice what that takes.
const SETTLED_WITHIN: Duration = Duration::from_secs(16);

/// An origin with `/slow`, which takes a minute, `/late`, whose first answer is late and which is as slow, and `/fast`.
async fn uneven_origin() -> ScriptedOrigin {
    let listener = TcpListener::bind("192.0.2.1:0").await.expect("a port");
    ScriptedOrigin::play_at(listener, None, |request, mut stream| async move {
        if request.head.contains("/fast") {
            let answer = proper(&request, &object(FAST_BYTES, 2), "\"fast\"");
            let _ = stream.write_all(&answer).await;
            let _ = stream.flush().await;
            return;
        }
        let answer = proper(&request, &object(SLOW_BYTES, 1), "\"slow\"");
        if request.head.contains("/late") && request.range_from().is_none() {
            // sleep: an answer that takes long is the subject
            sleep(LATE_HEAD_AFTER).await;
        }
        let mut tenth = interval(Duration::from_millis(100));
        for piece in answer.chunks(PIECE_BYTES) {
            tenth.tick().await;
            if stream.write_all(piece).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
    })
}

async fn cedos(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> CedosRun {
    let mut command = program_at(home, arguments);
    command.env("CEDOS_AGENT", &agent.socket);
    ended(command.spawn().expect("start cedos")).await
}

/// Waits until `why` of a transfer has these words.
async fn named(home: &Path, agent: &AgentProcess, id: &str, words: &str) {
    let named = async {
        loop {
            let told = why(home, agent, id).await;
            let because = told["last"]["why"].as_str().unwrap_or_default();
            if because.contains(words) {
                return;
            }
            // sleep: the agent is asked a few times a second until it says so
            sleep(Duration::from_millis(200)).await;
        }
    };
    let named = timeout(PATIENCE, named).await;
    assert!(named.is_ok(), "{}", why(home, agent, id).await);
}

async fn detached(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> String {
    let get = ["get", "--detach", "--json"];
    let run = cedos(home, agent, &[&get[..], arguments].concat()).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    run.last()["id"].to_string()
}

async fn why(home: &Path, agent: &AgentProcess, id: &str) -> Value {
    cedos(home, agent, &["why", id, "--json"])
        .await
        .last()
        .clone()
}

#[test]
fn a_slow_server_costs_no_metered_byte_and_nobody_waits_behind_it() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (origin, prox) = origin_namespace(|| async move {
            let prox = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (uneven_origin().await, prox)
        });
        let home = home.path();
        wifi_on("198.51.100.7");
        cell_on();
        let agent = AgentProcess::start(home).await;
        let before = received("wwan0");

        // Half of the time that the server takes: no link can change that.
        let through = ["--prox", &prox.address, "--within", "30s"];
        let slow_url = origin.url("/slow");
        let slow = [&through[..], &["-o", "slow", &slow_url]].concat();
        let slow = detached(home, &agent, &slow).await;
        named(home, &agent, &slow, "the server sends").await;
        named(home, &agent, &slow, "mobile data would not help").await;

        let asked = Instant::now();
        let fast_url = origin.url("/fast");
        let fast = [
            "get",
            "--json",
            "--prox",
            &prox.address,
            "-o",
            "fast",
            &fast_url,
        ];
        let run = cedos(home, &agent, &fast).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        assert!(asked.elapsed() < FAST_WITHIN, "{:?}", asked.elapsed());

        // sleep: that nothing is paid for a while is the subject
        sleep(Duration::from_secs(6)).await;
        let told = why(home, &agent, &slow).await;
        assert_eq!(told["standing"], "running", "{told}");
        let likely = told["promise"]["p"].as_f64().expect("a forecast");
        assert!(likely < 0.3, "{told}");
        let carried = received("wwan0") - before;
        assert!(carried < CONTROL_BYTES_MAX, "{carried} bytes on wwan0");
    });
}

/// A direct transfer finds out by using the metered link for five seconds: a second more to switch, and
/// connections that overlap.
const TRIED_BYTES_MAX: u64 = 1_200_000;

#[test]
fn a_direct_transfer_leaves_a_metered_link_that_is_no_faster() {
    let _share = beside_others();
    in_namespace(this_test!(), || leaves_a_metered_link("/slow"));
}

#[test]
fn a_direct_transfer_whose_first_answer_came_late_leaves_a_metered_link_too() {
    let _share = beside_others();
    in_namespace(this_test!(), || leaves_a_metered_link("/late"));
}

async fn leaves_a_metered_link(path: &'static str) {
    let home = tempfile::tempdir().expect("a directory");
    let origin = origin_namespace(|| async move { uneven_origin().await });
    let home = home.path();
    wifi_on("198.51.100.7");
    cell_on();
    let agent = AgentProcess::start(home).await;
    let before = received("wwan0");
    let slow_url = origin.url(path);
    let slow = [
        "--policy", "fast", "--within", "30s", "-o", "slow", &slow_url,
    ];
    let slow = detached(home, &agent, &slow).await;
    let is_compared = named(home, &agent, &slow, "mobile data would not help");
    match path {
        "/slow" => is_compared.await,
        // A first answer that was late makes the free link look slow at first, and the metered one may be left before
        // they are compared.
        _ => {
            let _ = timeout(SETTLED_WITHIN, is_compared).await;
        }
    }
    let tried = received("wwan0") - before;
    assert!(tried < TRIED_BYTES_MAX, "{tried} bytes on wwan0");
    // sleep: what was under way may still come
    sleep(Duration::from_secs(1)).await;
    let known = received("wwan0");
    // sleep: that nothing is paid for a while is the subject
    sleep(Duration::from_secs(5)).await;
    let more = received("wwan0") - known;
    assert!(more < CONTROL_BYTES_MAX, "{more} bytes on wwan0");
    let told = why(home, &agent, &slow).await;
    assert_eq!(told["standing"], "running", "{told}");
}
