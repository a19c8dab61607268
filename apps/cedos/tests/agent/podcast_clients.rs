//! Podcast clients of the distribution, as they are, with links of the agent and of a proxy: gPodder by its command line
//! `gpo` and its client of the sync API, and podget, which downloads by wget. Each has a home of its own.
//!
//! Their origin inserts other advertisements into each answer, has no validator and no ranges, so that two answers never
//! make one file.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cedos_lab_rig::missing_tool::{program_path, skip_without};
use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::{ProxyProcess, cedos, pid_of, run};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::{until, until_async, within};
use jiff::{Timestamp, ToSpan, Zoned};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::watch;

use crate::podcast_apps_scene::{AppAccess, Listener};

/// Bytes of an episode: 2.4 s at 20 Mb/s.
const EPISODE_BYTES: usize = 6_000_000;

/// An origin with a podcast of two episodes, once they are published, each answer with other bytes. Of each only the
/// first half comes before the origin is open.
async fn advertising_origin(
    host: &str,
    is_published: Arc<AtomicBool>,
    open: watch::Receiver<bool>,
) -> ScriptedOrigin {
    let listener = TcpListener::bind((host, 0)).await.expect("a port");
    ScriptedOrigin::play_at(listener, None, move |asked, mut stream| {
        let (is_published, mut open) = (is_published.clone(), open.clone());
        async move {
            let origin = format!("http://{}", asked.header("host").unwrap_or_default());
            let (body, at_once) = match (&*asked.path, is_published.load(Ordering::Relaxed)) {
                ("/feed", true) => (feed(&origin, 2), usize::MAX),
                ("/feed", false) => (feed(&origin, 0), usize::MAX),
                _ => (object(EPISODE_BYTES, asked.count as u32), EPISODE_BYTES / 2),
            };
            let whole = answer(&body);
            let begun = cut(whole.clone(), at_once.min(body.len()));
            // The proxy may have closed the connection.
            let _ = stream.write_all(&begun).await;
            let _ = stream.flush().await;
            let _ = open
                .wait_for(|open| *open || begun.len() == whole.len())
                .await;
            let _ = stream.write_all(&whole[begun.len()..]).await;
            let _ = stream.shutdown().await;
        }
    })
}

/// An origin on this machine whose episodes are published, and come whole.
async fn local_origin() -> ScriptedOrigin {
    let (_, open) = watch::channel(true);
    advertising_origin("127.0.0.1", Arc::new(AtomicBool::new(true)), open).await
}

fn feed(origin: &str, episodes: usize) -> Vec<u8> {
    let items: String = (1..=episodes)
        .map(|n| {
            format!(
                "<item><title>Episode {n}</title><guid isPermaLink=\"false\">{n}</guid>\n\
                 <pubDate>Mon, 0{n} Jun 2020 06:00:00 GMT</pubDate>\n\
                 <enclosure url=\"{origin}/{n}.mp3\" length=\"{EPISODE_BYTES}\" type=\"audio/mpeg\"/>\n</item>\n"
            )
        })
        .collect();
    format!(
        "<?xml version=\"1.0\"?>\n<rss version=\"2.0\"><channel><title>Morning</title>\n{items}</channel></rss>"
    )
    .into_bytes()
}

fn answer(body: &[u8]) -> Vec<u8> {
    let length = body.len().to_string();
    reply("200 OK", &[("Content-Length", &*length)], body)
}

/// What the first answer to a request for each episode had, by its path; every further answer is an error.
fn only_copies(origin: &ScriptedOrigin) -> BTreeMap<String, Vec<u8>> {
    let mut copies = BTreeMap::new();
    for asked in origin.requests() {
        if asked.path != "/feed" {
            let bytes = object(EPISODE_BYTES, asked.count as u32);
            let before = copies.insert(asked.path.clone(), bytes);
            assert!(before.is_none(), "{} was requested twice", asked.path);
        }
    }
    copies
}

