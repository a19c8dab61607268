//! The agent's pages of podcasts over HTTP: hostile feeds, forms, positions, lists of subscriptions.

use std::path::Path;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::wait::until_async;
use cedos_readycast::{
    ChannelId, ChannelRule, DownloadOutcome, EpisodeId, EpisodeQuery, Library, RefreshOutcome,
};
use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::page::{PageAnswer, PageHome};
use crate::podcast_scene::{EPISODE_S, PodcastScene, mp3};

/// A title that is markup, closes an attribute, and turns the direction of what follows.
const HOSTILE: &str = "<script>alert(1)</script>\"><img src=x onerror=alert(2)>\u{202e}cod.exe";

const AUDIO: &[u8] = b"0123456789";

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

/// A feed whose every text is hostile.
fn feed(title: &str) -> Vec<u8> {
    // Escaped twice: what is left after a reader took it for HTML.
    let text = escaped(&escaped(title));
    let notes = "<p onclick=\"alert(3)\">Hello <a href=\"https://a.example/x\">link</a> \
                 <a href=\"javascript:alert(4)\">bad</a><img src=\"https://spy.example/1.gif\">\
                 <script>alert(5)</script></p><p>0:00 Opening</p><p>1:30 Guests</p>";
    let notes = escaped(notes);
    format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>{text}</title>\
         <description>{text}</description><item><title>{text}</title><guid>1</guid>\
         <pubDate>Mon, 03 Jun 2030 10:00:00 +0000</pubDate><description>{notes}</description>\
         <enclosure url=\"https://a.example/1.mp3\" length=\"10\" type=\"audio/mpeg\"/></item></channel></rss>"
    )
    .into_bytes()
}

/// A library with one channel and one episode.
fn library(home: &Path, title: &str) -> (Library, ChannelId, EpisodeId) {
    let library = Library::open(&home.join(".state/cedos/podcasts")).expect("a library");
    let now = Timestamp::now();
    let url = "https://a.example/feed".parse().expect("an address");
    let channel = library.subscribe(&url, now).expect("stored");
    let outcome = RefreshOutcome::Feed {
        bytes: feed(title),
        etag: None,
        last_modified: None,
        moved_to: None,
    };
    let report = library
        .apply_refresh(channel, outcome, now)
        .expect("stored");
    assert_eq!(report.added, 1, "{report:?}");
    let episodes = library.episodes(&EpisodeQuery::default());
    let episode = episodes.expect("a list")[0].id;
    (library, channel, episode)
}

/// Makes the file of an episode whole.
fn make_ready(home: &Path, library: &Library, episode: EpisodeId) {
    let (file, now) = (home.join("1.mp3"), Timestamp::now());
    std::fs::write(&file, AUDIO).expect("written");
    library
        .begin_download(episode, &file, None)
        .expect("stored");
    let whole = DownloadOutcome::Whole {
        bytes: AUDIO.len() as u64,
        sha256: Some(hex::encode(Sha256::digest(AUDIO))),
        media_type: Some("audio/mpeg".to_owned()),
    };
    library
        .finish_download(episode, &whole, now)
        .expect("stored");
}

#[tokio::test]
async fn titles_and_notes_of_a_hostile_feed_are_text_on_every_page() {
    let mut stored = None;
    let home = PageHome::prepared(|home| {
        let (library, channel, episode) = library(home, HOSTILE);
        make_ready(home, &library, episode);
        stored = Some((channel, episode));
    })
    .await;
    let (channel, episode) = stored.expect("it was stored");
    let link = home.link(&[]).await;
    for path in [
        "/podcasts".to_owned(),
        format!("/podcasts/channel/{channel}"),
        format!("/podcasts/episode/{episode}"),
        "/podcasts/queue".to_owned(),
        "/podcasts/search?words=%3Cscript%3Ealert".to_owned(),
        "/podcasts/settings".to_owned(),
    ] {
        let page = link.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.text);
        for wrong in [
            "<script>",
            "<img",
            "onclick=",
            "javascript:",
            "\u{202e}",
            " style=",
        ] {
            assert!(
                !page.text.contains(wrong),
                "{path}: {wrong} in {}",
                page.text
            );
        }
    }
    let page = link.get(&format!("/podcasts/episode/{episode}")).await;
    assert!(
        page.text.contains("rel=\"noopener noreferrer nofollow\""),
        "{}",
        page.text
    );
    assert!(page.text.contains("data-start=\"90\""), "{}", page.text);
    for path in [
        "/podcasts/episode/99",
        "/podcasts/episode/99/audio",
        "/podcasts/channel/99",
    ] {
        assert_eq!(link.get(path).await.status, 409, "{path}");
    }
}

