//! Short queues for all programs: the process that moves the window clamps of other programs lives as long as the agent, and is
//! there unless an option or a setting keeps it away. What it does to a queue is measured in `tests/measured/short_queues.rs`
//! and `lab/emu/tests/world.rs`.

use cedos_lab_rig::wait::until_some;
use d2tp_tcp::ReachBarrier;
use nix::sys::signal::Signal;

use super::home::Home;

/// The child of a process whose command line has this word.
fn child_with(parent: u32, word: &str) -> Option<u32> {
    let children =
        std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let mut children = children.split_whitespace().filter_map(|id| id.parse().ok());
    children.find(|id| {
        let command = std::fs::read_to_string(format!("/proc/{id}/cmdline"));
        command.is_ok_and(|command| command.contains(word))
    })
}

/// Whether the processes of this machine reach each other's sockets; a sentence says that they do not.
fn is_within_reach() -> bool {
    let barrier = ReachBarrier::of_this_process();
    if let Some(barrier) = barrier {
        eprintln!("skipped: {barrier}");
    }
    barrier.is_none()
}

fn process_of(home: &Home) -> u32 {
    let agent = home.agent.as_ref().and_then(tokio::process::Child::id);
    agent.expect("it runs")
}

#[tokio::test]
async fn the_process_that_keeps_queues_short_ends_with_the_agent_however_that_ends() {
    if !is_within_reach() {
        return;
    }
    for (signal, sandbox) in [
        (Signal::SIGTERM, &[][..]),
        (Signal::SIGKILL, &["--no-sandbox"]),
    ] {
        let mut home = Home::new(&[&["--short-queues=2.5"], sandbox].concat()).await;
        let agent = process_of(&home);
        let keeper = until_some("a process for queues", || {
            child_with(agent, "--keep-queues-short=2.5")
        })
        .await;
        home.run(&["ls"]).await.ends_with(0, "No transfers");
        home.end(signal).await;
        until_some("it has ended, too", || {
            let state = std::fs::read_to_string(format!("/proc/{keeper}/stat"));
            // One that nobody waits for any more stays as a name only.
            state.map_or(Some(()), |state| state.contains(") Z ").then_some(()))
        })
        .await;
    }
}

#[tokio::test]
async fn queues_are_kept_short_unless_the_setting_or_an_option_says_no() {
    if !is_within_reach() {
        return;
    }
    let mut home = Home::new(&[]).await;
    let started = async |home: &Home| {
        let agent = process_of(home);
        until_some("a process for queues", || {
            child_with(agent, "--keep-queues-short=3")
        })
        .await;
    };
    started(&home).await;
    home.end(Signal::SIGTERM).await;
    // It is started before the agent says that it is ready.
    home.start(&["--no-short-queues"]).await;
    assert_eq!(child_with(process_of(&home), "--keep-queues"), None);
    let off = ["config", "set", "agent.short_queues", "false"];
    home.run(&off).await.ends_with(0, "changed");
    home.end(Signal::SIGTERM).await;
    home.start(&[]).await;
    assert_eq!(child_with(process_of(&home), "--keep-queues"), None);
    home.end(Signal::SIGTERM).await;
    home.start(&["--short-queues"]).await;
    started(&home).await;
    let both = home
        .run(&["agent", "--short-queues", "--no-short-queues"])
        .await;
    both.ends_with(2, "cannot be used with");
}

#[tokio::test]
async fn a_factor_that_makes_no_sense_is_refused() {
    let home = Home::new(&[]).await;
    let run = home.run(&["agent", "--short-queues=1"]).await;
    run.ends_with(2, "--short-queues");
}
