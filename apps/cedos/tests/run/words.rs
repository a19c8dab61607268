//! `cedos run`: messages for causes that an errno does not express.

use cedos_lab_rig::missing_tool::is_installed;
use cedos_lab_rig::namespace::in_namespace;
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, at_home, cedos, device_key, ended};
use cedos_lab_rig::{PATIENCE, this_test};

/// An address that nobody has (RFC 5737).
const URL: &str = "http://192.0.2.1/";

/// What `cedos run` prints if curl cannot reach its host.
async fn said(home: &std::path::Path, options: &[&str]) -> String {
    let words = [
        &["run", "--rung", "preload"],
        options,
        &["--", "curl", "-sS", URL],
    ]
    .concat();
    let output = cedos(home, &words).output();
    let output = tokio::time::timeout(PATIENCE, output).await;
    let output = output.expect("it does not wait").expect("cedos");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(7), "curl cannot connect: {said}");
    said
}

#[test]
fn a_server_without_a_proxy_that_calls_out_is_told_to_name_one() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        if !is_installed("curl") {
            return;
        }
        let listen = ["--listen", "--allow-any-client", "--at", "127.0.0.1:0"];
        let said = said(home.path(), &listen).await;
        assert!(
            said.contains("no proxy for outgoing connections: give --prox"),
            "{said}"
        );
    });
}

#[test]
fn a_device_that_is_not_admitted_is_told_whom_to_ask() {
    in_namespace(this_test!(), || async {
        let directory = tempfile::tempdir().expect("a directory");
        let home = directory.path();
        if !is_installed("curl") {
            return;
        }
        let ours = device_key(home).await;
        let nobody = "A".repeat(43);
        let proxy = ProxyProcess::start_for(&nobody, home, "127.0.0.1:0", &[]).await;
        let advice = format!(
            "does not let this device in; its operator invites it (`cedos prox invite`), or adds \
             --allow-client {ours}"
        );
        let prox = ["--prox", &*proxy.address];
        for rung in ["preload", "notify", "tun"] {
            let run = ["run", "--rung", rung];
            let curl = ["--", "curl", "-sS", URL];
            let child = cedos(home, &[&run[..], &prox, &curl].concat()).spawn();
            let ended = ended(child.expect("start cedos")).await;
            let is_there = !ended.errors.contains("cedos run: the rung");
            assert_ne!(ended.code, 0, "{rung}: {ended:?}");
            assert!(
                !is_there || ended.errors.contains(&advice),
                "{rung}: {}",
                ended.errors
            );
        }
        // A program that goes by variables gets an answer, which says it too.
        let run = [
            &["run", "--rung", "env"][..],
            &prox,
            &["--", "curl", "-sS", URL],
        ]
        .concat();
        let answered = ended(cedos(home, &run).spawn().expect("start cedos")).await;
        let answer = String::from_utf8_lossy(&answered.output).into_owned();
        assert!(answer.contains(&advice), "{answered:?}");
        // So does the agent's local proxy, by HTTP.
        let local = ["--proxy", "127.0.0.1:1080"];
        let _agent = AgentProcess::start_with(home, &[&local[..], &prox].concat()).await;
        let mut curl = tokio::process::Command::new("curl");
        at_home(
            curl.args(["-sS", "--proxy", "http://127.0.0.1:1080", URL]),
            home,
        );
        let answered = ended(curl.spawn().expect("start curl")).await;
        let answer = String::from_utf8_lossy(&answered.output).into_owned();
        assert!(answer.contains(&advice), "{answered:?}");
    });
}

#[test]
fn what_the_proxy_refuses_is_passed_on_in_its_words() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        if !is_installed("curl") {
            return;
        }
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let said = said(home.path(), &["--prox", &proxy.address, "--by", "+8d"]).await;
        let word = "the deadline is further away than this proxy keeps a flow";
        assert_eq!(said.matches(word).count(), 1, "{said}");
    });
}
