//! Names that programs look up by themselves: what they get, and what leaves the device for it.
//!
//! ```text
//!  device: cedos run -- PROGRAM   wlan0 ── veth ── ap0 198.51.100.1: D2Prox, and the name server of
//!                                   │                                 /etc/resolv.conf, which is silent
//!                                   └─ a packet socket reads all that leaves
//! ```

use cedos_lab_rig::missing_tool::is_installed;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use cedos_lab_rig::namespace::{
    LINKS_AND_MOUNTS, SHAPED_LINKS_OF_ROOT, in_namespace, in_namespace_with, sh, wifi_on,
};
use cedos_lab_rig::wait::until;
use cedos_lab_rig::{program, this_test};

use super::programs::{NAME, Net, compiled};

/// The name server of the device, which would hear what leaves in clear.
const SERVER: &str = "198.51.100.1";

/// The origin's host, which has a name server for connections, and the address that this answers with.
pub(super) const ORIGIN: &str = "192.0.2.1";
const ANSWERED: &str = "203.0.113.9";

/// The device's name, which is in no file of it.
const OWN_NAME: &str = "name-of-the-device";

/// Ways to look up a name, and the server that is asked: that of /etc/resolv.conf where none is named.
const LOOKUPS: [(&str, &str); 16] = [
    ("getaddrinfo", ""),
    ("getaddrinfo_a", ""),
    ("gethostbyname", ""),
    ("res_query", ""),
    ("res_search", ""),
    ("res_send", ""),
    ("res_nquery", ""),
    ("connect", SERVER),
    ("sendto", SERVER),
    ("sendmsg", SERVER),
    ("sendmmsg", SERVER),
    ("connect", "2001:db8::53"),
    ("sendto", "2001:db8::53"),
    // A resolver on the device would ask others.
    ("connect", "127.0.0.53"),
    ("sendto", "127.0.0.53"),
    ("tcp", "127.0.0.53"),
];

/// Answers questions that come by connections to the ports of DNS and of DNS over TLS, which is not spoken.
pub(super) fn serve_lookups_by_connection() {
    for port in [53, 853] {
        let listener = TcpListener::bind((ORIGIN, port)).expect("its port");
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let _ = client.and_then(answer_by_connection);
            }
        });
    }
}

fn answer_by_connection(mut client: TcpStream) -> io::Result<()> {
    let mut size = [0; 2];
    client.read_exact(&mut size)?;
    let mut message = vec![0; usize::from(u16::from_be_bytes(size))];
    client.read_exact(&mut message)?;
    // An answer to the question, with one record of the name that is asked for.
    message[2] |= 0x80;
    message[7] = 1;
    message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4]);
    message.extend(ANSWERED.parse::<Ipv4Addr>().expect("an address").octets());
    client.write_all(&(message.len() as u16).to_be_bytes())?;
    client.write_all(&message)
}

/// All that leaves the device by its links.
struct Capture {
    ends: Arc<AtomicBool>,
    reader: JoinHandle<Vec<u8>>,
}

impl Capture {
    fn start() -> Capture {
        let all = libc::c_int::from((libc::ETH_P_ALL as u16).to_be());
        // SAFETY: plain numbers.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW, all) };
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        // SAFETY: the kernel just made it for us.
        let socket = unsafe { socket2::Socket::from_raw_fd(fd) };
        socket.set_recv_buffer_size(8 << 20).expect("room");
        let look_every = Duration::from_millis(50);
        socket
            .set_read_timeout(Some(look_every))
            .expect("a timeout");
        let loopback = nix::net::if_::if_nametoindex("lo").expect("it");
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let reader = std::thread::spawn(move || {
            let mut seen = Vec::new();
            let mut packet = vec![0_u8; 65_536];
            loop {
                // SAFETY: places of the sizes that are said.
                let (n, from) = unsafe {
                    let mut from: libc::sockaddr_ll = std::mem::zeroed();
                    let mut size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
                    let n = libc::recvfrom(
                        socket.as_raw_fd(),
                        packet.as_mut_ptr().cast(),
                        packet.len(),
                        0,
                        (&raw mut from).cast(),
                        &raw mut size,
                    );
                    (n, from)
                };
                match usize::try_from(n) {
                    Ok(_) if from.sll_ifindex as u32 == loopback => {}
                    Ok(n) => seen.extend(&packet[..n]),
                    // All that was there before has been read.
                    Err(_) if ended.load(Relaxed) => return seen,
                    Err(_) => {}
                }
            }
        });
        Capture { ends, reader }
    }

