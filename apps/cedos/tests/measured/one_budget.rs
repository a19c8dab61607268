//! One budget for a whole device: a download, a stream, a socket of a program that uses libd2tp and a program under
//! `cedos run` at once, judged by what the kernel counted on the metered link.

use std::path::Path;
use std::time::Duration;

use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, received, wifi_on};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::sleep_beside;
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, ended, pid_of};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::{PATIENCE, program, this_test};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::Child;
use tokio::time::{sleep, timeout};

const OBJECT_BYTES: usize = 8_000_000; // 3.2 s at 20 Mb/s, for each of the four

const BUDGET_BYTES: u64 = 4_000_000;

/// Heads of packets, acknowledgements and handshakes: 15 % of the budget, a third of which is usual; and what four
/// clients are granted so that none stands still.
const BESIDE_BYTES_MAX: u64 = 600_000 + 4 * 16_384;

/// What the link may still carry in three seconds once the budget is used up.
const CONTROL_BYTES_MAX: u64 = 24_000; // 6,000 for each session

async fn cedos(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> Value {
    let run = ended(begin(home, agent, arguments)).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    run.last().clone()
}

fn begin(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> Child {
    let mut command = program::cedos(home, arguments);
    command.env("CEDOS_AGENT", &agent.socket);
    command.spawn().expect("start cedos")
}

/// A player's link to `url`, served by the agent for as long as the connection it came on.
pub(crate) async fn stream(
    agent: &AgentProcess,
    url: &str,
    prox: &str,
    home: &Path,
    policy: &str,
) -> (UnixStream, String) {
    let mut connection = UnixStream::connect(&agent.socket)
        .await
        .expect("it listens");
    let ordered = json!({"urls": [url], "prox": prox, "store": home.join("store"),
        "low": null, "high": null, "policy": policy, "duration_s": 60.0});
    let line = format!("{}\n", json!({"do": "stream", "ordered": ordered}));
    let sent = connection.write_all(line.as_bytes()).await;
    sent.expect("it listens");
    let mut answer = String::new();
    let mut lines = BufReader::new(&mut connection);
    let read = timeout(PATIENCE, lines.read_line(&mut answer)).await;
    read.expect("in time").expect("text");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["ok"], true, "{answer}");
    let link = answer["links"][0].as_str().expect("a link").to_owned();
    (connection, link)
}

#[test]
fn a_download_a_stream_a_socket_and_a_program_under_run_spend_one_budget() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (origin, prox) = origin_namespace(|| async move {
            let bytes = object(OBJECT_BYTES, 1);
            let script = move |asked: &OriginRequest| {
                OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
            };
            let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
            (
                origin,
                ProxyProcess::start(&place, "192.0.2.1:0", &[]).await,
            )
        });
        let home = home.path();
        cell_on();
        let agent = AgentProcess::start(home).await;
        let cap = BUDGET_BYTES.to_string();
        cedos(home, &agent, &["budget", "set", &cap, "--json"]).await;
        let before = received("wwan0");

        let get = [
            "get",
            "--json",
            "--policy",
            "fast",
            "--prox",
            &prox.address,
            "-o",
            "got",
        ];
        let url = origin.url("/a");
        let download = begin(home, &agent, &[&get[..], &[&url]].concat());

        let (_served, link) = stream(&agent, &url, &prox.address, home, "free-first").await;
        let player = tokio::process::Command::new("curl")
            .args(["-sS", "-o", "watched", &link])
            .current_dir(home)
            .kill_on_drop(true)
            .spawn()
            .expect("start curl");

        let told = CProgram::with_d2tp("told.c");
        let port = origin.address.port().to_string();
        let arguments = ["192.0.2.1", &port, "policy=3"];
        let mut socket = Program::start(&told, home, &prox.address, &agent.socket, &arguments);
        assert_eq!(socket.hear().await, "policy 0");
        assert_eq!(socket.hear().await, "connect 0");
        assert!(socket.ask("ask").await.starts_with("ask "));
        socket.tell(&format!("read {OBJECT_BYTES}")).await;

        let run = ["run", "--prox", &prox.address, "--policy", "fast", "--"];
        let curl = ["curl", "-sS", "-o", "run", &url];
        let program = begin(home, &agent, &[&run[..], &curl].concat());

        let used_up = async {
            while cedos(home, &agent, &["budget", "--json"]).await["over"] != true {
                // sleep: the agent is asked a few times a second until its account says so
                sleep(Duration::from_millis(200)).await;
            }
        };
        let used_up = timeout(PATIENCE, used_up).await;
        used_up.expect("the four want eight times as much");
        // sleep: what was granted before may still come
        sleep_beside(Duration::from_secs(2), &[pid_of(&agent.child)]).await;
        let carried = received("wwan0") - before;
        assert!(
            (BUDGET_BYTES * 9 / 10..BUDGET_BYTES + BESIDE_BYTES_MAX).contains(&carried),
            "{carried} bytes on wwan0 for a budget of {BUDGET_BYTES}"
        );
        let known = received("wwan0");
        // sleep: that nothing comes for a while is the subject
        sleep(Duration::from_secs(3)).await;
        let more = received("wwan0") - known;
        assert!(
            more < CONTROL_BYTES_MAX,
            "{more} bytes on wwan0 after the budget was used up"
        );
        // The budget's own account of it is not far from the kernel's.
        let budget = cedos(home, &agent, &["budget", "--json"]).await;
        let used = budget["used"].as_u64().unwrap_or_default();
        assert!(used <= carried + more && used >= BUDGET_BYTES, "{budget}");

        // A free network brings each of them the rest.
        wifi_on("198.51.100.7");
        let run = ended(download).await;
        assert_eq!(run.code, 0, "{}", run.errors);
        assert_eq!(socket.hear().await.split(' ').next(), Some("read"));
        for (who, mut child) in [("the player", player), ("the program", program)] {
            let status = timeout(PATIENCE, child.wait()).await;
            let status = status.unwrap_or_else(|_| panic!("{who} does not end"));
            assert!(status.expect("a status").success(), "{who}");
        }
        let wanted = object(OBJECT_BYTES, 1);
        for file in ["got", "watched", "run"] {
            let bytes = std::fs::read(home.join(file)).expect("it is there");
            assert!(bytes == wanted, "{file}: {} bytes", bytes.len());
        }
    });
}
