//! The programs of the evening on the device, and what each of them found.
//!
//! All but the client of IMAP are those of the distribution: they know nothing of a VPN.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use cedos_lab_emu::plan::ORIGIN_V4;
use cedos_lab_rig::browser::{BrowserKind, WebBrowser};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::datagrams::PacketTimes;
use super::lab_vpn::ScenarioClock;
use super::servers::{EveningServers, FILE_BYTES, IMAGES, PACKAGE, PASSWORD};

/// The rate of the long download, such that it lasts for most of the evening.
const FILE_KBYTES_PER_S: usize = 220;
/// The rate of each of apt's downloads.
pub const APT_KBYTES_PER_S: usize = 400;

/// How often a line is typed in the shell.
const TYPE_EVERY: Duration = Duration::from_millis(300);
/// How long a person looks at a web page.
const READ_FOR: Duration = Duration::from_millis(700);
/// How often a page that loads is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(30);
/// When a person reloads a page that does not come.
const RELOAD_AFTER: Duration = Duration::from_secs(20);
/// How often a name is looked up.
const LOOK_UP_EVERY: Duration = Duration::from_millis(500);
/// How often the time is asked for.
const ASK_TIME_EVERY: Duration = Duration::from_secs(5);
/// How often packages are looked for.
const UPDATE_EVERY: Duration = Duration::from_secs(1);

/// The longest wait for an answer over TCP: more than the minute without a network.
const ANSWER_WITHIN: Duration = Duration::from_secs(100);

/// Sleeps between two actions of a program.
fn pause(span: Duration) {
    // sleep: how often a program acts is the subject
    std::thread::sleep(span);
}

