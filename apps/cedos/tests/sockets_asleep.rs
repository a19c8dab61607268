//! D-Lock of programs, with an agent that carries their sockets and by their own engines: what is asked of the machine,
//! as the kernel and logind's stand-in have it.

#[path = "../../../edge/power/tests/bus/mod.rs"]
mod bus;
mod get_namespace;
mod get_origin;
mod get_rig;
#[path = "../../../edge/capi/tests/support/mod.rs"]
mod support;
mod told;

use std::path::Path;
use std::time::{Duration, Instant};

use bus::Bus;
use get_namespace::{PATIENCE, cell_on, in_namespace, origin_namespace, wifi_off, wifi_on};
use get_origin::{End, Origin, Reply, object, proper};
use get_rig::Proxy;
use nix::unistd::Pid;
use support::C;
use told::{Agent, Program, pid_of};

const OBJECT_BYTES: usize = 20_000_000; // 8 s at 20 Mb/s

/// Longer than a look at how sockets stand takes to come.
const LOOKED: Duration = Duration::from_secs(7);

/// Whether a process has an alarm set that counts while the machine sleeps. A thread may have descriptors of its own.
fn has_alarm(pid: Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let is_set = |info: String| {
        // CLOCK_BOOTTIME, CLOCK_BOOTTIME_ALARM.
        let counts = info.contains("clockid: 7") || info.contains("clockid: 9");
        counts && !info.contains("it_value: (0, 0)")
    };
    tasks.flatten().any(|task| {
        let Ok(all) = std::fs::read_dir(task.path().join("fdinfo")) else {
            return false;
        };
        let read = |one: std::fs::DirEntry| std::fs::read_to_string(one.path()).ok();
        all.flatten().filter_map(read).any(is_set)
    })
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Two programs with connections that no free link carries for a while. Who keeps watch for them is another, but what is
/// asked of the machine is not.
async fn what_is_asked_of_the_machine(agent: Option<&Agent>, home: &Path, to: &To, bus: &Bus) {
    let told = C::with_d2tp("told.c");
    let socket = agent.map_or(Path::new("none"), |agent| &agent.socket);
    let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
    let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
    let port = url.port().expect("a port").to_string();
    let begin = |more: &str| {
        let arguments = ["192.0.2.1", &*port, more];
        Program::start_among(&told, home, &to.1.address, socket, &arguments, &around)
    };
    let watcher = |program: &Program| agent.map_or(pid_of(&program.child), |a| pid_of(&a.child));
    wifi_on("198.51.100.7");
    let mut plain = begin("policy=0");
    assert_eq!(plain.hear().await, "policy 0");
    assert_eq!(plain.hear().await, "connect 0");
    assert!(plain.ask("ask").await.starts_with("ask "));
    assert_eq!(plain.ask("read 1000000").await, "read 1000000");
    // Nothing is asked for who asked for nothing, whether it moves or waits.
    plain.tell("read 2000000").await;
    assert!(bus.inhibitors().await.is_empty());
    assert_eq!(plain.hear().await, "read 2000000");
    wifi_off();
    tokio::time::sleep(LOOKED).await;
    assert!(!has_alarm(watcher(&plain)));
    // It is told of a D-Lock that comes later, of its end, and that there are two.
    assert_eq!(plain.ask("lock").await, "lock 1");
    until("an alarm", async || has_alarm(watcher(&plain))).await;
    assert_eq!(plain.ask("lock").await, "lock 2");
    assert_eq!(plain.ask("unlock").await, "unlock 1");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(has_alarm(watcher(&plain)));
    assert_eq!(plain.ask("unlock").await, "unlock 0");
    until("none", async || !has_alarm(watcher(&plain))).await;
    assert!(plain.ask("unlock").await.starts_with("unlock EINVAL"));
    // One that is not connected yet waits, too.
    let mut early = begin("locked");
    assert_eq!(early.hear().await, "policy 0");
    assert_eq!(early.hear().await, "lock 1");
    until("an alarm", async || has_alarm(watcher(&early))).await;
    assert!(bus.inhibitors().await.is_empty());
    wifi_on("198.51.100.99");
    assert_eq!(early.hear().await, "connect 0");
    until("none", async || !has_alarm(watcher(&early))).await;
    // It is kept awake while something moves for who asked for that, and no longer than it asks.
    assert!(early.ask("ask").await.starts_with("ask "));
    early.tell("read 5000000").await;
    until("a hold", async || !bus.inhibitors().await.is_empty()).await;
    assert_eq!(early.hear().await, "read 5000000");
    assert_eq!(early.ask("unlock").await, "unlock 0");
    until("it may sleep", async || bus.inhibitors().await.is_empty()).await;
    assert_eq!(early.ask("lock").await, "lock 1");
    early.tell("read 5000000").await;
    until("a hold", async || !bus.inhibitors().await.is_empty()).await;
    // Its D-Lock ends with it.
    early.child.kill().await.expect("it ends");
    until("it may sleep", async || bus.inhibitors().await.is_empty()).await;
}

type To = (Origin, Proxy);

fn with_a_machine(test: &str, agent: bool) {
    in_namespace(test, move || async move {
        let Some(bus) = Bus::with("logind", "org.freedesktop.login1").await else {
            return;
        };
        let home = tempfile::tempdir().expect("a directory");
        let place = home.path().to_owned();
        let to = origin_namespace(|| async move {
            let bytes = object(OBJECT_BYTES, 1);
            let script =
                move |asked: &get_origin::Asked| Reply(proper(asked, &bytes, "\"v1\""), End::Close);
            let origin = Origin::start_at("192.0.2.1", script).await;
            let proxy = get_rig::proxy(&place, "192.0.2.1:0", &[]).await;
            (origin, proxy)
        });
        cell_on();
        let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
        let agent = match agent {
            true => Some(Agent::start_among(home.path(), &[], &around).await),
            false => None,
        };
        what_is_asked_of_the_machine(agent.as_ref(), home.path(), &to, &bus).await;
    });
}

#[test]
fn an_agent_has_the_machine_woken_and_kept_awake_for_programs_that_hold_a_d_lock() {
    with_a_machine(
        "an_agent_has_the_machine_woken_and_kept_awake_for_programs_that_hold_a_d_lock",
        true,
    );
}

#[test]
fn without_an_agent_a_program_that_holds_a_d_lock_has_it_woken_itself() {
    with_a_machine(
        "without_an_agent_a_program_that_holds_a_d_lock_has_it_woken_itself",
        false,
    );
}
