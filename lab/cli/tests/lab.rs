//! Tests of `cedos lab run` and `cedos sim run` as programs: equal reports from both, uploads,
//! commands on the device, crashes. If the system forbids namespaces each test prints a message and
//! passes.

use cedos_lab_rig::missing_tool::is_installed;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cedos_lab_rig::wait::until_blocking;
use serde_json::Value;

fn cedos(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
        .args(arguments)
        .env_remove("CEDOS_PROX")
        .env("CEDOS_AGENT", "none")
        .env_remove("CEDOS_KEY_FILE")
        .output()
        .expect("cedos")
}

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl File {
    fn name(&self) -> &str {
        self.path.to_str().expect("a path")
    }
}

fn scenario(text: &str) -> File {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("test.toml");
    std::fs::write(&path, text).expect("written");
    File {
        _folder: folder,
        path,
    }
}

/// The output of a lab run; `None` if this machine cannot run the lab.
fn lab(file: &File, more: &[&str]) -> Option<Output> {
    let output = cedos(&[&["lab", "run", file.name()], more].concat());
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let forbidden = [
        "refuses unprivileged user namespaces",
        "lets nobody make network namespaces",
    ];
    if forbidden.iter().any(|words| told.contains(words)) {
        eprintln!("skipped, no lab on this machine: {told}");
        return None;
    }
    Some(output)
}

fn report(output: &Output) -> Value {
    let told = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(told.trim())
        .unwrap_or_else(|_| panic!("one object: {}", String::from_utf8_lossy(&output.stderr)))
}

fn keys(value: &Value) -> BTreeSet<&str> {
    let object = value.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

fn words(text: &str) -> BTreeSet<&str> {
    text.split_whitespace().collect()
}

const BOTH_WAYS: &str = r#"
duration_s = 60
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
[[link.at]]
t_s = 6
up = false
[[link]]
name = "wwan0"
up = false
down_mbps = 8
up_mbps = 8
[[link.at]]
t_s = 6.5
up = true
[[flow]]
bytes = 12_000_000
deadline_s = 55
policy = "any"
[[flow]]
direction = "up"
bytes = 400_000
[[expect]]
text = "count(flows[sha256_ok=true]) == 2"
[[expect]]
text = "1 == 2"
"#;

/// Wi-Fi is lost after a second and returns with another address.
const KERNEL: &str = r#"
duration_s = 30
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
[[link.at]]
t_s = 1
up = false
[[link.at]]
t_s = 2
up = true
[[link]]
name = "wlan1"
down_mbps = 4
up_mbps = 4
[[flow]]
bytes = 5_000_000
[[expect]]
text = "flows[0].sha256_ok"
"#;

#[test]
fn kernel_mptcp_takes_all_links_as_they_come_and_kernel_tcp_one() {
    let file = scenario(KERNEL);
    let Some(output) = lab(&file, &["--json", "--over", "mptcp"]) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    if told.contains("Protocol not supported") {
        eprintln!("skipped, this kernel has no MPTCP: {told}");
        return;
    }
    assert!(output.status.success(), "{told}");
    let report_of = |output: &Output| report(output)["flows"][0].clone();
    let mbps = |flow: &Value| {
        let at = |key: &str| flow[key].as_f64().expect("a time");
        5_000_000.0 * 8e-6 / (at("last_byte_s") - at("first_byte_s"))
    };
    let flow = report_of(&output);
    // Its first second, and from 2 s on with another address.
    assert!(
        flow["bytes_by_link"]["wlan0"].as_u64() > Some(1_500_000),
        "{flow}"
    );
    assert!(
        flow["bytes_by_link"]["wlan1"].as_u64() > Some(500_000),
        "{flow}"
    );
    assert!(flow["last_byte_s"].as_f64() > flow["first_byte_s"].as_f64());

    // An unmodified client of the proxy survives the loss of a network.
    let output = lab(&file, &["--json", "--over", "mptcp-prox"]).expect("a lab");
    assert!(output.status.success(), "{output:?}");
    let through = report_of(&output);
    assert!(
        through["bytes_by_link"]["wlan1"].as_u64() > Some(500_000),
        "{through}"
    );
    assert!(mbps(&through) > 5.0, "{through}");

    let output = lab(&file, &["--json", "--over", "tcp:wlan1"]).expect("a lab");
    assert!(output.status.success());
    let alone = report(&output);
    assert_eq!(alone["flows"][0]["bytes_by_link"]["wlan1"], 5_000_000);
    assert_eq!(alone["links"][0]["bytes_down"], 0);
    assert!(mbps(&alone["flows"][0]) < 4.0, "{alone}");
    assert!(mbps(&flow) > 5.0, "{flow}");

    let unknown = lab(&file, &["--over", "tcp:wlan7"]).expect("a lab");
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("no link wlan7"));
}

