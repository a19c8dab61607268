//! `cedos agent --short-queues`: the process that moves the window clamps of other programs lives as long as the agent.
//! What it does to a queue is measured in `lab/emu/tests/world.rs`.

use cedos_lab_rig::wait::until_some;
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

#[tokio::test]
async fn the_process_that_keeps_queues_short_ends_with_the_agent_however_that_ends() {
    for (signal, sandbox) in [
        (Signal::SIGTERM, &[][..]),
        (Signal::SIGKILL, &["--no-sandbox"]),
    ] {
        let mut home = Home::new(&[&["--short-queues=2.5"], sandbox].concat()).await;
        let agent = home.agent.as_ref().and_then(tokio::process::Child::id);
        let agent = agent.expect("it runs");
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
async fn the_setting_keeps_queues_short_without_an_option() {
    let mut home = Home::new(&[]).await;
    let set = home
        .run(&["config", "set", "agent.short_queues", "true"])
        .await;
    assert_eq!(set.code, 0, "{}", set.errors);
    home.end(Signal::SIGTERM).await;
    home.start(&[]).await;
    let agent = home.agent.as_ref().and_then(tokio::process::Child::id);
    let agent = agent.expect("it runs");
    until_some("a process for queues", || {
        child_with(agent, "--keep-queues-short=3")
    })
    .await;
}

#[tokio::test]
async fn a_factor_that_makes_no_sense_is_refused() {
    let home = Home::new(&[]).await;
    let run = home.run(&["agent", "--short-queues=1"]).await;
    run.ends_with(2, "--short-queues");
}
