//! D-Lock of programs, with an agent that carries their sockets and by their own engines: what is asked of the machine,
//! as the kernel and logind's stand-in have it.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::CProgram;
use crate::told::Program;
use cedos_lab_rig::bus::ServiceBus;
use cedos_lab_rig::namespace::{cell_on, in_namespace, origin_namespace, sh, wifi_off, wifi_on};
use cedos_lab_rig::origin::{OriginReply, OriginRequest, ReplyEnd, ScriptedOrigin, object, proper};
use cedos_lab_rig::program::{AgentProcess, ProxyProcess, pid_of};
use cedos_lab_rig::share::beside_others;
use cedos_lab_rig::wait::until_async;
use cedos_lab_rig::{PATIENCE, this_test};
use nix::unistd::Pid;

const PROXY_NAME: &str = "proxy.test";

const OBJECT_BYTES: usize = 20_000_000; // 8 s at 20 Mb/s

/// Longer than a look at how sockets stand takes to come.
const LOOKED: Duration = Duration::from_secs(7);

/// Soonest of the alarms that a process has set and that count while the machine sleeps, in seconds. A thread may have
/// descriptors of its own.
fn alarm(pid: Pid) -> Option<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let rings_in = |info: String| {
        // CLOCK_BOOTTIME, CLOCK_BOOTTIME_ALARM.
        let counts = info.contains("clockid: 7") || info.contains("clockid: 9");
        let value = info.split("it_value: (").nth(1).filter(|_| counts)?;
        let (seconds, rest) = value.split_once(", ")?;
        (!rest.starts_with("0)") || seconds != "0").then(|| seconds.parse().expect("seconds"))
    };
    let read = |one: std::fs::DirEntry| std::fs::read_to_string(one.path()).ok();
    let fds = tasks
        .flatten()
        .filter_map(|task| std::fs::read_dir(task.path().join("fdinfo")).ok());
    let infos = fds.flat_map(|all| all.flatten().filter_map(read));
    infos.filter_map(rings_in).min()
}

fn has_alarm(pid: Pid) -> bool {
    alarm(pid).is_some()
}

/// Hundredths of a second for which a process has run.
fn ran(pid: Pid) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let (_, fields) = stat.rsplit_once(") ").expect("fields");
    let ticks = fields.split(' ').skip(11).take(2);
    ticks
        .map(|field| field.parse::<u64>().expect("ticks"))
        .sum()
}

async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    until_async(what, async || is_so().await.then_some(())).await;
}

