//! Programs' datagram sockets that a real `cedos agent` carries: what their own engines do is what it does, and what its
//! user says of networks holds for them.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::namespace::{
    cell_on, in_namespace, origin_namespace, received, sent, wifi_off, wifi_on,
};
use cedos_lab_rig::processor_wait::{ProcessorWait, sleep_beside};
use cedos_lab_rig::program::{AgentProcess, ended, pid_of, stop};
use cedos_lab_rig::wait::until_async;
use cedos_lab_rig::{PATIENCE, program, this_test};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

/// What a link may carry besides payload in some seconds: handshakes, acknowledgements, neighbours.
const CONTROL_BYTES_MAX: u64 = 6_000;

/// A server, which no agent carries, and its address.
async fn server(program: &CProgram, home: &Path, host: &str) -> (Program, String) {
    let arguments = ["serve", host];
    let mut server = Program::start(program, home, "", Path::new("none"), &arguments);
    let address = server.hear().await;
    assert!(address.starts_with("d2tp://"), "{address}");
    (server, address)
}

/// A device with an agent, and a server.
struct Device {
    home: tempfile::TempDir,
    program: CProgram,
    agent: AgentProcess,
    server: Program,
    address: String,
}

impl Device {
    async fn new() -> Device {
        let home = tempfile::tempdir().expect("a directory");
        let program = CProgram::with_d2tp("messages.c");
        let (server, address) = server(&program, home.path(), "127.0.0.1").await;
        Device {
            agent: AgentProcess::start(home.path()).await,
            home,
            program,
            server,
            address,
        }
    }

    async fn client_at(&self, socket: &Path) -> Program {
        let arguments = ["to", &self.address];
        let mut client = Program::start(&self.program, self.home.path(), "", socket, &arguments);
        assert_eq!(client.hear().await, "connect 0");
        client
    }

    async fn client(&self) -> Program {
        self.client_at(&self.agent.socket).await
    }

    /// The server hears `text` and answers it.
    async fn answered(&mut self, client: &mut Program, text: &str) {
        let heard = format!("hear {} {text}", text.len());
        assert_eq!(self.server.ask("hear").await, heard);
        assert_eq!(self.server.ask("answer well").await, "answer 4");
        assert_eq!(client.ask("hear").await, "hear 4 well");
    }

    /// Waits until the server's kernel has no peer of that name any more.
    async fn until_gone(&mut self) {
        until_async("its end is the socket's", async || {
            (self.server.ask("answer x").await != "answer 1").then_some(())
        })
        .await;
        let refused = self.server.ask("answer x").await;
        assert!(refused.starts_with("answer ECONNREFUSED"), "{refused}");
    }
}

#[tokio::test]
async fn a_datagram_socket_is_carried_by_the_agent_and_ends_with_it() {
    let mut device = Device::new().await;
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    // What asks something for itself, by the kernel's call, and of the least and most bytes.
    assert_eq!(client.ask("mark 2 30000 on-each").await, "mark 7");
    device.answered(&mut client, "on-each").await;
    assert_eq!(client.ask("write plain").await, "write 5");
    device.answered(&mut client, "plain").await;
    assert_eq!(client.ask("many 1 0 0").await, "many 1");
    assert_eq!(device.server.ask("hear").await, "hear 0 ");
    assert_eq!(client.ask("many 1 1100 0").await, "many 1");
    assert_eq!(device.server.ask("hear").await, "hear 1100 ");
    let large = client.ask("many 1 9000 0").await;
    assert!(large.starts_with("many EMSGSIZE"), "{large}");
    // A burst, by either way.
    assert_eq!(client.ask("many 60 1000 0").await, "many 60");
    assert_eq!(device.server.ask("count 500 60").await, "count 60 60000");
    assert_eq!(client.ask("info").await, "info 2 61117 12 1");
    // What fits grows with the path, and the program hears of it.
    until_async("loopback carries more than 1,100 bytes", async || {
        (client.ask("many 1 1300 0").await == "many 1").then_some(())
    })
    .await;
    assert_eq!(device.server.ask("hear").await, "hear 1300 ");
    // The session is not this process's.
    device.agent.kill().await;
    let broken = client.ask("hear").await;
    let gone = "ECONNRESET: the agent that carried this connection is gone";
    assert_eq!(broken, format!("hear {gone}"));
    assert_eq!(client.ask("say x").await, format!("say {gone}"));
    assert_eq!(client.ask("info").await, "info 3 0 0 0");
    // And may be another now.
    let again = format!("call {}", device.address);
    assert_eq!(client.ask(&again).await, "connect 0");
    assert_eq!(client.ask("say alone").await, "say 5");
    assert_eq!(device.server.ask("hear").await, "hear 5 alone");
    client.leave().await;
}

