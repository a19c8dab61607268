//! The agent's page over HTTP: who may ask, what it shows, and what its buttons do.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::program::{self, AgentProcess, CedosRun, ProxyProcess, ended};
use cedos_lab_rig::wait::{until_async, within};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpStream, UnixStream};

const BYTES: usize = 400_000;

/// A home with an agent, and the link of its page.
pub struct PageHome {
    folder: tempfile::TempDir,
    pub agent: AgentProcess,
}

impl PageHome {
    pub async fn new() -> PageHome {
        PageHome::prepared(|_| ()).await
    }

    /// A home in which something is done before the agent begins.
    pub async fn prepared(prepare: impl FnOnce(&Path)) -> PageHome {
        let folder = tempfile::tempdir().expect("a directory");
        prepare(folder.path());
        let agent = AgentProcess::start(folder.path()).await;
        PageHome { folder, agent }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub async fn run(&self, arguments: &[&str]) -> CedosRun {
        let mut command = program::cedos(self.path(), arguments);
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("CEDOS_AGENT", &self.agent.socket)
            .env("PATH", format!("{}/bin:{path}", self.path().display()))
            .env("HOME", self.path())
            .env("XDG_DATA_HOME", self.path().join(".local/share"));
        ended(command.spawn().expect("start cedos")).await
    }

    pub async fn link(&self, more: &[&str]) -> PageLink {
        let run = self.run(&[&["page"], more].concat()).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        PageLink::of(String::from_utf8(run.output).expect("text").trim())
    }

    pub async fn standing(&self, id: u64) -> String {
        let run = self.run(&["status", &id.to_string(), "--json"]).await;
        run.last()["standing"].as_str().expect("a state").to_owned()
    }

    pub async fn until_standing(&self, id: u64, standing: &str) {
        until_async(standing, async || {
            (self.standing(id).await == standing).then_some(())
        })
        .await;
    }

    /// Asks the agent over its socket.
    async fn ask(&self, request: &str) -> Value {
        let mut stream = UnixStream::connect(&self.agent.socket)
            .await
            .expect("it listens");
        stream
            .write_all(format!("{request}\n").as_bytes())
            .await
            .expect("sent");
        let line = within(BufReader::new(stream).lines().next_line()).await;
        serde_json::from_str(&line.expect("readable").expect("a line")).expect("JSON")
    }
}

/// A link of the page, in its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageLink {
    pub url: String,
    host: String,
    base: String,
}

/// What the page answered.
pub struct PageAnswer {
    pub status: u16,
    pub text: String,
}

impl PageAnswer {
    /// Path of what the player of an episode's page plays, behind the link's token.
    pub fn player_source(&self) -> String {
        let audio = self.text.split("<audio").nth(1).expect("a player");
        let source = audio.split("src=\"").nth(1).expect("something to play");
        let source = source.split('"').next().expect("an address");
        let at = source.find("/podcasts").expect("a path of podcasts");
        source[at..].to_owned()
    }
}

impl PageLink {
    pub fn of(url: &str) -> PageLink {
        let rest = url.strip_prefix("http://").expect("a link");
        let (host, path) = rest.split_once('/').expect("a path");
        PageLink {
            url: url.to_owned(),
            host: host.to_owned(),
            base: format!("/{}", path.trim_end_matches('/')),
        }
    }

    async fn ask(
        &self,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        body: &str,
    ) -> PageAnswer {
        let mut words = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !fields.iter().any(|(name, _)| *name == "Host") {
            words += &format!("Host: {}\r\n", self.host);
        }
        for (name, value) in fields {
            words += &format!("{name}: {value}\r\n");
        }
        words += &format!("Content-Length: {}\r\n\r\n{body}", body.len());
        let mut stream = TcpStream::connect(&self.host).await.expect("it listens");
        stream.write_all(words.as_bytes()).await.expect("sent");
        let mut answer = Vec::new();
        within(stream.read_to_end(&mut answer))
            .await
            .expect("an answer");
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok());
        PageAnswer {
            status: status.unwrap_or_else(|| panic!("no answer: {answer}")),
            text: answer,
        }
    }

    pub async fn get(&self, path: &str) -> PageAnswer {
        self.ask("GET", &format!("{}{path}", self.base), &[], "")
            .await
    }

    /// Sends a form of the page, as a browser does.
    pub async fn post(&self, path: &str, form: &str) -> PageAnswer {
        let origin = format!("http://{}", self.host);
        let fields = [
            ("Origin", &*origin),
            ("Content-Type", "application/x-www-form-urlencoded"),
        ];
        self.ask("POST", &format!("{}{path}", self.base), &fields, form)
            .await
    }
}

