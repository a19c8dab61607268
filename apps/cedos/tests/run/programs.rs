//! `cedos run` with real programs, in a network namespace where D2Prox is all that can be reached: what
//! arrives went through it. Names are known to D2Prox alone.
//!
//! ```text
//!  device: cedos run -- PROGRAM   wlan0 ── veth ── ap0 198.51.100.1: D2Prox ── origin.test 192.0.2.1
//! ```

use cedos_lab_rig::missing_tool::is_installed;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use std::time::{Duration, Instant};

use cedos_lab_rig::namespace::{in_namespace, origin_namespace, sh, wifi_off, wifi_on};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, object, proper, reply};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::wait::until;
use cedos_lab_rig::{PATIENCE, program, this_test};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{ChildStdout, Command};

use super::lookups::{ORIGIN, serve_lookups_by_connection};

const BYTES: usize = 3_000_000;
/// The large object is the other, so many times: 9.6 s at 20 Mb/s.
const BIG_TIMES: usize = 8;
pub(super) const NAME: &str = "origin.test";

pub(super) struct Net {
    home: tempfile::TempDir,
    proxy: ProxyProcess,
    origin: ScriptedOrigin,
    pub(super) bytes: Vec<u8>,
}

/// What an origin serves beside the object: files of a folder.
fn files(root: &Path, path: &str) -> Option<Vec<u8>> {
    let path = path.split('?').next()?.strip_prefix("/files/")?;
    std::fs::read(root.join(path)).ok()
}

impl Net {
    /// A device that reaches D2Prox and nothing else.
    pub(super) fn new() -> Net {
        Net::with(|| {
            sh("ip link set lo up; ip link set wlan0 up; ip addr add 198.51.100.7/24 dev wlan0");
        })
    }

    pub(super) fn with(join: impl FnOnce()) -> Net {
        let home = tempfile::tempdir().expect("a directory");
        // Root's library is to be where all reach it.
        sh(&format!("chmod 755 {}", home.path().display()));
        let bytes = object(BYTES, 5);
        let (root, served) = (home.path().to_owned(), bytes.clone());
        let (origin, proxy) = origin_namespace(move || async move {
            let hosts = root.join("hosts");
            std::fs::write(&hosts, format!("127.0.0.1 localhost\n{ORIGIN} {NAME}\n"))
                .expect("write");
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("own mounts");
            sh(&format!("mount --bind {} /etc/hosts", hosts.display()));
            serve_lookups_by_connection();
            let origin = {
                let root = root.clone();
                ScriptedOrigin::start_at(ORIGIN, move |asked| {
                    let answer = match files(&root, &asked.path) {
                        _ if asked.path == "/a" => proper(asked, &served, "\"v1\""),
                        _ if asked.path == "/big" => {
                            proper(asked, &served.repeat(BIG_TIMES), "\"v2\"")
                        }
                        Some(file) => {
                            let length = file.len().to_string();
                            reply("200 OK", &[("content-length", &length)], &file)
                        }
                        None => reply("404 Not Found", &[("content-length", "0")], b""),
                    };
                    OriginReply(answer, ReplyEnd::Close)
                })
                .await
            };
            (
                origin,
                ProxyProcess::start(&root, "198.51.100.1:0", &[]).await,
            )
        });
        join();
        Net {
            home,
            proxy,
            origin,
            bytes,
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.home.path()
    }

    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{NAME}:{}{path}", self.port())
    }

    pub(super) fn port(&self) -> String {
        self.origin.address.port().to_string()
    }

    pub(super) fn command(&self, options: &[&str], program: &[&str]) -> Command {
        let words = [
            &["run", "--prox", &self.proxy.address],
            options,
            &["--"],
            program,
        ]
        .concat();
        let mut command = program::cedos(self.path(), &words);
        command.env("HOME", self.path());
        for name in [
            "http_proxy",
            "https_proxy",
            "all_proxy",
            "no_proxy",
            "LD_PRELOAD",
        ] {
            command.env_remove(name);
            command.env_remove(name.to_uppercase());
        }
        command
    }

    pub(super) async fn run(&self, options: &[&str], program: &[&str]) -> Output {
        let output = self.command(options, program).output();
        let output = tokio::time::timeout(PATIENCE, output).await;
        output
            .unwrap_or_else(|_| panic!("{program:?} with {options:?} ends by itself"))
            .expect("cedos")
    }

    /// Runs a program to its end. Returns how long that took, too, without what processes waited for a processor.
    async fn run_for(&self, options: &[&str], program: &[&str]) -> (Output, Duration) {
        let (wait, begun) = (ProcessorWait::of_this_and_descendants(), Instant::now());
        let (output, waited) = wait.during(self.run(options, program)).await;
        (output, begun.elapsed().saturating_sub(waited))
    }

    /// Asserts that the program was caught in this capture mode, and got the object.
    #[track_caller]
    pub(super) fn is_whole(&self, output: &Output, rung: &str, what: &str) {
        self.got(&self.bytes, output, rung, what);
    }

