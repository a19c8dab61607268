//! A Wi-Fi that is attached and carries nothing, beside cellular that the policy `any` allows: every client
//! connects over cellular soon, and goes on there when the Wi-Fi dies without a word.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::one_budget::stream;
use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, sent, sh, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{AgentProcess, ProxyProcess};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::{PATIENCE, program, this_test};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, UnixStream};
use tokio::process::Child;
use tokio::time::{sleep, timeout};

const OBJECT_BYTES: usize = 16_000_000; // 6.4 s at 20 Mb/s

/// What starting programs may add, and reading and writing files.
const START_SLACK: Duration = Duration::from_millis(1_500);

/// What looking at files and counters may add, where nothing starts.
const LOOK_SLACK: Duration = Duration::from_millis(200);

/// Where the agent's local proxy listens, in a network of the test's own.
const LOCAL_PROXY: &str = "127.0.0.1:1080";

const PLAYLIST: &[u8] = b"#EXTM3U\n#EXT-X-TARGETDURATION:60\n#EXTINF:60,\n/a\n#EXT-X-ENDLIST\n";

/// Payload over cellular, beside what handshakes and probes take.
const CARRIES_BYTES: u64 = 60_000;

/// From the start of a client to its first byte over cellular: a second for the Wi-Fi to answer, then a
/// handshake and a request.
const CONNECT_MAX: Duration = Duration::from_millis(2_500);

/// From the last byte over the Wi-Fi to the first over cellular.
const SILENCE_MAX: Duration = Duration::from_millis(1_500);

/// The Wi-Fi keeps carrier, address and route from now on, and carries nothing: what leaves goes to a
/// station that is not there, and what arrives is dropped.
fn wifi_dies() {
    sh(
        "ip neigh replace 198.51.100.1 lladdr 02:00:00:00:00:99 dev wlan0 nud permanent
        ip rule add pref 5 lookup local
        ip rule del pref 0
        ip rule add pref 1 iif wlan0 blackhole",
    );
}

