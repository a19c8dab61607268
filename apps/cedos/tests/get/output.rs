//! What is printed: where it cannot be written, and where it holds another host's words.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Stdio;

use cedos_lab_rig::origin::ScriptedOrigin;
use cedos_lab_rig::program::{AgentProcess, CedosRun, ProxyProcess, cedos, ended, run};

/// The command lines of all verbs that print and end by themselves.
fn printing_verbs(url: &str) -> Vec<Vec<String>> {
    let words = |line: &str| line.split(' ').map(str::to_owned).collect();
    [
        "--help",
        "--version",
        "get --help",
        "key show",
        "key show --json",
        "key gen",
        "key gen --json",
        "net",
        "net --json",
        "ls --json",
        "budget",
        "budget --json",
        &format!("get {url} -o plan --dry-run"),
        &format!("get {url} -o plan --dry-run --json"),
        &format!("get {url} -o fetched --json"),
    ]
    .map(words)
    .to_vec()
}

async fn run_into(folder: &Path, words: &[String], agent: &AgentProcess, out: Stdio) -> CedosRun {
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut command = cedos(folder, &words);
    // The rest of the verbs are as without an agent.
    if words[0] == "ls" || words[0] == "budget" {
        command.env("CEDOS_AGENT", &agent.socket);
    }
    ended(command.stdout(out).spawn().expect("start")).await
}

#[tokio::test]
async fn a_full_disk_is_an_error_and_a_closed_pipe_is_none_for_every_verb_that_prints() {
    let folder = tempfile::tempdir().expect("a folder");
    let body = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
    let origin = ScriptedOrigin::fixed(body).await;
    let agent = AgentProcess::start(folder.path()).await;
    let _ = run(folder.path(), &["key", "show"]).await;
    for words in printing_verbs(&origin.url("/a")) {
        if words[0] != "ls" {
            let full = OpenOptions::new().write(true).open("/dev/full");
            let full = Stdio::from(full.expect("/dev/full"));
            let output = run_into(folder.path(), &words, &agent, full).await;
            assert_eq!(output.code, 1, "{words:?}: {output:?}");
            let said = "cannot write to standard output: No space left";
            assert!(output.errors.contains(said), "{words:?}: {output:?}");
            assert!(!output.errors.contains("panicked"), "{words:?}: {output:?}");
        }
        let _ = std::fs::remove_file(folder.path().join("fetched"));

        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = run_into(folder.path(), &words, &agent, writer.into()).await;
        assert_eq!(output.code, 0, "{words:?}: {output:?}");
        assert!(!output.errors.contains("panicked"), "{words:?}: {output:?}");
        assert!(!output.errors.contains("pipe"), "{words:?}: {output:?}");
        if words.iter().any(|word| word == "fetched") {
            let fetched = std::fs::read(folder.path().join("fetched"));
            assert_eq!(fetched.expect("the file"), b"abc");
        }
        let _ = std::fs::remove_file(folder.path().join("fetched"));
    }
}

/// Text that sets colours and the window's title, overwrites its line, hides a direction, and forges a line.
const HOSTILE: &str = "\u{1b}[31mred\u{1b}]0;title\u{7}\rover\u{9b}1m\u{202e}txt\nFinished on time";

#[track_caller]
fn assert_clean(output: &CedosRun) {
    let printed = [&output.output[..], output.errors.as_bytes()].concat();
    let printed = String::from_utf8(printed).expect("text");
    let raw = |c: char| c != '\n' && (c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c));
    assert!(!printed.contains(raw), "{printed:?}");
    let forged = printed.lines().any(|line| line.starts_with("Finished"));
    assert!(!forged, "{printed}");
    assert!(
        printed.contains("[31mred"),
        "the words are shown: {printed}"
    );
}

#[tokio::test]
async fn no_words_of_an_origin_or_proxy_reach_the_terminal_as_they_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let proxy = ProxyProcess::start(folder.path(), "127.0.0.1:0", &[]).await;
    std::fs::write(folder.path().join("file"), b"abc").expect("written");
    let length = HOSTILE.len();
    let refusal = |field: &str| {
        format!("HTTP/1.1 409 Conflict\r\n{field}Content-Length: {length}\r\n\r\n{HOSTILE}")
    };
    let origin = ScriptedOrigin::fixed(refusal("")).await;
    let url = origin.url("/a");
    for json in [&[][..], &["--json"]] {
        let put = ["put", "file", &url, "--prox", &proxy.address];
        let output = run(folder.path(), &[&put[..], json].concat()).await;
        assert_eq!(output.code, 1);
        assert_clean(&output);
    }
}