fn output_of(command: &mut Command) -> (bool, String) {
    let output = command.stdin(Stdio::null()).output().expect("installed");
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

/// The lines that a process writes, as they come.
fn lines_of(from: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    told
}

fn seconds(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// A shell on the server: each line that is typed comes back, in order.
pub fn shell(clock: &ScenarioClock, folder: &Path) -> Value {
    let mut child = Command::new("ssh")
        .args([
            "-F",
            "none",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=no",
        ])
        .args([
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
            "-i",
        ])
        .arg(folder.join("user_key"))
        .args([
            "root@shell.evening.test",
            "while read -r line; do echo \"read $line\"; done",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("installed");
    let mut typed = child.stdin.take().expect("its input");
    let shown = lines_of(child.stdout.take().expect("its output"));
    let (mut lines, mut slowest, mut at_s) = (0_u64, 0.0, 0.0);
    let mut fault = None;
    while !clock.is_over() && fault.is_none() {
        let began = clock.now_s();
        let line = format!("line {lines}");
        let expected = format!("read {line}");
        fault = match writeln!(typed, "{line}") {
            Err(error) => Some(error.to_string()),
            Ok(()) => match shown.recv_timeout(ANSWER_WITHIN) {
                Ok(answer) if answer == expected => None,
                answer => Some(format!("{answer:?} instead of {expected:?}")),
            },
        };
        let took = clock.now_s() - began;
        if took > slowest {
            (slowest, at_s) = (took, began);
        }
        lines += 1;
        pause(TYPE_EVERY);
    }
    drop(typed);
    let ended = child.wait().expect("it ends");
    if !ended.success() && fault.is_none() {
        fault = Some(ended.to_string());
    }
    json!({
        "whole": fault.is_none(), "fault": fault, "lines": lines,
        "slowest_line_s": seconds(slowest), "slowest_line_at_s": seconds(at_s),
    })
}

/// A download that lasts for the evening.
pub fn long_download(clock: &ScenarioClock, folder: &Path) -> Value {
    let file = folder.join("downloaded");
    let began = clock.now_s();
    let mut child = Command::new("wget")
        .args(["--quiet", "--tries=1", "--no-proxy"])
        .arg(format!("--limit-rate={FILE_KBYTES_PER_S}k"))
        .arg("--output-document")
        .arg(&file)
        .arg("http://files.evening.test/large")
        .stdin(Stdio::null())
        .spawn()
        .expect("installed");
    let size = || std::fs::metadata(&file).map_or(0, |metadata| metadata.len());
    let (mut known, mut since, mut longest, mut at_s) = (0, clock.now_s(), 0.0, 0.0);
    let ended = loop {
        let ended = child.try_wait().expect("a status");
        let now = clock.now_s();
        if now - since > longest {
            (longest, at_s) = (now - since, since);
        }
        if size() > known {
            (known, since) = (size(), now);
        }
        if let Some(ended) = ended {
            break ended;
        }
        // It ends by itself, soon after the evening at the latest.
        assert!(
            !clock.is_long_over(),
            "wget goes on with {known} bytes of {FILE_BYTES}"
        );
        pause(Duration::from_millis(20));
    };
    let digest = |bytes: &[u8]| Sha256::digest(bytes);
    let bytes = std::fs::read(&file).unwrap_or_default();
    let whole = ended.success() && digest(&bytes) == digest(&EveningServers::file_bytes());
    json!({
        "whole": whole, "bytes": bytes.len(), "took_s": seconds(clock.now_s() - began),
        "longest_pause_s": seconds(longest), "longest_pause_at_s": seconds(at_s),
    })
}

/// Looks for packages and downloads one, again and again.
pub fn packages(clock: &ScenarioClock, folder: &Path) -> Value {
    let place = folder.join("apt");
    let package = folder.join("files").join(format!("{PACKAGE}_1_all.deb"));
    let package = std::fs::read(package).expect("made");
    let (mut runs, mut whole, mut faults, mut slowest) = (0, 0, Vec::new(), 0.0);
    while !clock.is_over() {
        let began = clock.now_s();
        let _ = std::fs::remove_dir_all(&place);
        for folder in [
            "lists/partial",
            "cache/archives/partial",
            "state",
            "parts",
            "got",
        ] {
            std::fs::create_dir_all(place.join(folder)).expect("made");
        }
        std::fs::write(place.join("state/status"), "").expect("written");
        let source = "deb [trusted=yes] http://files.evening.test/ ./\n";
        std::fs::write(place.join("sources.list"), source).expect("written");
        let at = place.display();
        let options = [
            format!("Dir::Etc::sourcelist={at}/sources.list"),
            format!("Dir::Etc::sourceparts={at}/parts"),
            format!("Dir::Etc::trustedparts={at}/parts"),
            format!("Dir::State={at}/state"),
            format!("Dir::State::status={at}/state/status"),
            format!("Dir::State::lists={at}/lists"),
            format!("Dir::Cache={at}/cache"),
            format!("Acquire::http::Dl-Limit={APT_KBYTES_PER_S}"),
            "APT::Sandbox::User=root".to_owned(),
            "Acquire::Languages=none".to_owned(),
        ];
        let apt = |verb: &[&str]| {
            let mut command = Command::new("apt-get");
            command.current_dir(place.join("got")).arg("-qq");
            for option in &options {
                command.args(["-o", option]);
            }
            output_of(command.args(verb))
        };
        let mut ended = apt(&["update"]);
        if ended.0 {
            ended = apt(&["download", PACKAGE]);
        }
        let got = std::fs::read(place.join("got").join(format!("{PACKAGE}_1_all.deb")));
        let is_whole = ended.0 && got.is_ok_and(|got| got == package);
        runs += 1;
        whole += i32::from(is_whole);
        let took = clock.now_s() - began;
        slowest = f64::max(slowest, took);
        if !is_whole {
            faults.push(json!({"at_s": seconds(began), "took_s": seconds(took), "said": ended.1}));
        }
        pause(UPDATE_EVERY);
    }
    json!({
        "whole": whole == runs, "runs": runs, "slowest_run_s": seconds(slowest), "faults": faults,
    })
}

/// A stand-in for a mail program: it waits for mail by IDLE (RFC 2177), and says nothing meanwhile.
pub fn mailbox(clock: &ScenarioClock) -> Value {
    let mut stream = TcpStream::connect((ORIGIN_V4, 143)).expect("connected");
    let lines = lines_of(stream.try_clone().expect("a descriptor"));
    let mut said = Vec::new();
    let mut until = |what: &str, within: Duration| {
        let began = Instant::now();
        loop {
            match lines.recv_timeout(within.saturating_sub(began.elapsed())) {
                Ok(line) if line.contains(what) => return Ok(clock.now_s()),
                Ok(line) => said.push(line),
                Err(_) => return Err(format!("no {what:?} behind {said:?}")),
            }
        }
    };
    let mut talk = || {
        until("* OK", ANSWER_WITHIN)?;
        let mut tell = |line: &str| write!(stream, "{line}\r\n").map_err(|error| error.to_string());
        tell(&format!("a LOGIN me {PASSWORD}"))?;
        until("a OK", ANSWER_WITHIN)?;
        tell("b SELECT INBOX")?;
        until("b OK", ANSWER_WITHIN)?;
        tell("c IDLE")?;
        let idle_s = until("+ ", ANSWER_WITHIN)?;
        let mail_s = until("1 EXISTS", ANSWER_WITHIN + ANSWER_WITHIN)?;
        tell("DONE")?;
        until("c OK", ANSWER_WITHIN)?;
        tell("d LOGOUT")?;
        until("d OK", ANSWER_WITHIN)?;
        Ok::<_, String>((idle_s, mail_s))
    };
    match talk() {
        Ok((idle_s, mail_s)) => json!({
            "whole": true, "idle_since_s": seconds(idle_s), "mail_at_s": seconds(mail_s),
        }),
        Err(fault) => json!({ "whole": false, "fault": fault }),
    }
}

/// Looks a name up, again and again, each time another one.
pub fn names(clock: &ScenarioClock) -> (Value, Vec<(f64, f64)>) {
    let (mut asked, mut answered, mut slowest) = (0, Vec::new(), 0.0);
    let mut failed_at = Vec::new();
    while !clock.is_over() {
        let began = clock.now_s();
        let name = format!("n{asked}.evening.test");
        let (_, said) =
            output_of(Command::new("dig").args(["+short", "+tries=1", "+time=1", &name]));
        asked += 1;
        let now = clock.now_s();
        if said.trim() == ORIGIN_V4.to_string() {
            answered.push((began, now));
            slowest = f64::max(slowest, now - began);
        } else {
            failed_at.push(seconds(began));
        }
        pause(LOOK_UP_EVERY);
    }
    let report = json!({
        "asked": asked, "answered": answered.len(), "slowest_answer_s": seconds(slowest), "unanswered_at_s": failed_at,
    });
    (report, answered)
}

/// Asks for the time, again and again.
pub fn time(clock: &ScenarioClock) -> (Value, Vec<(f64, f64)>) {
    let (mut asked, mut answered, mut failed_at) = (0, Vec::new(), Vec::new());
    while !clock.is_over() {
        let began = clock.now_s();
        let server = format!("server {ORIGIN_V4} iburst maxsamples 1");
        let mut command = Command::new("chronyd");
        command.args(["-Q", "-u", "root", "-t", "3", &server, "cmdport 0"]);
        let (succeeded, said) = output_of(&mut command);
        asked += 1;
        if succeeded && said.contains("System clock wrong by") {
            answered.push((began, clock.now_s()));
        } else {
            failed_at.push(seconds(began));
        }
        pause(ASK_TIME_EVERY);
    }
    let report = json!({
        "asked": asked, "answered": answered.len(), "unanswered_at_s": failed_at,
    });
    (report, answered)
}

/// Five echo requests a second.
pub fn ping(clock: &ScenarioClock) -> (Value, PacketTimes) {
    let mut child = Command::new("ping")
        .args(["-n", "-D", "-i", "0.2", &ORIGIN_V4.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("installed");
    let lines = lines_of(child.stdout.take().expect("its output"));
    clock.wait_until_over();
    let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGINT);
    let _ = child.wait();
    let unix_s = SystemTime::now().duration_since(UNIX_EPOCH);
    // The wall clock at the beginning of the evening.
    let began_s = unix_s.expect("after 1970").as_secs_f64() - clock.now_s();
    let mut times = PacketTimes::default();
    let mut summary = String::new();
    for line in lines {
        if line.contains("packets transmitted") {
            summary.clone_from(&line);
        }
        // [1796083200.123456] 64 bytes from 203.0.113.20: icmp_seq=7 ttl=62 time=21.3 ms
        let at = line
            .strip_prefix('[')
            .and_then(|rest| rest.split(']').next());
        let number = line
            .split("icmp_seq=")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let (Some(Ok(at)), Some(Ok(number)), true) = (
            at.map(str::parse::<f64>),
            number.map(str::parse::<usize>),
            line.contains("bytes from"),
        ) else {
            continue;
        };
        times.arrived.push((at - began_s, number));
    }
    (json!({ "summary": summary }), times)
}

/// What a page is: loaded with all images, an error, or not yet there.
const PAGE_STATE: &str = "JSON.stringify({
    failed: location.href.startsWith('chrome-error'),
    error: document.querySelector('.error-code')?.textContent ?? '',
    complete: document.readyState === 'complete',
    query: location.search,
    images: [...document.images].filter(image => image.complete && image.naturalWidth > 0).length,
    protocols: [performance.getEntriesByType('navigation'), performance.getEntriesByType('resource')]
        .flat().map(entry => entry.nextHopProtocol),
})";

/// Loads the page with this query, and all of its images. Returns the protocols by which they came.
async fn load(browser: &mut WebBrowser, query: &str) -> Result<Vec<Value>, String> {
    let url = format!("https://web.evening.test/page.html{query}");
    browser.visit(&url).await?;
    loop {
        if let Some(found) = browser.find(PAGE_STATE).await {
            let text = found.as_str().unwrap_or("null");
            let mut state: Value = serde_json::from_str(text).unwrap_or_default();
            if state["failed"] == true {
                return Err(state["error"].as_str().unwrap_or_default().to_owned());
            }
            if state["query"] == query && state["complete"] == true {
                return match (state["images"] == IMAGES, state["protocols"].take()) {
                    (true, Value::Array(protocols)) => Ok(protocols),
                    _ => Err(format!("{} of {IMAGES} images", state["images"])),
                };
            }
        }
        // sleep: a page sends no event when it is whole
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// A browser loads pages in turn, and reloads those that did not come whole.
pub fn browser(clock: &ScenarioClock, home: PathBuf, key_hash: &str) -> Value {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let arguments = [
            format!("--ignore-certificate-errors-spki-list={key_hash}"),
            // A certificate of no public authority is taken over HTTP/3 from such origins only.
            "--origin-to-force-quic-on=web.evening.test:443".to_owned(),
            "--disable-background-networking".to_owned(),
            "--disable-component-update".to_owned(),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let started = WebBrowser::start_with(BrowserKind::Chromium, &home, &[], &arguments).await;
        let mut browser = started.expect("it is installed");
        let (mut pages, mut at_once, mut reloads) = (0_u64, 0_u64, Vec::new());
        let (mut http3, mut other_protocols, mut slowest, mut slowest_at) =
            (0_u64, 0_u64, 0.0, 0.0);
        'evening: while !clock.is_over() {
            let began = clock.now_s();
            let mut tries = 0;
            loop {
                let query = format!("?page={pages}&try={tries}");
                let asked_s = clock.now_s();
                let loading = tokio::time::timeout(RELOAD_AFTER, load(&mut browser, &query));
                let why = match loading.await {
                    Ok(Ok(protocols)) => {
                        for protocol in protocols {
                            match protocol == "h3" {
                                true => http3 += 1,
                                false => other_protocols += 1,
                            }
                        }
                        break;
                    }
                    Ok(Err(why)) => why,
                    Err(_) => "not there after 20 s".to_owned(),
                };
                reloads.push(json!({
                    "at_s": seconds(asked_s), "why": why,
                }));
                tries += 1;
                if clock.is_over() {
                    break 'evening;
                }
                // sleep: a person presses the button
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
            pages += 1;
            at_once += u64::from(tries == 0);
            let took = clock.now_s() - began;
            if took > slowest {
                (slowest, slowest_at) = (took, began);
            }
            // sleep: a person reads
            tokio::time::sleep(READ_FOR).await;
        }
        browser.close().await;
        json!({
            "pages": pages, "without_reload": at_once, "reloads": reloads,
            "answers_by_http3": http3, "answers_otherwise": other_protocols,
            "slowest_page_s": seconds(slowest), "slowest_page_at_s": seconds(slowest_at),
        })
    })
}
