//! What is printed: where it cannot be written, and where it holds another host's words.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Stdio;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{
    AgentProcess, CedosRun, ProxyProcess, at_home, built, cedos, ended, run,
};
use tokio::io::AsyncReadExt;
use tokio::process::Command;

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

#[tokio::test]
async fn verbs_about_transfers_keep_their_exit_codes_when_nobody_reads_what_they_print() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin =
        ScriptedOrigin::start(|_| OriginReply(b"HTTP/1.1 200 OK\r\n".to_vec(), ReplyEnd::Silence));
    let url = origin.await.url("/a");
    let agent = AgentProcess::start(folder.path()).await;
    let at_agent = async |line: &str, out: Stdio| {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = cedos(folder.path(), &words);
        command.env("CEDOS_AGENT", &agent.socket);
        ended(command.stdout(out).spawn().expect("start")).await
    };
    let get = format!("get --detach -o out {url}");
    assert_eq!(at_agent(&get, Stdio::piped()).await.code, 0);
    // A verb that fails anyway keeps its code: 75 says that the transfer has not ended.
    for (line, on_full_disk, on_closed_pipe) in [
        ("pause 1", 1, 0),
        ("ls", 1, 0),
        ("ls --json", 1, 0),
        ("status 1", 75, 75),
        ("status 1 --json", 75, 75),
        ("why 1", 1, 0),
        ("why 1 --json", 1, 0),
        ("edit 1 --priority 3", 1, 0),
        ("edit 1 --priority 2 --json", 1, 0),
        ("resume 1", 1, 0),
        ("net ls", 1, 0),
        ("budget set 2G", 1, 0),
        ("budget show --json", 1, 0),
        ("net set wifi:Train metered --json", 1, 0),
        ("cancel 1", 1, 1),
        ("retry 1", 1, 1),
        ("cancel 1 --json", 1, 1),
        ("ls --clear", 1, 0),
    ] {
        let full = OpenOptions::new().write(true).open("/dev/full");
        let output = at_agent(line, full.expect("/dev/full").into()).await;
        assert_eq!(output.code, on_full_disk, "{line}: {output:?}");
        let said = "cannot write to standard output: No space left";
        assert!(output.errors.contains(said), "{line}: {output:?}");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = at_agent(line, writer.into()).await;
        assert_eq!(output.code, on_closed_pipe, "{line}: {output:?}");
        assert!(!output.errors.contains("panicked"), "{line}: {output:?}");
        assert!(!output.errors.contains("pipe"), "{line}: {output:?}");
    }
}

#[tokio::test]
async fn a_download_to_a_program_that_stops_reading_ends_with_a_sentence() {
    let folder = tempfile::tempdir().expect("a folder");
    let body = object(3_000_000, 1);
    let origin = ScriptedOrigin::start(move |asked| {
        OriginReply(proper(asked, &body, "\"v1\""), ReplyEnd::Close)
    });
    let url = origin.await.url("/a");
    for more in [&[][..], &["--json"]] {
        let arguments = [&["get", "-o", "-", &url], more].concat();
        let mut child = cedos(folder.path(), &arguments).spawn().expect("start");
        let mut output = child.stdout.take().expect("its output");
        let mut beginning = [0; 1_000];
        output
            .read_exact(&mut beginning)
            .await
            .expect("a beginning");
        drop(output);
        let ended = ended(child).await;
        ended.ends_with(1, "ended before the download was complete");
        assert!(!ended.errors.contains("os error"), "{}", ended.errors);
        assert!(!ended.errors.contains("panicked"), "{}", ended.errors);
    }
    let full = OpenOptions::new().write(true).open("/dev/full");
    let mut command = cedos(folder.path(), &["get", "-o", "-", &url]);
    let child = command
        .stdout(full.expect("/dev/full"))
        .spawn()
        .expect("start");
    ended(child)
        .await
        .ends_with(1, "cannot write to standard output: No space left");
}

/// What a command prints on a terminal of 30 columns, by script(1), which every Debian has.
async fn on_a_terminal(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let line = format!(
        "stty cols 30 rows 24; exec {} {}",
        built("cedos").display(),
        arguments.join(" ")
    );
    let mut command = Command::new("script");
    at_home(command.args(["-qefc", &line, "/dev/null"]), folder);
    command
        .env("TERM", "xterm")
        .env("COLORTERM", "truecolor")
        .envs(variables.iter().copied());
    let output = ended(command.spawn().expect("start script")).await;
    String::from_utf8_lossy(&output.output).into_owned()
}

