//! Words of other hosts that set colours and forge lines: of origins, proxies, and peers that close a session, in
//! file names and in pages. No verb passes them to a terminal as they came.

use std::net::UdpSocket;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, proper, reply};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, cedos, pid_of, run};
use cedos_lab_rig::wait::{until_async, within};
use d2tp_driver::{Admission, EndpointConfig, Flow, SecretKey, Server, ServerOptions};
use d2tp_session::{Addresses, Endpoint, IncomingDatagram, LinkId, PublicKey, SessionEvent, Time};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Text that sets colours and the window's title, overwrites its line, hides a direction, and forges a line.
pub const HOSTILE: &str =
    "\u{1b}[31mred\u{1b}]0;title\u{7}\rover\u{9b}1m\u{202e}txt\nForged on time";

/// What is left of [`HOSTILE`], and of names that are like it, where they are shown.
pub const SHOWN: &str = "[31mred";

/// A file name like [`HOSTILE`], and the same in a URL.
const HOSTILE_NAME: &str = "\u{1b}[31mred\u{202e}txt\nForged on time";
pub const HOSTILE_PATH: &str = "%1b%5b31mred%e2%80%aetxt%0aForged%20on%20time";

/// Whether a command shows the words of the other host at all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Words {
    Shown,
    Hidden,
}

/// Asserts that a terminal would show what was printed as it is.
#[track_caller]
pub fn assert_clean(command: &str, printed: &[u8], words: Words) {
    let printed = std::str::from_utf8(printed).unwrap_or_else(|_| panic!("{command}: {printed:?}"));
    let raw = |c: char| c != '\n' && cedos_text::is_control(c);
    assert!(!printed.contains(raw), "{command}: {printed:?}");
    let forged = printed.lines().any(|line| line.starts_with("Forged"));
    assert!(!forged, "{command}: {printed}");
    let are_shown = printed.contains(SHOWN);
    assert_eq!(are_shown, words == Words::Shown, "{command}: {printed}");
}

/// What a command prints, which is stopped once it has shown [`SHOWN`].
pub async fn printed_by(home: &Path, agent: Option<&AgentProcess>, arguments: &[&str]) -> Vec<u8> {
    let mut command = cedos(home, arguments);
    if let Some(agent) = agent {
        command.env("CEDOS_AGENT", &agent.socket);
    }
    let mut child = command.spawn().expect("start cedos");
    let mut output = child.stdout.take().expect("its output");
    let mut errors = child.stderr.take().expect("its errors");
    let (mut printed, mut said) = (Vec::new(), Vec::new());
    let (mut ended, mut is_stopped) = ([false; 2], false);
    let reads = async {
        while ended != [true; 2] {
            tokio::select! {
                read = output.read_buf(&mut printed), if !ended[0] => ended[0] = read.expect("bytes") == 0,
                read = errors.read_buf(&mut said), if !ended[1] => ended[1] = read.expect("bytes") == 0,
            }
            let is_shown = |bytes: &[u8]| {
                bytes
                    .windows(SHOWN.len())
                    .any(|words| words == SHOWN.as_bytes())
            };
            if !is_stopped && (is_shown(&printed) || is_shown(&said)) {
                is_stopped = true;
                // It may have ended already.
                if child.id().is_some() {
                    let _ = kill(pid_of(&child), Signal::SIGINT);
                }
            }
        }
    };
    if tokio::time::timeout(cedos_lab_rig::PATIENCE, reads)
        .await
        .is_err()
    {
        let said = String::from_utf8_lossy(&said).into_owned();
        panic!(
            "{arguments:?} goes on: {} {said}",
            String::from_utf8_lossy(&printed)
        );
    }
    within(child.wait()).await.expect("it ends");
    printed.extend(said);
    printed
}

/// Checks a command, and the same with `--json`.
async fn check(home: &Path, agent: Option<&AgentProcess>, arguments: &[&str], words: Words) {
    for json in [&[][..], &["--json"]] {
        let arguments = [arguments, json].concat();
        let printed = printed_by(home, agent, &arguments).await;
        assert_clean(&arguments.join(" "), &printed, words);
    }
}

/// An answer with [`HOSTILE`] as its body.
pub fn refusal(status: &str, field: &str) -> Vec<u8> {
    let length = HOSTILE.len();
    format!("HTTP/1.1 {status}\r\n{field}Content-Length: {length}\r\n\r\n{HOSTILE}").into_bytes()
}

