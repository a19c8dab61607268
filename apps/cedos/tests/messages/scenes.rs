//! The first hour: each verb once as it succeeds, and then what goes wrong.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cedos_lab_rig::namespace::{cell_on, origin_namespace, sh, wifi_off, wifi_on};
use cedos_lab_rig::origin::{OriginReply, ReplyEnd, ScriptedOrigin, cut, object, proper, reply};
use cedos_lab_rig::program::ProxyProcess;
use cedos_lab_rig::wait::until;
use nix::sys::signal::Signal;
use tokio::net::TcpListener;

use super::recorder::Recorder;

const INTRODUCTION: &str = "\
# Messages

What Cedos says in the first hour, for the review of its wording. A test records this page from real runs
(`CEDOS_WRITE_MESSAGES=1 cargo test -p cedos --test messages`) and fails when the programs say something else. Times,
durations, rates and chances are replaced by examples. Lines are shown as in a pipe; on a terminal a bar shows the
progress.
";

/// The size of the file that the server sends.
const SIZE: usize = 1_000_000;

/// Records the whole page. Must run in a network namespace of its own, where nothing is up.
pub async fn record() -> String {
    let mut page = Recorder::new(INTRODUCTION);
    without_networks(&mut page).await;
    sh("ip link set lo up");
    let is_open = Arc::new(AtomicBool::new(false));
    let origin = origin(is_open.clone()).await;
    help(&mut page).await;
    demonstration(&mut page).await;
    page.call(&origin.url(""), "http://files.example");
    page.call("127.0.0.1:8080", "files.example");
    page.call("127.0.0.1 answers", "files.example answers");
    page.call("127.0.0.1 requires", "files.example requires");
    downloads(&mut page).await;
    several_urls(&mut page).await;
    mistakes(&mut page).await;
    metered(&mut page).await;
    keys(&mut page).await;
    settings(&mut page).await;
    queue(&mut page, &is_open).await;
    podcasts(&mut page).await;
    players(&mut page).await;
    serving(&mut page).await;
    pairing(&mut page).await;
    through_a_proxy(&mut page).await;
    drop(origin);
    mobile_data(&mut page).await;
    page.page()
}

const FILM: &str = "http://127.0.0.1:8080/film.mp4";
const SLOW: &str = "http://127.0.0.1:8080/slow.iso";

/// A server with a film, a file of which it sends half until `is_open`, and pages that refuse.
async fn origin(is_open: Arc<AtomicBool>) -> ScriptedOrigin {
    let listener = TcpListener::bind("127.0.0.1:8080").await;
    ScriptedOrigin::serve_at(listener.expect("a free port"), None, move |asked| {
        let whole = proper(asked, &object(SIZE, 1), "\"v1\"");
        match asked.path.as_str() {
            "/film.mp4" | "/song.mp3" => OriginReply(whole, ReplyEnd::Close),
            "/slow.iso" if is_open.load(Ordering::Relaxed) => OriginReply(whole, ReplyEnd::Close),
            "/slow.iso" => match asked.range_from() {
                None => OriginReply(cut(whole, SIZE / 2), ReplyEnd::Silence),
                Some(_) => OriginReply(Vec::new(), ReplyEnd::Silence),
            },
            "/private" => OriginReply(reply("401 Unauthorized", &[], b""), ReplyEnd::Close),
            "/feed.xml" => {
                let host = asked.header("host").unwrap_or_default();
                OriginReply(feed(host), ReplyEnd::Close)
            }
            "/full" => {
                let page = b"<html><title>No space for this file</title></html>";
                let length = page.len().to_string();
                let fields = [("Content-Length", length.as_str())];
                OriginReply(
                    reply("507 Insufficient Storage", &fields, page),
                    ReplyEnd::Close,
                )
            }
            "/in/file.zip" => OriginReply(
                reply("201 Created", &[("Content-Length", "0")], b""),
                ReplyEnd::Close,
            ),
            _ => OriginReply(reply("404 Not Found", &[], b""), ReplyEnd::Close),
        }
    })
}

async fn help(page: &mut Recorder) {
    page.section("Help");
    page.run("Everything it does", &["--help"]).await;
}

