//! Podcasts of the agent: feeds from a server of this machine, episodes by their rules, through `kill -9`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::Duration;

use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::port::HeldPort;
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use crate::page::PageLink;
use crate::podcast_listener::{
    BYTES, Listener, TAG, empty, episode_bytes, feed_reply, sha256, states,
};

/// Partial downloads in a folder whose records say that half of the episode is on the disk.
fn durable_halves(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let notes = entries.filter_map(|entry| {
        let path = entry.ok()?.path();
        let is_note = path.to_string_lossy().ends_with(".part.json");
        let text = std::fs::read(path).ok().filter(|_| is_note)?;
        serde_json::from_slice::<Value>(&text).ok()
    });
    notes
        .filter(|note| note["durable_bytes"].as_u64() >= Some(BYTES as u64 / 2))
        .count()
}

#[tokio::test]
async fn a_rule_brings_episodes_whole_also_when_the_agent_is_killed_in_the_middle() {
    let open = Arc::new(AtomicBool::new(false));
    let flag = open.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        if asked.path == "/feed" {
            return feed_reply(asked, &["a", "b", "c"]);
        }
        let answer = proper(asked, &episode_bytes(&asked.path), TAG);
        match flag.load(Ordering::Relaxed) {
            true => OriginReply(answer, ReplyEnd::Close),
            // Half, and then nothing.
            false if asked.range_from().is_none() => {
                OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence)
            }
            false => OriginReply(Vec::new(), ReplyEnd::Close),
        }
    })
    .await;
    let mut home = Listener::new().await;
    let added = home.cast(&["add", &origin.url("/feed")]).await;
    assert_eq!(added["channel"]["episodes"], 3, "{added}");
    let rule = home
        .cast(&["rule", "morning", "daily", "07:30", "--keep", "3"])
        .await;
    assert_eq!(rule["channel"]["rule"]["schedule"], "daily 07:30", "{rule}");
    // Each has its half on the disk, by the transfer's own record.
    let folder = home.path().join("Podcasts/Morning News");
    home.until("half", |channel| {
        states(channel) == ["downloading"; 3] && durable_halves(&folder) == 3
    })
    .await;
    let queue = home.cast(&["queue"]).await;
    let queue = queue["episodes"].as_array().expect("a list");
    assert!(queue.iter().all(|e| e["deadline"].is_string()), "{queue:?}");
    home.replace_agent().await;
    open.store(true, Ordering::Relaxed);
    let channel = home
        .until("ready", |channel| states(channel) == ["ready"; 3])
        .await;
    for episode in channel["episodes"].as_array().expect("a list") {
        let file = home.file(episode).await;
        let title = episode["title"].as_str().expect("a title");
        let path = format!("/{}.mp3", title.trim_start_matches("Episode "));
        let bytes = std::fs::read(&file).expect("the file");
        assert_eq!(sha256(&bytes), sha256(&episode_bytes(&path)), "{title}");
        assert!(file.starts_with(home.path().join("Podcasts/Morning News")));
    }
    // From the beginning, each was asked for once; the rest went on from what was on the disk.
    for path in ["/a.mp3", "/b.mp3", "/c.mp3"] {
        let requests = origin.requests();
        let of_it = requests.iter().filter(|asked| asked.path == path);
        let whole = of_it.filter(|asked| asked.range_from().is_none());
        assert_eq!(whole.count(), 1, "{path}");
    }
    // Transfers are not begun anew by a further agent.
    let count = origin.requests().len();
    home.replace_agent().await;
    home.until("ready", |channel| states(channel) == ["ready"; 3])
        .await;
    let more = origin.requests().split_off(count);
    assert!(more.iter().all(|asked| asked.path == "/feed"), "{more:?}");
}

/// Bytes of an episode of which the first 500 kB are three minutes or more.
const LARGE_BYTES: usize = 5_000_000;
const START_BYTES: u64 = 500_000;

/// A feed of six episodes of an hour; the first answer has none.
fn large_feed(asked: &OriginRequest) -> Vec<u8> {
    let origin = format!("http://{}", asked.header("host").unwrap_or_default());
    let numbers = if asked.count == 0 { 0..0 } else { 1..7 };
    let items: String = numbers
        .map(|n| {
            format!(
                "<item><title>{n}</title><guid>{n}</guid><pubDate>0{n} Jun 2020 06:00:00 GMT</pubDate>\
                 <itunes:duration>3600</itunes:duration>\
                 <enclosure url=\"{origin}/{n}.mp3\" length=\"{LARGE_BYTES}\" type=\"audio/mpeg\"/></item>"
            )
        })
        .collect();
    let body = format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\" xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\">\
         <channel><title>Long</title>{items}</channel></rss>"
    );
    let length = body.len().to_string();
    reply("200 OK", &[("Content-Length", &length)], body.as_bytes())
}