    /// Asserts that the program was caught in this capture mode, and got these bytes.
    #[track_caller]
    fn got(&self, bytes: &[u8], output: &Output, rung: &str, what: &str) {
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{what}: {errors}");
        assert!(
            errors.contains(&format!("cedos run: {rung}")),
            "{what}, not by {rung}: {errors}"
        );
        assert!(
            output.stdout.ends_with(bytes),
            "{what}: {} bytes",
            output.stdout.len()
        );
    }
}

/// Compiles one of `lab/cli/src/repro/programs`; none where that cannot be done.
pub(super) fn compiled(folder: &Path, options: &[&str]) -> Option<PathBuf> {
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../lab/cli/src/repro/programs/fetch.c"
    );
    let program = folder.join(format!("fetch{}", options.concat()));
    let status = std::process::Command::new("cc")
        .args(options)
        .args(["-o".as_ref(), program.as_os_str(), source.as_ref()])
        .stderr(Stdio::null())
        .status();
    if status.is_ok_and(|status| status.success()) {
        return Some(program);
    }
    eprintln!("skipped: no C compiler here that takes {options:?}");
    None
}

/// The Go client of `lab/cli/src/repro/programs`; with `c`, one that loads the C library besides.
fn go_program(folder: &Path, c: bool) -> PathBuf {
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../lab/cli/src/repro/programs/fetch.go"
    );
    let program = folder.join(if c { "fetch-go-c" } else { "fetch-go" });
    let built = std::process::Command::new("go")
        .args(["build", "-o"])
        .args([program.as_os_str(), source.as_ref()])
        .env("CGO_ENABLED", if c { "1" } else { "0" })
        .status();
    assert!(built.is_ok_and(|status| status.success()), "go build");
    program
}

#[test]
fn programs_that_heed_variables_are_given_them() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let url = net.url("/a");
        if is_installed("curl") {
            for options in [&[][..], &["--strict"]] {
                let output = net.run(options, &["curl", "-sS", &url]).await;
                net.is_whole(&output, "env", "curl");
            }
        }
        if is_installed("wget") {
            let output = net.run(&[], &["wget", "-qO-", &url]).await;
            net.is_whole(&output, "env", "wget");
        }
    });
}

#[test]
fn a_repository_is_cloned_over_http() {
    in_namespace(this_test!(), async || {
        if !is_installed("git") {
            return;
        }
        let net = Net::new();
        let root = net.path().display();
        sh(&format!(
            "cd {root} && export HOME={root} && git init -q work && cd work && seq 1 20000 > numbers &&
             git add . && git -c user.name=a -c user.email=a@a.example commit -qm numbers &&
             git clone -q --bare . ../bare.git && cd ../bare.git && git update-server-info"
        ));
        let url = net.url("/files/bare.git");
        for (options, rung) in [(&[][..], "env"), (&["--rung", "preload"], "preload")] {
            let copy = format!("copy-{rung}");
            let output = net.run(options, &["git", "clone", "-q", &url, &copy]).await;
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{errors}");
            assert!(errors.contains(&format!("cedos run: {rung}")), "{errors}");
            let same =
                |name: &str| std::fs::read(net.path().join(name).join("numbers")).expect("it");
            assert_eq!(same(&copy), same("work"));
        }
    });
}

#[test]
fn a_program_that_loads_the_c_library_is_caught_by_each_rung_waiting_or_not() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(program) = compiled(net.path(), &[]) else {
            return;
        };
        let program = program.to_str().expect("text");
        for options in [
            &[][..],
            &["--strict"],
            &["--rung", "notify", "--strict"],
            &["--rung", "tun"],
        ] {
            let rung = options
                .get(1)
                .filter(|_| options[0] == "--rung")
                .unwrap_or(&"preload");
            for way in ["wait", "poll"] {
                let words = [program, way, NAME, &net.port(), "/a"];
                let output = net.run(options, &words).await;
                net.is_whole(&output, rung, &format!("{way} {options:?}"));
            }
        }
        // By address there is no name to look up.
        for way in ["wait", "poll"] {
            let words = [program, way, "192.0.2.1", &net.port(), "/a"];
            let output = net.run(&["--rung", "notify"], &words).await;
            net.is_whole(&output, "notify", way);
        }
    });
}

#[test]
fn a_proxy_that_does_not_answer_is_told_while_the_program_waits() {
    in_namespace(this_test!(), async || {
        let mut net = Net::new();
        let address = &net.proxy.address;
        let (way, _) = address.rsplit_once('/').expect("a key at its end");
        net.proxy.address = format!("{way}/{}", "A".repeat(43));
        let url = net.url("/a");
        let mut program = net.command(&[], &["curl", "-sS", &url]);
        let mut program = program
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("cedos");
        let mut lines = BufReader::new(program.stderr.take().expect("its errors")).lines();
        let told = async {
            while let Ok(Some(line)) = lines.next_line().await {
                if line.contains("does not answer") && line.contains("key") {
                    return;
                }
            }
            panic!("it ended without a message");
        };
        let told = tokio::time::timeout(PATIENCE, told).await;
        told.expect("a sentence");
        let (output, took) = net.run_for(&[], &["curl", "-sS", "-m", "1", &url]).await;
        assert_eq!(output.status.code(), Some(28), "{output:?}");
        assert!(took < Duration::from_secs(4), "it stays: {took:?}");
    });
}

