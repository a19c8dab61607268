//! Programs in C that use libd2tp, beside a real `cedos agent`: it carries their sockets, through a real
//! D2Prox to an origin of the test, or from one program to another.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::CProgram;
use crate::told::{Program, udp_sockets};
use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::processor_wait::{ProcessorWait, sleep_beside};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, device_key, pid_of, stop};
use cedos_lab_rig::wait::{until, until_async};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::time::timeout;

/// More than the kernel and the flow hold between them before an origin reads.
const MUCH: usize = 6_000_000;

/// A device with an agent, a D2Prox, and an origin that the test itself plays.
pub struct Device {
    pub home: tempfile::TempDir,
    program: CProgram,
    pub proxy: ProxyProcess,
    pub agent: AgentProcess,
    origin: TcpListener,
}

impl Device {
    pub async fn new() -> Device {
        let home = tempfile::tempdir().expect("a directory");
        Device {
            program: CProgram::with_d2tp("told.c"),
            proxy: ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await,
            agent: AgentProcess::start(home.path()).await,
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

    pub fn program(&self, more: &[&str]) -> Program {
        self.program_at(&self.agent.socket, more)
    }

    /// A program with these environment variables.
    pub fn program_around(&self, around: &[(&str, &str)]) -> Program {
        let at = self.origin.local_addr().expect("an address");
        let arguments = ["127.0.0.1", &at.port().to_string()];
        let (home, proxy, socket) = (self.home.path(), &self.proxy.address, &self.agent.socket);
        Program::start_among(&self.program, home, proxy, socket, &arguments, around)
    }

    /// A program that connects to a D2TP server.
    pub fn program_to(&self, server: &str) -> Program {
        let (home, socket) = (self.home.path(), &self.agent.socket);
        Program::start(&self.program, home, "", socket, &[server, ""])
    }

    pub async fn accept(&self) -> TcpStream {
        let accepted = timeout(PATIENCE, self.origin.accept()).await;
        accepted.expect("in time").expect("a connection").0
    }

    /// A program that is connected, and the other end.
    pub async fn connected(&self, more: &[&str]) -> (Program, TcpStream) {
        let mut program = self.program(more);
        if more.contains(&"persist") || more.contains(&"open") {
            assert_eq!(program.hear().await, "persist 0");
        }
        let there = self.accept().await;
        assert_eq!(program.hear().await, "connect 0");
        (program, there)
    }

    fn signal_proxy(&self, signal: Signal) {
        match signal {
            Signal::SIGSTOP => stop(&self.proxy.child),
            _ => kill(pid_of(&self.proxy.child), signal).expect("send"),
        }
    }
}

pub async fn all_of(mut there: TcpStream) -> std::io::Result<usize> {
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
    let mut info = String::new();
    while !info.starts_with("info 3 ") {
        info = program.ask("info").await;
    }
    assert_eq!(info, "info 3 200000 200000 70000");
    // Nothing of it was this program's own: with the agent it is gone.
    let mut other = device.program_around(&[("CEDOS_AGENT_WAIT", "0")]);
    let _there = device.accept().await;
    assert_eq!(other.hear().await, "connect 0");
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
async fn a_program_that_reads_nothing_has_data_read_ahead_once_it_sets_thresholds() {
    let device = Device::new().await;
    for socket in [Path::new("none"), &*device.agent.socket] {
        let mut program = device.program_at(socket, &[]);
        let mut there = device.accept().await;
        assert_eq!(program.hear().await, "connect 0");
        let writing = tokio::spawn(async move {
            there.write_all(&[7; MUCH]).await.expect("it is taken");
            there
        });
        let mut ahead = async || {
            let said = program.ask("ahead").await;
            let bytes = said.strip_prefix("ahead ").and_then(|n| n.parse().ok());
            bytes.expect("a number of bytes")
        };
        // The kernel has as much of it as it takes.
        let mut full: usize = 0;
        loop {
            // sleep: nothing tells that no more is taken
            tokio::time::sleep(Duration::from_millis(300)).await;
            let now = ahead().await;
            if now > 0 && now == full {
                break;
            }
            full = now;
        }
        assert!(full < MUCH, "{full} bytes without thresholds");
        assert_eq!(program.ask("levels 500000 4000000").await, "levels 0");
        until_async("all is read ahead", async || {
            let said = program.ask("ahead").await;
            (said == format!("ahead {MUCH}")).then_some(())
        })
        .await;
        let _there = writing.await.expect("it was written");
        let read = format!("read {MUCH}");
        assert_eq!(program.ask(&read).await, read);
        program.leave().await;
    }
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
    let nobody = HeldPort::take();
    let port = nobody.number().to_string();
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
    let wait = ProcessorWait::of(&[pid_of(&program.child), pid_of(&device.agent.child)]);
    let begun = Instant::now();
    assert_eq!(program.ask("info").await, "info 2 10000 0 0");
    let took = begun.elapsed().saturating_sub(wait.so_far());
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
    // sleep: the write is to reach the agent, which tells nobody while the proxy is stopped
    tokio::time::sleep(Duration::from_millis(500)).await;
    kill(pid_of(&program.child), Signal::SIGKILL).expect("send");
    program.child.wait().await.expect("it ends");
    // sleep: the agent gives a connection up five seconds after its program; nothing tells of it
    sleep_beside(Duration::from_secs(6), &[pid_of(&device.agent.child)]).await;
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

impl Device {
    /// The token of a connection, in hexadecimal.
    pub async fn token(&self, program: &mut Program) -> String {
        let said = program.ask("token").await;
        let token = said
            .strip_prefix("token ")
            .and_then(|t| t.strip_suffix(" 2"));
        let token = token.unwrap_or_else(|| panic!("{said}"));
        assert_eq!(token.len(), 64, "{said}");
        token.to_owned()
    }

    /// What another program hears that opens a connection again.
    pub async fn reopen(&self, token: &str) -> (Program, String) {
        let mut program = self.program(&[token]);
        let said = program.hear().await;
        (program, said)
    }
}

async fn killed(program: &mut Program) {
    kill(pid_of(&program.child), Signal::SIGKILL).expect("send");
    program.child.wait().await.expect("it ends");
}

/// Bytes that do not repeat.
pub fn content(count: usize) -> Vec<u8> {
    (0..count as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u8)
        .collect()
}

#[tokio::test]
async fn another_process_reads_on_where_one_was_killed() {
    let device = Device::new().await;
    let (mut program, mut there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    let all = content(MUCH);
    let sent = all.clone();
    let sending = tokio::spawn(async move {
        there.write_all(&sent).await.expect("it is taken");
        there
    });
    let path = device.home.path().join("copy");
    let copy = |count: usize| format!("copy {count} {}", path.display());
    assert_eq!(program.ask(&copy(1_234_567)).await, "copy 1234567");
    // It has not read what it was told to write.
    assert_eq!(program.ask("write 50000").await, "write 50000");
    // As long as it lives it is nobody else's.
    assert_eq!(device.reopen(&token).await.1, "reopen EBUSY");
    killed(&mut program).await;
    let (mut second, said) = device.reopen(&token).await;
    assert_eq!(said, "reopen 0");
    assert_eq!(second.ask(&copy(2_000_000)).await, "copy 2000000");
    // By no death of a program is anything lost, nor by the next one's.
    killed(&mut second).await;
    let (mut third, said) = device.reopen(&token).await;
    assert_eq!(said, "reopen 0");
    assert_eq!(device.token(&mut third).await, token);
    let rest = MUCH - 3_234_567;
    assert_eq!(third.ask(&copy(rest)).await, format!("copy {rest}"));
    assert!(std::fs::read(&path).expect("a file") == all, "not the same");
    // What it writes is counted from the beginning, as is what it waits for.
    assert_eq!(third.ask("write 70000").await, "write 70000");
    assert_eq!(third.ask("flush 30000").await, "flush 0");
    let info = third.ask("info").await;
    assert_eq!(info, format!("info 2 120000 120000 {MUCH}"));
    let there = sending.await.expect("all was taken");
    // Closed, it is over: for the peer, and for who has the token.
    assert_eq!(third.ask("close").await, "close 0");
    assert_eq!(all_of(there).await.expect("an end"), 120_000);
    assert_eq!(device.reopen(&token).await.1, "reopen ENOENT");
    third.leave().await;
}

#[tokio::test]
async fn what_comes_while_nobody_is_there_waits_and_flow_control_holds_the_rest() {
    let device = Device::new().await;
    let (mut program, there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    // An end without a close leaves it open, too.
    program.leave().await;
    let all = content(8 * MUCH);
    let (mut from, mut to) = there.into_split();
    let sent = all.clone();
    let sending = tokio::spawn(async move {
        to.write_all(&sent).await.expect("it is taken");
        to.shutdown().await.expect("it ends");
    });
    // sleep: that flow control holds the writer back for so long is the subject
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(!sending.is_finished(), "{} bytes are nowhere", all.len());
    let (mut second, said) = device.reopen(&token).await;
    assert_eq!(said, "reopen 0");
    let path = device.home.path().join("copy");
    let copy = format!("copy {} {}", all.len() + 1, path.display());
    assert_eq!(second.ask(&copy).await, format!("copy {}", all.len()));
    assert!(std::fs::read(&path).expect("a file") == all, "not the same");
    assert_eq!(second.ask("write 5").await, "write 5");
    assert_eq!(second.ask("close").await, "close 0");
    let mut bytes = Vec::new();
    let read = timeout(PATIENCE, from.read_to_end(&mut bytes)).await;
    assert_eq!(read.expect("in time").expect("an end"), 5);
}

#[tokio::test]
async fn a_connection_is_opened_again_by_its_token_only_and_not_after_its_end() {
    let device = Device::new().await;
    let (mut program, there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    let (mut plain, _there) = device.connected(&["persist"]).await;
    // It has none, so its number is all it says.
    assert_eq!(plain.ask("token").await, "token 01000000 1");
    let other = "0".repeat(64);
    assert_eq!(device.reopen(&other).await.1, "reopen ENOENT");
    // Why it broke meanwhile is known.
    assert_eq!(program.ask("deadline 4").await, "deadline 0");
    // The agent answers after it heard of that.
    assert_eq!(program.ask("info").await, "info 2 0 0 0");
    killed(&mut program).await;
    assert!(all_of(there).await.is_err(), "the peer hears of it");
    let known = async {
        loop {
            let said = device.reopen(&token).await.1;
            // The peer's end may be the first.
            if said != "reopen 0" && said != "reopen EBUSY" {
                return said;
            }
        }
    };
    let known = timeout(PATIENCE, known).await;
    assert_eq!(known.expect("the deadline passes here too"), "reopen ETIME");
    // With the agent goes what it keeps.
    let (mut program, _there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    killed(&mut program).await;
    let home = device.home.path().to_owned();
    let (agent, proxy, at) = (device.agent, device.proxy, device.origin.local_addr());
    let socket = agent.socket.clone();
    agent.kill().await;
    let port = at.expect("an address").port().to_string();
    let again = |socket: &Path| {
        let arguments = ["127.0.0.1", &port, &token];
        Program::start(&device.program, &home, &proxy.address, socket, &arguments)
    };
    assert_eq!(again(&socket).hear().await, "reopen EOPNOTSUPP");
    assert_eq!(again(Path::new("none")).hear().await, "reopen EOPNOTSUPP");
    std::fs::remove_file(&socket).expect("what it left");
    let agent = AgentProcess::start(&home).await;
    assert_eq!(again(&agent.socket).hear().await, "reopen ENOENT");
}

#[tokio::test]
async fn another_users_process_gets_nothing_by_a_token() {
    use std::io::{BufRead as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;
    const NOBODY: libc::uid_t = 65_534;
    let device = Device::new().await;
    let (mut program, _there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    killed(&mut program).await;
    if !nix::unistd::geteuid().is_root() {
        eprintln!("not tried: only root is other users too");
        return;
    }
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("ours");
    };
    open(device.home.path());
    open(&device.agent.socket);
    let at = device.agent.socket.clone();
    let line = format!("{{\"do\":\"reopen\",\"version\":1,\"token\":\"{token}\"}}\n");
    let asks = move |uid: libc::uid_t| {
        // SAFETY: plain numbers; of this thread alone, unlike the C library's call.
        let set = unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) };
        assert_eq!(set, 0);
        let mut stream = std::os::unix::net::UnixStream::connect(&at).expect("it is open");
        let mut said = String::new();
        // It may be gone already.
        if stream.write_all(line.as_bytes()).is_ok() {
            let _ = std::io::BufReader::new(stream).read_line(&mut said);
        }
        said
    };
    let same = asks.clone();
    let asked =
        tokio::task::spawn_blocking(move || std::thread::spawn(move || asks(NOBODY)).join());
    assert_eq!(asked.await.expect("it runs").expect("it asks"), "");
    let asked = tokio::task::spawn_blocking(move || std::thread::spawn(move || same(0)).join());
    let said = asked.await.expect("it runs").expect("it asks");
    assert!(said.contains("taken"), "{said}");
}

/// The library's own programs, with an agent and without.
#[tokio::test]
async fn programs_say_the_same_with_an_agent() {
    let home = tempfile::tempdir().expect("a directory");
    let agent = AgentProcess::start(home.path()).await;
    let sources = [
        "echo.c",
        "deadline.c",
        "forks.c",
        "quiet.c",
        "datagrams.c",
        "uring.c",
    ];
    for source in sources {
        let program = CProgram::with_d2tp(source);
        let mut command: Command = program.command().into();
        command.env("CEDOS_AGENT", &agent.socket);
        let before = udp_sockets(pid_of(&agent.child));
        let said = timeout(PATIENCE, command.output()).await;
        let said = said.unwrap_or_else(|_| panic!("{source} does not end"));
        let said = crate::support::told(source, said.expect("it runs"));
        // A session of its own, which is kept for some time.
        let after = udp_sockets(pid_of(&agent.child));
        assert!(!after.is_subset(&before), "{source} came by no agent");
        match said.strip_prefix("no io_uring here") {
            Some(why) => eprintln!("not tried: the kernel lets nobody use io_uring{why}"),
            None => assert_eq!(said, "ok\n", "{source}"),
        }
    }
    let program = CProgram::with_d2tp("conformance.c");
    let mut seen = Vec::new();
    for socket in [&*agent.socket, Path::new("none")] {
        let mut command: Command = program.command().into();
        command.env("CEDOS_AGENT", socket);
        let begun = Instant::now();
        let output = command.output().await.expect("it runs");
        eprintln!("{}: {:?}", socket.display(), begun.elapsed());
        let said = crate::support::told("conformance", output);
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

/// What was written before `exit` is the agent's to send, and its program is not waited with.
#[tokio::test]
async fn what_a_program_wrote_before_exit_arrives_whole_at_a_slow_reader() {
    let home = tempfile::tempdir().expect("a directory");
    let agent = AgentProcess::start(home.path()).await;
    let (server, client) = (CProgram::with_d2tp("late.c"), CProgram::with_d2tp("late.c"));
    let mut serving = Command::from(server.command())
        .arg("serve")
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("it runs");
    let mut said = BufReader::new(serving.stdout.take().expect("piped")).lines();
    let address = said.next_line().await.expect("text").expect("its address");
    let mut command = Command::from(client.command());
    command.env("CEDOS_AGENT", &agent.socket);
    let output = command.args(["send", &address]).output();
    let output = timeout(PATIENCE, output).await.expect("it ends");
    crate::support::told("late", output.expect("it runs"));
    let carried = udp_sockets(pid_of(&agent.child));
    assert!(!carried.is_empty(), "it came by no agent");
    let got = timeout(PATIENCE, said.next_line()).await.expect("in time");
    let got = got.expect("text").expect("what it got");
    assert_eq!(got, "3000000 bytes, then the end");
}

/// A proxy that is no D2Prox, and what it says no to.
#[tokio::test]
async fn a_proxys_refusals_are_errors_of_connect_with_an_agent_too() {
    let home = tempfile::tempdir().expect("a directory");
    let agent = AgentProcess::start(home.path()).await;
    let (proxy, client) = (CProgram::with_d2tp("proxy.c"), CProgram::with_d2tp("get.c"));
    let proxy = crate::support::Server::start(&proxy);
    let origin = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = origin.local_addr().expect("an address").port().to_string();
    let body = "x".repeat(300_000);
    let answer = body.clone();
    let serving = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = origin.accept().await.expect("a connection");
            let mut head = BufReader::new(&mut stream).lines();
            while !head
                .next_line()
                .await
                .expect("text")
                .expect("a line")
                .is_empty()
            {}
            stream.write_all(answer.as_bytes()).await.expect("it reads");
        }
    });
    let get = async |host: &str, port: &str| {
        let mut command = Command::from(client.command());
        command
            .args([host, port, "/a"])
            .env("CEDOS_AGENT", &agent.socket)
            .env("CEDOS_PROX", &proxy.1);
        let output = timeout(PATIENCE, command.output()).await.expect("it ends");
        crate::support::told("get", output.expect("it runs"))
    };
    assert!(get("127.0.0.1", &port).await == body);
    // Which only the proxy can look up.
    assert!(get("origin.example", &port).await == body);
    serving.await.expect("it served");
    let carried = udp_sockets(pid_of(&agent.child));
    assert!(!carried.is_empty(), "it came by no agent");
    let refused = get("127.0.0.1", &port).await;
    assert!(
        refused.starts_with("ECONNREFUSED: the proxy refuses (502)"),
        "{refused}"
    );
    let unknown = get("nobody.example", "80").await;
    assert!(
        unknown.starts_with("EHOSTUNREACH: ") && unknown.contains("no such name"),
        "{unknown}"
    );
}

#[tokio::test]
async fn who_does_not_wait_for_a_refused_connection_hears_of_it_as_from_the_kernel() {
    let device = Device::new().await;
    let closed = device.origin.local_addr().expect("an address").port();
    let port = closed.to_string();
    drop(device.origin);
    let told = CProgram::plain("refused.c").run(&[&port]);
    let lines: std::collections::BTreeSet<&str> = told.lines().collect();
    assert_eq!(lines.len(), 1, "{told}");
    let program = CProgram::with_d2tp("refused.c");
    for socket in [Path::new("none"), &*device.agent.socket] {
        let output = program
            .command()
            .arg(&port)
            .env("XDG_CONFIG_HOME", device.home.path().join(".config"))
            .env("XDG_RUNTIME_DIR", device.home.path())
            .env("CEDOS_AGENT", socket)
            .env("CEDOS_PROX", &device.proxy.address)
            .output();
        let output = output.expect("it runs");
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(said, told, "{}", socket.display());
    }
}

#[tokio::test]
async fn what_a_program_left_is_closed_at_an_origin_that_says_nothing() {
    let device = Device::new().await;
    let held = |there: &TcpStream| {
        let port = there.peer_addr().expect("an address").port();
        let origin = there.local_addr().expect("an address").port();
        let known = std::fs::read_to_string("/proc/net/tcp").expect("the kernel says");
        // Another connection may have the same port of its own, to another server.
        let ends = [format!(":{port:04X}"), format!(":{origin:04X}")];
        let line = known.lines().find(|line| {
            let addresses = line.split_whitespace().skip(1).take(2);
            addresses
                .zip(&ends)
                .all(|(address, end)| address.ends_with(end))
        });
        // The number of its file, while a process has it.
        line.is_some_and(|line| line.split_whitespace().nth(9) != Some("0"))
    };
    for socket in [Path::new("none"), &*device.agent.socket] {
        let mut program = device.program_at(socket, &[]);
        let mut there = device.accept().await;
        assert_eq!(program.hear().await, "connect 0");
        assert_eq!(program.ask("write 5").await, "write 5");
        let mut bytes = [0; 6];
        let read = timeout(PATIENCE, there.read_exact(&mut bytes[..5])).await;
        read.expect("in time").expect("it comes");
        assert_eq!(program.ask("end").await, "end 0");
        let read = timeout(PATIENCE, there.read(&mut bytes)).await;
        assert_eq!(read.expect("in time").expect("an end"), 0);
        // It may read on, for as long as it likes.
        // sleep: that the connection is kept for so long is the subject
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(held(&there));
        program.leave().await;
        // This end stays open, as one that does not look does.
        until("D2Prox lets it go", || !held(&there)).await;
    }
}

/// A D2Prox with a key of its own, which admits `client`.
async fn another_proxy(home: &Path, client: &str) -> ProxyProcess {
    // A running proxy has read its key: the next one makes another.
    let _ = std::fs::remove_file(home.join("prox.key"));
    ProxyProcess::start_for(client, home, "127.0.0.1:0", &[]).await
}

impl Device {
    /// A program that uses these proxies.
    fn program_by(&self, proxies: &[&ProxyProcess], socket: &Path) -> Program {
        let addresses: Vec<&str> = proxies.iter().map(|proxy| &*proxy.address).collect();
        let port = self.origin.local_addr().expect("an address").port();
        let arguments = ["127.0.0.1", &port.to_string()];
        let home = self.home.path();
        Program::start(
            &self.program,
            home,
            &addresses.join(" "),
            socket,
            &arguments,
        )
    }
}

#[tokio::test]
async fn of_several_proxies_one_is_used_that_answers_and_lets_the_device_in() {
    let device = Device::new().await;
    let home = device.home.path();
    let stranger = tempfile::tempdir().expect("a directory");
    let refusing = another_proxy(home, &device_key(stranger.path()).await).await;
    let mut dead = another_proxy(home, &device_key(home).await).await;
    dead.child.kill().await.expect("it runs");
    for socket in [Path::new("none"), &*device.agent.socket] {
        let list = [&dead, &refusing, &device.proxy];
        let mut program = device.program_by(&list, socket);
        let mut there = device.accept().await;
        assert_eq!(program.hear().await, "connect 0", "{}", socket.display());
        there.write_all(b"hello").await.expect("it is taken");
        assert_eq!(program.ask("read 5").await, "read 5");
        program.leave().await;
    }
    let mut program = device.program_by(&[&refusing], Path::new("none"));
    let refused = program.hear().await;
    assert!(refused.contains("does not let this device in"), "{refused}");
    assert!(refused.contains("`cedos prox invite`"), "{refused}");
}

#[tokio::test]
async fn connections_end_with_a_proxy_that_falls_silent_and_new_ones_go_through_another() {
    let device = Device::new().await;
    let second = another_proxy(device.home.path(), &device_key(device.home.path()).await).await;
    let list = [&device.proxy, &second];
    // On a busy machine the second might answer before the first.
    stop(&second.child);
    let mut program = device.program_by(&list, &device.agent.socket);
    let _there = device.accept().await;
    assert_eq!(program.hear().await, "connect 0");
    device.signal_proxy(Signal::SIGSTOP);
    kill(pid_of(&second.child), Signal::SIGCONT).expect("send");
    // The silence lasts for 30 s before the connection is given up.
    let broken = program.ask("read 1").await;
    assert!(
        broken.starts_with("read ECONNRESET: the proxy "),
        "{broken}"
    );
    assert!(
        broken.contains("does not answer; new connections go through"),
        "{broken}"
    );
    let mut other = device.program_by(&list, &device.agent.socket);
    let mut there = device.accept().await;
    assert_eq!(other.hear().await, "connect 0");
    there.write_all(b"hello").await.expect("it is taken");
    assert_eq!(other.ask("read 5").await, "read 5");
    device.signal_proxy(Signal::SIGCONT);
}
