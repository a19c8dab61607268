//! `cedos serve` and `cedos get` on two machines behind NATs of every kind, over real sockets: the
//! file arrives, directly if possible.
//!
//! It is a program without the test harness, because only a process with one thread may enter a
//! user namespace. If the system forbids namespaces it prints a message and passes.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use cedos_lab_emu::{HostNetwork, enter};
use cedos_lab_link::Behaviour;

/// The size of the file in bytes.
const FILE_BYTES: usize = 24_000_000;
/// The rate of the transfer. It takes six seconds, much longer than a rendezvous, so the rest of it shows which path
/// was found.
const RATE: &str = "4M";
/// More bytes than all punches and probes together.
const SHOWS_BYTES: u64 = 1_000_000;

fn main() {
    if let Err(forbidden) = enter() {
        println!("skipped, no lab on this machine: {forbidden}");
        return;
    }
    let only = std::env::args().skip(1).find(|a| !a.starts_with('-'));
    let mut passed = 0;
    // Those of one caller at once: each waits for its rate.
    for caller in Behaviour::ALL {
        std::thread::scope(|scope| {
            for listener in Behaviour::ALL {
                let name = format!("{}_{}", caller.word(), listener.word());
                if only.as_ref().is_some_and(|only| !name.contains(only)) {
                    continue;
                }
                scope.spawn(move || {
                    two_behind_nats_meet(caller, listener);
                    println!("test {name} ... ok");
                });
                passed += 1;
            }
        });
    }
    println!("test result: ok. {passed} passed; 0 failed");
}

fn cedos(home: &Path, arguments: &[&str]) -> Command {
    std::fs::create_dir_all(home).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedos-lab"));
    command
        .current_dir(home)
        .args(arguments)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .env("XDG_CONFIG_HOME", home)
        .env("XDG_STATE_HOME", home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// A process that is ended when this is dropped, and its first line of output.
struct Started(Child, String);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(crossing: &HostNetwork, host: usize, home: &Path, arguments: &[&str]) -> Started {
    let mut command = cedos(home, arguments);
    command.stderr(Stdio::null());
    let mut child = crossing.host(host).spawn(command).unwrap();
    let mut line = String::new();
    let out = child.stdout.take().expect("piped");
    BufReader::new(out).read_line(&mut line).unwrap();
    assert!(!line.is_empty(), "{arguments:?} says nothing");
    Started(child, line.trim().to_owned())
}

fn two_behind_nats_meet(caller: Behaviour, listener: Behaviour) {
    use Behaviour::{PortRestricted, Symmetric};
    let what = format!("{} × {}", caller.word(), listener.word());
    let crossing = HostNetwork::build(&[Some(caller), Some(listener), None]).unwrap();
    let place = tempfile::tempdir().unwrap();
    let at = |name: &str| place.path().join(name);
    std::fs::create_dir_all(at("files")).unwrap();
    let bytes: Vec<u8> = (0..FILE_BYTES as u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    std::fs::write(at("files/a.bin"), &bytes).unwrap();
    let files = at("files").display().to_string();

    let listen = format!("{}:4433", HostNetwork::address(2, false));
    let proxy = ["prox", "--listen", &listen, "--allow-any-client"];
    let proxy = start(&crossing, 2, &at("proxy"), &proxy);
    let serve = ["serve", &files, "--prox", &proxy.1, "--allow-any-client"];
    let serving = start(&crossing, 1, &at("listener"), &serve);

    let url = format!("{}a.bin", serving.1);
    let get = ["get", &url, "--prox", &proxy.1, "--limit-rate", RATE];
    let get = cedos(&at("caller"), &get);
    let child = crossing.host(0).spawn(get).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {said}");
    let got = std::fs::read(at("caller/a.bin")).unwrap();
    assert!(got == bytes, "{what}: other bytes");

    let (direct, relayed) = (crossing.carried(1, 0), crossing.carried(2, 0));
    let cannot = matches!(
        (caller, listener),
        (Symmetric, Symmetric | PortRestricted) | (PortRestricted, Symmetric)
    );
    println!("{what}: {direct} bytes directly, {relayed} by way of the proxy");
    if cannot {
        assert_eq!(direct, 0, "{what}: how did they come?");
    } else {
        assert!(direct > SHOWS_BYTES, "{what}: no direct path");
    }
}
