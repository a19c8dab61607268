//! A device's reactions to signs of its links: a carrier that is lost and returns, a first hop that
//! answers or does not, failures that a radio counts, and links that the application freezes.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{active, at, device, device_by_way_of, flow, server, wifi};
use cedos_lab_rig::processor_wait::ProcessorWait;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Attach, Attachment, Device, Flow, PathState, ProvidedLink, ProvidedLinks, SessionEvent,
};
use d2tp_links::{Link, LinkKind, LinkProbe, ProbeFuture, StationStats};
use d2tp_udp::BindError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// The state of the path over a device's link with this name.
fn state(device: &Device, name: &str) -> Option<PathState> {
    let ways = device.link_statuses();
    let way = ways.into_iter().find(|way| way.name == name)?;
    Some(way.path?.state)
}

fn ids(device: &Device) -> Vec<u32> {
    device.paths().iter().map(|path| path.id.0).collect()
}

async fn carries(near: &mut Flow, far: &mut Flow, word: &[u8]) {
    near.write_all(word).await.unwrap();
    let mut got = vec![0; word.len()];
    within(far.read_exact(&mut got)).await.unwrap();
    assert_eq!(got, word);
}

#[tokio::test]
async fn a_carrier_that_comes_back_finds_its_path_as_it_was() {
    // R-HOP-3
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    links.add(ProvidedLink::new("dock", at(3)));
    let (mut near, mut far) = flow(&device, &server).await;
    within(far.read_u8()).await.unwrap();
    until("both answer", || {
        active(&device, "wifi").len() == 1 && active(&device, "dock").len() == 1
    })
    .await;
    let before = ids(&device);
    links.set_carrier("wifi", false);
    until("it is frozen", || {
        device.paths().iter().any(|p| p.state == PathState::Silent)
    })
    .await;
    carries(&mut near, &mut far, b"by the other").await;
    links.set_carrier("wifi", true);
    until("it answers", || {
        state(&device, "wifi") == Some(PathState::Active)
    })
    .await;
    assert_eq!(ids(&device), before, "no path was opened or given up");
}

#[tokio::test]
async fn a_carrier_that_comes_back_under_another_address_is_another_path() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    within(far.read_u8()).await.unwrap();
    until("it answers", || !active(&device, "wifi").is_empty()).await;
    let before = ids(&device);
    links.set_carrier("wifi", false);
    until("it is frozen", || {
        device.paths().iter().any(|p| p.state == PathState::Silent)
    })
    .await;
    links.add(wifi(4));
    until("another path answers", || {
        state(&device, "wifi") == Some(PathState::Active)
    })
    .await;
    assert_ne!(ids(&device), before);
    carries(&mut near, &mut far, b"here").await;
}

#[tokio::test]
async fn a_link_is_left_alone_from_freeze_to_thaw() {
    // R-HOP-3
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    within(far.read_u8()).await.unwrap();
    until("it answers", || !active(&device, "wifi").is_empty()).await;
    let before = ids(&device);
    device.freeze("wifi");
    until("it is frozen", || {
        state(&device, "wifi") == Some(PathState::Silent)
    })
    .await;
    let sent = device.link_statuses()[0].path.as_ref().unwrap().control_out;
    near.write_all(b"later").await.unwrap();
    let mut got = [0; 5];
    let early = tokio::time::timeout(Duration::from_millis(300), far.read_exact(&mut got));
    assert!(early.await.is_err(), "it came");
    assert_eq!(
        device.link_statuses()[0].path.as_ref().unwrap().control_out,
        sent
    );
    device.unfreeze("wifi");
    within(far.read_exact(&mut got)).await.unwrap();
    assert_eq!((&got, ids(&device)), (b"later", before));
}

/// A probe of provided links with results that the test sets.
struct AttachWithProbe {
    links: Arc<ProvidedLinks>,
    signs: Arc<FakeProbe>,
}

#[derive(Default)]
struct FakeProbe {
    answers: AtomicBool,
    asked: AtomicU32,
    read: AtomicU32,
    station: Mutex<Option<StationStats>>,
}