#[test]
fn a_refused_connection_is_refused_as_the_kernel_would() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(program) = compiled(net.path(), &[]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let refused = format!("errno {}", libc::ECONNREFUSED);
        for rung in ["preload", "notify"] {
            for way in ["wait", "poll"] {
                let words = [program, way, "192.0.2.1", "9", "/a"];
                let output = net.run(&["--rung", rung], &words).await;
                let errors = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(3), "{rung} {way}: {errors}");
                assert!(errors.contains(&refused), "{rung} {way}: {errors}");
            }
        }
        // A name that nobody knows has an address, and nobody is there.
        let words = [program, "wait", "nobody.test", "80", "/a"];
        let output = net.run(&[], &words).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            errors.contains(&format!("errno {}", libc::EHOSTUNREACH)),
            "{errors}"
        );
    });
}

#[test]
fn a_connection_that_cannot_be_is_reset_by_the_tun_and_nothing_panics() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(program) = compiled(net.path(), &["-static"]) else {
            return;
        };
        let program = program.to_str().expect("text");
        for (host, port) in [("192.0.2.1", "9"), ("nobody.test", "80")] {
            let words = [program, "wait", host, port, "/a"];
            let output = net.run(&["--rung", "tun"], &words).await;
            let errors = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(3), "{host}: {errors}");
            assert!(!errors.contains("panicked"), "{host}: {errors}");
            assert!(!errors.contains('\u{1b}'), "colours: {errors}");
        }
        // A program that is killed, and a deadline that passes, while much is under way.
        let big = [program, "wait", NAME, &net.port(), "/big"];
        let killed = [&["timeout", "-s", "KILL", "0.3"], &big[..]].concat();
        for (options, words) in [(&[][..], &killed[..]), (&["--by", "+1s"], &big)] {
            let options = [&["--rung", "tun"], options].concat();
            let output = net.run(&options, words).await;
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "{words:?}: {errors}");
            assert!(!errors.contains("panicked"), "{words:?}: {errors}");
        }
        let words = [program, "wait", NAME, &net.port(), "/files/hosts"];
        let (output, took) = net.run_for(&["--rung", "tun"], &words).await;
        assert!(output.status.success(), "{output:?}");
        assert!(took < Duration::from_millis(1900), "it stays: {took:?}");
    });
}

#[test]
fn static_and_go_programs_are_caught() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        if let Some(program) = compiled(net.path(), &["-static"]) {
            let program = program.to_str().expect("text");
            let words = [program, "wait", NAME, &net.port(), "/a"];
            let output = net.run(&[], &words).await;
            net.is_whole(&output, "tun", "static");
            let output = net.run(&["--rung", "notify", "--strict"], &words).await;
            net.is_whole(&output, "notify", "static, strictly");
            // Started by `cedos run` itself, with a rung that does not catch it, it goes nowhere.
            let words = [program, "wait", "192.0.2.1", &net.port(), "/a"];
            let output = net.run(&["--rung", "preload", "--strict"], &words).await;
            assert_eq!(output.status.code(), Some(3), "{output:?}");
        }
        if is_installed("go") {
            let program = go_program(net.path(), false);
            let program = program.to_str().expect("text");
            for options in [&[][..], &["--strict"], &["--rung", "tun"]] {
                let rung = options.get(1).unwrap_or(&"notify");
                let output = net.run(options, &[program, &net.url("/a")]).await;
                net.is_whole(&output, rung, "Go");
            }
        }
    });
}

#[test]
fn a_python_script_and_its_children_are_caught() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let net = Net::new();
        let url = net.url("/a");
        // Without the variables: the sockets are what is to be caught.
        let script = "import sys, urllib.request as r\n\
                      r.install_opener(r.build_opener(r.ProxyHandler({})))\n\
                      sys.stdout.buffer.write(r.urlopen(sys.argv[1]).read())";
        let output = net.run(&[], &["python3", "-c", script, &url]).await;
        net.is_whole(&output, "preload", "urllib");
        let child = format!("exec python3 -c '{}' {url}", script.replace('\'', "\""));
        let output = net.run(&["--strict"], &["sh", "-c", &child]).await;
        net.is_whole(&output, "preload", "a child");
    });
}

/// A counter of this network namespace (proc_net(5), snmp).
fn counted(protocol: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/net/snmp").expect("counters");
    let prefix = format!("{protocol}: ");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(&prefix));
    let names = lines.next().expect("names").split(' ');
    let values = lines.next().expect("values").split(' ');
    let found = names.zip(values).find(|(known, _)| *known == name);
    found.expect("the counter").1.parse().expect("a number")
}

/// Connections that it began (RFC 4022, tcpActiveOpens).
fn connections_begun() -> u64 {
    counted("Tcp", "ActiveOpens")
}

/// Attempts to get where there is no way to (RFC 4293, ipSystemStatsOutNoRoutes).
fn attempts_to_nowhere() -> u64 {
    counted("Ip", "OutNoRoutes")
}

