//! `cedos send` and `cedos receive`: two devices and a proxy, as four processes on loopback.

use std::path::Path;

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, ended, pid_of, run};
use cedos_lab_rig::wait::until;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Child;
use tokio::time::timeout;

fn content() -> Vec<u8> {
    (0..2_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8)
        .collect()
}

/// A sender that waits, and its code.
struct Sender {
    child: Child,
    code: String,
}

impl Sender {
    async fn start(home: &Path, proxy: &ProxyProcess, more: &[&str]) -> Sender {
        let arguments = ["send", "report.pdf", "--json", "--prox", &proxy.address];
        let mut child = cedos(home, &[&arguments[..], more].concat())
            .spawn()
            .expect("start cedos");
        let mut lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.expect("in time");
        let Some(line) = line.expect("text") else {
            panic!("no code: {:?}", child.wait_with_output().await);
        };
        let event: Value = serde_json::from_str(&line).expect("JSON");
        let code = event["code"].as_str().expect("a code").to_owned();
        Sender { child, code }
    }

    /// Waits for the end; returns the exit code, standard error, and the last line of standard
    /// output.
    async fn end(mut self) -> (i32, String, String) {
        let status = timeout(PATIENCE, self.child.wait()).await;
        let code = status.expect("in time").expect("it ends").code();
        let (mut said, mut errors) = (String::new(), String::new());
        let output = self.child.stdout.as_mut().expect("piped");
        output.read_to_string(&mut said).await.expect("text");
        let output = self.child.stderr.as_mut().expect("piped");
        output.read_to_string(&mut errors).await.expect("text");
        let last = said.lines().last().unwrap_or_default().to_owned();
        (code.unwrap_or(-1), errors, last)
    }
}

async fn receive(home: &Path, proxy: &ProxyProcess, code: &str, more: &[&str]) -> CedosRun {
    let arguments = ["receive", code, "--json", "--prox", &proxy.address];
    run(home, &[&arguments[..], more].concat()).await
}

