//! A bridge that is not spared: noise, half frames, a device that is unplugged again and again, and a mobile that talks without pause.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cedos_lab_rig::serial::{PluggedCable, PseudoTerminal};
use d2tp_serial::{Bridge, BridgeCounts, BridgeEvent, MobileStation, SerialLine};
use tokio::net::UdpSocket;
use tokio::task::JoinHandle;

/// Bytes per second of the cable.
const RATE: u64 = 20_000;
/// The noise on the cable changes one byte in so many.
const NOISE_ONE_IN: u64 = 3_000;
/// How long the device stays plugged in.
const PLUGGED: Duration = Duration::from_secs(20);
/// How long the device stays away once it is unplugged.
const UNPLUGGED: Duration = Duration::from_millis(500);
/// How long a mobile waits for an answer: several turns of all, on a busy machine.
const ANSWER: Duration = Duration::from_secs(6);
/// Mobiles that ask and wait for answers.
const ASKERS: usize = 3;

/// Held by a soak: it counts what its process has open.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Questions of mobiles, and answers to them.
#[derive(Default)]
struct AskedCounts {
    asked: AtomicU64,
    answered: AtomicU64,
}

async fn echo() -> SocketAddr {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    tokio::spawn(async move {
        let mut buffer = [0; 2_000];
        loop {
            if let Ok((n, from)) = socket.recv_from(&mut buffer).await {
                let _ = socket.send_to(&buffer[..n], from).await;
            }
        }
    });
    address
}

/// Plugs a new device in at this place, with a cable to `far` whose noise begins with this number.
fn plug_in(place: &Path, far: &PseudoTerminal, noise: u64) -> (PseudoTerminal, PluggedCable) {
    let near = PseudoTerminal::open();
    let _ = std::fs::remove_file(place);
    std::os::unix::fs::symlink(&near.device, place).unwrap();
    let mut seed = noise;
    let cable = PluggedCable::plug([&near, far], RATE, move |bytes| {
        for n in 0..bytes.len() {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            match (noise > 0).then_some((seed >> 33) % (4 * NOISE_ONE_IN)) {
                // A flipped bit, a byte that is missing, one that nobody sent.
                Some(0 | 1) => bytes[n] ^= 0x20,
                Some(2) => {
                    bytes.remove(n);
                }
                Some(3) => bytes.insert(n, 0x7e),
                _ => continue,
            }
            return;
        }
    });
    (near, cable)
}

/// Asks and waits for the answer, again and again.
fn ask(mut mobile: MobileStation, number: u8, counts: Arc<AskedCounts>) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut n = 0_u32;
        loop {
            n += 1;
            let mut question = vec![0x40, number];
            question.extend(n.to_be_bytes());
            question.resize(60 + usize::from(number) * 100, number);
            mobile.sender().send(&question);
            counts.asked.fetch_add(1, Ordering::Relaxed);
            let answer = async {
                while let Some(got) = mobile.recv().await {
                    assert_eq!((got[0], got[1]), (0x40, number), "another mobile's answer");
                    if got == question {
                        return true;
                    }
                }
                false
            };
            if tokio::time::timeout(ANSWER, answer).await == Ok(true) {
                counts.answered.fetch_add(1, Ordering::Relaxed);
            }
            // sleep: a mobile that asks now and then
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Resident bytes of this process.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|text| text.parse::<u64>().ok());
    pages.unwrap() * 4_096
}

