//! `cedos agent` as a program: what it takes over, keeps through `kill -9`, and says.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::home::Home;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::program;
use cedos_lab_rig::program::{ProxyProcess, ended, run};
use cedos_lab_rig::wait::until;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Command;

const TAG: &str = "\"v1\"";
const BYTES: usize = 400_000;

/// An origin that gives the first half, and the rest once the flag is set.
async fn halting(open: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &object(BYTES, 1), TAG);
        if open.load(Ordering::Relaxed) {
            OriginReply(answer, ReplyEnd::Close)
        } else if asked.range_from().is_none() {
            OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence)
        } else {
            OriginReply(Vec::new(), ReplyEnd::Close)
        }
    })
    .await
}

fn has_half(told: &Value) -> bool {
    told["bytes"] == BYTES / 2
}

fn stands(standing: &'static str) -> impl Fn(&Value) -> bool {
    move |told| told["standing"] == standing
}

#[tokio::test]
async fn a_download_is_followed_and_ends_as_without_an_agent() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let home = Home::new(&[]).await;
    let run = home
        .run(&["get", "--json", "-o", "out", &origin.url("/a")])
        .await;
    assert_eq!(run.code, 0, "{}", run.errors);
    let events: Vec<&str> = run
        .events
        .iter()
        .filter_map(|e| e["event"].as_str())
        .collect();
    assert_eq!(
        (events.first(), events.last()),
        (Some(&"begun"), Some(&"done"))
    );
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
    let id = run.last()["id"].to_string();
    home.run(&["ls"]).await.ends_with(0, "DONE");
    assert_eq!(home.run(&["status", &id]).await.code, 0);
    // What was needed to begin again is gone.
    assert!(!home.kept(&id).join("order.json").exists());
    // A file that nobody mentioned is not replaced, and what is wrong is said at once.
    std::fs::write(home.path().join("a"), "old").expect("write");
    home.run(&["get", &origin.url("/a")])
        .await
        .ends_with(2, "a exists");
    home.run(&["get", "--detach", "-o", "no/such/out", &origin.url("/a")])
        .await
        .ends_with(1, "no/such does not exist");
    home.run(&["get", "--detach", "-o", "/proc/out", &origin.url("/a")])
        .await
        .ends_with(1, "cannot create a file in /proc");
    let none = home
        .run(&["get", "-o", "no/such/out", &origin.url("/a")])
        .await;
    none.ends_with(1, "no/such does not exist");
}

#[tokio::test]
async fn after_kill_9_of_the_agent_a_download_goes_on_where_it_was() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let mut home = Home::new(&[]).await;
    let id = home.leave(&origin.url("/a"), &["--within", "1h"]).await;
    home.until(&id, "has half", has_half).await;
    // The part is synced every two seconds; what came after that may come again.
    let note = home.path().join("out.part.json");
    until("some of it is synced", || {
        let note = std::fs::read(&note).ok();
        let note: Option<Value> = note.and_then(|note| serde_json::from_slice(&note).ok());
        note.is_some_and(|note| note["durable_bytes"].as_u64() > Some(0))
    })
    .await;
    home.end(Signal::SIGKILL).await;
    home.run(&["ls"]).await.ends_with(0, "QUEUED");
    run(home.path(), &["pause", &id])
        .await
        .ends_with(1, "the agent is not running");
    open.store(true, Ordering::Relaxed);
    home.start(&[]).await;
    let run = home.run(&["wait", &id]).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
    assert!(origin.requests().last().expect("asked").range_from() > Some(0));
}

#[tokio::test]
async fn an_agent_that_is_stopped_puts_down_what_it_holds_and_takes_it_up_again() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let mut home = Home::new(&[]).await;
    let running = home.leave(&origin.url("/a"), &[]).await;
    home.until(&running, "has half", has_half).await;
    home.end(Signal::SIGTERM).await;
    open.store(true, Ordering::Relaxed);
    home.start(&[]).await;
    let run = home.until(&running, "is done", stands("done")).await;
    assert_eq!(run.last()["bytes"], BYTES);
    let from = origin.requests().last().expect("asked").range_from();
    assert!(
        from.is_some_and(|from| from + 16 * 1024 >= BYTES / 2),
        "{from:?}"
    );
}