fn address(port: u16, key: PublicKey) -> String {
    format!("d2tp://127.0.0.1:{port}/{key}")
}

/// A D2TP server that gives each request the same answer. Returns its address.
pub fn answering_server(key: u8, answer: Vec<u8>) -> String {
    let server = Server::bind(ServerOptions {
        listen: "127.0.0.1:0".parse().expect("an address"),
        key: SecretKey::from_bytes([key; 32]),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    });
    let server = server.expect("a server");
    let address = address(server.local_addr().port(), server.public_key());
    let answer: Arc<[u8]> = answer.into();
    tokio::spawn(async move {
        while let Some(flow) = server.accept().await {
            tokio::spawn(answer_once(flow, answer.clone()));
        }
    });
    address
}

/// Answers one request. A client that goes away is no failure.
async fn answer_once(mut flow: Flow, answer: Arc<[u8]>) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(flow.read_u8().await?);
    }
    flow.write_all(&answer).await?;
    flow.shutdown().await?;
    flow.read_to_end(&mut head).await?;
    Ok(())
}

/// A D2TP server that closes each session with [`HOSTILE`], for as long as this is held.
pub struct ClosingServer {
    pub address: String,
    _alive: Arc<()>,
}

impl ClosingServer {
    pub fn start() -> ClosingServer {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
        let pause = Some(Duration::from_millis(5));
        socket.set_read_timeout(pause).expect("a timeout");
        let key = SecretKey::from_bytes([3; 32]);
        let config = EndpointConfig::default();
        let mut endpoint = Endpoint::new(config, key, Admission::Anybody, [4; 32], [5; 32]);
        let port = socket.local_addr().expect("an address").port();
        let address = address(port, endpoint.public_key());
        let alive = Arc::new(());
        let is_held = Arc::downgrade(&alive);
        std::thread::spawn(move || {
            let begin = Instant::now();
            let mut buffer = vec![0; 65_536];
            while is_held.strong_count() > 0 {
                let received = socket.recv_from(&mut buffer);
                let now = Time::from_secs_f64(1.0 + begin.elapsed().as_secs_f64());
                if let Ok((length, remote)) = received {
                    let addresses = Addresses {
                        link: LinkId(0),
                        local: None,
                        remote,
                    };
                    let bytes = &mut buffer[..length];
                    endpoint.handle_datagram(now, IncomingDatagram { addresses, bytes });
                }
                endpoint.handle_timeouts(now);
                while let Some((session, event)) = endpoint.poll_event() {
                    if matches!(event, SessionEvent::Established { .. }) {
                        let _ = endpoint.close(session, 3, HOSTILE);
                    }
                }
                while let Some(sent) = endpoint.poll_transmit(now, &mut buffer) {
                    for datagram in buffer[..sent.len].chunks(sent.segment.max(1)) {
                        let _ = socket.send_to(datagram, sent.remote);
                    }
                }
            }
        });
        ClosingServer {
            address,
            _alive: alive,
        }
    }
}