    fn end(self) -> Vec<u8> {
        self.ends.store(true, Relaxed);
        self.reader.join().expect("it reads")
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// A device that can reach a name server in clear, and is told to.
fn net_with_name_server() -> Net {
    Net::with(|| {
        sh("ip link set lo up");
        wifi_on("198.51.100.7");
        let folder = tempfile::tempdir().expect("a directory").keep();
        let file = folder.join("resolv.conf");
        std::fs::write(
            &file,
            format!("nameserver {SERVER}\noptions timeout:1 attempts:1\n"),
        )
        .expect("write");
        use nix::sched::CloneFlags;
        let own = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWUTS;
        nix::sched::unshare(own).expect("own mounts, and a name");
        sh(&format!(
            "mount --bind {} /etc/resolv.conf; hostname {OWN_NAME}",
            file.display()
        ));
        std::fs::remove_dir_all(folder).expect("it is mounted");
    })
}

fn lookup_program(folder: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/lookups.c");
    let program = folder.join("lookups");
    let status = std::process::Command::new("cc")
        .args(["-o".as_ref(), program.as_os_str(), source.as_ref()])
        .arg("-lresolv")
        .status();
    if status.is_err() {
        eprintln!("skipped: no C compiler here");
        return None;
    }
    assert!(status.is_ok_and(|status| status.success()), "{source}");
    Some(program)
}

#[track_caller]
fn has_stand_in(output: &Output, what: &str) {
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(said.starts_with("198.18."), "{what}: {said}{errors}");
}

/// Asserts that every lookup gets an answer in this capture mode, and that packets on the link
/// contain no name and no payload.
async fn no_name_leaves(options: &[&str]) {
    let net = net_with_name_server();
    let (Some(lookups), Some(fetch)) = (lookup_program(net.path()), compiled(net.path(), &[]))
    else {
        return;
    };
    let lookups = lookups.to_str().expect("text");
    let fetch = fetch.to_str().expect("text");
    let capture = Capture::start();
    for (way, server) in LOOKUPS {
        let server = if server.is_empty() { SERVER } else { server };
        let output = net.run(options, &[lookups, way, NAME, server]).await;
        has_stand_in(&output, &format!("{way} {server} by {options:?}"));
    }
    net.run(options, &[lookups, "getaddrinfo", OWN_NAME, SERVER])
        .await;
    // A connection to a name server elsewhere is D2Prox's, also one to the port of DNS over TLS.
    for way in ["tcp", "tcp-853"] {
        let output = net.run(options, &[lookups, way, NAME, ORIGIN]).await;
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.trim(), ANSWERED, "{way} by {options:?}: {output:?}");
    }
    let output = net
        .run(options, &[fetch, "wait", NAME, &net.port(), "/a"])
        .await;
    net.is_whole(&output, "", "the object");
    let seen = capture.end();
    assert!(seen.len() > net.bytes.len(), "the object is in the capture");
    let label = NAME.split('.').next().expect("a label").as_bytes();
    assert!(
        !contains(&seen, label),
        "a name left in clear by {options:?}"
    );
    assert!(
        !contains(&seen, OWN_NAME.as_bytes()),
        "the device's name left by {options:?}"
    );
    let payload = &net.bytes[..32];
    assert!(
        !contains(&seen, payload),
        "payload left in clear by {options:?}"
    );
    // The capture shows what leaves without `cedos run`.
    let capture = Capture::start();
    let asked = tokio::process::Command::new(lookups)
        .args(["res_query", NAME, SERVER])
        .output();
    asked.await.expect("it runs");
    assert!(
        contains(&capture.end(), label),
        "a lookup without `cedos run`"
    );
}

#[test]
fn by_preload_every_lookup_is_answered_and_no_name_leaves() {
    in_namespace(this_test!(), || no_name_leaves(&["--rung", "preload"]));
}

#[test]
fn by_env_no_name_leaves() {
    in_namespace(this_test!(), async || {
        let net = net_with_name_server();
        let url = net.url("/a");
        let secure = url.replacen("http:", "https:", 1);
        let env = ["--rung", "env"];
        // The origin speaks no TLS and has no repository: what such a program asks of it comes after the lookup.
        for (program, is_whole) in [
            (&["curl", "-sS", &url][..], true),
            (&["wget", "-qO-", &url], true),
            (&["curl", "-sSk", &secure], false),
            (
                &[
                    "wget",
                    "-qO-",
                    "--tries=1",
                    "--no-check-certificate",
                    &secure,
                ],
                false,
            ),
            (&["git", "ls-remote", &url], false),
            (&["git", "ls-remote", &secure], false),
        ] {
            if !is_installed(program[0]) {
                continue;
            }
            let capture = Capture::start();
            let output = net.run(&env, program).await;
            let seen = capture.end();
            if is_whole {
                net.is_whole(&output, "env", program[0]);
                assert!(
                    seen.len() > net.bytes.len(),
                    "{program:?} is not in the capture"
                );
            }
            assert!(!seen.is_empty(), "{program:?} is not in the capture");
            assert!(
                !contains(&seen, b"origin"),
                "{program:?}: a name left in clear"
            );
            let payload = &net.bytes[..32];
            assert!(
                !contains(&seen, payload),
                "{program:?}: payload left in clear"
            );
        }
    });
}

#[test]
fn by_notify_every_lookup_is_answered_and_no_name_leaves() {
    in_namespace(this_test!(), || no_name_leaves(&["--rung", "notify"]));
}

#[test]
fn by_tun_every_lookup_is_answered_and_no_name_leaves() {
    in_namespace(this_test!(), || no_name_leaves(&["--rung", "tun"]));
}

#[test]
fn strictly_every_lookup_is_answered_and_no_name_leaves() {
    in_namespace(this_test!(), || {
        no_name_leaves(&["--strict", "--rung", "preload"])
    });
}

/// Asks a Unix socket for a name, as the C library asks nscd, and then a name server.
const ASKS_NSCD: &str = r#"
import socket, sys
refused = 0
for path in ("/run/nscd/socket", "/run/systemd/resolve/io.systemd.Resolve"):
    try:
        asked = socket.socket(socket.AF_UNIX)
        asked.connect(path)
        asked.sendall(b"secret.example")
    except ConnectionRefusedError:
        refused += 1
other = socket.socket(socket.AF_UNIX)
other.connect("/run/other")
sys.exit(refused != 2)
"#;

/// A Unix socket at a path; keeps what each connection sends first.
fn stand_in(path: &str) -> Arc<Mutex<Vec<Vec<u8>>>> {
    let path = Path::new(path);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    let listener = std::os::unix::net::UnixListener::bind(path).expect("a socket");
    let first: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let kept = first.clone();
    std::thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let kept = kept.clone();
            std::thread::spawn(move || {
                let mut bytes = [0; 512];
                let length = connection.read(&mut bytes).unwrap_or(0);
                kept.lock().expect("a lock").push(bytes[..length].to_vec());
            });
        }
    });
    first
}

