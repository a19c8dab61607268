//! Podcasts under bad conditions: each is one sentence in `cedos cast`, and other feeds and episodes go on.

use std::fmt::Write as _;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{
    LINKS_AND_MOUNTS, cell_on, in_namespace, in_namespace_with, origin_namespace, sh, wifi_on,
};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::until_async;
use serde_json::Value;

use crate::page::PageLink;
use crate::podcast_listener::{BYTES, Listener, TAG, empty, episode_bytes, feed_reply, states};

fn audio(asked: &OriginRequest) -> OriginReply {
    OriginReply(
        proper(asked, &episode_bytes(&asked.path), TAG),
        ReplyEnd::Close,
    )
}

fn problem(of: &Value) -> &str {
    of["problem"].as_str().unwrap_or_default()
}

/// A feed of one episode at this address.
fn feed_of(enclosure: &str) -> OriginReply {
    let body = format!(
        "<rss version=\"2.0\"><channel><title>One</title><item><title>One</title><guid>1</guid>\
         <enclosure url=\"{enclosure}\" type=\"audio/mpeg\"/></item></channel></rss>"
    );
    let length = body.len().to_string();
    OriginReply(
        reply("200 OK", &[("Content-Length", &length)], body.as_bytes()),
        ReplyEnd::Close,
    )
}

/// Files below a folder, parts too.
fn files_below(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.flat_map(|entry| match entry.path().is_dir() {
        true => files_below(&entry.path()),
        false => vec![entry.file_name().to_string_lossy().into_owned()],
    });
    files.collect()
}

#[tokio::test]
async fn a_password_opens_the_feed_and_its_own_episodes_and_goes_nowhere_else() {
    const PASSWORD: &str = "Basic bWU6c2VjcmV0"; // me:secret
    let other = ScriptedOrigin::start(audio).await;
    let elsewhere = other.url("/b.mp3");
    let is_open = Arc::new(AtomicBool::new(false));
    let flag = is_open.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        if asked.header("authorization") != Some(PASSWORD) {
            return empty("401 Unauthorized", &[("WWW-Authenticate", "Basic")]);
        }
        let host = asked.header("host").unwrap_or_default();
        match &*asked.path {
            "/feed" => {
                let body = format!(
                    "<rss version=\"2.0\"><channel><title>Mine</title>\
                     <item><title>a</title><guid>a</guid><enclosure url=\"http://{host}/a.mp3\" type=\"audio/mpeg\"/>\
                     </item><item><title>b</title><guid>b</guid>\
                     <enclosure url=\"{elsewhere}\" type=\"audio/mpeg\"/></item></channel></rss>"
                );
                let length = body.len().to_string();
                let headers = [("Content-Length", &*length)];
                OriginReply(reply("200 OK", &headers, body.as_bytes()), ReplyEnd::Close)
            }
            path => {
                let answer = proper(asked, &episode_bytes(path), TAG);
                match flag.load(Ordering::Relaxed) {
                    true => OriginReply(answer, ReplyEnd::Close),
                    false => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
                }
            }
        }
    })
    .await;
    let mut home = Listener::new().await;
    let feed = origin.url("/feed");
    home.run(&["cast", "add", &feed])
        .await
        .ends_with(1, "wants another user name or password");
    let wrong = feed.replace("http://", "http://me:wrong@");
    assert_eq!(home.run(&["cast", "add", &wrong]).await.code, 1);
    let right = feed.replace("http://", "http://me:secret@");
    let added = home.cast(&["add", &right]).await;
    assert_eq!(added["channel"]["url"], feed, "{added}");
    // Also by an agent that takes the download up.
    home.until("begun", |_| {
        let asked = origin.requests();
        asked.iter().any(|asked| asked.path == "/a.mp3")
    })
    .await;
    is_open.store(true, Ordering::Relaxed);
    home.replace_agent().await;
    home.until("whole", |channel| states(channel) == ["ready", "ready"])
        .await;
    let told = other.requests();
    assert!(
        !told.is_empty()
            && told
                .iter()
                .all(|asked| asked.header("authorization").is_none())
    );
    let shown = home.run(&["cast", "show", "1", "--json"]).await;
    let shown = String::from_utf8_lossy(&shown.output).into_owned();
    assert!(
        !shown.contains("secret") && !shown.contains("bWU6"),
        "{shown}"
    );
}

