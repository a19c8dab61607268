//! Programs in C that use libd2tp, beside a real `cedos agent`: it carries their sockets, through a real
//! D2Prox to an origin of the test, or from one program to another.

mod get_origin;
mod get_rig;
#[path = "../../../edge/capi/tests/support/mod.rs"]
mod support;
mod told;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use get_rig::{PATIENCE, Proxy, proxy};
use nix::sys::signal::{Signal, kill};
use support::C;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;
use told::{Agent, Program, pid_of};

/// More than the kernel and the flow hold between them before an origin reads.
const MUCH: usize = 6_000_000;

/// A device with an agent, a D2Prox, and an origin that the test itself plays.
struct Device {
    home: tempfile::TempDir,
    program: C,
    proxy: Proxy,
    agent: Agent,
    origin: TcpListener,
}

impl Device {
    async fn new() -> Device {
        let home = tempfile::tempdir().expect("a directory");
        Device {
            program: C::with_d2tp("told.c"),
            proxy: proxy(home.path(), "127.0.0.1:0", &[]).await,
            agent: Agent::start(home.path()).await,
            origin: TcpListener::bind("127.0.0.1:0").await.expect("a port"),
            home,
        }
    }

    fn program_at(&self, socket: &Path, more: &[&str]) -> Program {
        let at = self.origin.local_addr().expect("an address");
        let port = at.port().to_string();
        let arguments = [&["127.0.0.1", &port][..], more].concat();
        let (home, proxy) = (self.home.path(), &self.proxy.address);
        Program::start(&self.program, home, proxy, socket, &arguments)
    }

    fn program(&self, more: &[&str]) -> Program {
        self.program_at(&self.agent.socket, more)
    }

    async fn accept(&self) -> TcpStream {
        let accepted = timeout(PATIENCE, self.origin.accept()).await;
        accepted.expect("in time").expect("a connection").0
    }

    /// A program that is connected, and the other end.
    async fn connected(&self, more: &[&str]) -> (Program, TcpStream) {
        let mut program = self.program(more);
        if more.contains(&"persist") {
            assert_eq!(program.hear().await, "persist 0");
        }
        let there = self.accept().await;
        assert_eq!(program.hear().await, "connect 0");
        (program, there)
    }

    fn signal_proxy(&self, signal: Signal) {
        kill(pid_of(&self.proxy.child), signal).expect("send");
    }
}

async fn all_of(mut there: TcpStream) -> std::io::Result<usize> {
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, there.read_to_end(&mut bytes)).await;
    read.expect("in time").map(|_| bytes.len())
}

#[tokio::test]
async fn a_socket_is_carried_by_the_agent_both_ways_with_ends_that_are_ends() {
    let device = Device::new().await;
    let (mut program, mut there) = device.connected(&[]).await;
    assert_eq!(program.ask("write 200000").await, "write 200000");
    assert_eq!(program.ask("flush 30000").await, "flush 0");
    assert_eq!(program.ask("info").await, "info 2 200000 200000 0");
    assert_eq!(program.ask("end").await, "end 0");
    let mut bytes = vec![0; 200_001];
    let mut got = 0;
    while let more @ 1.. = there.read(&mut bytes[got..]).await.expect("it comes") {
        got += more;
    }
    assert_eq!(got, 200_000);
    // The other direction is open yet.
    there.write_all(&[7; 70_000]).await.expect("it is taken");
    drop(there);
    assert_eq!(program.ask("read 100000").await, "read 70000");
    // Nothing of it was this program's own: with the agent it is gone.
    let (mut other, _there) = device.connected(&[]).await;
    device.agent.kill().await;
    let broken = other.ask("read 1").await;
    assert_eq!(
        broken,
        "read ECONNRESET: the agent that carried this connection is gone"
    );
    assert_eq!(other.ask("info").await, "info 3 0 0 0");
    other.leave().await;
    program.leave().await;
}

#[tokio::test]
async fn what_breaks_the_connection_has_its_errno_and_its_cause() {
    let device = Device::new().await;
    let (mut program, there) = device.connected(&[]).await;
    assert_eq!(program.ask("deadline 1").await, "deadline 0");
    let late = program.ask("read 1").await;
    assert!(late.starts_with("read ETIME: "), "{late}");
    assert!(late.contains("deadline passed"), "{late}");
    drop(there);
    let (mut program, there) = device.connected(&[]).await;
    socket2::SockRef::from(&there)
        .set_linger(Some(Duration::ZERO))
        .expect("set");
    drop(there);
    let broken = program.ask("read 1").await;
    assert!(broken.starts_with("read ECONNRESET: "), "{broken}");
    assert!(!broken.contains("agent"), "{broken}");
    // Nobody listens there.
    let free = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = free.local_addr().expect("an address").port().to_string();
    drop(free);
    let (home, proxy) = (device.home.path(), &device.proxy.address);
    let arguments = ["127.0.0.1", &port];
    let program = &device.program;
    let mut program = Program::start(program, home, proxy, &device.agent.socket, &arguments);
    let refused = program.hear().await;
    assert!(
        refused.starts_with("connect ECONNREFUSED: the proxy refuses (502)"),
        "{refused}"
    );
}