#[test]
fn of_an_address_nobody_is_asked_for_a_name() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let net = Net::new();
        let script = "import socket as s\n\
                      def of(call, *words):\n\
                      \x20try: return call(*words)[0]\n\
                      \x20except OSError as e: return type(e).__name__\n\
                      a = s.getaddrinfo('origin.test', 80)[0][4]\n\
                      six = s.getaddrinfo('origin.test', 80, s.AF_INET6)[0][4]\n\
                      far = ('192.0.2.1', 80)\n\
                      print(of(s.getnameinfo, far, 0), of(s.getnameinfo, far, s.NI_NAMEREQD),\n\
                      \x20of(s.gethostbyaddr, far[0]), of(s.getnameinfo, a, 0), of(s.gethostbyaddr, a[0]),\n\
                      \x20of(s.gethostbyaddr, six[0]), s.getnameinfo(a, 0)[1], of(s.getnameinfo, a, s.NI_NUMERICHOST) == a[0])";
        let before = attempts_to_nowhere();
        let output = net.run(&[], &["python3", "-c", script]).await;
        let said = String::from_utf8_lossy(&output.stdout);
        let wanted = format!("192.0.2.1 gaierror herror {NAME} {NAME} {NAME} http True\n");
        assert_eq!(said, wanted, "{output:?}");
        assert_eq!(attempts_to_nowhere(), before, "a question was on its way");
    });
}

#[test]
fn strictly_nothing_leaves_but_by_the_proxy() {
    in_namespace(this_test!(), async || {
        // Here the origin can be reached directly, too.
        let net = Net::with(|| {
            sh("ip link set lo up");
            wifi_on("198.51.100.7");
        });
        let Some(program) = compiled(net.path(), &[]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let port = net.port();
        let attempt = [program, "wait", "192.0.2.1", &port, "/a"];
        // The counter sees what goes past: without walls this program heeds no variables.
        let before = connections_begun();
        let output = net.run(&["--rung", "env"], &attempt).await;
        assert!(output.status.success(), "{output:?}");
        assert_eq!(connections_begun(), before + 1);
        assert_eq!(net.origin.requests().len(), 1);
        let before = connections_begun();
        let output = net.run(&["--rung", "env", "--strict"], &attempt).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{errors}");
        assert_eq!(net.origin.requests().len(), 1, "it got through");
        // Caught, it arrives; still this namespace begins nothing.
        for options in [
            &["--strict"][..],
            &["--strict", "--rung", "notify"],
            &["--rung", "tun"],
        ] {
            let output = net.run(options, &attempt).await;
            net.is_whole(&output, "", "caught");
        }
        assert_eq!(
            connections_begun(),
            before,
            "TCP connections past the proxy"
        );
        assert_eq!(net.origin.requests().len(), 4);
    });
}

/// Ways to start a program from one that loads the C library, and the words before it.
fn starters(folder: &Path) -> Vec<(&'static str, Vec<String>)> {
    let spawns = folder.join("spawns");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/starts.c");
    let status = std::process::Command::new("cc")
        .args(["-o".as_ref(), spawns.as_os_str(), source.as_ref()])
        .status();
    assert!(status.is_ok_and(|status| status.success()), "{source}");
    let script = folder.join("script");
    let text = "#!/usr/bin/env bash\nset -e\n\"$@\"\ntrue\n";
    std::fs::write(&script, text).expect("write");
    sh(&format!("chmod +x {}", script.display()));
    let shell = |name: &str, text: &str| vec![name.into(), "-ec".into(), text.into(), "-".into()];
    let ways = [
        "execve", "execv", "execvp", "execvpe", "execl", "execlp", "execle", "fexecve", "execveat",
        "spawn", "spawnp", "system", "popen", "bare",
    ];
    let mut all = vec![
        ("dash that waits", shell("sh", "\"$@\"; true")),
        ("dash that becomes it", shell("sh", "exec \"$@\"")),
        ("bash that waits", shell("bash", "\"$@\"; true")),
        ("bash, in the background", shell("bash", "\"$@\" & wait $!")),
        ("a script", vec![script.to_str().expect("text").into()]),
    ];
    let spawns = spawns.to_str().expect("text");
    all.extend(ways.map(|way| (way, vec![spawns.to_owned(), way.to_owned()])));
    all
}

/// The program that starts another, without a C library to load.
fn static_starts(folder: &Path) -> Option<PathBuf> {
    let starts = folder.join("static-starts");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/starts.c");
    let built = std::process::Command::new("cc")
        .args(["-static", "-o"])
        .args([starts.as_os_str(), source.as_ref()])
        .stderr(Stdio::null())
        .status();
    built.is_ok_and(|status| status.success()).then_some(starts)
}

/// A short object: many programs fetch it.
const SHORT: &str = "/files/short";

/// Runs a program that fetches [`SHORT`], with these words before it: nobody has anything to say.
async fn is_caught(net: &Net, options: &[&str], starter: &[String], program: &[&str], what: &str) {
    let bytes = object(20_000, 7);
    std::fs::write(net.path().join("short"), &bytes).expect("write");
    let starter = starter.iter().map(String::as_str);
    let words: Vec<&str> = starter.chain(program.iter().copied()).collect();
    let output = net.run(options, &words).await;
    net.got(&bytes, &output, "preload", what);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.lines().count(), 1, "{what}: {errors}");
}

