//! `cedos demo` without namespaces, shortened.

use std::process::Command;

use serde_json::Value;

/// The demonstration's events in a third of its time: Wi-Fi lost, another network with another
/// address, a second without any network, and back.
const SHORT: &str = r#"
seed = 3
duration_s = 30

[[link]]
name = "wlan0"
class = "free"
down_mbps = 24
up_mbps = 10
rtt_ms = 20
attach_s = 0.2
join = "home"

[[link.access_point]]
name = "home"

[[link.access_point]]
name = "cafe"
rtt_ms = 26

[[link.at]]
t_s = 2
up = false

[[link.at]]
t_s = 3
join = "cafe"

[[link.at]]
t_s = 5
up = false

[[link.at]]
t_s = 6
join = "home"

[[link]]
name = "wwan0"
class = "metered"
down_mbps = 12
up_mbps = 8
rtt_ms = 50
queue_ms = 200
attach_s = 0.2

[[link.at]]
t_s = 5
up = false

[[link.at]]
t_s = 7
up = true

[[flow]]
bytes = 20_000_000
deadline_s = 16
policy = "free-first"
"#;

#[test]
fn the_demonstration_holds_without_namespaces() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("short.toml");
    std::fs::write(&file, SHORT).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_cedos-lab"))
        .args(["demo", "--json", "--without-namespaces", "--scenario"])
        .arg(&file)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    let told: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {said}"));
    assert_eq!(told["mode"], "loopback");
    assert_eq!(told["sha256_ok"], true, "{told}\n{said}");
    assert_eq!(told["bytes"], 20_000_000);
    // The third change comes after seven seconds, when a fast run may be over.
    assert!(told["address_changes"].as_u64() >= Some(2), "{told}");
    assert_eq!(told["packets_while_down"], 0, "{told}");
    let wasted = told["wasted_bytes"].as_u64().unwrap();
    assert!(wasted <= 200_000, "more than 1 % twice: {told}");
    assert!(told["handovers"].as_u64() >= Some(2), "{told}");
    assert!(told["outage_s"].as_f64() >= Some(0.9), "{told}");
    assert!(
        told["tcp_baseline"]["starts"].as_u64() >= Some(1),
        "plain TCP got nothing at all: {told}\n{said}"
    );
    // Before anything has happened nobody says that it will be late: that is said of no file that then is on time.
    let begin = said.lines().take_while(|line| !line.contains("LOST"));
    let doubts = begin.filter(|line| line.contains("probably be late"));
    let doubts: Vec<&str> = doubts.collect();
    assert!(told["deadline_met"] == false || doubts.is_empty(), "{said}");
    // On a busy machine it may be late, but the file must be complete, and the report must say so.
    assert_eq!(
        out.status.success(),
        told["deadline_met"].as_bool().unwrap(),
        "{said}"
    );
}
