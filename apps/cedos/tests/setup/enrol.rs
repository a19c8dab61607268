//! Invitations: one device each, once, and a sentence for whatever goes wrong.

use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, reply};
use cedos_lab_rig::program::{cedos, device_key, run};
use cedos_lab_rig::wait::{PATIENCE, until_async, within};
use tokio::time::Instant;

use crate::support::{Operator, join, start_proxy};

const CONTENT: &[u8] = b"what was asked for";

async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|_| {
        let length = CONTENT.len().to_string();
        let answer = reply("200 OK", &[("content-length", &length)], CONTENT);
        OriginReply(answer, ReplyEnd::Close)
    })
    .await
}

#[tokio::test]
async fn a_device_joins_and_downloads_through_the_proxy_without_naming_it() {
    let operator = Operator::start().await;
    let (home, origin) = (tempfile::tempdir().unwrap(), origin().await);
    let line = operator.invite(&["--for", "laptop"]).await;
    let joined = join(home.path(), &line, &[]).await;
    joined.ends_with(0, "enrolled this device as laptop");
    joined.ends_with(0, "default");
    let clients = operator.clients().await;
    assert_eq!(clients.len(), 1, "{clients:?}");
    assert_eq!(clients[0]["name"], "laptop");
    assert_eq!(clients[0]["key"], device_key(home.path()).await.as_str());
    let url = origin.url("/file");
    let got = run(home.path(), &["get", &url, "-o", "file", "--json"]).await;
    got.ends_with(0, "done");
    assert_eq!(got.events[0]["mode"], "proxy-fetch", "{:?}", got.events[0]);
    assert_eq!(std::fs::read(home.path().join("file")).unwrap(), CONTENT);
    let direct = run(
        home.path(),
        &["get", &url, "-o", "direct", "--json", "--no-prox"],
    )
    .await;
    direct.ends_with(0, "done");
    assert_eq!(direct.events[0]["mode"], "direct", "{:?}", direct.events[0]);
}

#[tokio::test]
async fn an_invitation_is_for_one_device_once() {
    let operator = Operator::start().await;
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let line = operator.invite(&[]).await;
    join(homes[0].path(), &line, &["--name", "first"])
        .await
        .ends_with(0, "as first");
    // No other invitation is open: the proxy does not even answer the handshake.
    join(homes[1].path(), &line, &[])
        .await
        .ends_with(1, "was used already");
    join(homes[0].path(), &line, &[])
        .await
        .ends_with(1, "was used already, by this device");
    // With another one open, the proxy itself says it.
    operator.invite(&[]).await;
    join(homes[1].path(), &line, &[])
        .await
        .ends_with(1, "was used already, by another device");
    assert_eq!(operator.clients().await.len(), 1);
    let config = homes[1].path().join(".config/cedos/config.toml");
    assert!(
        !config.exists(),
        "a device that was refused has no new default"
    );
}

#[tokio::test]
async fn two_devices_with_one_line_are_one_client() {
    let operator = Operator::start().await;
    let homes: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
    let line = operator.invite(&[]).await;
    let joining = homes.iter().map(|home| join(home.path(), &line, &[]));
    let joined = futures_util::future::join_all(joining).await;
    let codes: Vec<i32> = joined.iter().map(|run| run.code).collect();
    let winners = codes.iter().filter(|code| **code == 0).count();
    assert_eq!(winners, 1, "{joined:?}");
    assert_eq!(operator.clients().await.len(), 1);
}

#[tokio::test]
async fn an_invitation_that_is_withdrawn_enrols_nobody() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    let line = operator.invite(&["--for", "laptop"]).await;
    let other = operator
        .invite(&["--for", "phone", "--expires", "1h"])
        .await;
    let list = async || operator.run(&["prox", "invite", "--list", "--json"]).await;
    let open = list().await;
    let names: Vec<&str> = open
        .events
        .iter()
        .filter_map(|i| i["name"].as_str())
        .collect();
    assert_eq!(names, ["laptop", "phone"], "{open:?}");
    let secret = line.split_once('#').unwrap().1;
    assert!(
        !format!("{open:?}").contains(secret),
        "no list has the secret"
    );
    let id = open.events[0]["id"].as_str().unwrap();
    let withdraw = |which: &str| {
        let arguments = [
            "prox".to_owned(),
            "invite".to_owned(),
            "--withdraw".to_owned(),
            which.to_owned(),
        ];
        let operator = &operator;
        async move {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            operator.run(&arguments).await
        }
    };
    withdraw(id).await.ends_with(0, "withdrew the invitation");
    withdraw(id)
        .await
        .ends_with(1, "no open invitation is called");
    // Another one is open, so that the proxy itself refuses.
    let refused = join(home.path(), &line, &[]).await;
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(operator.clients().await.is_empty());
    withdraw("phone").await.ends_with(0, "for phone");
    join(home.path(), &other, &[])
        .await
        .ends_with(1, "took it back");
    assert_eq!(list().await.events.len(), 0);
    let both = operator
        .run(&["prox", "invite", "--list", "--for", "x"])
        .await;
    assert_eq!(both.code, 2, "{both:?}");
}

