//! netrc and cookie files: who is sent what is in them, and what the agent keeps of it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper, reply};

use super::home::Home;

const BYTES: usize = 10_000;

/// An origin that sends the object, whoever asks.
async fn open_origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(BYTES, 1), "\"v1\""), ReplyEnd::Close)
    })
    .await
}

/// An origin that redirects to `/b` there.
async fn redirecting(to: String) -> ScriptedOrigin {
    ScriptedOrigin::start(move |_| {
        let headers = [("Location", to.as_str()), ("Content-Length", "0")];
        OriginReply(reply("302 Found", &headers, b""), ReplyEnd::Close)
    })
    .await
}

fn written(home: &Home, name: &str, text: &str) {
    let path = home.path().join(name);
    std::fs::write(&path, text).expect("write");
    let mode = std::fs::Permissions::from_mode(0o600);
    std::fs::set_permissions(&path, mode).expect("its mode");
}

/// Whether any file below `folder` contains `secret`.
fn is_kept_below(folder: &Path, secret: &str) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| match entry.path() {
        path if path.is_dir() => is_kept_below(&path, secret),
        path => std::fs::read(path)
            .is_ok_and(|bytes| bytes.windows(secret.len()).any(|w| w == secret.as_bytes())),
    })
}

#[tokio::test]
async fn a_netrc_password_goes_to_its_host_alone_and_the_agent_keeps_the_name_of_the_file() {
    let other = open_origin().await;
    let first = redirecting(other.url("/b")).await;
    let home = Home::new(&[]).await;
    written(&home, "netrc", "machine 127.0.0.1 login me password hush");
    let get = [
        "get",
        "--netrc-file",
        "netrc",
        "-o",
        "out",
        &first.url("/a"),
    ];
    let run = home
        .run(&[&get[..], &["--detach", "--json"]].concat())
        .await;
    assert_eq!(run.code, 0, "{}", run.errors);
    let id = run.last()["id"].to_string();
    assert_eq!(home.run(&["wait", &id]).await.code, 0);
    let sent = first.requests();
    // me:hush
    assert_eq!(sent[0].header("authorization"), Some("Basic bWU6aHVzaA=="));
    assert_eq!(other.requests()[0].header("authorization"), None);
    assert!(!is_kept_below(&home.path().join(".state"), "hush"));
    let shown = home.run(&["status", &id, "--json"]).await;
    assert!(!shown.last().to_string().contains("hush"));
    // The file is read when the transfer runs.
    written(&home, "netrc", "machine 127.0.0.1 login me password other");
    home.run(&get).await.ends_with(0, "sha256");
    let sent = first.requests();
    // me:other
    assert_eq!(sent[1].header("authorization"), Some("Basic bWU6b3RoZXI="));
}

#[tokio::test]
async fn a_cookie_goes_where_its_line_says_also_after_a_redirect() {
    let other = open_origin().await;
    let elsewhere = other.url("/b").replace("127.0.0.1", "localhost");
    let first = redirecting(elsewhere).await;
    let home = Home::new(&[]).await;
    written(
        &home,
        "cookies.txt",
        "# Netscape HTTP Cookie File\n\
         #HttpOnly_127.0.0.1\tFALSE\t/\tFALSE\t0\tsession\thush\n\
         127.0.0.1\tFALSE\t/private\tFALSE\t0\tp\tq\n\
         localhost\tFALSE\t/b\tFALSE\t0\tmine\ttoo\n",
    );
    let get = [
        "get",
        "--cookie",
        "cookies.txt",
        "-o",
        "out",
        "--detach",
        "--json",
    ];
    let url = first.url("/a");
    let run = home.run(&[&get[..], &[url.as_str()]].concat()).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    let id = run.last()["id"].to_string();
    assert_eq!(home.run(&["wait", &id]).await.code, 0);
    assert_eq!(first.requests()[0].header("cookie"), Some("session=hush"));
    assert_eq!(other.requests()[0].header("cookie"), Some("mine=too"));
    assert!(!is_kept_below(&home.path().join(".state"), "hush"));
}

#[tokio::test]
async fn a_bad_line_is_named_and_a_file_that_others_can_read_is_warned_about() {
    let origin = open_origin().await;
    let home = Home::new(&[]).await;
    let url = origin.url("/a");
    written(&home, "netrc", "machine h login me\npasswd hush\n");
    let run = home.run(&["get", "--netrc-file", "netrc", &url]).await;
    run.ends_with(2, "netrc line 2: expected machine NAME");
    assert!(!run.errors.contains("hush"), "{}", run.errors);
    written(&home, "cookies.txt", "\nh\tTRUE\thush\n");
    let run = home.run(&["get", "--cookie", "cookies.txt", &url]).await;
    run.ends_with(2, "cookies.txt line 2: a cookie is 7 fields");
    let run = home.run(&["url", "--cookie", "cookies.txt", &url]).await;
    run.ends_with(2, "cookies.txt line 2: a cookie is 7 fields");
    assert!(origin.requests().is_empty());
    written(&home, "netrc", "machine h login me password p\n");
    let run = home.run(&["get", "--netrc-file", "netrc", &url]).await;
    run.ends_with(2, "netrc has no entry for 127.0.0.1");
    written(&home, "netrc", "default login me password p\n");
    let mode = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(home.path().join("netrc"), mode).expect("its mode");
    let run = home
        .run(&["get", "--netrc-file", "netrc", "-o", "out", &url])
        .await;
    run.ends_with(0, "its mode is 0644; `chmod 600 netrc` changes that");
    // An upload would show them to the proxy.
    home.run(&["put", "out", &url, "--netrc-file", "netrc"])
        .await
        .ends_with(
            2,
            "the proxy that keeps the upload would see its credentials",
        );
}
