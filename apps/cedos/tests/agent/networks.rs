//! `cedos agent` beside stand-ins for NetworkManager, logind and a desktop (python-dbusmock's), over
//! links in a network namespace. Passes, saying so, where those cannot be had.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::bus::{BusKind, ServiceBus};
use cedos_lab_rig::missing_tool::skip_without;
use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::processor_wait::sleep_beside;
use cedos_lab_rig::program::{CedosRun, ended, pid_of};
use cedos_lab_rig::wait::until_async;
use cedos_lab_rig::{PATIENCE, program, this_test};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use zbus::{ObjectPath, Proxy, Variant};

const OBJECT_BYTES: usize = 16_000_000; // 6.4 s at 20 Mb/s

/// A user's machine.
struct Home {
    folder: tempfile::TempDir,
    system_bus: Option<String>,
    session_bus: Option<String>,
    agent: Option<Child>,
    figures: Option<String>,
}

impl Home {
    fn new() -> Home {
        Home {
            folder: tempfile::tempdir().expect("a directory"),
            system_bus: None,
            session_bus: None,
            agent: None,
            figures: None,
        }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn settle(&self, settings: &str) {
        let folder = self.path().join(".config/cedos");
        std::fs::create_dir_all(&folder).expect("a directory");
        std::fs::write(folder.join("config.toml"), settings).expect("write");
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program::cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.path().join("agent.sock"));
        for (name, bus) in [
            ("DBUS_SYSTEM_BUS_ADDRESS", &self.system_bus),
            ("DBUS_SESSION_BUS_ADDRESS", &self.session_bus),
        ] {
            if let Some(bus) = bus {
                command.env(name, bus);
            }
        }
        command
    }

    async fn start(&mut self, more: &[&str]) {
        let arguments = [&["agent", "--metrics", "127.0.0.1:0"], more].concat();
        let mut child = self.command(&arguments).spawn().expect("start the agent");
        let mut lines = BufReader::new(child.stderr.take().expect("its errors")).lines();
        let mut next = async || {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
            line.expect("in time").expect("readable").expect("a line")
        };
        let line = next().await;
        assert!(line.contains("ready at"), "{line}");
        let line = next().await;
        let at = line.split("http://").nth(1).expect("an address");
        self.figures = Some(at.trim_end_matches("/metrics").to_owned());
        // Nobody reads what it says from here on; it must not wait for that.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        self.agent = Some(child);
    }

    fn pid(&self) -> Pid {
        pid_of(self.agent.as_ref().expect("it runs"))
    }

    async fn end(&mut self, signal: Signal) {
        let mut agent = self.agent.take().expect("it runs");
        let pid = Pid::from_raw(agent.id().expect("a process") as i32);
        kill(pid, signal).expect("send");
        let ended = tokio::time::timeout(PATIENCE, agent.wait()).await;
        ended.expect("it ends").expect("a status");
    }

    async fn run(&self, arguments: &[&str]) -> CedosRun {
        ended(self.command(arguments).spawn().expect("start cedos")).await
    }

    async fn leave(&self, url: &str, file: &str, more: &[&str]) -> String {
        let get = ["get", "--detach", "--json", "-o", file, url];
        let run = self.run(&[&get[..], more].concat()).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        run.last()["id"].to_string()
    }

    /// Asks again and again.
    async fn until(&self, ask: &[&str], what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        until_async(what, async || {
            let run = self.run(ask).await;
            run.events.into_iter().find(&wanted)
        })
        .await
    }

    async fn figure(&self, name: &str) -> u64 {
        let at = self.figures.clone().expect("an address");
        let mut stream = tokio::net::TcpStream::connect(&at).await.expect("connect");
        let ask = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        line.rsplit(' ')
            .next()
            .and_then(|n| n.parse().ok())
            .expect("a number")
    }
}

async fn origin() -> ScriptedOrigin {
    let bytes = object(OBJECT_BYTES, 1);
    ScriptedOrigin::start_at("192.0.2.1", move |asked| {
        OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
    })
    .await
}

const MANAGER: &str = "org.freedesktop.NetworkManager";
const MANAGER_PATH: &str = "/org/freedesktop/NetworkManager";

/// NetworkManager with wlan0, which sees two networks.
struct Manager {
    bus: ServiceBus,
    wlan: String,
}

