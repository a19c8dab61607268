//! `cedos agent` over two real links in a network namespace: what crosses the one that costs, counted
//! by the kernel, while policies change and several transfers run.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::{ProcessorWait, sleep_beside};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, ended, pid_of};
use cedos_lab_rig::wait::{until, until_async};
use cedos_lab_rig::{PATIENCE, program, this_test};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const OBJECT_BYTES: usize = 16_000_000; // 6.4 s at 20 Mb/s

/// What a link may carry besides payload: handshakes, acknowledgements, neighbours.
const CONTROL_BYTES_MAX: u64 = 6_000;

async fn origin() -> ScriptedOrigin {
    let bytes = object(OBJECT_BYTES, 1);
    ScriptedOrigin::start_at("192.0.2.1", move |asked| {
        OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
    })
    .await
}

async fn origin_and_proxy(home: PathBuf) -> (ScriptedOrigin, ProxyProcess) {
    let origin = origin().await;
    let proxy = ProxyProcess::start(&home, "192.0.2.1:0", &[]).await;
    (origin, proxy)
}

struct Agent {
    child: Child,
    home: PathBuf,
}

fn cedos(home: &Path, arguments: &[&str]) -> Command {
    let mut command = program::cedos(home, arguments);
    command.env("CEDOS_AGENT", home.join("agent.sock"));
    command
}

impl Agent {
    async fn start(home: &Path) -> Agent {
        Agent::start_with(home, &[]).await
    }

    async fn start_with(home: &Path, more: &[&str]) -> Agent {
        let arguments = [&["agent"], more].concat();
        let child = cedos(home, &arguments).spawn().expect("start the agent");
        until("an agent", || home.join("agent.sock").exists()).await;
        Agent {
            child,
            home: home.to_owned(),
        }
    }

    async fn run(&self, arguments: &[&str]) -> CedosRun {
        ended(cedos(&self.home, arguments).spawn().expect("start cedos")).await
    }

    async fn leave(&self, url: &str, file: &str, more: &[&str]) -> String {
        let get = ["get", "--detach", "--json", "-o", file, url];
        let run = self.run(&[&get[..], more].concat()).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        run.last()["id"].to_string()
    }

    async fn status(&self, id: &str) -> Value {
        self.run(&["status", id, "--json"]).await.last().clone()
    }

    async fn until(&self, id: &str, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        until_async(what, async || Some(self.status(id).await).filter(&wanted)).await
    }
}

/// How long this many bytes more than `before` take on cellular, without what processes waited for a processor.
async fn until_on_cell(before: u64, bytes: u64) -> Duration {
    let (wait, begun) = (ProcessorWait::of_this_and_descendants(), Instant::now());
    let come = until("bytes on wwan0", || received("wwan0") >= before + bytes);
    let ((), waited) = wait.during(come).await;
    begun.elapsed().saturating_sub(waited)
}

/// How many bytes come on cellular in the next seconds.
async fn on_cell(seconds: f64) -> u64 {
    let before = received("wwan0");
    // sleep: bytes in a span of time are the subject
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    received("wwan0") - before
}

