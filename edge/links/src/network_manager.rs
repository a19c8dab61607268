//! NetworkManager over D-Bus: information about networks, scans, and joining an access point.
//!
//! ```text
//!  signals of NetworkManager ─▶ "something changed" ─▶ gather ─▶ read all its objects at once
//!                                                                 │ assemble
//!                              Networks of the latest reading ◀───┘
//! ```
//!
//! As with the kernel, a signal is only a hint. If NetworkManager does not run or ends, only the
//! kernel's information is used.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use zbus::fdo::{ManagedObjects, ObjectManagerProxy};
use zbus::message::Type;
use zbus::{Connection, MatchRule, MessageStream, OwnedObjectPath, OwnedVariant};

use crate::dhcp_option::{DHCP_PROXY_OPTION, option_text};
use crate::network::{AccessPoint, Connectivity, Metered, NetworkInfo, Networks};
use crate::network_manager_bus::{NetworkDaemonProxy, SavedConnectionProxy, WirelessDeviceProxy};

const NAME: &str = "org.freedesktop.NetworkManager";
const BUS: &str = "org.freedesktop.DBus";
const ROOT: &str = "/org/freedesktop";
const ACTIVE: &str = "org.freedesktop.NetworkManager.Connection.Active";
const ACCESS_POINT: &str = "org.freedesktop.NetworkManager.AccessPoint";
const DEVICE: &str = "org.freedesktop.NetworkManager.Device";
const DHCP4: &str = "org.freedesktop.NetworkManager.DHCP4Config";
const MODEM: &str = "org.freedesktop.NetworkManager.Device.Modem";
const WIRELESS: &str = "org.freedesktop.NetworkManager.Device.Wireless";
const SETTINGS: &str = "org.freedesktop.NetworkManager.Settings.Connection";

/// How long a burst of signals is collected: an attachment causes a dozen.
const GATHER: Duration = Duration::from_millis(50); // a guess

/// The shortest interval between two readings: signal strengths change all the time.
const READ_INTERVAL_MIN: Duration = Duration::from_secs(1); // a guess

/// Why a request to NetworkManager failed.
#[derive(Debug, thiserror::Error)]
pub enum NetworkManagerError {
    /// NetworkManager does not run, or there is no bus.
    #[error("NetworkManager is not reached: {0}")]
    Absent(#[source] zbus::Error),
    /// NetworkManager refused the call.
    #[error("NetworkManager refuses to {what}: {cause}")]
    Refused {
        /// The request, in words.
        what: &'static str,
        /// NetworkManager's error.
        cause: zbus::Error,
    },
    /// The device or access point no longer exists.
    #[error("NetworkManager has no {0}")]
    Gone(String),
}

type DbusProperties = HashMap<String, OwnedVariant>;

/// A connection to NetworkManager. Clones share it; watching ends with the last one.
#[derive(Debug, Clone)]
pub struct NetworkManager {
    bus: Connection,
    latest: watch::Receiver<Arc<NetworkManagerState>>,
}

/// The state that was read, with the object paths.
#[derive(Debug, Default, PartialEq)]
struct NetworkManagerState {
    networks: Networks,
    devices: HashMap<String, OwnedObjectPath>,
    /// By device and BSSID: the object paths of the access point, and of the settings with which to
    /// join it.
    access_points: HashMap<(String, String), (OwnedObjectPath, Option<OwnedObjectPath>)>,
}

impl NetworkManager {
    /// Connects to the system's NetworkManager. Must be called on a tokio runtime, and in
    /// NetworkManager's network namespace, because device names may stand for other devices
    /// elsewhere.
    ///
    /// # Errors
    /// NetworkManager does not run.
    pub async fn start() -> Result<NetworkManager, NetworkManagerError> {
        let bus = Connection::system().await;
        NetworkManager::on(bus.map_err(NetworkManagerError::Absent)?).await
    }

