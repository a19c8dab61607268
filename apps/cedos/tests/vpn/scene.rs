//! A machine with two links, a proxy with a tunnel network, and a server that only the proxy reaches.
//!
//! ```text
//!  device namespace             proxy namespace                    server namespace
//!  wlan0 198.51.100.7 ── ap0    cedos prox at 192.0.2.1:4433
//!  wwan0 203.0.113.7  ── tower0 cedos-prox0 10.83.0.1  srv0 198.18.0.1 ── eth0 198.18.0.2
//! ```
//!
//! The server has no route to inner addresses: it answers only what the proxy translated.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::namespace::{NamespaceNeeds, origin_namespace, sh, wifi_on};
use cedos_lab_rig::program::{ProxyProcess, cedos, device_key, pid_of, run};
use cedos_lab_rig::wait::within;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

/// Links with a rate, a TUN, mounts, and nftables with translation of addresses.
pub const TUNNEL: NamespaceNeeds = NamespaceNeeds::new(
    "-Urnm",
    "mount -t tmpfs t /run
     ip link add a0 type veth peer name a1
     tc qdisc add dev a0 root tbf rate 1mbit burst 10k latency 50ms
     ip tuntap add dev t0 mode tun
     nft 'table inet t { chain c { type nat hook output priority -100; meta l4proto tcp redirect to :1; }; }'",
);

pub const PROXY_HOST: &str = "192.0.2.1";
pub const SERVER: &str = "198.18.0.2";
pub const SERVER_IPV6: &str = "2001:db8:2::2";
/// The Wi-Fi's router, which is reached without the VPN: a name server, and an echo at port 80.
pub const OUTSIDE: &str = "198.51.100.1";
/// An address behind the router, with an echo at port 80.
pub const OUTSIDE_IPV6: &str = "2001:db8:1::1";
/// The first bytes of the router's answers to queries of names.
pub const OUTSIDE_ANSWER: &[u8] = b"outside answer to ";
/// A host behind the router, which answers each connection, and each datagram to port 7, with the address that it sees.
pub const OBSERVER: &str = "192.0.2.77";
/// The port at which it does so, and the router, too.
pub const OBSERVER_PORT: u16 = 81;
/// The port at which the server sends datagrams without end.
pub const STREAM_PORT: u16 = 10;
/// What the server sends over HTTP.
pub const OBJECT_BYTES: usize = 10_000_000;
/// The first bytes of the server's answers to queries of names.
pub const NAME_ANSWER: &[u8] = b"answer to ";

/// A Wi-Fi of 16 Mb/s towards the device.
const SLOW_SHAPE: &str = "tc qdisc replace dev ap0 root tbf rate 16mbit burst 32k latency 100ms";

/// The machines of a test.
pub struct Scene {
    pub home: TempDir,
    pub proxy: Pid,
    pub address: String,
    to_proxy_host: std::sync::mpsc::Sender<()>,
    restarted: std::sync::mpsc::Receiver<(Pid, String)>,
}

impl Scene {
    /// Starts device, proxy and server, with the Wi-Fi on.
    pub async fn start() -> Scene {
        Scene::start_with("10.83.0.0/16").await
    }

    /// Starts device, proxy and server, with this tunnel network.
    pub async fn start_with(net: &'static str) -> Scene {
        Scene::start_shaped(net, "", "60s").await
    }

    /// Starts device, proxy and server, with a Wi-Fi of 16 Mb/s towards the device.
    pub async fn start_slow() -> Scene {
        Scene::start_shaped("10.83.0.0/16", SLOW_SHAPE, "60s").await
    }

    /// Starts device, proxy and server, with a Wi-Fi of 16 Mb/s towards the device, and a proxy at which sessions sleep two
    /// seconds after their last path.
    pub async fn start_sleepy() -> Scene {
        Scene::start_shaped("10.83.0.0/16", SLOW_SHAPE, "2s").await
    }

