//! Unreliable datagrams between a device and a server, over links that the test provides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use crate::support::{active, at, device, flow, server, wifi};
use bytes::Bytes;
use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    DATAGRAMS_MAX, DatagramError, DatagramSource, PathSelection, ProvidedLink, ProvidedLinks,
    SourcedDatagram,
};
use d2tp_links::CostClass;

const LONG: Duration = Duration::from_secs(600);

#[tokio::test]
async fn datagrams_go_both_ways_whole_and_in_their_context() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (_near, far) = flow(&device, &server).await;
    let (here, there) = (device.connection(), far.connection());
    let largest = here.datagram_max().unwrap();
    assert!(largest >= 1_100, "{largest}");
    let bytes = Bytes::from(vec![7; largest]);
    here.send_datagram_on(PathSelection::Any, 9, bytes.clone(), LONG)
        .unwrap();
    let got = within(there.recv_datagram()).await.unwrap();
    assert_eq!((got.context, got.bytes), (9, bytes));
    there
        .send_datagram(Bytes::from_static(b"back"), LONG)
        .unwrap();
    let got = within(here.recv_datagram()).await.unwrap();
    assert_eq!((got.context, &got.bytes[..]), (0, &b"back"[..]));
    assert_eq!(here.datagram_stats().unwrap().0.sent, 1);
    assert_eq!(server.connections().len(), 1);
    let too_big = here.send_datagram(Bytes::from(vec![0; 65_000]), LONG);
    let max = here.datagram_max().unwrap();
    assert_eq!(too_big, Err(DatagramError::TooBig { bytes: 65_000, max }));
}

#[tokio::test]
async fn without_a_network_the_newest_wait_and_what_expires_never_leaves() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (_near, far) = flow(&device, &server).await;
    let (here, there) = (device.connection(), far.connection());
    links.remove("wifi");
    until("no path is left", || device.paths().is_empty()).await;
    // They expire before any path can carry them.
    for _ in 0..3 {
        here.send_datagram(Bytes::from_static(b"late"), Duration::ZERO)
            .unwrap();
    }
    for n in 0..DATAGRAMS_MAX as u8 {
        here.send_datagram(vec![n].into(), LONG).unwrap();
    }
    assert_eq!(here.datagram_stats().unwrap().0.displaced, 3, "the oldest");
    here.send_datagram(Bytes::from_static(b"late"), Duration::ZERO)
        .unwrap();
    links.add(wifi(3));
    // Loopback loses no datagram that fits into its buffers.
    for n in 1..DATAGRAMS_MAX as u8 {
        assert_eq!(&within(there.recv_datagram()).await.unwrap().bytes[..], [n]);
    }
    until("the late one is given up", || {
        here.datagram_stats().unwrap().0.expired == 1
    })
    .await;
    let stats = here.datagram_stats().unwrap().0;
    assert_eq!(stats.sent, DATAGRAMS_MAX as u64 - 1);
    assert_eq!(stats.displaced, 4);
}

/// Numbers, as datagrams, up to `end`.
#[derive(Default)]
struct Numbers {
    next: AtomicU32,
    end: AtomicU32,
    has_path: AtomicBool,
}

