//! Two proxies with one key that share their clients in Redis: who is enrolled, what a client may do, and what it does
//! at both together.

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, proper, reply};
use cedos_lab_rig::program::{CedosRun, ProxyProcess, cedos, run};
use cedos_lab_rig::redis::RedisServer;
use cedos_lab_rig::wait::{until_async, within};
use d2tp_driver::{Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, SecretKey};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::join;

/// The names of the nodes.
const NODES: [&str; 2] = ["a", "b"];
const SIZE: usize = 100_000;

/// Two nodes, and devices.
struct SharedNodes {
    home: tempfile::TempDir,
    redis: RedisServer,
    nodes: Vec<ProxyProcess>,
}

/// The key of a device that is named in the settings of both nodes.
fn named_key() -> SecretKey {
    SecretKey::from_bytes([7; 32])
}

impl SharedNodes {
    /// `None` where there is no `redis-server`.
    async fn start(settings: &str) -> Option<SharedNodes> {
        let redis = RedisServer::start()?;
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("node.toml"), settings).unwrap();
        run(home.path(), &["key", "gen", "-o", "prox.key"]).await;
        let mut shared = SharedNodes {
            home,
            redis,
            nodes: Vec::new(),
        };
        for name in NODES {
            let node = shared.begin(name).await;
            shared.nodes.push(node);
        }
        Some(shared)
    }

    async fn begin(&self, name: &str) -> ProxyProcess {
        let (url, state) = (self.redis.url(), format!("state-{name}"));
        let arguments = [
            "prox",
            "--listen",
            "127.0.0.1:0",
            "--key",
            "prox.key",
            "--allow-private",
            "--allow-client",
            &named_key().public().to_string(),
            "--store",
            &url,
            "--node",
            name,
            "--state-dir",
            &state,
            "--copies-dir",
            "copies",
            "--config",
            "node.toml",
        ];
        let log = self.home.path().join(format!("log-{name}"));
        let mut command = cedos(self.home.path(), &arguments);
        command.stderr(std::fs::File::create(log).unwrap());
        let node = ProxyProcess::spawned(&mut command).await;
        node.unwrap_or_else(|| panic!("{}", self.log(name)))
    }

    fn log(&self, name: &str) -> String {
        let log = self.home.path().join(format!("log-{name}"));
        std::fs::read_to_string(log).unwrap_or_default()
    }

    /// Runs a command of the operator of this node.
    async fn at(&self, node: usize, arguments: &[&str]) -> CedosRun {
        let state = format!("state-{}", NODES[node]);
        let arguments = [arguments, &["--state-dir", &state]].concat();
        run(self.home.path(), &arguments).await
    }

    /// The entry of a client in the list of a node; none if the node has no client of this name.
    async fn client(&self, node: usize, name: &str) -> Option<Value> {
        let told = self.at(node, &["prox", "client", "list", "--json"]).await;
        let mut clients = told.events.into_iter();
        let is_it = |client: &Value| client["name"].as_str().unwrap_or("named") == name;
        clients.find(is_it)
    }

    /// Waits until the entry of a client in the list of a node is as expected.
    async fn until_client(&self, node: usize, name: &str, is_so: impl Fn(&Value) -> bool) {
        until_async(&format!("node {node} knows of {name}"), async || {
            let client = self.client(node, name).await?;
            is_so(&client).then_some(())
        })
        .await;
    }

    /// The device that both nodes name, at this node.
    async fn device(&self, node: usize) -> Device {
        let options = DeviceOptions {
            server: self.nodes[node].address.parse().unwrap(),
            key: named_key(),
            config: EndpointConfig::default(),
        };
        let device = Device::new(options).await.unwrap();
        device.use_default_route().unwrap();
        device
    }
}

/// Asks for a URL in a flow of its own.
async fn ask(device: &Device, url: &str) -> Flow {
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let host = url.trim_start_matches("http://").split('/').next().unwrap();
    let request = format!("GET {url} HTTP/1.1\r\nhost: {host}\r\n\r\n");
    flow.write_all(request.as_bytes()).await.unwrap();
    flow.shutdown().await.unwrap();
    flow
}

/// The first line of an answer.
async fn status_line(flow: &mut Flow) -> String {
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        line.push(within(flow.read_u8()).await.unwrap());
    }
    String::from_utf8_lossy(&line).trim().to_owned()
}

/// An origin whose objects are complete, but those below `/long`, which never are.
async fn origin() -> ScriptedOrigin {
    ScriptedOrigin::start(|asked| {
        if asked.path.starts_with("/long") {
            let begun = reply("200 OK", &[("content-length", "1000000")], b"begun");
            return OriginReply(begun, ReplyEnd::Silence);
        }
        OriginReply(proper(asked, &vec![b'x'; SIZE], "\"1\""), ReplyEnd::Close)
    })
    .await
}