#[test]
fn lab_and_simulator_print_the_same_object_with_the_keys_of_the_documentation() {
    let file = scenario(BOTH_WAYS);
    let simulated = cedos(&["sim", "run", file.name(), "--json"]);
    let emulated = lab(&file, &["--json"]);
    for output in [Some(simulated), emulated].into_iter().flatten() {
        assert_eq!(output.status.code(), Some(1), "an expectation fails");
        let report = report(&output);
        assert_eq!(
            keys(&report),
            words("flows links switches origin_requests_twice packets_to_payload expectations")
        );
        let each = |list: &str, wanted: &str| {
            let list = report[list].as_array().expect("a list");
            assert!(!list.is_empty(), "{wanted}: {report}");
            for value in list {
                assert_eq!(keys(value), words(wanted));
            }
        };
        each(
            "flows",
            "id bytes sha256_ok finished_s first_byte_s last_byte_s silence_max_s deadline_s deadline_met bytes_by_link \
             duplicate_bytes",
        );
        each(
            "links",
            "name class bytes_down bytes_up packets_while_down wait_down_ms wait_up_ms \
             wait_down_max_ms",
        );
        each("switches", "at_s from to kind silence_ms");
        each("expectations", "text holds");
        let holds: Vec<_> = report["expectations"].as_array().unwrap().iter().collect();
        assert_eq!(holds[0]["holds"], true, "{report}");
        assert_eq!(holds[1]["holds"], false);
        let flows = report["flows"].as_array().unwrap();
        assert_eq!(flows[0]["deadline_s"], 55.0);
        assert_eq!(flows[0]["deadline_met"], true);
        assert_eq!(
            (&flows[1]["bytes"], &flows[1]["deadline_s"]),
            (&400_000.into(), &Value::Null)
        );
        for link in ["wlan0", "wwan0"] {
            assert!(
                flows[0]["bytes_by_link"][link].as_u64() > Some(0),
                "{link}: {report}"
            );
        }
    }
}

/// Two nodes with a store, which is paused while downloads run. Then the node in use is killed for good.
const NODES: &str = r#"
duration_s = 100
origin = "builtin"
nodes = 2
store = true
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
[[store_outage]]
how = "pause"
t_s = 2
for_s = 1
[[store_outage]]
t_s = 4
for_s = 1
[[crash]]
who = "proxy"
t_s = 7
for_s = 90
[[flow]]
id = "download"
count = 4
bytes = 3_000_000
[[expect]]
text = "count(flows[sha256_ok=true]) == 4"
[[expect]]
text = "origin_requests_twice == 0"
"#;

#[test]
fn downloads_outlive_their_store_and_their_node_and_ask_the_origin_for_nothing_twice() {
    if !is_installed("redis-server") {
        eprintln!("skipped: redis-server is not installed");
        return;
    }
    let Some(output) = lab(&scenario(NODES), &["--json"]) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let report = report(&output);
    assert!(output.status.success(), "{told}");
    assert_eq!(report["flows"].as_array().map(Vec::len), Some(4));
    assert_eq!(report["flows"][3]["id"], "download4");
    for event in [
        "store    is paused",
        "store    is killed",
        "proxy    crashes",
    ] {
        assert!(told.contains(event), "{event}: {told}");
    }
}

const LINK: &str = "duration_s = 60\n[[link]]\nname = \"wlan0\"\ndown_mbps = 20\nup_mbps = 20\n";