#[tokio::test]
async fn a_transfer_is_paused_resumed_cancelled_and_tried_again() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let mut home = Home::new(&[]).await;
    let id = home.leave(&origin.url("/a"), &[]).await;
    home.until(&id, "has half", has_half).await;
    assert_eq!(home.run(&["pause", &id]).await.code, 0);
    let run = home.until(&id, "is paused", stands("paused")).await;
    assert_eq!(run.code, 75);
    assert_eq!(
        run.last()["bytes"],
        BYTES / 2,
        "what is there is still told"
    );
    // It stays so, whatever becomes of the agent.
    home.end(Signal::SIGKILL).await;
    home.start(&[]).await;
    let run = home.run(&["status", &id]).await;
    run.ends_with(75, "PAUSED");
    run.ends_with(75, &format!("cedos resume {id}"));
    home.run(&["resume", &id]).await;
    home.until(&id, "goes on", |told| told["standing"] == "waiting")
        .await;
    let cancelled = home.run(&["cancel", &id, "--json"]).await;
    assert_eq!(
        cancelled.last()["standing"],
        "cancelled",
        "{}",
        cancelled.last()
    );
    assert_eq!(home.run(&["status", &id]).await.code, 3);
    home.run(&["resume", &id])
        .await
        .ends_with(1, "`cedos retry` starts it again");
    home.run(&["cancel", &id]).await.ends_with(1, "has ended");
    open.store(true, Ordering::Relaxed);
    assert_eq!(home.run(&["retry", &id]).await.code, 0);
    home.until(&id, "is done", stands("done")).await;
    home.run(&["retry", &id]).await.ends_with(1, "is complete");
    home.run(&["pause", "99"])
        .await
        .ends_with(1, "there is no transfer 99");
}

/// The command with SIGHUP heeded, whether or not whoever runs the tests ignores it.
fn hearing_hangups(command: &Command) -> Command {
    let command = command.as_std();
    let mut env = Command::new("env");
    env.arg("--default-signal=HUP")
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(command.get_current_dir().expect("a folder"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => env.env(name, value),
            None => env.env_remove(name),
        };
    }
    env
}

#[tokio::test]
async fn who_leaves_what_cannot_be_in_time_is_told_so() {
    let folder = tempfile::tempdir().expect("a directory");
    let socket = folder.path().join("agent.sock");
    let listener = tokio::net::UnixListener::bind(&socket).expect("a socket");
    // An agent that knows the size at once.
    let agent = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("a visitor");
            let (read, mut write) = stream.into_split();
            let mut lines = BufReader::new(read).lines();
            while let Some(asked) = lines.next_line().await.expect("readable") {
                if asked.contains("hello") {
                    write.write_all(b"{\"ok\":true}\n").await.expect("written");
                    continue;
                }
                let promise = json!({"p": 0.0, "infeasible": true, "metered_bytes_expected": 0,
                                     "metered_bytes_95": 0, "metered_bytes_worst": 0, "left_s": 5.0});
                let text = format!(
                    "{}\n{}\n",
                    json!({"ok": true, "id": 5, "file": "/out", "url": "http://h/a"}),
                    json!({"event": "progress", "id": 5, "promise": promise}),
                );
                write.write_all(text.as_bytes()).await.expect("written");
            }
        }
    });
    let get = ["get", "--detach", "http://h/a", "--within", "5s"];
    let mut command = program::cedos(folder.path(), &get);
    let child = command.env("CEDOS_AGENT", &socket).spawn();
    let run = ended(child.expect("start cedos")).await;
    run.ends_with(
        0,
        "note: it will probably be late: under 1 % likely to finish in 5 s",
    );
    agent.abort();
}