#[tokio::test]
async fn a_rule_keeps_so_many_episodes_and_so_many_bytes() {
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a", "b", "c", "d", "e"]),
        _ => audio(asked),
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    let settled = async |what: &str, wanted: [&str; 5]| {
        home.until(what, |channel| states(channel) == wanted).await;
        let whole = wanted.iter().filter(|state| **state == "ready").count();
        until_async("the files", async || {
            let files = files_below(&home.path().join("Podcasts"));
            (files.len() == whole).then_some(())
        })
        .await;
    };
    let [ready, new, removed] = ["ready", "new", "removed"];
    settled("the newest three", [ready, ready, ready, new, new]).await;
    home.cast(&["rule", "1", "--keep", "4"]).await;
    settled("four", [ready, ready, ready, ready, new]).await;
    // Two of 300,000 bytes fit.
    home.cast(&["rule", "1", "--keep-size", "700k"]).await;
    settled("two", [ready, ready, removed, removed, new]).await;
    home.cast(&["rule", "1", "--keep", "1"]).await;
    settled("one", [ready, removed, removed, removed, new]).await;
    // One that was heard makes room.
    let shown = home.cast(&["show", "1"]).await;
    let newest = shown["episodes"][0]["id"].to_string();
    home.cast(&["played", &newest]).await;
    home.until("the next", |channel| states(channel)[0] == "removed")
        .await;
}

#[tokio::test]
async fn a_rule_has_the_smallest_file_of_an_episode_downloaded() {
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => {
            let host = asked.header("host").unwrap_or_default();
            let body = format!(
                "<rss version=\"2.0\"><channel><title>One</title><item><title>One</title><guid>1</guid>\
                 <enclosure url=\"http://{host}/a.mp3\" length=\"{BYTES}\" type=\"audio/mpeg\"/>\
                 <podcast:alternateEnclosure type=\"audio/opus\" length=\"5000\" title=\"For the road\">\
                 <podcast:source uri=\"http://{host}/small\"/></podcast:alternateEnclosure></item></channel></rss>"
            );
            let length = body.len().to_string();
            let headers = [("Content-Length", &*length)];
            OriginReply(reply("200 OK", &headers, body.as_bytes()), ReplyEnd::Close)
        }
        "/small" => OriginReply(proper(asked, &object(5_000, 7), TAG), ReplyEnd::Close),
        _ => audio(asked),
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    let channel = home
        .until("whole", |channel| states(channel) == ["ready"])
        .await;
    let episode = channel["episodes"][0]["id"].to_string();
    let file = home.file(&channel["episodes"][0]).await;
    assert_eq!(std::fs::read(&file).expect("a file").len(), BYTES);
    let page = String::from_utf8(home.run(&["page"]).await.output).expect("text");
    let page = PageLink::of(page.trim());
    let shown = async || page.get(&format!("/podcasts/episode/{episode}")).await.text;
    let text = shown().await;
    assert!(text.contains("own file, of several"), "{text}");

    std::fs::remove_file(&file).expect("it was there");
    home.until("removed", |channel| states(channel) == ["removed"])
        .await;
    let rule = home.cast(&["rule", "1", "--file", "smallest"]).await;
    assert_eq!(rule["channel"]["rule"]["enclosure"], "smallest", "{rule}");
    home.cast(&["download", &episode]).await;
    let channel = home
        .until("whole", |channel| states(channel) == ["ready"])
        .await;
    let file = home.file(&channel["episodes"][0]).await;
    assert_eq!(
        file.extension().and_then(|name| name.to_str()),
        Some("opus")
    );
    assert_eq!(std::fs::read(&file).expect("a file"), object(5_000, 7));
    let text = shown().await;
    assert!(text.contains("For the road, audio/opus, 5.00 kB"), "{text}");
    let audio = page
        .get(&format!("/podcasts/episode/{episode}/audio"))
        .await;
    assert!(audio.text.contains("audio/opus"), "{}", &audio.text[..300]);
    let form = "do=rule&schedule=by+hand&latest=3&enclosure=audio";
    assert_eq!(page.post("/podcasts/channel/1", form).await.status, 303);
    let channel = home.cast(&["show", "1"]).await;
    let rule = &channel["channel"]["summary"]["rule"];
    assert_eq!(rule["enclosure"], "audio", "{channel}");
}

