//! `cedos cast play`: players outside of the page have the copy that is downloaded, from where it was heard to.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use cedos_lab_rig::missing_tool::{is_installed, skip_without};
use cedos_lab_rig::origin::{
    OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, cut, object, proper, reply,
};
use cedos_lab_rig::program::{CedosRun, cedos, ended, pid_of};
use cedos_lab_rig::wait::{until_async, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::sync::watch;

use crate::page::PageLink;
use crate::podcast_listener::{BYTES, Listener, TAG, states};
use crate::podcast_scene::{EPISODE_S, mp3};

/// Notes with a link, and with lines that are chapters.
const NOTES: &str = "&lt;p&gt;From the &lt;a href=\"https://radio.example/sources\"&gt;harbour&lt;/a&gt;.&lt;/p&gt;\
    &lt;p&gt;0:00 Opening&lt;/p&gt;&lt;p&gt;1:30 The new ferry&lt;/p&gt;";

/// A feed with two episodes of a season; the first answer has none.
fn feed(asked: &OriginRequest) -> Vec<u8> {
    let origin = format!("http://{}", asked.header("host").unwrap_or_default());
    let item = |number: u32, title: &str, path: &str| {
        format!(
            "<item><title>{title}</title><guid>{path}</guid><pubDate>Mon, 0{number} Jun 2020 06:00:00 GMT</pubDate>\
             <description>{NOTES}</description><itunes:season>2</itunes:season><itunes:episode>{number}</itunes:episode>\
             <itunes:duration>500</itunes:duration><link>https://radio.example/{number}</link>\
             <enclosure url=\"{origin}{path}\" length=\"{BYTES}\" type=\"audio/mpeg\"/></item>"
        )
    };
    let items = match asked.count {
        0 => String::new(),
        _ => item(1, "The night ferry", "/a.mp3") + &item(2, "A bridge that sings", "/b.mp3"),
    };
    let body = format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\" xmlns:itunes=\"http://www.itunes.com/dtds/podcast-1.0.dtd\">\
         <channel><title>Morning News</title>{items}</channel></rss>"
    );
    let length = body.len().to_string();
    let fields = [
        ("Content-Type", "application/rss+xml"),
        ("Content-Length", &*length),
    ];
    reply("200 OK", &fields, body.as_bytes())
}

/// An origin that makes other bytes for each request, as those do that insert advertisements: only a request for a rest
/// with the tag of a copy (`If-Range`) gets more of that copy. Of the first answers the second half comes when it is open.
struct InsertingOrigin {
    origin: ScriptedOrigin,
    open: watch::Sender<bool>,
}

impl InsertingOrigin {
    async fn start() -> InsertingOrigin {
        let (open, is_open) = watch::channel(false);
        let copies: Arc<Mutex<BTreeMap<String, u32>>> = Arc::default();
        let origin = ScriptedOrigin::play(move |asked, mut stream| {
            let (copies, mut is_open) = (copies.clone(), is_open.clone());
            async move {
                let answer = match &*asked.path {
                    "/feed" => feed(&asked),
                    _ => {
                        let mut copies = copies.lock().expect("no test panicked");
                        let known = asked.header("if-range").and_then(|tag| copies.get(tag));
                        let seed = known.copied().unwrap_or(asked.count as u32);
                        let tag = format!("\"{seed}\"");
                        copies.insert(tag.clone(), seed);
                        proper(&asked, &object(BYTES, seed), &tag)
                    }
                };
                let is_feed = asked.path == "/feed";
                let at_once = match is_feed || *is_open.borrow() {
                    true => answer.len(),
                    false if asked.range_from().is_some() => 0,
                    false => cut(answer.clone(), BYTES / 2).len(),
                };
                // The client may have closed the connection.
                let _ = stream.write_all(&answer[..at_once]).await;
                let _ = stream.flush().await;
                let _ = is_open.wait_for(|open| *open || is_feed).await;
                let _ = stream.write_all(&answer[at_once..]).await;
                let _ = stream.shutdown().await;
            }
        })
        .await;
        InsertingOrigin { origin, open }
    }