#[test]
fn each_origin_serves_both_ways_over_http_and_https() {
    for origin in ["builtin", "nginx"] {
        if origin == "nginx" && !is_installed("nginx") {
            eprintln!("skipped: nginx is not installed");
            continue;
        }
        let file = scenario(&format!(
            "origin = \"{origin}\"\n{LINK}
             [[flow]]\nbytes = 300_000
             [[flow]]\nurl = \"https://origin/bytes/300000\"
             [[flow]]\nurl = \"https://origin/bytes/70001\"
             [[flow]]\ndirection = \"up\"\nbytes = 300_000
             [[expect]]\ntext = \"count(flows[sha256_ok=true]) == 4\"\n"
        ));
        let Some(output) = lab(&file, &["--json"]) else {
            return;
        };
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{origin}: {told}");
        let who = if origin == "nginx" {
            "the origin is nginx/"
        } else {
            "the built-in server"
        };
        assert!(told.contains(who), "{told}");
    }
}

#[test]
fn podcasts_are_fetched_by_an_agent_and_played_from_the_origins_feeds() {
    let file = scenario(
        "duration_s = 90\norigin = \"builtin\"\n\
         [podcasts]\nclock = \"07:28\"\n\
         [[podcasts.feed]]\nid = \"news\"\nrule = \"daily 07:31\"\n\
         episode = [{ t_s = 1, bytes = 300_000, play_s = 15 }, { t_s = 3, bytes = 200_000 }]\n\
         [[link]]\nname = \"wlan0\"\n\
         [[expect]]\ntext = \"podcasts.in_time_share == 1 and podcasts.heard_whole_share == 1\"\n\
         [[expect]]\ntext = \"podcasts.free_share == 1 and podcasts.optimum_free_share > 0.999\"\n\
         [[expect]]\ntext = \"podcasts.study.delayed_share == 1 and podcasts.study.in_time_share == 1\"\n\
         [[expect]]\ntext = \"podcasts.study.wifi_share == 1 and podcasts.study.saved_bytes == 0\"\n",
    );
    let Some(output) = lab(&file, &["--json"]) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let report = report(&output);
    let episodes = report["podcasts"]["episodes"].as_array().expect("a list");
    assert_eq!(episodes.len(), 2, "{report}");
    for episode in episodes {
        // By the device's own clock, which is within its second.
        let deadline_s = episode["deadline_s"].as_f64().expect("a deadline");
        assert!((177.0..=180.5).contains(&deadline_s), "{episode}");
        let carried = episode["bytes_by_class"]["free"].as_u64();
        assert!(carried >= episode["bytes"].as_u64(), "{episode}");
    }
    assert_eq!(episodes[0]["heard_whole"], true, "{report}");
    assert!(episodes[1]["heard_whole"].is_null(), "{report}");
}

#[test]
fn podcasts_are_alone_in_a_scenario() {
    let podcasts = "[podcasts]\n[[podcasts.feed]]\nid = \"news\"\nrule = \"in 2h\"\n";
    let file = scenario(&format!("{LINK}[[flow]]\nbytes = 1\n{podcasts}"));
    let Some(output) = lab(&file, &[]) else {
        return;
    };
    assert!(!output.status.success());
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("podcasts and flows"), "{told}");
}

#[test]
fn an_origin_that_is_not_one_is_an_error() {
    let file = scenario(&format!("origin = \"apache\"\n{LINK}"));
    let output = cedos(&["lab", "run", file.name()]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("nginx"));
}

#[test]
fn a_command_runs_on_the_device_and_is_told_where_everything_is() {
    let file = scenario(LINK);
    let script = r#"
        set -e
        test "$CEDOS_LINK_CLASS" = wlan0=free
        test -s "$CEDOS_KEY_FILE" && test -s "$CEDOS_LAB_CA"
        "$0" get "$CEDOS_LAB_ORIGIN/bytes/50000" -o "$1/direct" --link wlan0=free
        "$0" get "$CEDOS_LAB_ORIGIN_TLS/bytes/50000" -o "$1/tls" --link wlan0=free --ca "$CEDOS_LAB_CA"
        "$0" get "$CEDOS_LAB_ORIGIN_TLS/bytes/50000" -o "$1/proxied" --prox "$CEDOS_LAB_PROX" --link wlan0=free
        cmp "$1/direct" "$1/tls" && cmp "$1/direct" "$1/proxied"
        echo "seen from here: $(wc -c < "$1/direct")"
    "#;
    let folder = tempfile::tempdir().expect("a folder");
    let to = folder.path().to_str().expect("a path");
    let arguments = [
        "--",
        "sh",
        "-c",
        script,
        env!("CARGO_BIN_EXE_cedos-lab"),
        to,
    ];
    let Some(output) = lab(&file, &arguments) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(out.contains("seen from here: 50000"), "{out}");
    let failing = lab(&file, &["--", "false"]).expect("a lab");
    assert_eq!(failing.status.code(), Some(1));
    let absent = lab(&file, &["--", "/no/such/program"]).expect("a lab");
    let told = String::from_utf8_lossy(&absent.stderr);
    assert!(
        told.contains("/no/such/program cannot be started"),
        "{told}"
    );
}