async fn policies_change(home: &Path, url: &str, more: &[&str]) {
    wifi_on("198.51.100.7");
    cell_on();
    let mut agent = Agent::start(home).await;
    let before = received("wwan0");
    let free_only = [&["--policy", "free-only"], more].concat();
    let id = agent.leave(url, "out", &free_only).await;
    agent
        .until(&id, "some bytes", |told| told["bytes"].as_u64() > Some(0))
        .await;
    wifi_off();
    let (wait, lost) = (ProcessorWait::of_this_and_descendants(), Instant::now());
    let waiting = agent.until(&id, "a wait", |told| told["standing"] == "waiting");
    let (told, waited) = wait.during(waiting).await;
    assert_eq!(told["reason"], "path_cost", "{told}");
    let said = lost.elapsed().saturating_sub(waited);
    assert!(said < Duration::from_secs(1), "said after {said:?}");
    // sleep: that nothing comes in two seconds is the subject
    tokio::time::sleep(Duration::from_secs(2)).await;
    let leaked = received("wwan0") - before;
    assert!(
        leaked < CONTROL_BYTES_MAX,
        "{leaked} bytes on wwan0 for a free-only download"
    );

    // To and fro: an epoch, and what a handshake takes, or what was granted for a second.
    let before = received("wwan0");
    agent.run(&["edit", &id, "--policy", "any"]).await;
    let took = until_on_cell(before, 300_000).await;
    assert!(took < Duration::from_secs(2), "{took:?} after any");
    agent.run(&["edit", &id, "--policy", "free-only"]).await;
    // sleep: an epoch is to pass, and what was granted for a second
    sleep_beside(Duration::from_millis(2_000), &[pid_of(&agent.child)]).await;
    let carried = on_cell(1.5).await;
    assert!(
        carried < CONTROL_BYTES_MAX,
        "{carried} bytes on wwan0 after free-only"
    );

    // The agent is killed while it waits; its next run waits for the same.
    kill(
        Pid::from_raw(agent.child.id().expect("it runs") as i32),
        Signal::SIGKILL,
    )
    .expect("send");
    agent.child.wait().await.expect("it ends");
    std::fs::remove_file(home.join("agent.sock")).expect("its socket is left");
    let before = received("wwan0");
    let agent = Agent::start(home).await;
    agent
        .until(&id, "a wait", |told| told["reason"] == "path_cost")
        .await;
    wifi_on("198.51.100.99");
    let done = agent
        .until(&id, "the end", |told| told["standing"] == "done")
        .await;
    let leaked = received("wwan0") - before;
    assert!(
        leaked < CONTROL_BYTES_MAX,
        "{leaked} bytes on wwan0 after a crash"
    );
    assert!(
        done["metered_bytes"].as_u64() > Some(0),
        "of both runs: {done}"
    );
    let got = std::fs::read(home.join("out")).expect("the file");
    assert!(got == object(OBJECT_BYTES, 1), "other bytes");
}

#[test]
fn free_only_leaks_nothing_and_policies_hold_within_an_epoch_without_a_proxy() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let origin = origin_namespace(origin);
        policies_change(home.path(), &origin.url("/a"), &[]).await;
    });
}

#[test]
fn free_only_leaks_nothing_and_policies_hold_within_an_epoch_through_a_proxy() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        let prox = ["--prox", proxy.address.as_str()];
        policies_change(home.path(), &origin.url("/a"), &prox).await;
    });
}

#[test]
fn what_cellular_may_carry_is_used_up_through_a_proxy_too_and_ends_with_its_own_code() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        cell_on();
        let url = origin.url("/a");
        let prox = ["--prox", proxy.address.as_str(), "--max-cell", "1M", &url];
        let get = async |file: &str, more: &[&str]| {
            let get = ["get", "--json", "-o", file];
            let arguments = [&get[..], &prox[..], more].concat();
            program::run(home.path(), &arguments).await
        };
        for (file, more) in [
            ("fast", &["--policy", "fast"][..]),
            ("now", &["--now"]),
            ("any", &["--policy", "any", "--if-late", "fail"]),
        ] {
            let run = get(file, more).await;
            run.ends_with(11, "--max-cell");
            let last = run.last();
            assert_eq!(last["reason"], "over_budget", "{last}");
            assert!(last["bytes"].as_u64() <= Some(1_000_000), "{last}");
            // What came behind a lost packet is paid for, and does not count.
            assert!(last["bytes"].as_u64() > Some(500_000), "{last}");
            assert!(!run.reasons().contains(&"origin_wait"), "{:?}", run.events);
        }
        let agent = Agent::start(home.path()).await;
        let more = [&prox[..], &["--policy", "fast", "--json", "-o", "agents"]].concat();
        let run = agent.run(&[&["get"], &more[..]].concat()).await;
        run.ends_with(11, "--max-cell");
        // So is what the device may spend, for who does not wait.
        agent.run(&["budget", "set", "1"]).await;
        let now = ["get", "-o", "over", "--now", &url];
        agent.run(&now).await.ends_with(11, "--now does not wait");
    });
}

