//! What the tests of other podcast apps share: a machine whose agent apps talk to, a plain HTTP client, and origins of
//! feeds.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper, reply,
};
use cedos_lab_rig::program::{AgentProcess, CedosRun, cedos, ended};
use cedos_lab_rig::wait::within;
use cedos_readycast::{ChannelRule, Library};
use jiff::Timestamp;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub const BYTES: usize = 300_000;
pub const TAG: &str = "\"v1\"";

/// A user's machine with an agent.
pub struct Listener {
    pub folder: tempfile::TempDir,
    pub agent: Option<AgentProcess>,
}

impl Listener {
    /// A machine with these subscriptions, of which nothing is fetched but by hand.
    pub async fn subscribed(feeds: &[&str]) -> Listener {
        let folder = tempfile::tempdir().expect("a directory");
        let library =
            Library::open(&folder.path().join(".state/cedos/podcasts")).expect("a library");
        let rule = ChannelRule {
            schedule: "by hand".parse().expect("a schedule"),
            ..ChannelRule::default()
        };
        for feed in feeds {
            let feed = feed.parse().expect("an address");
            let channel = library.subscribe(&feed, Timestamp::now()).expect("stored");
            library.set_channel_rule(channel, &rule).expect("stored");
        }
        drop(library);
        let agent = Some(AgentProcess::start(folder.path()).await);
        let home = Listener { folder, agent };
        home.cast(&["refresh"]).await;
        home
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub async fn replace_agent(&mut self) {
        self.agent.take().expect("it runs").kill().await;
        self.agent = Some(AgentProcess::start(self.path()).await);
    }

    /// What a verb prints.
    pub async fn printed(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        String::from_utf8(run.output)
            .expect("text")
            .trim()
            .to_owned()
    }

    pub async fn run(&self, arguments: &[&str]) -> CedosRun {
        let mut command = cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.path().join("agent.sock"));
        ended(command.spawn().expect("start cedos")).await
    }

    /// The answer of a verb of `cedos cast`.
    pub async fn cast(&self, arguments: &[&str]) -> Value {
        let run = self
            .run(&[&["cast"], arguments, &["--json"]].concat())
            .await;
        assert_eq!(run.code, 0, "{arguments:?}: {}", run.errors);
        run.last().clone()
    }

    /// What apps are told.
    pub async fn apps(&self) -> AppAccess {
        AppAccess::of(&self.cast(&["apps"]).await)
    }

    /// Addresses of the feeds that are subscribed to.
    pub async fn feeds(&self) -> Vec<String> {
        let list = self.cast(&["list"]).await;
        let channels = list["channels"].as_array().expect("a list");
        let mut feeds: Vec<String> = channels
            .iter()
            .map(|c| c["url"].as_str().expect("an address").to_owned())
            .collect();
        feeds.sort();
        feeds
    }

    /// The episodes of a channel.
    pub async fn episodes(&self, channel: &str) -> Vec<Value> {
        let shown = self.cast(&["show", channel]).await;
        shown["episodes"].as_array().expect("a list").clone()
    }

    /// Sets up the sync with a server.
    pub async fn set_up(&self, server: &str, user: &str, password: &str) -> CedosRun {
        let file = self.path().join("password");
        std::fs::write(&file, format!("{password}\n")).expect("written");
        let file = file.display().to_string();
        let line = [
            "cast",
            "sync",
            server,
            "--user",
            user,
            "--password-file",
            &file,
            "--json",
        ];
        self.run(&line).await
    }
}

/// What `cedos cast apps` prints.
#[derive(Debug, PartialEq, Eq)]
pub struct AppAccess {
    pub server: String,
    pub user: String,
    pub password: String,
    pub subscriptions: String,
}

impl AppAccess {
    pub fn of(answer: &Value) -> AppAccess {
        let text = |name: &str| answer[name].as_str().expect("a text").to_owned();
        AppAccess {
            server: text("server"),
            user: text("user"),
            password: text("password"),
            subscriptions: text("subscriptions"),
        }
    }

    pub fn authorization(&self) -> String {
        use base64::Engine as _;
        let pair = format!("{}:{}", self.user, self.password);
        let pair = base64::engine::general_purpose::STANDARD.encode(pair);
        format!("Basic {pair}")
    }

    /// Asks the API with the password.
    pub async fn api(&self, method: &str, path: &str, body: &str) -> AppAnswer {
        let authorization = self.authorization();
        let fields = [("Authorization", &*authorization)];
        ask(method, &format!("{}{path}", self.server), &fields, body).await
    }
}

/// What an app is answered.
pub struct AppAnswer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl AppAnswer {
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines();
        lines.find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{}{}", self.head, self.text()))
    }
}

