//! How many connections a program may have, how long they wait, and what becomes of them when the proxy is
//! started again. Everything is in one network namespace: the origin has an address that is not loopback's.

use cedos_lab_rig::missing_tool::is_installed;
use std::process::Stdio;
use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{cell_on, in_namespace, received, sh, wifi_on};
use cedos_lab_rig::program::{ProxyProcess, cedos};
use cedos_lab_rig::wait::until;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::sys::signal::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::Command;

use super::programs::{NAME, Net, compiled};

const ORIGIN: &str = "192.0.2.1";

/// An origin that sends back what it receives; returns its port.
async fn echo_origin() -> u16 {
    sh(&format!("ip addr add {ORIGIN}/32 dev lo"));
    let listener = TcpListener::bind((ORIGIN, 0)).await.expect("a port");
    let port = listener.local_addr().expect("it").port();
    tokio::spawn(async move {
        loop {
            let Ok((mut client, _)) = listener.accept().await else {
                return;
            };
            tokio::spawn(async move {
                let mut bytes = [0; 1024];
                while let Ok(n @ 1..) = client.read(&mut bytes).await {
                    if client.write_all(&bytes[..n]).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn run(home: &std::path::Path, address: &str, options: &[&str], program: &[&str]) -> Command {
    let words = [&["run", "--prox", address], options, &["--"], program].concat();
    let mut command = cedos(home, &words);
    command.kill_on_drop(true);
    command
}

#[test]
fn a_program_has_three_hundred_connections_at_once() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let port = echo_origin().await;
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let script = format!(
            "import socket as s\n\
             all = [s.create_connection(('{ORIGIN}', {port})) for _ in range(300)]\n\
             for n, c in enumerate(all): c.sendall(b'%4d' % n)\n\
             print(sum(c.recv(4, s.MSG_WAITALL) == b'%4d' % n for n, c in enumerate(all)))"
        );
        for rung in ["preload", "notify", "tun"] {
            let words = ["python3", "-c", &script];
            let output = run(home.path(), &proxy.address, &["--rung", rung], &words).output();
            let output = tokio::time::timeout(PATIENCE, output).await;
            let output = output.expect("it ends").expect("cedos");
            let said = String::from_utf8_lossy(&output.stdout);
            assert_eq!(said.trim(), "300", "{rung}: {output:?}");
        }
    });
}

/// An origin that answers `e` and sends without end to who says `f`; returns its port.
async fn endless_origin() -> u16 {
    sh(&format!("ip addr add {ORIGIN}/32 dev lo"));
    let listener = TcpListener::bind((ORIGIN, 0)).await.expect("a port");
    let port = listener.local_addr().expect("it").port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                if client.read_u8().await.is_ok_and(|said| said == b'e') {
                    return client.write_all(b"e").await;
                }
                loop {
                    client.write_all(&[0; 65_536]).await?;
                }
            });
        }
    });
    port
}

#[test]
fn connections_that_nobody_reads_leave_room_to_others() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let port = endless_origin().await;
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let script = format!(
            "import socket as s, time\n\
             open = lambda: s.create_connection(('{ORIGIN}', {port}))\n\
             unread = [open() for _ in range(20)]\n\
             for c in unread: c.sendall(b'f')\n\
             time.sleep(5)\n\
             one = open(); one.settimeout(20); one.sendall(b'e'); print(one.recv(1))"
        );
        let words = ["python3", "-c", &script];
        let output = run(home.path(), &proxy.address, &["--rung", "preload"], &words).output();
        let output = tokio::time::timeout(PATIENCE, output).await;
        let output = output.expect("it ends").expect("cedos");
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said.trim(), "b'e'", "{output:?}");
    });
}

#[test]
fn one_connection_too_many_waits_until_another_ends() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let port = echo_origin().await;
        let proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let script = format!(
            "import resource as r, socket as s, threading as t\n\
             r.setrlimit(r.RLIMIT_NOFILE, (4096, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n\
             open = lambda: s.create_connection(('{ORIGIN}', {port}))\n\
             all = [open() for _ in range(1024)]\n\
             more = []\n\
             one = t.Thread(target=lambda: more.append(open()))\n\
             one.start(); one.join(1)\n\
             print('waits' if one.is_alive() else 'does not wait', flush=True)\n\
             all.pop().close(); one.join()\n\
             more[0].sendall(b'made'); print(more[0].recv(4).decode())"
        );
        let words = ["python3", "-c", &script];
        let output = run(home.path(), &proxy.address, &["--rung", "preload"], &words).output();
        let output = tokio::time::timeout(PATIENCE, output).await;
        let output = output.expect("it ends").expect("cedos");
        let said = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said, "waits\nmade\n", "{errors}");
        assert_eq!(
            errors.matches("connections are open").count(),
            1,
            "{errors}"
        );
    });
}

