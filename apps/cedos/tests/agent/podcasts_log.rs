//! The log of downloads: what it says of a real one, what an export keeps to itself, and the rule that it proposes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, proper};
use cedos_readycast::{EpisodeQuery, Library, RefreshOutcome, TransferLogEntry};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Timestamp, ToSpan, Zoned};
use serde_json::Value;

use crate::page::PageLink;
use crate::podcast_listener::{BYTES, Listener, TAG, episode_bytes, feed_reply, states};

#[tokio::test]
async fn a_download_is_in_the_log_and_an_anonymous_export_says_nothing_of_whom() {
    let published = Arc::new(AtomicBool::new(false));
    let is_published = published.clone();
    let origin = ScriptedOrigin::start(move |asked| match &*asked.path {
        "/feed" if is_published.load(Ordering::Relaxed) => feed_reply(asked, &["a", "b"]),
        "/feed" => feed_reply(asked, &[]),
        path => OriginReply(proper(asked, &episode_bytes(path), TAG), ReplyEnd::Close),
    })
    .await;
    let home = Listener::new().await;
    // Who only looks leaves nothing behind.
    home.run(&["cast", "log"])
        .await
        .ends_with(0, "No downloads");
    assert!(!home.path().join(".state/cedos/podcasts").exists());
    let begun = Timestamp::now();
    home.cast(&["add", &origin.url("/feed")]).await;
    home.cast(&["rule", "1", "daily", "07:30"]).await;
    published.store(true, Ordering::Relaxed);
    home.cast(&["refresh", "1"]).await;
    let channel = home
        .until("ready", |channel| states(channel) == ["ready"; 2])
        .await;
    let id = channel["episodes"][0]["id"].to_string();
    home.cast(&["played", &id]).await;
    let log = home.cast(&["log"]).await;
    let entries = log["entries"].as_array().expect("a list");
    assert_eq!(entries.len(), 2, "{log}");
    for entry in entries {
        assert_eq!(entry["is_whole"], true, "{entry}");
        assert_eq!(entry["bytes"], BYTES, "{entry}");
        assert_eq!(entry["restart_bytes"], 0, "{entry}");
        assert_eq!(entry["labels"]["channel_title"], "Morning News", "{entry}");
        let carried = entry["carried"].as_array().expect("a list");
        let carried: u64 = carried.iter().filter_map(|c| c["bytes"].as_u64()).sum();
        assert!(carried >= BYTES as u64, "{entry}");
        let time = |field: &str| -> Timestamp {
            let text = entry[field].as_str();
            text.and_then(|text| text.parse().ok())
                .unwrap_or_else(|| panic!("{field}: {entry}"))
        };
        let to_the_second = Timestamp::from_second(begun.as_second()).expect("a time");
        assert!(time("started_at") >= to_the_second, "{entry}");
        assert!(time("started_at") <= time("first_byte_at"), "{entry}");
        assert!(time("first_byte_at") <= time("last_byte_at"), "{entry}");
        assert!(time("last_byte_at") <= time("ended_at"), "{entry}");
        // The deadline is within a day.
        let delay_s = entry["accepted_delay_s"].as_u64().expect("a delay");
        assert!(delay_s <= 86_400 + 60, "{entry}");
    }
    let is_played = |entry: &&Value| entry["played_at"].is_string();
    let played: Vec<&Value> = entries.iter().filter(is_played).collect();
    assert_eq!(played.len(), 1, "{log}");
    assert_eq!(played[0]["episode"].to_string(), id);
    let summary = home.cast(&["log", "--summary"]).await;
    assert_eq!(summary["downloads"], 2, "{summary}");
    assert_eq!(summary["in_time_share"], 1.0, "{summary}");
    assert_eq!(summary["ready_when_played_share"], 1.0, "{summary}");
    assert_eq!(summary["saved_share"], 0.0, "{summary}");
    home.run(&["cast", "log"])
        .await
        .ends_with(0, "Morning News");
    home.run(&["cast", "log", "--summary"])
        .await
        .ends_with(0, "In time");
    home.run(&["cast", "log", "--since", "1s", "--json"])
        .await
        .ends_with(0, "entries");
    home.run(&["cast", "log", "--since", "2100-01-01"])
        .await
        .ends_with(0, "No downloads");
    home.run(&["cast", "log", "--since", "soon"])
        .await
        .ends_with(2, "is no time");

    home.run(&["cast", "export", "whole.json"])
        .await
        .ends_with(0, "2 downloads");
    home.run(&["cast", "export", "anonymous.json", "--anonymous"])
        .await
        .ends_with(0, "2 downloads");
    let text =
        |name: &str| std::fs::read_to_string(home.path().join(name)).expect("it was written");
    let host = origin.url("/");
    let day = begun.to_zoned(TimeZone::UTC).date().to_string();
    for secret in [
        "Morning",
        "Episode",
        host.trim_start_matches("http://"),
        ".mp3",
        &day,
    ] {
        assert!(text("whole.json").contains(secret), "{secret}");
        assert!(
            !text("anonymous.json").contains(secret),
            "{secret}: {}",
            text("anonymous.json")
        );
    }
    // Others answer the study's questions from it without an agent of this device.
    let of_export = home
        .cast(&["log", "--summary", "--from", "anonymous.json"])
        .await;
    assert_eq!(of_export, summary);
    let twice = ["log", "--from", "anonymous.json", "--from", "whole.json"];
    let twice = home.cast(&twice).await;
    assert_eq!(twice["entries"].as_array().map(Vec::len), Some(4));
    home.run(&["cast", "log", "--from", "nowhere.json"])
        .await
        .ends_with(1, "nowhere.json");
}