impl PageLink {
    pub async fn get_with(&self, path: &str, fields: &[(&str, &str)]) -> PageAnswer {
        let path = format!("{}{path}", self.base);
        self.ask("GET", &path, fields, "").await
    }

    /// Sends an empty form with these fields alone.
    pub async fn post_with(&self, path: &str, fields: &[(&str, &str)]) -> PageAnswer {
        let path = format!("{}{path}", self.base);
        self.ask("POST", &path, fields, "").await
    }

    /// Asks as the page's own form does, but without the token.
    pub async fn without_token(&self, method: &str, path: &str) -> PageAnswer {
        let origin = format!("http://{}", self.host);
        self.ask(method, path, &[("Origin", &*origin)], "").await
    }

    /// Uploads a file by a form.
    pub async fn upload(&self, path: &str, boundary: &str, body: &str) -> PageAnswer {
        let origin = format!("http://{}", self.host);
        let media_type = format!("multipart/form-data; boundary={boundary}");
        let fields = [("Origin", &*origin), ("Content-Type", &*media_type)];
        let path = format!("{}{path}", self.base);
        self.ask("POST", &path, &fields, body).await
    }
}

/// An origin that gives half of an object, and the rest once the flag is set.
pub async fn halting(open: Arc<AtomicBool>) -> ScriptedOrigin {
    ScriptedOrigin::start(move |asked| {
        let answer = proper(asked, &object(BYTES, 1), "\"v1\"");
        match (open.load(Ordering::Relaxed), asked.range_from()) {
            (true, _) => OriginReply(answer, ReplyEnd::Close),
            (false, None) => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
            (false, Some(_)) => OriginReply(Vec::new(), ReplyEnd::Close),
        }
    })
    .await
}

#[tokio::test]
async fn the_page_answers_its_own_forms_and_who_knows_the_token_and_nobody_else() {
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let page = link.get("/").await;
    assert_eq!(page.status, 200, "{}", page.text);
    let lower = page.text.to_lowercase();
    for field in [
        "content-security-policy: default-src 'none'; script-src 'self';",
        "frame-ancestors 'none'",
        "cache-control: no-store",
        "referrer-policy: same-origin",
        "x-content-type-options: nosniff",
        "cross-origin-resource-policy: same-origin",
    ] {
        assert!(lower.contains(field), "no `{field}` in {}", page.text);
    }
    assert!(!lower.contains("access-control-allow"), "{}", page.text);
    // All it is made of comes from here, and no script or style is in it.
    assert!(!page.text.contains("<style") && !page.text.contains(" style="));
    for part in page.text.split("<script").skip(1) {
        assert!(
            part.contains("src=\"/") && part.contains("></script>"),
            "{part}"
        );
    }
    for asset in ["/assets/page.css", "/assets/page.js", "/assets/icon.svg"] {
        assert!(page.text.contains(asset), "{asset}");
        assert_eq!(link.get(asset).await.status, 200, "{asset}");
    }
    for path in ["/networks", "/networks?a=b"] {
        assert_eq!(link.get(path).await.status, 200, "{path}");
    }

    let ask = async |method: &str, path: &str, fields: &[(&str, &str)]| {
        link.ask(method, path, fields, "").await.status
    };
    let own = format!("{}/", link.base);
    let port = link.host.split(':').nth(1).expect("a port");
    let evil = format!("evil.example:{port}");
    for host in [&*evil, "127.0.0.1", ""] {
        assert_eq!(ask("GET", &own, &[("Host", host)]).await, 421, "{host}");
    }
    let local = format!("localhost:{port}");
    assert_eq!(ask("GET", &own, &[("Host", &local)]).await, 200);
    for origin in [
        "http://evil.example",
        "null",
        &format!("https://{}", link.host),
    ] {
        for method in ["GET", "POST"] {
            assert_eq!(
                ask(method, &own, &[("Origin", origin)]).await,
                403,
                "{origin}"
            );
        }
    }
    let clear = format!("{}/clear", link.base);
    assert_eq!(
        ask("POST", &clear, &[]).await,
        403,
        "no Origin, no form of ours"
    );
    for path in [
        "/",
        "/assets/page.js",
        "/0123456789abcdef0123456789abcdef/",
        "/open/0123",
    ] {
        let status = ask("GET", path, &[]).await;
        assert!(matches!(status, 404 | 410), "{path}: {status}");
    }
    assert_eq!(
        ask("GET", &format!("{}/nothing", link.base), &[]).await,
        404
    );
    // The stream of one that is gone, too: a browser asks for one that ends again and again.
    for path in ["/transfer/99", "/transfer/99/updates"] {
        let path = format!("{}{path}", link.base);
        assert_eq!(ask("GET", &path, &[]).await, 409, "{path}");
    }
}

