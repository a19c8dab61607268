//! `cedos put` and `cedos prox`, two processes on loopback: the origin's answer comes back, and what
//! cannot be sent is said.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::program::{AgentProcess, CedosRun, ProxyProcess, cedos, device_key, ended, run};
use cedos_lab_rig::wait::{until, within};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::sync::{Barrier, Semaphore, mpsc};

use crate::nodes::Balancer;

/// An origin that takes bodies by `Content-Length` and answers as `answer` says of (number, head, body).
async fn origin(answer: impl Fn(usize, &str, &[u8]) -> String + Send + Sync + 'static) -> String {
    let answer = Arc::new(answer);
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let answer = answer.clone();
        async move {
            if let Some(body) = request.body(&mut stream).await {
                let answer = answer(request.count, &request.head, &body);
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        }
    });
    origin.await.url("/place")
}

async fn put(folder: &Path, url: &str, proxy: &ProxyProcess, more: &[&str]) -> CedosRun {
    let arguments = ["put", "file", url, "--json", "--prox", &proxy.address];
    run(folder, &[&arguments[..], more].concat()).await
}

#[tokio::test]
async fn a_file_reaches_its_origin_and_the_answer_comes_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    for length in [0usize, 1, 3_000_000] {
        let content: Vec<u8> = (0..length).map(|i| (i * 7 + i / 256) as u8).collect();
        std::fs::write(folder.path().join("file"), &content).expect("written");
        let url = origin(move |_, head, body| {
            let same = body == content && head.starts_with("PUT /place HTTP/1.1\r\n");
            let word = if same { "same" } else { "else" };
            format!("HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\n{word}")
        })
        .await;
        let output = put(folder.path(), &url, &proxy, &[]).await;
        assert_eq!(output.code, 0, "{output:?}");
        let done = output.last();
        assert_eq!(
            (&done["event"], &done["status"]),
            (&"done".into(), &201.into())
        );
        assert_eq!(
            (&done["answer"], &done["bytes"]),
            (&"same".into(), &length.into())
        );
    }
}

#[tokio::test]
async fn a_limit_on_the_rate_holds_an_upload_back_with_an_agent_and_without() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let agent = AgentProcess::start(folder.path()).await;
    std::fs::write(folder.path().join("file"), [7; 180_000]).expect("written");
    for socket in [Path::new("none"), &*agent.socket] {
        let url = origin(|_, _, body| {
            let word = if body == [7; 180_000] { "same" } else { "else" };
            format!("HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\n{word}")
        })
        .await;
        let begun = Instant::now();
        let arguments = ["put", "file", &url, "--json", "--limit-rate", "60k"];
        let proxy = ["--prox", &proxy.address];
        let mut command = cedos(folder.path(), &[&arguments[..], &proxy].concat());
        command.env("CEDOS_AGENT", socket);
        let ran = ended(command.spawn().expect("start cedos")).await;
        assert_eq!(ran.code, 0, "{ran:?}");
        assert_eq!(ran.last()["answer"], "same", "{ran:?}");
        let took = begun.elapsed();
        // 180 kB at 60 kB/s, less a burst.
        assert!(took >= Duration::from_millis(2_800), "{took:?}");
    }
}