/// Files below a folder with this end of their name, the first by name first.
fn files(folder: &Path, end: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.path() {
                path if path.is_dir() => folders.push(path),
                path if path.to_string_lossy().ends_with(end) => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Asserts that a client's files are the copies of these episodes, whole.
#[track_caller]
fn assert_copies(files: &[PathBuf], copies: &BTreeMap<String, Vec<u8>>) {
    let whole: Vec<Vec<u8>> = (files.iter())
        .map(|file| std::fs::read(file).expect("a file"))
        .collect();
    assert_eq!(whole.len(), copies.len(), "{files:?}");
    for (path, copy) in copies {
        assert!(whole.contains(copy), "{path} is not in {files:?}");
    }
}

/// Runs a program of the distribution with a home of its own; whether it succeeded, and what it printed.
async fn ran(command: &mut Command, home: &Path) -> (bool, String) {
    command
        .env("HOME", home)
        .env("GPODDER_HOME", home.join("gPodder"))
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
        command.env_remove(name);
    }
    let output = within(command.output()).await.expect("it runs");
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (output.status.success(), text)
}

/// gPodder's command line, in a home of its own.
#[derive(Clone)]
struct Gpodder {
    program: PathBuf,
    home: PathBuf,
}

impl Gpodder {
    /// gPodder below this folder, which tries a broken download again this many times; none if it is not installed.
    async fn below(folder: &Path, retries: u32) -> Option<Gpodder> {
        let Some(program) = program_path("gpo") else {
            skip_without("gpodder", "gpodder is not installed");
            return None;
        };
        let home = folder.join("gpodder-home");
        std::fs::create_dir(&home).expect("a folder");
        let gpodder = Gpodder { program, home };
        gpodder
            .run(&["set", "auto.retries", &retries.to_string()])
            .await;
        Some(gpodder)
    }

    async fn run(&self, arguments: &[&str]) -> String {
        let (is_done, text) = ran(Command::new(&self.program).args(arguments), &self.home).await;
        assert!(is_done, "{arguments:?}: {text}");
        text
    }

    /// Subscribes to the feeds of a list.
    async fn import(&self, list: &Path) {
        self.run(&["import", &list.display().to_string()]).await;
        self.run(&["update"]).await;
    }

    fn episodes(&self) -> Vec<PathBuf> {
        files(&self.home, ".mp3")
    }

    /// Bytes of downloads that are not whole.
    fn partial_bytes(&self) -> u64 {
        let parts = files(&self.home, ".partial");
        let lengths = parts.iter().filter_map(|part| part.metadata().ok());
        lengths.map(|part| part.len()).sum()
    }
}

/// A network between a client and a server that can break.
struct BreakingRelay {
    address: String,
    /// Whether the network is there.
    is_up: Arc<AtomicBool>,
    /// Connections that are still to be broken after a part of their bytes.
    breaks: Arc<AtomicUsize>,
    /// Whether the network is gone once a connection was broken.
    is_gone_then: Arc<AtomicBool>,
}

/// Bytes towards the client after which a connection breaks.
const BREAKS_AFTER: usize = EPISODE_BYTES / 3;

impl BreakingRelay {
    async fn to(server: String) -> BreakingRelay {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let relay = BreakingRelay {
            address: listener.local_addr().expect("its address").to_string(),
            is_up: Arc::new(AtomicBool::new(true)),
            breaks: Arc::default(),
            is_gone_then: Arc::default(),
        };
        let (is_up, breaks) = (relay.is_up.clone(), relay.breaks.clone());
        let is_gone_then = relay.is_gone_then.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if is_up.load(Ordering::Relaxed) {
                    let (server, breaks) = (server.clone(), breaks.clone());
                    let (is_up, is_gone_then) = (is_up.clone(), is_gone_then.clone());
                    let on_break = move || {
                        let is_gone = is_gone_then.load(Ordering::Relaxed);
                        is_up.store(!is_gone, Ordering::Relaxed);
                    };
                    tokio::spawn(async move {
                        // Both ends may go at any time.
                        let _ = relayed(client, &server, &breaks, on_break).await;
                    });
                }
            }
        });
        relay
    }
}

/// Carries a connection, or breaks it after a third of an episode if one is still to be broken.
async fn relayed(
    client: TcpStream,
    server: &str,
    breaks: &AtomicUsize,
    on_break: impl Fn(),
) -> std::io::Result<()> {
    let server = TcpStream::connect(server).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let up = tokio::io::copy(&mut from_client, &mut to_server);
    let down = async {
        let (mut piece, mut carried) = (vec![0; 65_536], 0);
        loop {
            let n = from_server.read(&mut piece).await?;
            if n == 0 {
                return to_client.shutdown().await;
            }
            to_client.write_all(&piece[..n]).await?;
            carried += n;
            let is_due = carried >= BREAKS_AFTER;
            let one_less = |left: usize| left.checked_sub(1);
            let order = Ordering::Relaxed;
            if is_due && breaks.fetch_update(order, order, one_less).is_ok() {
                on_break();
                return Ok(());
            }
        }
    };
    tokio::select! {
        ended = down => ended,
        Err(error) = up => Err(error),
    }
}