async fn without_networks(page: &mut Recorder) {
    page.section("Without a network");
    let url = "http://192.0.2.1/film.mp4";
    page.run("`--now` does not wait", &["get", url, "--now"])
        .await;
    page.interrupt(
        "A download waits, and is stopped by Ctrl-C",
        &["get", url],
        "Waiting",
    )
    .await;
    page.run("Planning it", &["get", url, "--dry-run"]).await;
}

async fn downloads(page: &mut Recorder) {
    page.section("Downloads");
    page.run("A download", &["get", FILM]).await;
    page.run("The file exists", &["get", FILM]).await;
    page.run(
        "What would be done",
        &["get", FILM, "-o", "other.mp4", "--dry-run"],
    )
    .await;
    page.run(
        "The same, where the file exists",
        &["get", FILM, "--dry-run"],
    )
    .await;
    let mut half = page.start(&["get", SLOW, "-o", "half.iso"]);
    half.until("Using").await;
    let part = page.home().join("half.iso.part");
    until("half of it is there", || {
        part.metadata()
            .is_ok_and(|part| part.len() == SIZE as u64 / 2)
    })
    .await;
    page.end("Ctrl-C in the middle", half, Some(Signal::SIGINT))
        .await;
    page.run(
        "A stopped download is discarded",
        &["get", SLOW, "-o", "half.iso", "--forget"],
    )
    .await;
    page.run(
        "There is nothing to discard",
        &["get", SLOW, "-o", "half.iso", "--forget"],
    )
    .await;
    let digest = format!("sha256:{}", "0".repeat(64));
    page.run(
        "The content is not what was expected",
        &["get", FILM, "-o", "checked.mp4", "--integrity", &digest],
    )
    .await;
    page.run(
        "The server has no such file",
        &["get", "http://127.0.0.1:8080/none", "-o", "new.mp4"],
    )
    .await;
    page.run(
        "The server requires a password",
        &["get", "http://127.0.0.1:8080/private"],
    )
    .await;
    page.run(
        "No server runs there",
        &[
            "get",
            "http://127.0.0.1:1/film.mp4",
            "-o",
            "new.mp4",
            "--tries",
            "1",
        ],
    )
    .await;
}

async fn several_urls(page: &mut Recorder) {
    page.section("Several URLs");
    let (one, none) = (
        "http://127.0.0.1:8080/song.mp3",
        "http://127.0.0.1:8080/none",
    );
    let list = format!("# for the train\n{one}\n{FILM}\n");
    std::fs::write(page.home().join("list.txt"), list).expect("written");
    // Of each list one is downloaded, so that the lines have one order.
    page.run(
        "A list, of which one exists already",
        &["get", "-i", "list.txt", "--skip-existing"],
    )
    .await;
    page.run(
        "One that the server does not have, and one that exists",
        &["get", none, FILM],
    )
    .await;
    page.run("One name for all", &["get", one, FILM, "-o", "one.mp3"])
        .await;
    let _ = std::fs::write(page.home().join("bad.txt"), "files.example/song.mp3\n");
    page.run("A line that is no URL", &["get", "-i", "bad.txt"])
        .await;
    page.run("An option of curl", &["get", "-k", one]).await;
    page.run("An option of wget", &["get", "-nc", one]).await;
}

async fn settings(page: &mut Recorder) {
    page.section("Settings");
    page.run("There are none yet", &["config"]).await;
    page.run("One is set", &["config", "set", "transfer.within", "2h"])
        .await;
    page.run("It is shown", &["config", "show", "transfer.within"])
        .await;
    page.run(
        "A name that is none",
        &["config", "set", "transfer.withn", "2h"],
    )
    .await;
    page.run(
        "A value that is none",
        &["config", "set", "transfer.policy", "cheap"],
    )
    .await;
    page.run("The file makes sense", &["config", "check"]).await;
    page.run("It is taken back", &["config", "unset", "transfer.within"])
        .await;
}

/// Whether a line of `cedos doctor`, which may go on in others, is about what was set up.
fn is_of_setup(line: &str) -> bool {
    let about = ["settings:", "key:", "proxy:", "agent:"];
    about.iter().any(|about| line.contains(about))
}