impl LinkProbe for FakeProbe {
    fn probe_first_hop<'a>(&'a self, _: &'a Link) -> ProbeFuture<'a, Option<bool>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let answers = self.answers.load(Ordering::SeqCst);
        Box::pin(std::future::ready(Some(answers)))
    }

    fn station_stats<'a>(&'a self, _: &'a Link) -> ProbeFuture<'a, Option<StationStats>> {
        self.read.fetch_add(1, Ordering::SeqCst);
        let station = *self.station.lock().unwrap();
        Box::pin(std::future::ready(station))
    }
}

impl Attach for AttachWithProbe {
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        self.links.attach(link, servers)
    }

    fn link_probe(&self) -> Arc<dyn LinkProbe> {
        self.signs.clone()
    }
}

/// A server behind a link that can be cut, and a device on it whose first hop has answered.
struct HopFixture {
    device: Device,
    near: Flow,
    _far: Flow,
    _server: d2tp_driver::Server,
    signs: Arc<FakeProbe>,
    /// Whether no datagram passes.
    cut: Arc<AtomicBool>,
    /// How often the first hop had been asked when the link failed.
    asked_before: u32,
}

impl HopFixture {
    async fn new() -> HopFixture {
        let (server, links) = (server(), ProvidedLinks::new());
        let cut = Arc::new(AtomicBool::new(false));
        let port = relay(server.local_addr(), cut.clone());
        let signs = Arc::new(FakeProbe::default());
        signs.answers.store(true, Ordering::SeqCst);
        *signs.station.lock().unwrap() = Some(StationStats::default());
        let attach = Arc::new(AttachWithProbe {
            links: links.clone(),
            signs: signs.clone(),
        });
        let device = device_by_way_of(port, &server, &links, attach).await;
        links.add(ProvidedLink {
            kind: LinkKind::Wifi,
            ..wifi(2)
        });
        let (near, mut far) = flow(&device, &server).await;
        within(far.read_u8()).await.unwrap();
        until("its first hop was asked", || {
            signs.asked.load(Ordering::SeqCst) >= 1
        })
        .await;
        HopFixture {
            asked_before: 0,
            device,
            near,
            _far: far,
            _server: server,
            signs,
            cut,
        }
    }

    /// Cuts the link, and sets whether the first hop answers; then sends data.
    async fn fail(&mut self, answers: bool) {
        self.asked_before = self.asked();
        self.signs.answers.store(answers, Ordering::SeqCst);
        self.cut.store(true, Ordering::SeqCst);
        self.near.write_all(&[9; 50_000]).await.unwrap();
    }

    fn asked(&self) -> u32 {
        self.signs.asked.load(Ordering::SeqCst)
    }

    fn window(&self) -> u64 {
        self.device.paths()[0].window
    }

    /// The path fell silent, and answers again.
    async fn comes_back(&self) {
        until("it is silent", || {
            state(&self.device, "wifi") == Some(PathState::Silent)
        })
        .await;
        // The first hop's answer may arrive after that of the probes.
        until("its first hop was asked", || {
            self.asked() > self.asked_before
        })
        .await;
        // sleep: a task reads the answer of the first hop, and signals nothing
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.cut.store(false, Ordering::SeqCst);
        until("it answers", || {
            state(&self.device, "wifi") == Some(PathState::Active)
        })
        .await;
    }
}