#[test]
fn static_and_go_programs_that_another_one_starts_are_caught() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(program) = compiled(net.path(), &["-static"]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let port = net.port();
        let by_address = ["wait", "192.0.2.1", &port, SHORT];
        let by_address = [&[program][..], &by_address].concat();
        // The counter sees what tries to get past.
        let before = attempts_to_nowhere();
        let output = net.run(&["--rung", "env"], &by_address).await;
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert_eq!(attempts_to_nowhere(), before + 1);
        let before = attempts_to_nowhere();
        let starters = starters(net.path());
        for (what, starter) in &starters {
            is_caught(&net, &[], starter, &by_address, what).await;
        }
        if is_installed("go") {
            for c in [false, true] {
                let go = go_program(net.path(), c);
                let go = [go.to_str().expect("text"), &net.url(SHORT)];
                for (what, starter) in &starters {
                    if what.contains("waits") || what.contains("spawn") {
                        let what = format!("Go, with C: {c}, by {what}");
                        is_caught(&net, &[], starter, &go, &what).await;
                        is_caught(&net, &["--strict"], starter, &go, &what).await;
                    }
                }
            }
        }
        assert_eq!(attempts_to_nowhere(), before, "attempts to get past");
    });
}

#[test]
fn strictly_nothing_leaves_from_what_another_program_starts() {
    in_namespace(this_test!(), async || {
        // Here the origin can be reached directly, too.
        let net = Net::with(|| {
            sh("ip link set lo up");
            wifi_on("198.51.100.7");
        });
        let Some(program) = compiled(net.path(), &["-static"]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let port = net.port();
        let before = connections_begun();
        let starters = starters(net.path());
        for (what, starter) in &starters {
            for (way, host) in [("wait", "192.0.2.1"), ("poll", NAME)] {
                let words = [program, way, host, &port, SHORT];
                is_caught(&net, &["--strict"], starter, &words, what).await;
            }
        }
        assert_eq!(
            connections_begun(),
            before,
            "TCP connections past the proxy"
        );
        assert_eq!(net.origin.requests().len(), 2 * starters.len());
    });
}

#[test]
fn what_a_caught_static_program_starts_is_caught_too() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(starts) = static_starts(net.path()) else {
            return;
        };
        let starts = starts.to_str().expect("text");
        let port = net.port();
        let before = attempts_to_nowhere();
        for linked in [&[][..], &["-static"]] {
            let program = compiled(net.path(), linked).expect("it was compiled before");
            let program = program.to_str().expect("text");
            for options in [&[][..], &["--strict"]] {
                for (way, host) in [("wait", "192.0.2.1"), ("poll", NAME)] {
                    // Without walls a static program's lookups are its own.
                    if host == NAME && !linked.is_empty() && options.is_empty() {
                        continue;
                    }
                    // dash, static, dash, and the program: held by the kernel and asked for by itself.
                    let shell = ["sh", "-ec", "\"$@\"; true", "-"].map(str::to_owned);
                    let words = [starts, "spawnp", "sh", "-ec", "\"$@\"; true", "-"];
                    let words = [&words[..], &[program, way, host, &port, SHORT]].concat();
                    let what = format!("{linked:?} {options:?} {host}");
                    is_caught(&net, options, &shell, &words, &what).await;
                }
            }
        }
        // Static is what runs a script.
        if let Some(program) = compiled(net.path(), &["-static"]) {
            let script = net.path().join("interpreted");
            std::fs::write(&script, format!("#! {starts}  script\n")).expect("write");
            sh(&format!("chmod +x {}", script.display()));
            let shell = ["sh", "-ec", "\"$@\"; true", "-"].map(str::to_owned);
            let words = [script.to_str(), program.to_str()].map(|path| path.expect("text"));
            let words = [&words[..], &["wait", "192.0.2.1", &port, SHORT]].concat();
            is_caught(&net, &[], &shell, &words, "a script").await;
        }
        assert_eq!(attempts_to_nowhere(), before, "attempts to get past");
    });
}

#[test]
fn many_filters_are_heard_at_once_and_each_ends_with_its_programs() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let Some(program) = compiled(net.path(), &["-static"]) else {
            return;
        };
        let program = program.to_str().expect("text");
        let bytes = object(20_000, 8);
        std::fs::write(net.path().join("short"), &bytes).expect("write");
        const AT_ONCE: usize = 12;
        let Some(starts) = static_starts(net.path()) else {
            return;
        };
        // The shell's parent is `cedos run`, which has a descriptor or two for each filter.
        let script = format!(
            "held() {{ ls -l /proc/$PPID/fd | grep -c seccomp; }}
             mkfifo gate; held
             for i in $(seq {AT_ONCE}); do
                 \"$0\" spawnp sh -c 'read line < gate; exec \"$@\"' - \"$@\" > out$i &
             done
             until [ $(held) -ge {AT_ONCE} ]; do sleep 0.1; done
             exec 9<>gate; for i in $(seq {AT_ONCE}); do echo go >&9; done
             wait
             until [ $(held) -eq 0 ]; do sleep 0.1; done"
        );
        let port = net.port();
        let starts = starts.to_str().expect("text");
        let words = ["bash", "-c", &script, starts, program, "wait", "192.0.2.1"];
        let words = [&words[..], &[&port, SHORT]].concat();
        let output = net.run(&[], &words).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        assert_eq!(output.stdout, b"0\n", "{errors}");
        for i in 1..=AT_ONCE {
            let got = std::fs::read(net.path().join(format!("out{i}"))).expect("its output");
            assert!(got.ends_with(&bytes), "{i}: {errors}");
        }
    });
}

