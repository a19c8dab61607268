//! A `cedos prox` with a state directory that a test ends and starts again, and clients that speak HTTP to it over TCP.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::program::{ProxyProcess, cedos, pid_of, run};
use cedos_lab_rig::wait::within;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};

/// The token of uploads.
pub const TOKEN: &str = "0123456789abcdef-_XY";

/// The command of such a proxy.
pub fn command(
    folder: &Path,
    tcp: SocketAddr,
    environment: &[(&'static str, String)],
    more: &[&str],
) -> tokio::process::Command {
    let tcp = tcp.to_string();
    let mut arguments = vec!["prox", "--listen", "127.0.0.1:0", "--key", "prox.key"];
    arguments.extend([
        "--state-dir",
        "state",
        "--config",
        "prox.toml",
        "--allow-private",
    ]);
    arguments.extend(["--tcp-listen", &tcp, "--allow-address", "127.0.0.0/8"]);
    arguments.extend(more);
    let mut command = cedos(folder, &arguments);
    let variables = environment.iter().map(|(name, value)| (name, value));
    command.envs(variables);
    command
}

async fn process(
    folder: &Path,
    tcp: SocketAddr,
    environment: &[(&'static str, String)],
    more: &[&str],
) -> ProxyProcess {
    let mut command = command(folder, tcp, environment, more);
    let mut log = std::fs::File::options();
    let log = log.create(true).append(true).open(folder.join("log"));
    command.stderr(log.expect("a log"));
    let started = ProxyProcess::spawned(&mut command).await;
    started.unwrap_or_else(|| {
        let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        panic!("the proxy does not start: {log}")
    })
}

/// A proxy whose state outlives its processes.
pub struct DurableProxy {
    pub folder: tempfile::TempDir,
    tcp: SocketAddr,
    environment: Vec<(&'static str, String)>,
    process: ProxyProcess,
}

/// An answer: its status, its head in lower case, and its body.
pub struct PlainAnswer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl PlainAnswer {
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.find(|(known, _)| *known == name).map(|found| found.1)
    }

    pub fn is_hit(&self) -> bool {
        let status = self.field("cache-status").unwrap_or_default();
        status.starts_with("d2prox; hit; ttl=")
    }
}

impl DurableProxy {
    pub async fn start() -> DurableProxy {
        DurableProxy::start_with(Vec::new(), &[]).await
    }

    /// Starts a proxy with these variables in its environment and these options.
    pub async fn start_with(
        environment: Vec<(&'static str, String)>,
        more: &[&str],
    ) -> DurableProxy {
        let folder = tempfile::tempdir().expect("a folder");
        let settings = "stop_grace_s = 0.1\nretry_wait_s = 0.01\n";
        std::fs::write(folder.path().join("prox.toml"), settings).expect("written");
        run(folder.path(), &["key", "gen", "-o", "prox.key"]).await;
        // All of 127/8 belongs to this machine: an address that no other test uses.
        let [a, b, ..] = getrandom::u32().expect("randomness").to_ne_bytes();
        let listener = std::net::TcpListener::bind((format!("127.77.{a}.{}", b.max(1)), 0));
        let tcp = listener.expect("a port").local_addr().expect("its address");
        let process = process(folder.path(), tcp, &environment, more).await;
        DurableProxy {
            folder,
            tcp,
            environment,
            process,
        }
    }

    /// Starts another process after the end of the one before.
    pub async fn start_again(&mut self, more: &[&str]) {
        self.process = process(self.folder.path(), self.tcp, &self.environment, more).await;
    }

    /// What all processes have logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The proxy's status, as its operator's programs read it.
    pub async fn status(&self) -> Value {
        let socket = UnixStream::connect(self.folder.path().join("state/control.sock")).await;
        let mut socket = BufReader::new(socket.expect("its control socket"));
        let asked = b"{\"do\":\"status\"}\n";
        socket.get_mut().write_all(asked).await.expect("sent");
        let mut line = String::new();
        within(socket.read_line(&mut line))
            .await
            .expect("an answer");
        serde_json::from_str(&line).expect("JSON")
    }

    /// Ends the process with this signal, and starts another one with the same state.
    pub async fn restart(&mut self, signal: Signal, more: &[&str]) {
        self.end(signal).await;
        self.start_again(more).await;
    }

    pub async fn end(&mut self, signal: Signal) {
        self.signal(signal);
        self.until_ended().await;
    }

    pub fn signal(&self, signal: Signal) {
        kill(pid_of(&self.process.child), signal).expect("send");
    }

    pub async fn until_ended(&mut self) {
        within(self.process.child.wait()).await.expect("it ends");
    }

    /// Adds to the settings of the next process, or replaces the grace.
    pub fn set(&self, settings: &str) {
        let grace = if settings.contains("stop_grace_s") {
            ""
        } else {
            "stop_grace_s = 0.1\n"
        };
        let all = format!("{grace}retry_wait_s = 0.01\n{settings}\n");
        std::fs::write(self.folder.path().join("prox.toml"), all).expect("written");
    }

    pub async fn send(&self, request: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = within(TcpStream::connect(self.tcp)).await.expect("connect");
        stream.write_all(request.as_ref()).await.expect("sent");
        stream
    }

    pub async fn ask(&self, request: impl AsRef<[u8]>) -> PlainAnswer {
        rest_of(self.send(request).await).await
    }

    pub async fn get(&self, url: &str, fields: &str) -> PlainAnswer {
        self.ask(get(url, fields)).await
    }

    /// Waits until the journal has what was recorded so far: an answer that removes something from the cache waits
    /// for that.
    pub async fn until_recorded(&self) {
        let origin = ScriptedOrigin::start(|_| {
            let fields = [("Cache-Control", "max-age=600")];
            OriginReply(reply("200 OK", &fields, b"x"), ReplyEnd::Close)
        })
        .await;
        let url = origin.url("/recorded");
        assert_eq!(self.get(&url, "").await.status, 200);
        let put = format!("PUT {url} HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx");
        assert_eq!(self.ask(put).await.status, 200);
    }

    pub fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path().join("state/copies"));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    pub fn file_of(&self, bytes: u64) -> Option<PathBuf> {
        let is_long = |path: &PathBuf| path.metadata().is_ok_and(|file| file.len() == bytes);
        self.files().into_iter().find(is_long)
    }
}

/// A GET with further fields, each ending in CR LF.
pub fn get(url: &str, fields: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nHost: h\r\n{fields}\r\n")
}

/// Reads an answer to the end of the connection.
pub async fn rest_of(mut stream: TcpStream) -> PlainAnswer {
    let mut bytes = Vec::new();
    let _ = within(stream.read_to_end(&mut bytes)).await;
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(&bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    PlainAnswer {
        status: head
            .split(' ')
            .nth(1)
            .expect("a status")
            .parse()
            .expect("digits"),
        head,
        body: bytes[end + 4..].to_vec(),
    }
}

/// Reads a head that something follows.
pub async fn head_of(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(within(stream.read_u8()).await.expect("a byte"));
    }
    String::from_utf8(head).expect("text").to_ascii_lowercase()
}

/// The byte that the proxy wants next.
pub async fn offset(stream: &mut TcpStream) -> usize {
    let head = head_of(stream).await;
    assert!(head.starts_with("http/1.1 104 "), "{head}");
    let offset = head
        .lines()
        .find_map(|line| line.strip_prefix("upload-offset: "));
    offset.expect("an offset").parse().expect("digits")
}