#[test]
fn gpodder_has_episodes_by_the_rule_each_as_one_copy_through_lost_networks_and_agents() {
    in_namespace(this_test!(), || async {
        let mut home = Listener::subscribed(&[]).await;
        let Some(gpodder) = Gpodder::below(home.path(), 0).await else {
            return;
        };
        let place = home.path().to_owned();
        let published = Arc::new(AtomicBool::new(false));
        let is_published = published.clone();
        let (opening, open) = watch::channel(false);
        let (origin, prox) = origin_namespace(|| async move {
            let origin = advertising_origin("192.0.2.1", is_published, open).await;
            let prox = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
            (origin, prox)
        });
        home.run(&["config", "set", "proxy.default", &prox.address])
            .await
            .ends_with(0, "");
        cell_on();
        // The newest episode is one of the rule; gPodder wants the other one, too.
        let due: Zoned = Zoned::now().saturating_add(3.hours());
        let at = due.strftime("%H:%M").to_string();
        home.cast(&["add", &origin.url("/feed")]).await;
        let rule = [
            "rule",
            "1",
            "daily",
            &at,
            "--keep",
            "1",
            "--policy",
            "free-only",
        ];
        home.cast(&rule).await;
        published.store(true, Ordering::Relaxed);
        home.cast(&["refresh"]).await;
        let list = home.path().join("podcasts.opml");
        home.run(&["cast", "opml", "export", "--for-apps", "podcasts.opml"])
            .await
            .ends_with(0, "");
        let before = received("wwan0");
        gpodder.import(&list).await;
        // Without a network that the rule allows gPodder is told to come later.
        gpodder.run(&["download"]).await;
        assert!(gpodder.episodes().is_empty(), "{:?}", gpodder.episodes());
        let queue = home.cast(&["queue"]).await;
        let episodes = queue["episodes"].as_array().expect("a list");
        assert_eq!(episodes.len(), 2, "{queue}");
        for episode in episodes {
            let deadline = episode["deadline"].as_str().and_then(|at| at.parse().ok());
            let deadline: Timestamp = deadline.unwrap_or_else(|| panic!("{episode}"));
            let off = due.timestamp().duration_since(deadline).as_secs();
            assert!((0..60).contains(&off), "{episode}");
            assert_eq!(episode["transfer"]["policy"], "free-only", "{episode}");
            assert_eq!(episode["transfer"]["standing"], "waiting", "{episode}");
        }
        let spent = received("wwan0") - before;
        assert!(spent < 100_000, "{spent} bytes by the metered network");
        assert!(only_copies(&origin).is_empty());

        wifi_on("198.51.100.7");
        let begun = async || {
            let queue = home.cast(&["queue"]).await;
            let episodes = queue["episodes"].as_array().expect("a list").clone();
            let has_bytes = |e: &Value| e["transfer"]["last"]["bytes"].as_u64() > Some(1_000_000);
            episodes.iter().any(has_bytes).then_some(())
        };
        until_async("a part came", begun).await;
        let downloading = tokio::spawn({
            let gpodder = gpodder.clone();
            async move { gpodder.run(&["download"]).await }
        });
        until("gPodder has a part", || gpodder.partial_bytes() > 500_000).await;
        wifi_off();
        // The agent is killed while the network is away, and its connections with it: gPodder gives up.
        home.replace_agent().await;
        let said = downloading.await.expect("it ended");
        let kept = gpodder.partial_bytes();
        assert!(kept > 0 && gpodder.episodes().len() < 2, "{said}");
        wifi_on("198.51.100.7");
        opening.send_replace(true);
        until_async("both came", async || {
            let episodes = home.episodes("1").await;
            let ready = episodes.iter().filter(|e| e["state"] == "ready");
            (ready.count() == 2).then_some(())
        })
        .await;
        gpodder.run(&["resume"]).await;
        gpodder.run(&["download"]).await;
        assert_eq!(gpodder.partial_bytes(), 0);
        assert_copies(&gpodder.episodes(), &only_copies(&origin));
        wifi_off();
    });
}