#[test]
fn no_name_goes_to_a_resolver_behind_a_unix_socket() {
    in_namespace_with(LINKS_AND_MOUNTS, this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        sh("ip link set lo up; mount -t tmpfs t /run");
        let nscd = stand_in("/run/nscd/socket");
        let resolved = stand_in("/run/systemd/resolve/io.systemd.Resolve");
        let other = stand_in("/run/other");
        let home = tempfile::tempdir().expect("a directory");
        // Nobody is at the proxy, and nobody is asked there.
        let prox = format!("d2tp://127.0.0.1:9/{}", "A".repeat(43));
        for rung in ["preload", "notify"] {
            let run = ["run", "--prox", &prox, "--rung", rung, "--"];
            let words = [&run[..], &["python3", "-c", ASKS_NSCD]].concat();
            let ran = program::run(home.path(), &words).await;
            assert_eq!(ran.code, 0, "{rung}: {ran:?}");
        }
        // Other Unix sockets are the program's own.
        until("the connections of the program", || {
            other.lock().expect("a lock").len() == 2
        })
        .await;
        // The C library itself asks nscd for users, as a shell around Python does; a host is never asked for.
        let asked = [nscd, resolved].map(|socket| socket.lock().expect("a lock").clone());
        for message in asked.iter().flatten() {
            assert!(
                !asks_for_a_host(message),
                "{}",
                String::from_utf8_lossy(message)
            );
        }
        assert_eq!(asked[1].len(), 0);
    });
}

/// Whether a message that came to nscd asks for a host: its type is the second number of its head.
fn asks_for_a_host(message: &[u8]) -> bool {
    const GETHOSTBYNAME: u32 = 4;
    const GETHOSTBYADDRV6: u32 = 7;
    const GETAI: u32 = 14;
    let kind = message.get(4..8).map(|kind| {
        let kind = kind.try_into().expect("four bytes");
        u32::from_ne_bytes(kind)
    });
    let name = b"secret.example";
    message.windows(name.len()).any(|bytes| bytes == name)
        || kind
            .is_some_and(|kind| (GETHOSTBYNAME..=GETHOSTBYADDRV6).contains(&kind) || kind == GETAI)
}

