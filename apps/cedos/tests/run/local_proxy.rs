//! The local proxy of `cedos agent`: SOCKS5 and HTTP on one port, for programs as they are. Real curl, a
//! D2Prox and an origin of the test on loopback.

use cedos_lab_rig::missing_tool::is_installed;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use cedos_lab_rig::origin::{
    OriginReply, ReplyEnd, ScriptedOrigin, TestAuthority, cut, object, proper, reply,
};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::{PATIENCE, program};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

const BYTES: usize = 2_000_000;

/// A device with an agent that is a proxy, and one D2Prox or several, each with a key of its own.
pub(crate) struct Device {
    home: tempfile::TempDir,
    /// Address of the local proxy.
    pub(crate) at: String,
    _agent: Child,
    proxies: Vec<ProxyProcess>,
}

impl Device {
    pub(crate) async fn new(more: &[&str]) -> Device {
        Device::with_proxies(1, more).await
    }

    async fn with_proxies(count: usize, more: &[&str]) -> Device {
        let home = tempfile::tempdir().expect("a directory");
        let mut proxies = Vec::new();
        for _ in 0..count {
            // A running proxy has read its key: the next one makes another.
            let _ = std::fs::remove_file(home.path().join("prox.key"));
            proxies.push(ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await);
        }
        let addresses = proxies.iter().map(|proxy| &*proxy.address);
        let addresses = addresses.collect::<Vec<_>>().join(" ");
        let arguments = ["agent", "--proxy", "127.0.0.1:0", "--prox", &addresses];
        let mut agent = program::cedos(home.path(), &[&arguments[..], more].concat())
            .env("CEDOS_AGENT", home.path().join("agent.sock"))
            .spawn()
            .expect("start the agent");
        let mut lines = BufReader::new(agent.stderr.take().expect("its errors")).lines();
        let at = loop {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
            let line = line.expect("in time").expect("text").expect("it goes on");
            if let Some((_, at)) = line.split_once("proxy for programs at ") {
                break at.to_owned();
            }
        };
        Device {
            home,
            at,
            _agent: agent,
            proxies,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.home.path()
    }

    /// Runs curl with these words through it; none if there is no curl.
    pub(crate) async fn curl(&self, words: &[&str]) -> Option<ProgramResult> {
        let mut command = Command::new("curl");
        command
            .current_dir(self.path())
            .env_remove("http_proxy")
            .env_remove("no_proxy")
            .env("HOME", self.path())
            .args(["--silent", "--show-error", "--max-time", "60"])
            .args(words)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(PATIENCE, command.output()).await;
        match output.expect("curl ends by itself") {
            Ok(output) => Some(ProgramResult {
                code: output.status.code().expect("no signal"),
                output: output.stdout,
                errors: String::from_utf8_lossy(&output.stderr).into_owned(),
            }),
            Err(_) => {
                eprintln!("skipped: there is no curl");
                None
            }
        }
    }
}

pub(crate) struct ProgramResult {
    pub(crate) code: i32,
    pub(crate) output: Vec<u8>,
    pub(crate) errors: String,
}

impl ProgramResult {
    #[track_caller]
    pub(crate) fn is_whole(&self, wanted: &[u8]) {
        assert_eq!(self.code, 0, "{}", self.errors);
        assert!(self.output == wanted, "other bytes, or not all");
    }
}

#[tokio::test]
async fn connections_go_to_another_proxy_of_the_list_when_theirs_falls_silent() {
    let mut device = Device::with_proxies(2, &[]).await;
    let bytes = object(BYTES, 1);
    let served = bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close)
    });
    let origin = origin.await;
    let url = origin.url("/a");
    let http = format!("http://{}", device.at);
    for killed in [None, Some(0)] {
        if let Some(killed) = killed {
            let proxy: &mut ProxyProcess = &mut device.proxies[killed];
            proxy.child.kill().await.expect("it runs");
        }
        let Some(ran) = device.curl(&["-x", &http, &url]).await else {
            return;
        };
        ran.is_whole(&bytes);
    }
}

