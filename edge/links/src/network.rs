//! The system's network manager's information about the network behind each device.
//!
//! ```text
//!  device ─┬─ metered?        a property of the network, set by a user or guessed
//!          ├─ connectivity    the result of the manager's own check
//!          ├─ access point    SSID, BSSID, signal; and the others in sight
//!          └─ operator        of a mobile network
//!  VPN ───▶ the devices it runs over
//! ```

use serde::Serialize;

/// Whether a network is metered, according to the network manager.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metered {
    /// The manager does not know.
    #[default]
    Unknown,
    /// Yes, set by the user.
    Yes,
    /// No, set by the user.
    No,
    /// Probably: a phone's hotspot reports it by DHCP, or the device is a modem.
    GuessYes,
    /// NetworkManager guesses that the network is not metered.
    GuessNo,
}

/// The result of the network manager's connectivity check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Connectivity {
    /// The network manager has not checked.
    #[default]
    Unknown,
    /// There is no route.
    None,
    /// There is a captive portal.
    Portal,
    /// The network has no Internet access.
    Limited,
    /// The check succeeded. A portal that answers everything with success can fake it.
    Full,
}

/// A Wi-Fi access point in reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AccessPoint {
    /// The network's name; invalid UTF-8 in it is replaced.
    pub ssid: String,
    /// The access point's own address.
    pub bssid: String,
    /// The signal strength, 0 to 100.
    pub signal_percent: u8,
    /// The channel's frequency in MHz.
    pub frequency_mhz: u32,
    /// Whether the network manager can join it: credentials are saved, or none are needed.
    pub known: bool,
}

/// The network behind a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NetworkInfo {
    /// The kernel's name of the device.
    pub device: String,
    /// Whether the network is metered.
    pub metered: Metered,
    /// The result of the connectivity check.
    pub connectivity: Connectivity,
    /// The current access point.
    pub access_point: Option<AccessPoint>,
    /// All access points in reach, the current one included.
    pub in_sight: Vec<AccessPoint>,
    /// The code of a mobile network, country and operator, such as `26201`.
    pub operator: Option<String>,
    /// The text of the network's DHCP option for proxies ([`crate::DHCP_PROXY_OPTION`]).
    pub dhcp_proxy: Option<String>,
}

/// The networks behind all devices.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Networks {
    /// The network behind each device that the manager knows.
    pub networks: Vec<NetworkInfo>,
    /// The devices below VPNs.
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