#[tokio::test]
async fn a_client_that_one_node_enrols_and_limits_is_the_others_too_until_one_removes_it() {
    let Some(nodes) = SharedNodes::start("").await else {
        return;
    };
    let origin = origin().await;
    let invited = nodes
        .at(0, &["prox", "invite", "--for", "laptop", "--json"])
        .await;
    invited.ends_with(0, "line");
    let line = invited.last()["line"].as_str().unwrap().to_owned();
    // The invitation is one of both nodes, once the other has heard of it.
    until_async("the other node knows the invitation", async || {
        let told = nodes.at(1, &["prox", "invite", "--list", "--json"]).await;
        (!told.events.is_empty()).then_some(())
    })
    .await;
    let elsewhere = line.replace(nodes.nodes[0].listens_at(), nodes.nodes[1].listens_at());
    let device = tempfile::tempdir().unwrap();
    join(device.path(), &elsewhere, &[])
        .await
        .ends_with(0, "laptop");
    nodes.until_client(0, "laptop", |_| true).await;
    let again = join(device.path(), &line, &[]).await;
    again.ends_with(1, "used already");
    let limited = nodes
        .at(0, &["prox", "client", "limit", "laptop", "--flows", "3"])
        .await;
    limited.ends_with(0, "");
    nodes
        .until_client(1, "laptop", |client| client["limits"]["flows"] == 3)
        .await;

    // A download through the second node, whose client the first one removes.
    let url = origin.url("/long");
    let get = [
        "get",
        &url,
        "-o",
        "long",
        "--json",
        "--tries",
        "1",
        "--prox",
        &nodes.nodes[1].address,
    ];
    let mut child = cedos(device.path(), &get).spawn().unwrap();
    nodes
        .until_client(0, "laptop", |client| client["flows_elsewhere"] == 1)
        .await;
    nodes
        .at(0, &["prox", "client", "remove", "laptop"])
        .await
        .ends_with(0, "removed laptop");
    let ended = tokio::time::timeout(PATIENCE, child.wait()).await;
    assert!(!ended.expect("its session ends").unwrap().success());
    assert!(nodes.client(1, "laptop").await.is_none());
    let refused = run(device.path(), &get).await;
    refused.ends_with(1, "does not let this device in");
}

#[tokio::test]
async fn a_client_that_used_up_its_month_at_one_node_gets_nothing_at_the_next() {
    let settings = format!("client_month_bytes_max = {}\n", SIZE * 3 / 2);
    let Some(nodes) = SharedNodes::start(&settings).await else {
        return;
    };
    let origin = origin().await;
    let first = nodes.device(0).await;
    let mut whole = ask(&first, &origin.url("/1")).await;
    within(whole.read_to_end(&mut Vec::new())).await.unwrap();
    let used = |client: &Value| client["month"]["down_bytes"].as_u64() > Some(SIZE as u64);
    nodes.until_client(1, "named", used).await;
    // The rest of the month's bytes are used at the second node, where the flow ends.
    let second = nodes.device(1).await;
    let mut cut = ask(&second, &origin.url("/2")).await;
    within(cut.read_to_end(&mut Vec::new())).await.unwrap_err();
    // The limit is one of both directions together, and the flow is cut where it is reached.
    let max = SIZE as u64 * 3 / 2;
    let used_up = |client: &Value| {
        let bytes = |direction: &str| client["month"][direction].as_u64().unwrap_or(0);
        bytes("down_bytes") + bytes("up_bytes") >= max
    };
    nodes.until_client(0, "named", used_up).await;
    let requests = origin.requests().len();
    for device in [&first, &second] {
        let mut refused = ask(device, &origin.url("/3")).await;
        let line = status_line(&mut refused).await;
        assert!(line.starts_with("HTTP/1.1 429"), "{line}");
    }
    assert_eq!(origin.requests().len(), requests);
}

