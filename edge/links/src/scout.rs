//! Looks for access points and joins the one to be on, through the network manager.
//!
//! ```text
//!  look ─▶ scan ─▶ seconds later in sight ─▶ rove ─▶ judged? shunned? better? ─▶ join
//!  every 5 s while a stream runs; else on D-Lock's alarms, and when links change
//! ```

use d2tp_time::{Span, Time};

use crate::network::{AccessPoint, Network};
use crate::nm::{NetworkManager, NetworkManagerError};
use crate::points::Points;
use crate::trial::Trials;

/// Between looks while a stream runs: without them the paper's subway trip had 14.9 % by Wi-Fi, with
/// them 48.7. // Cedos, section V.C
pub const LOOK_STREAMING: Span = Span::from_secs(5);

/// What came of roving.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roved {
    /// Access points that did not answer, with the devices on them: shunned from now on.
    pub shunned: Vec<(String, String)>,
    /// That is being joined now.
    pub joining: Option<AccessPoint>,
}

/// The one who looks.
#[derive(Debug)]
pub struct Scout {
    manager: NetworkManager,
    /// Which access points answer.
    pub trials: Trials,
    /// What they carried.
    pub points: Points,
}

impl Scout {
    /// By way of this manager.
    pub fn new(manager: NetworkManager) -> Scout {
        Scout {
            manager,
            trials: Trials::default(),
            points: Points::default(),
        }
    }

    /// Looks for access points with this device; they are in sight some seconds later.
    ///
    /// # Errors
    /// The manager refuses: the last scan was a moment ago, or the device is gone.
    pub async fn look(&self, device: &str) -> Result<(), NetworkManagerError> {
        self.manager.scan(device).await
    }

    /// Notes a device's goodput on the access point it is on.
    pub fn carried(&mut self, now: Time, device: &str, bytes_per_s: f64) {
        if let Some(point) = self
            .network(device)
            .and_then(|network| network.access_point)
        {
            self.points.carried(now, &point, bytes_per_s);
        }
    }

    /// Judges the access point this device is on, and joins a better one. To be called when the
    /// manager's networks change, after a look, and at [`Trials::next`].
    ///
    /// # Errors
    /// The manager refuses to join it.
    pub async fn rove(&mut self, now: Time, device: &str) -> Result<Roved, NetworkManagerError> {
        let network = self.network(device).unwrap_or_default();
        match &network.access_point {
            Some(point) => self.trials.joined(now, device, &point.bssid),
            None => self.trials.left(device),
        }
        let shunned = self.trials.judge(now);
        let is_shunned = |bssid: &str| self.trials.is_shunned(now, bssid);
        let joining = self.points.better(&network, is_shunned).cloned();
        if let Some(point) = &joining {
            self.manager.join(device, &point.bssid).await?;
        }
        Ok(Roved { shunned, joining })
    }

    fn network(&self, device: &str) -> Option<Network> {
        self.manager.networks().of(device).cloned()
    }
}