    /// Starts all, after the command `shape` on the proxy's host.
    async fn start_shaped(
        net: &'static str,
        shape: &'static str,
        sleep_after: &'static str,
    ) -> Scene {
        sh("mount -t tmpfs t /run
            echo nameserver 198.18.0.2 > /run/resolv.conf
            mount --bind /run/resolv.conf /etc/resolv.conf
            ip link set lo up");
        let home = tempfile::tempdir().expect("a directory");
        let device = device_key(home.path()).await;
        let path = home.path().to_owned();
        let (to_proxy_host, restarts) = std::sync::mpsc::channel();
        let (restarted, proxies) = std::sync::mpsc::channel();
        origin_namespace(move || async move {
            start_server();
            start_outside();
            sh(shape);
            std::thread::spawn({
                // Of the proxy's namespace, as its thread is.
                move || {
                    let runtime = tokio::runtime::Builder::new_current_thread()
                        .enable_all()
                        .build();
                    runtime.expect("a runtime").block_on(async {
                        let mut running = Vec::new();
                        while restarts.recv().is_ok() {
                            running.push(start_proxy(&device, &path, net, sleep_after).await);
                            let new: &ProxyProcess = running.last().expect("just started");
                            let _ = restarted.send((pid_of(&new.child), new.address.clone()));
                        }
                    });
                }
            });
        });
        to_proxy_host.send(()).expect("the proxy's host runs");
        let (proxy, address) = proxies.recv_timeout(PATIENCE).expect("the proxy starts");
        wifi_on("198.51.100.7");
        Scene {
            home,
            proxy,
            address,
            to_proxy_host,
            restarted: proxies,
        }
    }

    /// Kills the proxy, and starts it again with the same state.
    pub fn restart_proxy(&mut self) {
        kill(self.proxy, Signal::SIGKILL).expect("send");
        self.to_proxy_host.send(()).expect("the proxy's host runs");
        (self.proxy, self.address) = self
            .restarted
            .recv_timeout(PATIENCE)
            .expect("the proxy starts");
    }

    /// The folder of programs that `cedos vpn` finds before those of the system.
    pub fn programs(&self) -> PathBuf {
        self.home.path().join("bin")
    }

    pub fn state_dir(&self) -> PathBuf {
        self.home.path().join("vpn")
    }

    /// Brings the VPN up, with more arguments.
    pub async fn up(&self, more: &[&str]) -> Vpn {
        self.up_over("w*=free", more).await
    }

    /// Brings the VPN up where networks cost what `--link` says, with more arguments.
    pub async fn up_over(&self, link: &str, more: &[&str]) -> Vpn {
        let state = self.state_dir();
        let words = [
            "vpn",
            "up",
            "--prox",
            &self.address,
            "--link",
            link,
            "--state-dir",
        ];
        let words = [&words[..], &[state.to_str().expect("text")], more].concat();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut child = cedos(self.home.path(), &words)
            .env("PATH", format!("{}:{path}", self.programs().display()))
            .stderr(std::process::Stdio::inherit())
            .spawn()
            .expect("start cedos");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let line = within(lines.next_line())
            .await
            .expect("text")
            .unwrap_or_default();
        let addresses = line.strip_prefix("cedos vpn: up as ");
        let addresses = addresses
            .unwrap_or_else(|| panic!("not up: {line}"))
            .to_owned();
        Vpn {
            child,
            addresses,
            _lines: lines,
        }
    }

    /// What `cedos vpn VERB` ends with, and prints.
    pub async fn vpn(&self, verb: &str, more: &[&str]) -> (i32, String) {
        let state = self.state_dir();
        let words = ["vpn", verb, "--state-dir", state.to_str().expect("text")];
        let ended = run(self.home.path(), &[&words[..], more].concat()).await;
        let said = String::from_utf8_lossy(&ended.output).into_owned();
        (ended.code, said + &ended.errors)
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        // The thread that started it does not end with the test.
        let _ = kill(self.proxy, Signal::SIGKILL);
    }
}

/// A VPN that is up.
pub struct Vpn {
    pub child: Child,
    pub addresses: String,
    _lines: Lines<BufReader<ChildStdout>>,
}

async fn start_proxy(device: &str, home: &Path, net: &str, sleep_after: &str) -> ProxyProcess {
    let listen = format!("{PROXY_HOST}:4433");
    let more = [
        "--state-dir",
        "proxy",
        "--tunnel-net",
        net,
        "--metrics-listen",
        "192.0.2.1:9433",
        "--sleep-after",
        sleep_after,
    ];
    ProxyProcess::start_for(device, home, &listen, &more).await
}

/// Starts the server in a namespace of its own, joined to that of the calling thread.
fn start_server() {
    let (tell, told) = std::sync::mpsc::channel();
    let (joined, is_joined) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a third namespace");
        tell.send(nix::unistd::gettid()).expect("it is awaited");
        is_joined.recv().expect("it joins");
        sh("ip link set lo up
            ip link set eth0 up
            ip addr add 198.18.0.2/24 dev eth0
            ip addr add 2001:db8:2::2/64 dev eth0 nodad");
        std::thread::spawn(|| echo_datagrams(7, b""));
        std::thread::spawn(|| echo_datagrams(53, NAME_ANSWER));
        std::thread::spawn(stream_datagrams);
        let datagrams = UdpSocket::bind((SERVER_IPV6, 7)).expect("a port");
        std::thread::spawn(move || answer_datagrams(&datagrams, b""));
        let served: [(u16, fn(TcpStream)); 2] = [(7, echo_stream), (80, serve_object)];
        for (port, serve) in served {
            let listener = TcpListener::bind((SERVER_IPV6, port)).expect("a port");
            std::thread::spawn(move || each(&listener, serve));
        }
        let streams = TcpListener::bind((SERVER, 7)).expect("a port");
        let web = TcpListener::bind((SERVER, 80)).expect("a port");
        std::thread::spawn(move || each(&streams, echo_stream));
        each(&web, serve_object);
    });
    let server = told.recv_timeout(PATIENCE).expect("it starts");
    sh(&format!(
        "ip link add srv0 type veth peer name eth0 netns {server}
         ip addr add 198.18.0.1/24 dev srv0
         ip addr add 2001:db8:2::1/64 dev srv0 nodad
         echo 1 > /proc/sys/net/ipv6/conf/all/forwarding
         ip link set srv0 up"
    ));
    joined.send(()).expect("it waits");
}