#[tokio::test]
async fn the_flows_of_a_client_at_two_nodes_count_together() {
    let Some(nodes) = SharedNodes::start("client_flows_max = 3\n").await else {
        return;
    };
    let origin = origin().await;
    let (first, second) = (nodes.device(0).await, nodes.device(1).await);
    let mut open = Vec::new();
    for n in 0..2 {
        let mut flow = ask(&first, &origin.url(&format!("/long{n}"))).await;
        status_line(&mut flow).await;
        open.push(flow);
    }
    let has_two = |client: &Value| client["flows_elsewhere"] == 2;
    nodes.until_client(1, "named", has_two).await;
    let mut third = ask(&second, &origin.url("/long2")).await;
    assert!(status_line(&mut third).await.starts_with("HTTP/1.1 200"));
    let mut fourth = ask(&second, &origin.url("/long3")).await;
    assert!(status_line(&mut fourth).await.starts_with("HTTP/1.1 503"));
    // One that ends makes room at the other node.
    drop(open.pop());
    let has_one = |client: &Value| client["flows_elsewhere"] == 1;
    nodes.until_client(1, "named", has_one).await;
    let mut again = ask(&second, &origin.url("/long4")).await;
    assert!(status_line(&mut again).await.starts_with("HTTP/1.1 200"));
}

/// What happens to the store.
#[derive(Clone, Copy, Debug)]
enum StoreFault {
    Killed,
    Paused,
    Full,
}

async fn what_runs_goes_on_and_is_counted_later(fault: StoreFault) {
    let Some(mut nodes) = SharedNodes::start("").await else {
        return;
    };
    let origin = origin().await;
    let device = nodes.device(0).await;
    let mut before = ask(&device, &origin.url("/1")).await;
    within(before.read_to_end(&mut Vec::new())).await.unwrap();
    match fault {
        StoreFault::Killed => nodes.redis.kill(),
        StoreFault::Paused => nodes.redis.pause(),
        StoreFault::Full => nodes.redis.set_full(true),
    }
    // The session is there: its next flow is served by what this node knows.
    let mut meanwhile = ask(&device, &origin.url("/2")).await;
    within(meanwhile.read_to_end(&mut Vec::new()))
        .await
        .unwrap();
    until_async("the node says that it counts alone", async || {
        let status = nodes.at(0, &["prox", "status", "--json"]).await;
        (status.last()["clients_counted"] == "this node").then_some(())
    })
    .await;
    let words = match fault {
        StoreFault::Full => "is full",
        StoreFault::Killed | StoreFault::Paused => "does not answer",
    };
    let refused = nodes.at(0, &["prox", "invite"]).await;
    refused.ends_with(1, words);
    match fault {
        StoreFault::Killed => nodes.redis.start_again(),
        StoreFault::Paused => nodes.redis.resume(),
        StoreFault::Full => nodes.redis.set_full(false),
    }
    let both = |client: &Value| client["month"]["down_bytes"].as_u64() > Some(2 * SIZE as u64);
    nodes.until_client(1, "named", both).await;
    until_async("clients are counted together again", async || {
        let status = nodes.at(0, &["prox", "status", "--json"]).await;
        (status.last()["clients_counted"] == "all nodes").then_some(())
    })
    .await;
    nodes.at(0, &["prox", "invite"]).await.ends_with(0, "d2tp");
}

#[tokio::test]
async fn clients_are_served_and_counted_later_while_the_store_is_killed() {
    what_runs_goes_on_and_is_counted_later(StoreFault::Killed).await;
}

#[tokio::test]
async fn clients_are_served_and_counted_later_while_the_store_does_not_answer() {
    what_runs_goes_on_and_is_counted_later(StoreFault::Paused).await;
}

#[tokio::test]
async fn clients_are_served_and_counted_later_while_the_store_is_full() {
    what_runs_goes_on_and_is_counted_later(StoreFault::Full).await;
}

#[tokio::test]
async fn what_a_node_counted_survives_its_restart_and_counts_once() {
    let Some(mut nodes) = SharedNodes::start("").await else {
        return;
    };
    let origin = origin().await;
    for path in ["/1", "/2"] {
        let device = nodes.device(0).await;
        let mut flow = ask(&device, &origin.url(path)).await;
        within(flow.read_to_end(&mut Vec::new())).await.unwrap();
        drop(device);
        let mut node = nodes.nodes.remove(0);
        nix::sys::signal::kill(
            cedos_lab_rig::program::pid_of(&node.child),
            nix::sys::signal::Signal::SIGTERM,
        )
        .unwrap();
        within(node.child.wait()).await.unwrap();
        let again = nodes.begin("a").await;
        nodes.nodes.insert(0, again);
    }
    let (most, least) = (2 * SIZE as u64 + 10_000, 2 * SIZE as u64);
    for node in 0..2 {
        let client = nodes.client(node, "named").await.unwrap();
        let down = client["month"]["down_bytes"].as_u64().unwrap();
        assert!((least..most).contains(&down), "{down} at node {node}");
    }
    let file = nodes.home.path().join("state-a/traffic.json");
    let kept = std::fs::read_to_string(file).unwrap();
    assert!(!kept.contains("down_bytes"), "the store has it: {kept}");
}
