//! `cedos put` and `cedos prox`, two processes on loopback: the origin's answer comes back, and what
//! cannot be sent is said.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(30);

fn cedos(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedos"));
    command
        .current_dir(folder)
        .args(arguments)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env("XDG_CONFIG_HOME", folder)
        .env("XDG_STATE_HOME", folder.join("state"));
    command
}

struct Proxy {
    child: Child,
    address: String,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn proxy(folder: &Path) -> Proxy {
    let shown = cedos(folder, &["key", "show"]).output().expect("a key");
    let key = String::from_utf8(shown.stdout).expect("text");
    let arguments = [
        "prox",
        "--listen",
        "127.0.0.1:0",
        "--allow-private",
        "--allow-client",
    ];
    let mut child = cedos(folder, &[&arguments[..], &[key.trim()]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("a proxy");
    let mut line = String::new();
    let out = child.stdout.take().expect("its output");
    BufReader::new(out)
        .read_line(&mut line)
        .expect("its address");
    Proxy {
        child,
        address: line.trim().to_owned(),
    }
}

/// An origin that takes bodies by `Content-Length` and answers as `answer` says of (number, body).
fn origin(answer: impl Fn(usize, &str, &[u8]) -> String + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!(
        "http://{}/place",
        listener.local_addr().expect("an address")
    );
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let Ok(mut stream) = stream else { return };
            let Some((head, body)) = request(&mut stream) else {
                continue;
            };
            let _ = stream.write_all(answer(number, &head, &body).as_bytes());
        }
    });
    url
}

fn request(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let lower = head.to_ascii_lowercase();
    let (_, rest) = lower.split_once("content-length: ")?;
    let mut body = vec![0; rest.lines().next()?.trim().parse().ok()?];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}

fn last(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().last().unwrap_or_default();
    serde_json::from_str(line).unwrap_or_else(|_| panic!("{output:?}"))
}

fn put(folder: &Path, url: &str, proxy: &Proxy, more: &[&str]) -> Output {
    let arguments = ["put", "file", url, "--json", "--prox", &proxy.address];
    let mut command = cedos(folder, &[&arguments[..], more].concat());
    command.output().expect("cedos put")
}

#[test]
fn a_file_reaches_its_origin_and_the_answer_comes_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    for length in [0usize, 1, 3_000_000] {
        let content: Vec<u8> = (0..length).map(|i| (i * 7 + i / 256) as u8).collect();
        std::fs::write(folder.path().join("file"), &content).expect("written");
        let url = origin(move |_, head, body| {
            let same = body == content && head.starts_with("PUT /place HTTP/1.1\r\n");
            let word = if same { "same" } else { "else" };
            format!("HTTP/1.1 201 Created\r\nContent-Length: 4\r\n\r\n{word}")
        });
        let output = put(folder.path(), &url, &proxy, &[]);
        assert!(output.status.success(), "{output:?}");
        let done = last(&output);
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

#[test]
fn what_the_origin_says_no_to_is_told_in_its_words_and_a_put_is_tried_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    let no = |words: &'static str| {
        origin(move |_, _, _| {
            let length = words.len();
            format!("HTTP/1.1 409 Conflict\r\nContent-Length: {length}\r\n\r\n{words}")
        })
    };
    let output = put(folder.path(), &no("there is one already"), &proxy, &[]);
    assert_eq!(output.status.code(), Some(1));
    let text = last(&output)["text"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        text.contains("409") && text.contains("there is one already"),
        "{text}"
    );

    let busy = || {
        origin(|number, _, _| match number {
            0 => "HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n".into(),
            _ => "HTTP/1.1 204 No Content\r\n\r\n".into(),
        })
    };
    let output = put(folder.path(), &busy(), &proxy, &[]);
    assert!(output.status.success(), "{output:?}");
    let output = put(folder.path(), &busy(), &proxy, &["--post"]);
    assert_eq!(
        output.status.code(),
        Some(1),
        "a POST is sent once: {output:?}"
    );
}

#[test]
fn two_that_send_the_same_at_once_are_two_uploads() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    let content: Vec<u8> = (0..300_000).map(|i| (i * 7 + i / 256) as u8).collect();
    std::fs::write(folder.path().join("file"), &content).expect("written");
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/a", listener.local_addr().expect("an address"));
    // Nobody is answered before both are here.
    let origin = std::thread::spawn(move || {
        let asked: Vec<_> = listener
            .incoming()
            .filter_map(|stream| {
                let mut stream = stream.ok()?;
                let (_, body) = request(&mut stream)?;
                Some((stream, body))
            })
            .take(2)
            .collect();
        for (mut stream, body) in asked {
            assert!(body == content, "other bytes");
            let _ = stream.write_all(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n");
        }
    });
    let start = || {
        let arguments = ["put", "file", &url, "--json", "--prox", &proxy.address];
        let mut command = cedos(folder.path(), &arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command.spawn().expect("cedos put")
    };
    for child in [start(), start()] {
        let output = child.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!said.contains("origin_wait"), "{said}");
    }
    origin.join().expect("the origin is content");
}

#[test]
fn what_waiting_does_not_change_is_asked_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    for status in ["501 Not Implemented", "507 Insufficient Storage"] {
        let asked = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = asked.clone();
        let url = origin(move |_, _, _| {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")
        });
        let output = put(folder.path(), &url, &proxy, &[]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(last(&output)["text"].to_string().contains(&status[..3]));
        assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 1);
    }
}

