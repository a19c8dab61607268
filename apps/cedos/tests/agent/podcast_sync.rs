//! Other podcast apps: feeds and episodes through the agent, and sync by the gpodder API, as server and as client.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::{AgentProcess, CedosRun, cedos, ended};
use cedos_lab_rig::wait::{until_async, within};
use cedos_readycast::{ChannelRule, Library, SyncAccount, SyncProgress};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::Command;

use super::page::PageLink;

const BYTES: usize = 300_000;
const TAG: &str = "\"v1\"";

/// A user's machine with an agent.
struct Listener {
    folder: tempfile::TempDir,
    agent: Option<AgentProcess>,
}

impl Listener {
    /// A machine with these subscriptions, of which nothing is fetched but by hand.
    async fn subscribed(feeds: &[&str]) -> Listener {
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

    fn path(&self) -> &Path {
        self.folder.path()
    }

    async fn replace_agent(&mut self) {
        self.agent.take().expect("it runs").kill().await;
        self.agent = Some(AgentProcess::start(self.path()).await);
    }

    /// What a verb prints.
    async fn printed(&self, arguments: &[&str]) -> String {
        let run = self.run(arguments).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        String::from_utf8(run.output)
            .expect("text")
            .trim()
            .to_owned()
    }

    async fn run(&self, arguments: &[&str]) -> CedosRun {
        let mut command = cedos(self.path(), arguments);
        command.env("CEDOS_AGENT", self.path().join("agent.sock"));
        ended(command.spawn().expect("start cedos")).await
    }

    /// The answer of a verb of `cedos cast`.
    async fn cast(&self, arguments: &[&str]) -> Value {
        let run = self
            .run(&[&["cast"], arguments, &["--json"]].concat())
            .await;
        assert_eq!(run.code, 0, "{arguments:?}: {}", run.errors);
        run.last().clone()
    }

    /// What apps are told.
    async fn apps(&self) -> AppAccess {
        AppAccess::of(&self.cast(&["apps"]).await)
    }

    /// Addresses of the feeds that are subscribed to.
    async fn feeds(&self) -> Vec<String> {
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
    async fn episodes(&self, channel: &str) -> Vec<Value> {
        let shown = self.cast(&["show", channel]).await;
        shown["episodes"].as_array().expect("a list").clone()
    }

    /// Sets up the sync with a server.
    async fn set_up(&self, server: &str, user: &str, password: &str) -> CedosRun {
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
struct AppAccess {
    server: String,
    user: String,
    password: String,
    subscriptions: String,
}

impl AppAccess {
    fn of(answer: &Value) -> AppAccess {
        let text = |name: &str| answer[name].as_str().expect("a text").to_owned();
        AppAccess {
            server: text("server"),
            user: text("user"),
            password: text("password"),
            subscriptions: text("subscriptions"),
        }
    }

    fn authorization(&self) -> String {
        use base64::Engine as _;
        let pair = format!("{}:{}", self.user, self.password);
        let pair = base64::engine::general_purpose::STANDARD.encode(pair);
        format!("Basic {pair}")
    }

    /// Asks the API with the password.
    async fn api(&self, method: &str, path: &str, body: &str) -> AppAnswer {
        let authorization = self.authorization();
        let fields = [("Authorization", &*authorization)];
        ask(method, &format!("{}{path}", self.server), &fields, body).await
    }
}

/// What an app is answered.
struct AppAnswer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl AppAnswer {
    fn field(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines();
        lines.find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("{}{}", self.head, self.text()))
    }
}

/// Sends a request whose answer ends with the connection, which is returned after its head and the bytes that came
/// with it.
async fn begin(
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

async fn ask(method: &str, url: &str, fields: &[(&str, &str)], body: &str) -> AppAnswer {
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

async fn get(url: &str) -> AppAnswer {
    ask("GET", url, &[], "").await
}

/// A feed of this title with an item for each of these paths.
fn feed(origin: &str, title: &str, paths: &[&str]) -> String {
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

fn feed_reply(asked: &OriginRequest, title: &str, paths: &[&str]) -> OriginReply {
    match asked.header("if-none-match") == Some(TAG) {
        true => empty("304 Not Modified"),
        false => unconditional_feed_reply(asked, title, paths),
    }
}

fn unconditional_feed_reply(asked: &OriginRequest, title: &str, paths: &[&str]) -> OriginReply {
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

fn empty(status: &str) -> OriginReply {
    let headers = [("Content-Length", "0")];
    OriginReply(reply(status, &headers, b""), ReplyEnd::Close)
}

/// The bytes of the episode at a path such as `/b.mp3`.
fn episode_bytes(path: &str) -> Vec<u8> {
    object(BYTES, u32::from(path.as_bytes()[1]))
}

/// An origin with a podcast at each path that begins with `/feed`, and its episodes.
async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| match &*asked.path {
        path if path.starts_with("/feed") => feed_reply(asked, &path[1..], &["a", "b"]),
        path => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
    })
    .await
}

/// The addresses in the attribute of a text.
fn attributes(text: &str, name: &str) -> Vec<String> {
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
async fn links(access: &AppAccess) -> (String, Vec<String>) {
    let opml = get(&access.subscriptions).await;
    assert_eq!(opml.status, 200, "{}", opml.text());
    let feed = attributes(&opml.text(), "xmlUrl").remove(0);
    let answer = get(&feed).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    (feed, attributes(&answer.text(), "enclosure url"))
}

#[tokio::test]
async fn an_app_downloads_one_copy_through_an_outage_a_broken_connection_and_another_agent() {
    let open = Arc::new(AtomicBool::new(false));
    let flag = open.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        if asked.path == "/feed" {
            return feed_reply(asked, "Morning", &["a", "b"]);
        }
        let answer = proper(asked, &episode_bytes(&asked.path), TAG);
        match (flag.load(Ordering::Relaxed), asked.range_from()) {
            (true, _) => OriginReply(answer, ReplyEnd::Close),
            // Two thirds, and then nothing: an outage.
            (false, None) => OriginReply(cut(answer, BYTES * 2 / 3), ReplyEnd::Silence),
            (false, Some(_)) => OriginReply(Vec::new(), ReplyEnd::Close),
        }
    })
    .await;
    let mut home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let (feed, enclosures) = links(&access).await;
    assert_eq!(enclosures.len(), 2);
    let text = get(&feed).await.text();
    assert!(
        !text.contains("new-feed-url")
            && !text.contains(
                "/a.mp3\" length=\"300000\" type=\"audio/mpeg\"/></item><item><title>Episode a"
            ),
        "{text}"
    );
    assert!(enclosures[0].starts_with(&access.server) && enclosures[0].ends_with("/a.mp3"));
    // To look at an episode does not ask for it.
    let looked = ask("HEAD", &enclosures[0], &[], "").await;
    assert_eq!(
        (looked.status, looked.field("content-type")),
        (200, Some("audio/mpeg"))
    );
    assert!(origin.requests().iter().all(|asked| asked.path == "/feed"));
    // Like an app that is closed in the middle: some bytes, and the connection is gone.
    let (mut stream, head, mut got) = begin("GET", &enclosures[0], &[], "").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let length = format!("content-length: {BYTES}");
    assert!(head.to_ascii_lowercase().contains(&length), "{head}");
    while got.len() < 50_000 {
        let mut piece = [0; 4096];
        let n = within(stream.read(&mut piece)).await.expect("bytes");
        assert!(n > 0, "it broke off at {}", got.len());
        got.extend_from_slice(&piece[..n]);
    }
    drop(stream);
    let tag = head
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .expect("a tag")
        .to_owned();
    home.replace_agent().await;
    open.store(true, Ordering::Relaxed);
    let range = format!("bytes={}-", got.len());
    let fields = [("Range", &*range), ("If-Range", &*tag)];
    let rest = ask("GET", &enclosures[0], &fields, "").await;
    assert_eq!(rest.status, 206, "{}", rest.head);
    assert_eq!(rest.field("etag"), Some(&*tag));
    got.extend(rest.body);
    assert!(got == episode_bytes("/a.mp3"), "{} bytes", got.len());
    // From the beginning it was asked for once; the same bytes are an episode of the library.
    let requests = origin.requests();
    let whole = requests
        .iter()
        .filter(|asked| asked.path == "/a.mp3" && asked.range_from().is_none());
    assert_eq!(whole.count(), 1);
    until_async("ready", async || {
        let episodes = home.episodes("1").await;
        let ready = episodes
            .iter()
            .filter(|episode| episode["state"] == "ready");
        (ready.count() == 1).then_some(())
    })
    .await;
    // The tag stays when the file is whole, and a range of it has the same bytes.
    let fields = [("Range", "bytes=100-199"), ("If-Range", &*tag)];
    let part = ask("GET", &enclosures[0], &fields, "").await;
    assert_eq!((part.status, part.field("etag")), (206, Some(&*tag)));
    assert!(part.body == episode_bytes("/a.mp3")[100..200]);
    let beyond = ask("GET", &enclosures[0], &[("Range", "bytes=300000-")], "").await;
    assert_eq!(beyond.status, 416);
    let other = [("Range", "bytes=100-199"), ("If-Range", "\"other\"")];
    assert_eq!(ask("GET", &enclosures[0], &other, "").await.status, 200);
}

#[tokio::test]
async fn neither_an_app_nor_a_player_is_given_bytes_of_two_copies() {
    let changed = Arc::new(AtomicBool::new(false));
    let flag = changed.clone();
    let new_bytes = object(BYTES, 99);
    let served = new_bytes.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        if asked.path == "/feed" {
            return feed_reply(asked, "Morning", &["a"]);
        }
        match flag.load(Ordering::Relaxed) {
            true => OriginReply(proper(asked, &served, "\"v2\""), ReplyEnd::Close),
            false if asked.range_from().is_none() => {
                let answer = proper(asked, &episode_bytes(&asked.path), TAG);
                OriginReply(cut(answer, BYTES * 2 / 3), ReplyEnd::Close)
            }
            false => empty("503 Service Unavailable"),
        }
    })
    .await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let (_, enclosures) = links(&home.apps().await).await;
    let (mut stream, head, mut got) = begin("GET", &enclosures[0], &[], "").await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let page = PageLink::of(&home.printed(&["page"]).await);
    let player = page.get("/podcasts/episode/1").await.player_source();
    let beginning = [("Range", "bytes=0-99")];
    let played = page.get_with(&player, &beginning).await;
    assert_eq!(played.status, 206, "{}", played.text);
    changed.store(true, Ordering::Relaxed);
    // The advertisements are others now: what was begun cannot be completed, and breaks off.
    let _ = within(stream.read_to_end(&mut got)).await;
    assert!(got.len() < BYTES, "{} bytes", got.len());
    assert!(episode_bytes("/a.mp3").starts_with(&got));
    let tag = head
        .lines()
        .find_map(|line| line.strip_prefix("etag: "))
        .expect("a tag");
    let range = format!("bytes={}-", got.len());
    let fields = [("Range", &*range), ("If-Range", tag)];
    let again = until_async("the new copy", async || {
        let again = ask("GET", &enclosures[0], &fields, "").await;
        (again.status == 200 && again.body.len() == BYTES).then_some(again)
    })
    .await;
    assert!(again.body == new_bytes);
    // A player has no `If-Range`: what it was told to play is another copy.
    let refused = page.get_with(&player, &beginning).await;
    assert_eq!(refused.status, 409, "{}", refused.text);
    let player = page.get("/podcasts/episode/1").await.player_source();
    assert_eq!(page.get_with(&player, &beginning).await.status, 206);
}

#[tokio::test]
async fn only_apps_of_this_machine_that_were_told_have_access() {
    let origin = origin().await;
    let mut home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let (feed, _) = links(&access).await;
    for (name, value, status) in [
        ("Host", "evil.example", 421),
        ("Host", "127.0.0.1", 421),
        ("Origin", "http://evil.example", 403),
        ("Origin", "null", 403),
    ] {
        for url in [
            &feed,
            &format!("{}/api/2/devices/cedos.json", access.server),
        ] {
            let authorization = access.authorization();
            let fields = [(name, value), ("Authorization", &*authorization)];
            assert_eq!(
                ask("GET", url, &fields, "").await.status,
                status,
                "{name}: {value}"
            );
        }
    }
    let wrong_token = feed.replace("/feeds", "x/feeds");
    assert_eq!(get(&wrong_token).await.status, 404);
    assert_eq!(get(&format!("{}/", access.server)).await.status, 404);
    for path in [
        "/api/2/devices/cedos.json",
        "/api/2/episodes/cedos.json",
        "/api/2/subscriptions/cedos/phone.json",
        "/subscriptions/cedos.opml",
        "/origins/subscriptions/cedos.json",
        "/api/2/none",
    ] {
        let url = format!("{}{path}", access.server);
        let refused = get(&url).await;
        assert_eq!(refused.status, 401, "{path}");
        assert!(
            refused
                .field("www-authenticate")
                .is_some_and(|value| value.starts_with("Basic"))
        );
        for wrong in ["Basic Y2Vkb3M6", "Basic !", "Bearer x", "Basic"] {
            let fields = [("Authorization", wrong)];
            assert_eq!(ask("GET", &url, &fields, "").await.status, 401, "{wrong}");
        }
        let cookie = [("Cookie", "sessionid=00000000000000000000000000000000")];
        assert_eq!(ask("GET", &url, &cookie, "").await.status, 401);
    }
    // A session does without the password, until it ends.
    let login = access.api("POST", "/api/2/auth/cedos/login.json", "").await;
    assert_eq!(login.status, 200);
    let cookie = login.field("set-cookie").expect("a session");
    assert!(
        cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"),
        "{cookie}"
    );
    let cookie = cookie.split(';').next().expect("a pair").to_owned();
    let session = [("Cookie", &*cookie)];
    let url = format!("{}/api/2/devices/cedos.json", access.server);
    assert_eq!(ask("GET", &url, &session, "").await.status, 200);
    let logout = format!("{}/api/2/auth/cedos/logout.json", access.server);
    assert_eq!(ask("POST", &logout, &session, "").await.status, 200);
    assert_eq!(ask("GET", &url, &session, "").await.status, 401);
    // What apps were told works with another agent, until a person ends it.
    home.replace_agent().await;
    until_async("the port is open again", async || {
        (TcpStream::connect(access.server.trim_start_matches("http://"))
            .await
            .is_ok())
        .then_some(())
    })
    .await;
    assert_eq!(get(&feed).await.status, 200);
    let new = AppAccess::of(&home.cast(&["apps", "--new-links"]).await);
    assert!(new.password != access.password && new.subscriptions != access.subscriptions);
    assert_eq!(get(&new.subscriptions).await.status, 200);
    home.cast(&["apps", "--off"]).await;
    assert!(
        TcpStream::connect(new.server.trim_start_matches("http://"))
            .await
            .is_err()
    );
    let file = home.path().join("list.opml");
    let name = file.display().to_string();
    home.run(&["cast", "opml", "export", "--for-apps", &name])
        .await
        .ends_with(0, "");
    let list = std::fs::read_to_string(&file).expect("the list");
    let feed = attributes(&list, "xmlUrl").remove(0);
    assert_eq!(get(&feed).await.status, 200, "{list}");
    let page = home.run(&["page"]).await;
    let page = String::from_utf8(page.output).expect("text");
    let by_page = get(&format!(
        "{}podcasts/subscriptions-for-apps.opml",
        page.trim()
    ))
    .await;
    assert_eq!((by_page.status, by_page.text()), (200, list));
    assert_ne!(home.apps().await.password, new.password);
}

#[tokio::test]
async fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let origin = origin().await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let subscriptions = "/origins/api/2/subscriptions/cedos/phone.json";
    let episodes = "/origins/api/2/episodes/cedos.json";
    let many = |n: usize, entry: &str| format!("[{}]", vec![entry; n].join(","));
    let action = json!({
        "podcast": origin.url("/feed"), "episode": origin.url("/a.mp3"), "action": "play", "position": 100, "total": 500,
    });
    for (method, path, body, status) in [
        ("POST", subscriptions, "{", 400),
        ("POST", subscriptions, "\u{0}", 400),
        (
            "POST",
            subscriptions,
            r#"{"add": ["https://a.example/"], "remove": ["https://a.example/"]}"#,
            400,
        ),
        (
            "POST",
            subscriptions,
            &format!("{{\"add\": {}}}", many(10_001, "\"x\"")),
            400,
        ),
        ("POST", episodes, "{}", 400),
        ("POST", episodes, &many(10_001, "{}"), 400),
        ("POST", episodes, &"[".repeat(100_000), 400),
        ("POST", episodes, &"x".repeat(5 << 20), 413),
        ("POST", "/api/2/episodes/other.json", "[]", 404),
        ("PUT", "/subscriptions/cedos/phone.opml", "<html>", 400),
        (
            "PUT",
            "/subscriptions/cedos/phone.opml",
            "<!DOCTYPE x [<!ENTITY a \"b\">]><opml/>",
            400,
        ),
        ("POST", "/api/2/devices/cedos/..%2F..%2Fetc.json", "{}", 400),
        ("POST", "/api/2/devices/cedos/phone.exe", "{}", 404),
        ("GET", "/api/2/lists/cedos.json", "", 404),
        ("DELETE", subscriptions, "", 405),
    ] {
        let answer = access.api(method, path, body).await;
        let shown: String = body.chars().take(60).collect();
        assert_eq!(
            answer.status,
            status,
            "{method} {path} {shown}: {}",
            answer.text()
        );
    }
    // Entries that make no sense are left out of those that do.
    let wrong = json!([{"action": "play"}, 7, null, {"podcast": "file:///x", "episode": "y", "action": "play"}, action]);
    assert_eq!(
        access
            .api("POST", episodes, &wrong.to_string())
            .await
            .status,
        200
    );
    let body = json!({"add": ["file:///etc/passwd", "x", "gopher://a/"], "remove": ["y"]});
    let answer = access.api("POST", subscriptions, &body.to_string()).await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        answer.json()["update_urls"].as_array().map(Vec::len),
        Some(3)
    );
    assert_eq!(home.feeds().await, [origin.url("/feed")]);
    let heard = home.episodes("1").await;
    let positions: Vec<_> = heard.iter().map(|e| e["position_ms"].clone()).collect();
    assert_eq!(positions, [json!(0), json!(100_000)]);
    // A list that lacks a podcast is no wish to remove it.
    let put = access
        .api("PUT", "/origins/subscriptions/cedos/phone.json", "[]")
        .await;
    assert_eq!(put.status, 200);
    assert_eq!(home.feeds().await, [origin.url("/feed")]);
}