#[tokio::test]
async fn socks_and_http_and_tunnels_are_told_apart_on_one_port() {
    let device = Device::new(&[]).await;
    let bytes = object(BYTES, 1);
    let served = bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close)
    });
    let origin = origin.await;
    let authority = TestAuthority::new();
    let served = bytes.clone();
    let secure = ScriptedOrigin::start_tls(&authority, move |asked| {
        OriginReply(proper(asked, &served, "\"v1\""), ReplyEnd::Close)
    });
    let secure = secure.await;
    std::fs::write(device.path().join("ca.pem"), &authority.pem).expect("write");
    let (url, secure) = (origin.url("/a"), secure.url("/a"));
    let socks = format!("socks5h://{}", device.at);
    let http = format!("http://{}", device.at);
    for words in [
        &["-x", &socks, &url][..],
        &["-x", &http, &url],
        &["-x", &http, "--proxytunnel", &url],
        &["-x", &socks, "--cacert", "ca.pem", &secure],
        &["-x", &http, "--cacert", "ca.pem", &secure],
    ] {
        let Some(ran) = device.curl(words).await else {
            return;
        };
        ran.is_whole(&bytes);
    }
    // What is for the proxy goes no further.
    let absolute = &origin.requests()[1];
    assert_eq!(absolute.path, "/a");
    assert!(!absolute.headers.contains_key("proxy-connection"));
}

/// An origin that answers twice on each connection, then closes it without having said so; connections so far.
async fn forgetful() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("it"));
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::spawn(async move {
                let (read, mut write) = client.into_split();
                let mut lines = BufReader::new(read).lines();
                let mut answered = 0;
                while answered < 2
                    && let Ok(Some(line)) = lines.next_line().await
                {
                    if line.is_empty() {
                        answered += 1;
                        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes";
                        write.write_all(answer).await.expect("it is read");
                    }
                }
            });
        }
    });
    (url, count)
}