#[tokio::test]
async fn what_ended_under_an_earlier_agent_is_still_known_to_every_verb() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let mut home = Home::new(&[]).await;
    let id = home.leave(&origin.url("/a"), &[]).await;
    home.until(&id, "is done", stands("done")).await;
    home.end(Signal::SIGTERM).await;
    home.start(&[]).await;
    let run = home.run(&["wait", &id, "--json"]).await;
    assert_eq!(
        (run.code, &run.last()["event"]),
        (0, &json!("done")),
        "{}",
        run.errors
    );
    for verb in [
        &["pause"][..],
        &["resume"],
        &["cancel"],
        &["retry"],
        &["edit", "--policy", "any"],
    ] {
        home.run(&[verb, &[&id]].concat())
            .await
            .ends_with(1, "is complete");
    }
    // The agent's transfers have no log of their own.
    let run = home.run(&["status", &id, "--json"]).await;
    assert_eq!(run.last()["log"], Value::Null, "{}", run.last());
}

#[tokio::test]
async fn a_transfer_of_another_process_is_not_unknown_and_one_of_the_agents_not_queued() {
    let origin = halting(Arc::new(AtomicBool::new(false))).await;
    let home = Home::new(&[]).await;
    let get = ["get", "--detach", "--json", "--stall", "1s", "-o", "own"];
    let url = origin.url("/a");
    let run = run(home.path(), &[&get[..], &[url.as_str()]].concat()).await;
    let own = run.last()["id"].to_string();
    for verb in [&["pause"][..], &["edit", "--policy", "any"]] {
        home.run(&[verb, &[&own]].concat())
            .await
            .ends_with(1, "in its own process");
    }
    assert_eq!(home.run(&["cancel", &own]).await.code, 0);
    assert_eq!(home.run(&["wait", &own]).await.code, 3);
    let id = home.leave(&url, &[]).await;
    home.until(&id, "has half", has_half).await;
    // Who does not ask the agent knows by its lock that it runs.
    let shown = program::run(home.path(), &["status", &id, "--json"]).await;
    let standing = shown.last()["standing"].as_str();
    assert!(
        matches!(standing, Some("running" | "waiting")),
        "{}",
        shown.last()
    );
    program::run(home.path(), &["cancel", &id])
        .await
        .ends_with(1, "names another");
}

#[tokio::test]
async fn ctrl_c_cancels_what_is_followed_and_a_follower_that_dies_or_loses_its_terminal_nothing() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = Home::new(&[]).await;
    for (signal, standing, code) in [
        (Signal::SIGINT, "cancelled", Some(3)),
        (Signal::SIGKILL, "waiting", None),
        (Signal::SIGHUP, "waiting", None),
    ] {
        let name = format!("out-{signal}");
        let get = [
            "get",
            "--json",
            "--stall",
            "1s",
            "-o",
            &name,
            &origin.url("/a"),
        ];
        let mut child = hearing_hangups(&home.command(&get)).spawn().expect("start");
        let mut lines = BufReader::new(child.stdout.take().expect("output")).lines();
        let id = loop {
            let line = lines.next_line().await.expect("readable").expect("a line");
            let event: Value = serde_json::from_str(&line).expect("JSON");
            if event["event"] == "waiting" {
                break event["id"].to_string();
            }
        };
        let pid = Pid::from_raw(child.id().expect("it runs") as i32);
        kill(pid, signal).expect("send");
        assert_eq!(child.wait().await.expect("it ends").code(), code);
        home.until(&id, standing, stands(standing)).await;
    }
}

#[tokio::test]
async fn a_deadline_that_passes_while_nobody_is_there_ends_as_it_was_asked() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let mut home = Home::new(&[]).await;
    let late = home.leave(&origin.url("/a"), &["--within", "3s"]).await;
    let fail = ["--within", "3s", "--if-late", "fail", "-o", "other"];
    let get = ["get", "--detach", "--json", "--stall", "1s"];
    let url = origin.url("/a");
    let run = home.run(&[&get[..], &fail, &[url.as_str()]].concat()).await;
    let failed = run.last()["id"].to_string();
    home.until(&late, "has half", has_half).await;
    home.end(Signal::SIGKILL).await;
    // sleep: the deadline of three seconds is to pass while nobody is there
    tokio::time::sleep(Duration::from_secs(3)).await;
    open.store(true, Ordering::Relaxed);
    home.start(&[]).await;
    let run = home.until(&late, "is done", stands("done")).await;
    assert_eq!(run.code, 10, "whole, only late");
    assert_eq!(run.last()["last"]["deadline_met"], false);
    let run = home.until(&failed, "has failed", stands("failed")).await;
    assert_eq!(run.code, 10, "{}", run.last());
}

