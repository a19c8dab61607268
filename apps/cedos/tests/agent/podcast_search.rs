//! Finding podcasts by Podcast Index and by an index on this device, and copies of the library.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, proper, reply};
use cedos_lab_rig::wait::until_async;
use cedos_readycast::Library;
use jiff::Timestamp;
use rusqlite::Connection;

use crate::page::PageLink;
use crate::podcast_listener::{Listener, TAG, empty, episode_bytes, feed_reply, states};

const KEY: &str = "MYKEY7";
const SECRET: &str = "a^secret$|";

#[tokio::test]
async fn podcast_index_is_asked_by_the_users_key_and_a_secret_from_a_file() {
    let origin = ScriptedOrigin::start(|asked| {
        let field = |name: &str| asked.header(name).unwrap_or_default();
        let date = field("x-auth-date");
        let signed = format!("{KEY}{SECRET}{date}");
        let signed = hex::encode(digest(&SHA1_FOR_LEGACY_USE_ONLY, signed.as_bytes()));
        let age = date.parse::<i64>().unwrap_or(0) - Timestamp::now().as_second();
        let is_known = field("x-auth-key") == KEY
            && field("authorization") == signed
            && !field("user-agent").is_empty()
            && age.abs() < 180;
        if !is_known {
            return empty("401 Unauthorized", &[]);
        }
        let body = br#"{"status": "true", "feeds": [{"id": 1, "title": "Morning", "author": "Ann",
            "url": "https://a.example/f", "episodeCount": 12}], "count": 1}"#;
        OriginReply(reply("200 OK", &[], body), ReplyEnd::Close)
    })
    .await;
    let home = Listener::new().await;
    let set = async |key: &str, value: &str| {
        home.run(&["config", "set", key, value])
            .await
            .ends_with(0, "");
    };
    set("podcasts.index_url", &origin.url("/api/search/byterm")).await;
    set("podcasts.index_key", KEY).await;
    let search = ["cast", "search", "morning", "news"];
    home.run(&search)
        .await
        .ends_with(2, "not podcasts.index_secret_file");
    let secret = home.path().join("secret");
    set("podcasts.index_secret_file", &secret.to_string_lossy()).await;
    home.run(&search).await.ends_with(2, "cannot read");
    std::fs::write(&secret, "wrong\n").expect("written");
    home.run(&search).await.ends_with(1, "refuses the key");
    std::fs::write(&secret, format!("{SECRET}\n")).expect("written");
    let found = home.cast(&["search", "morning", "news"]).await;
    assert_eq!(found["found"][0]["title"], "Morning", "{found}");
    assert_eq!(found["found"][0]["episodes"], 12, "{found}");
    let requests = origin.requests();
    let last = requests.last().expect("a request");
    assert!(last.path.contains("q=morning+news"), "{}", last.path);
    assert!(requests.iter().all(|asked| !asked.head.contains(SECRET)));
}

