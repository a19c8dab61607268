//! A device with a VPN, in a lab whose networks come and go by a scenario.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cedos_lab_emu::{Namespace, World, WorldEvent, plan};
use cedos_lab_rig::namespace::sh;
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::program::{cedos, device_key, run};
use cedos_lab_scenario::{EventKind, Scenario};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// How long programs may take to end after the scenario, which is more than the longest outage.
const END_WITHIN_S: f64 = 100.0;
/// The interval at which waits for a processor are noted, in seconds.
const NOTE_WAITS_EVERY_S: f64 = 0.05;

/// The clock of a scenario.
#[derive(Debug)]
pub struct ScenarioClock {
    began: Instant,
    over_s: f64,
}

impl ScenarioClock {
    /// Seconds since the beginning.
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// When programs are to end.
    pub fn over_s(&self) -> f64 {
        self.over_s
    }

    /// Whether programs are to end.
    pub fn is_over(&self) -> bool {
        self.now_s() >= self.over_s
    }

    /// Whether programs should have ended.
    pub fn is_long_over(&self) -> bool {
        self.now_s() >= self.over_s + END_WITHIN_S
    }

    /// Waits until a time of the scenario.
    pub fn wait_until(&self, at_s: f64) {
        let left = Duration::from_secs_f64((at_s - self.now_s()).max(0.0));
        // sleep: what happens at times of the scenario is the subject
        std::thread::sleep(left);
    }

    /// Waits for the end of the scenario.
    pub fn wait_until_over(&self) {
        self.wait_until(self.over_s);
    }
}

/// An event of a link, as the lab carried it out.
#[derive(Clone, Debug)]
struct LinkMoment {
    link: String,
    planned_s: f64,
    at_s: f64,
}

/// How long threads had waited for a processor, by the time of the scenario.
pub struct WaitLog(Vec<(f64, Duration)>);

impl WaitLog {
    /// How long threads waited for a processor in a part of the scenario, all together.
    pub fn waited_ms(&self, from_s: f64, to_s: f64) -> f64 {
        let before = self.0.iter().rev().find(|(at, _)| *at <= from_s);
        let after = self.0.iter().find(|(at, _)| *at >= to_s);
        let (Some((_, before)), Some((_, after))) = (before, after) else {
            return 0.0;
        };
        after.saturating_sub(*before).as_secs_f64() * 1e3
    }
}

/// A lab with a proxy, and a device with a VPN.
pub struct LabVpn {
    pub home: TempDir,
    pub world: World,
    pub clock: Arc<ScenarioClock>,
    moments: Arc<Mutex<Vec<LinkMoment>>>,
    waits: Option<JoinHandle<WaitLog>>,
    /// When the VPN was up.
    pub up_s: f64,
    proxy: Child,
    vpn: Child,
}

impl LabVpn {
    /// Builds the lab of a scenario, has `prepare` start servers in it, begins the scenario's time, and brings the VPN up with
    /// more options.
    pub async fn start<T>(
        text: &str,
        options: &[&str],
        prepare: impl FnOnce(&World, &Path) -> T,
    ) -> (LabVpn, T) {
        sh(&format!(
            "mount -t tmpfs t /run
             echo nameserver {} >/run/resolv.conf
             mount --bind /run/resolv.conf /etc/resolv.conf",
            plan::ORIGIN_V4
        ));
        let scenario = Scenario::parse("scenario", text, &mut |_| unreachable!("no traces"));
        let scenario = scenario.expect("a scenario");
        let over_s = scenario.duration_s;
        let links = scenario.links.iter();
        let classes: Vec<String> = links
            .map(|link| format!("{}={}", link.name, link.class.word()))
            .collect();
        let home = tempfile::tempdir().expect("a directory");
        let mut world = World::build(scenario).expect("a lab");
        let prepared = prepare(&world, home.path());

        let device = device_key(home.path()).await;
        run(home.path(), &["key", "gen", "-o", "prox.key"]).await;
        let listen = format!("{}:{}", plan::PROXY_V4, plan::PROXY_PORTS[0]);
        let words = [
            &["prox", "--listen", &listen, "--key", "prox.key"][..],
            &["--allow-private", "--allow-client", &device],
            &["--state-dir", "proxy", "--tunnel-net", "10.83.0.0/16"],
        ];
        let (proxy, address) = spawn_cedos(world.proxy(), home.path(), &words.concat());

        let clock = Arc::new(ScenarioClock {
            began: Instant::now(),
            over_s,
        });
        let moments = Arc::new(Mutex::new(Vec::new()));
        let (noted, noting) = (moments.clone(), clock.clone());
        let note = move |event: &WorldEvent| {
            if event.event.kind != EventKind::Attaching {
                noted.lock().expect("no panic").push(LinkMoment {
                    link: event.link.clone(),
                    planned_s: event.event.at.as_secs_f64(),
                    at_s: noting.now_s(),
                });
            }
        };
        world.start(note).expect("its time begins");

        let mut words = vec!["vpn", "up", "--prox", &address, "--state-dir", "vpn"];
        words.extend(classes.iter().flat_map(|class| ["--link", class]));
        words.extend(options);
        let (vpn, _) = spawn_cedos(world.device(), home.path(), &words);
        let lab = LabVpn {
            waits: Some(note_waits(clock.clone(), [proxy.id(), vpn.id()])),
            up_s: clock.now_s(),
            home,
            world,
            clock,
            moments,
            proxy,
            vpn,
        };
        (lab, prepared)
    }

