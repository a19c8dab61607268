//! Tests with a stand-in for NetworkManager on a bus of the test. They pass with a message if there
//! is no bus program.

use std::collections::HashMap;

use cedos_lab_rig::bus::ServiceBus;
use cedos_lab_rig::namespace::{LINKS, in_namespace_with, sh};
use cedos_lab_rig::{PATIENCE, this_test};
use d2tp_links::{
    Connectivity, CostClass, CostResolver, LinkMonitor, Metered, NetworkManager, NetworkRules,
    WifiRoamer,
};
use d2tp_time::{Span, Time};
use tokio::time::timeout;
use zbus::{ObjectPath, OwnedVariant, Proxy, Variant};

const NAME: &str = "org.freedesktop.NetworkManager";
const PATH: &str = "/org/freedesktop/NetworkManager";
const DEVICE: &str = "org.freedesktop.NetworkManager.Device";
const DHCP4: &str = "org.freedesktop.NetworkManager.DHCP4Config";
const WIRELESS: &str = "org.freedesktop.NetworkManager.Device.Wireless";
const ACTIVATED: i32 = 100;

/// A stand-in for NetworkManager with a Wi-Fi device of this name, two access points of a known
/// network, and one of an unknown network.
struct Manager {
    bus: ServiceBus,
    mock: Proxy<'static>,
    wlan: String,
}

async fn manager(device: &str) -> Option<Manager> {
    let bus = ServiceBus::with("networkmanager", NAME).await?;
    let mock = bus.mock(NAME, PATH).await;
    let wlan: String = mock
        .call("AddWiFiDevice", &("wlan", device, ACTIVATED))
        .await
        .unwrap();
    let manager = Manager { bus, mock, wlan };
    for (name, ssid, last, strength) in [
        ("near", "cafe", 1, 80),
        ("far", "cafe", 2, 45),
        ("other", "bar", 3, 99),
    ] {
        let bssid = format!("02:00:00:00:00:0{last}");
        let point = (
            &*manager.wlan,
            name,
            ssid,
            &*bssid,
            2u32,
            2_412u32,
            54_000u32,
            strength as u8,
            0u32,
        );
        let _: String = manager.mock.call("AddAccessPoint", &point).await.unwrap();
    }
    let known = (&*manager.wlan, "cafe", "cafe", "");
    let _: String = manager
        .mock
        .call("AddWiFiConnection", &known)
        .await
        .unwrap();
    Some(manager)
}

impl Manager {
    async fn start(&self) -> NetworkManager {
        NetworkManager::on(self.bus.connect().await).await.unwrap()
    }

    /// Adds or changes properties of the stand-in.
    async fn set(&self, interface: &str, name: &str, value: Variant<'_>) {
        let device = self.device(interface).await;
        if device
            .set_property(name, value.try_clone().unwrap())
            .await
            .is_err()
        {
            let device = Proxy::new(
                &self.bus.connection,
                NAME,
                &*self.wlan,
                "org.freedesktop.DBus.Mock",
            )
            .await
            .unwrap();
            let added = (interface, name, value);
            let _: () = device.call("AddProperty", &added).await.unwrap();
        }
        // A real NetworkManager signals changes by itself.
        let nudge: Vec<Variant<'_>> = Vec::new();
        let _: () = self
            .mock
            .call("EmitSignal", &("", "Nudge", "", nudge))
            .await
            .unwrap();
    }

    async fn device(&self, interface: &str) -> Proxy<'_> {
        Proxy::new(
            &self.bus.connection,
            NAME,
            &*self.wlan,
            interface.to_owned(),
        )
        .await
        .unwrap()
    }
}

/// Waits until the information about a device satisfies a condition.
async fn until(
    manager: &mut NetworkManager,
    device: &str,
    is: impl Fn(&d2tp_links::NetworkInfo) -> bool,
) {
    let so = async {
        while !manager.networks().of(device).is_some_and(&is) {
            manager.changed().await;
        }
    };
    timeout(PATIENCE, so).await.expect("it becomes so");
}

#[tokio::test]
async fn a_devices_network_is_known_with_its_access_points() {
    let Some(mock) = manager("wlan9").await else {
        return;
    };
    let mut known = mock.start().await;
    let networks = known.networks();
    let network = networks.of("wlan9").expect("the device");
    let sight: Vec<(&str, &str, u8, bool)> = (network.in_sight.iter())
        .map(|point| {
            (
                &*point.ssid,
                &*point.bssid,
                point.signal_percent,
                point.known,
            )
        })
        .collect();
    assert_eq!(
        sight,
        [
            ("cafe", "02:00:00:00:00:01", 80, true),
            ("cafe", "02:00:00:00:00:02", 45, true),
            ("bar", "02:00:00:00:00:03", 99, false),
        ]
    );
    assert_eq!(
        (network.metered, network.connectivity),
        (Metered::Unknown, Connectivity::Unknown)
    );
    assert_eq!(network.access_point, None);
    mock.set(DEVICE, "Metered", Variant::from(1u32)).await;
    mock.set(DEVICE, "Ip4Connectivity", Variant::from(2u32))
        .await;
    until(&mut known, "wlan9", |network| {
        (network.metered, network.connectivity) == (Metered::Yes, Connectivity::Portal)
    })
    .await;
    // One address family that works is enough.
    mock.set(DEVICE, "Ip6Connectivity", Variant::from(4u32))
        .await;
    until(&mut known, "wlan9", |network| {
        network.connectivity == Connectivity::Full
    })
    .await;
}

