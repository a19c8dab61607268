//! Feeds that are made to harm who reads them, or that other parsers stumble over.

use cedos_readycast::{FeedError, ParsedFeed, feed_links_of_page, parse_feed, read_opml};
use rand::{Rng as _, SeedableRng as _};
use rand_pcg::Pcg32;
use url::Url;

fn base() -> Url {
    "https://pod.example/feed.xml".parse().expect("an address")
}

/// A feed of one episode, with elements of the channel and of the item.
fn feed_with(channel: &str, item: &str) -> String {
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><rss version=\"2.0\" \
         xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\" \
         xmlns:media=\"http://search.yahoo.com/mrss/\" \
         xmlns:podcast=\"https://podcastindex.org/namespace/1.0\" \
         xmlns:content=\"http://purl.org/rss/1.0/modules/content/\">\
         <channel><title>Morning</title>{channel}<item><title>one</title><guid>g</guid>{item}\
         <enclosure url=\"https://cdn.example/1.mp3\" type=\"audio/mpeg\" length=\"1\"/></item></channel></rss>"
    )
}

fn parse(text: &str) -> ParsedFeed {
    parse_feed(text.as_bytes(), &base()).expect("a feed")
}

#[test]
fn names_and_lengths_that_the_parser_cannot_bear_are_left_out() {
    let broken_items = [
        "<itunes:duration>99999999999999999999999999</itunes:duration>",
        "<itunes:duration>999999999999999999:00:00</itunes:duration>",
        "<itunes:duration>\u{661}\u{662}\u{663}</itunes:duration>",
        "<author>ann@pod.example\u{ff08}Ann\u{ff09}</author>",
        "<author><![CDATA[\u{2026}\u{2026}ann@pod.example]]></author>",
        "<media:thumbnail url=\"https://pod.example/t.png\" time=\"99999999999999999999999\"/>",
        "<podcast:person role=\"no such role\">Bob</podcast:person>",
    ];
    for broken in broken_items {
        let feed = parse(&feed_with("<itunes:author>Ann</itunes:author>", broken));
        assert_eq!(feed.episodes.len(), 1, "{broken}");
        assert_eq!(feed.author, "Ann", "{broken}");
        assert_eq!(feed.episodes[0].duration_s, None, "{broken}");
    }
    let editor = "<managingEditor>ann@pod.example\u{ff08}Ann\u{ff09}</managingEditor>";
    let feed = parse(&feed_with(
        editor,
        "<itunes:duration>1:02</itunes:duration>",
    ));
    assert_eq!(feed.title, "Morning");
}

#[test]
fn nesting_has_an_end() {
    let nested = "<itunes:category text=\"a\">".repeat(200_000);
    let refused = parse_feed(feed_with(&nested, "").as_bytes(), &base()).expect_err("a refusal");
    assert!(refused.to_string().contains("nested"), "{refused}");
    let json = "{\"items\":".repeat(200_000);
    assert!(parse_feed(json.as_bytes(), &base()).is_err());
}

#[test]
fn notes_that_would_grow_are_shown_as_plain_text() {
    let open: String = (0..2_000).map(|n| format!("<b id=\"{n}\">")).collect();
    let bombs = [
        format!("{open}{}", "x<p>".repeat(2_000)),
        format!(
            "{}{}",
            "<b><button></b></button>".repeat(1_000),
            "x<p>".repeat(2_000)
        ),
        format!("{}x", "<div>".repeat(40_000)),
    ];
    for bomb in bombs {
        let notes = format!("<content:encoded><![CDATA[{bomb}]]></content:encoded>");
        let feed = parse(&feed_with("", &notes));
        let notes = &feed.episodes[0].notes;
        assert!(
            notes.starts_with('x') && !notes.contains("<b>"),
            "{}",
            notes.len()
        );
        assert!(notes.len() <= bomb.len());
    }
}