#[tokio::test]
async fn the_link_stays_with_the_next_agent_and_ends_when_it_is_asked_to() {
    let mut home = PageHome::new().await;
    let link = home.link(&[]).await;
    assert_eq!(home.link(&[]).await, link);
    let saved = home.path().join(".state/cedos/page.json");
    let mode = std::fs::metadata(&saved)
        .expect("saved")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);

    let next = AgentProcess::start_with;
    let PageHome { folder, agent } = home;
    agent.kill().await;
    let agent = next(folder.path(), &[]).await;
    home = PageHome { folder, agent };
    assert_eq!(
        link.get("/").await.status,
        200,
        "before anybody asked for it"
    );

    let other = home.link(&["--new-link"]).await;
    assert_ne!(other.base, link.base);
    assert_eq!(other.get("/").await.status, 200);
    let old = PageLink {
        host: other.host.clone(),
        ..link
    };
    assert_eq!(old.get("/").await.status, 404);

    home.run(&["page", "--close"]).await.ends_with(0, "closed");
    assert!(TcpStream::connect(&other.host).await.is_err());
    assert!(!saved.exists());
}

#[tokio::test]
async fn a_port_that_others_took_meanwhile_costs_the_link_its_token() {
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let PageHome { folder, agent } = home;
    agent.kill().await;
    let _stranger = std::net::TcpListener::bind(&link.host).expect("free");
    let agent = AgentProcess::start(folder.path()).await;
    let home = PageHome { folder, agent };
    let other = home.link(&[]).await;
    assert_ne!((&other.host, &other.base), (&link.host, &link.base));
    assert_ne!(other.base, link.base);
}