#[test]
fn a_program_that_cannot_be_caught_is_told_and_strictly_gets_nowhere() {
    in_namespace(this_test!(), async || {
        // Here the origin can be reached directly, too.
        let net = Net::with(|| {
            sh("ip link set lo up");
            wifi_on("198.51.100.7");
        });
        let Some(program) = compiled(net.path(), &["-static"]) else {
            return;
        };
        let starters = starters(net.path());
        let (_, starts) = starters.last().expect("one");
        let twice = ["sh", "-c", "\"$@\"; \"$@\"", "-", &starts[0], "unheld"];
        let (program, port) = (program.to_str().expect("text"), net.port());
        let words = [program, "wait", "192.0.2.1", &port, "/a"];
        let words = [&twice[..], &words].concat();
        let mut reached = 0;
        for (options, says, gets) in [
            (&[][..], "bypass the proxy", 2),
            (&["--strict"], "connections fail", 0),
        ] {
            let output = net.run(options, &words).await;
            let errors = String::from_utf8_lossy(&output.stderr);
            let said = format!("cedos run: {program} is not caught");
            assert_eq!(errors.matches(&said).count(), 1, "once: {errors}");
            assert!(
                errors.contains(says) && errors.contains("--rung tun"),
                "{errors}"
            );
            reached += gets;
            assert_eq!(net.origin.requests().len(), reached, "{errors}");
        }
        // One of another architecture is not run here, but looked at.
        let foreign = net.path().join("foreign");
        let mut bytes = std::fs::read(program).expect("it");
        const MACHINE: std::ops::Range<usize> = 18..20; // elf(5), e_machine
        bytes[MACHINE].copy_from_slice(&0xfeed_u16.to_ne_bytes());
        std::fs::write(&foreign, bytes).expect("write");
        sh(&format!("chmod +x {}", foreign.display()));
        let foreign = foreign.to_str().expect("text");
        let output = net.run(&[], &[&starts[0], "execve", foreign]).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(errors.contains("is of another architecture"), "{errors}");
    });
}

#[test]
fn names_asked_of_a_resolver_on_this_machine_are_the_proxys_too() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let conf = net.path().join("resolv.conf");
        std::fs::write(&conf, "nameserver 127.0.0.53\n").expect("write");
        let with = format!("mount --bind {} /etc/resolv.conf && \"$@\"", conf.display());
        let port = net.port();
        let url = net.url("/a");
        let mut programs = Vec::new();
        if let Some(program) = compiled(net.path(), &["-static"]) {
            programs.push((program, vec!["wait", NAME, &port, "/a"]));
        }
        if is_installed("go") {
            programs.push((go_program(net.path(), false), vec![&url]));
        }
        for (program, words) in programs {
            let program = [program.to_str().expect("text")];
            for rung in ["preload", "notify"] {
                let shell = ["unshare", "-m", "sh", "-c", &with, "-"];
                let words = [&shell[..], &program, &words].concat();
                let output = net.run(&["--rung", rung], &words).await;
                net.is_whole(&output, rung, program[0]);
            }
        }
    });
}

#[test]
fn what_outlives_cedos_run_starts_programs_as_before_and_no_file_is_left() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        let temporary = net.path().join("tmp");
        std::fs::create_dir(&temporary).expect("create");
        let program = compiled(net.path(), &["-static"]);
        let program = program.as_deref().unwrap_or(Path::new("true"));
        let script = "echo ready; read line; sh -c 'echo child'; \"$@\"; exit 0";
        let words = ["sh", "-c", script, "-", program.to_str().expect("text")];
        for round in 0..2 {
            let mut child = net
                .command(
                    &[],
                    &[&words[..], &["wait", "192.0.2.1", "9", "/a"]].concat(),
                )
                .env("TMPDIR", &temporary)
                .stdin(Stdio::piped())
                .spawn()
                .expect("cedos");
            let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
            let mut errors = BufReader::new(child.stderr.take().expect("its errors")).lines();
            let mut input = child.stdin.take().expect("its input");
            assert_eq!(line_of(&mut lines).await.as_deref(), Some("ready"));
            child.kill().await.expect("it is killed");
            input.write_all(b"\n").await.expect("it reads");
            assert_eq!(line_of(&mut lines).await.as_deref(), Some("child"));
            let mut said = Vec::new();
            while let Some(line) = errors.next_line().await.expect("text") {
                said.push(line);
            }
            // Which rung; who is not caught; what that one says itself.
            assert!(said.iter().all(|line| !line.contains("ld.so")), "{said:?}");
            if program != Path::new("true") {
                let told = said.iter().filter(|line| line.contains("does not answer"));
                assert_eq!(told.count(), 1, "{said:?}");
            }
            let files = |folder: &Path| -> Vec<String> {
                let entries = std::fs::read_dir(folder).expect("it").flatten();
                let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
                names.filter(|name| name != "instances").collect()
            };
            assert_eq!(files(&temporary).len(), 0, "after round {round}");
            let runtime = net.path().join(program::RUNTIME).join("cedos");
            assert_eq!(files(&runtime).len(), 1, "one library");
        }
    });
}