/// Starts what the device reaches without the VPN, in the namespace of the calling thread.
fn start_outside() {
    sh("ip -6 addr add 2001:db8::1/64 dev ap0 nodad
        ip -6 addr add 2001:db8:1::1/128 dev ap0 nodad");
    let ipv6 = TcpListener::bind((OUTSIDE_IPV6, 80)).expect("a port");
    std::thread::spawn(move || each(&ipv6, echo_stream));
    let names = UdpSocket::bind((OUTSIDE, 53)).expect("a port");
    std::thread::spawn(move || answer_datagrams(&names, OUTSIDE_ANSWER));
    let streams = TcpListener::bind((OUTSIDE, 80)).expect("a port");
    std::thread::spawn(move || each(&streams, echo_stream));
    sh(&format!("ip addr add {OBSERVER}/32 dev lo"));
    for host in [OBSERVER, OUTSIDE, OUTSIDE_IPV6] {
        let observer = TcpListener::bind((host, OBSERVER_PORT)).expect("a port");
        std::thread::spawn(move || each(&observer, answer_with_address));
    }
    let observer = UdpSocket::bind((OBSERVER, 7)).expect("a port");
    std::thread::spawn(move || {
        let mut bytes = [0; 64];
        while let Ok((_, from)) = observer.recv_from(&mut bytes) {
            let _ = observer.send_to(from.ip().to_string().as_bytes(), from);
        }
    });
}

fn answer_with_address(mut stream: TcpStream) {
    let peer = stream.peer_addr().expect("connected").ip().to_string();
    let _ = stream.write_all(peer.as_bytes());
}

fn each(listener: &TcpListener, serve: fn(TcpStream)) {
    for stream in listener.incoming().flatten() {
        std::thread::spawn(move || serve(stream));
    }
}

fn echo_stream(mut stream: TcpStream) {
    let mut copy = stream.try_clone().expect("a descriptor");
    let _ = std::io::copy(&mut stream, &mut copy);
}

fn serve_object(mut stream: TcpStream) {
    let mut head = [0; 4096];
    let _ = stream.read(&mut head);
    let _ = write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Length: {OBJECT_BYTES}\r\n\r\n"
    );
    let _ = stream.write_all(&vec![b'x'; OBJECT_BYTES]);
    let _ = stream.shutdown(Shutdown::Write);
    // The client closes when it has all.
    let _ = stream.read(&mut head);
    RETRANSMITTED.store(retransmitted(&stream), Ordering::Relaxed);
}