#[tokio::test]
async fn words_of_an_origin_reach_no_terminal_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    let proxy = ProxyProcess::start(home, "127.0.0.1:0", &[]).await;
    std::fs::write(home.join("file"), b"abc").expect("written");
    let origin = ScriptedOrigin::start(|asked| {
        let answer = match &*asked.path {
            "/page" => {
                let page = format!("<html><title>{HOSTILE}</title></html>");
                let length = page.len().to_string();
                let fields = [("Content-Length", length.as_str())];
                reply("507 Insufficient Storage", &fields, page.as_bytes())
            }
            "/moved" => {
                let mut answer =
                    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: ftp://".to_vec();
                answer.extend("host/[31mred\u{202e}\u{9b}1m\r\n\r\n".as_bytes());
                answer
            }
            "/named" => {
                let name = format!("attachment; filename*=UTF-8''{HOSTILE_PATH}");
                let fields = [("Content-Disposition", &*name), ("Content-Length", "3")];
                reply("200 OK", &fields, b"abc")
            }
            "/list/" => {
                let page = format!("<html><a href=\"{HOSTILE_PATH}\">{HOSTILE}</a></html>");
                reply("200 OK", &[], page.as_bytes())
            }
            path if path.ends_with(HOSTILE_PATH) => proper(asked, b"abc", "\"v1\""),
            _ => refusal("409 Conflict", ""),
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let url = |path: &str| origin.url(path);
    let prox = ["--prox", &*proxy.address];
    let (page, moved, named, refused) = (url("/page"), url("/moved"), url("/named"), url("/a"));
    let (list, named_by_url) = (url("/list/"), url(&format!("/{HOSTILE_PATH}")));
    for through in [
        &["--no-prox"][..],
        &prox,
        &[&prox[..], &["--sealed"]].concat(),
    ] {
        for (arguments, words) in [
            (&["get", &refused, "-o", "refused"][..], Words::Hidden),
            (
                &["get", &refused, "-o", "refused", "--dry-run"],
                Words::Hidden,
            ),
            (&["get", &moved, "-o", "moved"], Words::Shown),
            (&["get", &named_by_url, "--dry-run"], Words::Shown),
            // The second time, the file exists.
            (&["get", &named_by_url], Words::Shown),
            (&["get", &named], Words::Hidden),
        ] {
            check(home, None, &[arguments, through].concat(), words).await;
        }
    }
    for (arguments, words) in [
        (&["put", "file", &refused][..], Words::Shown),
        (&["put", "file", &page], Words::Shown),
        (&["put", "file", &moved], Words::Shown),
        (&["sync", &list, "listed"], Words::Shown),
        (&["sync", "--dry-run", &list, "new"], Words::Shown),
        (&["sync", &refused, "listed"], Words::Hidden),
    ] {
        check(home, None, &[arguments, &prox].concat(), words).await;
    }
}

#[tokio::test]
async fn words_of_a_proxy_or_server_reach_no_terminal_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    let _ = run(home, &["key", "show"]).await;
    std::fs::write(home.join("file"), b"abc").expect("written");
    let denied = "Proxy-Status: red; error=http_request_denied; details=\"\u{202e}\"\r\n";
    let plain = "Proxy-Status: red; error=http_request_denied\r\n";
    let url = "http://192.0.2.1/a";
    // An answer to HEAD has no words.
    for (key, field, words) in [(6, plain, Words::Shown), (7, denied, Words::Hidden)] {
        let proxy = answering_server(key, refusal("403 Forbidden", field));
        let prox = ["--prox", &*proxy];
        for (arguments, words) in [
            (&["get", url, "-o", "a"][..], words),
            (&["get", url, "-o", "a", "--dry-run"], Words::Hidden),
            (&["get", url, "-o", "a", "--sealed"], words),
            (&["put", "file", url], Words::Shown),
            (&["sync", "http://192.0.2.1/d/", "d"], words),
            (&["send", "file"], Words::Shown),
            (&["receive", "7-acorn-acorn-acorn"], Words::Shown),
        ] {
            check(home, None, &[arguments, &prox].concat(), words).await;
        }
        let run = [
            "run", "--rung", "preload", "--prox", &*proxy, "--", "bash", "-c",
        ];
        let run = [&run[..], &["exec 3<>/dev/tcp/192.0.2.1/80"]].concat();
        let printed = printed_by(home, None, &run).await;
        assert_clean("run", &printed, Words::Shown);
    }
    let server = answering_server(8, refusal("409 Conflict", ""));
    let file = format!("{server}/a");
    for arguments in [
        &["get", &file, "-o", "b"][..],
        &["get", &file, "-o", "b", "--dry-run"],
        &["sync", &file, "d"],
    ] {
        check(home, None, arguments, Words::Hidden).await;
    }
}

#[tokio::test]
async fn words_with_which_a_peer_closes_a_session_reach_no_terminal_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    let _ = run(home, &["key", "show"]).await;
    std::fs::write(home.join("file"), b"abc").expect("written");
    let server = ClosingServer::start();
    let prox = ["--prox", &*server.address];
    let (url, file) = ("http://192.0.2.1/a", format!("{}/a", server.address));
    // Whoever may be let in later goes on until its deadline.
    let late = ["--within", "3s", "--if-late", "fail"];
    let receive = ["receive", "7-acorn-acorn-acorn", "--within", "3s"];
    let serve = ["serve", ".", "--allow-any-client"];
    for (arguments, through, words) in [
        (
            &["get", url, "-o", "a"][..],
            [&prox[..], &late],
            Words::Shown,
        ),
        (
            &["get", url, "-o", "a", "--sealed"],
            [&prox, &late],
            Words::Shown,
        ),
        (
            &["get", url, "-o", "a", "--dry-run"],
            [&prox, &[]],
            Words::Shown,
        ),
        (&["get", &file, "-o", "a"], [&[], &late], Words::Shown),
        (&["put", "file", url], [&prox, &late], Words::Shown),
        (
            &["send", "file", "--within", "3s"],
            [&prox, &[]],
            Words::Shown,
        ),
        (&receive, [&prox, &[]], Words::Shown),
        (&["doctor"], [&prox, &[]], Words::Hidden),
    ] {
        check(home, None, &[arguments, &through.concat()].concat(), words).await;
    }
    let printed = printed_by(home, None, &[&serve[..], &prox].concat()).await;
    assert_clean("serve", &printed, Words::Shown);
}