#[test]
fn a_download_outlives_an_outage_and_comes_back_with_another_address() {
    in_namespace(this_test!(), async || {
        let net = Net::with(|| {
            sh("ip link set lo up");
            wifi_on("198.51.100.7");
        });
        let url = net.url("/big");
        let wanted = net.bytes.repeat(BIG_TIMES);
        let programs: [(&str, &[&str]); 4] = [
            ("env", &["curl", "-sS", "-o", "out", &url]),
            ("preload", &["curl", "-sS", "-o", "out", &url]),
            ("notify", &["wget", "-q", "--tries=1", "-O", "out", &url]),
            ("tun", &["wget", "-q", "--tries=1", "-O", "out", &url]),
        ];
        for (n, (rung, program)) in programs.into_iter().enumerate() {
            if !is_installed(program[0]) {
                continue;
            }
            let file = net.path().join("out");
            // Names of programs that look them up by DNS are answered in a namespace of their own.
            let options = ["--rung", rung, "--strict"];
            let mut child = net.command(&options, program).spawn().expect("cedos");
            let bytes = || std::fs::metadata(&file).map_or(0, |m| m.len());
            let ended = &mut None;
            until(&format!("{rung}: it begins or ends"), || {
                *ended = child.try_wait().expect("its state");
                bytes() >= BYTES as u64 || ended.is_some()
            })
            .await;
            if ended.is_some() {
                let output = child.wait_with_output().await.expect("output");
                panic!("{rung}: it ended before the outage: {output:?}");
            }
            wifi_off();
            // sleep: an outage of two seconds is the subject
            tokio::time::sleep(Duration::from_secs(2)).await;
            let before = bytes();
            assert!(
                before < wanted.len() as u64,
                "it was over before the outage"
            );
            wifi_on(&format!("198.51.100.{}", 8 + n));
            let output = tokio::time::timeout(PATIENCE, child.wait_with_output()).await;
            let output = output
                .unwrap_or_else(|_| panic!("{rung}: it ends"))
                .expect("output");
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{rung}: {errors}");
            assert!(
                std::fs::read(&file).expect("it") == wanted,
                "{rung}: other bytes"
            );
            std::fs::remove_file(&file).expect("remove");
        }
    });
}

/// Hears of links and addresses in both ways there are, and says how many notices came until it was told to
/// look; then whether it can still ask what addresses there are.
const LISTENS_TO_LINKS: &str = r#"
import socket, struct, sys
def opened():
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
IPV4_ADDRESS_GROUP = 5
bound, joined = opened(), opened()
bound.bind((0, 1 << IPV4_ADDRESS_GROUP - 1))
joined.bind((0, 0))
joined.setsockopt(270, 1, IPV4_ADDRESS_GROUP)  # SOL_NETLINK, NETLINK_ADD_MEMBERSHIP
print("ready", flush=True)
sys.stdin.readline()
for way in bound, joined:
    heard = 0
    try:
        while way.recv(65536, socket.MSG_DONTWAIT):
            heard += 1
    except BlockingIOError:
        pass
    RTM_GETADDR, REQUEST_ALL = 22, 0x301
    way.send(struct.pack("=IHHIIBxxxi", 24, RTM_GETADDR, REQUEST_ALL, 1, 0, socket.AF_INET, 0))
    print(heard, len(way.recv(65536)) > 0, flush=True)
"#;

#[test]
fn a_program_that_began_with_a_network_hears_of_no_other() {
    in_namespace(this_test!(), async || {
        if !is_installed("python3") {
            return;
        }
        let net = Net::new();
        let nothing = ["0 True"; 2];
        let each = ["1 True"; 2];
        // As it is without us: an address that comes is one notice.
        for (n, (options, online, wanted)) in [
            (&["--rung", "env"][..], true, each),
            (&[], true, nothing),
            (&["--strict"], true, nothing),
            // It is to hear that there is a network now.
            (&[], false, each),
        ]
        .into_iter()
        .enumerate()
        {
            if !online {
                wifi_off();
            }
            let mut child = net
                .command(options, &["python3", "-c", LISTENS_TO_LINKS])
                .stdin(Stdio::piped())
                .spawn()
                .expect("cedos");
            let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
            let mut input = child.stdin.take().expect("its input");
            assert_eq!(line_of(&mut lines).await.as_deref(), Some("ready"));
            sh(&format!("ip addr add 198.51.100.{}/24 dev wlan0", 20 + n));
            input.write_all(b"\n").await.expect("it reads");
            for wanted in wanted {
                let said = line_of(&mut lines).await;
                assert_eq!(said.as_deref(), Some(wanted), "{options:?} {online}");
            }
            let ended = tokio::time::timeout(PATIENCE, child.wait()).await;
            assert!(ended.expect("in time").expect("a status").success());
        }
    });
}

/// The next line a program says, in time.
async fn line_of(lines: &mut Lines<BufReader<ChildStdout>>) -> Option<String> {
    let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
    line.expect("a line in time").expect("text")
}

