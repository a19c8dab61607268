//! Connections of programs that outlive the agent that carries them: it is killed or ends, and the next one goes on.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::streams::{Device, all_of, content};
use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::namespace::{in_namespace, sh};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, cedos, ended, pid_of};
use cedos_lab_rig::wait::within;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// What moves in each direction: several times what kernel, agent and proxy hold between them.
const BYTES: usize = 40_000_000;
/// The bytes that an origin takes or gives at once, and the time between: so that there is time to kill agents.
const PIECE: usize = 100_000;
const PACE: Duration = Duration::from_millis(10);

/// Gives these bytes at a pace, and then an end.
fn gives(mut there: TcpStream, bytes: Vec<u8>) -> JoinHandle<TcpStream> {
    tokio::spawn(async move {
        for piece in bytes.chunks(PIECE) {
            there.write_all(piece).await.expect("it is taken");
            tokio::time::sleep(PACE).await; // sleep: the pace of the origin
        }
        there.shutdown().await.expect("it is taken");
        there
    })
}

/// Takes at a pace what comes until the end.
fn takes(mut there: TcpStream) -> JoinHandle<Vec<u8>> {
    tokio::spawn(async move {
        let (mut all, mut piece) = (Vec::new(), vec![0; PIECE]);
        loop {
            match there.read(&mut piece).await.expect("no reset") {
                0 => return all,
                more => all.extend(&piece[..more]),
            }
            // sleep: the pace of the origin
            tokio::time::sleep(PACE * piece.len() as u32 / PIECE as u32).await;
        }
    })
}

/// Ends the device's agent by this signal and starts another one. Returns how long there was none.
async fn replaced(device: &mut Device, signal: Signal) -> Duration {
    kill(pid_of(&device.agent.child), signal).expect("send");
    within(device.agent.child.wait()).await.expect("it ends");
    let gone = Instant::now();
    if signal == Signal::SIGKILL {
        std::fs::remove_file(&device.agent.socket).expect("what it left");
    }
    device.agent = AgentProcess::start(device.home.path()).await;
    gone.elapsed()
}

fn path(device: &Device, name: &str) -> PathBuf {
    device.home.path().join(name)
}

/// A file with these bytes.
fn file(device: &Device, name: &str, bytes: &[u8]) -> PathBuf {
    let path = path(device, name);
    std::fs::write(&path, bytes).expect("room");
    path
}

fn is_same(path: &Path, bytes: &[u8]) -> bool {
    std::fs::read(path).expect("a file") == bytes
}

/// A download and an upload at once, by two programs, while the agent is ended three times by this signal.
async fn go_on(signal: Signal) {
    let mut device = Device::new().await;
    let all = content(BYTES);
    let (mut reader, there) = device.connected(&[]).await;
    let giving = gives(there, all.clone());
    let (mut writer, there) = device.connected(&[]).await;
    let taking = takes(there);
    let (copy, source) = (path(&device, "copy"), file(&device, "source", &all));
    reader
        .tell(&format!("copy {BYTES} {}", copy.display()))
        .await;
    writer.tell(&format!("file 0 {}", source.display())).await;
    for _ in 0..3 {
        // sleep: so that much moves with each agent
        tokio::time::sleep(Duration::from_millis(700)).await;
        if giving.is_finished() || taking.is_finished() {
            panic!("{}; {}", reader.hear().await, writer.hear().await);
        }
        let without = replaced(&mut device, signal).await;
        eprintln!("without an agent for {without:?}");
    }
    assert_eq!(reader.hear().await, format!("copy {BYTES}"));
    assert_eq!(reader.ask("read 1").await, "read 0");
    assert!(is_same(&copy, &all), "not the same");
    assert_eq!(writer.hear().await, format!("file {BYTES}"));
    assert_eq!(writer.ask("flush 60000").await, "flush 0");
    assert_eq!(
        writer.ask("info").await,
        format!("info 2 {BYTES} {BYTES} 0")
    );
    assert_eq!(writer.ask("end").await, "end 0");
    let taken = timeout(PATIENCE, taking).await.expect("in time");
    assert!(taken.expect("an end") == all, "not the same");
    drop(timeout(PATIENCE, giving).await.expect("in time"));
    reader.leave().await;
    writer.leave().await;
}

#[tokio::test]
async fn a_download_and_an_upload_go_on_after_kill_9() {
    go_on(Signal::SIGKILL).await;
}

#[tokio::test]
async fn a_download_and_an_upload_go_on_after_a_restart() {
    go_on(Signal::SIGTERM).await;
}