#[tokio::test]
async fn a_channel_that_is_removed_while_it_downloads_leaves_nothing_behind() {
    let is_open = Arc::new(AtomicBool::new(false));
    let flag = is_open.clone();
    let origin = ScriptedOrigin::start(move |asked| match &*asked.path {
        "/one" => feed_reply(asked, &["a", "b"]),
        "/two" => feed_reply(asked, &["c"]),
        path => {
            let answer = proper(asked, &episode_bytes(path), TAG);
            match path == "/c.mp3" || flag.load(Ordering::Relaxed) {
                true => OriginReply(answer, ReplyEnd::Close),
                false => OriginReply(cut(answer, BYTES / 2), ReplyEnd::Silence),
            }
        }
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/one")]).await;
    let podcasts = home.path().join("Podcasts");
    until_async("two parts", async || {
        let parts = files_below(&podcasts);
        let parts = parts.iter().filter(|name| name.ends_with(".part"));
        (parts.count() == 2).then_some(())
    })
    .await;
    home.cast(&["remove", "1"]).await;
    let left = files_below(&podcasts);
    assert!(left.is_empty(), "{left:?}");
    let running = home.run(&["ls", "--json"]).await;
    let running = running.events.iter().filter(|job| {
        let standing = job["standing"].as_str().unwrap_or_default();
        !matches!(standing, "cancelled" | "done" | "failed")
    });
    assert_eq!(running.count(), 0);
    // Another channel, and the same again, begin anew.
    is_open.store(true, Ordering::Relaxed);
    home.cast(&["add", &origin.url("/two")]).await;
    home.cast(&["add", &origin.url("/one")]).await;
    until_async("both whole", async || {
        let list = home.cast(&["list"]).await;
        let channels = list["channels"].as_array().expect("a list");
        let ready = channels.iter().map(|c| c["ready"].as_u64().unwrap_or(0));
        (ready.sum::<u64>() == 3).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_part_of_an_episode_that_failed_goes_when_nobody_wants_it() {
    // Half of each, and then it is not there any more.
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a", "b"]),
        path if asked.range_from().is_none() => OriginReply(
            cut(proper(asked, &episode_bytes(path), TAG), BYTES / 2),
            ReplyEnd::Close,
        ),
        _ => empty("404 Not Found", &[]),
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    let channel = home
        .until("failed", |channel| states(channel) == ["failed"; 2])
        .await;
    let podcasts = home.path().join("Podcasts");
    let parts = |ending: &str| {
        let files = files_below(&podcasts);
        files.iter().filter(|name| name.ends_with(ending)).count()
    };
    assert_eq!(parts(".part"), 2, "they are continued after a while");
    let first = channel["episodes"][0]["id"].to_string();
    home.cast(&["played", &first]).await;
    until_async("one part", async || (parts(".part") == 1).then_some(())).await;
    home.cast(&["rule", "1", "by", "hand"]).await;
    until_async("no part", async || parts("").eq(&0).then_some(())).await;
    // What is asked for all the same begins anew, and a subscription that ends takes its part along.
    home.cast(&["download", &first]).await;
    until_async("a part", async || (parts(".part") == 1).then_some(())).await;
    home.until("failed", |channel| states(channel) == ["failed"; 2])
        .await;
    home.cast(&["remove", "1"]).await;
    let left = files_below(&podcasts);
    assert!(left.is_empty(), "{left:?}");
}

#[tokio::test]
async fn an_episode_whose_file_somebody_removed_is_not_said_to_be_here() {
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a", "b"]),
        _ => audio(asked),
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    let channel = home
        .until("ready", |channel| states(channel) == ["ready"; 2])
        .await;
    let file = home.file(&channel["episodes"][0]).await;
    std::fs::remove_file(&file).expect("it was there");
    home.until("one is removed", |channel| {
        states(channel) == ["removed", "ready"]
    })
    .await;
    // It does not come back by itself, and does when somebody asks for it.
    home.cast(&["refresh"]).await;
    let again = channel["episodes"][0]["id"].to_string();
    home.cast(&["download", &again]).await;
    home.until("both again", |channel| states(channel) == ["ready"; 2])
        .await;
    // A folder that is not there may be on a disk that is not mounted.
    let folder = file.parent().expect("a folder");
    let aside = home.path().join("aside");
    std::fs::rename(folder, &aside).expect("renamed");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let channel = home.cast(&["show", "1"]).await;
        assert_eq!(states(&channel), ["ready"; 2]);
    }
    std::fs::rename(&aside, folder).expect("renamed");
}

#[test]
fn episodes_on_a_disk_that_is_not_mounted_stay_and_new_ones_wait_for_it() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), || async {
        sh("ip link set lo up");
        let has_third = Arc::new(AtomicBool::new(false));
        let flag = has_third.clone();
        let origin = ScriptedOrigin::start(move |asked| match &*asked.path {
            "/feed" if flag.load(Ordering::Relaxed) => feed_reply(asked, &["a", "b", "c"]),
            "/feed" => feed_reply(asked, &["a", "b"]),
            _ => audio(asked),
        })
        .await;
        let home = Listener::new().await;
        let [disk, podcasts] = ["disk", "Podcasts"].map(|name| home.path().join(name));
        for folder in [&disk, &podcasts] {
            std::fs::create_dir(folder).expect("a folder");
        }
        let (disk, place) = (disk.display(), podcasts.display());
        sh(&format!("mount -t tmpfs t {disk}"));
        let mount = format!("mount --bind {disk} {place}");
        sh(&mount);
        home.cast(&["add", &origin.url("/feed")]).await;
        home.until("ready", |channel| states(channel) == ["ready"; 2])
            .await;

        sh(&format!("umount {place}"));
        has_third.store(true, Ordering::Relaxed);
        home.cast(&["refresh"]).await;
        let channel = home
            .until("waiting", |channel| {
                channel["episodes"]
                    .as_array()
                    .is_some_and(|episodes| problem(&episodes[0]).contains("not mounted"))
            })
            .await;
        assert_eq!(states(&channel), ["new", "ready", "ready"]);
        let left: Vec<_> = std::fs::read_dir(&podcasts).expect("a folder").collect();
        assert!(left.is_empty(), "{left:?}");
        // Not even if somebody makes the folder of the channel there; and nothing counts as gone that is on the disk.
        std::fs::create_dir(podcasts.join("Morning News")).expect("a folder");
        home.cast(&["rule", "1", "--keep", "1"]).await;
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(4) {
            let channel = home.cast(&["show", "1"]).await;
            assert_eq!(states(&channel), ["new", "ready", "ready"]);
        }
        sh(&mount);
        home.cast(&["rule", "1", "--keep", "2"]).await;
        let channel = home
            .until("there", |channel| {
                states(channel) == ["ready", "ready", "removed"]
            })
            .await;
        assert_eq!(problem(&channel["episodes"][0]), "", "{channel}");
        assert_eq!(files_below(&podcasts).len(), 2);
    });
}

#[test]
fn a_disk_that_does_not_answer_keeps_no_answer_about_podcasts() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), || async {
        sh("ip link set lo up");
        let origin = ScriptedOrigin::start(|asked| match &*asked.path {
            "/feed" => feed_reply(asked, &["a"]),
            _ => audio(asked),
        })
        .await;
        let mut home = Listener::new().await;
        home.cast(&["add", &origin.url("/feed")]).await;
        home.until("ready", |channel| states(channel) == ["ready"])
            .await;
        let podcasts = home.path().join("Podcasts");
        // Nobody reads what the kernel asks of this file system.
        let mut options = std::fs::File::options();
        let disk = options.read(true).write(true).open("/dev/fuse");
        let disk = disk.expect("the kernel has FUSE");
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            disk.as_raw_fd()
        );
        home.between_agents(|| {
            let none = nix::mount::MsFlags::empty();
            nix::mount::mount(
                Some("silent"),
                &podcasts,
                Some("fuse"),
                none,
                Some(&*options),
            )
            .expect("mounted");
        })
        .await;
        let channel = home.cast(&["show", "1"]).await;
        let episode = channel["episodes"][0]["id"].to_string();
        let page = String::from_utf8(home.run(&["page"]).await.output).expect("text");
        let page = PageLink::of(page.trim());
        for path in ["", "/channel/1", "/queue", "/settings"] {
            let answer = page.get(&format!("/podcasts{path}")).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text);
        }
        let answer = page.get(&format!("/podcasts/episode/{episode}")).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        assert_eq!(states(&home.cast(&["show", "1"]).await), ["ready"]);
        drop(disk);
    });
}