impl Manager {
    async fn start() -> Option<Manager> {
        let bus = ServiceBus::with("networkmanager", MANAGER).await?;
        let mock = bus.mock(MANAGER, MANAGER_PATH).await;
        let added = mock.call("AddWiFiDevice", &("wlan", "wlan0", 100i32)).await;
        let wlan: String = added.expect("a device");
        for (name, ssid, last) in [("train", "Train", 1), ("home", "Home", 2)] {
            let bssid = format!("02:00:00:00:00:0{last}");
            let point = (
                &*wlan, name, ssid, &*bssid, 2u32, 2_412u32, 54_000u32, 70u8, 0u32,
            );
            let _: String = mock.call("AddAccessPoint", &point).await.expect("a point");
        }
        Some(Manager { bus, wlan })
    }

    /// wlan0 is on this access point now.
    async fn join(&self, name: &str) {
        let path = format!("/org/freedesktop/NetworkManager/AccessPoint/{name}");
        let path = ObjectPath::try_from(path).expect("a path");
        let wireless = "org.freedesktop.NetworkManager.Device.Wireless";
        self.set(wireless, "ActiveAccessPoint", Variant::from(path))
            .await;
    }

    async fn set(&self, interface: &'static str, name: &str, value: Variant<'_>) {
        let of = |interface| Proxy::new(&self.bus.connection, MANAGER, &*self.wlan, interface);
        let device = of(interface).await.expect("a proxy");
        let copy = value.try_clone().expect("a copy");
        if device.set_property(name, copy).await.is_err() {
            let mock = of("org.freedesktop.DBus.Mock").await.expect("a proxy");
            let added = (interface, name, value);
            let _: () = mock.call("AddProperty", &added).await.expect("added");
        }
        // Real ones say so by themselves.
        let mock = self.bus.mock(MANAGER, MANAGER_PATH).await;
        let nudge: Vec<Variant<'_>> = Vec::new();
        let said = ("", "Nudge", "", nudge);
        let _: () = mock.call("EmitSignal", &said).await.expect("said");
    }
}

#[test]
fn a_link_is_known_by_its_network_and_judged_by_settings_and_the_manager() {
    in_namespace(this_test!(), || async {
        let Some(manager) = Manager::start().await else {
            return;
        };
        let _origin = origin_namespace(origin);
        wifi_on("198.51.100.7");
        manager.join("train").await;
        let mut home = Home::new();
        home.system_bus = Some(manager.bus.address().to_owned());
        home.settle("[[network]]\nssid = \"Train\"\nclass = \"metered\"\n");
        let ls = ["net", "ls", "--json"];
        let is = |ssid: &'static str, class: &'static str, because: &'static str| {
            move |link: &Value| {
                let text = link["because"].as_str().unwrap_or_default();
                link["link"] == "wlan0"
                    && (link["ssid"] == ssid && link["class"] == class)
                    && text.contains(because)
            }
        };
        // Without an agent too.
        home.until(
            &ls,
            "by the settings",
            is("Train", "metered", "your settings"),
        )
        .await;
        home.start(&[]).await;
        let link = home
            .until(&ls, "the same", is("Train", "metered", "your settings"))
            .await;
        assert_eq!(link["network"], "wifi:Train", "{link}");
        let said = home.run(&["net", "set", "wlan0", "free", "--json"]).await;
        assert_eq!(said.last()["network"], "wifi:Train", "{}", said.last());
        home.until(&ls, "as it was said", is("Train", "free", "set by you"))
            .await;
        // On the next network the word for the last one means nothing.
        manager.join("home").await;
        home.until(&ls, "as it seems", is("Home", "free", "free by default"))
            .await;
        let device = "org.freedesktop.NetworkManager.Device";
        manager.set(device, "Metered", Variant::from(1u32)).await;
        home.until(&ls, "metered", is("Home", "metered", "network's settings"))
            .await;
        manager
            .set(device, "Ip4Connectivity", Variant::from(2u32))
            .await;
        home.until(&ls, "a portal", |link| link["portal"] == true)
            .await;
        home.run(&["net"])
            .await
            .ends_with(0, "on Home at 70 %, requires a sign-in");
        // It is remembered of the network, by the next agent as well.
        home.end(Signal::SIGKILL).await;
        manager.join("train").await;
        home.start(&[]).await;
        home.until(&ls, "as it was said", is("Train", "free", "set by you"))
            .await;
        home.run(&["net", "set", "Train", "auto"]).await;
        home.until(
            &ls,
            "by the settings",
            is("Train", "metered", "your settings"),
        )
        .await;
        home.run(&["net", "set", "Trian", "free"])
            .await
            .ends_with(1, "no device or network");
    });
}