#[tokio::test]
async fn when_the_clock_is_set_a_time_of_day_follows_it_and_a_span_does_not() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let Some(home) = Home::with_clock().await else {
        return;
    };
    let at = jiff::Timestamp::now() + Duration::from_secs(3_600);
    let at = at.to_string();
    let by_clock = ["--by", &at, "--if-late", "fail"];
    let by_clock = home.leave(&origin.url("/a"), &by_clock).await;
    let get = [
        "get",
        "--detach",
        "--json",
        "-o",
        "b",
        "--stall",
        "1s",
        "--within",
        "1h",
        "--if-late",
        "fail",
    ];
    let url = origin.url("/b");
    let run = home.run(&[&get[..], &[url.as_str()]].concat()).await;
    let within = run.last()["id"].to_string();
    home.until(&by_clock, "has half", has_half).await;
    home.until(&within, "has half", has_half).await;
    // Back, by a day: neither has less time than before.
    home.set_clock(-86_400);
    // sleep: that neither fails meanwhile is the subject
    tokio::time::sleep(Duration::from_secs(2)).await;
    for id in [&by_clock, &within] {
        let run = home.run(&["status", id, "--json"]).await;
        assert!(!stands("failed")(run.last()), "{}", run.last());
    }
    home.set_clock(7_200);
    let run = home.until(&by_clock, "has failed", stands("failed")).await;
    assert_eq!(run.code, 10, "{}", run.last());
    let run = home.run(&["status", &within, "--json"]).await;
    assert!(!stands("failed")(run.last()), "{}", run.last());
    open.store(true, Ordering::Relaxed);
    let run = home.until(&within, "is done", stands("done")).await;
    assert_eq!(
        (run.code, &run.last()["last"]["deadline_met"]),
        (0, &json!(true)),
        "{}",
        run.last()
    );
}

#[tokio::test]
async fn an_origin_that_is_gone_is_tried_until_the_deadline_and_then_missed() {
    let home = Home::new(&[]).await;
    let gone = {
        let origin = ScriptedOrigin::start(|_| OriginReply(Vec::new(), ReplyEnd::Close)).await;
        origin.url("/a")
    };
    let id = home.leave(&gone, &["--within", "6s", "--tries", "2"]).await;
    let run = home.until(&id, "waits", stands("waiting")).await;
    assert_eq!(run.last()["reason"], "origin_wait", "{}", run.last());
    let run = home.until(&id, "has failed", stands("failed")).await;
    assert_eq!(
        (run.code, &run.last()["reason"]),
        (10, &json!("origin_wait"))
    );
    // Followed, it ends as without an agent: with the fault, and at once.
    let run = home.run(&["get", "-o", "b", "--tries", "2", &gone]).await;
    assert_eq!(run.code, 1, "{}", run.errors);
}

#[tokio::test]
async fn a_proxy_that_is_gone_is_waited_for_and_the_download_goes_on() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = Home::new(&[]).await;
    let keep = ["--state-dir", "prox"];
    let mut proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &keep).await;
    let address = proxy.address.clone();
    let id = home.leave(&origin.url("/a"), &["--prox", &address]).await;
    home.until(&id, "has half", has_half).await;
    proxy.child.kill().await.expect("kill");
    let gone = |told: &Value| told["reason"] == "proxy_unreachable";
    let run = home.until(&id, "waits for the proxy", gone).await;
    assert_eq!(run.last()["standing"], "waiting", "{}", run.last());
    assert_eq!(run.last()["bytes"], BYTES / 2);
    open.store(true, Ordering::Relaxed);
    let place = address
        .strip_prefix("d2tp://")
        .and_then(|rest| rest.split('/').next());
    let _proxy = ProxyProcess::start(home.path(), place.expect("a place"), &keep).await;
    home.until(&id, "is done", stands("done")).await;
    assert!(std::fs::read(home.path().join("out")).expect("the file") == object(BYTES, 1));
}

