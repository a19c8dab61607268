//! Tests of the monitor with real links in their own network namespace.
//!
//! Each test runs itself again under `unshare -Urn`; if the system forbids that, it prints a
//! message and passes.

use cedos_lab_rig::namespace::{LINKS, in_namespace_with, sh};
use cedos_lab_rig::{PATIENCE, this_test};
use d2tp_links::{ClassRules, CostClass, Link, LinkEvent, LinkKind, LinkMonitor};

fn ip(arguments: &str) {
    sh(&format!("ip {arguments}"));
}

/// Takes events until `wanted` holds, and asserts that they lead from `known` to the latest
/// snapshot.
async fn until(
    monitor: &mut LinkMonitor,
    known: &mut Vec<Link>,
    what: &str,
    wanted: impl Fn(&LinkEvent) -> bool,
) -> LinkEvent {
    loop {
        let event = tokio::time::timeout(PATIENCE, monitor.next())
            .await
            .unwrap_or_else(|_| panic!("no event: {what}; links {:?}", monitor.links()))
            .expect("the monitor watches");
        known.retain(|link| link.index != event.link().index);
        if !matches!(event, LinkEvent::Vanished { .. }) {
            known.push(event.link().clone());
            known.sort_by_key(|link| link.index);
        }
        if wanted(&event) {
            return event;
        }
    }
}

#[test]
fn links_are_seen_to_come_and_go() {
    in_namespace_with(LINKS, this_test!(), || async {
        let rules = ClassRules {
            rules: vec!["wlan1=metered".parse().expect("a rule")],
        };
        let (mut known, mut monitor) = LinkMonitor::start(rules).await.expect("start");
        assert!(monitor.has_kernel_events());
        assert!(known.iter().all(|link| !link.is_usable()), "{known:?}");
        assert!(known.iter().any(|link| link.kind == LinkKind::Loopback));

        // A Wi-Fi comes up: device, address, route; usable only with all three.
        ip("link add wlan0 type veth peer name ap0");
        ip("link set ap0 up");
        ip("link set wlan0 up");
        ip("addr add 198.51.100.7/24 dev wlan0");
        ip("route add default via 198.51.100.1 dev wlan0 metric 600");
        let event = until(&mut monitor, &mut known, "wlan0 usable", |e| {
            e.link().name == "wlan0" && e.gained_use()
        })
        .await;
        let link = event.link();
        assert_eq!(
            (link.kind, link.class.class),
            (LinkKind::Wifi, CostClass::Free)
        );
        assert_eq!(
            link.addresses,
            ["198.51.100.7".parse::<std::net::IpAddr>().expect("address")]
        );
        assert_eq!(link.metric(), Some(600));
        assert!(link.mtu_bytes >= 1280);

        // A cellular link, IPv6 only.
        ip("link add wwan0 type veth peer name tower0");
        ip("link set tower0 up");
        ip("link set wwan0 up");
        if std::path::Path::new("/proc/sys/net/ipv6").exists() {
            ip("-6 addr add 2001:db8::7/64 dev wwan0 nodad");
            ip("-6 route add default dev wwan0 metric 700");
        } else {
            ip("addr add 203.0.113.7/24 dev wwan0");
            ip("route add default dev wwan0 metric 700");
        }
        let event = until(&mut monitor, &mut known, "wwan0 usable", |e| {
            e.link().name == "wwan0" && e.gained_use()
        })
        .await;
        assert_eq!(event.link().kind, LinkKind::Cellular);
        assert_eq!(event.link().class.class, CostClass::Metered);
        assert_eq!(
            event.link().source_addresses().count(),
            1,
            "link-local does not count"
        );

        // The access point goes away: carrier lost.
        ip("link set ap0 down");
        let event = until(&mut monitor, &mut known, "wlan0 without carrier", |e| {
            e.link().name == "wlan0" && e.lost_use()
        })
        .await;
        assert!(!event.link().carrier);
        assert_eq!(event.addresses_lost().len(), 1);

        // Another network, another address.
        ip("addr flush dev wlan0");
        ip("link set ap0 up");
        ip("addr add 203.0.113.99/24 dev wlan0");
        ip("route add default via 203.0.113.1 dev wlan0 metric 600");
        let event = until(&mut monitor, &mut known, "wlan0 with a new address", |e| {
            e.link().name == "wlan0" && e.link().is_usable()
        })
        .await;
        assert_eq!(event.link().addresses[0].to_string(), "203.0.113.99");

        // The device is removed.
        ip("link del wlan0");
        let event = until(
            &mut monitor,
            &mut known,
            "wlan0 gone",
            |e| matches!(e, LinkEvent::Vanished { link } if link.name == "wlan0"),
        )
        .await;
        assert!(event.lost_use());

        // A rule of the user holds for devices that come later.
        ip("link add wlan1 type veth peer name ap1");
        let event = until(&mut monitor, &mut known, "wlan1 there", |e| {
            e.link().name == "wlan1"
        })
        .await;
        assert_eq!(event.link().class.class, CostClass::Metered);
        assert!(event.link().class.because.contains("wlan1=metered"));

        // Applying the events to the first snapshot gives what a fresh reading finds.
        let rules = ClassRules {
            rules: vec!["wlan1=metered".parse().expect("a rule")],
        };
        let (fresh, _) = LinkMonitor::start(rules).await.expect("read again");
        while known != fresh {
            until(&mut monitor, &mut known, "the latest snapshot", |_| true).await;
        }
    });
}

#[test]
fn a_hint_from_outside_reads_again_and_an_idle_hint_makes_no_event() {
    in_namespace_with(LINKS, this_test!(), || async {
        let (_, mut monitor) = LinkMonitor::start(ClassRules::default())
            .await
            .expect("start");
        for _ in 0..100 {
            monitor.handle().network_changed();
        }
        ip("link add wlan0 type veth peer name ap0");
        let event = tokio::time::timeout(PATIENCE, monitor.next())
            .await
            .expect("an event");
        assert!(
            matches!(event, Some(LinkEvent::Appeared { .. })),
            "{event:?}"
        );
    });
}
