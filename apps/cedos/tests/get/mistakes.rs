//! Everything that is wrong with a command line, a machine or a server is told in one sentence that
//! says what to do, with the exit code of its kind, before anything is fetched where that is
//! possible, and never by a panic.

use std::path::Path;
use std::process::Stdio;

use crate::download::Rig;
use cedos_lab_rig::origin::{
    OriginReply, ReplyEnd, ScriptedOrigin, TestAuthority, object, proper, reply,
};
use cedos_lab_rig::program::{cedos, run};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

/// A well-formed proxy address at which nobody listens.
fn nobody() -> String {
    format!("d2tp://127.0.0.1:9/{}", "A".repeat(43))
}

async fn assert_told(directory: &Path, table: &[(&[&str], i32, &str)]) {
    for (arguments, code, words) in table {
        let run = run(directory, arguments).await;
        run.ends_with(*code, words);
        assert!(
            !run.errors.contains("panicked"),
            "{arguments:?}: {}",
            run.errors
        );
    }
}

#[tokio::test]
async fn mistakes_on_the_command_line_are_told_with_what_to_write_instead() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    std::fs::write(home.join("text"), "hello").expect("write");
    let url = "http://127.0.0.1:9/a";
    let key = "A".repeat(43);
    let no_port = format!("d2tp://127.0.0.1/{key}");
    let nobody = nobody();
    let table: &[(&[&str], i32, &str)] = &[
        (&["get"], 2, "<URL>"),
        (
            &["get", "host.example/a"],
            2,
            "do you mean https://host.example/a?",
        ),
        (&["get", "ftp://host/a"], 2, "ftp: is not supported"),
        (&["get", "http://"], 2, "empty host"),
        (&["get", "http://host:99999/"], 2, "invalid port number"),
        (&["get", url, "--by", "25:99"], 2, "write 07:30"),
        (&["get", url, "--by", "2020-01-01 07:30"], 2, "has passed"),
        (&["get", url, "--by", "friday"], 2, "write friday 07:30"),
        (
            &["get", url, "--by", "2099-01-31 07:30", "--now"],
            2,
            "cannot be used with",
        ),
        (
            &["get", url, "--by", "2020-01-01T00:00:00Z"],
            2,
            "has passed",
        ),
        (&["get", url, "--within", "0s"], 2, "write 2h, 45m"),
        (&["get", url, "--within", "-5m"], 2, "write 2h, 45m"),
        (
            &["get", url, "--by", "+1h", "--now"],
            2,
            "cannot be used with",
        ),
        (&["get", url, "--policy", "cheap"], 2, "free-first"),
        (&["get", url, "--if-late", "never"], 2, "wait"),
        (&["get", url, "--max-cell", "-5"], 2, "write 50M"),
        (
            &["get", url, "--integrity", "sha256:12"],
            2,
            "64 hexadecimal",
        ),
        (&["get", url, "--link", "wwan0"], 2, "wwan0=metered"),
        (&["get", url, "-H", "Accept"], 2, "Name: value"),
        (&["get", url, "-H", "Range: bytes=1-"], 2, "leave it out"),
        (&["get", url, "--offline"], 2, "--dry-run"),
        (&["get", url, "--sealed"], 2, "give --prox"),
        (
            &["get", url, "--prox", "host:4433"],
            2,
            "d2tp://host:port/KEY",
        ),
        (
            &["get", url, "--prox", "http://host:3128"],
            2,
            "d2tp://host:port/KEY",
        ),
        (
            &["get", url, "--prox", "d2tp://127.0.0.1:9"],
            2,
            "the key is missing",
        ),
        (&["get", url, "--prox", &no_port], 2, "the port is missing"),
        (
            &["get", url, "--prox", "d2tp://127.0.0.1:9/x"],
            2,
            "43 characters",
        ),
        (
            &["get", url, "--prox", &nobody, "--ca", "x"],
            2,
            "add --sealed",
        ),
        (
            &["get", url, "--prox", &nobody, "--key", "none"],
            1,
            "cedos key gen",
        ),
        (&["get", url, "--prox", &nobody, "--key", "text"], 1, "text"),
        (
            &["get", url, "--ca", "none"],
            2,
            "cannot be read: No such file",
        ),
        (&["get", url, "--ca", "text"], 2, "PEM is expected"),
        (
            &["get", url, "-o", "none/out"],
            1,
            "`mkdir -p none` makes it",
        ),
        (
            &["get", url, "-o", "none/"],
            1,
            "the directory none/ does not exist",
        ),
        (
            &["get", url, "-o", "text/out"],
            1,
            "text is a file, not a directory",
        ),
        (
            &["get", url, "--dry-run", "--offline", "-o", "none/"],
            0,
            "Refused   as it is, because the directory none/ does not exist",
        ),
        (
            &["get", "http://127.0.0.1:9/text", "--dry-run", "--offline"],
            0,
            "because text exists; -o text replaces it",
        ),
        (
            &["get", url, "--link", "wlan9=free"],
            2,
            "no network device `wlan9`",
        ),
        (
            &["get", url, "--link", "lo=metered", "--policy", "free-only"],
            2,
            "always free",
        ),
        (
            &["get", "http://127.0.0.1:9/text"],
            2,
            "text exists; -o text replaces it",
        ),
        (&["get", url, "--detach", "-o", "-"], 2, "name a file"),
        (&["get", url, "--forget"], 0, "nothing to remove"),
        (&["status", "x"], 2, "cedos ls"),
        (&["cancel", "3"], 1, "cedos ls"),
    ];
    assert_told(home, table).await;
    let left = std::fs::read_dir(home).expect("list");
    let parts = left.filter(|e| {
        e.as_ref()
            .is_ok_and(|e| e.path().display().to_string().contains("part"))
    });
    assert_eq!(parts.count(), 0, "nothing is left of what never began");
}