/// The bridge for so long; `options` are those of its line.
async fn soak(time: Duration, options: &str) {
    let _alone = ALONE.lock().await;
    let server = echo().await;
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("ttyUSB0");
    let far = PseudoTerminal::open();
    let mut plugged = plug_in(&place, &far, 1);
    let named = |device: &Path, options: &str| -> SerialLine {
        let name = format!("serial:{}@115200{options}", device.display());
        name.parse().unwrap()
    };
    let mut bridge = Bridge::open(named(&place, options), vec![server]).unwrap();
    let (told, opened) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counted = opened.clone();
    let last = Arc::new(std::sync::Mutex::new(BridgeCounts::default()));
    let (kept, gone) = (last.clone(), told.clone());
    let runs = tokio::spawn(async move {
        bridge
            .run(|counts, event| {
                *kept.lock().unwrap() = *counts;
                match event {
                    BridgeEvent::LineOpen => counted.fetch_add(1, Ordering::Relaxed),
                    BridgeEvent::LineGone { .. } => gone.fetch_add(1, Ordering::Relaxed),
                    BridgeEvent::Answered { .. } => 0,
                };
            })
            .await;
    });
    let at_mobiles = named(
        &far.device,
        if options.is_empty() {
            ""
        } else {
            ",half-duplex"
        },
    );
    let counts = Arc::new(AskedCounts::default());
    let mut tasks = Vec::new();
    for number in 0..ASKERS {
        let mobile = MobileStation::attach(&at_mobiles).unwrap();
        tasks.push(ask(mobile, number as u8, counts.clone()));
    }
    let loud = MobileStation::attach(&at_mobiles).unwrap();
    let talker = loud.sender();
    tasks.push(tokio::spawn(async move {
        loop {
            talker.send(&[0x40; 900]);
            // sleep: more than the line carries, and not all of this host's time
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }));
    let (descriptors, began) = (open_descriptors(), Instant::now());
    let mut settled = None;
    let mut noise = 1;
    while began.elapsed() < time {
        // sleep: the device is plugged in for this long
        tokio::time::sleep(PLUGGED).await;
        settled.get_or_insert_with(resident_bytes);
        drop(plugged);
        // sleep: and away for this long
        tokio::time::sleep(UNPLUGGED).await;
        noise += 2;
        plugged = plug_in(&place, &far, noise);
    }
    // At last without noise: everything that is asked is answered again.
    drop(plugged);
    let _plugged = plug_in(&place, &far, 0);
    // sleep: the bridge looks for the device each second
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = (
        counts.asked.load(Ordering::Relaxed),
        counts.answered.load(Ordering::Relaxed),
    );
    // sleep: some questions and answers
    tokio::time::sleep(2 * ANSWER).await;
    let asked = counts.asked.load(Ordering::Relaxed);
    let answered = counts.answered.load(Ordering::Relaxed);
    assert!(tasks.iter().all(|task| !task.is_finished()) && !runs.is_finished());
    let (asked_since, answered_since) = (asked - before.0, answered - before.1);
    let line = last.lock().unwrap().line;
    let grown = resident_bytes().saturating_sub(settled.unwrap());
    println!(
        "{answered} of {asked} answered, {answered_since} of {asked_since} after the noise; {} times unplugged; {grown} bytes more; {line}",
        told.load(Ordering::Relaxed),
    );
    // One of each mobile may be under way.
    assert!(answered_since + ASKERS as u64 >= asked_since && answered_since > 0);
    assert!(answered * 2 > asked, "{answered} of {asked}");
    assert_eq!(
        opened.load(Ordering::Relaxed),
        told.load(Ordering::Relaxed) + 1
    );
    assert!(line.noise > 0);
    // One more terminal, its cable, and what the bridge opens for them.
    assert!(
        open_descriptors() <= descriptors + 6,
        "{} and {descriptors}",
        open_descriptors()
    );
    assert!(grown < 16 << 20, "{grown} bytes");
    runs.abort();
    tasks.iter().for_each(|task| task.abort());
}

/// The time of a long soak: half an hour, or what the variable says.
fn long() -> Duration {
    let seconds = std::env::var("CEDOS_SOAK_SECONDS").ok();
    let seconds = seconds.and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(1_800))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bridge_lives_through_noise_unplugging_and_a_mobile_that_talks_without_pause() {
    soak(Duration::from_secs(18), "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half an hour"]
async fn a_bridge_lives_through_half_an_hour_of_noise_and_unplugging() {
    soak(long(), "").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half an hour"]
async fn a_bridge_that_polls_lives_through_half_an_hour_of_noise_and_unplugging() {
    soak(long(), ",polled").await;
}
