//! Programs' sockets that an agent carries over two real links in a network namespace: what crosses the one
//! that costs, counted by the kernel, is what the agent's one scheduler and budget allow.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::support::CProgram;
use crate::told::{Program, udp_sockets};
use cedos_lab_rig::namespace::{
    BlockedUdp, cell_on, in_namespace, origin_namespace, received, sh, wifi_off, wifi_on,
};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::processor_wait::sleep_beside;
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, ended, pid_of};
use cedos_lab_rig::wait::{until, until_async};
use cedos_lab_rig::{program, this_test};
use serde_json::Value;

const OBJECT_BYTES: usize = 16_000_000; // 6.4 s at 20 Mb/s

/// What a link may carry besides payload: handshakes, acknowledgements, neighbours.
const CONTROL_BYTES_MAX: u64 = 6_000;

/// The bytes beside the payload that a budget allows: heads of packets, acknowledgements, handshakes.
const BESIDE_BYTES_MAX: u64 = 450_000; // 15 % of it; a third of that is measured

async fn origin_and_proxy(home: PathBuf) -> (ScriptedOrigin, ProxyProcess) {
    let bytes = object(OBJECT_BYTES, 1);
    let script =
        move |asked: &OriginRequest| OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close);
    let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
    let proxy = ProxyProcess::start(&home, "192.0.2.1:0", &[]).await;
    (origin, proxy)
}

fn begin(
    program: &CProgram,
    home: &Path,
    to: &(ScriptedOrigin, ProxyProcess),
    agent: &AgentProcess,
    policy: u8,
) -> Program {
    let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
    let port = url.port().expect("a port").to_string();
    let policy = format!("policy={policy}");
    let arguments = ["192.0.2.1", &port, &policy];
    Program::start(program, home, &to.1.address, &agent.socket, &arguments)
}

/// How many bytes come on cellular in the next seconds.
async fn on_cell(seconds: u64) -> u64 {
    let before = received("wwan0");
    // sleep: bytes in a span of time are the subject
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    received("wwan0") - before
}

async fn cedos(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> Value {
    let mut command = program::cedos(home, arguments);
    command.env("CEDOS_AGENT", &agent.socket);
    let run = ended(command.spawn().expect("start cedos")).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    run.last().clone()
}

#[test]
fn a_policy_reaches_the_agent_and_so_does_another_later() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        wifi_on("198.51.100.7");
        cell_on();
        let agent = AgentProcess::start(home.path()).await;
        let told = CProgram::with_d2tp("told.c");
        let mut program = begin(&told, home.path(), &to, &agent, 0);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        let before = received("wwan0");
        assert_eq!(program.ask("read 3000000").await, "read 3000000");
        wifi_off();
        program.tell("read 13000000").await;
        let leaked = received("wwan0") - before + on_cell(3).await;
        assert!(
            leaked < CONTROL_BYTES_MAX,
            "{leaked} bytes on wwan0 for a socket that may not pay"
        );
        // It is one program that reads and is told nothing meanwhile: another may pay, beside it.
        let mut payer = begin(&told, home.path(), &to, &agent, 0);
        assert_eq!(payer.hear().await, "policy 0");
        // Nothing leads to the proxy but what it may not use.
        let waited = tokio::time::timeout(Duration::from_secs(2), payer.hear()).await;
        assert!(waited.is_err(), "connected: {waited:?}");
        payer.child.kill().await.expect("it ends");
        let mut payer = begin(&told, home.path(), &to, &agent, 3);
        assert_eq!(payer.hear().await, "policy 0");
        assert_eq!(payer.hear().await, "connect 0");
        let begun = received("wwan0");
        assert!(payer.ask("ask").await.starts_with("ask "));
        until("one that may pay gets bytes on wwan0", || {
            received("wwan0") > begun + 500_000
        })
        .await;
        assert_eq!(payer.ask("policy 0").await, "policy 0");
        // sleep: what was granted for a second is still to come
        sleep_beside(Duration::from_secs(2), &[pid_of(&agent.child)]).await;
        payer.tell(&format!("read {OBJECT_BYTES}")).await;
        let carried = on_cell(2).await;
        assert!(
            carried < CONTROL_BYTES_MAX,
            "{carried} bytes on wwan0 after it may pay no more"
        );
        // The agent took down what both cost.
        let budget = cedos(home.path(), &agent, &["budget", "--json"]).await;
        let used = budget["used"].as_u64().unwrap_or_default();
        let on_the_link = received("wwan0") - before;
        assert!(
            used > 300_000 && used <= on_the_link,
            "{used} of {on_the_link} bytes: {budget}"
        );
        wifi_on("198.51.100.99");
        assert_eq!(program.hear().await, "read 13000000");
        assert_eq!(payer.hear().await, format!("read {OBJECT_BYTES}"));
    });
}

