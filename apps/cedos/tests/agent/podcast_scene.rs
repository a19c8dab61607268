//! Podcasts of a person for tests in browsers: an origin with feeds and sound, and an agent that subscribes to them.

use std::path::{Path, PathBuf};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginRequest, OriginStream, ScriptedOrigin, cut, proper, reply};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::page::{PageHome, PageLink};

/// How long an episode plays.
pub const EPISODE_S: usize = 60;

/// Bytes of a frame of 32 kb/s, and frames in ten seconds.
const FRAME_BYTES: usize = 104;
const FRAMES_IN_10_S: usize = 383;

/// Silence as MP3, with a title as podcasts have it: players look for one at the end of a file that begins with none.
pub fn mp3(seconds: usize) -> Vec<u8> {
    let title = b"\x00Episode";
    let mut frame = b"TIT2\x00\x00\x00".to_vec();
    frame.push(title.len() as u8);
    frame.extend_from_slice(&[0, 0]);
    frame.extend_from_slice(title);
    let mut file = b"ID3\x04\x00\x00\x00\x00\x00".to_vec();
    file.push(frame.len() as u8);
    file.extend(frame);
    // MPEG-1 layer III, 32 kb/s, 44.1 kHz, mono; no bits for any sample.
    let mut silence = vec![0xff, 0xfb, 0x10, 0xc0];
    silence.resize(FRAME_BYTES, 0);
    for _ in 0..seconds * FRAMES_IN_10_S / 10 {
        file.extend_from_slice(&silence);
    }
    file
}

/// What a feed of the origin is made of.
struct ScriptedFeed {
    title: &'static str,
    author: &'static str,
    about: &'static str,
    /// Title and path of each episode, the newest first.
    episodes: &'static [(&'static str, &'static str)],
}

const NOTES: &str = "<p>Three stories from the harbour, and the weather for the week.</p>\
    <ul><li>0:00 Opening</li><li>0:10 The new ferry</li><li>0:35 Weather</li></ul>\
    <p>Sources are on <a href=\"https://radio.example/sources\">our page</a>.</p>";

fn feed_at(path: &str) -> Option<ScriptedFeed> {
    Some(match path {
        "/news" => ScriptedFeed {
            title: "Morning News",
            author: "Harbour Radio",
            about: "What happened at the harbour while you slept, in ten minutes.",
            episodes: &[
                ("Friday: a bridge that sings", "/slow/news-5.mp3"),
                ("Thursday: the night ferry", "/audio/news-4.mp3"),
                ("Wednesday: the price of herring", "/page/news-3.mp3"),
                ("Tuesday: fog until noon", "/audio/news-2.mp3"),
                ("Monday: a whale in the dock", "/slow/news-1.mp3"),
            ],
        },
        "/water" => ScriptedFeed {
            title: "Deep Water",
            author: "Ada Okafor and Jonas Lind",
            about: "Long talks about rivers, seas and the people on them.",
            episodes: &[
                ("12: Where eels go", "/audio/water-12.mp3"),
                (
                    "11: A very long evening with the keeper of the last lighthouse that is still lit by hand",
                    "/audio/water-11.mp3",
                ),
            ],
        },
        "/arabic" => ScriptedFeed {
            title: "نشرة الأخبار",
            author: "إذاعة الميناء",
            about: "أخبار الميناء في عشر دقائق.",
            episodes: &[("الجمعة: جسر يغني", "/audio/arabic-1.mp3")],
        },
        "/gone" => ScriptedFeed {
            title: "Signals",
            author: "",
            about: "Radio from ships.",
            episodes: &[("The last message", "/audio/signals-1.mp3")],
        },
        _ => return None,
    })
}

