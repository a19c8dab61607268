//! Feeds of each kind, as their authors mean them.

use cedos_readycast::{FEED_EPISODES_MAX, FeedError, ParsedFeed, parse_feed};
use url::Url;

fn base() -> Url {
    "https://pod.example/feed.xml".parse().expect("an address")
}

fn rss(items: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<rss version=\"2.0\" \
         xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\" \
         xmlns:podcast=\"https://podcastindex.org/namespace/1.0\" \
         xmlns:content=\"http://purl.org/rss/1.0/modules/content/\"><channel><title>Morning</title>\
         <description>d</description><link>https://pod.example/</link>{items}</channel></rss>"
    )
}

fn item(guid: &str, day: u32, enclosure: &str) -> String {
    format!(
        "<item><title>t {guid}</title><guid>{guid}</guid>\
         <pubDate>{day:02} Jan 2030 06:00:00 +0100</pubDate>\
         <enclosure url=\"{enclosure}\" length=\"1000\" type=\"audio/mpeg\"/></item>"
    )
}

fn parse(text: &str) -> ParsedFeed {
    parse_feed(text.as_bytes(), &base()).expect("a feed")
}

#[test]
fn rss_with_the_namespaces_of_podcasts() {
    let feed = parse(&rss("<itunes:author>Ann</itunes:author><ttl>120</ttl>\
         <itunes:image href=\"https://pod.example/art.png\"/>\
         <itunes:new-feed-url>https://new.example/feed</itunes:new-feed-url>\
         <item><title>AT&amp;T &lt;b&gt;bold&lt;/b&gt;</title><guid isPermaLink=\"false\">g1</guid>\
         <pubDate>Tue, 01 Jan 2030 06:00:00 +0100</pubDate><itunes:duration>1:02:03</itunes:duration>\
         <itunes:season>2</itunes:season><itunes:episode>7</itunes:episode>\
         <content:encoded><![CDATA[<p>notes<script>x()</script></p>]]></content:encoded>\
         <podcast:chapters url=\"https://pod.example/c.json\" type=\"application/json+chapters\"/>\
         <podcast:transcript url=\"https://pod.example/t.vtt\" type=\"text/vtt\"/>\
         <podcast:person role=\"no such role\">Bob</podcast:person>\
         <enclosure url=\"https://cdn.example/1.mp3?a=1&amp;b=2\" length=\"1234\" type=\"audio/mpeg\"/></item>"));
    assert_eq!(
        (feed.title.as_str(), feed.author.as_str()),
        ("Morning", "Ann")
    );
    assert_eq!(feed.ttl_minutes, Some(120));
    assert_eq!(
        feed.new_url.as_ref().map(Url::as_str),
        Some("https://new.example/feed")
    );
    assert_eq!(
        feed.image.as_ref().map(Url::as_str),
        Some("https://pod.example/art.png")
    );
    let [episode] = feed.episodes.as_slice() else {
        panic!("{feed:?}");
    };
    assert_eq!(episode.guid, "g1");
    assert_eq!(episode.title, "AT&T bold");
    assert_eq!(episode.notes, "<p>notes</p>");
    assert_eq!(
        episode.enclosure.as_str(),
        "https://cdn.example/1.mp3?a=1&b=2"
    );
    assert_eq!(episode.bytes, Some(1234));
    assert_eq!(episode.duration_s, Some(3723));
    assert_eq!((episode.season, episode.number), (Some(2), Some(7)));
    assert_eq!(
        episode.chapters.as_ref().map(Url::as_str),
        Some("https://pod.example/c.json")
    );
    assert_eq!(
        episode.transcript.as_ref().map(Url::as_str),
        Some("https://pod.example/t.vtt")
    );
    assert_eq!(
        episode.published,
        Some("2030-01-01T05:00:00Z".parse().expect("a time"))
    );
}

#[test]
fn alternate_enclosures_and_the_transcript_that_is_easiest_to_follow_are_read() {
    let feed = parse(&rss(
        "<podcast:liveItem status=\"ended\"><podcast:alternateEnclosure type=\"audio/mpeg\" length=\"7\">\
         <podcast:source uri=\"https://cdn.example/live.mp3\"/></podcast:alternateEnclosure></podcast:liveItem>\
         <item><title>t</title><guid>g1</guid>\
         <enclosure url=\"https://cdn.example/1.mp3\" length=\"1234\" type=\"audio/mpeg\"/>\
         <source url=\"https://cdn.example/other-feed\">Other</source>\
         <podcast:alternateEnclosure type=\"audio/opus\" length=\"300\" title=\"Low &amp;amp; &lt;b&gt;slow\">\
         <podcast:source uri=\"ipfs://x\"/><podcast:source uri=\"https://cdn.example/1.opus\"/>\
         <podcast:source uri=\"https://mirror.example/1.opus\"/></podcast:alternateEnclosure>\
         <podcast:alternateEnclosure type=\"application/x-bittorrent\"><podcast:source uri=\"magnet:?x\"/>\
         </podcast:alternateEnclosure>\
         <podcast:transcript url=\"https://pod.example/t.txt\" type=\"text/plain\"/>\
         <podcast:transcript url=\"/t.srt\" type=\"application/x-subrip; charset=utf-8\"/>\
         <podcast:transcript url=\"https://pod.example/t.html\" type=\"text/html\"/></item>\
         <podcast:liveItem status=\"ended\"><podcast:alternateEnclosure type=\"audio/mpeg\" length=\"7\">\
         <podcast:source uri=\"https://cdn.example/live.mp3\"/></podcast:alternateEnclosure></podcast:liveItem>",
    ));
    let [episode] = feed.episodes.as_slice() else {
        panic!("{feed:?}");
    };
    assert_eq!(episode.enclosure.as_str(), "https://cdn.example/1.mp3");
    let [alternate] = episode.alternates.as_slice() else {
        panic!("{episode:?}");
    };
    assert_eq!(alternate.url.as_str(), "https://cdn.example/1.opus");
    assert_eq!(alternate.media_type.as_deref(), Some("audio/opus"));
    assert_eq!(alternate.bytes, Some(300));
    assert_eq!(alternate.title, "Low & slow");
    let transcript = episode.transcript.as_ref().expect("a transcript");
    assert_eq!(transcript.path(), "/t.srt");
}