#[tokio::test]
async fn gpodder_makes_no_file_of_two_copies() {
    // It does not say of which copy it has the beginning.
    let asked_before = Arc::new(AtomicUsize::new(0));
    let count = asked_before.clone();
    let (breaking, breaks) = watch::channel(false);
    let origin = ScriptedOrigin::play(move |asked, mut stream| {
        let (count, mut breaks) = (count.clone(), breaks.clone());
        async move {
            let origin = format!("http://{}", asked.header("host").unwrap_or_default());
            let seed = match &*asked.path {
                "/feed" => None,
                _ => Some(count.fetch_add(1, Ordering::Relaxed) as u32),
            };
            let body = match seed {
                None => feed(&origin, 2),
                Some(seed) => object(EPISODE_BYTES, seed),
            };
            let whole = answer(&body);
            let (sent, is_broken) = match seed {
                Some(0) => (cut(whole, EPISODE_BYTES / 2), true),
                _ => (whole, false),
            };
            // The agent may have closed the connection.
            let _ = stream.write_all(&sent).await;
            let _ = stream.flush().await;
            if is_broken {
                let _ = breaks.wait_for(|breaks| *breaks).await;
            }
        }
    })
    .await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    let Some(gpodder) = Gpodder::below(home.path(), 3).await else {
        return;
    };
    let list = home.path().join("podcasts.opml");
    home.run(&["cast", "opml", "export", "--for-apps", "podcasts.opml"])
        .await
        .ends_with(0, "");
    gpodder.import(&list).await;
    let feed = home
        .apps()
        .await
        .subscriptions
        .replace("subscriptions.opml", "feeds/1");
    let downloading = tokio::spawn({
        let (gpodder, feed) = (gpodder.clone(), feed.clone());
        async move { gpodder.run(&["download", &feed, "1"]).await }
    });
    until("gPodder has a part", || gpodder.partial_bytes() > 500_000).await;
    breaking.send_replace(true);
    let said = downloading.await.expect("it ended");
    assert_eq!(asked_before.load(Ordering::Relaxed), 2, "{said}");
    let episodes = gpodder.episodes();
    assert_eq!(episodes.len(), 1, "{said}");
    let bytes = std::fs::read(&episodes[0]).expect("the file");
    assert!(bytes == object(EPISODE_BYTES, 1), "it is no copy: {said}");
}

/// A proxy whose links apps reach through a network that breaks, and the list of a client's links.
struct LinkedProxy {
    folder: tempfile::TempDir,
    port: HeldPort,
    relay: BreakingRelay,
    proxy: ProxyProcess,
}

impl LinkedProxy {
    async fn of(origin: &ScriptedOrigin) -> LinkedProxy {
        let folder = tempfile::tempdir().expect("a folder");
        let port = HeldPort::take();
        let relay = BreakingRelay::to(port.address().to_string()).await;
        let proxy = LinkedProxy::start(folder.path(), &port, &relay).await;
        let mut list = std::fs::File::create(folder.path().join("podcasts.opml")).expect("a list");
        write!(
            list,
            "<opml><body><outline text=\"Morning\" xmlUrl=\"{}\"/></body></opml>",
            origin.url("/feed")
        )
        .expect("written");
        let feeds = [
            "prox",
            "feeds",
            "phone",
            "--opml",
            "podcasts.opml",
            "-o",
            "phone.opml",
            "--state-dir",
            "state",
        ];
        run(folder.path(), &feeds).await.ends_with(0, "");
        LinkedProxy {
            folder,
            port,
            relay,
            proxy,
        }
    }

    async fn start(folder: &Path, port: &HeldPort, relay: &BreakingRelay) -> ProxyProcess {
        let (at, url) = (
            port.address().to_string(),
            format!("http://{}", relay.address),
        );
        let arguments = [
            "prox",
            "--listen",
            "127.0.0.1:0",
            "--state-dir",
            "state",
            "--allow-net",
            "127.0.0.1",
            "--tcp-listen",
            &at,
            "--feeds-url",
            &url,
        ];
        let mut command = cedos(folder, &arguments);
        command.stderr(Stdio::null());
        let started = ProxyProcess::spawned(&mut command).await;
        started.expect("the proxy starts")
    }

    fn list(&self) -> PathBuf {
        self.folder.path().join("phone.opml")
    }