impl ScriptedFeed {
    fn xml(&self, origin: &str) -> String {
        let bytes = mp3(EPISODE_S).len();
        let notes = NOTES.replace('<', "&lt;");
        let days = (1..=30).rev();
        let items: String = (self.episodes.iter().zip(days))
            .map(|((title, path), day)| {
                let chapters = match *path {
                    "/audio/water-12.mp3" => "/chapters.json",
                    "/audio/water-11.mp3" => "/hostile-chapters.json",
                    _ => "",
                };
                let chapters = match chapters {
                    "" => String::new(),
                    path => format!(
                        "<podcast:chapters url=\"{origin}{path}\" type=\"application/json+chapters\"/>"
                    ),
                };
                let chapters = match *path {
                    "/audio/water-11.mp3" => format!(
                        "{chapters}<podcast:transcript url=\"{origin}/hostile.vtt\" type=\"text/vtt\"/>"
                    ),
                    _ => chapters,
                };
                format!(
                    "<item><title>{title}</title><guid>{path}</guid>\
                     <pubDate>{day:02} Oct 2026 05:00:00 GMT</pubDate><description>{notes}</description>{chapters}\
                     <itunes:duration>{EPISODE_S}</itunes:duration>\
                     <enclosure url=\"{origin}{path}\" length=\"{bytes}\" type=\"audio/mpeg\"/></item>"
                )
            })
            .collect();
        format!(
            "<?xml version=\"1.0\"?><rss version=\"2.0\" xmlns:podcast=\"https://podcastindex.org/namespace/1.0\" \
             xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\"><channel><title>{}</title>\
             <itunes:author>{}</itunes:author><description>{}</description>{items}</channel></rss>",
            self.title, self.author, self.about
        )
    }
}

/// Chapters as the podcast namespace has them.
const CHAPTERS: &str = r#"{"version": "1.2.0", "chapters": [
    {"startTime": 0, "title": "Opening"},
    {"startTime": 8, "title": "From the Sargasso Sea", "url": "https://eels.example/sargasso"},
    {"startTime": 25.5, "title": "Rivers, locks and ladders"},
    {"startTime": 47, "title": "Letters"}
]}"#;

/// Chapters with what must not reach a page.
const HOSTILE_CHAPTERS: &str = r#"{"version": "1.2.0", "chapters": [
    {"startTime": 0, "title": "Opening", "img": "https://spy.example/1.png"},
    {"startTime": 12.5, "title": "Eels <script>alert(1)</script>", "url": "https://eels.example/"},
    {"startTime": 30, "title": "Hidden", "toc": false},
    {"startTime": 40, "title": "Letters", "url": "javascript:alert(2)"}
]}"#;

/// A transcript with what must not reach a page.
const HOSTILE_TRANSCRIPT: &str = "WEBVTT\n\n00:00.000 --> 00:12.000\n<v Ada>Good evening.\n\n\
    00:14.500 --> 00:20.000\n<v Jonas>The lamp &lt;script&gt;alert(3)&lt;/script&gt; burns.<img src=https://spy.example/2.png>\n\n\
    00:42.000 --> 00:50.000\n<v Ada>Good night.\n";

fn of_type(media_type: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len().to_string();
    let fields = [("Content-Type", media_type), ("Content-Length", &length)];
    reply("200 OK", &fields, body)
}

/// What the origin answers at once.
fn answer(asked: &OriginRequest) -> Vec<u8> {
    let origin = format!("http://{}", asked.header("host").unwrap_or_default());
    if let Some(feed) = feed_at(&asked.path) {
        return of_type("application/rss+xml", feed.xml(&origin).as_bytes());
    }
    match &*asked.path {
        path if path.starts_with("/directory?") => {
            let found = [("Morning News", "/news"), ("Deep Water", "/water")];
            let found = found.map(|(title, path)| {
                json!({"collectionName": title, "artistName": "Harbour Radio", "trackCount": 5,
                       "feedUrl": format!("{origin}{path}")})
            });
            of_type(
                "text/javascript",
                json!({"results": found}).to_string().as_bytes(),
            )
        }
        "/hostile.vtt" => of_type("text/vtt", HOSTILE_TRANSCRIPT.as_bytes()),
        "/chapters.json" => of_type("application/json+chapters", CHAPTERS.as_bytes()),
        "/hostile-chapters.json" => {
            of_type("application/json+chapters", HOSTILE_CHAPTERS.as_bytes())
        }
        path if path.starts_with("/page/") => {
            of_type("audio/mpeg", b"<!doctype html><title>Log in</title>")
        }
        path if path.starts_with("/audio/") || path.starts_with("/slow/") => {
            proper(asked, &mp3(EPISODE_S), "\"v1\"")
        }
        _ => reply("404 Not Found", &[("Content-Length", "0")], b""),
    }
}

/// Answers a request. Of what is below `/slow/` only the first half comes before the origin is open.
async fn play(
    asked: OriginRequest,
    mut stream: OriginStream,
    mut open: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let answer = answer(&asked);
    let at_once = match asked.path.starts_with("/slow/") && !*open.borrow() {
        true if asked.range_from().is_some() => 0,
        true => cut(answer.clone(), mp3(EPISODE_S).len() / 2).len(),
        false => answer.len(),
    };
    stream.write_all(&answer[..at_once]).await?;
    stream.flush().await?;
    if at_once < answer.len() {
        // The scene ends before its origin opens, or it opens.
        let _ = open.wait_for(|open| *open).await;
        stream.write_all(&answer[at_once..]).await?;
    }
    stream.shutdown().await
}