#[test]
fn the_machine_is_woken_while_a_transfer_waits_and_kept_awake_while_it_moves() {
    in_namespace(this_test!(), || async {
        let Some(bus) = ServiceBus::with("logind", "org.freedesktop.login1").await else {
            return;
        };
        let origin = origin_namespace(origin);
        cell_on();
        let mut home = Home::new();
        home.system_bus = Some(bus.address().to_owned());
        home.start(&["--look-every", "1s"]).await;
        let looks = "cedos_wakeups_total{for=\"look\"}";
        // Nothing waits: nothing rings.
        // sleep: that nothing rings for longer than two looks take is the subject
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(home.figure(looks).await, 0);
        let id = home
            .leave(&origin.url("/a"), "out", &["--policy", "free-only"])
            .await;
        let status = ["status", id.as_str(), "--json"];
        let told = home
            .until(&status, "a look", |told| told["vigil"]["look"].is_string())
            .await;
        assert_eq!(
            (&told["standing"], &told["vigil"]["awake"]),
            (&"waiting".into(), &false.into())
        );
        home.run(&["why", &id])
            .await
            .ends_with(0, "looks for networks again at");
        assert!(bus.inhibitors().await.is_empty());
        until_async("it is woken", async || {
            (home.figure(looks).await >= 2).then_some(())
        })
        .await;
        wifi_on("198.51.100.7");
        let [_, _, why, _] = until_async("it may not sleep", async || {
            bus.inhibitors().await.into_iter().next()
        })
        .await;
        assert!(why.contains("out"), "{why}");
        home.until(&status, "the end", |told| told["standing"] == "done")
            .await;
        until_async("it may sleep", async || {
            bus.inhibitors().await.is_empty().then_some(())
        })
        .await;
        let after = home.figure(looks).await;
        // sleep: that nothing rings for longer than two looks take is the subject
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        assert_eq!(home.figure(looks).await, after, "woken for nothing");
    });
}

#[test]
fn a_cautious_cap_of_a_network_ends_before_it_and_a_soft_one_goes_on() {
    in_namespace(this_test!(), || async {
        let origin = origin_namespace(origin);
        cell_on();
        let mut home = Home::new();
        let cap = "[[network]]\ntype = \"cellular\"\ncap = 8000000\ncutoff = ";
        home.settle(&format!("{cap}\"cautious\"\n"));
        home.start(&[]).await;
        let id = home
            .leave(&origin.url("/a"), "out", &["--policy", "any"])
            .await;
        let status = ["status", id.as_str(), "--json"];
        let waits = |told: &Value| told["standing"] == "waiting" && told["reason"] == "over_budget";
        let told = home.until(&status, "a wait", waits).await;
        let paid = told["metered_bytes"].as_u64().expect("a count");
        // Nine tenths of it, and what a second at 2.5 MB/s brings.
        assert!((7_200_000..11_000_000).contains(&paid), "{paid}");
        let before = received("wwan0");
        // sleep: that nothing comes beyond the cap is the subject
        tokio::time::sleep(Duration::from_secs(2)).await;
        let more = received("wwan0") - before;
        assert!(more < 20_000, "{more} bytes beyond the cap");
        let link = home
            .until(&["net", "--json"], "it", |link| link["link"] == "wwan0")
            .await;
        assert_eq!(
            (&link["cap"]["left"], &link["cap"]["cutoff"]),
            (&0.into(), &"cautious".into())
        );
        assert_eq!(home.figure("cedos_leaked_bytes_total").await, 0);
        // It is remembered.
        home.end(Signal::SIGTERM).await;
        home.start(&[]).await;
        home.until(&status, "a wait", waits).await;
        home.end(Signal::SIGTERM).await;
        home.settle(&format!("{cap}\"soft\"\n"));
        home.start(&[]).await;
        home.until(&status, "the end", |told| told["standing"] == "done")
            .await;
        let link = home
            .until(&["net", "--json"], "it", |link| link["link"] == "wwan0")
            .await;
        assert!(link["cap"]["used"].as_u64() > Some(8_000_000), "{link}");
        assert!(std::fs::read(home.path().join("out")).expect("a file") == object(OBJECT_BYTES, 1));
    });
}

