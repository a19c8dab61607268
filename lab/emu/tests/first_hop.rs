//! A device on real sockets whose Wi-Fi fails, or whose access point loses its uplink: by probing
//! the gateway the device distinguishes the two.
//!
//! It is a program without the test harness, because only a process with one thread may enter a
//! user namespace. If the system forbids namespaces it prints a message and passes.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use cedos_lab_emu::{World, enter, plan};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_scenario::Scenario;
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, FlowSettings, LinkUse, PathState, PathStats,
    SecretKey, Server, ServerAddress, ServerOptions, SessionEvent,
};
use d2tp_links::{ClassRules, LinkMonitor};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PORT: u16 = 4433;
/// When the fault begins, in the scenario's time.
const FROM: Duration = Duration::from_secs(4);
const TO: Duration = Duration::from_secs(7);

fn main() {
    if let Err(forbidden) = enter() {
        println!("skipped, no lab on this machine: {forbidden}");
        return;
    }
    let (air, behind) = (fails("dead"), fails("cut"));
    println!("the air: {air:?}\nbehind the first hop: {behind:?}");
    // R-HOP-1: with its gateway's status, before probe timeouts would have detected it.
    assert!(air.whole, "the window did not survive a hole in the air");
    // R-HOP-2: by probe timeouts, and with half the window.
    assert!(!behind.whole, "a fault further on was taken for a hole");
    assert!(air.hesitated.saturating_sub(air.waited) < behind.hesitated);
    println!("test the_air_and_what_is_behind_it_are_told_apart ... ok");
}

/// The reaction of a device to a fault.
#[derive(Debug)]
struct ReceivedPacket {
    /// The time from quiet to silent.
    hesitated: Duration,
    /// How long a thread waited for a processor in that time.
    waited: Duration,
    /// Whether the path resumed with its previous window.
    whole: bool,
}

/// Runs an upload over one link with a fault of this kind.
fn fails(how: &str) -> ReceivedPacket {
    let text = format!(
        "seed = 5\nduration_s = 30\n[[link]]\nname = \"wlan0\"\ndown_mbps = 10\nup_mbps = 10\nrtt_ms = 150\n\
         queue_bytes = 100000\n[[link.at]]\nt_s = {}\n{how} = true\n[[link.at]]\nt_s = {}\n{how} = false\n",
        FROM.as_secs(),
        TO.as_secs()
    );
    let scenario = Scenario::parse("test", &text, &mut |_| unreachable!()).expect("a scenario");
    let mut world = World::build(scenario).expect("a world");
    let (ended, end) = tokio::sync::oneshot::channel::<()>();
    let (ready, bound) = channel();
    let serving = world.proxy().thread("server", move || {
        run(async move {
            let server = Server::bind(ServerOptions {
                listen: (plan::PROXY_V4, PORT).into(),
                key: SecretKey::from_bytes([2; 32]),
                admission: Admission::Anybody,
                config: EndpointConfig::default(),
            });
            let server = server.expect("a server");
            ready.send(server.public_key()).expect("somebody waits");
            let mut flow = server.accept().await.expect("a flow");
            let mut taken = vec![0; 65_536];
            let takes = async { while flow.read(&mut taken).await.is_ok_and(|n| n > 0) {} };
            tokio::select! {
                () = takes => {}
                _ = end => {}
            }
        });
    });
    let serving = serving.expect("a thread");
    let key = bound.recv().expect("it serves");
    world.start(|_| {}).expect("time begins");
    let began = Instant::now();
    let (tell, told) = channel();
    let device = world.device().thread("device", move || {
        run(async move {
            let options = DeviceOptions {
                server: ServerAddress::new(plan::PROXY_V4.to_string(), PORT, key),
                key: SecretKey::from_bytes([1; 32]),
                config: EndpointConfig::default(),
            };
            tell.send(upload(options, began).await)
                .expect("it is waited for");
        });
    });
    let device = device.expect("a thread");
    let came = told.recv().expect("the device died");
    let _ = ended.send(());
    let _ = device.join();
    drop(world);
    let _ = serving.join();
    came
}

async fn upload(options: DeviceOptions, began: Instant) -> ReceivedPacket {
    let (_, monitor) = LinkMonitor::start(ClassRules::default())
        .await
        .expect("links");
    let mut device = Device::new(options).await.expect("a device");
    let mut events = device.events();
    device.follow_links(monitor.subscribe(), |_| LinkUse::Free);
    let mut flow = device.open(FlowSettings::default()).expect("a flow");
    let sends = tokio::spawn(async move {
        let bytes = [7; 65_536];
        while flow.write_all(&bytes).await.is_ok() {}
    });
    let path = || device.paths().into_iter().next();
    let is = |state: PathState| path().is_some_and(|p: PathStats| p.state == state);
    while began.elapsed() < FROM {
        pause().await;
    }
    while !matches!(events.recv().await, Ok((_, SessionEvent::PathQuiet { .. }))) {}
    let (wait, quiet) = (ProcessorWait::of(&[]), Instant::now());
    while !is(PathState::Silent) {
        pause().await;
    }
    let (hesitated, waited) = (quiet.elapsed(), wait.longest());
    let window = path().expect("a path").window;
    while !is(PathState::Active) {
        pause().await;
    }
    let whole = path().expect("a path").window >= window;
    sends.abort();
    ReceivedPacket {
        hesitated,
        waited,
        whole,
    }
}

/// The interval between checks: shorter than a round trip, in which a window may grow again.
async fn pause() {
    // sleep: a path's statistics change without an event, so they are polled
    tokio::time::sleep(Duration::from_millis(5)).await;
}

fn run(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(work);
}