#[test]
fn programs_behind_the_agents_proxy_spend_the_devices_budget() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        cell_on();
        let local = ["--proxy", "127.0.0.1:1080", "--prox", &proxy.address];
        let agent = Agent::start_with(home.path(), &local).await;
        agent.run(&["budget", "set", "3M"]).await;
        let url = origin.url("/a");
        let curl = |file: &str| {
            let mut command = Command::new("curl");
            let via = ["-sS", "-x", "http://127.0.0.1:1080", "-w", "%{http_code}"];
            let file = home.path().join(file);
            command.args(via).arg("-o").arg(file).arg(&url);
            command.kill_on_drop(true);
            command
        };
        let before = received("wwan0");
        let first = curl("first").output();
        tokio::pin!(first);
        let budget = ["budget", "--json"];
        let used_up = async {
            until_async("a used up budget", async || {
                (agent.run(&budget).await.last()["left"] == 0).then_some(())
            })
            .await;
            // sleep: what was granted for a second is still to come
            sleep_beside(Duration::from_secs(2), &[pid_of(&agent.child)]).await;
        };
        let used_up = tokio::time::timeout(PATIENCE, used_up);
        tokio::select! {
            output = &mut first => panic!("it paid for all of it: {output:?}"),
            used_up = used_up => used_up.expect("it wants more than that"),
        }
        let carried = received("wwan0") - before;
        assert!(
            (2_500_000..3_600_000).contains(&carried),
            "{carried} bytes on wwan0 for a budget of 3 MB"
        );
        assert!(on_cell(2.0).await < 2 * CONTROL_BYTES_MAX);
        // Who comes now is told.
        let second = curl("second").output().await.expect("curl");
        assert_eq!(String::from_utf8_lossy(&second.stdout), "403");
        let told = std::fs::read_to_string(home.path().join("second")).expect("words");
        assert!(told.contains("cedos budget"), "{told}");
        // The first goes on when more may be spent, though nothing moved in between.
        // sleep: that a while without a byte does no harm is the subject
        tokio::time::sleep(Duration::from_secs(3)).await;
        let before = received("wwan0");
        agent.run(&["budget", "set", "5M"]).await;
        let took = until_on_cell(before, 1_000_000).await;
        assert!(took < Duration::from_secs(5), "{took:?} for 2 MB more");
        // And where there is a free link.
        wifi_on("198.51.100.7");
        let first = first.await.expect("curl");
        assert_eq!(String::from_utf8_lossy(&first.stdout), "200", "{first:?}");
        let whole = std::fs::read(home.path().join("first")).expect("a file");
        assert!(whole == object(OBJECT_BYTES, 1));
    });
}

#[test]
fn a_transfer_spends_what_is_left_of_the_budget_and_no_more() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        cell_on();
        let agent = Agent::start(home.path()).await;
        agent.run(&["budget", "set", "4M"]).await;
        let more = ["--policy", "any", "--prox", &proxy.address];
        let id = agent.leave(&origin.url("/a"), "a", &more).await;
        agent
            .until(&id, "the end of it", |told| told["reason"] == "over_budget")
            .await;
        // sleep: what was granted for a second is still to come
        sleep_beside(Duration::from_secs(2), &[pid_of(&agent.child)]).await;
        let budget = agent.run(&["budget", "--json"]).await.last().clone();
        let used = budget["used"].as_u64().expect("bytes");
        // At 20 Mb/s it was 6 MB when each second was granted anew what was left before it.
        assert!((3_500_000..4_100_000).contains(&used), "{budget}");
    });
}