#[tokio::test]
async fn a_position_is_stored_and_shown_and_the_audio_is_served_by_ranges() {
    // The agent begins with the file: it would fetch what it finds half done.
    let mut path = String::new();
    let home = PageHome::prepared(|home| {
        let (library, _, episode) = library(home, "Morning");
        make_ready(home, &library, episode);
        path = format!("/podcasts/episode/{episode}");
    })
    .await;
    let link = home.link(&[]).await;
    let audio = format!("{path}/audio");
    let whole = link.get(&audio).await;
    assert_eq!(whole.status, 200);
    assert!(whole.text.ends_with("\r\n\r\n0123456789"), "{}", whole.text);
    let part = link.get_with(&audio, &[("Range", "bytes=2-4")]).await;
    assert_eq!(part.status, 206);
    assert!(
        part.text.contains("content-range: bytes 2-4/10\r\n"),
        "{}",
        part.text
    );
    assert!(part.text.ends_with("\r\n\r\n234"), "{}", part.text);
    assert_eq!(
        link.get_with(&audio, &[("Range", "bytes=10-")])
            .await
            .status,
        416
    );

    let store = format!("{path}/position");
    let form = "position_ms=61000&duration_ms=600000";
    assert_eq!(link.post(&store, form).await.status, 204);
    let page = link.get(&path).await;
    assert!(
        page.text.contains("data-position=\"61000\""),
        "{}",
        page.text
    );
    assert!(page.text.contains("Goes on at 1:01."), "{}", page.text);
    assert_eq!(
        link.get_with(&path, &[("Origin", "http://evil.example")])
            .await
            .status,
        403
    );
    for wrong in ["", "position_ms=-1", "position_ms=x"] {
        let status = link.post(&store, wrong).await.status;
        assert!((400..500).contains(&status), "{wrong}: {status}");
    }
}

#[tokio::test]
async fn what_was_begun_is_on_the_first_page_and_the_order_of_hearing_on_the_queues() {
    let mut stored = None;
    let home = PageHome::prepared(|home| {
        let (library, channel, episode) = library(home, "Morning");
        make_ready(home, &library, episode);
        // What was heard stays here.
        let mut rule = ChannelRule::default();
        rule.keep.unplayed_only = false;
        library.set_channel_rule(channel, &rule).expect("stored");
        stored = Some(episode);
    })
    .await;
    let episode = stored.expect("it was stored");
    let link = home.link(&[]).await;
    let shown = async |path: &str| link.get(path).await.text;
    assert!(!shown("/podcasts").await.contains("Continue listening"));
    let store = format!("/podcasts/episode/{episode}/position");
    let form = "position_ms=61000&duration_ms=600000";
    assert_eq!(link.post(&store, form).await.status, 204);
    let page = shown("/podcasts").await;
    for part in [
        "Continue listening",
        "At 1:01 of 10:00, 8:59 left",
        &format!("/podcasts/episode/{episode}#play"),
    ] {
        assert!(page.contains(part), "{part}: {page}");
    }
    // The end is the end.
    let form = "position_ms=599000&duration_ms=600000";
    assert_eq!(link.post(&store, form).await.status, 204);
    assert!(!shown("/podcasts").await.contains("Continue listening"));

    // What is to be heard again is in the order of hearing.
    let queue = "/podcasts/queue";
    let page = shown(queue).await;
    assert!(page.contains("Nothing is here to be heard."), "{page}");
    let form = format!("do=top&episode={episode}");
    assert_eq!(link.post(queue, &form).await.status, 303);
    let page = shown(queue).await;
    for part in ["Order by publication", &format!("n{episode}-up")] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert_eq!(link.post(queue, "do=reset").await.status, 303);
    let page = shown(queue).await;
    assert!(!page.contains("Order by publication"), "{page}");
    for (wrong, status) in [
        ("do=up", 400),
        ("do=top&episode=99", 400),
        ("do=dance", 422),
        ("", 422),
    ] {
        assert_eq!(link.post(queue, wrong).await.status, status, "{wrong}");
    }
    for origin in [&[("Origin", "http://evil.example")][..], &[]] {
        assert_eq!(link.post_with(queue, origin).await.status, 403);
    }
}

