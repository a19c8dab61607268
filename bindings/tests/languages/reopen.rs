//! A connection that outlives its program, in each language: one process is killed, another reopens
//! the connection by its token and continues to read.

use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;

use d2tp_sockets::{
    ConnectSettings, ConnectionPersist, ConnectionToken, D2tpConnection, D2tpStream, asynchronous,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::time::timeout;

use crate::agent::{Agent, PATIENCE};
use crate::examples;
use crate::support::{CProgram, Server, told};

/// Builds an example, if that is possible.
type Build = fn(&Path) -> Option<examples::Example>;

/// `keep SERVER FILE` opens a connection and is killed; `again FILE` reopens and ends it.
async fn is_opened_again(build: Build) {
    let home = tempfile::tempdir().expect("a directory");
    let Some(example) = build(home.path()) else {
        return;
    };
    let agent = Agent::start(home.path()).await;
    let beside_agent = || {
        let mut command = tokio::process::Command::from(example());
        command.env("CEDOS_AGENT", &agent.socket);
        command
    };
    let echoes = CProgram::with_d2tp("echoes.c");
    let server = Server::start(&echoes);
    let token = home.path().join("token");

    let mut first = beside_agent()
        .args(["keep", &server.1])
        .arg(&token)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("it runs");
    let mut lines = BufReader::new(first.stdout.take().expect("piped")).lines();
    let kept = async {
        while let Some(line) = lines.next_line().await.expect("text") {
            if let Some(words) = line.strip_prefix("kept: ") {
                return words.to_owned();
            }
        }
        panic!("it ended before it was killed");
    };
    let words = timeout(PATIENCE, kept).await.expect("in time");
    let expected = "the process that has this connection is still there";
    assert!(words.ends_with(expected), "{words}");
    let pid = Pid::from_raw(first.id().expect("a process") as i32);
    kill(pid, Signal::SIGKILL).expect("send");
    first.wait().await.expect("it ends");

    let again = beside_agent().arg("again").arg(&token).output();
    let output = timeout(PATIENCE, again).await.expect("it ends");
    let said = told("example again", output.expect("it runs"));
    let expected = "no connection of this token is kept";
    let ended = said.lines().find_map(|line| line.strip_prefix("ended: "));
    assert!(
        ended.is_some_and(|words| words.contains(expected)),
        "{said}"
    );
}

#[tokio::test]
async fn python_reads_on_where_it_was_killed() {
    is_opened_again(examples::python).await;
}

#[tokio::test]
async fn go_reads_on_where_it_was_killed() {
    is_opened_again(examples::go).await;
}

#[tokio::test]
async fn node_goes_on_where_it_was_killed() {
    is_opened_again(examples::node).await;
}

#[tokio::test]
async fn java_reads_on_where_it_was_killed() {
    is_opened_again(examples::java).await;
}

#[tokio::test]
async fn kotlin_reads_on_where_it_was_killed() {
    is_opened_again(examples::kotlin).await;
}

#[tokio::test]
async fn rust_reads_on_where_it_was_killed() {
    is_opened_again(|home| {
        // This test program, with another of its tests.
        let (home, us) = (home.to_owned(), std::env::current_exe().expect("ours"));
        Some(Box::new(move || {
            let mut example = examples::command(&home, &us);
            example.args([
                "--exact",
                "reopen::the_program_in_rust",
                "--nocapture",
                "--ignored",
                "--",
            ]);
            example
        }))
    })
    .await;
}

/// `keep SERVER FILE` and `again FILE`, with streams that block and with tokio's.
#[test]
#[ignore = "a program that rust_reads_on_where_it_was_killed runs"]
fn the_program_in_rust() {
    let arguments: Vec<String> = std::env::args().skip_while(|word| word != "--").collect();
    match arguments.get(1).map(String::as_str) {
        Some("keep") => keep(&arguments[2], &arguments[3]),
        Some("again") => {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            runtime.block_on(again(&arguments[2]));
        }
        _ => {}
    }
}

fn not_reopened(token: &ConnectionToken) -> std::io::Error {
    D2tpStream::reopen(token).expect_err("it is not to be had")
}

fn keep(server: &str, file: &str) {
    let settings = ConnectSettings {
        persist: ConnectionPersist::Open,
        ..Default::default()
    };
    let mut stream = settings.connect(server).expect("a connection");
    stream.write_all(b"first second").expect("it is taken");
    let mut heard = [0; 6];
    stream.read_exact(&mut heard).expect("it comes");
    assert_eq!(&heard, b"first ");
    let token = stream.token().expect("it is asked").expect("it is kept");
    std::fs::write(file, token.as_bytes()).expect("a file");
    // The connection stays for the next process.
    drop(stream);
    let error = not_reopened(&token);
    assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy, "{error}");
    // On its own line, after the output of the test program.
    println!("\nkept: {error}");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

async fn again(file: &str) {
    let token = std::fs::read(file).expect("a file");
    let token = ConnectionToken::try_from(&token[..]).expect("a token");
    let mut stream = asynchronous::AsyncStream::reopen(&token)
        .await
        .expect("it stays");
    assert_eq!(stream.token().expect("it is asked"), Some(token.clone()));
    let mut heard = [0; 6];
    stream.read_exact(&mut heard).await.expect("it comes");
    assert_eq!(&heard, b"second");
    stream.write_all(b"third").await.expect("it is taken");
    stream.read_exact(&mut heard[..5]).await.expect("it comes");
    assert_eq!(&heard[..5], b"third");
    stream.flush_to_peer().await.expect("the peer has it");
    assert_eq!(stream.info().expect("it is asked").bytes_acked, 17);
    stream.end().await.expect("it is there");
    let error = not_reopened(&token);
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
    println!("\nended: {error}");
}