    /// The requests for an episode.
    fn requests(&self, path: &str) -> Vec<OriginRequest> {
        let requests = self.origin.requests().into_iter();
        requests.filter(|asked| asked.path == path).collect()
    }
}

/// A listener who subscribed to the feed, and asks for episodes by hand.
async fn subscribed(origin: &ScriptedOrigin) -> Listener {
    let home = Listener::new().await;
    home.cast(&["add", &origin.url("/feed")]).await;
    // Before there are episodes.
    home.cast(&["rule", "1", "by", "hand"]).await;
    home.cast(&["refresh", "1"]).await;
    home
}

/// A program in the listener's home.
fn program(home: &Path, name: &str, text: &str) -> PathBuf {
    let folder = home.join("bin");
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(name);
    std::fs::write(&path, text).expect("written");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("executable");
    path
}

/// A player that reads what it is given into `heard`, and goes on where a connection broke.
const READING_PLAYER: &str = "#!/bin/sh\nPATH=/usr/bin:/bin\nn=0\n\
    until curl -sf -C - -o heard \"$1\"; do\n  n=$((n+1)); [ $n -gt 100 ] && exit 1; sleep 0.3\ndone\n";

fn play(home: &Listener, player: &Path, arguments: &[&str]) -> Command {
    let mut command = cedos(home.path(), &[&["cast", "play"], arguments].concat());
    command
        .env("CEDOS_AGENT", home.path().join("agent.sock"))
        .env("CEDOS_PLAYER", player)
        .env("PATH", "/nonexistent");
    command
}

async fn until_heard(home: &Listener, bytes: u64) {
    let heard = home.path().join("heard");
    until_async("what was heard", async || {
        let length = heard.metadata().map_or(0, |found| found.len());
        (length >= bytes).then_some(())
    })
    .await;
}

/// The number of the episode with this path: episodes are in the order of the feed.
async fn number(home: &Listener, title: &str) -> String {
    let shown = home.cast(&["show", "1"]).await;
    let episodes = shown["episodes"].as_array().expect("a list").clone();
    let found = episodes.iter().find(|episode| episode["title"] == title);
    found.expect("the episode")["id"].to_string()
}

async fn ends(child: Child) -> CedosRun {
    within(ended(child)).await
}

#[tokio::test]
async fn a_player_has_the_copy_that_is_downloaded_and_the_origin_is_asked_once() {
    // What plays here.
    if !is_installed("curl") {
        return;
    }
    let origin = InsertingOrigin::start().await;
    let home = subscribed(&origin.origin).await;
    let player = program(home.path(), "reader", READING_PLAYER);
    let heard = home.path().join("heard");
    // One that nobody asked for, and one that is being downloaded.
    let scenes = [
        ("The night ferry", "/a.mp3", 1, ["new", "ready"]),
        ("A bridge that sings", "/b.mp3", 0, ["ready", "ready"]),
    ];
    for (title, path, place, wanted) in scenes {
        origin.open.send_replace(false);
        let id = number(&home, title).await;
        if place == 0 {
            home.cast(&["download", &id]).await;
            until_async("its request", async || {
                (!origin.requests(path).is_empty()).then_some(())
            })
            .await;
        }
        let playing = play(&home, &player, &[&id]).spawn().expect("start cedos");
        // As far as it has come, less what is kept back for the connection.
        until_heard(&home, BYTES as u64 / 4).await;
        origin.open.send_replace(true);
        let played = ends(playing).await;
        assert_eq!(played.code, 0, "{}", played.errors);
        let channel = home
            .until("ready", |channel| states(channel) == wanted)
            .await;
        let file = home.file(&channel["episodes"][place]).await;
        let bytes = std::fs::read(&heard).expect("what was heard");
        assert!(bytes == std::fs::read(file).expect("the file"));
        let requests = origin.requests(path);
        assert_eq!(requests.len(), 1, "{requests:?}");
        std::fs::remove_file(&heard).expect("removed");
    }
    // The study knows when they were played.
    let log = until_async("the log", async || {
        let log = home.cast(&["log"]).await;
        let entries = log["entries"].as_array().cloned().unwrap_or_default();
        (entries.len() == 2).then_some(entries)
    })
    .await;
    assert!(log.iter().all(|e| e["played_at"].is_string()), "{log:?}");
}