#[test]
fn the_budget_of_the_agent_is_one_for_its_transfers_and_all_programs() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        cell_on();
        let agent = AgentProcess::start(home.path()).await;
        cedos(home.path(), &agent, &["budget", "set", "3M", "--json"]).await;
        let told = CProgram::with_d2tp("told.c");
        let before = received("wwan0");
        let mut programs = Vec::new();
        for _ in 0..2 {
            let mut program = begin(&told, home.path(), &to, &agent, 3);
            assert_eq!(program.hear().await, "policy 0");
            assert_eq!(program.hear().await, "connect 0");
            programs.push(program);
        }
        // Once the budget is used up nobody connects here.
        for program in &mut programs {
            assert!(program.ask("ask").await.starts_with("ask "));
            program.tell(&format!("read {OBJECT_BYTES}")).await;
        }
        until_async("both want more than that", async || {
            let budget = cedos(home.path(), &agent, &["budget", "--json"]).await;
            (budget["over"] == true).then_some(())
        })
        .await;
        // sleep: what was granted for a second is still to come
        sleep_beside(Duration::from_secs(2), &[pid_of(&agent.child)]).await;
        let carried = received("wwan0") - before;
        assert!(
            (2_500_000..3_000_000 + BESIDE_BYTES_MAX).contains(&carried),
            "{carried} bytes on wwan0 for a budget of 3 MB"
        );
        let more = on_cell(3).await;
        assert!(
            more < 2 * CONTROL_BYTES_MAX,
            "{more} bytes on wwan0 after the budget was used up"
        );
        wifi_on("198.51.100.7");
        for mut program in programs {
            assert_eq!(program.hear().await, format!("read {OBJECT_BYTES}"));
        }
    });
}

/// Waits until this many bytes are ahead of the program.
async fn until_ahead(program: &mut Program, bytes: u64) {
    until_async("so much is read ahead", async || {
        let said = program.ask("ahead").await;
        let ahead = said.strip_prefix("ahead ").and_then(|n| n.parse().ok());
        (ahead.unwrap_or(0) >= bytes).then_some(())
    })
    .await;
}

