//! Mobiles that do not hear each other, on one air of pseudo-terminals.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use cedos_lab_rig::serial::{PseudoTerminal, shared_air};
use cedos_lab_rig::wait::PATIENCE;
use d2tp_serial::{MobileStation, SerialLine, SerialPort, StationAddress, StationRole};

/// Bytes per second of the air.
const RATE: u64 = 11_520;
/// How long mobiles are counted, once each has its turns.
const TIME: Duration = Duration::from_secs(12);

fn line(end: &PseudoTerminal, options: &str) -> SerialLine {
    let name = format!("serial:{}@115200{options}", end.device.display());
    name.parse().unwrap()
}

/// How long mobiles send before they are counted.
#[derive(Clone, Copy, PartialEq)]
enum Beginning {
    /// Until a packet of each has arrived: all are polled.
    AllHeard,
    /// Three seconds.
    Fixed,
}

/// Has three mobiles, which hear the bridge alone, send as much as they can. Returns the bytes of packets that arrived from
/// each, and the bridge's counters in words.
async fn sent_at_once(options: &str, beginning: Beginning) -> (Vec<usize>, String) {
    let air = shared_air(4, RATE, false);
    let (bridge, mut packets) =
        SerialPort::open(&line(&air[0], options), StationRole::Bridge).unwrap();
    let mobiles: Vec<MobileStation> = air[1..]
        .iter()
        .map(|end| MobileStation::attach(&line(end, options)).unwrap())
        .collect();
    let senders = mobiles.iter().zip([1_200, 600, 200]).map(|(mobile, size)| {
        let sender = mobile.sender();
        tokio::spawn(async move {
            loop {
                sender.send(&vec![7; size]);
                // sleep: more than the air carries, and not all of this host's time
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    });
    let senders: Vec<_> = senders.collect();
    let begun = Instant::now();
    let mut counted_from = match beginning {
        // Bridges invite seldom while they poll others, so a mobile may miss an invitation.
        Beginning::AllHeard => begun + PATIENCE,
        Beginning::Fixed => begun + Duration::from_secs(3),
    };
    let mut heard = BTreeSet::new();
    let mut bytes: BTreeMap<StationAddress, usize> = BTreeMap::new();
    loop {
        let until = counted_from + TIME;
        let Ok(Some(packet)) = tokio::time::timeout_at(until.into(), packets.recv()).await else {
            break;
        };
        assert!(packet.bytes.iter().all(|byte| *byte == 7));
        let now = Instant::now();
        if heard.insert(packet.address)
            && heard.len() == mobiles.len()
            && beginning == Beginning::AllHeard
        {
            counted_from = now;
        }
        if now >= counted_from {
            *bytes.entry(packet.address).or_default() += packet.bytes.len();
        }
    }
    senders.iter().for_each(|sender| sender.abort());
    let of = |mobile: &MobileStation| bytes.get(&mobile.address()).copied().unwrap_or(0);
    (
        mobiles.iter().map(of).collect(),
        bridge.counts().to_string(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn polled_mobiles_that_do_not_hear_each_other_have_equal_shares_of_most_of_the_air() {
    let (bytes, counts) = sent_at_once(",polled", Beginning::AllHeard).await;
    let all: usize = bytes.iter().sum();
    println!("{bytes:?}: {counts}");
    let air = RATE as usize * TIME.as_secs() as usize;
    assert!(all > air / 2, "{bytes:?} of {air}: {counts}");
    for share in &bytes {
        let share = *share as f64 * 3.0 / all as f64;
        assert!((0.7..1.4).contains(&share), "{bytes:?}: {counts}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_polls_they_destroy_most_of_what_they_send() {
    let (bytes, counts) = sent_at_once(",half-duplex", Beginning::Fixed).await;
    let all: usize = bytes.iter().sum();
    println!("{bytes:?}: {counts}");
    let air = RATE as usize * TIME.as_secs() as usize;
    assert!(all < air / 4, "{bytes:?} of {air}: {counts}");
}