/// An origin whose feed at `/old` is at `/new` once it has moved.
async fn moving_origin(has_moved: Arc<AtomicBool>) -> ScriptedOrigin {
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

#[tokio::test]
async fn an_app_that_follows_a_feed_to_its_new_address_does_not_end_the_subscription() {
    let has_moved = Arc::new(AtomicBool::new(false));
    let origin = moving_origin(has_moved.clone()).await;
    let (old, new) = (origin.url("/old"), origin.url("/new"));
    let home = Listener::subscribed(&[&old]).await;
    let access = home.apps().await;
    has_moved.store(true, Ordering::Relaxed);
    home.cast(&["refresh"]).await;
    assert_eq!(home.feeds().await, std::slice::from_ref(&new));
    let before = home.cast(&["list"]).await["channels"][0]["id"].clone();
    let path = "/origins/api/2/subscriptions/cedos/phone.json";
    for body in [
        json!({"add": [], "remove": [old]}),
        json!({"add": [new], "remove": [old]}),
    ] {
        let answer = access.api("POST", path, &body.to_string()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(home.feeds().await, std::slice::from_ref(&new));
    }
    let after = home.cast(&["list"]).await["channels"][0]["id"].clone();
    assert_eq!(after, before, "the same channel, with its rule and files");
}

#[tokio::test]
async fn a_feed_that_another_device_followed_first_stays_with_its_positions() {
    let has_moved = Arc::new(AtomicBool::new(false));
    let origin = moving_origin(has_moved.clone()).await;
    let (old, new) = (origin.url("/old"), origin.url("/new"));
    let server = Listener::subscribed(&[&old]).await;
    let device = Listener::subscribed(&[&old]).await;
    let access = server.apps().await;
    let address = format!("{}/origins", access.server);
    let set_up = device
        .set_up(&address, &access.user, &access.password)
        .await;
    assert_eq!(set_up.code, 0, "{}", set_up.errors);
    let episode = device.episodes(&old).await[0]["id"].to_string();
    device.cast(&["played", &episode]).await;
    let before = device.cast(&["list"]).await["channels"][0]["id"].clone();
    has_moved.store(true, Ordering::Relaxed);
    server.cast(&["refresh"]).await;
    assert_eq!(server.feeds().await, std::slice::from_ref(&new));
    let report = device.cast(&["sync"]).await["report"].clone();
    assert_eq!(report["unsubscribed"], json!([]), "{report}");
    assert_eq!(device.feeds().await, std::slice::from_ref(&new));
    let after = device.cast(&["list"]).await["channels"][0]["id"].clone();
    assert_eq!(after, before, "the same channel, with its rule and files");
    assert_eq!(device.episodes(&new).await[0]["played"], true);
}

#[tokio::test]
async fn the_agents_own_server_is_not_synced_with() {
    let origin = origin().await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let server = &access.server;
    home.set_up(server, &access.user, &access.password)
        .await
        .ends_with(2, "this agent's own server");
    assert_eq!(home.feeds().await, [origin.url("/feed")]);
}

#[tokio::test]
async fn two_devices_have_the_same_podcasts_and_positions_after_they_synced() {
    let origin = origin().await;
    let [one, two, three] = ["/feed1", "/feed2", "/feed3"].map(|path| origin.url(path));
    let server = Listener::subscribed(&[&one, &two]).await;
    let device = Listener::subscribed(&[&two, &three]).await;
    let heard = device.episodes(&two).await[0]["id"].to_string();
    device.cast(&["played", &heard]).await;
    let access = server.apps().await;
    let address = format!("{}/origins", access.server);
    let refused = device.set_up(&address, &access.user, "wrong").await;
    refused.ends_with(1, "refuses the user name or the password");
    let set_up = device
        .set_up(&address, &access.user, &access.password)
        .await;
    assert_eq!(set_up.code, 0, "{}", set_up.errors);
    let report = &set_up.last()["report"];
    assert_eq!(
        (&report["subscribed"], &report["subscriptions_sent"]),
        (&json!(1), &json!(1)),
        "{report}"
    );
    let shown = device.cast(&["sync", "--status"]).await;
    assert!(!shown.to_string().contains(&access.password), "{shown}");
    let all = [one.clone(), two.clone(), three.clone()];
    assert_eq!(server.feeds().await, all);
    assert_eq!(device.feeds().await, all);
    let is_played = async |home: &Listener| {
        let episodes = home.episodes(&two).await;
        episodes.iter().any(|episode| episode["played"] == true)
    };
    assert!(is_played(&server).await);
    // An exchange without changes sends and removes nothing.
    let again = device.cast(&["sync"]).await;
    let report = &again["report"];
    assert_eq!(report["subscriptions_sent"], 0, "{report}");
    assert_eq!(
        (&report["actions_sent"], &report["actions_applied"]),
        (&json!(0), &json!(0)),
        "{report}"
    );
    // What a person takes back on one device is taken back on the other, in both directions.
    let heard = server.episodes(&two).await;
    let heard = heard
        .iter()
        .find(|episode| episode["played"] == true)
        .expect("one");
    server
        .cast(&["played", &heard["id"].to_string(), "--not"])
        .await;
    server.cast(&["remove", &one]).await;
    device.cast(&["remove", &three]).await;
    let report = device.cast(&["sync"]).await["report"].clone();
    assert_eq!(report["unsubscribed"], json!(["feed1"]), "{report}");
    assert!(!is_played(&device).await);
    assert_eq!(device.feeds().await, std::slice::from_ref(&two));
    assert_eq!(server.feeds().await, std::slice::from_ref(&two));
    device.cast(&["add", &three]).await;
    device.cast(&["sync"]).await;
    assert_eq!(server.feeds().await, [two.clone(), three.clone()]);
    device.cast(&["sync", "--off"]).await;
    device
        .run(&["cast", "sync"])
        .await
        .ends_with(2, "no server is set up");
    assert_eq!(device.feeds().await, [two, three]);
}

#[tokio::test]
async fn an_action_on_an_episode_that_is_not_known_yet_counts_when_it_is() {
    let more = Arc::new(AtomicBool::new(false));
    let flag = more.clone();
    let origin = ScriptedOrigin::start(move |asked| match flag.load(Ordering::Relaxed) {
        true => unconditional_feed_reply(asked, "Morning", &["a", "b"]),
        false => feed_reply(asked, "Morning", &["a"]),
    })
    .await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let action = json!([{
        "podcast": origin.url("/feed"), "episode": origin.url("/b.mp3"), "action": "play", "position": 77, "total": 500,
    }]);
    let sent = access
        .api("POST", "/api/2/episodes/cedos.json", &action.to_string())
        .await;
    assert_eq!(sent.status, 200, "{}", sent.text());
    more.store(true, Ordering::Relaxed);
    home.cast(&["refresh"]).await;
    until_async("the position", async || {
        let episodes = home.episodes("1").await;
        episodes
            .iter()
            .any(|episode| episode["position_ms"] == 77_000)
            .then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_cannot_sync_is_one_sentence_and_nothing_is_lost() {
    let phase = Arc::new(AtomicU8::new(0));
    let now = phase.clone();
    let origin = origin().await;
    let feeds: Vec<String> = (0..7).map(|n| origin.url(&format!("/feed{n}"))).collect();
    let removed = feeds.clone();
    // A stand-in for servers that misbehave.
    let server = ScriptedOrigin::start(move |asked| {
        let ok = |body: &Value| {
            let text = body.to_string();
            let headers = [("Content-Length", &*text.len().to_string())];
            OriginReply(reply("200 OK", &headers, text.as_bytes()), ReplyEnd::Close)
        };
        let is_first = asked.path.ends_with("since=0");
        match (now.load(Ordering::Relaxed), &*asked.path) {
            (1, _) => empty("500 Internal Server Error"),
            (2, _) => OriginReply(
                reply("200 OK", &[], b"<html>Welcome</html>"),
                ReplyEnd::Close,
            ),
            (3, _) => {
                let headers = [
                    ("Location", "https://elsewhere.example/api/2/x.json"),
                    ("Content-Length", "0"),
                ];
                OriginReply(
                    reply("301 Moved Permanently", &headers, b""),
                    ReplyEnd::Close,
                )
            }
            (4, _) => OriginReply(Vec::new(), ReplyEnd::Close),
            (5, _) => empty("401 Unauthorized"),
            (_, path) if path.contains("/api/2/subscriptions/") && asked.method == "GET" => {
                // Whatever ended before this device took part does not end here.
                let removed = if is_first || now.load(Ordering::Relaxed) == 6 {
                    &removed[..]
                } else {
                    &removed[..0]
                };
                ok(&json!({"add": [], "remove": removed, "timestamp": 100}))
            }
            (_, path) if path.contains("/api/2/episodes/") && asked.method == "GET" => {
                ok(&json!({"actions": [], "timestamp": 100}))
            }
            (_, path) if path.starts_with("/subscriptions/") => empty("404 Not Found"),
            _ => ok(&json!({"timestamp": 100, "update_urls": []})),
        }
    })
    .await;
    let subscribed: Vec<&str> = feeds.iter().map(String::as_str).collect();
    let home = Listener::subscribed(&subscribed).await;
    let set_up = home.set_up(&server.url("/"), "me", "hush").await;
    assert_eq!(set_up.code, 0, "{}", set_up.errors);
    for (phase_number, sentence) in [
        (1, "it answers 500"),
        (2, "not answer in the gpodder API"),
        (
            3,
            "is at https://elsewhere.example; set it up there: `cedos cast sync https://elsewhere.example --user",
        ),
        (4, "broke off"),
        (5, "refuses the user name or the password of me"),
        (6, "7 of 7 subscriptions ended"),
    ] {
        phase.store(phase_number, Ordering::Relaxed);
        home.run(&["cast", "sync"]).await.ends_with(1, sentence);
        let status = home.cast(&["sync", "--status"]).await;
        assert!(
            status["account"]["problem"]
                .as_str()
                .is_some_and(|p| p.contains(sentence)),
            "{status}"
        );
    }
    assert_eq!(home.feeds().await, feeds);
    phase.store(0, Ordering::Relaxed);
    home.cast(&["sync"]).await;
    phase.store(6, Ordering::Relaxed);
    home.cast(&["sync", "--accept-removals"]).await;
    assert!(home.feeds().await.is_empty());
    // No password went anywhere but to the server.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}/", nobody.local_addr().expect("an address"));
    drop(nobody);
    let refused = home.set_up(&address, "me", "hush").await;
    assert_eq!(refused.code, 1, "{}", refused.errors);
    assert!(!refused.errors.contains("hush"), "{}", refused.errors);
}

#[tokio::test]
async fn the_agent_syncs_by_itself_and_tries_again_when_the_server_is_back() {
    let is_back = Arc::new(AtomicBool::new(false));
    let flag = is_back.clone();
    let server = ScriptedOrigin::start(move |_| match flag.load(Ordering::Relaxed) {
        true => {
            let body =
                br#"{"add": [], "remove": [], "actions": [], "timestamp": 100, "update_urls": []}"#;
            let length = body.len().to_string();
            OriginReply(
                reply("200 OK", &[("Content-Length", &*length)], body),
                ReplyEnd::Close,
            )
        }
        false => empty("502 Bad Gateway"),
    })
    .await;
    let folder = tempfile::tempdir().expect("a directory");
    let account = SyncAccount {
        server: server.url("/").parse().expect("an address"),
        user: "me".to_owned(),
        authorization: "Basic bWU6aHVzaA==".to_owned(),
        device: "cedos-test".to_owned(),
        is_nextcloud: false,
        synced_at: None,
        next_sync_at: Timestamp::UNIX_EPOCH,
        problem: None,
        progress: SyncProgress::default(),
    };
    let library = Library::open(&folder.path().join(".state/cedos/podcasts")).expect("a library");
    library.set_sync_account(&account).expect("stored");
    drop(library);
    let agent = Some(AgentProcess::start(folder.path()).await);
    let mut home = Listener { folder, agent };
    let status = until_async("a problem", async || {
        let status = home.cast(&["sync", "--status"]).await["account"].clone();
        status["problem"].is_string().then_some(status)
    })
    .await;
    assert!(
        status["problem"]
            .as_str()
            .is_some_and(|p| p.contains("502")),
        "{status}"
    );
    let next: Timestamp = status["next_sync_at"]
        .as_str()
        .expect("a time")
        .parse()
        .expect("a time");
    assert!(next > Timestamp::now(), "{status}");
    // It is left alone until then.
    let asked = server.requests().len();
    assert!(asked <= 3, "{asked} requests");
    is_back.store(true, Ordering::Relaxed);
    home.agent.take().expect("it runs").kill().await;
    let library = Library::open(&home.path().join(".state/cedos/podcasts")).expect("a library");
    library.set_sync_account(&account).expect("due again");
    drop(library);
    home.agent = Some(AgentProcess::start(home.path()).await);
    until_async("synced", async || {
        let status = home.cast(&["sync", "--status"]).await["account"].clone();
        (status["synced_at"].is_string() && status["problem"].is_null()).then_some(())
    })
    .await;
    let requests = server.requests();
    let is_known =
        |asked: &OriginRequest| asked.header("authorization") == Some("Basic bWU6aHVzaA==");
    assert!(requests.iter().all(is_known));
}

#[tokio::test]
async fn a_port_that_others_took_meanwhile_costs_apps_their_password() {
    let mut home = Listener::subscribed(&[]).await;
    let access = home.apps().await;
    home.agent.take().expect("it runs").kill().await;
    let taken = access.server.trim_start_matches("http://").to_owned();
    let _taken = within(tokio::net::TcpListener::bind(taken))
        .await
        .expect("it is free");
    home.agent = Some(AgentProcess::start(home.path()).await);
    let new = home.apps().await;
    assert_ne!(new.server, access.server);
    assert_ne!(new.password, access.password);
    let token = |access: &AppAccess| access.subscriptions.rsplit('/').nth(1).map(str::to_owned);
    assert_ne!(token(&new), token(&access));
}

/// The path of a program; none if it is not installed.
fn installed(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&path).map(|folder| folder.join(program));
    found.find(|file| file.is_file())
}

/// The Python that has gPodder's own library for the API.
async fn python_with_mygpoclient() -> Option<PathBuf> {
    for python in ["/usr/bin/python3".into(), installed("python3")?] {
        let mut command = Command::new(&python);
        command.args(["-c", "import mygpoclient.api"]);
        command.stderr(Stdio::null());
        if command.status().await.is_ok_and(|status| status.success()) {
            return Some(python);
        }
    }
    None
}

#[tokio::test]
async fn gpodders_own_library_syncs_with_the_agent() {
    let Some(python) = python_with_mygpoclient().await else {
        return eprintln!("skipped: mygpoclient is not installed");
    };
    let origin = origin().await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let access = home.apps().await;
    let script = r#"
import json, sys
from mygpoclient import api
server, user, password, feed, other, episode = sys.argv[1:]
client = api.MygPodderClient(user, password, server)
client.update_device_settings("pc", "A desktop", "desktop")
first = client.pull_subscriptions("pc", 0)
listed = client.get_subscriptions("pc")
updated = client.update_subscriptions("pc", [other], [])
second = client.pull_subscriptions("pc", first.since)
action = api.EpisodeAction(feed, episode, "play", "pc", "2026-11-26T07:30:00", 0, 120, 500)
client.upload_episode_actions([action])
actions = client.download_episode_actions(0)
client.put_subscriptions("pc", [])
after = client.get_subscriptions("pc")
client.update_subscriptions("pc", [], [first.add[0]])
third = client.pull_subscriptions("pc", second.since)
print(json.dumps({
    "first": first.add, "listed": listed, "updated": updated.update_urls, "second": second.add,
    "actions": [a.to_dictionary() for a in actions.actions], "after": after,
    "third": third.remove, "devices": [(d.device_id, d.caption, d.type) for d in client.get_devices()],
}))
"#;
    let (feed, other) = (origin.url("/feed"), origin.url("/feed2"));
    let mut command = Command::new(python);
    command
        .args([
            "-c",
            script,
            &access.server,
            &access.user,
            &access.password,
            &feed,
            &other,
        ])
        .arg(origin.url("/a.mp3"));
    let output = within(command.output()).await.expect("python runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    let told: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"));
    let link = told["first"][0].as_str().expect("a link").to_owned();
    assert!(
        link.starts_with(&access.server) && link.contains("/feeds/1"),
        "{told}"
    );
    assert_eq!(told["listed"], json!([link]), "{told}");
    let second = told["second"].as_array().expect("a list");
    assert_eq!(told["updated"], json!([[other, second[0]]]), "{told}");
    assert_eq!(told["after"].as_array().map(Vec::len), Some(2), "{told}");
    assert_eq!(told["third"], json!([link]), "{told}");
    assert_eq!(
        told["devices"],
        json!([["pc", "A desktop", "desktop"]]),
        "{told}"
    );
    let action = &told["actions"][0];
    assert_eq!(
        (&action["position"], &action["timestamp"]),
        (&json!(120), &json!("2026-11-26T07:30:00")),
        "{told}"
    );
    assert!(
        action["episode"]
            .as_str()
            .is_some_and(|e| e.starts_with(&access.server)),
        "{told}"
    );
    assert_eq!(home.feeds().await, [other]);
}

#[tokio::test]
async fn gpodder_downloads_an_episode_through_the_agent() {
    let Some(gpo) = installed("gpo") else {
        return eprintln!("skipped: gpodder is not installed");
    };
    let attempts = Arc::new(AtomicU8::new(0));
    let count = attempts.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        if asked.path == "/feed" {
            return feed_reply(asked, "Morning", &["a"]);
        }
        let answer = proper(asked, &episode_bytes(&asked.path), TAG);
        // The first two connections break off.
        match count.fetch_add(1, Ordering::Relaxed) {
            0 => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Reset),
            1 => OriginReply(Vec::new(), ReplyEnd::Reset),
            _ => OriginReply(answer, ReplyEnd::Close),
        }
    })
    .await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let (feed, _) = links(&home.apps().await).await;
    let folder = home.path().join("gpodder");
    for arguments in [&["subscribe", &feed][..], &["update"], &["download"]] {
        let mut command = Command::new(&gpo);
        command
            .args(arguments)
            .env("GPODDER_HOME", &folder)
            .env("HOME", home.path())
            .env_remove("http_proxy");
        let output = within(command.output()).await.expect("gpo runs");
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    }
    let mut found = Vec::new();
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path if path.extension().is_some_and(|e| e == "mp3") => found.push(path),
                _ => {}
            }
        }
    }
    assert_eq!(found.len(), 1, "{found:?}");
    let bytes = std::fs::read(&found[0]).expect("the file");
    assert!(bytes == episode_bytes("/a.mp3"), "{} bytes", bytes.len());
}

