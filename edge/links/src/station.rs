//! A Wi-Fi radio's statistics about its access point, and when they show an outage.
//!
//! A frame without an acknowledgement is sent again, seven times in total (dot11ShortRetryLimit,
//! IEEE 802.11-2020 annex C), then it counts as failed. Beacons arrive ten times a second; Linux
//! counts a loss of beacons when seven in a row were missed (mac80211, `beacon_loss_count`). Both
//! counters react within a fraction of a second, while a carrier is given up only after seconds.
//! [`StationStats::fails_since`] has the rule; it was not tried with a real radio, because no test
//! machine has one.

use futures_util::TryStreamExt;
use wl_nl80211::{Nl80211Attr, Nl80211Handle, Nl80211StationInfo};

/// The number of frames that must have failed, with none received, for an outage. A single one may
/// be due to interference; three are 21 attempts.
const FAILED_MIN: u32 = 3; // a guess

/// Statistics of a device's current access point.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StationStats {
    /// The BSSID of the access point.
    pub bssid: [u8; 6],
    /// Frames received from the access point.
    pub received: u32,
    /// Frames to the access point that failed after all attempts.
    pub failed: u32,
    /// How often the access point's beacons were lost.
    pub beacon_losses: u32,
}

impl StationStats {
    /// Whether there was an outage since `before`: beacons were lost, or frames failed while none
    /// were received. Always false after a change of access point.
    pub fn fails_since(&self, before: &StationStats) -> bool {
        if self.bssid != before.bssid {
            return false;
        }
        let grown = |now: u32, then: u32| now.wrapping_sub(then);
        grown(self.beacon_losses, before.beacon_losses) > 0
            || (grown(self.failed, before.failed) >= FAILED_MIN && self.received == before.received)
    }

    fn of(attributes: &[Nl80211Attr]) -> Option<StationStats> {
        let mut station = StationStats::default();
        let mut found = false;
        for attribute in attributes {
            match attribute {
                Nl80211Attr::Mac(bssid) => station.bssid = *bssid,
                Nl80211Attr::StationInfo(infos) => {
                    found = true;
                    for info in infos {
                        match info {
                            Nl80211StationInfo::RxPackets(n) => station.received = *n,
                            Nl80211StationInfo::TxFailed(n) => station.failed = *n,
                            Nl80211StationInfo::BeaconLoss(n) => station.beacon_losses = *n,
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        found.then_some(station)
    }
}

/// Reads the kernel's station statistics.
#[derive(Clone, Debug)]
pub(crate) struct StationReader {
    handle: Option<Nl80211Handle>,
}

impl StationReader {
    /// Opens the reader. Must be called on a tokio runtime.
    pub(crate) fn open() -> StationReader {
        let handle = match wl_nl80211::new_connection() {
            Ok((connection, handle, _)) => {
                tokio::spawn(connection);
                Some(handle)
            }
            Err(error) => {
                tracing::debug!(%error, "radios tell nothing");
                None
            }
        };
        StationReader { handle }
    }

    /// The access point that this device is joined to.
    pub(crate) async fn read(&self, index: u32) -> Option<StationStats> {
        let handle = self.handle.clone()?;
        let mut found = Box::pin(handle.station().dump(index).execute().await);
        // A client has one station. An access point would have many, none of which is its first
        // hop.
        let first = found.try_next().await.ok()??;
        let station = StationStats::of(&first.payload.attributes);
        found.try_next().await.ok()?.is_none().then_some(station)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: StationStats = StationStats {
        bssid: [2; 6],
        received: 1_000,
        failed: u32::MAX,
        beacon_losses: 4,
    };

    #[test]
    fn frames_given_up_are_a_sign_only_while_nothing_is_received() {
        let failed = |n: u32, received| StationStats {
            failed: BEFORE.failed.wrapping_add(n),
            received: BEFORE.received + received,
            ..BEFORE
        };
        assert!(!BEFORE.fails_since(&BEFORE));
        assert!(!failed(2, 0).fails_since(&BEFORE));
        assert!(failed(3, 0).fails_since(&BEFORE), "counters wrap");
        assert!(!failed(30, 1).fails_since(&BEFORE), "it is heard");
    }

    #[test]
    fn beacons_that_stay_away_are_a_sign_and_another_access_point_is_none() {
        let lost = StationStats {
            beacon_losses: 5,
            received: 1_001,
            ..BEFORE
        };
        assert!(lost.fails_since(&BEFORE));
        let roamed = StationStats {
            bssid: [3; 6],
            ..lost
        };
        assert!(!roamed.fails_since(&BEFORE));
    }

    #[test]
    fn counters_are_read_out_of_what_the_kernel_says() {
        let said = [
            Nl80211Attr::IfIndex(3),
            Nl80211Attr::Mac([7; 6]),
            Nl80211Attr::StationInfo(vec![
                Nl80211StationInfo::RxPackets(11),
                Nl80211StationInfo::TxRetries(12),
                Nl80211StationInfo::TxFailed(13),
                Nl80211StationInfo::BeaconLoss(14),
            ]),
        ];
        let station = StationStats {
            bssid: [7; 6],
            received: 11,
            failed: 13,
            beacon_losses: 14,
        };
        assert_eq!(StationStats::of(&said), Some(station));
        assert_eq!(StationStats::of(&said[..2]), None, "an error, say");
    }

    #[tokio::test]
    async fn a_device_that_is_no_radio_has_no_station() {
        // Index 1 is the loopback device, wherever there is one.
        assert_eq!(StationReader::open().read(1).await, None);
    }
}