#[tokio::test]
async fn a_session_that_ends_has_its_errno_and_its_cause_through_the_agent() {
    let mut device = Device::new().await;
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    assert_eq!(client.ask("deadline 1").await, "deadline 0");
    let late = client.ask("hear").await;
    assert!(late.starts_with("hear ETIME: "), "{late}");
    assert!(late.contains("deadline passed"), "{late}");
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    assert_eq!(device.server.ask("close").await, "close 0");
    let closed = client.ask("hear").await;
    assert!(closed.starts_with("hear ECONNRESET: "), "{closed}");
    assert!(!closed.contains("agent"), "{closed}");
}

#[tokio::test]
async fn the_socket_ends_with_its_last_descriptor_or_its_program_and_not_before() {
    let mut device = Device::new().await;
    for ends in ["close", "exit bye", "die bye"] {
        let mut client = device.client().await;
        assert_eq!(client.ask("twin").await, "twin 0");
        assert_eq!(client.ask("child inherited").await, "child 0");
        device.answered(&mut client, "inherited").await;
        match ends {
            "close" => assert_eq!(client.ask("close").await, "close 0"),
            _ => {
                client.tell(ends).await;
                let ended = tokio::time::timeout(PATIENCE, client.child.wait()).await;
                ended.expect("it ends").expect("a status");
                // Whatever it said was said.
                assert_eq!(device.server.ask("hear").await, "hear 3 bye", "{ends}");
            }
        }
        device.until_gone().await;
    }
    // One that is gone before an agent has taken anything.
    let arguments = ["to", &device.address, "say=hasty"];
    let (home, socket) = (device.home.path(), &device.agent.socket);
    let mut client = Program::start(&device.program, home, "", socket, &arguments);
    assert_eq!(device.server.ask("hear").await, "hear 5 hasty");
    client.leave().await;
}

/// The agent still keeps the session with the server that was killed, and does not know yet that it is over.
#[tokio::test]
async fn what_is_sent_to_a_server_that_was_started_anew_arrives_although_its_program_has_ended() {
    let mut device = Device::new().await;
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    assert_eq!(client.ask("close").await, "close 0");
    client.leave().await;
    device.server.child.kill().await.expect("it runs");
    let port = device.address.rsplit(':').next().expect("a port");
    let port = format!("port={}", port.split('/').next().expect("a port"));
    let (home, arguments) = (device.home.path(), ["serve", "127.0.0.1", &port]);
    let mut server = Program::start(&device.program, home, "", Path::new("none"), &arguments);
    assert_eq!(server.hear().await, device.address);
    let arguments = ["to", &device.address, "say=news"];
    let mut client = Program::start(&device.program, home, "", &device.agent.socket, &arguments);
    assert_eq!(server.ask("hear").await, "hear 4 news");
    client.leave().await;
}

#[tokio::test]
async fn a_call_elsewhere_ends_the_one_before() {
    let mut device = Device::new().await;
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    let (mut other, address) = server(&device.program, device.home.path(), "127.0.0.1").await;
    assert_eq!(client.ask(&format!("call {address}")).await, "connect 0");
    assert_eq!(client.ask("say there").await, "say 5");
    assert_eq!(other.ask("hear").await, "hear 5 there");
    device.until_gone().await;
    client.leave().await;
}

#[tokio::test]
async fn options_hold_for_the_next_message_and_a_stopped_agent_holds_nobody_for_long() {
    let mut device = Device::new().await;
    let mut client = device.client().await;
    assert_eq!(client.ask("say hello").await, "say 5");
    device.answered(&mut client, "hello").await;
    // Nothing leaves, but what it is worth is known.
    stop(&device.agent.child);
    let wait = ProcessorWait::of(&[pid_of(&client.child)]);
    let begun = Instant::now();
    assert_eq!(client.ask("expiry 60000").await, "expiry 0");
    assert_eq!(client.ask("say later").await, "say 5");
    for _ in 0..400 {
        assert_eq!(client.ask("mark 0 1000 x").await, "mark 1");
    }
    let took = begun.elapsed().saturating_sub(wait.so_far());
    assert!(took < Duration::from_secs(10), "{took:?}");
    kill(pid_of(&device.agent.child), Signal::SIGCONT).expect("send");
    assert_eq!(client.ask("say last").await, "say 4");
    let said = device.server.ask("count 1000 3").await;
    let count = said
        .strip_prefix("count ")
        .and_then(|s| s.split(' ').next());
    let count: usize = count.and_then(|n| n.parse().ok()).expect("a number");
    // The library keeps 64, and the socket to the agent holds fewer than 300 before those (208 KiB, 768 B each): the agent
    // sends them as it reads them, or drops some. All others were dropped at once.
    assert!((3..=2 + 64 + 300 + 1).contains(&count), "{said}");
    client.leave().await;
}