#[tokio::test]
async fn an_expired_invitation_says_so() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    let line = operator.invite(&["--expires", "1s"]).await;
    // sleep: the clock of the wall must pass the second
    tokio::time::sleep(std::time::Duration::from_millis(1_200)).await;
    join(home.path(), &line, &[])
        .await
        .ends_with(1, "has expired");
    operator.invite(&[]).await;
    join(home.path(), &line, &[])
        .await
        .ends_with(1, "has expired");
    assert!(operator.clients().await.is_empty());
}

#[tokio::test]
async fn a_wrong_key_a_silent_host_and_a_line_that_is_none_are_told_apart() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    let line = operator.invite(&[]).await;
    let (address, secret) = line.split_once('#').unwrap();
    let place = address.rsplit_once('/').unwrap().0;
    let other = device_key(home.path()).await;
    let wrong = join(home.path(), &format!("{place}/{other}#{secret}"), &[]).await;
    wrong.ends_with(1, "not with the key in the invitation");
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    drop(socket);
    let key = address.rsplit('/').next().unwrap();
    let nobody = format!("d2tp://127.0.0.1:{port}/{key}#{secret}");
    join(home.path(), &nobody, &[])
        .await
        .ends_with(1, "no proxy listens at");
    for none in ["hello", address, &line[..line.len() - 4]] {
        let refused = join(home.path(), none, &[]).await;
        assert_eq!(refused.code, 2, "{none}: {}", refused.errors);
        assert!(!refused.errors.contains(secret), "{}", refused.errors);
    }
    join(home.path(), &line, &[]).await.ends_with(0, "enrolled");
}

#[tokio::test]
async fn the_secret_is_in_no_log_no_file_and_not_in_the_list_of_processes() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    let line = operator.invite(&[]).await;
    let secret = line.split_once('#').unwrap().1;
    // A host that never answers, so that the process can be looked at.
    let silent = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let key = operator.proxy.address.rsplit('/').next().unwrap();
    let elsewhere = format!("d2tp://{}/{key}#{secret}", silent.local_addr().unwrap());
    let mut waiting = cedos(home.path(), &["join", &elsewhere]).spawn().unwrap();
    let pid = waiting.id().unwrap();
    let command_line = until_async("it has begun and hidden its secret", async || {
        let text = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        text.contains("xxxxxxxx").then_some(text)
    })
    .await;
    assert!(!command_line.contains(secret));
    waiting.kill().await.unwrap();
    join(home.path(), &line, &[]).await.ends_with(0, "enrolled");
    for directory in [operator.home.path(), home.path()] {
        for path in files_below(directory) {
            let text = std::fs::read(&path).unwrap_or_default();
            let has_it = text
                .windows(secret.len())
                .any(|part| part == secret.as_bytes());
            assert!(!has_it, "{}", path.display());
        }
    }
}

fn files_below(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().flatten();
    let found = entries.flat_map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => files_below(&entry.path()),
        Ok(kind) if kind.is_file() => vec![entry.path()],
        _ => Vec::new(),
    });
    found.collect()
}

