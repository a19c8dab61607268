//! Nodes whose bucket is a process of its own, which is killed, stopped, slow, or has no room on its disk: what runs goes
//! on, what wakes waits and says so, nothing is damaged, and all is taken up when the server is back.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use cedos_lab_rig::latency_proxy::LatencyProxy;
use cedos_lab_rig::origin::object;
use cedos_lab_rig::port::HeldPort;
use cedos_lab_rig::this_test;
use cedos_lab_rig::wait::until;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::net::TcpListener;

use crate::nodes::{Nodes, ObjectSizes};
use crate::nodes_bucket::{LARGE, SMALL, whole_copies, with_server};
use crate::prox_bucket::{BucketServer, PART, s3_answer, s3_service};

/// The variables by which the process learns that it is the server, where its folder is, and where it listens.
const ROOT: &str = "CEDOS_TEST_BUCKET_ROOT";
const AT: &str = "CEDOS_TEST_BUCKET_AT";

/// The disk of a server.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BucketDisk {
    /// A folder, which outlives the process.
    Folder,
    /// A file system of 16 MB of its own.
    Small,
}

/// What happens to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BucketFault {
    /// The server ends by SIGKILL.
    Killed,
    /// The server is stopped by SIGSTOP: the kernel accepts connections, and nobody answers.
    Stopped,
    /// The server answers after longer than a node waits for what a flow needs.
    Slow,
    /// The server's disk has no room.
    Full,
}

/// Longer than a node waits, each way.
const TOO_FAR: Duration = Duration::from_secs(6);

/// An S3 server as a process, behind a connection that may be slow.
struct BucketProcess {
    folder: tempfile::TempDir,
    port: HeldPort,
    disk: BucketDisk,
    child: Option<Child>,
    path: LatencyProxy,
    at: SocketAddr,
}

impl BucketServer for BucketProcess {
    fn root(&self) -> PathBuf {
        let root = self.folder.path().join("root");
        match (self.disk, &self.child) {
            // As the process sees it.
            (BucketDisk::Small, Some(child)) => {
                let inside = root.strip_prefix("/").expect("an absolute path");
                Path::new(&format!("/proc/{}/root", child.id())).join(inside)
            }
            _ => root,
        }
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.at)
    }
}

impl BucketProcess {
    /// Starts a server; `None`, with a sentence, where the system forbids a disk of its own.
    async fn start(disk: BucketDisk) -> Option<BucketProcess> {
        let port = HeldPort::take();
        let (path, at) = LatencyProxy::to_tcp(port.address(), Duration::ZERO).await;
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("root")).expect("a folder");
        let mut server = BucketProcess {
            folder,
            port,
            disk,
            child: None,
            path,
            at,
        };
        let serves = server.run().await;
        if !serves {
            eprintln!("NOT TRIED: no mount namespace, or no tmpfs in it, is allowed here");
        }
        serves.then_some(server)
    }

    /// Runs the process. Returns whether it serves.
    async fn run(&mut self) -> bool {
        let root = self.folder.path().join("root");
        let program = std::env::current_exe().expect("path of this test");
        let mut command = match self.disk {
            BucketDisk::Folder => Command::new(program),
            BucketDisk::Small => {
                let script = "mount -t tmpfs -o size=16m none \"$0\" && exec \"$@\"";
                let mut command = Command::new("unshare");
                command.args(["-rm", "sh", "-ec", script]).arg(&root);
                command.arg(program);
                command
            }
        };
        let child = command
            .args(["--exact", &server_test(), "--nocapture"])
            .env(ROOT, &root)
            .env(AT, self.port.address().to_string())
            // It ends when this end is closed, should the test be killed.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("start a server");
        self.child = Some(child);
        let (mut serves, mut has_ended) = (false, false);
        until("the server serves", || {
            let child = self.child.as_mut().expect("it was started");
            has_ended = child.try_wait().expect("a child").is_some();
            serves = std::net::TcpStream::connect(self.port.address()).is_ok();
            serves || has_ended
        })
        .await;
        serves
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("send");
    }

    fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("send");
        child.wait().expect("it ends");
    }

    fn ballast(&self) -> PathBuf {
        self.root().join("ballast")
    }

    /// Has this happen to the server.
    fn set(&mut self, fault: BucketFault) {
        match fault {
            BucketFault::Killed => self.kill(),
            BucketFault::Stopped => self.signal(Signal::SIGSTOP),
            BucketFault::Slow => self.path.set_latency(TOO_FAR),
            BucketFault::Full => {
                let mut file = std::fs::File::create(self.ballast()).expect("a file");
                while std::io::Write::write_all(&mut file, &[1; 65_536]).is_ok() {}
            }
        }
    }

    /// Ends what happened to the server.
    async fn mend(&mut self, fault: BucketFault) {
        match fault {
            BucketFault::Killed => assert!(self.run().await, "it serves again"),
            BucketFault::Stopped => self.signal(Signal::SIGCONT),
            BucketFault::Slow => self.path.set_latency(Duration::ZERO),
            BucketFault::Full => std::fs::remove_file(self.ballast()).expect("room"),
        }
    }
}

