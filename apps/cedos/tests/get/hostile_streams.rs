//! Words of other hosts that set colours, forge lines or have no end, where players read links: `cedos url` and
//! `cedos play` pass none to a terminal or a player as they came.

use std::path::Path;
use std::sync::Arc;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::program::ProxyProcess;

use crate::hostile_words::{
    ClosingServer, HOSTILE, HOSTILE_PATH, SHOWN, answering_server, printed_by, refusal,
};

/// The most bytes of a line that is printed for people.
const LINE_BYTES_MAX: usize = 1_000;

/// How long a player asks, at most, in seconds.
const PLAYED_S: &str = "3";

/// [`HOSTILE`], bytes that are no text, and a line without end.
fn hostile_bytes() -> Vec<u8> {
    [HOSTILE.as_bytes(), b"\xff\xfe\x80", &[b'x'; 9_000]].concat()
}

/// An answer of these bytes.
fn answer(status: &str, media_type: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len().to_string();
    let fields = [("Content-Type", media_type), ("Content-Length", &*length)];
    reply(status, &fields, body)
}

/// A playlist whose every word is hostile.
fn playlist() -> Vec<u8> {
    let head = b"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:4\n";
    let title = [&b"#EXTINF:4,"[..], &hostile_bytes(), b"\n"].concat();
    let key = format!("#EXT-X-KEY:METHOD=AES-128,URI=\"{HOSTILE_PATH}\"\n");
    let piece = format!("{HOSTILE_PATH}\n\u{1b}[31mred\u{202e}.ts\n");
    [
        head,
        &title[..],
        key.as_bytes(),
        piece.as_bytes(),
        b"#EXT-X-ENDLIST\n",
    ]
    .concat()
}

/// A manifest whose every word is hostile.
fn manifest() -> Vec<u8> {
    let text = format!(
        "<?xml version=\"1.0\"?><MPD xmlns=\"urn:mpeg:dash:schema:mpd:2011\" type=\"static\" \
         mediaPresentationDuration=\"PT8S\"><ProgramInformation><Title>{SHOWN}\u{202e}</Title>\
         </ProgramInformation><BaseURL>{HOSTILE_PATH}/</BaseURL><Period id=\"&#27;[31mred\"><AdaptationSet \
         mimeType=\"video/mp4\"><SegmentTemplate media=\"{HOSTILE_PATH}$Number$\" duration=\"4\"/><Representation \
         id=\"[31mred\u{202e}\" bandwidth=\"1000\"/></AdaptationSet></Period></MPD>"
    );
    [text.as_bytes(), b"\xff"].concat()
}

async fn hostile_origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| {
        let is_piece = asked.path.contains("%1b");
        let path = asked.path.split('?').next().unwrap_or_default();
        let answer = match path {
            "/list.m3u8" => answer("200 OK", "application/vnd.apple.mpegurl", &playlist()),
            "/film.mpd" => answer("200 OK", "application/dash+xml", &manifest()),
            "/named.mp4" => {
                let name = format!("attachment; filename*=UTF-8''{HOSTILE_PATH}");
                let mut head =
                    b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nContent-Disposition: ".to_vec();
                head.extend(name.as_bytes());
                head.extend("\r\nContent-Type: video/\u{202e}\u{9b}1m\r\n\r\nabc".as_bytes());
                head
            }
            "/moved.mp4" => {
                let mut head =
                    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: ftp://".to_vec();
                head.extend("host/[31mred\u{202e}\u{9b}1m\r\n\r\n".as_bytes());
                head
            }
            _ if is_piece => answer("404 Not Found", "text/plain", &hostile_bytes()),
            _ => answer("409 Conflict", "text/plain", &hostile_bytes()),
        };
        OriginReply(answer, ReplyEnd::Close)
    })
    .await
}