#[tokio::test]
async fn what_is_under_way_at_the_end_of_a_connection_arrives_by_the_next_agent() {
    let mut device = Device::new().await;
    // The origin has said all and its end, and the program reads nothing yet.
    let all = content(1_500_000);
    let (mut slow, mut there) = device.connected(&[]).await;
    assert_eq!(slow.ask("write 30000").await, "write 30000");
    assert_eq!(slow.ask("end").await, "end 0");
    there.write_all(&all).await.expect("it is taken");
    there.shutdown().await.expect("it is taken");
    assert_eq!(all_of(there).await.expect("an end"), 30_000);
    // One whose program has written, which its peer does not take.
    let (mut waits, held) = device.connected(&[]).await;
    let source = file(&device, "source", &content(9_000_000));
    waits.tell(&format!("file 0 {}", source.display())).await;
    // One at rest.
    let (mut rests, mut partner) = device.connected(&[]).await;
    partner.write_all(b"hello").await.expect("it is taken");
    assert_eq!(rests.ask("read 5").await, "read 5");
    // sleep: so that what is written is under way
    tokio::time::sleep(Duration::from_millis(500)).await;
    replaced(&mut device, Signal::SIGKILL).await;
    let copy = path(&device, "copy");
    let rest = format!("copy 1500000 {}", copy.display());
    assert_eq!(slow.ask(&rest).await, "copy 1500000");
    assert_eq!(slow.ask("read 1").await, "read 0");
    assert!(is_same(&copy, &all), "not the same");
    let taken = timeout(PATIENCE, takes(held));
    assert_eq!(waits.hear().await, "file 9000000");
    assert_eq!(waits.ask("close").await, "close 0");
    let taken = taken.await.expect("in time").expect("an end");
    assert!(taken == content(9_000_000), "not the same");
    // Both ways, and counted from the beginning.
    partner.write_all(b"again").await.expect("it is taken");
    assert_eq!(rests.ask("read 5").await, "read 5");
    assert_eq!(rests.ask("write 7").await, "write 7");
    assert_eq!(rests.ask("flush 30000").await, "flush 0");
    assert_eq!(rests.ask("info").await, "info 2 7 7 10");
    assert_eq!(rests.ask("close").await, "close 0");
    assert_eq!(all_of(partner).await.expect("an end"), 7);
    // New ones use the session that goes on.
    let (mut new, mut there) = device.connected(&[]).await;
    there.write_all(b"new").await.expect("it is taken");
    assert_eq!(new.ask("read 3").await, "read 3");
}

#[tokio::test]
async fn both_directions_of_a_connection_to_another_program_go_on() {
    const BYTES: usize = 3_000_000;
    let mut device = Device::new().await;
    // It says everything back, and accepts in its own process.
    let echoes = CProgram::with_d2tp("echoes.c");
    let mut command: Command = echoes.command().into();
    let mut server = (command.env("XDG_CONFIG_HOME", device.home.path()))
        .env("CEDOS_AGENT", "none")
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("it runs");
    let mut said = BufReader::new(server.stdout.take().expect("piped")).lines();
    let address = within(said.next_line()).await.expect("text");
    let mut program = device.program_to(&address.expect("an address"));
    assert_eq!(program.hear().await, "connect 0");
    // Nothing was ever said.
    replaced(&mut device, Signal::SIGKILL).await;
    let all = content(BYTES);
    let (copy, source) = (path(&device, "copy"), file(&device, "source", &all));
    let send = format!("file 0 {}", source.display());
    assert_eq!(program.ask(&send).await, format!("file {BYTES}"));
    replaced(&mut device, Signal::SIGKILL).await;
    let half = BYTES / 2;
    let read = format!("copy {half} {}", copy.display());
    assert_eq!(program.ask(&read).await, format!("copy {half}"));
    replaced(&mut device, Signal::SIGTERM).await;
    assert_eq!(program.ask(&read).await, format!("copy {half}"));
    assert!(is_same(&copy, &all), "not the same");
    assert_eq!(program.ask("flush 30000").await, "flush 0");
    assert_eq!(program.ask("end").await, "end 0");
    assert_eq!(program.ask("read 1").await, "read 0");
    program.leave().await;
}

#[tokio::test]
async fn many_connections_go_on_and_those_of_programs_that_died_meanwhile_do_not() {
    const MANY: usize = 12;
    let mut device = Device::new().await;
    let mut programs: Vec<(Program, TcpStream)> = Vec::new();
    for _ in 0..MANY {
        programs.push(device.connected(&[]).await);
    }
    kill(pid_of(&device.agent.child), Signal::SIGKILL).expect("send");
    within(device.agent.child.wait()).await.expect("it ends");
    std::fs::remove_file(&device.agent.socket).expect("what it left");
    let (mut dead, there_of_dead) = programs.remove(3);
    kill(pid_of(&dead.child), Signal::SIGKILL).expect("send");
    within(dead.child.wait()).await.expect("it ends");
    // What begins without an agent is its program's own, and has an instance of its own.
    let mut alone = device.program(&[]);
    let mut there = device.accept().await;
    assert_eq!(alone.hear().await, "connect 0");
    there.write_all(b"alone").await.expect("it is taken");
    assert_eq!(alone.ask("read 5").await, "read 5");
    device.agent = AgentProcess::start(device.home.path()).await;
    for (program, there) in &mut programs {
        there.write_all(b"hello").await.expect("it is taken");
        assert_eq!(program.ask("read 5").await, "read 5");
        assert_eq!(program.ask("write 5").await, "write 5");
        let mut five = [0; 5];
        within(there.read_exact(&mut five)).await.expect("it comes");
    }
    // D2Prox let go of it.
    assert!(all_of(there_of_dead).await.is_err(), "a reset");
    assert_eq!(alone.ask("write 5").await, "write 5");
    within(there.read_exact(&mut [0; 5]))
        .await
        .expect("it comes");
}