#[tokio::test]
async fn episodes_of_two_podcasts_with_one_title_share_no_part() {
    // Half of each, and then it is not there any more.
    let origin = ScriptedOrigin::start(|asked| match &*asked.path {
        "/one" | "/two" => feed_reply(asked, &["a"]),
        path if asked.range_from().is_none() => OriginReply(
            cut(proper(asked, &episode_bytes(path), TAG), BYTES / 2),
            ReplyEnd::Close,
        ),
        _ => empty("404 Not Found", &[]),
    })
    .await;
    let home = Listener::new().await;
    for (channel, path) in [("1", "/one"), ("2", "/two")] {
        home.cast(&["add", &origin.url(path)]).await;
        until_async("failed", async || {
            let channel = home.cast(&["show", channel]).await;
            (states(&channel) == ["failed"]).then_some(())
        })
        .await;
    }
    let files = files_below(&home.path().join("Podcasts"));
    let parts = files.iter().filter(|name| name.ends_with(".part"));
    assert_eq!(parts.count(), 2, "{files:?}");
}

#[test]
fn a_full_disk_is_said_and_with_room_again_the_episode_comes() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), || async {
        sh("ip link set lo up");
        let origin = ScriptedOrigin::start(|asked| match &*asked.path {
            "/large" => {
                let host = asked.header("host").unwrap_or_default();
                feed_of(&format!("http://{host}/large.mp3"))
            }
            "/large.mp3" => {
                let answer = proper(asked, &object(3_000_000, 1), TAG);
                OriginReply(answer, ReplyEnd::Close)
            }
            "/feed" => feed_reply(asked, &["a"]),
            _ => audio(asked),
        })
        .await;
        let home = Listener::new().await;
        let podcasts = home.path().join("Podcasts");
        std::fs::create_dir(&podcasts).expect("a folder");
        let mount = |options: &str| {
            sh(&format!(
                "mount -t tmpfs -o {options} t {}",
                podcasts.display()
            ));
        };
        mount("size=1m");
        home.cast(&["add", &origin.url("/large")]).await;
        let channel = home
            .until("refused", |channel| states(channel) == ["failed"])
            .await;
        let episode = &channel["episodes"][0];
        assert!(
            problem(episode).contains("No space left") && problem(episode).contains("make room"),
            "{episode}"
        );
        // Another one fits where there is a little room, beside the part that is kept.
        mount("remount,size=2m");
        home.cast(&["add", &origin.url("/feed")]).await;
        until_async("the small one", async || {
            (states(&home.cast(&["show", "2"]).await) == ["ready"]).then_some(())
        })
        .await;
        mount("remount,size=8m");
        let number = episode["id"].to_string();
        home.cast(&["download", &number]).await;
        let channel = home
            .until("there", |channel| states(channel) == ["ready"])
            .await;
        assert_eq!(problem(&channel["episodes"][0]), "", "{channel}");
    });
}

