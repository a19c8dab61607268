//! What the system's network manager knows of the network behind each device.
//!
//! ```text
//!  device ─┬─ metered?        a property of the network, said by a user or guessed
//!          ├─ connectivity    what the manager's own question to the Internet got for an answer
//!          ├─ access point    SSID, BSSID, signal; and the others in sight
//!          └─ operator        of a mobile network
//!  VPN ───▶ the devices it runs over
//! ```

use serde::Serialize;

/// Whether a network counts its bytes, as the manager has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metered {
    /// Nobody said.
    #[default]
    Unknown,
    /// A user did.
    Yes,
    /// A user did.
    No,
    /// A phone's hotspot says so in DHCP, or it is a modem.
    GuessYes,
    /// Nothing spoke for it.
    GuessNo,
}

/// How far the manager's own question got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Connectivity {
    /// The network manager did not ask the network.
    #[default]
    Unknown,
    /// No route.
    None,
    /// Somebody else answered: a page to sign in.
    Portal,
    /// A network without the Internet.
    Limited,
    /// The right answer came. A page that answers everything with success may fake it.
    Full,
}

/// A Wi-Fi access point in sight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessPoint {
    /// The network's name; what is not UTF-8 in it is replaced.
    pub ssid: String,
    /// The access point's own address.
    pub bssid: String,
    /// 0 to 100.
    pub signal_percent: u8,
    /// Its channel.
    pub frequency_mhz: u32,
    /// Its credentials are there, or it needs none that are not: the manager can join it.
    pub known: bool,
}

/// What is known of the network behind a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NetworkInfo {
    /// The device's name, as the kernel has it.
    pub device: String,
    /// Whether its bytes are counted.
    pub metered: Metered,
    /// How far the manager got.
    pub connectivity: Connectivity,
    /// The access point it is on.
    pub access_point: Option<AccessPoint>,
    /// All it hears, that one included.
    pub in_sight: Vec<AccessPoint>,
    /// A mobile network's code: country and operator, `26201`.
    pub operator: Option<String>,
}

/// The networks behind all devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Networks {
    /// The network behind each device that the manager knows.
    pub networks: Vec<NetworkInfo>,
    /// Devices that VPNs run over.
    pub under_vpns: Vec<String>,
}

impl Networks {
    /// The network behind a device.
    pub fn of(&self, device: &str) -> Option<&NetworkInfo> {
        self.networks
            .iter()
            .find(|network| network.device == device)
    }
}