#[test]
fn a_server_of_ones_own_runs_at_the_origin_and_ends_with_the_run() {
    if !is_installed("python3") || !is_installed("curl") {
        return eprintln!("skipped: no python3 or no curl");
    }
    let file = scenario("duration_s = 30\n[[link]]\nname = \"wlan0\"\n");
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("word"), "here\n").expect("written");
    let shown = folder.path().display();
    let server = format!(
        "python3 -m http.server 8099 --directory {shown} 2>/dev/null & echo $! >{shown}/server; wait"
    );
    let fetch = "curl -4 -s --noproxy '*' --retry 50 --retry-delay 1 --retry-connrefused \
                 $CEDOS_LAB_ORIGIN:8099/word";
    let more = ["--direct", "--at-origin", &server, "--", "sh", "-c", fetch];
    let Some(output) = lab(&file, &more) else {
        return;
    };
    assert!(output.status.success(), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "here\n");
    let id = std::fs::read_to_string(folder.path().join("server")).expect("its id");
    let still = Path::new("/proc").join(id.trim());
    // The end may be detected a moment later.
    until_blocking("the server ends with the run", || !still.exists());
}

#[test]
fn transfers_come_through_kill_9_of_either_end() {
    for who in ["device", "proxy"] {
        let file = scenario(&format!(
            "duration_s = 90\n[[link]]\nname = \"wlan0\"\ndown_mbps = 4\nup_mbps = 4
             [[crash]]\nwho = \"{who}\"\nt_s = 2\nfor_s = 0.5
             [[flow]]\nbytes = 2_000_000
             [[flow]]\ndirection = \"up\"\nbytes = 1_500_000
             [[expect]]\ntext = \"count(flows[sha256_ok=true]) == 2\"\n"
        ));
        let Some(output) = lab(&file, &["--json"]) else {
            return;
        };
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{who}: {told}");
        assert!(
            told.contains("crashes") && told.contains("is back"),
            "{told}"
        );
    }
}

#[test]
fn the_lab_is_there_for_an_ordinary_user_too() {
    use std::os::unix::process::CommandExt;
    const NOBODY: u32 = 65534;
    if !nix::unistd::geteuid().is_root() {
        return; // Then every other test has shown it.
    }
    // The program and the scenario in a folder that only this user can read.
    let folder = tempfile::tempdir().expect("a folder");
    let place = |name: &str| folder.path().join(name);
    let open = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("opened");
    };
    std::fs::copy(env!("CARGO_BIN_EXE_cedos-lab"), place("cedos")).expect("copied");
    let text =
        format!("{LINK}[[flow]]\nbytes = 100_000\n[[expect]]\ntext = \"flows[0].sha256_ok\"\n");
    std::fs::write(place("test.toml"), text).expect("written");
    for path in [folder.path().to_owned(), place("cedos"), place("test.toml")] {
        open(&path);
    }
    let output = Command::new(place("cedos"))
        .args(["lab", "run"])
        .arg(place("test.toml"))
        .current_dir(folder.path())
        .env("TMPDIR", folder.path())
        .env("HOME", folder.path())
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("cedos");
    let told = String::from_utf8_lossy(&output.stderr);
    if told.contains("refuses unprivileged user namespaces") {
        eprintln!("skipped: {told}");
        return;
    }
    assert!(output.status.success(), "{told}");
}