#[tokio::test]
async fn a_link_for_a_command_line_works_once() {
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let answer = home.ask(r#"{"do":"page","entry":true}"#).await;
    assert_eq!(answer["link"], link.url);
    let entry = answer["entry"].as_str().expect("a link");
    assert!(!entry.contains(&link.base), "{entry}");
    let path = entry
        .strip_prefix(&format!("http://{}", link.host))
        .expect("its port");
    let first = link.ask("GET", path, &[], "").await;
    assert_eq!(first.status, 303, "{}", first.text);
    assert!(
        first
            .text
            .contains(&format!("location: {}/\r\n", link.base)),
        "{}",
        first.text
    );
    assert_eq!(link.ask("GET", path, &[], "").await.status, 410);

    // What a desktop's browser is started with is such a link.
    let opener = home.path().join("bin/xdg-open");
    std::fs::create_dir(home.path().join("bin")).expect("a folder");
    std::fs::write(&opener, "#!/bin/sh\nprintf %s \"$1\" > opened\n").expect("written");
    std::fs::set_permissions(&opener, PermissionsExt::from_mode(0o755)).expect("changed");
    let opened = home.run(&["page", "--open"]).await;
    assert_eq!(
        (opened.code, &*opened.output),
        (0, &b""[..]),
        "{}",
        opened.errors
    );
    let entry = std::fs::read_to_string(home.path().join("opened")).expect("a link");
    assert!(!entry.contains(&link.base), "{entry}");
    let path = entry
        .strip_prefix(&format!("http://{}", link.host))
        .expect("its port");
    assert_eq!(link.ask("GET", path, &[], "").await.status, 303);
    std::fs::write(&opener, "#!/bin/sh\nexit 3\n").expect("written");
    let refused = home.run(&["page", "--open"]).await;
    refused.ends_with(1, "`cedos page` prints the link");
}

#[tokio::test]
async fn the_buttons_do_what_the_commands_do_and_a_refusal_is_a_sentence() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let get = [
        "get",
        "--detach",
        "-o",
        "<b>film",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    home.run(&get).await.ends_with(0, "1");
    let page = link.get("/").await;
    assert!(page.text.contains("&#60;b&#62;film"), "{}", page.text);
    assert!(!page.text.contains("<b>film"), "{}", page.text);

    assert_eq!(link.post("/transfer/1", "do=pause").await.status, 303);
    home.until_standing(1, "paused").await;
    assert_eq!(
        link.post("/transfer/1", "do=deadline&by=2999-01-31+07%3A30")
            .await
            .status,
        303
    );
    let status = home.run(&["status", "1", "--json"]).await;
    assert!(
        status.last()["deadline"]
            .as_str()
            .expect("one")
            .starts_with("2999-01-"),
        "{status:?}"
    );
    let refused = link.post("/transfer/1", "do=deadline&by=soon").await;
    assert_eq!(refused.status, 400);
    assert!(refused.text.contains("is not a time"), "{}", refused.text);
    assert_eq!(link.post("/transfer/1", "do=no-deadline").await.status, 303);
    assert_eq!(link.post("/transfer/1", "do=any-network").await.status, 303);
    let status = home.run(&["status", "1", "--json"]).await;
    assert_eq!(
        (&status.last()["deadline"], &status.last()["policy"]),
        (&Value::Null, &"any".into())
    );
    let moved = link.post("/transfer/1", "do=resume&page=transfer").await;
    assert!(
        moved
            .text
            .contains(&format!("location: {}/transfer/1\r\n", link.base)),
        "{}",
        moved.text
    );
    assert_eq!(link.post("/transfer/1", "do=cancel").await.status, 303);
    home.until_standing(1, "cancelled").await;
    let refused = link.post("/transfer/1", "do=resume").await;
    assert_eq!(refused.status, 409);
    assert!(refused.text.contains("cedos retry"), "{}", refused.text);
    open.store(true, Ordering::Relaxed);
    assert_eq!(link.post("/transfer/1", "do=retry").await.status, 303);
    home.until_standing(1, "done").await;
    assert!(std::fs::read(home.path().join("<b>film")).expect("a file") == object(BYTES, 1));
    assert_eq!(link.post("/clear", "").await.status, 303);
    assert!(home.run(&["ls", "--json"]).await.events.is_empty());
    for wrong in ["", "do=dance", "do=pause&do=pause&x"] {
        let status = link.post("/transfer/1", wrong).await.status;
        assert!((400..500).contains(&status), "{wrong}: {status}");
    }
}

#[tokio::test]
async fn another_users_program_gets_nothing_from_the_page() {
    use std::io::{Read as _, Write as _};
    const NOBODY: nix::libc::uid_t = 65_534;
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    assert_eq!(link.get("/").await.status, 200);
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not tried: only root is other users too");
        return;
    }
    let words = format!(
        "GET {}/ HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
        link.base, link.host
    );
    let host = link.host.clone();
    let asks = move || {
        // SAFETY: plain numbers; of this thread alone, unlike the C library's call.
        let changed = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, -1, NOBODY, -1) };
        assert_eq!(changed, 0);
        let mut stream = std::net::TcpStream::connect(host).expect("it listens");
        let mut answer = String::new();
        // It may be closed already.
        if stream.write_all(words.as_bytes()).is_ok() {
            let _ = stream.read_to_string(&mut answer);
        }
        answer
    };
    let asked = tokio::task::spawn_blocking(move || std::thread::spawn(asks).join());
    assert_eq!(asked.await.expect("it runs").expect("it asks"), "");
    assert_eq!(link.get("/").await.status, 200);
}