#[test]
fn what_was_paid_for_though_wifi_came_back_in_time_is_counted_as_avoidable() {
    in_namespace(this_test!(), || async {
        let origin = origin_namespace(origin);
        wifi_on("198.51.100.7");
        cell_on();
        let mut home = Home::new();
        home.start(&[]).await;
        let url = origin.url("/a");
        let done = |told: &Value| told["standing"] == "done";
        // Both are measured: by one that pays for nothing, and by one that is told to pay.
        let first = home.leave(&url, "first", &["--policy", "free-only"]).await;
        home.until(&["status", &first, "--json"], "the end", done)
            .await;
        wifi_off();
        let second = home.leave(&url, "second", &["--policy", "any"]).await;
        home.until(&["status", &second, "--json"], "the end", done)
            .await;
        let avoidable = "cedos_avoidable_bytes_total{kind=\"download\"}";
        assert_eq!(home.figure(avoidable).await, 0);
        // Nobody knows that Wi-Fi will be back, and time becomes short, so it pays …
        let id = home.leave(&url, "out", &["--within", "1h"]).await;
        let status = ["status", id.as_str(), "--json"];
        home.until(&status, "a wait", |told| told["reason"] == "path_cost")
            .await;
        home.run(&["edit", &id, "--within", "9s"]).await;
        let pays = |told: &Value| told["metered_bytes"].as_u64() > Some(1_000_000);
        home.until(&status, "a payment", pays).await;
        // … and then it is, and there would have been time.
        wifi_on("198.51.100.7");
        home.run(&["edit", &id, "--within", "25s"]).await;
        let told = home.until(&status, "the end", done).await;
        let paid = told["metered_bytes"].as_u64().expect("a count");
        let begun = Instant::now();
        let avoidable = loop {
            let told = home
                .figure("cedos_avoidable_bytes_total{kind=\"download\"}")
                .await;
            if told > 0 {
                break told;
            }
            assert!(begun.elapsed() < PATIENCE, "{paid} paid, nothing avoidable");
            // sleep: the agent looks back a few times a minute, and is asked until it has
            tokio::time::sleep(Duration::from_millis(200)).await;
        };
        assert!(
            (paid / 2..=paid).contains(&avoidable),
            "{avoidable} of {paid}"
        );
    });
}

#[tokio::test]
async fn what_was_learnt_is_kept_and_damage_costs_it_and_nothing_else() {
    let mut home = Home::new();
    home.start(&[]).await;
    home.end(Signal::SIGTERM).await;
    let learnt = home.path().join(".state/cedos/learnt");
    let mut bytes = std::fs::read(&learnt).expect("it is written down");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&learnt, &bytes).expect("write");
    home.start(&[]).await;
    assert_eq!(home.run(&["ls"]).await.code, 0);
    assert!(std::fs::read(learnt.with_extension("damaged")).expect("put aside") == bytes);
    assert!(!learnt.exists());
    home.end(Signal::SIGKILL).await;
    home.start(&[]).await;
    assert_eq!(home.run(&["ls"]).await.code, 0);
}