#[test]
fn entities_count_only_where_they_are_declared() {
    // Each use doubles a text, or one long text is used often.
    let quadratic = format!(
        "<!DOCTYPE rss [<!ENTITY a \"{}\">]><rss version=\"2.0\"><channel><title>{}</title></channel></rss>",
        "x".repeat(10_000),
        "&a;".repeat(10_000)
    );
    let external =
        "<!DOCTYPE rss [<!entity a SYSTEM \"file:///etc/passwd\">]><rss><channel/></rss>";
    for bomb in [quadratic.as_str(), external] {
        let refused = parse_feed(bomb.as_bytes(), &base());
        assert_eq!(refused, Err(FeedError::OwnEntities));
    }
    let about_xml = "<description><![CDATA[How <!ENTITY works]]></description>";
    assert_eq!(parse(&feed_with("", about_xml)).episodes.len(), 1);
}

#[test]
fn an_address_with_escapes_is_read_whole() {
    for address in [
        "https://new.example/f?a=1&amp;b=2",
        "<![CDATA[https://new.example/f?a=1&b=2]]>",
    ] {
        let moved = format!("<itunes:new-feed-url>{address}</itunes:new-feed-url>");
        let feed = parse(&feed_with(&moved, ""));
        let new_url = feed.new_url.expect("an address");
        assert_eq!(new_url.as_str(), "https://new.example/f?a=1&b=2");
    }
    let of_item = "<itunes:new-feed-url>https://elsewhere.example/</itunes:new-feed-url>";
    assert_eq!(parse(&feed_with("", of_item)).new_url, None);
}

#[test]
fn items_without_an_identifier_are_told_apart_by_their_enclosures() {
    let item = |n| {
        format!(
            "<item><title>Morning</title>\
             <enclosure url=\"https://cdn.example/{n}.mp3\" type=\"audio/mpeg\" length=\"1\"/></item>"
        )
    };
    let feed = format!(
        "<rss version=\"2.0\"><channel><title>M</title>{}{}</channel></rss>",
        item(1),
        item(2)
    );
    let feed = parse(&feed);
    let guids: Vec<_> = feed.episodes.iter().map(|e| e.guid.as_str()).collect();
    assert_eq!(
        guids,
        ["https://cdn.example/1.mp3", "https://cdn.example/2.mp3"]
    );
}

#[test]
fn scripts_reach_neither_titles_nor_notes() {
    let item = "<title><![CDATA[a<script>alert(1)</script><img src=x onerror=alert(2)>b]]></title>\
                <link>javascript:alert(3)</link><podcast:chapters url=\"file:///etc/passwd\"/>\
                <description><![CDATA[<p onclick=alert(4)>c<style>d</style><a href=\"javascript:alert(5)\">e</a>\
                <svg><script>alert(6)</script></svg></p>]]></description>";
    let feed = parse(&feed_with(
        "<description>&lt;script&gt;x()&lt;/script&gt;f</description>",
        item,
    ));
    let episode = &feed.episodes[0];
    assert_eq!(feed.description, "f");
    assert_eq!(
        (episode.link.as_ref(), episode.chapters.as_ref()),
        (None, None)
    );
    for text in [&episode.title, &episode.notes] {
        assert!(!text.contains("alert") && !text.contains("<img"), "{text}");
    }
}

#[test]
fn a_damaged_feed_is_read_or_refused() {
    let whole = feed_with(
        "<itunes:author>Ann</itunes:author><itunes:category text=\"a\"/>",
        "<pubDate>Tue, 01 Jan 2030 06:00:00 +0100</pubDate><itunes:duration>1:02:03</itunes:duration>\
         <author>ann@pod.example (Ann)</author><podcast:chapters url=\"https://pod.example/c.json\"/>\
         <content:encoded><![CDATA[<p>notes &amp; <b>more</b></p>]]></content:encoded>",
    )
    .into_bytes();
    let mut numbers = Pcg32::seed_from_u64(7);
    for _ in 0..500 {
        let cut = &whole[..numbers.random_range(0..whole.len())];
        // A channel that is whole is read, whatever lacks behind it.
        let is_whole = String::from_utf8_lossy(cut).contains("</channel>");
        assert_eq!(parse_feed(cut, &base()).is_ok(), is_whole);
        let mut damaged = whole.clone();
        for _ in 0..=numbers.random_range(0..8) {
            let at = numbers.random_range(0..damaged.len());
            damaged[at] = numbers.random();
        }
        if let Ok(feed) = parse_feed(&damaged, &base()) {
            assert!(feed.episodes.len() <= 1);
        }
        let _ = read_opml(&damaged);
    }
}