impl Drop for BucketProcess {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only if it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The name of the test that is the server.
fn server_test() -> String {
    let here = this_test!();
    let module = here.strip_suffix("server_test").expect("this function");
    format!("{module}an_s3_server_serves_until_it_is_killed")
}

// The process that the other tests start; among tests it does nothing.
#[tokio::test]
async fn an_s3_server_serves_until_it_is_killed() {
    let (Some(root), Ok(at)) = (std::env::var_os(ROOT), std::env::var(AT)) else {
        return;
    };
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(1);
    });
    let root = PathBuf::from(root);
    std::fs::create_dir_all(root.join("bucket")).expect("a bucket");
    let service = s3_service(&root);
    let listener = TcpListener::bind(at).await.expect("the port is held");
    while let Ok((stream, _)) = listener.accept().await {
        let service = service.clone();
        let answer = service_fn(move |request| {
            let service = service.clone();
            async move { Ok::<_, Infallible>(s3_answer(&service, request).await) }
        });
        let served = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), answer);
        tokio::spawn(async move { drop(served.await) });
    }
}

async fn with_process(disk: BucketDisk, sizes: ObjectSizes) -> Option<(Nodes, BucketProcess)> {
    let server = BucketProcess::start(disk).await?;
    let nodes = with_server(4, sizes, &server).await?;
    Some((nodes, server))
}

async fn flows_that_wake_wait(fault: BucketFault) {
    let Some((nodes, server)) = with_process(BucketDisk::Folder, SMALL).await else {
        return;
    };
    let is_removed = fault == BucketFault::Killed;
    let fail = |server: &mut BucketProcess| server.set(fault);
    let mend = async |server: &mut BucketProcess| server.mend(fault).await;
    crate::nodes_bucket::flows_that_wake_wait(&nodes, server, is_removed, fail, mend).await;
}

#[tokio::test]
async fn flows_that_wake_wait_for_a_bucket_whose_server_was_killed() {
    flows_that_wake_wait(BucketFault::Killed).await;
}

#[tokio::test]
async fn flows_that_wake_wait_for_a_bucket_whose_server_is_stopped() {
    flows_that_wake_wait(BucketFault::Stopped).await;
}

#[tokio::test]
async fn flows_that_wake_wait_for_a_bucket_that_answers_too_late() {
    flows_that_wake_wait(BucketFault::Slow).await;
}

#[tokio::test]
async fn copies_of_a_killed_node_come_from_a_bucket_that_is_far_away() {
    let Some((nodes, server)) = with_process(BucketDisk::Folder, SMALL).await else {
        return;
    };
    server.path.set_latency(Duration::from_millis(100));
    let (mut first, second, balancer, downloads) = whole_copies(&nodes, &server).await;
    first.child.kill().await.unwrap();
    balancer.move_to(&second);
    nodes.assert_whole(downloads).await;
    assert!(nodes.has_said("b", "takes over a copy from the bucket"));
    assert!(!nodes.has_said("b", "its flow waits"), "{}", nodes.log());
}

/// Downloads run while the bucket takes nothing; when it does again, another node goes on from it.
async fn what_runs_goes_on(fault: BucketFault) {
    let disk = match fault {
        BucketFault::Full => BucketDisk::Small,
        _ => BucketDisk::Folder,
    };
    let Some((nodes, server)) = with_process(disk, SMALL).await else {
        return;
    };
    // A server that is stopped is given up after two minutes, which no test waits for.
    let is_noticed = fault != BucketFault::Stopped;
    let fail = |server: &mut BucketProcess| server.set(fault);
    let mend = async |server: &mut BucketProcess| server.mend(fault).await;
    crate::nodes_bucket::what_runs_goes_on(&nodes, server, is_noticed, fail, mend).await;
}

#[tokio::test]
async fn what_runs_goes_on_while_the_server_of_the_bucket_is_gone() {
    what_runs_goes_on(BucketFault::Killed).await;
}

#[tokio::test]
async fn what_runs_goes_on_while_the_server_of_the_bucket_is_stopped() {
    what_runs_goes_on(BucketFault::Stopped).await;
}

#[tokio::test]
async fn what_runs_goes_on_while_the_disk_of_the_bucket_is_full() {
    what_runs_goes_on(BucketFault::Full).await;
}

#[tokio::test]
async fn no_part_is_damaged_by_a_server_that_is_killed_while_parts_are_written() {
    let Some((nodes, mut server)) = with_process(BucketDisk::Folder, LARGE).await else {
        return;
    };
    let (mut first, second, balancer) = nodes.start_two(&[]).await;
    let downloads = nodes.download(8, &first, &balancer).await;
    for _ in 0..4 {
        // sleep: the server is killed at other moments of its work
        tokio::time::sleep(Duration::from_millis(400)).await;
        server.kill();
        assert!(server.run().await, "it serves again");
    }
    nodes.halves_are_there(&downloads).await;
    until("the bucket has a part of each", || {
        server.parts() == [PART as u64; 8]
    })
    .await;
    let expected = object(LARGE.whole, 3);
    for file in server.objects() {
        let part = std::fs::read(&file).expect("a part");
        assert!(
            part.len() == 1 || part == expected[..PART],
            "{}",
            file.display()
        );
    }
    first.child.kill().await.unwrap();
    nodes.give_rest().await;
    balancer.move_to(&second);
    nodes.assert_whole(downloads).await;
}