#[tokio::test]
async fn an_upload_that_arrived_is_delivered_in_the_proxys_log() {
    let folder = tempfile::tempdir().expect("a folder");
    let key = device_key(folder.path()).await;
    let _ = run(folder.path(), &["key", "gen", "-o", "prox.key"]).await;
    let arguments = [
        "prox",
        "--key",
        "prox.key",
        "--listen",
        "127.0.0.1:0",
        "--allow-private",
    ];
    let mut command = cedos(
        folder.path(),
        &[&arguments[..], &["--allow-client", &key]].concat(),
    );
    let log = folder.path().join("log");
    command.stderr(std::fs::File::create(&log).expect("a log"));
    let proxy = ProxyProcess::spawned(&mut command).await.expect("a proxy");
    std::fs::write(folder.path().join("file"), vec![7; 3_000]).expect("written");
    let url =
        origin(|_, _, _| "HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\nsame".into()).await;
    for more in [&[][..], &["--post"]] {
        let output = put(folder.path(), &url, &proxy, more).await;
        assert_eq!(output.code, 0, "{output:?}");
    }
    let ended = || {
        let log = std::fs::read_to_string(&log).unwrap_or_default();
        let lines = log.lines().filter(|line| line.contains("flow ended"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    until("the proxy has logged both", || ended().len() == 2).await;
    for line in ended() {
        assert!(line.contains("outcome=\"delivered\""), "{line}");
    }
}

#[tokio::test]
async fn what_the_origin_says_no_to_is_told_in_its_words_and_a_put_is_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    let no = |words: &'static str| {
        origin(move |_, _, _| {
            let length = words.len();
            format!("HTTP/1.1 409 Conflict\r\nContent-Length: {length}\r\n\r\n{words}")
        })
    };
    let output = put(
        folder.path(),
        &no("there is one already").await,
        &proxy,
        &[],
    )
    .await;
    assert_eq!(output.code, 1);
    let text = output.last()["text"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        text.contains("409") && text.contains("there is one already"),
        "{text}"
    );
    assert_eq!(
        output.last()["resumable_bytes"],
        0,
        "the same command sends another request"
    );

    let busy = || {
        origin(|number, _, _| match number {
            0 => "HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n".into(),
            _ => "HTTP/1.1 204 No Content\r\n\r\n".into(),
        })
    };
    let output = put(folder.path(), &busy().await, &proxy, &[]).await;
    assert_eq!(output.code, 0, "{output:?}");
    let output = put(folder.path(), &busy().await, &proxy, &["--post"]).await;
    assert_eq!(output.code, 1, "a POST is sent once: {output:?}");
}

#[tokio::test]
async fn an_upload_that_its_server_refuses_is_sent_less_and_less_often_and_promises_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), vec![7; 100_000]).expect("written");
    let moments = Arc::new(Mutex::new(Vec::new()));
    let asked = moments.clone();
    let url = origin(move |_, _, _| {
        asked.lock().expect("no panic").push(Instant::now());
        "HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nfull".into()
    })
    .await;
    let more = ["--tries", "5", "--within", "6h"];
    let output = put(folder.path(), &url, &proxy, &more).await;
    assert_eq!(output.code, 1, "{output:?}");
    let last = output.last();
    assert_eq!(last["deadline_met"], Value::Null, "there were hours left");
    let text = last["text"].as_str().unwrap_or_default();
    assert!(
        text.contains("500") && text.contains("gave up after 5 tries"),
        "{text}"
    );
    let moments = moments.lock().expect("no panic");
    assert_eq!(moments.len(), 5, "each try is one request: {output:?}");
    let pauses: Vec<Duration> = moments.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses[3] >= Duration::from_millis(1_900), "{pauses:?}");
    let waits: Vec<&Value> = output
        .events
        .iter()
        .filter(|event| event["event"] == "waiting")
        .collect();
    let names_it = |event: &&Value| {
        event["why"]
            .as_str()
            .is_some_and(|why| why.contains("answers 500"))
    };
    assert!(waits.len() >= 4 && waits.iter().all(names_it), "{waits:?}");
    // After the first refusal nobody says how likely the upload is in time.
    let refused = output
        .events
        .iter()
        .position(|event| event["event"] == "waiting");
    let later = &output.events[refused.expect("a refusal")..];
    assert!(
        later
            .iter()
            .all(|event| event["event"] != "progress" || event["promise"].is_null())
    );
}

#[tokio::test]
async fn two_that_send_the_same_at_once_are_two_uploads() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let content: Vec<u8> = (0..300_000).map(|i| (i * 7 + i / 256) as u8).collect();
    std::fs::write(folder.path().join("file"), &content).expect("written");
    // Nobody is answered before both are here.
    let both = Arc::new(Barrier::new(2));
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let (both, content) = (both.clone(), content.clone());
        async move {
            if request
                .body(&mut stream)
                .await
                .is_some_and(|body| body == content)
            {
                both.wait().await;
                let created = b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n";
                let _ = stream.write_all(created).await;
            }
        }
    });
    let url = origin.await.url("/a");
    let sent = async || {
        let run = put(folder.path(), &url, &proxy, &[]).await;
        assert_eq!(run.code, 0, "{run:?}");
        assert!(!run.reasons().contains(&"origin_wait"), "{run:?}");
    };
    tokio::join!(sent(), sent());
}

#[tokio::test]
async fn what_waiting_does_not_change_is_asked_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    for status in ["501 Not Implemented", "507 Insufficient Storage"] {
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        let origin = ScriptedOrigin::play(move |request, mut stream| {
            let answer = answer.clone();
            async move {
                request.body(&mut stream).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        })
        .await;
        let output = put(folder.path(), &origin.url("/place"), &proxy, &[]).await;
        assert_eq!(output.code, 1, "{output:?}");
        assert!(output.last()["text"].to_string().contains(&status[..3]));
        assert_eq!(origin.requests().len(), 1);
    }
}