#[tokio::test]
async fn without_an_agent_that_understands_the_programs_own_engine_carries_datagrams() {
    let mut device = Device::new().await;
    // One that knows of sockets, and not of these: it takes a call by the fields it has.
    let old = device.home.path().join("old.sock");
    let listener = tokio::net::UnixListener::bind(&old).expect("a socket");
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            let _ = stream.read_line(&mut line).await;
            let known = !line.contains("datagrams");
            let answer = format!("{{\"event\":\"taken\",\"ok\":{known},\"version\":1}}\n");
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    // One that takes a call and is gone before its session is there.
    let brief = device.home.path().join("brief.sock");
    let listener = tokio::net::UnixListener::bind(&brief).expect("a socket");
    let going = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let taken = b"{\"event\":\"taken\",\"ok\":true,\"version\":1,\"notices\":true}\n";
            let mut asked = [0; 4096];
            let _ = stream.read(&mut asked).await;
            let _ = stream.write_all(taken).await;
            // sleep: an agent that is there for a moment is the subject
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    });
    let dead = device.home.path().join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).expect("a socket"));
    let nowhere = device.home.path().join("nowhere.sock");
    for socket in [&*old, &*brief, &*dead, &*nowhere, Path::new("none")] {
        let mut client = device.client_at(socket).await;
        assert_eq!(client.ask("say first").await, "say 5");
        assert_eq!(client.ask("say second").await, "say 6");
        let name = socket.display();
        assert_eq!(device.server.ask("hear").await, "hear 5 first", "{name}");
        device.answered(&mut client, "second").await;
        client.leave().await;
    }
    serving.abort();
    going.abort();
}

async fn cedos(home: &Path, agent: &AgentProcess, arguments: &[&str]) -> Value {
    let mut command = program::cedos(home, arguments);
    command.env("CEDOS_AGENT", &agent.socket);
    let run = ended(command.spawn().expect("start cedos")).await;
    assert_eq!(run.code, 0, "{}", run.errors);
    run.last().clone()
}

/// Bytes that the kernel counts on a link, both ways.
fn on(link: &str) -> u64 {
    received(link) + sent(link)
}

