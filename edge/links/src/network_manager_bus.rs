//! NetworkManager's D-Bus interfaces, as far as they are called. Names and signatures are those of its
//! D-Bus reference; what is read all at once comes by `org.freedesktop.DBus.ObjectManager`.

use std::collections::HashMap;

use zbus::{ObjectPath, OwnedObjectPath, OwnedVariant, Variant, proxy};

/// NetworkManager itself.
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
    /// Looks for access points.
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