fn wifi_lives() {
    sh("ip rule del pref 1
        ip rule add pref 0 lookup local
        ip rule del pref 5
        ip neigh del 198.51.100.1 dev wlan0");
}

/// A home, an origin, and a proxy that both links lead to.
struct TestNetwork {
    home: PathBuf,
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
    agent: AgentProcess,
    told: CProgram,
}

impl TestNetwork {
    async fn new(home: &Path) -> TestNetwork {
        let place = home.to_owned();
        let (origin, proxy) = origin_namespace(|| async move {
            let bytes: Arc<[u8]> = object(OBJECT_BYTES, 1).into();
            let listener = TcpListener::bind("192.0.2.1:0").await.expect("a port");
            let origin = ScriptedOrigin::play_at(listener, None, move |asked, mut stream| {
                let bytes = bytes.clone();
                async move {
                    let answer = match asked.method.as_str() {
                        "PUT" => {
                            asked.body(&mut stream).await;
                            reply("201 Created", &[], b"")
                        }
                        _ if asked.path == "/list.m3u8" => reply("200 OK", &[], PLAYLIST),
                        _ => proper(&asked, &bytes, "\"v1\""),
                    };
                    // A reader that went away is its own affair.
                    let _ = stream.write_all(&answer).await;
                }
            });
            (
                origin,
                ProxyProcess::start(&place, "192.0.2.1:0", &[]).await,
            )
        });
        let variables = [("CEDOS_PROX", &*proxy.address)];
        let agent = AgentProcess::start_among(home, &["--proxy", LOCAL_PROXY], &variables).await;
        TestNetwork {
            home: home.to_owned(),
            origin,
            proxy,
            agent,
            told: CProgram::with_d2tp("told.c"),
        }
    }

    fn url(&self) -> String {
        self.origin.url("/a")
    }

    fn begin(&self, arguments: &[&str]) -> Child {
        let mut command = program::cedos(&self.home, arguments);
        command.spawn().expect("start cedos")
    }

    /// `curl` under `cedos run`, writing to `file`.
    fn run(&self, file: &str) -> Child {
        let (url, prox) = (self.url(), &self.proxy.address);
        let run = ["run", "--prox", prox, "--policy", "any", "--"];
        self.begin(&[&run[..], &["curl", "-sS", "-o", file, &url]].concat())
    }

    fn get(&self, file: &str) -> Child {
        let (url, prox) = (self.url(), &self.proxy.address);
        let get = ["get", "--json", "--policy", "any", "--prox", prox];
        self.begin(&[&get[..], &["-o", file, &url]].concat())
    }

    /// `cedos put` of a file.
    fn put(&self, file: &str) -> Child {
        let (url, prox) = (self.origin.url("/up"), &self.proxy.address);
        self.begin(&[
            "put", "--json", "--policy", "any", "--prox", prox, file, &url,
        ])
    }

    /// `curl` under `cedos run` beside the agent, which decides.
    fn run_with_agent(&self, file: &str) -> Child {
        let (url, prox) = (self.url(), &self.proxy.address);
        let run = ["run", "--prox", prox, "--policy", "any", "--"];
        let arguments = [&run[..], &["curl", "-sS", "-o", file, &url]].concat();
        let mut command = program::cedos(&self.home, &arguments);
        command.env("CEDOS_AGENT", &self.agent.socket);
        command.spawn().expect("start cedos")
    }

    /// `curl` through the agent's local proxy, or of a player's link.
    fn curl(&self, file: &str, more: &[&str]) -> Child {
        let mut command = tokio::process::Command::new("curl");
        program::at_home(command.args(["-sS", "-o", file]).args(more), &self.home);
        command.spawn().expect("start curl")
    }

    /// `curl` as the player of `cedos play`, writing to `file`.
    fn play(&self, file: &str, path: &str, transport: &[&str], with_agent: bool) -> Child {
        let url = self.origin.url(path);
        let store = self.home.join(format!("store of {file}"));
        let store = store.to_str().expect("text");
        let play = ["play", "--store", store];
        let player = ["--", "curl", "-fsS", "-o", file];
        let arguments = [&play[..], transport, &[&url], &player[..]].concat();
        let mut command = program::cedos(&self.home, &arguments);
        if with_agent {
            command.env("CEDOS_AGENT", &self.agent.socket);
        }
        command.spawn().expect("start cedos")
    }

    /// Starts a client by its name. A stream lasts as long as the connection to the agent that is returned.
    async fn start(&self, client: &str) -> (Child, Option<UnixStream>) {
        let prox = &*self.proxy.address;
        let child = match client {
            "put" => self.put("sent"),
            "run beside an agent" => self.run_with_agent("run"),
            "the agent's local proxy" => {
                let proxy = format!("http://{LOCAL_PROXY}");
                self.curl("proxied", &["--proxy", &proxy, &self.url()])
            }
            "play beside an agent" => self.play(client, "/a", &["--prox", prox], true),
            "play without an agent" => self.play(client, "/a", &["--prox", prox], false),
            "sealed play" => self.play(client, "/a", &["--sealed", "--prox", prox], false),
            "play without a proxy" => self.play(client, "/a", &["--no-prox"], false),
            "a playlist without a proxy" => self.play(client, "/list.m3u8", &["--no-prox"], false),
            "get without a proxy" => {
                let get = ["get", "--json", "--policy", "any", "--no-prox", "-o"];
                self.begin(&[&get[..], &[client, &self.url()]].concat())
            }
            "a stream of the agent" => {
                let url = self.url();
                let (held, link) = stream(&self.agent, &url, prox, &self.home, "free-first").await;
                return (self.curl(client, &[&link]), Some(held));
            }
            _ => {
                let url = self.url();
                let (held, link) = stream(&self.agent, &url, prox, &self.home, "free-first").await;
                return (self.curl("streamed", &[&link]), Some(held));
            }
        };
        (child, None)
    }

    /// A socket of a program in C, carried by the agent or by its own process.
    fn socket(&self, by_agent: bool) -> Program {
        let port = self.origin.address.port().to_string();
        let arguments = ["192.0.2.1", &port, "policy=4"];
        let none = PathBuf::from("none");
        let agent = if by_agent { &self.agent.socket } else { &none };
        Program::start(
            &self.told,
            &self.home,
            &self.proxy.address,
            agent,
            &arguments,
        )
    }

    /// The size of a file that is being written, under its final or temporary name.
    fn bytes_of(&self, file: &str) -> u64 {
        let names = [file.to_owned(), format!("{file}.part")];
        let sizes = names.map(|name| std::fs::metadata(self.home.join(name)).map(|m| m.len()));
        sizes.into_iter().flatten().max().unwrap_or(0)
    }

    /// Waits until a file has as many bytes.
    async fn until(&self, file: &str, bytes: u64) {
        let grows = async {
            while self.bytes_of(file) < bytes {
                // sleep: the file is looked at until it has grown
                sleep(Duration::from_millis(10)).await;
            }
        };
        let grew = timeout(PATIENCE, grows).await;
        assert!(
            grew.is_ok(),
            "{file} stays at {} bytes",
            self.bytes_of(file)
        );
    }

    /// The longest time in which a file did not grow, until it has as many bytes, without what processes waited for a
    /// processor in that time.
    async fn longest_pause(&self, file: &str, bytes: u64) -> Duration {
        let (mut watch, mut size) = (Stopwatch::start(), self.bytes_of(file));
        let mut longest = Duration::ZERO;
        while size < bytes {
            assert!(
                watch.begun.elapsed() < PATIENCE,
                "{file} stays at {size} bytes"
            );
            // sleep: how long the file does not grow is the subject
            sleep(Duration::from_millis(20)).await;
            let now = self.bytes_of(file);
            // What cannot be the longest is not looked at closely.
            if watch.begun.elapsed() > longest {
                longest = longest.max(watch.took());
            }
            if now > size {
                (watch, size) = (Stopwatch::start(), now);
            }
        }
        longest
    }
}

/// Measures how long something takes, without what the test's processes waited for a processor.
struct Stopwatch {
    begun: Instant,
    wait: ProcessorWait,
}

impl Stopwatch {
    fn start() -> Stopwatch {
        Stopwatch {
            begun: Instant::now(),
            wait: ProcessorWait::of_this_and_descendants(),
        }
    }

    fn took(&self) -> Duration {
        self.begun.elapsed().saturating_sub(self.wait.so_far())
    }
}

#[track_caller]
fn assert_within(what: &str, took: Duration, bound: Duration) {
    eprintln!("{what}: {} ms", took.as_millis());
    assert!(took < bound, "{what} took {took:?}");
}

/// The clients that are judged by what the kernel counted on the links.
const COUNTED_CLIENTS: [&str; 4] = [
    "put",
    "run beside an agent",
    "the agent's local proxy",
    "a stream",
];

/// The clients that are judged by the bytes that a player, or a file, got.
const READ_CLIENTS: [&str; 7] = [
    "a stream of the agent",
    "play beside an agent",
    "play without an agent",
    "sealed play",
    "play without a proxy",
    "a playlist without a proxy",
    "get without a proxy",
];

fn carried(link: &str) -> u64 {
    received(link) + sent(link)
}

/// Waits until a link carried as many bytes more than `before`.
async fn until_carried(what: &str, link: &str, before: u64, bytes: u64) {
    let carries = async {
        while carried(link) < before + bytes {
            // sleep: the kernel's counters are looked at until they have grown
            sleep(Duration::from_millis(10)).await;
        }
    };
    let done = timeout(PATIENCE, carries).await;
    let more = carried(link) - before;
    assert!(done.is_ok(), "{what}: {more} bytes on {link}");
}

/// Uploads are as slow as downloads, so that a link can die during one.
fn slow_uplinks() {
    sh(
        "tc qdisc add dev wlan0 root tbf rate 20mbit burst 20k latency 100ms
        tc qdisc add dev wwan0 root tbf rate 20mbit burst 20k latency 100ms",
    );
}

#[test]
fn uploads_streams_and_the_agents_clients_connect_over_cellular_beside_a_dead_wifi() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        std::fs::write(place.home.join("sent"), object(OBJECT_BYTES, 1)).expect("the file");
        wifi_on("198.51.100.7");
        cell_on();
        slow_uplinks();
        wifi_dies();
        for client in COUNTED_CLIENTS {
            let before = carried("wwan0");
            let watch = Stopwatch::start();
            let (mut child, _held) = place.start(client).await;
            until_carried(client, "wwan0", before, CARRIES_BYTES).await;
            assert_within(client, watch.took(), CONNECT_MAX + START_SLACK);
            child.kill().await.expect("it runs");
        }
    });
}

