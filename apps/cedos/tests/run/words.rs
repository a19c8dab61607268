//! `cedos run`: messages for causes that an errno does not express.

use cedos_lab_rig::namespace::in_namespace;
use cedos_lab_rig::program::{ProxyProcess, cedos};
use cedos_lab_rig::{PATIENCE, this_test};

/// An address that nobody has (RFC 5737).
const URL: &str = "http://192.0.2.1/";

fn has_curl() -> bool {
    let tried = std::process::Command::new("curl").arg("--version").output();
    let found = tried.is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("skipped: curl is not installed");
    }
    found
}

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
        if !has_curl() {
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
fn what_the_proxy_refuses_is_passed_on_in_its_words() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        if !has_curl() {
            return;
        }
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let said = said(home.path(), &["--prox", &proxy.address, "--by", "+8d"]).await;
        let word = "the deadline is further away than this proxy keeps a flow";
        assert_eq!(said.matches(word).count(), 1, "{said}");
    });
}