/// An origin of feeds, episodes, and a directory that knows them.
pub struct PodcastOrigin {
    pub origin: ScriptedOrigin,
    /// Whether the origin gives the second half of what is below `/slow/`.
    open: watch::Sender<bool>,
}

impl PodcastOrigin {
    /// Starts an origin at an address of this machine.
    pub async fn start_at(host: &str) -> PodcastOrigin {
        let listener = TcpListener::bind((host, 0)).await.expect("a port");
        let (open, is_open) = watch::channel(false);
        let origin = ScriptedOrigin::play_at(listener, None, move |asked, stream| {
            let is_open = is_open.clone();
            async move {
                // The agent may have closed the connection.
                let _ = play(asked, stream, is_open).await;
            }
        });
        PodcastOrigin { origin, open }
    }
}

/// An agent, its page, and the origin of what it subscribes to.
pub struct PodcastScene {
    pub origin: ScriptedOrigin,
    pub home: PageHome,
    pub link: PageLink,
    open: watch::Sender<bool>,
}

impl PodcastScene {
    /// An agent without subscriptions.
    pub async fn empty() -> PodcastScene {
        PodcastScene::with(PodcastOrigin::start_at("127.0.0.1").await).await
    }

    /// An agent without subscriptions that finds podcasts at this origin.
    pub async fn with(PodcastOrigin { origin, open }: PodcastOrigin) -> PodcastScene {
        let home = PageHome::new().await;
        let directory = origin.url("/directory");
        let set = ["config", "set", "podcasts.search_url", &directory];
        home.run(&set).await.ends_with(0, "");
        let link = home.link(&[]).await;
        PodcastScene {
            origin,
            home,
            link,
            open,
        }
    }

    /// An agent with subscriptions, and episodes in every state: channel 1 is at work, channel 2 has chapters, channel 3
    /// is written from right to left, the feed of channel 4 is gone.
    pub async fn new() -> PodcastScene {
        let scene = PodcastScene::empty().await;
        for path in ["/news", "/water", "/arabic"] {
            scene.subscribe(path).await;
        }
        scene.cast(&["rule", "1", "weekdays", "07:30"]).await;
        scene.cast(&["rule", "3", "by", "hand"]).await;
        let news = ["downloading", "ready", "failed", "new", "new"];
        scene.until_states("1", &news).await;
        scene.until_states("2", &["ready", "ready"]).await;
        scene
    }

    /// Subscribes to a feed of the origin.
    pub async fn subscribe(&self, path: &str) {
        self.cast(&["add", &self.origin.url(path)]).await;
    }

    /// The answer of a verb of `cedos cast`.
    pub async fn cast(&self, arguments: &[&str]) -> Value {
        let words = [&["cast"], arguments, &["--json"]].concat();
        let run = self.home.run(&words).await;
        assert_eq!(run.code, 0, "{arguments:?}: {}", run.errors);
        run.last().clone()
    }

    /// Waits until the episodes of a channel have these states, the newest first. Returns their numbers.
    pub async fn until_states(&self, channel: &str, wanted: &[&str]) -> Vec<i64> {
        let mut last = Value::Null;
        let looking = async {
            loop {
                last = self.cast(&["show", channel]).await;
                let episodes = last["episodes"].as_array().expect("a list");
                let states = episodes.iter().map(|episode| episode["state"].as_str());
                if states.eq(wanted.iter().map(|state| Some(*state))) {
                    let ids = episodes.iter().filter_map(|e| e["id"].as_i64());
                    return ids.collect();
                }
            }
        };
        let found = tokio::time::timeout(PATIENCE, looking).await;
        found.unwrap_or_else(|_| panic!("never {wanted:?}: {last}"))
    }

    /// Lets the origin give all of what is below `/slow/`.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// What of downloads that are not whole is on the disk.
    pub fn parts(&self) -> Vec<PathBuf> {
        fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let path = entry.path();
                match path.is_dir() {
                    true => walk(&path, found),
                    false if path.extension().is_some_and(|end| end == "part") => found.push(path),
                    false => {}
                }
            }
        }
        let mut found = Vec::new();
        walk(self.home.path(), &mut found);
        found
    }

    /// The address of a page.
    pub fn url(&self, path: &str) -> String {
        format!("{}{path}", self.link.url)
    }
}