#[test]
fn players_and_direct_downloads_get_bytes_over_cellular_beside_a_dead_wifi() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        wifi_on("198.51.100.7");
        cell_on();
        wifi_dies();
        for client in READ_CLIENTS {
            let watch = Stopwatch::start();
            let (mut child, _held) = place.start(client).await;
            place.until(client, 1).await;
            assert_within(client, watch.took(), CONNECT_MAX + START_SLACK);
            child.kill().await.expect("it runs");
        }
    });
}

#[test]
fn uploads_and_the_agents_clients_go_on_over_cellular_when_the_wifi_dies() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        std::fs::write(place.home.join("sent"), object(OBJECT_BYTES, 1)).expect("the file");
        wifi_on("198.51.100.7");
        cell_on();
        slow_uplinks();
        // A stream pays when what it read ahead runs low, and not before.
        for client in COUNTED_CLIENTS.iter().copied().take(3) {
            let wifi = carried("wlan0");
            let (mut child, _held) = place.start(client).await;
            until_carried(client, "wlan0", wifi, 2_000_000).await;
            let before = carried("wwan0");
            wifi_dies();
            let watch = Stopwatch::start();
            until_carried(client, "wwan0", before, CARRIES_BYTES).await;
            assert_within(client, watch.took(), SILENCE_MAX + LOOK_SLACK);
            wifi_lives();
            let status = timeout(PATIENCE, child.wait()).await.expect("it ends");
            assert!(status.expect("a status").success(), "{client}");
        }
        for file in ["run", "proxied"] {
            let bytes = std::fs::read(place.home.join(file)).expect("the file");
            assert!(bytes == object(OBJECT_BYTES, 1), "{file}: other bytes");
        }
    });
}