#[tokio::test]
async fn without_a_proxy_or_a_file_nothing_is_sent() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    let said = async |arguments: &[&str], code: i32| {
        let output = run(folder.path(), arguments).await;
        assert_eq!(output.code, code, "{output:?}");
        output.errors
    };
    let nowhere = said(&["put", "file", "http://h/"], 2).await;
    assert!(nowhere.contains("--prox"));
    let prox = format!("d2tp://127.0.0.1:9/{}", "A".repeat(43));
    let absent = ["put", "absent", "http://h/", "--prox", &prox];
    assert!(said(&absent, 1).await.contains("cannot read"));
    let place = ["put", ".", "http://h/", "--prox", &prox];
    let refused = said(&place, 1).await;
    assert!(
        refused.contains("cedos put: . is a directory; send one file"),
        "{refused}"
    );
}

/// An origin that says when it has a body, and answers its first request only when it may.
async fn slow_origin() -> (String, mpsc::UnboundedReceiver<usize>, Arc<Semaphore>) {
    let (has, had) = mpsc::unbounded_channel();
    let may = Arc::new(Semaphore::new(0));
    let allowed = may.clone();
    let origin = ScriptedOrigin::play(move |request, mut stream| {
        let (has, allowed) = (has.clone(), allowed.clone());
        async move {
            let Some(body) = request.body(&mut stream).await else {
                return;
            };
            let _ = has.send(body.len());
            let number = request.count;
            if number == 0 {
                allowed
                    .acquire()
                    .await
                    .expect("it is never closed")
                    .forget();
            }
            let answer = format!("HTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\n{number}");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (origin.await.url("/place"), had, may)
}

#[tokio::test]
async fn a_put_whose_process_is_killed_goes_on_with_what_the_proxy_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), vec![7; 3_000_000]).expect("written");
    let (url, mut had, may) = slow_origin().await;
    let arguments = ["put", "file", &url, "--prox", &proxy.address];
    let mut first = cedos(folder.path(), &arguments).spawn().expect("cedos put");
    assert_eq!(within(had.recv()).await, Some(3_000_000));
    first.kill().await.expect("killed");
    may.add_permits(1);
    let output = put(folder.path(), &url, &proxy, &[]).await;
    assert_eq!(output.code, 0, "{output:?}");
    let done = output.last();
    assert_eq!(
        (&done["answer"], &done["bytes"]),
        (&"0".into(), &3_000_000.into())
    );
    let carried: u64 = (done["bytes_by_link"].as_object().expect("links").values())
        .filter_map(Value::as_u64)
        .sum();
    assert!(carried < 100_000, "{done}");
    // What was answered is over: the same again is another upload.
    for number in 1..10 {
        let again = put(folder.path(), &url, &proxy, &[]).await;
        assert_eq!(again.last()["answer"], number.to_string());
    }
    let tickets = std::fs::read_dir(folder.path().join(".state/cedos/uploads")).expect("a folder");
    assert_eq!(tickets.count(), 0);
}

/// Runs `cedos` beside an agent.
async fn beside(agent: &AgentProcess, folder: &Path, arguments: &[&str]) -> CedosRun {
    let mut command = cedos(folder, arguments);
    command.env("CEDOS_AGENT", &agent.socket);
    ended(command.spawn().expect("start cedos")).await
}

#[tokio::test]
async fn an_agents_post_is_delivered_once_though_the_agent_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), vec![7; 300_000]).expect("written");
    let (url, mut had, may) = slow_origin().await;
    let agent = AgentProcess::start(folder.path()).await;
    let post = [
        "put",
        "file",
        &url,
        "--post",
        "--detach",
        "--json",
        "--prox",
        &proxy.address,
    ];
    let id = beside(&agent, folder.path(), &post).await.last()["id"].to_string();
    assert_eq!(within(had.recv()).await, Some(300_000));
    agent.kill().await;
    may.add_permits(1);
    let agent = AgentProcess::start(folder.path()).await;
    let waited = beside(&agent, folder.path(), &["wait", &id, "--json"]).await;
    assert_eq!(waited.code, 0, "{waited:?}");
    assert_eq!(waited.last()["answer"], "0");
    assert!(had.try_recv().is_err(), "the origin got it twice");
}