#[tokio::test]
async fn a_file_reaches_another_device_by_a_code_that_works_once() {
    let place = tempfile::tempdir().expect("a directory");
    let [here, there] = ["here", "there"].map(|name| place.path().join(name));
    std::fs::create_dir_all(&here).unwrap();
    std::fs::create_dir_all(&there).unwrap();
    std::fs::write(here.join("report.pdf"), content()).unwrap();
    let proxy = ProxyProcess::start(place.path(), "127.0.0.1:0", &["--allow-any-client"]).await;

    let sender = Sender::start(&here, &proxy, &[]).await;
    let code = sender.code.clone();
    let got = receive(&there, &proxy, &code, &["--within", "1h"]).await;
    assert_eq!(got.code, 0, "{got:?}");
    assert_eq!(got.last()["event"], "done", "{got:?}");
    assert_eq!(std::fs::read(there.join("report.pdf")).unwrap(), content());
    let (exit, errors, last) = sender.end().await;
    assert_eq!(exit, 0, "{errors}");
    assert!(last.contains(r#""event":"done""#), "{last}");

    let again = receive(&there, &proxy, &code, &["-o", "again"]).await;
    assert_eq!(again.code, 1);
    let text = again.last()["text"].as_str().unwrap_or_default();
    assert!(
        text.starts_with("nobody waits under this code: it was used already"),
        "{text}"
    );
}

#[tokio::test]
async fn a_wrong_word_ends_both_and_a_file_that_exists_is_not_replaced() {
    let place = tempfile::tempdir().expect("a directory");
    let [here, there] = ["here", "there"].map(|name| place.path().join(name));
    std::fs::create_dir_all(&here).unwrap();
    std::fs::create_dir_all(&there).unwrap();
    std::fs::write(here.join("report.pdf"), content()).unwrap();
    std::fs::write(there.join("report.pdf"), b"another").unwrap();
    let proxy = ProxyProcess::start(place.path(), "127.0.0.1:0", &["--allow-any-client"]).await;

    let sender = Sender::start(&here, &proxy, &[]).await;
    let (number, _) = sender.code.split_once('-').expect("a number");
    let guess = format!("{number}-acorn-acorn-acorn");
    let wrong = receive(&there, &proxy, &guess, &[]).await;
    assert_eq!(wrong.code, 1);
    let text = wrong.last()["text"].as_str().unwrap_or_default();
    assert!(
        text.starts_with("the words of the code do not match. The code is spent"),
        "{text}"
    );
    let (exit, errors, last) = sender.end().await;
    assert_eq!(exit, 1, "{errors}");
    assert!(
        last.contains("Somebody tried the code with other words"),
        "{last}"
    );

    let sender = Sender::start(&here, &proxy, &["--within", "30s"]).await;
    let code = sender.code.clone();
    let refused = receive(&there, &proxy, &code, &[]).await;
    assert_eq!(refused.code, 2, "{refused:?}");
    let text = refused.last()["text"].as_str().unwrap_or_default();
    assert!(text.contains("report.pdf exists"), "{text}");
    assert_eq!(std::fs::read(there.join("report.pdf")).unwrap(), b"another");
    // The code goes on to work for this device.
    assert!(text.contains("The code still works"), "{text}");
    // A mistake in the command is told before the code is used.
    let refused = receive(&there, &proxy, &code, &["--limit-rate", "5"]).await;
    refused.ends_with(2, "at least 100 bytes per second");
    let got = receive(&there, &proxy, &code, &["-o", "new.pdf"]).await;
    assert_eq!(got.code, 0, "{got:?}");
    assert_eq!(std::fs::read(there.join("new.pdf")).unwrap(), content());
    let (exit, errors, _) = sender.end().await;
    assert_eq!(exit, 0, "the sender is told: {errors}");
}

#[tokio::test]
async fn a_transfer_that_is_interrupted_resumes_by_the_same_code() {
    let place = tempfile::tempdir().expect("a directory");
    let [here, there] = ["here", "there"].map(|name| place.path().join(name));
    std::fs::create_dir_all(&here).unwrap();
    std::fs::create_dir_all(&there).unwrap();
    std::fs::write(here.join("report.pdf"), content()).unwrap();
    let proxy = ProxyProcess::start(place.path(), "127.0.0.1:0", &["--allow-any-client"]).await;
    let sender = Sender::start(&here, &proxy, &[]).await;
    let code = sender.code.clone();
    let arguments = ["receive", &code, "--prox", &proxy.address, "--json"];
    // So slow that it cannot be whole when it is stopped.
    let slow = [&arguments[..], &["--limit-rate", "50k"]].concat();
    let child = cedos(&there, &slow).spawn().expect("start cedos");
    let part = there.join("report.pdf.part");
    until("some of it is there", || {
        part.metadata().is_ok_and(|part| part.len() > 0)
    })
    .await;
    kill(pid_of(&child), Signal::SIGINT).expect("send");
    let stopped = ended(child).await;
    assert_eq!(stopped.code, 3, "{stopped:?}");
    assert!(
        stopped.errors.contains("run the same command"),
        "{stopped:?}"
    );

    // Nobody else can use the code.
    let third = place.path().join("third");
    std::fs::create_dir_all(&third).unwrap();
    let other = receive(&third, &proxy, &code, &[]).await;
    assert_eq!(other.code, 1, "{other:?}");

    let resumed = receive(&there, &proxy, &code, &[]).await;
    assert_eq!(resumed.code, 0, "{resumed:?}");
    let held = resumed.last()["held_bytes"].as_u64().unwrap_or_default();
    assert!(held > 0, "nothing is fetched twice: {resumed:?}");
    assert_eq!(std::fs::read(there.join("report.pdf")).unwrap(), content());
    let (exit, errors, _) = sender.end().await;
    assert_eq!(exit, 0, "the sender is told: {errors}");
    let kept = there.join(".state/cedos/receive");
    assert_eq!(std::fs::read_dir(kept).unwrap().count(), 0, "it is over");
}

#[tokio::test]
async fn what_cannot_be_sent_or_received_is_said_in_a_sentence() {
    let place = tempfile::tempdir().expect("a directory");
    let home = place.path();
    std::fs::write(home.join("report.pdf"), content()).unwrap();
    std::fs::create_dir(home.join("folder")).unwrap();
    let proxy = ProxyProcess::start(home, "127.0.0.1:0", &[]).await;
    let through = ["--prox", &proxy.address];
    for (arguments, code, words) in [
        (
            &["send", "folder"][..],
            2,
            "folder is a directory; send one file",
        ),
        (&["send", "missing"], 1, "cannot read missing"),
        (&["receive", "7-acorn-acorn"], 2, "a number and 3 words"),
        (
            &["receive", "7-acorn-acorn-acrn"],
            2,
            "`acrn` is no word of a code",
        ),
        (
            &["receive", "7", "acorn", "acorn", "acorn"],
            1,
            "nobody waits under this code",
        ),
        (
            &["send", "report.pdf", "--within", "1s"],
            10,
            "nobody came for the file; the deadline passed",
        ),
    ] {
        let run = run(home, &[arguments, &through].concat()).await;
        run.ends_with(code, words);
    }
    run(home, &["send", "report.pdf"])
        .await
        .ends_with(2, "the two devices meet at a proxy");
}

#[tokio::test]
async fn a_proxy_that_lets_nobody_in_is_named() {
    let place = tempfile::tempdir().expect("a directory");
    let home = place.path();
    std::fs::write(home.join("report.pdf"), content()).unwrap();
    let key = "A".repeat(43);
    let proxy = ["prox", "--listen", "127.0.0.1:0", "--allow-client", &key];
    let mut child = cedos(home, &proxy).spawn().expect("start cedos");
    let mut lines = BufReader::new(child.stdout.as_mut().expect("piped")).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.expect("in time");
    let address = line.expect("text").expect("an address");
    let send = ["send", "report.pdf", "--prox", &address];
    run(home, &send)
        .await
        .ends_with(1, "does not let this device in");
    child.kill().await.expect("it runs");
}

#[tokio::test]
async fn a_proxy_from_which_nothing_comes_is_named_with_what_to_do() {
    let place = tempfile::tempdir().expect("a directory");
    let home = place.path();
    // Packets arrive there, and nobody answers, as where a network drops UDP.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("its port");
    let proxy = format!("d2tp://{address}/{}", "A".repeat(43));
    let receive = ["receive", "7-acorn-acorn-acorn", "--within", "6s"];
    let run = run(home, &[&receive[..], &["--prox", &proxy]].concat()).await;
    run.ends_with(10, "does not answer; the deadline passed");
    for words in [
        "does not answer yet",
        "this one blocks UDP",
        "`cedos doctor`",
    ] {
        assert!(run.errors.contains(words), "{}", run.errors);
    }
}

#[tokio::test]
async fn two_devices_meet_at_a_proxy_that_answers_whatever_the_order_of_their_lists() {
    let place = tempfile::tempdir().expect("a directory");
    let [here, there] = ["here", "there"].map(|name| place.path().join(name));
    std::fs::create_dir_all(&here).unwrap();
    std::fs::create_dir_all(&there).unwrap();
    std::fs::write(here.join("report.pdf"), content()).unwrap();
    let mut proxies = Vec::new();
    for _ in 0..3 {
        // A running proxy has read its key: the next one makes another.
        let _ = std::fs::remove_file(place.path().join("prox.key"));
        let any = &["--allow-any-client"];
        proxies.push(ProxyProcess::start(place.path(), "127.0.0.1:0", any).await);
    }
    proxies[0].child.kill().await.expect("it runs");
    let [dead, one, two] = [0, 1, 2].map(|n| proxies[n].address.clone());
    let (mine, yours) = (format!("{dead} {one} {two}"), format!("{two} {one} {dead}"));
    proxies[0].address = mine;
    let sender = Sender::start(&here, &proxies[0], &[]).await;
    proxies[0].address = yours;
    let got = receive(&there, &proxies[0], &sender.code, &["--within", "1h"]).await;
    assert_eq!(got.code, 0, "{got:?}");
    assert_eq!(std::fs::read(there.join("report.pdf")).unwrap(), content());
    let (exit, errors, _) = sender.end().await;
    assert_eq!(exit, 0, "{errors}");
}