#[tokio::test]
async fn the_start_of_each_episode_comes_before_the_rest_of_any() {
    let origin = ScriptedOrigin::play(|asked, mut stream| async move {
        let answer = match &*asked.path {
            "/feed" => large_feed(&asked),
            path => proper(
                &asked,
                &object(LARGE_BYTES, u32::from(path.as_bytes()[1])),
                TAG,
            ),
        };
        for piece in answer.chunks(40_000) {
            if stream.write_all(piece).await.is_err() {
                return;
            }
            // sleep: a network that carries 400 kB/s for each download
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        // The agent may have closed the connection.
        let _ = stream.shutdown().await;
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    home.cast(&["rule", "1", "whenever it is free", "--keep", "6"])
        .await;
    home.cast(&["refresh", "1"]).await;
    // Four downloads run side by side: without the order of beginnings these four were whole before the others began.
    home.until("begun", |channel| {
        let episodes = channel["episodes"].as_array().expect("a list").iter();
        let bytes: Vec<u64> = episodes
            .map(|episode| match episode["state"].as_str() {
                Some("ready") => LARGE_BYTES as u64,
                _ => episode["transfer"]["bytes"].as_u64().unwrap_or(0),
            })
            .collect();
        let (least, most) = (bytes.iter().min(), bytes.iter().max());
        let all_begun = least.is_some_and(|least| *least >= START_BYTES) && bytes.len() == 6;
        // What comes until the next decision, and until it is shown: some seconds.
        let ahead = most.is_some_and(|most| *most > START_BYTES + 2_000_000);
        assert!(all_begun || !ahead, "{bytes:?}");
        all_begun
    })
    .await;
    // What is being heard waits for no other's beginning.
    let shown = home.cast(&["show", "1"]).await;
    let heard = &shown["episodes"][0];
    let order = home
        .path()
        .join(format!(".state/cedos/get/{}/order.json", heard["job"]));
    let start_of = || -> Value {
        let text = std::fs::read(&order).expect("the order");
        serde_json::from_slice::<Value>(&text).expect("JSON")["order"]["start_bytes"].clone()
    };
    assert_eq!(start_of(), START_BYTES);
    let link = home.run(&["page"]).await;
    let page = PageLink::of(String::from_utf8(link.output).expect("text").trim());
    let audio = format!("/podcasts/episode/{}/audio", heard["id"]);
    let part = page.get_with(&audio, &[("Range", "bytes=0-9")]).await;
    assert_eq!(part.status, 206, "{}", part.text);
    assert_eq!(start_of(), 0);
}

#[tokio::test]
async fn a_web_page_in_place_of_an_episode_is_one_sentence_and_the_others_come() {
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a", "b"]),
        "/a.mp3" => {
            let page = b"<!DOCTYPE html><html><title>Log in</title></html>";
            let length = page.len().to_string();
            // As servers do that call everything audio.
            let headers = [
                ("Content-Type", "audio/mpeg"),
                ("Content-Length", &*length),
                ("ETag", TAG),
            ];
            OriginReply(reply("200 OK", &headers, page), ReplyEnd::Close)
        }
        path => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    let channel = home
        .until("settled", |channel| states(channel) == ["ready", "failed"])
        .await;
    let problem = channel["episodes"][1]["problem"].as_str();
    let problem = problem.expect("a sentence");
    assert!(problem.contains("web page"), "{problem}");
    let podcasts = home.path().join("Podcasts/Morning News");
    let files = std::fs::read_dir(podcasts).expect("a folder").count();
    assert_eq!(files, 1);
}

#[tokio::test]
async fn a_feed_that_moves_is_followed_and_one_that_is_gone_says_so() {
    let phase = Arc::new(AtomicU8::new(0));
    let now = phase.clone();
    let origin =
        ScriptedOrigin::start(
            move |asked| match (&*asked.path, now.load(Ordering::Relaxed)) {
                ("/old", 1) => empty("301 Moved Permanently", &[("Location", "/new")]),
                ("/old", _) => feed_reply(asked, &["a"]),
                ("/new", 2) => empty("410 Gone", &[]),
                ("/new", _) if asked.header("if-none-match") == Some(TAG) => {
                    empty("304 Not Modified", &[])
                }
                ("/new", _) => feed_reply(asked, &["a", "b"]),
                // A refused episode would have the feed read once more.
                (path, _) => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
            },
        )
        .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/old")]).await;
    home.cast(&["rule", "1", "by", "hand"]).await;
    phase.store(1, Ordering::Relaxed);
    let refreshed = home.cast(&["refresh"]).await;
    let moved = &refreshed["channels"][0]["report"];
    assert_eq!(moved["moved_to"], origin.url("/new"), "{refreshed}");
    assert_eq!(moved["added"], 1, "{refreshed}");
    // It is read whole at the new address once, and by conditions from then on.
    home.cast(&["refresh", "1"]).await;
    let again = home.cast(&["refresh", "1"]).await;
    assert!(
        again["channels"][0]["report"]["problem"].is_null(),
        "{again}"
    );
    let requests = origin.requests();
    let mut requests = requests.iter();
    let last = requests.rfind(|asked| asked.path == "/new");
    let last = last.expect("a request");
    assert_eq!(
        (&*last.path, last.header("if-none-match")),
        ("/new", Some(TAG))
    );
    phase.store(2, Ordering::Relaxed);
    home.cast(&["refresh"]).await;
    let list = home.cast(&["list"]).await;
    let channel = &list["channels"][0];
    assert!(
        channel["problem"]
            .as_str()
            .is_some_and(|p| p.contains("gone")),
        "{channel}"
    );
    // What was known of it stays.
    assert_eq!(channel["episodes"], 2, "{channel}");
    home.run(&["cast", "list"]).await.ends_with(0, "gone");
}

#[tokio::test]
async fn subscriptions_come_and_go_as_opml_and_pages_lead_to_their_feed() {
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" | "/other" => feed_reply(asked, &[]),
        "/page" => {
            let page = "<html><head><link rel=\"alternate\" type=\"application/rss+xml\" href=\"/feed\"></head></html>";
            OriginReply(reply("200 OK", &[("Content-Type", "text/html")], page.as_bytes()), ReplyEnd::Close)
        }
        "/nothing" => OriginReply(
            reply("200 OK", &[("Content-Type", "text/html")], b"<html><body>Hello</body></html>"),
            ReplyEnd::Close,
        ),
        path if path.starts_with("/search?") => {
            let body = br#"{"results": [{"collectionName": "Found", "artistName": "A", "feedUrl": "https://a.example/f"}]}"#;
            OriginReply(reply("200 OK", &[], body), ReplyEnd::Close)
        }
        _ => empty("404 Not Found", &[]),
    })
    .await;
    let home = Listener::new().await;
    // Who only looks leaves nothing behind.
    home.run(&["cast", "list"])
        .await
        .ends_with(0, "No podcasts yet");
    assert!(!home.path().join(".state/cedos/podcasts").exists());
    let added = home.cast(&["add", &origin.url("/page")]).await;
    assert_eq!(added["channel"]["url"], origin.url("/feed"), "{added}");
    home.run(&["cast", "add", &origin.url("/nothing")])
        .await
        .ends_with(1, "links to no podcast");
    home.run(&["cast", "add", &origin.url("/none")])
        .await
        .ends_with(1, "404");
    home.run(&["cast", "show", "nowhere"])
        .await
        .ends_with(2, "no channel is called `nowhere`");
    let list = format!(
        "<opml version=\"2.0\"><body><outline text=\"Other\" type=\"rss\" xmlUrl=\"{}\"/>\
         <outline text=\"Bad\" type=\"rss\" xmlUrl=\"file:///etc/passwd\"/></body></opml>",
        origin.url("/other")
    );
    std::fs::write(home.path().join("in.opml"), list).expect("written");
    let imported = home.cast(&["opml", "import", "in.opml"]).await;
    assert_eq!(imported["feeds"], 1, "{imported}");
    assert_eq!(
        imported["skipped"].as_array().map(Vec::len),
        Some(1),
        "{imported}"
    );
    home.run(&["cast", "opml", "export", "out.opml"])
        .await
        .ends_with(0, "");
    let exported = std::fs::read_to_string(home.path().join("out.opml")).expect("the list");
    for path in ["/feed", "/other"] {
        assert!(exported.contains(&origin.url(path)), "{exported}");
    }
    // A directory of one's own, and one that is not there.
    let set = [
        "config",
        "set",
        "podcasts.search_url",
        &origin.url("/search"),
    ];
    home.run(&set).await.ends_with(0, "");
    let found = home.cast(&["search", "two", "words"]).await;
    assert_eq!(found["found"][0]["title"], "Found", "{found}");
    let requests = origin.requests();
    let search = requests
        .iter()
        .find(|asked| asked.path.starts_with("/search?"));
    assert!(search.is_some_and(|asked| asked.path.contains("term=two+words")));
    let nobody = HeldPort::take();
    let address = format!("http://{}/", nobody.address());
    home.run(&["config", "set", "podcasts.search_url", &address])
        .await
        .ends_with(0, "");
    home.run(&["cast", "search", "x"])
        .await
        .ends_with(1, "cannot be searched");
    let removed = home.cast(&["remove", &origin.url("/feed")]).await;
    assert_eq!(removed["files_removed"], 0, "{removed}");
    let left = home.cast(&["list"]).await;
    assert_eq!(left["channels"].as_array().map(Vec::len), Some(1), "{left}");
}
