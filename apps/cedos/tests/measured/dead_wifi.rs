//! A Wi-Fi that is attached and carries nothing, beside cellular that the policy `any` allows: every client
//! connects over cellular soon, and goes on there when the Wi-Fi dies without a word.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::support::C;
use crate::told::Program;
use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, sh, wifi_on};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::{PATIENCE, program, this_test};
use tokio::process::Child;
use tokio::time::{sleep, timeout};

const OBJECT_BYTES: usize = 16_000_000; // 6.4 s at 20 Mb/s

/// What a machine that compiles beside the test may add, starting programs included.
const SLACK: Duration = Duration::from_millis(1_500);

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
struct Place {
    home: PathBuf,
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
    agent: AgentProcess,
    told: C,
}

impl Place {
    async fn new(home: &Path) -> Place {
        let place = home.to_owned();
        let (origin, proxy) = origin_namespace(|| async move {
            let bytes = object(OBJECT_BYTES, 1);
            let script = move |asked: &OriginRequest| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            };
            let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
            (
                origin,
                ProxyProcess::start(&place, "192.0.2.1:0", &[]).await,
            )
        });
        Place {
            home: home.to_owned(),
            origin,
            proxy,
            agent: AgentProcess::start(home).await,
            told: C::with_d2tp("told.c"),
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

    /// Bytes of a file that is being written, whatever its name is until it is whole.
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

    /// The longest time in which a file did not grow, until it has as many bytes.
    async fn longest_pause(&self, file: &str, bytes: u64) -> Duration {
        let (mut grown_at, mut size) = (Instant::now(), self.bytes_of(file));
        let mut longest = Duration::ZERO;
        while size < bytes {
            assert!(
                grown_at.elapsed() < PATIENCE,
                "{file} stays at {size} bytes"
            );
            // sleep: how long the file does not grow is the subject
            sleep(Duration::from_millis(10)).await;
            let now = self.bytes_of(file);
            longest = longest.max(grown_at.elapsed());
            if now > size {
                (grown_at, size) = (Instant::now(), now);
            }
        }
        longest
    }
}

#[track_caller]
fn assert_within(what: &str, took: Duration, bound: Duration) {
    eprintln!("{what}: {} ms", took.as_millis());
    assert!(took < bound + SLACK, "{what} took {took:?}");
}

#[test]
fn every_client_connects_over_cellular_beside_a_wifi_that_never_answers() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = Place::new(home.path()).await;
        wifi_on("198.51.100.7");
        cell_on();
        wifi_dies();
        for (what, file) in [("cedos run", "run"), ("cedos get", "get")] {
            let begun = Instant::now();
            let mut client = match file {
                "run" => place.run(file),
                _ => place.get(file),
            };
            place.until(file, 1).await;
            assert_within(what, begun.elapsed(), CONNECT_MAX);
            client.kill().await.expect("it runs");
        }
        for by_agent in [false, true] {
            let begun = Instant::now();
            let mut socket = place.socket(by_agent);
            assert_eq!(socket.hear().await, "policy 0");
            assert_eq!(socket.hear().await, "connect 0");
            let what = format!("a socket, by the agent: {by_agent}");
            assert_within(&what, begun.elapsed(), CONNECT_MAX);
            assert!(socket.ask("ask").await.starts_with("ask "));
            assert_eq!(socket.ask("read 100000").await, "read 100000");
        }
    });
}

#[test]
fn every_client_goes_on_over_cellular_when_the_wifi_dies_silently() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = Place::new(home.path()).await;
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
            assert_within(client, pause, SILENCE_MAX);
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
