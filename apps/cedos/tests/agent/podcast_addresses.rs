//! Podcasts lead to addresses of local networks only where the user subscribed there: feeds, pages, enclosures, what
//! these redirect to, and names whose addresses change.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use cedos_lab_rig::namespace::{
    LINKS_AND_MOUNTS, in_namespace_with, origin_namespace, sh, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, proper, reply};
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::until_async;
use serde_json::Value;
use tokio::net::TcpListener;

use crate::podcast_listener::{Listener, TAG, empty, episode_bytes, states};

/// A feed with an item for each of these enclosures, the oldest first.
fn feed_of(enclosures: &[String]) -> OriginReply {
    let mut items = String::new();
    for (n, enclosure) in enclosures.iter().enumerate() {
        let _ = write!(
            items,
            "<item><title>Episode {n}</title><guid>{n}</guid><pubDate>Mon, 0{} Jun 2020 06:00:00 GMT</pubDate>\
             <enclosure url=\"{enclosure}\" length=\"300000\" type=\"audio/mpeg\"/></item>",
            n + 1
        );
    }
    let body = format!("<rss version=\"2.0\"><channel><title>Local</title>{items}</channel></rss>");
    whole("application/rss+xml", &body)
}

/// A page that links to a feed.
fn page_of(feed: &str) -> OriginReply {
    let link = format!("<link rel=\"alternate\" type=\"application/rss+xml\" href=\"{feed}\">");
    whole("text/html", &format!("<html><head>{link}</head></html>"))
}

fn whole(media_type: &str, body: &str) -> OriginReply {
    let length = body.len().to_string();
    let headers = [("Content-Type", media_type), ("Content-Length", &*length)];
    OriginReply(reply("200 OK", &headers, body.as_bytes()), ReplyEnd::Close)
}

fn audio(asked: &OriginRequest) -> OriginReply {
    OriginReply(
        proper(asked, &episode_bytes(&asked.path), TAG),
        ReplyEnd::Close,
    )
}

fn problem(of: &Value) -> &str {
    of["problem"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_feed_in_a_local_network_leads_to_its_own_host_only() {
    let other = ScriptedOrigin::start_at("127.0.0.2", |asked| match &*asked.path {
        "/feed" => feed_of(&[]),
        _ => audio(asked),
    })
    .await;
    let (feed_there, audio_there) = (other.url("/feed"), other.url("/c.mp3"));
    let is_elsewhere = Arc::new(AtomicU8::new(0));
    let flag = is_elsewhere.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let here = format!("http://{}", asked.header("host").unwrap_or_default());
        match &*asked.path {
            "/feed" if flag.load(Ordering::Relaxed) == 1 => {
                empty("302 Found", &[("Location", &feed_there)])
            }
            "/feed" => feed_of(&[
                format!("{here}/a.mp3"),
                format!("{here}/leads-away.mp3"),
                format!("{here}/leads-on.mp3"),
            ]),
            "/page" => page_of(&feed_there),
            "/redirect" => empty("301 Moved Permanently", &[("Location", &feed_there)]),
            "/leads-away.mp3" => empty("302 Found", &[("Location", &audio_there)]),
            "/leads-on.mp3" => empty("302 Found", &[("Location", "/b.mp3")]),
            _ => audio(asked),
        }
    })
    .await;
    let home = Listener::new().await;
    for path in ["/redirect", "/page"] {
        let run = home.run(&["cast", "add", &origin.url(path)]).await;
        assert_eq!(run.code, 1, "{path}");
    }
    home.run(&["cast", "add", &origin.url("/redirect")])
        .await
        .ends_with(1, "127.0.0.2 is in a local network");
    home.cast(&["add", &origin.url("/feed")]).await;
    let channel = home
        .until("settled", |channel| {
            states(channel) == ["ready", "failed", "ready"]
        })
        .await;
    let failed = &channel["episodes"][1];
    assert!(
        problem(failed).contains("127.0.0.2 is in a local network"),
        "{failed}"
    );
    is_elsewhere.store(1, Ordering::Relaxed);
    home.cast(&["refresh"]).await;
    let channel = home.cast(&["list"]).await["channels"][0].clone();
    assert!(problem(&channel).contains("local network"), "{channel}");
    assert_eq!(channel["url"], origin.url("/feed"), "{channel}");
    assert!(other.requests().is_empty(), "{:?}", other.requests());
}