#[tokio::test]
async fn a_player_goes_on_with_the_same_link_when_the_agent_was_killed() {
    // What plays here.
    if !is_installed("curl") {
        return;
    }
    let origin = InsertingOrigin::start().await;
    let mut home = subscribed(&origin.origin).await;
    let player = program(home.path(), "reader", READING_PLAYER);
    let ferry = number(&home, "The night ferry").await;
    let playing = play(&home, &player, &[&ferry])
        .spawn()
        .expect("start cedos");
    until_heard(&home, BYTES as u64 / 4).await;
    home.kill_agent().await;
    // The command starts another one.
    let socket = home.path().join("agent.sock");
    let successor = until_async("a successor", async || {
        let mut stream = UnixStream::connect(&socket).await.ok()?;
        stream.write_all(b"{\"do\":\"hello\"}\n").await.ok()?;
        let line = BufReader::new(stream).lines().next_line().await.ok()??;
        let answer: Value = serde_json::from_str(&line).ok()?;
        i32::try_from(answer["pid"].as_i64()?).ok()
    })
    .await;
    origin.open.send_replace(true);
    let played = ends(playing).await;
    assert_eq!(played.code, 0, "{}", played.errors);
    let channel = home
        .until("ready", |channel| states(channel) == ["new", "ready"])
        .await;
    let file = home.file(&channel["episodes"][1]).await;
    let heard = std::fs::read(home.path().join("heard")).expect("what was heard");
    assert!(heard == std::fs::read(file).expect("the file"));
    let requests = origin.requests("/a.mp3");
    let whole = requests.iter().filter(|asked| asked.range_from().is_none());
    assert_eq!(whole.count(), 1, "{requests:?}");
    kill(Pid::from_raw(successor), Signal::SIGKILL).expect("sent");
}

/// mpv as its socket shows it: the arguments of a program with its name, and the test as what listens there.
struct StandInMpv {
    arguments: Vec<String>,
    lines: tokio::io::Lines<BufReader<tokio::net::unix::OwnedReadHalf>>,
    write: tokio::net::unix::OwnedWriteHalf,
}

impl StandInMpv {
    /// mpv once it was started and is asked where it is.
    async fn started(home: &Path) -> StandInMpv {
        let told = home.join("arguments");
        let arguments: Vec<String> = until_async("a player", async || {
            let text = std::fs::read_to_string(&told).ok()?;
            let text = text.strip_suffix("\n.\n")?;
            Some(text.lines().map(str::to_owned).collect())
        })
        .await;
        std::fs::remove_file(&told).expect("removed");
        let socket = arguments
            .iter()
            .find_map(|word| word.strip_prefix("--input-ipc-server="));
        let listener = UnixListener::bind(socket.expect("a socket")).expect("a socket");
        let (stream, _) = within(listener.accept()).await.expect("asked");
        let (read, write) = stream.into_split();
        let mut mpv = StandInMpv {
            arguments,
            lines: BufReader::new(read).lines(),
            write,
        };
        for name in ["time-pos", "duration"] {
            let line = within(mpv.lines.next_line()).await.expect("readable");
            assert!(line.expect("a line").contains(name));
        }
        mpv
    }

    /// Tells a position and a length, and ends.
    async fn end_at(mut self, home: &Path, position_s: f64) {
        for (name, data) in [("duration", 500.0), ("time-pos", position_s)] {
            let event = json!({"event": "property-change", "name": name, "data": data});
            let sent = self.write.write_all(format!("{event}\n").as_bytes()).await;
            sent.expect("sent");
        }
        // Its events are read before its process ends.
        drop(self.write);
        while let Ok(Some(_)) = within(self.lines.next_line()).await {}
        std::fs::write(home.join("go"), "").expect("written");
    }
}

/// A program that tells its arguments, and ends when the file `go` is there.
const MPV: &str = "#!/bin/sh\nPATH=/usr/bin:/bin\nprintf '%s\\n' \"$@\" > told\nprintf '.\\n' >> told\n\
    mv told arguments\nwhile [ ! -e go ]; do sleep 0.1; done\nrm go\n";