/// c-ares takes no answer from another address than it asked.
#[test]
fn programs_with_a_resolver_of_their_own_get_answers() {
    in_namespace(this_test!(), async || {
        let net = net_with_name_server();
        let url = net.url("/a");
        for rung in ["preload", "notify"] {
            let options = ["--rung", rung];
            if is_installed("aria2c") {
                let words = [
                    "aria2c",
                    "-q",
                    "--timeout=10",
                    "--max-tries=1",
                    "-o",
                    rung,
                    &url,
                ];
                let output = net.run(&options, &words).await;
                assert!(output.status.success(), "aria2c by {rung}: {output:?}");
                let file = std::fs::read(net.path().join(rung)).expect("it");
                assert_eq!(file, net.bytes, "aria2c by {rung}");
            }
            if is_installed("node") {
                let script = format!(
                    "require('dns').resolve4('{NAME}', (e, found) => console.log(e || found[0]))"
                );
                let output = net.run(&options, &["node", "-e", &script]).await;
                has_stand_in(&output, &format!("node by {rung}"));
            }
        }
    });
}

/// apt's downloads run as another user than apt.
#[test]
fn a_program_that_changes_its_user_is_caught_by_preload() {
    in_namespace_with(SHAPED_LINKS_OF_ROOT, this_test!(), async || {
        sh("ip link set lo up");
        let net = net_with_name_server();
        if is_installed("python3") {
            // All modules are loaded before: the other user may not read them.
            let script = format!(
                "import os, sys, socket as s\n\
                 os.setgroups([]); os.setgid(65534); os.setuid(65534)\n\
                 a = s.socket(); a.connect((b'{NAME}', {}))\n\
                 a.sendall(b'GET /a HTTP/1.1\\r\\nHost: a\\r\\nConnection: close\\r\\n\\r\\n')\n\
                 while more := a.recv(65536): sys.stdout.buffer.write(more)",
                net.port()
            );
            let output = net.run(&[], &["python3", "-c", &script]).await;
            net.is_whole(&output, "preload", "another user");
        }
        if !is_installed("apt-get") {
            return;
        }
        let home = net.path().display();
        sh(&format!(
            "cd {home}; mkdir -p repo state/lists/partial cache/archives/partial
             printf 'Package: cedos-test\nVersion: 1\nArchitecture: all\nFilename: a.deb\nSize: 1\n\
                     SHA256: {}\nDescription: test\n' > repo/Packages
             echo 'deb [trusted=yes] http://{NAME}:{}/files/repo ./' > sources.list",
            "0".repeat(64),
            net.port()
        ));
        let options = [
            format!("Dir::Etc::sourcelist={home}/sources.list"),
            "Dir::Etc::sourceparts=-".into(),
            format!("Dir::State={home}/state"),
            format!("Dir::Cache={home}/cache"),
            "Dir::State::status=/dev/null".into(),
            "Acquire::Languages=none".into(),
            "Acquire::Retries=0".into(),
            "APT::Sandbox::User=_apt".into(),
        ];
        let mut words = vec!["apt-get", "update"];
        for option in &options {
            words.extend(["-o", option]);
        }
        let output = net.run(&[], &words).await;
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{output:?}");
        assert!(said.contains("Packages ["), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!errors.contains("another user"), "{errors}");
    });
}

/// Sockets for datagrams are another namespace's by `notify`; what is for this machine stays on it.
#[test]
fn datagrams_reach_programs_of_the_same_device() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let net = Net::new();
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a port");
        let port = socket.local_addr().expect("it").port();
        let script = format!(
            "import socket as s\n\
             a = s.socket(s.AF_INET, s.SOCK_DGRAM); a.sendto(b'sent', ('127.0.0.1', {port}))\n\
             b = s.socket(s.AF_INET, s.SOCK_DGRAM); b.connect(('127.0.0.1', {port})); b.send(b'sent')\n\
             try: a.sendto(b'far', ('192.0.2.1', 9)); print('sent')\n\
             except OSError as e: print(e.errno)"
        );
        for rung in ["preload", "notify"] {
            let output = net
                .run(&["--rung", rung], &["python3", "-c", &script])
                .await;
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(
                said.trim(),
                libc::ENETUNREACH.to_string(),
                "{rung}: {output:?}"
            );
            let mut bytes = [0; 16];
            for _ in 0..2 {
                socket
                    .set_read_timeout(Some(cedos_lab_rig::PATIENCE))
                    .expect("a timeout");
                let (n, _) = socket.recv_from(&mut bytes).expect("a datagram");
                assert_eq!(&bytes[..n], b"sent", "{rung}");
            }
        }
    });
}