/// Forwards datagrams with a delay of 50 ms until it is cut, as long as the test runs.
fn relay(server: SocketAddr, cut: Arc<AtomicBool>) -> u16 {
    const DELAY: Duration = Duration::from_millis(50);
    let near = UdpSocket::bind("127.0.0.1:0").unwrap();
    let far = UdpSocket::bind("127.0.0.1:0").unwrap();
    far.connect(server).unwrap();
    let port = near.local_addr().unwrap().port();
    let device: Arc<Mutex<Option<SocketAddr>>> = Arc::default();
    for (from, to, to_server) in [
        (near.try_clone(), far.try_clone(), true),
        (Ok(far), Ok(near), false),
    ] {
        let (from, to, cut) = (from.unwrap(), to.unwrap(), cut.clone());
        let (device, device_too) = (device.clone(), device.clone());
        let (flying, landing) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
        std::thread::spawn(move || {
            let mut buffer = [0; 65_536];
            loop {
                // A server that has stopped refuses packets; the thread ends with the process.
                let Ok((n, sender)) = from.recv_from(&mut buffer) else {
                    continue;
                };
                if to_server {
                    *device.lock().unwrap() = Some(sender);
                }
                let _ = flying.send((Instant::now() + DELAY, buffer[..n].to_vec()));
            }
        });
        std::thread::spawn(move || {
            for (at, bytes) in landing {
                // sleep: this is the delay of the emulated link
                std::thread::sleep(at.saturating_duration_since(Instant::now()));
                let to_device = *device_too.lock().unwrap();
                if cut.load(Ordering::SeqCst) {
                    continue;
                }
                let _ = match to_device.filter(|_| !to_server) {
                    Some(device) => to.send_to(&bytes, device),
                    None => to.send(&bytes),
                };
            }
        });
    }
    port
}

/// The time from quiet to silent, and how long a thread waited for a processor in it.
async fn hesitates(answers: bool) -> (Duration, Duration) {
    let mut way = HopFixture::new().await;
    way.near.write_all(&[7; 200_000]).await.unwrap();
    until("it arrived", || way.near.acknowledged() == 200_001).await;
    let mut events = way.device.events();
    let window = way.window();
    way.fail(answers).await;
    while !matches!(
        within(events.recv()).await,
        Ok((_, SessionEvent::PathQuiet { .. }))
    ) {}
    let (wait, quiet) = (ProcessorWait::of(&[]), Instant::now());
    until("it is silent", || {
        state(&way.device, "wifi") == Some(PathState::Silent)
    })
    .await;
    let hesitated = (quiet.elapsed(), wait.longest());
    way.comes_back().await;
    if !answers {
        assert!(way.window() >= window, "{} of {window}", way.window());
    }
    hesitated
}

#[tokio::test]
async fn a_hole_in_the_air_freezes_at_once_and_a_fault_further_on_is_left_to_probes() {
    // R-HOP-1, R-HOP-2
    let ((hole, waited), (fault, _)) = (hesitates(false).await, hesitates(true).await);
    // Two probe timeouts of a path of 100 ms, one of which has passed.
    assert!(
        hole.saturating_sub(waited) + Duration::from_millis(100) < fault,
        "{hole:?}, {waited:?} of it for a processor, {fault:?}"
    );
}

#[tokio::test]
async fn a_radio_that_counts_failures_has_its_first_hop_asked() {
    let mut way = HopFixture::new().await;
    // A path that hears nothing for a while, as on a busy machine, has its first hop asked, too.
    let mut events = way.device.events();
    let (before, mut quiet) = (way.asked(), 0);
    let mut asked_by_radio = |way: &HopFixture| {
        let asked = way.asked();
        while let Ok((_, event)) = events.try_recv() {
            quiet += u32::from(matches!(event, SessionEvent::PathQuiet { .. }));
        }
        asked.saturating_sub(before + quiet)
    };
    let fails = |way: &HopFixture| way.signs.station.lock().unwrap().as_mut().unwrap().failed += 10;
    let radio_read = |way: &HopFixture| way.signs.read.load(Ordering::SeqCst);
    // Radios are read while payload moves.
    while radio_read(&way) < 3 {
        way.near.write_all(&[7; 1_000]).await.unwrap();
        // sleep: radios are read from time to time while payload moves
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(asked_by_radio(&way), 0, "nothing failed");
    while asked_by_radio(&way) == 0 {
        fails(&way);
        way.near.write_all(&[7; 1_000]).await.unwrap();
        // sleep: radios are read from time to time while payload moves
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The first hop answered, and so did the path.
    assert_eq!(state(&way.device, "wifi"), Some(PathState::Active));
}