impl DatagramSource for Numbers {
    fn take(&self, max: usize, count: usize, datagrams: &mut Vec<SourcedDatagram>) {
        assert!(max >= 1_000, "{max}");
        assert!(
            self.has_path.load(Ordering::Relaxed),
            "asked without a path"
        );
        let next = self.next.load(Ordering::Relaxed);
        let end = self.end.load(Ordering::Relaxed);
        let end = end.min(next + u32::try_from(count).unwrap());
        datagrams.extend((next..end).map(|number| SourcedDatagram {
            context: 5,
            bytes: number.to_be_bytes().to_vec().into(),
            expiry: LONG,
            acknowledges: false,
        }));
        self.next.store(end, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn a_source_keeps_what_a_session_has_no_room_for_and_all_of_it_leaves_in_order() {
    const ALL: u32 = 200; // more than a session holds, and fewer than an unread inbox
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (_near, far) = flow(&device, &server).await;
    let (here, there) = (device.connection(), far.connection());
    links.remove("wifi");
    until("no path is left", || device.paths().is_empty()).await;
    let numbers = Arc::new(Numbers::default());
    here.set_datagram_source(numbers.clone());
    numbers.end.store(ALL, Ordering::Relaxed);
    here.datagrams_ready();
    assert!(!here.carries_datagrams());
    numbers.has_path.store(true, Ordering::Relaxed);
    links.add(wifi(3));
    for number in 0..ALL {
        let got = within(there.recv_datagram()).await.unwrap();
        assert!(here.carries_datagrams());
        assert_eq!(
            (got.context, &got.bytes[..]),
            (5, &number.to_be_bytes()[..])
        );
    }
    let stats = here.datagram_stats().unwrap().0;
    assert_eq!((stats.sent, stats.displaced), (u64::from(ALL), 0));
    // What comes later is sent when the source says so.
    numbers.end.store(ALL + 1, Ordering::Relaxed);
    here.datagrams_ready();
    let got = within(there.recv_datagram()).await.unwrap();
    assert_eq!(&got.bytes[..], &ALL.to_be_bytes()[..]);
}

#[tokio::test]
async fn a_gated_path_takes_no_datagram_and_a_switch_to_a_free_one_lets_it_go() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (near, far) = flow(&device, &server).await;
    let (here, there) = (device.connection(), far.connection());
    // The flow may pay, so the metered link gets a path; datagrams may not.
    device.allow_paid(&near, true, Some(1 << 20));
    links.add(ProvidedLink::new("cell", at(4)).with_class(CostClass::Metered));
    until("the metered link answers", || {
        !active(&device, "cell").is_empty()
    })
    .await;
    links.remove("wifi");
    until("only it is left", || device.paths().len() == 1).await;
    here.send_datagram(Bytes::from_static(b"waits"), LONG)
        .unwrap();
    // A flow's bytes are carried meanwhile: the path works, but not for datagrams.
    drop(near);
    until("the flow's end got through", || far.end().is_some()).await;
    assert_eq!(here.datagram_stats().unwrap().0.sent, 0);
    links.add(wifi(3));
    let got = within(there.recv_datagram()).await.unwrap();
    assert_eq!(&got.bytes[..], b"waits");
}

#[tokio::test]
async fn datagrams_move_to_another_link_with_the_session() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (_near, far) = flow(&device, &server).await;
    let (here, there) = (device.connection(), far.connection());
    here.send_datagram(Bytes::from_static(b"one"), LONG)
        .unwrap();
    assert_eq!(
        &within(there.recv_datagram()).await.unwrap().bytes[..],
        b"one"
    );
    links.add(ProvidedLink::new("other", at(5)));
    until("the other link answers", || {
        !active(&device, "other").is_empty()
    })
    .await;
    links.remove("wifi");
    until("the first is gone", || device.paths().len() == 1).await;
    here.send_datagram(Bytes::from_static(b"two"), LONG)
        .unwrap();
    assert_eq!(
        &within(there.recv_datagram()).await.unwrap().bytes[..],
        b"two"
    );
    there
        .send_datagram(Bytes::from_static(b"three"), LONG)
        .unwrap();
    assert_eq!(
        &within(here.recv_datagram()).await.unwrap().bytes[..],
        b"three"
    );
}

#[tokio::test]
async fn a_reader_hears_of_the_sessions_end() {
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    let (_near, far) = flow(&device, &server).await;
    let there = far.connection();
    let reading = tokio::spawn({
        let there = there.clone();
        async move { there.recv_datagram().await }
    });
    device.close().await;
    assert_eq!(within(reading).await.unwrap(), None);
    let refused = there.send_datagram(Bytes::new(), LONG);
    assert!(
        matches!(refused, Err(DatagramError::SessionEnded(_))),
        "{refused:?}"
    );
}

#[tokio::test]
async fn one_for_each_path_leaves_by_both_links_and_is_read_once() {
    // R-COPY-1, R-COPY-2
    let (server, links) = (server(), ProvidedLinks::new());
    let device = device(&server, &links, links.clone()).await;
    links.add(wifi(2));
    links.add(ProvidedLink::new("dock", at(3)));
    let (_near, far) = flow(&device, &server).await;
    until("both answer", || {
        active(&device, "wifi").len() == 1 && active(&device, "dock").len() == 1
    })
    .await;
    let (here, there) = (device.connection(), far.connection());
    for n in 0..20 {
        here.send_datagram_on(PathSelection::Each, 5, vec![n].into(), LONG)
            .unwrap();
    }
    for n in 0..20 {
        let got = within(there.recv_datagram()).await.unwrap();
        assert_eq!((got.context, &got.bytes[..]), (5, &[n][..]));
    }
    let stats = || here.datagram_stats().unwrap().0;
    until("the copies left", || stats().copies_sent == 20).await;
    let far_stats = || there.datagram_stats().unwrap().0;
    until("the copies came", || far_stats().copies_received == 20).await;
    assert_eq!((stats().sent, far_stats().received), (20, 20));
}