/// A program that is killed with the test.
struct Server {
    _process: tokio::process::Child,
    url: String,
}

/// Starts oPodSync with an account of `me`, whose password is `hush hush`.
async fn opodsync(folder: &Path, data: &Path) -> Server {
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = port.local_addr().expect("an address").to_string();
    drop(port);
    std::fs::create_dir_all(data).expect("made");
    let process = Command::new("php")
        .args(["-S", &at, "-t"])
        .arg(folder)
        .arg(folder.join("index.php"))
        .env("DATA_ROOT", data)
        .env("PHP_CLI_SERVER_WORKERS", "2")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .expect("php");
    let url = format!("http://{at}/");
    until_async("oPodSync", async || {
        TcpStream::connect(&at).await.is_ok().then_some(())
    })
    .await;
    // The first request makes the database.
    get(&url).await;
    let script = "$db = new SQLite3($argv[1]); $db->busyTimeout(5000); \
                  $insert = $db->prepare('INSERT INTO users (name, password) VALUES (?, ?)'); \
                  $insert->bindValue(1, 'me'); $insert->bindValue(2, password_hash('hush hush', PASSWORD_DEFAULT)); \
                  $insert->execute();";
    let made = Command::new("php")
        .args(["-r", script, "--"])
        .arg(data.join("data.sqlite"))
        .output();
    let made = made.await.expect("php");
    assert!(made.status.success(), "{made:?}");
    Server {
        _process: process,
        url,
    }
}