    /// Ends the proxy, and starts another on its port and state.
    async fn restart(&mut self) {
        kill(pid_of(&self.proxy.child), Signal::SIGTERM).expect("send");
        within(self.proxy.child.wait()).await.expect("it ends");
        self.proxy = LinkedProxy::start(self.folder.path(), &self.port, &self.relay).await;
    }

    /// Bytes of the copies that the proxy has for its client.
    async fn copied_bytes(&self) -> u64 {
        let list = ["prox", "client", "list", "--json", "--state-dir", "state"];
        let listed = run(self.folder.path(), &list).await;
        listed.last()["pinned_bytes"].as_u64().expect("a number")
    }
}

#[tokio::test]
async fn gpodder_resumes_a_link_of_a_proxy_by_itself_and_after_a_restart_of_the_proxy() {
    let origin = local_origin().await;
    let mut linked = LinkedProxy::of(&origin).await;
    let Some(gpodder) = Gpodder::below(linked.folder.path(), 3).await else {
        return;
    };
    gpodder.import(&linked.list()).await;
    let listed = gpodder.run(&["list"]).await;
    let feed = listed.lines().find(|line| line.starts_with("http"));
    let feed = feed.unwrap_or_else(|| panic!("{listed}"));
    // Twice the connection breaks, and gPodder goes on by itself.
    linked.relay.breaks.store(2, Ordering::Relaxed);
    gpodder.run(&["download", feed, "1"]).await;
    assert_eq!(linked.relay.breaks.load(Ordering::Relaxed), 0);
    assert_copies(&gpodder.episodes(), &only_copies(&origin));
    // With the other one it gives up, since the network is gone for longer.
    linked.relay.breaks.store(1, Ordering::Relaxed);
    linked.relay.is_gone_then.store(true, Ordering::Relaxed);
    gpodder.run(&["download", feed, "2"]).await;
    assert!(!linked.relay.is_up.load(Ordering::Relaxed));
    assert_eq!(gpodder.episodes().len(), 1);
    let kept = gpodder.partial_bytes();
    assert!(kept > 0, "it has no part");
    until_async("the copy is whole", async || {
        (linked.copied_bytes().await >= 2 * EPISODE_BYTES as u64).then_some(())
    })
    .await;
    linked.restart().await;
    linked.relay.is_up.store(true, Ordering::Relaxed);
    gpodder.run(&["resume"]).await;
    assert_copies(&gpodder.episodes(), &only_copies(&origin));
}

#[tokio::test]
async fn podget_downloads_links_of_a_proxy_and_of_an_agent_over_a_network_that_breaks() {
    let (Some(podget), Some(_)) = (program_path("podget"), program_path("wget")) else {
        return skip_without("podget", "podget or wget is not installed");
    };
    let origin = local_origin().await;
    let linked = LinkedProxy::of(&origin).await;
    linked.relay.breaks.store(3, Ordering::Relaxed);
    let of_proxy = linked.folder.path().join("podget-home");
    podget_downloads(&podget, &of_proxy, &linked.list()).await;
    assert_eq!(linked.relay.breaks.load(Ordering::Relaxed), 0);
    assert_copies(&files(&of_proxy, ".mp3"), &only_copies(&origin));

    let origin = local_origin().await;
    let home = Listener::subscribed(&[&origin.url("/feed")]).await;
    home.run(&["cast", "opml", "export", "--for-apps", "podcasts.opml"])
        .await
        .ends_with(0, "");
    let of_agent = home.path().join("podget-home");
    podget_downloads(&podget, &of_agent, &home.path().join("podcasts.opml")).await;
    assert_copies(&files(&of_agent, ".mp3"), &only_copies(&origin));
}

/// Has podget import a list, and download what is in its feeds.
async fn podget_downloads(podget: &Path, home: &Path, list: &Path) {
    let settings = home.join(".podget");
    std::fs::create_dir_all(&settings).expect("a folder");
    let create = ["--create-config", "podgetrc"];
    ran(Command::new(podget).args(create), home).await;
    // The feeds of its own example are on the Internet.
    std::fs::write(settings.join("serverlist"), "").expect("written");
    let list = list.display().to_string();
    for arguments in [&["-vv", "--import_opml", &list][..], &["-vv"]] {
        let (is_done, text) = ran(Command::new(podget).args(arguments), home).await;
        assert!(is_done, "{arguments:?}: {text}");
    }
}