#[tokio::test]
async fn what_a_client_asks_next_goes_by_the_connection_there_is() {
    let device = Device::new(&[]).await;
    let (url, connections) = forgetful().await;
    let http = format!("http://{}", device.at);
    // curl keeps its connection to the proxy.
    let five = [&["-x", &http][..], &[&*url; 5]].concat();
    let Some(ran) = device.curl(&five).await else {
        return;
    };
    ran.is_whole(&b"yes".repeat(5));
    assert_eq!(connections.swap(0, Ordering::Relaxed), 3);
    // What changes something at the origin is never asked twice, so it goes by one that is new.
    let words = ["-x", &http, &url, "--next", "-x", &http, "-d", "", &url];
    let Some(ran) = device.curl(&words).await else {
        return;
    };
    ran.is_whole(&b"yes".repeat(2));
    assert_eq!(connections.swap(0, Ordering::Relaxed), 2);
    // Other terms are another flow's.
    let words = [
        "-x",
        &http,
        &url,
        "--next",
        "-x",
        &http,
        "-H",
        "Cedos-Policy: fast",
        &url,
    ];
    let Some(ran) = device.curl(&words).await else {
        return;
    };
    ran.is_whole(&b"yes".repeat(2));
    assert_eq!(connections.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn an_upload_arrives_and_a_redirect_is_the_programs_to_follow() {
    let device = Device::new(&[]).await;
    let origin = ScriptedOrigin::start(|asked| {
        let answer = match asked.path.as_str() {
            "/from" => reply(
                "302 Found",
                &[("location", "/to"), ("content-length", "0")],
                b"",
            ),
            _ => reply("200 OK", &[("content-length", "2")], b"ok"),
        };
        OriginReply(answer, ReplyEnd::Close)
    });
    let origin = origin.await;
    let http = format!("http://{}", device.at);
    let from = origin.url("/from");
    let Some(ran) = device
        .curl(&["-x", &http, "-o", "/dev/null", "-w", "%{http_code}", &from])
        .await
    else {
        return;
    };
    assert_eq!((ran.code, &*ran.output), (0, &b"302"[..]), "{}", ran.errors);
    assert_eq!(origin.requests().len(), 1, "nobody followed it");
    let ran = device
        .curl(&["-x", &http, "-L", &from])
        .await
        .expect("curl");
    ran.is_whole(b"ok");
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_never_taken_for_whole() {
    let device = Device::new(&[]).await;
    let bytes = object(BYTES, 2);
    for end in [ReplyEnd::Close, ReplyEnd::Reset] {
        let served = bytes.clone();
        let origin = ScriptedOrigin::start(move |asked| {
            OriginReply(cut(proper(asked, &served, "\"v1\""), BYTES / 2), end)
        });
        let url = origin.await.url("/a");
        for scheme in ["http", "socks5h"] {
            let at = format!("{scheme}://{}", device.at);
            // Whether the first bytes came or an error in their place: not as if that were all.
            let Some(ran) = device.curl(&["--fail", "-x", &at, &url]).await else {
                return;
            };
            assert_ne!(ran.code, 0, "{scheme}, {end:?}: {} bytes", ran.output.len());
        }
    }
}

#[tokio::test]
async fn an_answer_whose_end_is_its_connections_is_not_taken_for_whole_either() {
    let device = Device::new(&[]).await;
    let bytes = object(BYTES, 4);
    let served = bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let end = match asked.path.as_str() {
            "/whole" => ReplyEnd::Close,
            "/slow" => ReplyEnd::Silence,
            _ => ReplyEnd::Reset,
        };
        OriginReply([b"HTTP/1.0 200 OK\r\n\r\n", &served[..]].concat(), end)
    });
    let origin = origin.await;
    let at = format!("http://{}", device.at);
    let fetch = async |path: &str, more: &[&str]| {
        let url = origin.url(path);
        // Whether the first bytes came or an error in their place: not as if that were all.
        let words = [&["-0", "--fail", "-x", &at, &url], more].concat();
        device.curl(&words).await
    };
    let Some(whole) = fetch("/whole", &[]).await else {
        return;
    };
    assert_eq!(whole.code, 0, "{}", whole.errors);
    assert!(whole.output == bytes);
    let broken = fetch("/broken", &[]).await.expect("curl");
    assert_ne!(broken.code, 0, "{} bytes", broken.output.len());
    let late = fetch("/slow", &["-H", "Cedos-By: +2s"])
        .await
        .expect("curl");
    assert_ne!(late.code, 0, "{} bytes", late.output.len());
}

#[tokio::test]
async fn what_the_proxy_refuses_is_told_in_each_language() {
    let device = Device::new(&[]).await;
    let http = format!("http://{}", device.at);
    // D2Prox sends nobody's mail.
    let words = ["-x", &http, "--proxytunnel", "http://127.0.0.1:25/"];
    let Some(ran) = device.curl(&words).await else {
        return;
    };
    assert_eq!(ran.code, 56, "{}", ran.errors);
    assert!(ran.errors.contains("403"), "{}", ran.errors);
    let socks = format!("socks5h://{}", device.at);
    let ran = device.curl(&["-x", &socks, "http://127.0.0.1:25/"]).await;
    let ran = ran.expect("curl");
    assert_eq!(ran.code, 97, "{}", ran.errors);
    assert!(
        ran.errors.contains("(2)"),
        "not allowed by ruleset: {}",
        ran.errors
    );
    // A port where nobody is: refused, in words.
    let nobody = HeldPort::take();
    let url = format!("http://{}/", nobody.address());
    let ran = device.curl(&["-x", &http, "-i", &url]).await.expect("curl");
    let said = String::from_utf8_lossy(&ran.output);
    assert!(said.starts_with("HTTP/1.1 502"), "{said}");
    assert!(said.contains("error=connection_refused"), "{said}");
    // An upload, too: what is refused is said, and not that it broke off.
    let file = device.path().join("upload");
    std::fs::write(&file, object(BYTES, 3)).expect("write");
    let upload = format!("@{}", file.display());
    let words = ["-x", &http, "-i", "--data-binary", &upload, &url];
    let ran = device.curl(&words).await.expect("curl");
    let said = String::from_utf8_lossy(&ran.output);
    assert!(said.contains("error=connection_refused"), "{said}");
    let ran = device.curl(&["-x", &socks, &url]).await.expect("curl");
    assert!(
        ran.code == 97 && ran.errors.contains("(5)"),
        "{}",
        ran.errors
    );
}

#[tokio::test]
async fn by_when_is_said_by_user_name_or_field_and_holds() {
    let device = Device::new(&[]).await;
    // The first half, and then nothing.
    let bytes = object(20_000, 3);
    let served = bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(
            cut(proper(asked, &served, "\"v1\""), 10_000),
            ReplyEnd::Silence,
        )
    });
    let url = origin.await.url("/a");
    let socks = format!("socks5h://by=%2B2s,policy=any@{}", device.at);
    let begun = std::time::Instant::now();
    let Some(ran) = device.curl(&["-x", &socks, &url]).await else {
        return;
    };
    let took = begun.elapsed();
    assert_eq!(ran.code, 56, "reset: {} {}", ran.code, ran.errors);
    assert_eq!(ran.output.len(), 10_000);
    assert!(took > Duration::from_secs(1) && took < PATIENCE, "{took:?}");
    let http = format!("http://{}", device.at);
    let field = ["-x", &http, "-H", "Cedos-By: +2s", &url];
    let ran = device.curl(&field).await.expect("curl");
    assert_ne!(ran.code, 0);
    assert_eq!(ran.output.len(), 10_000);
    // Nonsense is said to be such.
    let nonsense = ["-x", &http, "-H", "Cedos-By: soon", &url];
    let ran = device.curl(&nonsense).await.expect("curl");
    assert!(String::from_utf8_lossy(&ran.output).contains("07:30"));
    let socks = format!("socks5h://policy=cheap:x@{}", device.at);
    let ran = device.curl(&["-x", &socks, &url]).await.expect("curl");
    assert_eq!(ran.code, 97, "{}", ran.errors);
}