/// Programs with connections that no free link carries for a while. Who keeps watch for them is another, but what is
/// asked of the machine is not.
async fn what_is_asked_of_the_machine(
    agent: Option<&AgentProcess>,
    home: &Path,
    to: &CallTarget,
    bus: &ServiceBus,
) {
    let told = CProgram::with_d2tp("told.c");
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
    // sleep: that it sets no alarm for so long is the subject
    tokio::time::sleep(LOOKED).await;
    assert!(!has_alarm(watcher(&plain)));
    // It is told of a D-Lock that comes later, of its end, and that there are two.
    assert_eq!(plain.ask("lock").await, "lock 1");
    until("an alarm", async || has_alarm(watcher(&plain))).await;
    assert_eq!(plain.ask("lock").await, "lock 2");
    assert_eq!(plain.ask("unlock").await, "unlock 1");
    // sleep: that the alarm stays is the subject
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
    // What it moved before it asks is nothing that keeps a machine awake.
    assert_eq!(plain.ask("lock").await, "lock 1");
    // What is read before the engine hears of the D-Lock does not count either.
    let mut read = 0;
    while bus.inhibitors().await.is_empty() {
        assert!(read < 10_000_000, "no hold while it reads");
        assert_eq!(plain.ask("read 50000").await, "read 50000");
        read += 50_000;
        // sleep: it is looked at every 5 s how much was read
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(plain.ask("unlock").await, "unlock 0");
    until("it may sleep", async || bus.inhibitors().await.is_empty()).await;
    plain.leave().await;
    when_it_must_begin(begin("policy=1"), watcher).await;
}

/// A metered link is there for who must be in time.
async fn when_it_must_begin(mut program: Program, watcher: impl Fn(&Program) -> Pid) {
    assert_eq!(program.hear().await, "policy 0");
    assert_eq!(program.hear().await, "connect 0");
    assert_eq!(program.ask("lock").await, "lock 1");
    assert!(program.ask("ask").await.starts_with("ask "));
    assert_eq!(program.ask("read 1000000").await, "read 1000000");
    wifi_off();
    // What was on its way has come. So little is left that even a path that a busy machine makes look slow need not begin
    // at once.
    let mut came = 0;
    loop {
        let info = program.ask("info").await;
        let word = info.rsplit(' ').next().and_then(|word| word.parse().ok());
        let now: u64 = word.expect("bytes that came");
        if now == came {
            break;
        }
        came = now;
        // sleep: it is over when nothing came for a while
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let size = came + 1_000_000;
    assert_eq!(program.ask(&format!("size {size}")).await, "size 0");
    assert_eq!(program.ask("deadline 55").await, "deadline 0");
    let is_soon = || alarm(watcher(&program)).is_some_and(|seconds| seconds < 55);
    let begun = Instant::now();
    while !is_soon() {
        let is = (alarm(watcher(&program)), begun.elapsed());
        assert!(
            is.1 < PATIENCE,
            "never: an alarm for the start; {is:?}, {} at {size}",
            program.ask("info").await
        );
        // sleep: the kernel does not tell of another process's alarm
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // It is late, and waits all the same.
    assert_eq!(program.ask("late 1").await, "late 0");
    assert_eq!(program.ask("deadline 1").await, "deadline 0");
    // sleep: that the alarm stays past the deadline is the subject
    tokio::time::sleep(LOOKED).await;
    assert!(has_alarm(watcher(&program)));
    // Who pays at any time has a network, until that is dead. Nobody is woken, or busy, for what is due already.
    assert_eq!(program.ask("policy 3").await, "policy 0");
    until("none", async || !has_alarm(watcher(&program))).await;
    sh("ip neigh replace 203.0.113.1 lladdr 02:00:00:00:00:01 nud permanent dev wwan0");
    until("an alarm", async || has_alarm(watcher(&program))).await;
    let before = ran(watcher(&program));
    // sleep: processor time in a span of time is the subject
    tokio::time::sleep(LOOKED).await;
    let ran = ran(watcher(&program)) - before;
    assert!(ran < 50, "{ran} ticks");
    assert!(has_alarm(watcher(&program)));
    sh("ip neigh del 203.0.113.1 dev wwan0");
    program.child.kill().await.expect("it ends");
}

/// Who calls for a server whose name nobody knows yet waits for a network, too.
async fn while_a_name_is_looked_for(home: &Path, to: &CallTarget, bus: &ServiceBus, hosts: &Path) {
    let told = CProgram::with_d2tp("told.c");
    let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
    let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
    let port = url.port().expect("a port").to_string();
    let arguments = ["192.0.2.1", &*port, "locked"];
    let named = to.1.address.replace("192.0.2.1", PROXY_NAME);
    // While there is a network it is not looked for for long.
    sh("ip link set wwan0 down");
    let none = Path::new("none");
    let mut program = Program::start_among(&told, home, &named, none, &arguments, &around);
    assert_eq!(program.hear().await, "policy 0");
    assert_eq!(program.hear().await, "lock 1");
    until("an alarm", async || has_alarm(pid_of(&program.child))).await;
    std::fs::write(hosts, format!("192.0.2.1 {PROXY_NAME}\n")).expect("write");
    wifi_on("198.51.100.7");
    assert_eq!(program.hear().await, "connect 0");
    until("none", async || !has_alarm(pid_of(&program.child))).await;
    program.leave().await;
}

/// A connection of another process is taken over while a D-Lock is held.
async fn who_takes_over_with_a_d_lock(
    agent: &AgentProcess,
    home: &Path,
    to: &CallTarget,
    bus: &ServiceBus,
) {
    let told = CProgram::with_d2tp("told.c");
    let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
    let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
    let port = url.port().expect("a port").to_string();
    let begin = |more: &[&str]| {
        let arguments = [&["192.0.2.1", &*port], more].concat();
        let at = &to.1.address;
        Program::start_among(&told, home, at, &agent.socket, &arguments, &around)
    };
    wifi_on("198.51.100.7");
    let mut before = begin(&["open"]);
    assert_eq!(before.hear().await, "persist 0");
    assert_eq!(before.hear().await, "connect 0");
    assert!(before.ask("ask").await.starts_with("ask "));
    assert_eq!(before.ask("read 1000000").await, "read 1000000");
    let token = before.ask("token").await;
    let token = token.split(' ').nth(1).expect("a token");
    before.leave().await;
    let mut after = begin(&[token, "locked"]);
    assert_eq!(after.hear().await, "lock 1");
    assert_eq!(after.hear().await, "reopen 0");
    after.tell("read 5000000").await;
    until("a hold", async || !bus.inhibitors().await.is_empty()).await;
    assert_eq!(after.hear().await, "read 5000000");
    assert_eq!(after.ask("unlock").await, "unlock 0");
    assert_eq!(after.ask("lock").await, "lock 1");
    after.leave().await;
}

type CallTarget = (ScriptedOrigin, ProxyProcess);

fn call_target(home: &Path) -> CallTarget {
    let place = home.to_owned();
    origin_namespace(|| async move {
        let bytes = object(OBJECT_BYTES, 1);
        let script = move |asked: &OriginRequest| {
            OriginReply(proper(asked, &bytes, "\"v1\""), ReplyEnd::Close)
        };
        let origin = ScriptedOrigin::start_at("192.0.2.1", script).await;
        let proxy = ProxyProcess::start(&place, "192.0.2.1:0", &[]).await;
        (origin, proxy)
    })
}

fn with_a_machine(test: String, agent: bool) {
    let _share = beside_others();
    in_namespace(test, move || async move {
        let Some(bus) = ServiceBus::with("logind", "org.freedesktop.login1").await else {
            return;
        };
        let home = tempfile::tempdir().expect("a directory");
        let to = call_target(home.path());
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("own mounts");
        let hosts = home.path().join("hosts");
        std::fs::write(&hosts, "").expect("write");
        sh(&format!("mount --bind {} /etc/hosts", hosts.display()));
        cell_on();
        let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
        let agent = match agent {
            true => Some(AgentProcess::start_among(home.path(), &[], &around).await),
            false => None,
        };
        what_is_asked_of_the_machine(agent.as_ref(), home.path(), &to, &bus).await;
        match &agent {
            Some(agent) => who_takes_over_with_a_d_lock(agent, home.path(), &to, &bus).await,
            None => while_a_name_is_looked_for(home.path(), &to, &bus, &hosts).await,
        }
    });
}

#[test]
fn an_agent_has_the_machine_woken_and_kept_awake_for_programs_that_hold_a_d_lock() {
    with_a_machine(this_test!(), true);
}

#[test]
fn without_an_agent_a_program_that_holds_a_d_lock_has_it_woken_itself() {
    with_a_machine(this_test!(), false);
}

#[test]
fn without_an_agent_a_silent_bus_prevents_no_alarm_and_is_used_once_it_answers() {
    let _share = beside_others();
    in_namespace(this_test!(), || async {
        let Some(bus) = ServiceBus::with("logind", "org.freedesktop.login1").await else {
            return;
        };
        let home = tempfile::tempdir().expect("a directory");
        let to = call_target(home.path());
        let url = url::Url::parse(&to.0.url("/a")).expect("a URL");
        let port = url.port().expect("a port").to_string();
        let told = CProgram::with_d2tp("told.c");
        let around = [("DBUS_SYSTEM_BUS_ADDRESS", bus.address())];
        let arguments = ["192.0.2.1", &*port, "locked"];
        bus.pause();
        let (home, at, nobody) = (home.path(), &to.1.address, Path::new("none"));
        let mut program = Program::start_among(&told, home, at, nobody, &arguments, &around);
        assert_eq!(program.hear().await, "policy 0");
        assert_eq!(program.hear().await, "lock 1");
        until("an alarm", async || has_alarm(pid_of(&program.child))).await;
        bus.resume();
        wifi_on("198.51.100.7");
        assert_eq!(program.hear().await, "connect 0");
        assert!(program.ask("ask").await.starts_with("ask "));
        program.tell("read 15000000").await;
        until("a hold", async || !bus.inhibitors().await.is_empty()).await;
        assert_eq!(program.hear().await, "read 15000000");
        program.leave().await;
    });
}