#[tokio::test]
async fn an_address_that_ran_out_is_asked_of_the_feed_once_and_the_new_one_tried() {
    let token = Arc::new(AtomicU32::new(1));
    let valid = token.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let host = asked.header("host").unwrap_or_default();
        let valid = valid.load(Ordering::Relaxed);
        match &*asked.path {
            // The first addresses are over before they are used.
            "/feed" => feed_of(&format!("http://{host}/a.mp3?token={}", asked.count)),
            "/never" => feed_of(&format!("http://{host}/never.mp3?token={}", asked.count)),
            path if path.starts_with("/a.mp3?token=") => {
                let of_it = path.trim_start_matches("/a.mp3?token=").parse::<u32>();
                match of_it.is_ok_and(|token| token > valid) {
                    true => OriginReply(proper(asked, &episode_bytes("/a"), TAG), ReplyEnd::Close),
                    false => empty("403 Forbidden", &[]),
                }
            }
            _ => empty("403 Forbidden", &[]),
        }
    })
    .await;
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    home.until("there", |channel| states(channel) == ["ready"])
        .await;
    let asked_for = |path: &str| {
        let requests = origin.requests();
        requests.iter().filter(|asked| asked.path == path).count()
    };
    let paths = || -> Vec<String> { origin.requests().into_iter().map(|a| a.path).collect() };
    assert_eq!(asked_for("/feed"), 2, "{:?}", paths());
    // One whose addresses never work is not asked for again and again.
    home.cast(&["add", &origin.url("/never")]).await;
    let channel = until_async("refused twice", async || {
        let requests = origin.requests();
        let tried = requests.iter().filter(|a| a.path.starts_with("/never.mp3"));
        let tried = tried.count();
        let channel = home.cast(&["show", "2"]).await;
        (tried >= 2 && states(&channel) == ["failed"]).then_some(channel)
    })
    .await;
    let episode = &channel["episodes"][0];
    assert!(problem(episode).contains("403 Forbidden"), "{episode}");
    until_async("the feed of the second failure", async || {
        (asked_for("/never") >= 3).then_some(())
    })
    .await;
    let channel = home.cast(&["show", "2"]).await;
    assert_eq!(states(&channel), ["failed"], "{channel}");
    assert_eq!(asked_for("/never"), 3, "{:?}", paths());
}

