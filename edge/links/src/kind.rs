//! What a link is made of: evidence from the kernel first, the device's name next.
//!
//! Names come before the bare hardware type because everything wireless calls itself Ethernet,
//! and because emulated links are tunnels that carry a radio's name on purpose.

use std::path::Path;

use serde::Serialize;

/// What a link is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A wireless LAN, a phone's hotspot included.
    Wifi,
    /// A mobile network: modem, or a phone tethered by cable.
    Cellular,
    /// A wired LAN.
    Ethernet,
    /// This machine itself.
    Loopback,
    /// A tunnel over other links.
    Vpn,
    /// A bridge, a container's cable, or something we do not know.
    Other,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Wifi => "Wi-Fi",
            Kind::Cellular => "cellular",
            Kind::Ethernet => "Ethernet",
            Kind::Loopback => "loopback",
            Kind::Vpn => "VPN",
            Kind::Other => "other",
        })
    }
}

/// Everything known about a device that tells its kind.
#[derive(Debug, Default, Clone)]
pub(crate) struct Evidence {
    pub(crate) name: String,
    pub(crate) loopback: bool,
    /// The kernel says it has wireless extensions or an 802.11 phy.
    pub(crate) wireless: bool,
    /// `DEVTYPE` of its uevent: `wlan`, `wwan`, `wireguard`, `bridge`, …
    pub(crate) devtype: Option<String>,
    /// The driver kind it was created with (`ip -d link`): `tun`, `veth`, `wwan`, …
    pub(crate) created_as: Option<String>,
    /// Its USB or PCI driver, for example `cdc_mbim` or `rndis_host`.
    pub(crate) driver: Option<String>,
    /// Link type is Ethernet, as opposed to point-to-point or raw IP.
    pub(crate) ethernet: bool,
    /// There is hardware behind it.
    pub(crate) hardware: bool,
}

impl Evidence {
    /// Adds what `/sys` knows of the device, if it is the same one: `/sys` shows the network
    /// namespace it was mounted in, which may not be ours.
    pub(crate) fn read_sysfs(&mut self, index: u32) {
        let device = Path::new("/sys/class/net").join(&self.name);
        let same = std::fs::read_to_string(device.join("ifindex"))
            .ok()
            .and_then(|text| text.trim().parse::<u32>().ok())
            == Some(index);
        if !same {
            return;
        }
        self.wireless |= device.join("wireless").exists() || device.join("phy80211").exists();
        self.hardware |= device.join("device").exists();
        self.devtype = std::fs::read_to_string(device.join("uevent"))
            .ok()
            .and_then(|text| {
                Some(
                    text.lines()
                        .find_map(|l| l.strip_prefix("DEVTYPE="))?
                        .into(),
                )
            });
        self.driver = std::fs::read_link(device.join("device/driver"))
            .ok()
            .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    }

    pub(crate) fn kind(&self) -> Kind {
        if self.loopback {
            return Kind::Loopback;
        }
        match self.devtype.as_deref() {
            Some("wlan") => return Kind::Wifi,
            Some("wwan") => return Kind::Cellular,
            Some("wireguard") => return Kind::Vpn,
            _ => {}
        }
        if self.wireless {
            return Kind::Wifi;
        }
        match self.created_as.as_deref() {
            Some("wwan" | "rmnet") => return Kind::Cellular,
            Some("virt_wifi") => return Kind::Wifi,
            Some("wireguard" | "xfrm" | "vti" | "vti6" | "gre" | "sit" | "ipip" | "ip6tnl") => {
                return Kind::Vpn;
            }
            _ => {}
        }
        if let Some(driver) = self.driver.as_deref()
            && CELLULAR_DRIVERS.contains(&driver)
        {
            return Kind::Cellular;
        }
        if let Some(kind) = kind_by_name(&self.name) {
            return kind;
        }
        match self.created_as.as_deref() {
            Some("tun") => return Kind::Vpn,
            Some(_) => return Kind::Other,
            None => {}
        }
        if self.ethernet && self.hardware {
            Kind::Ethernet
        } else if !self.ethernet && !self.hardware {
            Kind::Vpn
        } else {
            Kind::Other
        }
    }
}