async fn pairing(page: &mut Recorder) {
    page.section("Between two devices");
    // The page is recorded on one device, which has a second key for the other one's part, and both have the same
    // proxy set up.
    let start = ["prox", "--key", "prox.key", "--listen", "127.0.0.1:4436"];
    let mut proxy = page.start(&[&start[..], &["--allow-any-client", "--allow-private"]].concat());
    let address = proxy.until_begins("d2tp://").await.trim().to_owned();
    page.call(&format!(" --prox {address}"), "");
    let _ = page.quietly(&["key", "gen", "-o", "there.key"]).await;
    page.call(" --key there.key", "");
    let through = ["--prox", address.as_str()];
    let there = ["-o", "there", "--key", "there.key"];
    std::fs::write(page.home().join("report.pdf"), object(50_000, 4)).expect("written");
    std::fs::create_dir(page.home().join("there")).expect("made");
    let mut sender = page.start(&[&["send", "report.pdf"][..], &through].concat());
    let line = sender.until_begins("cedos receive ").await;
    let code = line.rsplit(' ').next().expect("a code").to_owned();
    page.call(&code, "4271-tulip-hazel-canoe");
    let receive = [&["receive", code.as_str()][..], &there, &through].concat();
    let received = page.start(&receive);
    page.end("On the other device, with the code", received, None)
        .await;
    page.end("On the device that sends", sender, None).await;
    page.run("The code was used", &receive).await;
    page.run("A code that is none", &["receive", "4271-tulip"])
        .await;
    page.run("A directory", &["send", "there"]).await;
    page.drop_running(proxy).await;
}

async fn mistakes(page: &mut Recorder) {
    page.section("Mistakes on the command line");
    for (about, more) in [
        (
            "A deadline that has passed",
            &["--by", "2020-01-31 07:30"][..],
        ),
        ("A time that is none", &["--by", "25:99"]),
        (
            "A network device that does not exist",
            &["--link", "wlan9=metered"],
        ),
        (
            "A cost for what stays on this machine",
            &["--link", "lo=metered"],
        ),
        ("An unknown policy", &["--policy", "cheap"]),
        ("A size that is none", &["--max-cell", "much"]),
        (
            "A proxy without its key",
            &["--prox", "d2tp://example.org:4433"],
        ),
    ] {
        page.run(about, &[&["get", FILM, "-o", "new.mp4"], more].concat())
            .await;
    }
    page.run(
        "A directory that does not exist",
        &["get", FILM, "-o", "films/"],
    )
    .await;
    page.run("No scheme", &["get", "files.example/film.mp4"])
        .await;
    page.run("An unknown verb", &["fetch"]).await;
}