#[tokio::test]
async fn another_users_connection_is_refused_unread() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: only root can be another user");
    }
    if !is_installed("curl") {
        return;
    }
    let device = Device::new(&[]).await;
    let origin = ScriptedOrigin::start(|_| {
        OriginReply(
            reply("200 OK", &[("content-length", "2")], b"ok"),
            ReplyEnd::Close,
        )
    });
    let origin = origin.await;
    let url = origin.url("/a");
    let http = format!("http://{}", device.at);
    let curl = ["curl", "--silent", "--max-time", "30", "-x", &http, &url];
    let run_as = |user: &'static str| {
        let output = Command::new("setpriv")
            .args(["--reuid", user, "--clear-groups"])
            .args(curl)
            .stdin(Stdio::null())
            .output();
        tokio::time::timeout(PATIENCE, output)
    };
    let Ok(output) = run_as("65534").await.expect("it ends") else {
        return eprintln!("skipped: there is no setpriv");
    };
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(origin.requests().len(), 0);
    let output = run_as("0").await.expect("it ends").expect("it runs");
    assert_eq!(output.stdout, b"ok", "{output:?}");
}

#[tokio::test]
async fn what_is_no_request_for_a_proxy_is_told_so_and_breaks_nothing() {
    let device = Device::new(&[]).await;
    let say = async |words: &[u8]| {
        let mut stream = TcpStream::connect(&device.at).await.expect("connect");
        stream.write_all(words).await.expect("write");
        stream.shutdown().await.expect("end");
        let mut said = Vec::new();
        let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut said)).await;
        let _ = read.expect("it ends");
        said
    };
    let said = say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(
        said.starts_with(b"HTTP/1.1 400"),
        "a page of the browser's is no proxy request"
    );
    assert!(
        say(b"GET https://a.example/ HTTP/1.1\r\nHost: a\r\n\r\n")
            .await
            .starts_with(b"HTTP/1.1 400")
    );
    assert!(
        say(b"CONNECT a.example HTTP/1.1\r\nHost: a\r\n\r\n")
            .await
            .starts_with(b"HTTP/1.1 400")
    );
    // SOCKS5: no method we have; BIND; an address of no kind.
    assert_eq!(say(&[5, 1, 1]).await, [5, 0xff]);
    assert_eq!(
        say(&[5, 1, 0, 5, 2, 0, 1, 127, 0, 0, 1, 0, 80]).await[..4],
        [5, 0, 5, 7]
    );
    assert_eq!(say(&[5, 1, 0, 5, 1, 0, 9]).await[..2], [5, 0]);
    for nonsense in [&b"\x04\x01\x00\x50"[..], b"\x05", b"\xff\xff\xff\xff", b""] {
        say(nonsense).await;
    }
    let said = say(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(said.starts_with(b"HTTP/1.1 400"), "it is still there");
}