/// How many segments the server sent again of the last object whose client has closed; before that the highest number.
pub static RETRANSMITTED: AtomicU32 = AtomicU32::new(u32::MAX);

fn retransmitted(stream: &TcpStream) -> u32 {
    // SAFETY: all-zero is a valid tcp_info.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = std::mem::size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `info`, which has as many.
    let got = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            std::ptr::from_mut(&mut info).cast(),
            &mut length,
        )
    };
    assert_eq!(got, 0, "{}", std::io::Error::last_os_error());
    info.tcpi_total_retrans
}

fn echo_datagrams(port: u16, before: &[u8]) {
    let socket = UdpSocket::bind((SERVER, port)).expect("a port");
    answer_datagrams(&socket, before);
}

/// Sends datagrams, once it is asked, to who asked first: a camera that never looks whether they arrive.
fn stream_datagrams() {
    let socket = UdpSocket::bind((SERVER, STREAM_PORT)).expect("a port");
    let (_, to) = socket.recv_from(&mut [0; 64]).expect("a query");
    loop {
        let _ = socket.send_to(&[b's'; 1_000], to);
        // sleep: 4 Mb/s
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn answer_datagrams(socket: &UdpSocket, before: &[u8]) {
    let mut bytes = [0; 2048];
    while let Ok((n, from)) = socket.recv_from(&mut bytes) {
        let _ = socket.send_to(&[before, &bytes[..n]].concat(), from);
    }
}

/// A socket of the device, for queries of the server.
pub fn udp(to: &str) -> UdpSocket {
    let to: SocketAddr = to.parse().expect("an address");
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    let socket = UdpSocket::bind(any).expect("a port");
    socket.connect(to).expect("a route");
    let wait = Some(Duration::from_millis(100));
    socket.set_read_timeout(wait).expect("a length of time");
    socket
}

/// Sends until an answer comes, which is returned with the time that it took. Each server repeats the query at the
/// end of its answer: one that comes late, to an earlier query, is passed over.
pub fn ask(socket: &UdpSocket, query: &[u8]) -> (Vec<u8>, Duration) {
    let began = Instant::now();
    let mut answer = [0; 2048];
    loop {
        // Refused while there is no network.
        let _ = socket.send(query);
        while let Ok(n) = socket.recv(&mut answer) {
            if answer[..n].ends_with(query) {
                return (answer[..n].to_vec(), began.elapsed());
            }
        }
        assert!(began.elapsed() < PATIENCE, "no answer");
    }
}

/// The routes, rules and tables of the device.
pub fn system_network() -> String {
    let text = |line: &str| {
        let output = std::process::Command::new("sh").args(["-c", line]).output();
        String::from_utf8(output.expect("run sh").stdout).expect("text")
    };
    text(
        "ip rule; ip -6 rule; ip route show table all type unicast; nft list tables; cat /etc/resolv.conf; ls /sys/class/net",
    )
}
