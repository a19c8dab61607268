//! Tunnels go on when another process follows: what is under way in them is passed on with the servers' connections.

use std::io::IoSliceMut;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::origin::object;
use cedos_lab_rig::program::{ProxyProcess, built, cedos, pid_of};
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Device, DeviceOptions, EndpointConfig, Flow, FlowSettings, LinkUse, ProvidedLink,
    ProvidedLinks, SecretKey,
};
use nix::cmsg_space;
use nix::fcntl::{FcntlArg, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use crate::upgrade::proxy_arguments;

/// What goes through a busy tunnel: more than all buffers between its ends.
const BYTES: usize = 24_000_000;
/// A reader that is slow enough for a process to start meanwhile: a piece, and the wait after it.
const PIECE: usize = 32_000;
const PIECE_EVERY: Duration = Duration::from_millis(4);
/// The first number of a descriptor on its way to a service.
const COPIES_FROM: i32 = 500;

async fn proxy(directory: &Path, listen: &str, more: &[&str]) -> ProxyProcess {
    let arguments = [&proxy_arguments(listen)[..], more].concat();
    let mut command = cedos(directory, &arguments);
    let log = directory.join("log");
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log);
    command.stderr(log.unwrap());
    let started = ProxyProcess::spawned(&mut command).await;
    started.unwrap_or_else(|| panic!("{}", said(directory)))
}

fn said(directory: &Path) -> String {
    std::fs::read_to_string(directory.join("log")).unwrap()
}

async fn device(proxy: &str) -> Device {
    let links = ProvidedLinks::new();
    links.add(ProvidedLink::new("wifi", IpAddr::from([127, 0, 0, 2])));
    let options = DeviceOptions {
        server: proxy.parse().unwrap(),
        key: SecretKey::from_bytes([7; 32]),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, links.clone()).await.unwrap();
    device.follow_links(links.subscribe(), |_| LinkUse::Free);
    device
}