#[tokio::test]
async fn mpv_begins_where_the_episode_was_heard_to_and_what_it_tells_is_stored() {
    let origin = InsertingOrigin::start().await;
    origin.open.send_replace(true);
    let home = subscribed(&origin.origin).await;
    let ferry = number(&home, "The night ferry").await;
    let player = program(home.path(), "mpv", MPV);
    let position = async || home.cast(&["position", &ferry]).await["episode"].clone();
    let mut begins = Vec::new();
    for (to_s, stored_ms, played) in [(77.5, 77_500, false), (499.0, 0, true)] {
        let playing = play(&home, &player, &[&ferry])
            .spawn()
            .expect("start cedos");
        let mpv = StandInMpv::started(home.path()).await;
        let start = mpv
            .arguments
            .iter()
            .find(|word| word.starts_with("--start="));
        begins.push(start.cloned());
        mpv.end_at(home.path(), to_s).await;
        let run = ends(playing).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        let episode = position().await;
        assert_eq!(episode["position_ms"], stored_ms, "{episode}");
        assert_eq!(episode["played"], played, "{episode}");
    }
    assert_eq!(begins, [None, Some("--start=77.500".to_owned())]);
}

#[tokio::test]
async fn after_the_end_of_an_episode_the_next_one_of_the_persons_own_order_follows() {
    let origin = InsertingOrigin::start().await;
    origin.open.send_replace(true);
    let home = subscribed(&origin.origin).await;
    let ferry = number(&home, "The night ferry").await;
    let bridge = number(&home, "A bridge that sings").await;
    let ids = |answer: &Value| -> Vec<String> {
        let episodes = answer["episodes"].as_array().expect("a list").iter();
        episodes.map(|episode| episode["id"].to_string()).collect()
    };
    // What is put into the order is downloaded. Without an order, the oldest is heard first.
    assert_eq!(ids(&home.cast(&["next"]).await), Vec::<String>::new());
    home.cast(&["next", &bridge, "--last"]).await;
    home.cast(&["next", &ferry, "--last"]).await;
    home.until("ready", |channel| states(channel) == ["ready", "ready"])
        .await;
    let order = [bridge.clone(), ferry.clone()];
    assert_eq!(ids(&home.cast(&["next"]).await), order);
    assert_eq!(
        ids(&home.cast(&["next", "--reset"]).await),
        [ferry.clone(), bridge.clone()]
    );
    let moved = home.cast(&["next", &ferry, "--down"]).await;
    assert_eq!(ids(&moved), order);
    assert_eq!(moved["episodes"][0]["up_next"], 1, "{moved}");
    home.run(&["cast", "next", "999"])
        .await
        .ends_with(2, "no episode 999");

    // Nothing was begun: the first of the order is played, and then the other.
    let player = program(home.path(), "mpv", MPV);
    let playing = play(&home, &player, &[]).spawn().expect("start cedos");
    for (to_s, file) in [(499.0, "bridge"), (60.0, "ferry")] {
        let mpv = StandInMpv::started(home.path()).await;
        let played = mpv.arguments.last().expect("a file").to_lowercase();
        assert!(played.contains(file), "{played}");
        mpv.end_at(home.path(), to_s).await;
    }
    // Who ends before the end wants to hear nothing else.
    let run = ends(playing).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    assert!(
        run.errors.contains("Next: The night ferry"),
        "{}",
        run.errors
    );
    assert_eq!(
        ids(&home.cast(&["next"]).await),
        std::slice::from_ref(&ferry)
    );

    // What was begun goes on without being named, and alone if that is wanted.
    let begun = home.cast(&["continue"]).await;
    assert_eq!(ids(&begun), std::slice::from_ref(&ferry));
    assert_eq!(begun["episodes"][0]["position_ms"], 60_000, "{begun}");
    let shown = home.run(&["cast", "continue"]).await;
    let shown = String::from_utf8(shown.output).expect("text");
    assert!(shown.contains("at 1:00, 7:20 left"), "{shown}");
    home.cast(&["next", &bridge]).await;
    let playing = play(&home, &player, &["--once"])
        .spawn()
        .expect("start cedos");
    let mpv = StandInMpv::started(home.path()).await;
    assert!(mpv.arguments.contains(&"--start=60.000".to_owned()));
    mpv.end_at(home.path(), 499.0).await;
    let run = ends(playing).await;
    assert_eq!((run.code, run.errors.contains("Next:")), (0, false));
    assert_eq!(ids(&home.cast(&["continue"]).await), Vec::<String>::new());
}

