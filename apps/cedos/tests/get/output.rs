//! What is printed, and where it cannot be written.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::Stdio;

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::program::{
    AgentProcess, ProxyProcess, at_home, built, cedos, ended, pid_of, run,
};
use cedos_lab_rig::wait::within;
use clap::CommandFactory;
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};

/// The command lines of verbs that print and end by themselves, each of which can be repeated. `URL`, `PROX` and
/// `STATE` are the server, the proxy, and the proxy's state directory.
const PRINTING: [&str; 46] = [
    "--help",
    "--version",
    "get --help",
    "key show",
    "key show --json",
    "key gen",
    "key gen --json",
    "net",
    "net ls --json",
    "net contacts",
    "ls --json",
    "budget",
    "budget show --json",
    "config",
    "config show transfer.within",
    "config show --json",
    "config set transfer.within 2h --json",
    "config unset transfer.within --json",
    "config check",
    "config check --json",
    "doctor --no-prox --json",
    "completions bash",
    "vpn status",
    "vpn status --json",
    "get URL/a -o plan --dry-run",
    "get URL/a -o plan --dry-run --json",
    "get URL/a -o fetched --json",
    "put file URL/a --prox PROX --json",
    "sync URL/list/ mirror --json",
    "prox invite --state-dir STATE",
    "prox invite --list --state-dir STATE",
    "prox client list --json --state-dir STATE",
    "prox status --state-dir STATE",
    "prox status --json --state-dir STATE",
    "page",
    "page --json",
    "page --close --json",
    "cast list --json",
    "cast queue --json",
    "cast next --json",
    "cast log --json",
    "cast apps",
    "cast apps --json",
    "cast opml export",
    "browser install",
    "browser remove --json",
];

/// The command lines of verbs that print a line, and then go on until they are stopped.
const LASTING: [&str; 5] = [
    "url URL/a --no-prox --alone",
    "net watch",
    "serve . --listen 127.0.0.1:0 --allow-any-client",
    "send file --prox PROX",
    "prox --key other.key --listen 127.0.0.1:0 --state-dir other",
];

/// The command lines of verbs about transfer 1, which the agent has: the exit codes where the disk is full, and where
/// nobody reads. A verb that fails anyway keeps its code: 75 says that the transfer has not ended.
const TRANSFERS: [(&str, i32, i32); 19] = [
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
    ("wait 1 --json", 3, 3),
    ("ls --clear", 1, 0),
];

/// The verbs that are not tried, by the beginnings of their command lines, and why.
const NOT_TRIED: [(&str, &str); 25] = [
    ("agent", "prints to standard error alone"),
    ("bridge", "prints to standard error alone"),
    ("play", "what its program prints is the program's"),
    ("run", "what its program prints is the program's"),
    ("vpn up", "prints to standard error alone"),
    ("vpn down", "prints nothing"),
    ("join", "an invitation works once"),
    ("receive", "a code works once"),
    ("config edit", "runs an editor"),
    ("prox client show", "prints as `prox client list` does"),
    ("prox client rename", "needs a client that has enrolled"),
    ("prox client limit", "needs a client that has enrolled"),
    ("prox client remove", "needs a client that has enrolled"),
    ("prox feeds", "needs a feed"),
    ("prox reload", "needs a proxy with settings"),
    ("prox drain", "ends the proxy"),
    ("cast add", "needs a feed, as the next verbs do"),
    ("cast search", "needs a directory of podcasts"),
    ("cast index", "needs a directory of podcasts"),
    ("cast backup", "replaces no file, so it cannot be repeated"),
    ("cast export", "writes to a file"),
    ("cast continue", "needs an episode that was begun"),
    ("cast opml import", "needs a feed"),
    ("cast sync", "needs a server of the gpodder API"),
    ("cast", "about channels: needs a feed"),
];

/// The product's command line, as `cedos` has it beside the verbs of the laboratory.
#[derive(clap::Parser)]
struct Product {
    #[command(subcommand)]
    _verb: cedos::ProductVerb,
}

/// The command lines of all verbs that have no verbs below them, without arguments.
fn all_verbs() -> Vec<String> {
    fn collect(command: &clap::Command, before: &str, found: &mut Vec<String>) {
        let verbs = command.get_subcommands();
        for verb in verbs.filter(|verb| !verb.is_hide_set() && verb.get_name() != "help") {
            let line = format!("{before}{}", verb.get_name());
            if !verb.is_subcommand_required_set() {
                found.push(line.clone());
            }
            collect(verb, &format!("{line} "), found);
        }
    }
    let mut found = Vec::new();
    collect(&Product::command(), "", &mut found);
    found
}

fn begins(line: &str, verb: &str) -> bool {
    line.strip_prefix(verb)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
}

#[test]
fn every_verb_of_the_product_is_tried_where_its_output_cannot_be_written() {
    let transfers = TRANSFERS.iter().map(|(line, ..)| *line);
    let tried: Vec<&str> = PRINTING
        .into_iter()
        .chain(LASTING)
        .chain(transfers)
        .collect();
    let verbs = all_verbs();
    assert!(verbs.len() > 50, "{verbs:?}");
    for verb in &verbs {
        let is_tried = tried.iter().any(|line| begins(line, verb));
        let why_not = NOT_TRIED.iter().any(|(start, _)| begins(verb, start));
        assert!(
            is_tried || why_not,
            "`cedos {verb}` is not tried with an output that cannot be written"
        );
    }
    for (start, why) in NOT_TRIED {
        assert!(
            verbs.iter().any(|verb| begins(verb, start)),
            "there is no {start}: {why}"
        );
        // Of a verb with verbs below it some may be tried.
        let is_tried = tried.iter().any(|line| begins(line, start));
        assert!(
            !is_tried || start.starts_with("cast"),
            "{start} is tried: {why}"
        );
    }
}