#[tokio::test]
async fn an_index_is_made_from_a_file_an_archive_or_an_address_and_searched_without_a_network() {
    let home = Listener::new().await;
    let search = ["cast", "search", "--offline", "morning"];
    home.run(&search)
        .await
        .ends_with(1, "cedos cast index FILE");
    let database = home.path().join("podcastindex_feeds.db");
    let connection = Connection::open(&database).expect("a database");
    connection
        .execute_batch(
            "CREATE TABLE podcasts (url TEXT, title TEXT, itunesAuthor TEXT, language TEXT);
             INSERT INTO podcasts VALUES ('https://a.example/f', 'Morning News', 'Ann', 'en'),
             ('https://b.example/f', 'Evening News', 'Bob', 'de')",
        )
        .expect("rows");
    let made = home.cast(&["index", "podcastindex_feeds.db"]).await;
    assert_eq!(
        (&made["podcasts"], &made["skipped"]),
        (&2.into(), &0.into())
    );
    let found = home.cast(&["search", "--offline", "morn"]).await;
    assert_eq!(found["found"][0]["url"], "https://a.example/f", "{found}");
    assert_eq!(found["found"].as_array().map(Vec::len), Some(1), "{found}");
    // A newer one replaces it, from its archive.
    connection
        .execute_batch("DELETE FROM podcasts; INSERT INTO podcasts VALUES ('https://c.example/f', 'Morning', '', '')")
        .expect("rows");
    drop(connection);
    let packed = Command::new("tar")
        .args(["-czf", "feeds.db.tgz", "podcastindex_feeds.db"])
        .current_dir(home.path())
        .status();
    assert!(packed.expect("tar").success());
    home.cast(&["index", "feeds.db.tgz"]).await;
    let found = home.cast(&["search", "--offline", "morning"]).await;
    assert_eq!(found["found"][0]["url"], "https://c.example/f", "{found}");
    // What is none is refused, and the index stays.
    std::fs::write(home.path().join("page"), "<html>").expect("written");
    home.run(&["cast", "index", "page"])
        .await
        .ends_with(1, "not a database");
    let mut archive = std::fs::read(home.path().join("feeds.db.tgz")).expect("the archive");
    archive.truncate(archive.len() / 2);
    std::fs::write(home.path().join("half.tgz"), &archive).expect("written");
    home.run(&["cast", "index", "half.tgz"])
        .await
        .ends_with(1, "cannot unpack");
    let found = home.cast(&["search", "--offline", "morning"]).await;
    assert_eq!(found["found"][0]["url"], "https://c.example/f", "{found}");
    // By address: downloaded, imported, and removed.
    let whole = std::fs::read(home.path().join("feeds.db.tgz")).expect("the archive");
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &whole, TAG), ReplyEnd::Close)
    })
    .await;
    let made = home.cast(&["index", &origin.url("/feeds.db.tgz")]).await;
    assert_eq!(made["podcasts"], 1, "{made}");
    let state = std::fs::read_dir(home.path().join(".state/cedos")).expect("the state");
    let left = state.filter(|entry| {
        let name = entry.as_ref().expect("an entry").file_name();
        name.to_string_lossy().contains("download")
    });
    assert_eq!(left.count(), 0);
}

#[tokio::test]
async fn a_copy_of_the_library_takes_its_place_again() {
    let is_gone = Arc::new(AtomicBool::new(false));
    let flag = is_gone.clone();
    let origin = ScriptedOrigin::start(move |asked| match &*asked.path {
        "/feed" if flag.load(Ordering::Relaxed) => empty("410 Gone", &[]),
        "/feed" => feed_reply(asked, &["a", "b"]),
        path => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
    })
    .await;
    let mut home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    home.until("there", |channel| states(channel) == ["ready"; 2])
        .await;
    home.cast(&["backup", "copy.sqlite"]).await;
    home.run(&["cast", "backup", "copy.sqlite"])
        .await
        .ends_with(1, "File exists");
    let copy = home.path().join("copy.sqlite");
    let mode = copy.metadata().expect("the copy").permissions().mode();
    assert_eq!(mode & 0o077, 0, "others can read it: {mode:o}");
    home.cast(&["remove", "1"]).await;
    is_gone.store(true, Ordering::Relaxed);
    // As the guide says it.
    let folder = home.path().join(".state/cedos/podcasts");
    home.between_agents(|| {
        for name in ["library.sqlite-wal", "library.sqlite-shm"] {
            let _ = std::fs::remove_file(folder.join(name));
        }
        std::fs::copy(&copy, folder.join("library.sqlite")).expect("copied");
    })
    .await;
    // Their files went with the channel, in its folder.
    let channel = home
        .until("known again", |channel| states(channel) == ["removed"; 2])
        .await;
    let number = channel["episodes"][0]["id"].to_string();
    home.cast(&["download", &number]).await;
    home.until("fetched again", |channel| states(channel)[0] == "ready")
        .await;
    let library = Library::open(&folder).expect("the library");
    assert_eq!(library.channels().expect("the channels").len(), 1);
}

/// What a form field says, as browsers send it.
fn field(name: &str, value: &str) -> String {
    let encoded: String = url::form_urlencoded::byte_serialize(value.as_bytes()).collect();
    format!("{name}={encoded}")
}