#[tokio::test]
async fn a_connection_that_can_be_opened_again_goes_on_and_is_opened_again_by_its_token() {
    let mut device = Device::new().await;
    let (mut program, mut there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    there.write_all(b"first").await.expect("it is taken");
    replaced(&mut device, Signal::SIGKILL).await;
    there.write_all(b"then").await.expect("it is taken");
    assert_eq!(program.ask("read 9").await, "read 9");
    assert_eq!(device.token(&mut program).await, token);
    replaced(&mut device, Signal::SIGTERM).await;
    there.write_all(b"again").await.expect("it is taken");
    assert_eq!(program.ask("read 2").await, "read 2");
    kill(pid_of(&program.child), Signal::SIGKILL).expect("send");
    within(program.child.wait()).await.expect("it ends");
    let (mut second, said) = device.reopen(&token).await;
    assert_eq!(said, "reopen 0");
    assert_eq!(second.ask("read 3").await, "read 3");
    assert_eq!(second.ask("write 4").await, "write 4");
    assert_eq!(second.ask("close").await, "close 0");
    assert_eq!(all_of(there).await.expect("an end"), 4);
    // One that was closed while there was no agent stays closed.
    let (mut program, there) = device.connected(&["open"]).await;
    let token = device.token(&mut program).await;
    kill(pid_of(&device.agent.child), Signal::SIGKILL).expect("send");
    within(device.agent.child.wait()).await.expect("it ends");
    std::fs::remove_file(&device.agent.socket).expect("what it left");
    program.tell("close").await;
    device.agent = AgentProcess::start(device.home.path()).await;
    assert_eq!(program.hear().await, "close 0");
    assert_eq!(all_of(there).await.expect("an end"), 0);
    assert_eq!(device.reopen(&token).await.1, "reopen ENOENT");
}

/// The session is `cedos run`'s own: the agent only decides what metered links carry.
#[test]
fn a_download_under_cedos_run_goes_on_without_the_agent_and_with_the_next_one() {
    in_namespace(this_test!(), || async {
        // What is on loopback it does not carry.
        sh("ip addr add 192.0.2.1/32 dev lo");
        let home = tempfile::tempdir().expect("a directory");
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let mut agent = AgentProcess::start(home.path()).await;
        let origin = TcpListener::bind("192.0.2.1:0").await.expect("a port");
        let at = origin.local_addr().expect("an address");
        let copy = home.path().join("copy");
        let mut command = cedos(home.path(), &["run", "--", "curl", "-sSo"]);
        command.arg(&copy).arg(format!("http://{at}/"));
        command.env("CEDOS_AGENT", &agent.socket);
        let program = command.env("CEDOS_PROX", &proxy.address).spawn();
        let program = program.expect("it runs");
        let mut there = within(origin.accept()).await.expect("a connection").0;
        let all = content(BYTES / 2);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", all.len());
        there.write_all(head.as_bytes()).await.expect("it is taken");
        let giving = gives(there, all.clone());
        for _ in 0..2 {
            // sleep: so that much moves with each agent
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert!(!giving.is_finished());
            let socket = agent.socket.clone();
            agent.kill().await;
            // sleep: a while without an agent
            tokio::time::sleep(Duration::from_millis(300)).await;
            std::fs::remove_file(socket).expect("what it left");
            agent = AgentProcess::start(home.path()).await;
        }
        let run = timeout(PATIENCE, ended(program)).await.expect("in time");
        assert_eq!(run.code, 0, "{}", run.errors);
        assert!(is_same(&copy, &all), "not the same");
        drop(timeout(PATIENCE, giving).await.expect("in time"));
    });
}

#[tokio::test]
async fn without_a_next_agent_a_connection_ends_with_the_reason() {
    let device = Device::new().await;
    let mut program = device.program_around(&[("CEDOS_AGENT_WAIT", "2")]);
    let there = device.accept().await;
    assert_eq!(program.hear().await, "connect 0");
    device.agent.kill().await;
    let gone = Instant::now();
    // Accepted, and kept for the next agent.
    assert_eq!(program.ask("write 5").await, "write 5");
    let broken = program.ask("flush 60000").await;
    assert!(broken.starts_with("flush ECONNRESET: "), "{broken}");
    assert_eq!(
        program.ask("read 1").await,
        "read ECONNRESET: the agent that carried this connection is gone, and no other one went on with it within 2 s"
    );
    assert!(gone.elapsed() >= Duration::from_secs(2));
    drop(there);
    program.leave().await;
}