#[tokio::test]
async fn feeds_that_cannot_be_read_are_a_sentence_each_and_the_others_go_on() {
    let is_bad = Arc::new(AtomicBool::new(false));
    let flag = is_bad.clone();
    let origin = ScriptedOrigin::start(move |asked| {
        let is_bad = flag.load(Ordering::Relaxed);
        match &*asked.path {
            "/circle" if is_bad => empty("302 Found", &[("Location", "/circle")]),
            "/page" if is_bad => {
                let page = b"<!doctype html><html>Sign in</html>";
                let length = page.len().to_string();
                OriginReply(
                    reply("200 OK", &[("Content-Length", &length)], page),
                    ReplyEnd::Close,
                )
            }
            "/broken" if is_bad => OriginReply(Vec::new(), ReplyEnd::Reset),
            "/moves" if is_bad => empty("301 Moved Permanently", &[("Location", "/moves-on")]),
            "/gone" if is_bad => empty("410 Gone", &[]),
            "/twice" => feed_reply(asked, &["a", "a", "b"]),
            path if path.ends_with(".mp3") => audio(asked),
            _ => feed_reply(asked, &["a"]),
        }
    })
    .await;
    let home = Listener::new().await;
    let bad = ["/circle", "/page", "/broken", "/moves", "/gone"];
    for path in bad.iter().chain(&["/twice"]) {
        home.cast(&["add", &origin.url(path)]).await;
    }
    is_bad.store(true, Ordering::Relaxed);
    home.cast(&["refresh"]).await;
    let list = home.cast(&["list"]).await;
    let of = |path: &str| {
        let channels = list["channels"].as_array().expect("a list");
        let url = origin.url(path);
        let channel = channels.iter().find(|channel| channel["url"] == url);
        channel
            .unwrap_or_else(|| panic!("no {path} in {list}"))
            .clone()
    };
    for (path, words) in [
        ("/circle", "in a circle"),
        ("/page", "a web page, not a feed"),
        ("/broken", "broke off"),
        ("/gone", "gone for good"),
    ] {
        let channel = of(path);
        assert!(problem(&channel).contains(words), "{path}: {channel}");
        assert_eq!(channel["episodes"], 1, "{path}: {channel}");
    }
    assert_eq!(problem(&of("/moves-on")), "");
    let twice = of("/twice");
    assert_eq!((problem(&twice), &twice["episodes"]), ("", &2.into()));
    home.run(&["cast", "show", &origin.url("/twice")])
        .await
        .ends_with(0, "items 1 with the identifier of a newer one");
}

