//! Proxy and agent in their sandboxes, as the kernel shows them (proc(5), /proc/PID/status).

use std::path::Path;

use cedos_lab_rig::program::{AgentProcess, pid_of};
use cedos_lab_rig::wait::until;
use nix::unistd::Pid;

use crate::support::start_proxy;

/// A field of the status of a process.
fn field(status: &str, name: &str) -> String {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.strip_prefix(':'))
        .expect(name)
        .trim()
        .to_owned()
}

fn status_of(pid: Pid) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

/// How many filters of system calls this process has, to begin with: containers have one.
fn own_filters() -> u32 {
    let own = std::fs::read_to_string("/proc/self/status").unwrap();
    field(&own, "Seccomp_filters").parse().unwrap()
}

fn filters(status: &str) -> u32 {
    field(status, "Seccomp_filters").parse().unwrap()
}

/// Bit 21 of the capabilities that a process, or a program that it becomes, can have: the right to mount and much more.
fn may_administer(status: &str) -> bool {
    let sets = ["CapEff", "CapBnd"].map(|name| field(status, name));
    sets.iter()
        .any(|set| u64::from_str_radix(set, 16).unwrap() >> 21 & 1 == 1)
}

#[tokio::test]
async fn a_proxy_is_in_its_sandbox_unless_it_is_told_not_to_be() {
    let home = tempfile::tempdir().unwrap();
    let proxy = start_proxy(home.path(), "127.0.0.1:0", &[]).await;
    let status = status_of(pid_of(&proxy.child));
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    assert_eq!(filters(&status), own_filters() + 1);
    assert!(
        !may_administer(&status) || !nix::unistd::geteuid().is_root(),
        "{status}"
    );

    let home = tempfile::tempdir().unwrap();
    let proxy = start_proxy(home.path(), "127.0.0.1:0", &["--no-sandbox"]).await;
    let status = status_of(pid_of(&proxy.child));
    assert_eq!(filters(&status), own_filters());
}

#[tokio::test]
async fn an_agent_is_in_its_sandbox_and_its_hooks_are_not() {
    let home = tempfile::tempdir().unwrap();
    let hook = "cat /proc/self/status > hook.part; mv hook.part hook";
    let both = ["--when-free", hook, "--when-not-free", hook];
    let agent = AgentProcess::start_with(home.path(), &both).await;
    let status = status_of(pid_of(&agent.child));
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    assert_eq!(filters(&status), own_filters() + 1);
    assert!(
        !may_administer(&status) || !nix::unistd::geteuid().is_root(),
        "{status}"
    );
    let told = home.path().join("hook");
    until("a hook has run", || told.exists()).await;
    assert_eq!(filters(&read(&told)), own_filters());
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}