    /// Connects to the NetworkManager on a bus.
    ///
    /// # Errors
    /// There is no NetworkManager on it.
    pub async fn on(bus: Connection) -> Result<NetworkManager, NetworkManagerError> {
        let mut reader = NetworkManagerReader::new(bus.clone());
        let hints = reader.hints().await.map_err(NetworkManagerError::Absent)?;
        let hearing = SignalListener::of(hints);
        let first = reader.read().await.map_err(NetworkManagerError::Absent)?;
        let (publish, latest) = watch::channel(Arc::new(first));
        tokio::spawn(watch_networks(reader, hearing, publish));
        Ok(NetworkManager { bus, latest })
    }

    /// The networks, as of the last reading.
    pub fn networks(&self) -> Networks {
        self.latest.borrow().networks.clone()
    }

    /// Waits until the networks change. Never returns when watching has stopped.
    pub async fn changed(&mut self) {
        if self.latest.changed().await.is_err() {
            std::future::pending().await
        }
    }

    /// Scans for access points with this device. They appear in [`NetworkManager::networks`] some
    /// seconds later.
    ///
    /// # Errors
    /// There is no such device, or NetworkManager refuses because the last scan was a moment ago.
    pub async fn scan(&self, device: &str) -> Result<(), NetworkManagerError> {
        let path = self.latest.borrow().devices.get(device).cloned();
        let path = path.ok_or_else(|| NetworkManagerError::Gone(device.to_owned()))?;
        let scan = async {
            let device = WirelessDeviceProxy::new(&self.bus, path).await?;
            device.request_scan(HashMap::new()).await
        };
        scan.await.map_err(refused("scan"))
    }

    /// Joins a known access point with this device. Its addresses are reported like those of any
    /// link.
    ///
    /// # Errors
    /// The access point is not in reach or not known any more, or NetworkManager refuses.
    pub async fn join(&self, device: &str, bssid: &str) -> Result<(), NetworkManagerError> {
        let gone = || NetworkManagerError::Gone(format!("{bssid} for {device}"));
        let (device, point, settings) = {
            let reading = self.latest.borrow();
            let named = (device.to_owned(), bssid.to_owned());
            let (point, settings) = reading.access_points.get(&named).ok_or_else(gone)?;
            let device = reading.devices.get(device).ok_or_else(gone)?;
            (
                device.clone(),
                point.clone(),
                settings.clone().ok_or_else(gone)?,
            )
        };
        let join = async {
            let daemon = NetworkDaemonProxy::new(&self.bus).await?;
            daemon.activate_connection(&settings, &device, &point).await
        };
        join.await.map(drop).map_err(refused("join"))
    }
}

fn refused(what: &'static str) -> impl FnOnce(zbus::Error) -> NetworkManagerError {
    move |cause| NetworkManagerError::Refused { what, cause }
}

/// Receives signals in its own task, because while a queue of signals is full, the connection
/// delivers no answers either.
struct SignalListener {
    hint: Arc<Notify>,
    task: JoinHandle<()>,
}

impl SignalListener {
    fn of(mut signals: BoxStream<'static, ()>) -> SignalListener {
        let hint = Arc::new(Notify::new());
        let changed_hint = hint.clone();
        let task = tokio::spawn(async move {
            while signals.next().await.is_some() {
                changed_hint.notify_one();
            }
        });
        SignalListener { hint, task }
    }
}

impl Drop for SignalListener {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Publishes a reading after each burst of signals, as long as there are receivers.
async fn watch_networks(
    mut reader: NetworkManagerReader,
    hearing: SignalListener,
    publish: watch::Sender<Arc<NetworkManagerState>>,
) {
    loop {
        tokio::select! {
            () = publish.closed() => return,
            () = hearing.hint.notified() => {}
        }
        tokio::time::sleep(GATHER).await;
        let reading = reader.read().await.unwrap_or_else(|error| {
            tracing::warn!(%error, "NetworkManager is gone; links are judged without it");
            NetworkManagerState::default()
        });
        publish.send_if_modified(|known| {
            let changed = **known != reading;
            *known = Arc::new(reading);
            changed
        });
        tokio::time::sleep(READ_INTERVAL_MIN).await;
    }
}

struct NetworkManagerReader {
    bus: Connection,
    /// The SSID of each saved Wi-Fi connection; `None` if it is not readable. A changed SSID is
    /// read only when NetworkManager restarts.
    saved: HashMap<OwnedObjectPath, Option<Vec<u8>>>,
}

impl NetworkManagerReader {
    fn new(bus: Connection) -> NetworkManagerReader {
        NetworkManagerReader {
            bus,
            saved: HashMap::new(),
        }
    }

