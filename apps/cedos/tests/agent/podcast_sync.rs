//! Sync by the gpodder API: the agent as a server of other apps, and as a client of other servers.

use cedos_lab_rig::missing_tool::program_path;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::AgentProcess;
use cedos_lab_rig::wait::{until_async, within};
use cedos_readycast::{Library, SyncAccount, SyncProgress};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::podcast_apps_scene::{
    Listener, empty, feed_reply, get, moving_origin, origin, unconditional_feed_reply,
};

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
    let nobody = HeldPort::take();
    let address = format!("http://{}/", nobody.address());
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

/// The Python that has gPodder's own library for the API.
async fn python_with_mygpoclient() -> Option<PathBuf> {
    for python in ["/usr/bin/python3".into(), program_path("python3")?] {
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