#[test]
fn a_stream_beside_a_free_link_that_is_too_slow_for_it_keeps_to_the_budget() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        wifi_on("198.51.100.7");
        cell_on();
        let agent = Agent::start(home.path()).await;
        agent.run(&["budget", "set", "2M"]).await;
        let more = ["--json", "--store", "store", "--bitrate", "60M"];
        let url = origin.url("/a");
        let arguments = [&["url"], &more[..], &["--prox", &proxy.address, &url]].concat();
        let mut stream = cedos(home.path(), &arguments).spawn().expect("a stream");
        let mut lines = BufReader::new(stream.stdout.take().expect("its output")).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.expect("in time").expect("readable").expect("a line");
        let told: Value = serde_json::from_str(&line).expect("JSON");
        let link = told["link"].as_str().expect("a link");
        // At 20 Mb/s each the two would carry half of 16 MB each.
        let before = received("wwan0");
        let mut player = Command::new("curl");
        player.args(["-sS", "-o", "seen", link]);
        let played = player.current_dir(home.path()).output();
        let played = tokio::time::timeout(PATIENCE, played).await;
        let played = played.expect("in time").expect("curl");
        assert!(played.status.success(), "{played:?}");
        let seen = std::fs::read(home.path().join("seen")).expect("a file");
        assert!(seen == object(OBJECT_BYTES, 1));
        let carried = received("wwan0") - before;
        assert!(
            (1_200_000..2_300_000).contains(&carried),
            "{carried} bytes on wwan0 for a budget of 2 MB"
        );
        let budget = agent.run(&["budget", "--json"]).await.last().clone();
        assert!(budget["used"].as_u64() <= Some(2_100_000), "{budget}");
    });
}

#[test]
fn of_several_on_one_link_the_earliest_deadline_goes_first_when_time_is_short() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let folder = home.path().to_owned();
        let (origin, proxy) = origin_namespace(|| origin_and_proxy(folder));
        wifi_on("198.51.100.7");
        let agent = Agent::start(home.path()).await;
        let url = origin.url("/a");
        let prox = ["--prox", proxy.address.as_str()];
        let leave = async |file: &str, within: &str| {
            let more = [&["--within", within, "--policy", "free-only"], &prox[..]].concat();
            agent.leave(&url, file, &more).await
        };
        // 6.4 s each at 20 Mb/s: together all need 19 s, and the one that comes last is due first.
        let late = [leave("late-1", "90s").await, leave("late-2", "90s").await];
        // sleep: the two are to be under way, by less than what the third then needs
        tokio::time::sleep(Duration::from_secs(1)).await;
        let urgent = leave("urgent", "15s").await;
        let mut behind = 0;
        let begun = Instant::now();
        let first = loop {
            for id in &late {
                let told = agent.status(id).await;
                behind += usize::from(told["reason"] == "queued_behind");
            }
            let told = agent.status(&urgent).await;
            if told["standing"] == "done" {
                break told;
            }
            assert!(begun.elapsed() < PATIENCE, "{told}");
        };
        assert!(behind >= 1, "nobody waited for the urgent one: {first}");
        for id in &late {
            let told = agent.status(id).await;
            assert_ne!(told["standing"], "done", "before the urgent one: {told}");
        }
        for id in &late {
            let told = agent
                .until(id, "the end", |told| told["standing"] == "done")
                .await;
            assert_eq!(told["last"]["deadline_met"], true, "{told}");
        }
    });
}

#[test]
fn a_deadline_that_cannot_be_met_is_said_at_once() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let origin = origin_namespace(origin);
        wifi_on("198.51.100.7");
        let agent = Agent::start(home.path()).await;
        let id = agent
            .leave(&origin.url("/a"), "out", &["--within", "2s"])
            .await;
        let told = agent
            .until(&id, "a promise", |told| told["promise"]["p"].is_number())
            .await;
        let told = match told["promise"]["infeasible"] == true {
            true => told,
            // The size was not known yet.
            false => {
                agent
                    .until(&id, "not feasible", |told| {
                        told["promise"]["infeasible"] == true
                    })
                    .await
            }
        };
        assert!(told["promise"]["p"].as_f64() < Some(0.05), "{told}");
        let run = agent.run(&["why", &id]).await;
        run.ends_with(0, "not feasible");
        agent.run(&["cancel", &id]).await;
    });
}