#[test]
fn atom_and_json_feeds_are_read_too() {
    let atom = parse(
        "<feed xmlns=\"http://www.w3.org/2005/Atom\"><title>A</title><id>x</id>\
         <entry><title>one</title><id>e1</id><updated>2030-01-01T00:00:00Z</updated>\
         <link rel=\"enclosure\" type=\"audio/ogg\" length=\"5\" href=\"https://cdn.example/1.ogg\"/>\
         <link href=\"https://pod.example/1\"/></entry></feed>",
    );
    assert_eq!(atom.episodes.len(), 1);
    assert_eq!(
        atom.episodes[0].enclosure.as_str(),
        "https://cdn.example/1.ogg"
    );
    let json = parse(
        r#"{"version":"https://jsonfeed.org/version/1.1","title":"J","items":[{"id":"1","title":"one",
        "date_published":"2030-01-01T00:00:00Z","content_text":"hello",
        "attachments":[{"url":"https://cdn.example/1.mp3","mime_type":"audio/mpeg","size_in_bytes":7}]}]}"#,
    );
    assert_eq!(json.title, "J");
    assert_eq!(
        json.episodes[0].enclosure.as_str(),
        "https://cdn.example/1.mp3"
    );
}

#[test]
fn duplicates_and_items_without_audio_are_counted_and_left_out() {
    let items = [
        item("a", 1, "https://cdn.example/old.mp3"),
        item("a", 3, "https://cdn.example/new.mp3"),
        "<item><title>only words</title><guid>w</guid></item>".to_owned(),
        item("b", 2, "https://cdn.example/b.mp3"),
    ];
    let feed = parse(&rss(&items.concat()));
    let guids: Vec<_> = feed.episodes.iter().map(|e| e.guid.as_str()).collect();
    assert_eq!(guids, ["a", "b"]);
    assert_eq!(
        feed.episodes[0].enclosure.as_str(),
        "https://cdn.example/new.mp3"
    );
    assert_eq!(feed.skipped.duplicates, 1);
    assert_eq!(feed.skipped.without_enclosure, 1);
}

#[test]
fn a_feed_without_dates_keeps_its_order() {
    let item = |n| {
        format!(
            "<item><title>{n}</title><guid>{n}</guid><pubDate>yesterday or so</pubDate>\
             <enclosure url=\"https://cdn.example/{n}.mp3\" type=\"audio/mpeg\" length=\"\"/></item>"
        )
    };
    let feed = parse(&rss(&(1..=3).map(item).collect::<String>()));
    let titles: Vec<_> = feed.episodes.iter().map(|e| e.title.as_str()).collect();
    assert_eq!(titles, ["1", "2", "3"]);
    assert!(feed.episodes.iter().all(|e| e.published.is_none()));
}

#[test]
fn the_newest_ten_thousand_are_kept() {
    let item = |n: usize| {
        format!(
            "<item><title>{n}</title><guid>{n}</guid><pubDate>{}</pubDate>\
             <enclosure url=\"https://cdn.example/{n}.mp3\" type=\"audio/mpeg\" length=\"1\"/></item>",
            jiff::Timestamp::from_second(1_800_000_000 + n as i64 * 3600)
                .expect("a time")
                .strftime("%a, %d %b %Y %H:%M:%S +0000")
        )
    };
    let feed = parse(&rss(&(0..FEED_EPISODES_MAX + 5)
        .map(item)
        .collect::<String>()));
    assert_eq!(feed.episodes.len(), FEED_EPISODES_MAX);
    assert_eq!(feed.skipped.beyond_limit, 5);
    assert_eq!(feed.episodes[0].title, (FEED_EPISODES_MAX + 4).to_string());
}

#[test]
fn what_is_no_feed_is_refused_with_the_reason() {
    let refused = |text: &str| parse_feed(text.as_bytes(), &base()).expect_err("a refusal");
    let page = "\u{feff}\n<!DOCTYPE html><html><head><title>404</title></head></html>";
    assert_eq!(refused(page), FeedError::WebPage);
    let bomb = "<?xml version=\"1.0\"?><!DOCTYPE lolz [<!ENTITY a \"lol\"><!ENTITY b \"&a;&a;&a;\">]>\
                <rss version=\"2.0\"><channel><title>&b;</title></channel></rss>";
    assert_eq!(refused(bomb), FeedError::OwnEntities);
    for text in ["", "hello", "{}", "<opml/>", "\u{0}\u{1}"] {
        assert!(matches!(refused(text), FeedError::Malformed(_)), "{text}");
    }
    let large = vec![b' '; cedos_readycast::FEED_BYTES_MAX + 1];
    assert_eq!(parse_feed(&large, &base()), Err(FeedError::TooLarge));
}