/// Names with their addresses, in place of `/etc/hosts` of this mount namespace.
fn name(file: &Path, names: &[(&str, &str)]) {
    let lines = names.iter().map(|(name, at)| format!("{at} {name}\n"));
    // In place: the file is mounted.
    std::fs::write(file, lines.collect::<String>()).expect("written");
}

#[test]
fn a_public_podcast_does_not_lead_into_the_local_network_by_any_name() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), || async {
        sh("ip link set lo up");
        let origin = origin_namespace(|| {
            ScriptedOrigin::start_at("192.0.2.1", |asked| {
                let host = asked.header("host").unwrap_or_default();
                let port = host.rsplit(':').next().unwrap_or_default();
                let at = |host: &str, path: &str| format!("http://{host}:{port}{path}");
                match &*asked.path {
                    "/feed" => feed_of(&[
                        at("cdn.example", "/a.mp3"),
                        at("pod.example", "/leads-inside.mp3"),
                        at("127.0.0.1", "/c.mp3"),
                        at("rebound.example", "/d.mp3"),
                    ]),
                    "/page" => page_of(&at("127.0.0.1", "/feed")),
                    "/leads-inside.mp3" => {
                        empty("302 Found", &[("Location", &at("127.0.0.1", "/b.mp3"))])
                    }
                    _ => audio(asked),
                }
            })
        });
        let port = origin.address.port();
        let listener = TcpListener::bind(("127.0.0.1", port)).await;
        let inside =
            ScriptedOrigin::serve_at(listener.expect("a port"), None, move |asked| match &*asked
                .path
            {
                "/feed" => feed_of(&[format!("http://nas.example:{port}/e.mp3")]),
                _ => audio(asked),
            });
        let public = "192.0.2.1";
        let names = [
            ("pod.example", public),
            ("cdn.example", public),
            ("rebound.example", "127.0.0.1"),
            ("nas.example", "127.0.0.1"),
        ];
        let home = Listener::new().await;
        let hosts = home.path().join("hosts");
        name(&hosts, &names);
        sh(&format!("mount --bind {} /etc/hosts", hosts.display()));
        wifi_on("198.51.100.7");
        let url = |host: &str, path: &str| format!("http://{host}:{port}{path}");
        let feed = url("pod.example", "/feed");
        // The link has just come up.
        until_async("a network", async || {
            let added = home.run(&["cast", "add", &feed, "--json"]).await;
            (added.code == 0 && added.last()["is_read_later"] == false).then_some(())
        })
        .await;
        home.cast(&["rule", "1", "--keep", "4"]).await;
        home.run(&["cast", "add", &url("pod.example", "/page")])
            .await
            .ends_with(1, "links to no podcast");
        let channel = home
            .until("settled", |channel| {
                states(channel) == ["failed", "failed", "failed", "ready"]
            })
            .await;
        let episodes = channel["episodes"].as_array().expect("a list");
        for failed in &episodes[..3] {
            assert!(problem(failed).contains("local network"), "{failed}");
        }
        let number = episodes[1]["id"].to_string();
        home.run(&["cast", "play", &number])
            .await
            .ends_with(1, "local network");
        // The feed's own name leads inside now.
        let names = [("pod.example", "127.0.0.1"), ("nas.example", "127.0.0.1")];
        name(&hosts, &names);
        let refreshed = home.cast(&["refresh", "1"]).await;
        let report = &refreshed["channels"][0]["report"];
        let why = problem(report);
        assert!(
            why.contains("pod.example is at 127.0.0.1, in a local network"),
            "{refreshed}"
        );
        assert!(inside.requests().is_empty(), "{:?}", inside.requests());
        // What the user subscribes to there is read there.
        let added = home.cast(&["add", &url("nas.example", "/feed")]).await;
        let second = added["channel"]["id"].to_string();
        until_async("its episode", async || {
            let shown = home.cast(&["show", &second]).await;
            (states(&shown) == ["ready"]).then_some(())
        })
        .await;
        let refreshed = home.cast(&["refresh", &second]).await;
        let report = &refreshed["channels"][0]["report"];
        assert!(report["problem"].is_null(), "{refreshed}");
    });
}
