//! Chromium and Firefox without a screen, driven by WebDriver BiDi: a WebSocket with a JSON object per message.
//!
//! ```text
//!  test ── WebSocket ── Firefox: --remote-debugging-port
//!       ── WebSocket ── chromedriver ── Chromium
//! ```

use crate::missing_tool::program_path;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{SinkExt, StreamExt};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;

use crate::missing_tool::skip_without;
use crate::program::at_home;
use crate::wait::within;

/// The Tab key.
pub const TAB: &str = "\u{e004}";
/// The Shift key.
const SHIFT: &str = "\u{e008}";
/// The Enter key.
pub const ENTER: &str = "\u{e007}";

/// The space bar.
pub const SPACE: &str = " ";

/// The interval between looks at a page.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A browser that tests can drive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrowserKind {
    /// Chromium, by chromedriver.
    Chromium,
    /// Firefox, which needs no driver.
    Firefox,
}

/// The colours that a browser's user prefers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColourScheme {
    /// Dark text on a light background.
    Light,
    /// Light text on a dark background.
    Dark,
}

impl ColourScheme {
    /// The scheme's name in CSS.
    pub fn as_str(self) -> &'static str {
        match self {
            ColourScheme::Light => "light",
            ColourScheme::Dark => "dark",
        }
    }
}

/// A browser with one tab.
pub struct WebBrowser {
    socket: WebSocketStream<TcpStream>,
    commands: u64,
    tab: String,
    events: Vec<Value>,
    child: Child,
    /// The profile's folder, by which a Chromium is found that its driver left.
    profile: PathBuf,
}

impl WebBrowser {
    /// Starts a browser whose home is `home`. `None`, with a message, if it is not installed.
    pub async fn start(
        kind: BrowserKind,
        home: &Path,
        variables: &[(&str, &Path)],
    ) -> Option<WebBrowser> {
        WebBrowser::start_with(kind, home, variables, &[]).await
    }

    /// Starts a browser with more arguments.
    pub async fn start_with(
        kind: BrowserKind,
        home: &Path,
        variables: &[(&str, &Path)],
        arguments: &[&str],
    ) -> Option<WebBrowser> {
        let started = match kind {
            BrowserKind::Chromium => chromium(home, variables, arguments).await,
            BrowserKind::Firefox => firefox(home, variables, arguments).await,
        };
        let Some((child, url, profile)) = started else {
            let tool = match kind {
                BrowserKind::Chromium => "chromium",
                BrowserKind::Firefox => "firefox",
            };
            skip_without(tool, &format!("{kind:?} is not installed here"));
            return None;
        };
        let address = url.split('/').nth(2).expect("a host and a port");
        let stream = within(TcpStream::connect(address))
            .await
            .expect("it listens");
        let opened = within(tokio_tungstenite::client_async(&url, stream)).await;
        let mut browser = WebBrowser {
            socket: opened.expect("a WebSocket").0,
            commands: 0,
            tab: String::new(),
            events: Vec::new(),
            child,
            profile,
        };
        if kind == BrowserKind::Firefox {
            browser
                .command("session.new", json!({"capabilities": {}}))
                .await;
        }
        let events = json!({"events": ["log.entryAdded", "network.beforeRequestSent"]});
        browser.command("session.subscribe", events).await;
        // The tab that a headless Firefox starts with never has the focus: keys press no buttons there.
        let tab = browser.command("browsingContext.create", json!({"type": "tab"}));
        let tab = tab.await["context"].as_str().expect("a tab").to_owned();
        browser
            .command("browsingContext.activate", json!({"context": tab}))
            .await;
        browser.tab = tab;
        Some(browser)
    }