/// Asserts that a terminal would show what was printed as it is, in lines that end.
#[track_caller]
fn assert_harmless(command: &str, printed: &[u8]) {
    let text = std::str::from_utf8(printed).unwrap_or_else(|_| panic!("{command}: {printed:?}"));
    let raw = |c: char| c != '\n' && cedos_text::is_control(c);
    assert!(!text.contains(raw), "{command}: {text:?}");
    for line in text.lines() {
        assert!(!line.starts_with("Forged"), "{command}: {text}");
        let is_json = line.starts_with('{');
        assert!(is_json || line.len() <= LINE_BYTES_MAX, "{command}: {line}");
    }
}

/// Plays a URL, and checks what is printed and what the player gets that is no content. Returns what was printed.
async fn check_played(home: &Path, url: &str, through: &[&str]) -> String {
    let mut all = String::new();
    for json in [&[][..], &["--json"]] {
        let played = home.join("played");
        let _ = std::fs::remove_file(&played);
        let player = [
            "--",
            "curl",
            "-sS",
            "-m",
            PLAYED_S,
            "--fail-with-body",
            "-o",
            "played",
        ];
        let play = ["play", url, "--alone", "--store", "store"];
        let play = [&play[..], through, json, &player].concat();
        let printed = printed_by(home, None, &play).await;
        assert_harmless(&play.join(" "), &printed);
        all += &String::from_utf8_lossy(&printed);
        let words = std::fs::read(&played).unwrap_or_default();
        // A manifest is for a player, and no words of an error.
        let is_content = [&b"abc"[..], b"#EXTM3U", b"<?xml"]
            .iter()
            .any(|begin| words.starts_with(begin));
        if !is_content {
            assert_harmless(&format!("played: {url}"), &words);
        }
    }
    all
}

#[tokio::test]
async fn words_of_origins_and_manifests_reach_no_terminal_or_player_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    if std::process::Command::new("curl")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("skipped: curl is not installed");
        return;
    }
    let proxy = ProxyProcess::start(home, "127.0.0.1:0", &[]).await;
    let origin = hostile_origin().await;
    let prox = ["--prox", &*proxy.address];
    for through in [
        &["--no-prox"][..],
        &prox,
        &[&prox[..], &["--sealed"]].concat(),
    ] {
        for path in [
            "/a.mp4",
            "/named.mp4",
            "/moved.mp4",
            "/list.m3u8",
            "/film.mpd",
        ] {
            check_played(home, &origin.url(path), through).await;
        }
        let named = origin.url(&format!("/{HOSTILE_PATH}.mp4"));
        check_played(home, &named, through).await;
    }
}

#[tokio::test]
async fn words_of_a_proxy_reach_no_terminal_or_player_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = folder.path();
    if std::process::Command::new("curl")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("skipped: curl is not installed");
        return;
    }
    let denied = "Proxy-Status: red; error=http_request_denied; details=\"\u{202e}\"\r\n";
    let (body, length) = (hostile_bytes(), hostile_bytes().len());
    let head = format!("HTTP/1.1 403 Forbidden\r\nContent-Length: {length}\r\n\r\n");
    let url = "http://192.0.2.1/a.mp4";
    for (key, refusal) in [
        (16, refusal("403 Forbidden", denied)),
        (17, [head.as_bytes(), &body].concat()),
    ] {
        let proxy = answering_server(key, refusal);
        let prox = ["--prox", &*proxy];
        for through in [&prox[..], &[&prox[..], &["--sealed"]].concat()] {
            check_played(home, url, through).await;
        }
    }
    let server = ClosingServer::start();
    let said = check_played(home, url, &["--prox", &*server.address]).await;
    assert!(said.contains("closed the session"), "{said}");
    // A link is printed before its URL is asked for, and said to wait for the proxy.
    let shown = Arc::new(format!("{url}?{HOSTILE_PATH}"));
    for json in [&[][..], &["--json"]] {
        let arguments = ["url", &**shown, "--alone", "--store", "store", "--prox"];
        let arguments = [&arguments[..], &[&*server.address], json].concat();
        let printed = printed_by(home, None, &arguments).await;
        assert_harmless("url", &printed);
    }
}