#[tokio::test]
async fn the_page_is_told_of_changes_while_it_is_looked_at() {
    let open = Arc::new(AtomicBool::new(false));
    let origin = halting(open.clone()).await;
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let mut stream = TcpStream::connect(&link.host).await.expect("it listens");
    let words = format!(
        "GET {}/updates HTTP/1.1\r\nHost: {}\r\n\r\n",
        link.base, link.host
    );
    stream.write_all(words.as_bytes()).await.expect("sent");
    let mut lines = BufReader::new(stream).lines();
    let mut until = async |words: &str| {
        within(async {
            loop {
                let line = lines.next_line().await.expect("readable").expect("a line");
                if line.starts_with("data:") && line.contains(words) {
                    return;
                }
            }
        })
        .await;
    };
    until("Nothing is downloaded").await;
    let get = [
        "get",
        "--detach",
        "-o",
        "film",
        "--stall",
        "1s",
        &origin.url("/a"),
    ];
    home.run(&get).await.ends_with(0, "1");
    until("film").await;
    home.run(&["pause", "1"]).await.ends_with(0, "#1");
    until(">Paused<").await;
    open.store(true, Ordering::Relaxed);
    home.run(&["resume", "1"]).await.ends_with(0, "#1");
    until(">Complete<").await;
}

/// Words that set colours and a window's title, hide a direction, forge a line, and are markup.
const HOSTILE_WORDS: &str =
    "\u{1b}[31mred\u{1b}]0;title\u{7}\rover\u{9b}1m\u{202e}txt\nForged<script>alert(1)</script>";

#[tokio::test]
async fn words_of_servers_and_names_of_files_are_text_without_controls_on_the_page() {
    let home = PageHome::new().await;
    let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
    let origin = ScriptedOrigin::start(|_| {
        let body = [
            HOSTILE_WORDS.as_bytes(),
            b"\xff\xfe",
            "x".repeat(9_000).as_bytes(),
        ]
        .concat();
        let length = body.len().to_string();
        let fields = [("Content-Length", &*length)];
        OriginReply(reply("409 Conflict", &fields, &body), ReplyEnd::Close)
    })
    .await;
    std::fs::write(home.path().join("file"), b"abc").expect("written");
    let named = origin.url("/%1b%5b31mred%e2%80%aetxt%0aForged%3Cscript%3Ealert(1)");
    let refused = origin.url("/a");
    let prox = ["--prox", &*proxy.address];
    for transfer in [
        &["put", "--detach", "file", &refused][..],
        &["get", "--detach", &named],
    ] {
        let begun = home.run(&[transfer, &prox].concat()).await;
        assert_eq!(begun.code, 0, "{begun:?}");
    }
    let link = home.link(&[]).await;
    for id in [1, 2] {
        home.until_standing(id, "failed").await;
    }
    for (path, words) in [
        ("/", "red"),
        ("/transfer/1", "[31mred"),
        ("/transfer/2", "red"),
    ] {
        let page = link.get(path).await;
        assert_eq!(page.status, 200, "{path}");
        let (_, text) = page.text.split_once("\r\n\r\n").expect("a page");
        let raw = |c: char| !matches!(c, '\n' | '\r') && cedos_text::is_control(c);
        let found = text.find(raw).map(|at| &text[at.saturating_sub(60)..at]);
        assert_eq!(found, None, "{path}");
        assert!(!text.contains("<script>alert"), "{path}: {text}");
        assert!(!text.contains(&"x".repeat(1_000)), "{path}: {text}");
        assert!(text.contains(words), "{path}: {text}");
    }
}
