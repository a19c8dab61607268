//! Processes with many connections that are killed, one after another: the next one has as much room at D2Prox.

use std::path::Path;
use std::process::Stdio;

use crate::support::CProgram;
use cedos_lab_rig::namespace::{in_namespace, sh};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, cedos, pid_of};
use cedos_lab_rig::share::alone;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::sys::signal::{Signal, kill};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Sockets of each process: two of them would fill what D2Prox gives to a device.
const MANY: usize = 150;
/// Three would have no room without a word.
const PROCESSES: usize = 4;

struct TestNetwork {
    home: tempfile::TempDir,
    proxy: ProxyProcess,
    origin: TcpListener,
}

impl TestNetwork {
    async fn new(address: &str) -> TestNetwork {
        let home = tempfile::tempdir().expect("a directory");
        TestNetwork {
            proxy: ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await,
            origin: TcpListener::bind((address, 0)).await.expect("a port"),
            home,
        }
    }

    fn arguments(&self) -> [String; 3] {
        let to = self.origin.local_addr().expect("an address");
        [MANY.to_string(), to.ip().to_string(), to.port().to_string()]
    }

    /// Starts it, and once it has all its connections kills what carries them. Returns the far ends.
    async fn kill(
        &self,
        mut program: Command,
        carrier: impl FnOnce(&Child) -> nix::unistd::Pid,
    ) -> Vec<TcpStream> {
        let mut child = program
            .env("XDG_RUNTIME_DIR", self.home.path())
            .env("XDG_CONFIG_HOME", self.home.path().join(".config"))
            .env("CEDOS_PROX", &self.proxy.address)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("it runs");
        let mut said = BufReader::new(child.stdout.take().expect("piped")).lines();
        let said = async {
            let line = timeout(PATIENCE, said.next_line()).await.expect("in time");
            assert_eq!(line.expect("text").as_deref(), Some("there"));
        };
        // Not all of them fit into a listener's queue.
        let accepted = async {
            let mut there = Vec::new();
            for _ in 0..MANY {
                let accepted = timeout(PATIENCE, self.origin.accept()).await;
                there.push(accepted.expect("in time").expect("a connection").0);
            }
            there
        };
        let ((), there) = tokio::join!(said, accepted);
        kill(carrier(&child), Signal::SIGKILL).expect("send");
        // A signal that was sent is no death: until that comes the instance is its.
        child.kill().await.expect("it ends");
        there
    }

    /// D2Prox let go of them.
    async fn are_over(&self, there: Vec<TcpStream>) {
        for mut stream in there {
            let mut rest = Vec::new();
            let read = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut rest);
            // An end, or a reset.
            let _ = timeout(PATIENCE, read).await.expect("in time");
        }
    }
}

#[tokio::test]
async fn of_programs_with_engines_of_their_own() {
    let _machine = alone();
    let place = TestNetwork::new("127.0.0.1").await;
    let program = CProgram::with_d2tp("many.c");
    let mut before = Vec::new();
    for _ in 0..PROCESSES {
        let mut command = program.command();
        command.args(place.arguments());
        let there = place.kill(command.into(), pid_of).await;
        place.are_over(std::mem::replace(&mut before, there)).await;
    }
}

#[test]
fn of_cedos_run() {
    let _machine = alone();
    in_namespace(this_test!(), || async {
        // What is on loopback it does not carry.
        sh("ip addr add 192.0.2.1/32 dev lo");
        let place = TestNetwork::new("192.0.2.1").await;
        let program = CProgram::plain("many.c");
        let mut before = Vec::new();
        for _ in 0..PROCESSES {
            let path = program.command().get_program().to_owned();
            let mut command = cedos(place.home.path(), &["run", "--"]);
            command.arg(path).args(place.arguments());
            let there = place.kill(command, pid_of).await;
            place.are_over(std::mem::replace(&mut before, there)).await;
        }
    });
}

#[tokio::test]
async fn of_an_agent() {
    let _machine = alone();
    let place = TestNetwork::new("127.0.0.1").await;
    let program = CProgram::with_d2tp("many.c");
    let mut before = Vec::new();
    let start = async |home: &Path| {
        let runtime = home.to_str().expect("a path in UTF-8");
        AgentProcess::start_among(home, &[], &[("XDG_RUNTIME_DIR", runtime)]).await
    };
    for _ in 0..PROCESSES {
        let agent = start(place.home.path()).await;
        let mut command = program.command();
        command
            .args(place.arguments())
            .env("CEDOS_AGENT", &agent.socket);
        let there = place.kill(command.into(), |_| pid_of(&agent.child)).await;
        agent.kill().await;
        place.are_over(std::mem::replace(&mut before, there)).await;
    }
}