/// The texts between line breaks, returns and escape sequences.
fn texts(printed: &str) -> Vec<String> {
    let mut texts = vec![String::new()];
    let mut rest = printed.chars();
    while let Some(c) = rest.next() {
        match c {
            '\u{1b}' => drop(rest.find(|c| c.is_ascii_alphabetic())),
            '\r' | '\n' => texts.push(String::new()),
            c => texts.last_mut().expect("one").push(c),
        }
    }
    texts
}

#[tokio::test]
async fn bars_fit_into_a_narrow_terminal_and_nothing_moves_where_that_cannot_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(60_000, 1), "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let names = ["/a-name-that-is-longer-than-the-terminal.bin", "/b.bin"];
    let [a, b] = names.map(|name| origin.url(name));
    let get = ["get", &a, &b, "--limit-rate", "60k"];
    let wide = on_a_terminal(folder.path(), &get, &[]).await;
    assert!(wide.contains('\u{1b}'), "a bar moves the cursor: {wide:?}");
    // Lines that are drawn together are filled up with spaces.
    let drawn: Vec<String> = texts(&wide)
        .iter()
        .flat_map(|text| text.split("  "))
        .map(|text| text.trim().to_owned())
        .filter(|text| text.contains(" %") || text.contains(" of 2 done"))
        .collect();
    assert!(drawn.iter().any(|text| text.contains('%')), "{wide:?}");
    for text in drawn {
        let columns = text.chars().count();
        assert!(columns < 30, "{columns} columns: {text:?}");
    }
    assert!(wide.contains("2 of 2 downloaded"), "{wide:?}");
    for name in names {
        std::fs::remove_file(folder.path().join(&name[1..])).expect("downloaded");
    }
    let dumb = on_a_terminal(folder.path(), &get, &[("TERM", "dumb")]).await;
    assert!(
        !dumb.contains('\u{1b}') && dumb.contains("2 of 2 downloaded"),
        "{dumb:?}"
    );
    // Colours are for mistakes alone, and for nobody who does not want them.
    let mistake = on_a_terminal(folder.path(), &["get", "--none"], &[]).await;
    assert!(mistake.contains("\u{1b}[31m"), "{mistake:?}");
    let plain = on_a_terminal(folder.path(), &["get", "--none"], &[("NO_COLOR", "1")]).await;
    assert!(!plain.contains('\u{1b}'), "{plain:?}");
    let piped = run(folder.path(), &get).await;
    assert!(!format!("{piped:?}").contains("\\u{1b}"), "{piped:?}");
}

#[tokio::test]
async fn what_is_said_before_a_bar_begins_has_a_line_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let origin = ScriptedOrigin::start(|asked| {
        OriginReply(proper(asked, &object(1_000, 1), "\"v1\""), ReplyEnd::Close)
    })
    .await;
    let url = origin.url("/a");
    // Whether a bar that is there already is drawn over is a race.
    for _ in 0..6 {
        let get = ["get", &url, "-o", "a", "--alone"];
        let printed = on_a_terminal(folder.path(), &get, &[]).await;
        let texts = texts(&printed);
        let deadline = texts.iter().find(|text| text.contains("Deadline:"));
        let deadline = deadline.unwrap_or_else(|| panic!("{printed:?}"));
        assert!(deadline.starts_with("Deadline:"), "{printed:?}");
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

#[tokio::test]
async fn a_device_is_written_to_and_never_replaced_by_a_file() {
    use std::os::unix::fs::{FileTypeExt, symlink};
    let folder = tempfile::tempdir().expect("a folder");
    let body = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc";
    let origin = ScriptedOrigin::fixed(body).await;
    let url = origin.url("/a");
    // A link, so that a failure breaks no device of this machine.
    let device = folder.path().join("null");
    symlink("/dev/null", &device).expect("a link");
    let name = device.to_str().expect("a name");
    let output = run(folder.path(), &["get", &url, "-o", name]).await;
    assert_eq!(output.code, 0, "{output:?}");
    let link = device.symlink_metadata().expect("the link");
    assert!(link.file_type().is_symlink(), "it was replaced");

    let pipe = folder.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    let name = pipe.to_str().expect("a name");
    let output = run(folder.path(), &["get", &url, "-o", name]).await;
    assert_eq!(output.code, 1, "{output:?}");
    assert!(output.errors.contains("must not replace"), "{output:?}");
    let found = pipe.metadata().expect("the pipe");
    assert!(found.file_type().is_fifo(), "it was replaced");

    let output = run(folder.path(), &["get", &url, "-o", "/dev/stdout"]).await;
    assert_eq!(
        (output.code, &*output.output),
        (0, &b"abc"[..]),
        "{output:?}"
    );
}