/// A tunnel of the device to a new server.
pub async fn tunnel(device: &Device) -> (Flow, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = listener.local_addr().unwrap();
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let request = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\n");
    flow.write_all(request.as_bytes()).await.unwrap();
    let (server, _) = within(listener.accept()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(within(flow.read_u8()).await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 200 "));
    (flow, server)
}

async fn write_whole(mut to: impl AsyncWrite + Unpin, seed: u32) {
    to.write_all(&object(BYTES, seed)).await.unwrap();
    to.shutdown().await.unwrap();
}

async fn read_slowly(from: &mut (impl AsyncRead + Unpin)) -> Vec<u8> {
    let (mut got, mut piece) = (Vec::new(), vec![0; PIECE]);
    loop {
        let read = within(from.read(&mut piece)).await;
        let read = read.unwrap_or_else(|error| panic!("after {} bytes: {error}", got.len()));
        if read == 0 {
            return got;
        }
        got.extend_from_slice(&piece[..read]);
        // sleep: a slow reader is the subject
        tokio::time::sleep(PIECE_EVERY).await;
    }
}

async fn exchange(flow: &mut Flow, server: &mut TcpStream, text: &[u8]) {
    let mut read = vec![0; text.len()];
    flow.write_all(text).await.unwrap();
    within(server.read_exact(&mut read)).await.unwrap();
    assert_eq!(read, text);
    server.write_all(text).await.unwrap();
    within(flow.read_exact(&mut read)).await.unwrap();
    assert_eq!(read, text);
}

/// Tunnels in each state in which another process may find them.
struct BusyTunnels {
    idle: (Flow, TcpStream),
    busy: Vec<(&'static str, JoinHandle<()>)>,
}

impl BusyTunnels {
    async fn start(device: &Device) -> BusyTunnels {
        let mut idle = tunnel(device).await;
        exchange(&mut idle.0, &mut idle.1, b"before").await;
        let mut busy: Vec<(&str, JoinHandle<()>)> = Vec::new();
        let (mut flow, server) = tunnel(device).await;
        let task = async move {
            let (mut reading, mut writing) = server.into_split();
            let sent = tokio::spawn(async move { write_whole(&mut writing, 1).await });
            assert!(read_slowly(&mut flow).await == object(BYTES, 1));
            flow.shutdown().await.unwrap();
            sent.await.unwrap();
            assert_eq!(within(reading.read(&mut [0])).await.unwrap(), 0);
        };
        busy.push(("a download", tokio::spawn(task)));
        let (flow, mut server) = tunnel(device).await;
        let task = async move {
            let (mut reading, mut writing) = tokio::io::split(flow);
            let sent = tokio::spawn(async move { write_whole(&mut writing, 2).await });
            assert!(read_slowly(&mut server).await == object(BYTES, 2));
            server.write_all(b"thanks").await.unwrap();
            server.shutdown().await.unwrap();
            let mut answer = Vec::new();
            within(reading.read_to_end(&mut answer)).await.unwrap();
            assert_eq!(answer, b"thanks");
            sent.await.unwrap();
        };
        busy.push(("an upload", tokio::spawn(task)));
        let (mut flow, mut server) = tunnel(device).await;
        let task = async move {
            flow.write_all(b"request").await.unwrap();
            flow.shutdown().await.unwrap();
            let mut request = Vec::new();
            within(server.read_to_end(&mut request)).await.unwrap();
            assert_eq!(request, b"request");
            let sent = tokio::spawn(write_whole(server, 3));
            assert!(read_slowly(&mut flow).await == object(BYTES, 3));
            sent.await.unwrap();
        };
        busy.push(("an answer after the request's end", tokio::spawn(task)));
        let (mut flow, mut server) = tunnel(device).await;
        let task = async move {
            // All of it lies in buffers soon, and the server's end with it.
            let short = &object(BYTES, 4)[..BYTES / 12];
            server.write_all(short).await.unwrap();
            server.shutdown().await.unwrap();
            // sleep: the reader begins when the other process is there
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert!(read_slowly(&mut flow).await == short);
            flow.write_all(b"late").await.unwrap();
            flow.shutdown().await.unwrap();
            let mut late = Vec::new();
            within(server.read_to_end(&mut late)).await.unwrap();
            assert_eq!(late, b"late");
        };
        busy.push(("a server that has said all", tokio::spawn(task)));
        let (mut flow, mut server) = tunnel(device).await;
        let task = async move {
            flow.write_all(b"request").await.unwrap();
            flow.shutdown().await.unwrap();
            let mut request = Vec::new();
            within(server.read_to_end(&mut request)).await.unwrap();
            let short = &object(BYTES, 5)[..BYTES / 12];
            server.write_all(short).await.unwrap();
            server.shutdown().await.unwrap();
            // sleep: the reader begins when the other process is there
            tokio::time::sleep(Duration::from_secs(2)).await;
            assert!(read_slowly(&mut flow).await == short);
        };
        busy.push(("both ends have said all", tokio::spawn(task)));
        // sleep: the tunnels are to be in the middle
        tokio::time::sleep(Duration::from_millis(300)).await;
        BusyTunnels { idle, busy }
    }

    fn are_all_under_way(&self) -> bool {
        self.busy.iter().all(|(_, task)| !task.is_finished())
    }

    async fn assert_whole(mut self) {
        exchange(&mut self.idle.0, &mut self.idle.1, b"after").await;
        for (name, task) in self.busy {
            let done = tokio::time::timeout(PATIENCE * 4, task).await;
            done.unwrap_or_else(|_| panic!("{name} stands still"))
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let (mut flow, mut server) = self.idle;
        exchange(&mut flow, &mut server, b"at the end").await;
        drop(server);
        assert_eq!(within(flow.read(&mut [0])).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn tunnels_go_on_at_the_process_that_takes_over() {
    let directory = tempfile::tempdir().unwrap();
    let mut old = proxy(directory.path(), "127.0.0.1:0", &[]).await;
    let device = device(&old.address).await;
    let tunnels = BusyTunnels::start(&device).await;
    let new = proxy(directory.path(), old.listens_at(), &["--upgrade"]).await;
    assert_eq!(new.address, old.address);
    assert!(tunnels.are_all_under_way());
    let status = tokio::time::timeout(PATIENCE, old.child.wait()).await;
    assert!(status.expect("the old process ends").unwrap().success());
    // Once more, with tunnels that were passed on before.
    let newest = proxy(directory.path(), old.listens_at(), &["--upgrade"]).await;
    tunnels.assert_whole().await;
    drop((new, newest));
}

#[tokio::test]
async fn tunnels_go_on_at_the_old_process_if_the_new_one_fails() {
    let directory = tempfile::tempdir().unwrap();
    let mut old = proxy(directory.path(), "127.0.0.1:0", &[]).await;
    let device = device(&old.address).await;
    let tunnels = BusyTunnels::start(&device).await;
    // It dies when the old one has left.
    let dies = cedos(directory.path(), &proxy_arguments(old.listens_at()))
        .args(["--upgrade", "--qlog", "/proc/nowhere"])
        .output()
        .await
        .unwrap();
    assert!(!dies.status.success());
    let again = "the new process failed; this one serves again";
    until("the old process serves again", || {
        said(directory.path()).contains(again)
    })
    .await;
    tunnels.assert_whole().await;
    assert!(old.child.try_wait().unwrap().is_none(), "the same process");
}

/// What a service manager was told, and the descriptors beside it. Like systemd, it closes those whose connection both ends
/// have shut, unless it is told not to look (`FDPOLL=0`, sd_notify(3)).
fn kept_by(manager: &UnixDatagram) -> Vec<(String, Vec<OwnedFd>)> {
    let mut all = Vec::new();
    manager.set_nonblocking(true).unwrap();
    loop {
        let (mut text, mut space) = ([0; 256], cmsg_space!([i32; 253]));
        let mut parts = [IoSliceMut::new(&mut text)];
        let flags = MsgFlags::empty();
        let Ok(got) = recvmsg::<()>(manager.as_raw_fd(), &mut parts, Some(&mut space), flags)
        else {
            return all;
        };
        let mut descriptors = Vec::new();
        for message in got.cmsgs().unwrap() {
            if let ControlMessageOwned::ScmRights(numbers) = message {
                // SAFETY: they were just received, and nobody else has them.
                let owned = numbers
                    .iter()
                    .map(|it| unsafe { OwnedFd::from_raw_fd(*it) });
                descriptors.extend(owned);
            }
        }
        let length = got.bytes;
        let text = String::from_utf8_lossy(&text[..length]).into_owned();
        if !text.contains("FDPOLL=0") {
            descriptors.retain(|descriptor| !is_hung_up(descriptor));
        }
        all.push((text, descriptors));
    }
}

fn is_hung_up(descriptor: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(descriptor.as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO).unwrap() > 0
}

/// A proxy as a service of the manager at this socket, which passes it these descriptors.
async fn service(
    directory: &Path,
    listen: &str,
    notify: &Path,
    passed: &[(String, OwnedFd)],
) -> ProxyProcess {
    service_with(directory, listen, &[], notify, passed).await
}

/// A proxy with more arguments as a service of the manager at this socket, which passes it these descriptors.
pub async fn service_with(
    directory: &Path,
    listen: &str,
    more: &[&str],
    notify: &Path,
    passed: &[(String, OwnedFd)],
) -> ProxyProcess {
    // Numbers that are nobody's, from which a shell moves them to those of a service.
    let copies = passed.iter().map(|(_, descriptor)| {
        let copy = fcntl(descriptor, FcntlArg::F_DUPFD(COPIES_FROM)).unwrap();
        // SAFETY: it was made just now.
        unsafe { OwnedFd::from_raw_fd(copy) }
    });
    let copies: Vec<_> = copies.collect();
    let moves: Vec<_> = (3..)
        .zip(&copies)
        .map(|(number, copy)| format!("{number}<&{0}-", copy.as_raw_fd()))
        .collect();
    let names: Vec<_> = passed.iter().map(|(name, _)| name.as_str()).collect();
    let script = format!(
        "exec {} \nexport LISTEN_PID=$$ LISTEN_FDS={} LISTEN_FDNAMES={}\nexec \"$@\"",
        moves.join(" "),
        passed.len(),
        names.join(":"),
    );
    let mut command = tokio::process::Command::new("bash");
    command.args(["-c", &script, "bash"]).arg(built("cedos"));
    command.args(proxy_arguments(listen)).args(more);
    cedos_lab_rig::program::at_home(&mut command, directory);
    command.env("NOTIFY_SOCKET", notify);
    let log = directory.join("log");
    let log = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(log);
    command.stderr(Stdio::from(log.unwrap()));
    let started = ProxyProcess::spawned(&mut command).await;
    drop(copies);
    started.unwrap_or_else(|| panic!("{}", said(directory)))
}

#[tokio::test]
async fn tunnels_go_on_at_the_service_that_systemd_starts_again() {
    let directory = tempfile::tempdir().unwrap();
    let notify = directory.path().join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap().to_string();
    drop(free);
    let mut old = service(directory.path(), &listen, &notify, &[]).await;
    assert_eq!(kept_by(&manager).len(), 1, "READY=1");
    let device = device(&old.address).await;
    let tunnels = BusyTunnels::start(&device).await;
    kill(pid_of(&old.child), Signal::SIGTERM).unwrap();
    let status = tokio::time::timeout(PATIENCE, old.child.wait()).await;
    assert!(status.expect("the old process ends").unwrap().success());
    let mut passed = Vec::new();
    for (text, descriptors) in kept_by(&manager) {
        let (first, name) = text.split_once("\nFDNAME=").expect(&text);
        assert!(
            first.starts_with("FDSTORE=1\n") || first == "FDSTORE=1",
            "{text}"
        );
        passed.extend(descriptors.into_iter().map(|it| (name.to_owned(), it)));
    }
    assert_eq!(
        passed.len(),
        1 + 6,
        "a description, and a connection for each tunnel"
    );
    // systemd says nothing of their order.
    passed.reverse();
    let new = service(directory.path(), &listen, &notify, &passed).await;
    drop(passed);
    assert_eq!(new.address, old.address);
    let told: Vec<_> = kept_by(&manager)
        .into_iter()
        .map(|(text, _)| text)
        .collect();
    for text in [
        "FDSTOREREMOVE=1\nFDNAME=cedos-tunnels",
        "FDSTOREREMOVE=1\nFDNAME=cedos-tunnel",
    ] {
        assert!(told.iter().any(|it| it == text), "{told:?}");
    }
    tunnels.assert_whole().await;
}

#[tokio::test]
async fn a_sleeping_tunnel_goes_on_after_a_crash_of_the_service() {
    let directory = tempfile::tempdir().unwrap();
    let notify = directory.path().join("notify");
    let manager = UnixDatagram::bind(&notify).unwrap();
    let free = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = free.local_addr().unwrap().to_string();
    drop(free);
    let more = ["--sleep-after", "2s"];
    let mut old = service_with(directory.path(), &listen, &more, &notify, &[]).await;
    let links = ProvidedLinks::new();
    links.add(ProvidedLink::new("wifi", IpAddr::from([127, 0, 0, 2])));
    let options = DeviceOptions {
        server: old.address.parse().unwrap(),
        key: SecretKey::from_bytes([7; 32]),
        config: EndpointConfig::default(),
    };
    let mut device = Device::with_attach(options, links.clone()).await.unwrap();
    device.follow_links(links.subscribe(), |_| LinkUse::Free);
    let (mut flow, mut server) = tunnel(&device).await;
    exchange(&mut flow, &mut server, b"first").await;
    // sleep: it is acknowledged a moment later, and nothing tells of it
    tokio::time::sleep(Duration::from_millis(500)).await;
    links.remove("wifi");
    let mut passed = Vec::new();
    let name_of = |text: &str| -> Option<String> {
        let name = text.split_once("\nFDNAME=")?.1;
        let is_kept = text.starts_with("FDSTORE=1\n") && name.starts_with("cedos-slept.");
        is_kept.then(|| name.to_owned())
    };
    until("the manager keeps the connection", || {
        for (text, descriptors) in kept_by(&manager) {
            let named = name_of(&text);
            passed.extend(named.zip(descriptors.into_iter().next()));
        }
        !passed.is_empty()
    })
    .await;
    assert_eq!(passed.len(), 1);
    // sleep: the record of the session is on the disk a moment later, and nothing tells of it
    tokio::time::sleep(Duration::from_secs(1)).await;
    old.child.kill().await.unwrap();
    let new = service_with(directory.path(), &listen, &more, &notify, &passed).await;
    let kept = passed[0].0.clone();
    drop(passed);
    assert_eq!(new.address, old.address);
    // What the server sends meanwhile waits at the connection.
    server.write_all(b"meanwhile").await.unwrap();
    links.add(ProvidedLink::new("another", IpAddr::from([127, 0, 0, 3])));
    let mut got = [0; 9];
    within(flow.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"meanwhile");
    exchange(&mut flow, &mut server, b"second").await;
    let mut told = Vec::new();
    until("the manager forgets it", || {
        told.extend(kept_by(&manager).into_iter().map(|(text, _)| text));
        let forgets = format!("FDSTOREREMOVE=1\nFDNAME={kept}");
        told.contains(&forgets)
    })
    .await;
    // It ends as any other.
    flow.shutdown().await.unwrap();
    assert_eq!(within(server.read(&mut [0])).await.unwrap(), 0);
    server.shutdown().await.unwrap();
    assert_eq!(within(flow.read(&mut [0])).await.unwrap(), 0);
}