#[tokio::test]
async fn credentials_are_kept_for_their_owner_alone_and_their_end_has_its_reason() {
    let origin = ScriptedOrigin::start(|asked| {
        let right = asked.headers.get("authorization");
        let right = right.is_some_and(|value| value.ends_with("bWU6aHVzaA=="));
        if right && asked.range_from().is_none() && asked.count == 0 {
            return OriginReply(
                cut(proper(asked, &object(BYTES, 1), TAG), 1_000),
                ReplyEnd::Silence,
            );
        }
        OriginReply(
            reply("401 Unauthorized", &[("Content-Length", "0")], b""),
            ReplyEnd::Close,
        )
    })
    .await;
    let mut home = Home::new(&[]).await;
    let url = origin.url("/a").replace("http://", "http://me:hush@");
    let id = home.leave(&url, &[]).await;
    home.until(&id, "has some", |told| told["bytes"] == 1_000)
        .await;
    home.end(Signal::SIGKILL).await;
    let folder = home.kept(&id);
    for name in ["job.json", "state.json"] {
        let text = std::fs::read_to_string(folder.join(name)).expect("text");
        assert!(!text.contains("hush"), "{name}: {text}");
    }
    let mode = |path: &Path| std::fs::metadata(path).expect("it is").permissions().mode() & 0o777;
    assert_eq!(mode(&folder.join("order.json")), 0o600);
    assert_eq!(mode(&folder), 0o700);
    home.start(&[]).await;
    let run = home.until(&id, "has failed", stands("failed")).await;
    assert_eq!(run.code, 1);
    assert_eq!(run.last()["reason"], "auth_required", "{}", run.last());
    assert!(!run.last().to_string().contains("hush"));
    let text = run.last()["last"]["text"].as_str().unwrap_or_default();
    assert!(text.contains("refused the credentials"), "{text}");
}

#[tokio::test]
async fn one_agent_has_the_socket_and_it_is_its_owners_alone() {
    let home = Home::new(&[]).await;
    let mode = std::fs::metadata(home.socket())
        .expect("it is")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    home.run(&["agent"]).await.ends_with(1, "already running");
    // What is no request is told so, and the next one is heard.
    let stream = UnixStream::connect(home.socket()).await.expect("connect");
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read).lines();
    write
        .write_all(b"dance\n{\"do\":\"hello\"}\n{\"do\":\"add\",\"order\":{\"verb\":\"get\",\"url\":\"http://h/a\",\
            \"file\":\"/a\",\"deadline\":{\"at\":\"2020-01-01T00:00:00Z\"}}}\n")
        .await
        .expect("write");
    let mut next = async || {
        let line = lines.next_line().await.expect("readable").expect("a line");
        serde_json::from_str::<Value>(&line).expect("JSON")
    };
    let (no, yes) = (next().await, next().await);
    let late = next().await;
    let text = late["text"].as_str().unwrap_or_default();
    assert!(text.contains("that time has passed"), "{late}");
    assert_eq!((&no["ok"], &no["exit"]), (&json!(false), &json!(2)));
    assert_eq!(
        (&yes["ok"], &yes["scheduler"]),
        (&json!(true), &json!("d2sched"))
    );
}

#[tokio::test]
async fn figures_hooks_and_the_allowance_are_there() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let home = Home::new(&[
        "--metrics",
        "127.0.0.1:0",
        "--when-free",
        "touch hook",
        "--when-not-free",
        "touch hook",
    ])
    .await;
    let done = home
        .run(&["get", "-o", "out", &origin.url("/a"), "--within", "1h"])
        .await;
    assert_eq!(done.code, 0, "{}", done.errors);
    let at = home.figures.clone().expect("an address");
    let mut stream = tokio::net::TcpStream::connect(&at).await.expect("connect");
    let ask = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read");
    for line in [
        "cedos_bytes_total{class=\"free\",kind=\"download\"} 400000",
        "cedos_leaked_bytes_total 0",
        "cedos_deadlines_total{outcome=\"met\"} 1",
    ] {
        assert!(text.contains(line), "no {line} in {text}");
    }
    assert!(
        !text.contains("127.0.0.1") && !text.contains("/a"),
        "{text}"
    );
    assert!(home.path().join("hook").exists());
    home.run(&["budget"]).await.ends_with(0, "no limit");
    let set = home
        .run(&["budget", "set", "2G", "--reset-day", "15", "--json"])
        .await;
    assert_eq!(set.last()["cap"], 2_000_000_000_u64, "{}", set.last());
    home.run(&["budget"]).await.ends_with(0, "2.00 GB left");
    home.run(&["net", "set", "lo", "dear"])
        .await
        .ends_with(1, "not one of free");
    home.run(&["net"]).await.ends_with(0, "lo:");
}