/// Over a metered link a socket with thresholds gets as much as they say, however long its program reads nothing;
/// from a free one, all.
async fn reads_ahead_by_its_thresholds(
    home: &Path,
    to: &(ScriptedOrigin, ProxyProcess),
    agent: &Path,
) {
    const LOW: u64 = 500_000;
    const HIGH: u64 = 2_000_000;
    // Packets' heads, and what is read until it is looked again.
    const MORE: u64 = HIGH / 4;
    let told = CProgram::with_d2tp("told.c");
    let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
    let port = url.port().expect("a port").to_string();
    let arguments = ["192.0.2.1", &port, "policy=3"];
    let mut program = Program::start(&told, home, &to.1.address, agent, &arguments);
    assert_eq!(program.hear().await, "policy 0");
    assert_eq!(program.hear().await, "connect 0");
    let levels = format!("levels {LOW} {HIGH}");
    assert_eq!(program.ask(&levels).await, "levels 0");
    assert_eq!(program.ask("policy 1").await, "policy 0");
    let before = received("wwan0");
    assert!(program.ask("ask").await.starts_with("ask "));
    until_ahead(&mut program, HIGH).await;
    let more = on_cell(3).await;
    let filled = received("wwan0") - before;
    assert!(
        filled < HIGH + MORE,
        "{filled} bytes on wwan0 for {HIGH} ahead, {more} of them in the last seconds"
    );
    // As long as low is not reached it lives on what is there.
    assert_eq!(program.ask("read 1000000").await, "read 1000000");
    let saved = on_cell(2).await;
    assert!(saved < CONTROL_BYTES_MAX, "{saved} bytes above low");
    assert_eq!(program.ask("read 800000").await, "read 800000");
    until_ahead(&mut program, HIGH).await;
    // sleep: that no more comes is the subject
    tokio::time::sleep(Duration::from_secs(2)).await;
    let filled = received("wwan0") - before;
    assert!(
        (HIGH + 1_800_000..HIGH + 1_800_000 + 2 * MORE).contains(&filled),
        "{filled} bytes on wwan0 for {HIGH} ahead and 1.8 MB read"
    );
    // A free link brings all there is, and nothing more is paid for.
    wifi_on("198.51.100.7");
    until_ahead(&mut program, OBJECT_BYTES as u64 - 1_800_000).await;
    let paid = received("wwan0") - before - filled;
    assert!(
        paid < CONTROL_BYTES_MAX,
        "{paid} bytes on wwan0 beside wlan0"
    );
    wifi_off();
    let rest = OBJECT_BYTES - 1_800_000;
    // Without any network.
    assert_eq!(
        program.ask(&format!("read {rest}")).await,
        format!("read {rest}")
    );
    program.leave().await;
}

#[test]
fn an_agent_reads_ahead_by_the_thresholds_of_a_socket() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        cell_on();
        let agent = AgentProcess::start(home.path()).await;
        reads_ahead_by_its_thresholds(home.path(), &to, &agent.socket).await;
    });
}

#[test]
fn a_programs_own_engine_reads_ahead_by_the_thresholds_of_a_socket() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        cell_on();
        reads_ahead_by_its_thresholds(home.path(), &to, Path::new("none")).await;
    });
}

#[test]
fn a_change_of_networks_that_a_program_knows_of_reaches_the_agent() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        wifi_on("198.51.100.7");
        let agent = AgentProcess::start(home.path()).await;
        let told = CProgram::with_d2tp("told.c");
        let mut program = begin(&told, home.path(), &to, &agent, 0);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        assert_eq!(program.ask("read 1000000").await, "read 1000000");
        let pid = pid_of(&agent.child);
        let before = udp_sockets(pid);
        assert!(!before.is_empty());
        // Nothing else gives a link that works another socket.
        // sleep: that no socket comes by itself is the subject
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(udp_sockets(pid).is_subset(&before));
        assert_eq!(program.ask("network").await, "network 0");
        until("the agent has another socket", || {
            !udp_sockets(pid).is_subset(&before)
        })
        .await;
        let rest = OBJECT_BYTES - 1_000_000;
        let read = program.ask(&format!("read {rest}")).await;
        assert_eq!(read, format!("read {rest}"));
        program.leave().await;
    });
}

/// An origin, and a proxy that is reached by streams alone: UDP to it is dropped while the third is held.
fn proxy_behind_blocked_udp(place: PathBuf) -> ((ScriptedOrigin, ProxyProcess), BlockedUdp) {
    origin_namespace(move || async move {
        let udp = BlockedUdp::on("ap0");
        let bytes = object(OBJECT_BYTES, 1);
        let script = move |asked: &OriginRequest| {
            OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
        };
        let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
        let more = ["--stream-listen", "192.0.2.1:0"];
        let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &more).await;
        ((origin, proxy), udp)
    })
}