/// What gPodder does when it syncs, by its own modules and without its window.
const GPODDER_SYNC: &str = r#"
import os, sys
import gpodder
gpodder.ui.cli, gpodder.prefix = True, "/usr"
from gpodder import core, my
core = core.Core()
server, user, password, verb = sys.argv[1:5]
sync = core.config.mygpo
sync.server, sync.username, sync.password = server, user, password
sync.device.uid, sync.enabled = "test", True
client = my.MygPoClient(core.config)
podcasts = core.model.get_podcasts()

def find(podcast_url, episode_url):
    for podcast in podcasts:
        for episode in podcast.get_all_episodes():
            if (podcast.url, episode.url) == (podcast_url, episode_url):
                return episode

if verb == "begin":
    client.create_device()
    client.on_subscribe([podcast.url for podcast in podcasts])
elif verb == "play":
    episode = podcasts[0].get_all_episodes()[0]
    client.on_playback_full(episode, 0, int(sys.argv[5]), 500)
elif verb == "subscribe":
    client.on_subscribe(sys.argv[5:])
elif verb == "unsubscribe":
    client.on_unsubscribe(sys.argv[5:])
client._at_exit()
client._store = my.minidb.Store(os.path.join(gpodder.home, client.STORE_FILE))
for action in client.get_received_actions():
    print("ADD" if action.is_add else "REMOVE", action.url)
client.process_episode_actions(find, lambda episode: print("POSITION", episode.url, episode.current_position))
assert sync.enabled, "it was refused"
core.db.commit()
sys.stdout.flush()
os._exit(0)
"#;

#[tokio::test]
async fn gpodder_syncs_subscriptions_and_positions_with_the_agent() {
    let origin = ScriptedOrigin::start(|asked| {
        let origin = format!("http://{}", asked.header("host").unwrap_or_default());
        OriginReply(answer(&feed(&origin, 2)), ReplyEnd::Close)
    })
    .await;
    let (morning, evening) = (origin.url("/feed"), origin.url("/feed?evening"));
    let home = Listener::subscribed(&[&morning]).await;
    let Some(gpodder) = Gpodder::below(home.path(), 0).await else {
        return;
    };
    let access = home.apps().await;
    let list = home.path().join("podcasts.opml");
    home.run(&["cast", "opml", "export", "--for-apps", "podcasts.opml"])
        .await
        .ends_with(0, "");
    gpodder.import(&list).await;
    let sync = async |server: &str, words: &[&str]| {
        let AppAccess { user, password, .. } = &access;
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", GPODDER_SYNC, server, user, password]);
        let (is_done, text) = ran(command.args(words), &gpodder.home).await;
        assert!(is_done, "{words:?}: {text}");
        text
    };
    // It has the podcast by the agent's link, and that is no second subscription.
    sync(&access.server, &["begin"]).await;
    assert_eq!(home.feeds().await, [&*morning]);
    // A position goes to the agent,
    sync(&access.server, &["play", "120"]).await;
    let positions = |episodes: &[Value]| -> Vec<i64> {
        let of = episodes.iter().filter_map(|e| e["position_ms"].as_i64());
        of.collect()
    };
    assert!(positions(&home.episodes("1").await).contains(&120_000));
    // and one of another device comes from it.
    let episode = origin.url("/1.mp3");
    let later = Timestamp::now() + 2.minutes();
    let action = serde_json::json!([{
        "podcast": morning, "episode": episode, "device": "phone", "action": "play",
        "timestamp": later.strftime("%Y-%m-%dT%H:%M:%S").to_string(),
        "started": 0, "position": 77, "total": 500,
    }]);
    let path = "/origins/api/2/episodes/cedos.json";
    let told = access.api("POST", path, &action.to_string()).await;
    assert_eq!(told.status, 200, "{}", told.text());
    let said = sync(&access.server, &["look"]).await;
    let is_told = |line: &str| line.starts_with("POSITION") && line.ends_with(" 77");
    assert!(said.lines().any(is_told), "{said}");
    // What it subscribes to is subscribed to here; by the addresses at the origins, too.
    let by_origins = format!("{}/origins", access.server);
    sync(&by_origins, &["subscribe", &evening]).await;
    assert_eq!(home.feeds().await, [&*morning, &*evening]);
    let said = sync(&access.server, &["look"]).await;
    assert!(said.contains("ADD http://127.0.0.1"), "{said}");
    sync(&by_origins, &["unsubscribe", &evening]).await;
    assert_eq!(home.feeds().await, [&*morning]);
}
