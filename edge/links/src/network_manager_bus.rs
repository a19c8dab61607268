//! The used part of NetworkManager's D-Bus interfaces, with names and signatures of its D-Bus
//! reference. Objects are read together by `org.freedesktop.DBus.ObjectManager`.

use std::collections::HashMap;

use zbus::{ObjectPath, OwnedObjectPath, OwnedVariant, Variant, proxy};

/// NetworkManager's main D-Bus interface.
#[proxy(
    interface = "org.freedesktop.NetworkManager",
    default_service = "org.freedesktop.NetworkManager",
    default_path = "/org/freedesktop/NetworkManager"
)]
pub trait NetworkDaemon {
    /// Joins `access_point` with `device`, by saved settings.
    fn activate_connection(
        &self,
        settings: &ObjectPath<'_>,
        device: &ObjectPath<'_>,
        access_point: &ObjectPath<'_>,
    ) -> zbus::Result<OwnedObjectPath>;
}

/// A Wi-Fi device.
#[proxy(
    interface = "org.freedesktop.NetworkManager.Device.Wireless",
    default_service = "org.freedesktop.NetworkManager"
)]
pub trait WirelessDevice {
    /// Scans for access points.
    fn request_scan(&self, options: HashMap<&str, Variant<'_>>) -> zbus::Result<()>;
}

/// Saved settings of one connection.
#[proxy(
    interface = "org.freedesktop.NetworkManager.Settings.Connection",
    default_service = "org.freedesktop.NetworkManager"
)]
pub trait SavedConnection {
    /// The settings by section and name, without secrets.
    fn get_settings(&self) -> zbus::Result<HashMap<String, HashMap<String, OwnedVariant>>>;
}