#[tokio::test]
async fn a_rule_that_fits_the_plays_is_proposed_and_not_set() {
    let home = Listener::new().await;
    let library = Library::open(&home.path().join(".state/cedos/podcasts")).expect("a library");
    let url = "https://pod.example/feed".parse().expect("an address");
    let now = Zoned::now();
    let channel = library.subscribe(&url, now.timestamp()).expect("stored");
    let days: Vec<Zoned> = (1..=6).map(|ago| now.saturating_sub(ago.days())).collect();
    let items: String = (0..days.len())
        .map(|n| {
            format!(
                "<item><title>{n}</title><guid>{n}</guid><pubDate>Mon, 0{} Jun 2020 06:00:00 GMT</pubDate>\
                 <enclosure url=\"https://pod.example/{n}.mp3\" length=\"5\" type=\"audio/mpeg\"/></item>",
                n + 1
            )
        })
        .collect();
    let feed = RefreshOutcome::Feed {
        bytes: format!("<rss version=\"2.0\"><channel><title>Daily</title>{items}</channel></rss>")
            .into_bytes(),
        etag: None,
        last_modified: None,
        moved_to: None,
    };
    library
        .apply_refresh(channel, feed, now.timestamp())
        .expect("stored");
    home.cast(&["rule", "1", "by", "hand"]).await;
    assert!(home.cast(&["show", "1"]).await["proposal"].is_null());
    // Asked for at noon, and heard ten hours later, on each of six days.
    let episodes = library.episodes(&EpisodeQuery::default()).expect("a list");
    for (day, episode) in days.iter().zip(&episodes) {
        let noon = day
            .date()
            .at(12, 0, 0, 0)
            .to_zoned(day.time_zone().clone())
            .expect("a time");
        let started_at = noon.timestamp();
        let entry = TransferLogEntry {
            episode: Some(episode.id),
            started_at,
            ended_at: started_at + Duration::from_secs(60),
            is_whole: true,
            bytes: 5,
            ..TransferLogEntry::default()
        };
        library.record_transfer(&entry).expect("stored");
        let heard = started_at + SignedDuration::from_hours(10);
        library
            .set_position(episode.id, 1_000, None, heard)
            .expect("stored");
    }
    let shown = home.cast(&["show", "1"]).await;
    let proposal = &shown["proposal"];
    assert_eq!(
        (&proposal["plays"], &proposal["met"]),
        (&6.into(), &6.into()),
        "{shown}"
    );
    assert!(
        proposal["mean_delay_s"].as_u64() >= Some(6 * 3_600),
        "{shown}"
    );
    let schedule = proposal["schedule"].as_str().expect("a rule");
    let command = format!("cedos cast rule 1 {schedule}");
    home.run(&["cast", "show", "1"])
        .await
        .ends_with(0, &command);
    assert_eq!(
        shown["channel"]["summary"]["rule"]["schedule"], "by hand",
        "{shown}"
    );
    // The page proposes it, too, and with its button there is nothing to propose.
    let page = home.run(&["page"]).await;
    let page = PageLink::of(String::from_utf8(page.output).expect("text").trim());
    let shown = page.get("/podcasts/channel/1").await.text;
    assert!(
        shown.contains(&format!(
            "“{schedule}” would have been in time for 6 of the last 6"
        )),
        "{shown}"
    );
    let form = format!("do=schedule&schedule={}", schedule.replace(' ', "+"));
    assert_eq!(page.post("/podcasts/channel/1", &form).await.status, 303);
    let shown = home.cast(&["show", "1"]).await;
    assert!(shown["proposal"].is_null(), "{shown}");
    assert_eq!(shown["channel"]["summary"]["rule"]["schedule"], schedule);
    assert!(
        !page
            .get("/podcasts/channel/1")
            .await
            .text
            .contains("use-proposal")
    );
    // The command is one that is understood.
    let words: Vec<&str> = command.split(' ').skip(2).collect();
    home.cast(&words).await;
    assert!(home.cast(&["show", "1"]).await["proposal"].is_null());
}
