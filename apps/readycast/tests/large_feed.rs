//! The largest feeds that are read: 50 MB, and 10,000 items. The only test of its process, whose memory it measures.

use std::fmt::Write as _;

use cedos_readycast::{
    EpisodeQuery, FEED_BYTES_MAX, FEED_EPISODES_MAX, Library, RefreshOutcome, parse_feed,
};
use jiff::Timestamp;
use url::Url;

/// The memory for reading a feed beside the feed itself, as a multiple of its size: items as they are written and as they are
/// kept, and what the readers of XML and HTML hold.
const MEMORY_PER_BYTE: u64 = 6;

/// The memory for reading any feed, in bytes: a page cache of the library, and what threads take.
const MEMORY_BESIDE: u64 = 48 << 20; // a guess

/// A value of this process' status in bytes, such as its peak memory.
fn status(field: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    1024 * kilobytes.and_then(|k| k.parse::<u64>().ok()).expect(field)
}

/// A feed with as many items of notes of this size, the newest first.
fn feed(items: usize, note_bytes: usize) -> Vec<u8> {
    let sentence =
        "&lt;p&gt;What happened at the harbour, and &lt;b&gt;why&lt;/b&gt; it matters.&lt;/p&gt; ";
    let notes = sentence.repeat(note_bytes.div_ceil(sentence.len()));
    let mut text = String::with_capacity(items * (notes.len() + 400) + 1_000);
    text.push_str("<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>Large</title>");
    for n in 0..items {
        let (day, month) = (1 + n % 28, ["Jan", "Feb", "Mar", "Apr", "May"][n % 5]);
        let year = 2025 - n / 500;
        write!(
            text,
            "<item><title>Episode {n}</title><guid>g{n}</guid><pubDate>{day:02} {month} {year} 05:00:00 GMT</pubDate>\
             <description>{notes}</description>\
             <enclosure url=\"https://cdn.example/{n}.mp3\" length=\"1000\" type=\"audio/mpeg\"/></item>"
        )
        .expect("memory");
    }
    text.push_str("</channel></rss>");
    text.into_bytes()
}

/// The most memory that a call took beside what there was before it.
fn memory_of<T>(call: impl FnOnce() -> T) -> (T, u64) {
    // The peak begins anew (proc(5)).
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux");
    let before = status("VmRSS:");
    let value = call();
    (value, status("VmHWM:").saturating_sub(before))
}

#[test]
fn a_feed_of_50_mb_and_one_of_10_000_items_are_read_within_memory_that_follows_from_their_size() {
    let url: Url = "https://pod.example/feed.xml".parse().expect("an address");
    let now = Timestamp::now();
    // As large as a feed may be, and as many items as are kept with notes of two lines.
    let note_bytes = FEED_BYTES_MAX / FEED_EPISODES_MAX - 400;
    let items = FEED_EPISODES_MAX;
    for note_bytes in [note_bytes, 160] {
        let body = feed(items, note_bytes);
        assert!(body.len() <= FEED_BYTES_MAX, "{}", body.len());
        let most = MEMORY_PER_BYTE * body.len() as u64 + MEMORY_BESIDE;
        let (parsed, memory) = memory_of(|| parse_feed(&body, &url).expect("a feed"));
        assert_eq!(parsed.episodes.len(), items);
        assert!(
            memory <= most,
            "{memory} bytes of memory for a feed of {}, {items} items",
            body.len()
        );
        println!(
            "{} bytes, {items} items: {memory} bytes of memory",
            body.len()
        );
        drop(parsed);
        let folder = tempfile::tempdir().expect("a folder");
        let library = Library::open(folder.path()).expect("a library");
        let channel = library.subscribe(&url, now).expect("stored");
        for added in [items, 0] {
            let outcome = RefreshOutcome::Feed {
                bytes: body.clone(),
                etag: None,
                last_modified: None,
                moved_to: None,
            };
            let (report, memory) = memory_of(|| library.apply_refresh(channel, outcome, now));
            let report = report.expect("stored");
            assert_eq!(report.added as usize, added, "{report:?}");
            assert!(
                memory <= most,
                "{memory} bytes of memory to store {items} items"
            );
        }
        let query = EpisodeQuery {
            limit: 1,
            offset: items as u32 - 1,
            ..EpisodeQuery::default()
        };
        let oldest = library.episodes(&query).expect("a list");
        assert_eq!(oldest.len(), 1, "all are kept");
    }
}