#[test]
fn without_a_proxy_or_a_file_nothing_is_sent() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    let said = |arguments: &[&str], code: i32| {
        let output = cedos(folder.path(), arguments).output().expect("cedos put");
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(said(&["put", "file", "http://h/"], 2).contains("--prox"));
    let prox = format!("d2tp://127.0.0.1:9/{}", "A".repeat(43));
    let absent = ["put", "absent", "http://h/", "--prox", &prox];
    assert!(said(&absent, 1).contains("cannot read"));
    let folder = ["put", ".", "http://h/", "--prox", &prox];
    assert!(said(&folder, 1).contains("give a regular file"));
}

/// An agent that ends with this.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// An origin that says when it has a body, and answers its first request only when it may.
fn slow_origin() -> (String, mpsc::Receiver<usize>, mpsc::Sender<()>) {
    let ((has, had), (may, allowed)) = (mpsc::channel(), mpsc::channel());
    let url = origin(move |number, _, body| {
        let _ = has.send(body.len());
        if number == 0 {
            let _ = allowed.recv();
        }
        format!("HTTP/1.1 201 Created\r\nContent-Length: 1\r\n\r\n{number}")
    });
    (url, had, may)
}

#[test]
fn a_put_whose_process_is_killed_goes_on_with_what_the_proxy_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    std::fs::write(folder.path().join("file"), vec![7; 3_000_000]).expect("written");
    let (url, had, may) = slow_origin();
    let arguments = ["put", "file", &url, "--prox", &proxy.address];
    let mut first = cedos(folder.path(), &arguments)
        .stderr(Stdio::null())
        .spawn()
        .expect("cedos put");
    assert_eq!(had.recv_timeout(PATIENCE), Ok(3_000_000));
    first.kill().expect("killed");
    first.wait().expect("it ended");
    may.send(()).expect("the origin waits");
    let output = put(folder.path(), &url, &proxy, &[]);
    assert!(output.status.success(), "{output:?}");
    let done = last(&output);
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
        let again = last(&put(folder.path(), &url, &proxy, &[]));
        assert_eq!(again["answer"], number.to_string());
    }
    let tickets = std::fs::read_dir(folder.path().join("state/cedos/uploads")).expect("a folder");
    assert_eq!(tickets.count(), 0);
}

#[test]
fn an_agents_post_is_delivered_once_though_the_agent_is_killed() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    std::fs::write(folder.path().join("file"), vec![7; 300_000]).expect("written");
    let (url, had, may) = slow_origin();
    let socket = folder.path().join("agent.sock");
    let cedos = |arguments: &[&str]| {
        let mut command = cedos(folder.path(), arguments);
        command.env("CEDOS_AGENT", &socket);
        command
    };
    let start = || {
        let _ = std::fs::remove_file(&socket);
        let agent = cedos(&["agent"]).stderr(Stdio::null()).spawn();
        let agent = Agent(agent.expect("an agent"));
        while !socket.exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        agent
    };
    let agent = start();
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
    let id = last(&cedos(&post).output().expect("cedos put"))["id"].to_string();
    assert_eq!(had.recv_timeout(PATIENCE), Ok(300_000));
    drop(agent); // by SIGKILL
    may.send(()).expect("the origin waits");
    let _agent = start();
    let wait = ["wait", &id, "--json"];
    let waited = cedos(&wait).output().expect("cedos wait");
    assert_eq!(waited.status.code(), Some(0), "{waited:?}");
    assert_eq!(last(&waited)["answer"], "0");
    assert!(had.try_recv().is_err(), "the origin got it twice");
}

#[test]
fn an_upload_is_handed_to_the_agent_followed_or_left() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = proxy(folder.path());
    let url = origin(|number, _, body| {
        let words = format!("{number}: {} bytes", body.len());
        let length = words.len();
        format!("HTTP/1.1 201 Created\r\nContent-Length: {length}\r\n\r\n{words}")
    });
    std::fs::write(folder.path().join("file"), vec![7; 300_000]).expect("written");
    let socket = folder.path().join("agent.sock");
    let cedos = |arguments: &[&str]| {
        let mut command = cedos(folder.path(), arguments);
        command.env("CEDOS_AGENT", &socket);
        command
    };
    let agent = cedos(&["agent"]).stderr(Stdio::null()).spawn();
    let _agent = Agent(agent.expect("an agent"));
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let put = ["put", "file", &url, "--json", "--prox", &proxy.address];
    let followed = cedos(&put).output().expect("cedos put");
    assert_eq!(followed.status.code(), Some(0), "{followed:?}");
    let told = last(&followed);
    assert_eq!(
        (&told["status"], &told["verb"]),
        (&201.into(), &"put".into())
    );
    assert_eq!(told["answer"], "0: 300000 bytes");
    // Each is an upload by itself, however soon it follows.
    for number in 1..10 {
        let left = [&put[..], &["--detach"]].concat();
        let left = cedos(&left).output().expect("cedos put");
        let id = last(&left)["id"].to_string();
        let waited = cedos(&["wait", &id, "--json"])
            .output()
            .expect("cedos wait");
        assert_eq!(waited.status.code(), Some(0), "{waited:?}");
        assert_eq!(last(&waited)["answer"], format!("{number}: 300000 bytes"));
    }
    // Without an agent there is nobody to leave it to.
    let alone = [&put[..], &["--detach", "--alone"]].concat();
    let alone = cedos(&alone).output().expect("cedos put");
    let said = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert!(
        alone.status.code() == Some(1) && said.contains("cedos agent"),
        "{said}"
    );
}