/// `CEDOS_OPODSYNC` names the folder `server` of oPodSync (github.com/kd2org/opodsync), which needs PHP.
#[tokio::test]
async fn podcasts_are_synced_through_opodsync_by_both_of_its_interfaces() {
    let Some(folder) = std::env::var_os("CEDOS_OPODSYNC").map(PathBuf::from) else {
        return eprintln!("skipped: CEDOS_OPODSYNC names no oPodSync");
    };
    let origin = origin().await;
    for path in ["", "index.php/apps/gpoddersync"] {
        let [first, second, third] = ["/feed1", "/feed2", "/feed3"].map(|path| origin.url(path));
        let one = Listener::subscribed(&[&first, &second]).await;
        let other = Listener::subscribed(&[&third]).await;
        let server = opodsync(&folder, &one.path().join("opodsync")).await;
        let address = format!("{}{path}", server.url);
        let heard = one.episodes(&first).await[0]["id"].to_string();
        one.cast(&["played", &heard]).await;
        one.set_up(&address, "me", "wrong")
            .await
            .ends_with(1, "refuses the user name");
        for home in [&one, &other, &one] {
            let set_up = home.set_up(&address, "me", "hush hush").await;
            assert_eq!(set_up.code, 0, "{path}: {}", set_up.errors);
        }
        let all = [first.clone(), second.clone(), third.clone()];
        assert_eq!(one.feeds().await, all, "{path}");
        assert_eq!(other.feeds().await, all, "{path}");
        let episodes = until_async("the feed is read", async || {
            let episodes = other.episodes(&first).await;
            episodes
                .iter()
                .any(|episode| episode["played"] == true)
                .then_some(episodes)
        })
        .await;
        let heard = episodes
            .iter()
            .find(|episode| episode["played"] == true)
            .expect("one");
        other
            .cast(&["played", &heard["id"].to_string(), "--not"])
            .await;
        other.cast(&["remove", &second]).await;
        other.cast(&["sync"]).await;
        one.cast(&["sync"]).await;
        assert_eq!(one.feeds().await, [first.clone(), third], "{path}");
        let episodes = one.episodes(&first).await;
        assert!(
            episodes.iter().all(|episode| episode["played"] == false),
            "{path}"
        );
        // An exchange without changes changes nothing.
        let again = one.cast(&["sync"]).await;
        let report = &again["report"];
        assert_eq!(
            (&report["actions_sent"], &report["subscriptions_sent"]),
            (&json!(0), &json!(0)),
            "{report}"
        );
        assert_eq!(report["actions_applied"], 0, "{report}");
    }
}