#[test]
fn lists_of_subscriptions_of_many_programs_are_read() {
    // As Apple, AntennaPod, gPodder, Pocket Casts and Overcast write them.
    let lists = [
        "<?xml version=\"1.0\" encoding=\"utf-8\"?>\n<opml version=\"1.0\"><head><title>Podcast Subscriptions</title></head>\
         <body><outline text=\"feeds\"><outline type=\"rss\" text=\"News &amp; more\" xmlUrl=\"https://a.example/f?x=1&amp;y=2\"/>\
         </outline></body></opml>",
        "<?xml version='1.0' encoding='UTF-8' standalone='no' ?><opml version=\"2.0\"><body>\
         <outline text=\"News &amp; more\" title=\"News &amp; more\" type=\"rss\" xmlUrl=\"https://a.example/f?x=1&amp;y=2\" \
         htmlUrl=\"https://a.example\" /></body></opml>",
        "<opml version=\"2.0\"><body><outline title=\"News &amp; more\" text=\"\" xmlUrl=\"https://a.example/f?x=1&amp;y=2\" \
         type=\"rss\"/></body></opml>",
        "<opml version='1.0'><body><outline text='feeds'><outline xmlUrl='https://a.example/f?x=1&y=2' type='rss' \
         text='News &amp; more' /></outline></body></opml>",
        "<opml version=\"1.0\"><body><outline text=\"playlists\"><outline type=\"podcast-playlist\" title=\"All\"/></outline>\
         <outline text=\"feeds\"><outline type=\"rss\" text=\"News &amp; more\" overcastId=\"1\" \
         xmlurl=\"https://a.example/f?x=1&amp;y=2\"><outline type=\"podcast-episode\" title=\"e\" \
         url=\"https://a.example/e\" enclosureUrl=\"https://a.example/e.mp3\"/></outline></outline></body></opml>",
    ];
    for list in lists {
        let import = read_opml(list.as_bytes()).expect(list);
        let [feed] = import.feeds.as_slice() else {
            panic!("{list}: {import:?}");
        };
        assert_eq!(feed.url.as_str(), "https://a.example/f?x=1&y=2");
        assert_eq!(feed.title, "News & more");
    }
}

#[test]
fn entries_of_a_list_that_cannot_be_read_are_named() {
    let list = "<opml><body><outline xmlUrl='https://a.example/'/><outline xmlUrl='https://a.example/'/>\
                <outline xmlUrl='file:///etc/passwd'/><outline xmlUrl='feed://b.example/'/>\
                <outline xmlUrl='no address'/></body></opml>";
    let import = read_opml(list.as_bytes()).expect("a list");
    let urls: Vec<_> = import.feeds.iter().map(|f| f.url.as_str()).collect();
    assert_eq!(urls, ["https://a.example/", "http://b.example/"]);
    assert_eq!(import.skipped.len(), 3, "{import:?}");
    let bomb =
        "<!DOCTYPE opml [<!ENTITY a \"b\">]><opml><body><outline xmlUrl='&a;'/></body></opml>";
    assert_eq!(read_opml(bomb.as_bytes()), Err(FeedError::OwnEntities));
    for not_a_list in ["", "<html></html>", "[]"] {
        assert!(read_opml(not_a_list.as_bytes()).is_err(), "{not_a_list}");
    }
}

#[test]
fn a_web_page_is_no_feed_and_names_its_feeds() {
    let page = "\u{feff}\n<!DOCTYPE html><html><head><LINK REL='alternate' type='application/rss+xml' href='/feed'>\
                <link rel=alternate type=application/atom+xml href=https://b.example/atom>\
                <link rel=alternate hreflang=de href=/de>\
                <!-- <link rel=alternate type=application/rss+xml href=/commented> --></head></html>";
    assert_eq!(
        parse_feed(page.as_bytes(), &base()),
        Err(FeedError::WebPage)
    );
    let found = feed_links_of_page(page.as_bytes(), &base());
    let found: Vec<_> = found.iter().map(Url::as_str).collect();
    assert_eq!(
        found,
        ["https://pod.example/feed", "https://b.example/atom"]
    );
}