/// What the verbs need: a server, a proxy, an agent, and files.
struct Scene {
    folder: tempfile::TempDir,
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
    agent: AgentProcess,
}

impl Scene {
    async fn new() -> Scene {
        let folder = tempfile::tempdir().expect("a folder");
        let origin = ScriptedOrigin::play(|asked, mut stream| async move {
            let answer = match (&*asked.method, &*asked.path) {
                ("PUT", _) => {
                    asked.body(&mut stream).await;
                    reply("201 Created", &[("Content-Length", "0")], b"")
                }
                (_, "/list/") => reply("200 OK", &[], b"<html><a href=\"a\">a</a></html>"),
                _ => proper(&asked, b"abc", "\"v1\""),
            };
            // A client that went away is its own affair.
            let _ = stream.write_all(&answer).await;
        });
        std::fs::write(folder.path().join("file"), b"abc").expect("written");
        let state = ["--state-dir", "state"];
        Scene {
            origin: origin.await,
            proxy: ProxyProcess::start(folder.path(), "127.0.0.1:0", &state).await,
            agent: AgentProcess::start(folder.path()).await,
            folder,
        }
    }

    fn words(&self, line: &str) -> Vec<String> {
        let url = self.origin.url("");
        let words = line.split(' ').map(|word| match word {
            "PROX" => self.proxy.address.clone(),
            "STATE" => "state".to_owned(),
            word => word.replace("URL", &url),
        });
        words.collect()
    }

    /// Starts a command. Verbs that are not about what the agent has are as without one.
    fn start(&self, line: &str, out: Stdio) -> Child {
        let words = self.words(line);
        let arguments: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut command = cedos(self.folder.path(), &arguments);
        if ["ls", "budget", "page", "cast"].contains(&arguments[0]) {
            command.env("CEDOS_AGENT", &self.agent.socket);
        }
        command.stdout(out).spawn().expect("start")
    }

    /// Prepares the next run of a verb that writes files.
    fn tidy(&self) {
        let _ = std::fs::remove_file(self.folder.path().join("fetched"));
        let _ = std::fs::remove_dir_all(self.folder.path().join("mirror"));
    }
}

fn full_disk() -> Stdio {
    let full = OpenOptions::new().write(true).open("/dev/full");
    full.expect("/dev/full").into()
}

/// A pipe that nobody reads.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    writer.into()
}

const FULL: &str = "cannot write to standard output: No space left";

#[tokio::test]
async fn a_full_disk_is_an_error_and_a_closed_pipe_is_none_for_every_verb_that_prints() {
    let scene = Scene::new().await;
    for line in PRINTING {
        // It says that there is none by its exit code.
        let usual = i32::from(line.starts_with("vpn status"));
        // What there is to list is known to the next test.
        if line != "ls --json" {
            let output = ended(scene.start(line, full_disk())).await;
            assert_eq!(output.code, 1, "{line}: {output:?}");
            assert_eq!(output.errors.matches(FULL).count(), 1, "{line}: {output:?}");
            assert!(!output.errors.contains("panicked"), "{line}: {output:?}");
        }
        scene.tidy();
        let output = ended(scene.start(line, closed_pipe())).await;
        assert_eq!(output.code, usual, "{line}: {output:?}");
        assert!(!output.errors.contains("panicked"), "{line}: {output:?}");
        assert!(!output.errors.contains("pipe"), "{line}: {output:?}");
        if line.contains("fetched") {
            let fetched = std::fs::read(scene.folder.path().join("fetched"));
            assert_eq!(fetched.expect("the file"), b"abc");
        }
        scene.tidy();
    }
}

#[tokio::test]
async fn a_verb_whose_only_line_is_lost_ends_and_one_whose_reader_has_read_it_goes_on() {
    let scene = Scene::new().await;
    run(scene.folder.path(), &["key", "gen", "-o", "other.key"]).await;
    for line in LASTING {
        let output = ended(scene.start(line, full_disk())).await;
        assert_eq!(output.code, 1, "{line}: {output:?}");
        assert_eq!(output.errors.matches(FULL).count(), 1, "{line}: {output:?}");
        assert!(!output.errors.contains("panicked"), "{line}: {output:?}");

        let mut child = scene.start(line, Stdio::piped());
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        within(lines.next_line())
            .await
            .expect("text")
            .expect("a line");
        drop(lines);
        assert!(child.try_wait().expect("a child").is_none(), "{line} ended");
        kill(pid_of(&child), Signal::SIGTERM).expect("send");
        let output = within(child.wait_with_output()).await.expect("its output");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!errors.contains("panicked"), "{line}: {errors}");
        assert!(!errors.contains("pipe"), "{line}: {errors}");
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
    for (line, on_full_disk, on_closed_pipe) in TRANSFERS {
        let output = at_agent(line, full_disk()).await;
        assert_eq!(output.code, on_full_disk, "{line}: {output:?}");
        assert!(output.errors.contains(FULL), "{line}: {output:?}");
        let output = at_agent(line, closed_pipe()).await;
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