#[tokio::test]
async fn servers_that_are_not_what_was_meant_are_told_with_what_to_try() {
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    let plain = ScriptedOrigin::start(|asked| match asked.path.as_str() {
        "/secret" => OriginReply(reply("401 Unauthorized", &[], b""), ReplyEnd::Close),
        "/malformed" => OriginReply(
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n".to_vec(),
            ReplyEnd::Close,
        ),
        _ => OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close),
    })
    .await;
    let tls = ScriptedOrigin::start_tls(&TestAuthority::new(), |_| {
        OriginReply(Vec::new(), ReplyEnd::Close)
    })
    .await;
    let no_tls = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let mistaken = format!("https://{}/a", no_tls.local_addr().expect("its address"));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = no_tls.accept().await {
            // What a web server says to a TLS hello.
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
        }
    });
    let (missing, secret, untrusted) = (plain.url("/a"), plain.url("/secret"), tls.url("/a"));
    let table: &[(&[&str], i32, &str)] = &[
        (&["get", &missing], 1, "404 Not Found for /a"),
        (&["get", &secret], 1, "give --user NAME"),
        (&["get", &mistaken], 1, "Do you mean http://"),
        (&["get", &untrusted], 1, "give --ca FILE"),
        (
            &["get", "http://127.0.0.1:1/a", "--tries", "1"],
            1,
            "no server runs there",
        ),
        (
            &["get", "http://127.0.0.1:1/a", "--now", "--prox", &nobody()],
            1,
            "Is it running",
        ),
        // Reserved never to exist (RFC 2606); with or without a network there is no answer.
        (
            &["get", "http://nobody.invalid/a", "--tries", "1", "--now"],
            0,
            "",
        ),
    ];
    run(home, &["get", &plain.url("/malformed")])
        .await
        .ends_with(1, "did not answer in valid HTTP");
    let malformed = |path: &String| path == "/malformed";
    let asked = plain.requests().into_iter().map(|asked| asked.path);
    assert_eq!(
        asked.filter(malformed).count(),
        1,
        "it would say the same again"
    );
    let (last, sure) = table.split_last().expect("rows");
    assert_told(home, sure).await;
    let run = run(home, last.0).await;
    assert!(matches!(run.code, 1 | 14), "{}", run.errors);
}

