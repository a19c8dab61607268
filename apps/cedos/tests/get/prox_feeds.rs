//! `cedos prox feeds`: a list of another program becomes links, which curl uses as a podcast app would, across a restart of
//! the proxy and until the client is removed.

use cedos_lab_rig::missing_tool::is_installed;
use std::path::Path;
use std::process::Stdio;

use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, reply};
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::program::{ProxyProcess, cedos, pid_of, run};
use cedos_lab_rig::wait::within;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;

/// Bytes of the episode: more than a copy keeps in memory.
const EPISODE_BYTES: usize = 5_000_000;

/// An origin with a feed, whose episode has other bytes at each request.
async fn advertising_origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked: &OriginRequest| {
        let body = match asked.path.as_str() {
            "/secret-feed?key=hush" => {
                b"<rss><channel><title>News</title><item><guid>1</guid>\
                <enclosure url=\"/secret-place/1.mp3\" type=\"audio/mpeg\"/></item></channel></rss>"
                    .to_vec()
            }
            _ => object(EPISODE_BYTES, asked.count as u32),
        };
        let length = body.len().to_string();
        let fields = [("content-length", length.as_str())];
        OriginReply(reply("200 OK", &fields, &body), ReplyEnd::Close)
    })
    .await
}

async fn proxy(folder: &Path, port: &HeldPort) -> ProxyProcess {
    let (at, url) = (
        port.address().to_string(),
        format!("http://{}", port.address()),
    );
    let arguments = [
        "prox",
        "--listen",
        "127.0.0.1:0",
        "--state-dir",
        "state",
        "--allow-net",
        "127.0.0.1",
        "--tcp-listen",
        &at,
        "--feeds-url",
        &url,
        "--access-log",
        "access",
        "--access-log-detail",
        "full",
    ];
    let log = std::fs::File::options()
        .create(true)
        .append(true)
        .open(folder.join("log"));
    let mut command = cedos(folder, &arguments);
    command.stderr(log.unwrap());
    let started = ProxyProcess::spawned(&mut command).await;
    started.unwrap_or_else(|| {
        let log = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
        panic!("the proxy does not start: {log}")
    })
}

/// Status and body of what curl gets.
async fn curl(arguments: &[&str]) -> (String, Vec<u8>) {
    let mut command = tokio::process::Command::new("curl");
    command.args([
        "--silent",
        "--max-time",
        "60",
        "--write-out",
        "%{stderr}%{http_code}",
    ]);
    let output = command.args(arguments).stdin(Stdio::null()).output();
    let output = within(output).await.expect("curl runs");
    (
        String::from_utf8_lossy(&output.stderr).into_owned(),
        output.stdout,
    )
}

/// The value of the first attribute of this name.
fn attribute(text: &str, name: &str) -> String {
    let value = text.split(&format!("{name}=\"")).nth(1).expect(text);
    value.split('"').next().expect("its end").to_owned()
}

