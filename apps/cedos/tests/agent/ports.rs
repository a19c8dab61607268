//! The agent's ports of this machine, which every user can connect to.

use std::process::Stdio;

use super::home::Home;
use cedos_lab_rig::PATIENCE;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

/// Connects forty times and sends nothing, waits until the agent closes the tenth connection, says so, and keeps the
/// others. The agent has sixteen places for connections that have asked for nothing.
const IDLE_CONNECTIONS: &str = r#"
for i in $(seq 40); do
    exec {idle}<>/dev/tcp/127.0.0.1/$1
    [ $i = 10 ] && tenth=$idle
done
cat <&$tenth
echo full
read
"#;

#[tokio::test]
async fn connections_of_another_user_displace_none_of_ours() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("skipped: only root can be another user");
    }
    let home = Home::new(&["--metrics", "127.0.0.1:0"]).await;
    let at = home.figures.clone().expect("an address");
    let mut ours = TcpStream::connect(&at).await.expect("connect");
    // Once the first line is on its way, the connection is still unproven: nothing was asked yet.
    ours.write_all(b"GET /metrics HTTP/1.1\r\n")
        .await
        .expect("write");
    let port = at.rsplit(':').next().expect("a port");
    let stranger = Command::new("setpriv")
        .args(["--reuid", "65534", "--clear-groups", "bash", "-c"])
        .args([IDLE_CONNECTIONS, "bash", port])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn();
    let Ok(mut stranger) = stranger else {
        return eprintln!("skipped: there is no setpriv");
    };
    let mut lines = BufReader::new(stranger.stdout.take().expect("its output")).lines();
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    let line = line.expect("in time").expect("readable");
    assert_eq!(line.as_deref(), Some("full"));
    ours.write_all(format!("Host: {at}\r\n\r\n").as_bytes())
        .await
        .expect("write");
    let mut answer = String::new();
    ours.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    drop(stranger);
}