#[tokio::test]
async fn the_option_of_dhcp_for_proxies_is_read_from_a_devices_lease() {
    let Some(mock) = manager("wlan9").await else {
        return;
    };
    let mut known = mock.start().await;
    assert_eq!(known.networks().of("wlan9").unwrap().dhcp_proxy, None);
    let text = "d2tp://192.168.1.5:4433/KEY";
    let hex: Vec<String> = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    let (hex, address) = (hex.join(":"), "192.168.1.7".to_owned());
    let options: HashMap<&str, Variant<'_>> = [
        ("private_224", Variant::from(hex)),
        ("ip_address", Variant::from(address)),
    ]
    .into();
    let properties: HashMap<&str, Variant<'_>> = [("Options", Variant::from(options))].into();
    let path = "/org/freedesktop/NetworkManager/DHCP4Config/1";
    let methods: Vec<(&str, &str, &str, &str)> = Vec::new();
    let lease = (path, DHCP4, properties, methods);
    let _: () = mock.mock.call("AddObject", &lease).await.unwrap();
    let path = ObjectPath::try_from(path).unwrap();
    mock.set(DEVICE, "Dhcp4Config", Variant::from(path)).await;
    until(&mut known, "wlan9", |network| {
        network.dhcp_proxy.as_deref() == Some(text)
    })
    .await;
}

#[tokio::test]
async fn a_dead_access_point_is_left_for_another_and_a_better_one_is_joined() {
    let Some(mock) = manager("wlan9").await else {
        return;
    };
    let mut known = mock.start().await;
    let mut scout = WifiRoamer::new(known.clone());
    let at = |seconds| Time::ZERO + Span::from_secs(seconds);
    scout.scan("wlan9").await.unwrap();
    let calls: Vec<(u64, String, Vec<OwnedVariant>)> = {
        let device = mock.device("org.freedesktop.DBus.Mock").await;
        device.call("GetCalls", &()).await.unwrap()
    };
    assert!(
        calls.iter().any(|(_, method, _)| method == "RequestScan"),
        "{calls:?}"
    );
    // On no access point: the strongest known one is joined.
    let roved = scout.roam(at(0), "wlan9").await.unwrap();
    assert_eq!(roved.joining.unwrap().bssid, "02:00:00:00:00:01");
    let on = |bssid: &'static str| {
        move |network: &d2tp_links::NetworkInfo| {
            network
                .access_point
                .as_ref()
                .is_some_and(|point| point.bssid == bssid)
        }
    };
    until(&mut known, "wlan9", on("02:00:00:00:00:01")).await;
    // The access point does not answer for four seconds.
    assert_eq!(scout.roam(at(1), "wlan9").await.unwrap().joining, None);
    let roved = scout.roam(at(5), "wlan9").await.unwrap();
    assert_eq!(
        roved.blocked,
        [("wlan9".to_owned(), "02:00:00:00:00:01".to_owned())]
    );
    assert_eq!(roved.joining.unwrap().bssid, "02:00:00:00:00:02");
    // The real NetworkManager also reports the joined access point on the device.
    let far = ObjectPath::try_from("/org/freedesktop/NetworkManager/AccessPoint/far").unwrap();
    mock.set(WIRELESS, "ActiveAccessPoint", Variant::from(far))
        .await;
    until(&mut known, "wlan9", on("02:00:00:00:00:02")).await;
    // This one answers, but carries little; a minute later the first one is tried again.
    assert_eq!(scout.roam(at(6), "wlan9").await.unwrap().joining, None);
    scout.trials.answered("wlan9");
    scout.record_goodput(at(20), "wlan9", 2_000.0);
    assert_eq!(scout.roam(at(30), "wlan9").await.unwrap().joining, None);
    let roved = scout.roam(at(70), "wlan9").await.unwrap();
    assert_eq!(roved.joining.unwrap().bssid, "02:00:00:00:00:01");
}

#[test]
fn links_are_judged_by_what_the_manager_says_and_rules_win() {
    in_namespace_with(LINKS, this_test!(), || async {
        sh("ip link add wlan0 type veth peer name ap0");
        let Some(mock) = manager("wlan0").await else {
            return;
        };
        mock.set(DEVICE, "Metered", Variant::from(2u32)).await;
        let class = async |rules: &str| {
            let judge = CostResolver {
                rules: NetworkRules::parse(rules).unwrap(),
                ..CostResolver::default()
            };
            let manager = mock.start().await;
            let (links, monitor) = LinkMonitor::start_with(judge, Some(manager)).await.unwrap();
            let wlan = links.into_iter().find(|link| link.name == "wlan0").unwrap();
            (wlan.class.class, monitor)
        };
        let (free, mut monitor) = class("").await;
        assert_eq!(free, CostClass::Free);
        assert_eq!(
            class("[[network]]\ndevice = \"w*\"\nclass = \"roaming\"")
                .await
                .0,
            CostClass::Roaming
        );
        // While it is being watched, the network becomes metered.
        mock.set(DEVICE, "Metered", Variant::from(1u32)).await;
        let metered = async {
            loop {
                let event = monitor.next().await.expect("it goes on");
                if event.link().name == "wlan0" && event.link().class.class == CostClass::Metered {
                    return event.link().class.because.clone();
                }
            }
        };
        let because = timeout(PATIENCE, metered).await.expect("it is told");
        assert!(because.contains("settings"), "{because}");
    });
}

#[tokio::test]
async fn when_the_manager_ends_nothing_is_known_any_more() {
    let Some(mut mock) = manager("wlan9").await else {
        return;
    };
    let mut known = mock.start().await;
    assert!(known.networks().of("wlan9").is_some());
    mock.bus.end_service();
    let gone = async {
        while known.networks().of("wlan9").is_some() {
            known.changed().await;
        }
    };
    timeout(PATIENCE, gone).await.expect("it is noticed");
    assert!(known.scan("wlan9").await.is_err());
    assert!(NetworkManager::on(mock.bus.connect().await).await.is_err());
}