    /// Carries a command out. Returns its result.
    pub async fn command(&mut self, method: &str, parameters: Value) -> Value {
        let answer = self.attempt(method, parameters).await;
        answer.unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Carries a command out, if the browser can.
    async fn attempt(&mut self, method: &str, parameters: Value) -> Result<Value, Value> {
        self.commands += 1;
        let id = self.commands;
        let command = json!({"id": id, "method": method, "params": parameters});
        let sent = self.socket.send(Message::text(command.to_string())).await;
        sent.expect("the browser listens");
        loop {
            let message = within(self.socket.next()).await.expect("it answers");
            let Message::Text(text) = message.expect("a message") else {
                continue;
            };
            let message: Value = serde_json::from_str(&text).expect("JSON");
            if message["id"] != id {
                self.events.push(message);
                continue;
            }
            return match message["type"] == "error" {
                true => Err(message),
                false => Ok(message["result"].clone()),
            };
        }
    }

    /// Opens a page, and waits until it is loaded.
    pub async fn open(&mut self, url: &str) {
        let page = json!({"context": self.tab, "url": url, "wait": "complete"});
        self.command("browsingContext.navigate", page).await;
    }

    /// Begins to open a page, and does not wait until it is loaded.
    ///
    /// # Errors
    /// There is no page, and what the browser says about it.
    pub async fn visit(&mut self, url: &str) -> Result<(), String> {
        let page = json!({"context": self.tab, "url": url, "wait": "none"});
        let visited = self.attempt("browsingContext.navigate", page).await;
        let fault = |error: Value| error["message"].as_str().unwrap_or_default().to_owned();
        visited.map(drop).map_err(fault)
    }

    /// The value of an expression on the page, if there is a page that has one.
    pub async fn find(&mut self, expression: &str) -> Option<Value> {
        let result = self.try_evaluate(expression).await.ok()?;
        (result["type"] == "success").then(|| result["result"]["value"].clone())
    }

    /// The value of an expression on the page: a string, a number or a truth.
    pub async fn evaluate(&mut self, expression: &str) -> Value {
        let result = self.try_evaluate(expression).await;
        let result = result.unwrap_or_else(|error| panic!("{expression}: {error}"));
        assert_eq!(result["type"], "success", "{expression}: {result}");
        result["result"]["value"].clone()
    }

    async fn try_evaluate(&mut self, expression: &str) -> Result<Value, Value> {
        let target = json!({"context": self.tab});
        let parameters = json!({"expression": expression, "target": target, "awaitPromise": true});
        self.attempt("script.evaluate", parameters).await
    }

    /// Waits until an expression on the page is true: on this one, or on the one that is being opened.
    pub async fn until(&mut self, expression: &str) {
        let is_so = async {
            loop {
                // Between two pages there is none.
                if let Ok(result) = self.try_evaluate(expression).await {
                    let between = result["type"] != "success" && self.is_loading().await;
                    assert!(
                        result["type"] == "success" || between,
                        "{expression}: {result}"
                    );
                    if result["result"]["value"] == true {
                        return;
                    }
                }
                // sleep: a page sends no event when its text changes
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        if tokio::time::timeout(crate::PATIENCE, is_so).await.is_err() {
            let page = self.evaluate("document.body.innerText").await;
            panic!("never: {expression}\n{page}\n{:?}", self.console());
        }
    }

    /// Whether the page is not yet there with all its scripts.
    async fn is_loading(&mut self) -> bool {
        let state = self
            .try_evaluate("document.readyState !== 'complete'")
            .await;
        state.is_ok_and(|state| state["result"]["value"] == true)
    }

    /// Presses and releases keys, one after the other.
    pub async fn press(&mut self, keys: &[&str]) {
        let strokes = keys.iter().flat_map(|key| {
            ["keyDown", "keyUp"].map(|stroke| json!({"type": stroke, "value": key}))
        });
        self.perform(strokes.collect()).await;
    }

    async fn perform(&mut self, strokes: Vec<Value>) {
        let source = json!({"type": "key", "id": "keyboard", "actions": strokes});
        let actions = json!({"context": self.tab, "actions": [source]});
        self.command("input.performActions", actions).await;
    }

    /// Moves the focus by Tab until it is on the element with this id.
    pub async fn tab_to(&mut self, id: &str) {
        self.tab_until(id, "").await;
    }

    /// Moves the focus by Shift and Tab until it is on the element with this id.
    pub async fn tab_back_to(&mut self, id: &str) {
        self.tab_until(id, SHIFT).await;
    }

    async fn tab_until(&mut self, id: &str, held: &str) {
        let stroke = |stroke: &str, key: &str| json!({"type": stroke, "value": key});
        for _ in 0..100 {
            let focused = self.evaluate("document.activeElement?.id ?? ''").await;
            if focused == id {
                return;
            }
            let mut strokes = vec![stroke("keyDown", TAB), stroke("keyUp", TAB)];
            if !held.is_empty() {
                strokes.insert(0, stroke("keyDown", held));
                strokes.push(stroke("keyUp", held));
            }
            self.perform(strokes).await;
        }
        panic!("no way to #{id} by Tab");
    }

    /// Sets the size of the page.
    pub async fn resize(&mut self, width: u32, height: u32) {
        let viewport = json!({"width": width, "height": height});
        let parameters = json!({"context": self.tab, "viewport": viewport});
        self.command("browsingContext.setViewport", parameters)
            .await;
    }

    /// Has pages shown as to a user who prefers this colour scheme. Chromium only: WebDriver BiDi has no word for it,
    /// and chromedriver passes commands of Chromium's own protocol on.
    pub async fn prefer(&mut self, scheme: ColourScheme) {
        let feature = json!({"name": "prefers-color-scheme", "value": scheme.as_str()});
        self.devtools("Emulation.setEmulatedMedia", json!({"features": [feature]}))
            .await;
    }

    /// Carries out a command of Chromium's own protocol.
    pub async fn devtools(&mut self, method: &str, parameters: Value) -> Value {
        let tab = json!({"context": self.tab});
        let session = self.command("goog:cdp.getSession", tab).await;
        let command =
            json!({"method": method, "params": parameters, "session": session["session"]});
        let answer = self.command("goog:cdp.sendCommand", command).await;
        answer["result"].clone()
    }

    /// Makes timers of a minute or more end a thousand times as fast on pages that are opened from
    /// now on.
    pub async fn hasten_minutes(&mut self) {
        let script = "() => {
            const timer = window.setTimeout;
            window.setTimeout = (call, ms, ...more) => timer(call, ms >= 60_000 ? ms / 1000 : ms, ...more);
        }";
        let parameters = json!({"functionDeclaration": script, "contexts": [self.tab]});
        self.command("script.addPreloadScript", parameters).await;
    }

    /// Keeps what pages that are opened from now on want to do when a media key is pressed, so that
    /// [`WebBrowser::press_media_key`] can do as the browser does then: a headless one hears no such keys.
    pub async fn keep_media_keys(&mut self) {
        let script = "() => {
            window.mediaKeys = {};
            const session = navigator.mediaSession;
            const set = session.setActionHandler.bind(session);
            session.setActionHandler = (action, handler) => {
                set(action, handler);
                window.mediaKeys[action] = handler;
            };
        }";
        let parameters = json!({"functionDeclaration": script, "contexts": [self.tab]});
        self.command("script.addPreloadScript", parameters).await;
    }

    /// Does what the page wants when a media key is pressed, such as `seekforward`.
    pub async fn press_media_key(&mut self, action: &str) {
        let press = format!("window.mediaKeys[{action:?}]({{ action: {action:?} }}), true");
        self.evaluate(&press).await;
    }

    /// The visible part of the page as a PNG file.
    pub async fn screenshot(&mut self) -> Vec<u8> {
        let tab = json!({"context": self.tab, "origin": "viewport"});
        let taken = self.command("browsingContext.captureScreenshot", tab).await;
        let picture = taken["data"].as_str().expect("a picture");
        STANDARD.decode(picture).expect("base64")
    }

    /// The whole page as a PNG file, as long as it is.
    pub async fn screenshot_of_page(&mut self) -> Vec<u8> {
        let tab = json!({"context": self.tab, "origin": "document"});
        let taken = self.command("browsingContext.captureScreenshot", tab).await;
        let picture = taken["data"].as_str().expect("a picture");
        STANDARD.decode(picture).expect("base64")
    }

    /// Chooses a file in the field that a CSS selector names.
    pub async fn choose_file(&mut self, selector: &str, file: &Path) {
        let expression = format!("document.querySelector({selector:?})");
        let target = json!({"context": self.tab});
        let parameters = json!({"expression": expression, "target": target, "awaitPromise": false});
        let found = self.command("script.evaluate", parameters).await;
        let element = json!({"sharedId": found["result"]["sharedId"]});
        let parameters = json!({"context": self.tab, "element": element, "files": [file]});
        self.command("input.setFiles", parameters).await;
    }

    /// Loads an extension from its folder.
    pub async fn install_extension(&mut self, folder: &Path) {
        let data = json!({"type": "path", "path": folder});
        self.command("webExtension.install", json!({"extensionData": data}))
            .await;
    }

    /// Errors and warnings of pages so far.
    pub fn console(&self) -> Vec<String> {
        let entries = self.of("log.entryAdded");
        let serious =
            entries.filter(|entry| matches!(entry["level"].as_str(), Some("error" | "warn")));
        serious.map(|entry| entry["text"].to_string()).collect()
    }

    /// The URLs of all requests so far.
    pub fn requests(&self) -> Vec<String> {
        let requests = self.of("network.beforeRequestSent");
        let urls = requests.filter_map(|event| event["request"]["url"].as_str());
        urls.map(str::to_owned).collect()
    }

    fn of(&self, method: &str) -> impl Iterator<Item = &Value> {
        let events = self.events.iter();
        events.filter_map(move |event| (event["method"] == method).then_some(&event["params"]))
    }

    /// Ends the browser, and waits until it is gone.
    pub async fn close(mut self) {
        self.command("browser.close", json!({})).await;
        if let Some(pid) = self.child.id() {
            // Firefox ends by itself; a driver does not.
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
        }
        within(self.child.wait()).await.expect("it ends");
    }
}

impl Drop for WebBrowser {
    /// Ends the Chromium of a test that failed: the driver is ended with its process, the browser is not.
    fn drop(&mut self) {
        let Ok(lock) = std::fs::read_link(self.profile.join("SingletonLock")) else {
            return;
        };
        let lock = lock.to_string_lossy();
        let pid = lock.rsplit('-').next().and_then(|pid| pid.parse().ok());
        if let Some(pid) = pid {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

/// The first of these programs that is installed.
fn installed(names: &[&str]) -> Option<PathBuf> {
    names.iter().find_map(|name| program_path(name))
}

fn command_at(home: &Path, program: &Path, variables: &[(&str, &Path)]) -> Command {
    let mut command = Command::new(program);
    at_home(&mut command, home)
        .env("HOME", home)
        .env("XDG_DATA_HOME", home.join(".local/share"))
        .envs(variables.iter().copied());
    command
}

/// Reads lines until one contains this, and returns what follows it; none if there is no such line, and then the lines are
/// printed. The rest is read and dropped.
async fn line_with(
    lines: impl AsyncBufRead + Unpin + Send + 'static,
    words: &str,
) -> Option<String> {
    let mut lines = lines.lines();
    let found = async {
        let mut read = Vec::new();
        loop {
            let Some(line) = lines.next_line().await.expect("readable") else {
                eprintln!("ended without `{words}`: {read:?}");
                return None;
            };
            if let Some((_, rest)) = line.split_once(words) {
                return Some(rest.to_owned());
            }
            read.push(line);
        }
    };
    let found = within(found).await;
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    found
}

/// Firefox asks no host of its own about networks that come and go: what it finds takes the focus from the page.
const FIREFOX_SETTINGS: &str = "user_pref(\"network.captive-portal-service.enabled\", false);
user_pref(\"network.connectivity-service.enabled\", false);
";

/// How often a browser or its driver is started again that ends at once.
const BROWSER_TRIES: u32 = 3;

async fn firefox(
    home: &Path,
    variables: &[(&str, &Path)],
    arguments: &[&str],
) -> Option<(Child, String, PathBuf)> {
    let program = installed(&["firefox-esr", "firefox"])?;
    let profile = home.join("profile");
    std::fs::create_dir_all(&profile).expect("a folder");
    std::fs::write(profile.join("user.js"), FIREFOX_SETTINGS).expect("written");
    let mut command = command_at(home, &program, variables);
    command
        .args([
            "--headless",
            "--no-remote",
            "--remote-debugging-port",
            "0",
            "--profile",
        ])
        .arg(&profile)
        .args(arguments)
        .stdout(Stdio::null());
    // It ended at once in one of some hundred starts; the cause is not known.
    let mut tries = 0;
    let (child, address) = loop {
        let mut child = command.spawn().expect("start Firefox");
        let errors = BufReader::new(child.stderr.take().expect("its errors"));
        match line_with(errors, "WebDriver BiDi listening on ").await {
            Some(address) => break (child, address),
            None => assert!(tries < BROWSER_TRIES, "Firefox does not start"),
        }
        tries += 1;
    };
    Some((child, format!("{}/session", address.trim()), profile))
}

async fn chromium(
    home: &Path,
    variables: &[(&str, &Path)],
    more: &[&str],
) -> Option<(Child, String, PathBuf)> {
    let driver = installed(&["chromedriver"])?;
    let browser = installed(&["chromium", "chromium-browser", "google-chrome"])?;
    let profile = home.join(".config/chromium");
    std::fs::create_dir_all(&profile).expect("a folder");
    let mut command = command_at(home, &driver, variables);
    command.arg("--port=0").stderr(Stdio::null());
    // It looks for a port of IPv4 and then takes the same of IPv6, which another program may have: then it ends.
    let mut tries = 0;
    let (child, port) = loop {
        let mut child = command.spawn().expect("start chromedriver");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        match line_with(output, "started successfully on port ").await {
            Some(port) => break (child, port),
            None => assert!(tries < BROWSER_TRIES, "chromedriver does not start"),
        }
        tries += 1;
    };
    let port: u16 = port.trim_end_matches('.').parse().expect("a port");
    let mut arguments = vec![
        "--headless=new".to_owned(),
        // Root has no sandbox, and containers none of what it needs. The pages are the test's own.
        "--no-sandbox".to_owned(),
        "--disable-gpu".to_owned(),
        // As on phones: they take nothing of a page's width.
        "--hide-scrollbars".to_owned(),
        // Folders for shared memory are small in containers.
        "--disable-dev-shm-usage".to_owned(),
        format!("--user-data-dir={}", profile.display()),
    ];
    arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    let options = json!({"args": arguments, "binary": browser});
    let wanted = json!({"webSocketUrl": true, "goog:chromeOptions": options});
    let body = json!({"capabilities": {"alwaysMatch": wanted}}).to_string();
    let answer = within(posted(port, "/session", &body)).await;
    let capabilities = &answer["value"]["capabilities"];
    let url = capabilities["webSocketUrl"].as_str();
    let url = url
        .unwrap_or_else(|| panic!("no session: {answer}"))
        .to_owned();
    Some((child, url, profile))
}

/// Posts JSON to a driver of this machine.
async fn posted(port: u16, path: &str, body: &str) -> Value {
    let mut stream = TcpStream::connect(("127.0.0.1", port))
        .await
        .expect("it listens");
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.expect("sent");
    // The driver keeps the connection open, whatever it is asked for.
    let mut stream = BufReader::new(stream);
    let mut length = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await.expect("a head");
        let line = line.trim().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.expect("a body");
    serde_json::from_slice(&body).expect("JSON")
}