#[test]
fn exit_codes_signals_and_what_was_in_ld_preload_pass_through() {
    in_namespace(this_test!(), async || {
        let net = Net::new();
        for options in [&[][..], &["--strict"], &["--rung", "notify"]] {
            let output = net.run(options, &["sh", "-c", "echo out; exit 7"]).await;
            assert_eq!(output.status.code(), Some(7), "{output:?}");
            assert_eq!(output.stdout, b"out\n");
            let output = net.run(options, &["sh", "-c", "kill -TERM $$"]).await;
            assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{output:?}");
        }
        let mut command = net.command(&[], &["sh", "-c", "echo $LD_PRELOAD"]);
        let output = command
            .env("LD_PRELOAD", "libc.so.6")
            .output()
            .await
            .expect("cedos");
        let list = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            list.starts_with("libc.so.6:") && list.contains("cedos-preload"),
            "{list}"
        );
        // A signal for cedos is one for the program.
        let trap = "trap 'echo heard; exit 5' TERM; echo ready; while :; do sleep 0.1; done";
        let mut child = net
            .command(&[], &["sh", "-c", trap])
            .spawn()
            .expect("cedos");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        assert_eq!(line_of(&mut lines).await.as_deref(), Some("ready"));
        let id = nix::unistd::Pid::from_raw(child.id().expect("it runs") as i32);
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).expect("kill");
        assert_eq!(line_of(&mut lines).await.as_deref(), Some("heard"));
        let ended = tokio::time::timeout(PATIENCE, child.wait()).await;
        let ended = ended.expect("it ends in time").expect("a status");
        assert_eq!(ended.code(), Some(5));
        // What cannot be run is said, and by whom.
        let output = net.run(&[], &["no-such-program"]).await;
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(2) && errors.contains("PATH"),
            "{errors}"
        );
    });
}

#[test]
fn nginx_as_it_is_becomes_a_d2tp_server() {
    in_namespace(this_test!(), async || {
        let nginx = ["/usr/sbin/nginx", "/usr/bin/nginx"];
        let Some(nginx) = nginx.into_iter().find(|path| Path::new(path).is_file()) else {
            return eprintln!("skipped: nginx is not installed");
        };
        sh("ip link set lo up");
        let folder = tempfile::tempdir().expect("a directory");
        let at = folder.path();
        sh(&format!("chmod 755 {}", at.display()));
        let bytes = object(BYTES, 6);
        std::fs::write(at.join("file"), &bytes).expect("write");
        let shown = at.display();
        let user = if nix::unistd::geteuid().is_root() {
            "user root;"
        } else {
            ""
        };
        let configuration = format!(
            "{user} daemon off; pid {shown}/pid; error_log {shown}/errors; worker_processes 2;
             events {{}}
             http {{ access_log off; client_body_temp_path {shown}/b; proxy_temp_path {shown}/p;
                     fastcgi_temp_path {shown}/f; uwsgi_temp_path {shown}/u; scgi_temp_path {shown}/s;
                     server {{ listen 127.0.0.1:8080; root {shown}; }} }}"
        );
        std::fs::write(at.join("nginx.conf"), configuration).expect("write");
        let file = at.join("nginx.conf");
        let file = file.to_str().expect("text");
        for (n, options) in [&[][..], &["--rung", "notify"], &["--strict"]]
            .iter()
            .enumerate()
        {
            let serve = [
                "run",
                "--listen",
                "--allow-any-client",
                "--at",
                "127.0.0.1:0",
            ];
            let words = [&serve[..], options, &["--", nginx, "-c", file]].concat();
            let mut server = program::cedos(at, &words).spawn().expect("cedos");
            let mut lines = BufReader::new(server.stderr.take().expect("its errors")).lines();
            let address = loop {
                let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
                let line = line.expect("in time").expect("text").expect("it goes on");
                if let Some((_, address)) = line.split_once("127.0.0.1:8080 is ") {
                    break address.to_owned();
                }
            };
            let out = format!("out{n}");
            let url = format!("{address}/file");
            let got = program::run(at, &["get", "--json", "-o", &out, &url]).await;
            assert_eq!(got.code, 0, "{options:?}: {}", got.errors);
            assert!(
                std::fs::read(at.join(&out)).expect("it") == bytes,
                "{options:?}: other bytes"
            );
            // By a program that knows as little of us as nginx does.
            if is_installed("curl") {
                let words = ["run", "--to", &address, "--", "curl", "-sS"];
                let words = [&words[..], &["http://nginx.test/file"]].concat();
                let got = program::cedos(at, &words).output();
                let got = tokio::time::timeout(PATIENCE, got).await;
                let got = got.expect("in time").expect("cedos");
                let errors = String::from_utf8_lossy(&got.stderr);
                assert!(got.stdout == bytes, "{options:?}: {errors}");
            }
            let id = nix::unistd::Pid::from_raw(server.id().expect("it runs") as i32);
            nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).expect("kill");
            let ended = tokio::time::timeout(PATIENCE, server.wait()).await;
            assert!(
                ended.expect("in time").expect("a status").success(),
                "{options:?}"
            );
        }
    });
}