/// What the agent's figures say of payload on free links and on those that cost, up and down.
async fn figures(at: &str) -> (u64, u64) {
    let mut stream = tokio::net::TcpStream::connect(at)
        .await
        .expect("it listens");
    let ask = format!("GET /metrics HTTP/1.1\r\nHost: {at}\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.expect("it listens");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("text");
    let of = |class: &str| {
        let begin = format!("cedos_bytes_total{{class=\"{class}\"");
        let lines = text.lines().filter(|line| line.starts_with(&begin));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        values.sum::<u64>()
    };
    (of("free"), of("metered"))
}

/// Waits until the agent has counted as many bytes as these, and asserts that it has counted no more.
async fn until_figures(at: &str, expected: (u64, u64)) {
    // Each second, and nothing tells of it.
    let counted = until_async("the bytes are counted", async || {
        let counted = figures(at).await;
        (counted.0 >= expected.0).then_some(counted)
    });
    assert_eq!(counted.await, expected);
}

#[test]
fn what_the_user_says_of_networks_holds_for_datagrams_and_their_bytes_are_counted() {
    const FIGURES: &str = "127.0.0.1:9646";
    in_namespace(this_test!(), || async {
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let (mut server, address) = origin_namespace(|| async move {
            let program = CProgram::with_d2tp("messages.c");
            server(&program, &place, "192.0.2.1").await
        });
        wifi_on("198.51.100.7");
        cell_on();
        let agent = AgentProcess::start_with(home.path(), &["--metrics", FIGURES]).await;
        let program = CProgram::with_d2tp("messages.c");
        // Any network, if this were a stream.
        let arguments = ["to", &address, "policy=4"];
        let mut client = Program::start(&program, home.path(), "", &agent.socket, &arguments);
        assert_eq!(client.hear().await, "connect 0");
        assert_eq!(client.ask("say hello").await, "say 5");
        assert_eq!(server.ask("hear").await, "hear 5 hello");
        assert_eq!(server.ask("answer well").await, "answer 4");
        assert_eq!(client.ask("hear").await, "hear 4 well");
        let (wifi, cell) = (on("wlan0"), on("wwan0"));
        server.tell("count 2000 500").await;
        assert_eq!(client.ask("many 500 1000 2000").await, "many 500");
        assert_eq!(server.hear().await, "count 500 500000");
        assert!(on("wlan0") - wifi > 500_000);
        let leaked = on("wwan0") - cell;
        assert!(leaked < CONTROL_BYTES_MAX, "{leaked} bytes on wwan0");
        until_figures(FIGURES, (500_009, 0)).await;
        // Its user says that this network costs, which its program does not know.
        cedos(
            home.path(),
            &agent,
            &["net", "set", "wlan0", "metered", "--json"],
        )
        .await;
        assert_eq!(client.ask("expiry 200").await, "expiry 0");
        // sleep: the path is to be granted nothing any more; grants last a second
        sleep_beside(Duration::from_secs(1), &[pid_of(&agent.child)]).await;
        let (wifi, cell) = (on("wlan0"), on("wwan0"));
        assert_eq!(client.ask("many 200 1000 2000").await, "many 200");
        assert_eq!(client.ask("mark 2 100 each").await, "mark 4");
        assert_eq!(server.ask("count 1000").await, "count 0 0");
        let leaked = (on("wlan0") - wifi, on("wwan0") - cell);
        assert!(
            leaked.0 < CONTROL_BYTES_MAX && leaked.1 < CONTROL_BYTES_MAX,
            "{leaked:?} bytes"
        );
        cedos(
            home.path(),
            &agent,
            &["net", "set", "wlan0", "auto", "--json"],
        )
        .await;
        assert_eq!(client.ask("expiry 30000").await, "expiry 0");
        assert_eq!(client.ask("say again").await, "say 5");
        assert_eq!(server.ask("hear").await, "hear 5 again");
        // Without a free one it waits, as long as it is worth.
        wifi_off();
        // What leaves before the agent knows is lost.
        until_async("the agent knows that the link is gone", async || {
            client.ask("info").await.ends_with(" 0").then_some(())
        })
        .await;
        let cell = on("wwan0");
        assert_eq!(client.ask("mark 0 300 soon-worthless").await, "mark 14");
        assert_eq!(client.ask("many 60 1000 2000").await, "many 60");
        // sleep: that nothing comes in a second is the subject
        tokio::time::sleep(Duration::from_secs(1)).await;
        let leaked = on("wwan0") - cell;
        assert!(leaked < CONTROL_BYTES_MAX, "{leaked} bytes on wwan0");
        wifi_on("198.51.100.99");
        assert_eq!(server.ask("count 3000 60").await, "count 60 60000");
        until_figures(FIGURES, (560_014, 0)).await;
        let budget = cedos(home.path(), &agent, &["budget", "--json"]).await;
        assert_eq!(budget["used"], 0, "{budget}");
        // What one message asks of paths reaches the agent.
        cedos(
            home.path(),
            &agent,
            &["net", "set", "wwan0", "free", "--json"],
        )
        .await;
        until_async("two paths", async || {
            client.ask("info").await.ends_with(" 4 2").then_some(())
        })
        .await;
        // sleep: what the new path asks in its first second is not to be counted
        tokio::time::sleep(Duration::from_secs(1)).await;
        let text = "x".repeat(190);
        let copied = async |client: &mut Program, server: &mut Program, route: u8| {
            let before = [on("wlan0"), on("wwan0")];
            for _ in 0..60 {
                let mark = format!("mark {route} 30000 {text}");
                assert_eq!(client.ask(&mark).await, "mark 190");
            }
            assert_eq!(server.ask("count 1000 60").await, "count 60 11400");
            [on("wlan0") - before[0], on("wwan0") - before[1]]
        };
        let each = copied(&mut client, &mut server, 2).await;
        assert!(each.iter().all(|bytes| *bytes > 11_400), "{each:?}");
        let any = copied(&mut client, &mut server, 0).await;
        assert!(any.iter().any(|bytes| *bytes < 11_400), "{any:?}");
    });
}