#[tokio::test]
async fn key_and_index_are_set_on_the_page_of_settings_and_searched_on_the_page_of_search() {
    let home = Listener::new().await;
    let link = home.run(&["page"]).await;
    let page = PageLink::of(String::from_utf8(link.output).expect("text").trim());
    let settings = "/podcasts/settings";
    let shown = async |path: &str| page.get(path).await.text;
    let send = async |fields: &[(&str, &str)]| {
        let fields: Vec<String> = fields
            .iter()
            .map(|(name, value)| field(name, value))
            .collect();
        page.post(settings, &fields.join("&")).await
    };
    // The key and its secret, which no page shows and no other user can read.
    let alone = send(&[("do", "index-key"), ("index_key", KEY)]).await;
    assert_eq!(alone.status, 400);
    assert!(alone.text.contains("gives a secret"), "{}", alone.text);
    let both = [
        ("do", "index-key"),
        ("index_key", KEY),
        ("index_secret", SECRET),
    ];
    assert_eq!(send(&both).await.status, 303);
    let text = shown(settings).await;
    assert!(text.contains(&format!("value=\"{KEY}\"")), "{text}");
    assert!(!text.contains("a^secret"), "{text}");
    let secret = home.path().join(".state/cedos/podcast-index.secret");
    assert_eq!(std::fs::read_to_string(&secret).expect("it is"), SECRET);
    let mode = secret.metadata().expect("it is").permissions().mode();
    assert_eq!(mode & 0o077, 0, "others can read it: {mode:o}");
    let named = home
        .run(&["config", "show", "podcasts.index_secret_file"])
        .await;
    let named = String::from_utf8(named.output).expect("text");
    assert!(named.contains("podcast-index.secret"), "{named}");
    // Another key, the same secret; and none.
    let other = [
        ("do", "index-key"),
        ("index_key", "OTHER"),
        ("index_secret", ""),
    ];
    assert_eq!(send(&other).await.status, 303);
    assert!(secret.exists() && shown(settings).await.contains("OTHER"));
    assert_eq!(send(&[("do", "index-key")]).await.status, 303);
    assert!(!secret.exists() && !shown(settings).await.contains("OTHER"));

    // An index, from a file and from an address.
    assert!(
        shown(settings)
            .await
            .contains("There is none on this device.")
    );
    assert!(!shown("/podcasts/search").await.contains("search-index"));
    let wrong = send(&[("do", "index-make"), ("index_source", "feeds.db")]).await;
    assert_eq!(wrong.status, 400);
    assert!(
        wrong.text.contains("write its whole path"),
        "{}",
        wrong.text
    );
    let database = home.path().join("feeds.db");
    let connection = Connection::open(&database).expect("a database");
    connection
        .execute_batch(
            "CREATE TABLE podcasts (url TEXT, title TEXT);
             INSERT INTO podcasts VALUES ('https://a.example/f', 'Morning News')",
        )
        .expect("rows");
    drop(connection);
    let whole = std::fs::read(&database).expect("the database");
    let until = async |text: &str| {
        until_async("made", async || {
            shown(settings).await.contains(text).then_some(())
        })
        .await;
    };
    let path = database.to_string_lossy();
    assert_eq!(
        send(&[("do", "index-make"), ("index_source", &*path)])
            .await
            .status,
        303
    );
    until("Made on ").await;
    let found = shown("/podcasts/search?words=morning&in=index").await;
    for part in [
        "In the index on this device",
        "Morning News",
        "search-index",
    ] {
        assert!(found.contains(part), "{part}: {found}");
    }
    assert_eq!(send(&[("do", "index-remove")]).await.status, 303);
    until("There is none on this device.").await;
    let origin = ScriptedOrigin::start(move |asked| {
        let body = match &*asked.path {
            "/feeds.db" => proper(asked, &whole, TAG),
            _ => proper(asked, b"<html>", TAG),
        };
        OriginReply(body, ReplyEnd::Close)
    })
    .await;
    for (path, text) in [("/page", "It was not made: "), ("/feeds.db", "Made on ")] {
        let url = origin.url(path);
        assert_eq!(
            send(&[("do", "index-make"), ("index_source", &*url)])
                .await
                .status,
            303
        );
        until(text).await;
    }
    assert!(
        !home
            .path()
            .join(".state/cedos/podcasts-index.download")
            .exists()
    );
}