    /// When an event of the scenario was carried out.
    pub fn moment(&self, link: &str, planned_s: f64) -> f64 {
        let moments = self.moments.lock().expect("no panic");
        let found = moments
            .iter()
            .find(|moment| moment.link == link && (moment.planned_s - planned_s).abs() < 0.01);
        found
            .unwrap_or_else(|| panic!("no event of {link} at {planned_s} s: {moments:?}"))
            .at_s
    }

    /// How long threads of this test, of the VPN and of the proxy waited for a processor. After the end of the scenario.
    pub fn waits(&mut self) -> WaitLog {
        let waits = self.waits.take().expect("asked for once");
        waits.join().expect("no panic")
    }

    /// Runs a part of the test on a thread of the device. Its result comes through the channel.
    pub fn on_device<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ScenarioClock) -> T + Send + 'static,
    ) -> Receiver<T> {
        self.start_in(self.world.device(), work)
    }

    /// Runs a part of the test on a thread of the server.
    pub fn on_server<T: Send + 'static>(
        &self,
        work: impl FnOnce(&ScenarioClock) -> T + Send + 'static,
    ) -> Receiver<T> {
        self.start_in(self.world.origin(), work)
    }

    fn start_in<T: Send + 'static>(
        &self,
        namespace: &Namespace,
        work: impl FnOnce(&ScenarioClock) -> T + Send + 'static,
    ) -> Receiver<T> {
        let (tell, told) = channel();
        let clock = self.clock.clone();
        let started = namespace.thread("part", move || drop(tell.send(work(&clock))));
        started.expect("started");
        told
    }

    /// Ends the VPN and the proxy. Returns what the VPN wrote to its log.
    pub fn end(mut self) -> String {
        assert_eq!(self.world.fault(), None);
        for child in [&mut self.vpn, &mut self.proxy] {
            let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM);
            let _ = child.wait();
        }
        std::fs::read_to_string(self.home.path().join("vpn.log")).unwrap_or_default()
    }
}

/// What a part of the test found.
pub fn found<T>(name: &str, from: &Receiver<T>) -> T {
    let found = from.recv_timeout(Duration::from_secs_f64(END_WITHIN_S * 3.0));
    found.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Starts `cedos` in a namespace, and returns it with the last word of the first line that it prints.
fn spawn_cedos(namespace: &Namespace, home: &Path, words: &[&str]) -> (Child, String) {
    let log = home.join(words[0]).with_extension("log");
    let mut command = cedos(home, words).into_std();
    command.stderr(File::create(&log).expect("a file"));
    let mut child = namespace.spawn(command).expect("started");
    let mut lines = BufReader::new(child.stdout.take().expect("its output"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("text");
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    let word = line.split_whitespace().last();
    let word = word.unwrap_or_else(|| panic!("it ends: {}", said()));
    let word = word.to_owned();
    // What it prints later is read, so that it never waits.
    std::thread::spawn(move || for _ in lines.lines() {});
    (child, word)
}

/// Notes until the end of the scenario how long threads of this test and of these processes wait for a processor.
fn note_waits(clock: Arc<ScenarioClock>, processes: [u32; 2]) -> JoinHandle<WaitLog> {
    std::thread::spawn(move || {
        let wait = ProcessorWait::of(&processes.map(|id| Pid::from_raw(id as i32)));
        let mut waits = Vec::new();
        while !clock.is_over() {
            waits.push((clock.now_s(), wait.so_far()));
            clock.wait_until(clock.now_s() + NOTE_WAITS_EVERY_S);
        }
        WaitLog(waits)
    })
}