#[tokio::test]
async fn a_full_disk_ends_it_with_its_reason_and_retry_goes_on_when_there_is_room() {
    let origin = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(3_000_000, 15), TAG), ReplyEnd::Close)
    });
    let url = origin.await.url("/object");
    let folder = tempfile::tempdir().expect("a directory");
    let cedos = program::built("cedos");
    let cedos = cedos.display();
    let script = format!(
        "mkdir small && mount -t tmpfs -o size=1m none small || exit 77
         {cedos} agent & agent=$!
         until {cedos} ls >/dev/null 2>&1 && test -S agent.sock; do sleep 0.1; done
         id=$({cedos} get --detach -o small/out {url})
         {cedos} wait $id; echo \"{{\\\"code\\\": $?}}\"; {cedos} status $id --json
         mount -o remount,size=16m small && {cedos} retry $id && {cedos} wait $id
         echo \"{{\\\"code\\\": $?}}\"; kill $agent; wait $agent; sha256sum small/out >&2"
    );
    let child = Command::new("unshare")
        .args(["-Urm", "sh", "-c", &script])
        .current_dir(folder.path())
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", folder.path().join("agent.sock"))
        .env("XDG_STATE_HOME", folder.path().join(".state"))
        .env("XDG_CONFIG_HOME", folder.path().join(".config"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let Ok(child) = child else {
        return eprintln!("skipped: there is no unshare here");
    };
    let run = ended(child).await;
    if run.code == 77 || run.events.is_empty() {
        return eprintln!("skipped: this system does not let us mount a small disk");
    }
    let codes: Vec<i64> = run
        .events
        .iter()
        .filter_map(|e| e["code"].as_i64())
        .collect();
    assert_eq!(codes, [1, 0], "{:#?}\n{}", run.events, run.errors);
    let full = run.events.iter().find(|e| e["standing"] == "failed");
    let full = full.unwrap_or_else(|| panic!("{:#?}", run.events));
    assert_eq!(full["reason"], "storage_full", "{full}");
    let text = full["last"]["text"].as_str().unwrap_or_default();
    assert!(text.contains("cedos retry 1 resumes"), "{text}");
    use sha2::Digest;
    let digest = hex::encode(sha2::Sha256::digest(object(3_000_000, 15)));
    assert!(run.errors.contains(&digest), "{}", run.errors);
}

#[tokio::test]
async fn without_an_agent_get_works_by_itself_and_the_verbs_say_what_is_missing() {
    let origin = halting(Arc::new(AtomicBool::new(true))).await;
    let folder = tempfile::tempdir().expect("a directory");
    let home = folder.path();
    let got = run(home, &["get", "-o", "out", &origin.url("/a")]).await;
    assert_eq!(got.code, 0, "{}", got.errors);
    assert!(!got.errors.contains("agent"), "{}", got.errors);
    for verb in ["pause", "resume", "retry", "wait"] {
        run(home, &[verb, "1"])
            .await
            .ends_with(1, "the agent is not running");
    }
    run(home, &["edit", "1", "--policy", "any"])
        .await
        .ends_with(1, "the agent is not running");
    run(home, &["edit", "1"])
        .await
        .ends_with(2, "say what to change");
    run(home, &["budget"])
        .await
        .ends_with(1, "the agent is not running");
    run(home, &["net"]).await.ends_with(0, "lo:");
}
