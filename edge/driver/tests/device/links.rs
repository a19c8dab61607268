//! Links of a device that appear, disappear, break and are renewed.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{active, at, device, flow, server, wifi};
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{Attach, Attachment, Flow, LinkUse, ProvidedLink, ProvidedLinks};
use d2tp_links::Link;
use d2tp_udp::{BindError, BindOptions, LinkSocket};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Sends a message and reads it at the other end.
async fn carries(near: &mut Flow, far: &mut Flow, word: &[u8]) {
    near.write_all(word).await.unwrap();
    let mut got = vec![0; word.len()];
    within(far.read_exact(&mut got)).await.unwrap();
    assert_eq!(got, word);
}

async fn past_the_mark(far: &mut Flow) {
    assert_eq!(within(far.read_u8()).await.unwrap(), b'!');
}

#[tokio::test]
async fn a_flow_moves_from_one_given_link_to_the_next() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    links.remove("wifi");
    until("nothing is left", || device.paths().is_empty()).await;
    near.write_all(b"kept").await.unwrap();
    links.add(wifi(3));
    let mut got = [0; 4];
    within(far.read_exact(&mut got)).await.unwrap();
    assert_eq!(&got, b"kept");
    let ways = device.link_statuses();
    assert_eq!((ways.len(), &*ways[0].name), (1, "wifi"));
    assert_eq!(ways[0].usage, LinkUse::Free);
}

#[tokio::test]
async fn a_socket_of_the_programs_own_carries_a_link() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    // No socket could be bound to the link's address: 192.0.2.1 is reserved for documentation.
    links.add(ProvidedLink {
        socket: Some(UdpSocket::bind("127.0.0.1:0").unwrap()),
        ..ProvidedLink::new("mine", "192.0.2.1".parse().unwrap())
    });
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    carries(&mut near, &mut far, b"through it").await;
}

#[tokio::test]
async fn when_told_of_another_network_every_link_gets_a_new_socket_and_flows_go_on() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    links.add(ProvidedLink::new("dock", at(3)));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    until("both answer", || {
        active(&device, "wifi").len() == 1 && active(&device, "dock").len() == 1
    })
    .await;
    let before = [active(&device, "wifi")[0], active(&device, "dock")[0]];
    device.network_changed();
    until("both answer on new sockets", || {
        ["wifi", "dock"].iter().zip(before).all(|(name, old)| {
            let now = active(&device, name);
            now.len() == 1 && now[0] != old
        })
    })
    .await;
    assert_eq!(device.paths().len(), 2, "the old paths are gone");
    carries(&mut near, &mut far, b"still here").await;
}

#[tokio::test]
async fn a_storm_of_changes_renews_once_and_once_more_after_it() {
    let (server, links) = (server(), ProvidedLinks::new());
    let counting = Arc::new(Counting::new(links.clone(), 0));
    let device = device(&server, &links, counting.clone()).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    until("it answers", || !active(&device, "wifi").is_empty()).await;
    let (before, begun) = (counting.asked(), std::time::Instant::now());
    for _ in 0..1_000 {
        device.network_changed();
    }
    let bound = || before + 1 + begun.elapsed().as_secs() as usize;
    let asked = counting.asked();
    assert!(asked <= bound(), "at most one a second");
    until("the last word is heeded too", || counting.asked() > asked).await;
    assert!(counting.asked() <= bound());
    carries(&mut near, &mut far, b"calm").await;
}

/// Provides sockets whose sends fail for the first `bad` times, then working ones.
struct Counting {
    links: Arc<ProvidedLinks>,
    bad: usize,
    asked: AtomicUsize,
}

impl Counting {
    fn new(links: Arc<ProvidedLinks>, bad: usize) -> Counting {
        Counting {
            links,
            bad,
            asked: AtomicUsize::new(0),
        }
    }
    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

impl Attach for Counting {
    fn attach(&self, link: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        let mut found = self.links.attach(link, servers)?;
        if self.asked.fetch_add(1, Ordering::SeqCst) < self.bad {
            for attachment in &mut found {
                // Broadcast without permission: the system refuses each send with EACCES.
                attachment.remote.set_ip("127.255.255.255".parse().unwrap());
            }
        }
        Ok(found)
    }
}

#[tokio::test]
async fn a_socket_whose_sends_keep_failing_is_replaced_but_not_in_a_spin() {
    let (server, links) = (server(), ProvidedLinks::new());
    let counting = Arc::new(Counting::new(links.clone(), 2));
    let device = device(&server, &links, counting.clone()).await;
    let begun = std::time::Instant::now();
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    carries(&mut near, &mut far, b"at last").await;
    let asked = counting.asked();
    assert!(asked >= 3, "{asked} sockets");
    // On any machine: a second for the first try, two for the next, and so on.
    let seconds = begun.elapsed().as_secs() as usize;
    assert!(asked <= seconds + 2, "{asked} sockets in {seconds} s");
}

/// A link with two address families, one of which leads nowhere.
struct Dual {
    silent: SocketAddr,
    silent_first: bool,
}

impl Attach for Dual {
    fn attach(&self, _: &Link, servers: &[SocketAddr]) -> Result<Vec<Attachment>, BindError> {
        let good = Attachment {
            socket: LinkSocket::bind(&BindOptions::at("127.0.0.2:0".parse().unwrap()))?,
            remote: servers[0],
        };
        let silent = Attachment {
            socket: LinkSocket::bind(&BindOptions::at("127.0.0.3:0".parse().unwrap()))?,
            remote: self.silent,
        };
        Ok(if self.silent_first {
            vec![silent, good]
        } else {
            vec![good, silent]
        })
    }
}

#[tokio::test]
async fn when_one_address_family_is_silent_the_other_carries_the_session() {
    // Takes datagrams and never answers.
    let hole = UdpSocket::bind("127.0.0.1:0").unwrap();
    for silent_first in [true, false] {
        let (server, links) = (server(), ProvidedLinks::new());
        let dual = Dual {
            silent: hole.local_addr().unwrap(),
            silent_first,
        };
        let device = device(&server, &links, Arc::new(dual)).await;
        links.add(wifi(2));
        let (mut near, mut far) = flow(&device, &server).await;
        past_the_mark(&mut far).await;
        until("one path is left, and answers", || {
            device.paths().len() == 1 && active(&device, "wifi").len() == 1
        })
        .await;
        assert_eq!(device.paths()[0].addresses.remote, server.local_addr());
        carries(&mut near, &mut far, b"by the other").await;
    }
}

#[tokio::test]
async fn the_time_in_which_payload_came_is_counted_and_the_time_between_is_not() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (mut near, mut far) = flow(&device, &server).await;
    past_the_mark(&mut far).await;
    let busy = || std::time::Duration::from(device.link_statuses()[0].busy);
    let begun = std::time::Instant::now();
    for word in 0..3 {
        carries(&mut far, &mut near, b"a word").await;
        until("it is counted", || {
            device.link_statuses()[0].payload.0 >= 6 * (word + 1)
        })
        .await;
        // sleep: the test is about time without data, which must not count
        tokio::time::sleep(std::time::Duration::from_millis(400)).await;
    }
    let counted = busy();
    assert!(!counted.is_zero());
    assert!(
        counted.as_secs_f64() < begun.elapsed().as_secs_f64() / 2.0,
        "{counted:?} of {:?}",
        begun.elapsed()
    );
    // What is sent may be in flight for long.
    carries(&mut near, &mut far, b"an answer").await;
    assert_eq!(busy(), counted);
}
