//! Other podcast apps get feeds and episodes through the agent.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use cedos_lab_rig::missing_tool::{program_path, skip_without};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper};
use cedos_lab_rig::program::AgentProcess;
use cedos_lab_rig::wait::{until_async, within};
use jiff::Timestamp;
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::page::PageLink;
use crate::podcast_apps_scene::{
    AppAccess, BYTES, Listener, TAG, ask, attributes, begin, empty, episode_bytes, feed_reply, get,
    links, moving_origin, origin,
};

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
    // Few apps say of which copy they have the beginning; the first one that goes on gets the whole all the same.
    let range = format!("bytes={}-", got.len());
    let rest = [("Range", &*range)];
    let again = until_async("the new copy", async || {
        let again = ask("GET", &enclosures[0], &rest, "").await;
        assert_ne!(again.status, 206, "a rest of another copy");
        (again.status == 200 && again.body.len() == BYTES).then_some(again)
    })
    .await;
    assert!(again.body == new_bytes);
    let fields = [("Range", &*range), ("If-Range", tag)];
    assert_eq!(ask("GET", &enclosures[0], &fields, "").await.status, 200);
    // What apps were given last is gone on with.
    let part = ask("GET", &enclosures[0], &rest, "").await;
    assert!(part.status == 206 && part.body == new_bytes[got.len()..]);
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

#[tokio::test]
async fn gpodder_downloads_an_episode_through_the_agent() {
    let Some(gpo) = program_path("gpo") else {
        return skip_without("gpodder", "gpodder is not installed");
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

#[tokio::test]
async fn an_app_that_asks_for_an_episode_has_the_deadline_and_the_networks_of_the_rule() {
    // A third of an episode, and then nothing: it stays in the queue.
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        path if path.starts_with("/feed") => feed_reply(asked, &path[1..], &["a", "b"]),
        path => {
            let answer = proper(asked, &episode_bytes(path), TAG);
            OriginReply(cut(answer, BYTES / 3), ReplyEnd::Silence)
        }
    })
    .await;
    let feeds = ["/feed1", "/feed2"].map(|path| origin.url(path));
    let home = Listener::subscribed(&[&feeds[0], &feeds[1]]).await;
    home.run(&["config", "set", "transfer.policy", "any"])
        .await
        .ends_with(0, "");
    let opml = get(&home.apps().await.subscriptions).await.text();
    let links = attributes(&opml, "xmlUrl");
    let two_hours = 2 * 3_600;
    for (n, (rule, policy, due_in_s)) in [
        ("whenever it is free", "free-only", None),
        ("in 2h", "any", Some(two_hours)),
    ]
    .into_iter()
    .enumerate()
    {
        let channel = (n + 1).to_string();
        let words: Vec<&str> = rule.split(' ').collect();
        // The rule wants the newest one alone.
        home.cast(&[&["rule", &channel], &*words, &["--keep", "1"]].concat())
            .await;
        let feed = get(&links[n]).await.text();
        let older = attributes(&feed, "enclosure url").remove(0);
        let asked_at = Timestamp::now();
        let (_stream, head, _) = begin("GET", &older, &[], "").await;
        assert!(head.starts_with("HTTP/1.1 200"), "{rule}: {head}");
        let episodes = home.episodes(&channel).await;
        let older = &episodes[1];
        assert_eq!(older["transfer"]["policy"], policy, "{rule}: {older}");
        let deadline = older["deadline"].as_str().map(|at| {
            let deadline: Timestamp = at.parse().expect("a time");
            deadline.duration_since(asked_at).as_secs()
        });
        let off_s = deadline.zip(due_in_s).map(|(found, due)| found - due);
        assert_eq!(deadline.is_some(), due_in_s.is_some(), "{rule}: {older}");
        assert!(
            off_s.is_none_or(|off| (-1..60).contains(&off)),
            "{rule}: {older}"
        );
    }
}