#[tokio::test]
async fn flushes_that_were_given_up_keep_nothing_else_waiting() {
    let device = Device::new().await;
    let (mut program, there) = device.connected(&[]).await;
    device.signal_proxy(Signal::SIGSTOP);
    assert_eq!(program.ask("write 10000").await, "write 10000");
    // More than an agent waits for at a time.
    for _ in 0..100 {
        let late = program.ask("flush 5").await;
        assert!(late.starts_with("flush EAGAIN"), "{late}");
    }
    let begun = Instant::now();
    assert_eq!(program.ask("info").await, "info 2 10000 0 0");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?} for an answer");
    device.signal_proxy(Signal::SIGCONT);
    assert_eq!(program.ask("flush 30000").await, "flush 0");
    program.leave().await;
    assert_eq!(all_of(there).await.expect("an end"), 10_000);
}

#[tokio::test]
async fn what_a_persistent_socket_wrote_goes_on_after_kill_9_and_after_exit() {
    let device = Device::new().await;
    for ends in ["die", "exit"] {
        let (mut program, there) = device.connected(&["persist"]).await;
        // Nothing leaves while the program lives.
        device.signal_proxy(Signal::SIGSTOP);
        let wrote = program.ask(&format!("write {MUCH}")).await;
        assert_eq!(wrote, format!("write {MUCH}"));
        match ends {
            "die" => {
                program.tell("die").await;
                program.child.wait().await.expect("it ends");
            }
            _ => program.leave().await,
        }
        device.signal_proxy(Signal::SIGCONT);
        assert_eq!(all_of(there).await.expect("an end"), MUCH, "{ends}");
    }
}

#[tokio::test]
async fn what_is_not_persistent_ends_soon_after_its_program_and_never_as_if_it_were_whole() {
    let device = Device::new().await;
    let (mut program, there) = device.connected(&[]).await;
    device.signal_proxy(Signal::SIGSTOP);
    program.tell(&format!("write {MUCH}")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    kill(pid_of(&program.child), Signal::SIGKILL).expect("send");
    program.child.wait().await.expect("it ends");
    tokio::time::sleep(Duration::from_secs(6)).await;
    device.signal_proxy(Signal::SIGCONT);
    // The agent gave it up, though the proxy answers again.
    let got = all_of(there).await;
    assert!(got.is_err(), "an end after {got:?} of {MUCH} bytes");
}

#[tokio::test]
async fn without_an_agent_that_understands_the_programs_own_engine_carries() {
    let device = Device::new().await;
    // One that says no to everything, as one does that does not know of sockets.
    let old = device.home.path().join("old.sock");
    let listener = tokio::net::UnixListener::bind(&old).expect("a socket");
    let serving = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            let _ = stream.read_line(&mut line).await;
            let no = "{\"ok\":false,\"exit\":2,\"text\":\"that is no request\"}\n";
            let _ = stream.write_all(no.as_bytes()).await;
        }
    });
    // One that died, and left its socket.
    let dead = device.home.path().join("dead.sock");
    drop(std::os::unix::net::UnixListener::bind(&dead).expect("a socket"));
    let nowhere = device.home.path().join("nowhere.sock");
    for socket in [&*old, &*dead, &*nowhere, Path::new("none")] {
        let mut program = device.program_at(socket, &[]);
        let mut there = device.accept().await;
        assert_eq!(program.hear().await, "connect 0", "{}", socket.display());
        there.write_all(b"hello").await.expect("it is taken");
        assert_eq!(program.ask("read 5").await, "read 5");
        program.leave().await;
    }
    // What cannot be kept is not promised.
    for socket in [&*dead, &*nowhere, Path::new("none")] {
        let mut program = device.program_at(socket, &["persist"]);
        let refused = program.hear().await;
        assert!(
            refused.starts_with("persist EOPNOTSUPP: a connection that outlives its program"),
            "{refused}"
        );
        assert!(refused.contains("cedos agent"), "{refused}");
    }
    let mut program = device.program_at(&old, &["persist"]);
    assert_eq!(program.hear().await, "persist 0");
    let refused = program.hear().await;
    assert!(refused.starts_with("connect EOPNOTSUPP: "), "{refused}");
    serving.abort();
}

/// The library's own programs, with an agent and without.
#[tokio::test]
async fn programs_say_the_same_with_an_agent() {
    let home = tempfile::tempdir().expect("a directory");
    let agent = Agent::start(home.path()).await;
    for source in ["echo.c", "deadline.c", "forks.c", "quiet.c"] {
        let program = C::with_d2tp(source);
        let mut command: Command = program.command().into();
        command.env("CEDOS_AGENT", &agent.socket);
        let said = timeout(PATIENCE, command.output()).await.expect("it ends");
        let output = said.expect("it runs");
        assert_eq!(support::told(source, output), "ok\n");
    }
    let program = C::with_d2tp("conformance.c");
    let mut seen = Vec::new();
    for socket in [&*agent.socket, Path::new("none")] {
        let mut command: Command = program.command().into();
        command.env("CEDOS_AGENT", socket);
        let begun = Instant::now();
        let output = command.output().await.expect("it runs");
        eprintln!("{}: {:?}", socket.display(), begun.elapsed());
        let said = support::told("conformance", output);
        let steps = said.lines().filter_map(|line| {
            let (step, value) = line.rsplit_once(':')?;
            Some((step.to_owned(), value.to_owned()))
        });
        seen.push(steps.collect::<BTreeMap<String, String>>());
    }
    assert!(seen[1].len() > 200, "only {} steps ran", seen[1].len());
    let differ: Vec<_> = seen[1]
        .iter()
        .filter(|(step, value)| seen[0].get(*step) != Some(value))
        .map(|(step, value)| (step, value, seen[0].get(step)))
        .collect();
    assert!(differ.is_empty(), "alone and with an agent: {differ:?}");
}
