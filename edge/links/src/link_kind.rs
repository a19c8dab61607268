//! The kind of a link: from the kernel's evidence first, then from the device's name.
//!
//! Names take precedence over the hardware type, because all wireless devices report Ethernet, and
//! because emulated links are tunnels with a radio's name on purpose.

use std::path::Path;

use serde::Serialize;

/// The kind of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
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
    /// A serial line to a bridge, or a radio that looks like one: it carries packets of D2TP alone.
    Serial,
    /// A bridge, a container's virtual cable, or an unknown kind.
    Other,
}

impl std::fmt::Display for LinkKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LinkKind::Wifi => "Wi-Fi",
            LinkKind::Cellular => "cellular",
            LinkKind::Ethernet => "Ethernet",
            LinkKind::Loopback => "loopback",
            LinkKind::Vpn => "VPN",
            LinkKind::Serial => "serial",
            LinkKind::Other => "other",
        })
    }
}

/// The evidence for a device's kind.
#[derive(Debug, Default, Clone)]
pub(crate) struct LinkKindEvidence {
    pub(crate) name: String,
    pub(crate) loopback: bool,
    /// Whether the kernel reports wireless extensions or an 802.11 phy.
    pub(crate) wireless: bool,
    /// `DEVTYPE` of the device's uevent: `wlan`, `wwan`, `wireguard`, `bridge`, …
    pub(crate) devtype: Option<String>,
    /// The driver kind with which the device was created (`ip -d link`): `tun`, `veth`, `wwan`, …
    pub(crate) created_as: Option<String>,
    /// The USB or PCI driver of the device, for example `cdc_mbim` or `rndis_host`.
    pub(crate) driver: Option<String>,
    /// Whether the link type is Ethernet, as opposed to point-to-point or raw IP.
    pub(crate) ethernet: bool,
    /// Whether there is hardware behind the device.
    pub(crate) hardware: bool,
}

impl LinkKindEvidence {
    /// Adds the evidence in `/sys`, if it has the same device: `/sys` shows the network namespace
    /// in which it was mounted, which may be another one.
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

    pub(crate) fn kind(&self) -> LinkKind {
        if self.loopback {
            return LinkKind::Loopback;
        }
        match self.devtype.as_deref() {
            Some("wlan") => return LinkKind::Wifi,
            Some("wwan") => return LinkKind::Cellular,
            Some("wireguard") => return LinkKind::Vpn,
            _ => {}
        }
        if self.wireless {
            return LinkKind::Wifi;
        }
        match self.created_as.as_deref() {
            Some("wwan" | "rmnet") => return LinkKind::Cellular,
            Some("virt_wifi") => return LinkKind::Wifi,
            Some("wireguard" | "xfrm" | "vti" | "vti6" | "gre" | "sit" | "ipip" | "ip6tnl") => {
                return LinkKind::Vpn;
            }
            _ => {}
        }
        if let Some(driver) = self.driver.as_deref()
            && CELLULAR_DRIVERS.contains(&driver)
        {
            return LinkKind::Cellular;
        }
        if let Some(kind) = kind_by_name(&self.name) {
            return kind;
        }
        match self.created_as.as_deref() {
            Some("tun") => return LinkKind::Vpn,
            Some(_) => return LinkKind::Other,
            None => {}
        }
        if self.ethernet && self.hardware {
            LinkKind::Ethernet
        } else if !self.ethernet && !self.hardware {
            LinkKind::Vpn
        } else {
            LinkKind::Other
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

/// Device names by convention of Linux (systemd's naming scheme), Android and tethering.
const NAMES: &[(&str, LinkKind)] = &[
    ("wwan", LinkKind::Cellular),
    ("wwp", LinkKind::Cellular),
    ("rmnet", LinkKind::Cellular),
    ("ccmni", LinkKind::Cellular),
    ("ppp", LinkKind::Cellular),
    ("usb", LinkKind::Cellular),
    ("lte", LinkKind::Cellular),
    ("wlan", LinkKind::Wifi),
    ("wlp", LinkKind::Wifi),
    ("wlx", LinkKind::Wifi),
    ("wls", LinkKind::Wifi),
    ("wifi", LinkKind::Wifi),
    ("eth", LinkKind::Ethernet),
    ("eno", LinkKind::Ethernet),
    ("ens", LinkKind::Ethernet),
    ("enp", LinkKind::Ethernet),
    ("enx", LinkKind::Ethernet),
    ("tun", LinkKind::Vpn),
    ("tap", LinkKind::Vpn),
    ("wg", LinkKind::Vpn),
    ("tailscale", LinkKind::Vpn),
    ("ipsec", LinkKind::Vpn),
    ("docker", LinkKind::Other),
    ("br", LinkKind::Other),
    ("virbr", LinkKind::Other),
    ("veth", LinkKind::Other),
    ("dummy", LinkKind::Other),
];

fn kind_by_name(name: &str) -> Option<LinkKind> {
    NAMES
        .iter()
        .filter(|(prefix, _)| {
            // A prefix counts only before a number or a separator: `tundra0` is no tunnel.
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

    fn named(name: &str) -> LinkKindEvidence {
        LinkKindEvidence {
            name: name.into(),
            ethernet: true,
            ..LinkKindEvidence::default()
        }
    }

    #[test]
    fn names_by_convention_tell_the_kind() {
        for (name, kind) in [
            ("wlan0", LinkKind::Wifi),
            ("wlp3s0", LinkKind::Wifi),
            ("wlx00c0ca", LinkKind::Wifi),
            ("wwan0", LinkKind::Cellular),
            ("rmnet_data0", LinkKind::Cellular),
            ("usb0", LinkKind::Cellular),
            ("eth0", LinkKind::Ethernet),
            ("enp0s31f6", LinkKind::Ethernet),
            ("wg0", LinkKind::Vpn),
            ("veth12ab", LinkKind::Other),
            ("docker0", LinkKind::Other),
            ("tundra0", LinkKind::Other),
        ] {
            assert_eq!(named(name).kind(), kind, "{name}");
        }
    }

    #[test]
    fn the_kernel_is_believed_before_the_name() {
        assert_eq!(
            LinkKindEvidence {
                wireless: true,
                ..named("eth0")
            }
            .kind(),
            LinkKind::Wifi
        );
        assert_eq!(
            LinkKindEvidence {
                devtype: Some("wwan".into()),
                ..named("eth1")
            }
            .kind(),
            LinkKind::Cellular
        );
        assert_eq!(
            LinkKindEvidence {
                driver: Some("rndis_host".into()),
                ..named("enx1")
            }
            .kind(),
            LinkKind::Cellular
        );
        assert_eq!(
            LinkKindEvidence {
                created_as: Some("wireguard".into()),
                ..named("eth0")
            }
            .kind(),
            LinkKind::Vpn
        );
    }

    #[test]
    fn an_emulated_radio_on_a_tunnel_is_a_radio_and_a_plain_tunnel_is_a_vpn() {
        let tunnel = |name: &str| LinkKindEvidence {
            created_as: Some("tun".into()),
            ethernet: false,
            ..named(name)
        };
        assert_eq!(tunnel("wlan0").kind(), LinkKind::Wifi);
        assert_eq!(tunnel("wwan0").kind(), LinkKind::Cellular);
        assert_eq!(tunnel("corp0").kind(), LinkKind::Vpn);
    }
}