#[test]
fn a_channels_policy_says_whether_its_episodes_may_cost() {
    in_namespace(this_test!(), || async {
        let origin = origin_namespace(|| {
            ScriptedOrigin::start_at("192.0.2.1", |asked| match &*asked.path {
                "/free" => feed_reply(asked, &["a"]),
                "/any" => feed_reply(asked, &["b"]),
                _ => audio(asked),
            })
        });
        cell_on();
        let home = Listener::new().await;
        for (path, policy) in [("/free", "free-only"), ("/any", "any")] {
            let feed = origin.url(path);
            until_async("a network", async || {
                let added = home.run(&["cast", "add", &feed, "--json"]).await;
                (added.code == 0 && added.last()["is_read_later"] == false).then_some(())
            })
            .await;
            let rule = ["rule", &feed, "daily", "07:30", "--policy", policy];
            home.cast(&rule).await;
        }
        until_async("the one that may cost", async || {
            (states(&home.cast(&["show", "2"]).await) == ["ready"]).then_some(())
        })
        .await;
        let waiting = home.cast(&["show", "1"]).await;
        assert_eq!(states(&waiting), ["downloading"], "{waiting}");
        assert!(origin.requests().iter().all(|asked| asked.path != "/a.mp3"));
        home.run(&["cast", "queue"]).await.ends_with(0, "waits:");
        wifi_on("198.51.100.7");
        home.until("the other, by Wi-Fi", |channel| {
            states(channel) == ["ready"]
        })
        .await;
    });
}

/// A list of subscriptions to `feeds`.
fn opml(feeds: impl Iterator<Item = String>) -> String {
    let mut list = String::from("<opml version=\"2.0\"><body>");
    for feed in feeds {
        let _ = write!(
            list,
            "<outline text=\"{feed}\" type=\"rss\" xmlUrl=\"{feed}\"/>"
        );
    }
    list + "</body></opml>"
}