#[tokio::test]
async fn the_mpv_of_this_machine_goes_on_where_it_was_and_ends_where_the_episode_does() {
    const MPV: &str = "/usr/bin/mpv";
    if !Path::new(MPV).exists() {
        return skip_without("mpv", "mpv is not installed");
    }
    let origin = ScriptedOrigin::start(|asked| {
        let answer = match &*asked.path {
            "/feed" => feed(asked),
            _ => proper(asked, &mp3(EPISODE_S), TAG),
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await;
    let home = subscribed(&origin).await;
    let ferry = number(&home, "The night ferry").await;
    home.cast(&["position", &ferry, "0:30"]).await;
    let heard = async |more: &str| {
        let player = format!("{MPV} --no-config --no-video --ao=null --speed=4 {more}");
        let mut playing = play(&home, Path::new(player.trim()), &[&ferry]);
        let run = ends(playing.spawn().expect("start cedos")).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        home.cast(&["position", &ferry]).await["episode"].clone()
    };
    // From the second 30 on, for ten.
    let episode = heard("--length=10").await;
    let position_s = episode["position_ms"].as_u64().expect("a position") / 1000;
    assert!((35..=41).contains(&position_s), "{episode}");
    assert_eq!(episode["played"], false, "{episode}");
    let episode = heard("").await;
    assert_eq!(episode["played"], true, "{episode}");
    assert_eq!(episode["position_ms"], 0, "{episode}");
}

#[tokio::test]
async fn a_players_link_leads_to_its_episode_alone() {
    let origin = InsertingOrigin::start().await;
    let home = subscribed(&origin.origin).await;
    let ferry = number(&home, "The night ferry").await;
    // Nobody plays it: the link is printed, and works until the command is stopped.
    let mut serving = play(&home, Path::new(""), &[&ferry, "--json"]);
    let mut serving = serving.spawn().expect("start cedos");
    let output = serving.stdout.take().expect("its output");
    let mut lines = BufReader::new(output).lines();
    let link = loop {
        let line = within(lines.next_line())
            .await
            .expect("text")
            .expect("a line");
        let event: Value = serde_json::from_str(&line).expect("JSON");
        if event["event"] == "link" {
            break event["link"].as_str().expect("a link").to_owned();
        }
    };
    origin.open.send_replace(true);
    home.until("ready", |channel| states(channel) == ["new", "ready"])
        .await;
    let page = PageLink::of(&link);
    let answer = page.get("").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let range = page.get_with("", &[("Range", "bytes=5-9")]).await;
    assert_eq!(range.status, 206, "{}", range.text);
    let foreign = [("Host", "evil.example"), ("Origin", "http://evil.example")];
    assert_eq!(page.get_with("", &foreign[..1]).await.status, 421);
    assert_eq!(page.get_with("", &foreign[1..]).await.status, 403);
    // Of another copy it gives nothing, and an answer does not tell the page's token.
    let other = PageLink::of(&format!("{link}x")).get("").await;
    assert_eq!(other.status, 409, "{}", other.text);
    let page_link = home.run(&["page"]).await.output;
    let page_link = String::from_utf8(page_link).expect("text");
    let token = page_link.trim().trim_end_matches('/').rsplit('/').next();
    assert!(!other.text.contains(token.expect("a token")));
    // It reads, and nothing else.
    assert_eq!(page.post("", "do=played").await.status, 405);
    let code = link.rsplit('/').next().expect("a code");
    let code = code.split('?').next().expect("a code");
    let origin_of_page = link.split("/play/").next().expect("a port");
    for other in [
        link.replace(&format!("/play/{ferry}/"), "/play/2000/"),
        format!("{origin_of_page}/{code}/podcasts"),
        format!("{origin_of_page}/play/{ferry}/{}", "0".repeat(code.len())),
    ] {
        assert_eq!(PageLink::of(&other).get("").await.status, 404, "{other}");
    }
    kill(pid_of(&serving), Signal::SIGINT).expect("sent");
    within(serving.wait()).await.expect("it ends");
}

#[tokio::test]
async fn what_the_page_can_the_command_can() {
    let origin = InsertingOrigin::start().await;
    origin.open.send_replace(true);
    let home = subscribed(&origin.origin).await;
    let ferry = number(&home, "The night ferry").await;
    let bridge = number(&home, "A bridge that sings").await;
    // Titles that are here.
    let found = home.cast(&["list", "ferry"]).await;
    assert_eq!(found["channels"], json!([]), "{found}");
    assert_eq!(found["episodes"][0]["id"].to_string(), ferry, "{found}");
    let found = home.cast(&["list", "news"]).await;
    assert_eq!(found["channels"][0]["title"], "Morning News", "{found}");
    home.run(&["cast", "list", "nothing"])
        .await
        .ends_with(0, "No title here");
    // Notes, numbers and chapters.
    let notes = home.run(&["cast", "notes", &ferry]).await;
    let text = String::from_utf8(notes.output).expect("text");
    for part in [
        "S2 E1",
        "From the harbour (https://radio.example/sources).",
        "1:30   The new ferry",
        "https://radio.example/1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    home.run(&["cast", "notes", &ferry, "--transcript"])
        .await
        .ends_with(0, "names no transcript");
    // Positions.
    let set = home.cast(&["position", &ferry, "1:02"]).await;
    assert_eq!(set["episode"]["position_ms"], 62_000, "{set}");
    home.run(&["cast", "position", &ferry, "1:99"])
        .await
        .ends_with(2, "is no position");
    // The rule's switch.
    for (text, value) in [("no", false), ("yes", true)] {
        let rule = home.cast(&["rule", "1", "--remove-played", text]).await;
        let keep = &rule["channel"]["rule"]["keep"];
        assert_eq!(keep["unplayed_only"], value, "{rule}");
    }
    // Out of the queue again.
    home.run(&["cast", "cancel", &ferry])
        .await
        .ends_with(2, "not in the queue");
    origin.open.send_replace(false);
    home.cast(&["download", &ferry]).await;
    home.until("downloading", |channel| {
        states(channel) == ["new", "downloading"]
    })
    .await;
    home.cast(&["cancel", &ferry]).await;
    home.until("cancelled", |channel| states(channel) == ["new", "removed"])
        .await;
    origin.open.send_replace(true);
    // What is ready is on the queue's page.
    home.cast(&["download", &bridge]).await;
    home.until("ready", |channel| states(channel) == ["ready", "removed"])
        .await;
    let link = home.run(&["page"]).await;
    let link = String::from_utf8(link.output).expect("text");
    let queue = PageLink::of(link.trim()).get("/podcasts/queue").await;
    for part in [
        "Up next",
        "A bridge that sings",
        "Season 2, episode 2",
        &format!("/podcasts/episode/{bridge}#play"),
    ] {
        assert!(queue.text.contains(part), "{part}: {}", queue.text);
    }
    // JSON of everything that is written.
    let exported = home.cast(&["export", "log.json"]).await;
    assert_eq!(exported["file"], "log.json", "{exported}");
    let opml = home.cast(&["opml", "export"]).await;
    let list = opml["opml"].as_str().expect("a list");
    assert!(list.contains(&origin.origin.url("/feed")), "{list}");
    let opml = home.cast(&["opml", "export", "out.opml"]).await;
    assert_eq!(opml["file"], "out.opml", "{opml}");
    // Options of streams are refused with a sentence.
    home.run(&["cast", "play", &bridge, "--low", "200k"])
        .await
        .ends_with(2, "downloaded, not streamed");
    home.run(&["cast", "play", &bridge, "--policy", "free-first"])
        .await
        .ends_with(2, "free-first");
}