#[tokio::test]
async fn a_list_becomes_links_that_survive_a_restart_and_end_with_their_client() {
    if !is_installed("curl") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let origin = advertising_origin().await;
    let list = format!(
        "<opml><body><outline text=\"News\" xmlUrl=\"{}\"/><outline xmlUrl=\"ftp://h/\"/></body></opml>",
        origin.url("/secret-feed?key=hush")
    );
    std::fs::write(folder.join("subscriptions.opml"), list).unwrap();
    let port = HeldPort::take();
    let mut first = proxy(folder, &port).await;
    let state = ["--state-dir", "state"];
    let feeds = |more: &[&'static str]| {
        let arguments = [
            &["prox", "feeds", "phone", "--opml", "subscriptions.opml"],
            &state[..],
            more,
        ];
        let arguments = arguments.concat();
        async move { run(folder, &arguments).await }
    };
    let made = feeds(&["-o", "phone.opml"]).await;
    assert_eq!(made.code, 0, "{}", made.errors);
    assert!(
        made.errors.contains("left out: ftp://h/"),
        "{}",
        made.errors
    );
    assert!(
        made.errors.contains("cedos prox client remove phone"),
        "{}",
        made.errors
    );
    let again = feeds(&["-o", "phone.opml"]).await;
    assert!(
        again.code == 1 && again.errors.contains("cannot write phone.opml"),
        "{}",
        again.errors
    );
    let list = std::fs::read_to_string(folder.join("phone.opml")).unwrap();
    let feed = attribute(&list, "xmlUrl");
    assert!(
        list.contains("text=\"News\"") && !list.contains("secret"),
        "{list}"
    );
    // What is read again is the same: apps know feeds by it.
    let printed = feeds(&["--json"]).await;
    let printed: Value = serde_json::from_slice(&printed.output).unwrap();
    assert_eq!(printed["feeds"][0]["link"], feed.as_str(), "{printed}");

    let (status, text) = curl(&[&feed]).await;
    let text = String::from_utf8(text).unwrap();
    assert_eq!(status, "200", "{text}");
    let episode = attribute(&text, "enclosure url");
    assert!(!text.contains("secret-"), "{text}");
    let (status, beginning) = curl(&["--range", "0-999999", &episode]).await;
    assert_eq!((status.as_str(), beginning.len()), ("206", 1_000_000));
    // The copy is whole, so that the next process has it.
    let (_, whole) = curl(&[&episode]).await;
    kill(pid_of(&first.child), Signal::SIGTERM).expect("send");
    within(first.child.wait()).await.unwrap();
    let _second = proxy(folder, &port).await;
    let (status, rest) = curl(&["--range", "1000000-", &episode]).await;
    assert_eq!(
        (status.as_str(), rest.len()),
        ("206", EPISODE_BYTES - 1_000_000)
    );
    assert!([beginning, rest].concat() == whole);
    let asked = origin.requests();
    let asked = asked
        .iter()
        .filter(|asked| asked.path == "/secret-place/1.mp3");
    assert_eq!(asked.count(), 1);

    let listed = run(
        folder,
        &["prox", "client", "list", "--json", "--state-dir", "state"],
    )
    .await;
    let listed: Value = serde_json::from_slice(&listed.output).unwrap();
    assert_eq!(
        (&listed["name"], &listed["by"]),
        (&"phone".into(), &"links".into()),
        "{listed}"
    );
    let held = listed["pinned_bytes"].as_u64().unwrap();
    assert!(held >= EPISODE_BYTES as u64, "{listed}");
    let removed = run(
        folder,
        &["prox", "client", "remove", "phone", "--state-dir", "state"],
    )
    .await;
    assert_eq!(removed.code, 0, "{}", removed.errors);
    for link in [&feed, &episode] {
        let (status, text) = curl(&[link]).await;
        assert_eq!(status, "403", "{}", String::from_utf8_lossy(&text));
    }
    let token = feed.split('/').nth(4).unwrap();
    assert!(token.len() > 40, "{token}");
    for name in ["log", "access", "state/clients.json"] {
        let text = std::fs::read_to_string(folder.join(name)).unwrap();
        assert!(!text.is_empty(), "{name}");
        for secret in [token, "secret-", "hush"] {
            assert!(!text.contains(secret), "{secret} is in {name}: {text}");
        }
    }
    let log = std::fs::read_to_string(folder.join("log")).unwrap();
    assert!(log.contains("a linked episode"), "{log}");
}

#[tokio::test]
async fn what_makes_no_sense_of_links_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let port = HeldPort::take();
    let at = port.address().to_string();
    for (arguments, words) in [
        (&["--feeds-url", "https://h"][..], "--tcp-listen"),
        (
            &["--tcp-listen", &at, "--feeds-url", "h"][..],
            "such as https://proxy.example",
        ),
    ] {
        let arguments = [&["prox", "--listen", "127.0.0.1:0"], arguments].concat();
        let refused = run(folder, &arguments).await;
        assert!(
            refused.code != 0 && refused.errors.contains(words),
            "{}",
            refused.errors
        );
    }
    let arguments = ["prox", "--listen", "127.0.0.1:0", "--state-dir", "state"];
    let _proxy = ProxyProcess::spawned(&mut cedos(folder, &arguments))
        .await
        .unwrap();
    std::fs::write(folder.join("page"), "<html></html>").unwrap();
    std::fs::write(folder.join("empty"), "<opml><body/></opml>").unwrap();
    std::fs::write(
        folder.join("bomb"),
        "<!DOCTYPE o [<!ENTITY a \"b\">]><opml>&a;</opml>",
    )
    .unwrap();
    for (arguments, words) in [
        (&["https://a.example/feed"][..], "--feeds-url"),
        (&["--opml", "page"][..], "no list of subscriptions"),
        (&["--opml", "empty"][..], "no feed in the list"),
        (&["--opml", "bomb"][..], "entities of its own"),
        (&["--opml", "nothing"][..], "cannot read the list nothing"),
    ] {
        let arguments = [
            &["prox", "feeds", "phone", "--state-dir", "state"],
            arguments,
        ]
        .concat();
        let refused = run(folder, &arguments).await;
        assert!(
            refused.code == 1 && refused.errors.contains(words),
            "{}",
            refused.errors
        );
    }
}