#[tokio::test]
async fn two_hundred_feeds_on_a_bad_network_hold_up_no_download() {
    /// How long an episode may take beside them.
    const BESIDE_MAX: Duration = Duration::from_secs(20);
    let bad = ScriptedOrigin::start_at("0.0.0.0", |asked| match asked.count % 4 {
        0 => OriginReply(Vec::new(), ReplyEnd::Silence),
        1 => OriginReply(Vec::new(), ReplyEnd::Reset),
        2 => {
            let OriginReply(answer, _) = feed_reply(asked, &[]);
            OriginReply(cut(answer, 20), ReplyEnd::Silence)
        }
        _ => feed_reply(asked, &[]),
    })
    .await;
    let port = bad.address.port();
    let good = ScriptedOrigin::start(|asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a", "b", "c"]),
        _ => audio(asked),
    })
    .await;
    let home = Listener::new().await;
    let feeds =
        (0..200).map(|n| format!("http://127.0.{}.{}:{port}/{n}", 1 + n / 200, 1 + n % 200));
    std::fs::write(home.path().join("in.opml"), opml(feeds)).expect("written");
    let imported = home.cast(&["opml", "import", "in.opml"]).await;
    assert_eq!(imported["feeds"], 200, "{imported}");
    until_async("silent feeds", async || {
        (bad.requests().len() > 8).then_some(())
    })
    .await;
    let (wait, begun) = (ProcessorWait::of(&[home.agent()]), Instant::now());
    let added = home.cast(&["add", &good.url("/feed")]).await;
    let channel = added["channel"]["id"].to_string();
    until_async("its episodes", async || {
        let shown = home.cast(&["show", &channel]).await;
        (states(&shown) == ["ready"; 3]).then_some(())
    })
    .await;
    let took = begun.elapsed().saturating_sub(wait.so_far());
    assert!(took < BESIDE_MAX, "{took:?}");
    // The bad ones are still at it.
    let list = home.cast(&["list"]).await;
    let channels = list["channels"].as_array().expect("a list");
    let unread = channels
        .iter()
        .filter(|c| c["title"] == c["url"] && c["problem"].is_null());
    assert!(unread.count() > 50, "they were read before");
}

#[tokio::test]
async fn ten_thousand_feeds_are_imported_at_once_and_read_a_few_at_a_time() {
    /// How long the import may take; 10,000 transactions would take longer on any disk.
    const IMPORT_MAX: Duration = Duration::from_secs(20);
    let most = Arc::new(AtomicU32::new(0));
    let now = Arc::new(AtomicU32::new(0));
    let (peak, open) = (most.clone(), now.clone());
    let many = ScriptedOrigin::play(move |asked, mut stream| {
        let (peak, open) = (peak.clone(), open.clone());
        async move {
            use tokio::io::AsyncWriteExt;
            let count = open.fetch_add(1, Ordering::SeqCst) + 1;
            peak.fetch_max(count, Ordering::SeqCst);
            // sleep: a slow server is the subject
            tokio::time::sleep(Duration::from_millis(30)).await;
            let OriginReply(answer, _) = feed_reply(&asked, &[]);
            open.fetch_sub(1, Ordering::SeqCst);
            let _ = stream.write_all(&answer).await;
            let _ = stream.shutdown().await;
        }
    })
    .await;
    let other = ScriptedOrigin::start_at("127.0.0.2", |asked| match &*asked.path {
        "/feed" => feed_reply(asked, &["a"]),
        _ => audio(asked),
    })
    .await;
    let home = Listener::new().await;
    let feeds = (0..10_000).map(|n| many.url(&format!("/{n}")));
    std::fs::write(home.path().join("in.opml"), opml(feeds)).expect("written");
    let (wait, begun) = (ProcessorWait::of(&[home.agent()]), Instant::now());
    let imported = home.cast(&["opml", "import", "in.opml"]).await;
    let took = begun.elapsed().saturating_sub(wait.so_far());
    eprintln!("10,000 feeds imported in {took:?}, without waits for a processor");
    assert_eq!(imported["feeds"], 10_000, "{imported}");
    assert!(took < IMPORT_MAX, "{took:?}");
    let added = home.cast(&["add", &other.url("/feed")]).await;
    let channel = added["channel"]["id"].to_string();
    until_async("its episode", async || {
        let shown = home.cast(&["show", &channel]).await;
        (states(&shown) == ["ready"]).then_some(())
    })
    .await;
    until_async("the first feeds", async || {
        (many.requests().len() >= 100).then_some(())
    })
    .await;
    let read = many.requests().len();
    assert!(read < 1_000, "{read} at once");
    let most = most.load(Ordering::SeqCst);
    assert!(most <= 2, "{most} of one host at once");
}