/// D2Prox counts the connections of a device, whichever process has them.
#[test]
fn connections_that_the_proxy_has_no_room_for_wait_too() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") || !is_installed("curl") {
            return;
        }
        let net = Net::new();
        let script = format!(
            "import resource as r, socket as s\n\
             r.setrlimit(r.RLIMIT_NOFILE, (4096, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n\
             all = [s.create_connection(('{NAME}', {})) for _ in range(1024)]\n\
             print('open', flush=True); input()\n\
             all.pop().close(); input()",
            net.port()
        );
        let mut holder = net
            .command(&["--rung", "preload"], &["python3", "-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("cedos");
        let mut lines = BufReader::new(holder.stdout.take().expect("its output")).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.expect("in time").expect("text");
        assert_eq!(line.as_deref(), Some("open"));
        let mut waiting = net
            .command(&["--rung", "env"], &["curl", "-sS", &net.url("/a")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("cedos");
        let mut errors = BufReader::new(waiting.stderr.take().expect("its errors")).lines();
        let told = async {
            let mut all = String::new();
            while let Ok(Some(line)) = errors.next_line().await {
                if line.contains("More connections wait") {
                    return Ok(());
                }
                all.extend([&line, "\n"]);
            }
            Err(all)
        };
        let told = tokio::time::timeout(PATIENCE, told).await;
        assert_eq!(told.expect("in time"), Ok(()));
        let mut input = holder.stdin.take().expect("its input");
        input.write_all(b"\n").await.expect("it reads");
        let output = tokio::time::timeout(PATIENCE, waiting.wait_with_output()).await;
        let output = output.expect("it ends").expect("cedos");
        assert!(output.status.success(), "{:?}", output.status);
        assert!(output.stdout == net.bytes, "the object");
    });
}

#[test]
fn a_proxy_that_is_absent_is_given_up_after_the_limit() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let port = echo_origin().await;
        let mut proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        proxy.child.kill().await.expect("it ends");
        // Datagrams to it are taken, and not answered.
        let _port = std::net::UdpSocket::bind(proxy.listens_at()).expect("its port");
        let script = format!(
            "import socket as s\n\
             try: s.create_connection(('{ORIGIN}', {port}))\n\
             except OSError as e: print(e.errno)"
        );
        for rung in ["preload", "notify"] {
            let before = Instant::now();
            let options = ["--rung", rung, "--proxy-timeout", "2"];
            let words = ["python3", "-c", &script];
            let output = run(home.path(), &proxy.address, &options, &words).output();
            let output = tokio::time::timeout(PATIENCE, output).await;
            let output = output.expect("it does not wait for ever").expect("cedos");
            let said = String::from_utf8_lossy(&output.stdout);
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(
                said.trim(),
                libc::ENETUNREACH.to_string(),
                "{rung}: {errors}"
            );
            assert!(errors.contains("does not answer (2 s)"), "{rung}: {errors}");
            assert!(
                before.elapsed() > Duration::from_secs(2),
                "{rung}: too soon"
            );
        }
    });
}

#[test]
fn a_proxy_that_is_started_again_resets_what_was_open_and_serves_what_waits() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let home = tempfile::tempdir().expect("a directory");
        let port = echo_origin().await;
        let mut proxy = ProxyProcess::start(home.path(), "127.0.0.1:0", &[]).await;
        let script = format!(
            "import socket as s\n\
             a = s.create_connection(('{ORIGIN}', {port})); a.sendall(b'a'); a.recv(1)\n\
             print('open', flush=True); input()\n\
             b = s.create_connection(('{ORIGIN}', {port})); b.sendall(b'b'); print(b.recv(1), flush=True)\n\
             a.settimeout(90)\n\
             try: print(a.recv(1))\n\
             except OSError as e: print(type(e).__name__)"
        );
        let words = ["python3", "-c", &script];
        let mut program = run(home.path(), &proxy.address, &["--rung", "preload"], &words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("cedos");
        let mut lines = BufReader::new(program.stdout.take().expect("its output")).lines();
        let mut next = async || {
            let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
            line.expect("in time").expect("text").unwrap_or_default()
        };
        assert_eq!(next().await, "open");
        let id = cedos_lab_rig::program::pid_of(&proxy.child);
        nix::sys::signal::kill(id, Signal::SIGKILL).expect("it lives");
        proxy.child.wait().await.expect("it ends");
        let mut input = program.stdin.take().expect("its input");
        input.write_all(b"\n").await.expect("it reads");
        // The second connection is asked for while there is no proxy.
        let at = proxy.listens_at().to_owned();
        let again = ProxyProcess::start(home.path(), &at, &[]).await;
        assert_eq!(next().await, "b'b'");
        assert_eq!(next().await, "ConnectionResetError");
        let output = tokio::time::timeout(PATIENCE, program.wait_with_output()).await;
        let output = output.expect("it ends").expect("cedos");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("the proxy was started again"), "{errors}");
        drop(again);
    });
}

#[test]
fn a_line_says_that_mobile_data_is_used_because_wifi_does_not_carry() {
    in_namespace(this_test!(), async || {
        let net = Net::with(|| {
            sh("ip link set lo up");
            wifi_on("198.51.100.7");
            cell_on();
        });
        let Some(program) = compiled(net.path(), &[]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let (port, links) = (
            net.port(),
            ["--link", "wlan0=free", "--link", "wwan0=metered"],
        );
        let words = [program, "wait", NAME, &port, "/big"];
        let run = net
            .command(&links, &words)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("cedos");
        until("payload by Wi-Fi", || received("wlan0") > 2_000_000).await;
        // What the device sends by Wi-Fi reaches nobody from now on.
        sh("ip neigh replace 198.51.100.1 lladdr 02:00:00:00:00:99 dev wlan0 nud permanent");
        let output = tokio::time::timeout(PATIENCE, run.wait_with_output()).await;
        let output = output.expect("it ends").expect("cedos");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let line = "wlan0 does not carry; using wwan0 (metered)";
        assert_eq!(errors.matches(line).count(), 1, "{errors}");
    });
}