/// Sends a POST of which the proxy gets all and acknowledges nothing; then another process with its key and none of its
/// state is reached: at the same address, or as the second node. Returns what `cedos put` said and how often the
/// origin got the POST.
async fn post_that_a_proxy_forgets(length: usize, is_other_node: bool) -> (CedosRun, usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let first = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let second = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let held = Duration::from_millis(60);
    let at = first.listens_at().parse().expect("an address");
    let balancer = Arc::new(Balancer::with_delay(at, held).await);
    std::fs::write(folder.path().join("file"), vec![7; length]).expect("written");
    let (had, mut posts) = mpsc::unbounded_channel();
    let at = second.listens_at().parse().expect("an address");
    let other = Arc::new(Balancer::with_delay(at, Duration::ZERO).await);
    // The session begins at the first node.
    other.set_cut(true);
    let (cut, open) = (balancer.clone(), other.clone());
    let url = origin(move |count, _, _| {
        if count == 0 {
            cut.set_cut(true);
            open.set_cut(false);
        }
        let _ = had.send(());
        "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n".into()
    })
    .await;
    let address = balancer.address_of(&first);
    let other_address = other.address_of(&second);
    let mut arguments = vec!["put", "file", &*url, "--post", "--json", "--within", "20s"];
    arguments.extend(["--prox", &*address]);
    if is_other_node {
        arguments.extend(["--prox", &*other_address]);
    }
    let running = cedos(folder.path(), &arguments).spawn().expect("cedos");
    within(posts.recv()).await.expect("the first POST");
    if !is_other_node {
        balancer.move_to(&second);
        drop(first);
        balancer.set_cut(false);
    }
    let run = ended(running).await;
    let mut count = 1;
    while posts.try_recv().is_ok() {
        count += 1;
    }
    (run, count)
}

#[tokio::test]
async fn a_post_that_a_proxy_may_have_is_not_begun_again_at_one_that_does_not_know_it() {
    let length = 500;
    for is_other_node in [false, true] {
        let (run, count) = post_that_a_proxy_forgets(length, is_other_node).await;
        assert_eq!(count, 1, "{is_other_node}: {run:?}");
        run.ends_with(1, "not sent again");
    }
}

#[tokio::test]
async fn a_put_whose_node_falls_silent_in_its_middle_reaches_the_origin_once_through_the_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let second = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let start = async |node: &ProxyProcess| {
        let at = node.listens_at().parse().expect("an address");
        Arc::new(Balancer::with_delay(at, Duration::ZERO).await)
    };
    let (before_first, before_second) = (start(&first).await, start(&second).await);
    // The session begins at the first node.
    before_second.set_cut(true);
    before_first.cut_after(1_000_000);
    let content: Vec<u8> = (0..20_000_000u32)
        .map(|i| (i * 7 + i / 256) as u8)
        .collect();
    std::fs::write(folder.path().join("file"), &content).expect("written");
    let (had, mut puts) = mpsc::unbounded_channel();
    let url = origin(move |_, _, body| {
        let _ = had.send(body == content);
        "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n".into()
    })
    .await;
    let addresses = [
        before_first.address_of(&first),
        before_second.address_of(&second),
    ];
    let both = ["--prox", &addresses[0], "--prox", &addresses[1]];
    let arguments = [&["put", "file", &url, "--json"][..], &both].concat();
    let running = cedos(folder.path(), &arguments).spawn().expect("cedos");
    until("the first node is silent", || before_first.is_cut()).await;
    before_second.set_cut(false);
    let run = ended(running).await;
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(puts.recv().await, Some(true));
    assert!(puts.try_recv().is_err(), "the origin got it twice");
}

#[tokio::test]
async fn an_upload_is_handed_to_the_agent_followed_or_left() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    let url = origin(|number, _, body| {
        let words = format!("{number}: {} bytes", body.len());
        let length = words.len();
        format!("HTTP/1.1 201 Created\r\nContent-Length: {length}\r\n\r\n{words}")
    })
    .await;
    std::fs::write(folder.path().join("file"), vec![7; 300_000]).expect("written");
    let agent = AgentProcess::start(folder.path()).await;
    let put = ["put", "file", &url, "--json", "--prox", &proxy.address];
    let followed = beside(&agent, folder.path(), &put).await;
    assert_eq!(followed.code, 0, "{followed:?}");
    let told = followed.last();
    assert_eq!(
        (&told["status"], &told["verb"]),
        (&201.into(), &"put".into())
    );
    assert_eq!(told["answer"], "0: 300000 bytes");
    // Each is an upload by itself, however soon it follows.
    for number in 1..10 {
        let left = beside(&agent, folder.path(), &[&put[..], &["--detach"]].concat()).await;
        let id = left.last()["id"].to_string();
        let waited = beside(&agent, folder.path(), &["wait", &id, "--json"]).await;
        assert_eq!(waited.code, 0, "{waited:?}");
        assert_eq!(waited.last()["answer"], format!("{number}: 300000 bytes"));
    }
    // Without an agent there is nobody to leave it to.
    let alone = [&put[..], &["--detach", "--alone"]].concat();
    beside(&agent, folder.path(), &alone)
        .await
        .ends_with(1, "needs the agent");
}