    /// NetworkManager's signals, and its start and end on the bus.
    async fn hints(&self) -> zbus::Result<BoxStream<'static, ()>> {
        let own = MatchRule::builder().msg_type(Type::Signal).sender(NAME);
        let owner = MatchRule::builder().msg_type(Type::Signal).sender(BUS);
        let owner = owner.member("NameOwnerChanged").arg(0, NAME);
        let own = MessageStream::for_match_rule(own.build()?, &self.bus, None).await?;
        let owner = MessageStream::for_match_rule(owner.build()?, &self.bus, None).await?;
        Ok(stream::select(own, owner).map(drop).boxed())
    }

    async fn read(&mut self) -> zbus::Result<NetworkManagerState> {
        let manager = ObjectManagerProxy::new(&self.bus, NAME, ROOT).await?;
        let objects = manager.get_managed_objects().await?;
        self.saved.retain(|path, _| objects.contains_key(path));
        for (path, object) in &objects {
            if object.contains_key(SETTINGS) && !self.saved.contains_key(path) {
                let ssid = self.ssid_of(path).await;
                self.saved.insert(path.clone(), ssid);
            }
        }
        Ok(assemble(&objects, &self.saved))
    }

    /// The SSID of saved settings; `None` also for settings of another user.
    async fn ssid_of(&self, path: &OwnedObjectPath) -> Option<Vec<u8>> {
        let saved = SavedConnectionProxy::new(&self.bus, path).await.ok()?;
        let mut settings = saved.get_settings().await.ok()?;
        let ssid = settings.get_mut("802-11-wireless")?.remove("ssid")?;
        ssid.try_into().ok()
    }
}

fn assemble(
    objects: &ManagedObjects,
    saved: &HashMap<OwnedObjectPath, Option<Vec<u8>>>,
) -> NetworkManagerState {
    let mut reading = NetworkManagerState::default();
    for (path, object) in objects {
        let Some(device) = object.get(DEVICE) else {
            continue;
        };
        let name = text(device, "IpInterface").or_else(|| text(device, "Interface"));
        let Some(name) = name else {
            continue;
        };
        reading.devices.insert(name.clone(), path.clone());
        let mut network = NetworkInfo {
            device: name.clone(),
            metered: metered(number(device, "Metered")),
            connectivity: connectivity(device),
            operator: object
                .get(MODEM)
                .and_then(|modem| text(modem, "OperatorCode")),
            dhcp_proxy: dhcp_proxy(objects, device),
            ..NetworkInfo::default()
        };
        let wireless = object.get(WIRELESS);
        let in_sight = wireless.and_then(|wireless| paths(wireless, "AccessPoints"));
        let joined = wireless
            .and_then(|wireless| path_of(wireless, "ActiveAccessPoint"))
            .or_else(|| {
                let active = path_of(device, "ActiveConnection")?;
                path_of(objects.get(&active)?.get(ACTIVE)?, "SpecificObject")
            });
        for path in in_sight.into_iter().flatten() {
            let point = objects
                .get(&path)
                .and_then(|object| object.get(ACCESS_POINT));
            let Some((ssid, mut point)) = point.and_then(access_point) else {
                continue;
            };
            let settings = saved.iter().find(|(_, of)| of.as_deref() == Some(&*ssid));
            point.known = settings.is_some();
            if joined.as_ref() == Some(&path) {
                network.access_point = Some(point.clone());
            }
            let named = (name.clone(), point.bssid.clone());
            let settings = settings.map(|(path, _)| path.clone());
            reading.access_points.insert(named, (path, settings));
            network.in_sight.push(point);
        }
        network.in_sight.sort_by(|a, b| a.bssid.cmp(&b.bssid));
        reading.networks.networks.push(network);
    }
    reading
        .networks
        .networks
        .sort_by(|a, b| a.device.cmp(&b.device));
    reading.networks.under_vpns = under_vpns(objects, &reading.devices);
    reading
}

/// The option for proxies of a device's lease, which NetworkManager names by the client of DHCP that it uses.
fn dhcp_proxy(objects: &ManagedObjects, device: &DbusProperties) -> Option<String> {
    let lease = objects.get(&path_of(device, "Dhcp4Config")?)?.get(DHCP4)?;
    let options: DbusProperties = lease.get("Options")?.try_clone().ok()?.try_into().ok()?;
    let names = ["private", "unknown"].map(|kind| format!("{kind}_{DHCP_PROXY_OPTION}"));
    let value = names.iter().find_map(|name| text(&options, name))?;
    option_text(&value)
}

/// The devices that NetworkManager's VPNs run over.
fn under_vpns(objects: &ManagedObjects, devices: &HashMap<String, OwnedObjectPath>) -> Vec<String> {
    let active = objects.values().filter_map(|object| object.get(ACTIVE));
    let vpns = active.filter(|active| {
        let vpn = active.get("Vpn").and_then(|is| bool::try_from(is).ok());
        vpn == Some(true)
    });
    let mut under: Vec<String> = vpns
        .filter_map(|vpn| paths(vpn, "Devices"))
        .flatten()
        .filter_map(|path| devices.iter().find(|(_, at)| **at == path))
        .map(|(name, _)| name.clone())
        .collect();
    under.sort();
    under.dedup();
    under
}

fn access_point(properties: &DbusProperties) -> Option<(Vec<u8>, AccessPoint)> {
    let ssid: Vec<u8> = properties.get("Ssid")?.try_clone().ok()?.try_into().ok()?;
    let strength = properties
        .get("Strength")
        .and_then(|of| u8::try_from(of).ok());
    let point = AccessPoint {
        ssid: String::from_utf8_lossy(&ssid).into_owned(),
        bssid: text(properties, "HwAddress")?,
        signal_percent: strength.unwrap_or(0),
        frequency_mhz: number(properties, "Frequency").unwrap_or(0),
        known: false,
    };
    Some((ssid, point))
}

// NMMetered, NMConnectivityState: NetworkManager's D-Bus reference.
fn metered(word: Option<u32>) -> Metered {
    match word {
        Some(1) => Metered::Yes,
        Some(2) => Metered::No,
        Some(3) => Metered::GuessYes,
        Some(4) => Metered::GuessNo,
        _ => Metered::Unknown,
    }
}

/// The better connectivity of both address families, because one that works is enough.
fn connectivity(device: &DbusProperties) -> Connectivity {
    let of = |family| match number(device, family) {
        Some(1) => Connectivity::None,
        Some(2) => Connectivity::Portal,
        Some(3) => Connectivity::Limited,
        Some(4) => Connectivity::Full,
        _ => Connectivity::Unknown,
    };
    let both = [of("Ip4Connectivity"), of("Ip6Connectivity")];
    let order = [
        Connectivity::Full,
        Connectivity::Portal,
        Connectivity::Limited,
        Connectivity::None,
    ];
    let best = order.into_iter().find(|one| both.contains(one));
    best.unwrap_or_default()
}

fn text(properties: &DbusProperties, name: &str) -> Option<String> {
    let text = <&str>::try_from(properties.get(name)?).ok()?;
    (!text.is_empty()).then(|| text.to_owned())
}

fn number(properties: &DbusProperties, name: &str) -> Option<u32> {
    u32::try_from(properties.get(name)?).ok()
}

/// A property that is an object path; `None` for `/`, which stands for no object.
fn path_of(properties: &DbusProperties, name: &str) -> Option<OwnedObjectPath> {
    let path: OwnedObjectPath = properties.get(name)?.try_clone().ok()?.try_into().ok()?;
    (path.as_str() != "/").then_some(path)
}

fn paths(properties: &DbusProperties, name: &str) -> Option<Vec<OwnedObjectPath>> {
    properties.get(name)?.try_clone().ok()?.try_into().ok()
}
