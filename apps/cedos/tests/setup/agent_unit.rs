//! `cedos agent --install`: the agent starts with the session. systemd is a stand-in that records what it is
//! asked and starts the unit's command, since a test has no session of its own.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use cedos_lab_rig::program::{AgentProcess, CedosRun, built, cedos, ended};
use cedos_lab_rig::wait::{until, within};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Puts a `systemctl` into the directory that answers by this script.
fn stand_in(home: &Path, script: &str) {
    let path = home.join("bin/systemctl");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A script that starts an agent when the unit is to start.
fn starts_the_unit() -> String {
    format!(
        "case \"$*\" in *restart*) {} agent > unit.log 2>&1 & echo $! > unit.pid;; esac",
        built("cedos").display()
    )
}

/// Runs `cedos agent` with the stand-in as the only systemctl.
async fn agent(home: &Path, arguments: &[&str], variables: &[(&str, &Path)]) -> CedosRun {
    let mut command = cedos(home, &[&["agent"], arguments].concat());
    let path = format!("{}:/usr/bin:/bin", home.join("bin").display());
    command.env("PATH", path).envs(variables.iter().copied());
    ended(command.spawn().unwrap()).await
}

const UNIT: &str = ".config/systemd/user/cedos-agent.service";

#[tokio::test]
async fn the_agent_is_installed_with_its_options_and_taken_back() {
    let home = tempfile::tempdir().unwrap();
    stand_in(home.path(), "echo \"$*\" >> calls");
    let unit = home.path().join(UNIT);
    let arguments = ["--install", "--link", "wwan*=metered", "--no-notifications"];
    let installed = agent(home.path(), &arguments, &[]).await;
    installed.ends_with(0, "starts with your session");
    let text = std::fs::read_to_string(&unit).unwrap();
    assert!(
        text.contains("\"agent\" \"--link\" \"wwan*=metered\" \"--no-notifications\"\n"),
        "{text}"
    );
    let calls = || std::fs::read_to_string(home.path().join("calls")).unwrap();
    assert!(
        calls()
            .ends_with("--user enable cedos-agent.service\n--user restart cedos-agent.service\n")
    );
    // Again, with other options: the unit is replaced.
    agent(home.path(), &["--install"], &[])
        .await
        .ends_with(0, "");
    assert!(!std::fs::read_to_string(&unit).unwrap().contains("--link"));
    agent(home.path(), &["--uninstall"], &[])
        .await
        .ends_with(0, "Removed");
    assert!(!unit.exists());
    assert!(calls().ends_with("--user disable --now cedos-agent.service\n--user daemon-reload\n"));
    agent(home.path(), &["--uninstall"], &[])
        .await
        .ends_with(0, "was not installed");
}

#[tokio::test]
async fn an_agent_that_runs_already_makes_room_for_the_units() {
    let home = tempfile::tempdir().unwrap();
    stand_in(home.path(), &starts_the_unit());
    let mut running = AgentProcess::start(home.path()).await;
    let variables = [("CEDOS_AGENT", running.socket.clone())];
    let variables = variables
        .each_ref()
        .map(|(name, path)| (*name, path.as_path()));
    agent(home.path(), &["--install"], &variables)
        .await
        .ends_with(0, "The agent runs");
    let status = within(running.child.wait()).await.unwrap();
    assert!(status.success(), "{status}");
    let text = std::fs::read_to_string(home.path().join(UNIT)).unwrap();
    let socket = format!("Environment=\"CEDOS_AGENT={}\"\n", running.socket.display());
    assert!(
        text.contains(&socket),
        "the unit's agent is at the same socket: {text}"
    );
    let pid = std::fs::read_to_string(home.path().join("unit.pid")).unwrap();
    let pid = Pid::from_raw(pid.trim().parse().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    until("the unit's agent ends", || kill(pid, None).is_err()).await;
}

#[tokio::test]
async fn a_unit_whose_agent_does_not_come_is_told() {
    let home = tempfile::tempdir().unwrap();
    stand_in(home.path(), "exit 0");
    let socket = home.path().join("nobody.sock");
    agent(home.path(), &["--install"], &[("CEDOS_AGENT", &socket)])
        .await
        .ends_with(1, "journalctl --user -u cedos-agent");
}

#[tokio::test]
async fn a_unit_that_systemd_does_not_stop_stays_and_the_reason_is_told() {
    let home = tempfile::tempdir().unwrap();
    stand_in(home.path(), "exit 0");
    agent(home.path(), &["--install"], &[])
        .await
        .ends_with(0, "");
    stand_in(home.path(), "echo 'Access denied' >&2; exit 1");
    agent(home.path(), &["--uninstall"], &[])
        .await
        .ends_with(1, "disable --now cedos-agent.service: Access denied");
    assert!(home.path().join(UNIT).exists());
    stand_in(
        home.path(),
        "echo 'Failed to connect to bus: No medium found' >&2; exit 1",
    );
    agent(home.path(), &["--uninstall"], &[])
        .await
        .ends_with(0, "Removed");
}

#[tokio::test]
async fn without_systemd_nothing_is_written_and_a_sentence_says_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let bus = "echo 'Failed to connect to bus: No medium found' >&2; exit 1";
    stand_in(home.path(), bus);
    agent(home.path(), &["--install"], &[])
        .await
        .ends_with(1, "systemd does not run for this user");
    assert!(!home.path().join(UNIT).exists());
}

#[tokio::test]
async fn a_unit_that_the_user_wrote_stays() {
    let home = tempfile::tempdir().unwrap();
    stand_in(home.path(), "exit 0");
    let unit = home.path().join(UNIT);
    std::fs::create_dir_all(unit.parent().unwrap()).unwrap();
    std::fs::write(&unit, "[Service]\n").unwrap();
    for option in ["--install", "--uninstall"] {
        agent(home.path(), &[option], &[])
            .await
            .ends_with(1, "was not written by");
    }
    assert_eq!(std::fs::read_to_string(&unit).unwrap(), "[Service]\n");
}