#[test]
fn what_a_command_began_is_ended_with_it() {
    let file = scenario(
        r#"
duration_s = 2
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
[[flow]]
bytes = 1000
[[expect]]
text = "flows[0].sha256_ok == true"
"#,
    );
    // A process in the background, one in its own session, and the command itself running too long.
    let begun = "sleep 987 & echo $!; setsid sh -c 'echo $$; exec sleep 987' & wait";
    let Some(output) = lab(&file, &["--direct", "--", "sh", "-c", begun]) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stdout);
    let ids: Vec<&str> = told.split_whitespace().collect();
    assert_eq!(ids.len(), 2, "{output:?}");
    for id in ids {
        let line = std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
        assert!(!line.contains("987"), "{id} is left: {line}");
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("FAILS"), "{errors}");
    assert!(errors.contains("not judged"), "{errors}");
}

#[test]
fn what_cannot_be_scored_says_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a path").to_owned()
    };
    let header = "t_s,iface,up,down_mbps,up_mbps,rtt_ms,loss";
    let trace = write(
        "down.csv",
        &format!("{header}\n0,wifi,1,8,,,\n60,wifi,1,8,,,\n"),
    );
    let output = cedos(&["sim", "score", &trace, "--uploads"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("no uplink rates (up_mbps)"), "{errors}");
    let jobs = write("jobs.csv", "when,size,deadline\n0,1000,20\n");
    let output = cedos(&["sim", "score", &trace, "--jobs", &jobs]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        errors.contains("expected `arrival_s,size_bytes,deadline_s`"),
        "{errors}"
    );
    let into = folder.path().join("new/trips");
    let into = into.to_str().expect("a path");
    let output = cedos(&[
        "sim", "foresee", "--make", "bus", "--into", into, "--count", "1",
    ]);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_dir(into).expect("the folder").count(), 1);
}

/// Wi-Fi that fails silently during both flows.
const DIES: &str = r#"
duration_s = 30
origin = "builtin"
[[link]]
name = "wlan0"
down_mbps = 8
up_mbps = 8
[[link.at]]
t_s = 3
dead = true
[[link]]
name = "wwan0"
class = "metered"
down_mbps = 8
up_mbps = 8
[[flow]]
id = "down"
bytes = 4_500_000
policy = "any"
[[flow]]
id = "up"
direction = "up"
bytes = 4_500_000
policy = "any"
[[expect]]
text = "count(flows[sha256_ok=true]) == 2"
"#;

#[test]
fn every_client_carries_flows_both_ways_and_their_silence_is_measured() {
    if !is_installed("curl") {
        eprintln!("skipped: there is no curl");
        return;
    }
    let file = scenario(DIES);
    for client in ["run", "proxy", "socket"] {
        let Some(output) = lab(&file, &["--client", client, "--json"]) else {
            return;
        };
        let report = report(&output);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{client}: {report}\n{told}");
        for flow in report["flows"].as_array().expect("flows") {
            let seconds = |key: &str| flow[key].as_f64().expect("it was seen");
            let (first, last) = (seconds("first_byte_s"), seconds("last_byte_s"));
            let silence = seconds("silence_max_s");
            assert!(first < 3.0 && last > 3.0, "{client}: {flow}");
            // The dead Wi-Fi is detected after more than 0.1 s, and before the flow would have
            // ended.
            assert!(silence > 0.1 && silence < last - first, "{client}: {flow}");
        }
        let cellular = &report["links"][1];
        assert!(
            cellular["bytes_down"].as_u64() > Some(100_000),
            "{cellular}"
        );
    }
}

/// A network with a captive portal for some seconds, which then blocks UDP.
const SIGN_IN: &str = r#"
duration_s = 20
[[link]]
name = "wlan0"
[[link.at]]
t_s = 0
portal = true
[[link.at]]
t_s = 5
portal = false
udp_blocked = true
"#;

#[test]
fn a_portal_answers_for_the_origin_and_tcp_passes_where_udp_is_blocked() {
    if !is_installed("curl") {
        eprintln!("skipped: there is no curl");
        return;
    }
    let script = r#"
        ask() { curl -s -o answer -w '%{http_code} %{redirect_url}\n' "$CEDOS_LAB_ORIGIN/bytes/1000"; }
        cd "$(mktemp -d)"
        ask
        until test "$(ask)" = '200 '; do sleep 0.1; done
        wc -c <answer
        "#;
    let file = scenario(SIGN_IN);
    let Some(output) = lab(&file, &["--", "sh", "-c", script]) else {
        return;
    };
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        ["302 http://portal.example/sign-in", "1000"],
        "{told}"
    );
}