/// The text of a page, without its markup.
fn text_of(page: &PageAnswer) -> String {
    let (_, body) = page.text.split_once("\r\n\r\n").expect("a body");
    let pieces = body.split('<');
    let texts = pieces.map(|piece| piece.split_once('>').map_or("", |(_, text)| text));
    texts.collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn pages_of_podcasts_use_the_words_of_their_listeners() {
    let mut stored = None;
    let home = PageHome::prepared(|home| {
        let (library, channel, episode) = library(home, "Morning");
        make_ready(home, &library, episode);
        stored = Some((channel, episode));
    })
    .await;
    let (channel, episode) = stored.expect("it was stored");
    let link = home.link(&[]).await;
    for path in [
        "/podcasts".to_owned(),
        format!("/podcasts/channel/{channel}"),
        format!("/podcasts/episode/{episode}"),
        "/podcasts/queue".to_owned(),
        "/podcasts/search?words=morning".to_owned(),
        "/podcasts/settings".to_owned(),
        "/podcasts/log".to_owned(),
    ] {
        let text = text_of(&link.get(&path).await).to_lowercase();
        let mut words = text.split(|c: char| !c.is_alphabetic());
        let of_machines = [
            "agent", "flow", "flows", "byte", "bytes", "metered", "socket", "path",
        ];
        let found = words.find(|word| of_machines.contains(word));
        assert_eq!(found, None, "{path}: {text}");
    }
}

#[tokio::test]
async fn forms_of_podcasts_do_what_they_say_and_only_the_pages_own_are_heard() {
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    assert_eq!(link.get("/podcasts").await.status, 200, "without a library");
    let origin = ScriptedOrigin::start(|_| {
        let served = feed("Served");
        let length = served.len().to_string();
        let answer = reply("200 OK", &[("Content-Length", &length)], &served);
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let form = format!(
        "url=http%3A%2F%2F127.0.0.1%3A{}%2Ffeed",
        origin.address.port()
    );
    let moved = link.post("/podcasts/subscribe", &form).await;
    assert_eq!(moved.status, 303, "{}", moved.text);
    for wrong in ["url=nothing", "url=file%3A%2F%2F%2Fetc%2Fpasswd"] {
        assert_eq!(
            link.post("/podcasts/subscribe", wrong).await.status,
            400,
            "{wrong}"
        );
    }
    let rule = "do=rule&schedule=weekdays+07%3A30&latest=5&megabytes=&policy=free-only";
    assert_eq!(link.post("/podcasts/channel/1", rule).await.status, 303);
    let page = link.get("/podcasts/channel/1").await;
    assert!(
        page.text.contains("value=\"weekdays 07:30\""),
        "{}",
        page.text
    );
    assert!(page.text.contains("Next deadline: "), "{}", page.text);
    let refused = link
        .post("/podcasts/channel/1", "do=rule&schedule=soon&latest=5")
        .await;
    assert_eq!(refused.status, 400);
    assert!(refused.text.contains("says no time"), "{}", refused.text);

    let boundary = "XX";
    let file = "<opml version=\"2.0\"><body><outline xmlUrl=\"https://c.example/feed\"/>\
                <outline xmlUrl=\"ftp://d.example/feed\"/></body></opml>";
    let body = format!(
        "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.opml\"\r\n\r\n{file}\r\n\
         --{boundary}--\r\n"
    );
    let imported = link.upload("/podcasts/opml", boundary, &body).await;
    assert_eq!(imported.status, 200, "{}", imported.text);
    assert!(
        imported.text.contains("subscribed to the one podcast of"),
        "{}",
        imported.text
    );
    assert!(
        imported.text.contains("only http and https are read"),
        "{}",
        imported.text
    );
    let list = link.get("/podcasts/subscriptions.opml").await;
    assert!(
        list.text.contains("xmlUrl=\"https://c.example/feed\""),
        "{}",
        list.text
    );
    let page_instead = body.replace(file, "<html></html>");
    assert_eq!(
        link.upload("/podcasts/opml", boundary, &page_instead)
            .await
            .status,
        400
    );

    let (_, _, episode) = library(home.path(), "Morning");
    let path = format!("/podcasts/episode/{episode}");
    let early = link.get(&format!("{path}/audio")).await;
    assert_eq!(early.status, 409);
    assert!(early.text.contains("download it first"), "{}", early.text);
    assert_eq!(link.post(&path, "do=download&by=in+2h").await.status, 303);
    let queue = link.get("/podcasts/queue").await;
    assert!(queue.text.contains("Morning"), "{}", queue.text);
    assert_eq!(link.post(&path, "do=download&by=soon").await.status, 400);
    assert_eq!(link.post(&path, "do=played").await.status, 303);
    assert!(link.get(&path).await.text.contains("Mark as not played"));

    for path in [
        "/podcasts/subscribe",
        "/podcasts/channel/1",
        "/podcasts/opml",
        &path,
        &format!("{path}/position"),
    ] {
        for origin in [&[("Origin", "http://evil.example")][..], &[]] {
            assert_eq!(link.post_with(path, origin).await.status, 403, "{path}");
        }
        assert_eq!(link.without_token("POST", path).await.status, 404, "{path}");
    }
    assert_eq!(
        link.post("/podcasts/channel/1", "do=remove").await.status,
        303
    );
    assert_eq!(link.get("/podcasts/channel/1").await.status, 409);
}

#[tokio::test]
async fn settings_of_podcasts_are_changed_on_the_page() {
    let home = PageHome::prepared(|home| drop(library(home, "Morning"))).await;
    let link = home.link(&[]).await;
    let settings = "/podcasts/settings";
    let shown = async || link.get(settings).await.text;

    let form = "do=save&directory=%7E%2FCasts&search_url=https%3A%2F%2Fdirectory.example%2Fsearch";
    assert_eq!(link.post(settings, form).await.status, 303);
    let page = shown().await;
    assert!(page.contains("value=\"~/Casts\""), "{page}");
    assert!(page.contains("https://directory.example/search"), "{page}");
    for (wrong, why) in [
        ("do=save&directory=Casts", "begin at the root"),
        ("do=save&directory=&search_url=nowhere", "search_url"),
    ] {
        let refused = link.post(settings, wrong).await;
        assert_eq!(refused.status, 400, "{wrong}");
        assert!(refused.text.contains(why), "{wrong}: {}", refused.text);
    }
    assert!(shown().await.contains("~/Casts"), "nothing was changed");
    assert_eq!(link.post(settings, "do=save").await.status, 303);
    assert!(!shown().await.contains("~/Casts"));

    // To look is to change nothing, also where an agent had a port open that this one has not.
    assert!(shown().await.contains("No app has access."));
    let saved = home.path().join(".state/cedos/podcast-apps.json");
    let letters = "a".repeat(32);
    let earlier = serde_json::json!({"token": letters, "port": 1, "password": letters});
    std::fs::write(&saved, earlier.to_string()).expect("written");
    assert!(shown().await.contains("No app has access."));
    let list = link.get("/podcasts/subscriptions-for-apps.opml").await;
    assert_eq!(list.status, 409, "{}", list.text);
    let kept = std::fs::read_to_string(&saved).expect("it is there");
    assert_eq!(kept, earlier.to_string());
    std::fs::remove_file(&saved).expect("it is there");

    // What nobody can read of the user's settings is said, and the rest of the page is there.
    let file = home.path().join(".config/cedos/config.toml");
    let before = std::fs::read(&file).unwrap_or_default();
    std::fs::write(&file, "podcasts = [").expect("written");
    let page = link.get(settings).await;
    assert_eq!(page.status, 200, "{}", page.text);
    assert!(page.text.contains("cannot be read"), "{}", page.text);
    assert!(page.text.contains("Import subscriptions"), "{}", page.text);
    std::fs::write(&file, before).expect("written");

    assert_eq!(link.post(settings, "do=apps-open").await.status, 303);
    let open = home.run(&["cast", "apps", "--json"]).await.last().clone();
    let page = shown().await;
    for name in ["server", "user", "password", "subscriptions"] {
        let text = open[name].as_str().expect("a text");
        assert!(page.contains(text), "{name}: {page}");
    }
    assert_eq!(link.post(settings, "do=apps-close").await.status, 303);
    assert!(shown().await.contains("No app has access."));

    // The server to sync with is another agent's.
    let other = PageHome::new().await;
    let there = other.run(&["cast", "apps", "--json"]).await.last().clone();
    let server = there["server"].as_str().expect("an address").to_owned();
    let form = |password: &str| {
        let server = server.replace(':', "%3A").replace('/', "%2F");
        format!("do=sync-set-up&server={server}&user=cedos&password={password}")
    };
    let refused = link.post(settings, &form("wrong")).await;
    assert_eq!(refused.status, 409);
    assert!(
        refused.text.contains("refuses the user name"),
        "{}",
        refused.text
    );
    assert!(!refused.text.contains("wrong"), "{}", refused.text);
    let password = there["password"].as_str().expect("a password");
    assert_eq!(link.post(settings, &form(password)).await.status, 303);
    let page = shown().await;
    assert!(
        page.contains("Forget this server") && !page.contains(password),
        "{page}"
    );
    let synced = other.run(&["cast", "list", "--json"]).await.last().clone();
    assert_eq!(synced["channels"].as_array().map(Vec::len), Some(1));
    assert_eq!(link.post(settings, "do=sync-now").await.status, 303);
    assert_eq!(link.post(settings, "do=sync-end").await.status, 303);
    assert!(shown().await.contains("Server of the gpodder API"));

    assert!(link.get("/podcasts/log").await.text.contains("unknown yet"));
    for (path, anonymous) in [("log.json", "false"), ("anonymous-log.json", "true")] {
        let log = link.get(&format!("/podcasts/{path}")).await.text;
        let log = log.split("\r\n\r\n").nth(1).expect("a body");
        assert!(log.contains("\"version\":1"), "{log}");
        assert!(log.contains(&format!("\"anonymous\":{anonymous}")), "{log}");
    }
    for origin in [&[("Origin", "http://evil.example")][..], &[]] {
        assert_eq!(link.post_with(settings, origin).await.status, 403);
    }
}

/// Bytes within a frame of silence, which are text to whoever reads answers as text.
fn silent_range(frame: usize) -> String {
    let from = 28 + 104 * frame + 10;
    format!("bytes={from}-{}", from + 9)
}

#[tokio::test]
async fn audio_of_a_download_is_served_as_far_as_it_has_come_and_the_rest_is_waited_for() {
    let scene = PodcastScene::empty().await;
    scene.subscribe("/news").await;
    let states = ["downloading", "ready", "failed", "new", "new"];
    let episodes = scene.until_states("1", &states).await;
    let beginning = [("Range", "bytes=0-2")];
    let late = silent_range(2000);
    let end = [("Range", &*late)];
    let until_begun = async |audio: &str| {
        until_async("its beginning", async || {
            let page = scene.link.get_with(audio, &beginning).await;
            (page.status == 206).then_some(page)
        })
        .await
    };

    // Whoever takes the episode back ends what a player waits for.
    let path = format!("/podcasts/episode/{}", episodes[0]);
    let audio = format!("{path}/audio");
    let page = until_begun(&audio).await;
    let range = format!("content-range: bytes 0-2/{}\r\n", mp3(EPISODE_S).len());
    assert!(page.text.contains(&range), "{}", page.text);
    assert!(page.text.ends_with("\r\n\r\nID3"), "{}", page.text);
    let waiting = scene.link.get_with(&audio, &end);
    let taken_back = async {
        // The player's request is there before its end is asked for.
        scene.link.get_with(&audio, &beginning).await;
        scene.link.post(&path, "do=not-wanted").await
    };
    assert_eq!(scene.parts().len(), 1);
    let (cut, done) = tokio::join!(waiting, taken_back);
    assert_eq!(done.status, 303, "{}", done.text);
    assert!(!cut.text.ends_with(&"\0".repeat(10)), "{}", cut.text);
    let parts = async || (scene.parts().is_empty()).then_some(());
    until_async("no part of what was taken back", parts).await;

    let path = format!("/podcasts/episode/{}", episodes[4]);
    let audio = format!("{path}/audio");
    assert_eq!(scene.link.get(&audio).await.status, 409);
    assert_eq!(scene.link.post(&path, "do=play").await.status, 303);
    until_begun(&audio).await;
    let opened = async {
        scene.link.get_with(&audio, &beginning).await;
        scene.open();
    };
    let (rest, ()) = tokio::join!(scene.link.get_with(&audio, &end), opened);
    assert_eq!(rest.status, 206, "{}", rest.text);
    let silence = format!("\r\n\r\n{}", "\0".repeat(10));
    assert!(rest.text.ends_with(&silence), "{}", rest.text);
}

#[tokio::test]
async fn chapters_on_a_local_network_that_the_feed_is_not_in_are_not_asked_for() {
    let inside = ScriptedOrigin::start_at("127.0.0.2", |_| {
        OriginReply(reply("200 OK", &[], b"{\"chapters\": []}"), ReplyEnd::Close)
    })
    .await;
    let secret = inside.url("/chapters.json");
    let origin = ScriptedOrigin::start(move |asked| {
        let own = format!("http://{}", asked.header("host").unwrap_or_default());
        let body = match &*asked.path {
            "/feed" => {
                let items = [("1", &*secret), ("2", &*format!("{own}/chapters.json"))];
                let items = items.map(|(guid, chapters)| {
                    format!(
                        "<item><title>Episode {guid}</title><guid>{guid}</guid>\
                         <podcast:chapters url=\"{chapters}\" type=\"application/json\"/>\
                         <enclosure url=\"{own}/{guid}.mp3\" length=\"9\" type=\"audio/mpeg\"/></item>"
                    )
                });
                format!(
                    "<?xml version=\"1.0\"?><rss version=\"2.0\" \
                     xmlns:podcast=\"https://podcastindex.org/namespace/1.0\"><channel>\
                     <title>Chapters</title>{}</channel></rss>",
                    items.concat()
                )
            }
            "/chapters.json" => "{\"chapters\": [{\"startTime\": 1, \"title\": \"Own\"}]}".to_owned(),
            _ => "123456789".to_owned(),
        };
        let length = body.len().to_string();
        let fields = [("Content-Length", &*length), ("ETag", "\"1\"")];
        OriginReply(reply("200 OK", &fields, body.as_bytes()), ReplyEnd::Close)
    })
    .await;
    let home = PageHome::new().await;
    let link = home.link(&[]).await;
    let added = home.run(&["cast", "add", &origin.url("/feed")]).await;
    assert_eq!(added.code, 0, "{}", added.errors);
    // Both pages are opened until one has its chapters: the other is refused without a request.
    until_async("chapters of the feed's own host", async || {
        let first = link.get("/podcasts/episode/1").await;
        assert_eq!(first.status, 200, "{}", first.text);
        let second = link.get("/podcasts/episode/2").await;
        let has_chapters = |page: &PageAnswer| page.text.contains("data-start=\"1\"");
        (has_chapters(&first) || has_chapters(&second)).then_some(())
    })
    .await;
    assert!(inside.requests().is_empty());
}