#[test]
fn a_proxy_is_found_by_its_name_although_the_resolver_is_beyond_a_dead_wifi() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let mut place = TestNetwork::new(home.path()).await;
        let memory = place.home.join(".cache/cedos");
        std::fs::create_dir_all(&memory).expect("a folder");
        std::fs::write(memory.join("servers"), "prox.example 192.0.2.1\n").expect("the file");
        let by_name = place.proxy.address.replace("192.0.2.1", "prox.example");
        place.proxy.address = by_name;
        wifi_on("198.51.100.7");
        cell_on();
        wifi_dies();
        for client in ["run", "get"] {
            let watch = Stopwatch::start();
            let mut child = match client {
                "run" => place.run(client),
                _ => place.get(client),
            };
            place.until(client, 1).await;
            assert_within(client, watch.took(), CONNECT_MAX + START_SLACK);
            child.kill().await.expect("it runs");
        }
    });
}

#[test]
fn every_client_connects_over_cellular_beside_a_wifi_that_never_answers() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        wifi_on("198.51.100.7");
        cell_on();
        wifi_dies();
        for (what, file) in [("cedos run", "run"), ("cedos get", "get")] {
            let watch = Stopwatch::start();
            let mut client = match file {
                "run" => place.run(file),
                _ => place.get(file),
            };
            place.until(file, 1).await;
            assert_within(what, watch.took(), CONNECT_MAX + START_SLACK);
            client.kill().await.expect("it runs");
        }
        for by_agent in [false, true] {
            let watch = Stopwatch::start();
            let mut socket = place.socket(by_agent);
            assert_eq!(socket.hear().await, "policy 0");
            assert_eq!(socket.hear().await, "connect 0");
            let what = format!("a socket, by the agent: {by_agent}");
            assert_within(&what, watch.took(), CONNECT_MAX + START_SLACK);
            assert!(socket.ask("ask").await.starts_with("ask "));
            assert_eq!(socket.ask("read 100000").await, "read 100000");
        }
    });
}

#[test]
fn sockets_use_cellular_beside_a_wifi_that_has_become_too_slow() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        for by_agent in [false, true] {
            wifi_on("198.51.100.7");
            let mut socket = place.socket(by_agent);
            assert_eq!(socket.hear().await, "policy 0");
            assert_eq!(socket.hear().await, "connect 0");
            assert!(socket.ask("ask").await.starts_with("ask "));
            // Before it reads, so that the object does not come at once.
            let slow = "type filter hook input priority 0; \
                        iifname wlan0 limit rate over 37 kbytes/second burst 10 kbytes drop;";
            sh(&format!(
                "nft 'table inet slow {{ chain c {{ {slow} }}; }}'"
            ));
            cell_on();
            let file = place.home.join(format!("by the agent: {by_agent}"));
            let before = received("wwan0");
            socket
                .tell(&format!("copy {OBJECT_BYTES} {}", file.display()))
                .await;
            until_carried("a socket", "wwan0", before, 1_000_000).await;
            sh("nft delete table inet slow
                ip link set wwan0 down
                ip addr flush dev wwan0");
            wifi_off();
        }
    });
}

#[test]
fn every_client_goes_on_over_cellular_when_the_wifi_dies_silently() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = TestNetwork::new(home.path()).await;
        wifi_on("198.51.100.7");
        cell_on();
        for client in ["run", "get", "socket", "socket-of-the-agent"] {
            let mut child = None;
            let mut program = None;
            match client {
                "run" => child = Some(place.run(client)),
                "get" => child = Some(place.get(client)),
                _ => {
                    let mut socket = place.socket(client != "socket");
                    assert_eq!(socket.hear().await, "policy 0");
                    assert_eq!(socket.hear().await, "connect 0");
                    assert!(socket.ask("ask").await.starts_with("ask "));
                    let file = place.home.join(client);
                    socket
                        .tell(&format!("copy {OBJECT_BYTES} {}", file.display()))
                        .await;
                    program = Some(socket);
                }
            }
            place.until(client, 2_000_000).await;
            wifi_dies();
            let pause = place.longest_pause(client, 8_000_000).await;
            assert_within(client, pause, SILENCE_MAX + LOOK_SLACK);
            wifi_lives();
            if let Some(mut child) = child {
                let status = timeout(PATIENCE, child.wait()).await.expect("it ends");
                assert!(status.expect("a status").success(), "{client}");
                let bytes = std::fs::read(place.home.join(client)).expect("the file");
                assert!(bytes == object(OBJECT_BYTES, 1), "{client}: other bytes");
            }
            if let Some(mut program) = program {
                program.child.kill().await.expect("it runs");
            }
        }
    });
}