/// Drivers of modems, and of phones that share their network over USB.
const CELLULAR_DRIVERS: &[&str] = &[
    "cdc_mbim",
    "qmi_wwan",
    "qmi_wwan_q",
    "huawei_cdc_ncm",
    "sierra_net",
    "option",
    "rndis_host", // Android tethering
    "ipheth",     // iPhone tethering
];

/// Names by convention of Linux (systemd's net naming scheme), Android and tethering.
const NAMES: &[(&str, Kind)] = &[
    ("wwan", Kind::Cellular),
    ("wwp", Kind::Cellular),
    ("rmnet", Kind::Cellular),
    ("ccmni", Kind::Cellular),
    ("ppp", Kind::Cellular),
    ("usb", Kind::Cellular),
    ("lte", Kind::Cellular),
    ("wlan", Kind::Wifi),
    ("wlp", Kind::Wifi),
    ("wlx", Kind::Wifi),
    ("wls", Kind::Wifi),
    ("wifi", Kind::Wifi),
    ("eth", Kind::Ethernet),
    ("eno", Kind::Ethernet),
    ("ens", Kind::Ethernet),
    ("enp", Kind::Ethernet),
    ("enx", Kind::Ethernet),
    ("tun", Kind::Vpn),
    ("tap", Kind::Vpn),
    ("wg", Kind::Vpn),
    ("tailscale", Kind::Vpn),
    ("ipsec", Kind::Vpn),
    ("docker", Kind::Other),
    ("br", Kind::Other),
    ("virbr", Kind::Other),
    ("veth", Kind::Other),
    ("dummy", Kind::Other),
];

fn kind_by_name(name: &str) -> Option<Kind> {
    NAMES
        .iter()
        .filter(|(prefix, _)| {
            // A prefix counts only before a number or the like: `tundra0` is no tunnel.
            name.strip_prefix(prefix).is_some_and(|rest| {
                !rest.starts_with(|c: char| c.is_ascii_alphabetic())
                    || matches!(*prefix, "wlx" | "enx" | "rmnet")
            })
        })
        .max_by_key(|(prefix, _)| prefix.len())
        .map(|(_, kind)| *kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Evidence {
        Evidence {
            name: name.into(),
            ethernet: true,
            ..Evidence::default()
        }
    }

    #[test]
    fn names_by_convention_tell_the_kind() {
        for (name, kind) in [
            ("wlan0", Kind::Wifi),
            ("wlp3s0", Kind::Wifi),
            ("wlx00c0ca", Kind::Wifi),
            ("wwan0", Kind::Cellular),
            ("rmnet_data0", Kind::Cellular),
            ("usb0", Kind::Cellular),
            ("eth0", Kind::Ethernet),
            ("enp0s31f6", Kind::Ethernet),
            ("wg0", Kind::Vpn),
            ("veth12ab", Kind::Other),
            ("docker0", Kind::Other),
            ("tundra0", Kind::Other),
        ] {
            assert_eq!(named(name).kind(), kind, "{name}");
        }
    }

    #[test]
    fn the_kernel_is_believed_before_the_name() {
        assert_eq!(
            Evidence {
                wireless: true,
                ..named("eth0")
            }
            .kind(),
            Kind::Wifi
        );
        assert_eq!(
            Evidence {
                devtype: Some("wwan".into()),
                ..named("eth1")
            }
            .kind(),
            Kind::Cellular
        );
        assert_eq!(
            Evidence {
                driver: Some("rndis_host".into()),
                ..named("enx1")
            }
            .kind(),
            Kind::Cellular
        );
        assert_eq!(
            Evidence {
                created_as: Some("wireguard".into()),
                ..named("eth0")
            }
            .kind(),
            Kind::Vpn
        );
    }

    #[test]
    fn an_emulated_radio_on_a_tunnel_is_a_radio_and_a_plain_tunnel_is_a_vpn() {
        let tunnel = |name: &str| Evidence {
            created_as: Some("tun".into()),
            ethernet: false,
            ..named(name)
        };
        assert_eq!(tunnel("wlan0").kind(), Kind::Wifi);
        assert_eq!(tunnel("wwan0").kind(), Kind::Cellular);
        assert_eq!(tunnel("corp0").kind(), Kind::Vpn);
    }
}