/// Sends a request whose answer ends with the connection, which is returned after its head and the bytes that came
/// with it.
pub async fn begin(
    method: &str,
    url: &str,
    fields: &[(&str, &str)],
    body: &str,
) -> (TcpStream, String, Vec<u8>) {
    let (host, path) = url
        .strip_prefix("http://")
        .and_then(|rest| rest.split_once('/'))
        .expect("an address");
    let mut words = format!("{method} /{path} HTTP/1.1\r\nConnection: close\r\n");
    if !fields.iter().any(|(name, _)| *name == "Host") {
        words += &format!("Host: {host}\r\n");
    }
    for (name, value) in fields {
        words += &format!("{name}: {value}\r\n");
    }
    words += &format!("Content-Length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(host).await.expect("it listens");
    // A server that refuses a body need not read it.
    let _ = stream.write_all(words.as_bytes()).await;
    let mut head = Vec::new();
    let rest = within(async {
        loop {
            let mut piece = [0; 4096];
            let n = stream.read(&mut piece).await.unwrap_or(0);
            assert!(n > 0, "no answer: {}", String::from_utf8_lossy(&head));
            head.extend_from_slice(&piece[..n]);
            if let Some(at) = head.windows(4).position(|w| w == b"\r\n\r\n") {
                return head.split_off(at + 4);
            }
        }
    })
    .await;
    (stream, String::from_utf8(head).expect("text"), rest)
}

pub async fn ask(method: &str, url: &str, fields: &[(&str, &str)], body: &str) -> AppAnswer {
    let (mut stream, head, mut body) = begin(method, url, fields, body).await;
    // One that is broken off has fewer bytes than its head says.
    let _ = within(stream.read_to_end(&mut body)).await;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    AppAnswer {
        status: status.unwrap_or_else(|| panic!("no answer: {head}")),
        head,
        body,
    }
}

pub async fn get(url: &str) -> AppAnswer {
    ask("GET", url, &[], "").await
}

/// A feed of this title with an item for each of these paths.
pub fn feed(origin: &str, title: &str, paths: &[&str]) -> String {
    let items: String = paths
        .iter()
        .enumerate()
        .map(|(n, path)| {
            format!(
                "<item><title>Episode {path}</title><guid>{path}</guid><itunes:duration>500</itunes:duration>\
                 <pubDate>Mon, 0{} Jun 2020 06:00:00 GMT</pubDate>\
                 <enclosure url=\"{origin}/{path}.mp3\" length=\"{BYTES}\" type=\"audio/mpeg\"/></item>",
                n + 1
            )
        })
        .collect();
    format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\" xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\">\
         <channel><title>{title}</title><itunes:new-feed-url>{origin}/feed</itunes:new-feed-url>{items}</channel></rss>"
    )
}

pub fn feed_reply(asked: &OriginRequest, title: &str, paths: &[&str]) -> OriginReply {
    match asked.header("if-none-match") == Some(TAG) {
        true => empty("304 Not Modified"),
        false => unconditional_feed_reply(asked, title, paths),
    }
}

pub fn unconditional_feed_reply(asked: &OriginRequest, title: &str, paths: &[&str]) -> OriginReply {
    let origin = format!("http://{}", asked.header("host").unwrap_or_default());
    let body = feed(&origin, title, paths).replace(
        &format!("{origin}/feed</itunes:new-feed-url>"),
        &format!("{origin}{}</itunes:new-feed-url>", asked.path),
    );
    let length = body.len().to_string();
    let headers = [
        ("Content-Type", "application/rss+xml"),
        ("Content-Length", &*length),
        ("ETag", TAG),
    ];
    OriginReply(reply("200 OK", &headers, body.as_bytes()), ReplyEnd::Close)
}

pub fn empty(status: &str) -> OriginReply {
    let headers = [("Content-Length", "0")];
    OriginReply(reply(status, &headers, b""), ReplyEnd::Close)
}

/// The bytes of the episode at a path such as `/b.mp3`.
pub fn episode_bytes(path: &str) -> Vec<u8> {
    object(BYTES, u32::from(path.as_bytes()[1]))
}

/// An origin with a podcast at each path that begins with `/feed`, and its episodes.
pub async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| match &*asked.path {
        path if path.starts_with("/feed") => feed_reply(asked, &path[1..], &["a", "b"]),
        path => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
    })
    .await
}

/// The addresses in the attribute of a text.
pub fn attributes(text: &str, name: &str) -> Vec<String> {
    let mark = format!("{name}=\"");
    let parts = text.split(&mark).skip(1);
    parts
        .map(|part| {
            part.split('"')
                .next()
                .unwrap_or_default()
                .replace("&amp;", "&")
        })
        .collect()
}

/// The links of the first feed and its enclosures, as an app finds them.
pub async fn links(access: &AppAccess) -> (String, Vec<String>) {
    let opml = get(&access.subscriptions).await;
    assert_eq!(opml.status, 200, "{}", opml.text());
    let feed = attributes(&opml.text(), "xmlUrl").remove(0);
    let answer = get(&feed).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    (feed, attributes(&answer.text(), "enclosure url"))
}

/// An origin whose feed at `/old` is at `/new` once it has moved.
pub async fn moving_origin(has_moved: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        match has_moved.load(Ordering::Relaxed) && asked.path == "/old" {
            true => {
                let to = [("Location", "/new"), ("Content-Length", "0")];
                OriginReply(reply("301 Moved Permanently", &to, b""), ReplyEnd::Close)
            }
            false => unconditional_feed_reply(asked, "Morning", &["a"]),
        }
    })
    .await
}
