//! Scans for access points and joins the best one, through the network manager.
//!
//! ```text
//!  scan ─▶ seconds later in reach ─▶ roam ─▶ on trial? avoided? better? ─▶ join
//!  every 5 s while a stream runs; else on D-Lock's alarms, and when links change
//! ```

use d2tp_time::{Span, Time};

use crate::access_point_rates::AccessPointRates;
use crate::access_point_trials::AccessPointTrials;
use crate::network::{AccessPoint, NetworkInfo};
use crate::network_manager::{NetworkManager, NetworkManagerError};

/// The interval between scans while a stream runs: without them the paper's subway trip had 14.9 %
/// of its bytes by Wi-Fi, with them 48.7 %. // Cedos, section V.C
pub const LOOK_STREAMING: Span = Span::from_secs(5);

/// The result of [`WifiRoamer::roam`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoamOutcome {
    /// Access points that did not answer, with their devices: they are avoided from now on.
    pub blocked: Vec<(String, String)>,
    /// The access point that is being joined now.
    pub joining: Option<AccessPoint>,
}

/// Chooses the access points of devices.
#[derive(Debug)]
pub struct WifiRoamer {
    manager: NetworkManager,
    /// The trials of access points.
    pub trials: AccessPointTrials,
    /// The rates of access points.
    pub rates: AccessPointRates,
}

impl WifiRoamer {
    /// A roamer that uses this manager.
    pub fn new(manager: NetworkManager) -> WifiRoamer {
        WifiRoamer {
            manager,
            trials: AccessPointTrials::default(),
            rates: AccessPointRates::default(),
        }
    }

    /// Scans for access points with this device; they are reported some seconds later.
    ///
    /// # Errors
    /// The manager refuses, because the last scan was a moment ago or the device is gone.
    pub async fn scan(&self, device: &str) -> Result<(), NetworkManagerError> {
        self.manager.scan(device).await
    }

    /// Records a device's goodput on its access point.
    pub fn record_goodput(&mut self, now: Time, device: &str, bytes_per_s: f64) {
        if let Some(point) = self
            .network(device)
            .and_then(|network| network.access_point)
        {
            self.rates.record_goodput(now, &point, bytes_per_s);
        }
    }

    /// Evaluates the access point that this device is on, and joins a better one. Call it when the
    /// manager's networks change, after a scan, and at [`AccessPointTrials::next_check_at`].
    ///
    /// # Errors
    /// The manager refuses to join it.
    pub async fn roam(
        &mut self,
        now: Time,
        device: &str,
    ) -> Result<RoamOutcome, NetworkManagerError> {
        let network = self.network(device).unwrap_or_default();
        match &network.access_point {
            Some(point) => self.trials.joined(now, device, &point.bssid),
            None => self.trials.left(device),
        }
        let shunned = self.trials.block_unresponsive(now);
        let is_shunned = |bssid: &str| self.trials.is_blocked(now, bssid);
        let joining = self.rates.better_than_joined(&network, is_shunned).cloned();
        if let Some(point) = &joining {
            self.manager.join(device, &point.bssid).await?;
        }
        Ok(RoamOutcome {
            blocked: shunned,
            joining,
        })
    }

    fn network(&self, device: &str) -> Option<NetworkInfo> {
        self.manager.networks().of(device).cloned()
    }
}