#[tokio::test]
async fn the_desktop_is_told_what_failed_and_its_answer_is_done() {
    const DESKTOP: &str = "org.freedesktop.Notifications";
    const PATH: &str = "/org/freedesktop/Notifications";
    let Some(bus) =
        ServiceBus::with_service("notification_daemon", DESKTOP, BusKind::Session).await
    else {
        return;
    };
    let there = Arc::new(AtomicBool::new(false));
    let is_there = there.clone();
    let origin = ScriptedOrigin::start(move |asked| match is_there.load(Ordering::Relaxed) {
        true => OriginReply(proper(asked, &object(10_000, 1), "\"v1\""), ReplyEnd::Close),
        false => OriginReply(
            reply("404 Not Found", &[("Content-Length", "0")], b""),
            ReplyEnd::Close,
        ),
    })
    .await;
    let mut home = Home::new();
    home.session_bus = Some(bus.address().to_owned());
    home.start(&[]).await;
    let id = home.leave(&origin.url("/a"), "episode", &[]).await;
    let mock = bus.mock(DESKTOP, PATH).await;
    let told = async |what: &str, wanted: &dyn Fn(&str) -> bool| {
        type Call = (u64, String, Vec<zbus::OwnedVariant>);
        let begun = Instant::now();
        loop {
            let calls: Vec<Call> = mock.call("GetCalls", &()).await.expect("calls");
            let words: Vec<String> = calls.iter().map(|call| format!("{:?}", call.2)).collect();
            if words.iter().any(|words| wanted(words)) {
                return;
            }
            assert!(begun.elapsed() < PATIENCE, "never {what}: {words:#?}");
            // sleep: the stand-in keeps what it was told and is asked for it
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    told("a failure", &|words| {
        words.contains("episode failed") && words.contains("retry")
    })
    .await;
    let status = ["status", id.as_str(), "--json"];
    home.until(&status, "a failure", |told| told["standing"] == "failed")
        .await;
    there.store(true, Ordering::Relaxed);
    let answer: Vec<Variant<'_>> = vec![Variant::from(1u32), Variant::from("retry")];
    let said = (DESKTOP, "ActionInvoked", "us", answer);
    let _: () = mock.call("EmitSignal", &said).await.expect("said");
    home.until(&status, "the end", |told| told["standing"] == "done")
        .await;
    told("the end", &|words| words.contains("episode has finished")).await;
}

#[tokio::test]
async fn after_a_crash_behind_its_new_name_a_folders_download_is_done_and_not_in_its_own_way() {
    let origin = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(10_000, 1), "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let mut home = Home::new();
    // The first time the note beside the part is removed, which is after the part has its name.
    let note = home.path().join("a.part.json");
    let agent = Command::new("strace")
        .args([
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            "-P",
            note.to_str().expect("text"),
        ])
        .args(["-e", "trace=unlink,unlinkat"])
        .args(["-e", "inject=unlink,unlinkat:signal=SIGKILL:when=1"])
        .arg(program::built("cedos"))
        .arg("agent")
        .envs(
            home.command(&[])
                .as_std()
                .get_envs()
                .filter_map(|(k, v)| Some((k, v?))),
        )
        .current_dir(home.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn();
    let Ok(mut agent) = agent else {
        return skip_without("strace", "strace is not installed");
    };
    let begun = Instant::now();
    // A verb that needs an agent would start another one.
    while UnixStream::connect(home.path().join("agent.sock"))
        .await
        .is_err()
    {
        if agent.try_wait().expect("a status").is_some() {
            return eprintln!("skipped: strace may not trace here");
        }
        assert!(begun.elapsed() < PATIENCE, "no agent");
    }
    let run = home
        .run(&["get", "--detach", "--json", &origin.url("/a")])
        .await;
    assert_eq!(run.code, 0, "{}", run.errors);
    let id = run.last()["id"].to_string();
    let gone = tokio::time::timeout(PATIENCE, agent.wait()).await;
    gone.expect("it is killed").expect("a status");
    assert!(home.path().join("a").exists(), "it has its name");
    home.run(&["ls"]).await.ends_with(0, "QUEUED");
    let asked = origin.requests().len();
    home.start(&[]).await;
    let status = ["status", id.as_str(), "--json"];
    let ended = |told: &Value| matches!(told["standing"].as_str(), Some("done" | "failed"));
    let told = home.until(&status, "the end", ended).await;
    assert_eq!(
        (&told["standing"], &told["bytes"]),
        (&"done".into(), &10_000.into()),
        "{told}"
    );
    assert!(!note.exists(), "what was beside the part is left");
    assert_eq!(origin.requests().len(), asked, "it was fetched again");
    assert!(std::fs::read(home.path().join("a")).expect("the file") == object(10_000, 1));
}

/// A stream that the agent serves, and what reads it.
struct Streamed {
    child: Child,
    link: String,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl Streamed {
    async fn start(home: &Home, url: &str, more: &[&str]) -> Streamed {
        let arguments = [&["url", "--json", "--store", "store"], more, &[url]].concat();
        let mut child = home.command(&arguments).spawn().expect("start the stream");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.expect("in time").expect("readable").expect("a line");
        let told: Value = serde_json::from_str(&line).expect("JSON");
        let link = told["link"].as_str().expect("a link").to_owned();
        Streamed { child, link, lines }
    }

    /// A player's connection, behind the head of the answer.
    async fn open(&self) -> BufReader<tokio::net::TcpStream> {
        let rest = self.link.strip_prefix("http://").expect("a link");
        let (host, path) = rest.split_once('/').expect("a path");
        let mut stream = tokio::net::TcpStream::connect(host).await.expect("connect");
        let ask = format!("GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        stream.write_all(ask.as_bytes()).await.expect("ask");
        let mut answer = BufReader::new(stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            let read = tokio::time::timeout(PATIENCE, answer.read_line(&mut line)).await;
            assert!(read.expect("in time").expect("readable") > 0, "no answer");
        }
        answer
    }

    async fn end(mut self) -> Value {
        let pid = Pid::from_raw(self.child.id().expect("it runs") as i32);
        kill(pid, Signal::SIGINT).expect("send");
        let mut last = Value::Null;
        while let Ok(Some(line)) = self.lines.next_line().await {
            last = serde_json::from_str(&line).expect("JSON");
        }
        last
    }
}

#[test]
fn a_stream_shares_the_agents_scheduler_and_access_points_are_looked_for_while_it_runs() {
    in_namespace(this_test!(), || async {
        let Some(manager) = Manager::start().await else {
            return;
        };
        let origin = origin_namespace(origin);
        wifi_on("198.51.100.7");
        manager.join("home").await;
        let mut home = Home::new();
        home.system_bus = Some(manager.bus.address().to_owned());
        home.start(&[]).await;
        let stream = Streamed::start(&home, &origin.url("/a"), &["--bitrate", "2M"]).await;
        let mut player = stream.open().await;
        let mut got = Vec::new();
        let read = tokio::time::timeout(PATIENCE, player.read_to_end(&mut got)).await;
        read.expect("in time").expect("readable");
        assert!(got == object(OBJECT_BYTES, 1), "other bytes");
        // What it carried is known to who decides for all.
        let ls = ["net", "ls", "--json"];
        let known = |link: &Value| {
            link["network"] == "wifi:Home" && link["rate_bytes_per_s"].as_f64() > Some(1e5)
        };
        home.until(&ls, "a rate", known).await;
        let carried = "cedos_bytes_total{class=\"free\",kind=\"download\"}";
        until_async("it is counted", async || {
            (home.figure(carried).await >= OBJECT_BYTES as u64).then_some(())
        })
        .await;
        let scans = async || {
            type Call = (u64, String, Vec<zbus::OwnedVariant>);
            let (connection, wlan) = (&manager.bus.connection, &*manager.wlan);
            let mock = "org.freedesktop.DBus.Mock";
            let mock = Proxy::new(connection, MANAGER, wlan, mock)
                .await
                .expect("a proxy");
            let calls: Vec<Call> = mock.call("GetCalls", &()).await.expect("calls");
            calls.iter().filter(|call| call.1 == "RequestScan").count()
        };
        until_async("three scans", async || (scans().await >= 3).then_some(())).await;
        let last = stream.end().await;
        assert_eq!(last["event"], "ended", "{last}");
        assert_eq!(last["bytes_by_link"]["wlan0"], OBJECT_BYTES, "{last}");
        // Nobody looks any more.
        let before = scans().await;
        // sleep: that nobody looks for longer than a look takes is the subject
        tokio::time::sleep(Duration::from_secs(7)).await;
        assert!(scans().await <= before + 1);
    });
}

#[test]
fn streams_and_transfers_spend_one_budget() {
    in_namespace(this_test!(), || async {
        let origin = origin_namespace(origin);
        cell_on();
        let mut home = Home::new();
        home.start(&[]).await;
        home.run(&["budget", "set", "6M"]).await;
        // Watched at 8 Mb/s, so that it has to pay all the time.
        let stream = Streamed::start(&home, &origin.url("/a"), &["--bitrate", "8M"]).await;
        let mut player = stream.open().await;
        let reading = tokio::spawn(async move {
            let mut piece = vec![0; 65_536];
            while player.read(&mut piece).await.is_ok_and(|read| read > 0) {}
        });
        let budget = ["budget", "--json"];
        let told = home
            .until(&budget, "all of it", |told| told["left"] == 0)
            .await;
        assert!(told["used"].as_u64() >= Some(6_000_000), "{told}");
        // A second of it may be under way.
        // sleep: what was granted for a second is still to come
        sleep_beside(Duration::from_secs(2), &[home.pid()]).await;
        let before = received("wwan0");
        // sleep: that nothing comes beyond the budget is the subject
        tokio::time::sleep(Duration::from_secs(2)).await;
        let more = received("wwan0") - before;
        assert!(more < 20_000, "{more} bytes beyond the budget");
        // A transfer has nothing to spend either.
        let id = home
            .leave(&origin.url("/a"), "out", &["--policy", "any"])
            .await;
        let status = ["status", id.as_str(), "--json"];
        home.until(&status, "a wait", |told| told["reason"] == "over_budget")
            .await;
        reading.abort();
        stream.end().await;
    });
}