#[test]
fn a_socket_is_carried_in_a_stream_where_udp_is_blocked_and_net_says_so() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (to, _udp) = proxy_behind_blocked_udp(place);
        wifi_on("198.51.100.7");
        let agent = AgentProcess::start(home.path()).await;
        let told = CProgram::with_d2tp("told.c");
        let mut program = begin(&told, home.path(), &to, &agent, 0);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        assert_eq!(program.ask("read 3000000").await, "read 3000000");
        until_async("`cedos net` says that UDP is blocked", async || {
            let mut command = program::cedos(home.path(), &["net", "--json"]);
            command.env("CEDOS_AGENT", &agent.socket);
            let net = ended(command.spawn().expect("start cedos")).await;
            let mut links = net.events.iter();
            let blocked = |link: &&Value| link["link"] == "wlan0" && link["udp"] == "blocked";
            links.find(blocked).map(|_| ())
        })
        .await;
    });
}

#[test]
fn a_program_with_the_settings_alone_reaches_the_default_proxys_streams_without_an_agent() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (to, _udp) = proxy_behind_blocked_udp(place);
        wifi_on("198.51.100.7");
        assert!(to.1.address.contains("?stream="), "{}", to.1.address);
        let folder = home.path().join(".config/cedos");
        std::fs::create_dir_all(&folder).expect("a directory");
        let settings = format!(
            "[proxies]\nhome = \"{}\"\n[proxy]\ndefault = \"home\"\n",
            to.1.address
        );
        std::fs::write(folder.join("config.toml"), settings).expect("written");
        let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
        let port = url.port().expect("a port").to_string();
        let told = CProgram::with_d2tp("told.c");
        let arguments = ["192.0.2.1", &port, "policy=0"];
        let nobody = Path::new("none");
        let mut program = Program::start(&told, home.path(), "", nobody, &arguments);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        assert_eq!(program.ask("read 3000000").await, "read 3000000");
        program.leave().await;
    });
}

#[test]
fn a_session_that_began_by_the_systems_route_keeps_to_the_links_that_come_up() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        // The system knows where the proxy is before any link has a default route.
        sh("ip link set wlan0 up
            ip addr add 198.51.100.7/24 dev wlan0
            ip route add 192.0.2.1 via 198.51.100.1 dev wlan0");
        let told = CProgram::with_d2tp("told.c");
        let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
        let port = url.port().expect("a port").to_string();
        let arguments = ["192.0.2.1", &port, "policy=0"];
        let (proxy, nobody) = (&to.1.address, Path::new("none"));
        let mut program = Program::start(&told, home.path(), proxy, nobody, &arguments);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        assert_eq!(program.ask("read 100000").await, "read 100000");
        sh("ip route add default via 198.51.100.1 dev wlan0 metric 600");
        cell_on();
        assert_eq!(program.ask("read 1000000").await, "read 1000000");
        wifi_off();
        program.tell("read 10000000").await;
        let leaked = on_cell(4).await;
        assert!(
            leaked < CONTROL_BYTES_MAX,
            "{leaked} bytes on wwan0 for a socket that may not pay"
        );
        wifi_on("198.51.100.99");
        assert_eq!(program.hear().await, "read 10000000");
    });
}

#[test]
fn a_socket_that_may_not_pay_uses_no_route_over_a_metered_link_that_leads_nowhere_else() {
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| origin_and_proxy(place));
        sh("ip link set wwan0 up
            ip addr add 203.0.113.7/24 dev wwan0
            ip route add 192.0.2.1 via 203.0.113.1 dev wwan0");
        let agent = AgentProcess::start(home.path()).await;
        let told = CProgram::with_d2tp("told.c");
        let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
        let port = url.port().expect("a port").to_string();
        let arguments = ["192.0.2.1", &port, "policy=0"];
        let nobody = Path::new("none");
        for socket in [nobody, &*agent.socket] {
            let before = received("wwan0");
            let at = &to.1.address;
            let mut program = Program::start(&told, home.path(), at, socket, &arguments);
            assert_eq!(program.hear().await, "policy 0");
            let waited = tokio::time::timeout(Duration::from_secs(2), program.hear()).await;
            assert!(waited.is_err(), "connected: {waited:?}");
            let leaked = received("wwan0") - before;
            assert!(leaked < CONTROL_BYTES_MAX, "{leaked} bytes on wwan0");
            wifi_on("198.51.100.7");
            assert_eq!(program.hear().await, "connect 0");
            program.leave().await;
            wifi_off();
        }
    });
}