#[tokio::test]
async fn the_name_of_a_file_that_another_device_sends_reaches_no_terminal_as_it_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let [here, there] = ["here", "there"].map(|name| folder.path().join(name));
    std::fs::create_dir(&here).expect("made");
    std::fs::create_dir(&there).expect("made");
    std::fs::write(here.join(HOSTILE_NAME), b"abc").expect("written");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &["--allow-any-client"]).await;
    let prox = ["--prox", &*proxy.address];
    for json in [&[][..], &["--json"]] {
        let send = [&["send", HOSTILE_NAME], &prox[..], json].concat();
        let mut sender = cedos(&here, &send).spawn().expect("start cedos");
        let mut output = sender.stdout.take().expect("its output");
        let mut said = Vec::new();
        let code = within(async {
            loop {
                assert!(
                    output.read_buf(&mut said).await.expect("bytes") > 0,
                    "it ended"
                );
                let text = String::from_utf8_lossy(&said).into_owned();
                let complete = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
                let mut words = complete.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
                let is_code = |word: &&str| {
                    word.split('-').count() == 4 && word.starts_with(|c: char| c.is_ascii_digit())
                };
                if let Some(code) = words.find(is_code) {
                    break code.to_owned();
                }
            }
        })
        .await;
        let receive = [&["receive", &*code], &prox[..], json].concat();
        let received = run(&there, &receive).await;
        let printed = [&received.output[..], received.errors.as_bytes()].concat();
        assert_clean("receive", &printed, Words::Shown);
        assert_eq!(received.code, 0, "{received:?}");
        within(output.read_to_end(&mut said)).await.expect("bytes");
        let ended = within(sender.wait_with_output()).await.expect("its output");
        said.extend(ended.stderr);
        assert_clean("send", &said, Words::Shown);
        // The next one has the same name.
        for entry in std::fs::read_dir(&there).expect("a folder").flatten() {
            if entry.path().is_file() {
                std::fs::remove_file(entry.path()).expect("removed");
            }
        }
    }
}

#[tokio::test]
async fn words_of_other_hosts_reach_no_terminal_by_way_of_the_agent() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    let agent = AgentProcess::start(home).await;
    std::fs::write(home.join("file"), b"abc").expect("written");
    let plain = "Proxy-Status: red; error=http_request_denied\r\n";
    let proxy = answering_server(9, refusal("403 Forbidden", plain));
    let prox = ["--prox", &*proxy];
    let url = format!("http://192.0.2.1/{HOSTILE_PATH}");
    let get = [&["get", "--detach", &*url], &prox[..]].concat();
    let put = [&["put", "--detach", "file", &*url], &prox[..]].concat();
    for (arguments, words) in [(get, Words::Hidden), (put, Words::Hidden)] {
        let printed = printed_by(home, Some(&agent), &arguments).await;
        assert_clean(&arguments.join(" "), &printed, words);
    }
    until_async("both have failed", async || {
        let listed = printed_by(home, Some(&agent), &["ls", "--json"]).await;
        let listed = String::from_utf8(listed).expect("text");
        (listed.matches("\"failed\"").count() == 2).then_some(())
    })
    .await;
    for arguments in [
        &["ls"][..],
        &["why", "1"],
        &["why", "2"],
        &["status", "1"],
        &["status", "2"],
        &["wait", "1"],
        &["wait", "2"],
        &["ls", "--clear"],
    ] {
        let is_clear = arguments.contains(&"--clear");
        let words = Words::Shown;
        if is_clear {
            let printed = printed_by(home, Some(&agent), arguments).await;
            assert_clean("ls --clear", &printed, words);
        } else {
            check(home, Some(&agent), arguments, words).await;
        }
    }
}