#[tokio::test]
async fn a_removed_client_loses_its_session_within_a_second_and_is_refused() {
    let operator = Operator::start().await;
    let home = tempfile::tempdir().unwrap();
    join(
        home.path(),
        &operator.invite(&[]).await,
        &["--name", "phone"],
    )
    .await
    .ends_with(0, "phone");
    // A body that never ends keeps the flow open.
    let origin = ScriptedOrigin::start(|_| {
        let answer = reply("200 OK", &[("content-length", "1000000")], CONTENT);
        OriginReply(answer, ReplyEnd::Silence)
    })
    .await;
    let arguments = [
        "get",
        &origin.url("/long"),
        "-o",
        "long",
        "--json",
        "--tries",
        "1",
    ];
    let mut child = cedos(home.path(), &arguments).spawn().unwrap();
    until_async("it receives", async || {
        let partial = std::fs::read_dir(home.path()).ok()?.flatten();
        let mut sizes = partial.filter_map(|entry| {
            let is_it = entry.file_name().to_string_lossy().contains("long");
            is_it.then(|| entry.metadata().map_or(0, |data| data.len()))
        });
        sizes.any(|size| size > 0).then_some(())
    })
    .await;
    let renamed = operator
        .run(&["prox", "client", "rename", "phone", "old phone"])
        .await;
    renamed.ends_with(0, "old phone");
    let asked = Instant::now();
    operator
        .run(&["prox", "client", "remove", "old phone"])
        .await
        .ends_with(0, "removed");
    let status = within(child.wait()).await.unwrap();
    assert_eq!(status.code(), Some(1));
    let took = asked.elapsed();
    assert!(took < PATIENCE / 10, "{took:?}");
    assert!(operator.clients().await.is_empty());
    let refused = run(
        home.path(),
        &["get", &origin.url("/long"), "-o", "again", "--tries", "1"],
    )
    .await;
    refused.ends_with(1, "does not let this device in");
    let gone = operator.run(&["prox", "client", "show", "old phone"]).await;
    gone.ends_with(1, "no client");
}

#[tokio::test]
async fn clients_and_open_invitations_outlive_the_proxy() {
    let mut operator = Operator::start().await;
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    join(
        homes[0].path(),
        &operator.invite(&[]).await,
        &["--name", "one"],
    )
    .await
    .ends_with(0, "one");
    let open = operator.invite(&["--for", "two"]).await;
    operator.proxy.child.kill().await.unwrap();
    let gone = operator.run(&["prox", "invite"]).await;
    gone.ends_with(1, "no proxy runs");
    let at = operator.proxy.listens_at().to_owned();
    operator.proxy = start_proxy(operator.home.path(), &at, &[]).await;
    join(homes[1].path(), &open, &[])
        .await
        .ends_with(0, "as two");
    let names: Vec<_> = operator
        .clients()
        .await
        .into_iter()
        .map(|client| client["name"].clone())
        .collect();
    assert_eq!(names, ["one", "two"]);
}

#[tokio::test]
async fn the_control_socket_belongs_to_the_proxys_user() {
    use std::os::unix::fs::PermissionsExt;
    let operator = Operator::start().await;
    let socket = operator.state_dir().join("control.sock");
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let line = operator.invite(&["--host", "proxy.example"]).await;
    assert!(line.starts_with("d2tp://proxy.example:"), "{line}");
    let shown = operator.run(&["prox", "invite"]).await;
    shown.ends_with(0, "this machine itself");
}

#[tokio::test]
async fn uploads_programs_and_devices_that_serve_use_the_default_proxy() {
    let operator = Operator::start().await;
    let (home, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let origin = origin().await;
    let url = origin.url("/in");
    std::fs::write(home.path().join("file"), CONTENT).unwrap();
    for (verb, words) in [
        (&["put", "file", &*url][..], "join one"),
        (&["run", "--", "true"], "join one"),
    ] {
        run(home.path(), verb).await.ends_with(2, words);
    }
    for device in [&home, &other] {
        let line = operator.invite(&[]).await;
        join(device.path(), &line, &[])
            .await
            .ends_with(0, "default");
    }
    run(home.path(), &["put", "file", &url])
        .await
        .ends_with(0, "");
    let asked = origin.requests();
    assert_eq!(asked.last().map(|request| &*request.method), Some("PUT"));
    run(home.path(), &["run", "--", "true"])
        .await
        .ends_with(0, "");
    let reader = device_key(other.path()).await;
    let mut serving = cedos(home.path(), &["serve", ".", "--allow-client", &reader])
        .spawn()
        .unwrap();
    let address = first_line(&mut serving).await;
    assert!(
        address.ends_with(&format!("{}/", device_key(home.path()).await)),
        "{address}"
    );
    let got = run(
        other.path(),
        &["get", &format!("{address}file"), "-o", "copy"],
    )
    .await;
    got.ends_with(0, "");
    assert_eq!(std::fs::read(other.path().join("copy")).unwrap(), CONTENT);
    serving.kill().await.unwrap();
}

/// The first line of a program's output.
async fn first_line(child: &mut tokio::process::Child) -> String {
    use tokio::io::AsyncBufReadExt;
    let output = child.stdout.take().unwrap();
    let mut lines = tokio::io::BufReader::new(output).lines();
    within(lines.next_line()).await.unwrap().unwrap_or_default()
}