#[tokio::test]
async fn a_proxy_that_refuses_says_why_and_whom_to_ask() {
    let rig = Rig::new("sealed", |asked| {
        OriginReply(proper(asked, &object(10, 1), "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let proxy = &rig.proxy.as_ref().expect("a proxy").address;
    let fetch = ["get", "--json", "-o", "out", "--prox", proxy];
    let home = rig.home();
    for (more, words) in [
        (&["http://169.254.169.254/x"][..], "metadata"),
        (&["http://169.254.169.254/x", "--sealed"], "metadata"),
        (&["http://127.0.0.1:25/x", "--sealed"], "25"),
        (&["http://127.0.0.1:25/x"], "25"),
        (
            &["http://127.0.0.1:1/x", "--tries", "1", "--sealed"],
            "127.0.0.1",
        ),
    ] {
        let run = run(home, &[&fetch[..], more].concat()).await;
        assert_eq!(run.code, 1, "{more:?}: {}", run.errors);
        let text = run.last()["text"].as_str().expect("a text");
        assert!(
            text.contains(words) && text.contains("proxy"),
            "{more:?}: {text}"
        );
    }
    // The device's key is not among those the proxy admits.
    let other = tempfile::tempdir().expect("a directory");
    let url = rig.origin.url("/a");
    let refused = run(other.path(), &[&fetch[..], &[&url]].concat()).await;
    refused.ends_with(1, "--allow-client");
}

#[tokio::test]
async fn a_directory_takes_the_file_under_its_name_and_two_do_not_write_one_file() {
    let origin = ScriptedOrigin::start(|asked| match asked.path.as_str() {
        "/slow" => OriginReply(
            reply("200 OK", &[("Content-Length", "100")], b"half"),
            ReplyEnd::Silence,
        ),
        _ => OriginReply(proper(asked, b"ok", "\"v1\""), ReplyEnd::Close),
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    let home = directory.path();
    std::fs::create_dir(home.join("music")).expect("make");
    let show = origin.url("/show.mp3");
    run(home, &["get", "-o", "music", &show])
        .await
        .ends_with(0, "music/show.mp3");
    assert_eq!(
        std::fs::read(home.join("music/show.mp3")).expect("it"),
        b"ok"
    );
    run(home, &["get", "-o", "music", &show])
        .await
        .ends_with(2, "music/show.mp3 exists");
    run(home, &["get", "-o", "music/show.mp3", &show])
        .await
        .ends_with(0, "show.mp3");

    let slow = origin.url("/slow");
    let mut first = cedos(home, &["get", "--json", "-o", "out", &slow])
        .spawn()
        .expect("start");
    let mut lines = BufReader::new(first.stdout.take().expect("output")).lines();
    lines
        .next_line()
        .await
        .expect("readable")
        .expect("it has begun");
    let second = run(home, &["get", "-o", "out", &slow]).await;
    second.ends_with(1, "another cedos get is writing it");
    first.kill().await.expect("kill");
}

#[tokio::test]
async fn a_reader_that_goes_away_does_not_stop_a_download() {
    let origin = ScriptedOrigin::start(|asked| match asked.count {
        0 => OriginReply(Vec::new(), ReplyEnd::Close),
        _ => OriginReply(
            proper(asked, &object(100_000, 2), "\"v1\""),
            ReplyEnd::Close,
        ),
    })
    .await;
    let directory = tempfile::tempdir().expect("a directory");
    let url = origin.url("/a");
    for json in [&[][..], &["--json"]] {
        let arguments = [&["get", "-o", "out", &url], json].concat();
        let mut child = cedos(directory.path(), &arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        drop((child.stdout.take(), child.stderr.take()));
        let status = tokio::time::timeout(cedos_lab_rig::PATIENCE, child.wait()).await;
        assert_eq!(status.expect("in time").expect("it ends").code(), Some(0));
        assert!(std::fs::read(directory.path().join("out")).expect("it") == object(100_000, 2));
    }
}