async fn metered(page: &mut Recorder) {
    page.section("A metered network");
    sh("ip link add wwan0 type veth peer name tower0
        ip link set tower0 up
        ip link set wwan0 up
        ip addr add 203.0.113.7/24 dev wwan0
        ip route add default via 203.0.113.1 dev wwan0");
    let url = "http://192.0.2.1/new.mp4";
    let cell = ["--link", "wwan0=metered"];
    page.interrupt(
        "A download waits for a free network",
        &[&["get", url][..], &cell].concat(),
        "Waiting",
    )
    .await;
    page.interrupt(
        "The deadline passes meanwhile",
        &[
            &["get", url, "--policy", "free-only", "--within", "2s"][..],
            &cell,
        ]
        .concat(),
        "the deadline passed",
    )
    .await;
    page.run(
        "It may not use this network, and does not wait",
        &[&["get", url, "--now", "--policy", "free-only"][..], &cell].concat(),
    )
    .await;
    page.run(
        "Planning it",
        &[&["get", url, "--dry-run"][..], &cell].concat(),
    )
    .await;
    page.run("The networks", &["net"]).await;
    sh("ip link del wwan0");
}

async fn keys(page: &mut Recorder) {
    page.section("Keys");
    let _ = page.quietly(&["key", "gen", "-o", "prox.key"]).await;
    let shown = page.quietly(&["key", "show", "prox.key"]).await;
    let prox_key = shown.lines().last().unwrap_or_default().trim().to_owned();
    page.call(&prox_key, "PROXY-KEY");
    let shown = page.quietly(&["key", "show"]).await;
    let device_key = shown.lines().last().unwrap_or_default().trim().to_owned();
    page.call(&device_key, "DEVICE-KEY");
    page.run("The key of this device", &["key", "show"]).await;
    page.run("A key file that exists", &["key", "gen", "-o", "prox.key"])
        .await;
}

async fn serving(page: &mut Recorder) {
    page.section("Serving a directory");
    std::fs::create_dir(page.home().join("music")).expect("made");
    page.run("Nobody may connect", &["serve", "music"]).await;
    let serve = ["serve", "music", "--listen", "127.0.0.1:4434"];
    let mut server = page.start(&[&serve[..], &["--allow-any-client"]].concat());
    server.until("d2tp://").await;
    page.end(
        "Anybody may connect, until it is stopped",
        server,
        Some(Signal::SIGTERM),
    )
    .await;
}

async fn through_a_proxy(page: &mut Recorder) {
    page.section("A proxy");
    std::fs::write(page.home().join("file.zip"), object(50_000, 2)).expect("written");
    let upload = ["put", "file.zip", "http://127.0.0.1:8080/in/file.zip"];
    page.run("An upload without a proxy", &upload).await;
    page.run("A program without a proxy", &["run", "--", "true"])
        .await;
    let start = ["prox", "--key", "prox.key", "--listen", "127.0.0.1:4433"];
    let mut proxy = page.start(&[&start[..], &["--allow-private"]].concat());
    let address = proxy.until_begins("d2tp://").await.trim().to_owned();
    page.call("127.0.0.1:4433", "prox.example:4433");
    let get = ["get", FILM, "-o", "proxied.mp4"];
    page.run(
        "This device may not use the proxy yet",
        &[&get[..], &["--prox", &address]].concat(),
    )
    .await;
    let mut invite = page.start(&["prox", "invite", "--for", "laptop"]);
    let line = invite.until_begins("d2tp://").await;
    let (_, secret) = line.split_once('#').expect("a secret");
    page.call(secret, "SECRET");
    let listed = page.quietly(&["prox", "invite", "--list", "--json"]).await;
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    page.call(listed["id"].as_str().expect("a number"), "4f2a90c1");
    page.end("On the proxy, a device is invited", invite, None)
        .await;
    page.run(
        "The invitations that are open",
        &["prox", "invite", "--list"],
    )
    .await;
    page.run("The device joins", &["join", &line]).await;
    page.run("The line was used", &["join", &line]).await;
    page.run("A line that is none", &["join", "d2tp://prox.example:4433"])
        .await;
    page.run(
        "There is no such invitation",
        &["prox", "invite", "--withdraw", "phone"],
    )
    .await;
    page.run("The clients", &["prox", "client", "list"]).await;
    page.run_keeping(
        "What is set up (lines about this machine are left out)",
        &["doctor"],
        is_of_setup,
    )
    .await;
    page.run("A download", &get).await;
    page.run(
        "Only host and port are shown to the proxy",
        &["get", FILM, "-o", "sealed.mp4", "--sealed"],
    )
    .await;
    page.run(
        "An address that the proxy refuses",
        &["get", "http://169.254.169.254/meta"],
    )
    .await;
    page.run("An upload", &upload).await;
    page.run(
        "The server refuses an upload",
        &["put", "file.zip", "http://127.0.0.1:8080/full"],
    )
    .await;
    page.run("There is no such file", &["put", "none.zip", upload[2]])
        .await;
    page.run("A program", &["run", "--", "echo", "from the program"])
        .await;
    page.run(
        "There is no such program",
        &["run", "--", "no-such-program"],
    )
    .await;
    page.end(
        "The proxy itself, until it is stopped",
        proxy,
        Some(Signal::SIGTERM),
    )
    .await;
    page.run(
        "The proxy does not answer",
        &["get", FILM, "-o", "never.mp4", "--now"],
    )
    .await;
}

async fn queue(page: &mut Recorder, is_open: &AtomicBool) {
    page.section("Transfers in the background");
    let mut agent = page.start(&["agent", "--no-notifications"]);
    agent.until("ready at").await;
    page.run("There are none", &["ls"]).await;
    page.run(
        "A download is left to the agent",
        &["get", SLOW, "-o", "slow.iso", "--detach"],
    )
    .await;
    let has_half = |shown: &serde_json::Value| shown["bytes"] == SIZE / 2;
    page.until_transfer("1", has_half).await;
    page.run("The list", &["ls"]).await;
    page.run("One of them", &["status", "1"]).await;
    page.run("Why it runs", &["why", "1"]).await;
    page.run("It is paused", &["pause", "1"]).await;
    page.run("Why it does not run", &["why", "1"]).await;
    page.run(
        "Its terms are changed",
        &["edit", "1", "--policy", "free-only"],
    )
    .await;
    page.run("No change is named", &["edit", "1"]).await;
    page.run("It is stopped", &["cancel", "1"]).await;
    page.run("What has ended cannot be paused", &["pause", "1"])
        .await;
    is_open.store(true, Ordering::Relaxed);
    page.run("It is resumed", &["retry", "1"]).await;
    // To its end, so that what the second one prints does not depend on when it begins.
    let _ = page.quietly(&["wait", "1"]).await;
    page.run("Waiting for its end", &["wait", "1"]).await;
    page.run("The list", &["ls"]).await;
    page.run(
        "One that fails",
        &["get", "http://127.0.0.1:8080/none", "--detach"],
    )
    .await;
    page.until_transfer("2", |shown| shown["standing"] == "failed")
        .await;
    page.run("Why it failed", &["why", "2"]).await;
    page.run("What is complete is not resumed", &["retry", "1"])
        .await;
    page.run("There is no such transfer", &["why", "9"]).await;
    page.run("Nor to resume", &["retry", "9"]).await;
    page.run("What has ended is forgotten", &["ls", "--clear"])
        .await;
    page.run("The limit on metered data", &["budget"]).await;
    page.run("A limit", &["budget", "set", "2G"]).await;
    page.end(
        "The agent itself, until it is stopped",
        agent,
        Some(Signal::SIGTERM),
    )
    .await;
}

/// A feed of two episodes, of which one is there.
fn feed(host: &str) -> Vec<u8> {
    let item = |title: &str, day: u8, name: &str| {
        format!(
            "<item><title>{title}</title><guid>{name}</guid><pubDate>{day} Jan 2020 05:00:00 GMT</pubDate>\
             <enclosure url=\"http://{host}/{name}\" length=\"{SIZE}\" type=\"audio/mpeg\"/></item>"
        )
    };
    let items = [
        item("A whale in the dock", 31, "song.mp3"),
        item("Fog until noon", 30, "gone.mp3"),
    ];
    let feed = format!(
        "<?xml version=\"1.0\"?><rss version=\"2.0\"><channel><title>Harbour News</title>{}</channel></rss>",
        items.concat()
    );
    let length = feed.len().to_string();
    let fields = [
        ("Content-Type", "application/rss+xml"),
        ("Content-Length", &*length),
    ];
    reply("200 OK", &fields, feed.as_bytes())
}

async fn podcasts(page: &mut Recorder) {
    page.section("Podcasts");
    let agent = page.start(&["agent", "--no-notifications"]);
    page.run("There are none", &["cast", "list"]).await;
    let feed = "http://127.0.0.1:8080/feed.xml";
    page.run("A podcast", &["cast", "add", feed]).await;
    page.until_podcast("1", "ready").await;
    page.until_podcast("2", "failed").await;
    page.run("It is there already", &["cast", "add", feed])
        .await;
    page.run("What is no feed", &["cast", "add", FILM]).await;
    page.run(
        "A feed that is not there",
        &["cast", "add", "http://127.0.0.1:8080/none"],
    )
    .await;
    page.run("The channels", &["cast", "list"]).await;
    page.run("Its episodes", &["cast", "show", "Harbour"]).await;
    page.run("No channel is called that", &["cast", "show", "Mountains"])
        .await;
    page.run(
        "When its episodes are wanted",
        &["cast", "rule", "Harbour", "by hand"],
    )
    .await;
    page.run(
        "A time that is none",
        &["cast", "rule", "Harbour", "sometimes"],
    )
    .await;
    page.run("What is here", &["cast", "queue"]).await;
    page.run("There is no such episode", &["cast", "download", "9"])
        .await;
    page.run("The subscription ends", &["cast", "remove", "Harbour"])
        .await;
    page.drop_running(agent).await;
}

/// The demonstration's networks, with a smaller file and more time, so that each run says the same.
const DEMONSTRATION: &str = r#"
about = "A download that loses Wi-Fi, waits without any network, and goes on from another address."
seed = 1
duration_s = 25

[[link]]
name = "wlan0"
down_mbps = 20
up_mbps = 5
rtt_ms = 20
attach_s = 1
join = "home"

[[link.access_point]]
name = "home"

[[link.access_point]]
name = "cafe"

[[link.at]]
t_s = 4
up = false

[[link.at]]
t_s = 7
join = "cafe"

[[link]]
name = "wwan0"
class = "metered"
down_mbps = 8
up_mbps = 2
rtt_ms = 50

[[link.at]]
t_s = 6
up = false

[[flow]]
bytes = 16_000_000
deadline_s = 60
policy = "free-only"
"#;

async fn demonstration(page: &mut Recorder) {
    page.section("The demonstration");
    std::fs::write(page.home().join("demo.toml"), DEMONSTRATION).expect("written");
    page.call(" --scenario demo.toml", "");
    page.run(
        "A download beside plain TCP, while networks come and go",
        &["demo", "--scenario", "demo.toml"],
    )
    .await;
}

async fn players(page: &mut Recorder) {
    page.section("Players");
    page.interrupt(
        "A link for any player, until Ctrl-C",
        &["url", FILM, "--alone"],
        "nothing requested",
    )
    .await;
    page.run(
        "There is no such player",
        &["play", FILM, "--alone", "--", "no-such-player"],
    )
    .await;
}

/// 8 s at the slow Wi-Fi's rate, and 0.4 s at cellular's.
const MOBILE_SIZE: usize = 1_000_000;

/// The Wi-Fi's rate where it is too slow.
const SLOW_RATE: &str = "1mbit";

/// The far ends of a Wi-Fi and of a cellular link, with a server and a proxy.
struct FarEnds {
    origin: ScriptedOrigin,
    proxy: ProxyProcess,
    /// Their network namespace.
    namespace: String,
}

impl FarEnds {
    fn new(home: &Path) -> FarEnds {
        let home = home.to_owned();
        origin_namespace(|| async move {
            let listener = TcpListener::bind("192.0.2.1:8080").await.expect("a port");
            let origin = ScriptedOrigin::serve_at(listener, None, |asked| {
                let bytes = match asked.path.as_str() {
                    "/film.mp4" => 8 * MOBILE_SIZE,
                    _ => MOBILE_SIZE,
                };
                OriginReply(proper(asked, &object(bytes, 1), "\"v1\""), ReplyEnd::Close)
            });
            let (process, thread) = (std::process::id(), nix::unistd::gettid());
            FarEnds {
                origin,
                proxy: ProxyProcess::start(&home, "192.0.2.1:4433", &[]).await,
                namespace: format!("/proc/{process}/task/{thread}/ns/net"),
            }
        })
    }

    fn sh(&self, command: &str) {
        sh(&format!("nsenter --net={} {command}", self.namespace));
    }

    /// Sets the rate of the Wi-Fi towards the device.
    fn set_wifi_rate(&self, rate: &str) {
        self.sh(&format!(
            "tc qdisc change dev ap0 root tbf rate {rate} burst 20k latency 100ms"
        ));
    }

    /// Makes the Wi-Fi slower, little by little, so that a deadline of 40 s for the film comes into doubt on
    /// the way: free networks alone will then probably do, and not surely, on a fast machine and on a busy one.
    async fn slow_wifi_down(&self) -> Infallible {
        let mut kilobits = 2_000;
        loop {
            self.set_wifi_rate(&format!("{kilobits}kbit"));
            kilobits = (kilobits * 98 / 100).max(100);
            // sleep: the course of the link
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// The Wi-Fi carries nothing from the device any more, without a word.
    fn kill_wifi(&self) {
        self.sh("ip rule add pref 100 lookup local");
        self.sh("ip rule del pref 0");
        self.sh("ip rule add pref 10 iif ap0 blackhole");
    }
}

/// Whether a line is no progress of a moment, and no measurement, which come or not by the speed of this machine.
fn is_no_progress(line: &str) -> bool {
    is_no_moment(line) && !line.starts_with("note: measuring")
}

/// Whether a line is no progress of a moment.
fn is_no_moment(line: &str) -> bool {
    !line.contains(" likely by ") && !line.contains(" of silence): ")
}

/// The words of a command line without quotes.
fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

async fn mobile_data(page: &mut Recorder) {
    page.section("Mobile data");
    let far = FarEnds::new(page.home());
    let prox = far.proxy.address.clone();
    page.call("192.0.2.1:4433", "prox.example:4433");
    page.call(&far.origin.url(""), "http://files.example");
    page.call(&format!(" --prox {prox}"), "");
    let (film, song) = (far.origin.url("/film.mp4"), far.origin.url("/song.mp3"));
    cell_on();
    page.run(
        "Only a metered network is up, and the policy allows it",
        &words(&format!("get {song} -o now.mp3 --policy any --prox {prox}")),
    )
    .await;
    page.run(
        "The limit of one download is used up",
        &words(&format!(
            "get {film} -o some.mp4 --policy any --max-cell 1M --prox {prox}"
        )),
    )
    .await;
    wifi_on("198.51.100.7");
    page.run(
        "Planning a download whose deadline is in doubt",
        &words(&format!(
            "get {film} -o doubtful.mp4 --within 40s --dry-run --prox {prox}"
        )),
    )
    .await;
    let line = format!("get {film} -o doubtful.mp4 --within 40s --prox {prox}");
    let mut doubtful = page.start(&words(&line));
    doubtful.keep(is_no_moment);
    tokio::select! {
        () = doubtful.until("measuring") => (),
        never = far.slow_wifi_down() => match never {},
    }
    let about = "A deadline that is in doubt, until Ctrl-C";
    page.end(about, doubtful, Some(Signal::SIGINT)).await;
    far.set_wifi_rate(SLOW_RATE);
    page.run_keeping(
        "Wi-Fi alone would be late",
        &words(&format!(
            "get {film} -o both.mp4 --within 12s --prox {prox}"
        )),
        is_no_progress,
    )
    .await;
    page.run_keeping(
        "Wi-Fi is too slow, and nothing else is allowed",
        &words(&format!(
            "get {song} -o late.mp3 --within 3s --policy free-only --prox {prox}"
        )),
        is_no_progress,
    )
    .await;
    far.set_wifi_rate("20mbit");
    let line = format!("get {film} -o moved.mp4 --policy any --prox {prox}");
    let mut moving = page.start(&words(&line));
    moving.until("Using").await;
    let part = page.home().join("moved.mp4.part");
    until("some of it is there", || {
        part.metadata().is_ok_and(|part| part.len() > 0)
    })
    .await;
    wifi_off();
    page.end(
        "Wi-Fi is lost, and the policy allows mobile data",
        moving,
        None,
    )
    .await;
    wifi_on("198.51.100.7");
    far.kill_wifi();
    page.run(
        "A program beside a Wi-Fi that carries nothing",
        &words(&format!(
            "run --policy any --prox {prox} -- curl -sS -o ran.mp3 {song}"
        )),
    )
    .await;
    wifi_off();
    let mut agent = page.start(&["agent", "--no-notifications"]);
    agent.until("ready at").await;
    page.run(
        "A limit for all transfers of a month",
        &["budget", "set", "500k"],
    )
    .await;
    page.interrupt(
        "It is used up while a download runs",
        &words(&format!(
            "get {film} -o month.mp4 --policy any --prox {prox}"
        )),
        "used up",
    )
    .await;
    page.run("What the month has used", &["budget"]).await;
    page.run(
        "Another download, which does not wait",
        &words(&format!(
            "get {song} -o next.mp3 --policy any --now --prox {prox}"
        )),
    )
    .await;
    page.drop_running(agent).await;
}
